"""All that one rank has of drafts: who proposes, on the host or the device, and how its steps are run.

A worker holds one, or none. Launches nothing: the worker runs what `by_device` and `choose` say.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from penstock.core.plan import Bind, RequestId, Row, StepId, StepPlan
from penstock.exec.drafts.device import Ahead
from penstock.exec.drafts.drafter import Drafter
from penstock.exec.drafts.mtp import MTP
from penstock.exec.drafts.narrow import WIDE, Narrowing
from penstock.exec.graphs.drafts import DraftGraphs
from penstock.exec.sampling.tokens import SampledStep, Tokens
from penstock.exec.step.attend import ANY, Attending
from penstock.exec.step.step_batch import Inputs
from penstock.exec.step.tables import RowTables


class Speculation:
    """host     where rows are and what they draft, as the host finds it
    layer    of the model, that drafts; None: it has none
    ahead    what the host tells a device that drafts; None: no device of this rank does
    graphs   captured steps whose drafts the device makes; None: none were captured
    """

    def __init__(self, drafter: Drafter, layer: MTP | None, tokens: Tokens, tables: RowTables, attending: Attending,
                 *, rows: int, max_len: int, vocab_size: int, tp_size: int, whole: bool, most: int) -> None:
        """tokens: of the rank's requests. whole: the model is not divided into stages. most: drafts of a row at
        most, of several stages."""
        device, self._tables, self._attending = tables.last_R.device, tables, attending
        on_host = device.type == "cpu"
        self.layer, self._most = layer, most
        self.host = Narrowing(drafter, tokens.history, vocab_size, WIDE[device.type], beside=on_host,
                              at_once=(lambda row: ANY) if on_host else self.at_once, forced=tokens.forced)
        there = drafter.on_device(rows, max_len, device) if whole and not on_host else None
        self.ahead = None if there is None else Ahead(
            there, tokens.history, tokens.simple, self.at_once, tables.index, beyond=tokens.beyond, tp_size=tp_size,
            keeps=layer is not None or bool(attending.states))
        self.graphs: DraftGraphs | None = None

    def at_once(self, row: Row) -> int:
        """Positions of a step that the row may have: see `Attending.at_once`."""
        return self._attending.at_once(self._tables.index(row))

    def captured(self, graphs: DraftGraphs | None) -> None:
        """From now on the device drafts in the steps that `graphs` takes, and rows of others draft nothing."""
        self.graphs = graphs
        if graphs is not None:
            self.host.leave()

    def bind(self, bind: Bind) -> None:
        """The request of a row has begun anew."""
        self.host.forget(bind.rid)
        if self.graphs is not None:
            self.graphs.ahead.bind(bind.row)

    def settle(self, step: StepId, right: Mapping[int, int]) -> bool:
        """How many drafts of each row, by its index, were right. Returns whether work was launched."""
        return self.layer is not None and self.layer.settle(step, right)

    def by_device(self, plan: StepPlan, flying: Sequence[SampledStep]) -> bool:
        """Whether the device says where rows are, and drafts. flying: answers of steps in front that are not known."""
        return self.graphs is not None and self.graphs.takes(plan) and (
            self.graphs.ahead.asks(plan) or any(answers.firsts for answers in flying))

    def waits(self, plan: StepPlan, flying: Sequence[SampledStep]) -> bool:
        """Whether the step has to be launched behind answers that are not known."""
        if self.by_device(plan, flying):    # of a row's tokens the device has the last, and those behind drafts
            return sum(bool(answers.states) and not answers.firsts for answers in flying) > 1
        return self.host.asks(plan) or any(answers.firsts for answers in flying)

    def passed(self, plan: StepPlan) -> None:
        """A step is launched in which the device drafts nothing."""
        if self.graphs is not None:
            self.graphs.ahead.passed(plan)

    def choose(self, plan: StepPlan, alone: Mapping[RequestId, int]) -> Inputs:
        """See `Narrowing.choose`."""
        return self.host.choose(plan, alone)

    def next(self, plan: StepPlan, said: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
        """See `Narrowing.next`."""
        with torch.inference_mode():
            return self.host.next(plan, said, self._most, self.layer, self._tables.end)
