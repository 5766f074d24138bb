"""One engine's end of a pair, for its loop: what the link tells becomes core events, Moves become calls.

Owns the present connection, the pushes whose steps have not retired, what came for the first tokens of requests,
and what the other engine's answers mean for them. Knows no socket and no thread (`transfer`), and plans nothing.
"""
from __future__ import annotations

import sys
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from penstock.config.request.scores import PromptScores
from penstock.core.pair.messages import Cancel, Drained, End, Message, Reason, Refused
from penstock.core.plan import (
    ONE_PEER,
    Event,
    Move,
    Moved,
    PeerId,
    PeerJoined,
    PeerLeft,
    Received,
    StepId,
    Tier,
)
from penstock.engine.wire import BootstrapRoom, OfSession, Origin, RemotePrefill, Submit
from penstock.exec.sampling.sampler import Logprobs
from penstock.transfer.events import Down, Opened, PeerMessage, Pushed, Unpaired, Up
from penstock.transfer.facts import Info
from penstock.transfer.link import PairLink
from penstock.transfer.messages import Ask, First, Prompted, Said, SessionNews

PROMPT_MAX = 1 << 21                # tokens of an Ask
PROMPTED_BYTES = 1 << 19            # of scores in a Prompted


News: TypeAlias = Event | RemotePrefill | OfSession


@dataclass(slots=True)
class RemoteWait:
    """Decode instance: a request that the other engine works for."""

    since: float                     # when it was sent on
    num_prompt: int = 0              # tokens
    generation: int = 0
    tokens: tuple[int, ...] = ()
    logprobs: list[Logprobs] | None = None
    cached: tuple[int, int, int] = (0, 0, 0)    # tokens of its prompt found there on device, host, storage
    prompt: PromptScores | None = None  # where it was asked for


