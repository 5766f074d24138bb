"""Latent attention (MLA), of DeepSeek-V3, or with a lightning indexer, of DeepSeek-V3.2 and its kin.

A token leaves one MLA KV entry for all heads, and, in layers that have an indexer, one indexer key. Queries are
multiplied into the latent space (absorbed), in prefill as in decode: no layer ever expands the rows of its
context. Rotated parts are written de-interleaved, which the weights' rows are put in order for while loading.

    T tokens of the step   N query heads   D model dim   Q rank of queries   R rank of rows
    H = R + rope dim, a row   I index heads   J index head dim   S chosen tokens of a query
Source: DeepSeek-V2, arXiv:2405.04434 section 2.1; DeepSeek-V3.2-Exp technical report section 1.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from penstock.kernels.fused.layer import LatentNorms, Weighs
from penstock.model.base import Attend, CacheShape, GlobalLayer, LocalLayer, Reads, Selector, Source, Stage
from penstock.model.parts import Cut, TpRank
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

    def key_order(self, rope_dim: int) -> Tensor:
        """Rows of a key's weight, the rotated part's so that pairs lie half of it apart."""
        first = _halves(rope_dim) if self.interleaved else torch.arange(rope_dim)
        return torch.cat((first, torch.arange(rope_dim, self.head_dim)))

    def query_order(self, rope_dim: int) -> Tensor:
        """Rows of the queries' weight: all heads' rotated parts, then all heads' plain parts."""
        order_IJ = torch.arange(self.num_heads)[:, None] * self.head_dim + self.key_order(rope_dim)
        return torch.cat((order_IJ[:, :rope_dim].flatten(), order_IJ[:, rope_dim:].flatten()))


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSpec:
    """Ranks and widths of a head's parts. `bias`: of the projections from and to the model's width. `index`:
    None: every query reads all rows. `growth`, `growth_length`: as of `layers.GqaSpec`."""

    num_heads: int
    q_rank: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    scale: float
    bias: bool
    index: IndexSpec | None
    growth: float = 0.0
    growth_length: int = 1

    @property
    def ops(self) -> tuple[str, ...]:
        return ("latent_attention",) if self.index is None else ("index_select", "latent_attention")

    def reads(self, tp_rank: TpRank, index: GlobalLayer, source: LocalLayer) -> Reads:
        """Return how layer `index` of the model attends, which reads the entries of `source`."""
        selector = None if self.index is None else Selector(group="index", score="relu", top_k=self.index.topk)
        return Reads(source=Source(source, selector), scale=self.scale,
                     num_heads=tp_rank.evenly(self.num_heads).size, value_dim=self.kv_rank)

    def groups(self, stage: Stage, windows: Sequence[int]) -> tuple[CacheShape, ...]:
        """Rows of every layer, indexer keys of those that have an indexer; the same on all TP ranks."""
        assert not windows, "MLA KV entries of a window"
        owned = stage.tp_rank.owns(1)
        layers = [GlobalLayer(index) for index in range(stage.first, stage.end)]
        rows = CacheShape(
            name="latent", layers=tuple(LocalLayer(i - stage.first) for i in layers), num_kv_heads=1,
            head_dim=self.kv_rank + self.rope_dim, planes=1, owned=owned,
        )
        if self.index is None:
            return (rows,)
        indexed = tuple(LocalLayer(i - stage.first) for i in layers if i in self.index.layers)
        keys = CacheShape(name="index", layers=indexed, num_kv_heads=1, head_dim=self.index.head_dim,
                          planes=1, selector=True, owned=owned)
        return (rows, keys) if indexed else (rows,)

    def build(
        self, slots: Slots, prefix: str, index: GlobalLayer, local: LocalLayer, hidden: int, eps: float
    ) -> LatentLayer:
        own = self.index if self.index is not None and index in self.index.layers else None
        return LatentLayer(slots, prefix, local, hidden, self, own)


def _halves(dim: int) -> Tensor:
    """Rows of a rotated part whose pairs are neighbours, put so that pairs lie half of it apart."""
    return torch.cat((torch.arange(0, dim, 2), torch.arange(1, dim, 2)))


