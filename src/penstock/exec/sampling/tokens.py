"""The next tokens of a step's rows: chosen on the host, drawn on the device, or heard from the last stage.

Owns the sampling state of open requests. Knows plans, and writes tokens into the tables; knows no pages.

    B rows that sample   V vocabulary
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from penstock.config.request.params import SamplingParams
from penstock.core.plan import Bind, RequestId, StepPlan
from penstock.exec.sampling.grammar import Grammars
from penstock.exec.sampling.on_device import Draws
from penstock.exec.sampling.sampler import Sampler, Sampling, check_ids
from penstock.exec.step.eager import Ran
from penstock.exec.step.links import Heard, Links
from penstock.exec.step.tables import RowTables
from penstock.kernels.types.ragged import on_device

States: TypeAlias = tuple[tuple[RequestId, Sampling], ...]


class Tokens:
    """As it stands here: the last stage samples, and this one need not know of it.

    outside    rows so far that sampled by what a captured step cannot do
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab, self.outside = vocab_size, 0

    def open(self, rid: RequestId, prompt: tuple[int, ...], params: SamplingParams, choice: int,
             stop_ids: tuple[int, ...]) -> None:
        """Raises RequestError for a token id outside the vocabulary."""
        check_ids(prompt, params, self._vocab)

    def close(self, rid: RequestId) -> None:
        """No plan names it any more."""

    def given(self, rid: RequestId, tokens: Sequence[int]) -> None:
        """Its first output tokens, which another engine has sampled."""

    def bind(self, bind: Bind) -> int:
        """The row's last sampled token as of this bind; of no interest between first and last stage."""
        return 0

    def ready(self, plan: StepPlan) -> bool:
        """Whether its rows sample without the answers of the steps in front of it."""
        return False

    def feed(self, plan: StepPlan) -> None:
        """Before the step: the tables get last tokens that were sampled elsewhere."""

    def sample(self, plan: StepPlan, ran: Ran) -> tuple[States, Tensor | None]:
        """Who samples here, and answer_2B int64 on its way to the host: tokens, and whether each row's
        logits were finite."""
        return (), None

    def settle(self) -> None:
        """No further plan comes."""


def tokens_of(links: Links, vocab_size: int, rows: int, tables: RowTables, seed: int,
              draw: str, grammars: Grammars | None) -> Tokens:
    """Of a stage with these links, on the device of its tables; `draw` as for `Draws`."""
    if links.hear is not None:
        return FromLast(vocab_size, Heard(links.hear), tables)
    if links.after is not None:
        return Tokens(vocab_size)
    device = tables.last_R.device
    sampler = Sampler(vocab_size, rows, seed=seed, device=device, grammars=grammars)
    if device.type == "cuda":
        return Drawn(sampler, tables, Draws(vocab_size, rows, device, draw))
    return Chosen(sampler, tables)


class Chosen(Tokens):
    """By the sampler."""

    def __init__(self, sampler: Sampler, tables: RowTables) -> None:
        self._sampler, self._tables, self.outside = sampler, tables, 0
        self._open: dict[RequestId, Sampling] = {}

    def open(self, rid: RequestId, prompt: tuple[int, ...], params: SamplingParams, choice: int,
             stop_ids: tuple[int, ...]) -> None:
        self._open[rid] = self._sampler.open(rid, prompt, params, choice, stop_ids)

    def close(self, rid: RequestId) -> None:
        del self._open[rid]

    def given(self, rid: RequestId, tokens: Sequence[int]) -> None:
        assert not self._open[rid].outputs, f"request {rid} has output tokens of its own"
        self._open[rid].outputs += tokens

    def bind(self, bind: Bind) -> int:
        s = self._open[bind.rid]
        self._sampler.bind(s, self._tables.index(bind.row), bind.emitted)
        return s.outputs[-1] if s.outputs else 0

    def ready(self, plan: StepPlan) -> bool:
        return all(self._open[rid].plain for rid in sampled(plan))

    def sample(self, plan: StepPlan, ran: Ran) -> tuple[States, Tensor | None]:
        pairs = tuple((rid, self._open[rid]) for rid in sampled(plan))
        states = [s for _, s in pairs]
        self.outside += sum(not s.simple for s in states)
        return pairs, self._answer(ran, states).to("cpu", non_blocking=True)    # pinned, from a device

    def _answer(self, ran: Ran, states: Sequence[Sampling]) -> Tensor:
        if ran.answer_2B is not None and all(s.plain for s in states):
            return ran.answer_2B
        assert ran.logits_BV is not None
        token_B, finite_B = self._sampler.sample(ran.logits_BV, states, ran.rows)
        self._tables.sampled(ran.rows, token_B)
        return torch.stack((token_B, finite_B.long()))


