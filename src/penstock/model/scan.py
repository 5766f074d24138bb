"""Layers that keep a state in place of KV: a gated delta net, or the mixer of Mamba-2.

They own weights and order of operations around the op `scan`; where states are the engine's `Attend.state`
says. Tensor-parallel ranks have some parts of each state, with the weights of these.

    T tokens of the step   D model dim   X channels of the convolution   N heads   K key heads   S key dim
    V value dim   W taps
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.state.scan import ScanSpec, ScanWeights
from penstock.model.base import Attend, AttendsStates, CacheShape, GlobalLayer, LocalLayer, Stage
from penstock.model.parts import Cut, whole
from penstock.model.weights.slots import Slots

# A state of all layers may be larger than everything else that is kept in pages: it is cut by layers into so
# many groups at most, of pages of about so many bytes (ADR 0057).
GROUPS_MAX, PAGE_BYTES = 4, 8 << 20
# Where all heads have one key head, a state has so many parts at least, for as many TP ranks. Each part has the inputs
# of its queries and keys: 1.4 % of a state with Granite 4's 48 heads (ADR 0092).
PARTS_LEAST = 8


def split_of(heads: int, key_heads: int) -> int:
    """Return the parts of a state for each key head, see `ScanSpec`."""
    if key_heads > 1:
        return 1
    return next(parts for parts in range(min(heads, PARTS_LEAST), heads + 1) if heads % parts == 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSpec:
    """`layers`: which have a state, by global number. `name`: of the mixer in files. `projections`: of each in
    files its name, and what its rows are, in order: q, k, v, z (gates), b (writes of a delta net), s (steps).
    `together`: in these what a key head has lies together. `channels`: what the rows of the convolution are.
    `bias`, `conv_bias`: of projections and of the convolution."""

    layers: frozenset[GlobalLayer]
    name: str
    scan: ScanSpec
    projections: tuple[tuple[str, str], ...]
    together: bool = False
    channels: str = "qkv"
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
            num_kv_heads=stage.tp_rank.kv_heads(self.scan.parts).size, head_dim=self.scan.part_elements, planes=1,
            snapshot=True, owned=stage.tp_rank.owns(self.scan.parts), dtype=torch.float32) for part in range(parts))

    def build(self, slots: Slots, prefix: str, local: LocalLayer, hidden: int, eps: float) -> Scanned:
        return Scanned(slots, f"{prefix}.{self.name}", local, hidden, self, eps)

    def projected(self, parts: Cut) -> tuple[list[list[Cut]], Tensor | None]:
        """Return, of each projection, the rows that a rank with these parts has, and the order of all of them in
        which they are q, k, v, z, b, s; None: it is this one."""
        return self._rows([kinds for _, kinds in self.projections], "qkvzbs" if self.scan.delta else "qkvzs", parts,
                          self.together and self.scan.split == 1)

    def convolved(self, parts: Cut) -> tuple[list[Cut], Tensor | None]:
        """Return the same of the convolution."""
        [cuts], order = self._rows([self.channels], "qkv", parts, False)
        return cuts, order

    def _rows(self, files: Sequence[str], wanted: str, parts: Cut, together: bool) \
            -> tuple[list[list[Cut]], Tensor | None]:
        scan, heads = self.scan, parts.of_each(self.scan.each)
        keys = parts if scan.split == 1 else whole(scan.key_heads)
        own = {"q": keys.of_each(scan.key_dim), "k": keys.of_each(scan.key_dim),
               "v": heads.of_each(scan.value_dim), "z": heads.of_each(scan.value_dim), "b": heads, "s": heads}
        found, at, first = list[list[Cut]](), dict[str, Tensor](), 0
        for kinds in files:
            total, begin, cuts = sum(own[kind].of for kind in kinds), 0, list[Cut]()
            for kind in kinds:
                size = own[kind].of
                if together:
                    each, width = size // keys.of, total // keys.of
                    rows = torch.arange(keys.size)[:, None] * width + torch.arange(each)
                    at[kind] = (rows + first + begin // keys.of).flatten()
                else:
                    cut = Cut(total, begin + own[kind].first, begin + own[kind].end)
                    at[kind] = torch.arange(cut.size) + first + sum(cut.size for cut in cuts)
                    cuts.append(cut)
                begin += size
            found.append(_joined(cuts) or [keys.of_each(total // keys.of)])
            first += sum(cut.size for cut in found[-1])
        order = torch.cat([at[kind] for kind in wanted])
        return found, None if torch.equal(order, torch.arange(len(order))) else order


def _joined(cuts: Sequence[Cut]) -> list[Cut]:
    """Those that follow each other are one."""
    found = list[Cut]()
    for cut in cuts:
        found = [*found[:-1], cut._replace(first=found[-1].first)] if found and found[-1].end == cut.first else [
            *found, cut]
    return found


class Scanned:
    """Sources: Gated DeltaNet, arXiv:2412.06464, as Qwen3-Next has it: a head is normed, then gated; Mamba-2,
    arXiv:2405.21060, as Bamba has it: gated, then normed with the heads of its key head, which may be on other
    ranks: they add their squares."""

    def __init__(self, slots: Slots, prefix: str, layer: LocalLayer, hidden: int, spec: StateSpec, eps: float,
                 ) -> None:
        parts, f32 = slots.tp_rank.kv_heads(spec.scan.parts), torch.float32
        assert slots.scan is not None, "a model with states, and nothing that scans"
        self.spec = scan = spec.scan.some(parts.size)
        self.layer, self.eps, self.ops, self.scan = layer, eps, slots.ops, slots.scan
        self.tp_group = slots.tp_group if parts.size < parts.of and spec.scan.split > 1 else None
        heads = parts.of_each(scan.each)
        values = heads.of_each(scan.value_dim)
        self.width = values.of // spec.scan.key_heads
        self.sizes = [scan.channels, values.size, heads.size if scan.delta else 0, heads.size]
        rows, order = spec.projected(parts)
        self.into = slots.linear(
            [f"{prefix}.{name}" for (name, _), cuts in zip(spec.projections, rows, strict=True) for _ in cuts],
            [cut for cuts in rows for cut in cuts], hidden, spec.bias, order=order)
        channels, order = spec.convolved(parts)
        self.conv = slots.vector(f"{prefix}.conv1d.weight", (channels, 1, scan.taps), dtype=f32, order=order)
        self.bias = slots.vector(f"{prefix}.conv1d.bias", (channels,), dtype=f32, order=order) \
            if spec.conv_bias else None
        self.skip = None if scan.delta else slots.vector(f"{prefix}.D", (heads,), dtype=f32)
        self.step = slots.vector(f"{prefix}.dt_bias", (heads,), dtype=f32)
        self.decay = slots.vector(f"{prefix}.A_log", (heads,), dtype=f32)
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
            normed_TKY = gated_TKY * torch.rsqrt(self._mean_square(gated_TKY) + self.eps)
            return self.out(self.norm.value * normed_TKY.flatten(1).to(x_TD.dtype)), None
        normed = self.ops.norm(out_TNV.flatten(0, 1), None, self.norm.value, self.eps)
        gated_TY = normed.view(z_TY.shape) * F.silu(z_TY.float())
        return self.out(gated_TY.to(x_TD.dtype)), None

    def _mean_square(self, x_TKY: Tensor) -> Tensor:
        """[T, K, 1] of all heads of a key head."""
        if self.tp_group is None:
            return x_TKY.square().mean(-1, keepdim=True)
        sum_TK1 = x_TKY.square().sum(-1, keepdim=True)
        self.tp_group.all_reduce(sum_TK1.view(len(sum_TK1), -1))
        return sum_TK1 / self.width
