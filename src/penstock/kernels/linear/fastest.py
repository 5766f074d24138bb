"""The fastest of `native`, `onednn` and torch's own linear, per dtype and size of the weight, as timed here.

Timed once, with one thread, and kept beside the compiled kernels: later processes, and the stages of one
engine, choose alike. Where none clearly wins it is `native`, whose rows do not depend on their batch.
"""
from __future__ import annotations

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

from penstock.kernels.linear import onednn, reference
from penstock.kernels.linear.panels import Panels
from penstock.kernels.platform import Platform

NATIVE = Panels("native")
_ARMS: Mapping[str, Callable[[Tensor, Tensor | None], Callable[[Tensor], Tensor]]] = {
    "native": NATIVE, "onednn": onednn.pack, "reference": reference.pack}
_SIZES = {"small": (576, 576), "large": (2048, 1024)}       # outputs, inputs: in a core's cache, and not
_SMALL = 1 << 20                                             # elements of a weight that counts as small
_ROWS = (1, 8, 128)                                         # one stream, eight, a chunk of a prompt
_MARGIN = 1.1
_ROUNDS = 5
_chosen: dict[str, str] = {}


def probe(platform: Platform) -> str:
    """Times them, or reads what was found before. Raises Unusable without `native`."""
    told = NATIVE.probe(platform)
    _chosen.update(_kept(platform, told) or _keep(platform, told))
    won = sorted({name for name in _ARMS if name in _chosen.values()})
    detail = "" if len(won) == 1 else " " + ", ".join(f"{k}: {v}" for k, v in sorted(_chosen.items()))
    path = _path(platform)
    how = "as timed here" if path is not None and path.exists() else "untimed without a cache folder"
    return f"{' or '.join(won)}, {how}{detail}; {told}"


def pack(weight_OI: Tensor, bias_O: Tensor | None) -> Callable[[Tensor], Tensor]:
    size = "small" if weight_OI.numel() <= _SMALL else "large"
    return _ARMS[_chosen[_key(weight_OI.dtype, size)]](weight_OI, bias_O)


def _key(dtype: torch.dtype, size: str) -> str:
    return f"{size} {str(dtype).removeprefix('torch.')}"


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
    return least if total[least] * _MARGIN < total["native"] else "native"


def _right(arm: Callable[[Tensor, Tensor | None], Callable[[Tensor], Tensor]], dtype: torch.dtype) -> bool:
    """Whether it runs here, and to the same result; oneDNN has no bf16 for some CPUs."""
    weight_OI, x_TI = torch.randn(37, 19).to(dtype), torch.randn(3, 19).to(dtype)
    want = F.linear(x_TI.float(), weight_OI.float())
    try:
        gap = float((arm(weight_OI, None)(x_TI).float() - want).abs().max() / want.abs().max())
    except (AttributeError, RuntimeError, NotImplementedError):
        return False
    return gap <= (1e-5 if dtype is torch.float32 else 2e-2)


def _path(platform: Platform) -> Path | None:
    return None if platform.cache is None else platform.cache / "linear.json"


def _kept(platform: Platform, told: str) -> dict[str, str]:
    """What an earlier process found with the same torch, compiler and CPU, or nothing."""
    path = _path(platform)
    if path is None:
        return {}
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    wanted = {_key(dtype, size) for dtype in (torch.float32, torch.bfloat16) for size in _SIZES}
    ok = (isinstance(found, dict) and found.get("of") == _identity(platform, told)
          and isinstance(found.get("chosen"), dict) and set(found["chosen"]) == wanted
          and set(found["chosen"].values()) <= set(_ARMS))
    return found["chosen"] if ok else {}


def _keep(platform: Platform, told: str) -> dict[str, str]:
    """What is the fastest, written where the next process looks. `native` for all where nothing can be
    written: stages of one engine that each timed for themselves might choose differently."""
    path = _path(platform)
    try:
        if path is None:
            raise FileNotFoundError
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            json.dump({"of": _identity(platform, told), "chosen": (chosen := _measure())}, file)
        os.replace(file.name, path)
    except OSError:
        return {_key(dtype, size): "native" for dtype in (torch.float32, torch.bfloat16) for size in _SIZES}
    return chosen


def _identity(platform: Platform, told: str) -> str:
    return f"{platform.torch}; {' '.join(platform.features)}; {told}"
