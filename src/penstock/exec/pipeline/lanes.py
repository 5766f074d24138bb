"""The lanes of a stage in processes of their own: sums and joins over gloo, on the interface of one address,
or over NCCL, where each has a GPU of its own.

Owns the group of connections. A lane that is gone is a ConnectionError for the others, as any neighbour is.

    T tokens of the step   D model dim   B rows   V words
"""
from __future__ import annotations

import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.config.base import machine
from penstock.exec.pipeline.beats import LANES, Waits
from penstock.exec.pipeline.nccl import Communicator, unique_id
from penstock.exec.pipeline.near import Near
from penstock.model.parts import Lane, even


class Meeting(dist.Store):  # type: ignore[misc, name-defined]
    """Where the lanes of a stage find each other: what one sets is sent to the front, which tells the others.
    So no port asks who comes, and no file is left."""

    def __init__(self, tell: Callable[[str, bytes], None]) -> None:
        super().__init__()
        self._tell = tell
        self._known: dict[str, bytes] = {}
        self._news = threading.Condition()

    def heard(self, key: str, value: bytes) -> None:
        """Of another lane, in any thread."""
        with self._news:
            self._known[key] = value
            self._news.notify_all()

    def set(self, key: str, value: bytes) -> None:
        self.heard(key, value)
        self._tell(key, value)

    def get(self, key: str) -> bytes:
        with self._news:
            return self._known[key]                     # it is asked for after a `wait`

    def wait(self, keys: Sequence[str], timeout: timedelta) -> None:
        with self._news:
            if not self._news.wait_for(lambda: all(key in self._known for key in keys),
                                       timeout.total_seconds()):
                raise RuntimeError(f"Timed out: no other lane has come in {timeout.total_seconds():g} s")

    def exchange(self, key: str, value: bytes, lane: Lane, timeout: timedelta) -> list[bytes]:
        """What each lane says, in order; all ask."""
        keys = [f"{key} {i}" for i in range(lane.size)]
        self.set(keys[lane.index], value)
        self.wait(keys, timeout)
        return [self.get(key) for key in keys]


class _Joins(ABC):
    """`join` of `model.base.Lanes`, by a gather."""

    def __init__(self, lane: Lane) -> None:
        self._lane = lane

    @abstractmethod
    def _gather(self, x_BV: Tensor) -> Tensor:
        """[lanes, B, V] of all lanes."""

    def join(self, x_BV: Tensor, num: int) -> Tensor:
        shares = even(num, self._lane.size)
        padded_BV = x_BV.new_zeros(len(x_BV), shares[0])        # the first has the most
        padded_BV[:, :x_BV.shape[1]] = x_BV
        found = self._gather(padded_BV)
        return torch.cat([part[:, :share] for part, share in zip(found, shares, strict=True)], 1)


class GlooLanes(_Joins):
    """`model.base.Lanes`; on a GPU that several lanes share, by way of the host."""

    def __init__(self, meeting: Meeting, lane: Lane, timeout_s: float, host: str, waits: Waits) -> None:
        """host: the address of this machine on which the other lanes connect; returns when all have.
        timeout_s: of one call. waits: are told of."""
        super().__init__(lane)
        self._waits, self._timeout_s = waits, timeout_s
        gloo: Any = dist.ProcessGroupGloo           # its stubs have no members
        options = gloo._Options()
        options._timeout = timedelta(seconds=timeout_s)
        options._devices = [gloo.create_device(hostname=host)]
        self._group = gloo(meeting, lane.index, lane.size, options)

    def add(self, x_TD: Tensor) -> None:
        self._call(lambda: self._group.allreduce([x_TD]))

    def _gather(self, x_BV: Tensor) -> Tensor:
        found = x_BV.new_empty(self._lane.size, *x_BV.shape)
        self._call(lambda: self._group.allgather([list(found)], [x_BV]))
        return found

    def _call(self, begin: Callable[[], Any]) -> None:
        try:
            with self._waits.on(LANES):
                begin().wait()
        except RuntimeError as e:
            if "Timed out" in str(e):
                print(f"lane {self._lane.index} has waited {self._timeout_s:g} s for another of its stage",
                      file=sys.stderr, flush=True)
            raise ConnectionError("another lane is gone, or hangs") from e


class NcclLanes(_Joins):
    """`model.base.Lanes` on GPUs of their own, captured as any kernel is. A lane that is gone leaves the
    others waiting on their devices: the front hears of it, and ends them."""

    def __init__(self, meeting: Meeting, lane: Lane, timeout_s: float, host: str,
                 log: Callable[[str], object]) -> None:
        """Returns when all have come. timeout_s: until the others have. host: as of `GlooLanes`; to another
        machine NCCL finds the interface by itself. log: is told how they add."""
        super().__init__(lane)
        if host == machine.LOOPBACK:
            machine.nccl_on_loopback()
        key, timeout = "nccl", timedelta(seconds=timeout_s)
        if lane.index == 0:
            meeting.set(key, unique_id())
        meeting.wait([key], timeout)
        self._ranks = Communicator(meeting.get(key), lane.index, lane.size)
        self._near = None if host != machine.LOOPBACK else self._nearer(
            lambda key, value: meeting.exchange(key, value, lane, timeout), log)

    def _nearer(self, exchange: Callable[[str, bytes], list[bytes]],
                log: Callable[[str], object]) -> Near | None:
        """For small sums, of lanes of one machine."""
        try:
            near = Near(self._lane, exchange)
        except RuntimeError as e:
            log(f"lanes add by NCCL alone: {e}")
            return None
        log("lanes add small tensors in each other's memory, others by NCCL")
        return near

    def add(self, x_TD: Tensor) -> None:
        if self._near is not None and self._near.takes(x_TD):
            self._near.add(x_TD)
        else:
            self._ranks.add(x_TD)

    def _gather(self, x_BV: Tensor) -> Tensor:
        return self._ranks.gather(x_BV)
