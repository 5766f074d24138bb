"""What one rank does with a plan: row tables, forward, sampling, moves. Runs in the calling thread.

On a CPU a step has run when it was launched. A CUDA device is given steps ahead, and its answers are
waited for: the same code, with the time between launch and landing.

Owns the tensors of its part of the model, the sampling state of open requests and the queue of plans.
Decides nothing, and knows no other rank: `front.py` makes an executor of one or several.

    T tokens of the step   B rows that sample   D model dim
"""
from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from penstock.config.request.params import SamplingParams
from penstock.core.plan import Bind, Moved, RequestId, StepId, StepPlan
from penstock.exec.graphs.capture import DecodeGraphs, GroupedDecodes
from penstock.exec.graphs.mixed import START_S, MixedGraphs
from penstock.exec.sampling.on_device import Draws
from penstock.exec.sampling.sampler import Logprobs, Sampler, Sampling
from penstock.exec.sparse.bounds import Selecting, Selector, Selects
from penstock.exec.sparse.indexer import Indexed
from penstock.exec.step.attend import Arriving, Attending, Grouped, LatentOps, attending
from penstock.exec.step.links import Heard, Links
from penstock.exec.step.tables import Lowered, RowTables
from penstock.kernels.attention.paged_attention import Planner
from penstock.kernels.types.ragged import on_device
from penstock.memory.dram import DramPool
from penstock.memory.hbm import HbmPool
from penstock.memory.lateness import Lateness
from penstock.memory.mover import Arrivals, Mover
from penstock.model.base import CacheShape, Model


@dataclass(frozen=True, slots=True)
class Stepped:
    """A step has executed on this rank.

    tokens      as in `core.plan.Retired`; () for a row whose logits were not finite. These three are
                of the last stage; others sample nothing
    logprobs    (request, index of the output token, its logprobs) where they were asked for
    faults      (request, why) of each row whose logits were not finite
    tables      each DIGEST_STEPS steps of several stages: digest of each bound row's pages, by row; all
                stages must have the same
    reads       (request, `exec.sparse.rows.READS`) of each row that selects, since its beginning
    """

    step: StepId
    tokens: tuple[tuple[int, ...], ...] = ()
    logprobs: tuple[tuple[RequestId, int, Logprobs], ...] = ()
    faults: tuple[tuple[RequestId, str], ...] = ()
    tables: tuple[tuple[int, str], ...] = ()
    reads: tuple[tuple[RequestId, tuple[int, ...]], ...] = ()


Report: TypeAlias = Stepped | Moved
DIGEST_STEPS = 64
_States: TypeAlias = tuple[tuple[RequestId, Sampling], ...]


@dataclass(frozen=True, slots=True)
class _Flight:
    """A step that was launched: whose tokens it samples, and where they arrive.

    done        None on a CPU
    answer_2B   int64, host: tokens, and whether each row's logits were finite; complete after `done`
    reads       tells `Stepped.reads`, after `done`
    """

    plan: StepPlan
    states: _States
    answer_2B: Tensor | None
    done: torch.cuda.Event | None
    reads: Callable[[], tuple[tuple[RequestId, tuple[int, ...]], ...]]


