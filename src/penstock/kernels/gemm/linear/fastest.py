"""The fastest of `c`, `onednn` and torch's own linear, per dtype and size of the weight, as timed here.

Timed once, with one thread, and kept beside the compiled kernels: other processes, such as the stages of
one engine and the two engines of a pair, choose alike. A weight is kept once, so one arm serves any number
of rows: the one with the least sum over one row, eight and a chunk of a prompt. Where none wins by a tenth it
is `c`, the only one whose rows do not depend on their batch.
"""
from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.c.build import HEADERS
from penstock.kernels.gemm.linear import onednn, reference
from penstock.kernels.gemm.linear.panels import SOURCE, Panels
from penstock.kernels.platform import Platform

NATIVE = Panels("native")
_ARMS: Mapping[str, Callable[[Tensor, Tensor | None], Callable[[Tensor], Tensor]]] = {
    "c": NATIVE, "onednn": onednn.pack, "reference": reference.pack}
_SIZES = {"small": (576, 576), "large": (2048, 1024)}       # outputs, inputs: in a core's cache, and not
_SMALL = 1 << 20                                             # elements of a weight that counts as small
_ROWS = (1, 8, 128)                                         # one stream, eight, a chunk of a prompt
_MARGIN = 1.1
_ROUNDS = 5


def _key(dtype: torch.dtype, size: str) -> str:
    return f"{size} {str(dtype).removeprefix('torch.')}"


_KEYS = frozenset(_key(dtype, size) for dtype in (torch.float32, torch.bfloat16) for size in _SIZES)
_chosen: dict[str, str] = {}


def probe(platform: Platform) -> str:
    """Times them, or reads what was found before. Raises Unusable without `c`."""
    told = NATIVE.probe(platform)
    chosen = _choice(platform, told)
    _chosen.update(chosen or dict.fromkeys(_KEYS, "c"))
    won = sorted({name for name in _ARMS if name in _chosen.values()})
    how = "untimed without a cache folder" if chosen is None else "as timed here"
    detail = "" if len(won) == 1 else " " + ", ".join(f"{k}: {v}" for k, v in sorted(_chosen.items()))
    return f"{' or '.join(won)}, {how}{detail}; {told}"


def pack(weight_OI: Tensor, bias_O: Tensor | None) -> Callable[[Tensor], Tensor]:
    size = "small" if weight_OI.numel() <= _SMALL else "large"
    return _ARMS[_chosen[_key(weight_OI.dtype, size)]](weight_OI, bias_O)


def _measure() -> dict[str, str]:
    """The arm of each dtype and size whose times, each as a multiple of the best one's, sum to least."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return {_key(dtype, size): _faster(dtype, *shape)
                for dtype in (torch.float32, torch.bfloat16) for size, shape in _SIZES.items()}
    finally:
        torch.set_num_threads(threads)


def _faster(dtype: torch.dtype, outputs: int, inputs: int) -> str:
    layers = max(1, (64 << 20) // (outputs * inputs * dtype.itemsize))      # more than caches hold
    weight_OI = torch.randn(outputs, inputs).to(dtype)
    arms = {name: arm for name, arm in _ARMS.items() if _right(arm, dtype)}
    # Each of its own weights: torch's own linear keeps the tensor that it gets.
    packed = {name: [arm(weight_OI.clone(), None) for _ in range(layers)] for name, arm in arms.items()}
    total = dict.fromkeys(arms, 0.0)
    for rows in _ROWS:
        x_TI = torch.randn(rows, inputs).to(dtype)
        best = dict.fromkeys(arms, math.inf)
        for _ in range(_ROUNDS):
            for name, linears in packed.items():
                some = linears[: 1 if rows > 8 else layers]
                started = time.perf_counter()
                for linear in some:
                    linear(x_TI)
                best[name] = min(best[name], (time.perf_counter() - started) / len(some))
        for name, seconds in best.items():
            total[name] += seconds / min(best.values())
    least = min(total, key=lambda name: total[name])
    return least if total[least] * _MARGIN < total["c"] else "c"


def _right(arm: Callable[[Tensor, Tensor | None], Callable[[Tensor], Tensor]], dtype: torch.dtype) -> bool:
    """Whether it runs here, and to the same result; oneDNN has no bf16 for some CPUs."""
    weight_OI, x_TI = torch.randn(37, 19).to(dtype), torch.randn(3, 19).to(dtype)
    want = F.linear(x_TI.float(), weight_OI.float())
    try:
        gap = float((arm(weight_OI, None)(x_TI).float() - want).abs().max() / want.abs().max())
    except (AttributeError, RuntimeError, NotImplementedError):
        return False
    return gap <= (1e-5 if dtype is torch.float32 else 2e-2)


def _choice(platform: Platform, told: str) -> dict[str, str] | None:
    """What was found here before, else what is found now, by one process while the others wait. None where it
    cannot be kept: processes that each timed for themselves might choose differently."""
    if platform.cache is None:
        return None
    path = platform.cache / f"linear-{_identity(platform, told)}.json"
    if found := _kept(path):
        return found
    try:
        with open(platform.cache / "linear.lock", "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if found := _kept(path):
                return found
            chosen = _measure()
            with tempfile.TemporaryDirectory(dir=path.parent, prefix="time-") as folder:
                part = Path(folder) / path.name
                part.write_text(json.dumps(chosen))
                os.replace(part, path)
    except OSError:
        return None
    return chosen


def _kept(path: Path) -> dict[str, str]:
    """What an earlier process wrote, or nothing."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    ok = isinstance(found, dict) and set(found) == _KEYS and all(str(arm) in _ARMS for arm in found.values())
    return found if ok else {}


def _identity(platform: Platform, told: str) -> str:
    """Of this CPU, as much of it as is used, this torch, compiler and source: of what the times depend on."""
    of = (platform.torch, platform.features, told, sorted(torch.cpu.get_capabilities().items(), key=str))
    sources = b"".join(file.read_bytes() for file in (SOURCE, *HEADERS, Path(__file__)))
    return hashlib.sha256(repr(of).encode() + sources).hexdigest()[:24]
