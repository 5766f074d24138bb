"""The ranks of an engine as processes: started by exec, spoken to over socket pairs, dead together.

Owns the processes, the host pool's memory and what they have reported. A rank that dies or hangs is
RankDied for whoever waits; the ranks go when this process does. Decides nothing.
"""
from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import NoReturn

from torch import Tensor

from penstock.config.base.errors import ConfigError
from penstock.config.request.params import SamplingParams
from penstock.config.settings.plain import to_plain
from penstock.config.settings.tree import Config
from penstock.core.plan import RequestId, StepPlan
from penstock.core.settings import CoreConfig
from penstock.exec.load.layout import Caches
from penstock.exec.pipeline import wire
from penstock.exec.pipeline.lanes import INTERFACE
from penstock.exec.rank import Report
from penstock.exec.sampling.grammar import NO_TOKENIZER, BadGrammar, Vocabulary
from penstock.exec.sampling.sampler import check_ids
from penstock.memory.dram import mapped
from penstock.memory.pool import BlockPool

LOADING_S = 60.0            # a rank that loads may be silent for so long at least: files may be slow
STACK_S = 1.0               # what a rank that hangs has to print its stack
OVERLAPS = 8                # steps of the stage before that a step may overlap with


class RankDied(RuntimeError):
    """A rank's process is gone, or hangs: the engine cannot go on."""


class RankProcess:
    """`front.Ranked` over a socket. `began` and `ended` of its newest steps are kept for utilisation."""

    def __init__(self, crew: Crew, index: int, sock: socket.socket, process: subprocess.Popen[bytes]) -> None:
        self.index, self.process, self._crew = index, process, crew
        self._channel = wire.Channel(sock)
        self._reports: SimpleQueue[wire.Reports] = SimpleQueue()
        self._answers: SimpleQueue[wire.FromRank | None] = SimpleQueue()
        self._counters: dict[str, float] = {}       # as it has last told
        self.died = False
        self.queued: deque[float] = deque()         # when each plan was sent that is not reported yet
        self.steps: deque[tuple[float, float]] = deque(maxlen=OVERLAPS)
        self.busy = self.overlap = 0.0              # seconds
        self.first = 0.0
        threading.Thread(target=self._listen, daemon=True, name=f"penstock-rank-{index}").start()

    def _listen(self) -> None:
        while (body := self._channel.receive()) is not None:
            message = wire.decode_from_rank(body)
            match message:
                case wire.Reports():
                    self._reports.put(message)
                    self._crew.tell()
                case wire.Counters(values):
                    self._counters = values
                case _:
                    self._answers.put(message)
        self.died = True
        self._answers.put(None)
        self._crew.tell()

    # ------------------------------------------------------------ Ranked
    def open(self, rid: RequestId, prompt: tuple[int, ...], params: SamplingParams, *, choice: int,
             stop_ids: tuple[int, ...]) -> None:
        check_ids(prompt, params, self._crew.vocab_size)
        self.send(wire.encode(wire.Open(rid, list(prompt), params, choice, list(stop_ids))))

    def close(self, rid: RequestId) -> None:
        self.send(wire.encode(wire.Close(rid)))

    def given(self, rid: RequestId, tokens: Sequence[int]) -> None:
        self.send(wire.encode(wire.Given(rid, list(tokens))))

    def start(self, plan: StepPlan) -> None:
        self.queued.append(time.monotonic())
        self.send(self._crew.encoded(plan))

    def collect(self, *, block: bool) -> list[Report]:
        assert not block, "the crew waits for all ranks together"
        found: list[Report] = []
        with contextlib.suppress(Empty):
            while True:
                reports = self._reports.get_nowait()
                found += [*reports.stepped, *reports.moved]
                if reports.stepped:
                    self.queued.popleft()
                    self._crew.computed(self, reports.began, reports.ended)
        if not found and self.died:
            self._crew.fail(self)
        return found

    def stats(self) -> dict[str, float]:
        stage = f'{{stage="{self._crew.stage_of(self)}"}}'
        since = time.monotonic() - self.first if self.first else 0.0
        return {**self._counters, f"stage_busy_seconds_total{stage}": self.busy,
                f"stage_overlap_seconds_total{stage}": self.overlap, f"stage_seconds_total{stage}": since}

    # ------------------------------------------------------------ messages
    def send(self, frame: bytes) -> None:
        try:
            self._channel.send(frame)
        except ConnectionError:
            self._crew.fail(self)

    def answer(self, timeout_s: float) -> wire.FromRank:
        """Raises ConfigError when the rank refuses, RankDied when it is gone or hangs."""
        try:
            message = self._answers.get(timeout=timeout_s)
        except Empty:
            # It may wait for another: who has plans and does not report is named.
            self._crew.hang([rank for rank in self._crew.ranks if rank.queued] or [self], timeout_s)
        if message is None:
            self._crew.fail(self)
        if isinstance(message, wire.Refused):
            raise ConfigError(message.message)
        return message


