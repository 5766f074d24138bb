"""THE loop: messages become events, the core plans, the executor executes, outputs become chunks.

Synchronous, overlapped and pipelined execution are this one loop; the core's depth says how many
plans are in flight. Owns deadlines, no socket and no thread: `main` beside it and tests drive it.
"""
from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import msgspec

from penstock.config.base.errors import RequestError
from penstock.config.request.params import SamplingParams
from penstock.config.request.selection import Selection, attention_identity
from penstock.core.lifecycle import Phase
from penstock.core.pair.messages import End, Message, Refused
from penstock.core.plan import (
    Aborted,
    Arrived,
    Entered,
    Event,
    Executor,
    Expired,
    Finished,
    Flushed,
    Lookup,
    Moved,
    Output,
    PeerLeft,
    Received,
    RequestId,
    Retired,
    Say,
    Started,
    StepPlan,
    Stopped,
    Tier,
    Token,
    Unstore,
)
from penstock.replay.recorder import Recorded, Recorder
from penstock.serve.engine.record import EventLog
from penstock.serve.wire import (
    Abort,
    Asked,
    AskStats,
    Chunk,
    Flush,
    Hello,
    Logprob,
    ProtocolError,
    Shutdown,
    Stats,
    StopAt,
    Submit,
    ToEngine,
)

if TYPE_CHECKING:
    from penstock.exec.sampling.sampler import Logprobs
    from penstock.serve.engine.peer import Peer
    from penstock.serve.engine.storing import Storing

ID_MAX = 1 << 62

# Why a request gets no answer, where its prompt is to be computed by the other engine only.
REFUSES = ("the prefill engine refused this prompt: it may be longer than the pages there hold, or they "
           "were needed for others; send a shorter one, or try again")
FAILS = "the prefill engine did not bring the KV of this prompt: try again"
LATE = "the KV of this prompt did not come from the prefill engine in time: try again"
CROWDED = "the pages that waited for the KV of this prompt were needed for other requests: try again"


class Planner(Recorded, Protocol):
    """What the loop needs of `core.Core`."""

    def check(self) -> None: ...
    def stats(self) -> dict[str, float]: ...


class Runner(Executor, Protocol):
    """An Executor that also keeps what the core need not know: sampling state and logprobs."""

    def open(self, rid: RequestId, prompt: tuple[int, ...], params: SamplingParams, *,
             choice: int, stop_ids: tuple[int, ...]) -> None: ...
    def close(self, rid: RequestId) -> None: ...
    def given(self, rid: RequestId, tokens: Sequence[int], logprobs: Sequence[Logprobs] = ()) -> None: ...
    def fault(self, rid: RequestId) -> str | None: ...
    def take_logprobs(self, rid: RequestId, index: int) -> Logprobs | None: ...
    def kv_reads(self, rid: RequestId) -> dict[str, int] | None: ...
    def stats(self) -> dict[str, float]: ...

    @property
    def works_here(self) -> bool: ...


class _Live:
    """One request between Submit and its terminal chunk."""

    __slots__ = ("cached", "excuse", "first", "given_up", "is_started", "logprobs", "num_prompt",
                 "peer_cached", "tokens", "transfer")

    def __init__(self, *, logprobs: bool, transfer: int, num_prompt: int) -> None:
        self.logprobs, self.transfer, self.num_prompt = logprobs, transfer, num_prompt
        self.first = 0                          # output index of tokens[0]
        self.tokens: list[int] = []             # of this turn
        self.cached: Started | None = None      # of this turn
        self.peer_cached = 0, 0                 # tokens of its prompt that the other engine had, by tier
        self.is_started = False
        self.excuse = ""                        # what the other engine of a pair last did for it
        self.given_up = False                   # that was no prompt computed, and nobody steps in


