"""The routes that answer at once, without a socket: aliases, admin's routes, numbers of a busy engine."""
from __future__ import annotations

import asyncio
import gc
import json
import re
import time
import weakref
from types import SimpleNamespace

import httpx
import pytest

from penstock.api import app as http_app
from penstock.api import page as http_page
from penstock.api.app import ADMIN_PATHS, Generating, Health, PeerView, build_app
from penstock.api.completions import OpenAI, as_api_error
from penstock.api.limits import Keys
from penstock.api.page import FILES, VIEWERS_MAX
from penstock.api.protocol.openai import ApiError
from penstock.api.server import _Server
from penstock.config.settings.tree import ServerConfig
from penstock.engine.client.client import EngineClosed
from penstock.engine.client.metrics import Metrics
from penstock.engine.wire import EngineReady, SeenRequest, SeenTurn, Shown
from penstock.text.model_text import ModelText


class Engine:
    """Tells its numbers once for each of `answers`, then is busy for ever."""

    num_waiting = num_running = 0
    missing = ""
    ready = EngineReady(pid=1, vocab_size=9, max_model_len=8, info={})

    def __init__(self, *answers: dict[str, float]) -> None:
        self.answers = list(answers)
        self.members = [self]
        self.engine = self

    flushed = 0
    peer_missing, peer_connected = "", True

    def flush(self) -> None:
        self.flushed += 1

    async def stats(self) -> dict[str, float]:
        if not self.answers:
            await asyncio.Event().wait()
        return self.answers.pop(0)

    async def shown(self) -> Shown:
        return Shown(1, 300, [SeenRequest(7, "prefill", 30, 16, 0)] * 256,
                     [SeenTurn(3, 2, 1, 16, 0, [(7, "queued", "prefill")])])


def bearer(*key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key[0]}"} if key else {}


def ask(*requests: tuple[str, str] | tuple[str, str, str], engine=None, keys=None,
        peer=None, config: ServerConfig | None = None) -> list[httpx.Response]:
    """Answers to (method, path, key or nothing), one after the other, of one server."""
    api = OpenAI(engine or Engine(), ModelText(None, None, ()), Metrics(), model="long-name", also=("demo",),
                 choices_max=1)
    app = build_app(api, Health(), keys or Keys([]), config or ServerConfig(),
                    {"model": "long-name", "page_size": 16, "max_num_seqs": 4}, [{"steps": 1.0}],
                    peer)

    async def go() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            return [await http.request(method, path, headers=bearer(*key))
                    for method, path, *key in requests]
    return asyncio.run(go())


def test_ready_is_another_thing_than_alive():
    def status(engine: Engine, **more) -> tuple[int, str, int]:
        ready, health = ask(("GET", "/ready"), ("GET", "/health"), engine=engine,
                            peer=PeerView(engine, "prefill", True), config=ServerConfig(**more))
        return ready.status_code, ready.json()["status"], health.status_code

    engine = Engine()
    assert status(engine) == status(engine, ready_needs_prefill=True) == (200, "ready", 200)
    engine.peer_missing = "h:1: no connection yet"
    assert status(engine, ready_needs_prefill=True) == (200, "ready", 200), "another prefill instance is connected"
    engine.peer_missing, engine.peer_connected = "no connection yet", False
    assert status(engine) == (200, "ready", 200)
    assert status(engine, ready_needs_prefill=True) == (503, "the prefill engine: no connection yet", 200)
    other = Engine()
    engine.members, engine.missing = [engine, other], "it is started again"
    assert status(engine) == (200, "ready", 200)               # the other engine serves
    other.missing = engine.missing
    assert status(engine) == (503, "engine died", 200)


def test_an_alias_is_a_model():
    own, alias, router = ask(*(("GET", f"/v1/models/{name}") for name in ("long-name", "demo", "unknown")))
    assert own.json()["id"] == "long-name" and alias.json() == {**own.json(), "id": "demo"}
    assert router.status_code == 404 and router.json()["error"]["param"] == "model"


def test_what_belongs_to_all_tenants_is_an_admins():
    methods = {path: "POST" if path in ("/flush_cache", "/reset_prefix_cache") else "GET"
               for path in ADMIN_PATHS if path != "/live"}      # whose answer does not end
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
    peer = PeerView(engine, "prefill", True, [SimpleNamespace(last=other, num_restarts=0)])
    done, metrics = ask(("POST", "/flush_cache"), ("GET", "/metrics"), engine=engine, peer=peer)
    assert done.status_code == 200 and (engine.flushed, other.flushed) == (1, 1)
    for line in ("penstock:steps_total 7.0", "penstock:hbm_pages 4.0", "penstock:prefill_steps_total 3.0",
                 "penstock:prefill_prefix_cache_queries_total 5.0"):
        assert line in metrics.text.splitlines(), line
    assert "penstock:prefill_hbm_pages" not in metrics.text
    gone = PeerView(engine, "prefill", True, [SimpleNamespace(last=None, num_restarts=0)])
    assert [a.status_code for a in ask(("POST", "/flush_cache"), ("GET", "/metrics"), engine=Engine({}),
                                       peer=gone)] == [200, 200]


