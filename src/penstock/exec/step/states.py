"""Where the states of a step's rows are: read behind the token before the step, written at the end of each
page and of the row's part of the step.

A row with drafts (`exec.drafts`) writes that behind its first token, which is right, and no other. Once it is
known how many drafts are, these are scanned once more: a state that has seen a wrong one is never written.
The last stage knows when it has sampled, one before it when the row goes on, or when it is told. A captured
step has both scans in it, since the device knows: nothing of it waits for anyone.

    B rows of the step   T tokens of the step   P pages   E elements of a state
    N rows of a captured step, each of W positions
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypeAlias

import torch
from torch import Tensor

from penstock.core.plan import StepId
from penstock.exec.step.step_batch import StepBatch
from penstock.exec.step.tables import GroupTable, Lowered
from penstock.kernels.fused.step import BlockTableRef
from penstock.kernels.types.ragged import Ragged, on_device
from penstock.kernels.types.states import BLOCK, Again, Blocks, States, starts_of
from penstock.memory.pool import BlockPool
from penstock.model.base import CacheShape, LocalLayer

Starts: TypeAlias = tuple[tuple[int, ...], Tensor, Tensor]      # `States.starts`, `start_B` and `row_T`
Places: TypeAlias = Mapping[int, tuple[Tensor, Tensor]]         # of each group `States.from_B` and `to_T`


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
        runs = _runs(lowered.batch) if self._layers else []
        self.go_on({run.row: run.start for run in runs})
        found = StepStates(self._layers)
        if self._layers:
            found.launched({g: lowered.ragged[g] for g in self._groups}, runs)
        if found.waiting:
            self._open[lowered.batch.step] = found
        return found

    def go_on(self, begins: Mapping[int, int]) -> None:
        """Rows that go on, by table index, say with their positions how many of their drafts were right."""
        for before, states in [*self._open.items()]:
            self.settle(before, {row: begins[row] - start - 1 for row, start in states.waiting.items()
                                 if row in begins})

    def decode(self, tables: Sequence[GroupTable], row_B: Tensor, position_B: Tensor,
               turn_NW: Tensor | None = None) -> StepStates:
        """Of a captured step, tables by cache group; the others as `Attending.decode` has them."""
        found = StepStates(self._layers)
        if self._layers:
            found.captured({g: tables[g] for g in self._groups}, row_B, position_B, turn_NW)
        return found

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
    """Of one step: launched, by a host that knows its rows, or captured, where all that depends on a row is read on
    the device. `again`: by layer the scan that its drafts have once more; None: there are none."""

    def __init__(self, layers: Mapping[LocalLayer, tuple[int, Tensor]]) -> None:
        self._layers, self._places = layers, dict[int, tuple[Tensor, Tensor]]()
        self._starts: Starts | None = None
        self._blocks: Blocks | None = None
        self._sizes, self._pages = dict[int, int](), dict[int, Tensor]()        # of each group; pages of all tokens
        self._drafting = dict[int, _Run]()              # of a step that is launched: rows that are not settled
        self._position_B: Tensor | None = None
        self._turn_NW: Tensor | None = None
        self.again: dict[LocalLayer, list[Again]] | None = None

    def launched(self, ragged: Mapping[int, Ragged], runs: Sequence[_Run]) -> None:
        device = next(iter(ragged.values())).page_T.device
        starts = (0, *(run.end for run in runs))
        self._starts = starts, *starts_of(starts, device)
        self._blocks = Blocks.of(starts, [-1 if run.drafts else run.start for run in runs], device)
        self._places = {g: _places(of, runs) for g, of in ragged.items()}
        # As the tables are: a later step may change them.
        self._sizes, self._pages = ({g: of.page_size for g, of in ragged.items()},
                                    {g: of.page_T for g, of in ragged.items()})
        self._drafting = {run.row: run for run in runs if run.drafts}
        self._may_scan_again(bool(self._drafting))

    def captured(self, tables: Mapping[int, GroupTable], row_B: Tensor, position_B: Tensor,
                 turn_NW: Tensor | None) -> None:
        width = 1 if turn_NW is None else turn_NW.shape[1]
        row_NW, at_NW = (x.long().view(-1, width) for x in (row_B, position_B))
        self._starts = _cut(len(row_NW), width, row_B.device)
        self._position_B, self._turn_NW = position_B, turn_NW
        for g, table in tables.items():
            from_N, page_NW = (table.place.pages(row, at.clamp(min=0)) for row, at in (
                (row_NW[:, 0], at_NW[:, 0] - 1), (row_NW, at_NW)))
            self._sizes[g], self._pages[g] = table.size, page_NW.where(at_NW >= 0, -1)
            to_NW = self._pages[g] if turn_NW is None else self._pages[g].where(turn_NW == 0, -1)
            self._places[g] = from_N.where(at_NW[:, 0] > 0, -1), to_NW.flatten()
        self._may_scan_again(width > 1)

    def _may_scan_again(self, drafts: bool) -> None:
        self.again = {layer: [] for layer in self._layers} if drafts else None

    @property
    def waiting(self) -> dict[int, int]:
        """Rows with drafts that are not settled, and where each began."""
        return {row: run.start for row, run in self._drafting.items()}

    def __call__(self, layer: LocalLayer, tokens: int) -> States:
        """As `model.base.AttendsStates.state`."""
        assert self._starts is not None and tokens == self._starts[0][-1], f"{tokens} tokens in another step"
        group, pool_PE = self._layers[layer]
        starts, start_B, row_T = self._starts
        # Where pages do not end with blocks, a state is left inside some of these.
        return States(pool_PE, starts, *self._places[group], start_B, row_T,
                      None if self.again is None else self.again[layer],
                      self._blocks if self._sizes[group] % BLOCK == 0 else None)

    def settle(self, right: Mapping[int, int]) -> None:
        """As `StatePools.settle`."""
        runs, firsts, tokens = list[_Run](), list[int](), list[int]()
        for row in [row for row in self._drafting if row in right]:
            run = self._drafting.pop(row)
            if (n := right[row]) > 0:           # less: of a row that failed
                runs.append(_Run(row, len(tokens), len(tokens) + n, run.start + 1, False))
                firsts.append(run.first)
                tokens += range(run.first + 1, run.first + 1 + n)
        if not runs:
            return
        device = next(iter(self._pages.values())).device
        first_b, at_t = (on_device(at, device, torch.int64) for at in (firsts, tokens))
        starts = (0, *(run.end for run in runs))
        self._scan_again(at_t, (starts, *starts_of(starts, device)), {
            g: (page_T[first_b], _left(page_T[at_t], self._sizes[g], runs)) for g, page_T in self._pages.items()})

    def checked(self, counts_B: Tensor) -> None:
        """Of a captured step, once it is known which positions count: the states behind them are written. All that
        follow a row's first are scanned, since a scan does not see what comes behind."""
        if not self.again or self._turn_NW is None:
            return
        assert self._position_B is not None
        rows, width = self._turn_NW.shape
        at_NW, places = torch.arange(len(counts_B), device=counts_B.device).view(-1, width), {}
        for g, page_NW in self._pages.items():
            lasts_B = lasts(counts_B, self._position_B, self._turn_NW.flatten(), self._sizes[g])
            to_NW = page_NW.where(lasts_B.view(-1, width), -1)
            # Dense: of one draft a row `flatten` alone would be a view.
            places[g] = page_NW[:, 0].contiguous(), to_NW[:, 1:].flatten().contiguous()
        self._scan_again(at_NW[:, 1:].flatten(), _cut(rows, width - 1, counts_B.device), places)

    def _scan_again(self, at_t: Tensor, starts: Starts, places: Places) -> None:
        assert self.again is not None, "a step without drafts"
        for layer, (group, pool_PE) in self._layers.items():
            [again] = self.again[layer]
            again(at_t, States(pool_PE, starts[0], *places[group], *starts[1:]))


def _cut(rows: int, width: int, device: torch.device) -> Starts:
    """Of rows that have so many tokens each."""
    return ((*range(0, rows * width + 1, width),), torch.arange(0, rows * width + 1, width, device=device),
            torch.arange(rows * width, device=device) // width)


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
