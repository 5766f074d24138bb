"""What the other engine of a pair means for the requests of this one's loop: what it brought for them, what
goes back with theirs, and who gets no answer where only the other engine may compute prompts, and why.
"""
from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from penstock.config.base.errors import ConfigError
from penstock.core.lifecycle import Phase
from penstock.core.pair.messages import End, Message, Reason, Refused
from penstock.core.plan import (
    Aborted,
    Entered,
    Event,
    Expired,
    Move,
    Output,
    PeerId,
    PeerLeft,
    Received,
    RequestId,
    Say,
    Started,
    StepId,
)
from penstock.engine.pd.remote import News, Peer
from penstock.engine.pd.rendezvous import WORDS
from penstock.engine.request import Live, Runner
from penstock.engine.wire import OfSession, RemotePrefill, Submit
from penstock.transfer.facts import Info
from penstock.transfer.streams import CONNECT_S

# Why a request gets no answer, where its prompt is to be computed by the other engine only.
REFUSES = ("the prefill engine refused this prompt: it may be longer than the pages there hold, or they "
           "were needed for others; send a shorter one, or try again")
FAILS = "the prefill engine did not bring the KV of this prompt: try again"
LATE = "the KV of this prompt did not come from the prefill engine in time: try again"
CROWDED = "the pages that waited for the KV of this prompt were needed for other requests: try again"


class Peers:
    """The engines of the other end, as the core numbers them; at least one place."""

    def __init__(self, *each: Peer, routed: bool = False, allowed: Sequence[str] = ()) -> None:
        """routed: of a decode instance, a router says whom to call, at most so many at a time. allowed: on these
        hosts; none: on any."""
        self._allowed = frozenset(host.strip("[]").lower() for host in allowed)
        self._routed = routed
        self.each = each
        self._named: OrderedDict[PeerId, None] = OrderedDict()      # by a router, the latest last
        self.role, self.refuses, self.address = each[0].role, each[0].refuses, each[0].address

    @property
    def changed(self) -> bool:
        """Whether what is missing, or known of one of them, has changed since this was set to False."""
        return any(peer.changed for peer in self.each)

    @changed.setter
    def changed(self, value: bool) -> None:
        for peer in self.each:
            peer.changed = value

    def at(self, address: str) -> Peer:
        """Who listens at `address`, whom a router has named; it may have to be called first. Raises
        ConfigError: no connection to that address is allowed, with the reason."""
        known = next((peer for peer in self.each if peer.address == address), None)
        if known is None:
            known = self._free_place(address)
            known.call(address)
        self._named[known.id] = None
        self._named.move_to_end(known.id)
        return known

    def _free_place(self, address: str) -> Peer:
        """A place without a user, or the one without a connection that was named longest ago."""
        if not self._routed:
            at = ", ".join(peer.address for peer in self.each)
            raise ConfigError(f"this decode instance has --disaggregation-connect {at}, and not {address}")
        host = address.rpartition(":")[0].strip("[]").lower()
        if self._allowed and host not in self._allowed:
            hosts = ", ".join(sorted(self._allowed))
            raise ConfigError(f"this decode instance has --disaggregation-allow {hosts}, and not {host}")
        free = [peer for peer in self.each if not peer.address] or [
            self.each[n] for n in self._named if not self.each[n].epoch and not self.each[n].load]
        if not free:
            raise ConfigError(f"this decode instance has connections to {len(self.each)} prefill instances, as many as "
                              f"it may have, and none to {address}")
        return free[0]

    @property
    def missing(self) -> str:
        """Who is not there, and why; "" if all are. Of those that may call it is enough that one does."""
        if self._routed:
            return "; ".join(f"{peer.address}: {peer.missing}" for peer in self.each
                             if peer.address and peer.missing)
        if len(self.each) == 1 or (self.role == "prefill" and not self.is_connected):
            return self.each[0].missing
        return "" if self.role == "prefill" else "; ".join(
            f"{peer.address}: {peer.missing}" for peer in self.each if peer.missing)

    @property
    def is_connected(self) -> bool:
        """Whether one of them is there."""
        return any(peer.epoch for peer in self.each)

    @property
    def info(self) -> Info:
        """Return the facts of the first remote instance that is there."""
        return next((peer.info for peer in self.each if peer.epoch), self.each[0].info)

    def free(self) -> Peer:
        """Who has least to do, of those that are there."""
        return min(self.each, key=lambda peer: (not peer.epoch, peer.load))

    def stats(self) -> dict[str, float]:
        """Sums, by metric name."""
        out: dict[str, float] = {}
        for peer in self.each:
            for name, value in peer.stats().items():
                out[name] = out.get(name, 0.0) + value
        return out

    def close(self) -> None:
        for peer in reversed(self.each):        # the first one listens for all
            peer.close()


@dataclass(slots=True)
class _Parked:
    """A request whose prefill instance is being called."""

    until: float
    submit: Submit
    peer: Peer


