"""The engine's loop: messages become events, the core plans, the executor executes, outputs become chunks.

Synchronous, overlapped and pipelined execution are this one loop; the core's depth says how many
plans are in flight. Owns no socket and no thread: `process.py` and tests drive it.
"""
from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from penstock.config.base.errors import ConfigError
from penstock.config.request.selection import Selection
from penstock.config.streams.frames import ProtocolError
from penstock.core.pair.messages import Reason
from penstock.core.plan import (
    ONE_PEER,
    Aborted,
    Arrived,
    Claimed,
    Entered,
    Event,
    Finished,
    Flushed,
    Lookup,
    Moved,
    Outcome,
    Output,
    PeerId,
    PeerLeft,
    RequestId,
    Retired,
    Say,
    Started,
    StepPlan,
    Stopped,
    Tier,
    Token,
    Unstore,
    Used,
)
from penstock.engine.fair import Fair
from penstock.engine.pd.rendezvous import LATE, UNCLAIMED, WORDS, Rooms
from penstock.engine.pd.router import PdRouter
from penstock.engine.record import EventLog
from penstock.engine.request import ID_MAX, Limits, Live, Runner
from penstock.engine.sessions import Retaining, SessionPrompts
from penstock.engine.shown import shown
from penstock.engine.timers import Timers
from penstock.engine.wire import (
    Abort,
    AskShown,
    AskStats,
    BootstrapRoom,
    Flush,
    Hello,
    OfSession,
    OutputChunk,
    RemotePrefill,
    Shown,
    Shutdown,
    Stats,
    StopAt,
    Submit,
    ToEngine,
)
from penstock.replay.recorder import Recorder

if TYPE_CHECKING:
    from penstock.core.core import Core
    from penstock.engine.kv_events import KvPublisher
    from penstock.engine.pd.remote import Peer
    from penstock.engine.pd.router import Peers
    from penstock.engine.storing import Storing
    from penstock.engine.traces.timeline import Timelines

ASKED_IDS = 1 << 40                     # above those of this engine's own clients
UNWANTED = "the decode engine has gone, or wants this prompt no longer"

