"""Pipeline stages as processes: counters, memory, and how they end. Their tokens: tests/equal."""
from __future__ import annotations

import os
import signal
import time
from collections import deque
from dataclasses import replace
from pathlib import Path
from queue import Empty, SimpleQueue
from types import SimpleNamespace

import pytest
from pipeline_engine import CONFIG, PROMPTS, Pipeline, checkpoint, gguf_checkpoint

from penstock.cli.doctor import examine
from penstock.config.base.errors import ConfigError
from penstock.config.base.machine import probe
from penstock.config.settings.cli import from_options
from penstock.exec.pipeline import wire
from penstock.exec.pipeline import workers as groups
from penstock.exec.pipeline.workers import RankDied, WorkerGroup, check_identity
from penstock.exec.start import build

SPARSE = {"sparse_top_k": 96, "host_decode": "always"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return checkpoint(tmp_path_factory.mktemp("pipeline"))


@pytest.fixture(scope="module")
def dense(model):
    with Pipeline(model, kv_cache_memory_bytes="4M") as one:
        return one.play()


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


def rss(pid: int) -> int:
    """Bytes of memory that a process holds, those included that it shares."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def processor_s(pid: int) -> float:
    """Seconds of processor that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def layers_of(stats: dict[str, float], name: str) -> dict[str, float]:
    return {key.split('"')[1]: value for key, value in stats.items() if key.startswith(name + "{")}


def test_counters_are_there_without_waiting_for_a_rank(model):
    """They came with what the ranks have reported: no plan waits for them. Ranks that have no work tell their
    last ones by themselves, each of its own layers under their numbers in the model."""
    with Pipeline(model, kv_cache_memory_bytes="1M", kv_offloading_size="8M", pp=2, pp_layers=["4", "2"],
                  **SPARSE) as two:
        pids = [two.built.info[f"rank_{i}_pid"] for i in range(2)]
        two.add(9, PROMPTS[1], 24)
        while len(two.got[9]) < 12:
            two.turn()
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        reads, stats = two.ex.kv_reads(9), two.ex.stats()
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        assert reads["hot_misses"] > 0 and layers_of(stats, "hot_misses_total").keys() == set("012345")
        two.play()
        last, until = sum(reads["hot_misses"] for reads in two.reads.values()), time.monotonic() + 20
        while sum(told := layers_of(two.ex.stats(), "hot_misses_total").values()) < last:
            assert time.monotonic() < until, (told, last)
            time.sleep(0.01)
        assert sum(told) == last and all(told)


@pytest.mark.skipif("config.getoption('--device') != 'cpu'", reason="codes are multiplied on a CPU")
def test_doctor_tells_the_weights_of_each_stage_of_a_gguf_file(tmp_path):
    """Each has those of its layers, and both have the embedding, which is the head."""
    file = gguf_checkpoint(tmp_path / "tiny.gguf")
    with Pipeline(file, dtype="gguf", kv_cache_memory_bytes="2M", pp=2, pp_layers=["4", "2"]) as two:
        have = [two.built.info[f"rank_{i}_weight_bytes"] for i in range(2)]
    told = [f.text for f in examine(from_options(file, {"dtype": "gguf", "pp": 2, "pp_layers": ["4", "2"]}),
                                    probe()) if f.section == "ranks"]
    assert [f"{nbytes / (1 << 20):.1f} MiB of weights" in text
            for nbytes, text in zip(have, told, strict=True)] == [True, True]


def test_layers_that_the_model_does_not_have_are_refused_before_a_process_starts(model):
    with pytest.raises(ConfigError, match="--pp 2, --pp-layers 3,4: this model has 6 layers"):
        Pipeline(model, kv_cache_memory_bytes="1M", pp=2, pp_layers=["3", "4"])


def test_an_identity_that_differs_is_refused_with_both_values():
    want = {"configuration": "1", "dtype": "float32", "layout": "full 6x2x2x8x16"}
    check_identity(1, dict(want), want)
    with pytest.raises(ConfigError, match="rank 1 has dtype 'bfloat16' and the engine 'float32'"):
        check_identity(1, want | {"dtype": "bfloat16"}, want)
    with pytest.raises(ConfigError, match="rank 1 has layout None and the engine 'full 6x2x2x8x16'"):
        check_identity(1, {"configuration": "1", "dtype": "float32"}, want)


@pytest.mark.covers(kind="selecting", place="hosted", feature="plain tier paused", across="pp", weights="gguf")
@pytest.mark.sweep
@pytest.mark.by_exec      # a fork's peak of memory begins with that of its parent
def test_the_demo_model_on_two_stages_decodes_from_host_pages_as_one_rank_does():
    """And a stage takes the memory of its own weights, while it loads and after."""
    prompts = {rid: tuple((rid * 31 + i * i * 7 + i) % 9973 for i in range(100 + 60 * rid))
               for rid in (1, 2, 3)}
    options = {"kv_cache_memory_bytes": "200M", "step_tokens": 128, "sparse_top_k": 128, "max_model_len": 400}
    with Pipeline("demo", **options, host_decode="off") as one:
        want, whole = one.play(new=16, prompts=prompts), one.built.info["weight_bytes"]
    with Pipeline("demo", pp=2, kv_offloading_size="200M", **options, host_decode="always") as two:
        assert two.play(new=16, prompts=prompts, pauses=lambda turn: [2] if turn == 12 else ()) == want
        assert sum(reads["hot_misses"] for reads in two.reads.values()) > 0
        info = two.built.info
        assert info["rank_0_layers"] == info["rank_1_layers"] == 15
        for rank in range(2):
            own, peak = info[f"rank_{rank}_weight_bytes"], info[f"rank_{rank}_load_peak_bytes"]
            # The last one has the embedding too, as its head, and packs it, which takes a copy.
            assert peak < (1.2, 1.45)[rank] * own and peak < .85 * whole


@pytest.mark.parametrize("together", [1, 3])
def test_three_uneven_stages_with_overlap_and_a_host_tier(model, dense, together):
    """A device of half of what the requests need: pages go down and come back, a rectangle at a time. Five requests
    take turns, or up to three of them go on in one step."""
    with Pipeline(model, kv_cache_memory_bytes="280K", kv_offloading_size="8M", pp=3, pp_layers=["1", "3", "2"],
                  pp_together=together) as three:
        assert three.play(pauses=lambda turn: [1 + turn % 5] if turn % 7 == 0 and turn < 100 else ()) == dense
        stats, info = three.ex.stats(), three.built.info
        assert three.core.stats()["pauses"] >= 3
        assert stats['moved_bytes_total{src="dram",dst="hbm",group="full"}'] > 0
        assert [info[f"rank_{i}_layers"] for i in range(3)] == [1, 3, 2]
        assert info["rank_1_hbm_unused_bytes"] == 0 < info["rank_0_hbm_unused_bytes"]
        assert all(0 < stats[f'stage_busy_seconds_total{{stage="{i}"}}'] for i in range(3))
        assert all(info[f"rank_{i}_{what}_bytes"] > 0 for i in range(3) for what in ("weight", "hbm"))
        pids = [info[f"rank_{i}_pid"] for i in range(3)]
        before = [processor_s(pid) for pid in pids]
        time.sleep(1.0)
        spun = [processor_s(pid) - was for pid, was in zip(pids, before, strict=True)]
        assert max(spun) < 0.2, "a rank without work waits in the kernel"
    assert all(map(gone, pids))


@pytest.mark.sweep
@pytest.mark.parametrize("section, name, value, message", [
    ("model", "dtype", "bfloat16", "rank 0 has dtype 'bfloat16' and the engine 'float32'"),
    ("kv", "page_size", 16, "rank 0 has layout 'full 6x2x2x16x16' and the engine 'full 6x2x2x8x16'"),
    ("model", "model", None, r"rank 0 has configuration '\w{16}' and the engine '\w{16}'")],
    ids=["dtype", "layout", "model"])
def test_processes_of_another_engine_are_refused_at_the_handshake(model, tmp_path, monkeypatch, section, name,
                                                                  value, message):
    """They start with another setting than the engine has: it names both values, and ends them."""
    other = value or checkpoint(tmp_path / "other", {**CONFIG, "rope_theta": 20000.0})
    started: list[WorkerGroup] = []

    class Odd(WorkerGroup):
        def __init__(self, config, *more):
            theirs = replace(getattr(config, section), **{name: other})
            super().__init__(replace(config, **{section: theirs}), *more)
            started.append(self)

    monkeypatch.setattr(build, "WorkerGroup", Odd)
    with pytest.raises(ConfigError, match=message):
        Pipeline(model, kv_cache_memory_bytes="1M", pp=2)
    assert [rank.process.returncode for rank in started[0].ranks] == [-signal.SIGKILL] * 2


def rounds_of(number: int) -> dict[int, tuple[int, ...]]:
    """Five prompts of round `number`; a third of each is what the other rounds have too."""
    return {10 * number + rid: (*p[:len(p) // 3], *((t + number % 4 + 1) % 97 for t in p[len(p) // 3:]))
            for rid, p in PROMPTS.items()}


@pytest.mark.parametrize("seconds", [5, pytest.param(60, marks=pytest.mark.sweep)])
def test_host_tier_on_two_stages_under_memory_pressure_neither_crashes_nor_diverges_nor_grows(model, seconds):
    """A device for half of the requests and a host for less than all, so that pages are evicted from both,
    come back and are computed again, and requests pause. Steps of few tokens: oneDNN keeps 0.6 MB for each
    number of them and each shape of a weight, so all have been met when the first third is over."""
    new, tokens = 40, {"step_tokens": 16}
    with Pipeline(model, kv_cache_memory_bytes="8M", **tokens) as one:
        want = [list(one.play(new, prompts=rounds_of(i)).values()) for i in range(4)]
    with Pipeline(model, kv_cache_memory_bytes="340K", kv_offloading_size="1M", pp=2, **tokens) as two:
        pids = [two.built.info[f"rank_{i}_pid"] for i in range(2)]
        until, number, resident = time.monotonic() + seconds, 0, []
        while time.monotonic() < until:
            prompts = rounds_of(number)
            busy = list(prompts)
            got = two.play(new, prompts=prompts, pauses=lambda turn, busy=busy: (
                [busy[turn % 5]] if turn % 9 == 0 and turn < 60 else ()))
            assert list(got.values()) == want[number % 4], f"round {number}"
            resident.append([rss(pid) for pid in pids])
            number += 1
        told = two.core.stats()
        assert two.ex.stats()["executor_requests"] == 0
        assert told["hbm_pages_in_use"] == told["moves_in_flight"] == 0
        assert min(told[name] for name in ("pauses", "hbm_evictions", "dram_evictions")) > 0
        if seconds >= 60:
            for of_rank in zip(*resident, strict=True):
                middle, last = of_rank[number // 3:2 * number // 3], of_rank[2 * number // 3:]
                assert max(last) - max(middle) < 1 << 20, of_rank


@pytest.mark.parametrize("layout", ["pp", "tp"])
@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.sweep), 1])
def test_a_rank_that_is_killed_ends_the_engine_and_says_so(model, victim, layout):
    with Pipeline(model, kv_cache_memory_bytes="1M", **{layout: 2}) as two:
        for rid, prompt in PROMPTS.items():
            two.add(rid, prompt, 200)
        pids = [two.built.info[f"rank_{i}_pid"] for i in range(2)]
        with pytest.raises(RankDied, match=rf"rank {victim} .*killed by signal 9"):
            for turn in range(200):
                if turn == 10:
                    os.kill(pids[victim], signal.SIGKILL)
                two.turn()
    assert all(map(gone, pids))


def test_a_rank_that_stops_loading_is_named_with_the_time(model, monkeypatch, capfd):
    """As when the network file system with its weights is gone."""
    started: list[WorkerGroup] = []

    class Stuck(WorkerGroup):
        def __init__(self, *args):
            super().__init__(*args)
            self.ranks[0].process.send_signal(signal.SIGSTOP)
            started.append(self)

    monkeypatch.setattr(build, "WorkerGroup", Stuck)
    monkeypatch.setattr(groups, "LOADING_S", 0.5)
    monkeypatch.setattr(groups, "STACK_S", 0.1)
    with pytest.raises(RankDied, match="rank 0 hangs: no report for 1 s"):
        Pipeline(model, kv_cache_memory_bytes="1M", pp=2, rank_timeout_s=1)
    assert "rank 0: no report for 1 s; its stack:" in capfd.readouterr().err
    assert [rank.process.returncode for rank in started[0].ranks] == [-signal.SIGKILL] * 2


class Asked:
    """Two ranks of which the first is asked for an answer: at these seconds something happens, first come first."""

    def __init__(self, monkeypatch, *happens):
        self.workers, self.happens, self.now = object.__new__(WorkerGroup), [*happens], 0.0
        self.ranks = [object.__new__(groups.WorkerProcess) for _ in range(2)]
        self.workers.ranks, self.workers.timeout_s = self.ranks, 1.0
        self.workers.loading_at, self.workers._nodes = 0.0, None
        self.workers.ranges = [range(2)]
        for i, rank in enumerate(self.ranks):
            rank.index, rank._workers, rank._answers = i, self.workers, self
            rank.refused, rank.died, rank.hangs = "", False, ""
            rank.queued, rank.process = deque(), SimpleNamespace(
                send_signal=lambda signal: None, pid=7 + i, wait=lambda seconds: None, returncode=-9)
        monkeypatch.setattr(groups.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(groups, "STACK_S", 0.0)

    def get(self, timeout):
        if self.happens and self.happens[0][0] <= self.now + timeout:
            self.now, what = self.happens.pop(0)
            if not callable(what):
                return what
            what(self)
        else:
            self.now += timeout
        raise Empty


LOADED = wire.Loaded({"dtype": "float32"}, 1, 1, 1)


def test_a_rank_that_loads_slowly_is_waited_for_while_any_says_how_far_it_is(monkeypatch):
    def logs(asked):
        asked.workers.loading_at = asked.now
    slow = Asked(monkeypatch, (50.0, logs), (100.0, logs), (101.0, wire.Loading()), (155.0, LOADED))
    assert slow.ranks[0].answer(groups.LOADING_S) == LOADED
    silent = Asked(monkeypatch, (50.0, logs), (115.0, LOADED))
    with pytest.raises(RankDied, match="rank 0 hangs"):
        silent.ranks[0].answer(groups.LOADING_S)


def test_a_rank_that_fails_while_another_waits_for_it_is_named_at_once(monkeypatch):
    """Stages capture together: the first waits for the second, which has no memory left, or was killed."""
    def refuses(asked):
        asked.ranks[1].refused = asked.ranks[1].died = "too little memory"

    def dies(asked):
        asked.ranks[1].died = True
    with pytest.raises(ConfigError, match="too little memory"):
        Asked(monkeypatch, (3.0, refuses)).ranks[0].answer(300.0)
    with pytest.raises(RankDied, match=r"rank 1 .*killed by signal 9"):
        Asked(monkeypatch, (3.0, dies)).ranks[0].answer(300.0)


def test_a_hang_is_noticed_by_who_only_looks_now_and_then(monkeypatch):
    """As a server's loop does, which waits for messages too: plans wait, none was reported for so long."""
    class Idle:
        index, process = 0, SimpleNamespace(send_signal=lambda signal: None)

        def __init__(self, index: int) -> None:
            self.index, self.queued = index, deque()

    now, workers = [100.0], object.__new__(WorkerGroup)
    workers.ranks, workers.timeout_s, workers.news, workers._news_at = [Idle(0), Idle(1)], 2.0, SimpleQueue(), 0.0
    workers._wake = lambda: None
    monkeypatch.setattr(groups.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(groups, "STACK_S", 0.0)

    def at(seconds: float) -> None:
        now[0] = 100.0 + seconds
        workers.watch()

    at(50)                                      # nothing is asked of them
    workers.ranks[1].queued += [150.0, 151.0]
    at(52.9)                                    # since the newest plan: who is told late is not late
    workers.tell()
    at(53)
    at(54.9)
    with pytest.raises(RankDied, match="rank 1 hangs: no report for 2 s"):
        at(55.1)


@pytest.mark.sweep
def test_a_rank_that_hangs_is_found_and_asked_for_its_stack(model, capfd):
    """A stopped process prints nothing; one that can is asked first."""
    with Pipeline(model, kv_cache_memory_bytes="1M", pp=2, rank_timeout_s=1) as two:
        two.add(1, PROMPTS[1], 200)
        for _ in range(5):
            two.turn()
        pid = two.built.info["rank_1_pid"]
        os.kill(pid, signal.SIGUSR2)
        said, until = "", time.monotonic() + 20
        while "pipeline/process.py" not in said and time.monotonic() < until:
            time.sleep(0.05)
            said += capfd.readouterr().err
        assert "pipeline/process.py" in said and 'in run' in said
        os.kill(pid, signal.SIGSTOP)
        started = time.monotonic()
        with pytest.raises(RankDied, match="hangs: no report for 1 s"):
            for _ in range(20):
                two.turn()
        assert time.monotonic() - started < 20
        assert "its stack:" in capfd.readouterr().err
