"""The blocks of a decoder layer: attention with one fused projection, the gated MLP.

They own weights and order of operations; which blocks a model has is the family's business.

    T tokens   D model dim   N query heads   K KV heads   M = N + K   H head dim   I MLP width
    C planes: k, v   S chosen tokens   Y chosen blocks
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.fused.layer import LayerWeights
from penstock.model.base import Attend, CacheShape, GlobalLayer, LocalLayer, Reads, Selector, Source, Stage
from penstock.model.parts import Cut, TpRank
from penstock.model.weights.slots import Slots


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockIndex:
    """Index heads of `head_dim`, one for each KV head, and one indexer key a token, for all of them: a query reads the
    `top_k` blocks of `block` tokens with the best keys, of these always the `last` up to its own. `layers`: that have
    them. Source: MiniMax-M3, `sparse_attention_config`."""

    num_heads: int
    head_dim: int
    block: int
    top_k: int
    last: int
    layers: frozenset[GlobalLayer]

    @property
    def selector(self) -> Selector:
        """Blocks that are always kept as tokens: of `last` blocks the first token of the first one is enough."""
        return Selector(group="index", score="max", block=self.block, top_k=self.top_k, per_head=True,
                        last=(self.last - 1) * self.block + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class GqaSpec:
    """`scale`, `softcap`: of the scores. `sinks`: a learned logit of each query head, which counts in the sum
    of weights. `qk_norm`: RMS norm of every query and key head, before RoPE, with learned weights, to which
    `norm_plus` is added. `rotated`: dims of a head that RoPE turns, the first ones; 0: all. `gated`: what
    comes out is multiplied by the sigmoid of as much beside each head's query. `norm_width`: all query heads
    of a token are normed together, and all key heads, with a weight for each dim of each head. `growth`: a
    query at position p is multiplied by 1 + growth ln(1 + floor(p / growth_length)) after RoPE; 0: by 1.
    `value_norm`: RMS norm of every value head, without weights. `one_kv`: values are what the key's projection
    makes, before norm and RoPE. `index`: of layers that select; None: all read all."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    softcap: float = 0.0
    sinks: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False
    norm_plus: float = 0.0
    rotated: int = 0
    gated: bool = False
    norm_width: bool = False
    growth: float = 0.0
    growth_length: int = 1
    value_norm: bool = False
    one_kv: bool = False
    index: BlockIndex | None = None

    ops: ClassVar = ("paged_attention",)

    @property
    def rope_dim(self) -> int:
        return self.head_dim

    def reads(self, tp_rank: TpRank, index: GlobalLayer, source: LocalLayer) -> Reads:
        """Return how layer `index` of the model attends, which reads the entries of `source`."""
        selector = self.index.selector if self.index is not None and index in self.index.layers else None
        return Reads(source=Source(source, selector), num_heads=tp_rank.queries(self.num_heads, self.num_kv_heads).size,
                     scale=self.scale, softcap=self.softcap, sinks=self.sinks,
                     shared=tp_rank.size > self.num_kv_heads)

    def groups(self, stage: Stage, windows: Sequence[int]) -> tuple[CacheShape, ...]:
        """One for the layers of each window, first those that see all; of a part of the model perhaps without
        layers. windows: of all layers; (): all see all. Of a model with layers that select: one for these, one for
        their indexer keys, and one for the others, which stays on the device."""
        kinds = sorted(set(windows)) or [0]
        assert sum(map(bool, kinds)) <= 1, f"windows of {kinds} tokens"
        shapes = tuple(CacheShape(
            name="window" if window else "full",
            layers=tuple(LocalLayer(i - stage.first) for i in range(stage.first, stage.end)
                         if not windows or windows[i] == window),
            num_kv_heads=stage.tp_rank.kv_heads(self.num_kv_heads).size,
            head_dim=self.head_dim,
            owned=stage.tp_rank.owns(self.num_kv_heads),
            window=window,
        ) for window in kinds)
        if self.index is None:
            return shapes
        [full] = shapes
        selects = tuple(i for i in full.layers if i + stage.first in self.index.layers)
        keys = CacheShape(name="index", layers=selects, num_kv_heads=1, head_dim=self.head_dim, planes=1,
                          selector=True, owned=stage.tp_rank.owns(1))
        others = tuple(i for i in full.layers if i not in selects)
        return (replace(full, layers=selects), keys,
                *([replace(full, name="dense", layers=others, resident=True)] if others else []))

    def build(
        self, slots: Slots, prefix: str, index: GlobalLayer, local: LocalLayer, hidden: int, eps: float,
        writes: bool = True,
    ) -> Attention:
        """writes: False: the layer reads the KV of an earlier one, and has queries only."""
        own = self.index if self.index is not None and index in self.index.layers else None
        return Attention(slots, prefix, local, hidden, replace(self, index=own), eps, writes=writes)


