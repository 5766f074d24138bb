"""The HTTP process and an echoing engine process, over real sockets and real signals."""
from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from clients import children
from http_server import LONG, SCRIPT, WAIT_S, Server, error, events

FAULT = 16                  # a prompt that begins with it makes the model fail there
CRASH = 13                  # a prompt that begins with it ends the engine at its third token


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    server = Server(tmp_path_factory.mktemp("shared"))
    yield server
    assert server.end(signal.SIGTERM) == 0


@pytest.fixture
def start(tmp_path):
    servers = []

    def make(*flags, **kwargs):
        servers.append(Server(tmp_path, *flags, **kwargs))
        return servers[-1]

    yield make
    for server in servers:
        server.process.kill()
        server.process.wait()


# ---------------------------------------------------------------- answers
def test_an_answer_echoes_and_counts(shared):
    got = shared.post(prompt="hello é", max_tokens=9).json()
    assert got["choices"][0]["text"].startswith("hello é")
    assert got["choices"][0]["finish_reason"] == "length"
    assert got["usage"]["completion_tokens"] == 9
    assert got["usage"]["prompt_tokens_details"] == {
        "cached_tokens": 3, "cached_tokens_details": {"device": 2, "host": 1},
        "cached_tokens_by_tier": {"hbm": 2, "dram": 1}}


def test_a_stream_says_what_the_whole_answer_says(shared):
    for path, body in (("completions", {"prompt": "hello é☃ ok"}),
                       ("chat/completions", {"messages": [{"role": "user", "content": "é☃"}]})):
        body |= {"max_tokens": 40, "stop": ["☃ "], "n": 2}
        whole = shared.post(path, **body).json()
        chunks = events(shared.post(path, **body, stream=True,
                                    stream_options={"include_usage": True}))
        assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] == whole["usage"]
        for i, choice in enumerate(whole["choices"]):
            mine = [c["choices"][0] for c in chunks[:-1] if c["choices"][0]["index"] == i]
            text = "".join(c.get("text") or c.get("delta", {}).get("content") or "" for c in mine)
            assert text == choice.get("text", choice.get("message", {}).get("content"))
            assert mine[-1]["finish_reason"] == choice["finish_reason"]
            assert all(c["finish_reason"] is None for c in mine[:-1])


