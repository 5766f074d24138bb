"""Two real engines and a network between them that waits, cuts and flips; engines killed at any moment."""
from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from pair_engines import PairOfEnds, whole
from pair_proxy import Fault, Proxy
from pair_server import LONG, PAIR, SERVED, Server, half_pushed, key_file, prompts, said, serving
from pipeline_engine import checkpoint

from penstock.engine.wire import Flush

PROMPT = tuple((i * i * 7 + 3 * i) % 97 for i in range(150))
PLACES = {
    "resident": {"kv_cache_memory_bytes": "4M"},
    "hosted": {"kv_cache_memory_bytes": "2M", "kv_offloading_size": "8M", "sparse_top_k": 96, "host_decode": "always"},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return checkpoint(tmp_path_factory.mktemp("pair"))


def faults(seed: int, count: int) -> tuple[Fault, ...]:
    """One for each of the first connections, at a byte that the prompts of one round are past."""
    rng = random.Random(seed)
    found = []
    for n in range(count):
        way, kind = rng.choice(("in", "in", "out")), ("cut", "flip", "cut", "delay")[n % 4]
        at = rng.randrange(rng.choice((600, 1_200, 30_000 if way == "in" else 2_000)))
        found.append(Fault(way, at, cut=kind == "cut", flip=kind == "flip",
                           delay_s=0.002 if kind == "delay" else 0.0, connection=n))
    return tuple(found)


def check_weather(model: str, folder: Path, place: str, seed: int, count: int) -> None:
    prompts = [PROMPT, PROMPT[:77], PROMPT + (5, 6, 7) * 9]
    one = whole(model, prompts, **PLACES[place])
    proxy = Proxy(f"unix:{folder / 'socket'}", faults(seed, count), address=f"unix:{folder / 'proxy'}")
    try:
        with PairOfEnds(model, folder, decode={"disaggregation_connect": [proxy.address]}, **PLACES[place]) as pair:
            ends = (pair.prefill, pair.decode)
            for n in range(count):
                rids = [pair.decode.submit(prompt, namespace=n + 1) for prompt in prompts]
                pair.finish()
                assert [pair.decode.got[rid] for rid in rids] == list(one.got.values())
                pair.until(lambda: 0 < pair.decode.peer.epoch == pair.prefill.peer.epoch)
            pair.settle()
            stats = pair.decode.loop.stats()
            assert stats["pair_delivered_total"] > 0 and proxy.connections > 1
            for end in ends:
                end.loop.handle(Flush())
            pair.until(lambda: not any(n for end in ends for n in end.free().values()))
    finally:
        proxy.close()


@pytest.mark.parametrize("place", PLACES)
def test_a_bad_network_changes_no_token_and_leaves_every_pool_whole(model: str, tmp_path: Path,
                                                                    place: str) -> None:
    check_weather(model, tmp_path, place, seed=1, count=4)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(10, 15))
@pytest.mark.parametrize("place", PLACES)
def test_fifty_faults_of_the_network(model: str, tmp_path: Path, place: str, seed: int) -> None:
    check_weather(model, tmp_path, place, seed, count=10)


# ---------------------------------------------------------------- over real processes
def storm(server: Server, count: int) -> None:
    """Clients that leave at any moment."""
    def leave(i: int) -> None:
        rng = random.Random(i)
        body = {"model": "tiny", "prompt": prompts()[i % 4], "max_tokens": 64, "ignore_eos": True,
                "cache_salt": f"x{i % 50}"}
        with contextlib.suppress(httpx.TimeoutException):
            httpx.post(f"{server.url}/v1/completions", json=body, timeout=rng.uniform(0.005, 0.2))
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(leave, range(count)))


def is_quiet(server: Server) -> bool:
    stats = server.info()["stats"]
    names = ("requests_running", "requests_waiting", "moves_in_flight", "hbm_pages_fenced")
    return not any(stats[name] for name in names)


@pytest.mark.soak
def test_fifty_cut_streams_and_five_hundred_aborts(model: str, tmp_path: Path) -> None:
    flags, rng = (*SERVED["resident"], *key_file(tmp_path)), random.Random(4)
    with serving(model, tmp_path, *SERVED["resident"]) as one:
        want = [said(one.ask(prompt))[0] for prompt in prompts()]
    with serving(model, tmp_path, *flags, "--disaggregation-mode", "prefill",
                 "--disaggregation-listen", "127.0.0.1:0") as prefill:
        proxy = Proxy(prefill.info()["pair_address"])
        with serving(model, tmp_path, *flags, "--disaggregation-mode", "decode",
                     "--disaggregation-connect", proxy.address) as decode, ThreadPoolExecutor(4) as pool:
            while proxy.connections <= 50:      # a cut may come before the last one was noticed
                decode.until(lambda: not decode.info()["prefill"]["missing"])
                salt = f"{proxy.connections} {rng.random()}"
                waiting = [pool.submit(decode.ask, prompt, cache_salt=salt) for prompt in prompts()]
                time.sleep(rng.uniform(0, 0.3))
                proxy.cut()
                assert [said(w.result())[0] for w in waiting] == want
            storm(decode, 500)
            decode.until(lambda: not decode.info()["prefill"]["missing"])
            answer = decode.ask(prompts()[0], cache_salt="after")
            assert said(answer)[0] == want[0]
            assert answer["usage"]["prompt_tokens_details"]["remote_tokens"] == len(prompts()[0])
            for end in (decode, prefill):
                end.until(lambda end=end: is_quiet(end))
        proxy.close()


