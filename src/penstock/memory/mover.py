"""Executes Moves: whole pages, or their first tokens, between two tiers of this node.

Owns the queue of copies and their counters. Knows steps only as fences: a copy starts after step
`after` and after the step that carried it, and ends in exactly one Moved.
"""
from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from penstock.core.plan import Move, Moved, StepId, Tier
from penstock.memory.lateness import Lateness, Prompt
from penstock.memory.pool import Pool

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Traffic:
    """Copies of one direction: how many, how many failed, bytes moved, seconds spent."""

    moves: int = 0
    failed: int = 0
    bytes: int = 0
    seconds: float = 0.0


class Mover:
    """Copies between pools of equal page shape, inline, in the order that `lateness` picks."""

    def __init__(self, pools: Iterable[Pool], lateness: Lateness | None = None) -> None:
        self._pools: dict[Tier, Pool] = {p.tier: p for p in pools}
        self._lateness: Lateness = lateness if lateness is not None else Prompt()
        self._pending: list[Move] = []
        self.traffic: dict[tuple[Tier, Tier], Traffic] = {
            (a, b): Traffic() for a in self._pools for b in self._pools if a is not b}
        shapes = {p.shape for p in self._pools.values()}
        assert len(shapes) == 1, f"pools of different page shapes: {shapes}"
        self._shape = shapes.pop()

    def __len__(self) -> int:
        """Moves that have not reported yet."""
        return len(self._pending)

    def add(self, moves: Sequence[Move]) -> None:
        """Queue the moves of a step that has just executed. Asserts that they are well formed."""
        for m in moves:
            size, n = self._shape.page_size, len(m.src_pages)
            assert n >= 1, f"move {m.id} names no page"
            assert n == len(m.dst_pages), f"move {m.id}: {n} pages to {len(m.dst_pages)}"
            assert (n - 1) * size < m.tokens <= n * size, (
                f"move {m.id}: {m.tokens} tokens in {n} pages of {size}")
            assert (m.src, m.dst) in self.traffic, f"move {m.id}: no way {m.src} to {m.dst}"
            for tier, pages in ((m.src, m.src_pages), (m.dst, m.dst_pages)):
                for page in pages:
                    self._pools[tier].index(page)
        self._pending += moves

    def run(self, executed: StepId, *, idle: bool) -> list[Moved]:
        """Run what is due after step `executed`; with `idle`, at least one if any is ready."""
        if not self._pending:
            return []
        ready = [m for m in self._pending if m.after <= executed]
        if not ready:
            return []
        done = [Moved(m.id, self._copy(m)) for m in self._lateness.pick(ready, idle=idle)]
        over = {m.id for m in done}
        self._pending = [m for m in self._pending if m.id not in over]
        return done

    def _copy(self, move: Move) -> bool:
        traffic = self.traffic[move.src, move.dst]
        torn = self._lateness.tears(move)
        tokens = move.tokens // 2 if torn else move.tokens
        started = time.perf_counter()
        try:
            self._copy_tokens(move, tokens)
            ok = not torn
        # A copy is the world, not our state: whatever goes wrong in it is a miss, never a crash.
        except Exception:
            log.exception("move %d: %s to %s failed", move.id, move.src.name, move.dst.name)
            ok = False
        traffic.seconds += time.perf_counter() - started
        traffic.moves += 1
        traffic.failed += not ok
        traffic.bytes += tokens * self._shape.token_bytes if ok else 0
        return ok

    def _copy_tokens(self, move: Move, tokens: int) -> None:
        src, dst, size = self._pools[move.src], self._pools[move.dst], self._shape.page_size
        for i, (a, b) in enumerate(zip(move.src_pages, move.dst_pages, strict=True)):
            left = tokens - i * size
            if left >= size:
                dst.page(b).copy_(src.page(a))
            elif left > 0:
                dst.page(b)[..., :left, :].copy_(src.page(a)[..., :left, :])
