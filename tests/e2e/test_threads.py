"""What threads cost while other processes have the cores: waits at OpenMP's barriers are bounded."""
from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from clients import TINY, children

from penstock import LLM, SamplingParams
from penstock.config.base import machine

WIDE = {**TINY, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 4, "vocab_size": 4096}
WAITS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
BUSY = "import os\nwhile os.getppid() == {}: pass"


def processor_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def is_engine(pid: int) -> bool:
    """Whether the process is an engine, and none of those that it or this one starts for a moment."""
    try:
        return b"penstock.engine.process" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def spent(model: Path, threads: int) -> float:
    """Processor seconds of an engine for one answer, after it has warmed up: the least of three, as
    memory and caches are shared with the busy processes."""
    before = children(os.getpid())
    with LLM(str(model), load_format="dummy", kv_cache_memory_bytes="32M", threads=threads, seed=1) as llm:
        [pid] = [pid for pid in children(os.getpid()) if pid not in before and is_engine(pid)]

        def answer(tokens: int) -> float:
            began = processor_s(pid)
            llm.generate([{"prompt_token_ids": [*range(40)]}],
                         SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True))
            return processor_s(pid) - began

        answer(20)
        return min(answer(150) for _ in range(3))


@pytest.mark.by_exec        # libgomp reads its limits where it is loaded
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")
def test_threads_beside_busy_processes_take_hardly_more_processor_time_than_one(tmp_path, monkeypatch):
    """With libgomp's own waits it is 3 to 16 times as much."""
    for name in WAITS:
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "config.json").write_text(json.dumps(WIDE))
    busy = [subprocess.Popen([sys.executable, "-c", BUSY.format(os.getpid())])
            for _ in os.sched_getaffinity(0)]
    try:
        one = spent(tmp_path, 1)
        assert spent(tmp_path, 2) < 2 * one + 0.1
    finally:
        for process in busy:
            process.kill()
            process.wait()


@pytest.mark.parametrize("own", [{"OMP_WAIT_POLICY": "active"}, {"GOMP_SPINCOUNT": "7"},
                                 {"KMP_BLOCKTIME": "3"}])
def test_a_wait_policy_of_the_user_stays(monkeypatch, own):
    for name in WAITS:
        monkeypatch.delenv(name, raising=False)
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    machine.bound_waits()
    assert {name: os.environ[name] for name in WAITS if name in os.environ} == own
