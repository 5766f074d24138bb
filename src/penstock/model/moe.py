"""Sparse mixture of experts: a router over gated MLPs, of which each token visits a few.

On a CPU each expert is an MLP of its own, and those that the step hits run in ascending order, so sums are
made in one order. On a device all experts of a layer are one operation, which the host knows no counts of.
Of several lanes each has a range of the experts, or columns of it.

    T tokens   D model dim   E experts   C chosen per token   S = T * C visits
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.gemm.experts import ExpertOps, Rule
from penstock.kernels.gemm.experts.reference import route
from penstock.model.base import GlobalLayer
from penstock.model.layers import GatedMLP, Mixer
from penstock.model.parts import Cut
from penstock.model.weights.slots import Slots


@dataclass(frozen=True, slots=True, kw_only=True)
class MoESpec:
    """`layers`: which layers have experts, by global number. `renormalize`: chosen weights are scaled
    to sum to 1.

    sigmoid         scores are sigmoids (DeepSeek-V3, arXiv:2412.19437 section 2.1.2), made in float32; a
                    learned bias is added where experts are chosen, not in their weights. Else softmax
    groups          experts are chosen from the `groups_chosen` groups with the best two experts
    shared_width    0, or of the MLP that every token visits beside
    scale           of the chosen weights
    """

    num_experts: int
    num_chosen: int
    width: int
    renormalize: bool
    layers: frozenset[GlobalLayer]
    sigmoid: bool = False
    groups: int = 1
    groups_chosen: int = 1
    shared_width: int = 0
    scale: float = 1.0

    @property
    def rule(self) -> Rule:
        return Rule(num_chosen=self.num_chosen, renormalize=self.renormalize, sigmoid=self.sigmoid,
                    groups=self.groups, groups_chosen=self.groups_chosen, scale=self.scale)


class SparseMLP:
    def __init__(self, slots: Slots, prefix: str, hidden: int, spec: MoESpec) -> None:
        self.rule = spec.rule
        self.router = (Sigmoid if spec.sigmoid else Softmax)(slots, f"{prefix}.gate", hidden, spec)
        self.shared: Mixer | None = None
        if spec.shared_width:
            self.shared = GatedMLP(slots, f"{prefix}.shared_experts", hidden,
                                   slots.lane.columns(spec.shared_width), False)
        names = [f"{prefix}.experts.{index}" for index in range(spec.num_experts)]
        kept, width = slots.lane.experts(spec.num_experts), slots.lane.of_range.columns(spec.width)
        self.route = route if slots.experts is None else slots.experts.route
        self.visit: Callable[[Tensor, Tensor, Tensor], Tensor] = (
            EachExpert(slots, names[kept.range], hidden, kept, width) if slots.experts is None else
            AllExperts(slots, slots.experts, names[kept.range], hidden, kept, width))
        for name in (*names[:kept.first], *names[kept.end:]):
            for part in ("gate", "up"):
                slots.foreign(f"{name}.{part}_proj.weight", (spec.width, hidden))
            slots.foreign(f"{name}.down_proj.weight", (hidden, spec.width))
        # transformers keeps a layer's experts in two tensors; files may have them either way.
        slots.bundle(
            f"{prefix}.experts.gate_up_proj",
            [f"{name}.{part}_proj.weight" for name in names for part in ("gate", "up")],
            (spec.num_experts, 2 * spec.width, hidden),
        )
        slots.bundle(
            f"{prefix}.experts.down_proj",
            [f"{name}.down_proj.weight" for name in names],
            (spec.num_experts, hidden, spec.width),
        )

    def __call__(self, x_TD: Tensor) -> Tensor:
        """out_TD."""
        expert_TC, weight_TC = self.route(*self.router(x_TD), self.rule)
        out_TD = self.visit(x_TD, expert_TC, weight_TC)
        return out_TD if self.shared is None else out_TD.add_(self.shared(x_TD))


class EachExpert:
    """An MLP for each expert of a lane. One synchronisation with the host, for the visits of each."""

    def __init__(self, slots: Slots, names: list[str], hidden: int, kept: Cut, width: Cut) -> None:
        self.kept = kept
        self.experts = [GatedMLP(slots, name, hidden, width, False) for name in names]

    def __call__(self, x_TD: Tensor, expert_TC: Tensor, weight_TC: Tensor) -> Tensor:
        expert_S = expert_TC.flatten()
        order_S = expert_S.argsort(stable=True)
        token_S = order_S // expert_TC.shape[1]
        x_SD = x_TD.index_select(0, token_S)
        counts, outs = expert_S.bincount(minlength=self.kept.of).tolist(), []
        begin = first = sum(counts[:self.kept.first])
        for mlp, visits in zip(self.experts, counts[self.kept.range], strict=True):
            if visits:
                outs.append(mlp(x_SD[first : first + visits]))
                first += visits
        out_TD, here = torch.zeros_like(x_TD), slice(begin, first)
        if not outs:                    # all visits are to other lanes
            return out_TD
        weight_S1 = weight_TC.to(x_TD.dtype).view(-1, 1).index_select(0, order_S[here])
        return out_TD.index_add_(0, token_S[here], torch.cat(outs).mul_(weight_S1))


class AllExperts:
    """Two stacks of weights for all experts of a lane. No synchronisation."""

    def __init__(self, slots: Slots, ops: ExpertOps, names: list[str], hidden: int, kept: Cut,
                 width: Cut) -> None:
        self.ops, self.first = ops, kept.first
        self.gate_up = slots.stack(
            [f"{name}.{part}_proj" for name in names for part in ("gate", "up")], width, hidden)
        self.down = slots.stack([f"{name}.down_proj" for name in names], hidden, width)

    def __call__(self, x_TD: Tensor, expert_TC: Tensor, weight_TC: Tensor) -> Tensor:
        return self.ops.mlp(x_TD, expert_TC, weight_TC, self.gate_up.value, self.down.value, self.first)


class Softmax:
    """Logits, and no bias."""

    def __init__(self, slots: Slots, prefix: str, hidden: int, spec: MoESpec) -> None:
        self.router = slots.linear([prefix], [spec.num_experts], hidden, False)

    def __call__(self, x_TD: Tensor) -> tuple[Tensor, Tensor | None]:
        return self.router(x_TD), None


class Sigmoid:
    """Logits in float32, and the bias by which experts are chosen."""

    def __init__(self, slots: Slots, prefix: str, hidden: int, spec: MoESpec) -> None:
        f32 = torch.float32
        self.weight = slots.vector(f"{prefix}.weight", (spec.num_experts, hidden), dtype=f32)
        self.bias = slots.vector(f"{prefix}.e_score_correction_bias", (spec.num_experts,), dtype=f32)

    def __call__(self, x_TD: Tensor) -> tuple[Tensor, Tensor | None]:
        return F.linear(x_TD.float(), self.weight.value), self.bias.value