class Mixes(Protocol):
    """The first half of a layer: attention, whatever it writes."""

    def __call__(
        self, x_TD: Tensor, chosen_TS: Tensor | None, cos_T1H: Tensor, sin_T1H: Tensor, attend: Attend
    ) -> tuple[Tensor, Tensor | None]:
        """out_TD, and what `Attend.select` has chosen for the layers behind."""


class Mixer(Protocol):
    """The second half of a layer: MLP or experts."""

    def __call__(self, x_TD: Tensor) -> Tensor:
        ...


class Grown:
    """`Attend` whose queries are multiplied first, each by a number of its position [T, 1, 1]."""

    def __init__(self, attend: Attend, growth_T11: Tensor) -> None:
        self._attend, self._growth_T11 = attend, growth_T11

    def __call__(
        self, layer: LocalLayer, q_TNH: Tensor, kv_TCKH: Tensor | None, chosen_TKY: Tensor | None = None,
        sinks_N: Tensor | None = None,
    ) -> Tensor:
        return self._attend(layer, q_TNH * self._growth_T11, kv_TCKH, chosen_TKY, sinks_N)

    def select(self, layer: LocalLayer, q_TIJ: Tensor, weight_TI: Tensor | None, key_TJ: Tensor) -> Tensor:
        return self._attend.select(layer, q_TIJ, weight_TI, key_TJ)


