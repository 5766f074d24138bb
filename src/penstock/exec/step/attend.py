"""The interface of an attention back-end: a rank makes one `Attending`, which makes an `Attend` for each step.

Each layer calls its `Attend` (`model.base`), which writes the new KV entry and attends. The back-ends are `dense.py`
(full attention over KV heads), `latent.py` (MLA without an indexer) and `exec/sparse/attending.py` (sparse decode);
here is what they share. Knows pools and the layout of a step, not requests.

    T tokens of the step   B queries of a captured one   N query heads   C planes   K KV heads   H head dim
    I index heads   J index head dim   Y chosen blocks
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from penstock.core.plan import Bind, HotResize, RequestId
from penstock.exec.graphs.halves import Copies
from penstock.exec.step.states import StatePools, StepStates
from penstock.exec.step.tables import Lowered
from penstock.kernels.attention.latent_attention import LatentAttention
from penstock.kernels.attention.paged_attention import AttentionSpec, Prepare
from penstock.kernels.fused.step import Looks, Queries
from penstock.kernels.types.states import States
from penstock.memory.copying import parts_of
from penstock.memory.mover import Arrivals
from penstock.memory.pool import BlockPool
from penstock.model.base import Attend, AttendsStates, CacheShape, LocalLayer, Reads

ANY = 1 << 30       # queries of a row, where nothing bounds them


@dataclass(frozen=True, slots=True)
class LatentOps:
    """The ops of a model with MLA KV entries, as a `Prepare` is that of one with KV heads. heads: of a layer that
    drafts with KV heads, None: there is none."""

    attend: LatentAttention
    heads: Prepare | None = None


Counts: TypeAlias = Sequence[Sequence[int]]             # of each row of an answer
ReadCounts: TypeAlias = Callable[[Counts], tuple[tuple[RequestId, tuple[int, ...]], ...]]


def none_read(counts: Counts) -> tuple[()]:
    """`ReadCounts` of no row."""
    return ()


class Attending(Protocol):
    """An attention back-end, made once for a rank: it makes the attention of a step, eager or captured. The defaults
    here are those of rows that read all of their KV."""

    selects: bool = False
    states: StatePools = StatePools((), ())
    kinds: tuple[str, ...] = ("all",)       # of decode steps, each captured by itself
    looks: Looks = Looks()                  # what `decode` asks of the queries

    def step(self, lowered: Lowered) -> Attend:
        """The attention of a step that is launched, whose binds, grows, remaps and resizes are applied."""

    def decode(self, kind: str, queries: Queries, turn_NW: Tensor | None = None,
               copies: Copies | None = None) -> Attend:
        """That of a captured step, as a function of tensors on the device alone: of queries, begun with `looks`, one of
        a row, or with `turn_NW` W of each of N rows, as `kernels.choose.resolve` takes them; of padding there is
        no context, and nothing is written for it. copies: it is half of a step that `may_halve`."""

    def prompts(self, given: Mapping[str, Tensor]) -> Attend:
        """That of a captured step with prompts. given: `StepBatch.mixed`, padded."""
        raise AssertionError("such steps are not captured here")

    def uncaptured(self) -> str:
        """The cause, of `graphs.steps.WHY`, for which steps with prompts are not captured; "": they are."""
        return ""

    def kind(self, rows: Sequence[int]) -> str:
        """Which of `kinds` a decode step with these rows of the tables is."""
        return self.kinds[0]

    def may_halve(self, kind: str, bucket: int) -> bool:
        """Whether steps of so many rows are captured in halves, too: what they lack comes from the host."""
        return False

    def halves(self) -> bool:
        """Whether the next such step is run so: by what those before it have missed."""
        return False

    def bind(self, bind: Bind, *, budget: int, num_prompt: int) -> None:
        """The row's tables are bound already. budget: tokens; 0: what the model reads of itself."""
        assert not bind.hot, "a rank without a selector has no hot buffers"

    def resize(self, resize: HotResize) -> None:
        """Of a row that is bound. Asserts that it can be."""
        raise AssertionError(f"no hot buffer for {resize}: a rank without a selector has none")

    def close(self, rid: RequestId) -> None:
        """No plan names `rid` any more."""
        return

    def at_once(self, row: int) -> int:
        """Of a row of the tables: how many of its queries may choose before any of them attends."""
        return ANY

    def reads(self, rows: Sequence[int], counted: bool = False) -> ReadCounts:
        """As `HotRows.reads`."""
        return none_read

    def stats(self) -> dict[str, float]:
        """By metric name."""
        return {}


