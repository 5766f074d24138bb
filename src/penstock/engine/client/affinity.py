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

from penstock.core.policy.sessions import Shares
from penstock.engine.sessions import TOKENS_MAX, weight_of

# In tokens of a prompt that must be computed: a choice that is open, which slows down others' steps a little,
# and one that has to wait for a row, while another engine has one free. A conversation so stays where its
# KV is, and a prompt that everybody begins with does not keep everybody in one place.
OPEN_TOKENS = 16
WAITING_TOKENS = 256
# Of a prompt, and more than those if it is long: a request that shares an engine with others like it waits for
# their prompts and for memory. Without it sessions that begin alike all go to one engine (ADR 0050).
OPEN_SHARE = 1 / 8
# Three quarters of what an engine keeps: requests that wait there reach its tables later than they are sent.
SESSIONS_MAX = 3072
PROMPT_TOKENS_MAX = TOKENS_MAX // 4 * 3


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
    """Which engines have served each session, the last one last, and whether its last prompt is kept there; of the
    latest sessions."""

    def __init__(self) -> None:
        self._engines: Shares[dict[object, None]] = Shares(SESSIONS_MAX)
        self._prompts: Shares[bool] = Shares(PROMPT_TOKENS_MAX)

    def note(self, session: int, engine: object, tokens: int) -> list[tuple[int, list[object]]]:
        """A request of this session, with a prompt of so many tokens, goes to `engine`. Return the sessions that are
        forgotten for it, with their engines: these are to forget them too."""
        engines = self._engines.get(session) or {}
        engines.pop(engine, None)
        engines[engine] = None
        self._prompts.put(session, weight_of(tokens), True)
        lost = self._engines.put(session, 1, engines)
        for old, _ in lost:
            self._prompts.pop(old)
        return [(old, list(of)) for old, of in lost]

    def of(self, session: int, *, ends: bool) -> list[object]:
        """Return them, the last one first, and forget a session that ends. None of one that cannot warm."""
        if not ends:
            return list(reversed(self._engines.get(session) or {})) if self._prompts.get(session) else []
        self._prompts.pop(session)
        return list(reversed(self._engines.pop(session) or {}))


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
