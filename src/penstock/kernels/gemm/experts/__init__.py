"""experts: which experts a token visits, and their MLPs, without a number that the host has to know.

Shapes follow from the number of tokens alone, so a step with experts can be captured.

    T tokens of the step   D model dim   E experts   C chosen per token   I MLP width
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.c import device
from penstock.kernels.gemm.experts import reference
from penstock.kernels.op import DEVICES, Implementation, Op
from penstock.kernels.triton.lazy import lazy
from penstock.kernels.types.packed import Packed


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """How experts are chosen.

    num_chosen      C
    renormalize     weights are scaled to sum to 1
    sigmoid         scores are sigmoids, else a softmax
    groups          experts are chosen from the `groups_chosen` groups whose best two rank highest
    scale           of the weights
    """

    num_chosen: int
    renormalize: bool
    sigmoid: bool = False
    groups: int = 1
    groups_chosen: int = 1
    scale: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Clamped:
    """A gate of clamped inputs: of gate at most `limit`, of up what is within it, then
    gate * sigmoid(alpha * gate) * (up + 1). Source: gpt-oss, arXiv:2508.10925."""

    alpha: float
    limit: float

    def __call__(self, gate_up_TJ: Tensor) -> Tensor:
        """[T, J / 2] of gate, then up, side by side."""
        gate_TI, up_TI = gate_up_TJ.chunk(2, -1)
        gate_TI = gate_TI.clamp(max=self.limit)
        return gate_TI * torch.sigmoid(self.alpha * gate_TI) * (up_TI.clamp(-self.limit, self.limit) + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class TanhGelu:
    """gelu(gate) * up, approximated by tanh. Source: Gaussian error linear units, arXiv:1606.08415 section 2."""

    def __call__(self, gate_up_TJ: Tensor) -> Tensor:
        """[T, J / 2] of gate, then up, side by side."""
        gate_TI, up_TI = gate_up_TJ.chunk(2, -1)
        return F.gelu(gate_TI, approximate="tanh") * up_TI


Gate: TypeAlias = Clamped | TanhGelu


class Biases(NamedTuple):
    """Biases of all experts, dense: [E * 2I] as rows of `gate_up`, and [E * D], None: another TP rank adds it."""

    gate_up: Tensor
    down: Tensor | None


class ExpertOps(Protocol):
    def route(self, logit_TE: Tensor, bias_E: Tensor | None, rule: Rule) -> tuple[Tensor, Tensor]:
        """The C experts of each token that rank highest, by score plus bias, and what they weigh.

        logit_TE    f32|bf16, dense in E; E is a multiple of `rule.groups`
        bias_E      f32, added where experts are chosen, not in their weights; None: 0
        Returns     expert_TC int64, different ones of a token, best first (of equal ones any);
                    weight_TC f32. A token with NaN among its logits gets experts that exist, and NaN.
        """

    def mlp(self, x_TD: Tensor, expert_TC: Tensor, weight_TC: Tensor, gate_up: Tensor | Packed,
            down: Tensor | Packed, first: int = 0, biases: Biases | None = None,
            gate: Gate | None = None) -> Tensor:
        """out_TD, the sum over a token's experts of weight * down(silu(gate(x)) * up(x)); new, dense.

        x_TD        f32|bf16, dense
        gate_up     [E * 2I, D], expert after expert, each with the rows of gate before those of up; dense,
                    dtype of x or block-scaled fp8. [E * I, D]: experts without gates, down(relu(up(x)) ** 2)
        down        [E * D, I], likewise
        first       number of the first of these E experts: visits to others count 0
        biases      of x's dtype, added to the products      gate   how gates work; None: silu(gate) * up
        Rounds      to x's dtype: what `down` gets, what each expert gives, their sum. Products are summed
                    in f32. A token's result does not depend on the others up to rounding.
        """


OP: Op[ExpertOps] = Op("experts", (
    lazy("cuda", "penstock.kernels.gemm.experts.triton_experts", device.probe),
    lazy("triton", "penstock.kernels.gemm.experts.triton_experts:TRITON"),
    Implementation("reference", reference.ExpertsReference(), reference.probe, DEVICES),
))
