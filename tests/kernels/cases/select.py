"""Inputs of select on a grid where sums are exact: scores tie often, and every implementation agrees.

Summaries that no query may score are NaN: of units that are kept anyway, not full, or of no row.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from cases import DTYPES, Case, Workload
from penstock.kernels.choose.select import Select, SelectRule
from penstock.kernels.types import fp8

# name: (row, position, budget in units) of each query
_QUERIES: dict[str, tuple[tuple[int, int, int], ...]] = {
    "first token": ((0, 0, 12),),
    "unit edges": ((0, 199, 12), (1, 200, 12), (2, 201, 12)),
    "budgets differ": ((0, 400, 12), (1, 400, 30), (2, 77, 17)),
    "all fit": ((0, 90, 60), (1, 3, 12)),
    "a chunk of one row": tuple((1, n, 13) for n in range(130, 145)),
    "none and one": ((0, -1, 12), (1, 333, 12), (2, -1, 12)),
    "long": ((0, 5000, 90), (2, 4500, 64)),
}
_HEADS = ((3, 3, 64), (2, 1, 20), (1, 8, 16), (2, 4, 128))     # KV heads, group, head dim
_RULES = ((4, SelectRule(unit=4, sink=6, window=13)), (1, SelectRule(unit=8, sink=0, window=1)),
          (3, SelectRule(unit=16, sink=1, window=32)))         # units a page, rule


def cases(device: str = "cpu") -> Iterator[Case]:
    for name, dtype in DTYPES:
        for step, queries in _QUERIES.items():
            for i, heads in enumerate(_HEADS):
                for j, (page_units, rule) in enumerate(_RULES):
                    if (i + j) % 2 == 0 or (step == "budgets differ" and dtype == torch.float32):
                        yield Case(f"{name}-{step}-{heads}-{rule.unit} of {page_units}",
                                   partial(_run, dtype, dtype, queries, heads, page_units, rule, device), 0.0)
        for kept in (torch.uint8, torch.bfloat16):
            for heads in (*_HEADS[::2], (1, 2, 256)):
                for step in ("budgets differ", "none and one") if kept != dtype else ():
                    yield Case(f"{name}-{step}-{heads}-kept as {kept}",
                               partial(_run, dtype, kept, _QUERIES[step], heads, *_RULES[0], device), 0.0)


@dataclass(frozen=True, slots=True)
class Inputs:
    q_BNH: Tensor
    bounds_PK2SH: Tensor
    table_RP: Tensor
    row_B: Tensor
    position_B: Tensor
    budget_B: Tensor


def make(dtype: torch.dtype, kept: torch.dtype, queries: tuple[tuple[int, int, int], ...],
         heads: tuple[int, int, int], page_units: int, rule: SelectRule, device: str = "cpu") -> Inputs:
    """Three rows over scattered pages of bounds, kept so; the pool's page stride is larger than a page."""
    kv_heads, group, dim = heads
    generator = torch.Generator().manual_seed(len(queries) + dim)
    pages = max(max(position for _, position, _ in queries), 1) // rule.unit // page_units + 1
    table_RP = torch.randperm(3 * pages + 2, generator=generator)[:3 * pages].view(3, pages).int()
    bounds = fp8.outward(torch.full((3 * pages + 2, 2, kv_heads, 2, page_units, dim), torch.nan), kept,
                         up=True)                                   # the layer is the second of two
    scored = torch.zeros(3, pages * page_units, dtype=torch.bool)
    for row, position, _ in queries:
        first, end = rule.scored(position)
        scored[row, first:end] = True
    for row, unit in scored.nonzero().tolist():
        keys = torch.randint(-8, 9, (2, kv_heads, rule.unit, dim), generator=generator) / 4
        at = int(table_RP[row, unit // page_units])
        bounds[at, :, :, :, unit % page_units] = fp8.outward(
            torch.stack((keys.amin(2), keys.amax(2)), 2), kept, up=True)        # exact in every type
    q = torch.randint(-8, 9, (len(queries), kv_heads * group + 1, dim), generator=generator) / 2
    columns = [torch.tensor(x, dtype=torch.int32) for x in zip(*queries, strict=True)]
    on = [x.to(device) for x in (q.to(dtype), bounds, table_RP, *columns)]
    return Inputs(on[0][:, 1:], on[1][:, 1], *on[2:])


def _run(dtype: torch.dtype, kept: torch.dtype, queries: tuple[tuple[int, int, int], ...],
         heads: tuple[int, int, int], page_units: int, rule: SelectRule, device: str,
         select: Select) -> Tensor:
    queries = tuple((row, at, max(budget, rule.least_units)) for row, at, budget in queries)
    i = make(dtype, kept, queries, heads, page_units, rule, device)
    return select(i.q_BNH, i.bounds_PK2SH, i.table_RP, i.row_B, i.position_B, i.budget_B, rule=rule,
                  chosen=int(i.budget_B.max()) + 1)


def workloads() -> Iterator[Workload]:
    """SmolLM2-135M's heads at 6,000 tokens, 64 units of 8, two units a page."""
    heads, rule = (3, 3, 64), SelectRule(unit=8, sink=4, window=64)
    for name, dtype in DTYPES:
        for rows in (1, 8):
            units = 6000 // rule.unit
            yield Workload(
                f"{name} {rows} x 64 of {units}",
                partial(_prepare, dtype, rows, heads, rule),
                rows * units * heads[0] * 2 * heads[2] * dtype.itemsize,
                rows * units * heads[0] * heads[1] * heads[2] * 4, 12)


def _prepare(dtype: torch.dtype, rows: int, heads: tuple[int, int, int], rule: SelectRule,
             select: Select) -> Callable[[int], object]:
    pages, (kv_heads, group, dim) = 6000 // rule.unit // 2, heads
    pools = torch.randn(12, rows * pages, kv_heads, 2, 2, dim).to(dtype)
    q = torch.randn(rows, kv_heads * group, dim).to(dtype)
    table = torch.arange(rows * pages, dtype=torch.int32).view(rows, pages)
    row, position, budget = (torch.arange(rows, dtype=torch.int32),
                             *(torch.full((rows,), n, dtype=torch.int32) for n in (5999, 64)))
    return lambda layer: select(q, pools[layer], table, row, position, budget, rule=rule, chosen=64)
