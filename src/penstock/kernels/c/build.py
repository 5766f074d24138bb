"""Kernels in C, compiled for this machine once and kept: for CPUs where torch's own are slow.

Owns finding a compiler, the flags, the cache and loading. Needs no compiler to be installed: what
cannot be built is Unusable with the reason, and an op's next implementation runs instead.
"""
from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import os
import shutil
import struct
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from penstock.config.base.errors import install_hint
from penstock.kernels import platform
from penstock.kernels.op import Unusable

_COMPILERS = ("cc", "gcc", "clang")
# No -ffast-math: linking with it makes the whole process flush denormals. 512-bit vectors must be
# asked for; gcc prefers 256 even where the CPU has more.
_FLAGS = ("-O3", "-fPIC", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast", "-fopenmp")
# What the compiler may use: all that this CPU has, that but for AMX, AVX2 with FMA, or what every CPU of its
# kind has.
_MARCH = {"native": ("-march=native",), "avx512": ("-march=native", "-mno-amx-tile", "-mno-amx-bf16"),
          "avx2": ("-march=x86-64-v3",), "plain": ()}
_TIMEOUT_S = 180                # a kernel takes 1 to 5 s, on a busy machine ten times that
_INCLUDE = Path(__file__).parent
_DIGEST_BYTES = 32              # of a kept file, at its end, of what is before: the loader looks at neither
HEADERS = tuple(sorted(_INCLUDE.glob("*.h")))
SLOW_S = 2.0                    # builds that take less are not reported at a server's start
_loaded: dict[tuple[Path, str], tuple[ctypes.CDLL, str]] = {}


class _Report:
    """Report of the builds of one `announced` block: a line when they are slow, another at the end."""

    def __init__(self, log: Callable[[str], object], after_s: float) -> None:
        self._log, self._after_s = log, after_s
        self._began: float | None = None
        self._timer: threading.Timer | None = None
        self._reported = False

    def begin(self, kept: bool) -> None:
        """A build begins, or this process waits for another one's. Only the first call counts."""
        if self._began is not None:
            return
        self._began = time.monotonic()
        text = ("compiling kernels for this CPU (once) ..." if kept else
                "compiling kernels for this CPU, at every start since the cache cannot be written ...")
        if not self._after_s:
            self._line(text)
            return
        self._timer = threading.Timer(self._after_s, self._line, (text,))
        self._timer.daemon = True
        self._timer.start()

    def end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer.join()
        if self._began is not None and self._reported:
            self._log(f"kernels compiled in {time.monotonic() - self._began:.0f} s")

    def _line(self, text: str) -> None:
        self._reported = True
        self._log(text)


_report: _Report | None = None


@contextlib.contextmanager
def announced(log: Callable[[str], object], after_s: float = SLOW_S) -> Iterator[None]:
    """Report builds inside the block with a line of `log` once they have taken `after_s` seconds.

    after_s     seconds from the beginning of the first build; 0 reports before it begins
    """
    global _report
    _report = report = _Report(log, after_s)
    try:
        yield
    finally:
        _report = None
        report.end()


def library(source: Path, cache: Path | None = None, isa: str = "native") -> tuple[ctypes.CDLL, str]:
    """(the loaded library, the compiler that made it) of one C file; the first call decides.

    cache   folder to keep it in, under a name that changes with source, headers, flags, compiler, CPU;
            None builds it anew in a folder that is gone again on return
    isa     'native', 'avx512', 'avx2', or 'plain': what every CPU of this kind has
    Raises Unusable: no compiler, no OpenMP runtime in torch, a failed build, an unsafe cache.
    """
    isa = platform.most() if isa == "native" else isa
    if (source, isa) not in _loaded:
        try:
            _loaded[source, isa] = _load(source, cache, isa)
        except OSError as error:
            raise Unusable(f"{error.strerror or error}: {error.filename or source.name}") from None
    return _loaded[source, isa]


@functools.cache
def entry(source: Path, name: str, *argtypes: type, isa: str = "native") -> Callable[..., int]:
    """A function of `source`, which a probe has built: (struct by reference or `packed`, *argtypes, threads).

    It returns 0, or a number that says which of its contract's conditions its inputs violate.
    """
    function = getattr(library(source, isa=isa)[0], name)
    function.argtypes = (ctypes.c_void_p, *argtypes, ctypes.c_int)
    function.restype = ctypes.c_int
    return function  # type: ignore[no-any-return]


def packed(tensors: Sequence[Tensor | None], numbers: Sequence[int], floats: Sequence[float] = ()) -> bytes:
    """A struct in C of pointers to what tensors have, NULL for None, then int64s, then floats. Of tensors it
    has the addresses only."""
    return struct.pack(f"{len(tensors)}P{len(numbers)}q{len(floats)}f0q",
                       *(0 if x is None else x.data_ptr() for x in tensors), *numbers, *floats)


def address(function: Callable[..., object]) -> int:
    """Return the address of a library's function, for a function in C that calls it."""
    at = ctypes.cast(function, ctypes.c_void_p).value  # type: ignore[arg-type]
    assert at is not None
    return at


def triton_version() -> str:
    """Raises Unusable where Triton is not installed: kernels in it are compiled when they run first."""
    try:
        import triton
    except ImportError as error:
        raise Unusable(f"Triton is not installed ({error}): {install_hint('cuda')}") from None
    return str(triton.__version__)


def triton_runs() -> None:
    """On a machine with a GPU: Triton builds, once, in C, what it calls the driver with. Raises Unusable
    where it cannot, or is not installed."""
    triton_version()
    from triton.runtime import driver
    try:
        assert driver.active.utils is not None
    except (RuntimeError, ImportError, OSError, subprocess.SubprocessError) as error:
        reason = str(error).splitlines()[-1] if str(error) else type(error).__name__
        raise Unusable("Triton cannot reach the GPU's driver, for which it needs a C compiler and Python's "
                       "headers (apt install gcc python3-dev) and a cache it may write: "
                       f"{reason[:200]}") from None


def compiler() -> str | None:
    """The path of this machine's C compiler."""
    return next(filter(None, map(shutil.which, _COMPILERS)), None)


def _load(source: Path, cache: Path | None, isa: str) -> tuple[ctypes.CDLL, str]:
    cc = compiler()
    if cc is None:
        raise Unusable(f"no C compiler ({', '.join(_COMPILERS)})")
    version = _run([cc, "--version"]).splitlines()[0]
    cpu = torch.cpu.get_capabilities()
    wide = ("-mprefer-vector-width=512",) if isa in ("native", "avx512") and cpu.get("avx512_f") else ()
    flags = (*_FLAGS, *_MARCH[isa], *wide)
    runtime = _openmp()
    try:
        if cache is not None:
            cache.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError:
        cache = None                    # a read-only home costs a build at every start, no more
    if cache is None or not os.access(cache, os.W_OK):
        if _report is not None:
            _report.begin(kept=False)
        with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
            path = _build(cc, flags, source, runtime, Path(folder) / "kernel.so")
            return ctypes.CDLL(str(path)), version
    key = hashlib.sha256(repr((version, flags, str(runtime), sorted(cpu.items(), key=str))).encode()
                         + b"".join(file.read_bytes() for file in
                                    (source, *HEADERS))).hexdigest()
    path = cache / f"{source.stem}-{key[:24]}.so"
    _refuse_shared(cache)
    found = _opened(path)
    if found is None:
        if _report is not None:
            _report.begin(kept=True)
        with _only_builder(cache):
            found = _opened(path) or ctypes.CDLL(str(_build(cc, flags, source, runtime, path)))
    return found, version


def _opened(path: Path) -> ctypes.CDLL | None:
    """What the cache has; None if that is nothing, or not all that was built: of a file that a crash has cut
    the loader maps what is there, and the process dies at the first page that is not. Raises Unusable."""
    if not path.exists():
        return None
    _refuse_shared(path)
    kept = path.read_bytes()
    if kept[-_DIGEST_BYTES:] != hashlib.sha256(kept[:-_DIGEST_BYTES]).digest():
        return None
    return ctypes.CDLL(str(path))


def _refuse_shared(path: Path) -> None:
    """Raises Unusable for a file or folder of the cache that somebody else may write."""
    found = path.stat()
    if found.st_uid != os.getuid() or found.st_mode & 0o022:
        what = "remove it" if path.is_file() else f"chmod go-w {path}, or set PENSTOCK_CACHE to another"
        raise Unusable(f"{path} could have been written by someone else: {what}")


@contextlib.contextmanager
def _only_builder(cache: Path) -> Iterator[None]:
    """One process of all builds at a time: ranks start together, and each would compile the same."""
    folder = os.open(cache, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _build(cc: str, flags: tuple[str, ...], source: Path, runtime: Path, path: Path) -> Path:
    """Compile and put the result in place at once, with its digest."""
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="build-") as folder:
        object_file, built = Path(folder) / "k.o", Path(folder) / "k.so"
        _run([cc, *flags, f"-I{_INCLUDE}", "-c", str(source), "-o", str(object_file)])
        # Linked with torch's own OpenMP runtime: a second one would keep its threads spinning next
        # to torch's, on the same cores.
        _run([cc, "-shared", str(object_file), str(runtime), "-o", str(built)])
        with built.open("ab") as file:
            file.write(hashlib.sha256(built.read_bytes()).digest())
        built.chmod(0o700)
        os.replace(built, path)
    return path


class _Symbol(ctypes.Structure):
    """Dl_info of dladdr(3)."""

    _fields_ = (("file", ctypes.c_char_p), ("base", ctypes.c_void_p), ("name", ctypes.c_char_p),
                ("address", ctypes.c_void_p))


def _openmp() -> Path:
    """The OpenMP runtime that torch's own library finds its functions in, whatever else is loaded."""
    found = _Symbol()
    try:
        torch_cpu = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        known = ctypes.CDLL(None).dladdr(ctypes.cast(torch_cpu.omp_get_max_threads, ctypes.c_void_p),
                                         ctypes.byref(found))
    except (OSError, AttributeError):
        known = 0
    if not known:
        raise Unusable("torch has loaded no OpenMP runtime")
    return Path(os.fsdecode(found.file))


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S,
                              stdin=subprocess.DEVNULL, check=True)
    except subprocess.TimeoutExpired:
        raise Unusable(f"{command[0]} took more than {_TIMEOUT_S} s") from None
    except subprocess.CalledProcessError as error:
        lines = [line for line in error.stderr.splitlines() if "error" in line]
        raise Unusable(f"{command[0]}: {lines[0] if lines else error}") from None
    return done.stdout
