"""The prefill/decode pair: what its two ends have in common, and what they say to their owners.

Two pure state machines (`decode_side`, `prefill_side`), one for each end of a connection between two engines.
They know transfers and generations; no pages, no phases, no content of a request. A generation ends on End,
on Drained or with the connection, never by time.
"""
from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TypeAlias

from penstock.core.pair.messages import Message, Reason


# ---------------------------------------------------------------- what a side tells its owner
@dataclass(frozen=True, slots=True)
class Declined:
    """Decode side: this generation will fail. Its pages are not free yet; its Landed will come.
    Generation 0: the request was refused before anything was granted."""

    transfer: int
    generation: int
    reason: int


@dataclass(frozen=True, slots=True)
class Landed:
    """Decode side, once for each generation: no byte of it will move any more. If `ok`, all bytes are
    in place, and `tokens` are the first output tokens."""

    transfer: int
    generation: int
    ok: bool
    reason: int = Reason.NONE
    tokens: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Granted:
    """Prefill side: pushes of positions `start` to `tokens` - 1 may begin, each named by this
    generation."""

    transfer: int
    generation: int
    tokens: int
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
    """What is common to both ends. `outbox` is for the owner to empty."""

    def __init__(self) -> None:
        self.up = False                        # a connection is there
        self.outbox: list[Message] = []
        self.counters: dict[str, int] = {}     # messages without effect, by reason
        self._out: list[Report] = []

    def joined(self) -> None:
        """A connection was made. Nothing of an earlier one is left on it."""
        assert not self.up
        self.up = True

    def left(self) -> list[Report]:
        """The connection is closed, and drained to its end: no write of either end can land any more."""
        self.up = False
        self.outbox.clear()
        self._lost()
        return self._told()

    def received(self, message: Message) -> list[Report]:
        """Apply a message from the other end."""
        self._apply(message)
        return self._told()

    @abstractmethod
    def _lost(self) -> None:
        """All that the other end had a part in has ended."""

    @abstractmethod
    def _apply(self, m: Message) -> None: ...

    def _ignore(self, why: str) -> None:
        self.counters[why] = self.counters.get(why, 0) + 1

    def _told(self) -> list[Report]:
        out, self._out = self._out, []
        return out
