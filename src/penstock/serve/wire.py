"""The one codec between the API process and the engine process: closed, typed messages.

Frames are a 4-byte little-endian length and a msgpack body, over a Unix socket in a 0700 folder.
Raises ProtocolError only, whatever the bytes. No pickle in any form.
"""
from __future__ import annotations

import msgspec

from penstock.config.params import SamplingParams

VERSION = 1
FRAME_BYTES_MAX = 256 << 20


class ProtocolError(Exception):
    """The other side sent something that is not a message of ours; the connection is closed."""


class _Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    pass


# ---------------------------------------------------------------- API process -> engine process
class Hello(_Message):
    """First message: the version, and the whole resolved command line as plain data."""

    version: int
    config: dict[str, dict[str, str | int | float | bool | None | list[str]]]


class Submit(_Message):
    """One choice of one request. `leader` is the first choice of the same prompt (n > 1)."""

    rid: int
    prompt: list[int]
    params: SamplingParams
    stop_ids: list[int]                 # end-of-sequence and stop_token_ids, after ignore_eos
    max_new: int                        # already clipped to the context length
    namespace: int = 0
    leader: int | None = None
    choice: int = 0                     # 0 .. n-1: part of the sampling seed


class Abort(_Message):
    rid: int


class StopAt(_Message):
    """A stop string ended `rid` after `count` output tokens."""

    rid: int
    count: int


class Flush(_Message):
    """Forget cached pages that no request holds."""


class AskStats(_Message):
    """Answered by one Stats."""

    id: int


class Shutdown(_Message):
    """Exit 0 at once; whatever runs is aborted."""


ToEngine = Hello | Submit | Abort | StopAt | Flush | AskStats | Shutdown


# ---------------------------------------------------------------- engine process -> API process
class Ready(_Message):
    """The model is loaded and a token can be produced."""

    pid: int
    vocab_size: int
    max_model_len: int
    info: dict[str, str | int | float | bool | None]     # what /server_info and `doctor` show


class Failed(_Message):
    """The engine cannot start: one clear line for the user (ConfigError), then it exits 2."""

    message: str


class Logprob(_Message):
    """Of one output token: its own logprob, then (token id, logprob) of the best ones."""

    logprob: float
    rank: int
    top: list[tuple[int, float]]


class Chunk(_Message):
    """News of one request. `finish` is None while it runs, then 'stop', 'length', 'abort', 'refused'."""

    rid: int
    tokens: list[int]                   # output tokens index .. index+len-1
    index: int
    logprobs: list[Logprob] | None = None
    finish: str | None = None
    reason: str = ""
    cached_tokens: int | None = None    # once, when the request starts
    cached_by_tier: dict[str, int] | None = None


class Chunks(_Message):
    """Everything that one step produced."""

    chunks: list[Chunk]


class Stats(_Message):
    """Gauges and counters of the core, the pools and the mover, by metric name."""

    id: int
    values: dict[str, float]


FromEngine = Ready | Failed | Chunks | Stats

_TO = msgspec.msgpack.Decoder(ToEngine)
_FROM = msgspec.msgpack.Decoder(FromEngine)
_ENCODER = msgspec.msgpack.Encoder()


def frame(message: ToEngine | FromEngine) -> bytes:
    """The bytes of one message, length prefix included."""
    body = _ENCODER.encode(message)
    if len(body) > FRAME_BYTES_MAX:
        raise ProtocolError(f"a message of {len(body)} bytes is over {FRAME_BYTES_MAX}")
    return len(body).to_bytes(4, "little") + body


def body_length(prefix: bytes) -> int:
    """Length of the body after a 4-byte prefix, checked before anything is allocated."""
    n = int.from_bytes(prefix, "little")
    if len(prefix) != 4 or n > FRAME_BYTES_MAX:
        raise ProtocolError(f"frame of {n} bytes")
    return n


def decode_to_engine(body: bytes) -> ToEngine:
    return _decode(_TO, body)


def decode_from_engine(body: bytes) -> FromEngine:
    return _decode(_FROM, body)


def _decode(decoder, body):  # type: ignore[no-untyped-def]
    try:
        return decoder.decode(body)
    # msgspec documents the first; the others were seen on mutated frames.
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError,
            MemoryError) as e:
        raise ProtocolError(f"{type(e).__name__}: not a message of protocol version {VERSION}") from e
