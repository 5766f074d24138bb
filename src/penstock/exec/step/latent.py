"""The back-end of MLA without an indexer: layers write one MLA KV entry a token and read all of them, up to the query's
own position.

    T tokens of the step   N query heads   C planes   K KV heads   H row dim   P pages   G page size
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from penstock.exec.graphs.halves import Copies
from penstock.exec.step.attend import Attending, LatentOps, NoIndexer, check_pools, places_of
from penstock.exec.step.tables import GroupTable, Lowered
from penstock.kernels.attention.latent_attention import PagedContext
from penstock.kernels.attention.latent_attention.context import seen_slots
from penstock.kernels.fused.step import Looks, Queries
from penstock.kernels.kv import write_kv
from penstock.kernels.kv.write_kv import WriteAt
from penstock.kernels.types import fp8
from penstock.memory.pool import BlockPool
from penstock.model.base import Attend, CacheShape, LocalLayer, Reads


class Latent(Attending):
    """MLA attention in one cache group."""

    SLOTS = 1 << 23     # that are named at once: of more, one part of the queries follows the other

    def __init__(self, reads: Mapping[LocalLayer, Reads], groups: Sequence[CacheShape], ops: LatentOps,
                 device: Sequence[BlockPool], tables: Sequence[GroupTable], first: int = 0) -> None:
        """tables: of the groups; first: position of the first row that others than its own query see."""
        check_pools(groups, device)
        [pool], [self._table] = device, tables
        self.by_layer, self.attend, self.first = reads, ops.attend, first
        # Of each layer its pool [P, G, H].
        self.rows = {layer: pool.pages[:, i, 0, 0] for layer, (_, i) in places_of(reads, groups).items()}
        self.looks = Looks((self._table.place,))
        self._write_kv = write_kv.OP.use("triton" if pool.pages.is_cuda else "reference")

    def uncaptured(self) -> str:
        """A prompt's slots are named by how long its row is."""
        return "latent"

    def step(self, lowered: Lowered) -> Attend:
        [ragged] = lowered.ragged
        tokens, longest = len(lowered.row_T), max(ragged.context)
        at_once = max(1, self.SLOTS // longest)
        parts = [slice(t, min(t + at_once, tokens)) for t in range(0, tokens, at_once)]

        def slots(part: slice) -> Tensor:
            """[B, S] int32: where the rows are that each of these queries sees, in the order of positions."""
            return seen_slots(ragged.pages_RM, ragged.page_size, lowered.row_T[part],
                              lowered.positions_T[part], self.first, longest)
        kept = slots(parts[0]) if len(parts) == 1 else None         # for all layers

        def put(kept_T1H: Tensor, pool_PGH: Tensor) -> None:
            pool_PGH[ragged.page_T, ragged.offset_T] = kept_T1H[:, 0]
        return _LatentStep(self, put, [(part, partial(slots, part) if kept is None else lambda: kept)
                                       for part in parts])

    def decode(self, kind: str, queries: Queries, turn_NW: Tensor | None = None,
               copies: Copies | None = None) -> Attend:
        nowhere_B = torch.full_like(queries.at_B, -1)
        [slot_B] = queries.slot_LB
        at = WriteAt(slot_B, nowhere_B, nowhere_B, queries.own_B, queries.position_B, 1)
        seen = PagedContext(self._table.device_RM, queries.row_B, queries.context_B, self.first)

        def put(kept_T1H: Tensor, pool_PGH: Tensor) -> None:
            self._write_kv((kept_T1H,), at, pool_PGH[:, None, None])
        return _LatentStep(self, put, [(slice(None), lambda: seen)])


class _LatentStep(NoIndexer):
    """`model.base.Attend` of one step, launched or captured."""

    def __init__(self, latent: Latent, put: Callable[[Tensor, Tensor], None],
                 parts: Sequence[tuple[slice, Callable[[], Tensor | PagedContext]]]) -> None:
        """put: writes entries to a layer's pool; parts: queries, and what they see."""
        self._latent, self._put, self._parts = latent, put, parts

    def __call__(self, layer: LocalLayer, q_TNH: Tensor, kv_TCKH: Tensor | None,
                 chosen_TKY: Tensor | None = None, sinks_N: Tensor | None = None) -> Tensor:
        assert chosen_TKY is None and sinks_N is None, "MLA KV entries are attended to as a whole here"
        of, reads, pool_PGH = self._latent, self._latent.by_layer[layer], self._latent.rows[layer]
        if kv_TCKH is not None:
            self._put(fp8.kept(kv_TCKH[:, 0], pool_PGH.dtype, reads.value_dim), pool_PGH)
        outs = [of.attend(q_TNH[part], pool_PGH, seen(), value_dim=reads.value_dim, scale=reads.scale)[0]
                for part, seen in self._parts]
        return outs[0] if len(outs) == 1 else torch.cat(outs)
