"""What the API process and the engine process say to each other: closed, typed messages.

In frames of `config.streams.frames`, not signed, over a Unix socket pair that only the two processes hold.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

import msgspec

from penstock.config.request.params import SamplingParams
from penstock.config.request.scores import Scores
from penstock.config.request.selection import Selection
from penstock.config.streams.frames import Kinds, Message

VERSION = 13
LOADED = "engine: loaded"       # the last line that the engine prints before it sends Ready
MESSAGE_BYTES_MAX = 256 << 20


# ---------------------------------------------------------------- API process -> engine process
class Hello(Message, frozen=True):
    """First message: the version, and the whole resolved command line as plain data."""

    version: int
    config: dict[str, dict[str, str | int | float | bool | list[str] | None]]


class BootstrapRoom(msgspec.Struct, frozen=True, array_like=True):
    """Where the two ends of a pair meet over one prompt that a router has sent to both.

    number   the router's, or of the prefill instance that answers it: it need not rise, and proves nothing
    index    of the choice in its request, all prompts counted
    address  of a decode instance: HOST:PORT of the prefill instance
    holds    of a prefill instance: it answers when the prompt is computed, and keeps the pages; else when all has
             been sent
    """

    number: int
    index: int = 0
    address: str = ""
    holds: bool = False


class Origin(msgspec.Struct, frozen=True, array_like=True):
    """Where a request comes from.

    tenant   whose turn it must be, see `engine/fair.py`; 0: it enters at once
    trace    W3C traceparent of the request's span; "": it is not traced
    session  63 bits of keyed digests of its tenant and of its name, see `session_number`; 0: none
    retain_s  seconds for which its session is retained after it; None: as it was
    """

    tenant: int = 0
    trace: str = ""
    session: int = 0
    retain_s: int | None = None


NO_ORIGIN = Origin()


class Submit(Message, frozen=True):
    """One choice of one request. `leader` is the first choice of the same prompt (n > 1), whose Submit came
    directly before those of the others: these may leave their prompt empty."""

    rid: int
    prompt: list[int]
    params: SamplingParams
    stop_ids: list[int]                 # end-of-sequence and stop_token_ids, after ignore_eos
    max_new: int                        # already clipped to the context length
    namespace: int = 0
    leader: int | None = None
    choice: int = 0                     # 0 .. n-1: part of the sampling seed
    selects: bool = False               # these two as in the core's Arrived
    attention: int = 0
    room: BootstrapRoom | None = None            # of one end of a pair behind a router
    origin: Origin = NO_ORIGIN


@dataclass(frozen=True, slots=True)
class RemotePrefill:
    """An engine of the other end of a pair wants a prompt computed: a Submit of ours without a number. With a
    room, it is one that was sent here too, or will be."""

    peer: int
    transfer: int
    submit: Submit


class Abort(Message, frozen=True):
    rid: int


class StopAt(Message, frozen=True):
    """A stop string ended `rid` after `count` output tokens."""

    rid: int
    count: int


class Flush(Message, frozen=True):
    """Forget cached pages that no request holds."""


class OfSession(Message, frozen=True):
    """No request of this session follows (`ends`), or one is about to: what storage has of its last prompt is read."""

    session: int
    ends: bool


class AskStats(Message, frozen=True):
    """Answered by one Stats."""

    id: int


class AskShown(Message, frozen=True):
    """Answered by one Shown."""

    id: int


class Shutdown(Message, frozen=True):
    """Abort what runs, write pages that wait for storage for at most `store_s` seconds, and exit 0."""

    store_s: float = 0.0


ToEngine = Hello | Submit | Abort | StopAt | Flush | OfSession | AskStats | AskShown | Shutdown


# ---------------------------------------------------------------- engine process -> API process
class EngineReady(Message, frozen=True):
    """The model is loaded and a token can be produced."""

    pid: int
    vocab_size: int
    max_model_len: int
    info: dict[str, str | int | float | bool | None]     # what /server_info and `doctor` show
    selection: Selection | None = None                   # the largest that a request may ask for
    dense_len: int = 0                                   # with it: tokens of a request that reads all KV


class Failed(Message, frozen=True):
    """The engine cannot start: one clear line for the user (ConfigError), then it exits 2."""

    message: str


class TokenLogprob(Message, frozen=True, gc=False):
    """One output token: its own logprob, then (token id, logprob) of the best ones."""

    logprob: float
    rank: int
    top: list[tuple[int, float]]


class OutputChunk(Message, frozen=True, gc=False):
    """News of one request. `finish` is None while it runs, then 'stop', 'length', 'abort', 'refused',
    'unavailable', or, of a room, 'room_taken' and 'room_late'."""

    rid: int
    tokens: list[int]                   # output tokens index .. index+len-1
    index: int
    logprobs: list[TokenLogprob] | None = None
    finish: str | None = None
    reason: str = ""
    cached_tokens: int | None = None    # once, when the request starts
    cached_by_tier: dict[str, int] | None = None
    peer_tokens: int = 0                # the same time: of the prompt, computed by the other engine of a pair
    prompt: Scores | None = None        # once, with the first token, where it was asked for
    kv_reads: dict[str, int] | None = None  # with `finish`, of a request that selected: by name
    drafts: tuple[int, int] | None = None   # with `finish`: tokens proposed, and those that it has said


class Chunks(Message, frozen=True):
    """Everything that one step produced."""

    chunks: list[OutputChunk]


class Timeline(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The phases of a traced request that has ended, in order: the name of each, its begin and its end in
    nanoseconds since 1970."""

    trace: str                          # of its Origin
    choice: int
    phases: list[tuple[str, int, int]]


class Timelines(Message, frozen=True):
    """Traced requests that have ended in one turn."""

    timelines: list[Timeline]


class PeerNews(Message, frozen=True):
    """An engine of the other end of a pair has come or gone. `missing`: which is not there, and why; "" if all are.
    `connected`: whether one of them is."""

    missing: str
    connected: bool
    info: dict[str, str | int | float | bool | None]


class Stats(Message, frozen=True):
    """Gauges and counters of the core, the pools and the mover, by metric name."""

    id: int
    values: dict[str, float]


class SeenRequest(msgspec.Struct, frozen=True, array_like=True):
    """One that is live; in tokens."""

    rid: int
    phase: str
    prompt: int
    computed: int
    output: int


class SeenTurn(msgspec.Struct, frozen=True, array_like=True):
    """One turn of the planner: the step that it planned (0: none), and who changed the phase, from and to."""

    number: int
    step: int
    rows: int
    tokens: int
    moves: int
    edges: list[tuple[int, str, str]]


class Shown(Message, frozen=True):
    """What the page shows of requests and turns; not all of `live` requests, if these are many."""

    id: int
    live: int
    requests: list[SeenRequest]
    turns: list[SeenTurn]


FromEngine = EngineReady | Failed | Chunks | Timelines | PeerNews | Stats | Shown

TO_ENGINE: Kinds[ToEngine] = Kinds(f"protocol version {VERSION}", get_args(ToEngine), MESSAGE_BYTES_MAX)
# Hello and Failed keep their numbers, 1 and 66, and their fields in every version: each end can name the other's.
FROM_ENGINE: Kinds[FromEngine] = Kinds(f"protocol version {VERSION}", get_args(FromEngine), MESSAGE_BYTES_MAX, first=65)
