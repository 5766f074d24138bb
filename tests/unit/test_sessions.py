"""Sessions outside the scheduler: whose they are, which engine has them, and which prompts are kept."""
from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from penstock.config.base.errors import RequestError
from penstock.config.request.params import SamplingParams
from penstock.core.core import Core
from penstock.core.plan import NAME_BITS, Arrived, RetentionEnded, SessionEnded, key_of
from penstock.core.policy.sessions import Shares
from penstock.core.settings import CoreConfig
from penstock.engine import sessions as engine_sessions
from penstock.engine.client import affinity
from penstock.engine.client.affinity import ServedSessions
from penstock.engine.client.namespaces import check_session, namespace, session_number
from penstock.engine.client.replicas import Engines
from penstock.engine.loop import EngineLoop
from penstock.engine.sessions import Retaining, SessionPrompts
from penstock.engine.wire import OfSession, Origin, Submit

_spec = importlib.util.spec_from_file_location("loop_hostile", Path(__file__).with_name("test_loop_hostile.py"))
hostile = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(hostile)


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
    monkeypatch.setattr(engine_sessions, "TOKENS_LEAST", 33)
    monkeypatch.setattr(engine_sessions, "TOKENS_MAX", 100)
    prompts = SessionPrompts()
    for n in range(1, 6):
        prompts.note(submit(n, n, range(10)))
    assert [bool(prompts.events(OfSession(n, False))) for n in range(1, 6)] == [False, False, True, True, True]
    prompts.note(submit(6, 6, range(95)))
    def kept() -> list[int]:
        return [n for n in range(1, 9) if prompts._last.get(n) is not None]

    assert kept() == [6]
    prompts.note(submit(7, 6, range(400)))
    assert kept() == [6], "one that is alone is kept, however long it is"
    prompts.note(submit(8, 7, range(1)))
    assert kept() == [7]


def test_a_key_with_more_than_its_share_loses_its_own_oldest() -> None:
    one, other = (key << NAME_BITS for key in (1, 2))
    shares: Shares[int] = Shares(6)
    for n in range(3):
        assert shares.put(one + n, 1, n) == []
    lost = [session for n in range(20) for session, _ in shares.put(other + n, 1, n)]
    assert [shares.get(one + n) for n in range(3)] == [0, 1, 2] and lost == [other + n for n in range(17)]
    assert shares.put(one, 1, 7) == [] and shares.put(one + 3, 1, 3) == [(one + 1, 1)], "3 and 4: the key with most"
    assert shares.pop(one) == 7 and shares.pop(one) is None and shares.put(one + 4, 1, 4) == []
    assert [shares.put(other, 9, 5), shares.get(other)] == [[(other + n, n) for n in (17, 18, 19)] + [(other, 5)], None]


def test_the_api_process_knows_no_more_than_an_engine_keeps() -> None:
    kept = CoreConfig.__dataclass_fields__["sessions_max"].default
    assert affinity.SESSIONS_MAX < kept == engine_sessions.TOKENS_MAX // engine_sessions.TOKENS_LEAST
    assert affinity.PROMPT_TOKENS_MAX < engine_sessions.TOKENS_MAX
    assert affinity.SESSIONS_MAX * engine_sessions.TOKENS_LEAST <= affinity.PROMPT_TOKENS_MAX, "short prompts all warm"


def test_engines_that_served_a_session_are_known_within_bounds(monkeypatch) -> None:
    monkeypatch.setattr(affinity, "SESSIONS_MAX", 2)
    served = ServedSessions()
    for session, engine in ((1, "a"), (2, "b"), (1, "b")):
        assert served.note(session, engine, 9) == []
    assert served.of(1, ends=False) == ["b", "a"] and served.of(3, ends=False) == [] == served.of(0, ends=True)
    served.note(1, "a", 9)
    assert served.of(1, ends=False) == ["a", "b"]
    assert served.note(3, "a", 9) == [(2, ["b"])]
    assert served.of(2, ends=True) == []
    assert served.of(1, ends=True) == ["a", "b"] and served.of(1, ends=True) == []


