"""What the executor and its ranks in other processes say to each other: closed, typed messages in msgpack.

In frames of `config.streams.frames`, not signed, over Unix socket pairs that only these processes hold. Plans are
the core's own types.
"""
from __future__ import annotations

import contextlib
import socket
import sys
import threading
from typing import Generic, get_args

import msgspec

from penstock.config.request.grammar import Grammar
from penstock.config.request.params import SamplingParams
from penstock.config.settings.plain import Plain
from penstock.config.streams.frames import FrameReader, Kinds, M, Message, ProtocolError
from penstock.config.streams.heartbeat import Beat
from penstock.core.plan import Moved, RequestId, Row, StepId, StepPlan
from penstock.core.settings import CoreConfig
from penstock.exec.worker import Stepped


# ---------------------------------------------------------------- executor -> rank
class Begin(Message, frozen=True):
    """First message: load what rank `index` of a model of so many layers has. `host`: the address of this
    machine on which other TP ranks of its stage reach it. `alone`: each rank has a GPU of its own."""

    config: Plain
    index: int
    num_layers: int
    threads: int
    host: str
    alone: bool


class RendezvousKey(Message, frozen=True):
    """Of `collectives.Rendezvous`: from a TP rank to the executor, and on to the others of its stage."""

    key: str
    value: bytes


class Pools(Message, frozen=True):
    """Make pools, tables and sampler of these sizes, in place of any there are; answered by Ready. The
    host pool is the descriptor that the process was started with, large enough by now. `capture`: steps for
    CUDA graphs, where this rank can. `serves`: they are those of requests."""

    core: CoreConfig
    capture: bool = False
    serves: bool = False


class Measure(Message, frozen=True):
    """Drop pools, tables and sampler, and answer with Memory: with `capture` of the largest graphs too."""

    capture: bool = False


class Words(Message, frozen=True):
    """To the TP ranks of the last stage, before Pools: the vocabulary of grammars, as
    `exec.sampling.grammar.Vocabulary`, or why there is none."""

    tokenizer: str
    eos_ids: list[int]
    missing: str


class Compile(Message, frozen=True):
    """To the TP ranks of the last stage; answered by Compiled."""

    grammar: Grammar


class Open(Message, frozen=True):
    rid: RequestId
    prompt: list[int]
    params: SamplingParams
    choice: int
    stop_ids: list[int]


class Close(Message, frozen=True):
    rid: RequestId


class Given(Message, frozen=True):
    """Output tokens of `rid` that another engine has sampled."""

    rid: RequestId
    tokens: list[int]


class Checked(Message, frozen=True):
    """To a stage in front of the last: `exec.worker.Worker.checked`, row by row."""

    step: StepId
    rows: list[Row]
    right: list[int]


class Plan(Message, frozen=True):
    """The same bytes to every rank, in step order."""

    plan: StepPlan


ToRank = Begin | RendezvousKey | Pools | Words | Measure | Compile | Open | Close | Given | Checked | Plan


# ---------------------------------------------------------------- rank -> executor
class Loading(Message, frozen=True):
    """It has just written a line to the log: it is alive. At any time until it serves."""


class Loaded(Message, frozen=True):
    """The stage has its weights. `identity`: what must be the same on every rank, by name; `free_bytes`: of
    its machine's memory, now."""

    identity: dict[str, str]
    weight_bytes: int
    peak_bytes: int
    free_bytes: int


class StageRefused(Message, frozen=True):
    """The stage cannot be built: one clear line for the user; the process exits."""

    message: str


class Ready(Message, frozen=True):
    """Answers Pools. `memory`: of an engine of a pair, the handle of its pools on a GPU (`memory.across`).
    `use`: bytes of a GPU by what they are for (`exec.start.memory_use`). `uncaptured`: as `Worker.uncaptured`."""

    memory: bytes = b""
    use: dict[str, int] = msgspec.field(default_factory=dict)
    uncaptured: str = ""


class RankMemory(Message, frozen=True):
    """Answers Measure, in bytes: of the GPU, what is free of that, and what steps since Loaded have taken
    beside weights, at most."""

    total: int
    free: int
    workspace: int


class Compiled(Message, frozen=True):
    """No step that samples under it waits, as long as it is among the last ones used."""

    grammar: Grammar


class Reports(Message, frozen=True):
    """What has happened since the last one: a step, if any, and then copies. `began` and `ended` (seconds of
    this machine's monotonic clock) say when the step computed, without its wait for the stage before it."""

    stepped: list[Stepped]
    moved: list[Moved]
    began: float = 0.0
    ended: float = 0.0


class Counters(Message, frozen=True):
    """`executor.WorkerHandle.stats` as they are now: before Ready, behind Reports, and when nothing more comes."""

    values: dict[str, float]


class RankBeat(Beat, frozen=True):
    """The sender lives: `hangs.Waits.now`, and `hangs.RankStatus.step`."""

    wait: int
    whom: str
    step: int


FromRank = (RankBeat | RendezvousKey | Loading | Loaded | StageRefused | Ready | RankMemory | Compiled | Reports
            | Counters)

_MESSAGE_BYTES_MAX = 1 << 32
TO_RANK: Kinds[ToRank] = Kinds("ranks", get_args(ToRank), _MESSAGE_BYTES_MAX)
FROM_RANK: Kinds[FromRank] = Kinds("ranks", get_args(FromRank), _MESSAGE_BYTES_MAX)


class Channel(Generic[M]):
    """One end of a socket pair: any thread sends, one receives, all waiting in the kernel."""

    def __init__(self, sock: socket.socket, hears: Kinds[M]) -> None:
        """hears: what the other end says."""
        self._socket, self._in = sock, sock.makefile("rb")
        self._sending = threading.Lock()
        self._reader = FrameReader(self._fill, hears)

    def cut(self) -> None:
        """Whoever sends or receives here finds the other end gone."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def send(self, data: bytes | memoryview) -> None:
        """Frames, or what `read` reads there. Raises ConnectionError when the other end is gone."""
        with self._sending:
            self._socket.sendall(data)

    def read(self, nbytes: int) -> bytearray | None:
        """So many bytes; None when the other end is gone."""
        data = bytearray(nbytes)
        try:
            self._fill(memoryview(data))
        except ConnectionError:
            return None
        return data

    def receive(self) -> M | None:
        """The next message; None when the other end is gone, or sent what is none: then this end is cut as well."""
        try:
            message: M = self._reader.next()
        except ConnectionError:
            return None
        except ProtocolError as e:
            print(f"the other end of {threading.current_thread().name} is taken for dead: {e}", file=sys.stderr,
                  flush=True)
            self.cut()
            return None
        return message

    def _fill(self, view: memoryview) -> int:
        """Raises ConnectionError when the other end is gone before that."""
        at = 0
        while at < len(view):
            if not (n := self._in.readinto(view[at:])):
                raise ConnectionError("the other end is gone")
            at += n
        return at
