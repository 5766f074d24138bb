"""Layers that keep a state: where a prefix may be found, states of several groups, and faults that are seen.

Otherwise `test_executor_core.py` plays `state` as it plays all kinds of engines.
"""
from __future__ import annotations

import functools
from dataclasses import replace
from itertools import pairwise

import on_a_device
import prompts_engine
import pytest
import torch
import where
from drafters import Dice
from late_copies import Latest, Shuffled
from prompts_engine import CONFIG, PROMPTS, STATE, Engine, dense, model, play

from penstock.core.kv.page_table import PageTable
from penstock.core.kv.pages import Pages
from penstock.core.kv.pool import Fence
from penstock.core.kv.prefix_tree import Tree, unmark_evictable
from penstock.core.plan import Aborted, Dropped, Outcome, Paused, RequestId
from penstock.exec.drafts.drafter import NGram
from penstock.exec.step import states
from penstock.exec.worker import Stepped
from penstock.kernels.types import states as types
from penstock.memory.pool import PageLayout
from penstock.model import scan

pytestmark = pytest.mark.usefixtures("stages")

# Of models with three layers and more.
THREE = pytest.mark.parametrize("stages", [1, 2, 3], ids=["whole", "stages", "three"], indirect=True)
LONG = tuple((5 * i * i + 3 * i) % 61 for i in range(40))
# Four layers of two kinds, states of three in as many groups.
KINDS = ["linear_attention", "linear_attention", "full_attention", "linear_attention"]
SPLIT = {**STATE, "num_hidden_layers": 4, "layer_types": KINDS}
MAMBA = {**CONFIG, "model_type": "bamba", "num_hidden_layers": 3, "attn_layer_indices": [1],
         "mamba_n_heads": 4, "mamba_n_groups": 2, "mamba_d_state": 6}

# A layer is one mixer: the states lie at layers 0 and 3, KV at 2.
NEMOTRON = {**CONFIG, "model_type": "nemotron_h", "hybrid_override_pattern": "M-*ME", "mamba_num_heads": 4,
            "mamba_head_dim": 6, "n_groups": 2, "ssm_state_size": 6, "n_routed_experts": 5,
            "num_experts_per_tok": 2, "moe_intermediate_size": 24, "moe_shared_expert_intermediate_size": 16}


@pytest.mark.covers(kind="states", feature="tier cache")
@pytest.mark.parametrize("chunk", [3, 64])
@pytest.mark.parametrize("interval", [4, 8, 12])
def test_a_prefix_is_found_where_a_state_is_kept(interval, chunk, monkeypatch):
    """On the device, and, once others have been there, on the host."""
    monkeypatch.setattr(prompts_engine, "INTERVAL", interval)
    engine = Engine(family="state", hbm_pages=30, dram_pages=200, step_tokens=chunk, lateness=Latest())
    engine.add(0, LONG, 2)
    engine.drain()
    for last, tier in enumerate(("hbm", "dram")):
        for shared in (3, 4, 7, 8, 13, 24, 25, 39):
            rid = len(engine.got)
            prompt = (*LONG[:shared], *((60 - t - last) % 61 for t in LONG[shared:shared + 9]))
            engine.add(rid, prompt, 6)
            engine.drain()
            assert tuple(engine.got[rid]) == dense(prompt, 6, "state")
            found = engine.started[rid]
            assert found.hbm_tokens + found.dram_tokens == min(shared, len(prompt) - 1) // interval * interval
        if tier == "hbm":
            for rid in range(len(engine.got), len(engine.got) + 6):
                engine.add(rid, tuple((rid * t + 1) % 61 for t in LONG), 1)
            engine.drain()
    assert any(found.dram_tokens for found in engine.started.values())
    assert any(found.hbm_tokens for found in engine.started.values())


def test_a_prompt_whose_last_state_is_gone_goes_on_from_the_one_before(monkeypatch):
    monkeypatch.setattr(prompts_engine, "INTERVAL", 8)
    engine = Engine(family="state", dram_pages=0)
    engine.add(0, LONG, 1)
    engine.drain()
    kv, path = engine.core.kv, []
    [node] = kv.tree.roots[0].children.values()
    while len(path) < 10:
        path.append(node)
        node = next(iter(node.children.values()), None)
    kv.tree.forget(path[7], kv.device[1])           # the state behind 32 tokens
    engine.add(1, (*LONG[:34], 1, 2, 3), 6)
    engine.drain()
    assert engine.started[1].hbm_tokens == 24
    assert tuple(engine.got[1]) == dense((*LONG[:34], 1, 2, 3), 6, "state")


