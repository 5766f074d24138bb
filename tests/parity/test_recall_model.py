"""The recall model: it finds what it is asked for, the same way whatever happens to its rows, and any wrong
row shows in its answers.

Contexts of 1,024 tokens, of which a query reads 64: a wide margin would hide a row that is not found.
"""
from __future__ import annotations

import functools

import pytest
import torch
from late_copies import Latest, Shuffled
from recall_engine import Answers, ask, shuffled

from penstock.core.plan import Dropped, Paused, RequestId
from penstock.eval import tasks
from penstock.eval.tasks import Interview, Size
from penstock.exec.lower import PageTable
from penstock.memory.copying import Copier

TOPK, CONTEXT = 64, 1024
# Room for one and a half of the two requests: who resumes gets pages that were another's meanwhile.
SMALL_POOL = {"hbm_pages": 75 * CONTEXT // 512, "dram_pages": 400 * CONTEXT // 512}


def interviews(task: str = "tracking", context: int = CONTEXT, samples: int = 2) -> list[Interview]:
    return tasks.interviews(task, Size(contexts=(context,), samples=samples, questions=16, seed=11,
                                       tokens_of=lambda text: len(text.split())))


@functools.cache
def undisturbed(task: str = "tracking") -> Answers:
    return ask(interviews(task), topk=TOPK, overlap=False)


def same(a: Answers, b: Answers) -> bool:
    return a.right == b.right and torch.allclose(torch.tensor(a.logprobs), torch.tensor(b.logprobs),
                                                 rtol=0, atol=1e-3)


@pytest.mark.parametrize("task", ["recall", "tracking", "sum"])
def test_it_answers(task: str) -> None:
    assert undisturbed(task).share >= 0.97


@pytest.mark.parametrize("step_tokens", [100, 333])
def test_chunks_change_no_answer(step_tokens: int) -> None:
    assert same(ask(interviews(), topk=TOPK, step_tokens=step_tokens), undisturbed())


def every_5_turns(kind):
    return lambda turn, live: [kind(RequestId(live[turn // 5 % len(live)]))] if turn % 5 == 4 and live else []


@pytest.mark.parametrize("lateness", [Latest, lambda: Shuffled(3, torn=0.2)], ids=["latest", "torn"])
def test_paused_every_5_steps_it_answers_the_same(lateness) -> None:
    got = ask(interviews(), topk=TOPK, lateness=lateness(), script=every_5_turns(Paused), **SMALL_POOL)
    assert same(got, undisturbed()) and got.stats["pauses"] >= 5


def test_dropped_and_recomputed_it_answers_the_same() -> None:
    got = ask(interviews(), topk=TOPK, script=lambda turn, live: (
        [Dropped(RequestId(live[0]))] if turn in (6, 20) and live else []))
    assert same(got, undisturbed()) and got.stats["drops"] >= 1


def test_shuffled_rows_are_useless() -> None:
    assert ask(interviews(), topk=TOPK, latent=shuffled()).share < 0.3


# ---------------------------------------------------------------- reports of wrong rows
def paused() -> Answers:
    return ask(interviews(), topk=TOPK, script=every_5_turns(Paused), **SMALL_POOL)


def test_a_bind_that_is_left_out_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    real = PageTable.bind
    seen: set[tuple[int, int]] = set()

    def bind(self, row, pages, host):
        if (id(self), row) not in seen:
            seen.add((id(self), row))
            real(self, row, pages, host)
        else:
            self._held[row] = len(pages)            # the table keeps what it had

    monkeypatch.setattr(PageTable, "bind", bind)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PageTable, "check", lambda self, row, end: None)
        got = paused()
    assert got.share < undisturbed().share - 0.1


def test_a_tail_of_4_bytes_that_is_not_copied_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    def copy(self, move, tokens):
        src, dst = self._pools[move.src, move.group], self._pools[move.dst, move.group]
        for a, b in zip(move.src_pages, move.dst_pages, strict=True):
            dst.page(b)[..., :-1].copy_(src.page(a)[..., :-1])

    monkeypatch.setattr(Copier, "_copy_tokens", copy)
    assert not same(paused(), undisturbed())


def test_a_page_that_is_stale_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Copier._copy_tokens

    def copy(self, move, tokens):
        if move.dst.name == "HBM" and len(move.dst_pages) > 1:
            return                                  # what was there before stays
        real(self, move, tokens)

    monkeypatch.setattr(Copier, "_copy_tokens", copy)
    assert paused().share < undisturbed().share - 0.1
