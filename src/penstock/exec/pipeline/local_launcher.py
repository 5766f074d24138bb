"""The ranks of one machine as processes: started by exec, with the memory and the sockets between them.

Owns both, and the ends of links that lead to another machine. Knows no message.
"""
from __future__ import annotations

import contextlib
import os
import socket
import subprocess
from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.config.base import child, machine
from penstock.config.settings.tree import Config
from penstock.core.settings import CoreConfig
from penstock.exec.load.layout import Caches
from penstock.exec.pipeline.nodes import AFTER, BEFORE, TOKENS
from penstock.memory.across import opened
from penstock.memory.dram import mapped
from penstock.memory.pool import BlockPool

Wire = tuple[tuple[int, int], tuple[int, int]]


def wires(stages: int, tp_size: int) -> list[Wire]:
    """The links between ranks, each as two ends: a rank, and BEFORE, AFTER or TOKENS. A TP rank hands its hidden
    states to the same TP rank of the next stage: all have the same. Sampled tokens go from the last stage to the
    first."""
    ranks = stages * tp_size
    return [*(((i, AFTER), (i + tp_size, BEFORE)) for i in range(ranks - tp_size)),
            *(((ranks - tp_size + i, TOKENS), (i, TOKENS)) for i in range(tp_size if stages > 1 else 0))]


def gpus_here(config: Config, engine: int) -> list[int]:
    """Of the GPUs that this process sees those of this engine's ranks, by number; none on a CPU."""
    return config.gpus_of(engine, torch.cuda.device_count()) if config.device.device == "cuda" else []


class LocalRanks:
    """`mine` of all ranks. executor_ends: our ends of their sockets to the executor. outside: of links to ranks
    elsewhere our ends, by rank and BEFORE, AFTER or TOKENS. gpus: of those that this process sees the number
    of the one that each sees, none on a CPU."""

    def __init__(self, config: Config, mine: range, engine: int = 0) -> None:
        """Starts a process for each. Of an engine of a pair this process sees device pools too. engine: which
        one of those that have ranks here and see the same GPUs."""
        self.mine = mine
        own = gpus_here(config, engine)
        self.gpus = [own[at % len(own)] for at in range(len(mine))] if own else []
        self.executor_ends: list[socket.socket] = []
        self.processes: list[subprocess.Popen[bytes]] = []
        self.outside: dict[tuple[int, int], socket.socket] = {}
        # It has no name: it goes with the last process that has mapped it.
        self._host_fd = os.memfd_create("penstock-host", os.MFD_CLOEXEC)
        self._sees_devices = config.pair.disaggregation_mode is not None
        self._device_fds = [os.memfd_create("penstock-device", os.MFD_CLOEXEC) for _ in mine
                            if self._sees_devices and not self.gpus]
        with contextlib.ExitStack() as until_started:
            ends = self._between(config, until_started)
            for at, i in enumerate(mine):
                ours, theirs = socket.socketpair()
                device = self._device_fds[at] if self._device_fds else -1
                fds = [theirs.fileno(), self._host_fd, device,
                       *(ends.get((i, slot), -1) for slot in (BEFORE, AFTER, TOKENS))]
                with theirs:
                    self.processes.append(child.start(
                        child.module("penstock.exec.pipeline.process", *fds), fds,
                        env=machine.of_gpus([self.gpus[at]]) if self.gpus else None))
                self.executor_ends.append(ours)

    def _between(self, config: Config, until: contextlib.ExitStack) -> dict[tuple[int, int], int]:
        """Descriptors of the ends that ranks of this machine have, open until then."""
        found = {}
        for one, other in wires(config.device.pp, config.device.tp):
            here = [end for end in (one, other) if end[0] in self.mine]
            if not here:
                continue
            pair = socket.socketpair()
            for end, sock in zip(here, pair, strict=False):
                found[end] = until.enter_context(sock).fileno()
            if len(here) == 1:
                self.outside[here[0]] = pair[1]
        return found

    def make_room(self, core: CoreConfig, own: Sequence[Caches]) -> None:
        """For pools of these sizes. own: of each of its ranks."""
        if core.dram_pages:
            os.ftruncate(self._host_fd, own[0].host_bytes(core))
        for fd, caches in zip(self._device_fds, own, strict=False):
            os.ftruncate(fd, caches.nbytes(core.hbm_pages))

    def seen(self, core: CoreConfig, own: Sequence[Caches],
             handles: Sequence[bytes]) -> list[list[BlockPool]]:
        """The pools of each rank over the memory that it has: on the host, and of an engine of a pair on its
        device. handles: of each rank's memory on a GPU."""
        found: list[list[BlockPool]] = []
        for i, caches in enumerate(own):
            pools: list[BlockPool] = []
            if self._sees_devices:
                nbytes = caches.nbytes(core.hbm_pages)
                pools += caches.device_pools(core, opened(handles[i], nbytes, self.gpus[i]) if self.gpus else
                                             mapped(self._device_fds[i], nbytes))
            if core.dram_pages:
                pools += caches.host_pools(core, self.host(caches.host_bytes(core)))
            found.append(pools)
        return found

    def host(self, nbytes: int) -> Tensor:
        """The host pool of all of them, uint8 [nbytes], seen from this process."""
        return mapped(self._host_fd, nbytes)

    def close(self) -> None:
        """End every rank, and wait for it. Idempotent."""
        for process in self.processes:
            child.end(process)
        for fd in (*self._device_fds, *([self._host_fd] if self._host_fd >= 0 else [])):
            os.close(fd)
        self._host_fd, self._device_fds = -1, []
