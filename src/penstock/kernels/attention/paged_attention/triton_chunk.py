"""New rows of prompts into pages, in Triton. Imported only where a CUDA device was asked for.

    T tokens   P pages of the pool   G page size   K KV heads   H head dim
"""
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def write_slots(k_new, v_new, k, v, page_T, offset_T, new_token, new_head, kv_page, kv_head, kv_token,
                HEADS: tl.constexpr, HEADS_PAD: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr):
    """One token's k and v."""
    t = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS_PAD)[:, None]
    d = tl.arange(0, DIM_PAD)[None, :]
    own = (head < HEADS) & (d < DIM)
    at = tl.load(page_T + t) * kv_page + head * kv_head + tl.load(offset_T + t) * kv_token + d
    src = t * new_token + head * new_head + d
    tl.store(k + at, tl.load(k_new + src, mask=own), mask=own)
    tl.store(v + at, tl.load(v_new + src, mask=own), mask=own)


def write_kv(k_TKH: Tensor, v_TKH: Tensor, k_PKGH: Tensor, v_PKGH: Tensor, page_T: Tensor,
             offset_T: Tensor) -> None:
    """As `paged_attention.write_kv`; new rows are dense in H, k and v lie alike."""
    tokens, heads, dim = k_TKH.shape
    assert k_TKH.stride() == v_TKH.stride() and k_PKGH.stride() == v_PKGH.stride(), "k and v lie differently"
    assert k_TKH.stride(2) == 1 and k_PKGH.stride(3) == 1, "head dim must be dense"
    write_slots[(tokens,)](
        k_TKH, v_TKH, k_PKGH, v_PKGH, page_T, offset_T, k_TKH.stride(0), k_TKH.stride(1), k_PKGH.stride(0),
        k_PKGH.stride(1), k_PKGH.stride(2), HEADS=heads, HEADS_PAD=triton.next_power_of_2(heads), DIM=dim,
        DIM_PAD=triton.next_power_of_2(dim), num_warps=4)
