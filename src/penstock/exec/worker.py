"""One rank: applies a plan to its block tables, runs the step, samples the next tokens and starts copies.

`_execute` is the path of a step: table edits, batch (`step/step_batch.py`), launch (`graphs/capture.py`, ... or
`step/eager.py`), sampling (`sampling/tokens.py`). On a CPU a step has run when its launch returns. A CUDA device is
given steps ahead, and `_land` waits for their results: the same code.

Owns the queue of plans and the steps in flight. Decides nothing about scheduling, and knows no other rank:
`executor.py` joins one or several. Runs in the calling thread.

    T tokens of the step   B rows that sample   D model dim
"""
from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import torch

from penstock.config.request.grammar import Grammar
from penstock.config.request.params import SamplingParams
from penstock.config.request.scores import Scores
from penstock.core.plan import Moved, RequestId, Row, StepId, StepPlan
from penstock.exec.drafts.drafter import Drafter
from penstock.exec.drafts.mtp import MTP
from penstock.exec.drafts.narrow import WIDE
from penstock.exec.drafts.speculation import Speculation
from penstock.exec.graphs.mixed import START_S
from penstock.exec.graphs.steps import WHY, captured, cause
from penstock.exec.sampling.grammar import Grammars
from penstock.exec.sampling.prompt import PromptReader, Read, landed
from penstock.exec.sampling.sampler import Logprobs
from penstock.exec.sampling.tokens import GpuSampler, SampledStep, tokens_of
from penstock.exec.sparse.attending import Sparse
from penstock.exec.step.attend import Attending, LatentOps, ReadCounts
from penstock.exec.step.dense import Dense
from penstock.exec.step.eager import Eager, Steps
from penstock.exec.step.latent import Latent
from penstock.exec.step.links import Links, Sampled
from penstock.exec.step.step_batch import Inputs, StepBatch
from penstock.exec.step.tables import Digests, RowTables
from penstock.kernels.attention.paged_attention import Prepare
from penstock.kernels.triton import compiles
from penstock.memory import pinned
from penstock.memory.dram import DramPool
from penstock.memory.hbm import HbmPool
from penstock.memory.lateness import Lateness
from penstock.memory.mover import Arrivals, Mover
from penstock.model.base import Boundary, CacheShape, Model, Selector


@dataclass(frozen=True, slots=True)
class Stepped:
    """What a step that has run on this rank produced.

    tokens      as in `core.plan.Retired`: sampled ids of each row; () for a row whose logits were not finite. These,
                logprobs and faults come from the last pipeline stage, the same on all its TP ranks
    logprobs    (request, index of the output token, its logprobs) where requested
    faults      (request, reason, whether its logits were not finite) of each row that failed; if they were finite, its
                grammar admits no token
    tables      every DIGEST_STEPS steps of several ranks: (row, digest of its pages) of each bound row; all ranks
                must have the same
    reads       (request, `exec.sparse.rows.READS`) of each row that selects, since its beginning
    prompts     (request, logprobs of a part of its prompt) where requested
    drafts      (request, draft tokens, accepted draft tokens) of each row that had some
    """

    step: StepId
    tokens: tuple[tuple[int, ...], ...] = ()
    logprobs: tuple[tuple[RequestId, int, Logprobs], ...] = ()
    faults: tuple[tuple[RequestId, str, bool], ...] = ()
    tables: tuple[tuple[int, str], ...] = ()
    reads: tuple[tuple[RequestId, tuple[int, ...]], ...] = ()
    prompts: tuple[tuple[RequestId, Scores], ...] = ()
    drafts: tuple[tuple[RequestId, int, int], ...] = ()


Report: TypeAlias = Stepped | Moved
DIGEST_STEPS = 64


@dataclass(slots=True)
class _Flight:
    """A step that was launched, and whose results are not known yet.

    done        CUDA event after the step and its sampling; None on a CPU
    reads       returns `Stepped.reads`, after `done`, from the counts in `answers`
    prompts     become `Stepped.prompts`, after `done`
    tables      returns `Stepped.tables`, after `done`, as they were at launch
    """

    plan: StepPlan
    answers: SampledStep
    done: torch.cuda.Event | None
    reads: ReadCounts
    prompts: list[Read]
    tables: Digests