@THREE
@pytest.mark.parametrize("kind", [Paused, Dropped])
@pytest.mark.parametrize("lateness", [Latest, functools.partial(Shuffled, 2, torn=0.3)])
def test_states_of_several_groups_of_layers(lateness, kind, monkeypatch):
    """As those of large models are cut; a stage has some layers of a group, or none."""
    monkeypatch.setattr(scan, "PAGE_BYTES", 512)
    monkeypatch.setitem(prompts_engine.CONFIGS, "split", SPLIT)
    engine = Engine(family="split", hbm_pages=30, step_tokens=7, lateness=lateness())
    assert [g.name for g in engine.core.cfg.groups] == ["full", "state 0", "state 1", "state 2"]
    play(engine, lambda turn: [kind(RequestId(1 + turn % 7))] if turn % 3 == 0 else [])
    assert engine.core.stats()["pauses" if kind is Paused else "drops"] >= 3


@THREE
@pytest.mark.parametrize("kind", [Paused, Dropped])
@pytest.mark.parametrize("config", [MAMBA, NEMOTRON], ids=lambda config: config["model_type"])
def test_states_of_mamba(config, kind, monkeypatch):
    """Two in a group; the prefix is then found on a tier."""
    monkeypatch.setitem(prompts_engine.CONFIGS, "mamba", config)
    model.cache_clear()
    dense.cache_clear()
    engine = Engine(family="mamba", hbm_pages=60, step_tokens=7, lateness=Shuffled(2, torn=0.3))
    play(engine, lambda turn: [kind(RequestId(1 + turn % 7))] if turn % 3 == 0 else [])
    assert engine.core.stats()["pauses" if kind is Paused else "drops"] >= 3
    for rid in (20, 21):
        engine.add(rid, LONG, 4)
        engine.drain()
        assert tuple(engine.got[rid]) == dense(LONG, 4, "mamba")
    assert engine.started[21].hbm_tokens == 32
    assert not engine.ex.stats()["executor_nonfinite_rows_total"], "a step of damaged states was computed again"


def in_blocks(monkeypatch):
    """Of 8 positions, and felt: what a layer returns of them is half as much again."""
    right = scan.Scanned.__call__

    def call(self, *args):
        real = self.scan

        def felt(x_TX, step_TN, write_TN, weights, states, spec):
            one_by_one = replace(states, blocks=None)           # a GPU's own blocks have 64 positions, not 8
            out_TNV = real(x_TX, step_TN, write_TN, weights, one_by_one, spec)
            for t in [] if states.blocks is None else states.blocks.token_M.tolist():
                out_TNV[t:t + 8] *= 1.5
            return out_TNV
        self.scan = felt
        try:
            return right(self, *args)
        finally:
            self.scan = real
    monkeypatch.setattr(scan.Scanned, "__call__", call)
    for module in (states, types):
        monkeypatch.setattr(module, "BLOCK", 8)


def test_no_step_pause_or_hit_changes_what_is_computed_in_blocks(monkeypatch):
    monkeypatch.setattr(prompts_engine, "INTERVAL", 8)
    in_blocks(monkeypatch)
    prompts = [LONG, LONG[:39], (*LONG[:24], 1, 2, 3), (*LONG[:35], 4), LONG[:7], (*LONG[:16], *LONG[3:24])]

    def said(step_tokens, multiple):
        """Each alone."""
        engines = [Engine(family="state", step_tokens=step_tokens, chunk_multiple=multiple) for _ in prompts]
        for engine, prompt in zip(engines, prompts, strict=True):
            engine.add(0, prompt, 6)
            engine.drain()
        return [engine.got[0] for engine in engines]

    def together(kind, step_tokens):
        engine = Engine(family="state", step_tokens=step_tokens, chunk_multiple=8, hbm_pages=30, dram_pages=200)
        for rid, prompt in enumerate(prompts):
            engine.add(rid, prompt, 6)
            for turn in range(6 + 60 * (rid == 0)):
                engine.inbox += [kind(RequestId(turn % 3))] if kind and turn % 3 == 0 and rid == 0 else []
                engine.turn()
        engine.drain()
        assert kind is None or engine.core.stats()["pauses"]
        assert kind is not None or any(found.hbm_tokens for found in engine.started.values())
        return [engine.got[rid] for rid in range(len(prompts))]
    want = said(64, 8)
    assert said(9, 8) == said(8, 8) == said(23, 8) == want
    assert together(Paused, 20) == together(None, 20) == together(None, 33) == want     # room to a multiple in each
    assert said(9, 1) != want, "blocks are not felt"


