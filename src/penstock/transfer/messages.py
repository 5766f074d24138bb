"""What the engines of a pair say to each other beside the core's messages. Bounded and typed.

The receiver checks that ids and lengths make sense: here is only what no message exceeds.
"""
from __future__ import annotations

from typing import Annotated, TypeAlias

from msgspec import Meta

from penstock.config.request.params import SamplingParams
from penstock.config.request.scores import Scores
from penstock.config.streams.frames import Message
from penstock.config.streams.heartbeat import Beat
from penstock.core.pair.messages import Cancel, Drained, End, Grant, Refused
from penstock.transfer.facts import Facts

Number = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
TokenId = Annotated[int, Meta(ge=0, lt=1 << 31)]


class Greeting(Message, frozen=True):
    """The first message under the keys of a connection. `newest` is the newest epoch that the sender
    knows of; `epoch`, of the end that listens, is that of this connection, 0 if it is paired with another
    engine. After `silence_ms` without a word the sender ends it. `engine`: drawn when the sender started."""

    facts: Facts
    newest: Number
    silence_ms: Annotated[int, Meta(ge=100, le=1 << 31)]
    engine: Annotated[bytes, Meta(min_length=16, max_length=16)]
    epoch: Number = 0


class Ask(Message, frozen=True):
    """Decode to prefill: compute this prompt and sample its first token.

    prompt      token ids, 4 bytes each, little-endian
    namespace   of the tenant: 63 bits of a keyed digest, above bit 0; both ends store pages under it
    leader      transfer of the first choice of the same prompt; 0: none
    room        where a router has sent the prompt to both ends: its number and the choice's; None: it has not
    trace       W3C traceparent of the request's span; "": it is not traced
    session     63 bits of a keyed digest of its tenant and name; 0: none
    retain_s    seconds for which the session is retained after it; None: as it was
    """

    transfer: Number
    prompt: Annotated[bytes, Meta(min_length=4, max_length=1 << 23)]
    params: SamplingParams
    stop_ids: Annotated[list[TokenId], Meta(max_length=4096)]
    max_new: Number
    namespace: Annotated[bytes, Meta(min_length=16, max_length=16)]
    choice: Number = 0
    leader: Number = 0
    selects: bool = False
    attention: Number = 0
    room: tuple[Number, Number] | None = None
    trace: Annotated[str, Meta(max_length=64)] = ""
    session: Number = 0
    retain_s: Number | None = None


Logprob: TypeAlias = tuple[float, Number, Annotated[list[tuple[TokenId, float]], Meta(max_length=64)]]


class First(Message, frozen=True):
    """Prefill to decode, before the End of the same generation: what belongs to its output tokens and prompt.

    logprobs           of each, where asked for: its own, its rank, then (token id, logprob) of the best
    hbm, dram, disk    tokens of the prompt that were cached there: on the device, the host, in storage
    """

    transfer: Number
    generation: Number
    logprobs: Annotated[list[Logprob], Meta(max_length=64)] | None = None
    hbm: Number = 0
    dram: Number = 0
    disk: Number = 0


class Prompted(Message, frozen=True):
    """Prefill to decode, before the First of the same generation: logprobs of a part of the prompt."""

    transfer: Number
    generation: Number
    scores: Scores


class SessionNews(Message, frozen=True):
    """Decode to prefill: no request of this session follows (`ends`), or one is about to."""

    session: Number
    ends: bool


class Memory(Message, frozen=True):
    """Prefill to decode, before anything else, where the decode instance READs: what its transport must know.
    Where that is memory of both, decode to prefill the same: it has it too."""

    here: Annotated[bytes, Meta(max_length=1 << 16)]


class Offer(Message, frozen=True):
    """Prefill to decode: a piece of a push lies in a slot of its buffer until it is Taken.

    piece    layer, layers, unit, units, head, heads, see `layout.PageSlice`; its bytes are dense page by page
             (`layout.page_parts`)
    digest   xxh3-64 of the bytes, big-endian; zeros where they lie in memory of both ends
    """

    transfer: Number
    generation: Number
    group: Annotated[int, Meta(ge=0, lt=64)]
    piece: tuple[Number, Number, Number, Number, Number, Number]
    digest: Annotated[bytes, Meta(min_length=8, max_length=8)]
    slot: Annotated[int, Meta(ge=0, le=255)]
    length: Annotated[int, Meta(ge=1, le=8 << 20)]


class Taken(Message, frozen=True):
    """Decode to prefill: it has read that slot, or will not."""

    slot: Annotated[int, Meta(ge=0, le=255)]


Said: TypeAlias = (Grant | Cancel | End | Refused | Drained
                   | Greeting | Beat | Ask | First | Prompted | SessionNews | Memory | Offer | Taken)
