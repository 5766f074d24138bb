"""Kernels in CUDA C++, compiled by NVRTC for the GPU at hand when they run first: where Triton is slower.

Owns compiling, loading and launching. What cannot be compiled is Unusable with the reason, and
the operation runs in Triton. A compile takes up to two seconds, once a machine.
"""
from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.config.base.errors import install_hint
from penstock.kernels.op import Unusable
from penstock.kernels.platform import Platform
from penstock.kernels.triton.compiles import noted
from penstock.kernels.triton.lazy import is_alone

ARCH = "sm_90a"
_log = logging.getLogger(__name__)
Launch = Callable[..., None]
_here = threading.local()


@contextlib.contextmanager
def held_back(instead: Callable[[tuple[Any, ...]], None]) -> Iterator[None]:
    """Kernels that this thread launches meanwhile are compiled and loaded, and do not run: `instead` gets
    their arguments."""
    _here.instead = instead
    try:
        yield
    finally:
        _here.instead = None


def version() -> str:
    """Return the version of NVRTC. Raises Unusable where it is not installed, or cannot be loaded."""
    try:
        from cuda.bindings import nvrtc
        error, major, minor = nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as reason:
        raise Unusable(f"NVRTC is not installed ({reason}): {install_hint('cuda')}") from None
    if error:
        raise Unusable(f"NVRTC: {error.name}")
    return f"{major}.{minor}"


def probe(platform: Platform) -> str:
    """Return the versions of NVRTC, and of Triton for shapes that no kernel in C++ takes. Raises Unusable."""
    from penstock.kernels.c.build import triton_version
    if "sm_90" not in platform.features:
        raise Unusable(f"compiled for {ARCH} only")
    return f"NVRTC {version()}, Triton {triton_version()} for other shapes"


def compiled(source: Path, **defines: int) -> bytes:
    """The code of a GPU of ARCH, out of Triton's cache where that has it. Needs no GPU. Raises Unusable: no NVRTC,
    or it does not compile."""
    from triton.runtime.cache import get_cache_manager
    folder, text = Path(__file__).parents[1], source.read_bytes()
    options = [f"--gpu-architecture={ARCH}", "--std=c++17", "--fmad=true",
               *(f"-D{name}={value}" for name, value in defines.items())]
    key = hashlib.sha256(repr((version(), source.name, options)).encode() + text)
    for header in sorted(folder.rglob("*.cuh")):
        key.update(header.read_bytes())
    cache, name = get_cache_manager(key.hexdigest()), f"{source.stem}.cubin"
    if kept := cache.get_file(name):
        return Path(kept).read_bytes()
    code = _compiled(source.name, text, [*options, f"--include-path={folder}"])
    cache.put(code, name, binary=True)
    return code


def _compiled(name: str, text: bytes, options: list[str]) -> bytes:
    from cuda.bindings import nvrtc
    error, program = nvrtc.nvrtcCreateProgram(text, name.encode(), 0, [], [])
    if error:
        raise Unusable(f"{name}: {error.name}")
    error, = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    if error:
        _, size = nvrtc.nvrtcGetProgramLogSize(program)
        log = b" " * size
        nvrtc.nvrtcGetProgramLog(program, log)
        raise Unusable(f"{name}: {error.name}: {log.decode(errors='replace')[:400]}")
    _, size = nvrtc.nvrtcGetCUBINSize(program)
    code = bytes(size)
    nvrtc.nvrtcGetCUBIN(program, code)
    nvrtc.nvrtcDestroyProgram(program)
    return code


def launcher(source: Path, name: str, *, shared: int = 0, **defines: int) -> Launch | None:
    """launch(grid, threads, *arguments) of a kernel whose parameters are pointers, for tensors, and long
    long, and which has so many bytes of shared memory beside its own; it begins as those that
    `triton.depend.follow`. None where there is no such kernel on this GPU, why is logged, once; and where
    Triton is to run alone. Capturable, once it has run."""
    return None if is_alone() else _found(source, name, shared, **defines)


@functools.cache
def _found(source: Path, name: str, shared: int, **defines: int) -> Launch | None:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        return None
    try:
        with noted(name):
            return _launcher(compiled(source, **defines), name, shared)
    except Unusable as reason:
        _log.warning("%s runs in Triton: %s", name, reason)
        return None


def _launcher(code: bytes, name: str, shared: int) -> Launch:
    from cuda.bindings import driver
    error, module = driver.cuModuleLoadData(code)
    if error:
        raise Unusable(f"{name}: {error.name}")
    error, function = driver.cuModuleGetFunction(module, name.encode())
    if not error and shared:
        error, = driver.cuFuncSetAttribute(
            function, driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared)
    if error:
        raise Unusable(f"{name}: {error.name}")

    def launch(grid: tuple[int, int], threads: int, *arguments: Tensor | int) -> None:
        if (instead := getattr(_here, "instead", None)) is not None:
            instead(arguments)
            return
        config: Any = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = *grid, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.sharedMemBytes = shared
        config.hStream = torch.cuda.current_stream().cuda_stream
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        config.attrs, config.numAttrs = [attribute], 1
        values = tuple(a.data_ptr() if isinstance(a, Tensor) else a for a in arguments)
        kinds = tuple(ctypes.c_void_p if isinstance(a, Tensor) else ctypes.c_longlong for a in arguments)
        error, = driver.cuLaunchKernelEx(config, function, (values, kinds), 0)
        assert not error, f"{name}: {error.name}"
    launch.module = module  # type: ignore[attr-defined]    # kept while the kernel may run
    return launch
