"""Paged attention on a CUDA device: decodes in Triton over pages, chunks in torch's own over gathered KV.

A chunk attends to what came before it and to itself in several calls, whose outputs are merged: torch's
fast kernels are causal only where queries and keys begin at the same position.

    T tokens of the step   B decode rows   C queries of a chunk   L with padding   S keys   N query heads
    K KV heads   P pages   G page size   H head dim
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.attention.paged_attention.spec import AttentionSpec, Row, pages_of, rows_of
from penstock.kernels.c.build import triton_version
from penstock.kernels.platform import Platform
from penstock.kernels.types.ragged import Ragged, on_device

# Queries from which on a plan of cuDNN's pays; lengths are rounded up to _ROUND, keys come in _STEPs.
_LARGE, _ROUND, _STEP = 1024, 1024, 2048

Part = Callable[[Tensor, Tensor, Tensor], Tensor]


def probe(platform: Platform) -> str:
    return f"cuDNN and flash attention for chunks, Triton {triton_version()} for decodes"


def plan(layout: Ragged, spec: AttentionSpec) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    rows = rows_of(layout)
    device = layout.pages_RM.device
    parts: list[tuple[slice | Tensor, Part]] = [
        (slice(row.first, row.first + row.count), _Chunk(row, layout, spec)) for row in rows if row.count > 1]
    singles = [row for row in rows if row.count == 1]
    if singles:
        first = singles[0].first
        together = singles[-1].first - first + 1 == len(singles)
        at = (slice(first, first + len(singles)) if together
              else on_device([row.first for row in singles], device, torch.int64))
        parts.append((at, _Decodes(singles, layout, spec)))

    def attend(q_TNH: Tensor, k_PKGH: Tensor, v_PKGH: Tensor) -> Tensor:
        if len(parts) == 1:
            return parts[0][1](q_TNH, k_PKGH, v_PKGH)
        out_TNH = torch.empty_like(q_TNH, memory_format=torch.contiguous_format)
        for at, part in parts:
            out_TNH[at] = part(q_TNH[at], k_PKGH, v_PKGH)
        return out_TNH
    return attend


class _Decodes:
    def __init__(self, rows: list[Row], layout: Ragged, spec: AttentionSpec) -> None:
        from penstock.kernels.attention.paged_attention import triton_decode
        device = layout.pages_RM.device
        self._decode, self._table, self._scale = triton_decode.decode, layout.pages_RM, spec.scale
        indices = on_device([row.index for row in rows] + [row.context for row in rows], device,
                            torch.int32)
        self._row_B, self._context_B = indices[:len(rows)], indices[len(rows):]
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        self._cut = triton_decode.tuning(len(rows), spec.num_kv_heads,
                                         max(row.context for row in rows), processors)

    def __call__(self, q_BNH: Tensor, k_PKGH: Tensor, v_PKGH: Tensor) -> Tensor:
        return self._decode(q_BNH, k_PKGH, v_PKGH, self._table, self._row_B, self._context_B,
                            scale=self._scale, cut=self._cut)


def fused(q_NCH: Tensor, k_KSH: Tensor, v_KSH: Tensor, scale: float, *, causal: bool,
          cudnn: bool) -> tuple[Tensor, Tensor]:
    """(out_NCH, log_NC): causal where queries and keys begin together, else over all keys."""
    args = q_NCH[None], k_KSH[None], v_KSH[None]
    aten: Any = torch.ops.aten
    if cudnn:
        out, log = aten._scaled_dot_product_cudnn_attention(*args, None, True, 0.0, causal, False,
                                                            scale=scale)[:2]
    else:
        out, log = aten._scaled_dot_product_flash_attention(*args, 0.0, causal, False, scale=scale)[:2]
    return out[0], log.reshape(log.shape[1:3])


def _gather(k_PKGH: Tensor, v_PKGH: Tensor, pages_p: Tensor, context: int, length: int) -> Tensor:
    from penstock.kernels.attention.paged_attention import triton_chunk
    return triton_chunk.gather(k_PKGH, v_PKGH, pages_p, context, length)


def _pad(q_CNH: Tensor, lead: int, length: int) -> Tensor:
    from penstock.kernels.attention.paged_attention import triton_chunk
    return triton_chunk.pad(q_CNH, lead, length)


def _merge(out_NCH: Tensor, log_NC: Tensor, past_NCH: Tensor, past_log_NC: Tensor) -> Tensor:
    from penstock.kernels.attention.paged_attention import triton_chunk
    return triton_chunk.merge(out_NCH, log_NC, past_NCH, past_log_NC).transpose(0, 1)


class _Chunk:
    """The queries of one prefill chunk.

    cuDNN is twice as fast as flash attention and builds a plan of 0.4 s for every new pair of lengths.
    So large chunks come in few lengths: queries are padded in front, to where a multiple of _STEP keys
    was before, and behind; what was before that is taken in pieces of _STEP times a power of two.
    Queries stay token by token, as they came: the fused kernels answer in the layout of their queries.
    """

    def __init__(self, row: Row, layout: Ragged, spec: AttentionSpec) -> None:
        self._pages, self._context, self._spec = pages_of(row, layout), row.context, spec
        self._fused = spec.dtype in (torch.bfloat16, torch.float16) and spec.head_dim % 8 == 0
        self._cudnn = self._fused and row.count >= _LARGE and spec.head_dim <= 128
        first = row.context - row.count
        self._before = first - first % _STEP if self._cudnn else first
        own = row.context - self._before
        self._lead, self._own = own - row.count, own
        self._length = -(-own // _ROUND) * _ROUND if self._cudnn else own

    def __call__(self, q_CNH: Tensor, k_PKGH: Tensor, v_PKGH: Tensor) -> Tensor:
        before, scale = self._before, self._spec.scale
        k_KSH, v_KSH = _gather(k_PKGH, v_PKGH, self._pages, self._context, before + self._length)
        if not self._fused:
            return self._masked(q_CNH.transpose(0, 1), k_KSH, v_KSH)
        q_LNH = q_CNH if len(q_CNH) == self._length else _pad(q_CNH, self._lead, self._length)
        q_NLH = q_LNH.transpose(0, 1)
        out_NLH, log_NL = fused(q_NLH, k_KSH[:, before:], v_KSH[:, before:], scale, causal=True,
                                cudnn=self._cudnn)
        for first, end in pieces(before) if self._cudnn else [(0, before)] if before else []:
            past = fused(q_NLH, k_KSH[:, first:end], v_KSH[:, first:end], scale, causal=False,
                         cudnn=self._cudnn)
            out_NLH, log_NL = _merge(out_NLH, log_NL, *past), torch.logaddexp(log_NL, past[1])
        return out_NLH[:, self._lead:self._own].transpose(0, 1).contiguous()

    def _masked(self, q_NCH: Tensor, k_KSH: Tensor, v_KSH: Tensor) -> Tensor:
        """For types that the fused kernels do not take: every score in memory."""
        count = q_NCH.shape[1]
        seen_CS = torch.ones(count, self._context, dtype=torch.bool,
                             device=q_NCH.device).tril_(self._context - count)
        out = F.scaled_dot_product_attention(q_NCH[None], k_KSH[None], v_KSH[None], attn_mask=seen_CS,
                                             scale=self._spec.scale, enable_gqa=True)
        return out[0].transpose(0, 1).contiguous()


def pieces(length: int) -> list[tuple[int, int]]:
    """Runs of _STEP times a power of two, the largest first, that make up a multiple of _STEP."""
    found, first = [], 0
    while first < length:
        size = _STEP << ((length - first) // _STEP).bit_length() - 1
        found.append((first, first + size))
        first += size
    return found
