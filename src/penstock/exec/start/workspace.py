"""What the largest step of a model takes of a GPU's memory beside weights and KV: measured once, at start.

Runs it on one page of KV that stands for all: content does not matter, addresses do not either.
"""
from __future__ import annotations

import torch

from penstock.config.request.params import SamplingParams
from penstock.core.plan import Bind, HbmPage, RequestId, Retired, Row, StepId, StepPlan
from penstock.core.settings import CoreConfig
from penstock.exec.front import Front
from penstock.exec.load.layout import Caches
from penstock.exec.load.sizing import DeviceMemory
from penstock.exec.rank import Rank
from penstock.exec.sampling.sampler import Sampler
from penstock.exec.sparse.bounds import Selector
from penstock.exec.step.attend import LatentOps
from penstock.kernels.attention.paged_attention import Planner
from penstock.model.base import Model

# Of the allocator's, for what a mixed step or another order of sizes takes more than the one measured.
SLACK = 0.1
SLACK_BYTES = 256 << 20
CONTEXT_MAX = 131_072           # tokens of the prompt whose last chunk is measured


def device_memory(model: Model, attention: Planner | LatentOps, caches: Caches, *, rows: int,
                  step_tokens: int, max_len: int, capture: bool,
                  selector: Selector | None = None) -> DeviceMemory:
    """Measured with the weights on the device and no pools there. Raises torch's OutOfMemoryError.

    The last chunk of `step_tokens` tokens of a prompt of `max_len`; then `rows` rows sampled with every
    parameter; with `capture` the largest graphs, which keep their memory. Their sum and a tenth; what
    grows with a context beyond CONTEXT_MAX is added by its size.
    """
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    held = torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    # One layer's KV of a prompt lies together while its chunk attends to it.
    beyond = max(0, max_len - CONTEXT_MAX) * max(n.unit_bytes // n.num_layers for n in caches.layouts)
    max_len = min(max_len, CONTEXT_MAX)
    size = caches.layouts[0].page_size
    max_len = max(1, max_len // size) * size
    pages = len(caches.groups) * caches.slabs.slab_pages[0]
    core = CoreConfig(page_size=size, rows=rows, hbm_pages=pages, max_len=max_len, groups=caches.groups,
                      group_base=1 << 20)
    rank = Rank(model, attention, *caches.pools(core, "cuda"), rows=rows, max_len=max_len, selector=selector)
    chunk, pages_held = min(step_tokens, max_len), max_len // size
    rid, params = RequestId(0), SamplingParams(temperature=0.0)
    front = Front([rank])
    front.open(rid, (0,) * max_len, params)
    bind = Bind(Row(0), rid, tuple(
        (HbmPage(g * core.group_base + g * core.groups[g].slab_pages),) * pages_held
        for g in range(len(core.groups))), 0)
    front.submit(StepPlan(
        step=StepId(1), rows=(Row(0),), rids=(rid,), start=(max_len - chunk,), count=(chunk,),
        samples=(True,), tokens=(0,) * chunk, grows=(), moves=(), binds=(bind,)))
    [retired, *_] = front.poll(block=True)
    assert isinstance(retired, Retired)
    front.close(rid)
    _sample(model.vocab_size, rows)
    taken = torch.cuda.max_memory_reserved() - held
    if capture:
        torch.cuda.empty_cache()            # as a capture does when it begins
        before = torch.cuda.memory_reserved()
        rank.capture((rows,), 0.0)
        taken += torch.cuda.memory_reserved() - before
    del rank, front
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    workspace = int(taken * (1 + SLACK)) + SLACK_BYTES + beyond
    return DeviceMemory(total=total, free=free, workspace=workspace)


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
