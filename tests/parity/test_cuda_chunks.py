"""What prompts attend to on a CUDA device, all rows of a step in one call, by each back-end; on a CPU with
stand-ins for their kernels: which pages, queries and lengths they are given."""
from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

from penstock.config.base import machine
from penstock.kernels.attention.paged_attention import AttentionSpec, cuda, flash, reference
from penstock.kernels.op import WrongResult
from penstock.kernels.types.ragged import Ragged

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STEPS = {                               # queries and context of each row
    "one": ((40, 40),), "two tokens": ((2, 2),), "behind a prefix": ((33, 300),),
    "alike": ((100, 100),) * 5,
    "a crowd": tuple((2 + 7 * i % 90, 2 + 8 * i % 90 + 7 * i % 90) for i in range(64)),
    "lengths far apart": ((2, 700), (600, 600), (3, 4), (129, 257)),
}
LARGE = {                               # on a device only
    "256 rows": tuple((100, 100 + i) for i in range(256)), "far behind": ((8, 131072), (1000, 30000)),
    "long": ((8192, 8192), (2048, 32768)),
}


def attended(q_CNH: Tensor, k_SKH: Tensor, v_SKH: Tensor, scale: float,
             window: int = 0) -> tuple[Tensor, Tensor]:
    """(out_CNH, lse_NC)"""
    count, group = len(q_CNH), q_CNH.shape[1] // k_SKH.shape[1]
    k, v = (x.float().repeat_interleave(group, 1) for x in (k_SKH, v_SKH))
    scores = torch.einsum("cnh,snh->ncs", q_CNH.float(), k) * scale
    seen = torch.ones(count, len(k), dtype=torch.bool).tril(len(k) - count)
    if window:
        seen = seen.triu(len(k) - count - window + 1)
    scores = scores.where(seen, -torch.inf)
    return torch.einsum("ncs,snh->cnh", scores.softmax(-1), v).to(q_CNH.dtype), scores.logsumexp(-1)


