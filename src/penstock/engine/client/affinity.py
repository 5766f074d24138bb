"""Which of several engines gets a prompt: the one that has least to do for it.

Pure: knows of an engine's cache what it has been sent and what that has room for.
"""
from __future__ import annotations

import bisect
import itertools
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

# In tokens of a prompt that must be computed: a choice that is open, which slows down others' steps a little,
# and one that has to wait for a row, while another engine has one free. A conversation so stays where its
# KV is, and a prompt that everybody begins with does not keep everybody in one place.
OPEN_TOKENS = 16
WAITING_TOKENS = 256
# Of a prompt, and more than those if it is long: a request that shares an engine with others like it waits for
# their prompts and for memory. Without it sessions that begin alike all go to one engine (ADR 0050).
OPEN_SHARE = 1 / 8
SESSIONS_MAX = 1 << 16


class Load(NamedTuple):
    """One engine: tokens of the prompt that it has cached, requests open there, and how many run at once."""

    cached_tokens: int
    num_open: int
    rows: int


def least(tokens: int, choices: int, loads: Sequence[Load]) -> int:
    """Return the number of the engine that has least to do for a prompt of so many tokens: the longest cached
    prefix, then the least load, unless the prefix is worth less than the requests that it would wait for."""
    over = [max(0, load.num_open + choices - load.rows) for load in loads]
    share = tokens * OPEN_SHARE
    waits = 0 if all(over) else max(WAITING_TOKENS, share)
    cost = [tokens - load.cached_tokens + max(OPEN_TOKENS, share) * load.num_open + waits * more
            for load, more in zip(loads, over, strict=True)]
    return min(range(len(loads)), key=lambda n: (cost[n], loads[n].num_open))


class ServedSessions:
    """Which engines have served each session, the last one last; of the latest sessions."""

    def __init__(self) -> None:
        self._engines: OrderedDict[int, dict[object, None]] = OrderedDict()

    def note(self, session: int, engine: object) -> None:
        """A request of this session goes to `engine`; 0: it has no session."""
        if session:
            engines = self._engines.setdefault(session, {})
            engines.pop(engine, None)
            engines[engine] = None
            self._engines.move_to_end(session)
            if len(self._engines) > SESSIONS_MAX:
                self._engines.popitem(last=False)

    def of(self, session: int, *, ends: bool) -> list[object]:
        """Return them, the last one first, and forget a session that ends."""
        engines = self._engines.pop(session, {}) if ends else self._engines.get(session, {})
        return list(reversed(engines))


class SentPages:
    """Pages of prompts that one engine has been sent and has kept, as far as is known."""

    def __init__(self) -> None:
        self._known: OrderedDict[int, None] = OrderedDict()

    def cached(self, pages: Sequence[int]) -> int:
        """How many of them, from the first on. In the key of a page is also what is before it, see `pages_of`."""
        known = self._known
        return bisect.bisect_left(range(len(pages)), True, key=lambda n: pages[n] not in known)

    def note(self, pages: Sequence[int], room: int) -> None:
        """It has been sent these, and has room for so many."""
        for page in reversed(pages):                    # the first of a prompt are forgotten last, as there
            self._known[page] = None
            self._known.move_to_end(page)
        while len(self._known) > room:
            self._known.popitem(last=False)

    def clear(self) -> None:
        self._known.clear()


def pages_of(prompt: Sequence[int], namespace: int, page_size: int) -> list[int]:
    """A number for each whole page of a prompt, of it and of what is before it; none of ids that no
    vocabulary has."""
    try:
        data = array("q", prompt).tobytes()
    except OverflowError:
        return []
    width = 8 * page_size
    return list(itertools.accumulate(
        (data[at:at + width] for at in range(0, len(data) - width + 1, width)),
        lambda key, page: hash((key, page)), initial=namespace))[1:]