def test_a_stop_string_ends_the_text_and_the_request(shared):
    got = shared.post(prompt="abcabc", max_tokens=15_000, stop=["cab"], return_token_ids=True).json()
    choice = got["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("ab", "stop", "cab")
    assert got["usage"]["completion_tokens"] == len(choice["token_ids"]) == 5
    shared.until(lambda: "Stopped" in shared.events.read_text())


def test_a_stop_token_ends_the_text_and_is_not_shown(shared):
    ids = shared.post(prompt="abc", max_tokens=3, return_token_ids=True).json()
    stop = ids["choices"][0]["token_ids"][2]
    got = shared.post(prompt="abc", max_tokens=9, stop_token_ids=[stop]).json()
    assert (got["choices"][0]["text"], got["usage"]["completion_tokens"]) == ("ab", 3)
    shown = shared.post(prompt="abc", max_tokens=9, stop_token_ids=[stop],
                        include_stop_str_in_output=True).json()
    assert shown["choices"][0]["text"] == "abc"


def test_prompts_in_all_forms_and_echo(shared):
    got = shared.post(prompt=["abc", "xyz"], n=2, max_tokens=3, echo=True).json()
    assert [c["text"] for c in got["choices"]] == ["abcabc"] * 2 + ["xyzxyz"] * 2
    assert got["usage"]["prompt_tokens"] == 6
    got = shared.post(prompt=[[5, 6], [7]], max_tokens=2, return_token_ids=True).json()
    assert [c["token_ids"] for c in got["choices"]] == [[5, 6], [7, 7]]
    chunks = events(shared.post(prompt="abc", max_tokens=3, echo=True, stream=True))
    assert "".join(c["choices"][0]["text"] for c in chunks) == "abcabc"


# ---------------------------------------------------------------- refusals
@pytest.mark.parametrize("path, body, status, param", [
    ("completions", {"prompt": ""}, 400, "prompt"),
    ("completions", {"prompt": [1000]}, 400, "prompt"),
    ("completions", {"prompt": [-1], "echo": True}, 400, "prompt"),
    ("completions", {"prompt": [1] * 20_000}, 400, "prompt"),
    ("completions", {"prompt": [1] * 19_990, "max_tokens": 11}, 400, "max_tokens"),
    ("completions", {"prompt": [1], "stop_token_ids": [1000]}, 400, "stop_token_ids"),
    ("completions", {"prompt": [1], "model": "other"}, 404, "model"),
    ("completions", {}, 400, "prompt"),
    ("chat/completions", {"messages": []}, 400, "messages"),
    ("chat/completions", {"messages": [{"role": "user", "content": "x" * 30_000}]}, 400, "messages"),
    ("chat/completions", {"messages": [{"role": "user", "content": "x"}],
                          "max_completion_tokens": 19_999}, 400, "max_completion_tokens"),
])
def test_requests_that_cannot_run_name_their_field(shared, path, body, status, param):
    for stream in (False, True):
        assert error(shared.post(path, **body, stream=stream), status)["param"] == param


def test_paths_methods_and_bodies_that_are_not_ours(shared):
    error(shared.http.get("/v1/nothing"), 404)
    error(shared.http.get("/v1/models/nothing"), 404)
    assert error(shared.http.get("/v1/completions"), 405)["code"] == "method_not_allowed"
    error(shared.http.post("/v1/completions", content=b"{"), 400)
    error(shared.http.post("/v1/completions", content=b"\xff" * 100), 400)
    assert shared.post(prompt="a", max_tokens=1).status_code == 200


def test_http2_and_noise_are_answered_and_closed(shared):
    for data in (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\x16\x03\x01\x00\xa5\x01", b"GET\r\n\r\n"):
        assert shared.raw(data).startswith(b"HTTP/1.1 400 "), data


def test_a_large_body_is_refused_before_and_while_it_arrives(start):
    server = start("--body-bytes-max", "10k")
    assert error(server.post(prompt="x" * 20_000), 413)["code"] == "body_too_large"
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
    assert b" 413 " in server.raw(head + b"Content-Length: 99999999\r\n\r\n")[:20]
    chunk = b"1000\r\n" + b"x" * 4096 + b"\r\n"
    answer = server.raw(head + b"Transfer-Encoding: chunked\r\n\r\n" + chunk * 3)
    assert b" 413 " in answer[:20] and b'"error"' in answer
    assert server.post(prompt="abc", max_tokens=1).status_code == 200


# ---------------------------------------------------------------- the other routes
def test_what_the_server_tells_of_itself(shared):
    get = shared.http.get
    (model,) = get("/v1/models").json()["data"]
    assert model["id"] == "fake" and model["max_model_len"] == 20_000
    assert get("/v1/models/fake").json() == model
    assert get("/health").json() == {"status": "ok"} and get("/ready").json()["status"] == "ready"
    assert get("/version").json()["version"]
    assert get("/model_info").json()["served_model_name"] == "fake"
    assert get("/server_info").json()["page_size"] == 16
    assert shared.http.post("/flush_cache").json()["success"]
    assert "penstock:time_to_first_token_seconds_bucket" in get("/metrics").text
    assert re.fullmatch(r"penstock: ready on http://127\.0\.0\.1:\d+ \(model fake, started in .*\)\n",
                        shared.line)


def test_every_route_wants_the_key_but_health_and_ready(start, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("one\ntwo\n")
    keys.chmod(0o600)
    server = start("--api-key-file", str(keys))
    for path in ("/v1/models", "/metrics", "/server_info", "/nothing", "/version"):
        assert error(server.http.get(path), 401)["code"] == "invalid_api_key"
        assert server.http.get(path, headers={"authorization": "Bearer two"}).status_code != 401
    error(server.post(prompt="abc"), 401)
    error(server.http.post("/flush_cache"), 401)
    assert server.http.get("/health").status_code == server.http.get("/ready").status_code == 200
    assert "one" not in server.log.read_text()


@pytest.mark.parametrize("headers", [
    {"host": "evil.example"}, {"host": "evil.example:8000"}, {"host": "0.0.0.0"},
    {"origin": "http://evil.example"}, {"origin": "null"}, {"origin": "http://localhost.evil.example"},
])
def test_a_web_page_of_elsewhere_cannot_use_a_server_without_keys(shared, headers):
    for ask in (lambda: shared.http.get("/v1/models", headers=headers),
                lambda: shared.http.post("/v1/completions", json={"prompt": "a"}, headers=headers),
                lambda: shared.http.post("/flush_cache", headers=headers)):
        assert error(ask(), 403)["code"] == "not_local"
    assert shared.http.get("/health", headers=headers).status_code == 200


def test_a_page_of_this_machine_may_ask_and_with_keys_everybody_who_has_one(shared, start):
    for headers in ({"host": "localhost:99"}, {"host": "[::1]:8000"}, {"host": "127.0.0.2"},
                    {"origin": "http://localhost:3000"}, {"origin": "https://[::1]"}):
        assert shared.http.get("/v1/models", headers=headers).status_code == 200
    server = start("--api-key", "one")
    assert server.http.get("/v1/models", headers={
        "authorization": "Bearer one", "host": "api.example", "origin": "https://app.example",
    }).status_code == 200


def test_a_cache_is_not_flushed_by_a_link(shared):
    error(shared.http.get("/flush_cache"), 405)


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
def test_a_body_of_another_type_is_415_and_says_what_curl_does(shared, kind):
    body = b'{"prompt": "a", "max_tokens": 1}'
    answer = shared.http.post("/v1/completions", content=body, headers={"content-type": kind})
    assert "curl -d" in error(answer, 415)["message"]
    kinds = ({}, {"content-type": "Application/JSON; charset=utf-8"})
    assert all(shared.http.post("/v1/completions", content=body, headers=h).status_code == 200
               for h in kinds)


def test_a_model_without_a_tokenizer_serves_ids(start):
    server = start(model="ids")
    assert "no tokenizer.json in ids: prompts are taken as token ids" in server.log.read_text()
    got = server.post(prompt=[5, 6], max_tokens=2, return_token_ids=True, logprobs=1).json()
    assert got["choices"][0]["token_ids"] == [5, 6] and got["choices"][0]["text"] == ""
    assert got["choices"][0]["logprobs"]["tokens"] == ["token_id:5", "token_id:6"]
    assert server.post(prompt=[5, 6], max_tokens=2).json()["choices"][0]["token_ids"] == [5, 6]
    lines = server.post(prompt=[5, 6, 7], max_tokens=3, stream=True).text.splitlines()
    pieces = [json.loads(line[6:])["choices"][0] for line in lines if line.startswith("data: {")]
    assert [piece["token_ids"] for piece in pieces if piece["token_ids"]] == [[5], [6], [7]]
    assert error(server.post(prompt="text"), 400)["param"] == "prompt"
    assert error(server.post(prompt=[5], stop="a"), 400)["param"] == "stop"
    assert "tokenizer" in error(server.post("chat/completions", messages=[
        {"role": "user", "content": "x"}]), 400)["message"]
    assert server.end(signal.SIGTERM) == 0


def test_a_model_whose_own_template_is_broken_still_completes(start):
    server = start(model="broken-template")
    assert server.post(prompt="abc", max_tokens=3).json()["choices"][0]["text"] == "abc"
    chat = server.post("chat/completions", messages=[{"role": "user", "content": "x"}])
    assert "--chat-template" in error(chat, 400)["message"]
    assert "TemplateSyntaxError" in server.log.read_text()


def test_beyond_the_queue_the_answer_is_503_with_retry_after(start):
    server = start("--max-num-seqs", "2", "--max-waiting", "1")
    links = [server.started() for _ in range(3)]
    answer = server.post(prompt="abc")
    assert error(answer, 503)["code"] == "overloaded" and int(answer.headers["retry-after"]) >= 1
    for link in links:
        link.close()
    server.until(lambda: server.post(prompt="abc", max_tokens=1).status_code == 200)


# ---------------------------------------------------------------- endings
def ended(server: Server) -> list[str]:
    return [line for line in server.events.read_text().splitlines() if "abort" in line.lower()]


def test_a_client_that_leaves_ends_its_request_streaming_or_not(start):
    server = start()
    server.started(n=2).close()
    server.until(lambda: server.metric("num_requests_running") == 0)
    server.until(lambda: len(ended(server)) >= 2)
    before = len(ended(server))
    link = server.socket()
    data = json.dumps(LONG).encode()
    link.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
                 % len(data) + data)
    server.until(lambda: server.metric("rows_used") == 1)
    link.close()
    server.until(lambda: len(ended(server)) > before)
    assert server.metric("rows_used") == 0
    assert server.metric('request_success_total{finished_reason="abort"}') == 3


def test_a_pipelined_request_is_ended_with_its_connection(start):
    server = start()
    link = server.started()
    link.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
    for _ in range(10):                     # until it is certain that the second one was read
        assert link.recv(4096)
    link.close()
    server.until(lambda: server.metric("rows_used") == 0)
    assert server.metric('request_success_total{finished_reason="abort"}') == 1
    assert "internal error" not in server.log.read_text()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=["term", "hup"])
def test_a_signal_finishes_open_requests_and_takes_no_others(start, number):
    server = start("--drain-s", "600")
    with server.started(max_tokens=2000) as link:
        server.process.send_signal(number)
        server.until(lambda: server.http.get("/ready").status_code == 503)
        assert error(server.post(prompt="abc"), 503)["code"] == "shutting_down"
        assert server.http.get("/health").status_code == 200
        seen = b"".join(iter(lambda: link.recv(65536), b""))
    assert b"[DONE]" in seen and seen.count(b'"finish_reason":"length"') == 1
    assert server.process.wait(WAIT_S) == 0


def limited(name: int, soft: int, hard: int):
    """What a child does before it runs: its own limits."""
    return lambda: resource.setrlimit(name, (soft, hard))


@pytest.mark.parametrize(("name", "most", "code", "says"), [
    (resource.RLIMIT_NOFILE, 24, 2, r"error: 24 files may be open at once \(ulimit -n\): a server needs 64"),
    (resource.RLIMIT_AS, 3_000_000 << 10, None, "")], ids=["descriptors", "memory"])
def test_hard_limits_of_the_shell_are_respected(tmp_path, name, most, code, says):
    """`ulimit -n 24` is a line and no traceback; `ulimit -v 3000000` starts the helpers all the same."""
    log = tmp_path / "log"
    server = subprocess.Popen([sys.executable, SCRIPT, "fake", "--port", "0"], stdout=subprocess.PIPE,
                              stderr=log.open("w"), text=True, preexec_fn=limited(name, most, most))
    try:
        if code is None:
            assert "ready on" in server.stdout.readline(), log.read_text()
        else:
            assert server.wait(WAIT_S) == code
            assert re.search(says, log.read_text()) and "Traceback" not in log.read_text()
    finally:
        server.kill()
        server.wait()


def test_connections_that_no_descriptor_is_left_for_are_told_so(tmp_path):
    """The soft limit is raised to the hard one. Idle connections make way for new ones first."""
    server = Server(tmp_path, under=limited(resource.RLIMIT_NOFILE, 64, 100))
    try:
        idle = []
        for _ in range(90):                  # each stays open
            idle.append(server.socket())
            idle[-1].sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert idle[-1].recv(4096).startswith(b"HTTP/1.1 200 ")
        while idle[0].recv(4096):            # until it is closed
            pass
        assert server.metric("connections_refused_total") == 0
        for link in idle:
            link.close()
        links = [server.socket() for _ in range(120)]
        told = []
        for link in links:
            link.settimeout(0.2)
            try:
                told.append(link.recv(4096))
            except (TimeoutError, ConnectionError):
                told.append(b"")
        refused = [one for one in told if one.startswith(b"HTTP/1.1 503 ")]
        assert refused and b"too many connections" in refused[0]
        for link in links:
            link.close()
        server.until(lambda: server.metric("connections_refused_total") >= len(refused))
        assert server.log.read_text().count("connections: ") == 1
        assert server.post(prompt="abc", max_tokens=1).status_code == 200
    finally:
        server.process.kill()
        server.process.wait()


def test_a_tenant_may_not_go_before_others_and_an_admin_may(start, tmp_path):
    for name, text in (("keys", "one\ntwo\n"), ("admins", "boss\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o600)
    server = start("--api-key-file", str(tmp_path / "keys"), "--admin-key-file", str(tmp_path / "admins"))
    for key, priority, status in (("one", -1, 400), ("one", -(2**31), 400), ("one", 0, 200), ("one", 5, 200),
                                  ("boss", -5, 200)):
        for path, body in (("/v1/completions", {"prompt": "hi", "max_tokens": 1}),
                           ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}],
                                                     "max_tokens": 1}),
                           ("/generate", {"text": "hi", "sampling_params": {"max_new_tokens": 1}})):
            answer = server.http.post(path, json={**body, "priority": priority},
                                      headers={"authorization": f"Bearer {key}"})
            assert answer.status_code == status, answer.text


