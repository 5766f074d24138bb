"""The block tables of a rank on its device, and each row's last sampled token; `lower` makes tensors of a batch.

A plan's binds, grows and remaps alone change the tables. One ragged layout serves prefill, decode and any mix. Knows
rows, positions and pages, not requests or sampling.

    R rows of the tables   M pages a row   B rows of the step   T tokens of the step   G page size
"""
from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import TypeAlias

import torch
from torch import Tensor

from penstock.core.plan import Bind, DramPage, Grow, HbmPage, Page, Remap, Row
from penstock.exec.step.edits import Edits
from penstock.exec.step.step_batch import StepBatch
from penstock.kernels.fused.step import BlockTableRef
from penstock.kernels.types.ragged import Ragged, on_device
from penstock.memory.pool import PagePool

NONE = -1       # entry of a table without a page in that tier
# (row id, digest of its pages in every group) of each row that was ever bound: the same on every rank.
Digests: TypeAlias = Callable[[], tuple[tuple[int, str], ...]]


@dataclass(frozen=True, slots=True)
class Lowered:
    """An eager step, on the device.

    ids_T, positions_T    int64
    row_T                 int64: table index of each token's row
    ragged                of each cache group
    sample_at_B           int64: index into T of the last token of each entry that samples
    """

    batch: StepBatch
    ids_T: Tensor
    positions_T: Tensor
    row_T: Tensor
    ragged: tuple[Ragged, ...]
    sample_at_B: Tensor


