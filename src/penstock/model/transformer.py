"""The decoder that all supported families share: pre-norm layers, RoPE, causal attention, of some layers
within a window.

What differs is in a `Spec`. Knows tensors and names, neither rows nor where KV lives.

    T tokens of the step   B sampled rows   D model dim   V vocabulary
"""
from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from penstock.config.base.errors import ConfigError
from penstock.kernels.fused.layer import LayerOps, LayerWeights, Stack, stack
from penstock.kernels.gemm.experts import ExpertOps, TanhGelu
from penstock.kernels.state.scan import Scan
from penstock.kernels.types.packed import Packed
from penstock.model.base import (
    Attend,
    AttendsPaged,
    Boundary,
    GlobalLayer,
    LocalLayer,
    Reads,
    Stage,
    TpGroup,
)
from penstock.model.layers import (
    Attention,
    GatedMLP,
    GqaSpec,
    Grown,
    Mixer,
    Mixes,
    PlainMLP,
    TokenInput,
    TokenInputs,
    bundle_mlp,
)
from penstock.model.moe import ParallelExperts, SparseMLP
from penstock.model.mtp import DraftLayer, Drafts
from penstock.model.parts import Cut
from penstock.model.spec import Spec
from penstock.model.weights.slots import LinearFactory, Slots, Vector, check_tensor

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_SHARED = (EMBED.rpartition(".")[0], HEAD.rpartition(".")[0])
_LAYER = re.compile(r"model\.layers\.([0-9]{1,9})\.")


class Layer:
    def __init__(
        self, slots: Slots, index: GlobalLayer, local: LocalLayer, spec: Spec, tp_group: TpGroup | None,
        prefix: str = "",
    ) -> None:
        """prefix: of its names; without one they go by its index."""
        prefix, hidden = prefix or f"model.layers.{index}", spec.hidden
        self.ops, self.eps, self.tp_group = slots.ops, spec.norm_eps, tp_group
        self.scale = spec.residual_scale
        self.windowed = bool(spec.windows and spec.windows[index])
        self.norm_in = self._norm(slots, f"{prefix}.input_layernorm", spec)
        self.attention = _mixes(slots, prefix, "self_attn", index, local, spec)
        after, before = spec.mlp_norm_name, "pre_feedforward_layernorm"
        self.norm_mlp = self._norm(slots, f"{prefix}.{before if spec.norms_behind else after}", spec)
        self.behind = [self._norm(slots, f"{prefix}.{name}", spec) for name in (
            (after, "post_feedforward_layernorm") if spec.norms_behind else ())]
        self.mlp: Mixer
        moe = spec.moe if spec.moe is not None and index in spec.moe.layers else None
        self.experts = ParallelExperts(slots, prefix, hidden, moe, self.eps) if moe and moe.parallel else None
        self.token = TokenInput(slots, prefix, hidden, spec.token_width, self.eps) if spec.token_width else None
        self.scalar = slots.vector(f"{prefix}.layer_scalar", (1,)) if spec.scaled else None
        if moe is not None and not moe.parallel:
            self.mlp = SparseMLP(slots, f"{prefix}.{spec.mlp_name}", hidden, moe)
        else:
            width = spec.width if spec.source_of(index) == index else spec.reader_width or spec.width
            self.mlp = GatedMLP(slots, f"{prefix}.{spec.mlp_name}", hidden, slots.tp_rank.columns(width),
                                spec.mlp_bias, TanhGelu() if spec.gelu else spec.gate)
            if spec.mlp_bundled:
                bundle_mlp(slots, f"{prefix}.{spec.mlp_name}", hidden, spec.width)

    @staticmethod
    def _norm(slots: Slots, name: str, spec: Spec) -> Vector:
        return slots.vector(f"{name}.weight", (spec.hidden,), plus=spec.norm_plus)

    @property
    def weights(self) -> LayerWeights | None:
        """None where it is not made of attention with KV heads, without sinks and gates, whose heads are
        normed one by one and whose queries do not grow, and a dense MLP that gates by SiLU, both added as
        they come."""
        if (not isinstance(self.attention, Attention) or not isinstance(self.mlp, GatedMLP)
                or self.mlp.own_gate is not None or self.attention.sinks is not None or self.behind
                or self.attention.spec.gated or self.attention.spec.norm_width or self.attention.spec.index is not None
                or self.attention.spec.growth or self.scale != 1.0 or self.scalar is not None):
            return None
        return self.attention.beside(self.norm_in.value, self.norm_mlp.value, self.mlp)

    def __call__(
        self, x: Boundary, cos_T1H: Tensor, sin_T1H: Tensor, attend: Attend
    ) -> Boundary:
        """Adds x's delta and the attention's half to its h in place; hands on the MLP's half."""
        x_TD = self.ops.norm(x.h_TD, x.delta_TD, self.norm_in.value, self.eps)
        delta_TD, chosen_TS = self.attention(x_TD, x.chosen_TS, cos_T1H, sin_T1H, attend)
        delta_TD = self._added(self._summed(delta_TD), 0)
        out_TD = self._summed(self.mlp(self.ops.norm(x.h_TD, delta_TD, self.norm_mlp.value, self.eps)))
        if self.experts is not None:
            out_TD = self.experts(x.h_TD, out_TD)
        out_TD = self._added(out_TD, 1)
        return Boundary(x.h_TD, out_TD, chosen_TS) if self.scalar is None else self._scaled(x, out_TD)

    def _scaled(self, x: Boundary, delta_TD: Tensor) -> Boundary:
        """The stream behind a layer that adds of the token itself and multiplies."""
        assert self.scalar is not None
        h_TD = x.h_TD.add_(delta_TD)
        if self.token is not None:
            assert x.own_TX is not None
            h_TD.add_(self.token(h_TD, x.own_TX))
        return Boundary(h_TD.mul_(self.scalar.value), None)

    def _summed(self, out_TD: Tensor) -> Tensor:
        """Over the TP ranks."""
        if self.tp_group is not None:
            self.tp_group.all_reduce(out_TD)
        return out_TD

    def _added(self, out_TD: Tensor, half: int) -> Tensor:
        """What a half adds, of what it gives."""
        if self.behind:
            out_TD = self.ops.norm(out_TD, None, self.behind[half].value, self.eps)
        return out_TD if self.scale == 1.0 else out_TD * self.scale


