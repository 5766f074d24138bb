"""Pages on real servers, over HTTP: an engine that follows another, and one whose server is not there."""
from __future__ import annotations

import pytest
from killing import PROMPTS, answers, disk, kill_and_kill
from pair_server import said, serving
from pipeline_engine import checkpoint
from stores import BUCKET, SECRETS, running

PROMPT = [(7 * i) % 96 + 1 for i in range(150)]
PAGES, ALL = 9 * 16, 10         # tokens of whole pages; objects, with an answer of 16 tokens
HOST = ("--kv-cache-memory-bytes", "4M", "--kv-offloading-size", "4M", "--kv-storage-policy", "wait_complete")


def url_of(server, monkeypatch, *, password: str = "") -> str:
    if server.kind == "valkey":
        return f"valkey://{password}127.0.0.1:{server.port}"
    if server.kind == "mooncake":
        return f"mooncake://127.0.0.1:{server.port}"
    for name, value in {**SECRETS, "AWS_ENDPOINT_URL": server.url}.items():
        monkeypatch.setenv(name, value)
    return f"s3://{BUCKET}/penstock"


def stored(server) -> float:
    [line] = [line for line in server.http.get("/metrics").text.splitlines()
              if line.startswith("penstock:storage_written_objects_total ")]
    return float(line.split()[1])


@pytest.mark.sweep
@pytest.mark.parametrize("kind", ["valkey", "s3", "mooncake"])
def test_an_engine_hits_what_another_has_stored_on_a_server_that_comes_and_goes(tmp_path, monkeypatch, kind):
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    model = checkpoint(tmp_path / "model")
    with running(kind, tmp_path / "server") as server:
        host = *HOST, "--kv-storage", url_of(server, monkeypatch)
        with serving(model, tmp_path, *host) as first:
            want = first.ask(PROMPT)
            assert disk(want) == 0
            first.until(lambda: stored(first) >= ALL)
        server.kill()
        with serving(model, tmp_path, *host) as second:
            log = (tmp_path / "log").read_text()
            assert "serving begins without it, and it is tried again" in log
            again = second.ask(PROMPT)
            assert said(again)[0] == said(want)[0] and disk(again) == 0
            server.start()

            def hits() -> bool:
                second.http.post("/flush_cache")
                answer = second.ask(PROMPT)
                assert said(answer)[0] == said(want)[0]
                return disk(answer) == PAGES

            second.until(hits)
        (tmp_path / "key").write_text("0123456789abcdef")
        (tmp_path / "key").chmod(0o600)
        with serving(model, tmp_path, *host, "--kv-storage-key", str(tmp_path / "key")) as other:
            assert disk(other.ask(PROMPT)) == 0, "another secret"
    assert "Traceback" not in (tmp_path / "log").read_text()


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["valkey", "mooncake"])
def test_engines_that_are_killed_while_they_write_leave_nothing_wrong(tmp_path, monkeypatch, kind):
    """The server lives on: what both have stored, a third engine hits whole."""
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    model = checkpoint(tmp_path / "model")

    def after(stays) -> None:
        assert "\npenstock:storage_bad_total 0.0\n" in stays.http.get("/metrics").text
        for prompt in PROMPTS:
            stays.ask(prompt)
        stays.until(lambda: not stays.stats()["pages_to_store"] and not stays.stats()["storage_in_flight"])

    with running(kind, tmp_path / "server") as server:
        flags = "--kv-cache-memory-bytes", "4M", "--kv-storage", url_of(server, monkeypatch)
        asked, hits = kill_and_kill(model, tmp_path, (*flags, "--kv-offloading-size", "2M"), 10, after)
        want = answers(model, tmp_path)
        with serving(model, tmp_path, *flags, *HOST[2:]) as third:
            for prompt, ids in zip(PROMPTS, want, strict=True):
                third.http.post("/flush_cache")
                answer = third.ask(prompt)
                assert said(answer)[0] == ids and disk(answer) == (len(prompt) - 1) // 16 * 16
    print(f"{kind}: 10 kills, {asked} answers, {hits} with hits")
    assert hits
