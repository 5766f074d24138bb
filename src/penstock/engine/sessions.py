"""The last prompt of each session: what a session that warms up is to have in host memory; and until when sessions are
retained.

Owns these prompts, within bounds, and the requests that ask storage for them, which no client waits for; and whose
sessions go first when a bound is reached. Which pages belong to a session, the planner knows.
"""
from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable

from penstock.core.plan import Arrived, Event, RequestId, RetentionEnded, SessionEnded
from penstock.core.policy.sessions import Shares
from penstock.engine.wire import OfSession, Submit

WARM_IDS = 1 << 61              # above those of clients, and of prompts that decode instances have asked for
TOKENS_MAX = 1 << 23            # of prompts that are kept: 4 bytes a token
TOKENS_LEAST = 2048             # that a prompt counts as: so 4,096 are the most
RETAINED_MAX = 3072             # sessions that ask to be retained


def weight_of(tokens: int) -> int:
    """Return how much of TOKENS_MAX a prompt of so many tokens takes."""
    return max(tokens, TOKENS_LEAST)


class Retaining:
    """Until when sessions are retained: for so many seconds after the last of their requests.

    The seconds of a session whose time is over are kept for its next request, apart: they take no place from sessions
    that are retained. Those of an ended session are forgotten.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seconds: Shares[int] = Shares(RETAINED_MAX)
        self._expired: Shares[int] = Shares(RETAINED_MAX)       # seconds of sessions whose time is over
        self._open = Counter[int]()             # live requests, by session
        self._until: dict[int, float] = {}      # of those without
        self._look_at: float | None = None      # not later than the first of these

    @property
    def wait_s(self) -> float | None:
        """Until the next one ends; None: there is none."""
        return None if self._look_at is None else max(0.0, self._look_at - self._clock())

    def begin(self, session: int, retain_s: int | None) -> list[Event]:
        """A request of this session has come, or one without (0). Return what the planner is to know."""
        self._open[session] += 1
        self._until.pop(session, None)
        expired, seconds = self._expired.pop(session), retain_s
        if seconds is None:
            seconds = expired if expired is not None else self._seconds.get(session)
        return [] if seconds is None else self._keep(session, seconds)

    def retains(self, session: int) -> bool:
        """Return whether the session asks to be retained: its latest number of seconds is above 0."""
        return bool(self._seconds.get(session))

    def end(self, session: int) -> None:
        """One of these requests has ended."""
        self._open[session] -= 1
        if self._open[session]:
            return
        del self._open[session]
        if (seconds := self._seconds.get(session)) is not None:
            self._keep(session, seconds)        # it is the newest: its time begins now
            self._until[session] = until = self._clock() + seconds
            self._look_at = until if self._look_at is None else min(self._look_at, until)

    def forget(self, session: int) -> None:
        """Forget the seconds of a session that ends. The planner releases its pages by itself."""
        self._until.pop(session, None)
        self._seconds.pop(session)
        self._expired.pop(session)

    def passed(self) -> list[Event]:
        """Return those that are retained no longer since the last call."""
        if self._look_at is None or self._clock() < self._look_at:
            return []
        over = [session for session, until in self._until.items() if until <= self._clock()]
        for session in over:
            del self._until[session]
            if seconds := self._seconds.pop(session):
                self._expired.put(session, 1, seconds)
        self._look_at = min(self._until.values(), default=None)
        return [RetentionEnded(session) for session in over]

    def _keep(self, session: int, seconds: int) -> list[Event]:
        """Make the session the newest of its key. Return the ends of those that lose their place for it."""
        lost = [other for other, _ in self._seconds.put(session, 1, seconds)]
        for other in lost:
            self._until.pop(other, None)
        return [RetentionEnded(other) for other in lost]


class SessionPrompts:
    def __init__(self) -> None:
        self._last: Shares[tuple[int, array[int]]] = Shares(TOKENS_MAX)     # namespace and tokens
        self._newest = WARM_IDS
        self._warming: dict[int, tuple[int, int]] = {}          # session and tokens, by request id

    def note(self, m: Submit) -> None:
        """A request was accepted: its prompt is the last one of its session, if it has one."""
        if m.origin.session:
            self._last.put(m.origin.session, weight_of(len(m.prompt)), (m.namespace, array("i", m.prompt)))

    def events(self, m: OfSession) -> list[Event]:
        """What the planner is to know. Nothing of a session that is unknown, or warms already."""
        if m.ends:
            self._last.pop(m.session)
            return [SessionEnded(m.session)]
        found = self._last.get(m.session)
        if found is None or any(session == m.session for session, _ in self._warming.values()):
            return []
        namespace, tokens = found
        self._newest += 1
        self._warming[self._newest] = m.session, len(tokens)
        # A token more: of a prompt of whole pages the last one is read too, as a longer prompt begins with it.
        return [Arrived(RequestId(self._newest), (*tokens, 0), 1, namespace=namespace, session=m.session, warms=True)]

    def length(self, rid: int) -> int | None:
        """Tokens of the prompt that this request asks storage for; None: it is a client's request."""
        found = self._warming.get(rid)
        return None if found is None else found[1]

    def warmed(self, rid: int) -> None:
        """This request has ended."""
        del self._warming[rid]
