"""Seeded bugs of sessions: pages of one that has ended outlive others, or go although another has them."""
from __future__ import annotations

from typing import Any

from mutants.registry import Real, instead_of
from penstock.core.core import Core
from penstock.core.kv import prefix_tree
from penstock.core.policy.sessions import Session, Sessions


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
