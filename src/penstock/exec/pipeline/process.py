"""One rank in a process: `... -m penstock.exec.pipeline.process EXECUTOR HOST DEVICE BEFORE AFTER TOKENS`.

The arguments are descriptors: the socket to the executor, the memory of the host pool (-1: none), that of the
device pools where the executor must see them (-1: it need not), the
sockets from the stage before and to the one after (-1: none), and the way of sampled tokens, which leads
from the last stage to the first (-1 between them). Loads its part, then does what the executor says, until
the executor is gone: it has no life of its own. Exit codes: 0 orphaned, 2 configuration, 70 our bug.
"""
from __future__ import annotations

import faulthandler
import math
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from queue import Empty, SimpleQueue
from typing import NoReturn

import torch

from penstock.config.base import machine
from penstock.config.base.errors import ConfigError
from penstock.config.settings.plain import from_plain
from penstock.config.streams.heartbeat import Heartbeat
from penstock.core.plan import Moved
from penstock.core.settings import CoreConfig
from penstock.exec.load.weights import identity_of, load
from penstock.exec.pipeline import wire
from penstock.exec.pipeline.collectives import GlooGroup, NcclGroup, Rendezvous
from penstock.exec.pipeline.hangs import BEAT_S, EXECUTOR, STAGE, Waits
from penstock.exec.pipeline.sockets import (
    SAMPLED,
    Inbox,
    LinkChannel,
    PutBoundary,
    PutSampled,
    Taker,
    TokenInbox,
    boundaries,
    sampled,
)
from penstock.exec.sampling.grammar import BadGrammar, Grammars, Vocabulary
from penstock.exec.start.memory_use import MemoryUse
from penstock.exec.start.rank import Rank
from penstock.exec.step.links import Links, nodes_of, of_config
from penstock.exec.worker import Report, Stepped, Worker
from penstock.memory.across import allocated
from penstock.memory.dram import mapped
from penstock.memory.pinned import NotPinned
from penstock.model.base import Boundary

EXIT_CONFIG, EXIT_BUG = 2, 70
TP_SHARE = 0.8            # of the time after which a rank hangs: who waits for another TP rank says so before
COUNTERS_S = 0.2            # between two of its Counters


class _StepEnded:
    """The oldest step in flight on the device has ended."""


