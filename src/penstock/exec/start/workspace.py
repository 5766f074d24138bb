"""What the largest step of a model takes of a GPU's memory beside weights and KV: measured once, at start.

Runs it on one page of KV that stands for all: content does not matter, addresses do not either.
"""
from __future__ import annotations

import torch

from penstock.config.request.params import SamplingParams
from penstock.core.plan import Bind, HbmPage, RequestId, Retired, Row, StepId, StepPlan
from penstock.core.settings import CoreConfig
from penstock.exec.executor import Executor
from penstock.exec.load.layout import Caches
from penstock.exec.load.sizing import DeviceMemory
from penstock.exec.sampling.sampler import Sampler
from penstock.exec.start.kinds import context_max
from penstock.exec.worker import Worker
from penstock.kernels.types.states import BLOCK

# Of the allocator's, for what a mixed step or another order of sizes takes more than the one measured.
SLACK = 0.1
SLACK_BYTES = 256 << 20


class MemoryProfile:
    """What is taken of a GPU's memory by this process from now on, beside what it holds already."""

    def __init__(self) -> None:
        torch.cuda.empty_cache()
        self._free, self._total = torch.cuda.mem_get_info()
        self._held = torch.cuda.memory_reserved()
        torch.cuda.reset_peak_memory_stats()

    def read(self, vocab_size: int, rows: int, rank: Worker | None = None, width: int = 1, *,
             samples: bool = True) -> DeviceMemory:
        """Of the steps since then, of sampling so many rows, if not another stage does, and of the largest
        graphs of `rank`, which keep their memory, with drafts of up to `width` positions; and a tenth."""
        if samples:
            _sample(vocab_size, rows)
        taken = torch.cuda.max_memory_reserved() - self._held
        torch.cuda.empty_cache()            # as a capture does when it begins
        if rank is not None:
            before = torch.cuda.memory_reserved()
            rank.capture((rows,), 0.0, width=width)
            taken += torch.cuda.memory_reserved() - before
        torch.cuda.reset_peak_memory_stats()
        return DeviceMemory(total=self._total, free=self._free,
                            workspace=int(taken * (1 + SLACK)) + SLACK_BYTES)


def largest_step(executor: Executor, core: CoreConfig, step_tokens: int) -> None:
    """The last chunk of a prompt of about `core.max_len` tokens, which begins with a block, on pools as `one_page` has
    them."""
    chunk, rid = min(step_tokens, core.max_len), RequestId(0)
    start = (core.max_len - chunk) // BLOCK * BLOCK
    executor.open(rid, (0,) * core.max_len, SamplingParams(temperature=0.0))
    bind = Bind(Row(0), rid, tuple(
        (HbmPage(g * core.group_base + g * group.slab_pages),)
        * -(-core.max_len // (group.page_tokens or core.page_size))
        for g, group in enumerate(core.groups)), 0)
    executor.submit(StepPlan(
        step=StepId(1), rows=(Row(0),), rids=(rid,), start=(start,), count=(chunk,),
        samples=(True,), tokens=(0,) * chunk, grows=(), moves=(), binds=(bind,)))
    [retired, *_] = executor.poll(block=True)
    assert isinstance(retired, Retired)
    executor.close(rid)


def beyond(caches: Caches, max_len: int) -> int:
    """Bytes of one layer's KV behind `context_max`: it lies together while a prompt's chunk attends to it. Of codes
    the floats too, which take at most twice their bytes in bfloat16; of KV heads once more, where torch's kernel has
    them side by side."""
    return max(0, max_len - context_max(caches)) * max(
        n.unit_bytes // n.num_layers * (1 if n.dtype != torch.uint8 else 3 if n.planes == 1 else 5)
        for n in caches.layouts)


@torch.inference_mode()
def _sample(vocab_size: int, rows: int) -> None:
    """All rows with all that sampling can do."""
    params = SamplingParams(temperature=1.5, top_p=0.9, top_k=50, min_p=0.01, presence_penalty=1.0,
                            frequency_penalty=1.0, repetition_penalty=1.1, logit_bias={0: 1.0}, logprobs=20)
    sampler = Sampler(vocab_size, rows, device="cuda")
    states = [sampler.open(row, (0,), params, 0, ()) for row in range(rows)]
    for row, state in enumerate(states):
        sampler.bind(state, row, 0)
    sampler.sample(torch.zeros(rows, vocab_size, device="cuda"), states, range(rows))
