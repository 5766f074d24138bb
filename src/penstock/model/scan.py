"""Layers that keep a state in place of KV: a gated delta net, or the mixer of Mamba-2.

They own weights and order of operations around the op `scan`; where states are the engine's `Attend.state`
says.

    T tokens of the step   D model dim   X channels of the convolution   N heads   K key heads   S key dim
    V value dim   W taps
"""
from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.state.scan import ScanSpec, ScanWeights
from penstock.model.base import Attend, AttendsStates, CacheShape, GlobalLayer, LocalLayer, Stage
from penstock.model.weights.slots import Slots

# A state of all layers may be larger than everything else that is kept in pages: it is cut by layers into so
# many groups at most, of pages of about so many bytes (ADR 0057).
GROUPS_MAX, PAGE_BYTES = 4, 8 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSpec:
    """`layers`: which have a state, by global number. `name`: of the mixer in files. `projections`: of these
    in files, whose outputs are fused and put in `order`: x [X], gate z [N V], write [N] of a delta net, step
    [N]. `channels`: the order of those of the convolution in files; (): as here. `bias`, `conv_bias`: of
    projections and of the convolution."""

    layers: frozenset[GlobalLayer]
    name: str
    scan: ScanSpec
    projections: tuple[tuple[str, int], ...]
    order: tuple[int, ...]
    channels: tuple[int, ...] = ()
    bias: bool = False
    conv_bias: bool = False

    ops = ("scan",)

    def groups(self, stage: Stage) -> tuple[CacheShape, ...]:
        """Cache groups of a part of the model, perhaps without layers; as many of the whole model as of any part."""
        layers = sorted(self.layers)
        parts = min(GROUPS_MAX, len(layers), -(-4 * self.scan.elements * len(layers) // PAGE_BYTES))
        return tuple(CacheShape(
            name="state" if parts == 1 else f"state {part}",
            layers=tuple(LocalLayer(i - stage.first) for i in layers[part::parts]
                         if stage.first <= i < stage.end),
            num_kv_heads=1, head_dim=self.scan.elements, planes=1, snapshot=True,
            owned=stage.tp_rank.owns(1), dtype=torch.float32) for part in range(parts))

    def build(self, slots: Slots, prefix: str, local: LocalLayer, hidden: int, eps: float) -> Scanned:
        return Scanned(slots, f"{prefix}.{self.name}", local, hidden, self, eps)


class Scanned:
    """Sources: Gated DeltaNet, arXiv:2412.06464, as Qwen3-Next has it: a head is normed, then gated; Mamba-2,
    arXiv:2405.21060, as Bamba has it: gated, then normed with the heads of its key head."""

    def __init__(self, slots: Slots, prefix: str, layer: LocalLayer, hidden: int, spec: StateSpec, eps: float,
                 ) -> None:
        scan, f32 = spec.scan, torch.float32
        assert slots.scan is not None, "a model with states, and nothing that scans"
        self.layer, self.eps, self.ops, self.spec, self.scan = layer, eps, slots.ops, scan, slots.scan
        values = scan.heads * scan.value_dim
        self.sizes = [scan.channels, values, scan.heads if scan.delta else 0, scan.heads]
        order = torch.tensor(spec.channels) if spec.channels else None
        names, rows = zip(*spec.projections, strict=True)
        self.into = slots.linear([f"{prefix}.{name}" for name in names], rows, hidden, spec.bias,
                                 order=torch.tensor(spec.order))
        self.conv = slots.vector(f"{prefix}.conv1d.weight", (scan.channels, 1, scan.taps), dtype=f32,
                                 order=order)
        self.bias = slots.vector(f"{prefix}.conv1d.bias", (scan.channels,), dtype=f32, order=order) \
            if spec.conv_bias else None
        self.skip = None if scan.delta else slots.vector(f"{prefix}.D", (scan.heads,), dtype=f32)
        self.step = slots.vector(f"{prefix}.dt_bias", (scan.heads,), dtype=f32)
        self.decay = slots.vector(f"{prefix}.A_log", (scan.heads,), dtype=f32)
        self.norm = slots.vector(f"{prefix}.norm.weight", (scan.value_dim if scan.delta else values,))
        self.out = slots.linear([f"{prefix}.out_proj"], [hidden], values, spec.bias)

    @cached_property
    def weights(self) -> ScanWeights:
        return ScanWeights(conv_WX=self.conv.value[:, 0].T.contiguous(),
                           bias_X=None if self.bias is None else self.bias.value,
                           decay_N=-self.decay.value.exp(), step_N=self.step.value,
                           skip_N=None if self.skip is None else self.skip.value)

    def __call__(
        self, x_TD: Tensor, chosen_TS: Tensor | None, cos_T1H: Tensor, sin_T1H: Tensor, attend: Attend
    ) -> tuple[Tensor, Tensor | None]:
        x_TX, z_TY, write_TN, step_TN = torch.split(self.into(x_TD), self.sizes, 1)
        assert isinstance(attend, AttendsStates), "a model with states, and nowhere to keep them"
        states = attend.state(self.layer, len(x_TD))
        delta = self.spec.delta
        out_TNV = self.scan(x_TX, step_TN, write_TN if delta else None, self.weights, states, self.spec)
        if states.again is not None:
            states.again.append(lambda at_t, states: self.scan(
                x_TX[at_t], step_TN[at_t], write_TN[at_t] if delta else None, self.weights, states,
                self.spec))
        if not delta:
            gated_TY = out_TNV.float().flatten(1) * F.silu(z_TY.float())
            gated_TKY = gated_TY.view(len(x_TD), self.spec.key_heads, -1)
            normed_TKY = gated_TKY * torch.rsqrt(gated_TKY.square().mean(-1, keepdim=True) + self.eps)
            return self.out(self.norm.value * normed_TKY.flatten(1).to(x_TD.dtype)), None
        normed = self.ops.norm(out_TNV.flatten(0, 1), None, self.norm.value, self.eps)
        gated_TY = normed.view(z_TY.shape) * F.silu(z_TY.float())
        return self.out(gated_TY.to(x_TD.dtype)), None
