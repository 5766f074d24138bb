"""`session_id` and `POST /v1/sessions/ID`: what ends is evicted first, what is retained last, what warms is in host
memory."""
from __future__ import annotations

import httpx
import pytest
from pair_server import PAIR, SERVED, Server, serving
from pipeline_engine import checkpoint

from penstock import LLM, RequestError, SamplingParams, Session

HOST = ("--kv-offloading-size", "8M")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return checkpoint(tmp_path_factory.mktemp("sessions"))


def tokens(seed: int, n: int) -> list[int]:
    return [(seed * 31 + i * i * 7 + 3 * i) % 97 for i in range(n)]


def change(server: Server, name: str, headers: dict[str, str] | None = None, **body: bool) -> httpx.Response:
    return server.http.post(f"/v1/sessions/{name}", json=body, headers=headers)


def cached(server: Server, prompt: list[int], **more: object) -> dict[str, int]:
    answer = server.ask(prompt, max_tokens=1, **more)
    assert answer["status"] == 200, answer
    details = answer["usage"]["prompt_tokens_details"]
    return {"all": details["cached_tokens"], **details["cached_tokens_details"],
            "remote": details.get("remote_tokens", 0)}


def stored(server: Server) -> None:
    """Until storage has all, and nothing else is cached."""
    server.until(lambda: server.stats()["pages_to_store"] == 0 and server.stats()["moves_in_flight"] == 0)
    assert server.http.post("/flush_cache").json()["success"]
    server.until(lambda: server.stats()["hbm_pages_held"] == 0 and server.stats()["dram_pages_held"] == 0)


