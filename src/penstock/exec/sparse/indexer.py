"""What a model of MLA KV entries with an indexer attends to, where its rows may be on the host.

Every position, of a prompt and behind it alike, reads the tokens that the model's own indexer chooses. One
that decodes finds them in device pages, in the row's hot buffer, or on the host, from where they come into
it. A chunk of a hosted prompt would bring most rows many times: all that are before it come once, a layer at
a time, into a workspace where a token's slot is its position. So does, on a GPU, one of a prompt on the
device whose rows are codes: attention decodes what lies together once. The sums are the same, term by term,
wherever rows lie. Indexer keys stay on the device.

    T tokens of the step   N query heads   H row dim   I index heads   J index head dim   S chosen tokens
    P pages of a row   G page size   L pages that lack a device page   E entries of `gather`'s list
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.core.plan import Bind
from penstock.exec.graphs.halves import LEAST, LINK_SHARE, Copies
from penstock.exec.sparse.bounds import Selector
from penstock.exec.sparse.layers import DEVICE, HOST, SparseLayers, SparseStep, row_attention
from penstock.exec.sparse.rows import HotRows, Selects, offloaded_of
from penstock.exec.step.attend import LatentOps, check_pools, places_of
from penstock.exec.step.tables import Lowered, RowTables
from penstock.kernels.choose import index_pair
from penstock.kernels.fused.step import Queries
from penstock.kernels.kv import gather
from penstock.kernels.kv.write_kv import WriteAt
from penstock.kernels.types import fp8
from penstock.kernels.types.ragged import on_device
from penstock.memory.pool import BlockPool
from penstock.model.base import Attend, CacheShape, LocalLayer, Model, topk_of, value_dim_of


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Tokens `at` of the step are positions [start, end) of a row; what is before them, by page of it:

    held_2L        int64: page of the device pool, and of the row
    miss_E3, num_1 what `gather` copies from the host, in units of a page
    brought        pages of that
    resident       all of the row is on the device: `held_2L` has the chunk's pages too
    """

    row: int
    at: slice
    start: int
    end: int
    held_2L: Tensor
    miss_E3: Tensor
    num_1: Tensor
    brought: int
    resident: bool


