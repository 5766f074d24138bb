"""What this machine is, probed once at start and passed down. Standard library only.

Owns what files under /proc and /sys say: processor, usable cores, memory under the cgroup's limit.
What torch offers on it is `Platform`, in the kernels' layer.
"""
from __future__ import annotations

import errno
import importlib.util
import os
import platform as _platform
import re
import resource
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# Instruction sets that a CPU back-end can depend on; the rest of /proc/cpuinfo is noise here.
FEATURES = ("avx2", "fma", "f16c", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16",
            "amx_tile", "amx_bf16", "asimd", "bf16", "i8mm", "sve")
ONEDNN_CACHED = 64        # a step of a dense model needs five at most, one for each shape of a weight
# Of a thread at a barrier before it sleeps, in turns of libgomp's loop, and in libiomp's unit.
SPINS = 3_000
BLOCK_MS = 0
LOOPBACK = "127.0.0.1"
# What torch, its threads and mmap raise where the system has no memory, and the bytes that one of them names.
_NO_MEMORY = re.compile("can't allocate memory|not enough memory|[Cc]annot allocate memory|unable to mmap")
_NO_ADDRESSES = re.compile("can't start new thread|failed to map segment")      # where these are limited
RAISE = "raise it (ulimit -v unlimited; in a systemd unit LimitAS=infinity)"
_ASKED = re.compile(r"tried to allocate (\d+) bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The machine. Memory in bytes, under the cgroup's limit; `cores` are those that affinity, the
    cgroup's quota and OMP_NUM_THREADS leave to us."""

    system: str
    machine: str
    python: str
    cpu: str
    features: tuple[str, ...]
    cores: int
    memory_total: int
    memory_available: int
    limit: str = ""                     # why less memory is available than the machine has free; '' if not
    gpus: tuple[str, ...] = ()
    no_gpu: str = ""                    # why `gpus` is empty
    torch_cuda: str = ""                # CUDA version that the installed torch was built for, '' for none

    @property
    def device(self) -> str:
        """What `--device auto` is here: a GPU where there is one and torch can use it."""
        return "cuda" if self.gpus and self.torch_cuda else "cpu"

    @property
    def words(self) -> dict[str, str]:
        """What a refusal may name."""
        return {"free": f"{self.memory_available / (1 << 30):.1f} GiB", "limit": self.limit, "why": self.why}

    @property
    def why(self) -> str:
        """The reason of `device`."""
        if not self.gpus:
            return self.no_gpu
        return (f"torch is built for CUDA {self.torch_cuda}" if self.torch_cuda else
                "the installed torch is a CPU build: install one with CUDA, from pip's default index")


def probe(root: Path = Path("/")) -> Machine:
    """Reads the machine. Never raises: what cannot be read is '' or the widest limit known."""
    info = _read(root / "proc/cpuinfo")
    flags = _field(info, "flags") or _field(info, "Features")
    memory = _read(root / "proc/meminfo")
    total = _kib(memory, "MemTotal") or (1 << 40)
    limit, used = _cgroup_memory(root)
    free = min(_kib(memory, "MemAvailable") or total, limit - used)
    addresses = _addresses(root)
    gpus, no_gpu = _gpus(root)
    return Machine(
        system=f"{_platform.system()} {_platform.release()}",
        machine=_platform.machine(),
        python=_platform.python_version(),
        cpu=_field(info, "model name") or _platform.processor() or "unknown",
        features=tuple(f for f in FEATURES if f in flags.split()),
        cores=_cores(root),
        memory_total=min(total, limit),
        memory_available=max(0, min(free, addresses)),
        limit=f"; {address_limit()}: {RAISE}" if addresses < free else "",
        gpus=gpus, no_gpu=no_gpu, torch_cuda=_torch_cuda())


def _addresses(root: Path = Path("/")) -> int:
    """Bytes that RLIMIT_AS (ulimit -v) leaves to this process, 2^62 without a limit."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return 1 << 62 if limit == resource.RLIM_INFINITY else limit - _kib(_read(root / "proc/self/status"),
                                                                        "VmSize")


def address_limit() -> str:
    """What ulimit -v allows each process, in words; '' without a limit."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return "" if limit == resource.RLIM_INFINITY else (
        f"ulimit -v {limit // 1024} lets each process have {limit / (1 << 30):.2f} GiB of addresses")


def why_no_memory(error: BaseException) -> str | None:
    """What to do about an allocation that failed, in one line; None for any other error.

    torch reports one as a RuntimeError, Python as a MemoryError, the system as ENOMEM, the loader of
    libraries as an ImportError.
    """
    limit, text = address_limit(), str(error)
    if not (isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
            or (isinstance(error, RuntimeError | ImportError) and (
                _NO_MEMORY.search(text) or (limit and _NO_ADDRESSES.search(text))))):
        return None
    asked = _ASKED.search(text)
    what = "memory could not be allocated" if asked is None else (
        f"{int(asked[1]) / (1 << 30):.2f} GiB could not be allocated")
    if limit:
        return f"{what}: {limit}: {RAISE}"
    return (f"{what}, {probe().memory_available / (1 << 30):.2f} GiB of memory are free: lower "
            "--gpu-memory-utilization or --kv-cache-memory-bytes, or take a smaller model")


