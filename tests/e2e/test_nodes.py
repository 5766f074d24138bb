"""Two machines as two torchrun processes on loopback: what they say, and a kill of anything on either."""
from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from clients import TINY, WAIT_S, ask, children
from pair_server import gone
from pipeline_engine import CONFIG, PROMPTS, checkpoint

LAYOUT = ("--tp", "2", "--pp", "2", "--threads", "1", "--dtype", "float32", "--page-size", "8",
          "--max-num-batched-tokens", "48")
HOSTED = ("--kv-cache-memory-bytes", "2M", "--kv-offloading-size", "64M", "--sparse-top-k", "160", "--host-decode",
          "always")
PORTS = range(21000, 28000, 2)          # torchrun listens at one, node 0 at the next


def free_port() -> int:
    for port in PORTS[os.getpid() % len(PORTS):]:
        try:
            for one in (port, port + 1):
                socket.create_server(("127.0.0.1", one)).close()
            return port
        except OSError:
            continue
    raise AssertionError("no two free ports beside each other")


class Two:
    """`nodes`: the processes of torchrun; `url` of node 0."""

    def __init__(self, model: str, log: Path, *flags: str, **env: str) -> None:
        self.log, port = log, free_port()
        self.nodes = [subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(rank),
             "--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port", str(port), "--no-python",
             sys.executable, "-m", "penstock.cli.main", "serve", model, "--port", "0", *LAYOUT, *flags],
            env={**os.environ, "PENSTOCK_CLUSTER_KEY": "0123456789abcdef", **env},
            stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL, stderr=log.open("a"), text=True)
            for rank in range(2)]
        found = re.search(r"ready on (http://\S+) ", self.nodes[0].stdout.readline())
        assert found, log.read_text()
        self.url = found.group(1)

    @property
    def served(self) -> list[int]:
        """The process of `penstock serve` of each node."""
        return [next(pid for pid in children(node.pid)
                     if "penstock.cli.main" in command(pid)) for node in self.nodes]

    def ended(self, below: list[int]) -> list[int]:
        """Those of `below` that are left after a while."""
        until = time.monotonic() + WAIT_S
        while (left := [pid for pid in below if not gone(pid)]) and time.monotonic() < until:
            time.sleep(0.05)
        return left


def command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


@contextmanager
def two(model: str, log: Path, *flags: str) -> Iterator[Two]:
    found = None
    try:
        found = Two(model, log, *flags)
        yield found
    finally:
        for node in [] if found is None else found.nodes:
            for pid in [*children(node.pid), node.pid] if node.poll() is None else []:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
            node.wait()


def says(url: str) -> list[list[int]]:
    """Each prompt, one after another and then all at once: hits."""
    def one(prompt: tuple[int, ...]) -> list[int]:
        answer = httpx.post(f"{url}/v1/completions", timeout=WAIT_S, json={
            "prompt": list(prompt), "max_tokens": 12, "temperature": 0, "ignore_eos": True,
            "return_token_ids": True})
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["token_ids"]

    with ThreadPoolExecutor(4) as pool:
        return [*map(one, PROMPTS.values()), *pool.map(one, PROMPTS.values())]


@pytest.mark.sweep
def test_two_nodes_of_torchrun_say_what_one_rank_says(tmp_path):
    """Over TLS; and end, both, when node 0 is asked to."""
    model = checkpoint(tmp_path / "model", {**CONFIG, "num_hidden_layers": 2})
    one = subprocess.Popen([sys.executable, "-m", "penstock.cli.main", "serve", model, "--port", "0",
                            "--dtype", "float32", "--page-size", "8", "--kv-cache-memory-bytes", "4M", "--threads",
                            "1"],
                           stdout=subprocess.PIPE, text=True)
    try:
        want = says(re.search(r"ready on (http://\S+) ", one.stdout.readline()).group(1))
    finally:
        one.kill()
        one.wait()
    with two(model, tmp_path / "log", "--kv-cache-memory-bytes", "1M", "--kv-offloading-size", "4M",
             "--cluster-tls-cert",
             str(Path(__file__).parents[1] / "data" / "pair_tls.pem")) as nodes:
        assert says(nodes.url) == want
        below = [pid for node in nodes.nodes for pid in children(node.pid)]
        assert len([pid for pid in below if "pipeline.process" in command(pid)]) == 4
        os.kill(nodes.served[0], signal.SIGTERM)
        assert [node.wait(WAIT_S) for node in nodes.nodes] == [0, 0], nodes.log.read_text()
        assert not nodes.ended(below)


