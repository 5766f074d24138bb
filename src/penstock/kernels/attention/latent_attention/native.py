"""`latent_attention` in C (`latent.c`): a row is read once for several heads, keys and values in one."""
from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from penstock.kernels.attention.latent_attention import reference
from penstock.kernels.attention.latent_attention.context import PagedContext, slots_of
from penstock.kernels.c.build import entry, library, packed
from penstock.kernels.op import WrongResult
from penstock.kernels.platform import Platform
from penstock.kernels.types import fp8

_LANES = 16                         # the widest in vectors.h
_HEADS = 32                         # of a task at most: its sums stay in the second-level cache
_SOURCE = Path(__file__).with_name("latent.c")


def probe(platform: Platform) -> str:
    """Builds the kernel and compares one small step with the reference."""
    _, compiler = library(_SOURCE, platform.cache)
    generator = torch.Generator().manual_seed(0)
    q, pool = (torch.randn(shape, generator=generator) for shape in ((3, 6, 48), (9, 16, 48)))
    slot = torch.randint(0, 144, (3, 140), generator=generator).int()
    slot[1, 5:], slot[2] = -1, -1
    for dtype, kept, tolerance in ((torch.float32, torch.float32, 1e-5), (torch.float32, torch.uint8, 1e-5),
                                   (torch.bfloat16, torch.bfloat16, 0.02)):
        got, want = (run(q.to(dtype), fp8.kept(pool, kept, 32), slot, value_dim=32, scale=0.2)
                     for run in (latent_attention, reference.latent_attention))
        gap = max((a.float() - b.float()).nan_to_num(neginf=0).abs().max()
                  for a, b in zip(got, want, strict=True))
        if not gap <= tolerance:
            raise WrongResult(f"{compiler}: {dtype} over {kept} differs by {gap:.2g} on a small case")
    return f"{platform.best('avx512_f', 'avx2', 'sve')}, {compiler}"


def latent_attention(q_BNH: Tensor, pool_PGH: Tensor, slot_BS: Tensor | PagedContext, *, value_dim: int,
                     scale: float) -> tuple[Tensor, Tensor]:
    queries, heads, dim = q_BNH.shape
    slot_BS = slots_of(slot_BS, pool_PGH.shape[1])
    if dim % _LANES or value_dim % _LANES:      # no model that is served has such rows
        return reference.latent_attention(q_BNH, pool_PGH, slot_BS, value_dim=value_dim, scale=scale)
    out_BNR = torch.empty(queries, heads, value_dim, dtype=q_BNH.dtype)
    lse_BN = torch.empty(queries, heads)
    threads = torch.get_num_threads()
    # Few queries leave threads idle unless their heads are shared out.
    heads_task = min(_HEADS, heads if queries >= 2 * threads else max(4, -(-heads // threads)))
    args = packed((q_BNH, pool_PGH, out_BNR, lse_BN, slot_BS), (
        pool_PGH.stride(0), pool_PGH.stride(1), queries, heads, heads_task, slot_BS.shape[1],
        pool_PGH.shape[1], value_dim), (scale,))
    entry(_SOURCE, "penstock_latent", ctypes.c_int64, ctypes.c_int, ctypes.c_int)(
        args, dim, q_BNH.dtype is torch.bfloat16, fp8.format_of(pool_PGH, q_BNH), threads)
    return out_BNR, lse_BN
