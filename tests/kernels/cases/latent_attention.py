"""Inputs of latent_attention: few and many rows in scattered slots.

Whatever no slot names is NaN or infinite."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from cases import FORMATS, TOLERANCE, Case, Workload, unseen
from penstock.kernels.attention.latent_attention import LatentAttention
from penstock.kernels.types import fp8

# name: rows that each query chose
_COUNTS: dict[str, tuple[int, ...]] = {
    "one row": (1,),
    "block edges": (15, 16, 17, 127, 128, 129),
    "a chunk of queries": tuple(range(250, 290)),
    "a prompt's queries": tuple(range(1, 271)),
    "a step of many": (200, *range(1, 33)),
    "long": (2048, 300),
}
# More queries than a device has processors, each in one part on a device; the last heads are no whole group.
_MANY, _WIDE = (1, 63, 64, 65, 127, 128, 129, 200) * 20, (72, 576, 512)
_SHAPES = ((8, 112, 96), (4, 24, 16), (3, 50, 30), (128, 576, 512))     # heads, row dim, value dim


def cases(device: str) -> Iterator[Case]:
    for name, dtype, kept in FORMATS:
        for step, counts in _COUNTS.items():
            for i, shape in enumerate(_SHAPES):
                if (shape[0] < 100 or "queries" not in step) and (
                        kept != torch.uint8 or shape[2] % 16 == 0):
                    yield Case(f"{name}-{step}-{shape}", partial(
                        _run, dtype, kept, counts, shape, (16, 3, 64)[i % 3], device), TOLERANCE[dtype])
        if dtype == torch.bfloat16:
            for size in (64, 3):
                yield Case(f"{name}-{len(_MANY)} queries of {_WIDE} in pages of {size}", partial(
                    _run, dtype, kept, _MANY, _WIDE, size, device), TOLERANCE[dtype])
        if kept == torch.uint8:
            yield Case(f"{name}-a prompt's rows together", partial(
                _run, dtype, kept, _COUNTS["a chunk of queries"], _SHAPES[0], 16, device, together=True),
                TOLERANCE[dtype])


def make(dtype: torch.dtype, kept: torch.dtype, counts: tuple[int, ...], shape: tuple[int, int, int],
         size: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, one of two layers of a pool, slots; queries share rows, one in -1 beyond the last."""
    heads, dim, value_dim = shape
    generator = torch.Generator().manual_seed(sum(counts) + dim)
    most = max(counts)
    held = torch.randperm(3 * most + size, generator=generator)[:2 * most]
    pool = unseen((-(-(3 * most + size) // size), 2, size, dim), dtype)
    pool[held // size, 1, held % size] = torch.randn(len(held), dim, generator=generator).to(dtype)
    slot = torch.full((len(counts), most + 1), -1, dtype=torch.int32)
    for b, count in enumerate(counts):
        slot[b, :count] = held[torch.randperm(len(held), generator=generator)[:count]]
    pool = fp8.kept(pool, kept, value_dim)
    return torch.randn(len(counts), heads, dim, generator=generator).to(dtype), pool[:, 1], slot


def _run(dtype: torch.dtype, kept: torch.dtype, counts: tuple[int, ...], shape: tuple[int, int, int],
         size: int, device: str, run: LatentAttention, together: bool = False) -> tuple[Tensor, ...]:
    q, pool, slot = (t.to(device) for t in make(dtype, kept, counts, shape, size))
    if together:
        pool = pool.contiguous()
    return run(q, pool, slot, value_dim=shape[2], scale=shape[1] ** -0.5)


def workloads() -> Iterator[Workload]:
    """DeepSeek-V3.2's decode of one row; a chunk of the recall model's prompt."""
    for name, dtype, kept in FORMATS:
        for shape, queries, chosen in (((128, 576, 512), 1, 2048), ((8, 112, 96), 512, 256)):
            row = fp8.width(shape[1], shape[2]) if kept == torch.uint8 else shape[1]
            yield Workload(
                f"{name} {shape} {queries} x {chosen}",
                partial(_prepare, dtype, kept, shape, queries, chosen),
                queries * chosen * row * kept.itemsize,
                2 * queries * chosen * shape[0] * (shape[1] + shape[2]), 4)


def _prepare(dtype: torch.dtype, kept: torch.dtype, shape: tuple[int, int, int], queries: int, chosen: int,
             run: LatentAttention) -> Callable[[int], object]:
    heads, dim, value_dim = shape
    pools = fp8.kept(torch.randn(4, 64, 64, dim).to(dtype), kept, value_dim)
    q = torch.randn(queries, heads, dim).to(dtype)
    slot = torch.stack([torch.randperm(4096)[:chosen] for _ in range(queries)]).int()
    return lambda layer: run(q, pools[layer], slot, value_dim=value_dim, scale=dim ** -0.5)
