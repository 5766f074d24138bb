"""What a step with drafts computes of its plan: where each decoding row is by now, and how many draft tokens it has.

A plan's starts and counts are upper bounds, made while results were out. Here they are known, or follow from steps
in flight that had no drafts. The first pipeline stage decides, and sends the result with its hidden states.

Owns the drafter and its counts. Knows no page and no logits.
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias

from penstock.core.plan import RequestId, Row, StepPlan
from penstock.exec.drafts.drafter import Drafter, DraftQuery
from penstock.exec.step.attend import ANY
from penstock.exec.step.step_batch import Inputs

# A request's prompt and the output tokens that it has by now, behind all steps in front.
History: TypeAlias = Callable[[RequestId], tuple[Sequence[int], Sequence[int]]]
WIDE = {"cpu": 16, "cuda": 32}          # positions of a step up to which another one costs little


class Narrowing:
    """What rows that decode compute, as the first stage finds it. On the last it says what may come next."""

    def __init__(self, drafter: Drafter, history: History, vocab_size: int, wide: int, *,
                 beside: bool = True, at_once: Callable[[Row], int] = lambda row: ANY,
                 forced: Callable[[RequestId, int], Sequence[int]] = lambda rid, most: ()) -> None:
        """wide: positions of a step up to which another one costs little: rows draft as far as they stay
        below. beside: whether rows draft in a step that has prompts. at_once: positions that one can have.
        forced: what comes next of a row, at most so much, whoever is asked."""
        self._forced = forced
        self._drafter, self._history, self._vocab, self._wide = drafter, history, vocab_size, wide
        self._beside, self._at_once = beside, at_once
        self.counts: Counter[str] = Counter()
        self.lengths: Counter[int] = Counter()

    def leave(self) -> None:
        """Drafts are made elsewhere: rows draft nothing here."""
        self._wide = 0

    def forget(self, rid: RequestId) -> None:
        """It is bound anew, or has ended."""
        self._drafter.forget(rid)

    def count(self, drafts: Sequence[tuple[RequestId, int, int]]) -> None:
        """As `rank.Stepped.drafts`."""
        for _, drafted, accepted in drafts:
            self.counts["draft"] += drafted
            self.counts["accepted"] += accepted
            self.lengths[accepted] += 1

    def asks(self, plan: StepPlan) -> bool:
        """Whether `choose` asks for drafts: then tokens of all steps in front must be known."""
        rows = list(decoding(plan))
        return self._room(plan, rows) > 0 and any(count > 1 for _, _, count in rows)

    def _room(self, plan: StepPlan, rows: Sequence[tuple[RequestId, Row, int]]) -> int:
        prompts = len(plan.tokens) - sum(count for _, _, count in rows)
        return max(0, self._wide - prompts - len(rows)) if self._beside or not prompts else 0

    def choose(self, plan: StepPlan, flying: Mapping[RequestId, int]) -> Inputs:
        """What the rows of this plan that decode compute. Waits for tokens that the last stage samples. flying:
        steps in front whose tokens are not known, of each request: they have no drafts."""
        rows = list(decoding(plan))
        histories = [self._history(rid) for rid, _, _ in rows]
        room, drafting = self._room(plan, rows), sum(count > 1 for _, _, count in rows)
        assert not (room and drafting and flying), "drafts are asked for behind tokens that are not known"
        given = _shares(room, drafting, [min(count, self._at_once(row)) - 1 for _, row, count in rows])
        asks = [DraftQuery(rid, row, *history, most) for (rid, row, _), history, most in
                zip(rows, histories, given, strict=True) if most]
        found = dict(zip([ask.rid for ask in asks], self._proposed(asks), strict=True))
        inputs: list[int] = []
        for (rid, _, _), (prompt, outputs) in zip(rows, histories, strict=True):
            drafts = found.get(rid, ())
            inputs += (len(prompt) + len(outputs) + flying.get(rid, 0) - 1, len(drafts), *drafts)
        return tuple(inputs)

    def next(self, plan: StepPlan, said: Sequence[Sequence[int]], drafts: int, layer: Drafter | None,
             end: Callable[[Row], int]) -> tuple[tuple[int, ...], ...]:
        """On the last of several stages, behind the step of `plan`: what may come next of each row that has
        sampled. It is what `choose` would ask for here, if the next step had the rows of this one, but of the
        layer no more than there are pages for. said: tokens of each; drafts: the most behind a prompt; layer:
        of the model, that drafts; end: positions that a row has pages for."""
        most = {rid: (row, drafts) for rid, row, samples in
                zip(plan.rids, plan.rows, plan.samples, strict=True) if samples}
        most |= {rid: (row, count - 1) for rid, row, count in decoding(plan)}
        live = [rid for rid, tokens in zip(most, said, strict=True) if tokens and most[rid][1]]
        given = _shares(max(0, self._wide - len(most)), len(live), [most[rid][1] for rid in live])
        found, asks = dict[RequestId, tuple[int, ...]](), list[DraftQuery]()
        for rid, much in zip(live, given, strict=True):
            row, (prompt, outputs) = most[rid][0], self._history(rid)
            found[rid] = tuple(self._forced(rid, much)) if much else ()
            pages = min(much, end(row) - (len(prompt) + len(outputs) - 1))
            if pages > 0 and not found[rid] and layer is not None:
                asks.append(DraftQuery(rid, row, prompt, outputs, pages))
        if layer is not None and asks:
            found |= zip([ask.rid for ask in asks], map(tuple, layer.propose(asks)), strict=True)
        return tuple(found.get(rid, ()) for rid in most)

    def _proposed(self, asks: Sequence[DraftQuery]) -> list[Sequence[int]]:
        found: list[Sequence[int]] = []
        proposed = {ask.rid: self._forced(ask.rid, ask.most) for ask in asks}
        if free := [ask for ask in asks if not proposed[ask.rid]]:
            proposed |= zip([ask.rid for ask in free], self._drafter.propose(free), strict=True)
        for ask in asks:
            drafts = proposed[ask.rid]
            good = len(drafts) <= ask.most and all(
                isinstance(token, int) and 0 <= token < self._vocab for token in drafts)
            self.counts["dropped"] += 0 if good else len(drafts)
            found.append(drafts if good else ())
        return found

    def stats(self) -> dict[str, float]:
        """By metric name. Of several ranks one tells what was checked, and one what was dropped."""
        of = f'drafter="{self._drafter.name}"'
        lengths = {f'spec_accepted_length_total{{{of},length="{n}"}}': float(count)
                   for n, count in sorted(self.lengths.items())}
        return {f"spec_{name}_tokens_total{{{of}}}": float(self.counts[name])
                for name in ("draft", "accepted", "dropped")} | lengths


def _shares(room: int, drafting: int, wanted: Sequence[int]) -> list[int]:
    """Of so many positions of a step, for rows of which so many draft, what each gets of what it wants."""
    share, given = -(-room // max(1, drafting)), list[int]()
    for want in wanted:
        given.append(min(want, share, room))
        room -= given[-1]
    return given


def decoding(plan: StepPlan) -> Iterator[tuple[RequestId, Row, int]]:
    """Requests of `plan` whose rows decode, these, and their positions at most."""
    at = 0
    for rid, row, count in zip(plan.rids, plan.rows, plan.count, strict=True):
        if plan.tokens[at] < 0:
            yield rid, row, count
        at += count
