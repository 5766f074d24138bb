"""Inputs of block_select on a grid where sums are exact: scores tie often, and every implementation agrees.

Keys of positions that no query sees, and of blocks that none scores, are NaN or infinite.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from cases import FORMATS, Case, Workload, unseen
from penstock.kernels.choose.block_select import BlockSelect
from penstock.kernels.choose.block_select.reference import rule_of
from penstock.kernels.types import fp8

# name: (row, position) of each query
_QUERIES: dict[str, tuple[tuple[int, int], ...]] = {
    "first token": ((0, 0),),
    "block edges": ((0, 127), (1, 128), (2, 129)),
    "around all": ((0, 95), (1, 96), (2, 79), (0, 767), (1, 768), (2, 640)),
    "a chunk of one row": tuple((1, n) for n in range(250, 263)),
    "none and one": ((0, -1), (1, 1333), (2, -1)),
    "long": ((0, 5000), (2, 4500)),
    "decodes beside chunks": ((0, 700), (2, -1), (1, 511), *((1, 630 + n) for n in range(20)),
                              *((0, n) for n in range(60, 75)), (2, 63)),
}
_HEADS = ((2, 32), (1, 128), (4, 16), (3, 20))              # index heads, index head dim
_RULES = ((16, 6, 0, 1), (128, 6, 0, 1), (4, 9, 2, 3), (24, 5, 1, 1), (200, 2, 0, 1))   # block, topk, first, last


def cases(device: str) -> Iterator[Case]:
    for name, dtype, kept in FORMATS:
        for s, (step, queries) in enumerate(_QUERIES.items()):
            for i, rule in enumerate(_RULES):
                heads, size = _HEADS[(s + i) % 4], (16, 64, 3)[(s + i) % 3]
                yield Case(f"{name}-{step}-{heads}-{rule}-pages of {size}",
                           partial(_run, dtype, kept, queries, heads, size, rule, False, device), 0.0)
        yield Case(f"{name}-long, all alike", partial(
            _run, dtype, kept, ((0, 5000), *((1, n) for n in range(900, 960))), (2, 32), 16, (16, 6, 0, 1), True,
            device), 0.0)


def make(dtype: torch.dtype, kept: torch.dtype, queries: tuple[tuple[int, int], ...], heads: tuple[int, int],
         size: int, rule: tuple[int, int, int, int], alike: bool = False) -> tuple[Tensor, ...]:
    """The tensors that `BlockSelect` takes. Three rows over scattered pages; the pool's page stride is larger than a
    page, and a query's than its heads. The largest of a key is 7: in fp8 its scale is 1/64, and all of it exact.
    alike: a row's keys are one."""
    num_heads, dim = heads
    generator = torch.Generator().manual_seed(len(queries) + dim)
    pages = max(max(position for _, position in queries), 0) // size + 1
    table_RP = torch.randperm(3 * pages + 2, generator=generator)[:3 * pages].view(3, pages).int()
    keys, scored = unseen((3 * pages + 2, 2, size, dim), dtype), rule_of(*rule)
    for row in range(3):
        end = max((scored.scored(p)[1] for r, p in queries if r == row), default=0)
        seen = torch.arange(end * rule[0])
        at = table_RP[row, seen // size].long()
        key = torch.randint(-3, 4, (len(seen), dim), generator=generator)
        key[:, 0] = 7
        if alike:
            key[:] = key[:1]
        keys[at, 1, seen % size] = key.to(dtype)
        table_RP[row, -(-(1 + max((p for r, p in queries if r == row), default=-1)) // size):] = -1
    q = torch.randint(-3, 4, (len(queries), num_heads + 1, dim), generator=generator)
    row_B, position_B = (torch.tensor(x, dtype=torch.int32) for x in zip(*queries, strict=True))
    of = torch.float8_e4m3fn if kept == torch.uint8 else dtype
    return q.to(of)[:, 1:], fp8.kept(keys, kept, dim)[:, 1], table_RP, row_B, position_B


def _run(dtype: torch.dtype, kept: torch.dtype, queries: tuple[tuple[int, int], ...], heads: tuple[int, int],
         size: int, rule: tuple[int, int, int, int], alike: bool, device: str, run: BlockSelect) -> Tensor:
    block, topk, first, last = rule
    args = make(dtype, kept, queries, heads, size, rule, alike)
    return run(*(x.to(device) for x in args), block=block, topk=topk, first=first, last=last)


def workloads() -> Iterator[Workload]:
    """MiniMax-M3's layer at 65,536 tokens, one query and a chunk of a prompt."""
    for name, dtype, kept in FORMATS:
        for queries, context in ((1, 65536), (512, 4096)):
            key = fp8.width(128, 128) if kept == torch.uint8 else 128
            yield Workload(f"{name} {queries} at {context}", partial(_prepare, dtype, kept, queries, context),
                           context * key * kept.itemsize, 2 * queries * context * 4 * 128, 4)


def _prepare(dtype: torch.dtype, kept: torch.dtype, queries: int, context: int,
             run: BlockSelect) -> Callable[[int], object]:
    pools = fp8.kept(torch.randn(4, context // 128, 128, 128).to(dtype), kept, 128)
    q = torch.randn(queries, 4, 128).to(torch.float8_e4m3fn if kept == torch.uint8 else dtype)
    table = torch.arange(context // 128, dtype=torch.int32).view(1, -1)
    row = torch.zeros(queries, dtype=torch.int32)
    position = torch.arange(context - queries, context, dtype=torch.int32)
    return lambda layer: run(q, pools[layer], table, row, position, block=128, topk=16, first=0, last=1)
