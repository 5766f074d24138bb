"""Speculation of rows whose pages are on the host: they say what a row alone on a large device says."""
from __future__ import annotations

import hosted
import pytest
import ranks
import where
from drafters import Dice, Noise
from driven import PAGE
from hosted import LATENESS, Engine, hosted_work, kind, play, resident

from penstock.core.plan import Aborted, Dropped, Paused, Promoted, RequestId, Spilled

SWEEP, SOAK = pytest.mark.sweep, pytest.mark.soak


@pytest.fixture(params=[1, pytest.param(2, marks=SOAK)], ids=["whole", "stages"], autouse=True)
def stages(request, monkeypatch):
    monkeypatch.setattr(ranks, "NUM", [request.param])


@pytest.fixture(params=["bounds", pytest.param("latent", marks=SWEEP),
                        *(pytest.param(kind, marks=SOAK) for kind in ("windowed", "sinks", "blocks"))], autouse=True)
def kinds(request, monkeypatch):
    monkeypatch.setattr(hosted, "KIND", [request.param])


WIDTHS = [pytest.param(1, marks=SOAK), 3, pytest.param(7, marks=SOAK)]


def drafting(drafts=3, chance=0.7, **more) -> Engine:
    """With hot buffers that hold what all positions of a row choose: a GPU's rows draft no further."""
    if where.DEVICE == "cuda":
        more = {"hot_pages": (1 + drafts) * kind().budget // PAGE + 1} | more
        more["hbm_pages"] = max(more.get("hbm_pages", 0), 4 * more["hot_pages"] + 60)
    return Engine(draft_tokens=drafts, drafter=Dice(resident, chance) if chance else Noise(), **more)


def worked(engine: Engine) -> None:
    """A GPU's hot buffers are large enough to evict next to nothing."""
    if where.DEVICE == "cpu":
        hosted_work(engine)
    assert engine.total("hot_misses") > 0


def checked(engine: Engine) -> None:
    worked(engine)
    assert 0 < engine.total("spec_accepted_tokens_total") < engine.total("spec_draft_tokens_total")


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("drafts", WIDTHS)
def test_speculation_of_rows_that_are_always_hosted(drafts, overlap):
    engine = drafting(drafts, hbm_pages=160, always=True, overlap=overlap)
    play(engine)
    checked(engine)


@pytest.mark.parametrize("drafts", [pytest.param(1, marks=SOAK), pytest.param(3, marks=SWEEP),
                                    pytest.param(7, marks=SOAK)])
def test_speculation_of_noise_on_the_host(drafts):
    engine = drafting(drafts, chance=0)
    play(engine)
    worked(engine)
    assert engine.total("spec_accepted_tokens_total") < engine.total("spec_draft_tokens_total") / 4


@pytest.mark.parametrize("lateness", ["latest", pytest.param("torn", marks=SOAK)])
@pytest.mark.parametrize("kind", [Paused, *(pytest.param(kind, marks=SOAK) for kind in (Dropped, Promoted)),
                                  Spilled])
def test_speculation_while_anyone_moves(kind, lateness):
    engine = drafting(step_tokens=100, hbm_pages=70, lateness=LATENESS[lateness]())
    play(engine, lambda turn: [kind(RequestId(1 + turn % 4))] if turn % 3 == 0 and turn < 60 else ())
    checked(engine)


def test_speculation_of_rows_that_spill_and_abort():
    engine = drafting(chance=0.2, hbm_pages=145, step_tokens=200)
    events = {4: [Spilled(RequestId(1)), Spilled(RequestId(3))],
              8: [Promoted(RequestId(1)), Aborted(RequestId(2))]}
    play(engine, lambda turn: events.get(turn, ()), arrive=lambda rid: (rid == 4) * 5, aborts=(2,))
    assert engine.core.stats()["spills"] >= 1
    assert 0 < engine.total("spec_accepted_tokens_total") < engine.total("spec_draft_tokens_total")


def test_speculation_of_a_prefix_found_in_either_tier():
    engine = drafting(hbm_pages=80, step_tokens=100, lateness=LATENESS["latest"]())
    first = kind().prompts[1]
    for rid, prompt in ((1, first), (2, (*first, 5, 9)), (3, kind().prompts[2]), (4, (*first, 8))):
        engine.add(rid, prompt, 24)
        engine.drain()
        assert tuple(engine.got[rid]) == resident(prompt, 24)
        found = engine.started[rid].hbm_tokens + engine.started[rid].dram_tokens
        assert found >= 128 if rid in (2, 4) else found == 0
    assert 0 < engine.total("spec_accepted_tokens_total") < engine.total("spec_draft_tokens_total")