def limit_libraries(isa: str) -> None:
    """What torch, oneDNN and MKL (on an Intel CPU) may use of the CPU, in this process, if they are not
    loaded, and its children: so in a process that ends with its engine. `isa` is --debug-cpu-isa; 'native' leaves
    them as they are. Waits of OpenMP's threads are bounded."""
    bound_waits()
    if isa != "native":
        os.environ["ATEN_CPU_CAPABILITY"] = {"avx2": "avx2", "plain": "default"}[isa]
        os.environ["ONEDNN_MAX_CPU_ISA"] = {"avx2": "AVX2", "plain": "SSE41"}[isa]
        os.environ["MKL_ENABLE_INSTRUCTIONS"] = {"avx2": "AVX2", "plain": "SSE4_2"}[isa]


def bound_waits() -> None:
    """Make OpenMP's threads sleep soon while they wait for each other; before libgomp or libiomp is loaded.

    libgomp's own 300,000 turns are milliseconds at each barrier of a step. Where another process has the core
    that the last thread needs, they burn the time which that one would have (ADR 0065). A wait policy
    of the user's own stays.
    """
    if not any(name in os.environ for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")):
        os.environ["GOMP_SPINCOUNT"] = str(SPINS)
        os.environ["KMP_BLOCKTIME"] = str(BLOCK_MS)


def nccl_on_loopback() -> None:
    """Ranks of this process's machine meet where no other machine can; what the user has set stays."""
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "=lo")


def of_gpus(indices: Sequence[int]) -> dict[str, str]:
    """The environment of a child that sees, of the GPUs that this process sees, these alone."""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(
        seen[i] if seen[0] else str(i) for i in indices)}


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _field(text: str, name: str) -> str:
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return ""


def _kib(text: str, name: str) -> int:
    words = _field(text, name).split()
    return int(words[0]) * 1024 if words and words[0].isdigit() else 0


def bound_onednn_caches() -> None:
    """Bound the caches of this process, before its first product. Two caches, oneDNN's and that of torch's way to
    it, keep the
    code made for each number of rows and shape of weight: 0.6 MB each, of 1,024, as they come, 0.6 GB. With
    fewer, code that is made anew costs 0.2 to 0.8 ms. What the user has set stays."""
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(name, str(ONEDNN_CACHED))


def keep_compiled(folder: Path) -> None:
    """Where flash-attn-4 keeps what it compiles for this machine, 3 to 5 s for each kind of model. Of this
    process, before it is imported; a folder that cannot be made or written keeps nothing."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError:
        return
    if not os.access(folder, os.W_OK | os.X_OK):
        return          # it would fail when it is imported
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(folder))


def _cores(root: Path) -> int:
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    quota = _read(root / "sys/fs/cgroup/cpu.max").split()
    if len(quota) == 2 and quota[0].isdigit():
        # Rounded up: a quota of 1.5 cores still runs two threads better than one.
        cores = min(cores, max(1, -(-int(quota[0]) // int(quota[1]))))
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    return min(cores, int(wanted)) if wanted.isdecimal() and int(wanted) else cores


def _cgroup_memory(root: Path) -> tuple[int, int]:
    """(limit, used without file cache) of this process's cgroup, v2 or v1."""
    for folder, limit_name, used_name, cache in (
            ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
            ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes",
             "total_inactive_file")):
        limit = _read(root / folder / limit_name).strip()
        if not limit.isdigit() or int(limit) >= 1 << 60:
            continue
        used = _read(root / folder / used_name).strip()
        stat = dict(line.split() for line in _read(root / folder / "memory.stat").splitlines()
                    if len(line.split()) == 2)
        freeable = int(stat.get(cache, 0))
        return int(limit), max(0, int(used) - freeable) if used.isdigit() else 0
    return 1 << 62, 0


def _torch_cuda() -> str:
    """Read in torch's files: to import it takes a second."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return ""
    found = re.search(r"^cuda\b[^=]*= *'([^']*)'", _read(Path(spec.origin).parent / "version.py"), re.M)
    return found[1] if found else ""


def _gpus(root: Path) -> tuple[tuple[str, ...], str]:
    folder = root / "proc/driver/nvidia/gpus"
    try:
        names = tuple(_field(_read(p / "information"), "Model") for p in sorted(folder.iterdir()))
    except OSError:
        return (), "no NVIDIA driver is loaded (/proc/driver/nvidia/gpus is missing)"
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    if shown is not None:
        if not shown.strip() or shown.strip().startswith("-"):
            return (), f"CUDA_VISIBLE_DEVICES={shown.strip()} hides every GPU"
        seen = shown.split(",")
        names = (tuple(names[int(i)] for i in seen if int(i) < len(names))
                 if all(i.strip().isdecimal() for i in seen) else names[:len(seen)])
    return names, "" if names else "the NVIDIA driver is loaded but reports no device"
