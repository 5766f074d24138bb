"""Recall models, which select tokens or blocks: they find what they are asked for, the same way whatever happens to
their rows, and any wrong row shows in their answers.

Contexts of 1,024 tokens, of which a query reads 64: a wide margin would hide a row that is not found.
"""
from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from late_copies import Latest, Shuffled
from recall_blocks import BLOCK, BLOCKS, layer_of
from recall_engine import TRAINED, Answers, ask, ids, shuffled

from penstock.config.settings.tree import KVConfig
from penstock.core.plan import Dropped, Paused, RequestId
from penstock.eval import tasks
from penstock.eval.tasks import Interview, Size
from penstock.exec.step.tables import GroupTable
from penstock.memory.copying import Copier

TOPK, CONTEXT = 64, 1024
# Faults in Python are not in steps that were captured before.
EAGER = pytest.mark.skipif("config.getoption('--device') != 'cpu'", reason="steps are captured there")
# Room for one and a half of the two requests: who resumes gets pages that were another's meanwhile.
SMALL_POOL = {"hbm_pages": 75 * CONTEXT // 512, "dram_pages": 400 * CONTEXT // 512}


# What is asked, and what it is asked of.
KINDS = {"tokens": ("tracking", TRAINED), "blocks": ("recall", BLOCKS)}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@functools.cache
def interviews(task: str = "tracking", context: int = CONTEXT, samples: int = 2) -> list[Interview]:
    return tasks.interviews(task, Size(contexts=(context,), samples=samples, questions=16, seed=11,
                                       tokens_of=lambda text: len(text.split())))


def asked(kind: str = "tokens", **how: Any) -> Answers:
    task, model = KINDS[kind]
    return ask(interviews(task), of=model, topk=TOPK, **how)


@functools.cache
def undisturbed(kind: str = "tokens") -> Answers:
    return asked(kind, overlap=False)


def same(a: Answers, b: Answers) -> bool:
    return a.right == b.right and torch.allclose(torch.tensor(a.logprobs), torch.tensor(b.logprobs),
                                                 rtol=0, atol=1e-3)


def test_it_answers(kind: str) -> None:
    assert undisturbed(kind).share >= 0.97


@pytest.mark.parametrize("task", ["recall", "sum"])
def test_what_is_trained_answers_other_questions(task: str) -> None:
    assert ask(interviews(task), topk=TOPK, overlap=False).share >= 0.97


@pytest.mark.parametrize("step_tokens", [100, 333])
def test_chunks_change_no_answer(step_tokens: int, kind: str) -> None:
    assert same(asked(kind, step_tokens=step_tokens), undisturbed(kind))


def every_5_turns(kind):
    return lambda turn, live: [kind(RequestId(live[turn // 5 % len(live)]))] if turn % 5 == 4 and live else []


@pytest.mark.parametrize("lateness", [Latest, lambda: Shuffled(3, torn=0.2)], ids=["latest", "torn"])
def test_paused_every_5_steps_it_answers_the_same(lateness, kind: str) -> None:
    got = asked(kind, lateness=lateness(), script=every_5_turns(Paused), **SMALL_POOL)
    assert same(got, undisturbed(kind)) and got.stats["pauses"] >= 5


def test_dropped_and_recomputed_it_answers_the_same(kind: str) -> None:
    got = asked(kind, script=lambda turn, live: (
        [Dropped(RequestId(live[0]))] if turn in (6, 20) and live else []))
    assert same(got, undisturbed(kind)) and got.stats["drops"] >= 1


@EAGER
def test_shuffled_rows_are_useless() -> None:
    assert ask(interviews(), topk=TOPK, put=shuffled).share < 0.3


# ---------------------------------------------------------------- rows that are read from the host
# The hot buffer is what one query reads and a page; the device has room for those of both, and their keys.
HOSTED = {"hot_tokens": TOPK + 16, "hbm_pages": 75 * CONTEXT // 1024, "dram_pages": 800 * CONTEXT // 512}


def hosted(kind: str = "tokens", **how: Any) -> Answers:
    return asked(kind, **{**HOSTED, **how})


@pytest.mark.parametrize("how", [
    {}, {"stages": 2}, {"step_tokens": 100}, {"script": every_5_turns(Paused), "lateness": Latest()},
    {"stages": 2, "script": every_5_turns(Paused), "lateness": Shuffled(3, torn=0.2)}],
    ids=["hosted", "two-stages", "chunks", "paused", "two-stages-paused"])
def test_read_from_the_host_it_answers_the_same(how: dict[str, Any], kind: str) -> None:
    got = hosted(kind, **how)
    assert same(got, undisturbed(kind))
    assert sum(n for name, n in got.stats.items() if name.startswith("hot_misses")) > 0
    assert sum(n for name, n in got.stats.items() if name.startswith("hot_evictions")) > 0
    assert "script" not in how or got.stats["pauses"] >= 5


@pytest.mark.covers(kind="latent", place="hosted", feature="tier paused", weights="bfloat16")
def test_in_bfloat16_it_answers_from_the_host_as_from_the_device() -> None:
    alone = ask(interviews(), topk=TOPK, dtype=torch.bfloat16)
    got = hosted(dtype=torch.bfloat16, script=every_5_turns(Paused))
    assert got.right == alone.right and got.share >= 0.97


def test_two_stages_answer_the_same(kind: str) -> None:
    assert same(asked(kind, stages=2), undisturbed(kind))


@EAGER
def test_shuffled_rows_from_the_host_are_useless() -> None:
    assert hosted(put=shuffled).share < 0.3


# ---------------------------------------------------------------- reports of wrong blocks
def neighbours(chosen_TKY: torch.Tensor, position_T: torch.Tensor) -> torch.Tensor:
    """The block before each, the query's own before the first one."""
    own_T11, past = (position_T // BLOCK)[:, None, None], 1 << 20
    moved_TKY = ((chosen_TKY + own_T11) % (own_T11 + 1)).where(chosen_TKY >= 0, past).sort().values
    return moved_TKY.where(moved_TKY < past, -1).int()


def other_heads(chosen_TKY: torch.Tensor, _position_T: torch.Tensor) -> torch.Tensor:
    return chosen_TKY.flip(1).contiguous()


@EAGER
@pytest.mark.parametrize("layer", [1, 2])
@pytest.mark.parametrize("ask_it", [asked, hosted], ids=["resident", "hosted"])
@pytest.mark.parametrize("fault", [neighbours, other_heads])
def test_wrong_blocks_of_a_layer_are_no_answers_to_what_it_looks_up(fault: Any, ask_it: Any, layer: int) -> None:
    def put(rank: Any) -> None:
        chooser = rank._attending._chooser
        right, wrong = chooser.score, chooser.pools[layer].data_ptr()

        def score(q: Any, weight: Any, key: torch.Tensor, table: Any, row: Any, position_T: Any) -> torch.Tensor:
            chosen_TKY = right(q, weight, key, table, row, position_T)
            return fault(chosen_TKY, position_T) if key.data_ptr() == wrong else chosen_TKY
        chooser.score = score
    found: dict[bool, list[bool]] = {True: [], False: []}
    for one, right in zip(interviews("recall"), ask_it("blocks", put=put).right, strict=True):
        said = ids(one.dialogue)
        for (at, *_), ok in zip(one.answers, right, strict=True):
            found[layer_of(said[at - 1]) == layer].append(ok)
    assert sum(found[True]) < 0.2 * len(found[True]) and all(found[False]) and len(found[False]) > 10


# ---------------------------------------------------------------- reports of wrong rows
def faulty(op: str, fault: Any, kind: str = "tokens", **how: Any) -> Answers:
    """Decode from the host with `fault` around an op of all layers."""
    def put(rank: Any) -> None:
        layers = rank._attending._layers
        setattr(layers, op, fault(getattr(layers, op)))
    return hosted(kind, put=put, **how)


@EAGER
def test_a_tail_of_4_bytes_that_a_gather_loses_shows() -> None:
    def fault(right):
        def gather(host, pool, miss, num, *, unit, beside=False):
            tail = pool[..., -1:].clone()
            right(host, pool, miss, num, unit=unit)
            pool[..., -1:] = tail
        return gather
    assert not same(faulty("_gather", fault), undisturbed())


@EAGER
def test_a_row_that_is_stale_in_the_hot_buffer_shows(kind: str) -> None:
    """Every other miss is counted as brought and is not: what was evicted is read in its place."""
    def fault(right):
        def gather(host, pool, miss, num, *, unit, beside=False):
            right(host, pool, miss[::2].contiguous(), (num + 1) // 2, unit=unit)
        return gather
    assert faulty("_gather", fault, kind).share < undisturbed(kind).share - 0.1


def test_a_bind_of_a_hot_buffer_that_is_left_out_shows() -> None:
    """Two requests take turns in one row, on a device that holds one: each goes on with the map and the pages
    of the other's hot buffer."""
    def put(rank: Any) -> None:
        hot = rank._attending.rows.hot
        right, seen = hot.bind, set()

        def bind(row: int, pages: list[int], keeps: list[int]) -> None:
            if row not in seen:
                right(row, pages, keeps)
            seen.add(row)
        hot.bind = bind
    got = hosted(put=put, script=every_5_turns(Paused), rows=1, hbm_pages=30)
    assert got.share < undisturbed().share - 0.1


def paused() -> Answers:
    return ask(interviews(), topk=TOPK, script=every_5_turns(Paused), **SMALL_POOL)


def test_a_bind_that_is_left_out_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    real = GroupTable.bind
    seen: set[tuple[int, int]] = set()

    def bind(self, row, pages, host):
        if (id(self), row) not in seen:
            seen.add((id(self), row))
            real(self, row, pages, host)
        else:
            self._held[row] = len(pages)            # the table keeps what it had

    monkeypatch.setattr(GroupTable, "bind", bind)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GroupTable, "check", lambda self, row, end: None)
        got = paused()
    assert got.share < undisturbed().share - 0.1


@EAGER
def test_a_tail_of_4_bytes_that_is_not_copied_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    def copy(self, move, tokens, layers):
        src, dst = self._pools[move.src, move.group], self._pools[move.dst, move.group]
        for a, b in zip(move.src_pages, move.dst_pages, strict=True):
            dst.page(b)[..., :-1].copy_(src.page(a)[..., :-1])

    monkeypatch.setattr(Copier, "_copy_tokens", copy)
    assert not same(paused(), undisturbed())


def test_a_page_that_is_stale_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Copier._copy_tokens

    def copy(self, move, tokens, layers):
        if move.dst.name == "HBM" and len(move.dst_pages) > 1:
            return                                  # what was there before stays
        real(self, move, tokens, layers)

    monkeypatch.setattr(Copier, "_copy_tokens", copy)
    assert paused().share < undisturbed().share - 0.1


# ---------------------------------------------------------------- rows in other formats
@EAGER
@pytest.mark.parametrize("kept", [KVConfig(kv_cache_dtype="fp8_e4m3"), KVConfig(kv_cache_dtype="bfloat16")],
                         ids=["fp8", "bfloat16"])
def test_in_other_formats_it_finds_as_much_wherever_rows_are(kept: KVConfig) -> None:
    alone = ask(interviews(), topk=TOPK, kept=kept)
    assert alone.share >= undisturbed().share - .05
    got = hosted(kept=kept, script=every_5_turns(Paused), lateness=Shuffled(3, torn=0.2))
    assert got.right == alone.right
    assert sum(n for name, n in got.stats.items() if name.startswith("hot_misses")) > 0


@EAGER
def test_shuffled_fp8_rows_are_useless() -> None:
    kept = KVConfig(kv_cache_dtype="fp8_e4m3")
    assert ask(interviews(), topk=TOPK, put=shuffled, kept=kept).share < 0.3
