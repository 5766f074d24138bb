"""The last prompt of each session: what a session that warms up is to have in host memory.

Owns these prompts, within bounds, and the requests that ask storage for them, which no client waits for. Which pages
belong to a session, the planner knows.
"""
from __future__ import annotations

from array import array
from collections import OrderedDict

from penstock.core.plan import Arrived, Event, RequestId, SessionEnded
from penstock.engine.wire import OfSession, Submit

WARM_IDS = 1 << 61              # above those of clients, and of prompts that decode instances have asked for
PROMPTS_MAX, TOKENS_MAX = 4096, 1 << 23        # that are kept: 4 bytes a token


class SessionPrompts:
    def __init__(self) -> None:
        self._last: OrderedDict[int, tuple[int, array[int]]] = OrderedDict()       # namespace and tokens
        self._tokens = 0
        self._newest = WARM_IDS
        self._warming: dict[int, tuple[int, int]] = {}          # session and tokens, by request id

    def note(self, m: Submit) -> None:
        """A request was accepted: its prompt is the last one of its session, if it has one."""
        if not m.origin.session:
            return
        self._forget(m.origin.session)
        self._last[m.origin.session] = m.namespace, array("i", m.prompt)
        self._tokens += len(m.prompt)
        while len(self._last) > PROMPTS_MAX or (self._tokens > TOKENS_MAX and len(self._last) > 1):
            self._forget(next(iter(self._last)))

    def events(self, m: OfSession) -> list[Event]:
        """What the planner is to know. Nothing of a session that is unknown, or warms already."""
        if m.ends:
            self._forget(m.session)
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

    def _forget(self, session: int) -> None:
        found = self._last.pop(session, None)
        self._tokens -= 0 if found is None else len(found[1])
