"""`select` in C (`select.c`): a unit's bounds are read once, for all query heads of its KV head."""
from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from penstock.kernels.c.build import entry, library, packed
from penstock.kernels.choose.select import reference
from penstock.kernels.choose.select.spec import SelectRule
from penstock.kernels.op import WrongResult
from penstock.kernels.platform import Platform
from penstock.kernels.types import fp8

_SOURCE = Path(__file__).with_name("select.c")


def probe(platform: Platform) -> str:
    """Builds the kernel and compares one small selection with the reference."""
    _, compiler = library(_SOURCE, platform.cache)
    generator = torch.Generator().manual_seed(0)
    q = torch.randint(-3, 4, (2, 6, 32), generator=generator).float()
    keys = torch.randint(-3, 4, (9, 2, 4, 4, 32), generator=generator).float()
    bounds = torch.stack((keys.amin(3), keys.amax(3)), 2)
    table = torch.arange(8, -1, -1, dtype=torch.int32).view(1, 9)
    args = [torch.tensor(x, dtype=torch.int32) for x in ([0, 0], [143, 57], [12, 9])]
    for dtype in (torch.float32, torch.bfloat16):
        for kept in (bounds.to(dtype), fp8.outward(bounds, torch.uint8, up=True)):
            out, want = (run(q.to(dtype), kept, table, *args, chosen=13,
                             rule=SelectRule(unit=4, sink=3, window=9))
                         for run in (select, reference.select))
            if not torch.equal(out, want):
                raise WrongResult(f"{compiler}: {dtype} chooses others on a small case")
    return f"{platform.best('avx512_f', 'avx2', 'sve')}, {compiler}"


def select(q_BNH: Tensor, bounds_PK2SH: Tensor, table_RP: Tensor, row_B: Tensor, position_B: Tensor,
           budget_B: Tensor, *, rule: SelectRule, chosen: int) -> Tensor:
    queries, heads, dim = q_BNH.shape
    kv_heads, page_units = bounds_PK2SH.shape[1], bounds_PK2SH.shape[3]
    chosen_BKC = torch.empty(queries, kv_heads, chosen, dtype=torch.int32)
    if queries == 0:
        return chosen_BKC
    width = int(position_B.max()) // rule.unit + 1
    score = torch.empty(queries * kv_heads * width)
    args = packed((q_BNH, bounds_PK2SH, table_RP, row_B, position_B, budget_B, score, chosen_BKC), (
        q_BNH.stride(0), *bounds_PK2SH.stride()[:3], table_RP.stride(0), queries, kv_heads,
        heads // kv_heads, page_units, width, chosen, rule.unit, rule.sink_units, rule.window,
        bounds_PK2SH.shape[4], fp8.format_of(bounds_PK2SH, q_BNH)))
    entry(_SOURCE, "penstock_select", ctypes.c_int64, ctypes.c_int)(
        args, dim, q_BNH.dtype is torch.bfloat16, torch.get_num_threads())
    return chosen_BKC
