"""chunk_attention: queries of one row over one run of its keys, to be merged. Contract, implementations.

    T queries   S keys   N query heads   K KV heads   H head dim
"""
from __future__ import annotations

from typing import Protocol

from torch import Tensor

from penstock.kernels.attention.chunk_attention import cuda, fused, matmul, reference
from penstock.kernels.attention.chunk_attention.sound import sound
from penstock.kernels.attention.paged_attention import flash
from penstock.kernels.op import DEVICES, Implementation, Op

__all__ = ["OP", "ChunkAttention"]


class ChunkAttention(Protocol):
    def __call__(self, q_TNH: Tensor, k_SKH: Tensor, v_SKH: Tensor, *, causal: bool,
                 scale: float) -> tuple[Tensor, Tensor]:
        """Attend to a part of a row's context: a window of earlier keys, or the chunk's own.

        q_TNH        f32|bf16, dense in H, T >= 1      k, v_SKH   dtype of q, any stride, S >= 1
        causal       the keys are those of the queries themselves (S == T): query t sees keys 0 .. t.
                     False: all keys are earlier, each query sees all
        Returns      out_TNH, dtype of q; lse_TN f32: log of the sum of e^score, natural, for `merge`.
        Exact        the merge over any split of a context is attention over all of it, up to rounding.
        Source       online softmax, arXiv:1805.02867.
        """


OP: Op[ChunkAttention] = Op("chunk_attention", (
    Implementation("fa4", cuda.chunk_attention, flash.check, ("cuda",)),
    Implementation("torch", cuda.chunk_attention_of_torch, "torch's flash attention", ("cuda",)),
    Implementation("fused", sound(fused.chunk_attention), fused.probe),
    Implementation("matmul", sound(matmul.chunk_attention), "torch's matrix products", DEVICES),
    Implementation("reference", reference.chunk_attention, "one query and head at a time", DEVICES),
))
