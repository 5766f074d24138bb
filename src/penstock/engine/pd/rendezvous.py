"""The prefill instance of a pair behind a router: prompts that the router has sent here, and who asks for them.

A room is a number under which both ends have the same prompt, in either order. It is the router's, so it
proves nothing: who asks has the pair's key, and gets a prompt only if it is the one that he names too. Knows
no core and no HTTP.
"""
from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from penstock.config.request.params import SamplingParams
from penstock.core.pair.messages import Reason
from penstock.core.plan import Finished
from penstock.engine.wire import BootstrapRoom, RemotePrefill, Submit

OVER_MAX = 4096                     # rooms that are over and known to have been
Key = tuple[int, int]

TAKEN, LATE = "room_taken", "room_late"
# Messages about a bootstrap room, by the reason that the other instance gave.
WORDS = {
    Reason.TAKEN: (TAKEN, "this room was taken before, by this or another request: a room is of one request"),
    Reason.LATE: (LATE, "the prompt of this room is not at the prefill instance, or no longer: send it again"),
    Reason.OTHER: (TAKEN, "this room is of another request: its prompt, or how its first token is chosen, is "
                   "another one"),
}
UNCLAIMED = "no decode engine has asked for the prompt of this room in time: its pages are free again"


@dataclass(slots=True)
class RendezvousWait:
    """One of the two is here. What was asked for is computed, as `rid`, and may have ended."""

    until: float
    here: Submit | None = None
    asked: RemotePrefill | None = None
    rid: int = 0
    end: Finished | None = None


class Rooms:
    def __init__(self, keep_s: float, clock: Callable[[], float]) -> None:
        """keep_s: how long one end's part waits for the other's."""
        self._keep_s, self._clock = keep_s, clock
        self._open: OrderedDict[Key, RendezvousWait] = OrderedDict()
        self._over: OrderedDict[Key, Reason] = OrderedDict()

    @property
    def wait_s(self) -> float | None:
        """Until the next of those that wait has waited long enough; None: none waits."""
        until = min((w.until for w in self._open.values()), default=None)
        return None if until is None else max(0.0, until - self._clock())

    def opened(self, m: Submit) -> RendezvousWait | Reason | None:
        """The router has sent `m` here. Returns what is known of it from who has asked, None if it is to
        wait, or why it is refused."""
        assert m.room is not None
        key = key_of(m.room)
        waiting = self._open.get(key)
        if key in self._over or (waiting is not None and waiting.here is not None):
            return self._over.get(key, Reason.TAKEN)
        if waiting is None:
            self._open[key] = RendezvousWait(self._clock() + self._keep_s, here=m)
            return None
        assert waiting.asked is not None
        if not alike(m, waiting.asked.submit):
            return Reason.OTHER
        self._end(key, Reason.TAKEN)
        return waiting

    def asked(self, asked: RemotePrefill, rid: int) -> Submit | Reason | None:
        """The decode instance asks. Returns the prompt that is here, None if it is to be computed from what he
        says, as `rid`, for the router may still be sending it, or why it is not."""
        room = asked.submit.room
        assert room is not None
        key = key_of(room)
        waiting = self._open.get(key)
        if waiting is None and key not in self._over:
            self._open[key] = RendezvousWait(self._clock() + self._keep_s, asked=asked, rid=rid)
            return None
        if waiting is None or waiting.here is None:
            return self._over.get(key, Reason.TAKEN)
        if not alike(waiting.here, asked.submit):
            return Reason.OTHER
        self._end(key, Reason.TAKEN)
        return waiting.here

    def computed(self, room: BootstrapRoom) -> None:
        """Its prompt has been computed and announced: from now the decode instance has the same time to ask."""
        if (waiting := self._open.get(key_of(room))) is not None:
            waiting.until = self._clock() + self._keep_s

    def ended(self, room: BootstrapRoom, end: Finished) -> None:
        """Its prompt is here no longer."""
        waiting = self._open.get(key_of(room))
        if waiting is not None and waiting.here is not None:
            self._end(key_of(room), Reason.LATE)
        elif waiting is not None:
            waiting.end = end

    def left(self, peer: int) -> None:
        """An engine that may have asked has gone."""
        for key, waiting in list(self._open.items()):
            if waiting.asked is not None and waiting.asked.peer == peer:
                del self._open[key]

    def passed(self) -> list[Submit]:
        """Prompts that have waited long enough, since the last call."""
        now = self._clock() if self._open else 0.0
        late = [(key, waiting) for key, waiting in self._open.items() if waiting.until <= now]
        for key, _ in late:
            self._end(key, Reason.LATE)
        return [waiting.here for _, waiting in late if waiting.here is not None]

    def _end(self, key: Key, reason: Reason) -> None:
        del self._open[key]
        self._over[key] = reason
        if len(self._over) > OVER_MAX:
            self._over.popitem(last=False)


def key_of(room: BootstrapRoom) -> Key:
    return room.number, room.index


def alike(one: Submit, other: Submit) -> bool:
    """Whether both have the same prompt, and choose the first token alike."""
    return tuple(one.prompt) == tuple(other.prompt) and _choosing(one.params) == _choosing(other.params)


def _choosing(params: SamplingParams) -> SamplingParams:
    """Without what differs between the ends: one of them may be asked for a single token."""
    return msgspec.structs.replace(params, max_tokens=None, sparse_top_k=None, priority=0)