@pytest.mark.parametrize("engines", [
    pytest.param(("--dp", "2"), marks=pytest.mark.sweep),
    pytest.param(("--prefill-replicas", "1", "--decode-replicas", "1"), marks=pytest.mark.soak)], ids=lambda e: e[0])
def test_several_engines_have_ranks_on_both_nodes(tmp_path, engines):
    """And one that lost a rank on the other node is there again; both nodes end when node 0 is asked to."""
    model = checkpoint(tmp_path / "model", {**CONFIG, "num_hidden_layers": 2})
    with two(model, tmp_path / "log", "--kv-cache-memory-bytes", "1M", "--kv-offloading-size", "4M", *engines) as nodes:
        want = says(nodes.url)
        below = [pid for node in nodes.nodes for pid in children(node.pid)]
        server, agent = nodes.served

        def ranks() -> list[int]:
            return [pid for pid in children(agent) if "pipeline.process" in command(pid)]

        assert len(ranks()) == 4
        info = httpx.get(f"{nodes.url}/server_info").json()
        first = {pid for name, pid in info.items() if name.startswith("rank_") and name.endswith("_pid")}
        victim = next(pid for pid in ranks() if pid not in first)       # of the prefill engine, or another
        os.kill(victim, signal.SIGKILL)
        until = time.monotonic() + WAIT_S
        while not gone(victim) or len(ranks()) < 4:
            assert time.monotonic() < until and nodes.nodes[0].poll() is None, nodes.log.read_text()
            time.sleep(0.1)
        assert says(nodes.url) == want              # by the others, or without the prefill engine
        os.kill(server, signal.SIGTERM)
        assert [node.wait(WAIT_S) for node in nodes.nodes] == [0, 0], nodes.log.read_text()
        assert not nodes.ended(below)


@pytest.mark.parametrize("victim", [
    *(pytest.param(v, marks=pytest.mark.sweep) for v in ("agent", "rank of node 1")),
    *(pytest.param(v, marks=pytest.mark.soak) for v in ("server", "silent agent", *["agent", "server"] * 4))])
def test_a_kill_on_either_node_is_heard_and_leaves_nothing(tmp_path, victim):
    """Six requests at once, hosted and paused."""
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    shared = set(os.listdir("/dev/shm"))
    with two(str(tmp_path), tmp_path / "log", "--load-format", "dummy", *HOSTED) as nodes, \
            ThreadPoolExecutor(6) as pool:
        below = [pid for node in nodes.nodes for pid in children(node.pid)]
        answers = [pool.submit(ask, nodes.url, seed) for seed in range(6)]
        time.sleep(1.5)
        assert not any(answer.done() for answer in answers)
        server, agent = nodes.served
        rank = next(pid for pid in children(agent) if "pipeline.process" in command(pid))
        pid, number = {"agent": (agent, signal.SIGKILL), "server": (server, signal.SIGKILL),
                       "rank of node 1": (rank, signal.SIGKILL),
                       "silent agent": (agent, signal.SIGSTOP)}[victim]
        killed = time.monotonic()
        os.kill(pid, number)
        heard = {answer.result() for answer in answers}
        print(f"{victim}: heard after {time.monotonic() - killed:.1f} s")
        assert "engine_died" not in heard if victim == "server" else heard == {"engine_died"}
        if number == signal.SIGSTOP:
            os.kill(pid, signal.SIGCONT)
        assert all(node.wait(WAIT_S) for node in nodes.nodes)
        assert not nodes.ended(below) and set(os.listdir("/dev/shm")) == shared
