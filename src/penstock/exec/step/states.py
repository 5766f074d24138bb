"""Where the states of a step's rows are: read behind the token before the step, written at the end of each
page and of the row's part of the step.

A row with drafts (`exec.drafts`) writes that behind its first token, which is right, and no other. Once it is
known how many drafts are, these are scanned once more: a state that has seen a wrong one is never written.
The last stage knows when it has sampled, one before it when the row goes on, or when it is told. A captured
step has both scans in it, since the device knows: nothing of it waits for anyone.

    N rows of a captured step, each of W positions, B in all
    B rows of the step   T tokens of the step   P pages   E elements of a state
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from penstock.core.plan import StepId
from penstock.exec.step.step_batch import StepBatch
from penstock.exec.step.tables import GroupTable, Lowered
from penstock.kernels.fused.step import BlockTableRef
from penstock.kernels.types.ragged import Ragged, on_device
from penstock.kernels.types.states import Again, States, starts_of
from penstock.memory.pool import BlockPool
from penstock.model.base import CacheShape, LocalLayer


@dataclass(frozen=True, slots=True)
class _Run:
    """Tokens [first, end) of the step are of one row, the first at position `start`; drafts: behind it."""

    row: int
    first: int
    end: int
    start: int
    drafts: bool


class StatePools:
    """The layers of a rank that keep a state, if it has any."""

    def __init__(self, groups: Sequence[CacheShape], device: Sequence[BlockPool]) -> None:
        # Of each layer: its group, and the pool [P, E].
        self._layers = {layer: (g, pool.pages[:, i].view(pool.num_pages, -1))
                        for g, (group, pool) in enumerate(zip(groups, device, strict=True))
                        if group.snapshot for i, layer in enumerate(group.layers)}
        self._groups = {g for g, _ in self._layers.values()}
        self._open: dict[StepId, StepStates] = {}   # of which drafts are not known to be right or wrong

    def __bool__(self) -> bool:
        """Whether a layer keeps one."""
        return bool(self._layers)

    def step(self, lowered: Lowered) -> StepStates:
        """Rows that go on say with their positions how many of their drafts were right."""
        runs = _runs(lowered.batch) if self._layers else []
        begins = {run.row: run.start for run in runs}
        for before, states in [*self._open.items()]:
            self.settle(before, {row: begins[row] - start - 1 for row, start in states.waiting.items()
                                 if row in begins})
        found = StepStates(self._layers, {g: lowered.ragged[g] for g in self._groups}, runs)
        if found.waiting:
            self._open[lowered.batch.step] = found
        return found

    def decode(self, tables: Sequence[GroupTable], row_B: Tensor, position_B: Tensor,
               turn_NW: Tensor | None = None) -> DecodeStates:
        """Of a captured step, tables by cache group; the others as `graphs.capture.Decodes` takes them."""
        return DecodeStates(self._layers, {g: tables[g] for g in self._groups}, row_B, position_B, turn_NW)

    def settle(self, step: StepId, right: Mapping[int, int]) -> bool:
        """Of rows with drafts in this step, by table index, how many of them are right: the states behind
        them are written. Once for each row: it may be told again. Whether anything is launched."""
        if (states := self._open.get(step)) is None:
            return False
        states.settle(right)
        if not states.waiting:
            del self._open[step]
        return True

    def waits(self, step: StepId) -> bool:
        """Whether a row of this step is not settled."""
        return step in self._open


class StepStates:
    """Of one step."""

    def __init__(self, layers: dict[LocalLayer, tuple[int, Tensor]], ragged: Mapping[int, Ragged],
                 runs: Sequence[_Run]) -> None:
        self._layers, self._ragged, self._runs = layers, ragged, runs
        self._places = {g: _places(of, runs) for g, of in ragged.items()}
        self._starts = (0, *(run.end for run in runs))
        self._drafting = {run.row: run for run in runs if run.drafts}           # and not settled
        self._again: dict[LocalLayer, list[Again]] | None = (
            {layer: [] for layer in layers} if self._drafting else None)

    @property
    def waiting(self) -> dict[int, int]:
        """Rows with drafts that are not settled, and where each began."""
        return {row: run.start for row, run in self._drafting.items()}

    @cached_property
    def _on_device(self) -> tuple[Tensor, Tensor]:
        return starts_of(self._starts, next(iter(self._ragged.values())).page_T.device)

    def __call__(self, layer: LocalLayer, tokens: int) -> States:
        """As `model.base.AttendsStates.state`."""
        assert tokens == self._starts[-1], f"{tokens} tokens in a step of {self._starts[-1]}"
        group, pool_PE = self._layers[layer]
        return States(pool_PE, self._starts, *self._places[group], *self._on_device,
                      None if self._again is None else self._again[layer])

    def settle(self, right: Mapping[int, int]) -> None:
        """As `StatePools.settle`."""
        assert self._again is not None, "a step without drafts"
        runs, firsts, tokens = list[_Run](), list[int](), list[int]()
        for row in [row for row in self._drafting if row in right]:
            run = self._drafting.pop(row)
            if (n := right[row]) > 0:           # less: of a row that failed
                runs.append(_Run(row, len(tokens), len(tokens) + n, run.start + 1, False))
                firsts.append(run.first)
                tokens += range(run.first + 1, run.first + 1 + n)
        if not runs:
            return
        device = next(iter(self._ragged.values())).page_T.device
        first_b, at_t = (on_device(at, device, torch.int64) for at in (firsts, tokens))
        # As the tables were: a later step may have changed them.
        places = {g: (of.page_T[first_b], _left(of.page_T[at_t], of.page_size, runs))
                  for g, of in self._ragged.items()}
        starts = (0, *(run.end for run in runs))
        for layer, (group, pool_PE) in self._layers.items():
            [again] = self._again[layer]
            again(at_t, States.of(pool_PE, starts, *places[group]))


class DecodeStates:
    """Of a captured step: all that depends on a row is read on the device, once a layer asks."""

    def __init__(self, layers: dict[LocalLayer, tuple[int, Tensor]], tables: Mapping[int, GroupTable],
                 row_B: Tensor, position_B: Tensor, turn_NW: Tensor | None) -> None:
        self._layers, self._tables, self._row_B, self._position_B = layers, tables, row_B, position_B
        self._turn_NW, self._width = turn_NW, 1 if turn_NW is None else turn_NW.shape[1]
        self._again: dict[LocalLayer, list[Again]] | None = (
            {layer: [] for layer in layers} if self._width > 1 else None)

    def _cut(self, width: int) -> tuple[tuple[int, ...], Tensor, Tensor]:
        """`States.starts`, `start_B` and `row_T` of rows that have so many tokens each."""
        tokens, device = len(self._row_B) // self._width * width, self._row_B.device
        return ((*range(0, tokens + 1, width),), torch.arange(0, tokens + 1, width, device=device),
                torch.arange(tokens, device=device) // width)

    @cached_property
    def _starts(self) -> tuple[tuple[int, ...], Tensor, Tensor]:
        return self._cut(self._width)

    @cached_property
    def _places(self) -> dict[int, tuple[Tensor, Tensor, Tensor]]:
        """Of each group `States.from_B`, `States.to_T`, and pages [N, W] of all positions, -1: padding."""
        row_NW, at_NW = (x.long().view(-1, self._width) for x in (self._row_B, self._position_B))
        found = {}
        for g, table in self._tables.items():
            from_N, page_NW = (table.place.pages(row, at.clamp(min=0)) for row, at in (
                (row_NW[:, 0], at_NW[:, 0] - 1), (row_NW, at_NW)))
            page_NW = page_NW.where(at_NW >= 0, -1)
            to_NW = page_NW if self._turn_NW is None else page_NW.where(self._turn_NW == 0, -1)
            found[g] = from_N.where(at_NW[:, 0] > 0, -1), to_NW.flatten(), page_NW
        return found

    def __call__(self, layer: LocalLayer, tokens: int) -> States:
        """As `model.base.AttendsStates.state`."""
        assert tokens == len(self._row_B), f"{tokens} tokens in a step of {len(self._row_B)}"
        group, pool_PE = self._layers[layer]
        from_N, to_B, _ = self._places[group]
        starts, start_N, row_B = self._starts
        return States(pool_PE, starts, from_N, to_B, start_N, row_B,
                      None if self._again is None else self._again[layer])

    def checked(self, counts_B: Tensor) -> None:
        """Once it is known which positions count: the states behind them are written. All that follow a row's
        first are scanned, since a scan does not see what comes behind."""
        if not self._again or self._turn_NW is None:
            return
        at_NW = torch.arange(len(counts_B), device=counts_B.device).view(-1, self._width)
        at_t, (starts, start_N, row_t) = at_NW[:, 1:].flatten(), self._cut(self._width - 1)
        places = {}
        for g, (_, _, page_NW) in self._places.items():
            lasts_B = lasts(counts_B, self._position_B, self._turn_NW.flatten(), self._tables[g].size)
            to_NW = page_NW.where(lasts_B.view(-1, self._width), -1)
            # Dense: of one draft a row `flatten` alone would be a view.
            places[g] = page_NW[:, 0].contiguous(), to_NW[:, 1:].flatten().contiguous()
        for layer, (group, pool_PE) in self._layers.items():
            [again] = self._again[layer]
            again(at_t, States(pool_PE, starts, *places[group], start_N, row_t))


def lasts(counts_B: Tensor, position_B: Tensor, turn_B: Tensor, size: int) -> Tensor:
    """Of the positions of a captured step, as `Draws.checked` has them, those behind which something is kept:
    the last that counts of each row and, of so many tokens, of each page."""
    goes_on_B = (counts_B & (turn_B > 0)).roll(-1)
    return counts_B & (position_B >= 0) & (~goes_on_B | ((position_B + 1) % size == 0))


def _runs(batch: StepBatch) -> list[_Run]:
    runs: list[_Run] = []
    for row, start, turn, (first, end) in zip(batch.rows, batch.start, batch.turns, pairwise(batch.first),
                                              strict=True):
        if turn:
            runs[-1] = replace(runs[-1], end=end, drafts=True)
        else:
            runs.append(_Run(row, first, end, start, False))
    return runs


def _places(ragged: Ragged, runs: Sequence[_Run]) -> tuple[Tensor, Tensor]:
    """`States.from_B` and `States.to_T` of a group."""
    size, at = ragged.page_size, [*(run.row for run in runs), *(run.start - 1 for run in runs)]
    row_B, before_B = on_device(at, ragged.page_T.device, torch.int64).view(2, -1)
    page_B = BlockTableRef(ragged.pages_RM, size).pages(row_B, before_B.clamp(min=0))
    return page_B.where(before_B >= 0, -1), _left(ragged.page_T, size, runs)


def _left(page_T: Tensor, size: int, runs: Sequence[_Run]) -> Tensor:
    """`States.to_T` of tokens that are in these pages."""
    leaves = [t for run in runs for t in range(run.first, run.end) if (
        t == run.first if run.drafts else t == run.end - 1 or (run.start + t - run.first + 1) % size == 0)]
    to_T, leaves_t = torch.full_like(page_T, -1), on_device(leaves, page_T.device, torch.int64)
    to_T[leaves_t] = page_T[leaves_t]
    return to_T
