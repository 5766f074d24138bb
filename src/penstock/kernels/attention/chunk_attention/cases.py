"""Inputs of chunk_attention: one query and many, grouped heads, keys as views of pages."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from penstock.kernels.attention.chunk_attention import ChunkAttention
from penstock.kernels.cases import DTYPES, TOLERANCE, Case, Workload

# queries, keys (None: their own), query heads, KV heads, head dim
_SHAPES = ((1, None, 4, 2, 16), (7, None, 9, 3, 64), (5, 33, 6, 6, 20), (1, 1, 2, 1, 8),
           (530, None, 2, 1, 16), (3, 100, 8, 2, 128), (1030, None, 2, 1, 16), (1030, 1024, 2, 1, 16))


def cases(device: str = "cpu") -> Iterator[Case]:
    for name, dtype in DTYPES:
        for shape in _SHAPES:
            yield Case(f"{name}-{shape}", partial(_run, dtype, shape, device), TOLERANCE[dtype])


def _inputs(dtype: torch.dtype, shape: tuple[int, int | None, int, int, int],
            device: str) -> tuple[Tensor, Tensor, Tensor]:
    """k and v are planes of one tensor, dense in H only, as in a page."""
    generator = torch.Generator().manual_seed(sum(n or 0 for n in shape))
    queries, keys, heads, kv_heads, dim = shape
    q = torch.randn(queries, heads, dim, generator=generator).to(dtype).to(device)
    pages = torch.randn(kv_heads, 2, keys or queries, dim, generator=generator).to(dtype).to(device)
    return q, pages[:, 0].transpose(0, 1), pages[:, 1].transpose(0, 1)


def _run(dtype: torch.dtype, shape: tuple[int, int | None, int, int, int], device: str,
         attend: ChunkAttention) -> Tensor:
    q, k, v = _inputs(dtype, shape, device)
    out, lse = attend(q, k, v, causal=shape[1] is None, scale=shape[-1] ** -0.5)
    return torch.cat((out.float(), lse[..., None]), -1)


def workloads() -> Iterator[Workload]:
    """A chunk of 512 of SmolLM2-135M's queries over a window of 528 keys."""
    shape = (512, 528, 9, 3, 64)
    yield Workload("512 x 528 x 9 x 64", partial(_prepare, shape), 4 * 528 * 3 * 64 * 2,
                   4 * 512 * 528 * 9 * 64)


def _prepare(shape: tuple[int, int | None, int, int, int],
             attend: ChunkAttention) -> Callable[[int], object]:
    q, k, v = _inputs(torch.float32, shape, "cpu")
    return lambda layer: attend(q, k, v, causal=False, scale=0.125)
