"""Windows and sinks: hits, pauses and aborts beside them, and twelve faults, each of which a scene sees.

Free pages are NaN, and so is every entry that lies behind a window (`driven.InProcess.poison`).
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import hosted
import prompts_engine
import pytest
import torch
from driven import PAGE
from late_copies import Latest
from prompts_engine import PROMPTS, SHARED, SMALL, Engine, dense, play

from penstock.core.kv import sealing
from penstock.core.kv.pages import Pages
from penstock.core.plan import Aborted, Outcome, Paused, RequestId

NEW = 12
FAMILIES = ["window", "sinks", "gemma4"]
Put = Callable[[Any, pytest.MonkeyPatch], None]


def nothing(e: Any, patch: pytest.MonkeyPatch) -> None:
    """The right executor."""


# ---------------------------------------------------------------- scenes
def squeezed(put: Put, patch: pytest.MonkeyPatch, family: str = "sinks") -> None:
    """A device that is too small, and somebody who pauses every five turns."""
    e = Engine(step_tokens=5, hbm_pages=SMALL[family], lateness=Latest(), family=family)
    put(e, patch)
    play(e, lambda turn: [Paused(RequestId(1 + turn // 5 % 7))] if turn % 5 == 4 else [])
    assert e.core.stats()["pauses"] >= 3


def found(put: Put, patch: pytest.MonkeyPatch, family: str = "sinks") -> None:
    """A prefix whose pages are on the device, and one whose pages have gone to the host."""
    e = Engine(hbm_pages=20, dram_pages=64, lateness=Latest(), family=family)
    put(e, patch)
    hits = []
    for rid, prompt in enumerate((SHARED * 2, SHARED * 2 + (4,), PROMPTS[5] * 8, SHARED * 2 + (9,),
                                  SHARED * 2 + (8, 3))):
        e.add(rid, prompt, 10)
        e.drain()
        assert tuple(e.got[rid]) == dense(prompt, 10, family)
        hits.append((e.started[rid].hbm_tokens, e.started[rid].dram_tokens))
    assert hits[1][0] and hits[3][1], hits


def cut_short(put: Put, patch: pytest.MonkeyPatch, family: str = "sinks") -> None:
    """Of a prefix the window's pages are gone, those of the layers that see all are not."""
    e = Engine(hbm_pages=24, dram_pages=0, lateness=Latest(), family=family)
    put(e, patch)
    for rid, prompt in enumerate((SHARED * 4, PROMPTS[5] * 6, (*SHARED, *SHARED[:2], 9))):
        e.add(rid, prompt, 10)
        e.drain()
        assert tuple(e.got[rid]) == dense(prompt, 10, family)
    assert 0 < e.started[2].hbm_tokens < 12, e.started[2]
    assert e.core.stats()['prefix_cache_cut_total{group="window"}'] == 12 - e.started[2].hbm_tokens


def on_the_host(put: Put, patch: pytest.MonkeyPatch) -> None:
    """A prompt longer than the device, read in windows of host pages, and answers that select."""
    patch.setattr(hosted, "KIND", ["sinks"])
    e = hosted.Engine(step_tokens=50)
    put(e, patch)
    hosted.play(e, new=NEW, prompts={1: hosted.kind().prompts[1]}, arrive=lambda rid: 0)
    assert e.total("hot_misses") and e.total("hot_window_pages")


# ---------------------------------------------------------------- faults
def windows_of(e: Any, change: Callable[[int], int]) -> None:
    attending = e.rank._attending
    attending.specs = {g: replace(spec, window=change(spec.window)) for g, spec in attending.specs.items()}


def window_one_short(e: Any, patch: pytest.MonkeyPatch) -> None:
    windows_of(e, lambda window: window and window - 1)


def window_one_long(e: Any, patch: pytest.MonkeyPatch) -> None:
    windows_of(e, lambda window: window and window + 1)


def dead_page_read(e: Any, patch: pytest.MonkeyPatch) -> None:
    """A window is what the pages hold that it begins in."""
    windows_of(e, lambda window: window and window + 2 * PAGE)


def window_of_the_other_layers(e: Any, patch: pytest.MonkeyPatch) -> None:
    windows_of(e, lambda window: 0 if window else 6)


def window_pages_one_entry_off(e: Any, patch: pytest.MonkeyPatch) -> None:
    """Who comes back has the pages of its window a page too late."""
    table = e.rank._tables.groups[1]
    right = table.bind
    table.bind = lambda row, pages, host: right(row, pages[-1:] + pages[:-1], host[-1:] + host[:-1])


def window_left_a_page_early(e: Any, patch: pytest.MonkeyPatch) -> None:
    right = sealing.leave_behind

    def early(kv, r, g, t):
        retired, r.retired = r.retired, r.retired + 3 * PAGE
        right(kv, r, g, t)
        r.retired = retired
    patch.setattr(sealing, "leave_behind", early)


def hit_without_its_window(e: Any, patch: pytest.MonkeyPatch) -> None:
    """A hit is as long as the pages of the layers that see all."""
    patch.setattr(Pages, "refuses", lambda kv, r, path, stored=False: None)


