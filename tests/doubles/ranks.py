"""A front whose ranks are stages of one model inside this process."""
from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Generic, TypeVar

import torch
import where

from penstock.core.plan import StepId
from penstock.core.settings import CoreConfig
from penstock.exec.executor import Executor
from penstock.exec.load.layout import Caches, stage_shapes
from penstock.exec.step.links import Links, Sampled, split
from penstock.exec.worker import Worker, WorkerParts
from penstock.kernels.attention.paged_attention import Prepare
from penstock.memory import dram
from penstock.memory.pool import BlockPool
from penstock.memory.storage import Storage
from penstock.model.base import Boundary, CacheShape, Model, Stage
from penstock.model.parts import even

T = TypeVar("T")
NUM = [1]           # stages of the fronts to come: the fixture `stages` of conformance sets it


class Handover(Generic[T]):
    """A link within one process."""

    def __init__(self) -> None:
        self._queue: deque[tuple[StepId, T]] = deque()

    def put(self, step: StepId, what: T) -> None:
        if isinstance(what, Boundary):
            what = copied(what)
        self._queue.append((step, what))

    def take(self, step: StepId) -> T:
        found, what = self._queue.popleft()
        assert found == step, f"step {step} was handed what step {found} made"
        return what

    def arrived(self) -> None:
        """Nothing is launched ahead of answers."""


def copied(x: Boundary) -> Boundary:
    return Boundary(*(None if part is None else part.clone() for part in x[:3]), x.inputs,
                    tuple(part.clone() for part in x.tapped), None if x.own_TX is None else x.own_TX.clone())


def links_in_process(num_stages: int) -> list[Links]:
    """Of stages that share a process, one after the other."""
    if num_stages == 1:
        return [Links()]
    between = [Handover[Boundary]() for _ in range(num_stages - 1)]
    sampled = Handover[Sampled]()
    return [Links(before=between[i - 1] if i else None,
                  after=between[i] if i < num_stages - 1 else None,
                  tell=sampled if i == num_stages - 1 else None, hear=None if i else sampled)
            for i in range(num_stages)]


def shared(fd: int) -> torch.Tensor | None:
    """A mapping of its own, as each process has one: a CUDA device takes a range of addresses once."""
    size = os.stat(fd).st_size
    return dram.mapped(fd, size) if size else None


def front(model: Callable[[Stage | None], Model], attention: Prepare, shapes: Sequence[CacheShape],
          caches: Caches, cfg: CoreConfig, layers: Sequence[int] = (), *, num_layers: int = 2, links=None,
          storage: Callable[[Sequence[BlockPool]], Storage] | None = None, selects=None,
          **rank) -> tuple[Executor, list[BlockPool], list[BlockPool]]:
    """With its device pools and its host pools, of all ranks. `model` makes one of its stages; None:
    all of it. layers: of each stage; () for as many as NUM says. storage: over host pools of whole pages."""
    stages = split(layers or even(num_layers, NUM[0]))
    host_fd = os.memfd_create("host")
    os.truncate(host_fd, caches.host_bytes(cfg))
    links = links or links_in_process(len(stages))
    ranks, device_pools, host_pools = [], [], []
    for stage, ends in zip(stages, links, strict=True):
        one = len(stages) == 1
        own = caches.stage(stage, shapes)
        pools = own.pools(cfg, where.DEVICE, host_memory=shared(host_fd))
        for kept, made in zip((device_pools, host_pools), pools, strict=True):
            kept += made
        mask = "triton" if where.DEVICE == "cuda" else "reference"
        made, own_shapes = model(None if one else stage), stage_shapes(shapes, stage)
        parts = (WorkerParts(made, attention, own_shapes, mask=mask) if selects is None else
                 replace(selects, model=made, attention=attention, groups=own_shapes, draw="triton", mask=mask))
        made_rank = Worker(parts, *pools, rows=cfg.rows, row_base=cfg.row_base, links=ends,
                         draft_tokens=cfg.draft_tokens, **rank)
        ranks.append(where.captured(made_rank, cfg.draft_tokens))
    whole = caches.host_pools(cfg, shared(host_fd)) if cfg.dram_pages else []
    os.close(host_fd)
    return Executor(ranks, storage=storage and storage(whole)), device_pools, host_pools
