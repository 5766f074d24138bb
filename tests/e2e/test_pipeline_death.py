"""kill -9 of any process of a server with stages, under load: who waits hears of it, and nothing is left."""
from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from clients import TINY, WAIT_S, ask, children
from pair_server import gone


def role(pid: int) -> str:
    command = Path(f"/proc/{pid}/cmdline").read_text()
    names = {"penstock.exec.pipeline.process": "rank", "penstock.serve.engine.main": "engine"}
    return next((what for name, what in names.items() if name in command), "helper")


@pytest.mark.parametrize("victim", [
    *(pytest.param(v, marks=pytest.mark.sweep) for v in ("engine", "rank 0", "rank 1", "server", "lane 1")),
    *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(20))])
def test_kill_9_of_any_process_is_heard_and_leaves_nothing(tmp_path, victim):
    """Six requests at once, hosted and paused. A number: a random engine or rank, at a random moment. A lane:
    another is inside a sum with it."""
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    chance, shared, log = random.Random(str(victim)), set(os.listdir("/dev/shm")), tmp_path / "log"
    server = subprocess.Popen(
        [sys.executable, "-m", "penstock.serve.cli.main", "serve", str(tmp_path), "--port", "0",
         "--tp" if victim == "lane 1" else "--pp", "2", "--threads", "1", "--load-format", "dummy",
         "--hbm-bytes", "2M", "--dram-bytes", "64M", "--sparse-top-k", "160", "--sparse-kv", "always"],
        stdout=subprocess.PIPE, stderr=log.open("w"), text=True)
    try:
        found = re.search(r"ready on (http://\S+) ", server.stdout.readline())
        assert found, log.read_text()
        below = children(server.pid)
        roles = {role(pid): pid for pid in below if role(pid) != "rank"}
        roles |= {f"rank {i}": pid for i, pid in enumerate(pid for pid in below if role(pid) == "rank")}
        assert {"engine", "rank 0", "rank 1"} <= set(roles)
        with ThreadPoolExecutor(6) as pool:
            answers = [pool.submit(ask, found.group(1), seed) for seed in range(6)]
            time.sleep(chance.uniform(0.5, 3))
            assert not any(answer.done() for answer in answers)
            who = (victim.replace("lane", "rank") if isinstance(victim, str) else
                   chance.choice(["engine", "rank 0", "rank 1"]))
            os.kill(server.pid if who == "server" else roles[who], signal.SIGKILL)
            heard = {answer.result() for answer in answers}
        if who == "server":
            assert server.wait(WAIT_S) == -signal.SIGKILL and "engine_died" not in heard
        else:
            assert server.wait(WAIT_S) == 1 and heard == {"engine_died"}
        until = time.monotonic() + 10
        while (left := [pid for pid in below if not gone(pid)]) and time.monotonic() < until:
            time.sleep(0.05)
        assert not left and set(os.listdir("/dev/shm")) == shared
    finally:
        server.kill()
        server.wait()
