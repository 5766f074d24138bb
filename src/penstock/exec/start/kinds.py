"""Steps of each kind that serving launches, taken on scratch pages before an engine is ready.

A step of a new kind compiles kernels, loads others and asks libraries for theirs: seconds in which every
request would wait. So a start takes one of each kind. Owns the list of kinds; content and addresses of
the pages do not matter, since one page of each cache group stands for all of a context.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import torch

from penstock.config.request.params import SamplingParams
from penstock.core.plan import NO_DRAM, NO_HBM, Bind, DramPage, HbmPage, Hot, RequestId, Row, StepId, StepPlan
from penstock.core.settings import CoreConfig
from penstock.exec.executor import Executor
from penstock.exec.load.layout import Caches
from penstock.kernels.sample import mask

CONTEXT_MAX = 131_072           # tokens of the longest context that scratch pages stand for
# Of MLA KV in float32, which no tensor core multiplies as it is: 1,024 tokens take a layer a second.
CONTEXT_MAX_F32, CHUNK_MAX_F32 = 8192, 256
# Tokens of a prompt's chunks beside the largest. Kernels of ours differ for one, a few, a tile's and many of
# them; a library of products picks another kernel for each tile, and loads it: 20 ms of the first prompt.
CHUNKS = (6144, 4096, 3072, 2048, 1536, 1024, 768, 512, 384, 320, 256, 192, 130, 96, 64, 48, 33, 24, 17, 12,
          9, 5, 3, 2, 1)
DECODED = 3                     # tokens at most that a request decodes
BESIDE = 40                     # tokens of a chunk in whose step another request decodes


def is_slow(caches: Caches) -> bool:
    """Whether a step of 8,192 tokens takes a minute: MLA KV in float32."""
    return caches.layouts[0].planes == 1 and caches.layouts[0].dtype == torch.float32


def context_max(caches: Caches) -> int:
    """Tokens of the longest context that scratch pages of these stand for."""
    return CONTEXT_MAX_F32 if is_slow(caches) else CONTEXT_MAX


def largest_chunk(caches: Caches, step_tokens: int) -> int:
    """Tokens of the largest step that is taken of each kind."""
    return min(step_tokens, CHUNK_MAX_F32) if is_slow(caches) else step_tokens


def one_page(caches: Caches, rows: int, max_len: int, hot_pages: int = 0) -> CoreConfig:
    """Pools in which one page of each group stands for all of a context, of `context_max` tokens at most;
    with `hot_pages` one host page, and hot buffers of so many pages, too."""
    size = caches.page_size
    pages = len(caches.groups) * caches.slabs.slab_pages[0]
    return CoreConfig(page_size=size, rows=rows, hbm_pages=pages, dram_pages=pages if hot_pages else 0,
                      hot_pages=hot_pages, max_len=max(1, min(max_len, context_max(caches)) // size) * size,
                      groups=caches.groups, group_base=1 << 20)


@dataclass(frozen=True, slots=True)
class _Part:
    """Tokens [start, start + count) of a request in a step: of its prompt, or, if it decodes, one."""

    request: int
    start: int
    count: int
    decodes: bool = False
    samples: bool = True


def take_each_kind(executor: Executor, core: CoreConfig, step_tokens: int, budget: int = 0, before: int = 0) -> int:
    """Take steps of every kind on pools as `one_page` makes them; return how many.

    step_tokens   tokens of the largest step
    before        steps, and requests, that the executor has had
    budget        tokens that a step of a request selects, of a model without an indexer; 0: none selects

    Kinds: chunks of CHUNKS tokens and the largest, at the beginning of a prompt and behind more of it; two
    prompts in a step; a chunk beside a request that decodes; one and two that decode. Each with greedy and
    with drawn tokens and with logprobs; with pages on the device, and, where a host tier is decoded from, on
    the host or on both.
    """
    steps = 0
    for host in (False, True)[:1 + (core.hot_pages > 0)]:
        steps += _of_pages(executor, core, step_tokens, budget, host, before + steps)
    return steps


def _of_pages(executor: Executor, core: CoreConfig, step_tokens: int, budget: int, host: bool, before: int) -> int:
    greedy = SamplingParams(temperature=0.0, sparse_top_k=budget)
    drawn = msgspec.structs.replace(greedy, temperature=0.8, top_p=0.9, top_k=20, seed=1)
    longest = core.max_len - DECODED
    beside, chunks = min(BESIDE, longest), [min(step_tokens, longest)]
    for count in CHUNKS:
        if count < step_tokens and sum(chunks) + count <= longest:
            chunks.append(count)
    ask = [(greedy, sum(chunks)), (msgspec.structs.replace(drawn, logprobs=2), beside), (drawn, beside),
           (greedy, beside), (msgspec.structs.replace(greedy, prompt_logprobs=1), beside)]
    long, short, other, third, scored = range(5)
    plans, at = [], 0
    for count in chunks:
        plans.append([_Part(long, at, count, samples=at + count == sum(chunks))])
        at += count
    plans.append([_Part(long, at, 1, decodes=True)])
    if core.rows > 1:
        plans += [[_Part(long, at + 1, 1, decodes=True), _Part(short, 0, beside)],
                  [_Part(long, at + 2, 1, decodes=True), _Part(short, beside, 1, decodes=True)],
                  [_Part(other, 0, beside), _Part(third, 0, beside)]]
    plans.append([_Part(scored, 0, beside)])
    ids = [RequestId(before + i) for i in range(len(ask))]
    for rid, (params, length) in zip(ids, ask, strict=True):
        executor.open(rid, (0,) * length, params)
    rows = {long: Row(0), short: Row(1), other: Row(0), third: Row(1), scored: Row(0)}
    bound: set[int] = set()
    for n, parts in enumerate(plans):
        binds = [_bind(rows[p.request], ids[p.request], core, host) for p in parts if p.request not in bound]
        bound.update(p.request for p in parts)
        executor.submit(StepPlan(
            step=StepId(before + n + 1), rows=tuple(rows[p.request] for p in parts),
            rids=tuple(ids[p.request] for p in parts), start=tuple(p.start for p in parts),
            count=tuple(p.count for p in parts), samples=tuple(p.samples for p in parts),
            tokens=tuple(t for p in parts for t in ((-1,) if p.decodes else (0,) * p.count)),
            grows=(), moves=(), binds=tuple(binds)))
        executor.poll(block=True)
    for rid in ids:
        executor.close(rid)
    return len(plans)


def masks_rows(vocab_size: int, backend: str) -> None:
    """Apply the masks of grammars to one row and to two of a GPU's logits."""
    for rows in (1, 2):
        words = torch.full((rows, -(-vocab_size // 32)), -1, dtype=torch.int32, device="cuda")
        mask.OP.use(backend)(torch.zeros(rows, vocab_size, device="cuda"), words,
                             torch.arange(rows, device="cuda"))


def _bind(row: Row, rid: RequestId, core: CoreConfig, host: bool) -> Bind:
    """All pages of a context: on the device, or all but the first of the offloaded groups on the host."""
    def entries(g: int) -> int:
        return -(-core.max_len // (core.groups[g].page_tokens or core.page_size))

    def on_device(g: int) -> HbmPage:
        return HbmPage(g * core.group_base + g * core.groups[g].slab_pages)

    groups = range(len(core.groups))
    pages: Sequence[tuple[HbmPage, ...]] = [(on_device(g),) * entries(g) for g in groups]
    if not host:
        return Bind(row, rid, tuple(pages), 0)
    away = [core.groups[g].hosted for g in groups]
    return Bind(
        row, rid, tuple((pages[g][0], *(NO_HBM,) * (entries(g) - 1)) if away[g] else pages[g]
                        for g in groups), 0,
        host=tuple((NO_DRAM, *(DramPage(g * core.group_base),) * (entries(g) - 1)) if away[g] else
                   (NO_DRAM,) * entries(g) for g in groups),
        hot=tuple((Hot(on_device(g)),) * core.hot_pages if away[g] else () for g in groups))

