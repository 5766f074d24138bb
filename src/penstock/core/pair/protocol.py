"""The prefill/decode pair: what its two ends have in common, and what they say to their owners.

Two pure state machines (`decode_side`, `prefill_side`), one for each end of one pair of engines. They know
transfers, generations and epochs; no pages, no phases, no content of a request. A generation ends
on End, on Drained or on the fence of the writer's epoch, never by time. The decode side alone
repeats itself: the prefill side answers, and has deadlines only for what it remembers.
"""
from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TypeAlias

from penstock.core.pair.messages import Hello, Message, Reason


# ---------------------------------------------------------------- what a side asks of its owner
@dataclass(frozen=True, slots=True)
class Remind:
    """Call `reminded(transfer, n)` after a while; longer with more `tries`."""

    transfer: int
    n: int
    tries: int


@dataclass(frozen=True, slots=True)
class Deadline:
    """Call `expired(transfer, n)` after as long as one half of a request may wait for the other, and
    a message may be on its way. If one takes longer, a transfer is refused; nothing worse happens."""

    transfer: int
    n: int


@dataclass(frozen=True, slots=True)
class FenceEpoch:
    """Close the data connection of this epoch of the peer, drain it to its end, then call
    `fenced(epoch)`. Over RDMA: revoke its key."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Renew:
    """The peer fenced our epoch though we live: call `restart` with a greater one."""


Ask: TypeAlias = Remind | Deadline | FenceEpoch | Renew


# ---------------------------------------------------------------- what a side tells its owner
@dataclass(frozen=True, slots=True)
class Declined:
    """Decode side: this generation will fail. Its pages are not free yet; its Landed will come."""

    transfer: int
    generation: int
    reason: int


@dataclass(frozen=True, slots=True)
class Landed:
    """Decode side, once for each generation: no byte of it will move any more. If `ok`, all bytes are
    in place, and `tokens` are the output tokens from number `index` on, none of them streamed yet."""

    transfer: int
    generation: int
    ok: bool
    reason: int = Reason.NONE
    index: int = 0
    tokens: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Granted:
    """Prefill side: pushes of positions `start` to `tokens` - 1 may begin, each named by this
    generation."""

    transfer: int
    generation: int
    tokens: int
    emitted: int
    start: int = 0


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """Prefill side: begin no push of this transfer; its copy of the request has ended."""

    transfer: int
    reason: int


@dataclass(frozen=True, slots=True)
class Sent:
    """Prefill side: all pushes have ended well and the End was sent. The copy has ended."""

    transfer: int
    generation: int


Report: TypeAlias = Declined | Landed | Granted | Withdrawn | Sent


class Side(ABC):
    """Epochs of both ends, and what is common to them. `outbox` is for the owner to empty."""

    def __init__(self, epoch: int, identity: int = 0) -> None:
        assert epoch > 0
        self.epoch = epoch
        self.identity = identity               # of our KV; no end with another one is heard
        self.peer = 0                          # epoch of the other end; 0: not known
        self.banned = 0                        # epochs up to this one are over for us
        self.outbox: list[Message | Ask] = []
        self.counters: dict[str, int] = {}     # messages and events without effect, by reason
        self._out: list[Report] = []
        self._serial = 0
        self._greet(0)

    def received(self, message: Message) -> list[Report]:
        """Apply a message from the other end. Twice is the same as once, but for repeated answers."""
        if self._admits(message):
            self._apply(message)
        return self._told()

    @abstractmethod
    def _apply(self, m: Message) -> None:
        """A message from the present incarnation of the other end."""

    @abstractmethod
    def _heard(self, epoch: int) -> None:
        """The peer has, or had, an incarnation `epoch`: not older than the one that we know."""

    def _replaced(self, epoch: int) -> None:             # noqa: B027
        """The other end has an incarnation with which we do not pair: the one before it is over."""

    def _outdated(self) -> None:                         # noqa: B027
        """The peer takes nothing from this epoch of ours. Only one side can be fenced."""

    def _admits(self, m: Message) -> bool:
        """Whether `m` is from the other end's present incarnation, and meant for ours. Before its Hello
        was taken, neither end says anything else."""
        if isinstance(m, Hello) and m.identity != self.identity:
            self._replaced(m.sender)
            return self._ignore("identity")    # its KV would be read as something that it is not
        if isinstance(m, Hello) and m.fenced >= self.epoch:
            self._outdated()
        if m.sender <= self.banned:
            self._greet(m.sender)              # it may live, and must learn that it is not heard
            return self._ignore("fenced_sender")
        if m.sender < self.peer:
            return self._ignore("old_sender")
        self._heard(m.sender)
        if m.receiver != self.epoch:
            self._greet(m.sender)
            return isinstance(m, Hello) or self._ignore("receiver")
        return m.sender == self.peer or self._ignore("unfenced_sender")

    def _greet(self, receiver: int) -> None:
        self.outbox.append(Hello(self.epoch, receiver, self.banned, self.identity))

    def _ignore(self, why: str) -> bool:
        self.counters[why] = self.counters.get(why, 0) + 1
        return False

    def _told(self) -> list[Report]:
        out, self._out = self._out, []
        return out

    def _next(self) -> int:
        self._serial += 1
        return self._serial
