"""draw: the next token of rows with a temperature, without asking the host. Contract and implementations.

    B rows of the step   R rows of the tables   V vocabulary
"""
from __future__ import annotations

from typing import Protocol

from torch import Tensor

from penstock.kernels.op import DEVICES, Implementation, Op
from penstock.kernels.sample.draw import reference
from penstock.kernels.triton.lazy import lazy

__all__ = ["OP", "Draw"]


class Draw(Protocol):
    def __call__(self, logits_BV: Tensor, token_B: Tensor, row_B: Tensor, position_B: Tensor,
                 params_R4: Tensor, stream_R2: Tensor) -> None:
        """Draw a token for each row that has a temperature; others keep theirs.

        logits_BV    f32, dense
        token_B      int64: overwritten for rows that draw
        row_B        int32, into the tables, no row that draws twice    position_B   int32; below 0: padding
        params_R4    f64: temperature (0: the row draws nothing), top_k (V: off), top_p, min_p
        stream_R2    int64: key of the row's uniforms, and how many it has used: one more if it draws
        Writes       token_B and stream_R2, nothing else.
        Exact        as `filters.weights` and `filters.draw` with `uniform.uniform`, of the row alone: sums
                     are in f64, in any order. A row with NaN gets some id below V.
        """


OP: Op[Draw] = Op("draw", (
    lazy("triton", "penstock.kernels.sample.draw.triton_draw:draw"),
    Implementation("reference", reference.draw, "one row at a time", DEVICES),
))
