"""The TP ranks of a stage in processes of their own: sums and joins over gloo, on the interface of one address,
or over NCCL, where each has a GPU of its own.

Owns the group of connections. A TP rank that is gone is a ConnectionError for the others, as any neighbour is.

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
from penstock.exec.pipeline.hangs import TP_RANKS, Waits
from penstock.exec.pipeline.nccl import Communicator, unique_id
from penstock.exec.pipeline.p2p_allreduce import P2PAllReduce
from penstock.model.parts import TpRank, even


class Rendezvous(dist.Store):  # type: ignore[misc, name-defined]
    """Where the TP ranks of a stage find each other: what one sets is sent to the executor, which tells the others.
    So no port asks who comes, and no file is left."""

    def __init__(self, tell: Callable[[str, bytes], None]) -> None:
        super().__init__()
        self._tell = tell
        self._known: dict[str, bytes] = {}
        self._news = threading.Condition()

    def heard(self, key: str, value: bytes) -> None:
        """Of another TP rank, in any thread."""
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
                raise RuntimeError(f"Timed out: no other TP rank has come in {timeout.total_seconds():g} s")

    def exchange(self, key: str, value: bytes, tp_rank: TpRank, timeout: timedelta) -> list[bytes]:
        """What each TP rank says, in order; all ask."""
        keys = [f"{key} {i}" for i in range(tp_rank.size)]
        self.set(keys[tp_rank.index], value)
        self.wait(keys, timeout)
        return [self.get(key) for key in keys]


class _AllGather(ABC):
    """`all_gather` of `model.base.TpGroup`, by a gather."""

    def __init__(self, tp_rank: TpRank) -> None:
        self._tp_rank = tp_rank

    @abstractmethod
    def _gather(self, x_BV: Tensor) -> Tensor:
        """[TP ranks, B, V] of all TP ranks."""

    def all_gather(self, x_BV: Tensor, num: int) -> Tensor:
        shares = even(num, self._tp_rank.size)
        padded_BV = x_BV.new_zeros(len(x_BV), shares[0])        # the first has the most
        padded_BV[:, :x_BV.shape[1]] = x_BV
        found = self._gather(padded_BV)
        return torch.cat([part[:, :share] for part, share in zip(found, shares, strict=True)], 1)


class GlooGroup(_AllGather):
    """`model.base.TpGroup`; on a GPU that several TP ranks share, by way of the host."""

    def __init__(self, rendezvous: Rendezvous, tp_rank: TpRank, timeout_s: float, host: str, waits: Waits) -> None:
        """host: the address of this machine on which the other TP ranks connect; returns when all have.
        timeout_s: of one call. waits: are told of."""
        super().__init__(tp_rank)
        self._waits, self._timeout_s = waits, timeout_s
        gloo: Any = dist.ProcessGroupGloo           # its stubs have no members
        options = gloo._Options()
        options._timeout = timedelta(seconds=timeout_s)
        options._devices = [gloo.create_device(hostname=host)]
        self._group = gloo(rendezvous, tp_rank.index, tp_rank.size, options)

    def all_reduce(self, x_TD: Tensor) -> None:
        self._call(lambda: self._group.allreduce([x_TD]))

    def _gather(self, x_BV: Tensor) -> Tensor:
        found = x_BV.new_empty(self._tp_rank.size, *x_BV.shape)
        self._call(lambda: self._group.allgather([list(found)], [x_BV]))
        return found

    def _call(self, begin: Callable[[], Any]) -> None:
        try:
            with self._waits.on(TP_RANKS):
                begin().wait()
        except RuntimeError as e:
            if "Timed out" in str(e):
                print(f"TP rank {self._tp_rank.index} has waited {self._timeout_s:g} s for another of its stage",
                      file=sys.stderr, flush=True)
            raise ConnectionError("another TP rank is gone, or hangs") from e


class NcclGroup(_AllGather):
    """`model.base.TpGroup` on GPUs of their own, captured as any kernel is. A TP rank that is gone leaves the
    others waiting on their devices: the executor hears of it, and ends them."""

    def __init__(self, rendezvous: Rendezvous, tp_rank: TpRank, timeout_s: float, host: str,
                 log: Callable[[str], object]) -> None:
        """Returns when all have come. timeout_s: until the others have. host: as of `GlooGroup`; to another
        machine NCCL finds the interface by itself. log: is told how they add."""
        super().__init__(tp_rank)
        if host == machine.LOOPBACK:
            machine.nccl_on_loopback()
        key, timeout = "nccl", timedelta(seconds=timeout_s)
        if tp_rank.index == 0:
            rendezvous.set(key, unique_id())
        rendezvous.wait([key], timeout)
        self._ranks = Communicator(rendezvous.get(key), tp_rank.index, tp_rank.size)
        self._near = None if host != machine.LOOPBACK else self._nearer(
            lambda key, value: rendezvous.exchange(key, value, tp_rank, timeout), log)

    def _nearer(self, exchange: Callable[[str, bytes], list[bytes]],
                log: Callable[[str], object]) -> P2PAllReduce | None:
        """For small sums, of TP ranks of one machine."""
        try:
            near = P2PAllReduce(self._tp_rank, exchange)
        except RuntimeError as e:
            log(f"TP ranks add by NCCL alone: {e}")
            return None
        log("TP ranks add small tensors in each other's memory, others by NCCL")
        return near

    def all_reduce(self, x_TD: Tensor) -> None:
        if self._near is not None and self._near.takes(x_TD):
            self._near.all_reduce(x_TD)
        else:
            self._ranks.all_reduce(x_TD)

    def _gather(self, x_BV: Tensor) -> Tensor:
        return self._ranks.gather(x_BV)
