"""Inputs of chunk_attention: one query and many, grouped heads, keys as views of pages; keys and values that
are not finite behind a query."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from cases import DTYPES, TOLERANCE, Case, Workload
from penstock.kernels.attention.chunk_attention import ChunkAttention

# queries, keys (None: their own), query heads, KV heads, head dim
_SHAPES = ((1, None, 4, 2, 16), (7, None, 9, 3, 64), (5, 33, 6, 6, 20), (1, 1, 2, 1, 8),
           (530, None, 2, 1, 16), (3, 100, 8, 2, 128), (1030, None, 2, 1, 16), (1030, 1024, 2, 1, 16),
           (37, None, 4, 1, 512), (37, 70, 4, 2, 512))


def cases(device: str = "cpu") -> Iterator[Case]:
    for name, dtype in DTYPES:
        for shape in _SHAPES:
            yield Case(f"{name}-{shape}", partial(_run, dtype, shape, device), TOLERANCE[dtype])
        for fault, (key, value) in _FAULTS.items():
            yield Case(f"{name}-hidden {fault}", partial(_hidden, dtype, key, value, device),
                       TOLERANCE[dtype])


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


# What a token has that earlier ones do not see: in its keys, in its values.
_FAULTS = {"NaN key": (float("nan"), 0.0), "infinite key": (float("inf"), 0.0),
           "NaN value": (0.0, float("nan")), "infinite value": (0.0, float("inf"))}


def _hidden(dtype: torch.dtype, key: float, value: float, device: str, attend: ChunkAttention) -> Tensor:
    """What the queries get that come before it, and 1 if each later one is not finite where it must show."""
    q, k, v = _inputs(dtype, (70, None, 6, 3, 64), device)
    k[41, :, 5] += key
    v[41, :, 5] += value
    out, lse = attend(q, k, v, causal=True, scale=0.125)
    shows = key == float("inf") or bool((~out[41:].isfinite()).flatten(1).any(1).all())
    return torch.cat((out[:41].float(), lse[:41, :, None], torch.full_like(lse[:41, :, None], shows)), -1)


def workloads() -> Iterator[Workload]:
    """A chunk of 512 of SmolLM2-135M's queries over a window of 528 keys."""
    shape = (512, 528, 9, 3, 64)
    yield Workload("512 x 528 x 9 x 64", partial(_prepare, shape), 4 * 528 * 3 * 64 * 2,
                   4 * 512 * 528 * 9 * 64)


def _prepare(shape: tuple[int, int | None, int, int, int],
             attend: ChunkAttention) -> Callable[[int], object]:
    q, k, v = _inputs(torch.float32, shape, "cpu")
    return lambda layer: attend(q, k, v, causal=False, scale=0.125)
