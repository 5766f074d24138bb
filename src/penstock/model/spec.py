"""The shape of one model, whatever its family: what `transformer.Transformer` is built from.

Families make it of a config.json (`families.common`). Knows fields and layers, no tensors.
"""
from __future__ import annotations

from dataclasses import dataclass, replace

from penstock.kernels.gemm.experts import Gate
from penstock.model.base import CacheShape, GlobalLayer, LocalLayer, Reads, Selector, Stage
from penstock.model.latent import LatentSpec
from penstock.model.layers import GqaSpec
from penstock.model.moe import MoESpec
from penstock.model.mtp import MTPNames
from penstock.model.rope import Rope
from penstock.model.scan import StateSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """One model's shape. `tied`: the head is the embedding. `width`: of the MLP, dense layers.
    `skipped_layers`: behind the last, in the files but not of the model. `mtp`: the first of them, or what
    files have in its place, drafts; None: nothing does.
    `gate`: of all MLPs, in place of SiLU and product.
    `windows`: of each layer the tokens that a query sees, 0: all; (): all layers see all. `window_rope`: of
    layers with a window; None: the others'. `norm_plus`: is added to the weights of norms. `norms_behind`:
    what the halves of a layer give is normed, too. `gelu`: gates by GELU, approximated by tanh, not by SiLU.
    `embed_scale`: of what is looked up. `logit_cap` c: logits x become c * tanh(x / c); 0: they stay.
    `states`: of layers that have one in place of attention; None: no layer has. `norm_name`: of the last norm
    in files; `mlp_norm_name`, where none is behind, and `mlp_name`: in a layer. `mlp_bundled`: files have
    gate and up of a dense MLP in one tensor. `residual_scale`: of what each half of a layer adds.
    `logit_divisor`: of logits. `feeds`: a layer is one norm and one mixer, these an MLP without a gate or
    experts; None: all layers mix, then feed forward. `window_attention`: of layers with a window; None: the
    others'. `sources`: of each layer the layer whose KV it reads, (): its own; MLPs of layers that read another's
    are `reader_width` wide. `token_width`: of what each layer adds of the token itself, 0: nothing. `scaled`:
    files have a factor of the residual stream behind each layer. `kv_format`: as of `base.Model`. `files`: beginnings
    of names in files, and what they are here, of one name each that fits."""

    vocab_size: int
    hidden: int
    num_layers: int
    width: int
    norm_eps: float
    tied: bool
    rope: Rope
    attention: GqaSpec | LatentSpec
    mlp_bias: bool = False
    moe: MoESpec | None = None
    skipped_layers: int = 0
    mtp: MTPNames | None = None
    windows: tuple[int, ...] = ()
    window_rope: Rope | None = None
    norm_plus: float = 0.0
    norms_behind: bool = False
    gelu: bool = False
    gate: Gate | None = None
    embed_scale: float = 1.0
    logit_cap: float = 0.0
    states: StateSpec | None = None
    norm_name: str = "model.norm"
    mlp_norm_name: str = "post_attention_layernorm"
    mlp_name: str = "mlp"
    mlp_bundled: bool = False
    residual_scale: float = 1.0
    logit_divisor: float = 1.0
    feeds: frozenset[GlobalLayer] | None = None
    window_attention: GqaSpec | None = None
    sources: tuple[int, ...] = ()
    reader_width: int = 0
    token_width: int = 0
    scaled: bool = False
    kv_format: str = ""
    files: tuple[tuple[str, str], ...] = ()

    @property
    def ops(self) -> tuple[str, ...]:
        """That its layers need beside `layer` and `linear`, by name."""
        return (*self.attention.ops, *(self.states.ops if self.states else ()))

    @property
    def drafting(self) -> Spec:
        """Cache group of the draft layer: it reads all of its KV, whatever others choose, and has experts where
        others have."""
        attention, moe = replace(self.attention, index=None), self.moe
        if moe is not None and moe.layers:
            moe = replace(moe, layers=moe.layers | {GlobalLayer(self.num_layers)})
        return replace(self, attention=attention, moe=moe, windows=(), states=None)

    def groups(self, stage: Stage) -> tuple[CacheShape, ...]:
        """Cache groups of a part of the model, perhaps without layers; those of states last."""
        states, attends = self.states, self.reads(stage)
        far, near = ((by or self.attention).groups(stage, self.windows) for by in (None, self.window_attention))
        groups = [n if n.window else f for f, n in zip(far, near, strict=True)]
        return (*(replace(group, layers=tuple(i for i in group.layers if i in attends and attends[i].source.layer == i))
                  for group in groups), *(states.groups(stage) if states is not None else ()))

    def attention_of(self, index: int) -> GqaSpec | LatentSpec:
        """Return the attention of this layer of the model."""
        own = self.window_attention if self.window_attention and self.windows[index] else self.attention
        if isinstance(own, GqaSpec) and own.index is not None and index not in own.index.layers:
            return replace(own, index=None)
        return own

    def source_of(self, index: int) -> int:
        """The layer of the model whose KV this one reads."""
        return self.sources[index] if self.sources else index

    @property
    def selector(self) -> Selector | None:
        """The model's own, of all layers that have one; None: it has none."""
        whole = Stage(GlobalLayer(0), GlobalLayer(self.num_layers), embeds=True, heads=True)
        found = {reads.source.selector for reads in self.reads(whole).values()} - {None}
        assert len(found) <= 1, f"several selectors: {found}"
        return next(iter(found), None)

    @property
    def tail(self) -> int:
        """Layers, the last ones, that one pipeline stage has: from the first whose KV another reads; 0: any."""
        sources = [source for index, source in enumerate(self.sources) if source != index]
        return self.num_layers - min(sources, default=self.num_layers)

    def reads(self, stage: Stage) -> dict[LocalLayer, Reads]:
        """Return how each layer of a part of the model attends, of those that do."""
        others = {*(self.feeds or ()), *(self.states.layers if self.states is not None else ())}
        return {LocalLayer(i - stage.first): self.attention_of(i).reads(
            stage.tp_rank, GlobalLayer(i), LocalLayer(self.source_of(i) - stage.first))
            for i in range(stage.first, stage.end) if i not in others}
