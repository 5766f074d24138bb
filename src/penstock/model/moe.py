"""Sparse mixture of experts: a router over MLPs, of which each token visits a few.

On a CPU each expert is an MLP of its own, and those that the step hits run in ascending order, so sums are
made in one order. On a device all experts of a layer are one operation, which the host knows no counts of.
Of several TP ranks each has a range of the experts, or columns of it.

    T tokens   D model dim   E experts   C chosen per token   S = T * C visits
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.gemm.experts import Biases, ExpertOps, Gate, Rule
from penstock.kernels.gemm.experts.reference import route
from penstock.model.base import GlobalLayer
from penstock.model.layers import GatedMLP, Mixer, PlainMLP, bundle_mlp, whole
from penstock.model.parts import Cut
from penstock.model.weights.slots import Slots, Vector


@dataclass(frozen=True, slots=True, kw_only=True)
class MoESpec:
    """`layers`: which layers have experts, by global number. `renormalize`: chosen weights are scaled
    to sum to 1.

    sigmoid         scores are sigmoids (DeepSeek-V3, arXiv:2412.19437 section 2.1.2), made in float32; a
                    learned bias is added where experts are chosen, not in their weights. Else softmax
    groups          experts are chosen from the `groups_chosen` groups with the best two experts
    shared_width    0, or of the MLP that every token visits beside
    shared_gated    what that says is weighed by the sigmoid of one more product
    scale           of the chosen weights
    router          its name in files
    beside          all of a layer lies as in Granite's files: the MLP that every token visits is
                    `shared_mlp` of the layer, experts may be `input_linear` and `output_linear`
    biased          router and experts have biases; where files have all experts of a layer in one tensor, it
                    is inputs by outputs, gate and up in turns
    gate            how experts gate; None: by SiLU
    gated           else all MLPs are plain ones: relu, squared
    transposed      where files have all experts of a layer in one tensor, it is inputs by outputs, gate
                    first, as makers publish them, or outputs by inputs, as transformers saves them
    bias_name       of the bias by which experts are chosen, after the name of the MLP
    inner           of so many dims is what experts get and give, by a product in front of them and one behind
                    (LatentMoE, of Nemotron 3); 0: the model's. The router and the shared MLP have the model's
    parallel        experts are beside the dense MLP of a layer, see `ParallelExperts`; their names are the layer's
    weighed         files have a factor of what each expert weighs, `router.per_expert_scale`
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
    shared_gated: bool = False
    scale: float = 1.0
    router: str = "gate"
    beside: bool = False
    biased: bool = False
    gate: Gate | None = None
    gated: bool = True
    transposed: bool = False
    bias_name: str = "gate.e_score_correction_bias"
    inner: int = 0
    parallel: bool = False
    weighed: bool = False

    @property
    def inward(self) -> tuple[str, ...]:
        """What an expert has of weights [width, hidden], by name."""
        return ("gate", "up") if self.gated else ("up",)

    @property
    def rule(self) -> Rule:
        return Rule(num_chosen=self.num_chosen, renormalize=self.renormalize, sigmoid=self.sigmoid,
                    groups=self.groups, groups_chosen=self.groups_chosen, scale=self.scale)


