"""What captured decode steps of stages compute, step by step on a CPU: as those of one rank that are launched."""
from __future__ import annotations

from types import SimpleNamespace

import hosted
import on_a_device
import prompts_engine
import pytest
import ranks
import where
from drafters import Dice
from hosted import NEW, Engine, hosted_work, kind

from penstock.core.plan import Paused, RequestId, Spilled
from penstock.exec.graphs import steps
from penstock.exec.graphs.stages import StageGraphs
from penstock.exec.step.links import Links

BUCKETS = 2, 5


@pytest.fixture(params=[2, 3])
def captured(request, monkeypatch):
    """Puts them into an engine of so many stages: on a device it has captured them itself."""
    on_a_device.plainly(monkeypatch)
    monkeypatch.setattr(ranks, "NUM", [request.param])

    def put(engine):
        if where.DEVICE == "cuda":
            return engine, [rank._steps[0] for rank in engine.ex._ranks]
        graphs = []
        for rank in engine.ex._ranks:
            graphs.append(on_a_device.recomputed(StageGraphs, rank, None, BUCKETS, rank._links))
            rank._steps.insert(0, graphs[-1])
        return engine, graphs
    return put


@pytest.mark.parametrize("family", ["grouped", "window", "sinks", "state", "gemma4", "mla", "latent"])
def test_rows_that_read_all_or_choose_decode_as_in_one_rank(captured, family):
    spec = prompts_engine.model(family).spec
    if ranks.NUM[0] > spec.num_layers - max(0, spec.tail - 1):
        pytest.skip("fewer cuts than stages")
    engine, graphs = captured(prompts_engine.Engine(family=family, step_tokens=9))
    prompts_engine.play(engine, lambda turn: [Paused(RequestId(1 + turn % 7))] if turn % 9 == 8 else ())
    if where.DEVICE == "cpu":
        assert min(len(graph.used) for graph in graphs) > 10


@pytest.mark.parametrize("family", ["grouped", "state"])
def test_steps_without_drafts_between_others_that_have_some(captured, family):
    """Which are launched, and leave states that wait to hear which drafts were right."""
    if ranks.NUM[0] > prompts_engine.model(family).spec.num_layers:
        pytest.skip("fewer layers than stages")
    dice = Dice(lambda prompt, n: prompts_engine.dense(prompt, n, family) if n % 6 == 0 else (), .7)
    engine, graphs = captured(prompts_engine.Engine(family=family, step_tokens=9, draft_tokens=3, drafter=dice))
    prompts_engine.play(engine)
    assert engine.total("spec_accepted_tokens_total") > 0
    if where.DEVICE == "cpu":
        assert min(len(graph.used) for graph in graphs) > 10


@pytest.mark.parametrize("name", ["bounds", "shared", "latent", pytest.param("blocks", marks=pytest.mark.sweep)])
def test_rows_that_select_out_of_host_memory_decode_as_in_one_rank(captured, name, monkeypatch):
    monkeypatch.setattr(hosted, "KIND", [name])
    if kind().cut and ranks.NUM[0] > 2:
        pytest.skip("fewer cuts than stages")
    engine, graphs = captured(Engine(hbm_pages=70, step_tokens=100))
    hosted.play(engine, lambda turn: [(Paused, Spilled)[turn % 2](RequestId(1 + turn % 4))] if turn % 5 == 4 else ())
    hosted_work(engine)
    if where.DEVICE == "cpu":
        assert min(len(graph.used) for graph in graphs) > NEW


def test_padding_of_a_stage_that_shares_a_choice_has_chosen_nothing(captured, monkeypatch):
    """GLM-5, cut in front of a layer without an indexer: what a larger step before it has chosen is not read."""
    latent, front, take = hosted.KINDS["latent"], ranks.front, StageGraphs._take
    config = {**hosted.LATENT, "model_type": "glm_moe_dsa", "indexer_types": ["full", "shared", "full"]}
    monkeypatch.setitem(hosted.KINDS, "shared", hosted.Kind(config, latent.selection, latent.prompts))
    monkeypatch.setattr(hosted, "KIND", ["shared"])
    padded = []

    def taken(self, before, bucket):
        take(self, before, bucket)
        if self._in.chosen_TS is not None:
            padded.append(self._in.chosen_TS[len(before.h_TD):bucket].clone())
    monkeypatch.setattr(StageGraphs, "_take", taken)
    for prompt in latent.prompts.values():
        hosted.resident(prompt, NEW)                # by one rank
    layers = (1, 2) if ranks.NUM[0] == 2 else (1, 1, 1)
    monkeypatch.setattr(ranks, "front", lambda *args, **kw: front(*args, **{**kw, "layers": layers}))
    engine, _ = captured(Engine(hbm_pages=70, step_tokens=100))
    hosted.play(engine, lambda turn: [Paused(RequestId(1 + turn % 4))] if turn % 5 == 4 else ())
    hosted_work(engine)
    assert sum(map(len, padded)) > 3 and all((chosen == -1).all() for chosen in padded)


def test_a_last_stage_that_drafts_takes_what_others_hand_on_while_they_capture():
    given = []
    model = SimpleNamespace(drafting=object())
    attending = SimpleNamespace(uncaptured=lambda: "")
    links = Links(before=SimpleNamespace(take=given.append))
    assert steps.captured(model, None, attending, None, BUCKETS, 0.0, links=links) == ([], None)
    assert given == [0, 0]
    assert [steps.cause(attending, None, links, layer) for layer in (False, True)] == ["stages", "layer"]
