"""One rank from its weights on: a worker over pools of whatever size, and what its steps take of a GPU's memory.

The same in the engine's process and in one of its own.
"""
from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from penstock.config.settings.tree import Config
from penstock.core.settings import CoreConfig
from penstock.exec.drafts.drafter import drafter_of
from penstock.exec.executor import Executor
from penstock.exec.graphs.capture import buckets_of
from penstock.exec.graphs.mixed import START_S
from penstock.exec.load.backends import parts_of
from penstock.exec.load.layout import Caches, stage_shapes
from penstock.exec.load.sizing import DeviceMemory, KvLayout
from penstock.exec.load.weights import LoadedModel
from penstock.exec.sampling.grammar import Grammars
from penstock.exec.start.kinds import masks_rows
from penstock.exec.start.memory_use import MemoryUse
from penstock.exec.start.workspace import MemoryProfile
from penstock.exec.step.links import Links
from penstock.exec.worker import Worker
from penstock.kernels.triton import compiles
from penstock.memory.dram import DramPool
from penstock.memory.hbm import HbmPool
from penstock.memory.lateness import Lateness
from penstock.memory.storage import HostPages
from penstock.transfer.pages import PageBytes, PoolPages


class Rank:
    """`worker`: over the pools that were made last, `hbm` and `dram` by cache group; None: there are none. Where it is
    the only one it is for the start what `WorkerGroup` is of several."""

    def __init__(self, config: Config, loaded: LoadedModel, layout: KvLayout, own: Caches, use: MemoryUse,
                 wake: Callable[[], None], *, links: Links | None = None, grammars: Grammars | None = None,
                 lateness: Lateness | None = None) -> None:
        """layout: of all stages; own: caches of this one. On a GPU what its memory is taken for counts from now on.
        wake, links, grammars, lateness: of `Worker`; the last of the one that serves."""
        self.worker: Worker | None = None
        self.alone, self.places = True, [(0, 0)]
        self.captures = config.device.device == "cuda" and config.device.cuda_graphs
        self.grammars = grammars
        self._config, self._loaded, self._layout, self._own, self._use = config, loaded, layout, own, use
        self._wake, self._links, self._lateness = wake, links or Links(), lateness
        self._groups = stage_shapes(layout.groups, loaded.model.stage)
        self._device = config.device.device
        self.hbm: list[HbmPool] = []
        self.dram: list[DramPool] = []
        self.capture_seconds = 0.0
        self._profile = MemoryProfile() if self._device == "cuda" else None

    def drop(self) -> None:
        """Before another worker takes its place: the device's memory has no room for both."""
        if self.worker is not None:
            self.worker.settle()
        self.worker, self.hbm, self.dram = None, [], []

    def pools(self, core: CoreConfig, *, capture: bool = False, serves: bool = False, host: Tensor | None = None,
              device: Tensor | None = None, outside: int = 0, seconds: float = START_S) -> Worker:
        """Make pools of these sizes, and a worker. capture: steps for CUDA graphs, for so many seconds those with
        prompts. serves: they are those of requests. host, device: memory that others see too, as `Caches.pools` has
        it, of which torch knows nothing of so many bytes `outside`."""
        self.drop()
        model, use = self._loaded.model, self._use
        parts = parts_of(model, self._loaded.backends, self._layout.selection, core.largest_hot, self._groups)
        if serves and self._device == "cuda" and self._links.after is None:
            masks_rows(model.vocab_size, parts.mask)
        use.took("kernels")
        self.hbm, self.dram = self._own.pools(core, self._device, host_memory=host, device_memory=device)
        if serves:
            use.took("kv", outside)
        self.worker = Worker(parts, self.hbm, self.dram, rows=core.rows, max_len=core.max_len, links=self._links,
                             seed=self._config.model.seed or 0, lateness=self._lateness if serves else None,
                             wake=self._wake, grammars=self.grammars, drafter=drafter_of(self._config),
                             draft_tokens=core.draft_tokens)
        if serves:
            use.took("tables")
        if capture:
            started = time.perf_counter()
            self.worker.capture(buckets_of(core.rows), seconds, width=1 + core.draft_tokens)
            self.capture_seconds = round(time.perf_counter() - started, 3)
        if serves:
            use.took("graphs")
            compiles.serve()
        return self.worker

    def measured(self, *, capture: bool | None = None) -> list[DeviceMemory]:
        """What steps since the start have taken of the GPU, with `capture` the largest graphs too; then there are no
        pools. Raises torch's OutOfMemoryError."""
        assert self._profile is not None, "on a GPU"
        if not (self.captures if capture is None else capture):
            self.drop()
        schedule = self._config.schedule
        found = self._profile.read(self._loaded.model.vocab_size, schedule.max_num_seqs, self.worker,
                                   1 + schedule.num_drafts, samples=self._links.after is None)
        self.drop()
        torch.cuda.empty_cache()
        return [found]

    @property
    def ranks(self) -> list[Worker]:
        return [] if self.worker is None else [self.worker]

    def executor(self, page_size: int = 0) -> Executor:
        return Executor(self.ranks, page_size=page_size)

    def seen(self, _: CoreConfig, __: Caches) -> PageBytes:
        return PoolPages([[*self.hbm, *self.dram]])

    def host_pages(self, _: CoreConfig, __: Caches) -> Sequence[HostPages]:
        return self.dram