class LatentLayer:
    def __init__(
        self, slots: Slots, prefix: str, local: LocalLayer, hidden: int, spec: LatentSpec,
        index: IndexSpec | None,
    ) -> None:
        """index: of a layer that has an indexer."""
        heads = slots.tp_rank.evenly(spec.num_heads)
        self.spec = spec = replace(spec, num_heads=heads.size)
        self.layer, self.ops, self.index = local, slots.ops, index
        self.row_dim = spec.kv_rank + spec.rope_dim
        down_order = torch.arange(spec.q_rank + self.row_dim)
        down_order[spec.q_rank + spec.kv_rank:] = spec.q_rank + spec.kv_rank + _halves(spec.rope_dim)
        down, up = [f"{prefix}.q_a_proj", f"{prefix}.kv_a_proj_with_mqa"], [f"{prefix}.q_b_proj"]
        down_rows: list[int | Cut] = [spec.q_rank, self.row_dim]
        up_rows: list[int | Cut] = [heads.of_each(spec.nope_dim + spec.rope_dim)]
        # What reads the same input is one product, but for a key without the bias that its neighbours have.
        self.indexer = None if index is None else Indexer(slots, f"{prefix}.indexer", hidden, spec, index)
        if index is not None and not spec.bias:
            down_order = torch.cat((down_order, len(down_order) + index.key_order(spec.rope_dim)))
            down.append(f"{prefix}.indexer.wk")
            down_rows.append(index.head_dim)
        self.down = slots.linear(down, down_rows, hidden, spec.bias, order=down_order)
        self.q_norm = slots.vector(f"{prefix}.q_a_layernorm.weight", (spec.q_rank,))
        self.kv_norm = slots.vector(f"{prefix}.kv_a_layernorm.weight", (spec.kv_rank,))
        # All heads' plain parts, then all heads' rotated parts: what is rotated must be dense.
        head = torch.arange(spec.num_heads)[:, None] * (spec.nope_dim + spec.rope_dim)
        plain = (head + torch.arange(spec.nope_dim)).flatten()
        turned = (head + spec.nope_dim + _halves(spec.rope_dim)).flatten()
        up_order = torch.cat((plain, turned))
        if index is not None:
            up_order = torch.cat((up_order, len(up_order) + index.query_order(spec.rope_dim)))
            up.append(f"{prefix}.indexer.wq_b")
            up_rows.append(index.num_heads * index.head_dim)
        self.q_up = slots.linear(up, up_rows, spec.q_rank, False, order=up_order)
        self.kv_up = slots.vector(
            f"{prefix}.kv_b_proj.weight",
            (heads.of_each(spec.nope_dim + spec.value_dim), spec.kv_rank),
        )
        self.out = slots.linear(
            [f"{prefix}.o_proj"], [hidden], heads.of_each(spec.value_dim), spec.bias
        )

    def __call__(
        self, x_TD: Tensor, chosen_TS: Tensor | None, cos_T1H: Tensor, sin_T1H: Tensor, attend: Attend
    ) -> tuple[Tensor, Tensor | None]:
        """out_TD and the chosen positions, this layer's own or those that it was given."""
        spec, index = self.spec, self.indexer
        down = self.down(x_TD)
        if index is not None and index.key is not None:
            down = torch.cat((down, index.key(x_TD)), 1)
        weighs = None if index is None else Weighs(x_TD, index.weights.value, index.scale)
        norms = LatentNorms(self.q_norm.value, self.kv_norm.value,
                            None if index is None else index.norm.value,
                            None if index is None else index.norm_bias.value, INNER_EPS)
        residual_TQ, key_TJ, weight_TI = self.ops.latent_rows(down, norms, cos_T1H, sin_T1H, weighs)
        row_TH = down[:, spec.q_rank:spec.q_rank + self.row_dim]
        q = self.q_up(residual_TQ)
        q_TNH = q.new_empty(len(x_TD), spec.num_heads, self.row_dim)
        heads, dim = (0, 0) if self.index is None else (self.index.num_heads, self.index.head_dim)
        q_TIJ = self.ops.latent_queries(q, q_TNH, heads, dim, cos_T1H, sin_T1H)
        if index is not None:
            chosen_TS = attend.select(self.layer, q_TIJ, weight_TI, key_TJ)[:, 0]
        up = self.kv_up.value.view(spec.num_heads, -1, spec.kv_rank)
        q_nope_TN = q[:, :spec.num_heads * spec.nope_dim].view(len(x_TD), spec.num_heads, -1)
        self.ops.by_head(q_nope_TN, up[:, :spec.nope_dim].transpose(1, 2), q_TNH[..., :spec.kv_rank])
        out_TNR = attend(self.layer, q_TNH, row_TH[:, None, None],
                         None if chosen_TS is None else chosen_TS[:, None])
        out_TNV = out_TNR.new_empty(*out_TNR.shape[:2], spec.value_dim)
        self.ops.by_head(out_TNR, up[:, spec.nope_dim:], out_TNV)
        return self.out(out_TNV.flatten(1)), chosen_TS


class Indexer:
    """Weights of the norm of its keys, which lie beside the rows, and of its heads. ReLU scores, summed."""

    def __init__(self, slots: Slots, prefix: str, hidden: int, spec: LatentSpec, index: IndexSpec) -> None:
        order = index.key_order(spec.rope_dim)
        self.key = slots.linear([f"{prefix}.wk"], [index.head_dim], hidden, False,
                                order=order) if spec.bias else None
        self.norm = slots.vector(f"{prefix}.k_norm.weight", (index.head_dim,), order=order)
        self.norm_bias = slots.vector(f"{prefix}.k_norm.bias", (index.head_dim,), order=order)
        self.weights = slots.vector(
            f"{prefix}.weights_proj.weight", (index.num_heads, hidden), dtype=torch.float32
        )
        self.scale = (index.num_heads * index.head_dim) ** -0.5
