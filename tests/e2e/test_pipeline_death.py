"""kill -9 of any process of a server with stages, under load: who waits hears of it, and nothing is left. The
same of ranks that are stopped, or wait for each other, with settings as they are by default."""
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
import where
from clients import TINY, WAIT_S, ask, children
from pair_server import gone

# What a lane of a server does that imports this at its start: its 300th sum is another than that of lane 0.
APART = """
import sys
if "penstock.exec.pipeline.process" in sys.orig_argv:
    from penstock.exec.pipeline.collectives import GlooGroup
    count, add = 0, GlooGroup.all_reduce
    def apart(self, x):
        global count
        count += 1
        if count == 300 and self._tp_rank.index == 1:
            self._call(lambda: self._group.recv([x], 0, 99))
        add(self, x)
    GlooGroup.all_reduce = apart
"""

# What a lane on a GPU does: once the file is there, its next step comes behind a kernel that does not end.
ON_DEVICE = """
import os, sys
if "penstock.exec.pipeline.process" in sys.orig_argv:
    import torch
    from penstock.exec.worker import Worker
    launch = Worker._launch
    def late(self, plan):
        if self._model.stage.tp_rank.index == 1 and os.path.exists(os.environ["HANG_FILE"]):
            torch.cuda._sleep(1 << 50)
        launch(self, plan)
    Worker._launch = late
"""
SAYS = {"lanes apart": "hangs: all wait for each other", "device": "hangs: its device has worked on one step"}


def role(pid: int) -> str:
    command = Path(f"/proc/{pid}/cmdline").read_text()
    names = {"penstock.exec.pipeline.process": "rank", "penstock.engine.process": "engine"}
    return next((what for name, what in names.items() if name in command), "helper")


def starting(folder: Path, log: Path, *flags: str, **env: str) -> tuple[subprocess.Popen, str]:
    """A server and its URL; hosted, and with too little memory for six requests."""
    (folder / "config.json").write_text(json.dumps(TINY))
    server = subprocess.Popen(
        [sys.executable, "-m", "penstock.cli.main", "serve", str(folder), "--port", "0", *flags,
         *where.flags(),
         "--threads", "1", "--load-format", "dummy", "--kv-cache-memory-bytes", "2M", "--kv-offloading-size", "64M",
         "--sparse-top-k", "160", "--host-decode", "always"],
        stdout=subprocess.PIPE, stderr=log.open("w"), text=True, env={**os.environ, **env})
    found = re.search(r"ready on (http://\S+) ", server.stdout.readline())
    if not found:
        server.kill()
        server.wait()
        raise AssertionError(log.read_text())
    return server, found.group(1)


@pytest.mark.sweep
@pytest.mark.parametrize("hang", [
    "stopped stage", "stopped lane",
    pytest.param("lanes apart", marks=pytest.mark.skipif("config.getoption('--device') != 'cpu'",
                                                         reason="lanes on GPUs add there")),
    pytest.param("device", marks=pytest.mark.skipif("config.getoption('--device') != 'cuda'",
                                                    reason="on a GPU"))])
def test_a_hang_is_heard_and_leaves_nothing(tmp_path, hang):
    log, env = tmp_path / "log", {}
    if hang in SAYS:
        (tmp_path / "path").mkdir()
        (tmp_path / "path" / "sitecustomize.py").write_text(APART if hang == "lanes apart" else ON_DEVICE)
        env["HANG_FILE"] = str(tmp_path / "hang")
        env["PYTHONPATH"] = os.pathsep.join([str(tmp_path / "path"), os.environ.get("PYTHONPATH", "")])
    server, url = starting(tmp_path, log, "--pp" if "stage" in hang else "--tp", "2", **env)
    try:
        below = children(server.pid)
        with ThreadPoolExecutor(6) as pool:
            answers = [pool.submit(ask, url, seed) for seed in range(6)]
            began = time.monotonic()
            if hang == "device":
                time.sleep(1)
                (tmp_path / "hang").touch()
                began = time.monotonic()
            elif hang != "lanes apart":
                time.sleep(1)
                os.kill([pid for pid in below if role(pid) == "rank"][1], signal.SIGSTOP)
                began = time.monotonic()
            assert {answer.result() for answer in answers} == {"engine_died"}
        print(f"{hang}: heard after {(took := time.monotonic() - began):.1f} s")
        assert took < 10 or hang == "lanes apart"
        assert server.wait(WAIT_S) == 1
        until = time.monotonic() + 10
        while (left := [pid for pid in below if not gone(pid)]) and time.monotonic() < until:
            time.sleep(0.05)
        assert not left
        told = log.read_text()
        assert SAYS.get(hang, "hangs: nothing was heard of its process") in told
        assert hang != "lanes apart" or told.count("collectives.py") >= 2, "the stacks of both"
    finally:
        server.kill()
        server.wait()


@pytest.mark.parametrize("victim", [
    *(pytest.param(v, marks=pytest.mark.sweep) for v in ("engine", "rank 0", "rank 1", "server", "lane 1")),
    *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(20))])
def test_kill_9_of_any_process_is_heard_and_leaves_nothing(tmp_path, victim):
    """Six requests at once, hosted and paused. A number: a random engine or rank, at a random moment. A lane:
    another is inside a sum with it."""
    chance, shared = random.Random(str(victim)), set(os.listdir("/dev/shm"))
    server, url = starting(tmp_path, tmp_path / "log", "--tp" if victim == "lane 1" else "--pp", "2")
    try:
        below = children(server.pid)
        roles = {role(pid): pid for pid in below if role(pid) != "rank"}
        roles |= {f"rank {i}": pid for i, pid in enumerate(pid for pid in below if role(pid) == "rank")}
        assert {"engine", "rank 0", "rank 1"} <= set(roles)
        with ThreadPoolExecutor(6) as pool:
            answers = [pool.submit(ask, url, seed) for seed in range(6)]
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
