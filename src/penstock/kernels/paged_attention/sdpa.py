"""Paged attention from torch's own kernels: fused attention where it wins, matmuls where they do.

A step is cut into parts once (`plan`): decodes of similar context together, long bf16 decodes
alone, every prefill chunk in blocks of queries. Nothing here depends on page runs being
contiguous; where they are, views replace gathers.

    T tokens of the step   B decode rows   C queries of a chunk   S context   E keys of a block
    X all slots of the pool   N query heads   K KV heads   g = N / K   H head dim
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.paged_attention.spec import AttentionSpec, Row, rows_of
from penstock.kernels.platform import Platform
from penstock.kernels.ragged import Ragged

# Queries of a prefill chunk handled at once: the masked triangle is small, matmuls are large.
_BLOCK = 128
# Rows share a batch while padding adds at most half of the work (and never for a few pages).
_PADDING, _PADDING_TOKENS = 1.5, 64
# One gathered batch stays near the caches: beyond it, a copy costs more than separate calls.
_GATHER_BYTES_MAX = 16 << 20
# From here a bf16 decode is faster as two matmuls over whole slots (all KV heads side by side, the
# queries block-diagonal) than in the fused kernel, which reads one head at a time: 2,000 tokens
# 125 against 230 us, 6,000 tokens 317 against 728 us. The wasted flops grow with K.
_DIAGONAL_CONTEXT, _DIAGONAL_KV_HEADS = 1024, 4


class Part(Protocol):
    """Attention of the tokens `at`: from their queries to their outputs."""

    at: slice | Tensor

    def __call__(self, q_TNH: Tensor, k_XKH: Tensor, v_XKH: Tensor) -> Tensor: ...


def probe(platform: Platform) -> str:
    return f"{platform.best('amx_bf16', 'avx512_bf16', 'avx512_f', 'avx2', 'sve')} through torch"


def plan(layout: Ragged, spec: AttentionSpec) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    return compose(parts_of(rows_of(layout), spec, layout.page_size))


def compose(parts: list[Part]) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """One attention out of parts that cover every token of the step once."""
    def attend(q_TNH: Tensor, k_PGKH: Tensor, v_PGKH: Tensor) -> Tensor:
        k_XKH, v_XKH = k_PGKH.flatten(0, 1), v_PGKH.flatten(0, 1)
        if len(parts) == 1:
            return parts[0](q_TNH, k_XKH, v_XKH)
        out_TNH = torch.empty_like(q_TNH, memory_format=torch.contiguous_format)
        for part in parts:
            out_TNH[part.at] = part(q_TNH[part.at], k_XKH, v_XKH)
        return out_TNH
    return attend


def parts_of(rows: list[Row], spec: AttentionSpec, page_size: int) -> list[Part]:
    parts: list[Part] = []
    batched: list[Row] = []
    for row in rows:
        if row.count > 1:
            parts.append(Chunk(row, spec, page_size))
        elif (spec.dtype == torch.bfloat16 and row.context >= _DIAGONAL_CONTEXT
                and spec.num_kv_heads <= _DIAGONAL_KV_HEADS):
            parts.append(_Diagonal(row, spec, page_size))
        else:
            batched.append(row)
    for bucket in _buckets(batched, spec):
        parts.append(_Single(bucket[0], spec, page_size) if len(bucket) == 1
                     else _Batch(bucket, spec, page_size))
    return parts


def _buckets(rows: list[Row], spec: AttentionSpec) -> list[list[Row]]:
    """Rows whose contexts are near enough to share one padded call, each bucket in token order."""
    slot_bytes = 2 * spec.num_kv_heads * spec.head_dim * spec.dtype.itemsize
    buckets: list[list[Row]] = []
    for row in sorted(rows, key=lambda row: -row.context):
        if buckets:
            widest = buckets[-1][0].context
            near = widest <= max(row.context * _PADDING, row.context + _PADDING_TOKENS)
            if near and (len(buckets[-1]) + 1) * widest * slot_bytes <= _GATHER_BYTES_MAX:
                buckets[-1].append(row)
                continue
        buckets.append([row])
    return [sorted(bucket, key=lambda row: row.first) for bucket in buckets]


def _slots(row: Row, page_size: int) -> Tensor:
    """Pool slot of each of the row's tokens."""
    pages = torch.tensor(row.pages)
    return (pages[:, None] * page_size + torch.arange(page_size)).flatten()[:row.context]


