"""merge: attention over two parts of a context becomes attention over both. Contract and implementations.

    T queries   N query heads   H head dim
"""
from __future__ import annotations

from typing import Protocol

from torch import Tensor

from penstock.kernels.attention.merge import reference
from penstock.kernels.op import DEVICES, Implementation, Op
from penstock.kernels.triton.lazy import lazy

__all__ = ["OP", "Merge"]


class Merge(Protocol):
    def __call__(self, out_TNH: Tensor, lse_TN: Tensor, more_TNH: Tensor, more_TN: Tensor) -> None:
        """Add a part of the context to what was attended to before it: exact, up to rounding.

        out, more   f32|bf16 of one dtype, dense
        lse, more   f32, dense: log of the sum of e^score over the part's keys, natural; -inf for a part
                    without keys, whose `out` is not looked at
        Writes      `out_TNH` and `lse_TN`, of both parts together. A query without any key has 0 and -inf.
        Source      online softmax, arXiv:1805.02867; merged states as in FlashInfer, arXiv:2501.01005.
        """


OP: Op[Merge] = Op("merge", (
    lazy("triton", "penstock.kernels.attention.merge.triton_merge:merge"),
    Implementation("reference", reference.merge, "torch's own operations", DEVICES),
))
