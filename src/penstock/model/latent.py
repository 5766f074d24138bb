"""Latent attention (MLA) with a lightning indexer: DeepSeek-V3.2 and its kin.

A token leaves one latent row for all heads, and, in layers that have an indexer, one index key. Queries are
multiplied into the latent space (absorbed), in prefill as in decode: no layer ever expands the rows of its
context. Rotated parts are written de-interleaved, which the weights' rows are put in order for while loading.

    T tokens of the step   N query heads   D model dim   Q rank of queries   R rank of rows
    H = R + rope dim, a row   I index heads   J index head dim   S chosen tokens of a query
Source: DeepSeek-V2, arXiv:2405.04434 section 2.1; DeepSeek-V3.2-Exp technical report section 1.
"""
from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.model.base import Attend, AttentionShape, CacheShape, GlobalLayer, LocalLayer, Stage
from penstock.model.parts import Lane
from penstock.model.weights.slots import Slots

# Of the norms inside of attention: fixed in the family's code, whatever rms_norm_eps says.
INNER_EPS = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexSpec:
    """`topk`: tokens that each query attends to. `layers`: which have an indexer; the others take the
    choice of the last one before them. `interleaved`: how its rotated pairs lie in the checkpoint."""

    num_heads: int
    head_dim: int
    topk: int
    interleaved: bool
    layers: frozenset[GlobalLayer]


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSpec:
    """Ranks and widths of a head's parts. `bias`: of the projections from and to the model's width."""

    num_heads: int
    q_rank: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    scale: float
    bias: bool
    index: IndexSpec

    ops: ClassVar = ("index_select", "latent_attention")

    def shape(self, lane: Lane) -> AttentionShape:
        return AttentionShape(
            num_heads=lane.evenly(self.num_heads).size, scale=self.scale, latent_dim=self.kv_rank,
            topk=self.index.topk
        )

    def groups(self, stage: Stage) -> tuple[CacheShape, ...]:
        """Rows of every layer, index keys of those that have an indexer; the same on all lanes."""
        owned = stage.lane.owns(1)
        layers = [GlobalLayer(index) for index in range(stage.first, stage.end)]
        rows = CacheShape(
            name="latent", layers=tuple(LocalLayer(i - stage.first) for i in layers), num_kv_heads=1,
            head_dim=self.kv_rank + self.rope_dim, planes=1, owned=owned,
        )
        indexed = tuple(LocalLayer(i - stage.first) for i in layers if i in self.index.layers)
        keys = CacheShape(name="index", layers=indexed, num_kv_heads=1, head_dim=self.index.head_dim,
                          planes=1, selector=True, owned=owned)
        return (rows, keys) if indexed else (rows,)

    def build(
        self, slots: Slots, prefix: str, index: GlobalLayer, local: LocalLayer, hidden: int, eps: float
    ) -> LatentAttention:
        return LatentAttention(slots, prefix, local, hidden, self, index in self.index.layers)


def _halves(dim: int) -> Tensor:
    """Rows of a rotated part whose pairs are neighbours, put so that pairs lie half of it apart."""
    return torch.cat((torch.arange(0, dim, 2), torch.arange(1, dim, 2)))


