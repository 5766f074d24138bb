"""Inputs of paged_attention: chunks, decodes and mixes over scattered and contiguous pages, of floats and of codes.

Every slot that holds no token of a row is NaN, so reading one shows in the output, and so is each page that
lies before all windows of a row; their entries in its table are -1. Pools are one
layer of page-major memory, so that pages do not touch; scattered ones lie in slabs that are larger
than their pages, by an odd number of elements.
"""
from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from cases import TOLERANCE, Case, Workload
from penstock.kernels.attention import hidden
from penstock.kernels.attention.paged_attention import AttentionSpec, Prepare
from penstock.kernels.types import fp8
from penstock.kernels.types.ragged import Ragged

# name: (queries, context) of each row
_STEPS: dict[str, tuple[tuple[int, int], ...]] = {
    "first token": ((1, 1),),
    "one decode": ((1, 47),),
    "decode on a page edge": ((1, 48), (1, 49)),
    "eight decodes": tuple((1, n) for n in (200, 190, 180, 55, 199, 3, 210, 1)),
    "equal decodes": ((1, 33),) * 4,
    "whole prompt": ((37, 37),),
    "one-token chunks": ((1, 1), (1, 2)),
    "later chunk": ((19, 64),),
    "blocks of queries": ((300, 333),),
    "mixed": ((1, 40), (130, 130), (1, 70), (1, 44), (7, 100), (1, 1)),
}
# (KV heads, group, head dim)
_HEADS = ((3, 3, 64), (2, 1, 80), (1, 8, 16), (2, 4, 128))
_CODED = (*_HEADS, (2, 2, 256))
_PAGE_SIZES = (1, 3, 16, 64)
# (window, softcap, sinks, first)
Scores: TypeAlias = tuple[int, float, bool, int]
_PLAIN = (0, 0.0, False, 0)
_SCORES = ((5, 0.0, False, 0), (64, 0.0, True, 0), (0, 3.0, False, 0), (0, 0.0, True, 0),
           (130, 2.0, True, 0), (0, 0.0, False, 1))


def cases(device: str) -> Iterator[Case]:
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        for step, rows in _STEPS.items():
            for i, heads in enumerate(_HEADS):
                for j, page_size in enumerate(_PAGE_SIZES):
                    if (i + j) % 2 and step != "mixed":
                        continue                       # half of the grid, every pair of sizes
                    for scattered in (False, True):
                        where = "scattered" if scattered else "runs"
                        yield Case(f"{name}-{step}-{heads}-pages of {page_size}-{where}",
                                   partial(_run, device, dtype, rows, heads, page_size, scattered, _PLAIN),
                                   TOLERANCE[dtype])
        for step, rows in _STEPS.items():
            for i, scores in enumerate(_SCORES):
                heads, page_size = _HEADS[i % len(_HEADS)], (16, 3, 1, 64)[(i + len(rows)) % 4]
                yield Case(f"{name}-{step}-{heads}-pages of {page_size}-scores {scores}",
                           partial(_run, device, dtype, rows, heads, page_size, True, scores),
                           TOLERANCE[dtype])
        for step in ("eight decodes", "blocks of queries", "mixed"):
            yield Case(f"{name}-{step}-wide heads",
                       partial(_run, device, dtype, _STEPS[step], (2, 4, 512), 16, True, _PLAIN), TOLERANCE[dtype])
            for i, scores in enumerate((_PLAIN, _PLAIN, *_SCORES)):
                heads, page_size = _CODED[(i + len(rows)) % len(_CODED)], (16, 3, 1, 64)[(i + len(rows)) % 4]
                yield Case(f"{name} over fp8-{i}-{step}-{heads}-pages of {page_size}-scores {scores}",
                           partial(_run, device, dtype, rows, heads, page_size, bool(i), scores, coded=True),
                           TOLERANCE[dtype])
        for scores in (_PLAIN, *_SCORES[:1], *_SCORES[4:]):
            for coded in (False, True):
                yield Case(f"{name}{' over fp8' * coded}-hidden faults-scores {scores}",
                           partial(_hidden, device, dtype, scores, coded), TOLERANCE[dtype])
        rows = ((1, 1500), (1, 20), (300, 1400), (5, 1037))
        yield Case(f"{name}-long windows", partial(_run, device, dtype, rows, (3, 3, 64), 16, True,
                                                   (512, 0.0, True, 0)), TOLERANCE[dtype])
        for scattered in (False, True):
            yield Case(f"{name}-long decodes-{'scattered' if scattered else 'runs'}",
                       partial(_run, device, dtype, ((1, 1500), (1, 20), (1, 1037)), (3, 3, 64), 16,
                               scattered, _PLAIN),
                       TOLERANCE[dtype])


