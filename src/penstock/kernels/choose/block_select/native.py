"""`block_select` in C (`block.c`): a token's key is read once, for all index heads."""
from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from penstock.kernels.c.build import entry, library, packed
from penstock.kernels.choose.block_select import reference
from penstock.kernels.op import WrongResult
from penstock.kernels.platform import Platform
from penstock.kernels.types import fp8

_LANES = 16                         # the widest in vectors.h
_SOURCE = Path(__file__).with_name("block.c")


def probe(platform: Platform) -> str:
    """Builds the kernel and compares one small selection with the reference, where sums are exact."""
    _, compiler = library(_SOURCE, platform.cache)
    generator = torch.Generator().manual_seed(0)
    q, keys = (torch.randint(-3, 4, shape, generator=generator).float() for shape in ((3, 2, 32), (9, 16, 32)))
    table = torch.arange(8, -1, -1, dtype=torch.int32).view(1, 9)
    row, position = (torch.tensor(x, dtype=torch.int32) for x in ([0, 0, 0], [143, 57, 3]))
    for dtype, kept in ((torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16),
                        (torch.float32, torch.uint8)):
        pages = fp8.kept(keys * 448 / 3, kept, 32)      # codes of whole numbers
        of = torch.float8_e4m3fn if kept == torch.uint8 else dtype
        out, want = (run(q.to(of), pages, table, row, position, block=6, topk=5, first=1, last=2)
                     for run in (block_select, reference.block_select))
        if not torch.equal(out, want):
            raise WrongResult(f"{compiler}: {dtype} over {kept} selects others on a small case")
    return f"{platform.best('avx512_f', 'avx2', 'sve')}, {compiler}"


def block_select(q_BIJ: Tensor, key_PGJ: Tensor, table_RP: Tensor, row_B: Tensor, position_B: Tensor, *,
                 block: int, topk: int, first: int, last: int) -> Tensor:
    queries, heads, dim = q_BIJ.shape
    rule = reference.rule_of(block, topk, first, last)
    if dim % _LANES:                    # no model that is served has such heads
        return reference.block_select(q_BIJ, key_PGJ, table_RP, row_B, position_B, block=block, topk=topk, first=first,
                                      last=last)
    if q_BIJ.dtype is torch.float8_e4m3fn:
        q_BIJ = q_BIJ.float()
    chosen_BIC = torch.empty(queries, heads, topk, dtype=torch.int32)
    if queries == 0:
        return chosen_BIC
    width = int(position_B.max()) // block + 1
    score = torch.empty(queries * heads * width)
    args = packed((q_BIJ, key_PGJ, table_RP, row_B, position_B, score, chosen_BIC), (
        rule.unit, rule.sink_units, rule.window, q_BIJ.stride(0), key_PGJ.stride(0), key_PGJ.stride(1),
        table_RP.stride(0), queries, heads, key_PGJ.shape[1], width, topk))
    entry(_SOURCE, "penstock_blocks", ctypes.c_int64, ctypes.c_int, ctypes.c_int)(
        args, dim, q_BIJ.dtype is torch.bfloat16, fp8.format_of(key_PGJ, q_BIJ), torch.get_num_threads())
    return chosen_BIC
