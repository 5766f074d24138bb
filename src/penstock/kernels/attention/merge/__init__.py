"""merge: attention over parts of a context, put together. Contract and implementations.

    A parts   T queries   N query heads   H head dim
"""
from __future__ import annotations

from typing import Protocol

from torch import Tensor

from penstock.kernels.attention.merge import reference
from penstock.kernels.op import DEVICES, Implementation, Op

__all__ = ["OP", "Merge"]


class Merge(Protocol):
    def __call__(self, out_ATNH: Tensor, lse_ATN: Tensor) -> tuple[Tensor, Tensor]:
        """Attention over all parts from the attention over each: exact, up to rounding.

        out_ATNH   f32|bf16    lse_ATN   f32: log of the sum of e^score over the part's keys, natural,
                               -inf for a part without keys, whose `out` is not looked at
        Returns    out_TNH, dtype of `out`, and lse_TN f32 of all parts together, which may be merged
                   on. A query without any key has 0 and -inf. Parts are added in their order.
        Source     online softmax, arXiv:1805.02867; merged states as in FlashInfer, arXiv:2501.01005.
        """


# A few passes over queries and heads beside reading the windows themselves: torch is enough.
OP: Op[Merge] = Op("merge", (
    Implementation("reference", reference.merge, "torch", DEVICES),
))
