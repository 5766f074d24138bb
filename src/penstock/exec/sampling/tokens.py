"""The next token of each row: sampled by the host's sampler, by the device, or by the last pipeline stage.

`tokens_of` makes the one that a rank has. Owns the sampling state of open requests. Knows batches, and writes tokens
into the tables; knows no pages.

    B rows that sample   V vocabulary
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import compress, pairwise, takewhile
from typing import TypeAlias

import torch
from torch import Tensor

from penstock.config.request.grammar import Grammar
from penstock.config.request.params import SamplingParams
from penstock.core.plan import Bind, RequestId
from penstock.exec.sampling.grammar import Grammars
from penstock.exec.sampling.on_device import Draws
from penstock.exec.sampling.sampler import (
    FINE,
    NOT_FINITE,
    Logprobs,
    Recorded,
    Redraw,
    Sampler,
    Sampling,
    check_ids,
    told,
)
from penstock.exec.sampling.verify import counted
from penstock.exec.step.eager import Ran
from penstock.exec.step.links import Links, Sees, TokensFromLast
from penstock.exec.step.step_batch import StepBatch
from penstock.exec.step.tables import RowTables
from penstock.kernels.types.ragged import on_device

States: TypeAlias = tuple[tuple[RequestId, Sampling], ...]


@dataclass(slots=True)
class SampledStep:
    """The sampled tokens of a step, on their way to the host.

    answer_2B   int64: tokens, and FINE or why not; where rows have several positions (`exec.drafts`) a third line,
                the draft token that each took as its input, -1: it is its row's first, or padding. Complete once the
                device has executed what `sample` and `choose` have launched
    counted     it has lines of `counts` instead: what the step counted of each row, known with its tokens
    late        samples the rows that need the tokens of all earlier steps first (grammar, penalties): until then they
                have provisional tokens. With drafts it may wait for this step, and learn its tokens
    firsts      where rows have several positions: index of the first of each; `states` has one entry a position then
    drafts      (request, draft tokens, accepted draft tokens) of rows that had some
    """

    states: States = ()
    firsts: Sequence[int] = ()
    answer_2B: Tensor | None = None
    late: Callable[[SampledStep], None] | None = None
    recorded: Recorded | None = None
    learnt: bool = False
    counted: bool = False
    counts: Sequence[Sequence[int]] = ()
    tokens: list[tuple[int, ...]] = field(default_factory=list)
    logprobs: list[tuple[RequestId, int, Logprobs]] = field(default_factory=list)
    faults: list[tuple[RequestId, str, bool]] = field(default_factory=list)
    drafts: list[tuple[RequestId, int, int]] = field(default_factory=list)

    def choose(self) -> None:
        """Launch `late`."""
        if self.late is not None:
            late, self.late = self.late, None
            late(self)

    def learn(self) -> None:
        """The device has executed the step: record its tokens in the states of their requests, and fill `tokens`,
        `logprobs` and `faults` as `worker.Stepped` has them. Once, in order of the steps."""
        assert not self.learnt and self.late is None, "tokens are learnt once, and once they are chosen"
        self.learnt = True
        tokens, fine, *inputs = [[], []] if self.answer_2B is None else self.answer_2B.tolist()
        if self.counted:
            self.counts, inputs = [*zip(*inputs, strict=True)], []
        told([s for _, s in self.states], fine, self.recorded)
        firsts = [*(self.firsts or range(len(self.states)))]
        counts = [True] * len(tokens)
        if inputs and self.answer_2B is not None:
            first_B = torch.zeros(len(tokens), dtype=torch.bool)
            first_B[firsts] = True
            token_B, fine_B, input_B = self.answer_2B
            counts = counted(token_B, input_B, fine_B == FINE, first_B).tolist()
        for first, end in pairwise((*firsts, len(self.states))):
            says = sum(counts[first:end])
            rid, s = self.states[first]
            self.tokens.append(self._follow(rid, s, tokens[first:first + says], fine[first]))
            if inputs:
                self.draft(rid, inputs[0][first + 1:end], self.tokens[-1])

    def _follow(self, rid: RequestId, s: Sampling, tokens: Sequence[int], code: int) -> tuple[int, ...]:
        """What a row says of tokens that count: up to where it ends, which a device does not know."""
        said = list[int]()
        for token in tokens:
            if not self.say(rid, s, token, FINE if said else code):
                break
            said.append(token)
            if token in s.stop_ids:
                break
        s.beyond += len(tokens) - len(said)
        return tuple(said)

    def draft(self, rid: RequestId, inputs: Sequence[int], said: Sequence[int]) -> None:
        """What the positions of a row behind its first took, -1: padding; and what it has said."""
        if drafts := [*takewhile(lambda token: token >= 0, inputs)]:
            right = len([*takewhile(lambda pair: pair[0] == pair[1], zip(said, drafts, strict=False))])
            self.drafts.append((rid, len(drafts), right))

    def say(self, rid: RequestId, s: Sampling, token: int, code: int) -> bool:
        """`token` is the next one of `rid`, if `code` is FINE; else it fails, and this is False."""
        index = len(s.outputs)
        if code != FINE:                    # no token is better than a made-up one
            self.faults.append((rid, s.fault or (
                f"the model's logits for output token {index} are not finite: its weights are damaged or "
                "overflow in this dtype"), code == NOT_FINITE))
            return False
        s.outputs.append(token)
        if index in s.logprobs:
            self.logprobs.append((rid, index, s.logprobs.pop(index)))
        return True


class Tokens:
    """The next tokens of a step's rows. The defaults are of a stage that neither samples nor needs the tokens.

    outside    rows so far whose sampling a captured step cannot do
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab, self.outside = vocab_size, 0

    def open(self, rid: RequestId, prompt: tuple[int, ...], params: SamplingParams, choice: int,
             stop_ids: tuple[int, ...]) -> None:
        """Raises RequestError for a token id outside the vocabulary."""
        check_ids(prompt, params, self._vocab)

    def compiled(self, grammar: Grammar) -> bool:
        """Whether no step would wait for it. Returns at once, and has it compiled."""
        return True

    def close(self, rid: RequestId) -> None:
        """No plan names it any more."""

    def given(self, rid: RequestId, tokens: Sequence[int]) -> None:
        """Its first output tokens, which another engine has sampled."""

    def bind(self, bind: Bind) -> int:
        """The row's last sampled token as of this bind; of no interest between first and last stage."""
        return 0

    def history(self, rid: RequestId) -> tuple[Sequence[int], Sequence[int]]:
        """Of a first stage: the prompt, and output tokens behind all steps in front."""
        raise AssertionError("a stage that does not hear of tokens")

    def simple(self, rid: RequestId) -> bool:
        """Whether a device samples it by itself."""
        return True

    def beyond(self, rid: RequestId) -> int:
        """How much further its row is on a device than `history`: of one that has ended."""
        return 0

    def forced(self, rid: RequestId, most: int) -> Sequence[int]:
        """What comes next whoever drafts, behind all steps in front: of a stage that samples as
        `Matcher.forced`, of a first stage what the last has said."""
        return ()

    def feed(self, batch: StepBatch) -> StepBatch:
        """Before the step: with the tokens that were sampled elsewhere."""
        return batch

    def sample(self, batch: StepBatch, ran: Ran) -> SampledStep:
        """Give each row of the step a token. Does not wait for a device."""
        return SampledStep()

    def settle(self) -> None:
        """No further plan comes."""


