"""`penstock serve` with a tiny model in processes of its own, as one engine or as those of a pair."""
from __future__ import annotations

import re
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import httpx

LIMIT_S = 60.0
SERVED = {"resident": ("--hbm-bytes", "4M"),
          "hosted": ("--hbm-bytes", "2M", "--dram-bytes", "8M", "--sparse-top-k", "96",
                     "--sparse-kv", "always")}
PAIR = ("--prefill", "1", "--decode", "1")


class Server:
    def __init__(self, model: str, log: Path, *flags: str) -> None:
        self.log = log
        self.process = subprocess.Popen(
            [sys.executable, "-m", "penstock.serve.cli.main", "serve", model, "--port", "0", "--threads", "1",
             "--served-model-name", "tiny", "--step-tokens", "48", *flags],
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

    def until(self, what) -> None:
        began = time.monotonic()
        while not what():
            assert time.monotonic() - began < LIMIT_S, self.log.read_text()
            time.sleep(0.05)

    def close(self) -> None:
        self.http.close()
        self.process.terminate()
        try:
            self.process.wait(20)
        finally:
            self.process.kill()


@contextmanager
def serving(model: str, tmp_path: Path, *flags: str):
    server = Server(model, tmp_path / "log", *flags)
    try:
        yield server
    finally:
        server.close()


def prompts() -> list[list[int]]:
    first = [(i * i * 7 + 3 * i) % 97 for i in range(150)]
    return [first, first, [*first, *(5, 6, 7) * 9], first[:128]]


def said(answer: dict) -> tuple:
    choice = answer["choices"][0]
    return choice["token_ids"], choice["logprobs"]["token_logprobs"], choice["finish_reason"]