def test_trailers_are_no_headers(start):
    """RFC 9110, 6.5.1: a proxy that checks or removes headers passes trailers on."""
    def asked(server: Server, *trailers: str, head: str = "") -> bytes:
        data = b'{"prompt": "abc", "max_tokens": 1}'
        return server.raw(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
                          + head.encode() + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n"
                          % (len(data), data) + "".join(f"{t}\r\n" for t in trailers).encode() + b"\r\n")

    server = start("--api-key", "secret")
    key = "Authorization: Bearer secret"
    assert asked(server, key).startswith(b"HTTP/1.1 401 ")
    assert asked(server, head=f"{key}\r\n").startswith(b"HTTP/1.1 200 ")
    assert asked(server, "X-Checksum: 1", "Host: evil.com", head=f"{key}\r\n").startswith(b"HTTP/1.1 200 ")
    assert asked(server, *["X: " + "y" * 1000] * 20, head=f"{key}\r\n").startswith(b"HTTP/1.1 431 ")
    assert "the only one is an admin's" in server.log.read_text()


def test_a_busy_server_says_so_and_an_access_log_is_written_when_asked_for(start):
    server = start("--log-stats-interval", "0.05", "--access-log", "--log-format", "json")
    with server.started(max_tokens=2000):
        server.until(lambda: "status: " in server.log.read_text())
    server.http.get("/health")
    assert server.end(signal.SIGTERM) == 0
    told = [json.loads(line) for line in server.log.read_text().splitlines()]
    assert any("GET /health" in one["message"] for one in told if one["logger"] == "uvicorn.access")
    assert next(one for one in told if one["logger"] == "penstock.status")["running"] == 1