def tokens_of(links: Links, vocab_size: int, rows: int, tables: RowTables, seed: int,
              draw: str, mask: str, grammars: Grammars | None) -> Tokens:
    """Of a stage with these links, on the device of its tables; `draw` as for `Draws`, `mask` as for
    `Sampler`."""
    if links.hear is not None:
        return FromLastStage(vocab_size, TokensFromLast(links.hear), tables, links.sees)
    if links.after is not None:
        return Tokens(vocab_size)
    device = tables.last_R.device
    sampler = Sampler(vocab_size, rows, seed=seed, device=device, grammars=grammars, mask=mask)
    if device.type == "cuda":
        return GpuSampler(sampler, tables, Draws(vocab_size, rows, device, draw))
    return HostSampler(sampler, tables)


class HostSampler(Tokens):
    """Samples on a CPU; on a GPU what the device cannot sample by itself."""

    def __init__(self, sampler: Sampler, tables: RowTables) -> None:
        self._sampler, self._tables, self.outside = sampler, tables, 0
        self._open: dict[RequestId, Sampling] = {}

    def open(self, rid: RequestId, prompt: tuple[int, ...], params: SamplingParams, choice: int,
             stop_ids: tuple[int, ...]) -> None:
        self._open[rid] = self._sampler.open(rid, prompt, params, choice, stop_ids)

    def compiled(self, grammar: Grammar) -> bool:
        return self._sampler.compiled(grammar)

    def close(self, rid: RequestId) -> None:
        del self._open[rid]

    def given(self, rid: RequestId, tokens: Sequence[int]) -> None:
        assert not self._open[rid].outputs, f"request {rid} has output tokens of its own"
        self._open[rid].outputs += tokens

    def bind(self, bind: Bind) -> int:
        s = self._open[bind.rid]
        self._sampler.bind(s, self._tables.index(bind.row), bind.emitted)
        return s.outputs[-1] if s.outputs else 0

    def history(self, rid: RequestId) -> tuple[Sequence[int], Sequence[int]]:
        s = self._open[rid]
        return s.prompt, s.outputs

    def forced(self, rid: RequestId, most: int) -> Sequence[int]:
        s = self._open[rid]
        return () if s.matcher is None else s.matcher.forced(s.outputs, most)

    def sample(self, batch: StepBatch, ran: Ran) -> SampledStep:
        pairs = tuple((rid, self._open[rid]) for rid in batch.sampled)
        if len(pairs) < len(ran.rows):
            return self._checked(batch, ran, pairs)
        states = [s for _, s in pairs]
        self.outside += sum(not s.simple for s in states)
        answer_2B, late = self._provisional(ran, states), [i for i, s in enumerate(states) if self._late(s)]
        if not late:
            return SampledStep(pairs, answer_2B=answer_2B.to("cpu", non_blocking=True),  # pinned, from a device
                           counted=ran.counted)
        return SampledStep(pairs, late=partial(self._choose, ran, answer_2B, states, late), counted=ran.counted)

    def _checked(self, batch: StepBatch, ran: Ran, pairs: States) -> SampledStep:
        """Of a step in which rows have several positions (`exec.drafts`)."""
        assert ran.logits_BV is not None and not ran.logits_BV.is_cuda, "drafts are checked on a CPU"
        answers = SampledStep(pairs)
        self._rounds(ran, self._sampler.best(ran.logits_BV), batch.takes, answers)
        return answers

    def _rounds(self, ran: Ran, answer_2B: Tensor, entries: Sequence[tuple[RequestId, int]],
                answers: SampledStep) -> None:
        """Each position is sampled as it would be alone, once the one before it has said what this one took
        for its input: so no token depends on drafts. entries: whose each is, and that input; those of a row
        that are padding come last, with -1."""
        assert ran.logits_BV is not None
        states, inputs = [self._open[rid] for rid, _ in entries], [token for _, token in entries]
        first = [i for i, (rid, _) in enumerate(entries) if not i or rid != entries[i - 1][0]]
        first_B, input_B = torch.zeros(len(entries), dtype=torch.bool), torch.tensor(inputs)
        first_B[first] = True
        pairs = [(entries[i][0], states[i]) for i in first]
        said: list[list[int]] = [[] for _ in pairs]
        live = list(enumerate(first))
        while live:
            at = [i for _, i in live]
            if late := [i for i in at if self._late(states[i])]:
                recorded = self._sampler.choose(ran.logits_BV, answer_2B, states, ran.rows, late,
                                                self._redraw)
            token_B, fine_B = answer_2B[:, :len(entries)].cpu()         # behind them: padding
            tokens, fine = token_B[at].tolist(), fine_B[at].tolist()
            told([states[i] for i in at], fine, recorded if late else None)
            counts = (counted(token_B, input_B, fine_B == FINE, first_B) & ~first_B).tolist()
            more: list[tuple[int, int]] = []
            for (n, i), token, code in zip(live, tokens, fine, strict=True):
                # Behind its first token a row does not fail: the next step does, if it is so again.
                if (code == FINE or not said[n]) and answers.say(*pairs[n], token, code):
                    said[n].append(token)
                    goes_on = i + 1 < len(counts) and counts[i + 1] and token not in pairs[n][1].stop_ids
                    more += [(n, i + 1)] * goes_on
            live = more
        answers.learnt = True
        answers.tokens += map(tuple, said)
        for (rid, _), begin, end, new in zip(pairs, first, (*first[1:], len(entries)), said, strict=True):
            answers.draft(rid, inputs[begin + 1:end], new)
        some = [n for n, new in enumerate(said) if new]
        self._tables.sampled([ran.rows[first[n]] for n in some], torch.tensor(
            [said[n][-1] for n in some], dtype=torch.int64, device=answer_2B.device))

    def _late(self, s: Sampling) -> bool:
        """Whether its token is another than the provisional one."""
        return not s.plain

    def _provisional(self, ran: Ran, states: Sequence[Sampling]) -> Tensor:
        """answer_2B of all rows, which are in the tables."""
        if ran.answer_2B is not None:
            return ran.answer_2B
        assert ran.logits_BV is not None
        answer_2B = self._sampler.best(ran.logits_BV)
        self._tables.sampled(ran.rows, answer_2B[0])
        return answer_2B

    def _choose(self, ran: Ran, answer_2B: Tensor, states: Sequence[Sampling], late: Sequence[int],
                answers: SampledStep) -> None:
        """Does not wait for a device."""
        assert ran.logits_BV is not None
        answers.recorded = self._sampler.choose(ran.logits_BV, answer_2B, states, ran.rows, late,
                                                self._redraw)
        at_b = on_device(late, answer_2B.device, torch.int64)
        self._tables.sampled([ran.rows[i] for i in late], answer_2B[0, at_b])
        answers.answer_2B = answer_2B.to("cpu", non_blocking=True)

    @property
    def _redraw(self) -> Redraw | None:
        return None


