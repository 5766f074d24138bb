"""The definition of `mask`: bits become booleans, one byte each."""
from __future__ import annotations

import torch
from torch import Tensor


def mask(logits_BV: Tensor, words_MW: Tensor, at_M: Tensor) -> Tensor:
    vocab = logits_BV.shape[1]
    bit_32 = torch.arange(32, dtype=torch.int32, device=words_MW.device)
    admits_MV = ((words_MW.unsqueeze(-1) >> bit_32) & 1).flatten(1).bool()
    admits_MV = torch.nn.functional.pad(admits_MV, (0, vocab - admits_MV.shape[1]))   # cuts where negative
    masked_MV = logits_BV[at_M].masked_fill(~admits_MV, -torch.inf)
    logits_BV[at_M] = masked_MV
    return masked_MV.amax(-1).isfinite()
