"""States in whole host pages: those that ranks of one TP size have written are gone on with by ranks of another."""
from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from dense_attend import Dense
from rank_threads import SCAN, STATES, Threads, packed, parts

from penstock.core.settings import CoreConfig
from penstock.exec.load import layout
from penstock.exec.load.layout import caches_of
from penstock.memory.dram import DramPool
from penstock.model import registry

PAGE, PAGES = 8, 3          # tokens of a page of states, and pages
IDS = torch.arange(PAGE * PAGES + 3) * 5 % 61


class Kept:
    """What is kept of the tokens: host pages of states, and KV as one rank has it."""

    def __init__(self, config: dict[str, Any]) -> None:
        groups = registry.build(config, dtype=torch.float32, linear=packed, scan=SCAN).groups
        self.groups = tuple(replace(group, page_tokens=PAGE) if group.snapshot else group for group in groups)
        self.caches = caches_of(self.groups, PAGE, torch.float32)
        pages = PAGES * self.caches.slabs.slab_pages[0]
        self.core = CoreConfig(page_size=PAGE, rows=1, hbm_pages=pages, dram_pages=pages, groups=self.caches.groups,
                               max_len=64, group_base=1 << 20)
        self.memory = torch.zeros(self.caches.host_bytes(self.core), dtype=torch.uint8)
        self.kv: dict[int, torch.Tensor] = {}
        self.before = 0             # read the state of so many boundaries before

    def pools(self, stage: Any) -> list[tuple[Any, DramPool]]:
        """Of groups of states, as this rank sees them."""
        pools = self.caches.stage(stage, self.groups).host_pools(self.core, self.memory)
        return [(group, pool) for group, pool in zip(self.groups, pools, strict=True) if group.snapshot]

    def write(self, stage: Any, page: int, attend: Dense) -> None:
        for group, pool in self.pools(stage):
            for i, layer in enumerate(group.layers):
                held = pool.page(pool.base + page)[i]
                held.copy_(attend.states[layer].view(held.shape))
        for layer, kv in attend.stored.items():
            cut = stage.tp_rank.kv_heads(4)
            self.kv.setdefault(layer, torch.zeros(len(IDS), 2, 4, kv.shape[3]))[:len(kv), :, cut.range] = kv

    def read(self, stage: Any, page: int, attend: Dense) -> None:
        for group, pool in self.pools(stage):
            for i, layer in enumerate(group.layers):
                attend.states[layer].copy_(pool.page(pool.base + page - self.before)[i].reshape(1, -1))
                attend.begun.add(layer)
        for layer, kv in self.kv.items():
            attend.stored[layer] = kv[:(page + 1) * PAGE, :, stage.tp_rank.kv_heads(4).range].clone()


def run(config: dict[str, Any], tp: int, kept: Kept, begin: int) -> torch.Tensor:
    """Logits of the tokens from page `begin` on; what is behind each page is kept."""
    tp_group, found = Threads(tp), [torch.empty(0)] * tp

    @torch.inference_mode()
    def one(stage: Any) -> None:
        index = stage.tp_rank.index
        model = registry.build(config, dtype=torch.float32, stage=stage, linear=packed, scan=SCAN,
                               tp_group=tp_group.of(index) if tp > 1 else None)
        for name, tensor in registry.dummy_tensors(config, 7, model.wants):
            model.load(name, tensor * (torch.linspace(0.5, 1.5, len(tensor)) if "norm" in name else 8))
        model.finish()
        attend, logits = Dense(model.reads, model.groups), []
        if begin:
            kept.read(stage, begin - 1, attend)
        for page in range(begin, PAGES + 1):
            at = torch.arange(page * PAGE, min(len(IDS), (page + 1) * PAGE))
            logits.append(model.logits(model.forward(IDS[at], at, attend)))
            if not begin and page < PAGES:
                kept.write(stage, page, attend)
        found[index] = torch.cat(logits)

    threads = [threading.Thread(target=one, args=(stage,)) for stage in parts(1, tp)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found[0]


def check(family: str, before: int, after: int, back: int = 0) -> None:
    """back: as `Kept.before`."""
    kept = Kept(STATES[family])
    want = run(STATES[family], before, kept, 0)
    assert torch.allclose(want, run(STATES[family], 1, Kept(STATES[family]), 0), atol=1e-4, rtol=1e-4)
    kept.before = back
    for page in range(1 + back, PAGES + 1):
        got = run(STATES[family], after, kept, page)
        assert torch.allclose(got, want[page * PAGE:], atol=1e-4, rtol=1e-4), f"from page {page} on"


@pytest.mark.parametrize("before, after", [(2, 1), (1, 2), (2, 3), (3, 2)])
@pytest.mark.parametrize("family", STATES)
def test_ranks_go_on_from_any_page_that_ranks_of_another_size_have_written(family, before, after):
    check(family, before, after)


@pytest.mark.parametrize("family", STATES)
def test_states_of_the_other_ranks_heads_are_seen(family, monkeypatch):
    real = layout._rectangle

    def rectangle(stage, whole, shape):
        layers, heads = real(stage, whole, shape)
        num = whole.num_kv_heads
        return layers, range(num - heads.stop, num - heads.start) if shape.snapshot else heads
    monkeypatch.setattr(layout, "_rectangle", rectangle)
    with pytest.raises(AssertionError, match="from page 1 on"):
        check(family, 2, 1)


@pytest.mark.parametrize("family", STATES)
def test_the_state_of_the_boundary_before_is_seen(family):
    with pytest.raises(AssertionError, match="from page 2 on"):
        check(family, 2, 2, back=1)
