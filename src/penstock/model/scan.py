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
# many groups at most, of pages of about so many bytes (docs/adr/0057-states-are-groups-of-layers.md).
GROUPS_MAX, PAGE_BYTES = 4, 8 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSpec:
    """`layers`: which have a state, by global number. `name`: of the mixer in files. `projections`: of these
    in files, whose outputs are fused and put in `order`: x [X], gate z [N V], write [N], step [N]."""

    layers: frozenset[GlobalLayer]
    name: str
    scan: ScanSpec
    projections: tuple[tuple[str, int], ...]
    order: tuple[int, ...]

    ops = ("scan",)

    def groups(self, stage: Stage) -> tuple[CacheShape, ...]:
        """Of a part of the model perhaps without layers; as many of the whole model as of any part."""
        layers = sorted(self.layers)
        parts = min(GROUPS_MAX, len(layers), -(-4 * self.scan.elements * len(layers) // PAGE_BYTES))
        return tuple(CacheShape(
            name="state" if parts == 1 else f"state {part}",
            layers=tuple(LocalLayer(i - stage.first) for i in layers[part::parts]
                         if stage.first <= i < stage.end),
            num_kv_heads=1, head_dim=self.scan.elements, planes=1, snapshot=True,
            owned=stage.lane.owns(1), dtype=torch.float32) for part in range(parts))

    def build(self, slots: Slots, prefix: str, local: LocalLayer, hidden: int, eps: float) -> GatedDelta:
        return GatedDelta(slots, f"{prefix}.{self.name}", local, hidden, self, eps)


class GatedDelta:
    """Source: Gated DeltaNet, arXiv:2412.06464, as Qwen3-Next has it."""

    def __init__(self, slots: Slots, prefix: str, layer: LocalLayer, hidden: int, spec: StateSpec, eps: float,
                 ) -> None:
        scan, f32 = spec.scan, torch.float32
        assert slots.scan is not None, "a model with states, and nothing that scans"
        self.layer, self.eps, self.ops, self.spec, self.scan = layer, eps, slots.ops, scan, slots.scan
        self.sizes = [scan.channels, scan.heads * scan.value_dim, scan.heads, scan.heads]
        names, rows = zip(*spec.projections, strict=True)
        self.into = slots.linear([f"{prefix}.{name}" for name in names], rows, hidden, False,
                                 order=torch.tensor(spec.order))
        self.conv = slots.vector(f"{prefix}.conv1d.weight", (scan.channels, 1, scan.taps), dtype=f32)
        self.step = slots.vector(f"{prefix}.dt_bias", (scan.heads,), dtype=f32)
        self.decay = slots.vector(f"{prefix}.A_log", (scan.heads,), dtype=f32)
        self.norm = slots.vector(f"{prefix}.norm.weight", (scan.value_dim,))
        self.out = slots.linear([f"{prefix}.out_proj"], [hidden], scan.heads * scan.value_dim, False)

    @cached_property
    def weights(self) -> ScanWeights:
        return ScanWeights(conv_WX=self.conv.value[:, 0].T.contiguous(), bias_X=None,
                           decay_N=-self.decay.value.exp(), step_N=self.step.value, skip_N=None)

    def __call__(
        self, x_TD: Tensor, chosen_TS: Tensor | None, cos_T1H: Tensor, sin_T1H: Tensor, attend: Attend
    ) -> tuple[Tensor, Tensor | None]:
        x_TX, z_TY, write_TN, step_TN = torch.split(self.into(x_TD), self.sizes, 1)
        assert isinstance(attend, AttendsStates), "a model with states, and nowhere to keep them"
        states = attend.state(self.layer, len(x_TD))
        out_TNV = self.scan(x_TX, step_TN, write_TN, self.weights, states, self.spec)
        normed = self.ops.norm(out_TNV.flatten(0, 1), None, self.norm.value, self.eps)
        gated_TY = normed.view(z_TY.shape) * F.silu(z_TY.float())
        return self.out(gated_TY.to(x_TD.dtype)), None
