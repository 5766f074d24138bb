"""`chunk_attention` on a CUDA device by torch's fused kernels; what they do not take is two products.

    T queries   S keys   N query heads   K KV heads   H head dim
"""
from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels.chunk_attention import matmul
from penstock.kernels.paged_attention.cuda import fused
from penstock.kernels.platform import Platform

# cuDNN is twice as fast as flash attention and plans for 0.4 s at every new pair of lengths: only lengths
# of whole windows are worth that.
_CUDNN = 1024


def probe(_: Platform) -> str:
    return "cuDNN and flash attention"


def chunk_attention(q_TNH: Tensor, k_SKH: Tensor, v_SKH: Tensor, *, causal: bool,
                    scale: float) -> tuple[Tensor, Tensor]:
    dim = q_TNH.shape[2]
    if q_TNH.dtype not in (torch.bfloat16, torch.float16) or dim % 8:
        return matmul.chunk_attention(q_TNH, k_SKH, v_SKH, causal=causal, scale=scale)
    whole = q_TNH.shape[0] % _CUDNN == 0 and k_SKH.shape[0] % _CUDNN == 0 and dim <= 128
    out_NTH, lse_NT = fused(q_TNH.transpose(0, 1), k_SKH.transpose(0, 1), v_SKH.transpose(0, 1), scale,
                            causal=causal, cudnn=whole)
    return out_NTH.transpose(0, 1).contiguous(), lse_NT.transpose(0, 1).contiguous()