def check_pools(groups: Sequence[CacheShape], hbm: Sequence[BlockPool]) -> None:
    """Asserts that the pools are of these cache groups."""
    for group, pool in zip(groups, hbm, strict=True):
        have = pool.layout
        unit = have.page_size if group.snapshot else group.unit
        want = (len(group.layers), group.num_kv_heads, group.planes, unit, group.head_dim)
        assert want == (have.num_layers, have.num_kv_heads, have.planes, have.unit, have.head_dim), (
            f"a foreign pool for group {group.name}")


class Arriving:
    """`Attend` of a step that reads what copies are still writing: the device, not the host, waits before
    each layer for what of them belongs to it."""

    def __init__(self, attend: Attend, groups: Sequence[CacheShape], arrivals: Arrivals) -> None:
        self._attend = attend
        self._before: dict[LocalLayer, list[torch.cuda.Event]] = {}
        for group, events in arrivals:
            layers = groups[group].layers
            for part, event in zip(parts_of(len(layers), len(events)), events, strict=True):
                for layer in layers[part][:1]:
                    self._before.setdefault(layer, []).append(event)

    def _hold(self, layer: LocalLayer) -> None:
        for event in self._before.pop(layer, ()):
            torch.cuda.current_stream().wait_event(event)

    def __call__(self, layer: LocalLayer, q_TNH: Tensor, kv_TCKH: Tensor | None,
                 chosen_TKY: Tensor | None = None, sinks_N: Tensor | None = None) -> Tensor:
        self._hold(layer)
        return self._attend(layer, q_TNH, kv_TCKH, chosen_TKY, sinks_N)

    def select(self, layer: LocalLayer, q_TIJ: Tensor, weight_TI: Tensor | None, key_TJ: Tensor) -> Tensor:
        self._hold(layer)
        return self._attend.select(layer, q_TIJ, weight_TI, key_TJ)

    def state(self, layer: LocalLayer, tokens: int) -> States:
        assert isinstance(self._attend, AttendsStates)
        self._hold(layer)
        return self._attend.state(layer, tokens)


def places_of(reads: Mapping[LocalLayer, Reads], groups: Sequence[CacheShape]) -> dict[LocalLayer, tuple[int, int]]:
    """Return for each layer that attends the cache group whose entries it reads, and which layer of its pages."""
    homes = {layer: (g, i) for g, group in enumerate(groups) if not (group.selector or group.snapshot)
             for i, layer in enumerate(group.layers)}
    return {layer: homes[by.source.layer] for layer, by in reads.items()}


def spec_of(reads: Reads, group: CacheShape, pool: BlockPool, first: int = 0) -> AttentionSpec:
    """Attention of a layer that reads a cache group with KV heads. first: as there."""
    coded = pool.layout.dtype == torch.uint8
    assert coded or pool.layout.dtype == reads.dtype, f"queries in {reads.dtype} of pages in {pool.layout.dtype}"
    return AttentionSpec(
        num_heads=reads.num_heads, num_kv_heads=group.num_kv_heads, head_dim=group.values or group.head_dim,
        dtype=reads.dtype, scale=reads.scale, window=group.window, softcap=reads.softcap,
        sinks=reads.sinks, first=first, coded=coded)


class NoIndexer:
    """What `model.base.Attend` has of layers that have none."""

    def select(self, layer: LocalLayer, q_TIJ: Tensor, weight_TI: Tensor | None, key_TJ: Tensor) -> Tensor:
        raise AssertionError("a layer without indexer keys")


class KeepsStates(NoIndexer):
    """`model.base.Attend` where layers may keep a state."""

    state: StepStates
