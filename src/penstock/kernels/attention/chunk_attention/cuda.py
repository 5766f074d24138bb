"""`chunk_attention` on a CUDA device by torch's fused kernels; what they do not take is two products.

    T queries   S keys   N query heads   K KV heads   H head dim
"""
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.attention.chunk_attention import matmul
from penstock.kernels.attention.paged_attention.cuda import fused
from penstock.kernels.platform import Platform

# cuDNN is twice as fast as flash attention and plans for 0.4 s at every new pair of lengths: many queries
# are padded to a multiple of these, and keys of another length go to flash attention.
_ROUND = 1024


def probe(_: Platform) -> str:
    return "cuDNN and flash attention"


def chunk_attention(q_TNH: Tensor, k_SKH: Tensor, v_SKH: Tensor, *, causal: bool,
                    scale: float) -> tuple[Tensor, Tensor]:
    num, _, dim = q_TNH.shape
    if q_TNH.dtype not in (torch.bfloat16, torch.float16) or dim % 8:
        return matmul.chunk_attention(q_TNH, k_SKH, v_SKH, causal=causal, scale=scale)
    q_NTH, k_KSH, v_KSH = (x.transpose(0, 1) for x in (q_TNH, k_SKH, v_SKH))
    cudnn = num >= _ROUND and dim <= 128 and (causal or k_SKH.shape[0] % _ROUND == 0)
    if cudnn and num % _ROUND:
        more = 0, 0, 0, -num % _ROUND
        q_NTH = F.pad(q_NTH, more)
        if causal:          # behind the chunk's own keys: no query of it sees them
            k_KSH, v_KSH = F.pad(k_KSH, more), F.pad(v_KSH, more)
    out_NTH, lse_NT = fused(q_NTH, k_KSH, v_KSH, scale, causal=causal, cudnn=cudnn)
    return out_NTH[:, :num].transpose(0, 1).contiguous(), lse_NT[:, :num].transpose(0, 1).contiguous()