class Attention:
    def __init__(
        self, slots: Slots, prefix: str, layer: LocalLayer, hidden: int, spec: GqaSpec,
        eps: float, inputs: int = 0, writes: bool = True,
    ) -> None:
        """inputs: width of what comes in; 0: `hidden`, as what goes out. writes: as of `GqaSpec.build`."""
        self.layer = layer
        self.eps = eps
        self.ops = slots.ops
        heads = slots.tp_rank.queries(spec.num_heads, spec.num_kv_heads)
        q_rows = heads.of_each(spec.head_dim)
        kv_rows = slots.tp_rank.kv_heads(spec.num_kv_heads).of_each(spec.head_dim)
        self.tp_group, self.owns_kv = slots.tp_group, slots.tp_rank.owns(spec.num_kv_heads)
        self.norm_widths = (q_rows.of, kv_rows.of)
        self.spec = spec = replace(spec, num_heads=heads.size,
                                   num_kv_heads=kv_rows.size // spec.head_dim)
        self.num_rotated = spec.num_heads + spec.num_kv_heads * writes
        self.writes = writes
        self.sinks = slots.vector(f"{prefix}.sinks", (heads,), dtype=torch.float32) if spec.sinks else None
        num_all = self.num_rotated + spec.num_kv_heads * writes
        self.num_index = 0 if spec.index is None else spec.num_kv_heads + 1
        assert not self.num_index or (writes and not spec.gated), "layers that select write KV, and have no gates"
        self.qkv_shape = (-1, num_all - spec.num_kv_heads * (writes and spec.one_kv) + spec.num_heads * spec.gated
                          + self.num_index, spec.head_dim)
        self.kv_shape = (-1, 2, spec.num_kv_heads, spec.head_dim)
        self.kv_at = slice(spec.num_heads, num_all)
        order, head_order = _order(spec)
        parts = [("q", q_rows.of_each(1 + spec.gated)),
                 *((part, kv_rows) for part in (("k",) if spec.one_kv else ("k", "v")) if writes),
                 *((("index_q", kv_rows), ("index_k", spec.head_dim)) if self.num_index else ())]
        self.qkv = slots.linear([f"{prefix}.{part}_proj" for part, _ in parts], [rows for _, rows in parts],
                                inputs or hidden, spec.qkv_bias, order=order)
        if not writes:                  # files may have them all the same
            for part in ("k", "v"):
                slots.foreign(f"{prefix}.{part}_proj.weight", (kv_rows.of, inputs or hidden))
                slots.foreign(f"{prefix}.{part}_norm.weight", (spec.head_dim,))
        self.out = slots.linear([f"{prefix}.o_proj"], [hidden], q_rows, spec.out_bias)
        if spec.qk_norm:
            norms = [slots.vector(
                f"{prefix}.{name}_norm.weight", (rows if spec.norm_width else spec.head_dim,),
                plus=spec.norm_plus, order=_of_heads(head_order, rows.size, spec))
                for name, rows in (("q", q_rows), ("k", kv_rows))[:1 + writes]]
            self.q_norm, self.k_norm = norms[0], norms[-1]
        if self.num_index:
            self.index_norms = [slots.vector(f"{prefix}.index_{name}_norm.weight", (spec.head_dim,),
                                             plus=spec.norm_plus, order=head_order) for name in "qk"]

    def __call__(
        self, x_TD: Tensor, chosen_TS: Tensor | None, cos_T1H: Tensor, sin_T1H: Tensor, attend: Attend
    ) -> tuple[Tensor, Tensor | None]:
        """out_TD, and nothing chosen. q and kv given to `attend` are views of one tensor, not dense in T."""
        spec, num_heads = self.spec, self.spec.num_heads
        qkv = self.qkv(x_TD).view(self.qkv_shape)
        if self.writes and spec.one_kv:         # a copy of the keys: a cache entry has both, and they differ
            qkv = torch.cat((qkv, qkv[:, num_heads:]), 1)
        if self.writes and spec.value_norm:
            v_TKH = qkv[:, self.num_rotated:]
            v_TKH.copy_(F.rms_norm(v_TKH, (spec.head_dim,), None, self.eps))
        qk_TMH = qkv[:, : self.num_rotated]
        if self.spec.norm_width:
            self._norm_together(qk_TMH)
            self.ops.rotate(qk_TMH, cos_T1H, sin_T1H)
        elif self.spec.qk_norm:
            self.ops.norm_rotate(qk_TMH, cos_T1H, sin_T1H, self.q_norm.value, self.k_norm.value, num_heads,
                                 self.eps)
        else:
            self.ops.rotate(qk_TMH, cos_T1H, sin_T1H)
        kv_TCKH = qkv[:, self.kv_at].view(self.kv_shape) if self.writes else None
        chosen_TKY = self._select(qkv[:, -self.num_index:], cos_T1H, sin_T1H, attend) if self.num_index else None
        out_TNH = attend(self.layer, qk_TMH[:, :num_heads], kv_TCKH, chosen_TKY,
                         sinks_N=None if self.sinks is None else self.sinks.value)
        if self.spec.gated:
            out_TNH = out_TNH * qkv[:, self.kv_at.stop:].sigmoid()
        return self.out(out_TNH.flatten(1)), None

    def _select(self, index_TLH: Tensor, cos_T1H: Tensor, sin_T1H: Tensor, attend: Attend) -> Tensor:
        """chosen_TKY. index: L = K + 1, queries of the index heads and the key."""
        q_norm, k_norm = self.index_norms
        self.ops.norm_rotate(index_TLH, cos_T1H, sin_T1H, q_norm.value, k_norm.value, self.num_index - 1, self.eps)
        return attend.select(self.layer, index_TLH[:, :-1], None, index_TLH[:, -1])

    def _norm_together(self, qk_TMH: Tensor) -> None:
        """Norm all query heads of a token together, in place, and all its key heads. Tensor-parallel ranks
        add the squares of their heads: two numbers a token and layer."""
        parts = qk_TMH[:, :self.spec.num_heads], qk_TMH[:, self.spec.num_heads:]
        squares_T2 = torch.stack([part.float().square().sum((1, 2)) for part in parts], 1)
        if self.tp_group is not None:
            squares_T2[:, 1] *= self.owns_kv            # a head that several ranks have counts once
            self.tp_group.all_reduce(squares_T2)
        for part, norm, square_T, width in zip(parts, (self.q_norm, self.k_norm), squares_T2.unbind(1),
                                               self.norm_widths, strict=True):
            scale_T = torch.rsqrt(square_T / width + self.eps)
            normed = (part.float() * scale_T[:, None, None]).to(part.dtype)
            part.copy_(normed * norm.value.view(-1, self.spec.head_dim))

    def beside(self, norm_in: Tensor, norm_mlp: Tensor, mlp: GatedMLP) -> LayerWeights:
        """The weights of the layer that consists of these and this."""
        normed = self.spec.qk_norm
        return LayerWeights(
            norm_in=norm_in, qkv=self.qkv.op, q_norm=self.q_norm.value if normed else None,
            k_norm=self.k_norm.value if normed else None, out=self.out.op, norm_mlp=norm_mlp,
            gate_up=mlp.gate_up.op, down=mlp.down.op)


def _order(spec: GqaSpec) -> tuple[Tensor | None, Tensor | None]:
    """Rows of the fused projection so that gates are behind all heads, and dims of a head so that each that
    is turned has its partner half a head away; None: as they come."""
    dim, half, turned = spec.head_dim, spec.head_dim // 2, (spec.rotated or spec.head_dim) // 2
    if turned == half and not spec.gated:
        return None, None
    head = torch.cat((torch.arange(turned), torch.arange(2 * turned, turned + half),
                      torch.arange(turned, 2 * turned), torch.arange(turned + half, dim)))
    each, heads = dim * (1 + spec.gated), torch.arange(spec.num_heads)[:, None]
    q = heads * each + head
    kv = spec.num_heads * each + torch.arange(2 * spec.num_kv_heads * dim).view(-1, dim)
    kv[:spec.num_kv_heads] = kv[:spec.num_kv_heads, head]
    gates = heads * each + dim + torch.arange(dim) if spec.gated else q[:0]
    order = torch.cat((q.flatten(), kv.flatten(), gates.flatten()))
    if spec.index is not None:              # index heads and their key lie behind all
        order = torch.cat((order, (len(order) + torch.arange(spec.num_kv_heads + 1)[:, None] * dim + head).flatten()))
    return order, head if turned < half else None


def _of_heads(order: Tensor | None, rows: int, spec: GqaSpec) -> Tensor | None:
    """Return the order of a norm's weights: those of one head, or of all of them one after the other."""
    if order is None or not spec.norm_width:
        return order
    return (torch.arange(0, rows, spec.head_dim)[:, None] + order).flatten()


def whole(tensor: Tensor) -> Tensor:
    """Rows as files have them, for `Slots.bundle`."""
    return tensor


def bundle_mlp(slots: Slots, prefix: str, hidden: int, width: int) -> None:
    """Granite's names of the weights of a `GatedMLP`: gate and up [2 width, hidden] are one tensor."""
    both = [f"{prefix}.{part}_proj.weight" for part in ("gate", "up")]
    slots.bundle(f"{prefix}.input_linear.weight", both, (2 * width, hidden), whole)
    slots.bundle(f"{prefix}.output_linear.weight", [f"{prefix}.down_proj.weight"], (hidden, width), whole)


class PlainMLP:
    """down(relu(up(x)) ** 2)."""

    def __init__(self, slots: Slots, prefix: str, hidden: int, width: Cut, bias: bool) -> None:
        self.up = slots.linear([f"{prefix}.up_proj"], [width], hidden, bias)
        self.down = slots.linear([f"{prefix}.down_proj"], [hidden], width, bias)

    def __call__(self, x_TD: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x_TD)).square_())


