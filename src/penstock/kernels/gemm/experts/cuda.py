"""Experts on a CUDA device, in Triton: imported with the first call, not before."""
from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from penstock.kernels.c.build import triton_version
from penstock.kernels.platform import Platform
from penstock.kernels.types.scaled import Scaled

if TYPE_CHECKING:
    from penstock.kernels.gemm.experts import Rule


def probe(platform: Platform) -> str:
    return f"Triton {triton_version()}"


class Cuda:
    def route(self, logit_TE: Tensor, bias_E: Tensor | None, rule: Rule) -> tuple[Tensor, Tensor]:
        from penstock.kernels.gemm.experts import triton_experts
        return triton_experts.route(logit_TE, bias_E, rule)

    def mlp(self, x_TD: Tensor, expert_TC: Tensor, weight_TC: Tensor, gate_up: Tensor | Scaled,
            down: Tensor | Scaled) -> Tensor:
        from penstock.kernels.gemm.experts import triton_experts
        return triton_experts.mlp(x_TD, expert_TC, weight_TC, gate_up, down)
