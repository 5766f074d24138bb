"""A start's kernels compiled while its weights are read.

What compiles is what the start launches, on fewer layers: the first of the model up to one of each kind, with
one page of KV, takes the steps that are captured and one of each kind of the others. Only torch's own
operations run. So there is no list of kernels, and one that is missed is compiled when the start meets it.
"""
from __future__ import annotations

import gc
import re
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

import torch

from penstock.config.base import machine
from penstock.config.settings.tree import Config
from penstock.exec.drafts.drafter import drafter_of
from penstock.exec.executor import Executor
from penstock.exec.graphs.capture import buckets_of, recorded
from penstock.exec.load.backends import parts_of
from penstock.exec.load.sizing import kv_layout, largest_hot, show_size
from penstock.exec.load.weights import Sketch
from penstock.exec.start.kinds import largest_chunk, masks_rows, one_page, take_each_kind
from penstock.exec.start.workspace import largest_step
from penstock.exec.worker import Worker
from penstock.model import registry as families
from penstock.model.base import GlobalLayer, Stage

THREADS = 8
ROOM_BYTES = 4 << 30            # of a GPU's memory, that stay free beside this and the weights
ONE_BY_ONE = "kernels are compiled one after the other, behind the weights"
_LAYER = re.compile(r"\blayers\.(\d+)\.")


class Rehearsal:
    """Of one engine: `begin` is handed to `load`, `join` called before the first step."""

    def __init__(self, config: Config, longest: Callable[[Any, int], int], step_tokens: int,
                 log: Callable[[str], object]) -> None:
        """longest: tokens of a context, of these caches and a model's most; step_tokens: if none are given"""
        self._config, self._longest, self._log = config, longest, log
        self._step_tokens = config.schedule.max_num_batched_tokens or step_tokens
        self._done: Future[None] | None = None

    def begin(self, sketch: Sketch) -> None:
        """Start it on a GPU, without waiting."""
        if self._config.device.device != "cuda":
            return
        spec = families.read_spec_of(sketch.config)
        stage = kinds(sketch.config, spec.windows)
        free, need = torch.cuda.mem_get_info()[0], sketch.bytes(None) + 3 * sketch.bytes(stage) + ROOM_BYTES
        if free < need:
            self._log(f"{ONE_BY_ONE}: to do it beside them takes {show_size(need)} of the GPU's memory, and "
                      f"{show_size(free)} are free")
            return
        self._done = done = Future[None]()
        threading.Thread(target=self._run, args=(sketch, stage, done), daemon=True,
                         name="penstock-rehearsal").start()

    def join(self) -> None:
        """Until all is compiled."""
        if self._done is not None:
            self._done.result()
            self._done = None
            torch.cuda.empty_cache()

    def _run(self, sketch: Sketch, stage: Stage, done: Future[None]) -> None:
        try:
            # What it takes goes back as a whole, and weights do not lie in between.
            with torch.cuda.use_mem_pool(torch.cuda.MemPool()), torch.inference_mode():
                self._rehearse(sketch, stage)
        except Exception as why:        # a start that this does not help goes on without
            self._log(f"{ONE_BY_ONE}: {type(why).__name__}: {str(why)[:200]}")
        finally:
            gc.collect()                # a model is in cycles
            # Workspaces of products stay with a thread, and would hold what they were cut out of: 2.5 GB.
            if not recorded():
                torch._C._cuda_clearCublasWorkspaces()
            done.set_result(None)

    def _rehearse(self, sketch: Sketch, stage: Stage) -> None:
        from penstock.kernels.triton.ahead import compiling  # needs Triton
        schedule = self._config.schedule
        rows = schedule.max_num_seqs
        with compiling(min(THREADS, machine.probe().cores)):
            model, kv = sketch.build(stage, "cuda"), self._config.kv
            layout = kv_layout(self._config, model, sketch.dtype)
            selection, caches = layout.selection, layout.caches
            longest = self._longest(caches, model.max_position)
            budget, hot = 0 if selection is None else selection.budget, 0
            if budget and kv.host_decode != "off" and kv.host_tier is not False:
                hot = largest_hot(kv, budget, caches.page_size, schedule.num_drafts, longest) // caches.page_size
            parts, core = parts_of(model, sketch.backends, selection, hot, layout.groups), one_page(
                caches, rows, longest, hot)
            ranks = [Worker(parts, *caches.pools(core, "cuda"), rows=rows, max_len=longest,
                          drafter=drafter_of(self._config)) for _ in range(2)]
            if self._config.device.cuda_graphs:
                ranks[0].capture(buckets_of(rows), float("inf"), width=1 + schedule.num_drafts,
                                 rehearses=True)
            executor = Executor(ranks[1:])
            largest_step(executor, core, self._step_tokens)
            take_each_kind(executor, core, largest_chunk(caches, self._step_tokens), budget, before=1)
            masks_rows(model.vocab_size, parts.mask)


def kinds(config: dict[str, Any], windows: Mapping[int, int] | tuple[int, ...]) -> Stage:
    """The first layers of a model, up to where each kind has been: as many as have other weights or windows
    than those before."""
    kind: dict[int, list[object]] = {}
    for name, shape in families.tensor_shapes(config):
        if found := _LAYER.search(name):
            kind.setdefault(int(found[1]), []).append((name[found.end():], shape))
    seen: list[object] = []
    last = 0
    for index, weights in sorted(kind.items()):
        this = weights, windows[index] if windows else 0
        if this not in seen:
            seen.append(this)
            last = index
    return Stage(GlobalLayer(0), GlobalLayer(last + 1), embeds=True, heads=True)
