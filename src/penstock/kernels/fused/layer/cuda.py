"""A layer's small operations on a CUDA device, in Triton: imported with the first call, not before."""
from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from torch import Tensor

from penstock.kernels.c.build import triton_version
from penstock.kernels.platform import Platform

if TYPE_CHECKING:
    from penstock.kernels.fused.layer.triton_ops import TritonOps


def probe(platform: Platform) -> str:
    return f"Triton {triton_version()}"


@functools.cache
def _ops() -> TritonOps:
    from penstock.kernels.fused.layer.triton_ops import TritonOps
    return TritonOps()


class Cuda:
    def norm(self, h_TD: Tensor, delta_TD: Tensor | None, weight_D: Tensor, eps: float) -> Tensor:
        return _ops().norm(h_TD, delta_TD, weight_D, eps)

    def rotate(self, x_TMH: Tensor, cos_T1H: Tensor, sin_T1H: Tensor) -> None:
        _ops().rotate(x_TMH, cos_T1H, sin_T1H)

    def norm_rotate(self, x_TMH: Tensor, cos_T1H: Tensor, sin_T1H: Tensor, q_weight_H: Tensor,
                    k_weight_H: Tensor, num_heads: int, eps: float) -> None:
        _ops().norm_rotate(x_TMH, cos_T1H, sin_T1H, q_weight_H, k_weight_H, num_heads, eps)

    def gate(self, gate_up_TJ: Tensor) -> Tensor:
        return _ops().gate(gate_up_TJ)