class _Context:
    """k or v of one row, [S, K, H]: a view where the pages form a run, else a gathered copy."""

    def __init__(self, row: Row, page_size: int) -> None:
        self._start, self._length = row.pages[0] * page_size, row.context
        self._slots_S = None if row.is_run else _slots(row, page_size)

    def __call__(self, pool_XKH: Tensor) -> Tensor:
        if self._slots_S is None:
            return pool_XKH.narrow(0, self._start, self._length)
        return pool_XKH.index_select(0, self._slots_S)


class _Single:
    """One decode. The query heads of a group are the queries of their KV head: [1, K, g, H]."""

    def __init__(self, row: Row, spec: AttentionSpec, page_size: int) -> None:
        self.at: slice | Tensor = slice(row.first, row.first + 1)
        self._context, self._scale = _Context(row, page_size), spec.scale
        self._q_shape = (1, spec.num_kv_heads, spec.group, spec.head_dim)

    def __call__(self, q_TNH: Tensor, k_XKH: Tensor, v_XKH: Tensor) -> Tensor:
        out_1KgH = F.scaled_dot_product_attention(
            q_TNH.view(self._q_shape), self._context(k_XKH).transpose(0, 1).unsqueeze(0),
            self._context(v_XKH).transpose(0, 1).unsqueeze(0), scale=self._scale)
        return out_1KgH.flatten(1, 2)


