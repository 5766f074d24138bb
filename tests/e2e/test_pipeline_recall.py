"""Stages as processes, on the recall model: an answer is wrong where a stage reads wrong rows."""
from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
from pipeline_engine import Pipeline
from recall_engine import FOLDER, ids

from penstock.core.plan import Paused, RequestId
from penstock.eval import tasks
from penstock.eval.tasks import Question, Size

pytestmark = pytest.mark.by_exec
TOPK = 256          # of config.json
# A device that holds the hot buffers and indexer keys of what runs, and not the requests.
HOSTED = {"kv_cache_memory_bytes": "3M", "kv_offloading_size": "64M", "host_decode": "always",
          "hot_buffer_tokens": TOPK + 16}


def questions(context: int = 640) -> list[Question]:
    return tasks.in_words("tracking", Size(contexts=(context,), samples=3, questions=2, seed=3,
                                           tokens_of=lambda text: len(text.split())))


def answers(pauses: Callable[[int], Iterable[int]] = lambda turn: (),
            **options: object) -> list[tuple[int, ...]]:
    """What is said to each question, all asked at once. pauses: request numbers, by turn."""
    with Pipeline(str(FOLDER), page_size=16, max_model_len=1024, **options) as engine:
        for rid, question in enumerate(questions(), 1):
            engine.add(rid, ids(question.prompt), question.max_tokens)
        for turn in range(4000):
            engine.inbox += [Paused(RequestId(rid)) for rid in pauses(turn) if rid not in engine.ended]
            if not engine.turn():
                break
        assert len(engine.ended) == len(engine.got), "a request never ended"
        if "host_decode" in options:
            assert sum(reads["hot_misses"] for reads in engine.reads.values()) > 0
            windows = [v for k, v in engine.ex.stats().items() if k.startswith("hot_window_pages_total")]
            assert windows and min(windows) > 0, "prompts of every layer came through windows"
        if pauses(0) != ():
            assert engine.core.stats()["pauses"] >= 3
        return [tuple(engine.got[rid]) for rid in sorted(engine.got)]


def right() -> list[tuple[int, ...]]:
    return [ids(question.answer) for question in questions()]


def every_5(turn: int) -> list[int]:
    return [1 + turn // 5 % 6] if turn % 5 == 0 else []


def test_recall_on_two_stages_from_host_pages_with_pauses():
    assert answers(every_5, pp=2, **HOSTED) == right()


@pytest.mark.parametrize("layout", [
    pytest.param({"tp": 2}, marks=pytest.mark.sweep),
    pytest.param({"tp": 2, "pp": 2, "nnodes": 2}, marks=pytest.mark.soak)], ids=str)
def test_recall_on_lanes_from_host_pages_with_pauses(layout):
    assert answers(every_5, **layout, **HOSTED) == right()


@pytest.mark.sweep
def test_recall_on_three_uneven_stages_with_overlap_and_a_host_tier():
    assert answers(every_5, pp=3, pp_layers=["2", "1", "1"], overlap=True, kv_cache_memory_bytes="6M",
                   kv_offloading_size="64M") == right()