@dataclass(frozen=True, slots=True)
class WorkerParts:
    """What a rank computes with.

    groups      cache groups of its pools; None: the model's. `exec.load.sizing.groups_of` makes those with a selection
    selector    how layers of the group that may be offloaded select; None: no request selects
    hot_pages   of a row's hot buffer, at most; 0 if no row is ever offloaded
    backends    operation -> name of its implementation, for the operations of sparse decode
    draw        implementation of `kernels.sample.draw` on a CUDA device
    mask        implementation of `kernels.sample.mask`, for grammars
    """

    model: Model
    attention: Prepare | LatentOps
    groups: Sequence[CacheShape] | None = None
    selector: Selector | None = None
    hot_pages: int = 0
    backends: Mapping[str, str] = field(default_factory=dict)
    draw: str = "triton"
    mask: str = "reference"


class Worker:
    """One rank in this process, on the device of its pools.

    start       queues a plan. A CUDA device gets its step at once, while earlier steps are in flight, unless the step
                waits for copies (ADR 0056), or for tokens that the host needs for its drafts. Requests with host-side
                sampling (grammar, penalties) get their token when the next step is launched, or when this one lands.
    collect     with `block`, runs the oldest queued plan or waits for the oldest step in flight; with neither, waits
                for the end of a copy. Without `block`, runs no step. Both start the copies that are due and report
                those that have ended. Copies run in a thread of the mover, next to the steps; with a `lateness`,
                which orders them, they run inline. A reported step's pages may be released, so a step is reported
                late while recurrent states still wait for the result of its drafts.
    """

    def __init__(self, parts: WorkerParts, hbm: Sequence[HbmPool], dram: Sequence[DramPool] = (), *, rows: int,
                 max_len: int, row_base: int = 0, seed: int = 0, lateness: Lateness | None = None,
                 links: Links | None = None, wake: Callable[[], None] | None = None,
                 grammars: Grammars | None = None, drafter: Drafter | None = None,
                 draft_tokens: int = 0) -> None:
        """Pools by cache group; `dram` is empty without a host tier. max_len: tokens of the longest
        request. links: to the other stages; None: the model is whole. wake: called in another thread when a
        copy has ended. grammars: of requests that have one; None: no request does. drafter: of rows whose
        plans have drafts; None: none has, but of a model that drafts itself. It is one on every stage.
        draft_tokens: the most that it drafts, of several stages."""
        self._links = links = links or Links()
        if drafter is not None or parts.model.drafting is not None:     # whose host has to know all tokens
            self._links = links = replace(links, sees=None)
        model = parts.model
        self._model, self._hbm, self._dram = model, hbm, dram
        self._groups = model.groups if parts.groups is None else parts.groups
        device = hbm[0].pages.device
        self._tables = RowTables(rows, max_len, hbm, dram, base=row_base, device=device)
        own = [group for group in self._groups if not group.drafts]
        self._counts = all(group.owned for group in [g for g in own if g.offloaded] or own)    # one rank of several
        self._attending = _attending(parts, own, self._tables, hbm[:len(own)], dram[:len(own)])
        layer = MTP(model, parts.attention, self._groups, self._tables, hbm) if model.drafting is not None else None
        self._tokens = tokens_of(self._links, model.vocab_size, rows, self._tables, seed, parts.draw,
                                 parts.mask, grammars)
        drafts = layer or drafter
        self._drafts = None if drafts is None else Speculation(
            drafts, layer, self._tokens, self._tables, self._attending, rows=rows, max_len=max_len,
            vocab_size=model.vocab_size, tp_size=model.stage.tp_rank.size, most=draft_tokens,
            whole=links.before is None and links.after is None)
        self._prompts = PromptReader(model.logits, model.vocab_size) if self._links.after is None else None
        self._eager = Eager(model, own, self._tables, self._attending, self._links, layer)
        self._steps: list[Steps] = [self._eager]
        self._mover = Mover([*hbm, *dram], lateness, wake)
        self._ahead = device.type == "cuda" and links.ahead and (links.before is None or self._drafts is None)
        self._queue: deque[StepPlan] = deque()
        self._flights: deque[_Flight] = deque()
        self._executed = StepId(0)
        self._reports: deque[Report] = deque()      # not told
        self._selects: dict[RequestId, tuple[int, int]] = {}      # budget, length of the prompt
        self._forward_s = 0.0
        self._sampling_s = 0.0
        self._launches = Counter[str]()

    def open(self, rid: RequestId, prompt: tuple[int, ...], params: SamplingParams, *,
             choice: int, stop_ids: tuple[int, ...]) -> None:
        """Sampling state of `rid`. Raises RequestError for a token id outside the vocabulary."""
        own = self._model.selector
        assert self._attending.selects or params.sparse_top_k in (None, 0, own and own.tokens), (
            f"request {rid} selects, and nothing here can")
        self._tokens.open(rid, prompt, params, choice, stop_ids)
        if self._prompts is not None:
            self._prompts.open(rid, prompt, params)
        self._selects[rid] = params.sparse_top_k or 0, len(prompt)

    def compiled(self, grammar: Grammar) -> bool:
        return self._tokens.compiled(grammar)

    def close(self, rid: RequestId) -> None:
        del self._selects[rid]
        if self._prompts is not None:
            self._prompts.close(rid)
        self._attending.close(rid)
        self._tokens.close(rid)
        if self._drafts is not None:
            self._drafts.host.forget(rid)

    def given(self, rid: RequestId, tokens: Sequence[int]) -> None:
        """The first output tokens of `rid`, which another engine has sampled."""
        self._tokens.given(rid, tokens)

    def capture(self, buckets: Sequence[int], seconds: float = START_S, *, width: int = 1,
                rehearses: bool = False) -> None:
        """On a CUDA device: capture decode steps of so many rows, and of a whole model those with drafts of up
        to `width` positions each, and for so long steps with prompts. Without, every step is launched kernel by
        kernel. All stages at the same time, or one after the other in their order: each hands the next what its
        steps take. rehearses: they are launched and not captured, and none can be replayed."""
        assert self._tables.last_R.is_cuda, "only steps of a CUDA device are captured"
        draws = self._tokens.draws if isinstance(self._tokens, GpuSampler) else None
        ahead = None if self._drafts is None else self._drafts.ahead
        with pinned.held_back():
            self._steps[:-1], graphs = captured(
                self._model, self._tables, self._attending, draws, buckets, seconds, width,
                WIDE["cuda"], ahead, rehearses, self._links)
        self._eager.cause = cause(self._attending, ahead, self._links, self._model.drafting is not None)
        if self._drafts is not None:
            self._drafts.captured(graphs)

    @property
    def uncaptured(self) -> str:
        """Which steps `capture` has left, and why; "": none but those that are too large for it."""
        return WHY.get(self._eager.cause, "")

    def settle(self) -> None:
        """No further plan comes: leave nothing on the links."""
        self._tokens.settle()

    @property
    def flying(self) -> torch.cuda.Event | None:
        """The oldest step in flight on a device has ended when this has: `collect` with `block` waits."""
        return self._flights[0].done if self._flights else None

    def start(self, plan: StepPlan) -> None:
        self._queue.append(plan)
        if self._ahead:
            self._launch_ahead()

    def collect(self, *, block: bool) -> list[Report]:
        reports: list[Report] = []
        idle = block and not self._queue and not self._flights
        if block and not idle:
            if not self._flights:
                self._launch(self._queue.popleft())
            if self._ahead:
                self._launch_ahead()
            flight = self._flights[0]
            stepped = self._land(flight)
            self._flights.popleft()
            if flight.plan.waits:       # told before the step that has read what they wrote
                reports += self._mover.finish(flight.plan.waits)
            reports.append(stepped)
        reports += self._mover.run(self._executed, idle=idle)
        if self._ahead:             # what had to wait for these answers: now, not after the next plan is made
            self._launch_ahead()
        self._reports += reports
        return list(self._told())

    def _told(self) -> Iterator[Report]:
        """In their order, up to a step whose states wait."""
        while self._reports:
            first = self._reports[0]
            if isinstance(first, Stepped) and self._attending.states.waits(first.step):
                break
            yield self._reports.popleft()

    def checked(self, step: StepId, right: Mapping[Row, int]) -> None:
        """Of the rows that sampled in a step with drafts, how many of these were right, as the last stage has
        found: one in front of it hears this once its own part has run."""
        by_index = {self._tables.index(row): n for row, n in right.items()}
        with torch.inference_mode():
            launched = self._attending.states.settle(step, by_index)
            if self._drafts is not None:
                launched |= self._drafts.settle(step, by_index)
        if launched and self._tables.last_R.is_cuda:
            torch.cuda.current_stream().synchronize()   # who is told copies on other streams

    def _settle(self, plan: StepPlan, answers: SampledStep) -> None:
        """Once the answers of a step are known."""
        if answers.drafts:
            self.checked(plan.step, right_of(plan, answers.tokens))

    def _launch_ahead(self) -> None:
        """All but a plan that waits for copies, or for tokens that drafts follow: once the steps in front of
        it have run."""
        while self._queue and self._arrived(self._queue[0]) and not (
                self._flights and self._waits(self._queue[0])):
            self._launch(self._queue.popleft())

    def _arrived(self, plan: StepPlan) -> bool:
        """What the stage in front hands over for it, where steps are launched ahead."""
        return self._links.before is None or not plan.rows or self._links.before.arrived() is not False

    @property
    def awaits(self) -> bool:
        """No step is in flight, and the next waits for the stage in front: `collect` goes on once that has come."""
        return self._ahead and bool(self._queue) and not self._flights and not self._arrived(self._queue[0])

    def _waits(self, plan: StepPlan) -> bool:
        return bool(plan.waits) or (self._drafts is not None and self._drafts.waits(plan, self._unknown()))

    def _unknown(self) -> list[SampledStep]:
        """Steps in flight whose tokens the host does not know yet."""
        return [flight.answers for flight in self._flights if not flight.answers.learnt]

    def _launch(self, plan: StepPlan) -> None:
        if self._flights:                   # its tokens are inputs of this one
            self._choose(self._flights[-1])
        flying = {rid for flight in self._flights for rid, _ in flight.answers.states} if plan.binds else ()
        assert not any(bind.rid in flying for bind in plan.binds), (
            f"step {plan.step} binds a request anew whose tokens are in flight")
        with torch.inference_mode():
            answers, prompts = self._execute(plan)
        self._launches["ahead" if self._flights else "alone"] += 1
        rows = map(self._tables.index, plan.rows if self._counts else ())
        reads = self._attending.reads(list(rows), answers.counted)
        several = self._links != Links() or self._model.stage.tp_rank.size > 1
        compared = several and plan.step % DIGEST_STEPS == 0
        tables = self._tables.digests() if compared else _not_compared
        self._flights.append(_Flight(plan, answers, self._done(), reads, prompts, tables))
        if not self._ahead or self._links.shows is not None:
            self._choose(self._flights[-1])
        if answers.states and self._links.shows is not None:
            self._links.shows(self._tables.last_R)

    def _done(self) -> torch.cuda.Event | None:
        """Behind all that has been launched."""
        if not self._tables.last_R.is_cuda:
            return None
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record()
        return done

    def _choose(self, flight: _Flight) -> None:
        """Rows whose tokens follow from those before get theirs. Waits for steps in front, not for this."""
        if flight.answers.late is None:
            return
        for before in self._flights:
            if before is flight:
                break
            self._learn(before)
        started = time.perf_counter()
        with torch.inference_mode():
            flight.answers.choose()
        if flight.answers.learnt:
            self._settle(flight.plan, flight.answers)
        flight.done = self._done()
        self._sampling_s += time.perf_counter() - started

    def _learn(self, flight: _Flight) -> None:
        """Its step has executed once this returns, and later choices know its tokens."""
        if flight.done is not None:
            flight.done.synchronize()
        if not flight.answers.learnt:
            flight.answers.learn()
            self._settle(flight.plan, flight.answers)

    def _execute(self, plan: StepPlan) -> tuple[SampledStep, list[Read]]:
        for bind in plan.binds:
            self._tables.bind(bind, self._tokens.bind(bind))
            budget, num_prompt = self._selects[bind.rid]
            self._attending.bind(bind, budget=budget, num_prompt=num_prompt)
            if self._drafts is not None:
                self._drafts.bind(bind)
        for grow in plan.grows:
            self._tables.grow(grow)
        for remap in plan.remaps:
            self._tables.remap(remap)
        self._tables.edits.apply()
        for resize in plan.resizes:
            self._attending.resize(resize)
        if not plan.rows:
            return SampledStep(), []
        flying, drafts = self._unknown(), self._drafts
        alone = Counter(rid for answers in flying if not answers.firsts for rid, _ in answers.states)
        graphs = drafts.graphs if drafts is not None and drafts.by_device(plan, flying) else None
        inputs: Inputs | None = None
        before: Boundary | None = None
        if drafts is not None and graphs is None:
            drafts.passed(plan)
            if self._links.before is None:
                inputs = drafts.choose(plan, alone)
            else:
                before = self._links.before.take(plan.step)
                inputs = before.inputs
                assert inputs is not None, f"step {plan.step}: the stage before does not say what it computes"
        batch = self._tokens.feed(StepBatch.of(plan, self._tables.index, inputs, before))
        arrivals = self._arrivals(plan) if plan.waits else []
        started = time.perf_counter()
        told = self._prompts if self._prompts is not None and self._prompts.wants(batch) else None
        ways = self._steps[-1:] if told else self._steps            # only an eager step has what that needs
        if graphs is not None:
            out = {rid for answers in flying if answers.firsts for rid, _ in answers.states}
            ran = graphs.step(plan, arrivals, alone, out)
        else:
            ran = next(found for way in ways if (found := way.step(batch, arrivals)) is not None)
        stepped = time.perf_counter()
        self._forward_s += stepped - started
        prompts = told.read(batch, ran.hidden_TD) if told and ran.hidden_TD is not None else []
        answers = self._tokens.sample(batch, ran) if ran.rows else SampledStep()
        self._settle(plan, answers)
        self._sampling_s += time.perf_counter() - stepped
        return answers, prompts

    def _arrivals(self, plan: StepPlan) -> Arrivals:
        """Start what the step waits for; on a CPU it has ended then, a device waits for events."""
        self._mover.start_now(plan.waits, plan.moves, self._executed)
        if self._tables.last_R.is_cuda:
            return self._mover.arrivals(plan.waits)
        self._mover.wait_for(plan.waits)
        return []

    def _land(self, flight: _Flight) -> Stepped:
        """The step has executed once this returns; what it carries may move now."""
        self._choose(flight)
        self._learn(flight)
        plan, answers = flight.plan, flight.answers
        if answers.states and self._links.tell is not None:
            drafts = () if self._drafts is None else self._drafts.next(plan, answers.tokens)
            self._links.tell.put(plan.step, Sampled(tuple(answers.tokens), drafts))
        self._executed = plan.step
        self._mover.add([m for m in plan.moves if m.id not in plan.waits])
        if self._drafts is not None and self._counts:
            self._drafts.host.count(answers.drafts)
        return Stepped(plan.step, tuple(answers.tokens), tuple(answers.logprobs), tuple(answers.faults),
                       flight.tables(), flight.reads(answers.counts),
                       landed(flight.prompts), tuple(answers.drafts))

    def stats(self) -> dict[str, float]:
        """By metric name; seconds of this thread, those of moves of whichever made them."""
        out = {"executor_forward_seconds_total": self._forward_s,
               "executor_sampling_seconds_total": self._sampling_s,
               "executor_sampled_outside_total": float(self._tokens.outside)}
        if self._ahead:         # of the answers of a step in flight, or with none
            out |= {f'executor_steps_total{{launch="{way}"}}': float(n) for way, n in self._launches.items()}
        if self._tables.last_R.is_cuda and self._counts:
            out |= compiles.stats()
        owned = [self._attending.stats, *([self._drafts.host.stats] if self._drafts else [])]
        for stats in (*(way.stats for way in self._steps), *(owned if self._counts else [])):
            out |= stats()
        for (src, dst, group), traffic in self._mover.traffic.items():
            name = self._groups[group].name
            way = f'{{src="{src.value}",dst="{dst.value}",group="{name}"}}'
            out[f"moves_total{way}"] = traffic.moves
            out[f"moves_failed_total{way}"] = traffic.failed
            out[f"moved_bytes_total{way}"] = traffic.bytes
            out[f"move_seconds_total{way}"] = traffic.seconds
        for pool in (*self._hbm, *self._dram):
            name = self._groups[pool.group].name
            out[f'pool_bytes{{tier="{pool.tier.value}",group="{name}"}}'] = pool.nbytes
        return out


def _not_compared() -> tuple[()]:
    return ()


def right_of(plan: StepPlan, tokens: Sequence[Sequence[int]]) -> dict[Row, int]:
    """Of each row that has sampled: how many of its drafts, if it had any, were right. tokens: as
    `Stepped.tokens`."""
    rows = dict.fromkeys(row for row, samples in zip(plan.rows, plan.samples, strict=True) if samples)
    return {row: len(said) - 1 for row, said in zip(rows, tokens, strict=True)}


def _attending(parts: WorkerParts, groups: Sequence[CacheShape], tables: RowTables, hbm: Sequence[HbmPool],
               dram: Sequence[DramPool]) -> Attending:
    model, attention, selector = parts.model, parts.attention, parts.selector
    if selector is None:
        if isinstance(attention, LatentOps):
            return Latent(model.reads, groups, attention, hbm, tables.groups[:len(groups)])
        return Dense(model.reads, groups, attention, hbm, tables.groups)
    for pool in dram:           # its address goes to kernels before any page: they must know it
        pool.index(pool.base)
    return Sparse(selector, parts.hot_pages, parts.backends, model, groups, tables, hbm, dram, attention)
