"""Attention of bf16 prompts on AMX: against the reference in float32, and whatever the chunk."""
from __future__ import annotations

import pytest
import torch

from penstock.kernels.attention.paged_attention import native, reference, tiled
from penstock.kernels.attention.paged_attention.spec import AttentionSpec, rows_of
from penstock.kernels.platform import KernelError, probe
from penstock.kernels.types.ragged import Ragged


@pytest.fixture(autouse=True)
def built() -> None:
    native.probe(probe())                       # a wrong result fails here
    if not tiled.build(probe()):
        pytest.skip("this CPU has no AMX, or the system does not grant it")


def chunk(first: int, context: int, page_size: int) -> Ragged:
    """Queries `first` up to `context` of a row whose pages lie in reverse."""
    pages = -(-context // page_size)
    table = torch.arange(pages - 1, -1, -1, dtype=torch.int32)
    at = torch.arange(first, context)
    return Ragged((0, context - first), (context,), (0,), table[None], table[at // page_size], at % page_size,
                  page_size)


def tensors(heads: int, kv_heads: int, dim: int, queries: int, context: int, page_size: int):
    """(q out of a wider tensor, pools); what lies behind the context is NaN."""
    torch.manual_seed(0)
    pages = -(-context // page_size)
    kv = torch.randn(pages, 2, kv_heads, page_size, dim).bfloat16()
    kv[0, :, :, context - (pages - 1) * page_size:] = float("nan")         # the row's last page
    q = (3 * torch.randn(queries, heads + 2 * kv_heads, dim)).bfloat16()[:, :heads]
    return q, kv[:, 0], kv[:, 1]


def spec_of(heads: int, kv_heads: int, dim: int, dtype: torch.dtype, **scores: float) -> AttentionSpec:
    return AttentionSpec(num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, dtype=dtype, scale=dim**-0.5,
                         **scores)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("heads, kv_heads, dim, queries, context, page_size", [
    (9, 3, 64, 70, 300, 16), (4, 4, 128, 33, 257, 16), (16, 2, 96, 100, 100, 1), (8, 1, 32, 47, 129, 64),
    (2, 2, 256, 32, 128, 16), (2, 1, 64, 130, 1000, 16)])
def test_a_chunk_equals_the_reference(heads, kv_heads, dim, queries, context, page_size, threads):
    layout = chunk(context - queries, context, page_size)
    q, k, v = tensors(heads, kv_heads, dim, queries, context, page_size)
    spec = spec_of(heads, kv_heads, dim, torch.bfloat16)
    assert tiled.takes(rows_of(layout)[0], spec)
    torch.set_num_threads(threads)
    try:
        got = native.prepare(layout, spec)(q, k, v)
    finally:
        torch.set_num_threads(1)
    in_f32 = spec_of(heads, kv_heads, dim, torch.float32)
    want = reference.prepare(layout, in_f32)(q.float(), k.float(), v.float())
    assert got.dtype is torch.bfloat16
    assert (got.float() - want).abs().max() <= 0.01 * want.abs().max()


@pytest.mark.parametrize("scores", [{}, {"window": 50, "softcap": 3.0, "sinks": True}], ids=str)
def test_a_query_is_the_same_in_every_chunk(scores):
    context, spec = 400, spec_of(6, 2, 64, torch.bfloat16, **scores)
    q, k, v = tensors(6, 2, 64, context, context, 16)
    sinks = torch.randn(6) if scores else None
    whole = native.prepare(chunk(0, context, 16), spec)(q, k, v, sinks)
    for first in (1, 31, 100, 128, 368):
        part = native.prepare(chunk(first, context, 16), spec)(q[first:], k, v, sinks)
        assert torch.equal(part, whole[first:]), first


@pytest.mark.parametrize("sink", [-200.0, 0.0, 200.0])
def test_a_sink_far_above_and_below_all_scores(sink):
    spec, layout = spec_of(2, 1, 64, torch.bfloat16, sinks=1), chunk(0, 100, 16)
    q, k, v = tensors(2, 1, 64, 100, 100, 16)
    sinks = torch.tensor([sink, 1.0])
    got = native.prepare(layout, spec)(q, k, v, sinks)
    in_f32 = spec_of(2, 1, 64, torch.float32, sinks=1)
    want = reference.prepare(layout, in_f32)(q.float(), k.float(), v.float(), sinks)
    assert (got.float() - want).abs().max() <= 0.01 * want.abs().max()
    assert bool((got[:, 0].abs() < 1e-30).all()) == (sink > 0)


def test_scores_far_apart_give_no_nan():
    spec, layout = spec_of(2, 1, 64, torch.bfloat16), chunk(0, 300, 16)
    q, k, v = tensors(2, 1, 64, 300, 300, 16)
    got = native.prepare(layout, spec)(q * 1e4, k, v)
    in_f32 = spec_of(2, 1, 64, torch.float32)
    want = reference.prepare(layout, in_f32)((q * 1e4).float(), k.float(), v.float())
    assert (got.float() - want).abs().max() <= 0.01 * want.abs().max()


def test_a_nan_reaches_the_queries_that_see_it_and_an_absent_page_is_told():
    spec, layout = spec_of(2, 1, 64, torch.bfloat16), chunk(0, 300, 16)
    q, k, v = tensors(2, 1, 64, 300, 300, 16)
    q[40, 0], k[layout.page_T[200], 0, layout.offset_T[200]] = float("nan"), float("inf")
    got = native.prepare(layout, spec)(q, k, v)
    assert got[40, 0].isnan().all() and got[40, 1].isfinite().all() and got[:40].isfinite().all()
    assert got[200:].isnan().any(-1).any() and got[41:200].isfinite().all()
    layout.pages_RM[0, 3] = -1
    with pytest.raises(KernelError, match="no page"):
        native.prepare(layout, spec)(q, k, v)
