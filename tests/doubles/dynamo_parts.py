"""Dynamo's frontend and workers of ours in processes, with file discovery, TCP requests and ZMQ events."""
from __future__ import annotations

import contextlib
import importlib.util
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import printable
import pytest
from clients import children, free_port
from pair_server import LEFT
from pipeline_engine import CONFIG, checkpoint

LIMIT_S = 120.0
KV = ("--kv-cache-memory-bytes", "4M")
QUICK = {"DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "1"}


def needed() -> None:
    """Skip where Dynamo is not installed."""
    for package in ("dynamo.frontend", "dynamo.indexer"):
        try:
            found = importlib.util.find_spec(package)
        except ModuleNotFoundError:
            found = None
        if found is None:
            pytest.skip("needs the wheels ai-dynamo 1.6.1 and ai-dynamo-runtime: pip install '.[dynamo]'")


def tiny(folder: Path) -> str:
    """A model with all that Dynamo's frontend reads of it."""
    model = checkpoint(folder, CONFIG | {"eos_token_id": printable.END, "bos_token_id": 0})
    Path(model, "tokenizer.json").write_text(printable.vocabulary().tokenizer)
    Path(model, "tokenizer_config.json").write_text("{}")
    return model


def small_port() -> int:
    """A free one that fits 16 bits with a sign: Dynamo's DYN_SYSTEM_PORT takes no other."""
    for port in random.sample(range(20_000, 32_000), 100):
        with socket.socket() as found, contextlib.suppress(OSError):
            found.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port is free")


class Fleet:
    """Ends all that it has started."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        (folder / "discovery").mkdir()
        hooks = str(Path(__file__).parents[1] / "hooks")
        paths = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p and p != hooks]
        paths.insert(0, str(Path(__file__).parents[2] / "src"))
        self._env = {**os.environ, **QUICK, "DYN_FILE_KV": str(folder / "discovery"), "DYN_LOG": "info",
                     "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)), "DYN_DISCOVERY_BACKEND": "file",
                     "DYN_EVENT_PLANE": "zmq", "DYN_REQUEST_PLANE": "tcp", "TMPDIR": str(folder)}
        self.processes: list[subprocess.Popen[bytes]] = []
        self.workers: list[Worker] = []
        self.url = ""

    def start(self, name: str, *words: str, **env: str) -> subprocess.Popen[bytes]:
        with (self._folder / f"{name}.log").open("ab") as into:
            process = subprocess.Popen([sys.executable, "-m", *words], stdout=into, stderr=into,
                                       env={**self._env, **env})
        self.processes.append(process)
        return process

    def worker(self, model: str, *flags: str) -> Worker:
        port, name = small_port(), f"worker{len(self.workers)}"
        process = self.start(name, "penstock.cli.main", "dynamo", model, "--served-model-name", "tiny", "--threads",
                             "1", "--max-num-batched-tokens", "48", *flags, DYN_SYSTEM_PORT=str(port))
        self.workers.append(Worker(self, process, name, f"http://127.0.0.1:{port}"))
        return self.workers[-1]

    def frontend(self, *flags: str) -> None:
        port = free_port()
        self.start("frontend", "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", str(port), *flags)
        self.url = f"http://127.0.0.1:{port}"

    def ready(self) -> None:
        """Until every worker is known and answers."""
        for worker in self.workers:
            self.until(lambda worker=worker: worker.is_up())
        self.until(lambda: self.ask([1, 2, 3], max_tokens=1).status_code == 200)
        time.sleep(1)                   # of several, the router learns of the last one a moment later

    def ask(self, prompt: list[int] | str, headers: dict[str, str] | None = None, **more: object) -> httpx.Response:
        try:
            return httpx.post(f"{self.url}/v1/completions", timeout=LIMIT_S, headers=headers, json={
                "model": "tiny", "prompt": prompt, "max_tokens": 16, "temperature": 0, **more})
        except httpx.ConnectError:
            return httpx.Response(599)

    def text(self, prompt: list[int] | str, **more: object) -> str:
        answer = self.ask(prompt, **more)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["text"]

    def until(self, what: Callable[[], object]) -> None:
        began = time.monotonic()
        while not what():
            if time.monotonic() - began > LIMIT_S:
                raise AssertionError("\n".join(f.read_text()[-4000:] for f in self._folder.glob("*.log")))
            time.sleep(0.1)

    def log(self, name: str) -> str:
        path = self._folder / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def close(self) -> None:
        for process in reversed(self.processes):
            process.terminate()
        for process in reversed(self.processes):
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Worker:
    def __init__(self, fleet: Fleet, process: subprocess.Popen[bytes], name: str, url: str) -> None:
        self._fleet, self.process, self._name, self.url = fleet, process, name, url

    def log(self) -> str:
        return self._fleet.log(self._name)

    def is_up(self) -> bool:
        assert self.process.poll() is None, self.log()[-4000:]
        return "Registered endpoint" in self.log() and bool(self.stats())

    def stats(self) -> dict[str, float]:
        """Its engines' numbers, at most half a second old; none while it starts."""
        try:
            text = httpx.get(f"{self.url}/metrics", timeout=LIMIT_S).text
        except httpx.TransportError:
            return {}
        return {name: float(value) for name, value in re.findall(r"^penstock:(\S+) (\S+)$", text, re.MULTILINE)}

    def flush(self) -> None:
        assert httpx.post(f"{self.url}/engine/control/flush", json={}).json() == {"status": "ok"}

    def flushed(self) -> None:
        """Until nothing is held once the cache is flushed."""
        def is_so() -> bool:
            self.flush()
            time.sleep(0.6)             # its numbers are read every half second
            text = httpx.get(f"{self.url}/metrics").text
            found = dict(LEFT.findall(text))
            assert {"hbm_pages_held", "num_requests_running"} <= found.keys()
            return not any(map(float, found.values()))
        self._fleet.until(is_so)

    def engines(self) -> list[int]:
        """Processes under it."""
        return children(self.process.pid)

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()
