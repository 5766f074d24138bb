"""What a prefill chunk needs around torch's fused attention, in Triton, one pass each: new rows into pages,
pages into rows that lie together, queries with padding, and the merge of attention over two runs of keys.

Imported only where a CUDA device was asked for.

    T tokens   S keys   P pages of the pool   p pages of a row   G page size   N query heads   K KV heads
    H head dim
"""
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 64         # tokens of a program: 32 KiB of k and v in bf16, 128 wide


@triton.jit
def store_slots(k_new, v_new, k, v, page_T, offset_T, new_token, new_head, kv_page, kv_head, kv_token,
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


def store(k_TKH: Tensor, v_TKH: Tensor, k_PKGH: Tensor, v_PKGH: Tensor, page_T: Tensor,
          offset_T: Tensor) -> None:
    """As `paged_attention.store`; new rows are dense in H, k and v lie alike."""
    tokens, heads, dim = k_TKH.shape
    assert k_TKH.stride() == v_TKH.stride() and k_PKGH.stride() == v_PKGH.stride(), "k and v lie differently"
    assert k_TKH.stride(2) == 1 and k_PKGH.stride(3) == 1, "head dim must be dense"
    store_slots[(tokens,)](
        k_TKH, v_TKH, k_PKGH, v_PKGH, page_T, offset_T, k_TKH.stride(0), k_TKH.stride(1), k_PKGH.stride(0),
        k_PKGH.stride(1), k_PKGH.stride(2), HEADS=heads, HEADS_PAD=triton.next_power_of_2(heads), DIM=dim,
        DIM_PAD=triton.next_power_of_2(dim), num_warps=4)


@triton.jit
def gather_pages(k, v, pages, out, context, length, plane, kv_page, kv_head, kv_token, DIM: tl.constexpr,
                 DIM_PAD: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    """k and v of BLOCK tokens of one head."""
    s = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    head = tl.program_id(1).to(tl.int64)
    d = tl.arange(0, DIM_PAD)[None, :]
    seen = (s < context)[:, None]
    page = tl.load(pages + s // PAGE, mask=s < context, other=0).to(tl.int64)
    at = (page * kv_page + head * kv_head + s % PAGE * kv_token)[:, None] + d
    to = (head * length + s)[:, None] * DIM + d
    own = (s < length)[:, None] & (d < DIM)
    tl.store(out + to, tl.load(k + at, mask=seen & own, other=0.0), mask=own)
    tl.store(out + plane + to, tl.load(v + at, mask=seen & own, other=0.0), mask=own)


def gather(k_PKGH: Tensor, v_PKGH: Tensor, pages_p: Tensor, context: int, length: int) -> Tensor:
    """kv_2KSH, new, dense, S = `length`: the first `context` tokens of a row's pages, zeros behind them.

    k, v_PKGH   dense in H, equal strides      pages_p   int32, dense, at least those of `context` tokens
    Reads only slots of these tokens.
    """
    _, heads, size, dim = k_PKGH.shape
    assert k_PKGH.stride() == v_PKGH.stride() and k_PKGH.stride(3) == 1 and pages_p.stride(0) == 1
    kv_2KSH = torch.empty((2, heads, length, dim), dtype=k_PKGH.dtype, device=k_PKGH.device)
    gather_pages[(triton.cdiv(length, _BLOCK), heads)](
        k_PKGH, v_PKGH, pages_p, kv_2KSH, context, length, kv_2KSH.stride(0), k_PKGH.stride(0),
        k_PKGH.stride(1), k_PKGH.stride(2), DIM=dim, DIM_PAD=triton.next_power_of_2(dim), PAGE=size,
        BLOCK=_BLOCK, num_warps=4)
    return kv_2KSH


@triton.jit
def pad_queries(q, out, q_token, lead, count, WIDTH: tl.constexpr, WIDTH_PAD: tl.constexpr):
    """All heads of one token."""
    t = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, WIDTH_PAD)
    width = tl.where(t < lead, 0, tl.where(t < lead + count, WIDTH, 0))
    x = tl.load(q + (t - lead) * q_token + d, mask=d < width, other=0.0)
    tl.store(out + t * WIDTH + d, x, mask=d < WIDTH)


def pad(q_CNH: Tensor, lead: int, length: int) -> Tensor:
    """q_LNH, new, dense, L = `length`: `lead` zeros, the queries, zeros. q_CNH is dense in N and H."""
    count, heads, dim = q_CNH.shape
    assert q_CNH.stride(2) == 1 and q_CNH.stride(1) == dim, "the heads of a query must be dense"
    out_LNH = torch.empty((length, heads, dim), dtype=q_CNH.dtype, device=q_CNH.device)
    width = heads * dim
    pad_queries[(length,)](q_CNH, out_LNH, q_CNH.stride(0), lead, count, WIDTH=width,
                           WIDTH_PAD=triton.next_power_of_2(width), num_warps=4)
    return out_LNH


@triton.jit
def merge_parts(a, a_log, b, b_log, out, tokens, a_token, a_head, b_token, b_head, HEADS: tl.constexpr,
                HEADS_PAD: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr):
    """All heads of one token."""
    t = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, HEADS_PAD)
    d = tl.arange(0, DIM_PAD)[None, :]
    at = n.to(tl.int64) * tokens + t
    log_a = tl.load(a_log + at, mask=n < HEADS, other=0.0)
    log_b = tl.load(b_log + at, mask=n < HEADS, other=0.0)
    top = tl.maximum(log_a, log_b)
    weight_a, weight_b = tl.exp(log_a - top), tl.exp(log_b - top)
    own = (n[:, None] < HEADS) & (d < DIM)
    x = tl.load(a + t * a_token + n[:, None] * a_head + d, mask=own).to(tl.float32) * weight_a[:, None]
    x += tl.load(b + t * b_token + n[:, None] * b_head + d, mask=own).to(tl.float32) * weight_b[:, None]
    x = x / (weight_a + weight_b)[:, None]
    tl.store(out + (t * HEADS + n[:, None]) * DIM + d, x.to(out.dtype.element_ty), mask=own)


def merge(a_NTH: Tensor, a_log_NT: Tensor, b_NTH: Tensor, b_log_NT: Tensor) -> Tensor:
    """out_TNH, new, dense: the same queries over two sets of keys. Logs f32, dense: natural log of the sum
    of exponentials of the scaled scores."""
    heads, tokens, dim = a_NTH.shape
    assert a_NTH.stride(2) == b_NTH.stride(2) == 1 and a_log_NT.is_contiguous() and b_log_NT.is_contiguous()
    out_TNH = torch.empty((tokens, heads, dim), dtype=a_NTH.dtype, device=a_NTH.device)
    merge_parts[(tokens,)](
        a_NTH, a_log_NT, b_NTH, b_log_NT, out_TNH, tokens, a_NTH.stride(1), a_NTH.stride(0), b_NTH.stride(1),
        b_NTH.stride(0), HEADS=heads, HEADS_PAD=triton.next_power_of_2(heads), DIM=dim,
        DIM_PAD=triton.next_power_of_2(dim), num_warps=4)
    return out_TNH
