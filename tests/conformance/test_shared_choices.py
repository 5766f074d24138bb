"""Layers that share the choice of an earlier one (GLM-5), when the two are on different stages."""
from __future__ import annotations

import hosted
import pytest
import ranks
from hosted import LATENESS, Kind, hosted_work, kind, play, resident

from penstock.core.plan import Paused, RequestId

SHARED = {**hosted.LATENT, "model_type": "glm_moe_dsa", "indexer_types": ["full", "shared", "full"]}


@pytest.fixture(autouse=True)
def shares(monkeypatch):
    latent = hosted.KINDS["latent"]
    monkeypatch.setitem(hosted.KINDS, "shared", Kind(SHARED, latent.selection, latent.prompts))
    monkeypatch.setattr(hosted, "KIND", ["shared"])


@pytest.mark.parametrize("layers", [(1, 2), (2, 1), (1, 1, 1)], ids=str)
def test_a_choice_crosses_the_boundary_of_two_stages(monkeypatch, layers):
    """Of a stage whose first layer has no indexer, the choice comes with the hidden states."""
    for prompt in kind().prompts.values():
        resident(prompt, hosted.NEW)                # by one rank: `play` compares with these
    front = ranks.front
    monkeypatch.setattr(ranks, "front", lambda *args, **kw: front(*args, **{**kw, "layers": layers}))
    engine = hosted.Engine(step_tokens=100, lateness=LATENESS["latest"]())
    play(engine, lambda turn: [Paused(RequestId(1 + turn % 4))] if turn % 5 == 0 and turn < 60 else ())
    hosted_work(engine)
    assert engine.core.stats()["pauses"] >= 1
