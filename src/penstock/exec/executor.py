"""The executor: hands each plan to every rank, collects what they report and tells the core once all have.

Owns which requests are open and which plans and moves are in flight. Decides nothing, touches no
tensor: which rows run, where pages live and when a request ends is the core's business.
"""
from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from penstock.config.request.grammar import Grammar
from penstock.config.request.params import SamplingParams
from penstock.config.request.scores import PromptScores
from penstock.core.plan import (
    Aborted,
    Event,
    HotUse,
    Moved,
    MoveId,
    RequestId,
    Retired,
    Row,
    StepId,
    StepPlan,
    Tier,
)
from penstock.exec.drafts.narrow import decoding
from penstock.exec.sampling.sampler import Logprobs
from penstock.exec.sparse.rows import READS
from penstock.exec.worker import Report, Stepped, right_of
from penstock.memory.storage import Storage

log = logging.getLogger(__name__)

# Every rank makes every move, of its own layers: the one that has ended most has ended all that all have.
ONCE = ("moves_total", "moves_failed_total")
HOT_USE_STEPS = 16       # steps after which the core is told what rows on the host have missed


class WorkerHandle(Protocol):
    """What the executor needs of a rank, here or in another process."""

    def open(self, rid: RequestId, prompt: tuple[int, ...], params: SamplingParams, *, choice: int,
             stop_ids: tuple[int, ...]) -> None:
        """Make `rid` known, before the first plan that names it. Raises RequestError, the same on
        every rank."""

    def compiled(self, grammar: Grammar) -> bool:
        """See `Executor.compiled`."""

    def close(self, rid: RequestId) -> None:
        """No plan that is still to come names `rid`."""

    def given(self, rid: RequestId, tokens: Sequence[int]) -> None:
        """See `Executor.given`."""

    def start(self, plan: StepPlan) -> None:
        """Queue a plan. Never blocks on the device."""

    def checked(self, step: StepId, right: Mapping[Row, int]) -> None:
        """See `Worker.checked`. Before what it then reports."""

    def collect(self, *, block: bool) -> list[Report]:
        """Reports since the last call, in order; with `block`, at least one unless nothing that is
        in flight can end before another plan comes, or the rank waits for `checked`."""

    def stats(self) -> dict[str, float]:
        """Seconds, bytes and moves of this rank, by metric name, as it has last told: never waits for it.
        Those of all ranks are added, but ONCE."""


@dataclass(slots=True)
class _Open:
    """A request between `open` and its last plan."""

    queued: int = 0              # plans in flight that name it
    closed: bool = False
    fault: str | None = None     # why a step of it failed last
    logprobs: dict[int, Logprobs] = field(default_factory=dict)
    reads: dict[int, tuple[int, ...]] = field(default_factory=dict)     # READS, by rank
    prompt: PromptScores | None = None
    hot_pages: int = 0           # the most that its hot buffer had
    told: tuple[int, int] = 0, 0  # units selected and missed, when the core was last told
    drafted: int = 0             # tokens that were proposed for it,
    accepted: int = 0            # and those that it has said


@dataclass(slots=True)
class _Step:
    """A plan in flight, and what each rank that has reported it did."""

    plan: StepPlan
    stepped: dict[int, Stepped] = field(default_factory=dict)
    spoiled: bool = False        # it has waited for a copy that failed


@dataclass(slots=True)
class _Move:
    step: StepId                 # that carried it
    missing: int
    ok: bool = True


