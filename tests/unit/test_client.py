"""The client against a real engine process whose core echoes prompts (no model, no torch)."""
from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import re
import signal
import socket
import sys
from pathlib import Path

import pytest

from penstock.config.base.errors import ConfigError, RequestError
from penstock.config.request.params import SamplingParams
from penstock.config.settings.tree import Config, DebugConfig, KVConfig, ModelConfig
from penstock.config.streams.frames import ProtocolError
from penstock.engine import wire
from penstock.engine.client.client import EngineClient, EngineDied
from penstock.replay import flight

ENGINE = [sys.executable, "-P", str(Path(__file__).with_name("engine_fake.py"))]
LONG = SamplingParams(max_tokens=None)


def client_of(model="fake", **kwargs):
    event_log, kv = kwargs.pop("event_log", None), kwargs.pop("kv", KVConfig())
    config = Config(model=ModelConfig(model=model), debug=DebugConfig(debug_event_log=event_log), kv=kv)
    return EngineClient(config, argv=ENGINE, **kwargs)


def drive(coroutine):
    """Run with a time-out far above need, so that a hang is a failure and not a stuck suite."""
    return asyncio.run(asyncio.wait_for(coroutine, 60))


def with_engine(test, **kwargs):
    """`async def test(client)` against a started client that is closed whatever happens."""
    async def whole():
        client = client_of(**kwargs)
        await client.start()
        try:
            return await test(client)
        finally:
            await client.close()
    return drive(whole())


async def tokens_of(stream):
    out, finish = [], None
    async for chunk in stream:
        assert finish is None
        out += chunk.tokens
        finish = chunk.finish
    return out, finish


async def until(condition):
    while not condition():
        await asyncio.sleep(0.001)


def test_choices_and_requests_run_side_by_side():
    async def go(client):
        a = client.submit([5, 6, 7], SamplingParams(max_tokens=4, n=2))
        b = client.submit([8, 9], SamplingParams(max_tokens=50, stop_token_ids=(9,)))
        c = client.submit([8, 9], SamplingParams(max_tokens=3), eos_ids=[8])
        d = client.submit([8, 9], SamplingParams(max_tokens=3, ignore_eos=True), eos_ids=[8])
        assert client.num_waiting == 5
        got = await asyncio.gather(*(tokens_of(s) for s in [*a, *b, *c, *d]))
        assert got == [([5, 6, 7, 5], "length")] * 2 + [
            ([8, 9], "stop"), ([8], "stop"), ([8, 9, 8], "length")]
        assert client.num_waiting == client.num_running == 0
        assert len({s.rid for s in [*a, *b, *c, *d]}) == 5
    with_engine(go)


async def reads_of(stream):
    return [chunk.kv_reads async for chunk in stream][-1]


def test_a_budget_is_the_servers_or_the_requests_and_only_for_what_is_longer_than_it():
    async def go(client):
        def ask(prompt, **fields):
            [stream] = client.submit([5] * prompt, SamplingParams(**fields))
            return reads_of(stream)

        asked = [ask(200, max_tokens=3), ask(200, max_tokens=3, sparse_top_k=107),
                 ask(200, max_tokens=3, sparse_top_k=0), ask(119, max_tokens=2),
                 ask(119, max_tokens=3), ask(119, max_tokens=2, sparse_top_k=96)]
        misses = [reads and reads["hot_misses"] for reads in await asyncio.gather(*asked)]
        assert misses == [120, 104, None, None, 120, 96]
        for budget, said in ((121, "at most 120, the server's --sparse-top-k"), (95, "at least 96"),
                             (-1, "0 \\(all\\) to")):
            with pytest.raises(RequestError, match=f"sparse_top_k is {budget}: {said}") as e:
                client.submit([5] * 9, SamplingParams(sparse_top_k=budget))
            assert e.value.param == "sparse_top_k"
        assert client.num_waiting == 0
    with_engine(go, kv=KVConfig(sparse_top_k=127))


