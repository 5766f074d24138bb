"""What the executor and its ranks in other processes say to each other: closed, typed messages in msgpack.

Frames are an 8-byte little-endian length and a body, over Unix socket pairs that only these processes
hold. Plans are the core's own types. No pickle in any form.
"""
from __future__ import annotations

import contextlib
import socket
import threading

import msgspec

from penstock.config.request.grammar import Grammar
from penstock.config.request.params import SamplingParams
from penstock.config.settings.plain import Plain
from penstock.core.plan import Moved, RequestId, Row, StepId, StepPlan
from penstock.core.settings import CoreConfig
from penstock.exec.worker import Stepped


class _Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    pass


# ---------------------------------------------------------------- executor -> rank
class Begin(_Message, frozen=True):
    """First message: load what rank `index` of a model of so many layers has. `host`: the address of this
    machine on which other TP ranks of its stage reach it. `alone`: each rank has a GPU of its own."""

    config: Plain
    index: int
    num_layers: int
    threads: int
    host: str
    alone: bool


class RendezvousKey(_Message, frozen=True):
    """Of `collectives.Rendezvous`: from a TP rank to the executor, and on to the others of its stage."""

    key: str
    value: bytes


class Pools(_Message, frozen=True):
    """Make pools, tables and sampler of these sizes, in place of any there are; answered by Ready. The
    host pool is the descriptor that the process was started with, large enough by now. `capture`: steps for
    CUDA graphs, where this rank can. `serves`: they are those of requests."""

    core: CoreConfig
    capture: bool = False
    serves: bool = False


class Measure(_Message, frozen=True):
    """Drop pools, tables and sampler, and answer with Memory: with `capture` of the largest graphs too."""

    capture: bool = False


class Words(_Message, frozen=True):
    """To the TP ranks of the last stage, before Pools: the vocabulary of grammars, as
    `exec.sampling.grammar.Vocabulary`, or why there is none."""

    tokenizer: str
    eos_ids: list[int]
    missing: str


class Compile(_Message, frozen=True):
    """To the TP ranks of the last stage; answered by Compiled."""

    grammar: Grammar


class Open(_Message, frozen=True):
    rid: RequestId
    prompt: list[int]
    params: SamplingParams
    choice: int
    stop_ids: list[int]


class Close(_Message, frozen=True):
    rid: RequestId


class Given(_Message, frozen=True):
    """Output tokens of `rid` that another engine has sampled."""

    rid: RequestId
    tokens: list[int]


class Checked(_Message, frozen=True):
    """To a stage in front of the last: `exec.worker.Worker.checked`, row by row."""

    step: StepId
    rows: list[Row]
    right: list[int]


class Plan(_Message, frozen=True):
    """The same bytes to every rank, in step order."""

    plan: StepPlan


ToRank = Begin | RendezvousKey | Pools | Words | Measure | Compile | Open | Close | Given | Checked | Plan


# ---------------------------------------------------------------- rank -> executor
class Loading(_Message, frozen=True):
    """It has just written a line to the log: it is alive. At any time until it serves."""


class Loaded(_Message, frozen=True):
    """The stage has its weights. `identity`: what must be the same on every rank, by name; `free_bytes`: of
    its machine's memory, now."""

    identity: dict[str, str]
    weight_bytes: int
    peak_bytes: int
    free_bytes: int


class StageRefused(_Message, frozen=True):
    """The stage cannot be built: one clear line for the user; the process exits."""

    message: str


class Ready(_Message, frozen=True):
    """Answers Pools. `memory`: of an engine of a pair, the handle of its pools on a GPU (`memory.across`).
    `use`: bytes of a GPU by what they are for (`exec.start.memory_use`). `uncaptured`: as `Worker.uncaptured`."""

    memory: bytes = b""
    use: dict[str, int] = {}
    uncaptured: str = ""


class RankMemory(_Message, frozen=True):
    """Answers Measure, in bytes: of the GPU, what is free of that, and what steps since Loaded have taken
    beside weights, at most."""

    total: int
    free: int
    workspace: int


class Compiled(_Message, frozen=True):
    """No step that samples under it waits, as long as it is among the last ones used."""

    grammar: Grammar


class Reports(_Message, frozen=True):
    """What has happened since the last one: a step, if any, and then copies. `began` and `ended` (seconds of
    this machine's monotonic clock) say when the step computed, without its wait for the stage before it."""

    stepped: list[Stepped]
    moved: list[Moved]
    began: float = 0.0
    ended: float = 0.0


class Counters(_Message, frozen=True):
    """`executor.WorkerHandle.stats` as they are now: before Ready, behind Reports, and when nothing more comes."""

    values: dict[str, float]


class RankBeat(_Message, frozen=True):
    """The sender lives: `beats.Waits.now`, and `beats.Heard.step`."""

    wait: int
    whom: str
    step: int


FromRank = (RankBeat | RendezvousKey | Loading | Loaded | StageRefused | Ready | RankMemory | Compiled | Reports
            | Counters)

_ENCODER = msgspec.msgpack.Encoder()
_TO = msgspec.msgpack.Decoder(ToRank)
_FROM = msgspec.msgpack.Decoder(FromRank)


def encode(message: object) -> bytes:
    """A frame: any number of channels may send the same."""
    body = _ENCODER.encode(message)
    return len(body).to_bytes(8, "little") + body


def decode_to_rank(body: bytes) -> ToRank:
    message: ToRank = _TO.decode(body)
    return message


def decode_from_rank(body: bytes) -> FromRank:
    message: FromRank = _FROM.decode(body)
    return message


class Channel:
    """One end of a socket pair: any thread sends, one receives, all waiting in the kernel."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket, self._in = sock, sock.makefile("rb")
        self._sending = threading.Lock()

    def cut(self) -> None:
        """Whoever sends or receives here finds the other end gone."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def send(self, frame: bytes | memoryview) -> None:
        """Raises ConnectionError when the other end is gone."""
        with self._sending:
            self._socket.sendall(frame)

    def read(self, nbytes: int) -> bytearray | None:
        """So many bytes; None when the other end is gone."""
        data = bytearray(nbytes)
        view, at = memoryview(data), 0
        while at < nbytes:
            try:
                n = self._in.readinto(view[at:])
            except ConnectionError:
                return None
            if not n:
                return None
            at += n
        return data

    def receive(self) -> bytes | None:
        """The body of the next frame; None when the other end is gone."""
        if (head := self.read(8)) is None:
            return None
        body = self.read(int.from_bytes(head, "little"))
        return None if body is None else bytes(body)
