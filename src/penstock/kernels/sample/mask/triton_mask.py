"""mask in Triton: some blocks of a row are one program, and what they saw is gathered by an atomic or.

Imported only where a CUDA device was asked for.
"""
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096                    # tokens, a multiple of 32


@triton.jit(do_not_specialize_on_alignment=["at_M", "seen_M"])
def mask_rows(logits, words, at_M, seen_M, V, WIDTH, BLOCK: tl.constexpr):
    """seen_M: 1: an admitted logit is finite; 2: one is NaN or plus infinity."""
    m = tl.program_id(0)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(words + m.to(tl.int64) * WIDTH + token // 32, mask=token // 32 < WIDTH, other=0)
    admits = ((word >> (token % 32)) & 1) != 0
    logits += tl.load(at_M + m) * V
    x = tl.load(logits + token, mask=(token < V) & admits, other=float("-inf"))
    tl.store(logits + token, x, mask=(token < V) & (admits == 0))
    finite = tl.abs(x) < float("inf")
    bad = (x != x) | (x == float("inf"))
    seen = tl.max(finite.to(tl.int32)) + 2 * tl.max(bad.to(tl.int32))
    if seen > 0:
        tl.atomic_or(seen_M + m, seen)


def mask(logits_BV: Tensor, words_MW: Tensor, at_M: Tensor) -> Tensor:
    """See the package."""
    assert logits_BV.is_contiguous() and logits_BV.dtype == torch.float32, "logits of another kind"
    assert words_MW.is_contiguous() and words_MW.dtype == torch.int32 and at_M.dtype == torch.int64
    masks, width = words_MW.shape
    vocab = logits_BV.shape[1]
    seen_M = torch.zeros(masks, dtype=torch.int32, device=logits_BV.device)
    if masks:
        mask_rows[(masks, triton.cdiv(vocab, BLOCK))](logits_BV, words_MW, at_M, seen_M, vocab, width,
                                                      BLOCK=BLOCK, num_warps=8)
    return seen_M == 1
