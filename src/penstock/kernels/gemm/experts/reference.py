"""The definition of routing and of experts' MLPs, in torch's own: every expert sees every token."""
from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.platform import Platform
from penstock.kernels.types.packed import Packed

if TYPE_CHECKING:
    from penstock.kernels.gemm.experts import Biases, Gate, Rule


def probe(platform: Platform) -> str:
    return ("experts run one by one" if platform.device == "cpu" else
            "torch, all experts for all tokens")


def route(logit_TE: Tensor, bias_E: Tensor | None, rule: Rule) -> tuple[Tensor, Tensor]:
    """Implement `ExpertOps.route`; no synchronisation."""
    score_TE = logit_TE.float().sigmoid() if rule.sigmoid else torch.softmax(
        logit_TE, dim=-1, dtype=torch.float32)
    rank_TE = score_TE if bias_E is None else score_TE + bias_E
    if rule.groups_chosen < rule.groups:
        rank_TGe = rank_TE.view(len(rank_TE), rule.groups, -1)
        group_TG = rank_TGe.topk(2, dim=-1).values.sum(dim=-1)
        best_TC = group_TG.topk(rule.groups_chosen, dim=-1).indices
        out_TG = torch.ones_like(group_TG, dtype=torch.bool).scatter_(1, best_TC, False)
        rank_TE = rank_TGe.masked_fill(out_TG[..., None], float("-inf")).view_as(score_TE)
    expert_TC = torch.topk(rank_TE, rule.num_chosen, dim=-1).indices
    weight_TC = score_TE.gather(1, expert_TC)
    if rule.renormalize:
        weight_TC /= weight_TC.sum(dim=-1, keepdim=True).clamp_min(1e-20)
    weight_TC *= rule.scale
    return expert_TC, weight_TC


class ExpertsReference:
    def route(self, logit_TE: Tensor, bias_E: Tensor | None, rule: Rule) -> tuple[Tensor, Tensor]:
        return route(logit_TE, bias_E, rule)

    def mlp(self, x_TD: Tensor, expert_TC: Tensor, weight_TC: Tensor, gate_up: Tensor | Packed,
            down: Tensor | Packed, first: int = 0, biases: Biases | None = None,
            gate: Gate | None = None) -> Tensor:
        dim = x_TD.shape[1]
        num_experts, out_TD = down.shape[0] // dim, torch.zeros_like(x_TD, dtype=torch.float32)
        rows_in, width = gate_up.shape[0] // num_experts, down.shape[1]
        for expert in range(num_experts):
            bias = [None if of is None else _rows(of, expert, rows) for of, rows in zip(
                biases or (None, None), (rows_in, dim), strict=True)]
            gate_up_TJ = F.linear(x_TD.float(), _rows(gate_up, expert, rows_in), bias[0])
            if rows_in == width:
                inner_TI = F.relu(gate_up_TJ).square()
            elif gate is None:
                gate_TI, up_TI = gate_up_TJ.chunk(2, -1)
                inner_TI = F.silu(gate_TI) * up_TI
            else:
                inner_TI = gate(gate_up_TJ)
            weight_T = torch.where(expert_TC == first + expert, weight_TC, 0.0).sum(1)
            inner_TI = inner_TI.to(x_TD.dtype).float()
            one_TD = F.linear(inner_TI, _rows(down, expert, dim), bias[1]) * weight_T[:, None]
            out_TD += one_TD.to(x_TD.dtype)
        return out_TD.to(x_TD.dtype)


def _rows(weight: Tensor | Packed, expert: int, rows: int) -> Tensor:
    """float32: one expert's."""
    part = weight[expert * rows : (expert + 1) * rows]
    return part.floats() if isinstance(part, Packed) else part.float()
