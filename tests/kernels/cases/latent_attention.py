"""Inputs of latent_attention: few and many rows in scattered slots.

Whatever no slot names is NaN or infinite."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from cases import FORMATS, TOLERANCE, Case, Workload, unseen
from penstock.kernels.attention.latent_attention import LatentAttention, PagedContext
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
_RANK = (8, 576, 512)           # one of eight TP ranks of Kimi-K2


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
        for shape in _SHAPES if kept != torch.uint8 else (*_SHAPES[:1], *_SHAPES[3:], _RANK):
            for contexts, first in (((200, *range(33)), 0), ((1, 0, 2, 700, 129), 1)):
                yield Case(f"{name}-contexts to {max(contexts)}-{shape}", partial(
                    _all_of_rows, dtype, kept, contexts, first, shape, 64 if shape[1] > 500 else 3, device),
                    TOLERANCE[dtype])
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


def _all_of_rows(dtype: torch.dtype, kept: torch.dtype, contexts: tuple[int, ...], first: int,
                 shape: tuple[int, int, int], size: int, device: str, run: LatentAttention) -> tuple[Tensor, ...]:
    """Of a block table that is much wider than contexts."""
    generator = torch.Generator().manual_seed(2)
    q = torch.randn(len(contexts), *shape[:2], generator=generator).to(dtype)
    needed = [-(-n // size) for n in contexts]
    whole = unseen((sum(needed) + 2, 2, size, shape[1]), dtype)
    table = torch.full((len(contexts) + 2, 1600 // size), -1, dtype=torch.int32)
    free = iter(torch.randperm(len(whole), generator=generator).tolist())
    rows = torch.arange(len(contexts)).flip(0) + 1
    for row, context, pages in zip(rows.tolist(), contexts, needed, strict=True):
        for entry in range(pages):
            table[row, entry] = page = next(free)
            lines = slice(first if context > first and not entry else 0, min(size, context - entry * size))
            whole[page, 1, lines] = torch.randn(size, shape[1], generator=generator).to(dtype)[lines]
    whole = fp8.kept(whole, kept, shape[2])
    seen = PagedContext(table.to(device), rows.int().to(device), torch.tensor(contexts).int().to(device), first)
    out, lse = run(q.to(device), whole.to(device)[:, 1], seen, value_dim=shape[2], scale=shape[1] ** -0.5)
    return out, lse.clamp(min=-1e3)


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
