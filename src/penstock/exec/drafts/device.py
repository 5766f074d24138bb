"""Drafts that a CUDA device makes by itself, so that a step with drafts is launched ahead of the answers of
the one before: where a row is and what it has said are there.

    N rows of a step   R rows of the tables, and one for padding   L tokens of the longest   D drafts at most
"""
from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from penstock.core.plan import RequestId, Row, StepPlan

History = Callable[[RequestId], tuple[Sequence[int], Sequence[int]]]
OUT = -2            # of a row's position: it follows from steps in flight


class OnDevice(Protocol):
    """A drafter whose tables are on a device. Whatever it proposes, no token changes.

    layer    it computes with the model: every step of rows that decode is one of its, whether any may draft
             or not
    """

    layer: bool = False

    def put(self, row: int, first: int, prompt: Sequence[int], outputs: Sequence[int]) -> None:
        """Of a row of the tables its tokens, of which it has those before index `first`. Does not wait."""
        return

    def propose(self, index_N: Tensor, at_N: Tensor, last_N: Tensor, most_N: Tensor, most: int) -> Tensor:
        """[N, most] int64: what follows the tokens `last` at indices `at` of these rows, each id in the
        vocabulary; -1: nothing from there on. Of each row `most_N` are read, and no more of its pages are its
        own. Captured: a function of tensors alone."""
        ...

    def ran(self, token_B: Tensor, hidden_BD: Tensor, row_B: Tensor, position_B: Tensor, turn_B: Tensor,
            counts_B: Tensor) -> None:
        """The step's positions, as `Draws.checked` has them, what they took and what the model made of it,
        behind its last norm. Captured, behind the step."""
        return

    def said(self, index_N: Tensor, at_N: Tensor, token_NW: Tensor) -> None:
        """What these rows may have said behind `at`. Captured. A part of it is said again otherwise."""
        return


class GpuNGram(OnDevice):
    """`NGram` of `drafter.py`, of all rows at once."""

    def __init__(self, rows: int, max_len: int, least: int, most: int, device: torch.device) -> None:
        self._least, self._most = least, most
        self._end_L = torch.arange(max_len, dtype=torch.int32, device=device)
        # What padding and the last step of a row write has room behind.
        self._said_RL = torch.zeros(rows + 1, max_len + 32, dtype=torch.int32, device=device)

    def put(self, row: int, first: int, prompt: Sequence[int], outputs: Sequence[int]) -> None:
        tokens = (*prompt[first:], *outputs[max(0, first - len(prompt)):])
        there = torch.from_numpy(np.asarray(tokens, np.int32))
        if self._said_RL.is_cuda:
            there = there.pin_memory()
        self._said_RL[row, first:first + len(tokens)].copy_(there, non_blocking=True)

    def propose(self, index_N: Tensor, at_N: Tensor, last_N: Tensor, most_N: Tensor, most: int) -> Tensor:
        length = len(self._end_L)
        at_N1 = at_N.clamp(0, length - 1).long()[:, None]
        self._said_RL[index_N, at_N1[:, 0]] = last_N.int()
        if not most:
            return last_N[:, None][:, :0]
        said_NL = self._said_RL[index_N, :length]
        same_NL, longest_NL = self._end_L < at_N1, torch.zeros_like(said_NL)
        for n in range(self._most):             # whether the n + 1 tokens that end here are the last ones
            same_NL = same_NL & (said_NL.roll(n, 1) == said_NL.gather(1, (at_N1 - n).clamp(0))) & (
                self._end_L >= n)
            if n + 1 >= self._least:
                longest_NL += same_NL
        best_N1, end_N1 = (longest_NL * length + self._end_L).max(1, keepdim=True)
        next_ND = end_N1 + torch.arange(1, most + 1, device=index_N.device)
        found_ND = said_NL.gather(1, next_ND.clamp(max=length - 1)).long()
        return found_ND.where((best_N1 >= length) & (next_ND <= at_N1), -1)

    def said(self, index_N: Tensor, at_N: Tensor, token_NW: Tensor) -> None:
        next_NW = at_N.clamp(0, len(self._end_L) - 1).long()[:, None] + torch.arange(
            1, token_NW.shape[1] + 1, device=at_N.device)
        self._said_RL[index_N[:, None], next_NW] = token_NW.int()


class Ahead:
    """What the host tells a device of the rows of a step: what it does not know yet of their tokens, how far
    they may draft, and where they are, unless that follows from steps in flight."""

    def __init__(self, drafter: OnDevice, history: History, simple: Callable[[RequestId], bool],
                 at_once: Callable[[Row], int], index: Callable[[Row], int], *,
                 beyond: Callable[[RequestId], int], keeps: bool, tp_size: int) -> None:
        """As `Narrowing` takes them; simple: whether a device samples a row by itself; index: of a row in the
        tables; beyond: as `Tokens.beyond`; keeps: steps leave more behind than KV, of what the device has
        said, so that rows which the host samples draft nothing."""
        self.drafter, self._keeps = drafter, keeps
        # Every step of rows that decode: TP ranks, which hear of answers at times of their own, take one path.
        self.always = drafter.layer or tp_size > 1
        self._history, self._simple, self._at_once, self._index = history, simple, at_once, index
        self._beyond = beyond
        self._there: dict[int, int] = {}        # tokens of each row that the drafter has; all of them: absent

    def bind(self, row: Row) -> None:
        self._there[self._index(row)] = 0

    def asks(self, plan: StepPlan) -> bool:
        """Whether a row may draft, of a plan of rows that decode."""
        return self.always or any(
            count > 1 and self._at_once(row) > 1 for row, count in zip(plan.rows, plan.count, strict=True))

    def passed(self, plan: StepPlan) -> None:
        """Another kind of step is launched: what its rows say has to be put."""
        for row, rid in zip(plan.rows, plan.rids, strict=True):
            prompt, outputs = self._history(rid)
            r, known = self._index(row), len(prompt) + len(outputs)
            self._there[r] = min(known, self._there.get(r, known))

    def lines(self, plan: StepPlan, width: int, flying: Mapping[RequestId, int],
              out: Collection[RequestId]) -> tuple[list[int], list[int]]:
        """Positions of the last tokens of these rows, or OUT, and how many drafts each may have, of a step of
        so many positions a row. flying: steps in front whose tokens are not known and that have no drafts;
        out: requests of those that have."""
        positions, most = [], []
        for row, rid, count in zip(plan.rows, plan.rids, plan.count, strict=True):
            prompt, outputs = self._history(rid)
            r, known = self._index(row), len(prompt) + len(outputs)
            if (there := self._there.pop(r, known)) < known:
                self.drafter.put(r, there, prompt, outputs)
            # The same whether a TP rank has heard of a row's end by now or not.
            positions.append(OUT if rid in out else known + self._beyond(rid) + flying.get(rid, 0) - 1)
            simple = self._simple(rid)
            drafts = max(0, min(count, width, self._at_once(row)) - 1)
            most.append(drafts if simple or not self._keeps else 0)
            if not simple:
                self._there[r] = known
        return positions, most
