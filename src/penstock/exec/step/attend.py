"""What a rank answers when a layer asks: write what a token leaves behind, and attend (`model.base.Attend`).

Here the layers that read all of their KV; those that select are in `exec.sparse`. Knows pools and the layout
of a step; refuses to know plans and requests.

    T tokens of the step   N query heads   K KV heads   C planes   H head dim   P pages   G page size
    I index heads   J index head dim   S chosen tokens
"""
from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from penstock.core.plan import Bind, HotResize, RequestId
from penstock.exec.step.states import StatePools, StepStates
from penstock.exec.step.tables import Lowered, RowTables
from penstock.kernels.attention.latent_attention import LatentAttention
from penstock.kernels.attention.latent_attention.context import seen_slots
from penstock.kernels.attention.paged_attention import AttentionSpec, Prepare, Prepared, flash, write_kv
from penstock.kernels.attention.paged_attention.native import NativeDecodes, Paged
from penstock.kernels.choose.index_select import IndexSelect
from penstock.kernels.types import fp8
from penstock.kernels.types.states import States
from penstock.memory.copying import parts_of
from penstock.memory.hbm import HbmPool
from penstock.memory.mover import Arrivals
from penstock.memory.pool import BlockPool
from penstock.model.base import Attend, AttendsStates, AttentionShape, CacheShape, LocalLayer

ANY = 1 << 30       # queries of a row, where nothing bounds them


@dataclass(frozen=True, slots=True)
class LatentOps:
    """The ops of a model with MLA KV entries, as a `Prepare` is that of one with KV heads. select: None where
    the model has no indexer; heads: of a layer that drafts with KV heads, None: there is none."""

    select: IndexSelect | None
    attend: LatentAttention
    heads: Prepare | None = None


Counts: TypeAlias = Sequence[Sequence[int]]             # of each row of an answer
Reads: TypeAlias = Callable[[Counts], tuple[tuple[RequestId, tuple[int, ...]], ...]]


def none_read(counts: Counts) -> tuple[()]:
    """`Reads` of no row."""
    return ()


class Attending(Protocol):
    """Made once for a rank; `step` of each step. As it stands here: of rows that read all of their KV."""

    selects: bool = False
    states: StatePools = StatePools((), ())

    def step(self, lowered: Lowered) -> Attend:
        """The attention of a step whose binds, grows, remaps and resizes are applied."""

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

    def reads(self, rows: Sequence[int], counted: bool = False) -> Reads:
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

    def __call__(self, layer: LocalLayer, q_TNH: Tensor, kv_TCKH: Tensor,
                 chosen_TS: Tensor | None = None, sinks_N: Tensor | None = None) -> Tensor:
        self._hold(layer)
        return self._attend(layer, q_TNH, kv_TCKH, chosen_TS, sinks_N)

    def select(self, layer: LocalLayer, q_TIJ: Tensor, weight_TI: Tensor, key_TJ: Tensor) -> Tensor:
        self._hold(layer)
        return self._attend.select(layer, q_TIJ, weight_TI, key_TJ)

    def state(self, layer: LocalLayer, tokens: int) -> States:
        assert isinstance(self._attend, AttendsStates)
        self._hold(layer)
        return self._attend.state(layer, tokens)


def spec_of(shape: AttentionShape, group: CacheShape, pool: BlockPool, first: int = 0) -> AttentionSpec:
    """Attention of the layers of a cache group with KV heads. first: as there."""
    return AttentionSpec(
        num_heads=shape.num_heads, num_kv_heads=group.num_kv_heads, head_dim=group.head_dim,
        dtype=pool.layout.dtype, scale=shape.scale, window=group.window, softcap=shape.softcap,
        sinks=shape.sinks, first=first)


class NoIndexer:
    """What `model.base.Attend` has of layers that have none."""

    def select(self, layer: LocalLayer, q_TIJ: Tensor, weight_TI: Tensor, key_TJ: Tensor) -> Tensor:
        raise AssertionError("a model without an indexer")