def _mixes(slots: Slots, prefix: str, name: str, index: GlobalLayer, local: LocalLayer, spec: Spec) -> Mixes:
    """A state, where the layer has one, or attention, whose name in files this is."""
    if spec.states is not None and index in spec.states.layers:
        return spec.states.build(slots, prefix, local, spec.hidden, spec.norm_eps)
    attention, given = spec.attention_of(index), (slots, f"{prefix}.{name}", index, local, spec.hidden, spec.norm_eps)
    if isinstance(attention, GqaSpec):
        return attention.build(*given, writes=spec.source_of(index) == index)
    return attention.build(*given)


class Single:
    """A layer of one norm and one mixer."""

    windowed = False
    weights = None

    def __init__(
        self, slots: Slots, index: GlobalLayer, local: LocalLayer, spec: Spec, tp_group: TpGroup | None
    ) -> None:
        prefix, hidden = f"model.layers.{index}", spec.hidden
        self.ops, self.eps, self.tp_group = slots.ops, spec.norm_eps, tp_group
        self.norm_in = slots.vector(f"{prefix}.norm.weight", (hidden,))
        self.mixes: Mixes | None = None
        self.feeds: Mixer | None = None
        if spec.feeds is None or index not in spec.feeds:
            self.mixes = _mixes(slots, prefix, "mixer", index, local, spec)
        elif spec.moe is not None and index in spec.moe.layers:
            self.feeds = SparseMLP(slots, f"{prefix}.mixer", hidden, spec.moe)
        else:
            self.feeds = PlainMLP(slots, f"{prefix}.mixer", hidden, slots.tp_rank.columns(spec.width),
                                  spec.mlp_bias)

    def __call__(
        self, x: Boundary, cos_T1H: Tensor, sin_T1H: Tensor, attend: Attend
    ) -> Boundary:
        """Adds x's delta to its h in place; hands on its own."""
        x_TD, chosen_TS = self.ops.norm(x.h_TD, x.delta_TD, self.norm_in.value, self.eps), x.chosen_TS
        if self.mixes is not None:
            out_TD, chosen_TS = self.mixes(x_TD, chosen_TS, cos_T1H, sin_T1H, attend)
        else:
            assert self.feeds is not None
            out_TD = self.feeds(x_TD)
        if self.tp_group is not None:
            self.tp_group.all_reduce(out_TD)
        return Boundary(x.h_TD, out_TD, chosen_TS)