def test_a_signal_that_was_ignored_at_the_start_stays_ignored(start):
    """As under `nohup penstock serve &`; the engine process gets the terminal's signal too."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGHUP, signal.SIGINT)}
    try:
        server = start()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    for number in before:
        for pid in (server.process.pid, *children(server.process.pid)):
            os.kill(pid, number)
    assert server.post(prompt="abc", max_tokens=2).status_code == 200
    assert server.http.get("/ready").status_code == 200
    assert server.end(signal.SIGTERM) == 0
    assert "stopping" in server.log.read_text()


def test_what_does_not_finish_in_time_is_told_so(start):
    server = start("--drain-s", "0.05")
    with server.started() as link:
        server.process.send_signal(signal.SIGTERM)
        seen = b"".join(iter(lambda: link.recv(65536), b""))
    assert b'data: {"error":' in seen and b"[DONE]" not in seen
    assert b'"code":"shutting_down"' in seen and b"engine" not in seen
    assert server.process.wait(WAIT_S) == 0


def test_a_second_interrupt_exits_at_once(start):
    server = start()
    with server.started() as link:
        server.process.send_signal(signal.SIGINT)
        server.until(lambda: server.http.get("/ready").status_code == 503)
        assert server.end(signal.SIGINT) == 130
        assert b"[DONE]" not in b"".join(iter(lambda: link.recv(65536), b""))


@pytest.mark.parametrize("how", ["bug", "killed"])
def test_when_the_engine_dies_clients_hear_503_and_the_exit_code_says_so(start, how):
    server = start()
    with server.started() as link:
        if how == "bug":
            # The engine is alone with this: whoever is first to notice gets the same answer.
            assert error(server.post(prompt=[CRASH], max_tokens=9), 503)["code"] == "engine_died"
        else:
            children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children")
            for pid in children.read_text().split():
                if "--engine" in Path(f"/proc/{pid}/cmdline").read_text():
                    os.kill(int(pid), signal.SIGKILL)
        seen = b""
        while b"engine_died" not in seen:
            part = link.recv(65536)
            assert part, seen
            seen += part
        # New requests hear it too, before the port closes.
        error(server.post(prompt="hello"), 503)
        assert server.http.get("/health").status_code == 503
        seen += b"".join(iter(lambda: link.recv(65536), b""))
    assert b"[DONE]" not in seen
    assert server.process.wait(WAIT_S) == 1
    log = server.log.read_text()
    assert log.count("the engine process") == 1 and log.count("loading a fake") == 1


def test_a_fault_of_the_model_is_a_500_with_its_reason_and_an_event_in_a_stream(shared):
    told = error(shared.post(prompt=[FAULT, 66], max_tokens=9), 500)
    assert told["message"] == "the logits are not finite" and told["code"] == "model_fault"
    stream = shared.post(prompt=[FAULT, 66], max_tokens=9, stream=True)
    *first, last = [json.loads(part.removeprefix("data: ")) for part in stream.text.split("\n\n") if part]
    assert first and last == {"error": told}
    for answer in (shared.post(prompt=[FAULT, 66], max_tokens=9, n=3),
                   shared.post("completions", prompt=[[FAULT], [1]], max_tokens=9)):
        assert error(answer, 500) == told and "retry-after" not in answer.headers


def test_a_port_in_use_is_one_line_before_anything_is_loaded(shared):
    port = str(shared.http.base_url.port)
    run = subprocess.run([sys.executable, SCRIPT, "fake", "--port", port], capture_output=True,
                         text=True, timeout=WAIT_S)
    assert run.returncode == 2 and "loading" not in run.stderr
    (line,) = run.stderr.strip().splitlines()
    assert line.startswith(f"penstock: error: port {port} on 127.0.0.1 is in use")


def test_a_wrong_model_or_template_is_one_line_and_exit_code_2(tmp_path):
    bad = tmp_path / "bad.jinja"
    bad.write_text("{% if %}")
    for words, said in ((["missing"], "no such folder"),
                        (["fake", "--chat-template", str(bad)], "the chat template is wrong")):
        run = subprocess.run([sys.executable, SCRIPT, *words, "--port", "0"], capture_output=True,
                             text=True, timeout=WAIT_S)
        errors = [line for line in run.stderr.splitlines() if "error:" in line]
        assert run.returncode == 2 and len(errors) == 1 and said in errors[0], run.stderr


def test_no_word_of_a_request_is_in_logs_metrics_or_events(start):
    server = start("--log-level", "debug")
    secret = "xyzzyplugh"
    server.post(prompt=secret, max_tokens=20, user=secret, cache_salt=secret, stop=[secret + "!"])
    server.post("chat/completions", messages=[{"role": "user", "content": secret}], max_tokens=4,
                stream=True)
    server.post("chat/completions", messages=[{"role": secret, "content": secret}])
    server.post(prompt=secret, nonsense=secret)
    server.http.post("/v1/completions", content=b'{"prompt": "' + secret.encode() + b'\xff"}')
    numbers = server.http.get("/metrics").text + server.http.get("/server_info").text
    assert server.metric("http_responses_total{status=\"200\"}") >= 2
    assert server.end(signal.SIGTERM) == 0
    written = (server.log.read_text() + server.events.read_text() + numbers
               + server.process.stdout.read())
    assert written and secret not in written
