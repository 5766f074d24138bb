"""Bodies, keys and namespaces: what one client may take, and who may ask."""
from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import socket

import pytest
import uvicorn
from hypothesis import given
from hypothesis import strategies as st

from penstock.api import descriptors, limits
from penstock.api.limits import (
    Disconnected,
    Keys,
    load_keys,
    read_body,
)
from penstock.api.protocol.openai import ApiError
from penstock.config.base.errors import ConfigError
from penstock.config.settings.pairkey import pair_key
from penstock.config.settings.refuse import is_local, is_local_origin
from penstock.config.settings.tree import ClusterConfig, ServerConfig
from penstock.engine.client.gate import Gate
from penstock.engine.client.namespaces import namespace


def body_of(*parts, headers=(), bytes_max=10, end=None, seconds_max=60.0):
    """read_body of messages with these bodies; `end` is what comes after them."""
    messages = [{"type": "http.request", "body": p, "more_body": i + 1 < len(parts) or end}
                for i, p in enumerate(parts)]

    async def receive():
        if messages:
            return messages.pop(0)
        if end == "hang":
            await asyncio.Event().wait()
        return {"type": "http.disconnect"}

    return asyncio.run(read_body(headers, receive, bytes_max, seconds_max))


def test_a_body_of_exactly_the_limit_is_read():
    assert body_of(b"01234", b"56789") == b"0123456789"
    assert body_of(b"", headers=[(b"content-length", b"10")]) == b""


def test_a_large_body_is_refused_by_its_header_before_it_is_read():
    with pytest.raises(ApiError, match="over 10 bytes"):
        body_of(end="hang", headers=[(b"content-length", b"11")])


def test_a_large_body_without_a_length_is_refused_while_it_arrives():
    with pytest.raises(ApiError, match="over 10 bytes"):
        body_of(b"01234", b"567890", end="hang")


def test_a_body_that_never_ends_times_out():
    with pytest.raises(ApiError, match="too long to arrive"):
        body_of(b"0", end="hang", seconds_max=0.01)


def test_a_client_that_leaves_while_sending_is_noticed():
    with pytest.raises(Disconnected):
        body_of(b"0", end="gone")


def test_without_keys_everybody_is_one_tenant():
    keys = Keys([])
    assert not keys and keys.tenant(None) == b"" == keys.tenant(b"Bearer anything")


def test_keys_are_tenants_and_anything_else_is_nobody():
    keys = Keys(["alpha", "beta"])
    first, second = keys.tenant(b"Bearer alpha"), keys.tenant(b"bearer beta")
    assert first and second and first != second
    for wrong in (None, b"", b"Bearer", b"Bearer alph", b"Bearer alphaa", b"Basic alpha", b"alpha",
                  b"Bearer \xff"):
        assert keys.tenant(wrong) is None, wrong
    assert b"alpha" not in repr(vars(keys)).encode()


def test_keys_come_from_a_file(tmp_path):
    path = tmp_path / "keys"
    path.write_text("# two\nalpha\n\n beta \n")
    path.chmod(0o600)
    keys = load_keys(ServerConfig(api_key_file=str(path)))
    assert keys.tenant(b"Bearer beta") and keys.tenant(b"Bearer # two") is None
    path.write_text("# none\n\n")
    for wrong in (path, tmp_path / "missing"):
        with pytest.raises(ConfigError, match="--api-key-file"):
            load_keys(ServerConfig(api_key_file=str(wrong)))
        with pytest.raises(ConfigError, match="--admin-key-file"):
            load_keys(ServerConfig(api_key="a", admin_key_file=str(wrong)))


@pytest.mark.parametrize("mode", [0o604, 0o644])
def test_a_key_that_others_can_read_is_refused(tmp_path, mode):
    path = tmp_path / "keys"
    path.write_text("0123456789abcdef\n")
    path.chmod(mode)
    for flag, load in (("--api-key-file", lambda: load_keys(ServerConfig(api_key_file=str(path)))),
                       ("--cluster-key-file", lambda: pair_key(ClusterConfig(cluster_key_file=str(path))))):
        with pytest.raises(ConfigError, match=rf"{flag} .*can read it \(mode {mode:o}\): chmod o= "):
            load()


