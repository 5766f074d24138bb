"""`chunk_attention` on a CUDA device: flash-attn-4, else torch's flash attention, of wide heads its memory-efficient
one, else two products.

    T queries   S keys   N query heads   K KV heads   H head dim
"""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from penstock.kernels.attention import hidden
from penstock.kernels.attention.chunk_attention import matmul
from penstock.kernels.attention.paged_attention import flash
from penstock.kernels.triton.lazy import alone


def chunk_attention(q_TNH: Tensor, k_SKH: Tensor, v_SKH: Tensor, *, causal: bool,
                    scale: float) -> tuple[Tensor, Tensor]:
    heads, dim = q_TNH.shape[1:]
    if causal:
        k_SKH, v_SKH = hidden.marked(k_SKH, v_SKH)
    aten: Any = torch.ops.aten
    if q_TNH.dtype not in flash.TYPES or dim % 8:
        return matmul.chunk_attention(q_TNH, k_SKH, v_SKH, causal=causal, scale=scale)
    if dim > flash.DIM_MAX:             # a KV head at a time; its lse is padded
        each = [aten._scaled_dot_product_efficient_attention(
            q_gTH[None], *(x_SKH[:, k].expand(1, len(q_gTH), -1, -1) for x_SKH in (k_SKH, v_SKH)), None, True, 0.0,
            causal, scale=scale)[:2] for k, q_gTH in enumerate(q_TNH.transpose(0, 1).chunk(k_SKH.shape[1]))]
        outs, lses = zip(*each, strict=True)
        return (torch.cat(outs, 1)[0].transpose(0, 1).contiguous(),
                torch.cat(lses, 1)[0, :, :len(q_TNH)].transpose(0, 1).contiguous())
    if flash.ready(heads, k_SKH.shape[1], dim, q_TNH.dtype):
        out_TNH, lse_NT = flash.attend_run(q_TNH, k_SKH, v_SKH, scale=scale, causal=causal)
        return out_TNH, lse_NT.transpose(0, 1).contiguous()
    out_1NTH, lse_1NT = aten._scaled_dot_product_flash_attention(
        *(x.transpose(0, 1)[None] for x in (q_TNH, k_SKH, v_SKH)), 0.0, causal, False, scale=scale)[:2]
    return out_1NTH[0].transpose(0, 1).contiguous(), lse_1NT[0].transpose(0, 1).contiguous()


chunk_attention_of_torch = alone(chunk_attention)
