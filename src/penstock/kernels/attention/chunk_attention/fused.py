"""`chunk_attention` through torch's fused CPU kernel, which returns the log-sum-exp beside the output.

Of float32, and of bf16 where the CPU has tiles for it. Elsewhere bf16 is converted, but where the CPU
multiplies it: there oneDNN's matrix products are faster than that kernel, so `matmul` has them.

    T queries   S keys   N query heads   K KV heads   g query heads of a KV head   H head dim
"""
from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels.attention.chunk_attention import matmul, reference
from penstock.kernels.op import Unusable, WrongResult
from penstock.kernels.platform import Platform, has_tiles, multiplies_bf16


def probe(platform: Platform) -> str:
    """Compares one small case, with and without a triangle, with the reference: the operation is torch's own
    and not promised to anybody."""
    if not hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu"):
        raise Unusable("this torch has no fused attention that returns the log-sum-exp")
    # Tiles are used from 64 queries and keys on. Without them no bf16 comes here: see below.
    dtypes = {torch.float32: 1e-5, **({torch.bfloat16: 0.05} if has_tiles() else {})}
    q, k, v = torch.randn(3, 70, 6, 32, generator=torch.Generator().manual_seed(0))
    for dtype, tolerance in dtypes.items():
        for causal in (False, True):
            got, want = (run(q.to(dtype), k[:, :2].to(dtype), v[:, :2].to(dtype), causal=causal, scale=0.2)
                         for run in (chunk_attention, reference.chunk_attention))
            gap = max(float((a.float() - b.float()).abs().max()) for a, b in zip(got, want, strict=True))
            if not gap <= tolerance:
                raise WrongResult(f"torch {torch.__version__}: {dtype} differs by {gap:.2g} on a small case")
    return f"{'amx_bf16' if has_tiles() else platform.best('avx512_f', 'avx2', 'sve')} through torch"


def chunk_attention(q_TNH: Tensor, k_SKH: Tensor, v_SKH: Tensor, *, causal: bool,
                    scale: float) -> tuple[Tensor, Tensor]:
    if q_TNH.dtype is not torch.float32 and not has_tiles():
        if multiplies_bf16():
            return matmul.chunk_attention(q_TNH, k_SKH, v_SKH, causal=causal, scale=scale)
        out_TNH, lse_TN = chunk_attention(q_TNH.float(), k_SKH.float(), v_SKH.float(), causal=causal,
                                          scale=scale)
        return out_TNH.to(q_TNH.dtype), lse_TN
    (num, heads, dim), kv_heads = q_TNH.shape, k_SKH.shape[1]
    group = heads // kv_heads
    # KV heads are the batch, a group's query heads share theirs through a zero stride.
    q_KgTH = q_TNH.view(num, kv_heads, group, dim).permute(1, 2, 0, 3)
    k_KgSH, v_KgSH = (x.transpose(0, 1).contiguous()[:, None].expand(-1, group, -1, -1)
                      for x in (k_SKH, v_SKH))
    out_KgTH, lse_KgT = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q_KgTH, k_KgSH, v_KgSH, 0.0, causal, scale=scale)
    return (out_KgTH.permute(2, 0, 1, 3).reshape(num, heads, dim),
            lse_KgT.permute(2, 0, 1).reshape(num, heads))