@pytest.mark.soak
def test_fifty_kills_of_either_engine(model: str, tmp_path: Path) -> None:
    """Whoever had the prefill engine killed under it gets its answer. With the decode engine the server goes,
    and who waited hears a 503, or the end of its connection."""
    with serving(model, tmp_path, *SERVED["resident"]) as one:
        want = [said(one.ask(prompt))[0] for prompt in prompts()]
    with serving(model, tmp_path, *SERVED["resident"], *PAIR) as pair, ThreadPoolExecutor(4) as pool:
        for n in range(40):
            waiting = [pool.submit(pair.ask, prompt, cache_salt=f"{n}") for prompt in prompts()]
            os.kill(pair.info()["prefill"]["pid"], signal.SIGKILL)
            assert [said(w.result())[0] for w in waiting] == want
            pair.until(lambda n=n: pair.info()["prefill"]["restarts"] == n + 1
                       and not pair.info()["prefill"]["missing"])
        pair.until(lambda: is_quiet(pair))
    heard = set()
    for n in range(10):
        with serving(model, tmp_path, *SERVED["resident"], *PAIR) as pair, ThreadPoolExecutor(4) as pool:
            victim = pair.info()["pid"]
            waiting = [pool.submit(pair.ask, prompt, cache_salt=f"{n}") for prompt in prompts()]
            time.sleep(random.Random(n).uniform(0, 0.3))
            os.kill(victim, signal.SIGKILL)
            for w, right in zip(waiting, want, strict=True):
                try:
                    answer = w.result()
                except httpx.TransportError:
                    heard.add("closed")
                    continue
                heard.add(answer["status"])
                if answer["status"] == 200:
                    assert said(answer)[0] == right
                else:
                    assert answer["status"] == 503 and answer["error"]["message"]
            assert pair.process.wait(30) != 0
    assert 503 in heard


ON_ITS_WAY = [pytest.param(victim, place, share, marks=pytest.mark.sweep if swept else pytest.mark.soak)
              for victim, swept_place in (("prefill", "hosted"), ("decode", "resident"))
              for place in SERVED for share in (0, 0.5, 0.9)
              for swept in [(place, share) == (swept_place, 0.5)]]


@pytest.mark.parametrize(("victim", "place", "share"), ON_ITS_WAY)
def test_an_engine_is_killed_while_a_push_is_under_way(model: str, tmp_path: Path, victim: str, place: str,
                                                       share: float) -> None:
    """The prefill engine: who waits gets its answer, and the next prompt is computed there again. The decode
    engine: its server goes, and the prefill engine works for the next one. No page stays behind."""
    with serving(model, tmp_path, *SERVED[place]) as one:
        want = said(one.ask(LONG))
    check = {"prefill": check_prefill_killed, "decode": check_decode_killed}[victim]
    check(model, tmp_path, SERVED[place], share, want)


def check_computed_there(decode: Server, salt: str, want: tuple) -> None:
    decode.until(lambda: not decode.info()["prefill"]["missing"])
    answer = decode.ask(LONG, cache_salt=salt)
    assert said(answer) == want
    assert answer["usage"]["prompt_tokens_details"]["remote_tokens"] == len(LONG)


def check_prefill_killed(model: str, folder: Path, flags: tuple[str, ...], share: float,
                         want: tuple) -> None:
    with serving(model, folder, *flags, *PAIR) as pair:
        for n in range(2):
            victim = pair.info()["prefill"]["pid"]
            with half_pushed(pair, victim, share, f"{n}") as waiting:
                lost = pair.stats()["pair_lost_total"]
                os.kill(victim, signal.SIGKILL)
                answer = waiting.result()
            assert said(answer) == want
            assert "remote_tokens" not in answer["usage"]["prompt_tokens_details"]
            assert pair.stats()["pair_lost_total"] == lost + 1
            pair.until(lambda n=n: pair.info()["prefill"]["restarts"] == n + 1)
            check_computed_there(pair, f"{n} after", want)
            pair.flushed()


def check_decode_killed(model: str, folder: Path, flags: tuple[str, ...], share: float,
                        want: tuple) -> None:
    flags = (*flags, *key_file(folder))
    with serving(model, folder, *flags, "--disaggregation-mode", "prefill",
                 "--disaggregation-listen", "127.0.0.1:0") as prefill:
        to = ("--disaggregation-mode", "decode", "--disaggregation-connect", prefill.info()["pair_address"])
        for n in range(2):
            with serving(model, folder, *flags, *to) as decode:
                with half_pushed(decode, prefill.info()["pid"], share, f"{n}") as waiting:
                    os.kill(decode.info()["pid"], signal.SIGKILL)
                    with contextlib.suppress(httpx.TransportError):
                        assert waiting.result()["status"] == 503
                assert decode.process.wait(30) != 0
            prefill.until(lambda: prefill.info()["decode"]["missing"])
            prefill.flushed()
        with serving(model, folder, *flags, *to) as decode:
            check_computed_there(decode, "after", want)
            decode.flushed()
            prefill.flushed()
