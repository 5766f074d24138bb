"""Grants: which pages the other end's bytes may be written into, under which (transfer, generation).

Owns that table and its lock. Only our own thread writes, and only through here: a grant that is
revoked, or whose connection is over, is written no more once `revoke` or `end` has returned.
"""
from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.config.streams.frames import ProtocolError
from penstock.core.plan import Move, Tier
from penstock.transfer.codec import PageFrame, checksum
from penstock.transfer.facts import Facts, GroupFacts
from penstock.transfer.layout import GroupProgress, PageSlice, common_layer_spans, page_parts, whole_units
from penstock.transfer.pages import PageBytes, Span


def place(group: GroupFacts, there: GroupFacts, move_first: int, pages: Sequence[int],
          piece: PageSlice) -> list[Span]:
    """Where `piece` lies in our pages, those from `move_first` on, in the order of its bytes. there: the same
    group at the other end."""
    of_page, first = group.page_units, move_first // group.page_size
    return [Span(pages[units.start // of_page - first], units.start % of_page, len(units))
            for units in page_parts(piece.unit, piece.units, (of_page, there.page_units))]


class Counts:
    """Counters of a link, over all its connections. Each is written by one thread at a time."""

    def __init__(self) -> None:
        self.frames_sent = self.frames_received = 0
        self.strays = self.damaged = 0                     # frames that no grant waits for; whose bytes are not right
        self.bytes_sent = self.bytes_received = 0          # of pages
        self.send_seconds = 0.0
        self.connections = 0
        self.failures: dict[str, int] = {}                 # by cause

    def failed(self, cause: str) -> None:
        self.failures[cause] = self.failures.get(cause, 0) + 1


@dataclass(slots=True)
class _Granted:
    """into: Moves, each with the unit behind its last."""

    progress: GroupProgress
    into: list[tuple[Move, int]]


@dataclass(slots=True)
class _Generation:
    """One generation. `broken`: bytes arrived that are not what was sent."""

    groups: dict[int, _Granted] = field(default_factory=dict)
    bytes: int = 0
    broken: bool = False


@dataclass(frozen=True, slots=True)
class TransferResult:
    """What a generation has brought by its end. `ok`: all that was granted, every piece verified."""

    ok: bool
    bytes: int


class GrantTable:
    """The grants of one connection. Any thread may call."""

    def __init__(self, facts: Facts, theirs: Facts, pages: PageBytes, counts: Counts) -> None:
        """theirs: what the end that writes says of itself."""
        self._facts, self._theirs, self._pages, self._counts = facts, theirs, pages, counts
        self._stages = [common_layer_spans(stages, stages) for stages in facts.stages]
        self._lock = threading.Lock()
        self._open: dict[tuple[int, int], _Generation] = {}
        self._over = False

    def end(self) -> None:
        """The connection is over: nothing is written any more."""
        with self._lock:
            self._over = True
            self._open.clear()

    def grant(self, move: Move) -> None:
        """Its positions may land in its pages. No effect once the connection is over. A second one of
        a group is of whole pages from the first position on: what comes is written into both."""
        assert move.src is Tier.PEER and move.first % self._facts.groups[move.group].page_size == 0
        group = self._facts.groups[move.group]
        units = whole_units(move.first, move.tokens, group.unit, states=group.is_state)
        with self._lock:
            if self._over:
                return
            landing = self._open.setdefault((move.transfer, move.generation), _Generation())
            granted = landing.groups.setdefault(
                move.group, _Granted(GroupProgress(units, self._stages[move.group], group.num_kv_heads), []))
            granted.into.append((move, units.stop))
            (whole, stop), *others = granted.into
            assert all(m.first == whole.first and m.dst is not whole.dst and end <= stop for m, end in others), (
                f"group {move.group} is granted twice")

    def revoke(self, transfer: int, generation: int) -> None:
        """Nothing of it is written any more once this has returned. Unknown ones are no error."""
        with self._lock:
            self._open.pop((transfer, generation), None)

    def land(self, frame: PageFrame, *, sound: bool | None = None) -> None:
        """Write a piece, unless no request waits for it or its bytes are damaged. sound: whether they are what
        was sent; None: their checksum says so. Raises ProtocolError if it is not what comes next."""
        head, payload = frame
        if sound is None:
            sound = checksum(payload) == head.checksum
        with self._lock:
            landing = self._open.get((head.transfer, head.generation))
            if landing is None:
                self._counts.strays += 1
                return
            granted = landing.groups.get(head.group)
            if granted is None:
                raise ProtocolError(f"group {head.group} is not granted to transfer {head.transfer}")
            group, piece = self._facts.groups[head.group], head.piece
            if len(payload) != group.bytes_of(piece):
                raise ProtocolError(f"{len(payload)} bytes for {piece}")
            granted.progress.take(piece)
            landing.bytes += len(payload)
            if not sound:
                self._counts.damaged += 1
                landing.broken = True
                return
            for move, end in granted.into:
                part = piece._replace(units=min(piece.units, end - piece.unit))
                if part.units > 0:
                    spans = place(group, self._theirs.groups[head.group], move.first, move.dst_pages, part)
                    self._pages.write(move.dst, move.group, part.of_layers, spans,
                                      payload[:group.bytes_of(part)], part.of_heads)

    def landed(self, transfer: int, generation: int) -> TransferResult | None:
        """What has become of a generation whose end was said; None: no request waits for it."""
        with self._lock:
            landing = self._open.get((transfer, generation))
            if landing is None:
                return None
            ok = not landing.broken and all(g.progress.done for g in landing.groups.values())
            return TransferResult(ok, landing.bytes)
