"""Sessions: whose pages go first once they have ended, and whose pages go last.

A page belongs to the session whose requests alone have used it. When the session ends, its pages become the oldest of
all, so they are evicted before any other; pages that another request has used as well keep their place. The number of
sessions is bounded: beyond it the key with the most loses the one that it used longest ago, whose pages are as others.
"""
from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from penstock.core.plan import key_of

T = TypeVar("T")
LATE = 1 << 61      # what a retained page's place in an eviction order is later by than its last use: above any clock


@dataclass(slots=True, eq=False)
class Session:
    """`ends`: its pages in the prefix tree after which it has no other, and perhaps some before these. `last`: while
    it is retained, the last page of its latest request, which had `num_pages`."""

    number: int = 0
    ended: bool = False
    ends: dict[Any, None] = field(default_factory=dict)
    retains: bool = False               # it asks for that
    last: Any = None
    num_pages: int = 0

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


def above(page: Any) -> Any:
    """The page before this one; None: there is none."""
    parent = page.parent
    return None if parent is None or parent.parent is None else parent


class Retained:
    """Which pages are evicted after all others: those of the latest request of each retained session.

    A session that asks is retained while all pages of retained sessions are at most `most`. Beyond, the tenant with the
    most loses its newest session; one that has more alone is not retained. Pages change their place over turns; of a
    context that has grown, those that are new.
    """

    def __init__(self, most: int = 0) -> None:
        self._most = most
        self._sessions: dict[Session, None] = {}        # the oldest first
        self._num_pages = Counter[int]()                # of its sessions, by tenant
        self.users: dict[Any, int] = {}                 # pages of the tree that sessions retain: how many do
        self.moving: deque[tuple[Any, Any]] = deque()   # last pages: of what a session gives up, of what it retains

    def used(self, session: Session, path: list[Any]) -> None:
        """A request of this session has ended, with these pages."""
        if not (self._most and session.retains and path) or path[-1].banished:
            return
        if len(path) > self._most:
            self.release(session)
            return
        self._sessions.setdefault(session)
        self._num_pages[key_of(session.number)] += len(path) - session.num_pages
        session.num_pages = len(path)
        while self._num_pages.total() > self._most:
            most = max(self._num_pages, key=self._num_pages.__getitem__)
            self.release(next(s for s in reversed(self._sessions) if key_of(s.number) == most))
        if session in self._sessions:
            self._move(session, path[-1])

    def release(self, session: Session) -> None:
        """It is retained no longer, if it was."""
        if session in self._sessions:
            del self._sessions[session]
            key = key_of(session.number)
            self._num_pages[key] -= session.num_pages
            if not self._num_pages[key]:
                del self._num_pages[key]
            session.num_pages = 0
            self._move(session, None)

    def late(self, page: Any) -> int:
        """Return what its place is later by than its last use. A page that a live request names goes after all."""
        return LATE if page in self.users and not page.refs else 0

    def flush(self) -> None:
        """All pages are hidden: none is retained."""
        for session in list(self._sessions):
            self.release(session)

    def _move(self, session: Session, last: Any) -> None:
        if session.last is not last:
            self.moving.append((session.last, last))
            session.last = last

    def step(self, tree: Any, most: int) -> int:
        """Let up to `most` pages change their place. Return how many more could. From both last pages to where the
        two paths meet: pages before that are in both. The last ones go first, so that none outlives those before it."""
        while self.moving and most > 0:
            old, new = self.moving.popleft()
            while old is not new and most > 0:
                most -= 1
                if old is not None and (new is None or old.depth >= new.depth):
                    self._count(tree, old, -1)
                    old = above(old)
                else:
                    self._count(tree, new, 1)
                    new = above(new)
            if old is not new:
                self.moving.appendleft((old, new))
        return most

    def _count(self, tree: Any, page: Any, by: int) -> None:
        before = self.users.get(page, 0)
        if by < 0 and not before:
            return                             # it has left the tree
        self.users[page] = before + by
        if before + by == 0:
            del self.users[page]
            if tree.is_flushed(page):
                tree.to_flush = list(tree.spaces)
        if page.first is not None and not (before and before + by):
            tree.update_evictable(page)

    def cut(self, tree: Any, page: Any) -> None:
        """This page is about to be banished, with all that build on it."""
        self.step(tree, 1 << 60)
        if self.users:
            gone = dict.fromkeys(tree.below(page))
            for one in gone:
                self.users.pop(one, None)
            for session in self._sessions:
                if session.last in gone:
                    session.last = above(page)


