"""`index_select` in C (`index.c`): a token's key is read once, for all index heads."""
from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from penstock.kernels.c.build import entry, library, packed
from penstock.kernels.choose.index_select import reference
from penstock.kernels.op import WrongResult
from penstock.kernels.platform import Platform
from penstock.kernels.types import fp8

_LANES = 16                         # the widest in vectors.h
_SOURCE = Path(__file__).with_name("index.c")


def probe(platform: Platform) -> str:
    """Builds the kernel and compares one small choice with the reference, where sums are exact."""
    _, compiler = library(_SOURCE, platform.cache)
    generator = torch.Generator().manual_seed(0)
    q, keys = (torch.randint(-3, 4, shape, generator=generator).float() for shape in (
        (3, 4, 32), (9, 16, 32)))
    weight = torch.randint(-2, 5, (3, 4), generator=generator).float()
    table = torch.arange(8, -1, -1, dtype=torch.int32).view(1, 9)
    row, position = (torch.tensor(x, dtype=torch.int32) for x in ([0, 0, 0], [143, 57, 3]))
    for dtype, kept in ((torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16),
                        (torch.float32, torch.uint8)):
        pages = fp8.kept(keys * 448 / 3, kept, 32)      # codes of whole numbers
        of = torch.float8_e4m3fn if kept == torch.uint8 else dtype
        out, want = (run(q.to(of), weight, pages, table, row, position, topk=20)
                     for run in (index_select, reference.index_select))
        if not torch.equal(out, want):
            raise WrongResult(f"{compiler}: {dtype} over {kept} chooses others on a small case")
    return f"{platform.best('avx512_f', 'avx2', 'sve')}, {compiler}"


def index_select(q_BIJ: Tensor, weight_BI: Tensor, key_PGJ: Tensor, table_RP: Tensor, row_B: Tensor,
                 position_B: Tensor, *, topk: int) -> Tensor:
    queries, heads, dim = q_BIJ.shape
    if dim % _LANES:                    # no model that is served has such heads
        return reference.index_select(q_BIJ, weight_BI, key_PGJ, table_RP, row_B, position_B, topk=topk)
    if q_BIJ.dtype is torch.float8_e4m3fn:
        q_BIJ = q_BIJ.float()
    chosen_BS = torch.empty(queries, topk, dtype=torch.int32)
    if queries == 0:
        return chosen_BS
    width = int(position_B.max()) + 1
    score = torch.empty(queries * width if width > topk else 0)
    args = packed((q_BIJ, key_PGJ, weight_BI, table_RP, row_B, position_B, score, chosen_BS), (
        key_PGJ.stride(0), key_PGJ.stride(1), table_RP.stride(0), queries, heads, key_PGJ.shape[1], width,
        topk))
    entry(_SOURCE, "penstock_index", ctypes.c_int64, ctypes.c_int, ctypes.c_int)(
        args, dim, q_BIJ.dtype is torch.bfloat16, fp8.format_of(key_PGJ, q_BIJ),
        torch.get_num_threads())
    return chosen_BS