class _Batch:
    """Decodes of similar context, gathered and padded to the longest: [B, K, g, H].

    Padding repeats the row's first slot and is masked, so that no other slot is ever read.
    """

    def __init__(self, rows: list[Row], spec: AttentionSpec, page_size: int) -> None:
        first, last = rows[0].first, rows[-1].first
        self.at: slice | Tensor = (slice(first, last + 1) if last - first + 1 == len(rows)
                                   else torch.tensor([row.first for row in rows]))
        length_B1 = torch.tensor([[row.context] for row in rows])
        longest = int(length_B1.max())
        pages_BP = torch.zeros(len(rows), -(-longest // page_size), dtype=torch.int64)
        for pages_P, row in zip(pages_BP, rows, strict=True):
            pages_P[:len(row.pages)] = torch.tensor(row.pages)
        slots_BS = (pages_BP[:, :, None] * page_size + torch.arange(page_size)).flatten(1)
        slots_BS = slots_BS[:, :longest]
        padded_BS = torch.arange(longest) >= length_B1
        self._slots = slots_BS.where(~padded_BS, slots_BS[:, :1]).flatten()
        self._mask = (torch.zeros(padded_BS.shape, dtype=spec.dtype)
                      .masked_fill_(padded_BS, float("-inf"))[:, None, None]
                      if padded_BS.any() else None)
        self._q_shape = (len(rows), spec.num_kv_heads, spec.group, spec.head_dim)
        self._kv_shape = (len(rows), longest, spec.num_kv_heads, spec.head_dim)
        self._scale = spec.scale

    def __call__(self, q_TNH: Tensor, k_XKH: Tensor, v_XKH: Tensor) -> Tensor:
        k_BKSH, v_BKSH = (
            pool_XKH.index_select(0, self._slots).view(self._kv_shape).transpose(1, 2)
            for pool_XKH in (k_XKH, v_XKH))
        out_BKgH = F.scaled_dot_product_attention(
            q_TNH.view(self._q_shape), k_BKSH, v_BKSH, attn_mask=self._mask, scale=self._scale)
        return out_BKgH.flatten(1, 2)


class _Diagonal:
    """One long decode as two matmuls over whole slots, [S, K * H].

    Row (k, i) of the queries is query head i of KV head k in columns of head k, and zero in the
    others; of the outputs, the same columns are kept. Slots are read once, in order.
    """

    def __init__(self, row: Row, spec: AttentionSpec, page_size: int) -> None:
        self.at: slice | Tensor = slice(row.first, row.first + 1)
        self._context = _Context(row, page_size)
        self._heads, self._group, self._dim = spec.num_kv_heads, spec.group, spec.head_dim
        self._scale = spec.scale
        self._diagonal = torch.eye(self._heads, dtype=spec.dtype).view(self._heads, 1, -1, 1)

    def __call__(self, q_TNH: Tensor, k_XKH: Tensor, v_XKH: Tensor) -> Tensor:
        heads, group, dim = self._heads, self._group, self._dim
        q_wide = (q_TNH.view(heads, group, 1, dim) * self._diagonal).view(-1, heads * dim)
        k_wide, v_wide = self._context(k_XKH).flatten(1), self._context(v_XKH).flatten(1)
        weights_NS = torch.softmax(torch.mm(q_wide, k_wide.t()).float() * self._scale, -1)
        out_wide = torch.mm(weights_NS.to(v_wide.dtype), v_wide)
        out_gHK = out_wide.view(heads, group, heads, dim).diagonal(0, 0, 2)
        return out_gHK.permute(2, 0, 1).contiguous().view(1, heads * group, dim)


class Chunk:
    """The queries of one prefill chunk, a block at a time, each over the keys up to its last."""

    def __init__(self, row: Row, spec: AttentionSpec, page_size: int) -> None:
        self.at: slice | Tensor = slice(row.first, row.first + row.count)
        self._context = _Context(row, page_size)
        self._spec, self._count, self._length = spec, row.count, row.context
        block = min(_BLOCK, row.count)
        # Aligned at the lower right corner: every block and its keys is a view of this one mask.
        self._mask = torch.zeros(block, row.context, dtype=spec.dtype)
        self._mask[:, row.context - block:] = torch.full(
            (block, block), float("-inf"), dtype=spec.dtype).triu_(1)
        self._run = self._matmuls if spec.dtype == torch.bfloat16 else self._fused
        self._unused = torch.empty((), dtype=spec.dtype)

    def __call__(self, q_TNH: Tensor, k_XKH: Tensor, v_XKH: Tensor) -> Tensor:
        spec = self._spec
        k_KSH, v_KSH = self._context(k_XKH).transpose(0, 1), self._context(v_XKH).transpose(0, 1)
        out_TNH = torch.empty_like(q_TNH, memory_format=torch.contiguous_format)
        heads = (-1, spec.num_kv_heads, spec.group, spec.head_dim)
        q_CKgH, out_CKgH = q_TNH.view(heads), out_TNH.view(heads)
        for start in range(0, self._count, _BLOCK):
            end = min(start + _BLOCK, self._count)
            visible = self._length - self._count + end
            mask = self._mask[start - end:, self._length - visible:]
            self._run(q_CKgH[start:end], k_KSH[:, :visible], v_KSH[:, :visible], mask,
                      out_CKgH[start:end])
        return out_TNH

    def _fused(self, q_CKgH: Tensor, k_KEH: Tensor, v_KEH: Tensor, mask_CE: Tensor,
               out_CKgH: Tensor) -> None:
        """KV heads are the batch, a group's query heads share theirs through a zero stride."""
        shape = (-1, self._spec.group, -1, -1)
        out_KgCH = F.scaled_dot_product_attention(
            q_CKgH.permute(1, 2, 0, 3), k_KEH.unsqueeze(1).expand(shape),
            v_KEH.unsqueeze(1).expand(shape), attn_mask=mask_CE, scale=self._spec.scale)
        out_CKgH.copy_(out_KgCH.permute(2, 0, 1, 3))

    def _matmuls(self, q_CKgH: Tensor, k_KEH: Tensor, v_KEH: Tensor, mask_CE: Tensor,
                 out_CKgH: Tensor) -> None:
        """Scores in memory, in bf16: oneDNN's bf16 matmul makes it 3x the fused kernel."""
        queries, group = mask_CE.shape[0], self._spec.group
        q_KcH = q_CKgH.transpose(0, 1).flatten(1, 2)
        scores_KcE = torch.baddbmm(self._unused, q_KcH, k_KEH.transpose(1, 2), beta=0,
                                   alpha=self._spec.scale)
        scores_KCgE = scores_KcE.view(-1, queries, group, mask_CE.shape[1])
        scores_KCgE[..., -queries:] += mask_CE[:, None, -queries:]
        out_KcH = torch.bmm(torch.softmax(scores_KcE, -1), v_KEH)
        out_CKgH.copy_(out_KcH.view(-1, queries, group, out_KcH.shape[2]).transpose(0, 1))