class Changed:
    """An `Attend` whose sinks are others."""

    def __init__(self, attend: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._attend, self._change = attend, change

    def __call__(self, layer, q_TNH, kv_TCKH, chosen_TS=None, sinks_N=None):
        return self._attend(layer, q_TNH, kv_TCKH, chosen_TS, self._change(sinks_N))


def sinks_of(e: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    right = e.rank._attending.step
    e.rank._attending.step = lambda lowered: Changed(right(lowered), change)


def sinks_of_other_heads(e: Any, patch: pytest.MonkeyPatch) -> None:
    sinks_of(e, lambda sinks_N: sinks_N.flip(0).contiguous())


def sinks_without_weight(e: Any, patch: pytest.MonkeyPatch) -> None:
    sinks_of(e, lambda sinks_N: torch.full_like(sinks_N, -1e9))


def sinks_counted_twice(e: Any, patch: pytest.MonkeyPatch) -> None:
    sinks_of(e, lambda sinks_N: torch.logaddexp(sinks_N, sinks_N))


def sink_in_each_part(e: Any, patch: pytest.MonkeyPatch) -> None:
    """Of a prompt that is read in windows of host pages."""
    prompts = e.rank._attending._prompts
    right, run = prompts.attend, prompts._chunk_attention

    def attend(layer, chunk, windows, q_TNH, k_TKH, v_TKH, sinks_N=None):
        def part(*given, **how):
            out_TNH, lse_TN = run(*given, **how)
            return out_TNH * torch.sigmoid(lse_TN - sinks_N)[..., None], torch.logaddexp(lse_TN, sinks_N)
        prompts._chunk_attention = part
        return right(layer, chunk, windows, q_TNH, k_TKH, v_TKH, None)
    prompts.attend = attend


def sinks_lost_where_rows_select(e: Any, patch: pytest.MonkeyPatch) -> None:
    layers = e.rank._attending._layers
    right = layers.attend
    layers.attend = lambda layer, q, chosen, step, sinks, *reader: right(layer, q, chosen, step, None, *reader)


FAULTS = {
    window_one_short: squeezed,
    window_one_long: squeezed,
    dead_page_read: squeezed,
    window_of_the_other_layers: squeezed,
    window_pages_one_entry_off: squeezed,
    window_left_a_page_early: squeezed,
    hit_without_its_window: cut_short,
    sinks_of_other_heads: squeezed,
    sinks_without_weight: squeezed,
    sinks_counted_twice: squeezed,
    sink_in_each_part: on_the_host,
    sinks_lost_where_rows_select: on_the_host,
}


@pytest.mark.parametrize("scene, family", [
    *product((squeezed, found), FAMILIES), *product((cut_short,), FAMILIES[:2])],
    ids=lambda x: getattr(x, "__name__", x))
def test_pauses_and_hits_in_either_tier_change_no_token(scene, family, stages, monkeypatch):
    scene(nothing, monkeypatch, family)


@pytest.mark.parametrize("stages", [3], ids=["three"], indirect=True)
@pytest.mark.parametrize("family", FAMILIES[:2])       # the other has two stages at most
def test_three_stages_pause_and_find_as_one_does(family, stages, monkeypatch):
    """The one in the middle has the window alone."""
    name = f"{family}, three layers"
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    monkeypatch.setitem(prompts_engine.CONFIGS, name, {
        **prompts_engine.CONFIGS[family], "num_hidden_layers": 3, "layer_types": kinds})
    monkeypatch.setitem(SMALL, name, SMALL[family])
    for scene in (squeezed, found):
        scene(nothing, monkeypatch, name)


@pytest.mark.sweep
def test_a_prompt_longer_than_the_device_and_what_it_selects(monkeypatch):
    on_the_host(nothing, monkeypatch)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_abort_at_every_step_leaves_nothing_behind(family, stages):
    e = Engine(step_tokens=5, hbm_pages=SMALL[family] + 3, lateness=Latest(), family=family)
    for rid in range(40):
        e.add(rid, PROMPTS[1 + rid % 7], NEW)
        for turn in range(rid // 2):
            e.inbox += [Aborted(RequestId(rid))] if turn == rid // 2 - 1 and rid % 2 else []
            e.turn()
    e.drain()
    for rid, tokens in e.got.items():
        assert tuple(tokens) == dense(PROMPTS[1 + rid % 7], NEW, family)[:len(tokens)]
        assert len(tokens) == NEW or e.ended[rid].outcome is Outcome.ABORT
    assert sum(len(tokens) < NEW for tokens in e.got.values()) >= 5


@pytest.mark.parametrize("fault", [pytest.param(f, marks=[pytest.mark.sweep] * (scene is on_the_host))
                                   for f, scene in FAULTS.items()], ids=lambda f: f.__name__)
def test_a_fault_is_seen(fault, monkeypatch):
    with pytest.raises((AssertionError, IndexError)):
        FAULTS[fault](fault, monkeypatch)
