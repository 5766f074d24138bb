"""Pairs of processes whose ends are cut in different ways, over each transport; kill -9 of each kind."""
from __future__ import annotations

import importlib.util
import os
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import httpx
import pytest
from clients import children, free_port
from pair_server import SERVED, Server, gone, key_file, prompts, said, serving
from pipeline_engine import checkpoint

LAYOUTS = {"tp 2 to pp 2": (("--tp", "2"), 1, ("--pp", "2")),
           "pp 2 to tp 2": (("--pp", "2"), 1, ("--tp", "2")),
           "tp 1 to tp 3": ((), 1, ("--tp", "3")), "2 prefill to 1 decode": ((), 2, ())}
CASES = [(layout, transport) for layout in LAYOUTS for transport in ("stream", "nixl")]
KINDS = {"server": "cli.main", "engine": "engine.process", "rank": "exec.pipeline.process"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return checkpoint(tmp_path_factory.mktemp("layouts"))


@pytest.fixture(scope="module")
def want(model: str, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    with serving(model, tmp_path_factory.mktemp("one"), *SERVED["resident"]) as one:
        return [said(one.ask(prompt))[0] for prompt in prompts()]


class Pair:
    """The ends, each a server of its own that `again` starts anew with the same flags."""

    def __init__(self, model: str, folder: Path, layout: str, transport: str) -> None:
        before, num, after = LAYOUTS[layout]
        self._chance = random.Random(layout)
        alike = (*SERVED["resident"], *key_file(folder), "--disaggregation-transfer-backend", transport,
                 "--disaggregation-mode")
        at = [f"127.0.0.1:{free_port()}" for _ in range(num)]
        flags = [*((*alike, "prefill", *before, "--disaggregation-listen", address) for address in at),
                 (*alike, "decode", *after, "--disaggregation-connect", ",".join(at))]
        self._start = [partial(Server, model, folder / f"log{n}", *own) for n, own in enumerate(flags)]
        self.ends: list[Server] = []
        try:
            for start in self._start:
                self.ends.append(start())
        except BaseException:
            self.close()
            raise

    @property
    def decode(self) -> Server:
        return self.ends[-1]

    def says(self, salt: str) -> list[list[int]]:
        """Once all ends have met, each prompt; computed by the prefill instances."""
        self.decode.until(lambda: self.decode.http.get("/health").json() == {"status": "ok"})
        before = self.decode.stats()["pair_delivered_total"]
        found = [said(self.decode.ask(prompt, cache_salt=salt))[0] for prompt in prompts()]
        assert self.decode.stats()["pair_delivered_total"] - before == len(found)
        return found

    def kill(self, end: int, kind: str, want: list[list[int]], salt: str) -> None:
        """Under load: what is answered is right, all of its processes go, and the end is started again."""
        victim, decode = self.ends[end], self.decode
        below = children(victim.process.pid)
        pid = self._chance.choice([p for p in [victim.process.pid, *below] if KINDS[kind] in command(p)])
        with ThreadPoolExecutor(4) as pool:
            busy = [pool.submit(decode.ask, prompt, cache_salt=salt) for prompt in prompts()]
            time.sleep(self._chance.uniform(0, 0.2))
            os.kill(pid, signal.SIGKILL)
            for answer, tokens in zip(busy, want, strict=True):
                if victim is not decode:
                    assert said(answer.result())[0] == tokens
                elif isinstance(answer.exception(), httpx.TransportError) or answer.result()["status"] == 503:
                    continue
                else:
                    assert said(answer.result())[0] == tokens
        victim.process.wait(60)
        victim.until(lambda: all(gone(one) for one in below))
        victim.close()
        self.ends[end] = self._start[end]()

    def close(self) -> None:
        for end in self.ends:
            end.close()


def command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


@pytest.mark.soak
@pytest.mark.parametrize(("layout", "transport"), [*CASES, ("tp 2 to pp 2", "mooncake")])
def test_ends_of_any_layout_say_what_one_engine_says_and_outlive_a_kill(
    model: str, want: list[list[int]], tmp_path: Path, layout: str, transport: str
) -> None:
    if transport != "stream" and importlib.util.find_spec(transport) is None:
        pytest.skip(f"pip install '.[{transport}]'")
    pair = Pair(model, tmp_path, layout, transport)
    try:
        assert pair.says("at first") == want
        for end in (0, len(pair.ends) - 1):
            server = pair.ends[end].process.pid
            has = [command(pid) for pid in [server, *children(server)]]
            kinds = [kind for kind, name in KINDS.items() if any(name in one for one in has)]
            for kind in kinds if transport == "stream" else kinds[-1:]:
                pair.kill(end, kind, want, f"{end} {kind}")
                assert pair.says(f"{end} {kind} behind it") == want
                for one in pair.ends:
                    one.flushed()
    finally:
        pair.close()


@pytest.mark.soak
@pytest.mark.parametrize("kind", KINDS)
def test_no_pool_loses_a_page_in_twenty_kills_of_each_kind_of_process(
    model: str, want: list[list[int]], tmp_path: Path, kind: str
) -> None:
    """Ten at either end, at any moment of four requests."""
    pair = Pair(model, tmp_path, "tp 2 to pp 2", "stream")
    try:
        for number in range(20):
            pair.kill(number % 2, kind, want, f"{number}")
            assert pair.says(f"{number} behind it") == want
            for one in pair.ends:
                one.flushed()
    finally:
        pair.close()
