"""mask: only some tokens of some rows stay, by packed bits. Contract and implementations.

    B rows of the step   M of them with a mask   W words of 32 tokens   V vocabulary
"""
from __future__ import annotations

from typing import Protocol

from torch import Tensor

from penstock.kernels.op import DEVICES, Implementation, Op
from penstock.kernels.sample.mask import native, reference
from penstock.kernels.triton.lazy import lazy

__all__ = ["OP", "Mask"]


class Mask(Protocol):
    def __call__(self, logits_BV: Tensor, words_MW: Tensor, at_M: Tensor) -> Tensor:
        """Minus infinity for each token that a row's mask does not admit.

        logits_BV    f32, dense; changed in place, rows that `at_M` does not name are not touched
        words_MW     int32, dense, W >= 1: bit i of word w, the lowest first, admits token 32 * w + i. Bits
                     behind V mean nothing, tokens behind 32 * W are not admitted
        at_M         int64: the row of each mask, distinct
        Returns      ok_M bool: the largest admitted logit is finite: none of them is NaN or plus infinity,
                     and one is finite. What else the row had does not matter.
        """


OP: Op[Mask] = Op("mask", (
    lazy("triton", "penstock.kernels.sample.mask.triton_mask:mask"),
    Implementation("c", native.mask, native.probe),
    Implementation("reference", reference.mask, "bits become booleans", DEVICES),
))