class TokenInputs:
    """What each layer adds of the token itself (per-layer embeddings, of Gemma 4): rows that are looked up by its
    id, and a product of its embedding. Whole on every TP rank."""

    NAMES = ("model.embed_tokens_per_layer", "model.per_layer_model_projection", "model.per_layer_projection_norm")

    def __init__(self, slots: Slots, hidden: int, vocab_size: int, layers: int, width: int, eps: float) -> None:
        """width: of what one layer gets."""
        table, projection, norm = self.NAMES
        self.ops, self.eps, self.width, self.hidden = slots.ops, eps, width, hidden
        self.table = slots.table(f"{table}.weight", (vocab_size, layers * width))
        self.projection = slots.linear([projection], [layers * width], hidden, False)
        self.norm = slots.vector(f"{norm}.weight", (width,))
        self.scale = float(torch.tensor(width ** 0.5, dtype=slots.dtype))       # as transformers, which rounds it

    def __call__(self, ids_T: Tensor, h_TD: Tensor) -> Tensor:
        """[T, layers * width]. h_TD: the embedding, as the first layer gets it."""
        both_TX = self.projection(h_TD).mul_(self.hidden ** -0.5)
        both_TX = self.ops.norm(both_TX.view(-1, self.width), None, self.norm.value, self.eps).view(both_TX.shape)
        return both_TX.add_(self.table(ids_T) * self.scale).mul_(0.5 ** 0.5)


