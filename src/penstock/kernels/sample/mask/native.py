"""`mask` in C (`mask.c`)."""
from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from penstock.kernels.c.build import entry, library, packed
from penstock.kernels.op import WrongResult
from penstock.kernels.platform import Platform

_SOURCE = Path(__file__).with_name("mask.c")


def probe(platform: Platform) -> str:
    """Builds the kernel and masks two small rows."""
    _, compiler = library(_SOURCE, platform.cache)
    logits = torch.arange(105.0).view(3, 35)
    words = torch.tensor([[-1 << 31, 5], [0, 0]], dtype=torch.int32)
    ok = mask(logits, words, torch.tensor([2, 0]))
    if (ok.tolist() != [True, False] or logits.isfinite().nonzero().tolist() != [
            *([1, i] for i in range(35)), [2, 31], [2, 32], [2, 34]]):
        raise WrongResult(f"{compiler}: other tokens stay")
    return f"{platform.best('avx512_f', 'avx2', 'sve')}, {compiler}"


def mask(logits_BV: Tensor, words_MW: Tensor, at_M: Tensor) -> Tensor:
    assert logits_BV.is_contiguous() and logits_BV.dtype == torch.float32, "logits of another kind"
    assert words_MW.is_contiguous() and words_MW.dtype == torch.int32 and at_M.dtype == torch.int64
    masks, width = words_MW.shape
    ok_M = torch.empty(masks, dtype=torch.bool)
    args = packed((logits_BV, words_MW, at_M, ok_M), (masks, width, logits_BV.shape[1]))
    error = entry(_SOURCE, "penstock_mask")(args, torch.get_num_threads())
    assert not error
    return ok_M