class Drawn(Chosen):
    """By the device itself, as a captured step does, where all rows of the step are simple."""

    def __init__(self, sampler: Sampler, tables: RowTables, draws: Draws) -> None:
        super().__init__(sampler, tables)
        self.draws = draws

    def bind(self, bind: Bind) -> int:
        last = super().bind(bind)
        self.draws.bind(self._tables.index(bind.row), self._open[bind.rid])
        return last

    def ready(self, plan: StepPlan) -> bool:
        return all(self._open[rid].simple for rid in sampled(plan))

    def _answer(self, ran: Ran, states: Sequence[Sampling]) -> Tensor:
        if not all(s.simple for s in states):
            answer_2B = super()._answer(ran, states)
            if ran.answer_2B is None:
                self.draws.skip(ran.rows, states)
            return answer_2B
        if ran.answer_2B is not None:
            return ran.answer_2B
        assert ran.logits_BV is not None
        row_B = on_device(ran.rows, ran.logits_BV.device, torch.int32)
        best_B, token_B = ran.logits_BV.max(-1)
        self.draws.draw(ran.logits_BV, token_B, row_B, torch.zeros_like(row_B))
        self._tables.sampled(ran.rows, token_B)
        return torch.stack((token_B, best_B.isfinite().long()))


class FromLast(Tokens):
    """By the last stage, and this first one hears of them: they are the inputs of its next steps."""

    def __init__(self, vocab_size: int, heard: Heard, tables: RowTables) -> None:
        super().__init__(vocab_size)
        self._heard, self._tables = heard, tables

    def open(self, rid: RequestId, prompt: tuple[int, ...], params: SamplingParams, choice: int,
             stop_ids: tuple[int, ...]) -> None:
        super().open(rid, prompt, params, choice, stop_ids)
        self._heard.open(rid)

    def close(self, rid: RequestId) -> None:
        self._heard.close(rid)

    def given(self, rid: RequestId, tokens: Sequence[int]) -> None:
        self._heard.given(rid, tokens)

    def bind(self, bind: Bind) -> int:
        return self._heard.rewind(bind.rid, bind.emitted)

    def feed(self, plan: StepPlan) -> None:
        at, rows, tokens = -1, [], []
        for row, rid, count in zip(plan.rows, plan.rids, plan.count, strict=True):
            at += count
            if plan.tokens[at] < 0:
                rows.append(self._tables.index(row))
                tokens.append(self._heard.last(rid))
        if rows:
            self._tables.sampled(rows, torch.tensor(tokens, device=self._tables.last_R.device))

    def sample(self, plan: StepPlan, ran: Ran) -> tuple[States, Tensor | None]:
        self._heard.expect(plan.step, sampled(plan))
        return (), None

    def settle(self) -> None:
        self._heard.settle()


def sampled(plan: StepPlan) -> tuple[RequestId, ...]:
    """Requests that sample in this step, in order."""
    return tuple(rid for rid, samples in zip(plan.rids, plan.samples, strict=True) if samples)
