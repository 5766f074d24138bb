"""Pieces of pages as bytes: out of the pools of this process, and into them.

A piece is dense [layers, heads, planes, units, dim] page by page, whatever pool it is of.

    P pages   L layers of the rank   K its KV heads   C planes   U units of a page   B bytes of a vector
"""
from __future__ import annotations

import math
import mmap
import threading
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from penstock.core.plan import Group, Tier
from penstock.memory.pinned import Pinned
from penstock.memory.pool import BlockPool

_Array: TypeAlias = np.ndarray[Any, Any]
_Bytes: TypeAlias = Tensor | _Array         # uint8, of a GPU and of the host
_Pair: TypeAlias = tuple[_Bytes, _Array]    # in pages and in the piece


class Span(NamedTuple):
    """Units `offset` to `offset + units` of a page."""

    page: int
    offset: int
    units: int


class PageBytes(Protocol):
    """Where bytes of pages are. Calls come from a link's threads, never two at once for one page."""

    def read(self, tier: Tier, group: Group, layers: range, spans: Sequence[Span], out: memoryview,
             heads: range | None = None) -> None:
        """These layers of each span into `out` of just their size, one span after the other, each dense. heads:
        of them; None: all."""
        ...

    def write(self, tier: Tier, group: Group, layers: range, spans: Sequence[Span], data: memoryview,
              heads: range | None = None) -> None:
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
        self._pools: dict[tuple[Tier, Group], list[tuple[BlockPool, _Bytes]]] = {}
        self._staging = threading.local()           # of each thread that reads or writes a GPU's pages
        self._cuda = False
        for pools in ranks:
            for pool in pools:
                if pool.layout.num_layers:
                    pages = pool.pages.view(torch.uint8)
                    self._pools.setdefault((pool.tier, pool.group), []).append(
                        (pool, pages if pages.is_cuda else pages.numpy()))
                    self._cuda = self._cuda or pages.is_cuda

    def pin(self, memory: Tensor) -> object:
        if not self._cuda:
            return None
        pinned = Pinned(memory.numel(), mmap.PAGESIZE, memory=memory)
        pinned.wait(memory.numel())
        return pinned

    def read(self, tier: Tier, group: Group, layers: range, spans: Sequence[Span], out: memoryview,
             heads: range | None = None) -> None:
        """Each head from the first rank that has it."""
        done = 0
        copies: list[_Pair] = []
        for own, pairs in self._views(tier, group, layers, spans, out, heads):
            if own.stop > done:
                copies += pairs
                done = own.stop
        self._copy(copies, up=False)

    def write(self, tier: Tier, group: Group, layers: range, spans: Sequence[Span], data: memoryview,
              heads: range | None = None) -> None:
        """To every rank that has it on its device, and once to the host."""
        self._copy([pair for _, pairs in self._views(tier, group, layers, spans, data, heads) for pair in pairs],
                   up=True)

    def _copy(self, pairs: Sequence[_Pair], *, up: bool) -> None:
        """up: into the pages. All of it is there when this returns."""
        of_device: dict[torch.device, list[tuple[Tensor, _Array]]] = {}
        for view, dense in pairs:
            if isinstance(view, Tensor):
                of_device.setdefault(view.device, []).append((view, dense))
            elif up:
                np.copyto(view, dense)
            else:
                np.copyto(dense, view)
        for device, on_device in of_device.items():
            self._copy_device(device, on_device, up=up)

    def _copy_device(self, device: torch.device, pairs: Sequence[tuple[Tensor, _Array]], *, up: bool) -> None:
        """Between pages of a GPU and the host, launched by one call, so that other threads have the
        interpreter meanwhile. On a stream of its own: no step touches a page that is sent or delivered, and
        none is waited for. What a GPU does not reach, or is not in one piece, goes through pinned memory of
        this thread's."""
        of = self._staging
        if getattr(of, "streams", None) is None:
            of.streams, of.pinned = {}, None
        if (stream := of.streams.get(device)) is None:
            stream = of.streams[device] = torch.cuda.Stream(device)     # type: ignore[no-untyped-call]
        views = [view for view, _ in pairs]
        first = pairs[0][1]
        straight = (first.flags.writeable and all(dense.flags.c_contiguous for _, dense in pairs)
                    and torch.from_numpy(first).is_pinned())
        if straight:
            hosts = [torch.from_numpy(dense) for _, dense in pairs]
        else:
            hosts = self._pinned(views)
        if up and not straight:
            for host, (_, dense) in zip(hosts, pairs, strict=True):
                np.copyto(host.numpy(), dense)
        with torch.cuda.stream(stream):
            torch._foreach_copy_(*((views, hosts) if up else (hosts, views)), non_blocking=True)
        stream.synchronize()
        if not (up or straight):
            for host, (_, dense) in zip(hosts, pairs, strict=True):
                np.copyto(dense, host.numpy())

    def _pinned(self, views: Sequence[Tensor]) -> list[Tensor]:
        """Pinned memory of this thread's of just these shapes."""
        of, ends = self._staging, list(accumulate(view.numel() for view in views))
        if of.pinned is None or of.pinned.numel() < ends[-1]:
            of.pinned = torch.empty(1 << ends[-1].bit_length(), dtype=torch.uint8, pin_memory=True)
        return [of.pinned[end - view.numel():end].view(view.shape) for view, end in zip(views, ends, strict=True)]

    def _views(self, tier: Tier, group: Group, layers: range, spans: Sequence[Span], data: memoryview,
               heads: range | None) -> Iterator[tuple[slice, list[_Pair]]]:
        """Return, for each rank that has some of these heads of these layers: which of them, and uint8 [P, layers,
        their number, C, units, B] in its pages and in `data`. In the order of heads, all of them; of the same memory
        once."""
        done, whole_data = 0, np.frombuffer(data, dtype=np.uint8)
        for pool, pages in self._pools[tier, group]:
            layer, whole = layers.start - pool.part.layer, pool.part.whole
            if not (pool.writes and 0 <= layer and layer + len(layers) <= pool.layout.num_layers):
                continue
            wanted = range(whole.num_kv_heads) if heads is None else heads
            begin_head = max(wanted.start, pool.part.head)
            end_head = min(wanted.stop, pool.part.head + pool.layout.num_kv_heads)
            if begin_head >= end_head:
                continue
            own = slice(begin_head - wanted.start, end_head - wanted.start)
            in_pool = slice(begin_head - pool.part.head, end_head - pool.part.head)
            assert own.start <= done, f"no rank has head {done} of {layers}"
            done, at = own.stop, 0
            pairs: list[_Pair] = []
            # A GPU copies what is in one piece at both ends without a kernel: not pages with a gap between.
            joined = not isinstance(pages, Tensor) or pages.is_contiguous()
            begin, view = (-1, -1), pages
            for (page, offset, units), n in _runs(spans, joined):
                if begin != (offset, units):
                    begin = offset, units
                    view = pages[:, layer:layer + len(layers), in_pool, :, offset:offset + units]
                first = pool.index(page)
                pool.index(page + n - 1)
                shape = n, len(layers), len(wanted), *view.shape[3:]
                size = math.prod(shape)
                pairs.append((view[first:first + n], whole_data[at:at + size].reshape(shape)[:, :, own]))
                at += size
            assert at == len(whole_data), f"{len(whole_data)} bytes for {at} of {layers}"
            yield own, pairs
        assert done, f"no rank has all layers of {layers}"


def _runs(spans: Sequence[Span], joined: bool) -> Iterator[tuple[Span, int]]:
    """The first of each run of spans that are alike in pages one behind the other, and their number; not
    joined: each alone."""
    begin = 0
    for end in range(1, len(spans) + 1):
        if joined and end < len(spans) and spans[end] == spans[end - 1]._replace(page=spans[end - 1].page + 1):
            continue
        yield spans[begin], end - begin
        begin = end
