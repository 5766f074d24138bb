"""The layer behind the last of some checkpoints, that says the token after the next (multi-token prediction).

It takes what the model made of one token and the token that follows: entry p of its KV is of (hidden p-1,
token p), so that its pages depend on their own tokens and those before, as the model's do.

    T tokens of the step   D model dim
Source: DeepSeek-V3, arXiv:2412.19437 section 2.2
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from penstock.model.base import Attend, Boundary, CacheShape, LocalLayer, Reads
from penstock.model.rope import Rope
from penstock.model.weights.slots import Slots


@dataclass(frozen=True, slots=True, kw_only=True)
class MTPNames:
    """Prefixes of its tensors in files."""

    layer: str
    joint: str              # linear [D, 2 D] over the two, each behind its norm: the token's embedding first
    norm_token: str
    norm_hidden: str
    norm_last: str


def deepseek_names(index: int) -> MTPNames:
    at = f"model.layers.{index}"
    return MTPNames(layer=at, joint=f"{at}.eh_proj", norm_token=f"{at}.enorm", norm_hidden=f"{at}.hnorm",
                    norm_last=f"{at}.shared_head.norm")


QWEN = MTPNames(layer="mtp.layers.0", joint="mtp.fc", norm_token="mtp.pre_fc_norm_embedding",
                norm_hidden="mtp.pre_fc_norm_hidden", norm_last="mtp.norm")


def groups_of(kv: CacheShape, hidden: int) -> tuple[CacheShape, ...]:
    """Its KV, and what the model made of the last token of each page: `hidden` numbers."""
    of_page = CacheShape(name="draft_hidden", layers=(LocalLayer(0),), num_kv_heads=1, head_dim=hidden,
                         planes=1, snapshot=True, drafts=True)
    return (replace(kv, name="draft", resident=True, drafts=True), of_page)


class Drafts(Protocol):
    """What drafts for a model. Embedding, and RoPE and head where it has none, are the model's.

    groups      its own, of a whole model       reads       of its layer
    taps        layers of the model before which it reads the residual stream
    rope        None: as the model's
    """

    name: str
    groups: tuple[CacheShape, ...]
    reads: Reads
    taps: tuple[int, ...]
    rope: Rope | None

    def made(self, hidden_TD: Tensor, tapped: Sequence[Tensor]) -> Tensor:
        """[T, D], of each token what the entry of the next one is made of. hidden_TD: behind the model's last
        norm; tapped: [T, D] each."""
        ...

    def __call__(self, token_TD: Tensor, hidden_TD: Tensor, cos_T1H: Tensor, sin_T1H: Tensor,
                 attend: Attend) -> Tensor:
        """token_TD: as embedded; hidden_TD: of the token before each, as `made`. Returns what `guess` reads,
        and the hidden_TD of the draft that comes next."""
        ...

    def guess(self, hidden_BD: Tensor, logits: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """The logit of the likeliest token and its id, [B] each. logits: the model's head."""
        ...


class DraftLayer:
    """`Drafts` by a layer of the model. Its hidden states are the model's, behind the last norm."""

    name = "mtp"

    def __init__(self, slots: Slots, names: MTPNames, hidden: int, eps: float, plus: float,
                 layer: Callable[[Boundary, Tensor, Tensor, Attend], Boundary], kv: CacheShape,
                 reads: Reads) -> None:
        """hidden, eps, plus: as `transformer.Spec`; layer: one as the model's, under its own name, with this
        KV and attention."""
        self._ops, self._eps, self.layer = slots.ops, eps, layer
        self.groups, self.reads = groups_of(kv, hidden), reads
        self.taps: tuple[int, ...] = ()
        self.rope: Rope | None = None
        self.norm_token, self.norm_hidden, self.norm_last = (
            slots.vector(f"{name}.weight", (hidden,), plus=plus)
            for name in (names.norm_token, names.norm_hidden, names.norm_last))
        self.joint = slots.linear([names.joint], [hidden], 2 * hidden, False)

    def made(self, hidden_TD: Tensor, tapped: Sequence[Tensor]) -> Tensor:
        return hidden_TD

    def guess(self, hidden_BD: Tensor, logits: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        best_B, id_B = logits(hidden_BD).max(1)
        return best_B, id_B

    def __call__(self, token_TD: Tensor, hidden_TD: Tensor, cos_T1H: Tensor, sin_T1H: Tensor,
                 attend: Attend) -> Tensor:
        """Return hidden_TD after the layer's last norm, see `Drafts`."""
        ops, eps = self._ops, self._eps
        both = [ops.norm(x_TD, None, norm.value, eps) for x_TD, norm in (
            (token_TD, self.norm_token), (hidden_TD, self.norm_hidden))]
        x = self.layer(Boundary(self.joint(torch.cat(both, 1)), None), cos_T1H, sin_T1H, attend)
        return ops.norm(x.h_TD, x.delta_TD, self.norm_last.value, eps)
