"""Inputs of index_select on a grid where sums are exact: scores tie often, and everyone agrees.

Keys of positions that no query sees are NaN or infinite.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from cases import FORMATS, Case, Workload, unseen
from penstock.kernels.choose.index_select import IndexSelect
from penstock.kernels.types import fp8

# name: (row, position) of each query
_QUERIES: dict[str, tuple[tuple[int, int], ...]] = {
    "first token": ((0, 0),),
    "around topk": ((0, 22), (1, 23), (2, 24), (0, 25)),
    "page edges": ((0, 63), (1, 64), (2, 65)),
    "a chunk of one row": tuple((1, n) for n in range(130, 145)),
    "none and one": ((0, -1), (1, 333), (2, -1)),
    "long": ((0, 5000), (2, 4500)),
    "a step of many": tuple((n % 3, 97 * n - 1) for n in range(40)),
    "a chunk of many": tuple((1, 1000 + n) for n in range(70)),
    "decodes beside chunks": ((0, 700), (2, -1), (1, 511), *((1, 630 + n) for n in range(20)),
                              *((0, n) for n in range(60, 75)), (2, 63)),
}
_HEADS = ((8, 32), (4, 20), (1, 16), (64, 128))     # index heads, index head dim
_TOPK = 24


def cases(device: str) -> Iterator[Case]:
    for name, dtype, kept in FORMATS:
        for step, queries in _QUERIES.items():
            for i, heads in enumerate(_HEADS):
                size = (16, 64, 3)[i % 3]
                yield Case(f"{name}-{step}-{heads}-pages of {size}",
                           partial(_run, dtype, kept, queries, heads, size, False, device), 0.0)
        for size in (16, 3):
            yield Case(f"{name}-long, all alike, pages of {size}",
                       partial(_run, dtype, kept, ((0, 5000), (2, 30)), (8, 32), size, True, device), 0.0)
        for value in (float("nan"), float("inf")):
            yield Case(f"{name}-a later key of the chunk is {value}", partial(
                _hidden, dtype, kept, value, device), 0.0)
        yield Case(f"{name}-many, all alike", partial(
            _run, dtype, kept, ((0, 5000), *((1, n) for n in range(32, 99))), (8, 32), 16, True, device), 0.0)
        yield Case(f"{name}-long, all small", partial(      # more of them share a bin than a list holds
            _run, dtype, kept, ((0, 5000), (2, 4500)), (8, 32), 16, False, device, by=2.0 ** -20), 0.0)
        if dtype == torch.bfloat16:         # wide enough for lines that are read once
            yield Case(f"{name}-far in", partial(
                _run, dtype, kept, ((0, 65600), (0, 3), (0, 65535), *((0, 40 * n) for n in range(70))),
                (8, 32), 64, False, device), 0.0)


def _coded(dtype: torch.dtype, kept: torch.dtype) -> torch.dtype:
    """Of queries."""
    return torch.float8_e4m3fn if kept == torch.uint8 else dtype


def make(dtype: torch.dtype, kept: torch.dtype, queries: tuple[tuple[int, int], ...], heads: tuple[int, int],
         size: int, alike: bool = False) -> tuple[Tensor, ...]:
    """The tensors that `IndexSelect` takes. Three rows over scattered pages; the pool's page stride is larger
    than a page. The largest of a key is 7: in fp8 its scale is 1/64, and all of it exact. alike: a row's keys
    are one."""
    num_heads, dim = heads
    generator = torch.Generator().manual_seed(len(queries) + dim)
    pages = max(max(position for _, position in queries), 0) // size + 1
    table_RP = torch.randperm(3 * pages + 2, generator=generator)[:3 * pages].view(3, pages).int()
    keys = unseen((3 * pages + 2, 2, size, dim), dtype)
    for row in range(3):
        seen = torch.arange(1 + max((p for r, p in queries if r == row), default=-1))
        at = table_RP[row, seen // size].long()
        key = torch.randint(-3, 4, (len(seen), dim), generator=generator)
        key[:, 0] = 7
        if alike:
            key[:] = key[:1]
        keys[at, 1, seen % size] = key.to(dtype)
    q = torch.randint(-3, 4, (len(queries), num_heads, dim), generator=generator)
    weight = torch.randint(-2, 5, (len(queries), num_heads), generator=generator)
    row_B, position_B = (torch.tensor(x, dtype=torch.int32) for x in zip(*queries, strict=True))
    return (q.to(_coded(dtype, kept)), weight.float(), fp8.kept(keys, kept, dim)[:, 1], table_RP, row_B,
            position_B)


def _run(dtype: torch.dtype, kept: torch.dtype, queries: tuple[tuple[int, int], ...], heads: tuple[int, int],
         size: int, alike: bool, device: str, run: IndexSelect, *, by: float = 1.0) -> Tensor:
    q, weight, *rest = (x.to(device) for x in make(dtype, kept, queries, heads, size, alike))
    return run(q, weight * by, *rest, topk=_TOPK)


def _hidden(dtype: torch.dtype, kept: torch.dtype, value: float, device: str, run: IndexSelect) -> Tensor:
    """What the queries of a chunk choose that come before a token whose key is not finite."""
    queries = tuple((1, n) for n in range(130, 145))
    q, weight, keys, table, row, position = make(dtype, torch.float32, queries, (8, 32), 16)
    keys = keys.clone()
    keys[table[1, 138 // 16].long(), 138 % 16] = value
    q, keys = q.to(_coded(dtype, kept)), fp8.kept(keys.to(dtype), kept, 32)
    return run(*(x.to(device) for x in (q, weight, keys, table, row, position)), topk=_TOPK)[:8].contiguous()


def workloads() -> Iterator[Workload]:
    """DeepSeek-V3.2's indexer at 16,384 tokens; a prompt of the recall model."""
    for name, dtype, kept in FORMATS:
        for heads, queries, context, topk in (((64, 128), 1, 16384, 2048), ((8, 32), 512, 4096, 256)):
            key = fp8.width(heads[1], heads[1]) if kept == torch.uint8 else heads[1]
            yield Workload(
                f"{name} {heads} {queries} at {context}",
                partial(_prepare, dtype, kept, heads, queries, context, topk),
                context * key * kept.itemsize, 2 * queries * context * heads[0] * heads[1], 4)


def _prepare(dtype: torch.dtype, kept: torch.dtype, heads: tuple[int, int], queries: int, context: int,
             topk: int, run: IndexSelect) -> Callable[[int], object]:
    num_heads, dim = heads
    pools = fp8.kept(torch.randn(4, context // 64, 64, dim).to(dtype), kept, dim)
    q = torch.randn(queries, num_heads, dim).to(_coded(dtype, kept))
    weight = torch.rand(queries, num_heads)
    table = torch.arange(context // 64, dtype=torch.int32).view(1, -1)
    row = torch.zeros(queries, dtype=torch.int32)
    position = torch.arange(context - queries, context, dtype=torch.int32)
    return lambda layer: run(q, weight, pools[layer], table, row, position, topk=topk)