class LatentAttention:
    def __init__(
        self, slots: Slots, prefix: str, local: LocalLayer, hidden: int, spec: LatentSpec, indexes: bool
    ) -> None:
        heads = slots.lane.evenly(spec.num_heads)
        self.spec = spec = replace(spec, num_heads=heads.size)
        self.layer, self.ops = local, slots.ops
        self.row_dim = spec.kv_rank + spec.rope_dim
        down_order = torch.arange(spec.q_rank + self.row_dim)
        down_order[spec.q_rank + spec.kv_rank:] = spec.q_rank + spec.kv_rank + _halves(spec.rope_dim)
        self.down = slots.linear(
            [f"{prefix}.q_a_proj", f"{prefix}.kv_a_proj_with_mqa"], [spec.q_rank, self.row_dim], hidden,
            spec.bias, order=down_order,
        )
        self.q_norm = slots.vector(f"{prefix}.q_a_layernorm.weight", (spec.q_rank,))
        self.kv_norm = slots.vector(f"{prefix}.kv_a_layernorm.weight", (spec.kv_rank,))
        # All heads' plain parts, then all heads' rotated parts: what is rotated must be dense.
        head = torch.arange(spec.num_heads)[:, None] * (spec.nope_dim + spec.rope_dim)
        plain = (head + torch.arange(spec.nope_dim)).flatten()
        turned = (head + spec.nope_dim + _halves(spec.rope_dim)).flatten()
        self.q_up = slots.linear(
            [f"{prefix}.q_b_proj"], [heads.of_each(spec.nope_dim + spec.rope_dim)], spec.q_rank, False,
            order=torch.cat((plain, turned)),
        )
        self.kv_up = slots.vector(
            f"{prefix}.kv_b_proj.weight",
            (heads.of_each(spec.nope_dim + spec.value_dim), spec.kv_rank),
        )
        self.out = slots.linear(
            [f"{prefix}.o_proj"], [hidden], heads.of_each(spec.value_dim), spec.bias
        )
        self.indexer = Indexer(slots, f"{prefix}.indexer", hidden, spec) if indexes else None

    def __call__(
        self, x_TD: Tensor, chosen_TS: Tensor | None, cos_T1H: Tensor, sin_T1H: Tensor, attend: Attend
    ) -> tuple[Tensor, Tensor | None]:
        """out_TD and the chosen positions, this layer's own or those that it was given."""
        spec, tokens = self.spec, len(x_TD)
        down = self.down(x_TD)
        residual_TQ = F.rms_norm(down[:, :spec.q_rank], (spec.q_rank,), self.q_norm.value, INNER_EPS)
        row_TH = down[:, spec.q_rank:]
        row_TH[:, :spec.kv_rank] = F.rms_norm(
            row_TH[:, :spec.kv_rank], (spec.kv_rank,), self.kv_norm.value, INNER_EPS
        )
        self.ops.rotate(row_TH[:, None, spec.kv_rank:], cos_T1H, sin_T1H)
        if self.indexer is not None:
            query = self.indexer(x_TD, residual_TQ, cos_T1H, sin_T1H)
            chosen_TS = attend.select(self.layer, *query)
        q = self.q_up(residual_TQ)
        plain = spec.num_heads * spec.nope_dim
        q_rope = q[:, plain:].view(tokens, spec.num_heads, spec.rope_dim)
        self.ops.rotate(q_rope, cos_T1H, sin_T1H)
        up = self.kv_up.value.view(spec.num_heads, -1, spec.kv_rank)
        q_TNH = q.new_empty(tokens, spec.num_heads, self.row_dim)
        q_nope_NT = q[:, :plain].view(tokens, spec.num_heads, spec.nope_dim).transpose(0, 1)
        q_TNH[..., :spec.kv_rank] = torch.bmm(q_nope_NT, up[:, :spec.nope_dim]).transpose(0, 1)
        q_TNH[..., spec.kv_rank:] = q_rope
        out_TNR = attend(self.layer, q_TNH, row_TH[:, None, None], chosen_TS)
        out_NT = torch.bmm(out_TNR.transpose(0, 1), up[:, spec.nope_dim:].transpose(1, 2))
        return self.out(out_NT.transpose(0, 1).flatten(1)), chosen_TS


class Indexer:
    """Queries, weights and the key of a token, for `Attend.select`. ReLU scores, summed with weights."""

    def __init__(self, slots: Slots, prefix: str, hidden: int, spec: LatentSpec) -> None:
        index = spec.index
        self.index, self.rope_dim, self.ops = index, spec.rope_dim, slots.ops
        first = _halves(spec.rope_dim) if index.interleaved else torch.arange(spec.rope_dim)
        rest = torch.arange(spec.rope_dim, index.head_dim)
        head = torch.arange(index.num_heads)[:, None] * index.head_dim
        self.query = slots.linear(
            [f"{prefix}.wq_b"], [index.num_heads * index.head_dim], spec.q_rank, False,
            order=torch.cat(((head + first).flatten(), (head + rest).flatten())),
        )
        order = torch.cat((first, rest))
        self.key = slots.linear([f"{prefix}.wk"], [index.head_dim], hidden, False, order=order)
        self.norm = slots.vector(f"{prefix}.k_norm.weight", (index.head_dim,), order=order)
        self.norm_bias = slots.vector(f"{prefix}.k_norm.bias", (index.head_dim,), order=order)
        self.weights = slots.vector(
            f"{prefix}.weights_proj.weight", (index.num_heads, hidden), dtype=torch.float32
        )
        self.scale = (index.num_heads * index.head_dim) ** -0.5

    def __call__(
        self, x_TD: Tensor, residual_TQ: Tensor, cos_T1H: Tensor, sin_T1H: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q_TIJ, weight_TI (float32, scaled) and key_TJ."""
        heads = self.index.num_heads
        q = self.query(residual_TQ)
        turned = q[:, :heads * self.rope_dim].view(-1, heads, self.rope_dim)
        self.ops.rotate(turned, cos_T1H, sin_T1H)
        q_TIJ = torch.cat((turned, q[:, heads * self.rope_dim:].view(len(q), heads, -1)), -1)
        key_TJ = F.layer_norm(
            self.key(x_TD), (self.index.head_dim,), self.norm.value, self.norm_bias.value, INNER_EPS
        )
        self.ops.rotate(key_TJ[:, None, :self.rope_dim], cos_T1H, sin_T1H)
        return q_TIJ, F.linear(x_TD.float(), self.weights.value) * self.scale, key_TJ