class TokenInput:
    """What one layer makes of its part of `TokenInputs`, gated by the residual stream."""

    def __init__(self, slots: Slots, prefix: str, hidden: int, width: int, eps: float) -> None:
        self.ops, self.eps = slots.ops, eps
        self.gate = slots.linear([f"{prefix}.per_layer_input_gate"], [width], hidden, False)
        self.out = slots.linear([f"{prefix}.per_layer_projection"], [hidden], width, False)
        self.norm = slots.vector(f"{prefix}.post_per_layer_input_norm.weight", (hidden,))

    def __call__(self, h_TD: Tensor, own_TW: Tensor) -> Tensor:
        """What is added to h_TD."""
        gated_TW = F.gelu(self.gate(h_TD), approximate="tanh") * own_TW
        return self.ops.norm(self.out(gated_TW), None, self.norm.value, self.eps)


class GatedMLP:
    """down(silu(gate(x)) * up(x)), gate and up in one projection. `gate`: in place of silu and product, makes
    [T, I] of [T, 2I]. `adds`: as of `Slots.linear`, the bias of down."""

    def __init__(self, slots: Slots, prefix: str, hidden: int, width: Cut, bias: bool,
                 gate: Callable[[Tensor], Tensor] | None = None, adds: bool | None = None) -> None:
        self.own_gate = gate
        self.gate = slots.ops.gate if gate is None else gate
        self.gate_up = slots.linear(
            [f"{prefix}.gate_proj", f"{prefix}.up_proj"], [width, width], hidden, bias
        )
        self.down = slots.linear([f"{prefix}.down_proj"], [hidden], width, bias, adds=adds)

    def __call__(self, x_TD: Tensor) -> Tensor:
        return self.down(self.gate(self.gate_up(x_TD)))
