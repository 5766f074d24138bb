"""The decoder that all supported families share: pre-norm layers, RoPE, full causal attention.

A family says what differs in a `Spec`. Knows tensors and names, neither rows nor where KV lives.

    T tokens of the step   B sampled rows   D model dim   V vocabulary
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.config.errors import ConfigError
from penstock.kernels.layer import LayerOps
from penstock.model.base import Attend, AttentionShape, KVShape
from penstock.model.layers import Attention, AttentionSpec, GatedMLP, Mixer
from penstock.model.moe import MoESpec, SparseMLP
from penstock.model.rope import Rope
from penstock.model.slots import LinearFactory, Slots, check_tensor

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """One model's shape. `tied`: the head is the embedding. `width`: of the MLP, dense layers."""

    vocab_size: int
    hidden: int
    num_layers: int
    width: int
    norm_eps: float
    tied: bool
    rope: Rope
    attention: AttentionSpec
    mlp_bias: bool = False
    moe: MoESpec | None = None


class Layer:
    def __init__(self, slots: Slots, index: int, spec: Spec) -> None:
        prefix, hidden = f"model.layers.{index}", spec.hidden
        self.ops, self.eps = slots.ops, spec.norm_eps
        self.norm_in = slots.vector(f"{prefix}.input_layernorm.weight", (hidden,))
        self.attention = Attention(
            slots, f"{prefix}.self_attn", index, hidden, spec.attention, self.eps
        )
        self.norm_mlp = slots.vector(f"{prefix}.post_attention_layernorm.weight", (hidden,))
        self.mlp: Mixer
        if spec.moe is not None and index in spec.moe.layers:
            self.mlp = SparseMLP(slots, f"{prefix}.mlp", hidden, spec.moe)
        else:
            self.mlp = GatedMLP(slots, f"{prefix}.mlp", hidden, spec.width, spec.mlp_bias)

    def __call__(
        self, h_TD: Tensor, delta_TD: Tensor | None, cos_T1H: Tensor, sin_T1H: Tensor,
        attend: Attend,
    ) -> Tensor:
        """Adds `delta` (of the layer before) and the attention's half to h in place; returns the
        MLP's half, for whoever norms h next: adding and norming are one operation."""
        x_TD = self.ops.norm(h_TD, delta_TD, self.norm_in.value, self.eps)
        delta_TD = self.attention(x_TD, cos_T1H, sin_T1H, attend)
        return self.mlp(self.ops.norm(h_TD, delta_TD, self.norm_mlp.value, self.eps))


class Transformer:
    """Implements `model.base.Model`. Building allocates nothing; weights come with `load`."""

    def __init__(
        self, spec: Spec, dtype: torch.dtype, linear: LinearFactory, ops: LayerOps
    ) -> None:
        self.spec = spec
        self.dtype = dtype
        self.kv = KVShape(
            num_layers=spec.num_layers,
            num_kv_heads=spec.attention.num_kv_heads,
            head_dim=spec.attention.head_dim,
        )
        self.attention = AttentionShape(
            num_heads=spec.attention.num_heads, scale=spec.attention.scale
        )
        self.vocab_size = spec.vocab_size
        self.max_position = spec.rope.max_position
        self._slots = slots = Slots(dtype, linear, ops)
        self._embed = slots.vector(EMBED, (spec.vocab_size, spec.hidden))
        self._layers = [Layer(slots, index, spec) for index in range(spec.num_layers)]
        self._norm = slots.vector("model.norm.weight", (spec.hidden,))
        self._head: Callable[[Tensor], Tensor]          # a tied head is packed by `finish`
        if not spec.tied:
            self._head = slots.linear(["lm_head"], [spec.vocab_size], spec.hidden, False)
        self._extra_head: Tensor | None = None

    def load(self, name: str, tensor: Tensor) -> None:
        if name.endswith(".rotary_emb.inv_freq"):
            return                      # old Llama files carry it; transformers recomputes it too
        if name == HEAD and self.spec.tied:
            check_tensor(name, tensor, (self.spec.vocab_size, self.spec.hidden))
            self._extra_head = tensor.to(self.dtype, copy=True)
            return
        self._slots.load(name, tensor)

    def finish(self) -> None:
        missing = self._slots.missing()
        if self.spec.tied and self._extra_head is not None and missing == [EMBED]:
            self._slots.load(EMBED, self._extra_head)       # tying is symmetric in transformers
            missing = []
        if missing:
            some = ", ".join(missing[:20]) + (", ..." if len(missing) > 20 else "")
            raise ConfigError(f"the checkpoint lacks {len(missing)} tensors: {some}")
        if self.spec.tied:
            self._head = self._tied_head()

    def _tied_head(self) -> Callable[[Tensor], Tensor]:
        """As transformers: an explicit head that differs from the embedding is used."""
        head, self._extra_head = self._extra_head, None
        if head is None or torch.equal(head, self._embed.value):
            head = self._embed.value
        return self._slots.pack(head, None)

    def forward(self, ids_T: Tensor, positions_T: Tensor, attend: Attend) -> Tensor:
        h_TD = F.embedding(ids_T, self._embed.value)
        cos_T1H, sin_T1H = self.spec.rope.angles(positions_T, self.dtype)
        delta_TD = None
        for layer in self._layers:
            delta_TD = layer(h_TD, delta_TD, cos_T1H, sin_T1H, attend)
        return self._slots.ops.norm(h_TD, delta_TD, self._norm.value, self.spec.norm_eps)

    def logits(self, hidden_BD: Tensor) -> Tensor:
        return self._head(hidden_BD).float()

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """(name, shape) of every tensor that `load` expects, in the order of the model."""
        return self._slots.shapes()