def test_a_server_without_a_budget_takes_zero_only():
    async def go(client):
        [stream] = client.submit([5, 6], SamplingParams(max_tokens=3, sparse_top_k=0))
        assert await reads_of(stream) is None
        with pytest.raises(RequestError, match=r"sparse_top_k is 512: .* start it with --sparse-top-k N"):
            client.submit([5, 6], SamplingParams(sparse_top_k=512))
    with_engine(go)


@pytest.mark.parametrize("prompt, params, param", [
    ([], SamplingParams(), "prompt"), ([5] * 1000, SamplingParams(), "prompt"),
    ([100], SamplingParams(), "prompt"), ([-1], SamplingParams(), "prompt"),
    ([5], SamplingParams(top_p=0), "top_p"),
    ([5], SamplingParams(stop_token_ids=(100,)), "stop_token_ids"),
    ([5], SamplingParams(logit_bias={-1: 1.0}), "logit_bias"),
    ([5], SamplingParams(forced=(1, 100)), "forced"),
    ([5], SamplingParams(forced=(1,) * 17), "forced"),
    ([5], SamplingParams(forced=(1,) * 1000, max_tokens=None), "forced"),
], ids=str)
def test_a_bad_request_names_its_field_and_starts_nothing(prompt, params, param):
    async def go(client):
        with pytest.raises(RequestError) as caught:
            client.submit(prompt, params)
        assert caught.value.param == param
        assert client.num_waiting == 0
    with_engine(go)


def test_max_tokens_is_clipped_to_the_context():
    async def go(client):
        for params in (LONG, SamplingParams(max_tokens=5000)):
            [stream] = client.submit([5] * 990, params)
            assert await tokens_of(stream) == ([5] * 10, "length")
    with_engine(go)


def test_every_way_to_leave_a_stream_aborts_it():
    async def go(client):
        async def read_forever(stream):
            async for _ in stream:
                pass

        def num_open():
            return client.num_running + client.num_waiting

        streams = [client.submit([14], LONG)[0] for _ in range(4)]
        await streams[0].aclose()                       # closed
        assert num_open() == 3
        async with contextlib.aclosing(streams[1]):                          # left
            await anext(streams[1])
        assert num_open() == 2
        task = asyncio.create_task(read_forever(streams[2]))
        await asyncio.sleep(0)
        task.cancel()                                   # cancelled while it waits
        with pytest.raises(asyncio.CancelledError):
            await task
        assert num_open() == 1
        streams.clear()                                 # dropped
        gc.collect()
        await until(lambda: num_open() == 0)
        while (await client.stats())["rows_used"]:
            pass                                        # a step is on its way
        [stream] = client.submit([5, 6], SamplingParams(max_tokens=2))
        assert await tokens_of(stream) == ([5, 6], "length")
    with_engine(go)


def test_stop_at_ends_a_stream_with_stop():
    async def go(client):
        [stream] = client.submit([14], LONG)
        await anext(stream)
        stream.stop_at(1)
        assert (await tokens_of(stream))[1] == "stop"
        client.flush()
        assert (await client.stats())["steps_total"] == 3.0
    with_engine(go)


def test_a_killed_engine_ends_everything_at_once():
    async def go():
        deaths = []
        client = client_of(on_death=deaths.append)
        ready = await client.start()
        assert ready.info["page_size"] == 16
        streams = [client.submit([14], LONG)[0] for _ in range(3)]
        await anext(streams[0])
        os.kill(client._process.pid, signal.SIGKILL)
        for stream in streams:
            with pytest.raises(EngineDied, match="signal 9"):
                await tokens_of(stream)
        await until(lambda: deaths)
        for late in (lambda: client.submit([5], LONG), client.stats):
            with pytest.raises(EngineDied):
                r = late()
                await r
        await client.close()
        assert deaths == [client.died] and client.died.exit_code == -9
        assert client.num_running == client.num_waiting == 0
    drive(go())


