"""A front whose ranks are stages of one model inside this process."""
from __future__ import annotations

from collections.abc import Callable, Sequence

import where

from penstock.core.settings import CoreConfig
from penstock.exec.front import Front
from penstock.exec.load.layout import Caches, stage_shapes
from penstock.exec.rank import Rank, RankParts
from penstock.exec.step.links import links_in_process, split
from penstock.kernels.attention.paged_attention import Prepare
from penstock.memory import dram
from penstock.memory.pool import BlockPool
from penstock.memory.storage import Storage
from penstock.model.base import CacheShape, Model, Stage
from penstock.model.parts import even

NUM = [1]           # stages of the fronts to come: the fixture `stages` of conformance sets it


def front(model: Callable[[Stage | None], Model], attention: Prepare, shapes: Sequence[CacheShape],
          caches: Caches, cfg: CoreConfig, layers: Sequence[int] = (), *, num_layers: int = 2, links=None,
          storage: Callable[[Sequence[BlockPool]], Storage] | None = None, selector=None,
          **rank) -> tuple[Front, list[BlockPool], list[BlockPool]]:
    """With its device pools and its host pools, of all ranks. `model` makes one of its stages; None:
    all of it. layers: of each stage; () for as many as NUM says. storage: over host pools of whole pages."""
    stages = split(layers or even(num_layers, NUM[0]))
    host = dram.allocate(caches.host_bytes(cfg)) if cfg.dram_pages and where.DEVICE == "cpu" else None
    links = links or links_in_process(len(stages))
    ranks, device_pools, host_pools = [], [], []
    for stage, ends in zip(stages, links, strict=True):
        one = len(stages) == 1
        own = caches.stage(stage, shapes)
        pools = own.pools(cfg, where.DEVICE, host_memory=host)
        for kept, made in zip((device_pools, host_pools), pools, strict=True):
            kept += made
        parts = RankParts(model(None if one else stage), attention, stage_shapes(shapes, stage), selector)
        made_rank = Rank(parts, *pools, rows=cfg.rows, row_base=cfg.row_base, links=ends, **rank)
        ranks.append(where.captured(made_rank))
    whole = host_pools if host is None else caches.host_pools(cfg, host)
    return Front(ranks, storage=storage and storage(whole)), device_pools, host_pools
