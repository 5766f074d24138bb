"""A layer from a folder of its own that drafts for a model: EAGLE-3, with the hidden states of three layers.

Entry p of its KV is of (what the model made of token p - 1, token p), as `model.mtp` has it. Its head knows
some words of the model's vocabulary.

    T tokens of the step   B rows   D model dim   V words of its head
Source: EAGLE-3, arXiv:2503.01840 section 3; tensors as its makers' files have them
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from penstock.config.base.errors import ConfigError
from penstock.kernels.fused.layer import LayerOps
from penstock.kernels.types.packed import Packed
from penstock.model.base import Attend, CacheShape, GlobalLayer, LocalLayer, Stage, TpGroup
from penstock.model.families.common import read_attention
from penstock.model.layers import Attention, GatedMLP, GqaSpec
from penstock.model.mtp import groups_of
from penstock.model.parts import ONE, TpRank
from penstock.model.rope import Rope, read_rope
from penstock.model.spec import Spec
from penstock.model.weights.fields import Fields
from penstock.model.weights.slots import LinearFactory, Slots

LAYER = LocalLayer(0)
UNUSED = ("t2d", "embed_tokens.weight")         # the words again; as the model's
FILES = "layers.0.", "midlayer."                # newer files' name of the layer


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleSpec:
    """Its shape, and before which of the model's layers it taps the residual stream."""

    hidden: int
    width: int
    words: int
    eps: float
    rope: Rope
    attention: GqaSpec
    taps: tuple[int, int, int]


