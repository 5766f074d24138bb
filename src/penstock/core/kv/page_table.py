"""The page table of a request: two columns of a cache group, one a tier, and who pins what.

Everybody reads columns; only this module writes them, and it alone counts pins (`tests/tidy`).
"""
from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from penstock.core.kv.prefix_tree import Copy, Reader, unmark_evictable
from penstock.core.settings import CacheGroup

Column: TypeAlias = Sequence[Copy | None]      # a list, which others do not change


@dataclass(slots=True, eq=False)
class PageTable:
    """One cache group's pages of one request. Entry i is page i of the group: its copy on the
    device and on the host, each the path node's own or a private one, each pinned; None is a
    copy that the request has no need of, or does not have."""

    group: CacheGroup
    unit: int                                  # tokens of a page
    device: Column = field(default_factory=list)
    host: Column = field(default_factory=list)
    hot: Sequence[Copy] = field(default_factory=list)
    kept: dict[int, int] = field(default_factory=dict)  # hot unit -> the entry whose page it was
    first: int = 0                             # entries below were left behind by the window
    hosted: bool = field(init=False)           # the group's, kept: each page that grows asks for it
    reach: int = field(init=False)

    def __post_init__(self) -> None:
        self.hosted, self.reach = self.group.hosted, self.group.reach

    def begin(self, tokens: int) -> int:
        """The first entry that the step which computes position `tokens` reads."""
        return max(0, tokens - self.reach) // self.unit if self.reach else 0

    def end(self, tokens: int) -> int:
        """Entries that positions below `tokens` need."""
        return -(-tokens // self.unit)

    def stays(self, i: int, ends: Sequence[int]) -> bool:
        """Whether the prefix tree keeps page i of a group with `keep`: it is read by requests that go on at one of
        these positions, which ascend, or at the next multiple of `keep`. The first of them behind it decides."""
        keep, end = self.group.keep, (i + 1) * self.unit
        return self.begin(min([-(-end // keep) * keep, *ends[(at := bisect_left(ends, end)):at + 1]])) <= i

    def replace(self, device: list[Copy | None], host: list[Copy | None],
                ) -> tuple[list[Copy | None], list[Copy | None]]:
        """Take these columns. Returns those that were there before: they are the caller's now."""
        assert isinstance(self.device, list) and isinstance(self.host, list)
        old = self.device, self.host
        self.device, self.host = device, host
        return old


# ---------------------------------------------------------------- pins: nobody else counts them
def pin(copy: Copy) -> Copy:
    copy.pins += 1
    if copy.evictable_in is not None:
        unmark_evictable(copy)
    return copy


def unpin(copy: Copy) -> None:
    copy.pins -= 1


def read(copy: Copy, reader: Reader) -> None:
    """Who has pinned this page can do without it, and reads it as long as nobody needs it more."""
    copy.pins -= 1
    copy.readers += (reader,)


def give_up(copy: Copy, reader: Reader) -> None:
    """Whether it reads this page or has pinned it: no more."""
    if reader in copy.readers:
        copy.readers = tuple([other for other in copy.readers if other is not reader])
    else:
        copy.pins -= 1


def is_own(copy: Copy) -> bool:
    """Whether a request that has pinned this page is the only one that has it."""
    return copy.pins == 1 and not copy.readers


def pinned(page: int = -1) -> Copy:
    """A new page of one request; -1: it is still to be had."""
    return Copy(page, None, True, 1)


# ---------------------------------------------------------------- entries
def own(column: Column, i: int) -> Copy | None:
    return column[i] if i < len(column) else None


def put(column: Column, i: int, copy: Copy) -> None:
    """Enter a copy, and pin it. Columns are as long as their last entry."""
    enter_pinned(column, i, pin(copy))


def enter_pinned(column: Column, i: int, copy: Copy) -> None:
    """The same of one that is pinned already."""
    extend(column, i + 1)
    assert isinstance(column, list)
    column[i] = copy


def add(column: Column, pages: Iterable[int]) -> None:
    """Enter new pages behind the last."""
    assert isinstance(column, list)
    column += map(pinned, pages)


def extend(column: Column, length: int) -> None:
    """Entries without a copy, up to this length."""
    assert isinstance(column, list)
    column += [None] * (length - len(column))


def take(column: Column, i: int) -> Copy | None:
    """Take out an entry, still pinned."""
    assert isinstance(column, list)
    copy: Copy | None = column[i]
    column[i] = None
    return copy


def take_all(column: Column) -> list[Copy]:
    """The same of all entries: none is left."""
    assert isinstance(column, list)
    copies = [copy for copy in column if copy is not None]
    column.clear()
    return copies


def cut(column: Column, n: int) -> list[Copy]:
    """The same of the last n entries."""
    last = column[-n:]
    assert isinstance(column, list)
    del column[-n:]
    return [copy for copy in last if copy is not None]


def split(column: Column, n: int, to: Column) -> None:
    """The first n entries become those of another column, which is empty."""
    assert isinstance(column, list) and isinstance(to, list) and not to
    to += column[:n]
    column[:n] = [None] * len(to)


def move(column: Column, i: int, to: Column) -> Copy:
    """Entry i becomes the last of another column."""
    copy = take(column, i)
    assert copy is not None and isinstance(to, list)
    to.append(copy)
    return copy