class Indexed(Selects):
    """`Selects` of a model that chooses its tokens itself.

    groups    one has the MLA KV entries of all layers, one the keys of those that have an indexer
    """

    def __init__(self, selector: Selector, model: Model, groups: Sequence[CacheShape], tables: RowTables,
                 device: Sequence[BlockPool], host: Sequence[BlockPool], ops: LatentOps) -> None:
        self._tables, self._ops = tables, ops
        self._topk, self._value_dim = topk_of(model), value_dim_of(model)
        self.weight_bytes, self._tp_size = model.num_bytes, model.stage.tp_rank.size
        assert self._value_dim and self._topk, "ops for MLA KV entries and another model"
        assert ops.select is not None, "a model with an indexer, and no op for it"
        self._select = ops.select
        self._pair = index_pair.OP.use(selector.backends["index_pair"])
        check_pools(groups, device)
        [g], [self._key_group] = offloaded_of(groups)
        self._local = {layer: i for layer, (_, i) in places_of(model.reads, groups).items()}
        self._keys = {layer: device[self._key_group].pages[:, i]
                      for i, layer in enumerate(groups[self._key_group].layers)}
        self.rows = HotRows(tables, g, device[g], unit=1, hot_pages=selector.hot_pages,
                            layers=groups[g].layers, stage=model.stage)
        layers = range(len(groups[g].layers))
        self._device = [device[g].pages[:, i] for i in layers]
        self._host = [host[g].pages[:, i] for i in layers] if host else []
        [self._scale] = {reads.scale for reads in model.reads.values()}
        rows, keys = tables.groups[g], tables.groups[self._key_group]
        self._layers = SparseLayers(
            row_attention(ops.attend, value_dim=self._value_dim, scale=self._scale), unit=1,
            device=self._device, host=self._host, device_RP=rows.device_RM,
            host_RP=self.rows.host_RM, hot=self.rows.hot, backends=selector.backends)
        self._gather = gather.OP.use(selector.backends["gather"])
        pages = rows.device_RM.shape[1] if host else 0
        self._whole_P11GH = device[g].pages.new_empty(pages, *device[g].pages.shape[2:])
        # Of captured steps.
        self.kinds = (DEVICE,) if rows.host_RM is None else (DEVICE, HOST)
        self.looks = self.rows.looks(keys.place, rows.place, rows.host_place)
        self._keys_RM, self._nowhere = keys.device_RM, dict[int, Tensor]()

    def bind(self, bind: Bind, *, budget: int, num_prompt: int) -> None:
        self.rows.bind(bind, budget=self._topk, first=0)

    def kind(self, rows: Sequence[int]) -> str:
        """Whether a row lacks a device page."""
        return DEVICE if all(map(self._tables.groups[self.rows.group].is_resident, rows)) else HOST

    def may_halve(self, kind: str, bucket: int) -> bool:
        """What the ranks of a layer add up goes one way at a time."""
        return kind == HOST and bucket >= LEAST and self._tp_size == 1

    def halves(self) -> bool:
        return self.rows.missed_bytes * LINK_SHARE > self.weight_bytes

    def decode(self, kind: str, queries: Queries, turn_NW: Tensor | None = None,
               copies: Copies | None = None) -> Attend:
        row_B, position_B = queries.row_B, queries.position_B
        if (nowhere_B := self._nowhere.get(len(row_B))) is None:        # not of a graph: a step comes before it
            nowhere_B = self._nowhere[len(row_B)] = torch.full_like(queries.at_B, -1)
        key_B, device_B, host_B = queries.slot_LB
        at = WriteAt(device_B, host_B, nowhere_B, queries.own_B, position_B, 1)
        keys_at = WriteAt(key_B, nowhere_B, nowhere_B, queries.own_B, position_B, 1)
        step = SparseStep(row_B, position_B, (slice(None),), self.rows.hot.now_R11,
                          None if turn_NW is None else turn_NW.flatten(), kind == HOST, copies)
        return _IndexedStep(self, step, slice(None), (), at, keys_at, row_B, position_B, self._keys_RM)

    def step(self, lowered: Lowered) -> Attend:
        """The attention of a step whose binds, grows, remaps and resizes are applied."""
        rows: list[int] = []
        positions: list[int] = []
        tokens: list[int] = []              # of the step, that read row by row
        at_once: list[int] = []
        chunks: list[_Chunk] = []
        at = 0
        for r, start, count in zip(lowered.batch.rows, lowered.batch.start, lowered.batch.count, strict=True):
            if count > 1 and self._together(r, start + count, count):
                chunks.append(self._chunk(r, slice(at, at + count), start, start + count))
            else:
                rows += [r] * count
                positions += range(start, start + count)
                tokens += range(at, at + count)
                at_once += [self.rows.at_once(r)] * count
            at += count
        step = self._layers.step(rows, positions, at_once) if rows else None
        token_B = on_device(tokens, lowered.row_T.device, torch.int64) if chunks else slice(None)
        write_at, row_T = self.rows.write_at(lowered), lowered.row_T.int()
        position_T, ragged = lowered.positions_T.int(), lowered.ragged[self._key_group]
        nowhere_T = torch.full_like(ragged.page_T, -1)
        keys_at = WriteAt(ragged.page_T * ragged.page_size + ragged.offset_T, nowhere_T, nowhere_T,
                          nowhere_T.int(), position_T, 1)
        # Only pages that the step sees: scores are as wide as the table.
        table_RM = ragged.pages_RM[:, :-(-max(ragged.context) // ragged.page_size)]
        return _IndexedStep(self, step, token_B, chunks, write_at, keys_at, row_T, position_T, table_RM)

    def _together(self, r: int, end: int, count: int) -> bool:
        """Whether so many tokens of a row, the last of `end`, read what is before them from one place. Of a
        row on the device only codes on a GPU, where they choose more than there are: a CPU decodes as it
        reads, and a copy is 45 % of 17 tokens of 16 heads."""
        if not self._tables.groups[self.rows.group].is_resident(r):
            return True
        pages = self._whole_P11GH
        return pages.is_cuda and pages.dtype == torch.uint8 and count * self._topk > end

    def _chunk(self, r: int, at: slice, start: int, end: int) -> _Chunk:
        table = self._tables.groups[self.rows.group]
        resident = table.is_resident(r)
        pages = slice(0, -(-(end if resident else start) // table.size))
        device_P, host_P = (x[r, pages] for x in (table.device_RM, self.rows.host_RM))
        held_L = torch.arange(len(device_P), device=device_P.device)
        lacks_L = held_L[:0]
        if not resident:            # on a GPU the host waits for how many there are
            lacks_L, held_L = ((device_P < 0).nonzero().flatten(), (device_P >= 0).nonzero().flatten())
        miss_E3 = torch.stack((torch.zeros_like(lacks_L), host_P[lacks_L].long(), lacks_L), 1).int()
        return _Chunk(r, at, start, end, torch.stack((device_P[held_L].long(), held_L)), miss_E3,
                      on_device([len(miss_E3)], miss_E3.device, torch.int32), len(miss_E3), resident)

    def attend(self, layer: LocalLayer, q_TNH: Tensor, row_T1H: Tensor, chosen_TS: Tensor,
               by: _IndexedStep) -> Tensor:
        i, at = self._local[layer], by.token_B
        row_T1H = fp8.kept(row_T1H, self._whole_P11GH.dtype, self._value_dim)
        self._layers.write_kv(i, (row_T1H,), by.at)
        if not by.chunks:
            assert by.step is not None, "a step without tokens"
            return self._layers.attend(i, q_TNH, chosen_TS[:, None], by.step)
        out_TNR = q_TNH.new_empty(*q_TNH.shape[:2], self._value_dim)
        if by.step is not None:
            out_TNR[at] = self._layers.attend(i, q_TNH[at], chosen_TS[at][:, None], by.step)
        for chunk in by.chunks:
            of = chunk.at
            out_TNR[of] = self._through(i, chunk, q_TNH[of], row_T1H[of], chosen_TS[of])
        return out_TNR

    def _through(self, layer: int, chunk: _Chunk, q_TNH: Tensor, row_T1H: Tensor,
                 chosen_TS: Tensor) -> Tensor:
        """A chunk over all rows before it and its own, in the order of positions."""
        page_L, at_L = chunk.held_2L
        held_L11GH = self._device[layer][page_L]
        if chunk.resident:
            whole_P11GH = held_L11GH
        else:
            whole_P11GH = self._whole_P11GH[:-(-chunk.end // held_L11GH.shape[3])]
            self._gather(self._host[layer], whole_P11GH, chunk.miss_E3, chunk.num_1,
                         unit=whole_P11GH.shape[3])
            self.rows.window(layer, chunk.row, chunk.brought)
            whole_P11GH[at_L] = held_L11GH
            whole_P11GH.view(-1, row_T1H.shape[2])[chunk.start:chunk.end] = row_T1H[:, 0]
        return self._ops.attend(q_TNH, whole_P11GH[:, 0, 0], chosen_TS, value_dim=self._value_dim,
                                scale=self._scale)[0]

    def choose(self, layer: LocalLayer, q_TIJ: Tensor, weight_TI: Tensor, key_TJ: Tensor,
               by: _IndexedStep) -> Tensor:
        keys_P11GJ = self._keys[layer]
        if keys_P11GJ.dtype == torch.uint8:         # both are mixed and coded
            q_TIJ, weight_TI, kept_TJ = self._pair(q_TIJ, weight_TI, key_TJ)
        else:
            kept_TJ = fp8.kept(key_TJ, keys_P11GJ.dtype, key_TJ.shape[1])
        self._layers.put((kept_TJ[:, None],), by.keys_at, keys_P11GJ)
        return self._select(q_TIJ, weight_TI, keys_P11GJ[:, 0, 0], by.table_RM, by.row_T, by.position_T,
                            topk=self._topk)


@dataclass(frozen=True, slots=True)
class _IndexedStep:
    """`model.base.Attend` of one step.

    step, token_B, chunks     tokens that read row by row, which they are, and the others
    at, keys_at               where rows and keys are written
    row_T, position_T, table_RM    as `index_select` takes them
    """

    indexed: Indexed
    step: SparseStep | None
    token_B: Tensor | slice
    chunks: Sequence[_Chunk]
    at: WriteAt
    keys_at: WriteAt
    row_T: Tensor
    position_T: Tensor
    table_RM: Tensor

    def __call__(self, layer: LocalLayer, q_TNH: Tensor, kv_TCKH: Tensor | None,
                 chosen_TS: Tensor | None = None, sinks_N: Tensor | None = None) -> Tensor:
        assert chosen_TS is not None and sinks_N is None, "nothing has been chosen for this layer"
        assert kv_TCKH is not None, "each layer of a model with an indexer writes its entries"
        return self.indexed.attend(layer, q_TNH, kv_TCKH[:, 0], chosen_TS, self)

    def select(self, layer: LocalLayer, q_TIJ: Tensor, weight_TI: Tensor, key_TJ: Tensor) -> Tensor:
        return self.indexed.choose(layer, q_TIJ, weight_TI, key_TJ, self)