def _draft_layer(slots: Slots, spec: Spec, stage: Stage, tp_group: TpGroup | None) -> DraftLayer:
    assert spec.mtp is not None, "a model without a layer that drafts"
    index, own = GlobalLayer(spec.num_layers), spec.drafting
    [kv] = own.attention.groups(replace(stage, first=GlobalLayer(0), end=GlobalLayer(1)), ())
    return DraftLayer(slots, spec.mtp, spec.hidden, spec.norm_eps, spec.norm_plus,
                      Layer(slots, index, LocalLayer(0), own, tp_group, spec.mtp.layer), kv,
                      replace(own.attention.reads(stage.tp_rank, index, LocalLayer(0)), dtype=slots.dtype))


class Transformer:
    """Implements `model.base.Model`. Building allocates nothing; weights come with `load`.
    `stage` is the part that it is; None: all of it. `TP ranksoup`: those of its stage, where it has several."""

    def __init__(
        self, spec: Spec, dtype: torch.dtype, linear: LinearFactory, ops: LayerOps,
        stage: Stage | None = None, experts: ExpertOps | None = None, tp_group: TpGroup | None = None,
        scan: Scan | None = None,
    ) -> None:
        self.spec = spec
        self.stage = stage = stage or Stage(
            GlobalLayer(0), GlobalLayer(spec.num_layers), embeds=True, heads=True)
        assert 0 <= stage.first < stage.end <= spec.num_layers, f"{stage} of {spec.num_layers} layers"
        self.dtype = dtype
        self.groups = spec.groups(stage)
        self.reads: Mapping[LocalLayer, Reads] = {
            layer: replace(by, dtype=dtype) for layer, by in spec.reads(stage).items()}
        self.selector = spec.selector
        self.drafting: Reads | None = None
        self.kv_format = spec.kv_format
        self.drafter = ""
        self.vocab_size, self.hidden = spec.vocab_size, spec.hidden
        self.handed = 2 * spec.hidden + spec.token_width * (spec.num_layers - stage.first)
        self.max_position = spec.rope.max_position
        self._tp_group, self._slots = tp_group, (slots := Slots(
            dtype, linear, ops, experts, stage.tp_rank, scan, tp_group))
        if stage.embeds or stage.inputs or (stage.heads and spec.tied):
            self._embed = slots.table(EMBED, (spec.vocab_size, spec.hidden))
        self._token_inputs = (TokenInputs(slots, spec.hidden, spec.vocab_size, spec.num_layers, spec.token_width,
                                          spec.norm_eps) if stage.embeds and spec.token_width else None)
        kind: type[Layer | Single] = Layer if spec.feeds is None else Single
        self._layers = [
            kind(slots, GlobalLayer(index), LocalLayer(index - stage.first), spec, tp_group)
            for index in range(stage.first, stage.end)
        ]
        self._head: Callable[[Tensor], Tensor]          # a tied head is packed by `finish`
        if stage.heads:
            self._norm = slots.vector(f"{spec.norm_name}.weight", (spec.hidden,), plus=spec.norm_plus)
        if stage.heads and not spec.tied:
            self._head = slots.linear(["lm_head"], [stage.tp_rank.evenly(spec.vocab_size)], spec.hidden, False)
        self._extra_head: Tensor | Packed | None = None
        self._draft: Drafts | None = None
        self._taps: list[int] = []
        self._tapped: dict[int, Tensor] = {}
        if stage.drafts:
            self.take_drafts(_draft_layer(slots, spec, stage, tp_group))

    def _here(self, name: str) -> str:
        """What a name in a file is here."""
        for begin, known in self.spec.files:
            if name.startswith(begin):
                name = known + name[len(begin):]
        return name

    def ignores(self, name: str) -> bool:
        name = self._here(name)
        if layer := _LAYER.match(name):
            last = self.spec.num_layers + self.spec.skipped_layers
            return int(layer[1]) >= last and not self._slots.has(name)
        if name.startswith("mtp."):
            return self.spec.mtp is None
        # One of a module that the model has, such as a bias, is refused by `load`: it would be lost.
        own = TokenInputs.NAMES if self.spec.token_width else ()
        return name.rpartition(".")[0] not in (*_SHARED, *own, self.spec.norm_name)

    def wants(self, name: str) -> bool:
        if self.ignores(name):
            return False
        stage, tied, name = self.stage, self.spec.tied, self._here(name)
        if layer := _LAYER.match(name):
            index = int(layer[1]) - self.spec.num_layers
            if index >= 0:          # of a layer that drafts what is not shared with the model
                return self._slots.has(name)
            return stage.first <= index + self.spec.num_layers < stage.end and self._slots.wants(name)
        if name.startswith("mtp.") or name.rpartition(".")[0] in TokenInputs.NAMES:
            return self._slots.has(name)
        # A stage that needs a tied tensor reads both names: a file may have either.
        return {EMBED: stage.embeds or stage.inputs or (stage.heads and tied),
                f"{self.spec.norm_name}.weight": stage.heads,
                HEAD: stage.heads or (stage.embeds and tied)}.get(name, True)

    def load(self, name: str, tensor: Tensor | Packed) -> None:
        name = self._here(name)
        if name.endswith(".rotary_emb.inv_freq"):
            return                      # old Llama files carry it; transformers recomputes it too
        if name == HEAD and self.spec.tied:
            check_tensor(name, tensor, (self.spec.vocab_size, self.spec.hidden))
            self._extra_head = tensor if isinstance(tensor, Packed) else tensor.to(self.dtype, copy=True)
            return
        self._slots.load(name, tensor)

    @property
    def dequantised(self) -> int:
        return self._slots.dequantised

    @property
    def num_bytes(self) -> int:
        return self._slots.num_bytes

    def finish(self) -> None:
        missing = self._slots.missing()
        if self.spec.tied and self._extra_head is not None and missing == [EMBED]:
            self._slots.load(EMBED, self._extra_head)       # tying is symmetric in transformers
            missing = []
        if missing:
            some = ", ".join(missing[:20]) + (", ..." if len(missing) > 20 else "")
            raise ConfigError(f"the checkpoint lacks {len(missing)} tensors: {some}")
        if self.spec.tied and self.stage.heads:
            self._head = self._tied_head()
        self._extra_head = None
        device = self._layers[0].norm_in.value.device
        self._rope = self.spec.rope.on(device)
        self._window_rope = None if self.spec.window_rope is None else self.spec.window_rope.on(device)
        self._stack = self._stacked()

    def _stacked(self) -> Stack | None:
        spec = self.spec.attention
        layers = [weights for layer in self._layers if (weights := layer.weights) is not None]
        if not isinstance(spec, GqaSpec) or len(layers) < len(self._layers) or self._tp_group is not None:
            return None
        return stack(self._slots.ops, layers, heads=spec.num_heads, kv_heads=spec.num_kv_heads,
                     head_dim=spec.head_dim, eps=self.spec.norm_eps)

    def _tied_head(self) -> Callable[[Tensor], Tensor]:
        """As transformers: an explicit head that differs from the embedding is used."""
        head, table = self._extra_head, self._embed.value
        if head is None or (isinstance(head, Packed) and isinstance(table, Packed) and head.equals(table)) \
                or (isinstance(head, Tensor) and isinstance(table, Tensor) and torch.equal(head, table)):
            head = table
        words = self.stage.tp_rank.evenly(self.spec.vocab_size)
        return self._slots.pack(head if words.size == words.of else head[words.range], None)

    def forward(self, ids_T: Tensor, positions_T: Tensor, attend: Attend) -> Tensor:
        return self.norm(self.layers(self.embed(ids_T), positions_T, attend))

    def embed(self, ids_T: Tensor) -> Boundary:
        h_TD = self._embed(ids_T)
        if self.spec.embed_scale != 1.0:            # as transformers, which rounds it
            h_TD = h_TD * float(torch.tensor(self.spec.embed_scale, dtype=self.dtype))
        return Boundary(h_TD, None, own_TX=None if self._token_inputs is None else self._token_inputs(ids_T, h_TD))

    def layers(self, x: Boundary, positions_T: Tensor, attend: Attend) -> Boundary:
        cos_T1H, sin_T1H = near = far = self._rope.angles(positions_T, self.dtype)
        attend = self._grown(attend, positions_T)
        first, tapped = self.stage.first, [*x.tapped]
        taps = [index - first for index in self._taps if first <= index < self.stage.end]
        if (self._stack is not None and not taps and isinstance(attend, AttendsPaged)
                and (paged := attend.paged()) is not None):
            x = Boundary(x.h_TD, self._stack(x.h_TD, x.delta_TD, cos_T1H, sin_T1H, paged))
            return self._with_taps(x, tapped)
        if self._window_rope is not None:
            near = self._window_rope.angles(positions_T, self.dtype)
        own_TX, width = x.own_TX, self.spec.token_width
        for index, layer in enumerate(self._layers):
            if index in taps:
                tapped.append(x.h_TD.clone() if x.delta_TD is None else x.h_TD + x.delta_TD)
            if own_TX is not None:
                x = x._replace(own_TX=own_TX[:, index * width:(index + 1) * width])
            x = layer(x, *(near if layer.windowed else far), attend)
        if own_TX is not None and not self.stage.heads:
            x = x._replace(own_TX=own_TX[:, len(self._layers) * width:].contiguous())
        return self._with_taps(x, tapped)

    def _grown(self, attend: Attend, positions_T: Tensor) -> Attend:
        spec = self.spec.attention
        if not spec.growth:
            return attend
        turns_T = torch.floor(positions_T.float() / spec.growth_length)
        growth_T11 = (1 + spec.growth * torch.log(1 + turns_T))[:, None, None].to(self.dtype)
        return Grown(attend, growth_T11)

    def _with_taps(self, x: Boundary, tapped: Sequence[Tensor]) -> Boundary:
        """For the next stage, or kept for what drafts here."""
        if self.stage.heads:
            self._tapped = dict(zip(self._taps, tapped, strict=True))
        return x if self.stage.heads else x._replace(tapped=tuple(tapped))

    def tap(self, layers: tuple[int, ...]) -> None:
        self._taps = sorted({*layers})

    def take_drafts(self, drafts: Drafts) -> None:
        assert self._draft is None and self.stage.heads
        self._draft, self.drafting, self.drafter = drafts, drafts.reads, drafts.name
        self.tap(drafts.taps)
        self.groups = (*self.groups, *drafts.groups)

    def made(self, hidden_TD: Tensor) -> Tensor:
        assert self._draft is not None, "nothing drafts"
        return self._draft.made(hidden_TD, [self._tapped[index] for index in self._draft.taps])

    def guess(self, hidden_BD: Tensor) -> tuple[Tensor, Tensor]:
        assert self._draft is not None, "nothing drafts"
        return self._draft.guess(hidden_BD, self.logits)

    def draft(self, ids_T: Tensor, hidden_TD: Tensor, positions_T: Tensor, attend: Attend) -> Tensor:
        assert self._draft is not None, "nothing drafts"
        cos_T1H, sin_T1H = (self._draft.rope or self._rope).angles(positions_T, self.dtype)
        return self._draft(self.embed(ids_T).h_TD, hidden_TD, cos_T1H, sin_T1H, attend)

    def queries(self, q_BNH: Tensor) -> Tensor:
        spec, tp_rank = self.spec.attention, self.stage.tp_rank
        assert isinstance(spec, GqaSpec) and self._tp_group is not None
        own, head = tp_rank.queries(spec.num_heads, spec.num_kv_heads), tp_rank.kv_heads(spec.num_kv_heads)
        all_BNH = q_BNH.new_zeros(len(q_BNH), spec.num_heads, q_BNH.shape[2])
        all_BNH[:, own.range] = q_BNH
        self._tp_group.all_reduce(all_BNH.view(len(q_BNH), -1))  # with zeros: nothing is rounded
        return all_BNH[:, head.of_each(spec.num_heads // spec.num_kv_heads).range].contiguous()

    def norm(self, x: Boundary) -> Tensor:
        return self._slots.ops.norm(x.h_TD, x.delta_TD, self._norm.value, self.spec.norm_eps)

    def logits(self, hidden_BD: Tensor) -> Tensor:
        return self.head(hidden_BD).float()

    def head(self, hidden_BD: Tensor) -> Tensor:
        logits_BV = self._head(hidden_BD)
        if self._tp_group is not None:
            logits_BV = self._tp_group.all_gather(logits_BV, self.vocab_size)
        if self.spec.logit_divisor != 1.0:
            logits_BV = logits_BV.float() / self.spec.logit_divisor
        if cap := self.spec.logit_cap:
            logits_BV = torch.tanh(logits_BV.float() / cap) * cap
        return logits_BV

    def cuts(self) -> Iterator[tuple[str, tuple[Cut, ...]]]:
        """(name, what is kept of each dimension) of every tensor that `load` expects, in the order of the
        model."""
        return self._slots.cuts()
