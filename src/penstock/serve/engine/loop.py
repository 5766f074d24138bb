"""THE loop: messages become events, the core plans, the executor executes, outputs become chunks.

Synchronous, overlapped and pipelined execution are this one loop; the core's depth says how many
plans are in flight. Owns no socket and no thread: `main` beside it and tests drive it.
"""
from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import msgspec

from penstock.config.base.errors import RequestError
from penstock.config.request.scores import scores_fit
from penstock.config.request.selection import Selection, attention_identity
from penstock.core.plan import (
    ONE_PEER,
    Aborted,
    Arrived,
    Entered,
    Event,
    Finished,
    Flushed,
    Lookup,
    Moved,
    Output,
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
from penstock.serve.engine.live import Live, Runner
from penstock.serve.engine.paired import Paired
from penstock.serve.engine.record import EventLog
from penstock.serve.engine.shown import shown
from penstock.serve.engine.timers import Timers
from penstock.serve.wire import (
    Abort,
    Asked,
    AskShown,
    AskStats,
    Chunk,
    Flush,
    Hello,
    ProtocolError,
    Shown,
    Shutdown,
    Stats,
    StopAt,
    Submit,
    ToEngine,
)

if TYPE_CHECKING:
    from penstock.serve.engine.paired import Peers
    from penstock.serve.engine.peer import Peer
    from penstock.serve.engine.storing import Storing

ID_MAX = 1 << 62

class Planner(Recorded, Protocol):
    """What the loop needs of `core.Core`."""

    def check(self) -> None: ...
    def stats(self) -> dict[str, float]: ...


class EngineLoop:
    """Messages in, chunks out. `handle` any number of messages, then `turn`, for ever."""

    def __init__(self, core: Planner, executor: Runner, *, vocab_size: int, max_model_len: int,
                 selection: Selection | None = None, event_log: EventLog | None = None,
                 check: bool = False, peers: Peers | None = None, storing: Storing | None = None,
                 deadlines_s: Mapping[str, float] | None = None,
                 clock: Callable[[], float] = time.monotonic) -> None:
        """selection: the largest that `executor` can decode from; None: it reads all KV.
        peers: the engines of the other end of a pair. storing: where `executor` has storage. deadlines_s: by
        phase, how long a request may be in it."""
        self._core = core
        self.recorder = Recorder(core)
        self._executor = executor
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._selection = selection
        self._event_log = event_log or EventLog()
        self._check, self._storing = check, storing
        self._timers = Timers(clock, deadlines_s or {}, storing)
        self._works_for_peer = core.cfg.role == "prefill"
        self._live: dict[int, Live] = {}
        self._paired = None if peers is None else Paired(peers, executor, self._live)
        self._newest = 0                        # request id
        self._held: dict[int, Submit] = {}      # until their grammars are compiled: no step waits for that
        self._events: list[Event] = []          # since the last advance
        self._chunks: list[Chunk] = []          # refusals since the last turn
        self.steps_in_flight = 0
        self.moves_in_flight = 0
        self.num_tokens = 0                     # output tokens since the start

    @property
    def idle(self) -> bool:
        """Nothing can happen before the next message."""
        return not (self.steps_in_flight or self.moves_in_flight or self._events or self._chunks
                    or self._held)

    @property
    def wait_s(self) -> float | None:
        """How long whoever drives it may wait for messages, the executor and the other engine, all together,
        before the next `turn`; None: until one of them has something."""
        if self._events or self._chunks or self._executor.works_here:
            return 0
        return self._timers.wait_s

    @property
    def works_here(self) -> bool:
        """Whether a `turn` with `block` waits for nothing but steps."""
        return self._executor.works_here

    # ------------------------------------------------------------ messages in
    def handle(self, message: ToEngine) -> Stats | Shown | None:
        """Take one message; it has effect at the next `turn`. AskStats and AskShown are answered at once.

        Repeats and unknown ids have no effect. Raises ProtocolError on Hello and Shutdown, which
        are the caller's."""
        match message:
            case Submit():
                self._submit(message)
            case Abort(rid):
                self._held.pop(rid, None)
                if rid in self._live:
                    self._events.append(Aborted(RequestId(rid)))
            case StopAt(rid, count):
                if rid in self._live and 0 < count <= self._max_model_len:
                    self._events.append(Stopped(RequestId(rid), count))
            case Flush():
                self._events.append(Flushed())
            case AskStats(asked):
                return Stats(asked, self.stats())
            case AskShown(asked):
                return shown(asked, self.recorder)
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
        # One end of a pair takes them in order, as the other wants them: there prompts take longer anyway.
        if (m.params.grammar is None or self._paired is not None
                or self._executor.compiled(m.params.grammar)):
            self._begin(m)
        else:
            self._held[m.rid] = m

    def _begin(self, m: Submit) -> None:
        peer, excuse = (None, "") if self._paired is None else self._paired.ask(m)
        if excuse:
            self._chunks.append(Chunk(rid=m.rid, tokens=[], index=0, finish="unavailable", reason=excuse))
            return
        self._accept(m, peer, 0 if peer is None else m.rid)

    def _asked(self, asked: Asked) -> None:
        """The other engine wants a prompt computed."""
        assert self._paired is not None
        peer = self._paired.of(asked)
        self._newest += 1
        m = msgspec.structs.replace(asked.submit, rid=self._newest)
        if self._refusal(m) is not None:
            peer.refuse(asked.transfer)
            return
        peer.accept(asked.transfer, m.rid, len(m.prompt))
        self._accept(m, peer, asked.transfer)

    def _accept(self, m: Submit, peer: Peer | None, transfer: int) -> None:
        rid = RequestId(m.rid)
        prompt = tuple(m.prompt)
        leader = m.leader if m.leader in self._live else None
        self._executor.open(rid, prompt, m.params, choice=m.choice, stop_ids=tuple(m.stop_ids))
        self._live[rid] = Live(rid, m.params, peer=peer, transfer=transfer, num_prompt=len(prompt))
        self._events.append(Arrived(
            rid=rid, prompt=prompt, max_new=m.max_new, stop=frozenset(m.stop_ids),
            min_new=m.params.min_tokens, namespace=m.namespace, priority=m.params.priority,
            leader=None if leader is None else RequestId(leader), host_token=m.host_token,
            selects=m.selects, attention=m.attention, transfer=transfer,
            peer=ONE_PEER if peer is None else peer.id, cached_max=m.params.cached_max))

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
        if (m.params.prompt_logprobs or 0) > vocab or not scores_fit(m.params, len(m.prompt)):
            return f"prompt_logprobs is over the vocabulary of {vocab}, or over what a message holds"
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
        self._hear()
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
            if self._paired is not None:
                self._paired.give_first(advance.outputs)
            if advance.plan is not None:        # before anything else: the device must not starve
                self._execute(advance.plan)
            if self._paired is not None:
                self._paired.say(advance.outputs)
            if self._check:
                self._core.check()
            if advance.plan is None:
                break
        self._event_log.outputs(outputs, self._core.stats)
        return chunks + self._chunks_of(outputs)

    def _execute(self, plan: StepPlan) -> None:
        here = plan
        if self._paired is not None:
            moves = [m for m in plan.moves if Tier.PEER in (m.src, m.dst)]
            if moves:
                here = replace(plan, moves=tuple([m for m in plan.moves if Tier.PEER not in (m.src, m.dst)]))
        self._executor.submit(here)
        if self._storing is not None:
            self._storing.submitted(plan)
        if here is not plan and self._paired is not None:
            self._paired.take(moves)
        self.steps_in_flight += 1
        self.moves_in_flight += len(here.moves)
        self._event_log.plan(plan)

    def _settle(self, event: Event) -> None:
        if isinstance(event, Retired):
            self.steps_in_flight -= 1
            if self._storing is not None:
                self._storing.retired(event.step)
            if self._paired is not None:
                self._paired.retired(event.step)
        elif isinstance(event, Moved):
            self.moves_in_flight -= 1
        assert self.steps_in_flight >= 0 and self.moves_in_flight >= 0, "executor: told twice"

    def _hear(self) -> None:
        """What the other engine, time and compiled grammars bring."""
        for m in list(self._held.values()):
            assert m.params.grammar is not None
            if self._executor.compiled(m.params.grammar):
                self._begin(self._held.pop(m.rid))
        for news in () if self._paired is None else self._paired.hear():
            if isinstance(news, Asked):
                self._asked(news)
            else:
                self._events.append(news)
        for expired in self._timers.passed():
            if self._paired is not None:
                self._paired.expired(expired)
            self._events.append(expired)

    def _chunks_of(self, outputs: Sequence[Output]) -> list[Chunk]:
        """One chunk a request, in order of its first output of this turn."""
        touched: dict[int, Live] = {}
        chunks: list[Chunk] = []
        for output in outputs:
            if isinstance(output, Say | Lookup | Unstore):
                continue
            rid = output.rid
            live = self._live[rid]
            match output:
                case Token():
                    live.token(output)
                    touched[rid] = live
                case Started():
                    live.start(output)
                    touched[rid] = live
                case Entered():
                    self._timers.set(output, live.num_prompt)
                    if self._paired is not None:
                        self._events += self._paired.entered(output)
                case Finished():
                    touched.pop(rid, None)
                    if not self._works_for_peer:
                        chunks.append(live.chunk(self._executor, output))
                    del self._live[rid]
                    if live.peer is not None:
                        live.peer.forget(live.transfer, rid)
                    self._executor.close(rid)
        if not self._works_for_peer:
            chunks += [live.chunk(self._executor, None) for live in touched.values()]
        self.num_tokens += sum(len(chunk.tokens) for chunk in chunks)
        return chunks

    # ------------------------------------------------------------ for operators
    def stats(self) -> dict[str, float]:
        """Gauges and counters of the core, the executor and the loop, by metric name."""
        return {**self._core.stats(), **self._executor.stats(),
                **({} if self._paired is None else self._paired.stats()),
                "generation_tokens_total": float(self.num_tokens),
                "steps_in_flight": float(self.steps_in_flight),
                "moves_in_flight": float(self.moves_in_flight)}
