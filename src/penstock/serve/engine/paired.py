"""What the other engine of a pair means for the requests of this one's loop: what it brought for them, what
goes back with theirs, and who gets no answer where only the other engine may compute prompts, and why.
"""
from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from penstock.core.lifecycle import Phase
from penstock.core.pair.messages import End, Message, Refused
from penstock.core.plan import (
    Aborted,
    Entered,
    Event,
    Expired,
    Output,
    PeerLeft,
    Received,
    RequestId,
    Say,
    Started,
)
from penstock.serve.engine.live import Live, Runner
from penstock.serve.engine.peer import Peer
from penstock.serve.wire import Asked

# Why a request gets no answer, where its prompt is to be computed by the other engine only.
REFUSES = ("the prefill engine refused this prompt: it may be longer than the pages there hold, or they "
           "were needed for others; send a shorter one, or try again")
FAILS = "the prefill engine did not bring the KV of this prompt: try again"
LATE = "the KV of this prompt did not come from the prefill engine in time: try again"
CROWDED = "the pages that waited for the KV of this prompt were needed for other requests: try again"


class Paired:
    def __init__(self, peer: Peer, executor: Runner, live: Mapping[int, Live]) -> None:
        """live: the loop's, by request."""
        self._peer, self._executor, self._live = peer, executor, live

    def hear(self) -> Iterator[Event | Asked]:
        """What has happened at the other end, and what follows from that here, in order."""
        peer = self._peer
        for news in peer.collect():
            yield news
            if peer.refuses and isinstance(news, PeerLeft):
                for live in self._live.values():
                    if not live.given_up:
                        live.excuse = peer.excuse
                    yield from self._give_up(live)
            elif isinstance(news, Received) and peer.role == "decode":
                yield from self._answered(news.message)

    def _answered(self, message: Message) -> Iterator[Event]:
        """What the other engine says of one request, which has the number of its transfer."""
        live = self._live.get(message.transfer)
        if live is None or not live.transfer or live.given_up:
            return
        live.excuse = REFUSES if isinstance(message, Refused) else FAILS
        if self._peer.refuses and isinstance(message, Refused) and message.generation == 0:
            yield from self._give_up(live)              # nothing was granted that would come back

    def expired(self, expired: Expired) -> None:
        if expired.phase == Phase.RECEIVING.value and (live := self._live.get(expired.rid)) is not None:
            live.excuse = LATE

    def entered(self, entered: Entered) -> Iterator[Event]:
        """What follows from a change of phase."""
        if entered.phase != Phase.DROPPED.value:
            return
        live = self._live[entered.rid]
        if live.excuse == LATE and live.started is None:
            self._peer.late(live.transfer)
        if self._peer.refuses:
            yield from self._give_up(live)

    def _give_up(self, live: Live) -> Iterator[Event]:
        """Nobody computes its prompt, where that is the policy."""
        if live.started is None and not live.given_up:
            live.given_up, live.excuse = True, live.excuse or CROWDED
            yield Aborted(live.rid)

    def give_first(self, outputs: Sequence[Output]) -> None:
        """The executor must know the tokens that came with a request before a plan that goes on from them."""
        for output in outputs:
            if isinstance(output, Started) and output.peer_tokens:
                live = self._live[output.rid]
                first = self._peer.take_first(live.transfer)
                live.peer_cached = first.cached
                self._executor.given(output.rid, first.tokens, first.logprobs or (), first.prompt)

    def say(self, outputs: Sequence[Output]) -> None:
        """The messages among them, each with what belongs to its tokens in front of it."""
        for output in outputs:
            if isinstance(output, Say):
                if isinstance(output.what, End):
                    self._say_first(output.what)
                self._peer.say(output.what)

    def _say_first(self, end: End) -> None:
        rid = self._peer.rid_of(end.transfer)
        found = [] if rid is None else [
            self._executor.take_logprobs(RequestId(rid), i) for i in range(len(end.first))]
        hits = None if rid is None else self._live[rid].started
        prompt = None if rid is None else self._executor.take_prompt(RequestId(rid))
        if prompt is not None and prompt.is_whole:
            self._peer.say_prompt(end, prompt)
        self._peer.say_first(end, [p for p in found if p is not None],
                             (0, 0) if hits is None else (hits.hbm_tokens, hits.dram_tokens))
