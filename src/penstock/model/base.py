"""What every model family provides, and what the engine gives it. Tensors only, no requests.

    T tokens of the step   B sampled rows   N query heads   K KV heads   C planes   H head dim
    D model dim   V vocabulary   I index heads   J index head dim   S chosen tokens of a query   Y chosen blocks
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, NewType, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor

from penstock.kernels.attention.paged_attention.native import Paged
from penstock.kernels.types.packed import Packed
from penstock.kernels.types.states import States
from penstock.model.parts import ONE, TpRank
from penstock.model.weights.formats.reader import Format

GlobalLayer = NewType("GlobalLayer", int)      # counted over the whole model, as in tensor names
LocalLayer = NewType("LocalLayer", int)        # counted from the first layer of a stage, as in pools
Wants: TypeAlias = Callable[[str], bool]       # whether the tensor of this name is to be read


def everything(name: str) -> bool:
    """The `Wants` of a reader without a model: every tensor."""
    return True


@dataclass(frozen=True, slots=True)
class Stage:
    """What one rank has of a model: layers [first, end), at least one, and of those what its TP rank has. The
    first stage has the embedding (`embeds`), the last the final norm and the head (`heads`); a tied head
    needs the embedding's tensor as well. `drafts`: the last has the layer that drafts, too; `inputs`: and the
    embedding, for what drafts."""

    first: GlobalLayer
    end: GlobalLayer
    embeds: bool
    heads: bool
    tp_rank: TpRank = ONE
    drafts: bool = False
    inputs: bool = False


class Boundary(NamedTuple):
    """What one layer hands to the next, and one stage to the next. The receiver may write into it.

    `h_TD` is the residual stream without `delta_TD`, the last half layer's output, which the next
    norm of h adds to it (adding and norming are one operation); None: it has been added.
    `chosen_TS` is what `Attend.select` chose last for all heads, for a layer that shares it; None: nothing yet.
    `inputs` is what the rows that decode compute, see `exec.drafts.narrow`; None: what their plan says.
    `tapped` is what stages so far have of the layers that `Model.tap` names, [T, D] each.
    `own_TX` is what each layer from here on adds of the token itself, one behind the other; None: they add none.
    """

    h_TD: Tensor
    delta_TD: Tensor | None
    chosen_TS: Tensor | None = None
    inputs: tuple[int, ...] | None = None
    tapped: tuple[Tensor, ...] = ()
    own_TX: Tensor | None = None

    @property
    def parts(self) -> list[Tensor]:
        """The tensors that there are, in order."""
        return [part for part in (self.h_TD, self.delta_TD, self.chosen_TS, *self.tapped, self.own_TX)
                if part is not None]


class TpGroup(Protocol):
    """The TP ranks of a stage, as one of them sees them. Each call is made by all, in the same order, with the
    same shapes; what they get is the same on all, bit for bit."""

    def all_reduce(self, x_TD: Tensor) -> None:
        """x_TD, dense, becomes the sum over the TP ranks."""

    def all_gather(self, x_BV: Tensor, num: int) -> Tensor:
        """[B, num]: what the TP ranks have of `TpRank.evenly(num)` columns, side by side."""


class Attend(Protocol):
    """What a layer asks of the engine: write what a token leaves behind, and read what others left."""

    def __call__(
        self, layer: LocalLayer, q_TNH: Tensor, kv_TCKH: Tensor | None, chosen_TKY: Tensor | None = None,
        sinks_N: Tensor | None = None,
    ) -> Tensor:
        """Writes kv (RoPE applied) into the pages of the layer's KV group, then attends causally, with
        `Reads.scale`, over everything that the row has written, or over chosen_TKY of it.

        kv_TCKH     as the group's `CacheShape` says: C planes, k before v; None: the layer reads the entries
                    of an earlier one, which has written this step's
        chosen_TKY  as `select` returns it
        sinks_N     f32, of a model with `sinks`: counts in the sum of weights as a key's score, without a
                    value
        Returns     out_TNH; with an MLA KV entry, whose first dims are its value, those of them
        """

    def select(
        self, layer: LocalLayer, q_TIJ: Tensor, weight_TI: Tensor | None, key_TJ: Tensor
    ) -> Tensor:
        """Writes the keys into the layer's part of the group that its selector scores, then chooses for each
        token, and each KV head or for all of them, `Selector.top_k` blocks of what it sees. Only of a layer
        whose source has a selector.

        weight_TI   float32, what index heads count; None: the selector's score has no weights
        Returns     chosen_TKY int32, K is 1 where one choice is for all: numbers of blocks, ascending, -1 pads
                    at the end; of equal scores the lower one
        """


@runtime_checkable
class AttendsPaged(Protocol):
    """An `Attend` that may say where all layers write and read in this step, for a kernel that does it
    itself. The layers have KV heads, and share one cache group."""

    def paged(self) -> Paged | None:
        """None: each layer must call."""


@runtime_checkable
class AttendsStates(Protocol):
    """An `Attend` of a model with layers that keep a state."""

    def state(self, layer: LocalLayer, tokens: int) -> States:
        """Where those of the layer are in this step, which has so many tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheShape:
    """One cache group: layers that write the same, and share a page table.

    layers      of this stage; entry i is layer i of the group's pages
    planes      vectors a token, layer and KV head: 2 for k and v or for two bounds, 1 for a latent
    unit        tokens that one vector stands for: 1 for KV, more for summaries
    selector    only what chooses tokens reads it; not what attention reads
    resident    attention reads all of it at each step, so it stays on the device
    owned       no TP rank before this one has the same: what all TP ranks see is written and counted by this one
    dtype       of its pages, None: the model's; of uint8 `head_dim` is bytes, as `kernels.types.fp8` lays out, and
                `values` those of a vector
    window      tokens that a query of its layers sees, itself and those before it; 0: all
    keep        of a window: tokens from one page end that prompts may go on from to the next; 0: all page ends serve
    snapshot    what is kept is a state behind a token, one vector that stands for all tokens up to it
    page_tokens of snapshots, tokens from one that stays to the next; 0: `exec.load.layout` says
    drafts      of the layer that drafts, which is layer 0 of a count of its own
    """

    name: str
    layers: tuple[LocalLayer, ...]
    num_kv_heads: int
    head_dim: int
    planes: int = 2
    unit: int = 1
    selector: bool = False
    resident: bool = False
    owned: bool = True
    dtype: torch.dtype | None = None
    values: int = 0
    window: int = 0
    keep: int = 0
    snapshot: bool = False
    page_tokens: int = 0
    drafts: bool = False

    @property
    def offloaded(self) -> bool:
        """Whether pages of a request that selects may be on the host, see `core.settings.CacheGroup`."""
        return not (self.selector or self.resident or self.window or self.snapshot or self.drafts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Selector:
    """How queries choose what they attend to: blocks of their layer's entries, by their score.

    group     name of the cache group that is scored
    score     of a block: "relu", the sum over index heads of weight * max(q . key, 0) of its one token's indexer key;
              "max", the largest q . key of its indexer keys, of the index head of each KV head; "bounds", what q . k
              can be, see `kernels.choose.select`
    block     tokens that are chosen together
    top_k     blocks of a query, with those that are always kept; at most, where requests say how many
    per_head  each KV head has its own choice; else one is for all
    first, last   tokens, at the beginning and up to the query's own, whose blocks are always kept
    native    it is the model's: queries of prompts and of outputs select, of every request; else those behind a
              prompt do, of requests that ask for it
    """

    group: str
    score: str
    block: int = 1
    top_k: int
    per_head: bool = False
    first: int = 0
    last: int = 0
    native: bool = True

    @property
    def tokens(self) -> int:
        """That a query reads, of each head, at most."""
        return self.block * self.top_k


class Source(NamedTuple):
    """What a layer attends to: the entries of `layer`, its own or an earlier one of the same stage.

    selector    the model's own, of which of them; None: it has none
    """

    layer: LocalLayer
    selector: Selector | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reads:
    """How one layer attends. Queries of one token, of this TP rank: `num_heads` x the values of a vector of the
    group that has the entries of `source`. Scores are q.k times `scale`.

    dtype        of queries, keys and values
    softcap      0, or: what scores are capped with, as in `paged_attention.AttentionSpec`
    sinks        the layer gives a logit of each query head, as there
    shared       other TP ranks have queries to the same KV head, see `Model.queries`
    value_dim    0: an entry is k and v of KV heads; else it is one vector, whose first dims are its value
    """

    source: Source
    num_heads: int
    scale: float
    dtype: torch.dtype = torch.float32
    softcap: float = 0.0
    sinks: bool = False
    shared: bool = False
    value_dim: int = 0


class Model(Protocol):
    """A loaded model, or one stage of it. Built by `build`, filled by `load`, ready after `finish`."""

    stage: Stage
    # Each layer is in one that is not a selector's; states are last, behind them what drafts.
    groups: tuple[CacheShape, ...]
    reads: Mapping[LocalLayer, Reads]   # of each layer of this stage that attends
    selector: Selector | None      # the model's own, of which source ever; None: it has none
    drafting: Reads | None         # of the layer that drafts; None: there is none
    drafter: str                   # what that is
    kv_format: str                 # that the checkpoint asks for its KV: fp8_e4m3, one that is not known, or "": none
    vocab_size: int
    hidden: int
    handed: int                    # floats of a token that the stage before hands over, see `Boundary`
    max_position: int              # context length of the checkpoint, tokens

    @property
    def dequantised(self) -> int:
        """Packed weights that became floats when they were loaded, as a TP rank's part begins inside of a block."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the loaded weights, as they are kept."""

    def wants(self, name: str) -> bool:
        """Whether `load` has a use for the tensor of this name: not for another stage's, nor for one that
        the model ignores. True for another name that no stage knows, which `load` refuses."""

    def ignores(self, name: str) -> bool:
        """Whether the tensor of this name belongs to no part of the model, and to none of its modules: it is
        of a layer after the last one, or of a module outside of the layers."""

    def load(self, name: str, tensor: Tensor | Packed) -> None:
        """Take one checkpoint tensor by its Hugging Face name; drops the source when it returns.

        Raises ConfigError on an unknown name or a wrong shape.
        """

    def finish(self) -> None:
        """Pack what is left. Raises ConfigError that lists the tensors which never came."""

    def forward(self, ids_T: Tensor, positions_T: Tensor, attend: Attend) -> Tensor:
        """hidden_TD of a whole model after the final norm: `norm` of `layers` of `embed`.
        ids and positions int64."""

    def embed(self, ids_T: Tensor) -> Boundary:
        """In front of the first layer. Only of a stage that embeds."""

    def layers(self, x: Boundary, positions_T: Tensor, attend: Attend) -> Boundary:
        """Behind the last layer of this stage, for the next stage or for `norm`. Exact: any split
        into stages computes what one stage does, bit for bit."""

    def queries(self, q_BNH: Tensor) -> Tensor:
        """All queries to this TP rank's one KV head, of which it has some: of layers that select, and are
        `shared`; called by all TP ranks with as many rows."""

    def norm(self, x: Boundary) -> Tensor:
        """hidden_TD after the final norm. Only of a stage that has the head."""

    def logits(self, hidden_BD: Tensor) -> Tensor:
        """logits_BV, float32. Only of a stage that has the head."""

    def head(self, hidden_BD: Tensor) -> Tensor:
        """Return the logits before they become floats: in the model's dtype, where nothing is done to them; see
        `logits`."""

    def take_drafts(self, drafts: Any) -> None:
        """From now on this, a `mtp.Drafts`, drafts. Of a stage that has the head."""

    def tap(self, layers: tuple[int, ...]) -> None:
        """What drafts on the last stage reads the residual stream before these, counted over the model."""

    def made(self, hidden_TD: Tensor) -> Tensor:
        """What `draft` takes of the tokens that `forward` or `layers` had last. hidden_TD: behind the final
        norm. This and the next two only of a stage that drafts."""

    def draft(self, ids_T: Tensor, hidden_TD: Tensor, positions_T: Tensor, attend: Attend) -> Tensor:
        """Run the draft layer on these tokens, see `mtp.DraftLayer`."""

    def guess(self, hidden_BD: Tensor) -> tuple[Tensor, Tensor]:
        """Return, for the result of `draft`, the logit of the likeliest token, and its id. [B] each."""


def value_dim_of(model: Model) -> int:
    """Return how many leading dims of an MLA KV entry are its value; 0: the model has KV heads."""
    return max((reads.value_dim for reads in model.reads.values()), default=0)


class Checkpoint(Protocol):
    """A model on disk, whatever its format, presented in Hugging Face terms."""

    config: dict[str, Any]         # as config.json (GGUF metadata translated)
    eos_ids: tuple[int, ...]       # from generation_config, config, or the tokenizer
    dequantised: str               # its quantised weights that become floats, for the log; "": none do

    def tensors(self, wants: Wants = everything,
                device: str = "cpu") -> Iterator[tuple[str, Tensor | Packed]]:
        """Every wanted weight once, Hugging Face name and layout, one at a time (bounded memory), in the
        memory of `device`. Of the others nothing is read but the header. Packed only
        where that was asked for."""

    def unread(self, ignores: Callable[[str], bool]) -> list[str]:
        """Lines for the log: which tensors of the files are not read. ignores: as of `Model`."""

    def format(self, name: str) -> Format | None:
        """Return how the weight of this name stays packed; None: it becomes floats."""