class SparseMLP:
    def __init__(self, slots: Slots, prefix: str, hidden: int, spec: MoESpec) -> None:
        self.rule = spec.rule
        self.router = (Sigmoid if spec.sigmoid else Softmax)(slots, f"{prefix}.{spec.router}", hidden, spec)
        self.shared: Mixer | None = None
        if spec.shared_width:
            name = f"{prefix}.shared_expert" if spec.shared_gated else f"{prefix}.shared_experts"
            if spec.beside:
                name = f"{prefix.rpartition('.')[0]}.shared_mlp"
                bundle_mlp(slots, name, hidden, spec.shared_width)
            width = slots.tp_rank.columns(spec.shared_width)
            self.shared = (GatedMLP(slots, name, hidden, width, False, spec.gate) if spec.gated else
                           PlainMLP(slots, name, hidden, width, False))
        self.shared_gate = (slots.linear([f"{prefix}.shared_expert_gate"], [1], hidden, False)
                            if spec.shared_gated else None)
        self.weighs = (slots.vector(f"{prefix}.router.per_expert_scale", (spec.num_experts,), dtype=torch.float32)
                       if spec.weighed else None)
        self.into = self.back = None
        if spec.inner:          # whole on every TP rank: what comes back is a part of the sum over ranks, as it went in
            self.into = slots.linear([f"{prefix}.fc1_latent_proj"], [spec.inner], hidden, False)
            self.back = slots.linear([f"{prefix}.fc2_latent_proj"], [hidden], spec.inner, False)
            hidden = spec.inner
        names = [f"{prefix}.experts.{index}" for index in range(spec.num_experts)]
        kept, width = slots.tp_rank.experts(spec.num_experts), slots.tp_rank.of_range.columns(spec.width)
        self.route = route if slots.experts is None else slots.experts.route
        self.visit: Callable[[Tensor, Tensor, Tensor], Tensor] = (
            EachExpert(slots, names[kept.range], hidden, kept, width, spec) if slots.experts is None else
            AllExperts(slots, slots.experts, names[kept.range], hidden, kept, width, spec))
        for name in (*names[:kept.first], *names[kept.end:]):
            for part, shape in (*((part, (spec.width, hidden)) for part in spec.inward),
                                ("down", (hidden, spec.width))):
                slots.foreign(f"{name}.{part}_proj.weight", shape)
                if spec.biased:
                    slots.foreign(f"{name}.{part}_proj.bias", shape[:1])
        self._bundles(slots, prefix, names, hidden, spec)

    @staticmethod
    def _bundles(slots: Slots, prefix: str, names: list[str], hidden: int, spec: MoESpec) -> None:
        """transformers keeps a layer's experts in two tensors; files may have them either way, Granite's by
        other names."""
        gate_up = [f"{name}.{part}_proj" for name in names for part in spec.inward]
        down = [f"{name}.down_proj" for name in names]
        experts, wide = spec.num_experts, len(spec.inward) * spec.width
        if spec.beside:
            slots.bundle(f"{prefix}.router.layer.weight", [f"{prefix}.{spec.router}.weight"],
                         (experts, hidden), whole)
            slots.bundle(f"{prefix}.input_linear.weight", _weights(gate_up), (experts, wide, hidden))
            slots.bundle(f"{prefix}.output_linear.weight", _weights(down), (experts, hidden, spec.width))
        prefix = f"{prefix}.experts"
        if not spec.biased:
            both = "_".join(spec.inward)
            for name, parts, shape in ((both, gate_up, (wide, hidden)), ("down", down, (hidden, spec.width))):
                if spec.transposed:
                    slots.bundle(f"{prefix}.{name}_proj", _weights(parts), (experts, *shape[::-1]),
                                 lambda tensor_EXY: tensor_EXY.mT.flatten(0, 1))
                slots.bundle(f"{prefix}.{name}_proj", _weights(parts), (experts, *shape))
            return
        slots.bundle(f"{prefix}.gate_up_proj", _weights(gate_up), (experts, hidden, wide),
                     lambda tensor_EDJ: in_turns(tensor_EDJ.mT).flatten(0, 1))
        slots.bundle(f"{prefix}.gate_up_proj_bias", [f"{name}.bias" for name in gate_up], (experts, wide),
                     lambda tensor_EJ: in_turns(tensor_EJ).flatten())
        slots.bundle(f"{prefix}.down_proj", _weights(down), (experts, spec.width, hidden),
                     lambda tensor_EID: tensor_EID.mT.flatten(0, 1))
        slots.bundle(f"{prefix}.down_proj_bias", [f"{name}.bias" for name in down], (experts, hidden))

    def __call__(self, x_TD: Tensor, by_TD: Tensor | None = None) -> Tensor:
        """out_TD. by_TD: what the router reads, None: x."""
        expert_TC, weight_TC = self.route(*self.router(x_TD if by_TD is None else by_TD), self.rule)
        if self.weighs is not None:
            weight_TC = weight_TC * self.weighs.value[expert_TC]
        out_TD = self.visit(x_TD if self.into is None else self.into(x_TD), expert_TC, weight_TC)
        if self.back is not None:
            out_TD = self.back(out_TD)
        if self.shared is None:
            return out_TD
        shared_TD = self.shared(x_TD)
        return out_TD.add_(shared_TD if self.shared_gate is None else
                           shared_TD.mul_(self.shared_gate(x_TD).sigmoid()))


