"""The core and the sizes of pools count a context by one formula: what is printed and refused at start is
what a request that is alone can have."""
from __future__ import annotations

from dataclasses import replace

import prompts_engine
import pytest
import torch

from penstock.core.policy.capacity import Place, fits
from penstock.core.settings import CoreConfig
from penstock.exec.load.layout import caches_of
from penstock.model import scan

PAGE, LONGEST = 4, 400
SPLIT = {**prompts_engine.STATE, "num_hidden_layers": 4, "layer_types": [
    "linear_attention", "linear_attention", "full_attention", "linear_attention"]}


@pytest.mark.parametrize("interval", [0, 16])
@pytest.mark.parametrize("family", [*prompts_engine.CONFIGS, "experts", "split"])
def test_a_context_fits_where_its_bytes_do(family, interval, monkeypatch):
    monkeypatch.setattr(scan, "PAGE_BYTES", 512)
    monkeypatch.setitem(prompts_engine.CONFIGS, "split", SPLIT)
    prompts_engine.model.cache_clear()
    groups = [replace(group, page_tokens=interval) if group.snapshot else group
              for group in prompts_engine.model(family).groups]
    prompts_engine.model.cache_clear()
    caches = caches_of(groups, PAGE, torch.float32)
    per, seen = caches.slabs.slab_pages[0], set()
    for slabs in range(len(groups), 40):
        cfg = CoreConfig(page_size=PAGE, rows=1, hbm_pages=slabs * per, dram_pages=0, step_tokens=8,
                         max_len=LONGEST, groups=caches.groups)
        held = caches.context_pages(caches.nbytes(cfg.hbm_pages))
        for pages in range(1, LONGEST // PAGE + 1):
            assert fits(cfg, Place.DEVICE, pages * PAGE) == (pages <= held), (slabs, pages, held)
            seen.add(pages <= held)
    assert seen == {True, False}
