"""Sparse mixture of experts: a softmax router over gated MLPs, of which each token visits a few.

Runs only the experts that the step hits, in ascending order, so sums are made in one order.

    T tokens   D model dim   E experts   C chosen per token   S = T * C visits
"""
from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.model.base import GlobalLayer
from penstock.model.layers import GatedMLP
from penstock.model.slots import Slots


@dataclass(frozen=True, slots=True, kw_only=True)
class MoESpec:
    """`layers`: which layers have experts, by global number. `renormalize`: chosen weights are scaled
    to sum to 1."""

    num_experts: int
    num_chosen: int
    width: int
    renormalize: bool
    layers: frozenset[GlobalLayer]


class SparseMLP:
    def __init__(self, slots: Slots, prefix: str, hidden: int, spec: MoESpec) -> None:
        self.spec = spec
        self.router = slots.linear([f"{prefix}.gate"], [spec.num_experts], hidden, False)
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
        probs_TE = torch.softmax(self.router(x_TD), dim=-1, dtype=torch.float32)
        weight_TC, expert_TC = torch.topk(probs_TE, self.spec.num_chosen, dim=-1)
        if self.spec.renormalize:
            weight_TC /= weight_TC.sum(dim=-1, keepdim=True)
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
        return torch.zeros_like(x_TD).index_add_(0, token_S, torch.cat(outs).mul_(weight_S1))
