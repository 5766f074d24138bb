"""Temperature, min-p, top-k, top-p and the draw, vectorised over rows. Tensors only.

A row's result depends on that row alone: never on the batch it shares, whichever path is taken.

    B rows   V vocabulary   C candidates, the largest weights of a row in descending order
"""
from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

# How many of the largest weights are looked at first; nearly always enough for a language model. A
# row for which it is not, a flat one with top-p, is sorted as a whole.
CANDIDATES = 512
LOG_LEAST, LEAST = -87.0, 2e-38        # a weight of e^-87 of the largest one, 1.6e-38, is none


def weights(logits_BV: Tensor, temperature: Sequence[float], top_k: Sequence[int],
            top_p: Sequence[float], min_p: Sequence[float]) -> Tensor:
    """Unnormalised probabilities of what may be sampled; 0 where a filter removed a token.

    logits_BV  float32, finite or -inf, at least one finite a row    temperature  > 0
    top_k  < 1 is off    top_p  1 is off    min_p  0 is off
    Applied in vLLM's order: temperature, min-p, top-k, top-p over what top-k left. Ties at an edge
    keep the lowest ids, so that top-k keeps exactly k. At least one token a row is left.
    """
    device = logits_BV.device
    # The maximum goes first: a tiny temperature then underflows to weight 0 and never overflows.
    shifted_BV = logits_BV - logits_BV.amax(-1, keepdim=True)
    if any(t != 1.0 for t in temperature):
        shifted_BV /= torch.tensor([max(t, 1e-30) for t in temperature],
                                   device=device).unsqueeze(1)
    # On a CPU exp takes 30 times as long where it underflows: of masked tokens, and at low temperatures.
    w_BV = torch.threshold_(shifted_BV.clamp_(min=LOG_LEAST).exp_(), LEAST, 0.0)
    if any(p > 0 for p in min_p):
        w_BV.masked_fill_(w_BV < torch.tensor(min_p, device=device).unsqueeze(1), 0.0)
    some = [i for i, (k, p) in enumerate(zip(top_k, top_p, strict=True)) if k >= 1 or p < 1]
    if not some:
        return w_BV
    width = w_BV.shape[1]
    k_B = torch.tensor([min(top_k[i], width) if top_k[i] >= 1 else width for i in some],
                       device=device)
    p_B = torch.tensor([top_p[i] for i in some], dtype=torch.float64, device=device)
    if len(some) == len(top_k):
        return _truncated(w_BV, k_B, p_B, CANDIDATES)
    at = torch.tensor(some, device=device)
    w_BV[at] = _truncated(w_BV[at], k_B, p_B, CANDIDATES)
    return w_BV


def _truncated(w_BV: Tensor, k_B: Tensor, p_B: Tensor, candidates: int) -> Tensor:
    """w_BV with only the first k of each row, and of those the least that hold p of the mass."""
    width = w_BV.shape[1]
    candidates = min(width, max(candidates, int(k_B.where(k_B < width, 0).max())))
    k_B1, p_B1 = k_B.unsqueeze(1), p_B.unsqueeze(1)
    top_BC = _descending(w_BV, candidates)
    upto_BC = top_BC.cumsum(-1, dtype=torch.float64)
    total_B1 = torch.where(k_B1 <= candidates,
                           upto_BC.gather(1, k_B1.clamp(max=candidates) - 1),
                           w_BV.sum(-1, keepdim=True, dtype=torch.float64))
    keep_BC = ((upto_BC - top_BC) < p_B1 * total_B1) | (p_B1 >= 1)
    keep_BC &= torch.arange(candidates, device=w_BV.device) < k_B1
    keep_B1 = keep_BC.sum(-1, keepdim=True)
    out_BV = w_BV * _largest(w_BV, keep_B1, top_BC.gather(1, keep_B1 - 1))
    if candidates < width:
        more_B = ((keep_B1 == candidates) & (k_B1 > candidates)).squeeze(1)
        if more_B.any():
            out_BV[more_B] = _truncated(w_BV[more_B], k_B[more_B], p_B[more_B], width)
    return out_BV


def _descending(w_BV: Tensor, num: int) -> Tensor:
    """The `num` largest of each row."""
    if num < w_BV.shape[1] or w_BV.device.type != "cpu":
        return w_BV.topk(num, dim=-1).values
    # numpy sorts 49,152 floats in 0.08 ms with AVX-512, torch in 2.7.
    return torch.from_numpy(np.sort(w_BV.numpy(), axis=-1)).flip(-1)


def _largest(w_BV: Tensor, num_B1: Tensor, edge_B1: Tensor) -> Tensor:
    """Where the num_B1 largest of each row are, the last of them being edge_B1."""
    above_BV, edge_BV = w_BV > edge_B1, w_BV == edge_B1
    spare_B1 = num_B1 - above_BV.sum(-1, keepdim=True)
    if (edge_BV.sum(-1, keepdim=True) > spare_B1).any():
        edge_BV &= edge_BV.cumsum(-1) <= spare_B1
    return above_BV | edge_BV


def draw(w_BV: Tensor, uniforms: Sequence[float]) -> Tensor:
    """token_B, int64: inverse CDF in order of token id. w_BV >= 0, some weight in each row.

    uniforms  in [0, 1), one a row
    A row without weight, or with a NaN, gets some id that means nothing, but never one >= V: an id
    outside the embedding would take the engine down with its request.
    """
    cdf_BV = w_BV.cumsum(-1, dtype=torch.float64)
    u_B = torch.tensor(uniforms, dtype=torch.float64, device=w_BV.device)
    # right=True never stops on a token of weight 0: its CDF equals that of the token before it.
    token_B1 = torch.searchsorted(cdf_BV, (u_B * cdf_BV[:, -1]).unsqueeze(1), right=True)
    return token_B1.squeeze(1).clamp_(max=w_BV.shape[1] - 1)
