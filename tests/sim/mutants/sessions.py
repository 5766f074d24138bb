"""Seeded bugs of sessions: pages of one that has ended outlive others, or go although another has them; retained pages
go before others, or stay when they are retained no longer."""
from __future__ import annotations

from typing import Any

from mutants.registry import Real, instead_of
from penstock.core.core import Core
from penstock.core.kv import prefix_tree
from penstock.core.plan import key_of
from penstock.core.policy.sessions import Retained, Session, Sessions, Shares, above


@instead_of(Sessions, "end")
def ended_session_keeps_its_pages(real: Real, sessions: Sessions, number: int) -> None:
    """The session is forgotten, and its pages are as others."""
    real(sessions, number)
    sessions.ending.clear()


@instead_of(prefix_tree, "claim", budget=600)
def shared_pages_stay_one_sessions(real: Real, page: Any, user: Session, *, is_end: bool) -> None:
    """Pages that another request has used as well go with the session that used them first."""
    if page.session is None or page.session.ended:
        real(page, user, is_end=is_end)
    elif is_end and page.session is user:
        real(page, user, is_end=is_end)


@instead_of(Session, "lost", budget=600)
def the_page_before_an_evicted_one_is_forgotten(real: Real, session: Session, page: Any) -> None:
    """Once the last page of a session is evicted, the others are not found at its end."""
    session.ends.pop(page, None)


@instead_of(Core, "_end_warm")
def warm_prompts_never_end(real: Real, core: Core) -> None:
    """A request for what storage has waits for ever with host pages."""


@instead_of(Retained, "late")
def retained_pages_go_as_others(real: Real, retained: Retained, page: Any) -> int:
    """Least recently used first, whoever has asked."""
    return 0


@instead_of(Retained, "used", budget=600)
def retained_sessions_outgrow_their_bound(real: Real, retained: Retained, session: Session, path: list[Any]) -> None:
    """A session keeps all that it has grown to."""
    retained._most, most = retained._most and 1 << 40, retained._most
    real(retained, session, path)
    retained._most = most


@instead_of(Retained, "release", budget=600)
def retained_pages_stay_for_good(real: Real, retained: Retained, session: Session) -> None:
    """What a session gives up goes last for ever."""
    moving = list(retained.moving)
    real(retained, session)
    retained.moving.clear()
    retained.moving.extend(moving)


@instead_of(Retained, "step", budget=600)
def the_branch_that_a_session_has_left_stays_retained(real: Real, retained: Retained, tree: Any, most: int) -> int:
    """Its latest request began as the one before it, and went on otherwise."""
    for i, (old, new) in enumerate(retained.moving):
        while new is not None and old is not None and old.depth > new.depth:
            old = above(old)
        retained.moving[i] = old, new
    return real(retained, tree, most)


@instead_of(Sessions, "unretain", budget=600)
def expired_sessions_stay_retained(real: Real, sessions: Sessions, number: int) -> None:
    """Nothing ends what a session has once asked for."""


@instead_of(Sessions, "_unretain", budget=600, mode="sessions_max=1")
def a_forgotten_session_retains_what_its_last_request_used(real: Real, sessions: Sessions, session: Session) -> None:
    """A request that is live when its session is forgotten ends, and no expiry is to come."""
    sessions.retained.release(session)


@instead_of(Shares, "put", budget=600, mode="sessions_max=3,sessions=4")
def one_tenants_sessions_make_those_of_another_unknown(
        real: Real, shares: Shares[Session], session: int, weight: int, value: Session) -> list[tuple[int, Session]]:
    """Beyond the bound another tenant loses a session, however few it has."""
    others = [n for key, of in shares._of.items() if key != key_of(session) for n in of]
    is_full = shares._sum >= shares._most and shares.get(session) is None
    lost = [(n, shares.pop(n)) for n in others[:is_full]]
    return lost + real(shares, session, weight, value)


@instead_of(Retained, "flush", budget=600)
def flushed_pages_are_retained_once_they_are_used_again(real: Real, retained: Retained) -> None:
    """A flush has hidden them, and a request has computed some anew."""
