"""Eager steps, kernel by kernel: from the tables to hidden states, handed to the next pipeline stage or to the head.

    T tokens of the step   B rows that sample   V vocabulary   D model dim
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from penstock.exec.drafts.mtp import MTP
from penstock.exec.step.attend import Arriving, Attending
from penstock.exec.step.links import Links
from penstock.exec.step.step_batch import StepBatch
from penstock.exec.step.tables import Lowered, RowTables
from penstock.memory.mover import Arrivals
from penstock.model.base import CacheShape, Model


@dataclass(frozen=True, slots=True)
class Ran:
    """What a step leaves to sampling. rows: by table index; logits_BV: None where another stage has them;
    answer_2B: of a captured step, with its tokens (`DecodeGraphs.run`), which are in the tables already;
    counted: behind these lines it has what was counted of each row;
    hidden_TD: of all tokens, of a last stage's step that was not captured; width: of a step with drafts that
    a device made: entries of each row."""

    rows: Sequence[int]
    logits_BV: Tensor | None = None
    answer_2B: Tensor | None = None
    hidden_TD: Tensor | None = None
    width: int = 1
    counted: bool = False


class Steps(Protocol):
    """A way to run steps: eager, or captured for one kind of them."""

    def step(self, batch: StepBatch, arrivals: Arrivals) -> Ran | None:
        """Run a step that has rows, and whose table edits are applied. Does not wait for a device, which waits for
        the arrivals. None: it is not one of these steps, and nothing was done."""

    def stats(self) -> dict[str, float]:
        """By metric name."""
        return {}


def wait(arrivals: Arrivals) -> None:
    """Have the device wait for all of them."""
    for _, events in arrivals:
        torch.cuda.current_stream().wait_event(events[-1])


class Eager(Steps):
    """Runs any step: all of a CPU, and those that a CUDA device does not capture.

    groups    cache groups that `attending` knows; those of `mtp` follow them
    cause     of `graphs.steps.WHY`, why steps run here that would be replayed otherwise: these are counted"""

    cause = ""

    def __init__(self, model: Model, groups: Sequence[CacheShape], tables: RowTables, attending: Attending,
                 links: Links, mtp: MTP | None = None) -> None:
        self._model, self._groups, self._tables = model, groups, tables
        self._attending, self._links, self._mtp = attending, links, mtp
        self._count = 0

    def stats(self) -> dict[str, float]:
        return {f'executor_launched_total{{cause="{self.cause}"}}': float(self._count)} if self.cause else {}

    def step(self, batch: StepBatch, arrivals: Arrivals) -> Ran:
        self._count += bool(self.cause)
        lowered = self._tables.lower(batch)
        own = replace(lowered, ragged=lowered.ragged[:len(self._groups)])
        hidden_TD = self._forward(own, [of for of in arrivals if of[0] < len(self._groups)])
        if self._mtp is not None:
            wait([of for of in arrivals if of[0] >= len(self._groups)])
            self._mtp.step(lowered, hidden_TD)
        if self._links.after is not None:
            return Ran(batch.sample_rows)
        logits_BV = self._model.logits(hidden_TD[lowered.sample_at_B]) if batch.sample_rows else None
        return Ran(batch.sample_rows, logits_BV, hidden_TD=hidden_TD)

    def _forward(self, lowered: Lowered, arrivals: Arrivals) -> Tensor:
        """hidden_TD behind the final norm, or, but for the last stage, nothing that is used here."""
        model, links, attend, batch = self._model, self._links, self._attending.step(lowered), lowered.batch
        if arrivals:
            attend = Arriving(attend, self._groups, arrivals)
        if links.before is None and links.after is None:
            return model.forward(lowered.ids_T, lowered.positions_T, attend)
        x = model.embed(lowered.ids_T) if links.before is None else (
            batch.before or links.before.take(batch.step))
        x = model.layers(x, lowered.positions_T, attend)
        if links.after is None:
            return model.norm(x)
        links.after.put(batch.step, x._replace(inputs=batch.inputs))
        return x.h_TD
