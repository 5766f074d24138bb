"""Inputs of sparse_attention: units anywhere in the pool, partial last units, few and many.

Every slot that a query may not see is NaN or infinite, so reading one shows in the output.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from cases import DTYPES, TOLERANCE, Case, Workload, unseen
from penstock.kernels.attention.sparse_attention import SparseAttention
from penstock.kernels.types import fp8

# name: (position, units chosen) of each query; -1: all that it sees
_QUERIES: dict[str, tuple[tuple[int, int], ...]] = {
    "first token": ((0, 1),),
    "edges of units": ((47, 3), (48, 3), (49, 2)),
    "all": ((100, -1), (7, -1), (8, -1)),
    "more than a chunk": ((3000, 45), (1200, 16), (100, 3)),
    "none": ((10, 0), (300, 9)),
}
_HEADS = ((3, 3, 64), (2, 1, 80), (1, 8, 16), (2, 4, 128), (2, 2, 20), (1, 4, 512))     # KV heads, group, head dim


def cases(device: str = "cpu") -> Iterator[Case]:
    for kind, dtype in DTYPES:
        for name, queries in _QUERIES.items():
            for i, heads in enumerate(_HEADS):
                for j, (unit, page_units) in enumerate(((8, 2), (4, 4), (16, 1), (12, 3))):
                    if (i + j) % 2 == 0:
                        yield Case(f"{kind}-{name}-{heads}-{unit} x {page_units}",
                                   partial(_run, dtype, queries, heads, unit, page_units, device),
                                   TOLERANCE[dtype])
            for heads, unit, page_units in ((_HEADS[0], 8, 2), (_HEADS[1], 4, 4), (_HEADS[2], 16, 1), (_HEADS[3], 8, 2),
                                            ((2, 2, 256), 12, 3)):
                yield Case(f"{kind} over fp8-{name}-{heads}-{unit} x {page_units}",
                           partial(_run, dtype, queries, heads, unit, page_units, device, coded=True), TOLERANCE[dtype])


def make(dtype: torch.dtype, queries: tuple[tuple[int, int], ...], heads: tuple[int, int, int],
         unit: int, page_units: int, device: str = "cpu") -> tuple[Tensor, ...]:
    """The tensors that `SparseAttention` takes. Every query, head and unit has a slot of its own; pages are
    the second of two layers'."""
    kv_heads, group, dim = heads
    generator = torch.Generator().manual_seed(len(queries) * unit + dim)
    seen = [position // unit + 1 for position, _ in queries]
    taken = [have if count < 0 else min(count, have)
             for have, (_, count) in zip(seen, queries, strict=True)]
    pages = -(-sum(taken) // page_units) + 3
    pool = unseen((pages, 2, kv_heads, 2, page_units * unit, dim), dtype)
    chosen = torch.full((len(queries), kv_heads, max(*taken, 1) + 2), -1, dtype=torch.int32)
    slot = torch.full_like(chosen, -1)
    for k in range(kv_heads):
        free = torch.randperm(pages * page_units, generator=generator).tolist()
        for b, (count, have) in enumerate(zip(taken, seen, strict=True)):
            # The query's own unit is always among them.
            units = sorted([*torch.randperm(have - 1, generator=generator)[:count - 1].tolist(),
                            have - 1]) if count else []
            for c, u in enumerate(units):
                chosen[b, k, c], slot[b, k, c] = u, free.pop()
                tokens = min(unit, queries[b][0] + 1 - u * unit)
                page, at = divmod(int(slot[b, k, c]), page_units)
                pool[page, 1, k, :, at * unit:at * unit + tokens] = torch.randn(
                    2, tokens, dim, generator=generator).to(dtype)
    q = torch.randn(len(queries), kv_heads * group + 1, dim, generator=generator).to(dtype)
    position = torch.tensor([position for position, _ in queries], dtype=torch.int32)
    on = [x.to(device) for x in (q, pool, chosen, slot, position)]
    return on[0][:, 1:], on[1][:, 1], *on[2:]


def _run(dtype: torch.dtype, queries: tuple[tuple[int, int], ...], heads: tuple[int, int, int],
         unit: int, page_units: int, device: str, attend: SparseAttention, coded: bool = False) -> Tensor:
    q, pool, *where = make(dtype, queries, heads, unit, page_units, device)
    if coded:
        pool = codes_of(pool)
    out, lse = attend(q, pool, *where, unit=unit, scale=heads[2] ** -0.5)
    assert out.dtype == dtype and out.is_contiguous() and lse.dtype == torch.float32
    return torch.cat((out.float(), lse.clamp_min(-10.0)[..., None]), -1)


def codes_of(pool_PK2GH: Tensor) -> Tensor:
    """The same in codes, of the second of two layers: what a query may not see is NaN, as bytes behind vectors are."""
    dim, kept_PK2GW = pool_PK2GH.shape[-1], fp8.encode_heads(pool_PK2GH.cpu())
    kept_PK2GW[~pool_PK2GH.cpu().isfinite().all(-1)] = 255
    kept_PK2GW[..., fp8.width(dim, dim):] = 255
    return torch.stack((torch.full_like(kept_PK2GW, 255), kept_PK2GW), 1).to(pool_PK2GH.device)[:, 1]


def workloads() -> Iterator[Workload]:
    """SmolLM2-135M's heads: 64 units of 8, as `select` chooses of any context."""
    for kind, dtype in DTYPES:
        for rows in (1, 8):
            yield Workload(f"{kind} {rows} x 64 units of 8",
                           partial(_prepare, dtype, rows),
                           rows * 512 * 3 * 2 * 64 * dtype.itemsize, rows * 512 * 9 * 64 * 4, 12)


def _prepare(dtype: torch.dtype, rows: int, attend: SparseAttention) -> Callable[[int], object]:
    q, pool, *where = make(dtype, ((5999, 64),) * rows, (3, 3, 64), 8, 2)
    pools = [pool.clone() for _ in range(12)]
    return lambda layer: attend(q, pools[layer], *where, unit=8, scale=0.125)
