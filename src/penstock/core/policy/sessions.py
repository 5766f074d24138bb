"""Sessions: whose pages go first once they have ended, and prompts that are brought up before they are asked for.

A page belongs to the session whose requests alone have used it. When the session ends, its pages become the oldest of
all, so they are evicted before any other; pages that another request has used as well keep their place. The number of
sessions is bounded: of the one that was used longest ago nothing is known any more, and its pages are as others.
"""
from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True, eq=False)
class Session:
    """`ends`: its pages in the prefix tree after which it has no other, and perhaps some before these."""

    ended: bool = False
    ends: dict[Any, None] = field(default_factory=dict)

    def lost(self, page: Any) -> None:
        """This page of it has left the tree: the page before it is the last one."""
        if page in self.ends:
            del self.ends[page]
            if page.parent is not None and page.parent.session is self:
                self.ends[page.parent] = None


SHARED = Session()      # of pages that several sessions have used, or requests without one


def claim(page: Any, user: Session, *, is_end: bool) -> None:
    """A request of `user` has used this page. is_end: it goes no further."""
    owner: Session | None = page.session
    if owner is None or owner.ended:
        page.session = user
    elif owner is not user and not user.ended:
        page.session = SHARED
        owner.ends.pop(page, None)
    if is_end and page.session is user is not SHARED:
        user.ends[page] = None


class Sessions:
    """The sessions of one engine, by number."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._known: OrderedDict[int, Session] = OrderedDict()
        self.ending: list[tuple[Session, Any]] = []    # pages from which those before them become the oldest

    def begin(self, number: int) -> Session:
        """Return the session of a request that arrives; 0: it has none."""
        if not number:
            return SHARED
        session = self._known.setdefault(number, Session())
        self._known.move_to_end(number)
        if len(self._known) > self._most:
            self._known.popitem(last=False)
        return session

    @property
    def remembered(self) -> list[Any]:
        """Pages that are kept for sessions that have not ended, or are about to be looked at."""
        return [*self.ending, *(page for session in self._known.values() for page in session.ends)]

    def end(self, number: int) -> None:
        """It ends, if it is known. Its pages follow in `age`."""
        session = self._known.pop(number, None)
        if session is not None:
            session.ended = True
            self.ending += [(session, page) for page in session.ends]
            session.ends.clear()

    def age(self, tree: Any, most: int) -> None:
        """Make up to `most` pages of ended sessions the oldest, the last ones first. Those that a request names follow
        when it gives them up."""
        oldest = tree.flushed + 1
        while self.ending and most > 0:
            session, page = self.ending.pop()
            while most > 0 and page.session is session and not page.refs and page.last_used > oldest:
                page.last_used, most = oldest, most - 1
                if page.first is not None:         # else it has left the tree
                    tree.update_evictable(page)
                page = page.parent
            if most <= 0:
                self.ending.append((session, page))
