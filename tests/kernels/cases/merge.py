"""Inputs of merge: one part and several, huge differences, parts without keys whose output
is NaN or infinite."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from cases import DTYPES, TOLERANCE, Case, Workload, unseen
from penstock.kernels.attention.merge import Merge


def cases(device: str = "cpu") -> Iterator[Case]:
    for name, dtype in DTYPES:
        for shape in ((1, 3, 2, 16), (2, 1, 9, 64), (5, 33, 3, 20)):
            yield Case(f"{name}-{shape}", partial(_run, dtype, shape, device), TOLERANCE[dtype])


def _run(dtype: torch.dtype, shape: tuple[int, ...], device: str, merge: Merge) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    out = torch.randn(shape, generator=generator).to(dtype)
    lse = torch.randn(shape[:3], generator=generator) * 30
    empty = torch.rand(shape[:3], generator=generator) < 0.2
    lse[empty] = float("-inf")
    out[empty] = unseen(out.shape, dtype)[empty]
    merged, total = merge(out.to(device), lse.to(device))
    return torch.cat((merged.float(), total.clamp_min(-1e4)[..., None]), -1)


def workloads() -> Iterator[Workload]:
    """A chunk of 512 of SmolLM2-135M's queries over four windows."""
    values = 512 * 9 * 64
    yield Workload("4 x 512 x 9 x 64", partial(_prepare), 4 * values * 5, 4 * values * 2, 4)


def _prepare(merge: Merge) -> Callable[[int], object]:
    out, lse = torch.randn(4, 4, 512, 9, 64), torch.randn(4, 4, 512, 9)
    return lambda layer: merge(out[layer], lse[layer])
