"""kill -9 of each process of a server while it starts: exit code 1, a line that names it, nothing left."""
from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from clients import TINY, WAIT_S, children, free_port
from http_server import SCRIPT
from pair_server import gone

pytestmark = pytest.mark.by_exec      # forks with all imports done are ready before they are killed
SERVE = [sys.executable, "-m", "penstock.cli.main", "serve"]
FAKE_ENGINE, ENGINE, RANK = "http_fake.py --engine", "engine.process", "pipeline.process"
KILLED = r"was killed by signal 9"
ENGINE_SAYS = rf"penstock: the engine process {KILLED}"
AGENT_SAYS = r"(rank \d \(process \d+ of node 1.*|node 1 .*) (is gone|does not start its ranks)"
PAIR = ("--prefill-replicas", "1", "--decode-replicas", "1")


def command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def found(server: subprocess.Popen, kind: str, nth: int) -> int:
    """The process under `server` whose command line has `kind`, once it runs that program."""
    until = time.monotonic() + WAIT_S
    while time.monotonic() < until:
        those = [pid for pid in sorted(children(server.pid)) if kind in command(pid)]
        if len(those) > nth:
            return those[nth]
        time.sleep(0.01)
    raise AssertionError(f"no {kind} in {WAIT_S} s")


def killed(server: subprocess.Popen, victim: int, log: Path) -> str:
    """The log, once the server has ended as it should."""
    below = children(server.pid)
    os.kill(victim, signal.SIGKILL)
    assert server.wait(WAIT_S) == 1, log.read_text()
    until = time.monotonic() + 10
    while (left := [pid for pid in below if not gone(pid)]) and time.monotonic() < until:
        time.sleep(0.05)
    assert not left
    assert server.stdout.read() == "", "it was never ready"
    return log.read_text()


def start(argv: list[str], log: Path, **env: str) -> subprocess.Popen:
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=log.open("w"), text=True,
                            env={**os.environ, "PENSTOCK_CLUSTER_KEY": "0123456789abcdef", **env})


@pytest.mark.parametrize(("flags", "kind", "nth", "says"), [
    pytest.param((), FAKE_ENGINE, 0, ENGINE_SAYS, id="engine"),
    pytest.param((), "chat_render", 0, rf"the helper process \S+chat_render {KILLED}", id="template"),
    pytest.param(("--dp", "2"), FAKE_ENGINE, 1, rf"engine \d: the engine process {KILLED}", id="dp"),
    pytest.param(PAIR, FAKE_ENGINE, 0, KILLED, id="one end"),
    pytest.param(PAIR, FAKE_ENGINE, 1, KILLED, id="other end")])
def test_kill_9_before_ready_is_exit_code_1(tmp_path, flags, kind, nth, says):
    """An engine that never gets ready, and the helpers that start beside it."""
    log = tmp_path / "log"
    server = start([sys.executable, SCRIPT, "slow", "--port", "0", *flags], log)
    try:
        victim = found(server, kind, nth)
        assert re.search(says, killed(server, victim, log)), log.read_text()
    finally:
        server.kill()
        server.wait()


@pytest.mark.parametrize(("flags", "kind", "nth", "after_s", "says"), [
    pytest.param(("--pp", "2"), RANK, 1, 0.2, rf"the start failed: rank 1 .*{KILLED}", id="rank"),
    *(pytest.param((), ENGINE, 0, after_s, ENGINE_SAYS, id=f"engine after {after_s} s",
                   marks=pytest.mark.sweep) for after_s in (0.1, 0.4, 0.8)),
    *(pytest.param(("--pp", "2"), RANK, nth, after_s, rf"rank {nth} .*{KILLED}", marks=pytest.mark.sweep,
                   id=f"rank {nth} after {after_s} s") for nth in (0, 1) for after_s in (0.1, 0.4)),
    *(pytest.param(PAIR, ENGINE, nth, 0.6, KILLED, id=f"end {nth}", marks=pytest.mark.sweep)
      for nth in (0, 1))])
def test_kill_9_of_a_process_that_loads_is_exit_code_1(tmp_path, flags, kind, nth, after_s, says):
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    log = tmp_path / "log"
    server = start([*SERVE, str(tmp_path), "--port", "0", "--threads", "1", "--load-format", "dummy",
                    "--kv-cache-memory-bytes", "2M", *flags], log)
    try:
        victim = found(server, kind, nth)
        time.sleep(after_s)
        assert re.search(says, killed(server, victim, log)), log.read_text()
    finally:
        server.kill()
        server.wait()


def test_a_start_without_memory_names_the_limit_and_prints_no_traceback(tmp_path):
    """400 MB of addresses: torch's libraries do not fit into the engine process."""
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    log = tmp_path / "log"
    server = start(["sh", "-c", 'ulimit -v 400000 && exec "$@"', "sh", *SERVE, str(tmp_path), "--port", "0",
                    "--threads", "1", "--load-format", "dummy", "--kv-cache-memory-bytes", "2M"], log)
    try:
        assert server.wait(WAIT_S) == 1
    finally:
        server.kill()
    said = log.read_text()
    assert re.search(r"start failed: memory could not be allocated: ulimit -v 400000 .* 0.38 GiB .*"
                     "raise it", said) and "Traceback" not in said, said


@pytest.mark.sweep
@pytest.mark.parametrize("after_s", (0.0, 0.4))
def test_kill_9_of_an_agent_that_loads_is_exit_code_1(tmp_path, after_s):
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    logs = [tmp_path / "log0", tmp_path / "log1"]
    argv = [*SERVE, str(tmp_path), "--port", "0", "--threads", "1", "--load-format", "dummy",
            "--kv-cache-memory-bytes", "2M", "--pp", "2", "--nnodes", "2", "--dist-init-addr",
            f"127.0.0.1:{free_port()}"]
    nodes = [start([*argv, "--node-rank", str(n)], logs[n]) for n in range(2)]
    try:
        found(nodes[1], RANK, 0)                        # node 0 has taken it
        time.sleep(after_s)
        nodes[1].kill()
        assert nodes[0].wait(WAIT_S) == 1, logs[0].read_text()
        assert re.search(AGENT_SAYS, logs[0].read_text()), logs[0].read_text()
    finally:
        for node in nodes:
            node.kill()
            node.wait()