@pytest.mark.parametrize("exit_code", [None, 0, -9])
def test_an_engine_that_was_asked_to_go_did_not_die(exit_code):
    told = as_api_error(EngineClosed(exit_code))
    assert told.status == 503 and told.body["error"]["code"] == "shutting_down"


async def live(app, *, key: str = "") -> tuple[int, list[dict]]:
    """Status and events of /live, until the server ends it."""
    sent: list[dict] = []

    async def receive():
        await asyncio.Event().wait()

    async def send(message):
        sent.append(message)

    headers = [(b"host", b"localhost"), *((k.encode(), v.encode()) for k, v in bearer(key).items() if key)]
    await app({"type": "http", "method": "GET", "path": "/live", "raw_path": b"/live", "query_string": b"",
               "headers": headers, "http_version": "1.1", "scheme": "http", "server": ("localhost", 80),
               "client": ("127.0.0.1", 1), "root_path": ""}, receive, send)
    body = b"".join(m.get("body", b"") for m in sent[1:])
    return sent[0]["status"], [json.loads(x[6:]) for x in body.split(b"\n\n") if x.startswith(b"data: ")]


@pytest.mark.parametrize(("context", "size", "status"), [
    (600_000, 600_000 * 8, 400), (600_000, 16 * 600_000 + 1, 413), (8192, (4 << 20) + 1, 413),
    (8192, 4 << 20, 400)])
def test_largest_body_follows_the_context(context: int, size: int, status: int) -> None:
    """400: it is read whole, and is no JSON."""
    api = OpenAI(Engine(), ModelText(None, None, ()), Metrics(), model="m", choices_max=1)
    app = build_app(api, Health(), Keys([]), ServerConfig(), {"model": "m", "max_model_len": context}, [{}])

    async def go() -> int:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            answer = await http.post("/v1/completions", content=b"x" * size,
                                     headers={"content-type": "application/json"})
            return answer.status_code
    assert asyncio.run(go()) == status


def test_ready_line_names_kv_of_each_tier() -> None:
    def line(**info: object) -> str:
        told = {"kv_bytes_per_request": 1 << 20, "max_model_len": 1024, "hbm_bytes": 1 << 30,
                "page_size": 16, **info}
        member = SimpleNamespace(known=lambda name: int(told.get(name) or 0))
        server = SimpleNamespace(
            _listener=SimpleNamespace(getsockname=lambda: ("127.0.0.1", 1)), _tls=None,
            _began=time.monotonic(),
            _engine=SimpleNamespace(members=[member, member], ready=SimpleNamespace(info=told)))
        return _Server._ready_line(server, "m")
    assert "KV of 2,097,152 tokens in 2.00 GiB, started" in line(dram_pages=0, dram_bytes=0)
    tiers = line(dram_pages=1000, dram_bytes=1 << 29, kv_storage="file:///kv")
    assert "in 2.00 GiB, 32,000 tokens in 1.00 GiB of host memory, storage at file:///kv, started" in tiers


def test_another_method_is_told_the_right_one() -> None:
    got, posted = ask(("GET", "/v1/chat/completions"), ("POST", "/health"))
    assert (got.status_code, posted.status_code) == (405, 405)
    assert got.json()["error"]["message"] == "method not allowed: use POST"
    assert posted.json()["error"]["message"] == "method not allowed: use GET"


def served(engine: Engine, health: Health, keys: Keys | None = None):
    api = OpenAI(engine, ModelText(None, None, ()), Metrics(), model="m", choices_max=1)
    return build_app(api, health, keys or Keys([]), ServerConfig(),
                     {"model": "m", "page_size": 16, "max_num_seqs": 4, "device": "cpu"}, [{}])


