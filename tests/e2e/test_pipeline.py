"""Pipeline stages as processes say what one rank says, and end together."""
from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from pipeline_engine import PROMPTS, Pipeline, checkpoint

from penstock.config.errors import ConfigError
from penstock.exec.crew import RankDied, check_identity

SPARSE = {"sparse_top_k": 96, "sparse_kv": "always"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return checkpoint(tmp_path_factory.mktemp("pipeline"))


@pytest.fixture(scope="module")
def dense(model):
    with Pipeline(model, hbm_bytes="4M") as one:
        return one.play()


@pytest.fixture(scope="module")
def selected(model):
    """What one rank says whose requests select from device pages."""
    with Pipeline(model, hbm_bytes="4M", sparse_top_k=96, sparse_kv="off") as one:
        return one.play()


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


def test_hosted_decode_on_two_stages_with_pauses(model, selected):
    """Rows read from host pages of which each stage has half; every row is paused again and again."""
    def every_few(turn):
        return [1 + turn // 5 % 5] if turn % 5 == 0 and turn < 150 else ()

    with Pipeline(model, hbm_bytes="1M", dram_bytes="8M", pp=2, **SPARSE) as two:
        assert two.play(pauses=every_few) == selected
        assert two.core.stats()["pauses"] >= 3
        assert sum(reads["hot_misses"] for reads in two.reads.values()) > 0


def test_layers_that_the_model_does_not_have_are_refused_before_a_process_starts(model):
    with pytest.raises(ConfigError, match="--pp 2 with --pp-layers 3,4: this model has 6 layers"):
        Pipeline(model, hbm_bytes="1M", pp=2, pp_layers=["3", "4"])


def test_a_rank_of_another_dtype_is_refused_with_both_values():
    want = {"model": "a (1)", "dtype": "float32", "layout": "full 6x2x2x8x16"}
    check_identity(1, dict(want), want)
    with pytest.raises(ConfigError, match="rank 1 has dtype 'bfloat16' and the engine 'float32'"):
        check_identity(1, want | {"dtype": "bfloat16"}, want)


@pytest.mark.soak                     # until all of its cells have been timed on a quiet machine
@pytest.mark.parametrize("pp", [1, 2, 3])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("tiers", [False, True], ids=["device", "host"])
@pytest.mark.parametrize("sparse", [False, True], ids=["resident", "selects"])
def test_any_stages_overlap_and_tiers_say_the_same(model, dense, selected, pp, overlap, tiers, sparse):
    options = {"hbm_bytes": f"{4 // pp}M", "dram_bytes": "8M" if tiers else 0, "overlap": overlap}
    if sparse:
        options |= {"sparse_top_k": 96, "sparse_kv": "always" if tiers else "off"}
    with Pipeline(model, pp=pp, **options) as engine:
        got = engine.play(pauses=lambda turn: [1 + turn % 5] if turn % 9 == 0 and turn < 60 else ())
        assert got == (selected if sparse else dense)
        if sparse and tiers:
            assert sum(reads["hot_misses"] for reads in engine.reads.values()) > 0


def test_three_uneven_stages_with_overlap_and_a_host_tier(model, dense):
    """A device of half of what the requests need: pages go down and come back, a rectangle at a time."""
    with Pipeline(model, hbm_bytes="280K", dram_bytes="8M", pp=3, pp_layers=["1", "3", "2"]) as three:
        assert three.play(pauses=lambda turn: [1 + turn % 5] if turn % 7 == 0 and turn < 100 else ()) == dense
        stats, info = three.ex.stats(), three.built.info
        assert three.core.stats()["pauses"] >= 3
        assert stats['moved_bytes_total{src="dram",dst="hbm",group="full"}'] > 0
        assert [info[f"rank_{i}_layers"] for i in range(3)] == [1, 3, 2]
        assert info["rank_1_hbm_unused_bytes"] == 0 < info["rank_0_hbm_unused_bytes"]
        assert all(0 < stats[f'stage_busy_seconds_total{{stage="{i}"}}'] for i in range(3))
        pids = [info[f"rank_{i}_pid"] for i in range(3)]
    assert all(map(gone, pids))


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.sweep), 1])
def test_a_rank_that_is_killed_ends_the_engine_and_says_so(model, victim):
    with Pipeline(model, hbm_bytes="1M", pp=2) as two:
        for rid, prompt in PROMPTS.items():
            two.add(rid, prompt, 200)
        pids = [two.built.info[f"rank_{i}_pid"] for i in range(2)]
        with pytest.raises(RankDied, match=rf"rank {victim} .*killed by signal 9"):
            for turn in range(200):
                if turn == 10:
                    os.kill(pids[victim], signal.SIGKILL)
                two.turn()
    assert all(map(gone, pids))


@pytest.mark.sweep
def test_a_rank_that_hangs_is_found_and_asked_for_its_stack(model, capfd):
    """A stopped process prints nothing; one that can is asked first."""
    with Pipeline(model, hbm_bytes="1M", pp=2, rank_timeout_s=1) as two:
        two.add(1, PROMPTS[1], 200)
        for _ in range(5):
            two.turn()
        pid = two.built.info["rank_1_pid"]
        os.kill(pid, signal.SIGUSR2)
        said, until = "", time.monotonic() + 20
        while "rank_main.py" not in said and time.monotonic() < until:
            time.sleep(0.05)
            said += capfd.readouterr().err
        assert "rank_main.py" in said and 'in run' in said
        os.kill(pid, signal.SIGSTOP)
        started = time.monotonic()
        with pytest.raises(RankDied, match="hangs: no report for 1 s"):
            for _ in range(20):
                two.turn()
        assert time.monotonic() - started < 20
        assert "its stack:" in capfd.readouterr().err
