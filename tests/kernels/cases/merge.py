"""Inputs of merge: parts that weigh alike and far apart, parts without keys, one that is not finite."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from cases import DTYPES, TOLERANCE, Case, Workload
from penstock.kernels.attention.merge import Merge

# queries, query heads, head dim
_SHAPES = ((1, 4, 16), (7, 9, 64), (130, 3, 128), (3, 5, 20), (17, 2, 256))


def cases(device: str = "cpu") -> Iterator[Case]:
    for name, dtype in DTYPES:
        for shape in _SHAPES:
            yield Case(f"{name}-{shape}", partial(_run, dtype, shape, device), TOLERANCE[dtype])


def _inputs(dtype: torch.dtype, shape: tuple[int, int, int], device: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(sum(shape))
    out, more = (torch.randn(*shape, generator=generator).to(dtype) for _ in range(2))
    lse, more_lse = (torch.randn(*shape[:2], generator=generator) * 30 for _ in range(2))
    return [x.to(device) for x in (out, lse, more, more_lse)]


def _run(dtype: torch.dtype, shape: tuple[int, int, int], device: str, merge: Merge) -> Tensor:
    """Its first query has no keys in the first part, which is not finite there; its last none in both."""
    out, lse, more, more_lse = _inputs(dtype, shape, device)
    out[0], lse[0] = torch.nan, -torch.inf
    if len(out) > 1:
        more[-1], more_lse[-1], lse[-1] = torch.nan, -torch.inf, -torch.inf
        more[1, 0, 3], more_lse[1, 0] = torch.nan, 100.0        # shows
    merge(out, lse, more, more_lse)
    nothing = lse == -torch.inf
    return torch.cat((out.float().nan_to_num(7.0), lse.where(~nothing, 0.0)[..., None], nothing.float()[..., None]), -1)


def workloads() -> Iterator[Workload]:
    """A chunk of 512 of SmolLM2-135M's queries."""
    shape = (512, 9, 64)
    yield Workload("512 x 9 x 64", partial(_prepare, shape), 3 * 512 * 9 * 64 * 4, 4 * 512 * 9 * 64)


def _prepare(shape: tuple[int, int, int], merge: Merge) -> Callable[[int], object]:
    given = _inputs(torch.float32, shape, "cpu")
    return lambda layer: merge(*given)