def test_a_refused_body_is_freed_without_the_cycle_collector():
    """Which finds old cycles after hours: 150 bodies of 3 MB kept 890 MiB."""
    bodies: list[weakref.ref] = []

    class Body:
        pass

    async def refuse(api, body, tenant, reply):
        held = Body()
        bodies.append(weakref.ref(held))
        raise ApiError(400, "no")

    async def go() -> None:
        sent = []

        async def receive():
            if sent:
                await asyncio.Event().wait()
            sent.append(1)
            return {"type": "http.request", "body": b"{}"}

        async def send(message):
            sent.append(message)

        api = OpenAI(Engine(), ModelText(None, None, ()), Metrics(), model="m", choices_max=1)
        await Generating(api, refuse, 100)({"headers": [], "tenant": b"", "send": send}, receive, send)
        assert sent[1]["status"] == 400

    gc.disable()
    try:
        asyncio.run(go())
        assert bodies[0]() is None
    finally:
        gc.enable()


def test_the_page_asks_nobody_else_and_tells_nothing_by_itself():
    keys = Keys(["user"], ["admin"])
    answers = ask(*(("GET", path) for path in FILES), keys=keys)
    assert [a.status_code for a in answers] == [200] * len(FILES)
    kinds = [a.headers["content-type"].partition(";")[0] for a in answers]
    assert kinds == [kind for _, kind in FILES.values()]
    assert all("default-src 'none'" in a.headers["content-security-policy"] for a in answers)
    html = answers[0].text
    script = "".join(a.text for a, kind in zip(answers, kinds, strict=True) if kind == "text/javascript")
    assert not re.search(r"https?://|<script>|<style| on\w+=| style=", html + script), "its policy forbids it"
    asked = set(re.findall(r'at\("([\w-]+)"\)', script))
    assert asked <= set(re.findall(r'id="([\w-]+)"', html)), "an element that is not there"
    assert sum(len(a.content) for a in answers) <= 60_000
    assert [a.status_code for a in ask(("GET", "/live"), ("GET", "/live", "user"), keys=keys)] == [401, 403]
    [foreign] = ask(("GET", "http://elsewhere/"))
    assert foreign.status_code == 403, "without keys only this machine's own programs"


def test_a_viewer_gets_numbers_until_the_server_ends(monkeypatch):
    monkeypatch.setattr(http_page, "EVERY_S", 0.01)
    health = Health()

    class Ends(Engine):
        async def stats(self):
            health.draining = len(self.answers) == 1
            return await super().stats()

    numbers = [{"hbm_pages": 8.0, "steps": float(i)} for i in range(3)]
    status, events = asyncio.run(live(served(Ends(*numbers), health)))
    assert status == 200 and [e["values"] for e in events] == numbers
    assert events[0]["live"] == 300 and events[0]["requests"] == [[0, 7, "prefill", 30, 16, 0]] * 256
    assert events[0]["turns"] == [[0, 3, 2, 1, 16, 0, [[7, "queued", "prefill"]]]]
    assert all((e["model"], e["page_size"], e["device"]) == ("m", 16, "cpu") for e in events)
    assert events[0]["at"] < events[1]["at"] and events[0]["age"] < 1


def test_an_engine_that_answers_slowly_is_asked_seldom_and_by_few(monkeypatch):
    """And by nobody while nobody looks."""
    monkeypatch.setattr(http_page, "EVERY_S", 0.001)
    asked: list[float] = []
    health = Health()

    class Slow(Engine):
        async def stats(self):
            asked.append(time.monotonic())
            health.draining = len(asked) == 2
            await asyncio.sleep(0.005)
            return {}

    app = served(Slow(), health)
    assert not asked
    asyncio.run(live(app))
    assert asked[1] - asked[0] >= 0.5, "a hundredth of its time"

    async def crowd():
        health.draining = False
        viewers = [asyncio.create_task(live(app)) for _ in range(VIEWERS_MAX)]
        await asyncio.sleep(0.2)
        status, _ = await live(app)
        for viewer in viewers:
            viewer.cancel()
        await asyncio.gather(*viewers, return_exceptions=True)
        health.draining = True
        return status, (await live(app))[0]
    assert asyncio.run(crowd()) == (503, 200)


def test_server_info_has_new_names_and_for_one_release_the_old_ones() -> None:
    api = OpenAI(Engine(), ModelText(None, None, ()), Metrics(), model="m", choices_max=1)
    app = build_app(api, Health(), Keys([]), ServerConfig(), {
        "model": "m", "max_model_len": 64, "max_num_seqs": 1, "rank_0_hbm_bytes": 4, "dram_pages": 2,
        "overlap": True}, [{}])

    async def go() -> dict[str, object]:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            return (await http.get("/server_info")).json()
    info = asyncio.run(go())
    assert info["rank_0_device_bytes"] == info["rank_0_hbm_bytes"] == 4
    assert info["host_pages"] == info["dram_pages"] == 2
    assert info["async_scheduling"] is info["overlap"] is True and "model" in info