class Executor:
    """`core.plan.PlanExecutor` over the ranks of an engine, and what the loop asks about open requests.

    submit      sends the plan to every rank, possibly before the step in front of it has run
    poll        see `WorkerHandle.collect`. A step has retired, and a move has ended, when every rank has reported it;
                a move is ok if it is on every rank; tokens are those of the last rank.
    Retired     has () for a row whose logits were not finite; an Aborted for its request follows, and `fault` says
                why. One request fails, the engine goes on.
    """

    def __init__(self, ranks: Sequence[WorkerHandle], wait: Callable[[], None] | None = None,
                 storage: Storage | None = None, *, tp_size: int = 1, page_size: int = 0) -> None:
        """wait: blocks until a rank in another process has reported; None: all are in this process, and
        work while they are collected. storage: makes the Moves from and to it, for all ranks. tp_size: the last
        ranks, which sample the same. page_size: tokens, of rows that may be hosted."""
        self._page_size = page_size
        self._ranks, self._wait, self.storage, self._tp_size = ranks, wait, storage, tp_size
        self._open: dict[RequestId, _Open] = {}
        self._steps: dict[StepId, _Step] = {}
        self._moves: dict[MoveId, _Move] = {}
        self._newest = self._retired = StepId(0)
        self._count = dict.fromkeys(("steps", "empty_steps", "prefill_tokens", "decode_tokens",
                                     "sampled_tokens", "nonfinite_rows"), 0)

    # ------------------------------------------------------------ requests
    def compiled(self, grammar: Grammar) -> bool:
        """Whether a request with it makes no step wait, as far as this process knows. Returns at once, and
        has it compiled; the executor wakes its loop when that has ended."""
        return all([rank.compiled(grammar) for rank in self._ranks[-self._tp_size:]])

    def open(self, rid: RequestId, prompt: tuple[int, ...], params: SamplingParams, *,
             choice: int = 0, stop_ids: tuple[int, ...] = ()) -> None:
        """Make `rid` known, before the first plan that names it.

        stop_ids  token ids that end it: `min_tokens` keeps them from being sampled too early.
        Raises RequestError for a token id outside the vocabulary; nothing is kept then.
        """
        assert rid not in self._open, f"request {rid} is open already"
        for rank in self._ranks:
            rank.open(rid, prompt, params, choice=choice, stop_ids=stop_ids)
        self._open[rid] = _Open(
            prompt=None if params.prompt_logprobs is None else PromptScores(params, len(prompt)))

    def close(self, rid: RequestId) -> None:
        """`rid` has finished. Its state goes when the last plan in flight that names it has run."""
        state = self._open[rid]
        assert not state.closed, f"request {rid} is closed already"
        state.closed = True
        self._forget(rid, state)

    def _forget(self, rid: RequestId, state: _Open) -> None:
        if state.closed and state.queued == 0:
            del self._open[rid]
            for rank in self._ranks:
                rank.close(rid)

    def given(self, rid: RequestId, tokens: Sequence[int], logprobs: Sequence[Logprobs] = (),
              prompt: PromptScores | None = None) -> None:
        """The first output tokens of `rid`, which another engine has sampled, with the logprobs of each and
        of its prompt where they were asked for. Before a plan that binds it."""
        for rank in self._ranks:
            rank.given(rid, tokens)
        self._open[rid].logprobs.update(enumerate(logprobs))
        if prompt is not None:
            self._open[rid].prompt = prompt

    def take_prompt(self, rid: RequestId) -> PromptScores | None:
        """Logprobs of its prompt, once; None if none were asked for or they are gone."""
        state = self._open[rid]
        scores, state.prompt = state.prompt, None
        return scores

    def take_logprobs(self, rid: RequestId, index: int) -> Logprobs | None:
        """Logprobs of output token `index`, once; None if none were asked for or they are gone."""
        state = self._open.get(rid)
        return None if state is None else state.logprobs.pop(index, None)

    def kv_reads(self, rid: RequestId) -> dict[str, int] | None:
        """What the units that `rid` selected were read from, by name, in all layers, up to the last step that
        has retired, and the most tokens that its hot buffer had; None: it has selected none. Before
        `close`."""
        state = self._open[rid]
        found = state.reads.values()
        hot = {"hot_buffer_tokens": state.hot_pages * self._page_size}
        return dict(zip(READS, map(sum, zip(*found, strict=True)), strict=True)) | hot if found else None

    def drafts(self, rid: RequestId) -> tuple[int, int]:
        """Tokens that were proposed for `rid`, and how many of them it has said. Before `close`."""
        state = self._open[rid]
        return state.drafted, state.accepted

    def fault(self, rid: RequestId) -> str | None:
        """Why a step of `rid` failed last, until `close`; None if none did."""
        return self._open[rid].fault

    # ------------------------------------------------------------ plans
    def submit(self, plan: StepPlan) -> None:
        """Queue a plan. Asserts that steps are dense and that its requests are open."""
        assert plan.step == self._newest + 1, f"step {plan.step} after step {self._newest}"
        for rid in _named(plan):
            assert rid in self._open, f"step {plan.step} names request {rid}, which is not open"
            self._open[rid].queued += 1
        for rid, hot_pages in _hot_pages(plan):
            self._open[rid].hot_pages = max(self._open[rid].hot_pages, hot_pages)
        self._newest = plan.step
        if self.storage is not None:
            stored = [move for move in plan.moves if Tier.DISK in (move.src, move.dst)]
            for move in stored:
                self.storage.start(move)
            if stored:
                plan = replace(plan, moves=tuple([move for move in plan.moves if move not in stored]))
        self._steps[plan.step] = _Step(plan)
        for move in plan.moves:
            self._moves[move.id] = _Move(plan.step, len(self._ranks))
        for rank in self._ranks:
            rank.start(plan)

    @property
    def works_here(self) -> bool:
        """Whether `poll` with `block` runs a step in this thread, or waits for the device to have run one;
        else what is in flight ends elsewhere."""
        return self._wait is None and bool(self._steps)

    def poll(self, *, block: bool) -> Sequence[Event]:
        while True:
            stored = [] if self.storage is None else self.storage.collect()
            reports = [(i, report) for i, rank in enumerate(self._ranks)
                       for report in rank.collect(block=block and self._wait is None and not stored)]
            events = stored + [event for i, report in reports for event in self._merge(i, report)]
            if events or not block:
                return events
            if self._wait is not None and (self._steps or self._moves):
                self._wait()
            elif not reports:
                return events if self.storage is None else self.storage.collect(wait=True)

    def _merge(self, rank: int, report: Report) -> list[Event]:
        """What is told now that this rank has reported too."""
        if isinstance(report, Moved):
            move = self._moves[report.id]
            move.missing -= 1
            move.ok = move.ok and report.ok
            if move.missing:
                return []
            del self._moves[report.id]
            if not move.ok:
                for waiting in self._steps.values():
                    waiting.spoiled |= report.id in waiting.plan.waits
            return [Moved(report.id, move.ok)]
        step = self._steps[report.step]
        step.stepped[rank] = report
        if report.drafts and rank == len(self._ranks) - 1:
            right = right_of(step.plan, report.tokens)
            for other in self._ranks[:-self._tp_size]:
                other.checked(report.step, right)
        if len(step.stepped) < len(self._ranks):
            return []
        assert report.step == self._retired + 1
        self._retired = report.step
        _check_tables(report.step, [(i, stepped.tables) for i, stepped in step.stepped.items()])
        last = len(self._ranks) - 1
        for i in range(len(self._ranks) - self._tp_size, last):
            if step.stepped[i].tokens != step.stepped[last].tokens:
                raise RanksDisagree(
                    f"step {report.step}: rank {i} has sampled {list(step.stepped[i].tokens)}, rank {last} "
                    f"{list(step.stepped[last].tokens)}")
        del self._steps[report.step]
        for i, stepped in step.stepped.items():
            for rid, reads in stepped.reads:
                self._open[rid].reads[i] = reads
        use = self._hot_use(report.step) if report.step % HOT_USE_STEPS == 0 else []
        return use + self._end(step.plan, step.stepped[last], spoiled=step.spoiled)

    def _hot_use(self, step: StepId) -> list[Event]:
        rows = []
        for rid, state in self._open.items():
            if state.reads:
                device, hits, misses = map(sum, [*zip(*state.reads.values(), strict=True)][:3])
                selected, missed = (now - was for now, was in
                                    zip((device + hits + misses, misses), state.told, strict=True))
                state.told = device + hits + misses, misses
                rows += [(rid, selected, missed)] if selected else []
        return [HotUse(step, tuple(rows))] if rows else []

    def _end(self, plan: StepPlan, stepped: Stepped, *, spoiled: bool) -> list[Event]:
        for rid, index, logprobs in stepped.logprobs:
            self._open[rid].logprobs[index] = logprobs
        for rid, part in stepped.prompts:       # those of forgotten results come again
            if (scores := self._open[rid].prompt) is not None:
                scores.add(part)
        # A spoiled step has read what a failed copy should have written: the core forgets that row's results,
        # and whatever else is not finite is so again in the next step.
        faults = () if spoiled else stepped.faults
        aborts: list[Event] = [Aborted(rid, damaged) for rid, why, damaged in faults if self._fault(rid, why)]
        decodes = [count for _, _, count in decoding(plan)]
        said = sum(map(len, stepped.tokens))
        for rid, drafted, accepted in stepped.drafts:
            self._open[rid].drafted += drafted
            self._open[rid].accepted += accepted
        self._count["steps"] += 1
        self._count["empty_steps"] += not plan.rows
        self._count["decode_tokens"] += said - (sum(plan.samples) - len(decodes) - len(stepped.faults))
        self._count["prefill_tokens"] += len(plan.tokens) - sum(decodes)
        self._count["sampled_tokens"] += said
        self._count["nonfinite_rows"] += sum(damaged for _, _, damaged in stepped.faults)
        for rid in _named(plan):
            state = self._open[rid]
            state.queued -= 1
            self._forget(rid, state)
        return [Retired(plan.step, stepped.tokens), *aborts]

    def _fault(self, rid: RequestId, why: str) -> bool:
        """Note why `rid` fails. False once it has ended: until then the core may compute it again."""
        state = self._open[rid]
        if state.closed:
            return False
        if state.fault is None:
            log.error("request %d: %s", rid, why)
        state.fault = why
        return True

    def stats(self) -> dict[str, float]:
        """By metric name: counters since start, and the sums over the ranks of what they tell, or of ONCE the
        most that one tells."""
        out: dict[str, float] = {f"executor_{k}_total": v for k, v in self._count.items()}
        for rank in self._ranks:
            for name, value in rank.stats().items():
                before = out.get(name, 0.0)
                out[name] = max(before, value) if name.startswith(ONCE) else before + value
        out |= {} if self.storage is None else self.storage.stats()
        return {**out, "executor_requests": len(self._open), "executor_queued_plans": len(self._steps),
                "executor_pending_moves": float(sum(m.step <= self._retired for m in self._moves.values()))}


class RanksDisagree(RuntimeError):
    """Two ranks have other pages for the same row, or TP ranks have sampled other tokens: one of them would go
    wrong."""


def _check_tables(step: StepId, records: Sequence[tuple[int, tuple[tuple[int, str], ...]]]) -> None:
    rank, tables = records[0]
    for other, others in records[1:]:
        if others != tables:
            a, b = set(tables) - set(others), set(others) - set(tables)
            raise RanksDisagree(
                f"step {step}: the row tables of ranks {rank} and {other} differ; (row, digest) of rank "
                f"{rank}: {sorted(a)}, of rank {other}: {sorted(b)}")


def _hot_pages(plan: StepPlan) -> list[tuple[RequestId, int]]:
    """The rows that are told how large their hot buffer is."""
    rids = dict(zip(plan.rows, plan.rids, strict=True)) if plan.resizes else {}
    return [(bind.rid, len(hot)) for bind in plan.binds for hot in bind.hot if hot] + [
        (rids[resize.row], len(resize.pages)) for resize in plan.resizes]


def _named(plan: StepPlan) -> set[RequestId]:
    return {*plan.rids, *(b.rid for b in plan.binds)}