class Shares(Generic[T]):
    """What is known of sessions, by number, up to a sum of weights. Beyond it the API key with the most loses its
    oldest, so that no key makes others' sessions unknown."""

    def __init__(self, most: int) -> None:
        self._most, self._sum = most, 0
        self._of: dict[int, OrderedDict[int, tuple[int, T]]] = {}       # by key, the oldest first
        self._weights: dict[int, int] = {}                              # by key

    def get(self, session: int) -> T | None:
        of_key = self._of.get(key_of(session))
        return None if of_key is None or session not in of_key else of_key[session][1]

    def put(self, session: int, weight: int, value: T) -> list[tuple[int, T]]:
        """It is the newest of its key. Return what is lost for it; one that is alone stays, whatever its weight."""
        self.pop(session)
        key = key_of(session)
        self._of.setdefault(key, OrderedDict())[session] = weight, value
        self._weights[key] = self._weights.get(key, 0) + weight
        self._sum += weight
        lost = []
        while self._sum > self._most and self._sum > weight:
            most = max(self._weights, key=self._weights.__getitem__)
            oldest, (_, old) = next(iter(self._of[most].items()))
            self.pop(oldest)
            lost.append((oldest, old))
        return lost

    def values(self) -> Iterator[T]:
        return (value for of_key in self._of.values() for _, value in of_key.values())

    def pop(self, session: int) -> T | None:
        key = key_of(session)
        if key not in self._of or session not in self._of[key]:
            return None
        weight, value = self._of[key].pop(session)
        self._sum -= weight
        self._weights[key] -= weight
        if not self._of[key]:
            del self._of[key], self._weights[key]
        return value


class Sessions:
    """The sessions of one engine, by number."""

    def __init__(self, most: int, retained: Retained) -> None:
        self.retained = retained
        self._known: Shares[Session] = Shares(most)
        self.ending: list[tuple[Session, Any]] = []    # pages from which those before them become the oldest

    def begin(self, number: int, *, retains: bool = False) -> Session:
        """Return the session of a request that arrives; 0: it has none. retains: from now on it asks for that."""
        if not number:
            return SHARED
        session = self._known.get(number) or Session(number)
        session.retains |= retains
        for _, forgotten in self._known.put(number, 1, session):
            self._unretain(forgotten)
        return session

    def unretain(self, number: int) -> None:
        """It does not ask for that any more."""
        if (session := self._known.get(number)) is not None:
            self._unretain(session)

    def _unretain(self, session: Session) -> None:
        session.retains = False                # nor when a request of it ends that is live
        self.retained.release(session)

    @property
    def remembered(self) -> list[Any]:
        """Pages that are kept for sessions that have not ended, or are about to be looked at."""
        return [*self.ending, *self.retained.moving, *self.retained.users,
                *(page for session in self._known.values() for page in session.ends)]

    @property
    def is_late(self) -> bool:
        """Whether pages are still to change their place."""
        return bool(self.ending or self.retained.moving)

    def end(self, number: int) -> None:
        """It ends, if it is known. Its pages follow in `age`."""
        session = self._known.pop(number)
        if session is not None:
            self._unretain(session)
            session.ended = True
            self.ending += [(session, page) for page in session.ends]
            session.ends.clear()

    def age(self, tree: Any, most: int) -> None:
        """Make up to `most` pages of ended sessions the oldest, the last ones first. Those that a request names follow
        when it gives them up. Before that retained pages change their place."""
        oldest, most = tree.flushed + 1, self.retained.step(tree, most)
        while self.ending and most > 0:
            session, page = self.ending.pop()
            while most > 0 and page.session is session and not page.refs and page.last_used > oldest:
                page.last_used, most = oldest, most - 1
                if page.first is not None:         # else it has left the tree
                    tree.update_evictable(page)
                page = page.parent
            if most <= 0:
                self.ending.append((session, page))
