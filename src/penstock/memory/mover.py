"""Executes Moves: whole pages, or their first tokens, between two tiers of this node.

Owns the moves that have not reported yet, and their counters. Knows steps only as fences: a copy
starts after step `after` and after the step that carried it, or before that one if it waits for the copy,
and ends in exactly one Moved.
"""
from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from penstock.core.plan import Group, Move, Moved, MoveId, StepId, Tier
from penstock.memory.copying import Copied, Copier, CopyThread
from penstock.memory.lateness import Lateness, Promptly
from penstock.memory.pool import PagePool


@dataclass(slots=True)
class Traffic:
    """Copies of one direction: how many, how many failed, bytes moved, seconds spent copying."""

    moves: int = 0
    failed: int = 0
    bytes: int = 0
    seconds: float = 0.0


# Of each copy its cache group and, in order, an event behind each of the `parts_of` its layers.
Arrivals: TypeAlias = list[tuple[Group, Sequence[torch.cuda.Event]]]
_BEGUN_S = 0.0005           # between two looks whether the thread has begun a copy that was handed to it


class Mover:
    """Copies between the pools of a cache group, which have one layout in every tier.

    lateness   None, as in production: copies run promptly, in plan order, in a thread beside the
               steps. Otherwise those that it picks run inline in `run`: tests are deterministic.

    The bytes need no lock. A copy reads only pages whose producers have retired, which is its
    fence, and which the core lets no step overwrite before Moved; it writes only pages that the
    core lets no step read or write before Moved. What is left between the threads are two
    SimpleQueues, whose put comes before the get: a copy sees what was written before it was
    started, and the receiver of its Moved sees what it copied.
    """

    def __init__(self, pools: Iterable[PagePool], lateness: Lateness | None = None,
                 wake: Callable[[], None] | None = None) -> None:
        """wake: called in the thread whenever a copy has ended."""
        self._pools: dict[tuple[Tier, Group], PagePool] = {(p.tier, p.group): p for p in pools}
        self._layouts = {p.group: p.layout for p in self._pools.values()}
        for p in self._pools.values():
            assert p.layout == self._layouts[p.group], (
                f"group {p.group}: {p.layout} and {self._layouts[p.group]}")
        self._lateness: Lateness = Promptly() if lateness is None else lateness
        self._copy = Copier(self._pools)
        self._thread = (CopyThread(self._copy.begin, wake, self._copy.flying) if lateness is None
                        else None)
        self._pending: list[Move] = []
        self._running: dict[MoveId, Group] = {}     # in the thread
        self._ended: list[Copied] = []              # not reported yet
        self.traffic: dict[tuple[Tier, Tier, Group], Traffic] = {
            (a, b, g): Traffic() for a, g in self._pools for b, h in self._pools
            if g == h and a is not b}

    def __len__(self) -> int:
        """Moves that have not reported yet."""
        return len(self._pending) + len(self._running) + len(self._ended)

    def add(self, moves: Sequence[Move]) -> None:
        """Take the moves of a step that has just executed, or is about to and waits for them. Asserts that
        they are well formed."""
        for m in moves:
            assert (m.src, m.dst, m.group) in self.traffic, (
                f"move {m.id}: no way {m.src} to {m.dst} for group {m.group}")
            size, n = self._layouts[m.group].page_size, len(m.src_pages)
            assert n >= 1, f"move {m.id} names no page"
            assert n == len(m.dst_pages), f"move {m.id}: {n} pages to {len(m.dst_pages)}"
            assert (n - 1) * size < m.tokens <= n * size, (
                f"move {m.id}: {m.tokens} tokens in {n} pages of {size}")
            for tier, pages in ((m.src, m.src_pages), (m.dst, m.dst_pages)):
                for page in pages:
                    self._pools[tier, m.group].index(page)
        self._pending += moves

    def start_now(self, ids: Collection[MoveId], moves: Sequence[Move], executed: StepId) -> None:
        """Start what a step waits for that is about to run and carries `moves`, if it has not been. On a CPU
        that is done when this returns, but for copies that the thread is in."""
        self.add([m for m in moves if m.id in ids])
        due = [m for m in self._pending if m.id in ids]
        self._pending = [m for m in self._pending if m.id not in ids]
        for m in due:
            assert m.after <= executed, f"a step waits for move {m.id}, whose source step {m.after} writes"
            end = self._copy.begin(m, torn=self._lateness.tears(m))
            if self._thread is not None and self._copy.flying > 1:
                self._running[m.id] = m.group
                self._thread.start(end)
            else:
                self._ended.append(end())

    def wait_for(self, ids: Collection[MoveId]) -> None:
        """Blocks until these have ended."""
        while not self._running.keys().isdisjoint(ids):
            self._collect(wait=True)

    def finish(self, ids: Collection[MoveId]) -> list[Moved]:
        """`wait_for`, and return all that has ended."""
        self.wait_for(ids)
        return self._tell()

    def arrivals(self, ids: Iterable[MoveId]) -> Arrivals:
        """On a CUDA device, of those that have not ended."""
        found: Arrivals = []
        for id in ids:
            while id in self._running and id not in self._copy.events:
                time.sleep(_BEGUN_S)
                self._collect(wait=False)
            if id in self._running:
                found.append((self._running[id], self._copy.events[id]))
        return found

    def run(self, executed: StepId, *, idle: bool) -> list[Moved]:
        """Start what is due after step `executed`; returns what has ended since the last call.

        With `idle` nothing else is left to do: it blocks until a copy has ended, unless none is
        due and none is running. Raises RuntimeError once the thread has died, which is our bug.
        """
        chosen: list[Move] = []
        if ready := [m for m in self._pending if m.after <= executed]:
            chosen = self._lateness.pick(ready, idle=idle)
            taken = {m.id for m in chosen}
            self._pending = [m for m in self._pending if m.id not in taken]
        if self._thread is None:
            self._ended += [self._copy(m, torn=self._lateness.tears(m)) for m in chosen]
        else:
            for m in chosen:
                self._running[m.id] = m.group
                self._thread.start(m)
            self._collect(wait=idle and not self._ended)
        return self._tell()

    def _collect(self, *, wait: bool) -> None:
        assert self._thread is not None
        for copied in self._thread.collect(wait=wait):
            del self._running[copied.move.id]
            self._ended.append(copied)

    def _tell(self) -> list[Moved]:
        ended, self._ended = self._ended, []
        return [self._moved(copied) for copied in ended]

    def _moved(self, copied: Copied) -> Moved:
        traffic = self.traffic[copied.move.src, copied.move.dst, copied.move.group]
        traffic.moves += 1
        traffic.failed += not copied.ok
        traffic.bytes += copied.bytes
        traffic.seconds += copied.seconds
        self._copy.events.pop(copied.move.id, None)
        return Moved(copied.move.id, copied.ok)
