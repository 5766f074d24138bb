"""`bench/device/versus.py`: whose turn it is, and what is told of two rounds."""
from __future__ import annotations

import math
from pathlib import Path
from types import ModuleType, SimpleNamespace

import bench_programs
import pytest

from penstock.bench.load import Answer


@pytest.fixture(scope="module")
def versus() -> ModuleType:
    return bench_programs.program("device/versus.py")


def test_each_server_is_first_as_often_and_on_each_gpu_as_often(versus: ModuleType) -> None:
    rounds = versus.orders(("a", "b"), ("0",), 4)
    assert [[peer for peer, _ in turns] for turns in rounds] == [["a", "b"], ["b", "a"]] * 2
    crossed = versus.orders(("a", "b"), ("0", "1"), 4)
    for peer in "ab":
        assert sum(turns[0][0] == peer for turns in crossed) == 2
        assert [gpu for turns in crossed for name, gpu in turns if name == peer].count("0") == 2
    assert all(len({gpu for _, gpu in turns}) == 2 for turns in crossed)


def test_steady_counts_only_while_all_decode(versus: ModuleType) -> None:
    one = Answer(ttft=1.0, gaps=[1.0] * 9, output_tokens=10)            # tokens at 1 to 10
    two = Answer(ttft=1.0, gaps=[0.5] * 8, output_tokens=18)            # chunks of two, at 4 to 8
    assert versus.steady([(0.0, one), (3.0, two)]) == pytest.approx((4 + 16) / 4)
    assert versus.steady([(0.0, one)]) == pytest.approx(1.0)
    assert math.isnan(versus.steady([(0.0, one), (20.0, two)])) and math.isnan(versus.steady([]))


def test_failed_requests_count_as_failed_only(versus: ModuleType) -> None:
    found = versus.measured([(0.0, Answer(ttft=0.25, gaps=[0.5] * 3, output_tokens=4)),
                             (0.0, Answer(error="HTTP 400", ttft=9.0, output_tokens=7))], 2.0)
    assert (found["tokens/s"], found["failed"], found["first token p95, ms"]) == (2.0, 1.0, 250.0)


def test_ratios_are_of_one_round(versus: ModuleType) -> None:
    """The machine is twice as fast in the second round: each round has the ratio 2, and medians alone would not."""
    runs = [{"round": n, "peer": peer, "work": "w", "measured": {"tokens/s": value}}
            for n, peer, value in ((0, "a", 20.0), (0, "b", 10.0), (1, "b", 20.0), (1, "a", 40.0), (2, "b", 40.0))]
    [ours, theirs] = versus.lines(runs, "a")
    assert ours == ("w", "tokens/s", "a", "30 (20 .. 40)", "")
    assert theirs == ("w", "tokens/s", "b", "20 (10 .. 40)", "2 (2 .. 2)")
    assert versus.lines(runs[1:2], "a") == [("w", "tokens/s", "b", "10 (10 .. 10)", "")]


def test_a_command_of_a_scene_has_only_known_places(versus: ModuleType) -> None:
    for scene in versus.SCENES.values():
        for command in scene.commands.values():
            filled = command.format(model="M", port=1, gpu=2)
            assert "M" in filled and "{" not in filled.replace("{\"top_k", "") and " --port 1" in filled
    assert '{"top_k": 2048' in versus.SCENES["b"].commands["sglang"].format(model="M", port=1, gpu=2)


def test_vllm_can_start_with_the_memory_of_its_scene_and_take_every_request(versus: ModuleType) -> None:
    """It wants one request of --max-model-len to fit into the KV that it is given."""
    assert versus.LEN_A <= versus.TOKENS_A
    for name in "ad":
        assert f"--max-model-len {versus.LEN_A} " in versus.SCENES[name].commands["vllm"]
    assert all(work.high + work.new <= versus.LEN_A for work in versus.SCENES["a"].works)
    assert "--kv-offloading-backend native" in versus.SCENES["d"].commands["vllm"]


def test_a_work_on_a_server_that_is_gone_has_failed_and_the_next_goes_on(
        versus: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def run(*args: object, **more: object) -> SimpleNamespace:
        return SimpleNamespace(returncode=2, stdout="", stderr="it does not answer")

    monkeypatch.setattr(versus.subprocess, "run", run)
    (tmp_path / "agents.json").write_text('{"of": "another peer"}')
    one = object.__new__(versus.Run)
    one.args, one.vocab, noted = SimpleNamespace(out=tmp_path, turns=8), 100, []
    one.scene = versus.Scene("", (versus.Work(3, 8, 8, 2), versus.Work(2, 8, 8, 2)), {}, agents=(4,))
    one.note = lambda n, peer, work, found: noted.append(found)
    assert len([*one.work(1, "a", "http://127.0.0.1:1")]) == 3
    assert noted == [{"failed": 3.0}, {"failed": 2.0}, {"failed": 32.0}]