def test_a_session_whose_prompt_is_kept_no_more_ends_but_does_not_warm() -> None:
    served = ServedSessions()
    served.note(1, "a", 9)
    served.note(2, "a", affinity.PROMPT_TOKENS_MAX)
    assert served.of(1, ends=False) == [] and served.of(2, ends=False) == served.of(1, ends=True) == ["a"]


def test_what_the_api_process_forgets_ends_in_the_engines_that_served_it(monkeypatch) -> None:
    monkeypatch.setattr(affinity, "SESSIONS_MAX", 2)
    told: list[tuple[str, int, bool]] = []

    class Told(str):
        def of_session(self, session: int, *, ends: bool) -> None:
            told.append((str(self), session, ends))

    def member(name: str, missing: str = "") -> SimpleNamespace:
        return SimpleNamespace(missing=missing, engine=Told(name))

    engines = Engines.__new__(Engines)
    engines._sessions, engines.members = ServedSessions(), [member("a"), member("b"), member("c", "it has died")]
    for session, at in ((1, 0), (1, 1), (1, 2), (0, 0), (2, 0), (3, 0)):
        engines._noted(session, engines.members[at].engine, 9)
    assert sorted(told) == [("a", 1, True), ("b", 1, True)]
    assert not engines.of_session(1, ends=True) and engines.of_session(2, ends=False) and told[2:] == [("a", 2, False)]


@pytest.mark.parametrize("other", [(b"key", b"a", "y"), (b"key", b"b", "x"), (b"yek", b"a", "x")])
def test_no_other_tenant_or_name_has_the_number_of_a_session(other: tuple[bytes, bytes, str]) -> None:
    mine = session_number(b"key", b"a", "x")
    assert mine == session_number(b"key", b"a", "x") != session_number(*other) and 0 < mine < 1 << 63
    assert (key_of(mine) == key_of(session_number(*other))) is (other[:2] == (b"key", b"a"))
    assert mine != namespace(b"key", b"a", "x")


# ---------------------------------------------------------------- retained
def test_a_session_is_retained_from_its_last_request_on() -> None:
    now = [0.0]
    retaining = Retaining(lambda: now[0])
    assert retaining.begin(0, None) == retaining.begin(7, 10) == retaining.begin(7, None) == []
    retaining.end(7)
    now[0] = 20
    assert retaining.wait_s is None and retaining.passed() == [], "a request of it is live"
    retaining.end(7)
    retaining.end(0)
    assert retaining.wait_s == 10
    now[0] = 25
    retaining.begin(7, None)
    now[0] = 31
    assert retaining.passed() == []
    retaining.end(7)
    now[0] = 41
    assert retaining.wait_s == 0 and retaining.passed() == [RetentionEnded(7)]
    assert retaining.wait_s is None and retaining.passed() == []
    retaining.begin(8, 10)
    retaining.begin(8, 0)
    retaining.end(8)
    retaining.end(8)
    assert retaining.passed() == [RetentionEnded(8)] and not retaining.retains(8)


def test_seconds_of_a_session_count_again_after_its_time_is_over() -> None:
    now = [0.0]
    retaining = Retaining(lambda: now[0])
    retaining.begin(7, 60)
    retaining.end(7)
    for _ in range(2):
        now[0] += 61
        assert retaining.passed() == [RetentionEnded(7)] and not retaining.retains(7)
        assert retaining.begin(7, None) == [] and retaining.retains(7)
        retaining.end(7)
        assert retaining.wait_s == 60
    now[0] += 61
    retaining.passed()
    retaining.begin(7, 0)
    assert not retaining.retains(7)
    retaining.end(7)
    assert retaining.passed() == [RetentionEnded(7)]
    retaining.begin(7, None)
    retaining.end(7)
    assert retaining.wait_s is None, "0 is its last value"