class PdRouter:
    def __init__(self, peers: Peers, executor: Runner, live: Mapping[int, Live],
                 clock: Callable[[], float]) -> None:
        """live: the loop's, by request."""
        self._peers, self._executor, self._live, self._clock = peers, executor, live, clock
        self._parked: dict[int, _Parked] = {}
        self.refuses = peers.refuses

    @property
    def wait_s(self) -> float | None:
        """Until the next of those that wait for a connection has waited long enough; None: none waits."""
        until = min((p.until for p in self._parked.values()), default=None)
        return None if until is None else max(0.0, until - self._clock())

    def park(self, m: Submit) -> bool:
        """Whether a request waits for a connection to the engine that a router has named. Raises ConfigError:
        there can be none."""
        if m.room is None:
            return False
        peer = self._peers.at(m.room.address)
        if not peer.epoch:
            self._parked[m.rid] = _Parked(self._clock() + CONNECT_S, m, peer)
        return not peer.epoch

    def unpark(self, rid: int) -> None:
        """Its client has gone. Nothing, of a request that does not wait."""
        self._parked.pop(rid, None)

    def ask(self, m: Submit) -> tuple[Peer | None, str]:
        """Send a request on. Returns to whom; None: it is computed here, or, with the reason, not at all."""
        if m.room is not None:
            peer = self._peers.at(m.room.address)
            return (peer, "") if peer.ask(m) else (None, peer.excuse if self.refuses else "")
        first = None if m.leader is None else self._live.get(m.leader)
        peer = self._peers.free() if first is None or first.peer is None else first.peer
        if peer.ask(m):
            return peer, ""
        return None, peer.excuse if self.refuses else ""

    def of_session(self, m: OfSession) -> None:
        """Pass on what was said of a session to all prefill instances."""
        for peer in self._peers.each:
            peer.of_session(m)

    def of(self, asked: RemotePrefill) -> Peer:
        """Who has asked."""
        return self._peers.each[asked.peer]

    def take(self, moves: Sequence[Move]) -> None:
        """Moves from and to the other engines, of a plan that was just made."""
        for peer in self._peers.each:
            if mine := [move for move in moves if move.peer == peer.id]:
                peer.take(mine)

    def retired(self, step: StepId) -> None:
        """What was to wait for this step, and those before it, is sent."""
        for peer in self._peers.each:
            peer.retired(step)

    def stats(self) -> dict[str, float]:
        """By metric name."""
        return self._peers.stats()

    def collect(self) -> Iterator[News | Submit]:
        """What has happened at the other ends, in order; and requests that were parked and are no longer."""
        return chain(chain.from_iterable(map(Peer.collect, self._peers.each)), self._unparked())

    def _unparked(self) -> Iterator[Submit]:
        for rid, parked in list(self._parked.items()):
            if parked.peer.epoch or parked.until <= self._clock():
                del self._parked[rid]
                yield parked.submit

    def follows(self, news: Event) -> Iterator[Event]:
        """Decode instance: what follows from that for requests of clients."""
        if isinstance(news, PeerLeft) and self.refuses:
            peer = self._peers.each[news.peer]
            for live in self._live.values():
                if live.peer is peer:
                    if not live.given_up:
                        live.excuse = peer.excuse
                    yield from self._give_up(live)
        elif isinstance(news, Received):
            yield from self._answered(self._peers.each[news.peer], news.message)

    def _answered(self, peer: Peer, message: Message) -> Iterator[Event]:
        """What the other engine says of one request, which has the number of its transfer."""
        live = self._live.get(message.transfer)
        if live is None or live.peer is not peer or live.given_up:
            return
        live.excuse = REFUSES if isinstance(message, Refused) else FAILS
        if isinstance(message, Refused) and message.reason in WORDS:
            live.verdict, live.excuse = WORDS[Reason(message.reason)]
            yield from self._give_up(live)
        elif peer.refuses and isinstance(message, Refused) and message.generation == 0:
            yield from self._give_up(live)              # nothing was granted that would come back

    def expired(self, expired: Expired) -> None:
        if expired.phase == Phase.RECEIVING.value and (live := self._live.get(expired.rid)) is not None:
            live.excuse = LATE

    def entered(self, entered: Entered) -> Iterator[Event]:
        """What follows from a change of phase."""
        if entered.phase != Phase.DROPPED.value:
            return
        live = self._live[entered.rid]
        if live.excuse == LATE and live.started is None and live.peer is not None:
            live.peer.late(live.transfer)
        if self.refuses:
            yield from self._give_up(live)

    def _give_up(self, live: Live) -> Iterator[Event]:
        """Refuse a request that no prefill instance serves, where that is the policy."""
        if live.started is None and not live.given_up:
            live.given_up, live.excuse = True, live.excuse or CROWDED
            yield Aborted(live.rid)

    def give_first(self, outputs: Sequence[Output]) -> None:
        """The executor must know the tokens that came with a request before a plan that goes on from them."""
        for output in outputs:
            if isinstance(output, Started) and output.peer_tokens:
                live = self._live[output.rid]
                assert live.peer is not None, "who brought them"
                first = live.peer.take_first(live.transfer)
                live.peer_cached = first.cached
                self._executor.given(output.rid, first.tokens, first.logprobs or (), first.prompt)

    def say(self, outputs: Sequence[Output]) -> None:
        """The messages among them, each with what belongs to its tokens in front of it."""
        for output in outputs:
            if isinstance(output, Say) and output.peer < len(self._peers.each):     # the last place may be free
                peer = self._peers.each[output.peer]
                if isinstance(output.what, End):
                    self._say_first(peer, output.what)
                peer.say(output.what)

    def _say_first(self, peer: Peer, end: End) -> None:
        rid = peer.rid_of(end.transfer)
        found = [] if rid is None else [
            self._executor.take_logprobs(RequestId(rid), i) for i in range(len(end.first))]
        hits = None if rid is None else self._live[rid].started
        prompt = None if rid is None else self._executor.take_prompt(RequestId(rid))
        peer.say_first(end, [p for p in found if p is not None],
                       (0, 0, 0) if hits is None else (hits.hbm_tokens, hits.dram_tokens, hits.disk_tokens),
                       prompt if prompt is not None and prompt.is_whole else None)