class Process:
    """The rank, and its inbox: messages of the executor, None when a copy has ended, and Landed."""

    def __init__(self, fds: list[int]) -> None:
        self._executor = wire.Channel(socket.socket(fileno=fds[0]), wire.TO_RANK)
        self._fds = fds
        self._inbox: SimpleQueue[wire.ToRank | _StepEnded | None] = SimpleQueue()
        self._flights: SimpleQueue[torch.cuda.Event] = SimpleQueue()        # to be waited for
        self._awaits = False                    # a Landed is to come
        self._waits = Waits()
        self._rendezvous = Rendezvous(lambda key, value: self.send(wire.RendezvousKey(key, value)))
        self._rank: Worker | None = None
        self._grammars: Grammars | None = None
        self._queued = 0                        # plans that have not run
        self._ended = 0                         # steps that have,
        self._computed = deque[tuple[float, float]]()       # and when, of those that are not told
        self._uncounted = False                 # something was reported since its counters were told
        self._count_at = 0.0                    # when they may be told again
        threading.Thread(target=self._listen, daemon=True, name="penstock-executor").start()
        Heartbeat(math.inf, BEAT_S).begin(
            lambda: self.send(wire.RankBeat(*self._waits.now, self._on_device())))

    @property
    def runs(self) -> bool:
        """Whether everything is loaded: a failure from now on is none of the start."""
        return self._rank is not None

    def _listen(self) -> None:
        while (message := self._executor.receive()) is not None:
            if isinstance(message, wire.RendezvousKey):
                self._rendezvous.heard(message.key, message.value)
            else:
                self._inbox.put(message)
        os._exit(0)                             # the executor is gone, and what it wanted with it

    def _on_device(self) -> int:
        """See `hangs.RankStatus.step`. In the thread of beats: the one that runs steps may be in a launch."""
        rank, ended = self._rank, self._ended
        try:
            event = None if rank is None else rank.flying
            ended_too = event is None or bool(event.query())  # type: ignore[no-untyped-call]
            return 0 if ended_too else ended + 1
        except IndexError:                      # it has just ended, between two looks at the flights
            return 0
        except RuntimeError:                    # the device is broken, which who waits for the step meets
            return 0

    def send(self, message: wire.FromRank) -> None:
        try:
            self._executor.send(wire.FROM_RANK.frames(message))
        except ConnectionError:
            os._exit(0)

    def load(self) -> None:
        """Raises ConfigError."""
        begin = self._inbox.get()
        assert isinstance(begin, wire.Begin)
        self._index = begin.index
        config = self._config = from_plain(begin.config)
        parts = of_config(config, begin.num_layers)
        stage = parts[begin.index]
        node = next(ranks for ranks in nodes_of(config) if begin.index in ranks)
        torch.set_num_threads(1)
        _, _, _, before, after, tokens = self._fds
        timeout_s = TP_SHARE * config.device.step_timeout_s
        tp_group = (None if stage.tp_rank.size == 1 else
                 NcclGroup(self._rendezvous, stage.tp_rank, timeout_s, begin.host, self._log) if begin.alone else
                 GlooGroup(self._rendezvous, stage.tp_rank, timeout_s, begin.host, self._waits))
        self._use = MemoryUse(cuda=config.device.device == "cuda")
        self._loaded = load(config, stage, self._log, tp_group)
        self._use.took("weights")
        torch.set_num_threads(begin.threads)
        layout = self._loaded.layout
        self._own = layout.caches.stage(stage, layout.groups, [parts[i] for i in node])
        self._device = config.device.device
        self._before = None if before < 0 else self._from(_channel(before), near=begin.alone and
                                                          begin.index - config.device.tp in node)
        way = None if tokens < 0 else _channel(tokens)
        tp_size, near = config.device.tp, self._device == "cuda" and begin.alone
        tell = PutSampled(way) if way and stage.heads else None
        sees = (TokenInbox(way, config.schedule.max_num_seqs + 1) if way and stage.embeds and near
                and len(node) == len(parts) else None)
        shows = tell is not None and near and len(node) == len(parts) and tell.reach()
        reached = sees is not None and sees.reached()           # before anything else comes this way
        self._links = links = Links(
            before=self._before, after=None if after < 0 else PutBoundary(
                _channel(after), near=near and begin.index + tp_size in node),
            tell=tell, hear=Taker(sampled(way), self._waits) if way and stage.embeds else None,
            shows=tell.show if tell is not None and shows else None, sees=sees if reached else None)
        if self._device == "cuda":
            threading.Thread(target=self._land, daemon=True, name="penstock-landing").start()
        self._pools = Rank(config, self._loaded, layout, self._own, self._use,
                           lambda: self._inbox.put(None), links=links)
        self.send(wire.Loaded(identity_of(self._loaded), self._loaded.bytes, self._loaded.peak,
                              machine.probe().memory_available))

    def _from(self, channel: LinkChannel, near: bool) -> Taker[Boundary]:
        """What the stage in front sends. near: that is on another GPU of this machine."""
        model, dtype, inbox = self._loaded.model, self._loaded.dtype, None
        if near and self._device == "cuda":
            row_bytes = model.handed * dtype.itemsize + 4 * (model.selector.top_k if model.selector else 0)
            inbox = Inbox(channel, self._config.schedule.num_step_tokens * row_bytes)
        return Taker(boundaries(channel, dtype, self._device, inbox), self._waits, inbox,
                     None if inbox is None else lambda: self._inbox.put(None))

    def _land(self) -> None:
        """Waits for steps in a thread of its own: the next plan is launched meanwhile."""
        while True:
            event = self._flights.get()
            try:
                event.synchronize()
            finally:
                self._inbox.put(_StepEnded())       # after an error too, which `collect` then meets

    def _flies(self) -> bool:
        """Whether a step is on the device, whose end the inbox tells."""
        event = None if self._rank is None else self._rank.flying
        if event is not None and not self._awaits:
            self._awaits = True
            self._flights.put(event)
        return event is not None

    def _log(self, line: object) -> None:
        # In one piece, also where nothing is buffered: other ranks write there too.
        print(f"rank {self._index}: {line}\n", end="", file=sys.stderr, flush=True)
        self.send(wire.Loading())

    def _make_pools(self, core: CoreConfig, *, capture: bool, serves: bool) -> None:
        self._drop()
        host = mapped(self._fds[1], self._own.host_bytes(core)) if core.dram_pages else None
        nbytes, handle = self._own.nbytes(core.hbm_pages), b""
        device = mapped(self._fds[2], nbytes) if self._fds[2] >= 0 else None
        if self._device == "cuda" and self._config.pair.disaggregation_mode:
            device, handle = allocated(nbytes)
        # Of each TP rank as many steps are captured, however long they take.
        self._rank = self._pools.pools(core, capture=capture, serves=serves, host=host, device=device,
                                       outside=nbytes if handle else 0, seconds=0.0)
        if serves and (line := self._use.ended()):
            self._log(line)
        self._count()
        self.send(wire.Ready(handle, self._use.parts, self._rank.uncaptured))

    def _drop(self) -> None:
        self._rank = None
        self._pools.drop()

    def _measure(self, capture: bool) -> None:
        self._rank = None
        [told] = self._pools.measured(capture=capture)
        self.send(wire.RankMemory(told.total, torch.cuda.mem_get_info()[0], told.workspace))     # of all by now

    def run(self) -> NoReturn:
        """Messages as they come, steps when there is nothing else; waits in the kernel."""
        while True:
            late = max(0.0, self._count_at - time.monotonic()) if self._uncounted else None
            try:
                message = self._next(late)
            except Empty:
                if self._queued:
                    self._collect()
                else:
                    self._count()
            else:
                self._handle(message)

    def _next(self, late: float | None) -> wire.ToRank | _StepEnded | None:
        """Raises Empty: nothing has come, and a step waits or `late` seconds are over."""
        if self._queued and self._rank is not None and self._rank.awaits:
            with self._waits.on(STAGE):
                return self._inbox.get()
        if self._queued:
            return self._inbox.get(block=self._flies())
        with self._waits.on(EXECUTOR):
            return self._inbox.get(timeout=late)

    def _handle(self, message: wire.ToRank | _StepEnded | None) -> None:
        if message is None:
            self._collect_ended()
            return
        if isinstance(message, _StepEnded):
            self._awaits = False
            self._collect()
            return
        if isinstance(message, wire.Words):
            words = message

            def vocabulary() -> Vocabulary:
                if words.missing:
                    raise BadGrammar(words.missing)
                return Vocabulary(words.tokenizer, tuple(words.eos_ids))

            self._grammars = self._pools.grammars = Grammars(vocabulary)
            self._grammars.begin()
            return
        if isinstance(message, wire.Pools):
            self._make_pools(message.core, capture=message.capture, serves=message.serves)
            return
        if isinstance(message, wire.Measure):
            self._measure(message.capture)
            return
        rank = self._rank
        assert rank is not None, f"{type(message).__name__} before Pools"
        match message:
            case wire.Compile(grammar):
                assert self._grammars is not None, "Compile before Words"
                self._grammars.told(grammar, lambda: self.send(wire.Compiled(grammar)))
            case wire.Open(rid, prompt, params, choice, stop_ids):
                rank.open(rid, tuple(prompt), params, choice=choice, stop_ids=tuple(stop_ids))
            case wire.Close(rid):
                rank.close(rid)
            case wire.Given(rid, tokens):
                rank.given(rid, tokens)
            case wire.Checked(step, rows, right):
                rank.checked(step, dict(zip(rows, right, strict=True)))
                self._collect_ended()
            case wire.Plan(plan):
                rank.start(plan)
                self._queued += 1
            case _:
                raise AssertionError(f"{type(message).__name__} to a rank that runs")

    def _collect(self) -> None:
        """The oldest plan, then what its copies and earlier ones have come to."""
        assert self._rank is not None
        began = time.monotonic()
        reports = self._rank.collect(block=True)
        self._queued -= 1
        self._ended += 1
        if self._before is not None:
            began = max(began, self._before.taken_at)
        if isinstance(self._links.hear, Taker):
            began = max(began, self._links.hear.taken_at)
        self._computed.append((began, time.monotonic()))
        self._report(reports)

    def _collect_ended(self) -> None:
        """What has ended beside a plan: copies, and steps whose states waited."""
        if self._rank is not None and (reports := self._rank.collect(block=False)):
            self._report(reports)

    def _report(self, reports: Sequence[Report]) -> None:
        """What a step has waited for is told before it."""
        steps = [i for i, report in enumerate(reports) if isinstance(report, Stepped)]
        for first, end in pairwise((0, *steps, len(reports))):
            if first < end:
                stepped = [r for r in reports[first:end] if isinstance(r, Stepped)]
                self.send(wire.Reports(stepped, [r for r in reports[first:end] if isinstance(r, Moved)],
                                       *(self._computed.popleft() if stepped else ())))
        self._uncounted = True
        if time.monotonic() >= self._count_at:
            self._count()

    def _count(self) -> None:
        """Tell the counters, which nobody waits for."""
        assert self._rank is not None
        self.send(wire.Counters(self._rank.stats()))
        self._uncounted, self._count_at = False, time.monotonic() + COUNTERS_S


