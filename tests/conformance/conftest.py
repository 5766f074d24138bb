"""Executors of one rank, and of stages in one process, by the same tests."""
from __future__ import annotations

import hosted
import pytest
import ranks

from penstock.exec import executor


@pytest.fixture(params=[1, 2], ids=["whole", "stages"])
def stages(request, monkeypatch):
    monkeypatch.setattr(ranks, "NUM", [request.param])
    return request.param


@pytest.fixture(params=[1, pytest.param(2, marks=pytest.mark.sweep)], ids=["whole", "stages"])
def stages_swept(request, monkeypatch):
    """As `stages`, of suites that take long."""
    monkeypatch.setattr(ranks, "NUM", [request.param])
    return request.param


@pytest.fixture
def told_each_step(monkeypatch):
    """The core hears after every step what rows on the host have missed."""
    monkeypatch.setattr(executor, "HOT_USE_STEPS", 1)


@pytest.fixture(params=["bounds", *(pytest.param(kind, marks=pytest.mark.sweep)
                                    for kind in ("latent", "windowed", "sinks", "shared", "blocks"))])
def kinds(request, monkeypatch):
    """Engines of `hosted` whose requests select by bounds, also beside windows, with sinks and of
    shared KV, and those of models with an indexer: of MLA KV entries, or of blocks of KV heads."""
    monkeypatch.setattr(hosted, "KIND", [request.param])
    return request.param
