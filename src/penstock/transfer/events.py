"""What a link tells the loop, and the queue between them, which bounds what the other end may say ahead."""
from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from penstock.core.plan import Move, MoveId
from penstock.transfer.facts import Info
from penstock.transfer.messages import Said

WAITING_MAX = 4096


class Opened(Protocol):
    """What an engine has of one connection, whatever carries it. Any thread calls.

    epoch   rises with each connection
    info    what the other engine says of itself
    """

    epoch: int
    info: Info

    def say(self, message: Said) -> None:
        """Messages are sent in order. Dropped if it is over. Asserts nothing of their content."""

    def grant(self, move: Move) -> None:
        """The other end may write these positions from now on. No effect if it is over."""

    def revoke(self, transfer: int, generation: int) -> None:
        """When it returns, nothing of this generation is written any more. Waits for a piece at most."""

    def push(self, move: Move) -> None:
        """Send positions of a granted transfer out of our pages, which are read from now until the one
        Pushed. Of one group in rising order, without a gap, from where the grant begins."""

    def stop(self, transfer: int, generation: int) -> None:
        """Pushes of it that are not done end soon, between two frames, not ok."""

    def unsent(self, transfer: int) -> int:
        """Bytes of its pushes that are not in the stream yet."""
        ...

    def cut(self) -> None:
        """End it: its Down follows."""


@dataclass(frozen=True, slots=True)
class Up:
    """A connection, authenticated, to an end with which we pair."""

    session: Opened


@dataclass(frozen=True, slots=True)
class Down:
    """Closed and drained: no byte of this epoch is written any more, and its pushes have ended."""

    epoch: int
    cause: str


@dataclass(frozen=True, slots=True)
class PeerMessage:
    """`bytes`, with an End: what its generation brought."""

    message: Said
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class Pushed:
    """Once for each push. If `ok`, its bytes are in the stream, before whatever is said after this.
    `seconds` were spent on these `bytes`, not on waiting for others."""

    id: MoveId
    ok: bool
    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Unpaired:
    """No session with the other instance: the reason for the user, sent when it changes."""

    words: str


LinkEvent: TypeAlias = Up | Down | PeerMessage | Pushed | Unpaired


class Events:
    """In order. Any thread puts, one collects."""

    def __init__(self, wake: Callable[[], None]) -> None:
        """wake: called whenever there is something to collect."""
        self._wake = wake
        self._waiting: deque[LinkEvent] = deque()
        self._room = threading.Condition()
        self._died: BaseException | None = None

    def put(self, event: LinkEvent) -> None:
        with self._room:
            self._waiting.append(event)
        self._wake()

    def put_when_there_is_room(self, event: LinkEvent, given_up: Callable[[], bool]) -> None:
        """Waits while WAITING_MAX events do; not if `given_up`, of which `stir` tells."""
        with self._room:
            self._room.wait_for(lambda: len(self._waiting) < WAITING_MAX or given_up())
            if given_up():
                return
            self._waiting.append(event)
        self._wake()

    def stir(self) -> None:
        with self._room:
            self._room.notify_all()

    def fail(self, error: BaseException) -> None:
        """Our bug in a thread: `collect` raises it."""
        with self._room:
            self._died = self._died or error
        self._wake()

    def collect(self) -> list[LinkEvent]:
        """Never waits. Raises RuntimeError, from its cause, once a thread has died."""
        with self._room:
            if self._died is not None:
                raise RuntimeError("a thread of the pair's link died") from self._died
            found = list(self._waiting)
            self._waiting.clear()
            self._room.notify_all()
        return found