def _cached(found: Started, there: tuple[int, int]) -> tuple[dict[str, int], int]:
    """Tokens of a prompt by the tier that they were cached in, of either engine of a pair, and those that the
    other one has computed. What both had is ours."""
    ours = {"hbm": found.hbm_tokens, "dram": found.dram_tokens, "disk": found.disk_tokens}
    skip, computed = sum(ours.values()), found.peer_tokens
    for tier, tokens in zip(("hbm", "dram"), there, strict=True):
        more = min(max(0, tokens - skip), computed)
        skip, computed = max(0, skip - tokens), computed - more
        ours[tier] += more
    if not ours["disk"]:
        del ours["disk"]
    return ours, computed


class EngineLoop:
    """Messages in, chunks out. `handle` any number of messages, then `turn`, for ever."""

    def __init__(self, core: Planner, executor: Runner, *, vocab_size: int, max_model_len: int,
                 selection: Selection | None = None, event_log: EventLog | None = None,
                 check: bool = False, peer: Peer | None = None, storing: Storing | None = None,
                 deadlines_s: Mapping[str, float] | None = None,
                 clock: Callable[[], float] = time.monotonic) -> None:
        """selection: the largest that `executor` can decode from; None: it reads all KV.
        peer: the other engine of a pair. storing: where `executor` has storage. deadlines_s: by phase, how
        long a request may be in it."""
        self._core = core
        self.recorder = Recorder(core)
        self._executor = executor
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._selection = selection
        self._event_log = event_log or EventLog()
        self._check, self._peer, self._clock, self._storing = check, peer, clock, storing
        self._deadlines_s = deadlines_s or {}
        self._timers: list[tuple[float, int, Expired]] = []    # a heap: when, and in order of their setting
        self._timers_set = 0
        self._works_for_peer = core.cfg.role == "prefill"
        self._live: dict[int, _Live] = {}
        self._newest = 0                        # request id
        self._events: list[Event] = []          # since the last advance
        self._chunks: list[Chunk] = []          # refusals since the last turn
        self.steps_in_flight = 0
        self.moves_in_flight = 0
        self.num_tokens = 0                     # output tokens since the start

    @property
    def idle(self) -> bool:
        """Nothing can happen before the next message."""
        return not (self.steps_in_flight or self.moves_in_flight or self._events or self._chunks)

    @property
    def wait_s(self) -> float | None:
        """How long whoever drives it may wait for messages, the executor and the other engine, all together,
        before the next `turn`; None: until one of them has something."""
        if self._events or self._chunks or self._executor.works_here:
            return 0
        return max(0.0, self._timers[0][0] - self._clock()) if self._timers else None

    @property
    def works_here(self) -> bool:
        """Whether a `turn` with `block` waits for nothing but steps."""
        return self._executor.works_here

    # ------------------------------------------------------------ messages in
    def handle(self, message: ToEngine) -> Stats | None:
        """Take one message; it has effect at the next `turn`. AskStats is answered at once.

        Repeats and unknown ids have no effect. Raises ProtocolError on Hello and Shutdown, which
        are the caller's."""
        match message:
            case Submit():
                self._submit(message)
            case Abort(rid):
                if rid in self._live:
                    self._events.append(Aborted(RequestId(rid)))
            case StopAt(rid, count):
                if rid in self._live and 0 < count <= self._max_model_len:
                    self._events.append(Stopped(RequestId(rid), count))
            case Flush():
                self._events.append(Flushed())
            case AskStats(asked):
                return Stats(asked, self.stats())
            case Hello() | Shutdown():
                raise ProtocolError(f"{type(message).__name__} is not for the loop")
        return None

    def _submit(self, m: Submit) -> None:
        if 0 < m.rid <= self._newest:
            return                              # a repeat: ids only grow
        if 0 < m.rid < ID_MAX:
            self._newest = m.rid
        if (reason := self._refusal(m)) is not None:
            self._chunks.append(Chunk(rid=m.rid, tokens=[], index=0, finish="refused",
                                      reason=reason))
            return
        transfer = 0 if self._peer is None else self._peer.ask(m)
        if self._peer is not None and self._peer.refuses and not transfer:
            self._chunks.append(Chunk(rid=m.rid, tokens=[], index=0, finish="unavailable",
                                      reason=self._peer.excuse))
            return
        self._accept(m, transfer)

    def _asked(self, asked: Asked) -> None:
        """The other engine wants a prompt computed."""
        assert self._peer is not None
        self._newest += 1
        m = msgspec.structs.replace(asked.submit, rid=self._newest)
        if self._refusal(m) is not None:
            self._peer.refuse(asked.transfer)
            return
        self._peer.accept(asked.transfer, m.rid, len(m.prompt))
        self._accept(m, asked.transfer)

    def _accept(self, m: Submit, transfer: int) -> None:
        rid = RequestId(m.rid)
        prompt = tuple(m.prompt)
        leader = m.leader if m.leader in self._live else None
        self._executor.open(rid, prompt, m.params, choice=m.choice, stop_ids=tuple(m.stop_ids))
        self._live[rid] = _Live(logprobs=m.params.logprobs is not None, transfer=transfer,
                                num_prompt=len(prompt))
        self._events.append(Arrived(
            rid=rid, prompt=prompt, max_new=m.max_new, stop=frozenset(m.stop_ids),
            min_new=m.params.min_tokens, namespace=m.namespace, priority=m.params.priority,
            leader=None if leader is None else RequestId(leader), host_token=m.host_token,
            selects=m.selects, attention=m.attention, transfer=transfer))

    def _refusal(self, m: Submit) -> str | None:
        """Why `m` cannot run. The API process has said so before with more words: this is the
        check that lets nothing received become an index or a size."""
        try:
            m.params.checked()
        except RequestError as e:
            return str(e)
        vocab = self._vocab_size
        if not 0 < m.rid < ID_MAX or not 0 <= m.choice < m.params.n:
            return "the request id or the choice is out of range"
        if not m.prompt or min(m.prompt) < 0 or max(m.prompt) >= vocab:
            return f"the prompt is empty or has a token id outside 0 to {vocab - 1}"
        if (reason := self._selection_refusal(m)) is not None:
            return reason
        if m.max_new < 1 or len(m.prompt) + m.max_new > self._max_model_len:
            return (f"{len(m.prompt)} prompt tokens and {m.max_new} new ones: "
                    f"the context is {self._max_model_len}")
        if any(not 0 <= i < vocab for i in (*m.stop_ids, *m.params.logit_bias, *m.params.forced)):
            return f"a stop id, a logit bias or a forced id is outside 0 to {vocab - 1}"
        if m.params.min_tokens and len(set(m.stop_ids)) >= vocab:
            return "min_tokens: every token id is a stop id"
        if m.params.logprobs is not None and m.params.logprobs > vocab:
            return f"logprobs is over the vocabulary of {vocab}"
        return None

    def _selection_refusal(self, m: Submit) -> str | None:
        top, budget = self._selection, m.params.top_k_tokens or 0
        if not m.selects:
            if top is not None and top.native:
                return "selects: every request of this model does"
            odd = budget or m.attention
            return "top_k_tokens or attention of a request that reads all KV" if odd else None
        if top is None:
            return "selects: this engine has no selector"
        if not top.least <= budget <= top.budget or budget % top.unit:
            return f"top_k_tokens: {top.least} to {top.budget}, in units of {top.unit}"
        if m.attention != attention_identity(top.within(budget)):
            return "attention: not the identity of what this request selects"
        return None

    # ------------------------------------------------------------ one turn
    def turn(self, *, block: bool) -> list[Chunk]:
        """Collect what the executor finished, plan and submit as much as the core allows, and
        return what is new for the readers. With `block`, wait for the device, but only if
        something is in flight and no message waits for the core.
        """
        in_flight = self.steps_in_flight or self.moves_in_flight
        wait = block and in_flight > 0 and not self._events and not self._chunks
        for event in self._executor.poll(block=wait):
            self._settle(event)
            self._events.append(event)
        if self._peer is not None:
            self._hear(self._peer)
        self._ring()
        if self._storing is not None and (rates := self._storing.rates()) is not None:
            self._events.append(rates)
        chunks, self._chunks = self._chunks, []
        outputs: list[Output] = []
        events: Sequence[Event] = self._events
        self._events = []
        for event in events:
            self._event_log.event(event)
        while True:
            advance = self.recorder.advance(events)
            events = ()
            outputs += advance.outputs
            if self._storing is not None:
                self._storing.ask(advance.outputs)
            if self._peer is not None:
                self._give_first(advance.outputs)
            if advance.plan is not None:        # before anything else: the device must not starve
                self._execute(advance.plan)
            if self._peer is not None:
                self._say(advance.outputs)
            if self._check:
                self._core.check()
            if advance.plan is None:
                break
        self._event_log.outputs(outputs, self._core.stats)
        return chunks + self._chunks_of(outputs)

    def _execute(self, plan: StepPlan) -> None:
        here = plan
        if self._peer is not None:
            moves = [m for m in plan.moves if Tier.PEER in (m.src, m.dst)]
            if moves:
                here = replace(plan, moves=tuple([m for m in plan.moves if Tier.PEER not in (m.src, m.dst)]))
        self._executor.submit(here)
        if self._storing is not None:
            self._storing.submitted(plan)
        if here is not plan and self._peer is not None:
            self._peer.take(moves)
        self.steps_in_flight += 1
        self.moves_in_flight += len(here.moves)
        self._event_log.plan(plan)

    def _settle(self, event: Event) -> None:
        if isinstance(event, Retired):
            self.steps_in_flight -= 1
            if self._storing is not None:
                self._storing.retired(event.step)
            if self._peer is not None:
                self._peer.retired(event.step)
        elif isinstance(event, Moved):
            self.moves_in_flight -= 1
        assert self.steps_in_flight >= 0 and self.moves_in_flight >= 0, "executor: told twice"

    # ------------------------------------------------------------ the other engine, and time
    def _hear(self, peer: Peer) -> None:
        for news in peer.collect():
            if isinstance(news, Asked):
                self._asked(news)
                continue
            self._events.append(news)
            if peer.refuses and isinstance(news, PeerLeft):
                for rid, live in self._live.items():
                    if not live.given_up:
                        live.excuse = peer.excuse
                    self._give_up(rid, live)
            elif isinstance(news, Received) and not self._works_for_peer:
                self._answered(peer, news.message)

    def _answered(self, peer: Peer, message: Message) -> None:
        """Decode end: what the other engine says of one request, which has the number of its transfer."""
        live = self._live.get(message.transfer)
        if live is None or not live.transfer or live.given_up:
            return
        live.excuse = REFUSES if isinstance(message, Refused) else FAILS
        if peer.refuses and isinstance(message, Refused) and message.generation == 0:
            self._give_up(message.transfer, live)       # nothing was granted that would come back

    def _dropped(self, peer: Peer, rid: int, live: _Live) -> None:
        if live.excuse == LATE and not live.is_started:
            peer.late(live.transfer)
        if peer.refuses:
            self._give_up(rid, live)

    def _give_up(self, rid: int, live: _Live) -> None:
        """Nobody computes its prompt, where that is the policy."""
        if not (live.is_started or live.given_up):
            live.given_up = True
            self._events.append(Aborted(RequestId(rid)))

    def _give_first(self, outputs: Sequence[Output]) -> None:
        """The executor must know the tokens that came with a request before a plan that goes on from them."""
        assert self._peer is not None
        for output in outputs:
            if isinstance(output, Started) and output.peer_tokens:
                live = self._live[output.rid]
                tokens, logprobs, live.peer_cached = self._peer.take_first(live.transfer)
                self._executor.given(output.rid, tokens, logprobs)

    def _say(self, outputs: Sequence[Output]) -> None:
        peer = self._peer
        assert peer is not None
        for output in outputs:
            if isinstance(output, Say):
                if isinstance(output.what, End):
                    self._say_first(peer, output.what)
                peer.say(output.what)

    def _say_first(self, peer: Peer, end: End) -> None:
        """What belongs to the tokens of `end`, in front of it."""
        rid = peer.rid_of(end.transfer)
        found = [] if rid is None else [
            self._executor.take_logprobs(RequestId(rid), i) for i in range(len(end.first))]
        hits = None if rid is None else self._live[rid].cached
        peer.say_first(end, [p for p in found if p is not None],
                       (0, 0) if hits is None else (hits.hbm_tokens, hits.dram_tokens))

    def _ring(self) -> None:
        """Deadlines that have passed become events."""
        now = self._clock() if self._timers else 0.0
        while self._timers and self._timers[0][0] <= now:
            expired = heapq.heappop(self._timers)[2]
            if (live := self._live.get(expired.rid)) is not None and expired.phase == Phase.RECEIVING.value:
                live.excuse = LATE
            self._events.append(expired)

    def _set_timer(self, entered: Entered) -> None:
        limit_s = self._deadlines_s.get(entered.phase)
        if self._storing is not None and entered.phase == Phase.FETCHING.value:
            limit_s = self._storing.patience_s(self._live[entered.rid].num_prompt)
        if limit_s is not None:
            self._timers_set += 1
            heapq.heappush(self._timers, (self._clock() + limit_s, self._timers_set,
                                          Expired(entered.rid, entered.phase, entered.visit)))

    def _chunks_of(self, outputs: Sequence[Output]) -> list[Chunk]:
        """One chunk a request, in order of its first output of this turn."""
        touched: dict[int, _Live] = {}
        chunks: list[Chunk] = []
        for output in outputs:
            if isinstance(output, Say | Lookup | Unstore):
                continue
            rid = output.rid
            live = self._live[rid]
            match output:
                case Token():
                    if not live.tokens:
                        live.first = output.index
                    live.tokens.append(output.token)
                    touched[rid] = live
                case Started():
                    live.cached, live.is_started = output, True
                    touched[rid] = live
                case Entered():
                    self._set_timer(output)
                    if self._peer is not None and output.phase == Phase.DROPPED.value:
                        self._dropped(self._peer, rid, live)
                case Finished():
                    touched.pop(rid, None)
                    if not self._works_for_peer:
                        chunks.append(self._chunk(rid, live, output))
                    del self._live[rid]
                    if self._peer is not None:
                        self._peer.forget(live.transfer, rid)
                    self._executor.close(rid)
        if not self._works_for_peer:
            chunks += [self._chunk(rid, live, None) for rid, live in touched.items()]
        return chunks

    def _chunk(self, rid: int, live: _Live, end: Finished | None) -> Chunk:
        tokens, live.tokens = live.tokens, []
        cached, live.cached = live.cached, None
        self.num_tokens += len(tokens)
        logprobs = None
        if live.logprobs and tokens:
            logprobs = [self._logprob(rid, live.first + i) for i in range(len(tokens))]
        reason = "" if end is None else end.reason or self._executor.fault(RequestId(rid)) or ""
        by_tier, peer_tokens = (None, 0) if cached is None else _cached(cached, live.peer_cached)
        finish = None if end is None else end.outcome.value
        if live.given_up and self._peer is not None and finish is not None:
            finish, reason = "unavailable", live.excuse or CROWDED
        return Chunk(
            rid=rid, tokens=tokens, index=live.first, logprobs=logprobs, finish=finish, reason=reason,
            cached_tokens=None if by_tier is None else sum(by_tier.values()),
            cached_by_tier=by_tier,
            peer_tokens=peer_tokens,
            kv_reads=None if end is None else self._executor.kv_reads(RequestId(rid)))

    def _logprob(self, rid: int, index: int) -> Logprob:
        found = self._executor.take_logprobs(RequestId(rid), index)
        assert found is not None, f"request {rid}: no logprobs of output token {index}"
        return Logprob(*found)

    # ------------------------------------------------------------ for operators
    def stats(self) -> dict[str, float]:
        """Gauges and counters of the core, the executor and the loop, by metric name."""
        return {**self._core.stats(), **self._executor.stats(),
                **({} if self._peer is None else self._peer.stats()),
                "generation_tokens_total": float(self.num_tokens),
                "steps_in_flight": float(self.steps_in_flight),
                "moves_in_flight": float(self.moves_in_flight)}