class Peer:
    def __init__(self, link: PairLink, role: str, address: str = "", *, refuses: bool = False,
                 id: PeerId = ONE_PEER, clock: Callable[[], float] = time.monotonic) -> None:
        """address: where the link listens, or whom it calls. refuses: a prompt that the other engine does
        not compute is not computed here either. id: the core's number of the other engine."""
        self.role, self.address, self.refuses, self.id = role, address, refuses, id
        self.session: Opened | None = None             # the connection that the core knows
        self.info: Info = {}                            # of the other engine
        self.missing = "no connection yet"              # why there is none; "" if there is one
        self.changed = True                             # one of these two, since somebody looked
        self._link, self._clock = link, clock
        self._retired = StepId(0)
        self._due: deque[tuple[Opened, Move]] = deque()        # pushes whose steps have not retired
        self._waits: dict[int, RemoteWait] = {}              # by transfer
        self._rids: dict[int, int] = {}                 # prefill instance: transfer -> ours
        self._lengths: dict[int, int] = {}              # prefill instance: transfer -> tokens of the prompt
        self._ended: dict[int, float] = {}              # prefill instance: when the last chunk of a transfer had
        self._heard_at = 0.0                            # a message of the other engine's, not of its link
        self._newest = 0                                # transfer that was asked for on this connection
        self._count = dict.fromkeys((f"pair_{name}_total" for name in (
            "requests", "delivered", "refused", "lost", "wait_seconds", "delivered_bytes", "tail_bytes",
            "tail_seconds", "pushed_bytes", "push_seconds")), 0.0)

    @property
    def epoch(self) -> int:
        """The number of the connection; 0: there is none."""
        return 0 if self.session is None else self.session.epoch

    # ------------------------------------------------------------ from the link
    def collect(self) -> list[News]:
        """What has happened at the other end, in order."""
        news: list[News] = []
        for event in self._link.events.collect():
            match event:
                case Up(session):
                    self.session, self.info, self.missing, self.changed = session, session.info, "", True
                    self._newest = 0
                    news.append(PeerJoined(self.id))
                case Down(_, cause):
                    self._count["pair_lost_total"] += sum(not wait.tokens for wait in self._waits.values())
                    self.session, self.missing, self.changed = None, cause, True
                    self._rids.clear()
                    self._lengths.clear()
                    self._ended.clear()
                    news.append(PeerLeft(self.id))
                case Unpaired(words) if self.session is not None:
                    pass                            # somebody else's, beside the pair that there is
                case Unpaired(words):
                    self.missing, self.changed = words, True
                case Pushed(id, ok, nbytes, seconds):
                    self._count["pair_pushed_bytes_total"] += nbytes
                    self._count["pair_push_seconds_total"] += seconds
                    news.append(Moved(id, ok))
                case PeerMessage():
                    news += self._heard(event)
        return news

    def _heard(self, event: PeerMessage) -> list[News]:
        message, connection = event.message, self.session
        assert connection is not None, "messages come between Up and Down"
        self._heard_at = self._clock()
        match message:
            case Ask():
                return self._asked(message)
            case SessionNews(session, ends):
                return [OfSession(session, ends)] if self.role == "prefill" else []
            case First(transfer, generation, logprobs, hbm, dram, disk):
                if (wait := self._waits.get(transfer)) is not None and generation == wait.generation:
                    wait.logprobs = None if logprobs is None else list(logprobs)
                    wait.cached = hbm, dram, disk
                return []
            case Prompted(transfer, generation, scores):
                wait = self._waits.get(transfer)
                if wait is not None and wait.prompt is not None and not wait.prompt.add(scores):
                    self._cut()                 # it breaks its rule
                return []
            case End(transfer, generation, _, tokens) if tokens and not self._is_whole(transfer):
                self._cut()
                return []
            case End(transfer, generation, _, tokens):
                connection.revoke(transfer, generation)
                if (wait := self._waits.get(transfer)) is not None and generation == wait.generation:
                    wait.tokens = tokens
                    self._count["pair_wait_seconds_total"] += self._clock() - wait.since
                    self._count["pair_delivered_bytes_total"] += event.bytes
            case Drained(transfer, generation):
                connection.revoke(transfer, generation)
            case Cancel(transfer, generation):
                connection.stop(transfer, generation)
            case Refused():
                self._count["pair_refused_total"] += 1
        assert isinstance(message, Message)
        return [Received(message, self.id)]

    def _asked(self, ask: Ask) -> list[News]:
        if self.role != "prefill" or ask.transfer <= self._newest:
            self._cut()                         # it breaks its rule: ids only grow
            return []
        self._newest = ask.transfer
        prompt = _little(array("i", ask.prompt[:len(ask.prompt) // 4 * 4]))
        return [RemotePrefill(self.id, ask.transfer, Submit(
            rid=0, prompt=prompt.tolist(), params=ask.params, stop_ids=ask.stop_ids, max_new=1,
            namespace=int.from_bytes(ask.namespace[:8], "little") >> 1,
            leader=self._rids.get(ask.leader), choice=ask.choice, selects=ask.selects,
            attention=ask.attention, room=None if ask.room is None else BootstrapRoom(*ask.room),
            origin=Origin(trace=ask.trace, session=ask.session, retain_s=ask.retain_s)))]

    # ------------------------------------------------------------ prefill instance
    def accept(self, transfer: int, rid: int, num_prompt: int) -> None:
        """Our request `rid` works for `transfer` now."""
        self._rids[transfer], self._lengths[transfer] = rid, num_prompt

    def refuse(self, transfer: int, reason: Reason = Reason.REFUSED) -> None:
        """Refuse a request that never reached the core."""
        self.say(Refused(transfer, 0, reason))

    def rid_of(self, transfer: int) -> int | None:
        return self._rids.get(transfer)

    # ------------------------------------------------------------ decode instance
    def ask(self, m: Submit) -> int:
        """Send a request on. Returns the transfer that names it there; 0: there is no connection, or no
        message holds it."""
        if self.session is None or len(m.prompt) > PROMPT_MAX:
            return 0
        prompt = _little(array("i", m.prompt))
        self._waits[m.rid] = RemoteWait(self._clock(), len(m.prompt), prompt=(
            None if m.params.prompt_logprobs is None else PromptScores(m.params, len(m.prompt))))
        self._count["pair_requests_total"] += 1
        self.session.say(Ask(
            m.rid, prompt.tobytes(), m.params, m.stop_ids, m.max_new,
            (m.namespace << 1).to_bytes(16, "little"), m.choice,
            m.leader or 0, m.selects, m.attention,
            None if m.room is None else (m.room.number, m.room.index), m.origin.trace, m.origin.session,
            m.origin.retain_s))
        return m.rid

    def of_session(self, m: OfSession) -> None:
        """Pass on what was said of a session, if there is a connection."""
        if self.session is not None:
            self.session.say(SessionNews(m.session, m.ends))

    def call(self, address: str) -> None:
        """From now on this is whom the link calls; it is not connected. Raises ConfigError."""
        assert self.session is None
        self._link.call(address)
        self.address, self.missing, self.changed = address, "no connection yet", True

    def late(self, transfer: int) -> None:
        """It did not come in time. An engine that has said nothing since it was asked, though its link is
        alive, may hang: the connection is ended, for that is what frees the pages that it was granted."""
        wait = self._waits.pop(transfer, None)
        if wait is None:
            return
        self._count["pair_lost_total"] += 1
        if self._heard_at < wait.since:
            self._cut()

    def _cut(self) -> None:
        if self.session is not None:
            self.session.cut()

    def _is_whole(self, transfer: int) -> bool:
        """Whether what was asked of its prompt has come."""
        wait = self._waits.get(transfer)
        return wait is None or wait.prompt is None or wait.prompt.is_whole

    def take_first(self, transfer: int) -> RemoteWait:
        """What came with a request that was delivered."""
        self._count["pair_delivered_total"] += 1
        return self._waits.pop(transfer)

    def forget(self, transfer: int, rid: int) -> None:
        """Our request `rid` has ended. On a later connection the transfer may be another one's."""
        self._waits.pop(transfer, None)
        if self._rids.get(transfer) == rid:
            del self._rids[transfer], self._lengths[transfer]
            self._ended.pop(transfer, None)

    # ------------------------------------------------------------ from the core
    def take(self, moves: Sequence[Move]) -> None:
        """Moves from and to the other engine, of a plan that was just made."""
        assert self.session is not None, "the core plans none without a connection"
        for move in moves:
            if move.src is Tier.PEER:
                self.session.grant(move)
                if (wait := self._waits.get(move.transfer)) is not None:
                    wait.generation = move.generation
            else:
                self._due.append((self.session, move))
        self.retired(self._retired)

    def retired(self, step: StepId) -> None:
        """What was to wait for this step, and those before it, is sent."""
        self._retired = step
        later: list[tuple[Opened, Move]] = []
        ends: dict[int, Opened] = {}
        while self._due:
            session, move = self._due.popleft()
            if move.after > step:
                later.append((session, move))
                continue
            session.push(move)
            if move.first + move.tokens == self._lengths.get(move.transfer):
                ends[move.transfer] = session
        self._due.extend(later)
        for transfer, session in ends.items():          # its last chunk has ended, and is among them
            self._count["pair_tail_bytes_total"] += session.unsent(transfer)
            self._ended[transfer] = self._clock()

    @property
    def load(self) -> int:
        """Tokens of the prompts that it was asked for and has not brought."""
        return sum(wait.num_prompt for wait in self._waits.values())

    @property
    def excuse(self) -> str:
        """Why a request was not sent on, or gets no answer as the connection is over."""
        why = self.missing or f"it is longer than {PROMPT_MAX} tokens"
        return f"the prefill engine does not compute this prompt ({why}): try again"

    def say(self, message: Said) -> None:
        """To the other engine, if there is a connection."""
        if isinstance(message, End) and (ended := self._ended.pop(message.transfer, None)) is not None:
            self._count["pair_tail_seconds_total"] += self._clock() - ended
        if self.session is not None:
            self.session.say(message)

    def say_first(self, end: End, logprobs: list[Logprobs], cached: tuple[int, int, int],
                  prompt: PromptScores | None) -> None:
        """What belongs to the tokens of `end`, and logprobs of its prompt, in front of it; `cached` as in
        `take_first`."""
        for part in () if prompt is None else prompt.parts(PROMPTED_BYTES):
            self.say(Prompted(end.transfer, end.generation, part))
        self.say(First(end.transfer, end.generation, logprobs or None, *cached))

    def stats(self) -> dict[str, float]:
        """By metric name."""
        return {**self._link.stats(), **self._count, "pair_requests_waiting": float(len(self._waits))}

    def close(self) -> None:
        self._link.close()


def _little(numbers: array[int]) -> array[int]:
    """To or from little-endian, in place."""
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers
