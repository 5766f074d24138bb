"""Pieces of pages as bytes: out of the pools of this process, and into them.

A piece is dense [layers, heads, planes, units, dim], whatever pool it is of.

    P pages   L layers of the rank   K its KV heads   C planes   U units of a page   B bytes of a vector
"""
from __future__ import annotations

import mmap
import threading
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from penstock.core.plan import Group, Tier
from penstock.memory.pinned import Pinned
from penstock.memory.pool import BlockPool
from penstock.transfer.layout import Piece


class PageBytes(Protocol):
    """Where bytes of pages are. Calls come from a link's threads, never two at once for one page."""

    def read(self, tier: Tier, group: Group, page: int, piece: Piece, offset: int, out: memoryview) -> None:
        """The piece of `page`, whose units begin at `offset` in it, into `out` of just its size."""
        ...

    def write(self, tier: Tier, group: Group, page: int, piece: Piece, offset: int,
              data: memoryview) -> None:
        """The reverse. When it returns, `data` may be used for something else."""
        ...

    def pin(self, memory: Tensor) -> object:
        """uint8 [bytes] of the host, which `out` and `data` are to be parts of: a GPU copies from and to it
        as long as what is returned is kept. Raises NotPinned."""
        ...


class PoolPages:
    """Pages over the pools of every rank, all visible in this process."""

    def __init__(self, ranks: Iterable[Iterable[BlockPool]]) -> None:
        """ranks: the pools of each, which say which layers and heads they have; one without layers of a group
        needs no pool of it."""
        self._pools: dict[tuple[Tier, Group], list[tuple[BlockPool, Tensor]]] = {}
        self._staging = threading.local()           # of each thread that reads or writes a GPU's pages
        self._cuda = False
        for pools in ranks:
            for pool in pools:
                if pool.layout.num_layers:
                    self._pools.setdefault((pool.tier, pool.group), []).append(
                        (pool, pool.pages.view(torch.uint8)))
                    self._cuda = self._cuda or pool.pages.is_cuda

    def pin(self, memory: Tensor) -> object:
        if not self._cuda:
            return None
        pinned = Pinned(memory.numel(), mmap.PAGESIZE, memory=memory)
        pinned.wait(memory.numel())
        return pinned

    def read(self, tier: Tier, group: Group, page: int, piece: Piece, offset: int, out: memoryview) -> None:
        """Each head from the first rank that has it."""
        done = 0
        for heads, view, shape in self._views(tier, group, page, piece, offset):
            if heads.stop > done:
                dense = np.frombuffer(out, dtype=np.uint8).reshape(shape)
                if view.is_cuda:
                    self._copy(view, dense[:, heads], up=False)
                else:
                    np.copyto(dense[:, heads], view.numpy())
                done = heads.stop

    def write(self, tier: Tier, group: Group, page: int, piece: Piece, offset: int,
              data: memoryview) -> None:
        """To every rank that has it on its device, and once to the host."""
        for heads, view, shape in self._views(tier, group, page, piece, offset):
            dense = np.frombuffer(data, dtype=np.uint8).reshape(shape)[:, heads]
            if view.is_cuda:
                self._copy(view, dense, up=True)
            else:
                np.copyto(view.numpy(), dense)

    def _copy(self, view: Tensor, dense: np.ndarray[Any, Any], *, up: bool) -> None:
        """Between pages of a GPU and the host; up: to the GPU. It is there when this returns. On a stream of
        its own: no step touches a page that is sent or delivered, and none is waited for. What a GPU does not
        reach, or is not in one piece, goes through pinned memory of this thread's."""
        of = self._staging
        if getattr(of, "streams", None) is None:
            of.streams, of.pinned = {}, None
        if (stream := of.streams.get(view.device)) is None:
            stream = of.streams[view.device] = torch.cuda.Stream(view.device)   # type: ignore[no-untyped-call]
        straight = (dense.flags.c_contiguous and dense.flags.writeable
                    and (host := torch.from_numpy(dense)).is_pinned())
        if not straight:
            if of.pinned is None or of.pinned.numel() < view.numel():
                of.pinned = torch.empty(1 << view.numel().bit_length(), dtype=torch.uint8, pin_memory=True)
            host = of.pinned[:view.numel()].view(view.shape)
        if up and not straight:
            np.copyto(host.numpy(), dense)
        with torch.cuda.stream(stream):
            if up:
                view.copy_(host, non_blocking=True)
            else:
                host.copy_(view, non_blocking=True)
        stream.synchronize()
        if not (up or straight):
            np.copyto(dense, host.numpy())

    def _views(self, tier: Tier, group: Group, page: int, piece: Piece, offset: int) \
            -> Iterator[tuple[slice, Tensor, tuple[int, ...]]]:
        """Of each rank that has these layers: its heads, uint8 [layers, their number, C, units, B] of them,
        and the shape of the whole piece. In the order of heads, all of them; of the same memory once."""
        done = 0
        for pool, bytes_PLKCUB in self._pools[tier, group]:
            layer, whole = piece.layer - pool.part.layer, pool.part.whole
            if pool.writes and 0 <= layer and layer + piece.layers <= pool.layout.num_layers:
                heads = slice(pool.part.head, pool.part.head + pool.layout.num_kv_heads)
                view = bytes_PLKCUB[pool.index(page), layer:layer + piece.layers, :, :,
                                    offset:offset + piece.units]
                assert heads.start <= done, f"no rank has head {done} of {piece}"
                done = heads.stop
                yield heads, view, (len(view), whole.num_kv_heads, *view.shape[2:])
        assert done, f"no rank has all layers of {piece}"