class GpuSampler(HostSampler):
    """The device samples, in a captured step or after an eager one. Rows that are not simple (grammar, penalties, ...)
    have provisional tokens, until the host samples them again."""

    def __init__(self, sampler: Sampler, tables: RowTables, draws: Draws) -> None:
        super().__init__(sampler, tables)
        self.draws = draws

    def bind(self, bind: Bind) -> int:
        last = super().bind(bind)
        self.draws.bind(self._tables.index(bind.row), self._open[bind.rid], self._tables.edits)
        return last

    def simple(self, rid: RequestId) -> bool:
        return self._open[rid].simple

    def beyond(self, rid: RequestId) -> int:
        return self._open[rid].beyond

    def _late(self, s: Sampling) -> bool:
        return not s.simple

    def _checked(self, batch: StepBatch, ran: Ran, pairs: States) -> SampledStep:
        """The device has found what counts, or does now. With rows that are not simple, whose tokens follow
        from those before, all is gone through again when they are chosen."""
        answer_3B = ran.answer_2B
        if answer_3B is None:
            rids, answer_3B = self._eagerly(batch, ran)
        else:
            rids = [rid for rid in batch.rids for _ in range(ran.width)]
        firsts = [i for i, rid in enumerate(rids) if not i or rids[i - 1] != rid]
        entries = tuple((rid, self._open[rid]) for rid in rids)
        late = sum(self._late(entries[i][1]) for i in firsts)
        self.outside += late
        if late:
            return SampledStep(entries, firsts, late=partial(self._again, ran, answer_3B))
        return SampledStep(entries, firsts, answer_3B.to("cpu", non_blocking=True))

    def _again(self, ran: Ran, answer_3B: Tensor, answers: SampledStep) -> None:
        """Waits for the step."""
        rids, inputs = [rid for rid, _ in answers.states], answer_3B[2].tolist()
        self._rounds(ran, answer_3B[:2].clone(), list(zip(rids, inputs, strict=False)), answers)

    def _eagerly(self, batch: StepBatch, ran: Ran) -> tuple[list[RequestId], Tensor]:
        """Whose the positions of a step are that the host has narrowed, and what `Draws.checked` says."""
        rids, inputs = zip(*batch.takes, strict=True)
        turns = [*compress(batch.turns, batch.samples)]
        assert ran.logits_BV is not None
        row_B, id_B, turn_B = on_device([*ran.rows, *inputs, *turns], ran.logits_BV.device,
                                        torch.int32).view(3, -1)
        return list(rids), self.draws.checked(
            ran.logits_BV, self._tables.last_R, row_B, row_B.long(), torch.zeros_like(row_B), id_B, turn_B,
            max(turns) + 1)[0]

    def _provisional(self, ran: Ran, states: Sequence[Sampling]) -> Tensor:
        if ran.answer_2B is not None:
            return ran.answer_2B
        assert ran.logits_BV is not None
        answer_2B = self._sampler.best(ran.logits_BV)
        row_B = on_device(ran.rows, ran.logits_BV.device, torch.int32)
        self.draws.draw(ran.logits_BV, answer_2B[0], row_B, torch.zeros_like(row_B))
        self._tables.sampled(ran.rows, answer_2B[0])
        return answer_2B

    @property
    def _redraw(self) -> Redraw:
        return self.draws.again