def read_eagle(config: dict[str, Any], of: Spec, name: str) -> EagleSpec:
    """Read a folder's config.json, for this model. Raises ConfigError: it is for another, or of other kind."""
    fields = Fields(config, "eagle3")
    for key, have in (("hidden_size", of.hidden), ("vocab_size", of.vocab_size)):
        if fields.size(key) != have:
            raise ConfigError(f"--speculative-model {name}: its {key} is {fields.size(key)}, the model's is "
                              f"{have}: give a folder that was made for this model")
    for key, only in (("num_hidden_layers", 1), ("norm_before_residual", False), ("norm_before_fc", False)):
        if fields.values.get(key, only) != only:
            fields.refuse(key, f"supported: {only!r}")
    words = fields.size("draft_vocab_size", of.vocab_size)
    if words > of.vocab_size:
        fields.refuse("draft_vocab_size", f"at most the vocabulary's {of.vocab_size}")
    given = fields.mapping("eagle_config").get("eagle_aux_hidden_state_layer_ids")
    last = of.num_layers
    taps = tuple(given) if isinstance(given, list) else (2, last // 2, last - 3)
    if len(taps) != 3 or not all(type(i) is int and 0 <= i < last for i in taps):
        raise ConfigError(f"--speculative-model {name}: it reads what comes before layers {list(taps)}, and "
                          f"the model has layers 0 to {last - 1}")
    attention = read_attention(fields, kv_heads=None, qkv_bias=fields.flag("attention_bias"), out_bias=False)
    return EagleSpec(hidden=of.hidden, width=fields.size("intermediate_size"), words=words,
                     eps=fields.number("rms_norm_eps", 1e-6), rope=read_rope(fields, attention.head_dim),
                     attention=attention, taps=(taps[0], taps[1], taps[2]))


class Eagle3:
    """`mtp.Drafts` of a folder. Its weights: building allocates nothing, they come with `load`."""

    name = "eagle3"

    def __init__(self, spec: EagleSpec, dtype: torch.dtype, linear: LinearFactory, ops: LayerOps,
                 tp_rank: TpRank = ONE, tp_group: TpGroup | None = None) -> None:
        """tp_rank, tp_group:ks: of the model's stage, as `Transformer` takes them."""
        self.spec, self._ops, self._tp_group = spec, ops, tp_group
        self.taps: tuple[int, ...] = spec.taps
        self._slots = slots = Slots(dtype, linear, ops, tp_rank=tp_rank)
        hidden, at = spec.hidden, "midlayer"
        [kv] = spec.attention.groups(Stage(GlobalLayer(0), GlobalLayer(1), embeds=False, heads=False), ())
        self.groups: tuple[CacheShape, ...] = groups_of(kv, hidden)
        self.reads = replace(spec.attention.reads(tp_rank, GlobalLayer(0), LAYER), dtype=dtype)
        self.joint = slots.linear(["fc"], [hidden], 3 * hidden, False)
        self.norm_token, self.norm_hidden, self.norm_mlp, self.norm_last = (
            slots.vector(f"{name}.weight", (hidden,)) for name in (
                f"{at}.input_layernorm", f"{at}.hidden_norm", f"{at}.post_attention_layernorm", "norm"))
        self.layer = Attention(slots, f"{at}.self_attn", LAYER, hidden, spec.attention, spec.eps,
                               inputs=2 * hidden)
        self.mlp = GatedMLP(slots, f"{at}.mlp", hidden, tp_rank.columns(spec.width), False)
        self.head = slots.linear(["lm_head"], [tp_rank.evenly(spec.words)], hidden, False)
        self.rope: Rope | None = None               # by `finish`
        self.offset_V: Tensor | None = None         # of each word: what to add for the model's id of it

    def wants(self, name: str) -> bool:
        return name not in UNUSED

    def load(self, name: str, tensor: Tensor | Packed) -> None:
        """Raises ConfigError on an unknown name or a wrong shape."""
        if name != "d2t":
            newer, here = FILES
            self._slots.load(here + name[len(newer):] if name.startswith(newer) else name, tensor)
            return
        words = self.spec.words
        if not isinstance(tensor, Tensor) or tensor.dtype != torch.int64 or tensor.shape != (words,):
            raise ConfigError(f"the draft's 'd2t' is not {words} int64")
        self.offset_V = tensor.clone()

    def finish(self) -> None:
        """Raises ConfigError that lists what never came."""
        lacking = [*self._slots.missing(), *(["d2t"] if self.offset_V is None else [])]
        if lacking:
            raise ConfigError(f"the draft lacks {len(lacking)} tensors: {', '.join(lacking[:20])}")
        self.rope = self.spec.rope.on(self.norm_last.value.device)

    @property
    def num_bytes(self) -> int:
        return self._slots.num_bytes

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Return the shape of every weight but d2t."""
        return ((name, tuple(cut.of for cut in cuts)) for name, cuts in self._slots.cuts())

    def made(self, hidden_TD: Tensor, tapped: Sequence[Tensor]) -> Tensor:
        return self.joint(torch.cat(list(tapped), 1))

    def __call__(self, token_TD: Tensor, hidden_TD: Tensor, cos_T1H: Tensor, sin_T1H: Tensor,
                 attend: Attend) -> Tensor:
        """Return hidden_TD before the layer's last norm, see `mtp.Drafts`."""
        ops, eps, out_TD = self._ops, self.spec.eps, hidden_TD.clone()
        both = [ops.norm(x_TD, None, norm.value, eps) for x_TD, norm in (
            (token_TD, self.norm_token), (hidden_TD, self.norm_hidden))]
        delta_TD, _ = self.layer(torch.cat(both, 1), None, cos_T1H, sin_T1H, attend)
        if self._tp_group is not None:
            self._tp_group.all_reduce(delta_TD)
        fed_TD = self.mlp(ops.norm(out_TD, delta_TD, self.norm_mlp.value, eps))     # adds delta to out
        if self._tp_group is not None:
            self._tp_group.all_reduce(fed_TD)
        return out_TD + fed_TD

    def guess(self, hidden_BD: Tensor, logits: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        assert self.offset_V is not None
        own_BV = self.head(self._ops.norm(hidden_BD, None, self.norm_last.value, self.spec.eps))
        if self._tp_group is not None:
            own_BV = self._tp_group.all_gather(own_BV, self.spec.words)
        best_B, word_B = own_BV.float().max(1)
        return best_B, word_B + self.offset_V[word_B]
