"""The routes that answer at once, without a socket: aliases, admin's routes, numbers of a busy engine."""
from __future__ import annotations

import asyncio

import httpx
import pytest

from penstock.config.settings.tree import ServerConfig
from penstock.serve.client.client import EngineClosed
from penstock.serve.http import app as http_app
from penstock.serve.http.app import ADMIN_PATHS, Health, PeerView, build_app
from penstock.serve.http.completions import OpenAI, as_api_error
from penstock.serve.http.limits import Keys
from penstock.serve.metrics import Metrics
from penstock.serve.text.model_text import Text
from penstock.serve.wire import Ready


class Engine:
    """Tells its numbers once for each of `answers`, then is busy for ever."""

    num_waiting = num_running = 0
    ready = Ready(pid=1, vocab_size=9, max_model_len=8, info={})

    def __init__(self, *answers: dict[str, float]) -> None:
        self.answers = list(answers)

    flushed = 0
    peer_missing = ""

    def flush(self) -> None:
        self.flushed += 1

    async def stats(self) -> dict[str, float]:
        if not self.answers:
            await asyncio.Event().wait()
        return self.answers.pop(0)


def bearer(*key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key[0]}"} if key else {}


def ask(*requests: tuple[str, str] | tuple[str, str, str], engine=None, keys=None,
        peer=None) -> list[httpx.Response]:
    """Answers to (method, path, key or nothing), one after the other, of one server."""
    api = OpenAI(engine or Engine(), Text(None, None, ()), Metrics(), model="long-name", also=("demo",),
                 choices_max=1)
    app = build_app(api, Health(), keys or Keys([]), ServerConfig(),
                    {"model": "long-name", "page_size": 16, "max_num_seqs": 4}, {"steps": 1.0},
                    peer)

    async def go() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            return [await http.request(method, path, headers=bearer(*key))
                    for method, path, *key in requests]
    return asyncio.run(go())


def test_an_alias_is_a_model():
    own, alias, router = ask(*(("GET", f"/v1/models/{name}") for name in ("long-name", "demo", "unknown")))
    assert own.json()["id"] == "long-name" and alias.json() == {**own.json(), "id": "demo"}
    assert router.status_code == 404 and router.json()["error"]["param"] == "model"


def test_what_belongs_to_all_tenants_is_an_admins():
    methods = {path: "POST" if path in ("/flush_cache", "/reset_prefix_cache") else "GET"
               for path in ADMIN_PATHS}
    for path, method in methods.items():
        tenant, admin, nobody, models = ask(
            (method, path, "one"), (method, path, "boss"), (method, path), ("GET", "/v1/models", "one"),
            engine=Engine({}, {}), keys=Keys(["one"], ["boss"]))
        assert tenant.status_code == 403 and tenant.json()["error"]["code"] == "admin_key_required"
        assert (admin.status_code, nobody.status_code, models.status_code) == (200, 401, 200), path
    local = ask(*((m, p) for p, m in methods.items()), engine=Engine(*[{}] * 3))
    assert all(answer.status_code == 200 for answer in local)


def test_a_busy_engines_last_numbers_are_served_with_their_age(monkeypatch):
    monkeypatch.setattr(http_app, "STATS_S_MAX", 0.02)
    fresh, late = ask(("GET", "/metrics"), ("GET", "/metrics"), engine=Engine({"steps": 7, "hbm_pages": 4}))
    for answer in (fresh, late):
        assert "penstock:steps_total 7.0" in answer.text and "penstock:hbm_pages 4.0" in answer.text
    (first,) = ask(("GET", "/metrics"))
    assert "penstock:steps_total 1.0" in first.text

    def age(answer: httpx.Response) -> float:
        lines = answer.text.splitlines()
        return next(float(line.split()[1]) for line in lines if line.startswith("penstock:engine_stats_age"))
    assert age(late) >= 0.02 > 0.0 <= age(fresh)


def test_a_server_of_both_ends_flushes_both_and_tells_of_both():
    engine, other = Engine({"steps": 7, "hbm_pages": 4}), Engine({"steps": 3, "prefix_queries": 5})
    peer = PeerView(engine, "prefill", True, lambda: 0, lambda: other)
    done, metrics = ask(("POST", "/flush_cache"), ("GET", "/metrics"), engine=engine, peer=peer)
    assert done.status_code == 200 and (engine.flushed, other.flushed) == (1, 1)
    for line in ("penstock:steps_total 7.0", "penstock:hbm_pages 4.0", "penstock:prefill_steps_total 3.0",
                 "penstock:prefill_prefix_cache_queries_total 5.0"):
        assert line in metrics.text.splitlines(), line
    assert "penstock:prefill_hbm_pages" not in metrics.text
    gone = PeerView(engine, "prefill", True, lambda: 1, lambda: None)
    assert [a.status_code for a in ask(("POST", "/flush_cache"), ("GET", "/metrics"), engine=Engine({}),
                                       peer=gone)] == [200, 200]


@pytest.mark.parametrize("exit_code", [None, 0, -9])
def test_an_engine_that_was_asked_to_go_did_not_die(exit_code):
    told = as_api_error(EngineClosed(exit_code))
    assert told.status == 503 and told.body["error"]["code"] == "shutting_down"