def test_an_ended_session_has_no_seconds_and_no_place(monkeypatch) -> None:
    monkeypatch.setattr(engine_sessions, "RETAINED_MAX", 2)
    now = [0.0]
    retaining = Retaining(lambda: now[0])
    for session in (1, 2):
        retaining.begin(session, 10)
        retaining.end(session)
    retaining.forget(2)
    assert retaining.begin(3, 10) == [], "the place of 2"
    retaining.forget(3)
    retaining.end(3)
    now[0] = 11
    assert retaining.passed() == [RetentionEnded(1)] and retaining.wait_s is None
    retaining.forget(1)
    for session in (1, 2, 3):
        assert retaining.begin(session, None) == [] and not retaining.retains(session)


def test_an_expired_session_takes_no_place_from_a_retained_one(monkeypatch) -> None:
    monkeypatch.setattr(engine_sessions, "RETAINED_MAX", 2)
    now = [0.0]
    retaining = Retaining(lambda: now[0])
    for session, seconds in ((1, 100), (2, 1)):
        retaining.begin(session, seconds)
        retaining.end(session)
    now[0] = 2
    assert retaining.passed() == [RetentionEnded(2)] and retaining.begin(3, 100) == []
    assert retaining.begin(2, None) == [RetentionEnded(1)] and retaining.retains(2)


def test_a_session_in_use_is_newer_than_one_whose_requests_ended_before(monkeypatch) -> None:
    monkeypatch.setattr(engine_sessions, "RETAINED_MAX", 2)
    retaining = Retaining(lambda: 0.0)
    for session in (1, 2):
        retaining.begin(session, 10)
    for session in (2, 1):
        retaining.end(session)
    assert retaining.begin(3, 10) == [RetentionEnded(2)]


def test_of_many_retained_sessions_the_key_with_the_most_loses_its_oldest(monkeypatch) -> None:
    monkeypatch.setattr(engine_sessions, "RETAINED_MAX", 3)
    retaining = Retaining(lambda: 0.0)
    for session in (1, 2, 3):
        retaining.begin(session, 10)
        retaining.end(session)
    assert retaining.begin(1 << NAME_BITS | 1, 10) == [RetentionEnded(1)]
    assert sorted(retaining._until) == [2, 3]


def test_the_core_retains_a_session_by_its_last_seconds_until_it_ends() -> None:
    now = [0.0]
    core = Core(CoreConfig(page_size=4, rows=4, hbm_pages=40, step_tokens=24, max_len=120, retained_pages=20))
    loop = EngineLoop(core, hostile.Executor(), vocab_size=100, max_model_len=120, clock=lambda: now[0])

    def run() -> bool:
        """Return whether pages are retained after all that is to do."""
        loop.turn(block=True)
        while not loop.idle:
            loop.turn(block=True)
        return len(core.sessions.retained.users) > 0

    def ask(rid: int, retain_s: int | None = None) -> bool:
        origin = Origin(session=7, retain_s=retain_s)
        loop.handle(msgspec.structs.replace(submit(rid, 7, range(12)), origin=origin))
        return run()

    assert not ask(1) and ask(2, 60) and ask(3)
    now[0] = 61
    assert not run() and ask(4), "its time was over"
    core.sessions._known = Shares(4096)
    core.sessions.retained.flush()
    assert not run() and ask(5), "the core has forgotten it"
    loop.handle(OfSession(7, True))
    assert not run() and not ask(6) and not loop._retaining._until, "it has ended"
    assert ask(7, 60)


@pytest.mark.parametrize(("name", "retain_s", "pages", "says"), [
    ("a", -1, 9, "0 to 86400"), ("a", 86_401, 9, "0 to 86400"), (None, 5, 9, "session_id"), ("a", 5, 0,
     "--retained-share"), ("", None, 9, "1 to 256"), ("\udcff", None, 9, "UTF-8")])
def test_a_session_that_cannot_be_is_refused(name, retain_s, pages, says) -> None:
    with pytest.raises(RequestError, match=says):
        check_session(name, retain_s, pages)
    check_session("a" * 256, 86_400, 1)
    check_session("a", 0, 0)