class GroupTable:
    """The block table of one cache group: entry [r, i] of `device_RM` and of `host_RM`, int32, is the index
    of page i of row r in that tier's pool (its id less the pool's base), or NONE. `host_RM` is None
    without a host pool. They change when `edits` are applied."""

    def __init__(self, rows: int, max_len: int, device_pool: PagePool, host_pool: PagePool | None,
                 edits: Edits, device: torch.device | str) -> None:
        self._pools, self._edits = (device_pool, host_pool), edits
        self.size = device_pool.layout.page_size
        shape = rows, -(-max_len // self.size)
        self.device_RM = torch.full(shape, NONE, dtype=torch.int32, device=device)
        self.host_RM = None if host_pool is None else torch.full_like(self.device_RM, NONE)
        self.place, self.host_place = (BlockTableRef(table, self.size) for table in (self.device_RM, self.host_RM))
        self._held: list[int | None] = [None] * rows       # entries; None: never bound
        self._absent = [set[int]() for _ in range(rows)]   # of them, those without a device page

    def bind(self, row: int, pages: Sequence[Page], host: Sequence[Page]) -> None:
        """Forget all entries of `row`; from now on it has these."""
        for table in (self.device_RM, self.host_RM):
            if table is not None:
                self._put(table, row, range(self._held[row] or 0), repeat(NONE))
        self._held[row], self._absent[row] = 0, set()
        self.append(row, 0, pages, host)

    def append(self, row: int, first: int, pages: Sequence[Page], host: Sequence[Page]) -> None:
        """Entries `first` and on; what is appended ends the table. Asserts that nothing is between."""
        assert first == self._held[row], f"row {row} has {self._held[row]} pages and grows at {first}"
        end = first + len(pages)
        assert end <= self.device_RM.shape[1], (
            f"row {row}: {end} pages in a table of {self.device_RM.shape[1]}")
        assert len(host) in (0, len(pages)), f"row {row}: {len(pages)} pages, {len(host)} on the host"
        self._held[row] = end
        self._absent[row].update([first + i for i, page in enumerate(pages) if page == NONE])
        for table, pool, column in zip((self.device_RM, self.host_RM), self._pools, (pages, host),
                                       strict=True):
            if column:
                assert table is not None and pool is not None, f"row {row}: no host pool"
                self._put(table, row, range(first, end), _indices(pool, column))

    def remap(self, row: int, entries: Sequence[int], pages: Sequence[HbmPage],
              host: Sequence[DramPage]) -> None:
        """These entries, which `row` has, have these copies from now on."""
        held = self._held[row]
        assert held is not None and 0 <= min(entries) and max(entries) < held, (
            f"row {row} has {held} pages, and entry {min(entries)} or {max(entries)} is not one of them")
        assert len(pages) == len(host) == len(entries), f"row {row}: not a page for each of {len(entries)}"
        self._absent[row].difference_update(entries)
        self._absent[row].update([i for i, page in zip(entries, pages, strict=True) if page == NONE])
        for table, pool, column in ((self.device_RM, self._pools[0], pages),
                                    (self.host_RM, self._pools[1], host)):
            if table is None or pool is None:
                assert max(column) == NONE, f"row {row}: no host pool"
            else:
                self._put(table, row, entries, _indices(pool, column))

    def _put(self, table_RM: Tensor, row: int, entries: Iterable[int], values: Iterable[int]) -> None:
        first = row * table_RM.shape[1]
        self._edits.put(table_RM, zip([first + i for i in entries], values, strict=False))

    def end(self, row: int) -> int:
        """Positions that `row` has entries for."""
        return (self._held[row] or 0) * self.size

    def is_resident(self, row: int) -> bool:
        """Whether each page of `row` has a device page."""
        return not self._absent[row]

    def copied(self) -> tuple[list[int | None], list[Tensor]]:
        """Entries of each row (None: never bound), and of the tables of both tiers as many columns as any row has,
        on the host: complete once the device has come here."""
        most = max([held or 0 for held in self._held])
        return [*self._held], [table[:, :most].contiguous().to("cpu", non_blocking=True, copy=True)
                               for table in (self.device_RM, self.host_RM) if table is not None]

    def check(self, row: int, end: int) -> None:
        """Asserts that `row` is bound and has an entry for each position before `end`."""
        held = self._held[row]
        assert held is not None, f"row {row} runs before it was bound"
        assert end <= held * self.size, (
            f"row {row} computes up to {end} but has {held} pages of {self.size}")


def _indices(pool: PagePool, column: Sequence[Page]) -> list[int]:
    """Entries of a table."""
    return [NONE if p == NONE else pool.index(p) for p in column]


class RowTables:
    """What the device remembers of each row: its pages in each cache group, its last token.

    edits    of binds, grows and remaps, which change nothing before they are applied
    """

    def __init__(self, rows: int, max_len: int, device_pools: Sequence[PagePool],
                 host_pools: Sequence[PagePool], *, base: int = 0,
                 device: torch.device | str = "cpu") -> None:
        """Pools by cache group; `host_pools` may be empty. max_len: tokens of the longest row."""
        hosts: Sequence[PagePool | None] = host_pools or [None] * len(device_pools)
        self.edits = Edits(device)
        self.groups = tuple(GroupTable(rows, max_len, pool, host, self.edits, device)
                            for pool, host in zip(device_pools, hosts, strict=True))
        self._rows, self._base, self._device = rows, base, device
        # One more than there are rows: what a captured step samples for padding goes there.
        self.last_R = torch.zeros(rows + 1, dtype=torch.int64, device=device)
        # Tokens of a row, behind a step with drafts: how many it says is known there first.
        self.length_R = torch.zeros(rows + 1, dtype=torch.int32, device=device)

    def index(self, row: Row) -> int:
        """Table index of `row`. Asserts that the id is a row of these tables."""
        i = row - self._base
        assert 0 <= i < self._rows, (
            f"row {row} is not in {self._base} .. {self._base + self._rows - 1}")
        return i

    def bind(self, bind: Bind, last: int) -> None:
        """Apply a bind, but for its hot buffer; `last` is the row's last sampled token."""
        i, groups = self.index(bind.row), self.groups
        for table, pages, host in zip(groups, bind.pages, bind.host or [()] * len(groups),
                                      strict=True):
            table.bind(i, pages, host)
        self.edits.put(self.last_R, [(i, last)])

    def grow(self, grow: Grow) -> None:
        self.groups[grow.group].append(self.index(grow.row), grow.index, grow.pages, grow.host)

    def remap(self, remap: Remap) -> None:
        assert 0 <= remap.group < len(self.groups) and remap.entries, f"no table entries for {remap}"
        self.groups[remap.group].remap(self.index(remap.row), remap.entries, remap.device, remap.host)

    def digests(self) -> Digests:
        """As of the steps that have been launched, and complete once the device has come here."""
        groups = [table.copied() for table in self.groups]

        def digested() -> tuple[tuple[int, str], ...]:
            out = []
            for row, bound in enumerate(groups[0][0]):
                if bound is not None:
                    digest = hashlib.blake2b(digest_size=8)
                    for held, tables in groups:
                        digest.update(b"%d " % (held[row] or 0))
                        for table in tables:
                            digest.update(table[row, :held[row] or 0].numpy().tobytes())
                    out.append((self._base + row, digest.hexdigest()))
            return tuple(out)
        return digested

    def sampled(self, rows: Sequence[int], tokens_B: Tensor) -> None:
        """Remember the newest token of each row, given by table index. Stays on the device."""
        self.last_R[on_device(rows, self.last_R.device, torch.int64)] = tokens_B

    def end(self, row: Row) -> int:
        """Positions that it has pages for, in every group."""
        return min(table.end(self.index(row)) for table in self.groups)

    def check(self, rows: Sequence[int], ends: Sequence[int]) -> None:
        """Asserts that each of these rows, by table index, is bound and has pages up to its end."""
        for table in self.groups:
            for row, end in zip(rows, ends, strict=True):
                table.check(row, end)

    def lower(self, batch: StepBatch) -> Lowered:
        """The step's tensors. It has rows; the edits of its binds, grows and remaps are applied.

        Asserts that every row is bound and has a page for each position it computes.
        """
        tokens, first = batch.tokens, batch.first
        assert min(batch.count) >= 1 and len(tokens) == first[-1], "tokens do not add up to the counts"
        self.check(batch.rows, batch.ends)
        ids_T, row_T, positions_T, at_S = batch.on(self.last_R.device)
        if owed := tokens.count(-1):            # whose input is on the device
            assert owed == sum([tokens[end - 1] < 0 for end in first[1:]]), (
                "-1 may only be the last token of a row: this executor takes no drafts")
            ids_T = torch.where(ids_T < 0, self.last_R[row_T], ids_T)
        step = first, batch.ends, tuple(batch.rows)
        return Lowered(
            batch, ids_T, positions_T, row_T,
            tuple(Ragged(*step, table.device_RM, table.place.pages(row_T, positions_T),
                         positions_T % table.size, table.size) for table in self.groups), at_S)
