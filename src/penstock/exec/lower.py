"""StepPlan -> tensors: one ragged lowering for prefill, decode and any mix of them.

Owns the device-resident row tables (pages, last sampled token), which change by a plan's binds
and grows only. Knows rows, positions and pages; refuses to know requests and sampling.

    R rows of the table   B rows of the step   T tokens of the step   G page size
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.core.plan import HbmPage, Row, StepPlan
from penstock.kernels.ragged import Ragged
from penstock.memory.hbm import HbmPool


@dataclass(frozen=True, slots=True)
class Lowered:
    """The tensors of one step.

    ids_T, positions_T    int64, device
    sample_rows           table index of each row that samples, in plan order
    sample_at_B           int64, device: index into T of the last token of each of these rows
    """

    ids_T: Tensor
    positions_T: Tensor
    ragged: Ragged
    sample_rows: tuple[int, ...]
    sample_at_B: Tensor


class RowTable:
    """What the device remembers of each row: its pages, as pool indices, and its last token."""

    def __init__(self, rows: int, pool: HbmPool, *, base: int = 0,
                 device: torch.device | str = "cpu") -> None:
        self._pool, self._base, self._device = pool, base, device
        self._size = pool.shape.page_size
        self._pages: list[tuple[int, ...] | None] = [None] * rows
        self._last_R = torch.zeros(rows, dtype=torch.int64, device=device)

    def index(self, row: Row) -> int:
        """Table index of `row`. Asserts that the id is a row of this table."""
        i = row - self._base
        assert 0 <= i < len(self._pages), (
            f"row {row} is not in {self._base} .. {self._base + len(self._pages) - 1}")
        return i

    def bind(self, row: Row, pages: Sequence[HbmPage], last: int) -> None:
        """Forget all of `row`; from now on it has `pages` and its last sampled token is `last`."""
        i = self.index(row)
        self._pages[i] = tuple(self._pool.index(p) for p in pages)
        self._last_R[i] = last

    def grow(self, row: Row, index: int, pages: Sequence[HbmPage]) -> None:
        """`pages` are entries `index` and on of the row's table, and end it."""
        i = self.index(row)
        held = self._pages[i]
        assert held is not None, f"row {row} grows before it was bound"
        assert index == len(held), f"row {row} has {len(held)} pages and grows at {index}"
        self._pages[i] = held + tuple(self._pool.index(p) for p in pages)

    def sampled(self, rows: Sequence[int], tokens_B: Tensor) -> None:
        """Remember the newest token of each row, given by table index. Stays on the device."""
        self._last_R[torch.tensor(rows, device=self._device)] = tokens_B

    def lower(self, plan: StepPlan) -> Lowered:
        """The step's tensors. `plan` has rows; its binds and grows are already applied.

        Asserts that every row is bound and has a page for each position it computes.
        """
        size = self._size
        start_B, context, pages_B = [0], [], []
        positions: list[int] = []
        slots: list[int] = []
        sample_rows: list[int] = []
        sample_at: list[int] = []
        owed: list[tuple[int, int]] = []          # index into T, row: the input is on the device
        for row, start, count, samples in zip(plan.rows, plan.start, plan.count, plan.samples,
                                              strict=True):
            i = self.index(row)
            pages = self._pages[i]
            end = start + count
            assert pages is not None, f"row {row} runs before it was bound"
            assert count >= 1, f"row {row} computes {count} tokens"
            assert end <= len(pages) * size, (
                f"row {row} computes up to {end} but has {len(pages)} pages of {size}")
            at = len(positions)
            if count == 1:
                positions.append(start)
                slots.append(pages[start // size] * size + start % size)
                if plan.tokens[at] < 0:
                    owed.append((at, i))
            else:
                positions.extend(range(start, end))
                for n in range(start // size, -(-end // size)):
                    first = pages[n] * size
                    slots.extend(range(first + max(start - n * size, 0),
                                       first + min(end - n * size, size)))
                if plan.tokens[at + count - 1] < 0:
                    owed.append((at + count - 1, i))
            start_B.append(at + count)
            context.append(end)
            pages_B.append(pages)
            if samples:
                sample_rows.append(i)
                sample_at.append(at + count - 1)
        assert len(plan.tokens) == len(positions), "tokens do not add up to the counts"
        ids_T = self._ids(plan.tokens, owed)
        return Lowered(
            ids_T, torch.tensor(positions, device=self._device),
            Ragged(tuple(start_B), tuple(context), tuple(pages_B),
                   torch.tensor(slots, device=self._device), size),
            tuple(sample_rows), torch.tensor(sample_at, dtype=torch.int64, device=self._device))

    def _ids(self, tokens: Sequence[int], owed: Sequence[tuple[int, int]]) -> Tensor:
        ids_T = torch.tensor(tokens, device=self._device)
        if owed:
            at, rows = zip(*owed, strict=True)
            ids_T[torch.tensor(at, device=self._device)] = (
                self._last_R[torch.tensor(rows, device=self._device)])
        assert tokens.count(-1) == len(owed), (
            "-1 may only be the last token of a row: this executor takes no drafts")
        return ids_T