@pytest.mark.parametrize("ends", [True, False])
def test_an_ended_session_makes_room_before_older_prompts(model, tmp_path, ends):
    with serving(model, tmp_path, *SERVED["resident"]) as server:
        room = int(server.stats()["hbm_pages"]) * server.info()["page_size"]
        share, third = tokens(1, 64), room // 3 - 64
        others, mine = tokens(2, third), [*share, *tokens(3, third)]
        assert len(mine) < 1000 and cached(server, others)["all"] == 0
        cached(server, share)
        cached(server, mine, session_id="agent/7")
        if ends:
            assert change(server, "agent/7", end=True).json() == {
                "object": "session", "id": "agent/7", "status": "ended"}
            assert change(server, "agent/7", end=True).status_code == 404
        cached(server, tokens(4, room // 4))
        cached(server, tokens(5, room // 4))
        assert (cached(server, others)["all"] > third - 20) is ends
        assert cached(server, share)["all"] == 48, "a prompt without a session has these too"


def test_what_is_not_known_or_not_asked_for_is_said(model, tmp_path):
    with serving(model, tmp_path, *SERVED["resident"], "--api-key", "one", "--admin-api-key", "boss") as server:
        one, boss = ({"authorization": f"Bearer {key}"} for key in ("one", "boss"))
        body = {"model": "tiny", "prompt": tokens(1, 40), "max_tokens": 1}

        def ask(headers: dict[str, str], **more: object) -> int:
            return server.http.post("/v1/completions", json={**body, **more}, headers=headers).status_code

        unknown = change(server, "a", one, end=True)
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "session_not_found")
        assert ask(one, session_id="a") == ask(one | {"x-dynamo-session-id": "b"}) == 200
        assert change(server, "a", boss, end=True).status_code == 404, "it is another key's"
        assert [change(server, name, one, end=True).status_code for name in ("a", "b", "b")] == [200, 200, 404]
        assert ask(one | {"x-dynamo-session-id": "c"}, session_id="d") == 200
        assert [change(server, name, one, end=True).status_code for name in ("c", "d")] == [404, 200]
        for wrong in ({}, {"end": True, "warm": True}, {"end": False}, {"stop": True}):
            assert change(server, "a", one, **wrong).status_code == 400
        assert ask(one, session_id="x" * 257) == 400 and ask(one, session_id=7) == 400
        # Header, field and path read a name alike.
        for where, named in (("z\u00e9", {"session_id": "z\u00e9"}), ("\u4f1a/1", {})):
            assert ask({**one, **({} if named else {b"x-dynamo-session-id": where.encode()})}, **named) == 200
            assert change(server, where, one, end=True).json()["id"] == where
        for header, body_name in ((b"z\xe9", None), (b"", None), (b"good", "")):
            given = {} if body_name is None else {"session_id": body_name}
            refused = server.http.post("/v1/completions", json={**body, **given},
                                       headers={**one, b"x-dynamo-session-id": header})
            assert refused.status_code == 400 and refused.json()["error"]["param"] == "session_id", refused.text
            assert ("UTF-8" if header == b"z\xe9" else "0 characters: 1 to 256") in refused.text
        nameless = change(server, "", {**one, "x-dynamo-session-id": "a"}, end=True)
        assert nameless.status_code == 400 and "0 characters" in nameless.text, "the path's name counts"
        assert ask(one, session_id="a") == 200
        warm = change(server, "a", one, warm=True)
        assert warm.status_code == 400 and "--kv-storage" in warm.json()["error"]["message"]
        assert server.http.post("/v1/sessions/a", json={"end": True}).status_code == 401
        assert server.http.get("/v1/sessions/a", headers=one).status_code == 405


@pytest.mark.parametrize("ranks", ["1", pytest.param("2", marks=pytest.mark.sweep)])
def test_a_session_that_warms_is_read_from_storage_before_it_is_asked(model, tmp_path, ranks):
    flags = (*SERVED["resident"], *HOST, "--kv-storage", f"file://{tmp_path}/pages", "--kv-storage-policy",
             "wait_complete", "--tp", ranks, "--pp", ranks)
    with serving(model, tmp_path, *flags) as server:
        prompt, size = tokens(5, 400), server.info()["page_size"]
        cached(server, prompt, session_id="s")
        stored(server)
        assert change(server, "s", warm=True).json()["status"] == "warming"
        server.until(lambda: server.stats()["dram_pages_held"] >= 400 // size)
        server.until(lambda: server.stats()["moves_in_flight"] == 0 and not server.stats()["requests_waiting"])
        assert server.stats()["hbm_pages_held"] == 0
        found = cached(server, [*prompt, 1, 2, 3], session_id="s")
        assert found["host"] == 400 // size * size and not found.get("storage")
        assert change(server, "s", end=True).status_code == 200
        assert change(server, "s", warm=True).status_code == 404
        stored(server)


def test_with_several_engines_the_one_that_served_a_session_warms_it(model, tmp_path):
    flags = (*SERVED["resident"], *HOST, "--kv-storage", f"file://{tmp_path}/pages", "--dp", "2")
    with serving(model, tmp_path, *flags) as both:
        cached(both, tokens(6, 400), session_id="s", data_parallel_rank=0)
        cached(both, tokens(7, 400), session_id="s", data_parallel_rank=1)
        both.until(lambda: both.stats()["pages_to_store"] == 0 and both.stats()["moves_in_flight"] == 0)
        assert both.http.post("/flush_cache").json()["success"]

        def held() -> list[float]:
            return [e["stats"]["dram_pages_held"] for e in both.info()["engines"]]

        both.until(lambda: held() == [0, 0])
        assert change(both, "s", warm=True).status_code == 200
        both.until(lambda: held()[1] > 0)
        both.until(lambda: both.stats()["moves_in_flight"] == 0 and not both.stats()["requests_waiting"])
        assert held()[0] == 0
        assert change(both, "s", end=True).status_code == 200 and change(both, "s", end=True).status_code == 404
        assert both.http.post("/flush_cache").json()["success"]
        both.until(lambda: held() == [0, 0])


@pytest.mark.parametrize("place", ["resident", pytest.param("hosted", marks=pytest.mark.sweep)])
def test_both_engines_of_a_pair_know_a_session(model, tmp_path, place):
    """The prefill engine has a part of a session in its own tiers: it warms there too, and ends there."""
    flags = (*SERVED[place], *(() if place == "hosted" else HOST), "--kv-storage", f"file://{tmp_path}/pages", *PAIR)
    with serving(model, tmp_path, *flags) as pair:
        prompt = tokens(8, 400)
        assert cached(pair, prompt, session_id="s")["remote"] > 0

        def both(name: str) -> list[float]:
            text = pair.http.get("/metrics").text
            return [float(line.split()[1]) for line in text.splitlines()
                    if line.split(" ")[0] in (f"penstock:{name}", f"penstock:prefill_{name}")]

        def quiet() -> bool:
            return not sum(both("moves_in_flight") + both("pages_to_store") + both("num_requests_waiting"))

        pair.until(quiet)
        pair.flushed()
        assert change(pair, "s", warm=True).status_code == 200
        pair.until(lambda: quiet() and len(held := both("dram_pages_held")) == 2 and min(held) > 20)
        assert cached(pair, prompt, session_id="s")["all"] >= 384
        assert change(pair, "s", end=True).status_code == 200
        pair.until(quiet)
        pair.flushed()


@pytest.mark.parametrize(("seconds", "stays"), [(600, True), (1, False), (None, False)])
def test_a_retained_session_outlives_later_prompts_until_its_time_is_over(model, tmp_path, seconds, stays):
    with serving(model, tmp_path, *SERVED["resident"], "--retained-share", ".5") as server:
        room = int(server.stats()["hbm_pages"]) * server.info()["page_size"]
        mine, more = tokens(3, room // 3), {} if seconds is None else {"session_retain_s": seconds}
        assert cached(server, mine, session_id="a", **more)["all"] == 0
        if seconds is not None:
            assert server.stats()["retained_pages"] >= len(mine) // server.info()["page_size"]
            server.until(lambda: stays or server.stats()["retained_pages"] == 0)
        for seed in range(4, 10):
            cached(server, tokens(seed, room // 4))
        assert (cached(server, mine, session_id="a")["all"] > len(mine) - 20) is stays
        change(server, "a", end=True)
        server.until(lambda: server.stats()["retained_pages"] == 0)


def test_a_server_that_retains_no_sessions_says_how_it_would(model, tmp_path):
    with serving(model, tmp_path, *SERVED["resident"]) as server:
        refused = server.ask(tokens(3, 40), session_id="a", session_retain_s=60)
        assert refused["status"] == 400 and "--retained-share" in refused["error"]["message"], refused
        assert server.ask(tokens(3, 40), session_id="a", session_retain_s=0)["status"] == 200
        assert server.ask(tokens(3, 40), session_retain_s=60)["status"] == 400


def test_both_engines_of_a_pair_retain_a_session(model, tmp_path):
    with serving(model, tmp_path, *SERVED["resident"], *HOST, *PAIR, "--retained-share", ".5") as pair:
        def retained() -> list[float]:
            return [float(line.split()[1]) for line in pair.http.get("/metrics").text.splitlines()
                    if line.split(" ")[0] in ("penstock:retained_pages", "penstock:prefill_retained_pages")]

        cached(pair, tokens(8, 400), session_id="s", session_retain_s=600)
        pair.until(lambda: len(found := retained()) == 2 and min(found) >= 24)
        assert change(pair, "s", end=True).status_code == 200
        pair.until(lambda: retained() == [0, 0])


def test_a_session_of_the_library_is_retained_and_ends(model):
    with LLM(model, threads=1, kv_cache_memory_bytes="4M", retained_share=0.5) as llm:
        once, room = SamplingParams(max_tokens=1), 900

        def found(prompt: list[int], session: Session | None = None) -> int:
            return llm.generate({"prompt_token_ids": prompt}, once, session=session)[0].num_cached_tokens

        def others() -> None:
            for seed in range(40, 60):
                found(tokens(seed, room))

        found(tokens(3, 400), Session("a", retain_s=600))
        others()
        assert found(tokens(3, 400), Session("a")) > 380
        llm.end_session("a")
        others()
        assert found(tokens(3, 400), Session("a")) < 380
        with pytest.raises(RequestError, match="0 to 86400"):
            found([1, 2], Session("a", retain_s=-1))
