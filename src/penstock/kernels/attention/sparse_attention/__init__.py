"""sparse_attention: one query over the units chosen for it, wherever they are. Contract, implementations.

    B queries   N query heads   K KV heads   H head dim   P pages   G page size   C chosen units
"""
from __future__ import annotations

from typing import Protocol

from torch import Tensor

from penstock.kernels.attention.sparse_attention import native, reference
from penstock.kernels.op import DEVICES, Implementation, Op
from penstock.kernels.triton.lazy import lazy

__all__ = ["OP", "SparseAttention"]


class SparseAttention(Protocol):
    def __call__(self, q_BNH: Tensor, pool_PK2GH: Tensor, chosen_BKC: Tensor, slot_BKC: Tensor,
                 position_B: Tensor, *, unit: int, scale: float) -> tuple[Tensor, Tensor]:
        """Attend to the tokens of the chosen units that are not after the query.

        q_BNH        f32|bf16, dense in N and H, any stride in B
        pool_PK2GH   dtype of q, or uint8 [P, K, 2, G, W] of `types.fp8.encode_heads`: k and v of one layer of the
                     device pool, dense in G and H
        chosen_BKC   int32: ascending units, -1 after the last (`select`); unit u is the positions
                     [u * unit, u * unit + unit)
        slot_BKC     int32: where each is: tokens [n % (G / unit) * unit, + unit) of page n // (G / unit)
                     (`resolve`), a page of the row or of its hot buffer alike
        position_B   int32: the query's own position, the last that it sees
        Returns      out_BNH, dtype of q, dense; lse_BN f32, log of the sum of e^score, natural. A query
                     without units has 0 and -inf.
        Reads        only slots of tokens up to the position. Writes nothing.
        Exact        does not depend on `slot_BKC` beyond what lies there, nor on the batch: tokens
                     are added in the order of their positions. With every unit chosen it is
                     `paged_attention` of the same query (bitwise between those in C).
        """


OP: Op[SparseAttention] = Op("sparse_attention", (
    lazy("triton", "penstock.kernels.attention.sparse_attention.triton_units:sparse_attention"),
    Implementation("c", native.sparse_attention, native.probe),
    Implementation("reference", reference.sparse_attention, "one query at a time in float32", DEVICES),
))
