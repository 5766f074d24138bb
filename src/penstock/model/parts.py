"""Which part of each weight and page a TP rank of a stage has: ranges of heads, columns, experts and words.

Pure numbers; knows neither tensors nor processes. TP ranks of a stage run side by side on one input: what is cut
by columns is a sum over them, all else is whole on each.
"""
from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple


class Cut(NamedTuple):
    """[first, end) of `of` rows, columns or whatever is cut."""

    of: int
    first: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.first

    @property
    def range(self) -> slice:
        return slice(self.first, self.end)

    def of_each(self, num: int) -> Cut:
        """Return the range of rows, `num` for each of these."""
        return Cut(self.of * num, self.first * num, self.end * num)


def whole(num: int) -> Cut:
    return Cut(num, 0, num)


def even(num: int, parts: int) -> list[int]:
    """`num` things in so many parts, as even as it goes; the first parts get what is over."""
    return [num // parts + (i < num % parts) for i in range(parts)]


def _at(num: int, parts: int, index: int) -> Cut:
    ends = list(accumulate(even(num, parts), initial=0))
    return Cut(num, ends[index], ends[index + 1])


@dataclass(frozen=True, slots=True)
class TpRank:
    """TP rank `index` of `size` of a stage.

    ranges    of experts, which divide `size`: the TP ranks of a range cut the columns of its experts
    block     columns of an MLP that stay together, as they share scales or vectors
    """

    index: int = 0
    size: int = 1
    ranges: int = 1
    block: int = 16

    def evenly(self, num: int) -> Cut:
        """Its share of `num` things, none of them on two TP ranks."""
        return _at(num, self.size, self.index)

    def _sharers(self, kv_heads: int) -> tuple[int, int, int]:
        """With more TP ranks than KV heads: return this one's head, its number among the TP ranks of that, and how
        many."""
        sharers = even(self.size, kv_heads)
        ends = list(accumulate(sharers, initial=0))
        head = next(head for head in range(kv_heads) if self.index < ends[head + 1])
        return head, self.index - ends[head], sharers[head]

    def kv_heads(self, num: int) -> Cut:
        """Some KV heads, or one that other TP ranks have as well. MLA KV entries are one head, of all TP ranks."""
        if self.size <= num:
            return self.evenly(num)
        head, *_ = self._sharers(num)
        return Cut(num, head, head + 1)

    def owns(self, kv_heads: int) -> bool:
        """Whether it is the one TP rank that writes and counts what its KV heads leave where all see it."""
        return self.size <= kv_heads or self._sharers(kv_heads)[1] == 0

    def queries(self, num: int, kv_heads: int) -> Cut:
        """Query heads of its KV heads, or its share of those of the one."""
        each = num // kv_heads
        if self.size <= kv_heads:
            return self.kv_heads(kv_heads).of_each(each)
        head, index, sharers = self._sharers(kv_heads)
        share = _at(each, sharers, index)
        return Cut(num, head * each + share.first, head * each + share.end)

    def columns(self, width: int) -> Cut:
        """Columns of an MLP, in whole blocks; in smaller ones where a TP rank would have none."""
        block = self.block
        while block > 1 and -(-width // block) < self.size:
            block //= 2
        blocks = self.evenly(-(-width // block))
        return Cut(width, min(width, blocks.first * block), min(width, blocks.end * block))

    def experts(self, num: int) -> Cut:
        """The range of experts that it has, or has columns of."""
        return _at(num, self.ranges, self.index // (self.size // self.ranges))

    @property
    def of_range(self) -> TpRank:
        """It as a TP rank of those that share its range of experts."""
        size = self.size // self.ranges
        return replace(self, index=self.index % size, size=size, ranges=1)


ONE = TpRank()