class Crew:
    """All ranks of an engine."""

    def __init__(self, config: Config, num_layers: int, threads: int, wake: Callable[[], None]) -> None:
        """Starts a process for each lane of each stage, which begins to load. wake: called in other threads
        whenever a rank has reported or died. Of an engine of a pair this process sees device pools too."""
        self._wake, self._news_at = wake, 0.0
        self.news: SimpleQueue[None] = SimpleQueue()
        self.grammars = ""                          # what the last stage says of them
        self.vocab_size = 0                         # known before the first request
        self.timeout_s = config.device.rank_timeout_s
        self._encoded: tuple[StepPlan | None, bytes] = None, b""
        # It has no name: it goes with the last process that has mapped it.
        self._host_fd = os.memfd_create("penstock-host", os.MFD_CLOEXEC)
        n, self._lanes = config.device.num_ranks, config.device.tp
        self._device_fds = [os.memfd_create("penstock-device", os.MFD_CLOEXEC) for _ in range(n)
                            if config.pair.disaggregation_mode]
        self.ranks: list[RankProcess] = []
        with contextlib.ExitStack() as until_started:
            for i, between in enumerate(_between(config.device.pp, config.device.tp, until_started)):
                ours, theirs = socket.socketpair()
                device = self._device_fds[i] if self._device_fds else -1
                fds = [theirs.fileno(), self._host_fd, device, *between]
                with theirs:
                    process = subprocess.Popen(
                        [sys.executable, "-P", "-m", "penstock.exec.pipeline.process", *map(str, fds)],
                        pass_fds=[fd for fd in fds if fd >= 0], stdin=subprocess.DEVNULL,
                        env={**os.environ, **INTERFACE})
                self.ranks.append(RankProcess(self, i, ours, process))
                self.ranks[-1].send(wire.encode(wire.Begin(to_plain(config), i, num_layers, threads)))

    def loaded(self, want: dict[str, str]) -> list[wire.Loaded]:
        """Wait until every rank has its weights. Raises ConfigError: one is not of this engine; RankDied:
        one has not got on for as long as a hang takes."""
        found, limit = [], max(self.timeout_s, LOADING_S)
        for rank in self.ranks:
            while isinstance(message := rank.answer(limit), wire.Loading):
                pass
            assert isinstance(message, wire.Loaded)
            check_identity(rank.index, message.identity, want)
            found.append(message)
        return found

    def vocabulary(self, of: Callable[[], Vocabulary | None], lanes: int) -> None:
        """Tell the lanes of the last stage, which sample. Before `pools`."""
        try:
            found = of()
            words = wire.Words("", [], NO_TOKENIZER) if found is None else wire.Words(
                found.tokenizer, list(found.eos_ids), "")
        except BadGrammar as why:
            words = wire.Words("", [], str(why))
        for rank in self.ranks[-lanes:]:
            rank.send(wire.encode(words))

    def pools(self, core: CoreConfig, host_bytes: int, device_bytes: Sequence[int]) -> None:
        """Every rank has pools of these sizes when this returns."""
        if core.dram_pages:
            os.ftruncate(self._host_fd, host_bytes)
        for fd, size in zip(self._device_fds, device_bytes, strict=False):
            os.ftruncate(fd, size)
        for rank in self.ranks:
            rank.send(wire.encode(wire.Pools(core)))
        for rank in self.ranks:
            message = rank.answer(self.timeout_s)
            assert isinstance(message, wire.Ready)
            self.grammars = message.grammars

    def measured(self) -> list[wire.Memory]:
        """Of each rank on a GPU, one after the other, what its steps so far have taken."""
        found = []
        for rank in self.ranks:
            rank.send(wire.encode(wire.Measure()))
            message = rank.answer(self.timeout_s)
            assert isinstance(message, wire.Memory)
            found.append(message)
        return found

    def seen(self, core: CoreConfig, own: Sequence[Caches]) -> list[list[BlockPool]]:
        """Of an engine of a pair the pools of each rank, over the memory that its rank has."""
        found: list[list[BlockPool]] = []
        for fd, caches in zip(self._device_fds, own, strict=False):
            host = mapped(self._host_fd, caches.host_bytes(core)) if core.dram_pages else None
            device, below = caches.pools(core, host_memory=host,
                                         device_memory=mapped(fd, caches.nbytes(core.hbm_pages)))
            found.append([*device, *below])
        return found

    def host(self, nbytes: int) -> Tensor:
        """The host pool of all ranks, uint8 [nbytes], seen from this process."""
        return mapped(self._host_fd, nbytes)

    def encoded(self, plan: StepPlan) -> bytes:
        """Encoded once, for whichever rank asks first."""
        if self._encoded[0] is not plan:
            self._encoded = plan, wire.encode(wire.Plan(plan))
        return self._encoded[1]

    def wait(self) -> None:
        """Until a rank has reported or died. Raises RankDied when none has for as long as a hang takes."""
        try:
            self.news.get(timeout=self.timeout_s)
        except Empty:
            self.hang([rank for rank in self.ranks if rank.queued] or self.ranks, self.timeout_s)

    def watch(self) -> None:
        """For who waits elsewhere: raises RankDied when plans wait and none was reported for as long as a
        hang takes."""
        now, sent = time.monotonic(), [rank.queued[-1] for rank in self.ranks if rank.queued]
        while not self.news.empty():
            self.news.get_nowait()
            self._news_at = now
        if sent and now - max(self._news_at, *sent) > self.timeout_s:
            self.hang([rank for rank in self.ranks if rank.queued], self.timeout_s)

    def hang(self, hung: Sequence[RankProcess], silent_s: float) -> NoReturn:
        """These have said nothing for so long: their stacks go to stderr. Raises RankDied."""
        for rank in hung:
            print(f"rank {rank.index}: no report for {silent_s:g} s; its stack:",
                  file=sys.stderr, flush=True)
            rank.process.send_signal(signal.SIGUSR2)
            time.sleep(STACK_S)
        names = ", ".join(str(rank.index) for rank in hung)
        raise RankDied(f"rank {names} hangs: no report for {silent_s:g} s") from None

    def stage_of(self, rank: RankProcess) -> int:
        return rank.index // self._lanes

    def computed(self, rank: RankProcess, began: float, ended: float) -> None:
        """Seconds of a step, and those of them in which the stage before computed as well."""
        rank.first = rank.first or began
        rank.busy += ended - began
        rank.steps.append((began, ended))
        n = self._lanes
        for one in (rank.index, rank.index + n):            # whichever of two reports last finds the other
            if n <= one < len(self.ranks):
                other = self.ranks[one - n if one == rank.index else one]
                self.ranks[one].overlap += sum(
                    max(0.0, min(ended, b) - max(began, a)) for a, b in other.steps)

    def tell(self) -> None:
        """A rank has reported, or has gone."""
        self.news.put(None)
        self._wake()

    def fail(self, rank: RankProcess) -> NoReturn:
        """Raises RankDied, with what is known of its end."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            rank.process.wait(1.0)
        code = rank.process.returncode
        how = ("closed its connection" if code is None else
               f"was killed by signal {-code}" if code < 0 else f"exited with code {code}")
        raise RankDied(f"rank {rank.index} (process {rank.process.pid}) {how}")

    def close(self) -> None:
        """End every rank, and wait for it. Idempotent."""
        for rank in self.ranks:
            rank.process.kill()
            rank.process.wait()
        for fd in (*self._device_fds, *([self._host_fd] if self._host_fd >= 0 else [])):
            os.close(fd)
        self._host_fd, self._device_fds = -1, []


def _between(stages: int, lanes: int, until: contextlib.ExitStack) -> list[list[int]]:
    """For each rank its descriptors BEFORE, AFTER, TOKENS and LANES (`process.py`), open until then. A lane
    hands its hidden states to the same lane of the next stage: all have the same."""
    def pair() -> tuple[int, int]:
        a, b = socket.socketpair()
        until.enter_context(a)
        until.enter_context(b)
        return a.fileno(), b.fileno()

    found = [[-1, -1, -1, -1] for _ in range(stages * lanes)]
    for i in range((stages - 1) * lanes):
        found[i][1], found[i + lanes][0] = pair()
    for i in range(lanes if stages > 1 else 0):
        found[i - lanes][2], found[i][2] = pair()
    for first in range(0, len(found) if lanes > 1 else 0, lanes):
        meeting = os.memfd_create("penstock-lanes", os.MFD_CLOEXEC)
        until.callback(os.close, meeting)
        for one in found[first:first + lanes]:
            one[3] = meeting
    return found


def check_identity(index: int, have: dict[str, str], want: dict[str, str]) -> None:
    """Raises ConfigError with both values of the first difference."""
    for name, value in want.items():
        if have.get(name) != value:
            raise ConfigError(f"rank {index} has {name} {have.get(name)!r} and the engine {value!r}: all "
                              "ranks must come from one installation and one checkpoint")