@dataclass(frozen=True, slots=True)
class Inputs:
    layout: Ragged
    spec: AttentionSpec
    q_TNH: Tensor
    k_PKGH: Tensor
    v_PKGH: Tensor
    sinks_N: Tensor | None


def make(dtype: torch.dtype, rows: tuple[tuple[int, int], ...], heads: tuple[int, int, int],
         page_size: int, scattered: bool, device: str = "cpu",
         scores: Scores = _PLAIN) -> Inputs:
    """A step of `rows` (queries, context) with its pools; q is a view of wider rows. scores: window, softcap,
    sinks, first."""
    num_kv_heads, group, head_dim = heads
    spec = AttentionSpec(num_heads=num_kv_heads * group, num_kv_heads=num_kv_heads, head_dim=head_dim,
                         dtype=dtype, scale=head_dim ** -0.5, window=scores[0], softcap=scores[1],
                         sinks=scores[2], first=scores[3])
    generator = torch.Generator().manual_seed(len(rows) * 100 + page_size)
    needed = [-(-context // page_size) for _, context in rows]
    free = list(range(2, sum(needed) + 5))
    if scattered:
        random.Random(page_size).shuffle(free)
    query_start, at = [0], []
    index = list(range(1, 2 * len(rows), 2))                   # rows of the tables, none the first
    tables = torch.full((2 * len(rows), max(needed) + 1), -1, dtype=torch.int32,
                        device=device)
    k_PKGH, v_PKGH = pool(dtype, max(free) + 1, 1, num_kv_heads, page_size, head_dim,
                          pad=7 if scattered else 0, device=device)[0]
    for (count, context), num_pages, row in zip(rows, needed, index, strict=True):
        pages = torch.tensor(free[:num_pages], device=device)
        del free[:num_pages]
        tables[row, :num_pages] = pages
        held = torch.arange(context, device=device)
        page_S, offset_S = pages[held // page_size], held % page_size
        query_start.append(query_start[-1] + count)
        at.append(torch.stack((page_S, offset_S))[:, context - count:])
        for part in (k_PKGH, v_PKGH):
            part[page_S, :, offset_S] = torch.randn(
                context, num_kv_heads, head_dim, generator=generator).to(device, dtype)
        gone = spec.first_seen(context - count) // page_size if spec.window else 0
        tables[row, :gone] = -1
        for part in (k_PKGH, v_PKGH):
            part[pages[:gone]] = float("nan")
    page_T, offset_T = torch.cat(at, 1)
    layout = Ragged(tuple(query_start), tuple(context for _, context in rows), tuple(index), tables,
                    page_T, offset_T, page_size)
    num_heads = spec.num_heads
    q_TMH = torch.randn(query_start[-1], num_heads + 2, head_dim, generator=generator).to(device, dtype)
    sinks_N = 2 * torch.randn(num_heads, generator=generator).to(device) if spec.sinks else None
    return Inputs(layout, spec, q_TMH[:, :num_heads], k_PKGH, v_PKGH, sinks_N)


def pool(dtype: torch.dtype, num_pages: int, layers: int, num_kv_heads: int, page_size: int,
         head_dim: int, *, pad: int = 0, device: str = "cpu") -> list[tuple[Tensor, Tensor]]:
    """(k_PKGH, v_PKGH) of each layer, all NaN, in one page-major memory with `pad` elements between
    two pages, which begins with another layer's."""
    shape = (layers + 1, num_kv_heads, 2, page_size, head_dim)
    strides = torch.empty(shape, device="meta").stride()
    stride = shape[0] * strides[0] + pad
    memory = torch.full((num_pages * stride,), float("nan"), dtype=dtype, device=device)
    pages = memory.as_strided((num_pages, *shape), (stride, *strides))
    return [(pages[:, layer, :, 0], pages[:, layer, :, 1]) for layer in range(1, layers + 1)]


def _run(device: str, dtype: torch.dtype, rows: tuple[tuple[int, int], ...],
         heads: tuple[int, int, int], page_size: int, scattered: bool, scores: Scores,
         prepare: Prepare, coded: bool = False) -> Tensor:
    inputs = make(dtype, rows, heads, page_size, scattered, device, scores)
    attend = prepare(inputs.layout, replace(inputs.spec, coded=coded))
    pools = inputs.k_PKGH, inputs.v_PKGH
    return attend(inputs.q_TNH, *(codes_of(*pools) if coded else pools), inputs.sinks_N)


def codes_of(k_PKGH: Tensor, v_PKGH: Tensor) -> tuple[Tensor, Tensor]:
    """The same in codes, of the second of two layers, where all that a query does not see is NaN: vectors that were,
    and the bytes behind each vector."""
    kv_PK2GH = torch.stack((k_PKGH, v_PKGH), 2).cpu()
    dim, kept_PK2GW = kv_PK2GH.shape[-1], fp8.encode_heads(kv_PK2GH)
    kept_PK2GW[kv_PK2GH.isnan().all(-1)] = 255
    kept_PK2GW[..., fp8.width(dim, dim):] = 255
    pages = torch.full((len(kept_PK2GW), 2, *kept_PK2GW.shape[1:]), 255, dtype=torch.uint8, device=k_PKGH.device)
    pages[:, 1] = kept_PK2GW.to(pages.device)
    return pages[:, 1, :, 0], pages[:, 1, :, 1]


# What is put where a query may not look: of a key, of a value; and whether who sees it cannot miss it.
FAULTS = ((float("nan"), 0.0, True), (float("inf"), 0.0, False), (0.0, float("nan"), True),
          (0.0, float("-inf"), True), (3e38, 0.0, False))


def _hidden(device: str, dtype: torch.dtype, scores: Scores, coded: bool,
            prepare: Prepare) -> tuple[Tensor, Tensor]:
    """A chunk for each fault, and a decode: what queries get that do not see it, and 1 of each other one
    whose result is not finite, where its fault is one that it cannot miss."""
    rows = (*((37, 37 + 5 * i) for i in range(len(FAULTS))), (1, 50))
    inputs = make(dtype, rows, (2, 3, 32), 16, True, device, scores)
    layout, spec = inputs.layout, replace(inputs.spec, coded=coded)
    sound, missed = (torch.ones(layout.query_start[-1], dtype=torch.bool) for _ in range(2))
    for i, (key, value, shows) in enumerate(FAULTS):
        first, end, context = *layout.query_start[i:i + 2], layout.context[i]
        bad = context - 14                      # queries before it, some behind that a window is past
        positions = range(context - (end - first), context)
        sound[first:end] = torch.tensor([not spec.first_seen(p) <= bad <= p for p in positions])
        missed[first:end] = ~sound[first:end] & shows
        at = int(layout.pages_RM[layout.rows[i], bad // 16]), slice(None), bad % 16, 3
        for part, number in ((inputs.k_PKGH, key), (inputs.v_PKGH, value)):
            if number:
                part[at] = number
    missed[-1] = False
    k_PKGH, v_PKGH = inputs.k_PKGH, inputs.v_PKGH
    if device != "cpu":                         # as `write_kv` stores them
        k_PKGH, v_PKGH = hidden.marked(k_PKGH, v_PKGH)
    if coded:
        k_PKGH, v_PKGH = codes_of(k_PKGH, v_PKGH)
    out_TNH = prepare(layout, spec)(inputs.q_TNH, k_PKGH, v_PKGH, inputs.sinks_N)
    missed &= out_TNH.isfinite().flatten(1).all(1).cpu()
    return out_TNH.where(sound.to(device)[:, None, None], 0), 1 - missed.float()


def workloads() -> Iterator[Workload]:
    """SmolLM2-135M's heads, pages of 16, contiguous: decodes and a prompt."""
    heads, layers = (3, 3, 64), 12
    slot_values, query_flops = 2 * heads[0] * heads[2], 4 * heads[0] * heads[1] * heads[2]
    for dtype in (torch.float32, torch.bfloat16):
        for rows, queries, context in ((1, 1, 300), (8, 1, 300), (1, 1, 4000), (1, 512, 512)):
            visible = sum(range(context - queries + 1, context + 1))
            yield Workload(
                f"{str(dtype).removeprefix('torch.')} {rows} x {queries} at {context}",
                partial(_prepare, dtype, ((queries, context),) * rows, heads, layers),
                dtype.itemsize * rows * (context * slot_values
                                         + 2 * queries * heads[0] * heads[1] * heads[2]),
                rows * visible * query_flops, layers)


def _prepare(dtype: torch.dtype, rows: tuple[tuple[int, int], ...], heads: tuple[int, int, int],
             layers: int, prepare: Prepare) -> Callable[[int], object]:
    inputs = make(dtype, rows, heads, 16, scattered=False)
    num_pages, num_kv_heads, _, head_dim = inputs.k_PKGH.shape
    pools = pool(dtype, num_pages, layers, num_kv_heads, 16, head_dim)
    for k_PKGH, v_PKGH in pools:
        k_PKGH.copy_(inputs.k_PKGH)
        v_PKGH.copy_(inputs.v_PKGH)
    attend = prepare(inputs.layout, inputs.spec)
    return lambda layer: attend(inputs.q_TNH, *pools[layer])
