"""Positions of a prompt as pieces of pages: how two ends with other page sizes and stages agree on bytes.

Pure functions. A unit is what one vector of a cache group stands for: a token of KV, several of a
selector's summaries. A piece is some layers of some units, or, where one layer of one unit is larger than a
frame, some heads of that. It lies within one stage of both ends and within
one frame or slot, which consecutive pages fill. Its bytes are those of one page after the other, a page being
the smaller of both ends'. Pieces of a group go out in rising order: of the first units all layers, then of
the next ones.
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise, product
from typing import NamedTuple

from penstock.config.streams.frames import ProtocolError


class PageSlice(NamedTuple):
    """Layers of the group, units from the first position of the request on, and heads; 0 heads: all."""

    layer: int
    layers: int
    unit: int
    units: int
    head: int = 0
    heads: int = 0

    @property
    def of_layers(self) -> range:
        return range(self.layer, self.layer + self.layers)

    @property
    def of_heads(self) -> range | None:
        return range(self.head, self.head + self.heads) if self.heads else None


def whole_units(first: int, tokens: int, unit: int, *, states: bool = False) -> range:
    """Units of `unit` positions that lie wholly in `tokens` positions from `first` on, which is where
    one begins: a unit that is not full is made where it is filled, from its keys. Of states, which are what
    they are at any position, the last one is sent too."""
    assert first % unit == 0, f"position {first} is inside a unit of {unit}"
    return range(first // unit, -(-(first + tokens) // unit) if states else (first + tokens) // unit)


def common_layer_spans(ours: Sequence[int], theirs: Sequence[int]) -> tuple[range, ...]:
    """Layers that lie in one stage on both sides, in order; a stage may have none."""
    assert sum(ours) == sum(theirs), f"stages of {list(ours)} and {list(theirs)} layers"
    ends = sorted({0, *accumulate(ours), *accumulate(theirs)})
    return tuple(range(a, b) for a, b in pairwise(ends))


def pieces(units: range, page_units: tuple[int, int], layers: Sequence[range], cell_bytes: int,
           limit: int, heads: int = 1) -> Iterator[PageSlice]:
    """Every layer of every unit once, in order, in as few pieces as whole pages allow.

    page_units   units of a page at one end and at the other
    cell_bytes   of one unit in one layer
    limit        bytes of a piece, at least one head of a cell
    heads        of a cell
    """
    if cell_bytes > limit:
        most = limit * heads // cell_bytes
        assert most, f"a head of a unit of one layer has {cell_bytes // heads} bytes and a frame {limit}"
        for unit, span in product(units, layers):
            for layer, head in product(span, range(0, heads, most)):
                yield PageSlice(layer, 1, unit, 1, head, min(most, heads - head))
        return
    tallest = max(map(len, layers)) * cell_bytes
    unit = units.start
    while unit < units.stop:
        most = unit + limit // tallest
        end = units.stop if units.stop <= most else max(most // n * n for n in page_units)
        if end <= unit:             # some layers, or units, of a page that is larger than a piece may be
            end = min(units.stop, *((unit // n + 1) * n for n in page_units), unit + limit // cell_bytes)
        at_once = limit // ((end - unit) * cell_bytes)
        for span in layers:
            for layer in range(span.start, span.stop, at_once):
                yield PageSlice(layer, min(at_once, span.stop - layer), unit, end - unit)
        unit = end


def page_parts(unit: int, units: int, page_units: tuple[int, int]) -> Iterator[range]:
    """These units in runs that lie in one page of both ends each, in order."""
    end, stop = unit, unit + units
    while end < stop:
        begin, end = end, min(stop, *((end // n + 1) * n for n in page_units))
        yield range(begin, end)


class GroupProgress:
    """What of one group of a grant has landed: each head of each unit of each layer once, in the order of
    `pieces`."""

    def __init__(self, units: range, stages: Sequence[range], heads: int = 1) -> None:
        """stages are those of this end."""
        self._units, self._stages, self._heads = units, stages, heads
        self._unit, self._end, self._layer, self._head = units.start, units.stop, 0, 0

    @property
    def done(self) -> bool:
        return self._unit >= self._units.stop

    def take(self, p: PageSlice) -> None:
        """Count `p`. Raises ProtocolError, and counts nothing, if it is not what comes next."""
        end, last_head = p.unit + p.units, p.head + (p.heads or self._heads)
        if p.layers < 1 or p.units < 1 or end > self._units.stop:
            raise ProtocolError(f"{p} where units {self._units.start} to {self._units.stop - 1} are granted")
        if (p.unit, p.layer, p.head) != (self._unit, self._layer, self._head) or (p.layer and end != self._end):
            raise ProtocolError(f"{p} where head {self._head} of layer {self._layer} of unit {self._unit} comes next")
        if last_head > self._heads or (p.heads and (p.layers, p.units) != (1, 1)):
            raise ProtocolError(f"{p} where layers have {self._heads} heads")
        if not any(s.start <= p.layer and p.layer + p.layers <= s.stop for s in self._stages):
            raise ProtocolError(f"{p} is in two stages")
        self._end, self._head = end, last_head % self._heads
        if self._head:
            return
        self._layer = p.layer + p.layers
        if self._layer == self._stages[-1].stop:
            self._unit, self._layer = end, 0
