"""`sparse_attention` in C (`sparse.c`), with the blocks and the order of sums of dense decodes."""
from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from penstock.kernels.attention.sparse_attention import reference
from penstock.kernels.c.build import entry, library, packed
from penstock.kernels.op import WrongResult
from penstock.kernels.platform import Platform
from penstock.kernels.types import fp8

_CHUNK, _LANES = 128, 16            # as in vectors.h, its widest
_SOURCE = Path(__file__).with_name("sparse.c")


def probe(platform: Platform) -> str:
    """Builds the kernel and compares one small step with the reference."""
    _, compiler = library(_SOURCE, platform.cache)
    generator = torch.Generator().manual_seed(0)
    q, pool = (torch.randn(shape, generator=generator) for shape in ((2, 6, 32), (9, 2, 2, 16, 32)))
    chosen = torch.full((2, 2, 40), -1, dtype=torch.int32)
    chosen[0], chosen[1, :, :3] = torch.arange(40), torch.tensor([0, 5, 7])
    slot = torch.randint(0, 36, (2, 2, 40), generator=generator).int()
    position = torch.tensor([158, 30], dtype=torch.int32)
    codes = fp8.encode_heads(pool)
    for dtype, pages, tolerance in ((torch.float32, pool, 1e-5), (torch.bfloat16, pool.bfloat16(), 0.02),
                                    (torch.float32, codes, 1e-5)):
        got, want = (run(q.to(dtype), pages, chosen, slot, position, unit=4, scale=0.2)
                     for run in (sparse_attention, reference.sparse_attention))
        gap = max((a.float() - b.float()).abs().max() for a, b in zip(got, want, strict=True))
        if not gap <= tolerance:
            raise WrongResult(f"{compiler}: {dtype} of {pages.dtype} differs by {gap:.2g} on a small case")
    return f"{platform.best('avx512_f', 'avx2', 'sve')}, {compiler}"


def sparse_attention(q_BNH: Tensor, pool_PK2GH: Tensor, chosen_BKC: Tensor, slot_BKC: Tensor,
                     position_B: Tensor, *, unit: int, scale: float) -> tuple[Tensor, Tensor]:
    queries, kv_heads, chosen = chosen_BKC.shape
    heads, dim = q_BNH.shape[1:]
    if dim % _LANES:                    # no model that is served has such heads
        return reference.sparse_attention(q_BNH, pool_PK2GH, chosen_BKC, slot_BKC, position_B,
                                          unit=unit, scale=scale)
    chunks = -(-chosen * unit // _CHUNK)
    out_BNH = torch.empty(q_BNH.shape, dtype=q_BNH.dtype)
    lse_BN = torch.empty(queries, heads)
    partial = torch.empty(queries * heads * chunks * (dim + 2))
    args = packed((q_BNH, pool_PK2GH, out_BNH, lse_BN, partial, chosen_BKC, slot_BKC, position_B), (
        q_BNH.stride(0), *pool_PK2GH.stride()[:4], pool_PK2GH.dtype == torch.uint8, queries, kv_heads,
        heads // kv_heads, chosen, chunks, unit, pool_PK2GH.shape[3] // unit), (scale,))
    entry(_SOURCE, "penstock_sparse", ctypes.c_int64, ctypes.c_int)(
        args, dim, q_BNH.dtype is torch.bfloat16, torch.get_num_threads())
    return out_BNH, lse_BN