class EngineLoop:
    """Messages in, chunks out. `handle` any number of messages, then `turn`, for ever."""

    def __init__(self, core: Core, executor: Runner, *, vocab_size: int, max_model_len: int,
                 selection: Selection | None = None, event_log: EventLog | None = None,
                 check: bool = False, peers: Peers | None = None, storing: Storing | None = None,
                 publisher: KvPublisher | None = None, timelines: Timelines | None = None,
                 deadlines_s: Mapping[str, float] | None = None, room_s: float | None = None,
                 clock: Callable[[], float] = time.monotonic) -> None:
        """selection: the largest that `executor` can decode from; None: it reads all KV.
        peers: the engines of the other end of a pair. storing: where `executor` has storage. deadlines_s: by
        phase, how long a request may be in it. timelines: of traced requests. room_s: of a prefill instance behind a
        router, how long a prompt that one end has waits for the other."""
        self._core = core
        self.recorder = Recorder(core)
        self._executor = executor
        self._limits = Limits(vocab_size, max_model_len, selection)
        self._event_log = event_log or EventLog()
        self._check, self._storing, self._publisher = check, storing, publisher
        self.timelines = timelines
        if timelines is not None:
            core.watchers.append(timelines)
        self._timers = Timers(clock, deadlines_s or {}, storing)
        self._works_for_peer = core.cfg.role == "prefill"
        self._live: dict[int, Live] = {}
        self._paired = None if peers is None else PdRouter(peers, executor, self._live, clock)
        self._rooms = None if room_s is None else Rooms(room_s, clock)
        self._nobody = PeerId(core.cfg.peers - 1)       # whose prompts are that wait in a room
        self._newest = 0                        # request id
        self._first: tuple[int, tuple[int, ...]] = 0, ()        # the last with a prompt
        self._fair, self._sessions, self._retaining = Fair(), SessionPrompts(), Retaining(clock)
        self._held: dict[int, Submit] = {}      # until their grammars are compiled: no step waits for that
        self._newest_asked = ASKED_IDS          # of those that the other end has asked for
        self._untold: dict[RequestId, None] = {}        # whose clients wait for the end of a prompt
        self._events: list[Event] = []          # since the last advance
        self._chunks: list[OutputChunk] = []          # refusals since the last turn
        self.is_ending = False                  # prompts of other engines are refused from now on
        self.steps_in_flight = self.moves_in_flight = 0
        self.num_tokens = 0                     # output tokens since the start

    @property
    def idle(self) -> bool:
        """Nothing can happen before the next message."""
        return not (self.steps_in_flight or self.moves_in_flight or self._events or self._chunks
                    or self._held or self._core.flushing)

    @property
    def wait_s(self) -> float | None:
        """How long the caller may wait for messages, the executor and the other engine, all together,
        before the next `turn`; None: until one of them has something."""
        if self._events or self._chunks or self._executor.works_here or self._core.flushing:
            return 0
        waits = [o.wait_s for o in (self._timers, self._retaining, self._rooms, self._paired, self._publisher) if o]
        return min((wait_s for wait_s in waits if wait_s is not None), default=None)

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
                if self.timelines is not None:
                    self.timelines.aborted(rid)
                self._held.pop(rid, None)
                if self._fair.drop(rid):
                    self._chunks.append(OutputChunk(rid=rid, tokens=[], index=0, finish="abort"))
                if rid in self._live:
                    self._events.append(Aborted(RequestId(rid)))
                elif self._paired is not None:
                    self._paired.unpark(rid)
            case StopAt(rid, count):
                if rid in self._live and 0 < count <= self._limits.max_model_len:
                    self._events.append(Stopped(RequestId(rid), count))
            case Flush():
                self._events.append(Flushed())
            case OfSession():
                self._of_session(message)
            case AskStats(asked):
                return Stats(asked, self.stats())
            case AskShown(asked):
                return shown(asked, self.recorder)
            case Hello() | Shutdown():
                raise ProtocolError(f"{type(message).__name__} is not for the loop")
        return None

    def _of_session(self, m: OfSession) -> None:
        self._events += self._sessions.events(m)
        if m.ends:
            self._retaining.forget(m.session)
        if self._paired is not None and not self._works_for_peer:
            self._paired.of_session(m)

    def _submit(self, m: Submit) -> None:
        if 0 < m.rid <= self._newest:
            return                              # a repeat: ids only grow
        if 0 < m.rid < ID_MAX:
            self._newest = m.rid
        if self.timelines is not None:
            self.timelines.begin(m)
        if m.prompt or m.leader is None:
            self._first = m.rid, tuple(m.prompt)
        if m.rid == self._first[0] or m.leader == self._first[0]:       # all choices share one prompt
            m = msgspec.structs.replace(m, prompt=self._first[1])
        if self._works_for_peer:
            m = msgspec.structs.replace(m, max_new=1)
        if (reason := self._limits.refusal(m)) is not None:
            self._refuse(m, "refused", reason)
        # One end of a pair takes them in order, as the other wants them: there prompts take longer anyway.
        elif (m.params.grammar is None or self._paired is not None
                or self._executor.compiled(m.params.grammar)):
            self._begin(m)
        else:
            self._held[m.rid] = m

    def _begin(self, m: Submit) -> None:
        if self._works_for_peer:
            self._enter(m)
        elif m.origin.tenant:
            self._fair.add(m)
            self._release()
        else:
            self._send_on(m, parks=True)

    def _release(self) -> None:
        """Requests of keys whose turn it is enter, if few wait in the core: there they keep their order."""
        if not self._fair:
            return
        line = [(self._live[e.rid], False) for e in self._events if isinstance(e, Arrived) and e.rid in self._live]
        line += [(self._live[r.rid], r.leader is not None) for r in self._core.waiting if r.rid in self._live]
        # Prompts of a pair take their time elsewhere: there only their number counts.
        most = self._core.cfg.step_tokens if self._paired is None else None
        for m in self._fair.release(line, self._core.kv.rows.free, most):
            self._send_on(m, parks=True)

    def _refuse(self, m: Submit, finish: str, reason: str) -> None:
        self._chunks.append(OutputChunk(rid=m.rid, tokens=[], index=0, finish=finish, reason=reason))

    def _send_on(self, m: Submit, *, parks: bool) -> None:
        """To another engine that computes the prompt, or nowhere. parks: it may wait for a connection."""
        try:
            if parks and self._paired is not None and self._paired.park(m):
                return
            peer, excuse = (None, "") if self._paired is None else self._paired.ask(m)
        except ConfigError as e:
            self._refuse(m, "refused", str(e))
            return
        if excuse:
            self._refuse(m, "unavailable", excuse)
        else:
            self._accept(m, peer, 0 if peer is None else m.rid)

    # ------------------------------------------------------------ prompts for the other end
    def _asked(self, asked: RemotePrefill) -> None:
        assert self._paired is not None
        peer = self._paired.of(asked)
        self._newest_asked += 1
        found: Submit | Reason | None = Reason.REFUSED if self.is_ending else None
        if found is None and asked.submit.room is not None and self._rooms is not None:
            found = self._rooms.asked(asked, self._newest_asked)
        if isinstance(found, Reason):
            peer.refuse(asked.transfer, found)
        elif found is not None:                 # it has waited here, perhaps computed
            live = self._live[found.rid]
            live.peer, live.transfer = peer, asked.transfer
            peer.accept(asked.transfer, found.rid, len(found.prompt))
            self._events.append(Claimed(live.rid, asked.transfer, peer.id))
        elif self._limits.refusal(m := msgspec.structs.replace(asked.submit, rid=self._newest_asked)) is not None:
            peer.refuse(asked.transfer)
        else:
            peer.accept(asked.transfer, m.rid, len(m.prompt))
            self._accept(m, peer, asked.transfer)
            self._live[m.rid].client = 0

    def _enter(self, m: Submit) -> None:
        """A router has sent a prompt here, for a decode instance that asks for it, or has."""
        if m.room is None or self._rooms is None:
            self._refuse(m, "refused", "this engine computes prompts for decode instances, and none "
                         "has asked for this one")
            return
        found = self._rooms.opened(m)
        if isinstance(found, Reason):
            self._refuse(m, *WORDS[found])
        elif found is None:
            self._accept(m, None, m.rid, self._nobody)
            if m.room.holds:
                self._untold[RequestId(m.rid)] = None
        elif (live := self._live.get(found.rid)) is not None:
            live.client = m.rid
        elif found.end is not None and found.end.outcome is Outcome.SENT:
            self._refuse(m, "length", "")       # it is done
        else:
            self._refuse(m, "unavailable", UNWANTED)

    def _watch_rooms(self, rooms: Rooms) -> None:
        for m in rooms.passed():
            if (live := self._live.get(m.rid)) is not None:
                live.given_up, live.verdict, live.excuse = True, LATE, UNCLAIMED
                self._events.append(Aborted(live.rid))

    def _computed(self) -> list[OutputChunk]:
        """Answer prompts whose clients wait for no more than their end."""
        chunks = []
        for rid in [rid for rid in self._untold if (r := self._core.live.get(rid)) and r.num_output]:
            live = self._live[rid]
            assert self._rooms is not None and live.room is not None
            del self._untold[rid]
            self._rooms.computed(live.room)
            chunks.append(msgspec.structs.replace(live.chunk(self._executor, None), finish="length"))
            live.client = 0
        return chunks

    def _accept(self, m: Submit, peer: Peer | None, transfer: int, at: PeerId = ONE_PEER) -> None:
        """at: for whom it is computed, where that is no `peer` that could hear of it."""
        rid = RequestId(m.rid)
        prompt = tuple(m.prompt)                # the same one, if it is a tuple: all choices share it
        leader = m.leader if m.leader in self._live else None
        if self.timelines is not None:
            self.timelines.begin(m)
        self._sessions.note(m)
        self._executor.open(rid, prompt, m.params, choice=m.choice, stop_ids=tuple(m.stop_ids))
        self._live[rid] = Live(rid, m.params, peer=peer, transfer=transfer, num_prompt=len(prompt),
                               room=m.room if self._rooms is not None else None, tenant=m.origin.tenant,
                               session=m.origin.session)
        self._events += self._retaining.begin(m.origin.session, m.origin.retain_s)
        self._events.append(Arrived(
            rid=rid, prompt=prompt, max_new=m.max_new, stop=frozenset(m.stop_ids),
            min_new=m.params.min_tokens, namespace=m.namespace, priority=m.params.priority,
            leader=None if leader is None else RequestId(leader), selects=m.selects,
            attention=m.attention, transfer=transfer,
            peer=at if peer is None else peer.id, cached_max=m.params.cached_max, session=m.origin.session,
            retains=self._retaining.retains(m.origin.session), drafts=m.params.speculative_tokens))

    # ------------------------------------------------------------ one turn
    def turn(self, *, block: bool) -> list[OutputChunk]:
        """Collect what the executor finished, plan and submit as much as the core allows, and
        return what is new for the readers. With `block`, wait for the device, but only if
        something is in flight and no message waits for the core.
        """
        in_flight = self.steps_in_flight or self.moves_in_flight
        wait = block and in_flight > 0 and not self._events and not self._chunks
        for event in self._executor.poll(block=wait):
            self._settle(event)
            self._events.append(event)
        if self.timelines is not None:
            self.timelines.look()
        self._hear()
        if self._storing is not None and (rates := self._storing.rates()) is not None:
            self._events.append(rates)
        chunks, self._chunks = self._chunks, []
        outputs: list[Output] = []
        events = self._take_events()
        while True:
            self.recorder.begin(events)
            advance = self._core.advance(events)
            self.recorder.end(advance)
            outputs += advance.outputs
            if self._publisher is not None and advance.cached is not None:
                self._publisher.put(advance.cached)     # before the plan that overwrites pages
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
            self._release()
            events = self._take_events()
            if advance.plan is None and not events:
                break
        self._event_log.outputs(outputs, self._core.stats)
        return chunks + self._chunks_of(outputs) + self._computed()

    def _take_events(self) -> Sequence[Event]:
        events, self._events = self._events, []
        for event in events:
            self._event_log.add(event)
        return events

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
        self._event_log.add(plan)

    def _settle(self, event: Event) -> None:
        if isinstance(event, Retired):
            self.steps_in_flight -= 1
            if self._storing is not None:
                self._storing.retired(event.step)
            if self._paired is not None:
                self._paired.retired(event.step)
        elif isinstance(event, Moved):
            self.moves_in_flight -= 1
        assert self.steps_in_flight >= 0 and self.moves_in_flight >= 0, "executor: an event was reported twice"

    def _hear(self) -> None:
        for m in list(self._held.values()):
            assert m.params.grammar is not None
            if self._executor.compiled(m.params.grammar):
                self._begin(self._held.pop(m.rid))
        for news in () if self._paired is None else self._paired.collect():
            if isinstance(news, RemotePrefill):
                self._asked(news)
            elif isinstance(news, Submit):
                self._send_on(news, parks=False)
            elif isinstance(news, OfSession):
                self._of_session(news)
            else:
                if isinstance(news, PeerLeft) and self._rooms is not None:
                    self._rooms.left(news.peer)
                self._events.append(news)
                if self._paired is not None and not self._works_for_peer:
                    self._events += self._paired.follows(news)
        if self._publisher is not None:
            self._events += self._publisher.news()
        if self._rooms is not None:
            self._watch_rooms(self._rooms)
        self._events += self._retaining.passed()
        for expired in self._timers.passed():
            if self._paired is not None:
                self._paired.expired(expired)
            self._events.append(expired)

    def _chunks_of(self, outputs: Sequence[Output]) -> list[OutputChunk]:
        """One chunk a request, in order of its first output of this turn."""
        touched: dict[int, Live] = {}
        chunks: list[OutputChunk] = []
        for output in outputs:
            if isinstance(output, Say | Lookup | Unstore | Used):
                continue
            rid = output.rid
            if (tokens := self._sessions.length(rid)) is not None:
                if isinstance(output, Entered):
                    self._timers.set(output, tokens)
                elif isinstance(output, Finished):
                    self._sessions.warmed(rid)
                continue
            live = self._live[rid]
            match output:
                case Token():
                    live.token(output)
                    self._fair.charge(live.tenant, 1)
                    touched[rid] = live
                case Started():
                    live.start(output)
                    self._fair.started(live)
                    touched[rid] = live
                case Entered():
                    self._timers.set(output, live.num_prompt)
                    if self._paired is not None:
                        self._events += self._paired.entered(output)
                case Finished():
                    touched.pop(rid, None)
                    if not self._works_for_peer:
                        chunks.append(live.chunk(self._executor, output))
                    elif live.room is not None:
                        chunks += self._left_room(live, live.room, output)
                    del self._live[rid]
                    self._fair.ended(live)
                    self._retaining.end(live.session)
                    if live.peer is not None:
                        live.peer.forget(live.transfer, rid)
                    self._executor.close(rid)
        if not self._works_for_peer:
            chunks += [live.chunk(self._executor, None) for live in touched.values()]
        self.num_tokens += sum(len(chunk.tokens) for chunk in chunks)
        return chunks

    def _left_room(self, live: Live, room: BootstrapRoom, end: Finished) -> list[OutputChunk]:
        """Return the answer to the router for a prompt that is computed or given up."""
        assert self._rooms is not None, "a room is of a routed engine"
        self._rooms.ended(room, end)
        self._untold.pop(live.rid, None)
        if not live.client:
            return []
        chunk = live.chunk(self._executor, end)
        if end.outcome is Outcome.SENT:
            chunk = msgspec.structs.replace(chunk, finish="length")
        elif end.outcome is Outcome.LOST:
            chunk = msgspec.structs.replace(chunk, finish="unavailable", reason=UNWANTED)
        return [msgspec.structs.replace(chunk, rid=live.client)]

    # ------------------------------------------------------------ for operators
    def stats(self) -> dict[str, float]:
        """Gauges and counters of the core, the executor and the loop, by metric name."""
        return {**self._fair.counted(self._core.stats()), **self._executor.stats(),
                **({} if self._paired is None else self._paired.stats()),
                **({} if self._publisher is None else self._publisher.stats()),
                "generation_tokens_total": float(self.num_tokens),
                "steps_in_flight": float(self.steps_in_flight),
                "moves_in_flight": float(self.moves_in_flight)}