class FromLastStage(Tokens):
    """On the first pipeline stage: it receives the tokens of the last stage, as inputs of its next steps."""

    def __init__(self, vocab_size: int, heard: TokensFromLast, tables: RowTables, sees: Sees | None) -> None:
        super().__init__(vocab_size)
        self._heard, self._tables, self._sees = heard, tables, sees
        self._numbers: dict[RequestId, int] = {}        # of its newest step that samples, as `sees` counts
        self._prompts: dict[RequestId, tuple[int, ...]] = {}

    def open(self, rid: RequestId, prompt: tuple[int, ...], params: SamplingParams, choice: int,
             stop_ids: tuple[int, ...]) -> None:
        super().open(rid, prompt, params, choice, stop_ids)
        self._heard.open(rid)
        self._prompts[rid] = prompt

    def close(self, rid: RequestId) -> None:
        self._heard.close(rid)
        self._numbers.pop(rid, None)
        del self._prompts[rid]

    def history(self, rid: RequestId) -> tuple[Sequence[int], Sequence[int]]:
        return self._prompts[rid], self._heard.outputs(rid)

    def forced(self, rid: RequestId, most: int) -> Sequence[int]:
        return self._heard.drafts(rid)[:most]

    def given(self, rid: RequestId, tokens: Sequence[int]) -> None:
        self._heard.given(rid, tokens)

    def bind(self, bind: Bind) -> int:
        return self._heard.rewind(bind.rid, bind.emitted)

    def feed(self, batch: StepBatch) -> StepBatch:
        """What the host knows, and -1 where only the device will: then that waits for it."""
        last, number = dict[RequestId, int](), 0
        for rid, end in zip(batch.rids, batch.first[1:], strict=True):
            if batch.tokens[end - 1] >= 0:
                continue
            if self._sees is None or self._heard.known(rid):
                last[rid] = self._heard.last(rid)
            else:
                last[rid], number = -1, max(number, self._numbers[rid])
        if not last:
            return batch
        if self._sees is not None and number:
            self._sees.wait(number, self._tables.last_R)
        rids = [rid for rid, count in zip(batch.rids, batch.count, strict=True) for _ in range(count)]
        return replace(batch, heard=[last[rid] if token < 0 else token for rid, token in
                                     zip(rids, batch.tokens, strict=True)])

    def sample(self, batch: StepBatch, ran: Ran) -> SampledStep:
        self._heard.expect(batch.step, batch.sampled)
        if self._sees is not None:
            self._numbers |= dict.fromkeys(batch.sampled, self._sees.expect())
        return SampledStep()

    def settle(self) -> None:
        self._heard.settle()