class Rank:
    """One rank in this process, on the device of its pools.

    start       queues. A CUDA device gets the plan at once if it needs nothing that only the answers of
                steps in flight can tell: rows that the device samples by itself, no row bound anew.
    collect     with `block` executes the oldest queued plan, or waits for the oldest in flight, or, with
                neither, for the end of a copy; without, runs no step. Both start the copies that are due
                and report those that have ended. Copies run in a thread of the mover's own, beside the
                steps; with a `lateness`, which picks them, they run inline.
    """

    def __init__(self, model: Model, attention: Planner | LatentOps, hbm: Sequence[HbmPool],
                 dram: Sequence[DramPool] = (), *, rows: int, max_len: int, row_base: int = 0,
                 seed: int = 0, lateness: Lateness | None = None,
                 groups: Sequence[CacheShape] | None = None, selector: Selector | None = None,
                 links: Links | None = None, wake: Callable[[], None] | None = None,
                 draw: str = "cuda") -> None:
        """Pools by cache group; `dram` is empty without a host tier. max_len: tokens of the longest
        request. selector: how requests with a budget select, in `groups` as `exec.sizing.groups_of` makes
        them; None: no request does. groups: None are the model's. links: to the other stages; None: the
        model is whole. wake: called in another thread when a copy has ended. draw: the implementation that
        a device draws with."""
        self._links = links or Links()
        self._samples = self._links.after is None
        self._heard = None if self._links.hear is None else Heard(self._links.hear)
        self._model, self._hbm, self._dram = model, hbm, dram
        self._groups = model.groups if groups is None else groups
        device = hbm[0].pages.device
        self._tables = RowTables(rows, max_len, hbm, dram, base=row_base, device=device)
        self._selecting: Selects | None = None
        self._attending: Attending
        if selector is None:
            self._attending = attending(model, self._groups, attention, hbm)
        else:
            for pool in dram:           # its address goes to kernels before any page: they must know it
                pool.index(pool.base)
            parts = selector, model, self._groups, self._tables, hbm, dram
            self._attending = self._selecting = (
                Indexed(*parts, attention) if isinstance(attention, LatentOps) else
                Selecting(*parts, attention))
        self._sampler = Sampler(model.vocab_size, rows, seed=seed, device=device)
        self._draws = (Draws(model.vocab_size, rows, device, draw) if device.type == "cuda" and self._samples
                       else None)
        self._mover = Mover([*hbm, *dram], lateness, wake)
        self._whole = self._links.before is None and self._samples
        self._ahead = device.type == "cuda" and self._whole
        self._graphs: DecodeGraphs | None = None
        self._mixed: MixedGraphs | None = None
        self._launched: Counter[str] = Counter()    # steps that no graph was replayed for, by cause
        self._queue: deque[StepPlan] = deque()
        self._flights: deque[_Flight] = deque()
        self._executed = StepId(0)
        self._open: dict[RequestId, Sampling] = {}
        self._selects: dict[RequestId, tuple[int, int]] = {}      # budget, length of the prompt
        self._forward_s = 0.0
        self._sampling_s = 0.0
        self._sampled_outside = 0

    def open(self, rid: RequestId, prompt: tuple[int, ...], params: SamplingParams, *,
             choice: int, stop_ids: tuple[int, ...]) -> None:
        """Sampling state of `rid`. Raises RequestError for a token id outside the vocabulary."""
        assert self._selecting or params.top_k_tokens in (None, 0, self._model.attention.topk), (
            f"request {rid} selects, and nothing here can")
        self._open[rid] = self._sampler.open(rid, prompt, params, choice, stop_ids)
        self._selects[rid] = params.top_k_tokens or 0, len(prompt)
        if self._heard is not None:
            self._heard.open(rid)

    def close(self, rid: RequestId) -> None:
        del self._open[rid], self._selects[rid]
        if self._selecting is not None:
            self._selecting.rows.close(rid)
        if self._heard is not None:
            self._heard.close(rid)

    def given(self, rid: RequestId, tokens: Sequence[int]) -> None:
        """The first output tokens of `rid`, which another engine has sampled."""
        if self._samples:
            assert not self._open[rid].outputs, f"request {rid} has output tokens of its own"
            self._open[rid].outputs += tokens
        if self._heard is not None:
            self._heard.given(rid, tokens)

    def capture(self, buckets: Sequence[int], seconds: float = START_S) -> None:
        """On a CUDA device, of a whole model with KV heads: capture decode steps of so many rows, and for so
        long steps with prompts. Without, every step is launched kernel by kernel."""
        attending = self._attending
        assert isinstance(attending, Grouped | Selecting) and self._ahead, "such a rank is not captured"
        decodes = (GroupedDecodes(attending, self._tables) if isinstance(attending, Grouped)
                   else attending.decodes())
        with torch.inference_mode():
            assert self._draws is not None
            self._graphs = DecodeGraphs(self._model, self._tables, decodes, self._draws, buckets)
            self._graphs.capture()
            if isinstance(attending, Grouped) and attending.reads_pages(self._tables):
                self._mixed = MixedGraphs(self._model, self._tables, attending, self._draws, buckets[-1],
                                          self._graphs.memory, self._graphs.logits_BV, self._launched)
                self._mixed.capture(seconds)

    def settle(self) -> None:
        """No further plan comes: leave nothing on the links."""
        if self._heard is not None:
            self._heard.settle()

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
            flight = self._flights.popleft()
            stepped = self._land(flight)
            if flight.plan.waits:       # told before the step that has read what they wrote
                reports += self._mover.finish(flight.plan.waits)
            reports.append(stepped)
        reports += self._mover.run(self._executed, idle=idle)
        if self._ahead:             # what had to wait for these answers: now, not after the next plan is made
            self._launch_ahead()
        return reports

    def _launch_ahead(self) -> None:
        while self._queue and (not self._flights or self._may_fly(self._queue[0])):
            self._launch(self._queue.popleft())

    def _may_fly(self, plan: StepPlan) -> bool:
        """Whether it can be launched without the answers of the steps in front of it."""
        return not (plan.binds or plan.waits) and all(
            s.plain if self._draws is None else s.simple for s in map(self._open.__getitem__, _sampled(plan)))

    def _launch(self, plan: StepPlan) -> None:
        with torch.inference_mode():
            states, answer_2B = self._execute(plan)
        reads = (tuple if self._selecting is None else
                 self._selecting.rows.reads(list(map(self._tables.index, plan.rows))))
        done = None
        if self._tables.last_R.is_cuda:
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record()
        self._flights.append(_Flight(plan, states, answer_2B, done, reads))

    def _execute(self, plan: StepPlan) -> tuple[_States, Tensor | None]:
        for bind in plan.binds:
            self._tables.bind(bind, 0 if bind.keep else self._last(bind))
            if self._selecting is not None:
                budget, num_prompt = self._selects[bind.rid]
                self._selecting.bind(bind, budget=budget, num_prompt=num_prompt)
            else:
                assert not bind.hot, "a rank without a selector has no hot buffers"
        for grow in plan.grows:
            self._tables.grow(grow)
        for lost in plan.unmaps:
            self._tables.unmap(lost)
        if not plan.rows:
            return (), None
        self._hear(plan)
        arrivals = self._arrivals(plan) if plan.waits else []
        started = time.perf_counter()
        if self._graphs is not None and self._graphs.takes(plan):
            for _, events in arrivals:
                torch.cuda.current_stream().wait_event(events[-1])
            rows = tuple(map(self._tables.index, plan.rows))
            logits_BV, answer_2B = self._graphs.run(rows, plan.start)
        elif self._mixed is not None and (bucket := self._mixed.bucket(plan)):
            at = tuple(map(self._tables.index, plan.rows))
            logits_BV, answer_2B = self._mixed.run(plan, at, bucket)
            rows = tuple(row for row, samples in zip(at, plan.samples, strict=True) if samples)
        else:
            if self._graphs is not None and self._mixed is None:
                self._launched["backend" if isinstance(self._attending, Grouped) else "selects"] += 1
            lowered = self._tables.lower(plan)
            hidden_TD = self._forward(plan, lowered, arrivals)
            rows, answer_2B = lowered.sample_rows, None
            if rows and self._samples:
                logits_BV = self._model.logits(hidden_TD[lowered.sample_at_B])
        self._forward_s += time.perf_counter() - started
        if rows and self._samples:
            return self._sample(plan, rows, logits_BV, answer_2B)
        if rows and self._heard is not None:
            self._heard.expect(plan.step, _sampled(plan))
        return (), None

    def _last(self, bind: Bind) -> int:
        """The row's last sampled token as of this bind; of no interest between first and last stage."""
        if self._heard is not None:
            return self._heard.rewind(bind.rid, bind.emitted)
        if not self._samples:
            return 0
        s = self._open[bind.rid]
        self._sampler.bind(s, self._tables.index(bind.row), bind.emitted)
        if self._draws is not None:
            self._draws.bind(self._tables.index(bind.row), s)
        return s.outputs[-1] if s.outputs else 0

    def _hear(self, plan: StepPlan) -> None:
        """On the first of several stages: what rows of this step have sampled since."""
        if self._heard is None:
            return
        at, rows, tokens = -1, [], []
        for row, rid, count in zip(plan.rows, plan.rids, plan.count, strict=True):
            at += count
            if plan.tokens[at] < 0:
                rows.append(self._tables.index(row))
                tokens.append(self._heard.last(rid))
        if rows:
            self._tables.sampled(rows, torch.tensor(tokens, device=self._tables.last_R.device))

    def _arrivals(self, plan: StepPlan) -> Arrivals:
        """Start what the step waits for; on a CPU it has ended then, a device waits for events."""
        self._mover.hasten(plan.waits, plan.moves, self._executed)
        if self._tables.last_R.is_cuda:
            return self._mover.arrivals(plan.waits)
        self._mover.settle(plan.waits)
        return []

    def _forward(self, plan: StepPlan, lowered: Lowered, arrivals: Arrivals) -> Tensor:
        """hidden_TD behind the final norm, or, but for the last stage, nothing that is used here."""
        model, links, attend = self._model, self._links, self._attending.step(plan, lowered)
        if arrivals:
            attend = Arriving(attend, self._groups, arrivals)
        if links.before is None and links.after is None:
            return model.forward(lowered.ids_T, lowered.positions_T, attend)
        x = model.embed(lowered.ids_T) if links.before is None else links.before.take(plan.step)
        x = model.layers(x, lowered.positions_T, attend)
        if links.after is None:
            return model.norm(x)
        links.after.put(plan.step, x)
        return x.h_TD

    def _sample(self, plan: StepPlan, rows: Sequence[int], logits_BV: Tensor,
                answer_2B: Tensor | None) -> tuple[_States, Tensor]:
        """`answer_2B`: a captured step's, with its tokens; else they are still to be chosen."""
        started = time.perf_counter()
        pairs = tuple((rid, self._open[rid]) for rid in _sampled(plan))
        states = [s for _, s in pairs]
        self._sampled_outside += sum(not s.simple for s in states)
        drawn = answer_2B is not None
        if self._draws is not None and all(s.simple for s in states):
            if answer_2B is None:
                answer_2B = self._drawn(self._draws, logits_BV, rows)
        elif answer_2B is None or not all(s.plain for s in states):
            token_B, finite_B = self._sampler.sample(logits_BV, states, rows)
            self._tables.sampled(rows, token_B)
            answer_2B = torch.stack((token_B, finite_B.long()))
            if self._draws is not None and not drawn:
                self._draws.skip(rows, states)
        assert answer_2B is not None
        answer_2B = answer_2B.to("cpu", non_blocking=True)      # from a device, into pinned memory
        self._sampling_s += time.perf_counter() - started
        return pairs, answer_2B

    def _drawn(self, draws: Draws, logits_BV: Tensor, rows: Sequence[int]) -> Tensor:
        """Of a step that was not captured: as a captured one ends."""
        row_B = on_device(rows, logits_BV.device, torch.int32)
        best_B, token_B = logits_BV.max(-1)
        draws.draw(logits_BV, token_B, row_B, torch.zeros_like(row_B))
        self._tables.sampled(rows, token_B)
        return torch.stack((token_B, best_B.isfinite().long()))

    def _land(self, flight: _Flight) -> Stepped:
        """The step has executed once this returns; what it carries may move now."""
        plan = flight.plan
        tokens: list[tuple[int, ...]] = []
        logprobs, faults = [], []
        if flight.done is not None:
            flight.done.synchronize()
        answers = [[], []] if flight.answer_2B is None else flight.answer_2B.tolist()
        for (rid, s), token, finite in zip(flight.states, *answers, strict=False):    # padding comes last
            index = len(s.outputs)
            if not finite:                  # no token is better than a made-up one
                tokens.append(())
                faults.append((rid, f"the model's logits for output token {index} are not finite: "
                                    "its weights are damaged or overflow in this dtype"))
                continue
            s.outputs.append(token)
            tokens.append((token,))
            if index in s.logprobs:
                logprobs.append((rid, index, s.logprobs.pop(index)))
        if flight.states and self._links.tell is not None:
            self._links.tell.put(plan.step, tuple(tokens))
        self._executed = plan.step
        self._mover.add([m for m in plan.moves if m.id not in plan.waits])
        compared = self._links != Links() and plan.step % DIGEST_STEPS == 0
        return Stepped(plan.step, tuple(tokens), tuple(logprobs), tuple(faults),
                       self._tables.digests() if compared else (), flight.reads())

    def stats(self) -> dict[str, float]:
        """By metric name; seconds of this thread, those of moves of whichever made them."""
        out = {"executor_forward_seconds_total": self._forward_s,
               "executor_sampling_seconds_total": self._sampling_s,
               "executor_sampled_outside_total": float(self._sampled_outside)}
        out |= {f'executor_launched_total{{cause="{cause}"}}': float(n)
                for cause, n in self._launched.items()}
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
        return out if self._selecting is None else out | self._selecting.rows.stats()


def _sampled(plan: StepPlan) -> tuple[RequestId, ...]:
    """Requests that sample in this step, in order."""
    return tuple(rid for rid, samples in zip(plan.rids, plan.samples, strict=True) if samples)