def out_of_pages(q, k, v, *, scale, max_query, max_key, start_B1, context_B, table_BM):
    outs = []
    for b, context in enumerate(context_B.tolist()):
        own = q[start_B1[b]:start_B1[b + 1]]
        assert 1 < len(own) <= max_query and context <= max_key
        pages = table_BM[b, :-(-context // k.shape[1])].long()
        k_SKH, v_SKH = (x[pages].flatten(0, 1)[:context] for x in (k, v))
        outs.append(attended(own, k_SKH, v_SKH, scale)[0])
    return torch.cat(outs)


def gathered(q, k, v, start_B1, key_start_B1, max_query, max_key, scale, window):
    assert k.isfinite().all() and v.isfinite().all(), "a slot of nobody was read"
    outs, lses = zip(*[attended(q[a:b], k[c:d], v[c:d], scale, window) for a, b, c, d in zip(
        start_B1, start_B1[1:], key_start_B1, key_start_B1[1:], strict=False)], strict=True)
    return torch.cat(outs), torch.cat(lses, 1)


def layout_of(step, size: int, generator: torch.Generator) -> tuple[Ragged, int]:
    """Rows of a step on pages in no order; entries that no row needs have none."""
    pages = [-(-context // size) for _, context in step]
    order = torch.randperm(sum(pages) + 5, generator=generator)
    table = torch.full((len(step) + 2, max(pages) + 1), -1, dtype=torch.int32)
    rows = torch.randperm(len(step) + 2, generator=generator)[:len(step)].tolist()
    first, start = 0, [0]
    for row, num, (count, _) in zip(rows, pages, step, strict=True):
        table[row, :num] = order[first:first + num]
        first += num
        start.append(start[-1] + count)
    none = torch.empty(0, dtype=torch.int64, device=DEVICE)
    return Ragged(tuple(start), tuple(c for _, c in step), tuple(rows), table.to(DEVICE), none, none,
                  size), len(order)


@pytest.mark.parametrize("size", [16, 64])
@pytest.mark.parametrize("way", ["flash-attn-4", "torch", "masked"])
@pytest.mark.parametrize("name", [*STEPS, *LARGE])
@pytest.mark.parametrize("scores", [{}, {"window": 70, "sinks": True}, {"window": 5, "softcap": 2.0},
                                    {"first": 1}],
                         ids=str)
def test_prompts_of_a_step_equal_the_reference(name, way, size, scores, monkeypatch):
    if way == "flash-attn-4" and scores:
        pytest.skip("it is given plain scores only")
    if name in LARGE and (DEVICE == "cpu" or way == "masked"):
        pytest.skip("large: on a device, by its kernels")
    step = {**STEPS, **LARGE}[name]
    if DEVICE == "cpu":
        monkeypatch.setattr(flash, "attend", out_of_pages)
        monkeypatch.setattr(cuda, "rows_by_torch", gathered)
        monkeypatch.setattr(flash, "ready", lambda *_: way == "flash-attn-4")
    elif way != "flash-attn-4":
        monkeypatch.setattr(flash, "ready", lambda *_: False)
    elif not flash.ready(6, 2, 64, torch.bfloat16, size):
        pytest.skip("flash-attn-4 is not to be had here")
    heads, kv_heads, dim = 6, 2, 64
    dtype = torch.float32 if way == "masked" else torch.bfloat16
    generator = torch.Generator().manual_seed(len(step))
    layout, num_pages = layout_of(step, size, generator)
    pool = torch.full((num_pages, kv_heads, 2, size, dim), float("nan"), dtype=dtype, device=DEVICE)
    for row, (_, context) in zip(layout.rows, step, strict=True):
        at = torch.arange(context, device=DEVICE)
        pages = layout.pages_RM[row, at // size].long()
        pool[pages, :, :, at % size] = torch.randn(context, kv_heads, 2, dim, device=DEVICE).to(dtype)
    spec = AttentionSpec(num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, dtype=dtype, scale=0.1,
                         **scores)
    for row, (count, context) in zip(layout.rows, step, strict=True):
        gone = spec.first_seen(context - count) // size if spec.window else 0
        pool[layout.pages_RM[row, :gone].long()] = float("nan")
        layout.pages_RM[row, :gone] = -1
    sinks = torch.randn(heads, device=DEVICE) if spec.sinks else None
    q = torch.randn(layout.query_start[-1], heads + 1, dim, device=DEVICE).to(dtype)[:, 1:]
    k, v = pool[:, :, 0], pool[:, :, 1]
    got = cuda.prepare(layout, spec)(q, k, v, sinks)
    assert got.shape == q.shape and got.is_contiguous()
    for i in range(0, len(step), 1 + len(step) // 8):       # the reference takes a row at a time, and seconds
        a, b = layout.query_start[i:i + 2]
        one = Ragged((0, min(b - a, 512)), (layout.context[i],), (layout.rows[i],), layout.pages_RM,
                     layout.page_T, layout.offset_T, size)
        want = reference.prepare(one, spec)(q[max(a, b - 512):b], k, v, sinks)
        gap = (got[max(a, b - 512):b].float() - want.float()).abs().max() / want.float().abs().max()
        assert gap < 2e-2, (i, float(gap))


def test_decodes_between_prompts_keep_their_places(monkeypatch):
    """The core puts them first; nothing here relies on it."""
    monkeypatch.setattr(cuda, "_Decodes", lambda rows, layout, spec: lambda q, *_: q + 1)
    monkeypatch.setattr(cuda, "prompts", lambda rows, layout, spec: lambda q, *_: q + 2)
    layout, _ = layout_of(((1, 5), (3, 9), (1, 2), (2, 4)), 16, torch.Generator().manual_seed(0))
    spec = AttentionSpec(num_heads=1, num_kv_heads=1, head_dim=8, dtype=torch.float32, scale=1.0)
    q = torch.zeros(7, 1, 8, device=DEVICE)
    assert cuda.prepare(layout, spec)(q, q, q)[:, 0, 0].tolist() == [1, 2, 2, 2, 1, 2, 2]


def test_what_does_not_compile_is_not_used_and_said_once(monkeypatch, caplog):
    monkeypatch.setattr(flash, "_flash", flash._Flash())
    monkeypatch.setattr(flash, "import_module", lambda name: 1 / 0)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    for _ in range(2):
        assert not flash.ready(6, 2, 64, torch.bfloat16, 16)
    assert not flash.ready(6, 2, 64, torch.float32, 16) and not flash.ready(6, 2, 20, torch.bfloat16, 16)
    assert [r.message for r in caplog.records] == [
        "flash-attn-4 is not used for prompts: ZeroDivisionError: division by zero"]
    assert flash._flash.begin().exception().__traceback__ is None, "it keeps what its callers had"


def library(tile: int):
    """As flash-attn-4's function, on a CPU; where a page is `tile` tokens it reads whole pages."""
    def run(q, k, v, *, causal, softmax_scale, max_seqlen_q, cu_seqlens_q=None, seqused_k=None,
            page_table=None, max_seqlen_k=None, return_lse=False):
        assert max_seqlen_q >= flash.LONG, "lengths below a tile are a kind of their own"
        if page_table is None:
            return attended(q[0], k[0], v[0], softmax_scale)[0][None], torch.zeros(1, q.shape[2], q.shape[1])
        out = torch.cat([attended(q[a:b], *(x[pages.long()].flatten(0, 1)[:n] for x in (k, v)),
                                  softmax_scale)[0]
                         for a, b, n, pages in zip(cu_seqlens_q.tolist(), cu_seqlens_q[1:].tolist(),
                                                   seqused_k.tolist(), page_table, strict=False) if b > a])
        return (out * (v[page_table[0, 0].long()].sum() * 0 + 1) if v.shape[1] == tile else out), None
    return run


@pytest.mark.parametrize("size", [1, 2, 16, 128, None])
@pytest.mark.parametrize("many", [False, True])
def test_it_is_tried_with_nan_wherever_a_row_may_not_look(size, many, monkeypatch):
    kind = torch.device("cpu"), 6, 2, 64, torch.bfloat16, size, many
    monkeypatch.setattr(flash._flash, "function", lambda: library(tile=0))
    flash.trial(*kind)
    if size == 128:
        monkeypatch.setattr(flash._flash, "function", lambda: library(tile=128))
        with pytest.raises(WrongResult, match="behind a row's context"):
            flash.trial(*kind)


@pytest.mark.parametrize("writable", [False, True])
def test_what_it_compiles_is_kept_where_that_can_be_written(writable, tmp_path, monkeypatch):
    """A folder that is there and cannot be written would fail its import."""
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(os, "access", lambda path, mode: writable)
    machine.keep_compiled(tmp_path / "kept")
    assert bool(os.environ) is writable
    (tmp_path / "file").touch()
    machine.keep_compiled(tmp_path / "file" / "kept")