def test_an_admins_key_is_a_key_and_a_tenants_is_no_admins(tmp_path):
    path = tmp_path / "admins"
    path.write_text("boss\n")
    path.chmod(0o600)
    keys = load_keys(ServerConfig(api_key="one", admin_key_file=str(path)))
    one, boss = keys.tenant(b"Bearer one"), keys.tenant(b"Bearer boss")
    assert one and boss and one != boss
    assert keys.is_admin(boss) and not keys.is_admin(one)
    assert not Keys(["one"]).is_admin(one) and Keys([]).is_admin(b"")


def test_the_only_key_has_a_cache_of_its_own_unless_pages_are_published():
    for keys, shared in ((Keys(["one"]), True), (Keys(["one", "two"]), False), (Keys(["one"], ["boss"]), False)):
        one = keys.tenant(b"Bearer one")
        assert one and keys.cache_of(one, published=False) == one
        assert keys.cache_of(one, published=True) == (b"" if shared else one)
    assert Keys([]).cache_of(b"", published=True) == b""


@pytest.mark.parametrize(("given", "admins", "says"), [
    ({"api_key": "one"}, {"one"}, "the only one is an admin's"),
    ({"api_key": "one", "admin_api_key": "boss"}, {"boss"}, ""),
    ({"file": "one\n"}, {"one"}, "the only one is an admin's"),
    ({"file": "one\ntwo\n"}, set(), "closed to all of them"),
    ({"file": "one\ntwo\n", "admin_api_key": "two"}, {"two"}, "")])
def test_one_key_alone_is_an_admins_unless_a_flag_names_one(tmp_path, given, admins, says):
    path = tmp_path / "keys"
    path.write_text(given.pop("file", ""))
    path.chmod(0o600)
    keys = load_keys(ServerConfig(**given, **({} if "api_key" in given else {"api_key_file": str(path)})))
    all_of_them = {k: keys.tenant(f"Bearer {k}".encode()) for k in ("one", "two", "boss")}
    assert {k for k, tenant in all_of_them.items() if tenant and keys.is_admin(tenant)} == admins
    assert says in keys.says and bool(says) == bool(keys.says)
    assert not Keys([]).says


def test_connections_beyond_the_descriptors_are_refused_counted_and_logged_now_and_then(caplog):
    refused = []
    connections = descriptors.Connections(len(os.listdir("/proc/self/fd")) + descriptors.SPARE + 2,
                                          lambda: refused.append(1))
    with caplog.at_level("ERROR", "penstock"):
        admitted = [connections.admit() for _ in range(100)]
    assert sum(admitted) in (1, 2, 3) and sum(admitted) + len(refused) == 100
    assert len(caplog.records) == 1 and "raise it with ulimit -n" in caplog.text
    connections.left()
    assert connections.admit()


def test_a_new_connection_takes_the_place_of_the_one_that_was_idle_the_longest():
    refused, closed = [], []
    connections = descriptors.Connections(0, lambda: refused.append(1))
    connections.most = 3
    assert all(connections.admit() for _ in range(3))
    for name in (1, 2, 3):
        connections.idle(name, functools.partial(closed.append, name))
    connections.busy(1)                      # it has another request, and is idle last
    connections.idle(1, functools.partial(closed.append, 1))
    connections.busy(3)
    assert connections.admit() and closed == [2] and connections.open == 4
    connections.left()                       # of the closed one
    assert connections.admit() and closed == [2, 1]
    connections.left()
    assert not connections.admit() and refused == [1] and connections.open == 3


@pytest.mark.parametrize("name", ["on_url", "on_headers_complete"])
def test_another_uvicorn_is_refused_at_the_start(monkeypatch, name):
    limits.check_uvicorn()
    monkeypatch.delattr(limits.HttpToolsProtocol, name)
    monkeypatch.delattr(limits.LimitedProtocol, name)
    with pytest.raises(ConfigError, match=rf"uvicorn {uvicorn.__version__} has no {name},"):
        limits.check_uvicorn()


def test_an_attribute_that_uvicorn_no_longer_has_is_refused_at_the_start(monkeypatch):
    monkeypatch.setitem(limits._SET, limits.RequestResponseCycle, ("disconnected", "gone"))
    with pytest.raises(ConfigError, match=r"has no RequestResponseCycle\.gone,"):
        limits.check_uvicorn()


pairs = st.tuples(st.binary(max_size=3), st.none() | st.text(max_size=3))