def test_an_engine_bug_leaves_evidence_without_prompts(tmp_path, monkeypatch):
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path))

    async def go():
        lines = []
        client = client_of(log=lines.append)
        await client.start()
        [stream] = client.submit([13, 91, 92], LONG)
        with pytest.raises(EngineDied, match="a device fault") as caught:
            await tokens_of(stream)
        await client.close()
        assert caught.value.exit_code == 70
        assert "loading a fake" in lines
        assert not [line for line in caught.value.tail if "loading" in line]    # no start-up banner
        [path] = (tmp_path / "flights").iterdir()
        assert caught.value.tail[-1] == f"engine: died; the last turns: penstock sim --print {path}"
        assert path.stat().st_mode & 0o777 == 0o600
        log = flight.read(path.open())
        assert log.complete and log.error.startswith("RuntimeError at penstock/engine/loop.py:")
        [arrived] = log.turns[0].events
        assert len(arrived.prompt) == 3
        seen = re.findall(r"\d+", str([turn.events for turn in log.turns]))
        assert not {"91", "92"} & {*seen}
    drive(go())


def test_a_config_error_of_the_engine_is_a_config_error_here():
    async def go():
        client = client_of("missing")
        with pytest.raises(ConfigError, match="no such folder"):
            await client.start()
        with pytest.raises(ProcessLookupError):
            os.kill(client._process.pid, 0)
    drive(go())


def test_processes_of_two_installations_do_not_talk(monkeypatch):
    async def go():
        monkeypatch.setattr(wire, "VERSION", 99)
        with pytest.raises(ConfigError, match=r"version \d+ and the API process 99"):
            await client_of().start()
    drive(go())


def test_an_event_log_that_cannot_be_written_is_a_config_error(tmp_path):
    async def go():
        with pytest.raises(ConfigError, match="event-log"):
            await client_of(event_log=str(tmp_path / "no" / "log")).start()
    drive(go())


def test_sigusr1_writes_a_flight_while_it_sleeps_and_while_it_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path))

    def flights():
        folder = tmp_path / "flights"
        return [flight.read(p.open()) for p in sorted(folder.iterdir())] if folder.exists() else []

    async def go():
        lines = []
        client = client_of(log=lines.append)
        await client.start()
        try:
            await client.stats()
            os.kill(client._process.pid, signal.SIGUSR1)             # it sleeps
            await until(lambda: sum("flight recorder: " in line for line in lines) == 1)
            [stream] = client.submit([7], SamplingParams(max_tokens=900))
            await stream.__anext__()
            os.kill(client._process.pid, signal.SIGUSR1)
            await until(lambda: sum("flight recorder: " in line for line in lines) == 2)
            await stream.aclose()
            await client.stats()                            # it lives
        finally:
            await client.close()

    drive(go())
    asleep, running = flights()
    assert not any(t.events or t.plan for t in asleep.turns) and running.turns and not running.error


def test_an_engine_that_cannot_start_shows_why():
    async def go():
        client = EngineClient(Config(model=ModelConfig(model="x")),
                              argv=[sys.executable, "-c", "raise SystemExit('no torch here')"])
        with pytest.raises(EngineDied, match="no torch here") as caught:
            await client.start()
        assert caught.value.exit_code == 1
    drive(go())


def test_a_start_that_fails_leaves_no_socket_open(monkeypatch):
    async def go():
        async def broken(*args, **kwargs):
            raise OSError("no more files")

        monkeypatch.setattr(asyncio.get_running_loop(), "create_unix_connection", broken)
        client = client_of()
        ours = []
        pair = socket.socketpair
        monkeypatch.setattr(socket, "socketpair", lambda: ours.append(pair()) or ours[0])
        with pytest.raises(OSError, match="no more files"):
            await client.start()
        assert [s.fileno() for s in ours[0]] == [-1, -1]
        with pytest.raises(ProcessLookupError):
            os.kill(client._process.pid, 0)
    drive(go())