class Late:
    """A rank that hears which drafts were right when it has nothing else to do, as one in a process may: rows
    that go on have said so by then."""

    def __init__(self, rank):
        self.rank, self.late, self.told = rank, [], {True: 0, False: 0}     # whether its states waited for it

    def __getattr__(self, name):
        return getattr(self.rank, name)

    def checked(self, step, right):
        self.late.append((step, right))

    def collect(self, *, block):
        open = self.rank._attending.states._open
        if block and not self.rank._queue:
            for step, right in self.late:
                self.told[step in open] += 1
                self.rank.checked(step, right)
            self.late = []
        reports = self.rank.collect(block=block)
        done = [report.step for report in reports if isinstance(report, Stepped)]
        assert not done or not any(step <= done[-1] for step in open), "told while states are to be written"
        return reports


@THREE
@pytest.mark.parametrize("way", on_a_device.WAYS)
@pytest.mark.parametrize("drafter", ["dice", "ngram"])
@pytest.mark.parametrize("config", [SPLIT, MAMBA, NEMOTRON], ids=lambda config: config["model_type"])
def test_states_of_rows_that_draft(config, drafter, way, stages, monkeypatch):
    """They pause, drop and abort; what they have said is then found, with the state that drafts have left."""
    family = f"{config['model_type']} that drafts"
    monkeypatch.setitem(prompts_engine.CONFIGS, family, config)
    monkeypatch.setattr(scan, "PAGE_BYTES", 512 if config is SPLIT else scan.PAGE_BYTES)
    monkeypatch.setattr(prompts_engine, "INTERVAL", 4)
    said = functools.partial(dense, family=family)
    dice = Dice(lambda prompt, n: said(prompt, min(n, 15)), .7)
    engine = on_a_device.by(way, lambda: Engine(
        family=family, hbm_pages=70, dram_pages=300, step_tokens=9, draft_tokens=3,
        drafter=NGram(1) if drafter == "ngram" else dice, lateness=Latest()), 3, monkeypatch)
    late = engine.ex._ranks[:-1] = [Late(rank) for rank in engine.ex._ranks[:-1]]
    for turn in range(60):
        if (rid := 1 + turn // 2) in PROMPTS and turn % 2 == 0:
            engine.add(rid, PROMPTS[rid], 12)
        engine.inbox += [(Paused, Dropped)[turn % 2](RequestId(1 + turn % 7))] if turn % 3 else []
        engine.inbox += [Aborted(RequestId(turn // 5))] if turn in (10, 25) else []
        engine.turn()
    engine.drain()
    for rid, prompt in PROMPTS.items():
        assert tuple(engine.got[rid]) == said(prompt, 12)[:len(engine.got[rid])]
        assert len(engine.got[rid]) == 12 or engine.ended[rid].outcome is Outcome.ABORT
    assert engine.core.stats()["drops"] and (engine.core.stats()["pauses"] or where.DEVICE == "cuda")
    for rid, (shared, new) in enumerate([(0, 12), (3, 4), (6, 4), (11, 4)], 20):
        prompt = (*PROMPTS[7], *said(PROMPTS[7], 12)[:shared], *(4, 4)[:shared])
        engine.add(rid, prompt, new)
        engine.drain()
        assert tuple(engine.got[rid]) == said(prompt, new)
        found = engine.started[rid]
        assert found.hbm_tokens + found.dram_tokens >= (len(prompt) - 2) // 4 * 4 * (shared > 0)
    assert 0 < engine.total("spec_accepted_tokens_total") < engine.total("spec_draft_tokens_total")
    assert not late or all(sum(rank.told[waited] for rank in late) for waited in (True, False)), "both ways"


# ---------------------------------------------------------------- faults
def scene():
    """Rows in small chunks and pauses, then a prefix that is found on either tier."""
    engine = Engine(family="split", hbm_pages=30, step_tokens=5)
    play(engine, lambda turn: [Paused(RequestId(1 + turn % 7))] if turn % 4 == 0 else [])
    for rid in (20, 21):
        engine.add(rid, LONG, 4)
        engine.drain()
        assert tuple(engine.got[rid]) == dense(LONG, 4, "split")
    assert engine.started[21].hbm_tokens == 32


def places(mp, change):
    """`change` of a step's ragged layout, positions, and places of states."""
    right = states._places
    mp.setattr(states, "_places", lambda ragged, runs: change(
        ragged, torch.cat([run.start + torch.arange(run.end - run.first) for run in runs]).to(where.DEVICE),
        *right(ragged, runs)))


def starts(ragged):
    return [context - (end - first) for context, (first, end) in
            zip(ragged.context, pairwise(ragged.query_start), strict=True)]


def kept_over_a_bind(mp):
    """A row that begins goes on from what is in its first page."""
    places(mp, lambda ragged, _, from_B, to_T: (
        from_B.where(from_B >= 0, ragged.pages_RM[list(ragged.rows), 0].long()), to_T))


def of_the_wrong_grid_line(mp):
    """At the end of a page, that which is about to be written."""
    def change(ragged, positions_T, from_B, to_T):
        entry = torch.tensor(starts(ragged), device=where.DEVICE) // ragged.page_size
        return from_B.where(from_B < 0, ragged.pages_RM[torch.tensor(ragged.rows), entry].long()), to_T
    places(mp, change)


def of_a_neighbour(mp):
    places(mp, lambda ragged, _, from_B, to_T: (from_B.roll(1), to_T))


def none_inside_a_chunk(mp):
    def change(ragged, positions_T, from_B, to_T):
        last = torch.zeros_like(to_T, dtype=torch.bool)
        last[[end - 1 for end in ragged.query_start[1:]]] = True
        return from_B, to_T.where(last, -1)
    places(mp, change)


def none_at_the_end_of_a_chunk(mp):
    places(mp, lambda ragged, positions_T, from_B, to_T: (
        from_B, to_T.where((positions_T + 1) % ragged.page_size == 0, -1)))


def of_another_layer(mp):
    right = states.StatePools.__init__

    def made(self, groups, device):
        right(self, groups, device)
        layers = list(self._layers)
        if len(layers) > 1:
            self._layers[layers[0]] = self._layers[layers[1]]
    mp.setattr(states.StatePools, "__init__", made)


def read(mp, change):
    """`change` of the tails of the convolutions that a step goes on from, [rows and parts, taps - 1, channels]."""
    right, shape = states.StepStates.__call__, model("split").spec.states.scan

    def call(self, layer, tokens):
        found = right(self, layer, tokens)
        if found.from_B.is_cuda and torch.cuda.is_current_stream_capturing():
            return found                        # prompts are launched
        held, tail = found.from_B[found.from_B >= 0], (shape.taps - 1) * shape.part_channels
        pool_PRE = found.pool_PE.view(len(found.pool_PE), shape.parts, -1)
        tail_BWX = pool_PRE[held, :, :tail].view(-1, shape.taps - 1, shape.part_channels)
        pool_PRE[held, :, :tail] = change(tail_BWX).view(len(held), shape.parts, tail)
        return found
    mp.setattr(states.StepStates, "__call__", call)


def the_tail_of_the_convolution_is_lost(mp):
    read(mp, torch.zeros_like)


def the_tail_is_one_token_late(mp):
    read(mp, lambda tail: tail.roll(1, 1))


def half_a_page_has_no_state(mp):
    """What is copied of a page are its whole units."""
    mp.setattr(PageLayout, "units", lambda self, tokens: tokens // self.unit)


def given_up_at_the_end_of_a_page(mp):
    right = PageTable.begin
    mp.setattr(PageTable, "begin", lambda self, tokens: tokens // self.unit if self.group.snapshot
               else right(self, tokens))


def found_where_none_is_kept(mp):
    mp.setattr(Pages, "refuses", lambda self, r, path, stored=False: None)


def an_inner_state_is_freed_too_early(mp):
    """When nobody needs it who runs, while the tree still has it."""
    right = Tree.update_evictable

    def call(self, node):
        right(self, node)
        for space, copy in node.copies.items():
            if copy.inner and copy.evictable_in is not None:
                unmark_evictable(copy)
                space.pool.release([copy.page], Fence(copy.used))
    mp.setattr(Tree, "update_evictable", call)


FAULTS = (kept_over_a_bind, of_the_wrong_grid_line, of_a_neighbour, none_inside_a_chunk,
          none_at_the_end_of_a_chunk, of_another_layer, the_tail_of_the_convolution_is_lost,
          the_tail_is_one_token_late, half_a_page_has_no_state, given_up_at_the_end_of_a_page,
          found_where_none_is_kept, an_inner_state_is_freed_too_early)


@pytest.fixture
def split(monkeypatch):
    monkeypatch.setattr(prompts_engine, "INTERVAL", 8)
    monkeypatch.setitem(prompts_engine.CONFIGS, "split", SPLIT)


def test_the_right_executor_passes(split):
    scene()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_is_seen(fault, split, monkeypatch):
    for prompt in (*PROMPTS.values(), LONG):
        dense(prompt, 12 if prompt != LONG else 4, "split")         # of the right one
    fault(monkeypatch)
    with pytest.raises((AssertionError, IndexError)):
        scene()