@given(st.lists(pairs, max_size=20))
def test_namespaces_are_equal_only_for_equal_tenant_and_salt(asked):
    given_out = {}
    for tenant, salt in asked:
        number = namespace(b"a" * 32, tenant, salt)
        assert given_out.setdefault((tenant, salt), number) == number
        assert (number == 0) == (tenant == b"" and salt is None)
    assert len(set(given_out.values())) == len(given_out)


def test_namespaces_of_one_secret_are_the_same_in_every_process_and_of_another_none():
    asked = [(b"one", None), (b"one", "salt"), (b"", "salt"), (b"two", None)]
    assert namespace(b"a" * 32, *asked[1]) == 7376441622556850856
    numbers = {namespace(secret * 32, *a) for secret in (b"a", b"b") for a in asked}
    assert len(numbers) == 2 * len(asked) and all(0 < n < 1 << 63 for n in numbers)


# ---------------------------------------------------------------- connections
async def hello(scope, receive, send):
    await send({"type": "http.response.start", "status": 200,
                "headers": [(b"content-length", b"5")]})
    await send({"type": "http.response.body", "body": b"hello"})


def talk(*parts: bytes, app=hello) -> bytes:
    """What a server of LimitedProtocol answers to these bytes until it closes the connection."""
    async def go() -> bytes:
        listener = socket.create_server(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(
            app, http=functools.partial(limits.LimitedProtocol, gate=Gate()), ws="none",
            lifespan="off", log_config=None, timeout_keep_alive=1))
        server.capture_signals = contextlib.nullcontext
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        for part in parts:
            writer.write(part)
            await writer.drain()
        answer = await reader.read()
        writer.close()
        server.should_exit = True
        await serving
        return answer
    return asyncio.run(asyncio.wait_for(go(), 60))


GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


def test_a_head_that_never_ends_closes_the_connection(monkeypatch):
    monkeypatch.setattr(limits, "HEADER_S_MAX", 0.05)
    assert talk() == b""
    assert talk(GET[:-2]) == b""
    assert talk(GET, GET[:-2]).count(b"hello") == 1
    assert talk(GET, GET).count(b"hello") == 2


def test_a_head_that_is_too_large_is_refused():
    answer = talk(b"GET / HTTP/1.1\r\nX: " + b"x" * limits.HEADER_BYTES_MAX)
    assert answer.startswith(b"HTTP/1.1 431 ") and b'"error"' in answer


def test_a_head_that_is_too_large_is_refused_also_when_it_comes_whole():
    for head in (b"X: " + b"x" * 60_000 + b"\r\n", b"A: b\r\n" * 5000, b"A: b\r\n" * 101):
        answer = talk(b"GET / HTTP/1.1\r\nHost: x\r\n" + head + b"\r\n")
        assert answer.startswith(b"HTTP/1.1 431 ") and b"hello" not in answer
    assert talk(b"GET /" + b"x" * 60_000 + b" HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.1 431 ")
    large = GET[:-2] + b"X: " + b"x" * 12_000 + b"\r\n\r\n"      # each is within the limit
    assert talk(*[large] * 4).count(b"hello") == 4


def test_a_stream_for_http_1_0_ends_with_its_connection_and_has_no_chunks():
    async def stream(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for part in (b"one ", b"", b"two"):
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    head, _, body = talk(GET.replace(b"1.1", b"1.0"), app=stream).partition(b"\r\n\r\n")
    assert body == b"one two" and b"chunked" not in head.lower()
    assert b"chunked" in talk(GET, app=stream)
    assert talk(GET.replace(b"1.1", b"1.0")).endswith(b"\r\n\r\nhello")


def test_noise_is_answered_in_openais_shape():
    for noise in (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\x16\x03\x01\r\n\r\n"):
        answer = talk(noise)
        assert answer.startswith(b"HTTP/1.1 400 ") and b'{"error":{"message"' in answer


@pytest.mark.parametrize("host, local", [
    ("localhost", True), ("LOCALHOST:8000", True), ("127.0.0.1:80", True), ("[::1]", True),
    ("[::1]:8000", True), ("0.0.0.0", False), ("[::]", False), ("", False), ("[:::::]:1", False),
    ("localhost.evil.example", False), ("localhost@evil.example", False), ("127.0.0.1.nip.io", False),
    ("192.168.0.2", False), ("localhost:80:80", False), ("::1", False), ("localhost\n", False)])
def test_names_of_this_machine(host, local):
    assert is_local(host) is local
    assert is_local_origin(f"http://{host}") is local
    assert not is_local_origin(host) and not is_local_origin(f"file://{host}")