class ParallelExperts:
    """Experts beside a dense MLP (Gemma 4): each reads the residual stream through a norm of its own, the router
    through a third; what both give is normed, then added."""

    def __init__(self, slots: Slots, prefix: str, hidden: int, spec: MoESpec, eps: float) -> None:
        self.ops, self.eps, self.tp_group, self.scale = slots.ops, eps, slots.tp_group, hidden ** -0.5
        self.experts = SparseMLP(slots, prefix, hidden, spec)
        self.router_scale = slots.vector(f"{prefix}.router.scale", (hidden,))
        self.norm_in, self.norm_mlp, self.norm_out = (
            slots.vector(f"{prefix}.{name}.weight", (hidden,)) for name in (
                "pre_feedforward_layernorm_2", "post_feedforward_layernorm_1", "post_feedforward_layernorm_2"))

    def __call__(self, h_TD: Tensor, mlp_TD: Tensor) -> Tensor:
        """mlp_TD: what the dense MLP gives, of all TP ranks. Returns the sum."""
        by_TD = self._norm(h_TD, self.router_scale.value * self.scale)
        out_TD = self.experts(self._norm(h_TD, self.norm_in.value), by_TD)
        if self.tp_group is not None:
            self.tp_group.all_reduce(out_TD)
        return self._norm(mlp_TD, self.norm_mlp.value).add_(self._norm(out_TD, self.norm_out.value))

    def _norm(self, x_TD: Tensor, weight_D: Tensor) -> Tensor:
        return self.ops.norm(x_TD, None, weight_D, self.eps)


def in_turns(rows_EJ: Tensor) -> Tensor:
    """Rows of gate and up in turns, along the second axis: first all of gate, then all of up."""
    return torch.cat((rows_EJ[:, ::2], rows_EJ[:, 1::2]), 1)


def _weights(prefixes: list[str]) -> list[str]:
    return [f"{prefix}.weight" for prefix in prefixes]


class EachExpert:
    """An MLP for each expert of a TP rank. One synchronisation with the host, for the visits of each."""

    def __init__(self, slots: Slots, names: list[str], hidden: int, kept: Cut, width: Cut,
                 spec: MoESpec) -> None:
        self.kept = kept
        self.experts: list[Mixer] = [
            GatedMLP(slots, name, hidden, width, spec.biased, spec.gate, slots.tp_rank.of_range.index == 0)
            if spec.gated else PlainMLP(slots, name, hidden, width, False) for name in names]

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
        if not outs:                    # all visits are to other TP ranks
            return out_TD
        weight_S1 = weight_TC.to(x_TD.dtype).view(-1, 1).index_select(0, order_S[here])
        return out_TD.index_add_(0, token_S[here], torch.cat(outs).mul_(weight_S1))


class AllExperts:
    """Two stacks of weights for all experts of a TP rank. No synchronisation."""

    def __init__(self, slots: Slots, ops: ExpertOps, names: list[str], hidden: int, kept: Cut,
                 width: Cut, spec: MoESpec) -> None:
        self.ops, self.first, self.gate = ops, kept.first, spec.gate
        gate_up = [f"{name}.{part}_proj" for name in names for part in spec.inward]
        down = [f"{name}.down_proj" for name in names]
        self.gate_up = slots.stack(gate_up, width, hidden)
        self.down = slots.stack(down, hidden, width)
        self.gate_up_bias = slots.biases(gate_up, width) if spec.biased else None
        self.down_bias: Vector | None = None
        if spec.biased and slots.tp_rank.of_range.index == 0:
            self.down_bias = slots.biases(down, hidden)
        elif spec.biased:
            for name in down:
                slots.foreign(f"{name}.bias", (hidden,))

    def __call__(self, x_TD: Tensor, expert_TC: Tensor, weight_TC: Tensor) -> Tensor:
        biases = None
        if self.gate_up_bias is not None:
            biases = Biases(self.gate_up_bias.value, None if self.down_bias is None else self.down_bias.value)
        return self.ops.mlp(x_TD, expert_TC, weight_TC, self.gate_up.value, self.down.value, self.first, biases,
                            self.gate)


class Softmax:
    """Logits, and no bias by which experts are chosen."""

    def __init__(self, slots: Slots, prefix: str, hidden: int, spec: MoESpec) -> None:
        self.router = slots.linear([prefix], [spec.num_experts], hidden, spec.biased)

    def __call__(self, x_TD: Tensor) -> tuple[Tensor, Tensor | None]:
        return self.router(x_TD), None


class Sigmoid:
    """Logits in float32, and the bias by which experts are chosen."""

    def __init__(self, slots: Slots, prefix: str, hidden: int, spec: MoESpec) -> None:
        f32 = torch.float32
        self.weight = slots.vector(f"{prefix}.weight", (spec.num_experts, hidden), dtype=f32)
        self.bias = slots.vector(f"{prefix.rpartition('.')[0]}.{spec.bias_name}", (spec.num_experts,),
                                 dtype=f32)

    def __call__(self, x_TD: Tensor) -> tuple[Tensor, Tensor | None]:
        return F.linear(x_TD.float(), self.weight.value), self.bias.value
