"""The CPU executor: runs plans in the calling thread, one step per blocking poll.

Owns the row tables, the sampling state of open requests and the queue of plans. Decides nothing:
which rows run, where pages live and when a request ends is the core's business.

    T tokens of the step   B rows that sample   N query heads   K KV heads   H head dim
"""
from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.config.params import SamplingParams
from penstock.core.plan import Aborted, Event, RequestId, Retired, StepId, StepPlan
from penstock.exec.lower import Lowered, RowTables
from penstock.exec.sampling import Logprobs, Sampler, Sampling
from penstock.kernels.paged_attention import AttentionSpec, Planner, store
from penstock.memory.dram import DramPool
from penstock.memory.hbm import HbmPool
from penstock.memory.lateness import Lateness
from penstock.memory.mover import Mover
from penstock.model.base import CacheShape, Model

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Open:
    """A request between `open` and its last plan."""

    sampling: Sampling
    queued: int = 0              # plans not yet executed that name it
    closed: bool = False
    fault: str | None = None     # why this executor aborted it


class CpuExecutor:
    """`core.plan.Executor` on one CPU, plus the sampling state of requests.

    submit      queues, so that a plan may be made before the step in front of it has run
    poll        block=True executes the oldest queued plan, or, with none queued, waits for the end
                of a copy; block=False runs no step. Both start the copies that are due and report
                those that have ended. Copies run in a thread of the mover's own, beside the steps;
                with a `lateness`, which picks them, they run inline.
    Retired     has () for a row whose logits were not finite; an Aborted for its request follows,
                and `fault` says why. One request fails, the engine goes on.
    """

    def __init__(self, model: Model, attention: Planner, hbm: Sequence[HbmPool],
                 dram: Sequence[DramPool] = (), *, rows: int, max_len: int, row_base: int = 0,
                 seed: int = 0, lateness: Lateness | None = None) -> None:
        """Pools by cache group of the model; `dram` is empty without a host tier. max_len: tokens
        of the longest request."""
        self._model, self._attention, self._hbm, self._dram = model, attention, hbm, dram
        self._table = RowTables(rows, max_len, hbm, dram, base=row_base)
        self._sampler = Sampler(model.vocab_size, rows, seed=seed)
        self._specs = [_spec(model, group, pool)
                       for group, pool in zip(model.groups, hbm, strict=True)]
        self._places = _places(model, hbm)
        self._mover = Mover([*hbm, *dram], lateness)
        self._queue: deque[StepPlan] = deque()
        self._executed = StepId(0)
        self._open: dict[RequestId, _Open] = {}
        self._count = dict.fromkeys(("steps", "empty_steps", "prefill_tokens", "decode_tokens",
                                     "sampled_tokens", "nonfinite_rows"), 0)
        self._forward_s = 0.0
        self._sampling_s = 0.0

    # ------------------------------------------------------------ requests
    def open(self, rid: RequestId, prompt: tuple[int, ...], params: SamplingParams, *,
             choice: int = 0, stop_ids: tuple[int, ...] = ()) -> None:
        """Make `rid` known, before the first plan that names it.

        stop_ids  token ids that end it: `min_tokens` keeps them from being sampled too early.
        Raises RequestError for a token id outside the vocabulary; nothing is kept then.
        """
        assert rid not in self._open, f"request {rid} is open already"
        self._open[rid] = _Open(self._sampler.open(rid, prompt, params, choice, stop_ids))

    def close(self, rid: RequestId) -> None:
        """`rid` has finished. Its state goes when the last plan in flight that names it has run."""
        state = self._open[rid]
        assert not state.closed, f"request {rid} is closed already"
        state.closed = True
        self._forget(rid, state)

    def _forget(self, rid: RequestId, state: _Open) -> None:
        if state.closed and state.queued == 0:
            del self._open[rid]

    def take_logprobs(self, rid: RequestId, index: int) -> Logprobs | None:
        """Logprobs of output token `index`, once; None if none were asked for or they are gone."""
        state = self._open.get(rid)
        return None if state is None else state.sampling.logprobs.pop(index, None)

    def fault(self, rid: RequestId) -> str | None:
        """Why this executor aborted `rid`, until `close`; None if it did not."""
        return self._open[rid].fault

    # ------------------------------------------------------------ plans
    def submit(self, plan: StepPlan) -> None:
        """Queue a plan. Asserts that steps are dense and that its requests are open."""
        newest = self._queue[-1].step if self._queue else self._executed
        assert plan.step == newest + 1, f"step {plan.step} after step {newest}"
        for rid in _named(plan):
            assert rid in self._open, f"step {plan.step} names request {rid}, which is not open"
            self._open[rid].queued += 1
        self._queue.append(plan)

    def poll(self, *, block: bool) -> Sequence[Event]:
        events: list[Event] = []
        idle = block and not self._queue
        if block and self._queue:
            plan = self._queue.popleft()
            with torch.inference_mode():
                events += self._execute(plan)
            self._executed = plan.step
            self._mover.add(plan.moves)
            for rid in _named(plan):
                state = self._open[rid]
                state.queued -= 1
                self._forget(rid, state)
        events += self._mover.run(self._executed, idle=idle)
        return events

    def _execute(self, plan: StepPlan) -> list[Event]:
        self._count["steps"] += 1
        assert not plan.waits, "this executor waits for no copies"
        for bind in plan.binds:
            s = self._open[bind.rid].sampling
            if not bind.keep:
                self._sampler.bind(s, self._table.index(bind.row), bind.emitted)
            self._table.bind(bind, s.outputs[-1] if s.outputs else 0)
        for grow in plan.grows:
            self._table.grow(grow)
        for lost in plan.yields:
            self._table.unmap(lost)
        if not plan.rows:
            self._count["empty_steps"] += 1
            return [Retired(plan.step, ())]
        started = time.perf_counter()
        lowered = self._table.lower(plan)
        hidden_TD = self._forward(lowered)
        decodes = sum(c == 1 and s for c, s in zip(plan.count, plan.samples, strict=True))
        self._count["decode_tokens"] += decodes
        self._count["prefill_tokens"] += len(plan.tokens) - decodes
        self._forward_s += time.perf_counter() - started
        if not lowered.sample_rows:
            return [Retired(plan.step, ())]
        return self._sample(plan, lowered, hidden_TD)

    def _forward(self, lowered: Lowered) -> Tensor:
        plans = [self._attention(ragged, spec)
                 for ragged, spec in zip(lowered.ragged, self._specs, strict=True)]

        def attend(layer: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor) -> Tensor:
            group, k_PKGH, v_PKGH = self._places[layer]
            ragged = lowered.ragged[group]
            store(k_TKH, v_TKH, k_PKGH, v_PKGH, ragged.page_T, ragged.offset_T)
            return plans[group](q_TNH, k_PKGH, v_PKGH)

        return self._model.forward(lowered.ids_T, lowered.positions_T, attend)

    def _sample(self, plan: StepPlan, lowered: Lowered, hidden_TD: Tensor) -> list[Event]:
        started = time.perf_counter()
        logits_BV = self._model.logits(hidden_TD[lowered.sample_at_B])
        rids = [rid for rid, samples in zip(plan.rids, plan.samples, strict=True) if samples]
        states = [self._open[rid].sampling for rid in rids]
        token_B, finite_B = self._sampler.sample(logits_BV, states, lowered.sample_rows)
        self._table.sampled(lowered.sample_rows, token_B)
        tokens: list[tuple[int, ...]] = []
        aborts: list[Event] = []
        for rid, s, token, finite in zip(rids, states, token_B.tolist(), finite_B.tolist(),
                                         strict=True):
            if finite:
                s.outputs.append(token)
                tokens.append((token,))
            else:
                tokens.append(())
                aborts += self._fault(rid, len(s.outputs))
        self._count["sampled_tokens"] += len(tokens) - len(aborts)
        self._sampling_s += time.perf_counter() - started
        return [Retired(plan.step, tuple(tokens)), *aborts]

    def _fault(self, rid: RequestId, index: int) -> list[Event]:
        """A NaN or an infinity among the logits: no token is better than a made-up one."""
        self._count["nonfinite_rows"] += 1
        state = self._open[rid]
        if state.fault is not None:
            return []
        state.fault = (f"the model's logits for output token {index} are not finite: its weights "
                       "are damaged or overflow in this dtype")
        log.error("request %d aborted: %s", rid, state.fault)
        return [Aborted(rid, damaged=True)]

    def stats(self) -> dict[str, float]:
        """By metric name: counters since start, sizes of the pools; seconds of this thread, but
        those of moves, which are the copy thread's."""
        out: dict[str, float] = {f"executor_{k}_total": v for k, v in self._count.items()}
        out["executor_forward_seconds_total"] = self._forward_s
        out["executor_sampling_seconds_total"] = self._sampling_s
        out["executor_requests"] = len(self._open)
        out["executor_queued_plans"] = len(self._queue)
        out["executor_pending_moves"] = len(self._mover)
        for (src, dst, group), traffic in self._mover.traffic.items():
            name = self._model.groups[group].name
            way = f'{{src="{src.value}",dst="{dst.value}",group="{name}"}}'
            out[f"moves_total{way}"] = traffic.moves
            out[f"moves_failed_total{way}"] = traffic.failed
            out[f"moved_bytes_total{way}"] = traffic.bytes
            out[f"move_seconds_total{way}"] = traffic.seconds
        for pool in (*self._hbm, *self._dram):
            name = self._model.groups[pool.group].name
            out[f'pool_bytes{{tier="{pool.tier.value}",group="{name}"}}'] = pool.nbytes
        return out


def _spec(model: Model, group: CacheShape, pool: HbmPool) -> AttentionSpec:
    want = (len(group.layers), group.num_kv_heads, group.planes, group.unit, group.head_dim)
    have = pool.layout
    assert want == (have.num_layers, have.num_kv_heads, have.planes, have.unit, have.head_dim), (
        f"a foreign pool for group {group.name}")
    return AttentionSpec(
        num_heads=model.attention.num_heads, num_kv_heads=group.num_kv_heads,
        head_dim=group.head_dim, dtype=have.dtype, scale=model.attention.scale)


def _places(model: Model, hbm: Sequence[HbmPool]) -> dict[int, tuple[int, Tensor, Tensor]]:
    """Of each layer: the group that attention reads, its k and v pools [P, K, G, H]."""
    return {layer: (g, pool.pages[:, i, :, 0], pool.pages[:, i, :, 1])
            for g, (group, pool) in enumerate(zip(model.groups, hbm, strict=True))
            if not group.selector for i, layer in enumerate(group.layers)}


def _named(plan: StepPlan) -> set[RequestId]:
    return {*plan.rids, *(b.rid for b in plan.binds)}
