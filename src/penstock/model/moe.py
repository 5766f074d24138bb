"""Sparse mixture of experts: a router over gated MLPs, of which each token visits a few.

Runs only the experts that the step hits, in ascending order, so sums are made in one order.

    T tokens   D model dim   E experts   C chosen per token   S = T * C visits
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.model.base import GlobalLayer
from penstock.model.layers import GatedMLP, Mixer
from penstock.model.slots import Slots


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


class SparseMLP:
    def __init__(self, slots: Slots, prefix: str, hidden: int, spec: MoESpec) -> None:
        self.spec = spec
        self.scores: Callable[[Tensor], tuple[Tensor, Tensor]]
        self.scores = (Sigmoid if spec.sigmoid else Softmax)(slots, f"{prefix}.gate", hidden, spec)
        self.shared: Mixer | None = None
        if spec.shared_width:
            self.shared = GatedMLP(slots, f"{prefix}.shared_experts", hidden, spec.shared_width, False)
        names = [f"{prefix}.experts.{index}" for index in range(spec.num_experts)]
        self.experts = [GatedMLP(slots, name, hidden, spec.width, False) for name in names]
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
        """out_TD. One synchronisation with the host, for the number of visits of each expert."""
        score_TE, rank_TE = self.scores(x_TD)
        expert_TC = torch.topk(rank_TE, self.spec.num_chosen, dim=-1).indices
        weight_TC = score_TE.gather(1, expert_TC)
        if self.spec.renormalize:
            weight_TC /= weight_TC.sum(dim=-1, keepdim=True).clamp_min(1e-20)
        weight_TC *= self.spec.scale
        expert_S = expert_TC.flatten()
        order_S = expert_S.argsort(stable=True)
        token_S = order_S // self.spec.num_chosen
        x_SD = x_TD.index_select(0, token_S)
        outs, first = [], 0
        for expert, visits in enumerate(expert_S.bincount().tolist()):
            if visits:
                outs.append(self.experts[expert](x_SD[first : first + visits]))
                first += visits
        weight_S1 = weight_TC.to(x_TD.dtype).view(-1, 1).index_select(0, order_S)
        out_TD = torch.zeros_like(x_TD).index_add_(0, token_S, torch.cat(outs).mul_(weight_S1))
        return out_TD if self.shared is None else out_TD.add_(self.shared(x_TD))


class Softmax:
    """Scores, and what experts are chosen by: the same."""

    def __init__(self, slots: Slots, prefix: str, hidden: int, spec: MoESpec) -> None:
        self.router = slots.linear([prefix], [spec.num_experts], hidden, False)

    def __call__(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        score_TE = torch.softmax(self.router(x_TD), dim=-1, dtype=torch.float32)
        return score_TE, score_TE


class Sigmoid:
    """Scores, and what experts are chosen by: with the bias, and -inf outside of the chosen groups."""

    def __init__(self, slots: Slots, prefix: str, hidden: int, spec: MoESpec) -> None:
        self.spec = spec
        f32 = torch.float32
        self.weight = slots.vector(f"{prefix}.weight", (spec.num_experts, hidden), dtype=f32)
        self.bias = slots.vector(f"{prefix}.e_score_correction_bias", (spec.num_experts,), dtype=f32)

    def __call__(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        spec = self.spec
        score_TE = F.linear(x_TD.float(), self.weight.value).sigmoid()
        rank_TE = score_TE + self.bias.value
        if spec.groups_chosen < spec.groups:
            rank_TGe = rank_TE.view(len(x_TD), spec.groups, -1)
            group_TG = rank_TGe.topk(2, dim=-1).values.sum(dim=-1)
            best_TC = group_TG.topk(spec.groups_chosen, dim=-1).indices
            out_TG = torch.ones_like(group_TG, dtype=torch.bool).scatter_(1, best_TC, False)
            rank_TE = rank_TGe.masked_fill(out_TG[..., None], float("-inf")).view_as(score_TE)
        return score_TE, rank_TE
