"""`penstock serve` with a tiny model in processes of its own, as one engine or as those of a pair."""
from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest
import where

LIMIT_S = 60.0
SERVED = {"resident": ("--kv-cache-memory-bytes", "4M"),
          "hosted": ("--kv-cache-memory-bytes", "2M", "--kv-offloading-size", "8M", "--sparse-top-k", "96",
                     "--host-decode", "always")}
PAIR = ("--prefill-replicas", "1", "--decode-replicas", "1")
LONG = [(i * i * 7 + 3 * i) % 97 for i in range(900)]
SLICE_S = 0.002
LEFT = re.compile(r"^penstock:((?:prefill_)?(?:hbm_pages_held|hbm_pages_fenced|dram_pages_held|"
                  r"dram_pages_fenced|pair_requests_waiting|num_requests_\w+|moves_in_flight)) (\S+)$",
                  re.MULTILINE)


class Server:
    def __init__(self, model: str, log: Path, *flags: str, under: Sequence[str] = ()) -> None:
        """under: a command that runs it."""
        self.log, self.whose = log, ("", "prefill_") if "--prefill-replicas" in flags else ("",)
        self.process = subprocess.Popen(
            [*under, sys.executable, "-m", "penstock.cli.main", "serve", model, "--port", "0",
             "--threads", "1", "--served-model-name", "tiny", "--max-num-batched-tokens", "48", *where.flags(), *flags],
            stdout=subprocess.PIPE, stderr=log.open("a"), text=True)
        found = re.search(r"ready on (http://\S+) ", self.process.stdout.readline())
        assert found, log.read_text()
        self.url = found.group(1)
        self.http = httpx.Client(base_url=self.url, timeout=LIMIT_S)

    def ask(self, prompt: list[int], **more: object) -> dict:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 16, "temperature": 0, "logprobs": 2,
                "return_token_ids": True, "ignore_eos": True, **more}
        answer = self.http.post("/v1/completions", json=body)
        return {"status": answer.status_code, **answer.json()}

    def info(self) -> dict:
        return self.http.get("/server_info").json()

    def stats(self) -> dict[str, float]:
        return self.info()["stats"]

    def left(self) -> dict[str, float]:
        """Of this engine, and of a prefill engine that the server has beside it, what is not zero and is to
        be when nothing runs and nothing is cached."""
        found = dict(LEFT.findall(self.http.get("/metrics").text))
        assert {f"{whose}{name}" for whose in self.whose for name in
                ("hbm_pages_held", "pair_requests_waiting", "num_requests_running")} <= found.keys()
        return {name: float(value) for name, value in found.items() if float(value)}

    def flushed(self) -> None:
        """Until nothing is left once the caches are flushed."""
        self.until(lambda: self.http.post("/flush_cache").json()["success"] and not self.left())

    def until(self, what) -> None:
        began = time.monotonic()
        while not what():
            assert time.monotonic() - began < LIMIT_S, self.log.read_text()
            time.sleep(0.05)

    def close(self) -> None:
        self.http.close()
        self.process.terminate()
        try:
            self.process.wait(45)           # --drain-store-s is 20
        finally:
            self.process.kill()


@contextmanager
def serving(model: str, tmp_path: Path, *flags: str, under: Sequence[str] = ()):
    server = Server(model, tmp_path / "log", *flags, under=under)
    try:
        yield server
    finally:
        server.close()


def gone(pid: int) -> bool:
    """A process: a zombie is."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


def key_file(folder: Path) -> tuple[str, str]:
    """Flags of both ends of a pair."""
    key = folder / "key"
    key.write_text("0123456789abcdef")
    key.chmod(0o600)
    return "--cluster-key-file", str(key)


@contextmanager
def half_pushed(decode: Server, prefill: int, share: float, salt: str) -> Iterator[Future[dict]]:
    """`LONG` is asked, and the prefill engine, a process, stopped between two bytes of it: at least `share`
    of them have come. Gives the answer to come; what is still stopped at the end goes on."""
    def came() -> float:
        return decode.stats()["pair_received_bytes_total"]

    before = came()
    assert decode.ask(LONG, cache_salt=f"{salt} whole")["status"] == 200
    decode.until(lambda: decode.stats()["pair_requests_waiting"] == 0)
    whole = came() - before
    with ThreadPoolExecutor(1) as pool:
        try:
            for attempt in range(20):
                before, delivered = came(), decode.stats()["pair_delivered_total"]
                os.kill(prefill, signal.SIGSTOP)
                answer = pool.submit(decode.ask, LONG, cache_salt=f"{salt} {attempt}")
                decode.until(lambda: decode.stats()["pair_requests_waiting"] == 1)
                while not answer.done() and came() - before <= share * whole:
                    os.kill(prefill, signal.SIGCONT)
                    time.sleep(SLICE_S)
                    os.kill(prefill, signal.SIGSTOP)
                time.sleep(0.2)                     # what was on its way arrives
                now = decode.stats()
                if not answer.done() and 0 < now["pair_received_bytes_total"] - before < whole:
                    assert now["pair_requests_waiting"] == 1 and now["pair_delivered_total"] == delivered
                    break
                os.kill(prefill, signal.SIGCONT)    # a slice was too long: again
                answer.result()
            else:
                raise AssertionError("it was never stopped on its way")
            yield answer
        finally:
            with suppress(ProcessLookupError):
                os.kill(prefill, signal.SIGCONT)


def prompts() -> list[list[int]]:
    first = [(i * i * 7 + 3 * i) % 97 for i in range(150)]
    return [first, first, [*first, *(5, 6, 7) * 9], first[:128]]


def said(answer: dict) -> tuple:
    choice = answer["choices"][0]
    return choice["token_ids"], choice["logprobs"]["token_logprobs"], choice["finish_reason"]


def alike(told: tuple) -> tuple:
    """What another engine says to be right: on a GPU logprobs are near."""
    ids, logprobs, finish = told
    return ids, logprobs if where.DEVICE == "cpu" else pytest.approx(logprobs, abs=1e-3), finish
