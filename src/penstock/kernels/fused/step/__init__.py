"""What a step does in front of its layers and behind its head: a launch for each of these on a CUDA device,
and operations of torch on a CPU. All but `angles` of captured steps.

    B queries of the step   R rows of the tables   V vocabulary   S vocabulary in parts   X lines of an answer
    T tokens of the step   F frequencies   H = 2 F
"""
from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels.fused.step import reference
from penstock.kernels.fused.step.spec import Best, BlockTableRef, Looks, Queries

__all__ = ["Best", "BlockTableRef", "Looks", "Queries", "angles", "begin", "best", "say"]
_NOTHING = Looks()


def begin(row_B: Tensor, position_B: Tensor, last_R: Tensor, looks: Looks = _NOTHING) -> Queries:
    """What a step needs to know of its queries.

    row_B, position_B   int32, dense; row 0 at position -1: padding
    last_R              int64: last tokens of the rows, and behind them a place for padding
    Writes              `looks.now_1`. Capturable.
    """
    if row_B.is_cuda:
        from penstock.kernels.fused.step import triton_step  # needs Triton
        return triton_step.begin(row_B, position_B, last_R, looks)
    return reference.begin(row_B, position_B, last_R, looks)


def angles(positions_T: Tensor, freq_F: Tensor, factor: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(cos_T1H, sin_T1H), dense, as `LayerOps.rotate` takes them: of position times frequency, in f32, times
    `factor`, in both halves of H; the first half of sin is negated. Capturable.

    positions_T   int64    freq_F   f32, dense, or those of each token, [T, F]
    """
    if positions_T.is_cuda:
        from penstock.kernels.fused.step import triton_step  # needs Triton
        return triton_step.angles(positions_T, freq_F, factor, dtype)
    return reference.angles(positions_T, freq_F, factor, dtype)


def best(head_BV: Tensor, logits_BV: Tensor) -> Best:
    """The logits that a head gives, bf16 or f32, dense in V, become those in `logits_BV`, f32, dense; and
    what the best tokens are found of, by `say`. Capturable."""
    if head_BV.is_cuda:
        from penstock.kernels.fused.step import triton_step  # needs Triton
        return triton_step.best(head_BV, logits_BV)
    return reference.best(head_BV, logits_BV)


def say(found: Best, row_B: Tensor, position_B: Tensor, last_R: Tensor,
        count_LRKE: Tensor | None = None) -> Tensor:
    """answer_XB, int64: the token of each query, which is what was drawn or the best one, of equal ones the
    lowest; whether its logits have a finite maximum, or else the token is some id below V; and, with counts,
    what they are of its row, summed over layers and heads, 0 for padding.

    row_B, position_B   as `begin` takes them, no row twice
    Writes              `last_R`: each row's token, those of padding in its last place. Capturable.
    """
    if row_B.is_cuda:
        from penstock.kernels.fused.step import triton_step  # needs Triton
        return triton_step.say(found, row_B, position_B, last_R, count_LRKE)
    return reference.say(found, row_B, position_B, last_R, count_LRKE)
