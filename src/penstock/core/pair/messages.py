"""What the two engines of a prefill/decode pair say to each other. Plain integers and tuples only.

They come in order and none is lost, over a connection whose end both hear of; the request itself was sent
over it before. A transfer is named by the id that the server gave it; a generation names one grant, and rises
with each that a decode engine gives. No message holds an address, a page or a tensor.
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
    LOST = 4               # the other engine, or the connection to it, is gone
    UNKNOWN = 5            # the prefill engine has no such request (any more)
    BROKEN = 6             # the end that arrived is not the end of what was asked for
    TAKEN = 7              # of a room: somebody has asked for it before
    LATE = 8               # of a room: nobody has sent its prompt here, or that was too long ago
    OTHER = 9              # of a room: it is another prompt's


@dataclass(frozen=True, slots=True)
class Grant:
    """Decode to prefill: pages for positions from `start` to `tokens` - 1 wait for your writes."""

    transfer: int
    generation: int
    tokens: int
    start: int = 0


@dataclass(frozen=True, slots=True)
class Cancel:
    """Decode to prefill: the request is of no use any more. Begin no write of this generation; say Drained
    once none is in flight. Generation 0: nothing was granted, nothing is to be said."""

    transfer: int
    generation: int


@dataclass(frozen=True, slots=True)
class End:
    """Prefill to decode: all writes of this generation have ended well, and there will be no more.
    `first` are the first output tokens of the request."""

    transfer: int
    generation: int
    tokens: int            # positions that were written: those below it
    first: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Refused:
    """Prefill to decode: this generation will not end well. Writes of it may still be in flight.
    Generation 0: no Grant of it had come; one that is on its way is answered with Drained."""

    transfer: int
    generation: int
    reason: int


@dataclass(frozen=True, slots=True)
class Drained:
    """Prefill to decode: no write of this generation is in flight, and none will ever be begun."""

    transfer: int
    generation: int
    reason: int


Message: TypeAlias = Grant | Cancel | End | Refused | Drained

# End and Drained are promises about writes, so they must not overtake them: they come behind the bytes, in
# the same stream.