class Grouped(Attending):
    """Layers that write k and v of their KV heads, in one cache group or several, and layers that keep a
    state."""

    def __init__(self, shape: AttentionShape, groups: Sequence[CacheShape], prepare: Prepare,
                 hbm: Sequence[HbmPool], first: int = 0) -> None:
        """first: position of the first token that others than its own query see, 0 or 1."""
        assert not shape.latent_dim, "a model of MLA KV entries and ops for KV heads"
        check_pools(groups, hbm)
        self._prepare = prepare
        attends = [*zip(groups, hbm, strict=True)][:sum(not group.snapshot for group in groups)]
        self.specs = [spec_of(shape, *of, first) for of in attends]
        self.states = StatePools(groups, hbm)
        # Of each layer: the group that attention reads, its k and v pools [P, K, G, H].
        self.places = {layer: (g, pool.pages[:, i, :, 0], pool.pages[:, i, :, 1])
                       for g, (group, pool) in enumerate(attends)
                       if not group.selector for i, layer in enumerate(group.layers)}
        addresses = [pool.data_ptr() for layer in sorted(self.places) for pool in self.places[layer][1:]]
        self.pools = (ctypes.c_void_p * len(addresses))(*addresses)

    def reads_pages(self, tables: RowTables) -> bool:
        """Whether what prompts attend to can be captured: read out of pages in one call, whatever their
        lengths."""
        return all(spec.plain and flash.ready(spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.dtype,
                                              table.size, len(table.device_RM))
                   for spec, table in zip(self.specs, tables.groups, strict=False))

    def step(self, lowered: Lowered) -> Attend:
        attended = lowered.ragged[:len(self.specs)]
        prepared = [self._prepare(ragged, spec) for ragged, spec in zip(attended, self.specs, strict=True)]
        return _GroupedStep(self, lowered, prepared)


class Latent(Attending):
    """Layers that write one MLA KV entry a token and read all rows, in one cache group."""

    SLOTS = 1 << 23     # that are named at once: of more, one part of the queries follows the other

    def __init__(self, shape: AttentionShape, groups: Sequence[CacheShape], ops: LatentOps,
                 hbm: Sequence[HbmPool], first: int = 0) -> None:
        """first: position of the first row that others than its own query see."""
        check_pools(groups, hbm)
        assert shape.latent_dim and len(groups) == 1
        self.shape, self.attend, self.first = shape, ops.attend, first
        self.coded = hbm[0].layout.dtype == torch.uint8
        # Of each layer its pool [P, G, H].
        self.rows = {layer: hbm[0].pages[:, i, 0, 0] for i, layer in enumerate(groups[0].layers)}

    def step(self, lowered: Lowered) -> Attend:
        return _LatentStep(self, lowered)


class _LatentStep(NoIndexer):
    def __init__(self, latent: Latent, lowered: Lowered) -> None:
        self._latent, self._lowered, self._ragged = latent, lowered, lowered.ragged[0]
        tokens, self._longest = len(lowered.row_T), max(self._ragged.context)
        at_once = max(1, latent.SLOTS // self._longest)
        self._parts = [slice(t, min(t + at_once, tokens)) for t in range(0, tokens, at_once)]
        self._slots = [self._slots_of(part) for part in self._parts[:1]]        # of one part they are kept

    def _slots_of(self, part: slice) -> Tensor:
        """[B, S] int32: where the rows are that each of these queries sees, in the order of positions."""
        return seen_slots(self._ragged.pages_RM, self._ragged.page_size, self._lowered.row_T[part],
                          self._lowered.positions_T[part], self._latent.first, self._longest)

    def __call__(self, layer: LocalLayer, q_TNH: Tensor, kv_TCKH: Tensor,
                 chosen_TS: Tensor | None = None, sinks_N: Tensor | None = None) -> Tensor:
        assert chosen_TS is None and sinks_N is None, "MLA KV entries are attended to as a whole here"
        shape, pool_PGH, ragged = self._latent.shape, self._latent.rows[layer], self._ragged
        pool_PGH[ragged.page_T, ragged.offset_T] = fp8.kept(kv_TCKH[:, 0], pool_PGH.dtype,
                                                            shape.latent_dim)[:, 0]
        outs = [self._latent.attend(
            q_TNH[part], pool_PGH, self._slots[0] if len(self._parts) == 1 else self._slots_of(part),
            value_dim=shape.latent_dim, scale=shape.scale)[0] for part in self._parts]
        return outs[0] if len(outs) == 1 else torch.cat(outs)


class _GroupedStep(NoIndexer):
    def __init__(self, grouped: Grouped, lowered: Lowered, prepared: Sequence[Prepared]) -> None:
        self._places, self._pools = grouped.places, grouped.pools
        self._ragged, self._prepared = lowered.ragged, prepared
        self.state: StepStates = grouped.states.step(lowered)

    def __call__(self, layer: LocalLayer, q_TNH: Tensor, kv_TCKH: Tensor,
                 chosen_TS: Tensor | None = None, sinks_N: Tensor | None = None) -> Tensor:
        assert chosen_TS is None, "KV heads are attended to as a whole here"
        group, k_PKGH, v_PKGH = self._places[layer]
        ragged = self._ragged[group]
        write_kv(kv_TCKH[:, 0], kv_TCKH[:, 1], k_PKGH, v_PKGH, ragged.page_T, ragged.offset_T)
        return self._prepared[group](q_TNH, k_PKGH, v_PKGH, sinks_N)

    def paged(self) -> Paged | None:
        first, ragged = self._prepared[0], self._ragged[0]
        if len(self._prepared) > 1 or not isinstance(first, NativeDecodes):
            return None
        return first.paged(self._pools, self._places[LocalLayer(0)][1], ragged.page_T, ragged.offset_T)
