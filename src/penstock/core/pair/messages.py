"""What the two engines of a prefill/decode pair say to each other. Plain integers and tuples only.

Every message carries the epoch of its sender and of its receiver: positive integers, one for each
incarnation of an engine, and a later one is greater. A transfer is named by the id that the server
gave it; a generation names one attempt at it, and rises with every attempt that one epoch of the
decode engine makes, at whatever transfer. No message holds an address, a page or a tensor.
"""
from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TypeAlias


class Reason(IntEnum):
    """Why a generation did not bring its KV. On the wire it is an integer that may be unknown."""

    NONE = 0               # it did
    CANCELLED = 1          # the decode engine wants it no more
    REFUSED = 2            # the prefill engine could not, or its copy of the request was aborted
    FAILED = 3             # a push failed
    EXPIRED = 4            # one half of the request waited too long for the other
    LOST = 5               # the other engine, or the connection to it, is gone
    FORGOTTEN = 6          # too old: the prefill engine cannot tell whether it had ended it
    BROKEN = 7             # the end that arrived is not the end of what was asked for


@dataclass(frozen=True, slots=True)
class Hello:
    """Tells the sender's epoch. `receiver` is 0 if the sender does not know it: this and a wrong
    one are answered with a Hello. `fenced`: up to this epoch the sender takes nothing from the
    receiver any more, not even if it lives. `identity`: what its KV is, see `CoreConfig`."""

    sender: int
    receiver: int
    fenced: int = 0
    identity: int = 0


@dataclass(frozen=True, slots=True)
class Grant:
    """Decode to prefill: pages for positions from `start` to `tokens` - 1 wait for your writes.
    `emitted` output tokens have been streamed already, and must not be sampled again. Repeated until
    it ends."""

    sender: int
    receiver: int
    transfer: int
    generation: int
    tokens: int
    emitted: int = 0
    start: int = 0


@dataclass(frozen=True, slots=True)
class Cancel:
    """Decode to prefill: begin no write of this generation; say Drained once none is in flight.
    Repeated until that, or the End, is heard."""

    sender: int
    receiver: int
    transfer: int
    generation: int


@dataclass(frozen=True, slots=True)
class End:
    """Prefill to decode: all writes of this generation have ended well, and there will be no more.
    `first` are output tokens number `index`, `index + 1`, ... of the request."""

    sender: int
    receiver: int
    transfer: int
    generation: int
    tokens: int            # positions that were written: those below it
    index: int
    first: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Refused:
    """Prefill to decode: this generation will not end well. Writes of it may still be in flight."""

    sender: int
    receiver: int
    transfer: int
    generation: int
    reason: int


@dataclass(frozen=True, slots=True)
class Drained:
    """Prefill to decode: no write of this generation is in flight, and none will ever be begun by
    this epoch of the sender."""

    sender: int
    receiver: int
    transfer: int
    generation: int
    reason: int


Message: TypeAlias = Hello | Grant | Cancel | End | Refused | Drained

# Each of these is a promise about writes, so it must not overtake them. A transport that reports a
# push as ended before its bytes have landed sends these behind the bytes, in the same stream.
IN_STREAM = (End, Drained)
