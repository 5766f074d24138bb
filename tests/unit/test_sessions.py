"""Sessions outside the scheduler: whose they are, which engine has them, and which prompts are kept."""
from __future__ import annotations

import pytest

from penstock.config.request.params import SamplingParams
from penstock.core.plan import Arrived, SessionEnded
from penstock.engine import sessions as engine_sessions
from penstock.engine.client import affinity
from penstock.engine.client.affinity import ServedSessions
from penstock.engine.client.namespaces import namespace, session_number
from penstock.engine.sessions import SessionPrompts
from penstock.engine.wire import OfSession, Origin, Submit


def submit(rid: int, session: int, tokens: range) -> Submit:
    return Submit(rid=rid, prompt=list(tokens), params=SamplingParams(), stop_ids=[], max_new=4, namespace=3,
                  origin=Origin(session=session))


def test_a_session_warms_with_its_last_prompt_once_at_a_time() -> None:
    prompts = SessionPrompts()
    for m in (submit(1, 7, range(5)), submit(2, 0, range(3)), submit(3, 7, range(9)), submit(4, 8, range(2))):
        prompts.note(m)
    [warm] = prompts.events(OfSession(7, False))
    assert isinstance(warm, Arrived) and warm.warms and (warm.prompt, warm.namespace, warm.session) == (
        (*range(9), 0), 3, 7)
    assert prompts.events(OfSession(7, False)) == [] and prompts.length(warm.rid) == 9
    assert prompts.length(3) is None and len(prompts.events(OfSession(8, False))) == 1
    prompts.warmed(warm.rid)
    [again] = prompts.events(OfSession(7, False))
    assert isinstance(again, Arrived) and again.rid > warm.rid
    assert prompts.events(OfSession(9, False)) == []
    assert prompts.events(OfSession(7, True)) == [SessionEnded(7)]
    prompts.warmed(again.rid)
    assert prompts.events(OfSession(7, False)) == []
    assert prompts.events(OfSession(7, True)) == [SessionEnded(7)], "the planner knows whether there is one"


def test_prompts_are_kept_within_bounds(monkeypatch) -> None:
    monkeypatch.setattr(engine_sessions, "PROMPTS_MAX", 3)
    monkeypatch.setattr(engine_sessions, "TOKENS_MAX", 100)
    prompts = SessionPrompts()
    for n in range(1, 6):
        prompts.note(submit(n, n, range(10)))
    assert [bool(prompts.events(OfSession(n, False))) for n in range(1, 6)] == [False, False, True, True, True]
    prompts.note(submit(6, 6, range(95)))
    assert len(prompts._last) == 1 and prompts._tokens == 95
    prompts.note(submit(7, 6, range(400)))
    assert prompts._tokens == 400, "the last one is kept, however long it is"
    prompts.note(submit(8, 7, range(1)))
    assert list(prompts._last) == [7] and prompts._tokens == 1


def test_engines_that_served_a_session_are_known_within_bounds(monkeypatch) -> None:
    monkeypatch.setattr(affinity, "SESSIONS_MAX", 2)
    served = ServedSessions()
    for session, engine in ((1, "a"), (2, "b"), (1, "b"), (0, "a")):
        served.note(session, engine)
    assert served.of(1, ends=False) == ["b", "a"] and served.of(3, ends=False) == [] == served.of(0, ends=True)
    served.note(1, "a")
    assert served.of(1, ends=False) == ["a", "b"]
    served.note(3, "a")
    assert served.of(2, ends=True) == []
    assert served.of(1, ends=True) == ["a", "b"] and served.of(1, ends=True) == []


@pytest.mark.parametrize("other", [(b"key", b"a", "y"), (b"key", b"b", "x"), (b"yek", b"a", "x")])
def test_no_other_tenant_or_name_has_the_number_of_a_session(other: tuple[bytes, bytes, str]) -> None:
    mine = session_number(b"key", b"a", "x")
    assert mine == session_number(b"key", b"a", "x") != session_number(*other) and 0 < mine < 1 << 63
    assert mine != namespace(b"key", b"a", "x")