def _channel(fd: int) -> LinkChannel:
    return LinkChannel(socket.socket(fileno=fd), SAMPLED)


def main(argv: list[str]) -> NoReturn:
    # As the engine process: who ends this one is the executor, by going.
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(ignored, signal.SIG_IGN)
    faulthandler.register(signal.SIGUSR2, all_threads=True)     # the executor's watchdog asks for it
    process = Process([int(a) for a in argv])
    try:
        process.load()
        process.run()
    except (ConfigError, NotPinned) as e:
        process.send(wire.StageRefused(str(e)))
        os._exit(EXIT_CONFIG)
    except torch.OutOfMemoryError as e:
        print(e, file=sys.stderr, flush=True)
        process.send(wire.StageRefused(
            "a stage, its KV and its largest step do not fit into what is left of the GPU's memory: lower "
            "--gpu-memory-utilization, --max-num-batched-tokens or --max-num-seqs"))
        os._exit(EXIT_CONFIG)
    except ConnectionError:
        threading.Event().wait()        # a neighbour is gone: the executor hears of it, and goes itself
    except BaseException as e:
        why = None if process.runs else machine.why_no_memory(e)
        if why is None:
            traceback.print_exc()
        else:
            print(f"rank: the start failed: {why}", file=sys.stderr, flush=True)
        os._exit(EXIT_BUG)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