def test_choices_that_cannot_all_be_sent_leave_none_behind(monkeypatch):
    async def go(client):
        sent = []

        def send(message):
            sent.append(message)
            if len(sent) == 2:
                raise ProtocolError("too long")

        monkeypatch.setattr(client, "_send", send)
        with pytest.raises(ProtocolError):
            client.submit([5], SamplingParams(max_tokens=4, n=3))
        assert client.num_waiting == client.num_running == 0
        rids = [m.rid for m in sent if isinstance(m, wire.Submit)]
        assert [m.rid for m in sent if isinstance(m, wire.Abort)] == rids and len(rids) == 2
        monkeypatch.undo()
    with_engine(go)


def test_min_tokens_where_every_token_would_stop_is_refused():
    async def go(client):
        with pytest.raises(RequestError, match="every token id is a stop id") as caught:
            client.submit([5], SamplingParams(min_tokens=1), eos_ids=range(100))
        assert caught.value.param == "min_tokens" and client.num_waiting == 0
        [stream] = client.submit([5], SamplingParams(min_tokens=1, ignore_eos=True, max_tokens=2),
                                 eos_ids=range(100))
        assert await tokens_of(stream) == ([5, 5], "length")
    with_engine(go)


def test_an_engine_that_talks_nonsense_is_killed():
    nonsense = ("import socket, sys, time\n"
                "socket.socket(fileno=int(sys.argv[1])).sendall(b'\\1\\0\\0\\0x')\n"
                "time.sleep(100)")

    async def go():
        client = EngineClient(Config(model=ModelConfig(model="x")),
                              argv=[sys.executable, "-c", nonsense])
        with pytest.raises(EngineDied, match="signal 9"):
            await client.start()
    drive(go())


def test_cancelling_a_start_leaves_no_process():
    async def go():
        client = EngineClient(Config(model=ModelConfig(model="x")),
                              argv=[sys.executable, "-c", "import time; time.sleep(100)"])
        task = asyncio.create_task(client.start())
        await until(lambda: client._process is not None)
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(ProcessLookupError):
            os.kill(client._process.pid, 0)
    drive(go())


def test_close_is_a_clean_exit_and_is_idempotent(monkeypatch):
    monkeypatch.setattr("penstock.engine.client.client.EXIT_GRACE_S", 60.0)     # however busy the machine is

    async def go():
        deaths = []
        client = client_of(on_death=deaths.append)
        await client.start()
        [stream] = client.submit([14], LONG)
        await client.close()
        await client.close()
        assert client._process.returncode == 0 and not deaths
        with pytest.raises(EngineDied):
            await tokens_of(stream)
        with pytest.raises(EngineDied):
            client.submit([5], LONG)
    drive(go())


@pytest.mark.parametrize("model", ["fake", "slow"])
def test_the_engine_outlives_signals_of_the_terminal_but_not_its_parent(model):
    parent = (
        "import asyncio, os, sys\n"
        "from penstock.config.settings.tree import *\n"
        "from penstock.engine.client.client import EngineClient\n"
        "async def main():\n"
        "    loading = asyncio.Event()\n"
        "    loop = asyncio.get_running_loop()\n"
        "    log = lambda line: loop.call_soon_threadsafe(loading.set)\n"
        "    config = Config(model=ModelConfig(model=sys.argv[1]))\n"
        "    client = EngineClient(config, argv=sys.argv[2:], log=log)\n"
        "    starting = asyncio.create_task(client.start())\n"
        "    await loading.wait()\n"
        "    os.kill(client._process.pid, 2); os.kill(client._process.pid, 15)\n"
        "    if sys.argv[1] == 'fake':\n"
        "        await starting\n"
        "        await client.stats()\n"
        "    print(client._process.pid, flush=True)\n"
        "    os.kill(os.getpid(), 9)\n"
        "asyncio.run(main())\n")

    async def go():
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", parent, model, *ENGINE, stdout=asyncio.subprocess.PIPE)
        out, _ = await process.communicate()
        assert process.returncode == -9
        pid = int(out)
        await until(lambda: gone(pid))
    drive(go())


def gone(pid: int) -> bool:
    """No such process, or one that only waits to be reaped by a container's init."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state == "Z"
