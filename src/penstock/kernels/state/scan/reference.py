"""The definition of `scan`: one token at a time."""
from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.state.scan.spec import ScanSpec, ScanWeights
from penstock.kernels.types.states import States

EPS = 1e-6          # under the root of a key's length


def scan(x_TX: Tensor, step_TN: Tensor, write_TN: Tensor | None, weights: ScanWeights, states: States,
         spec: ScanSpec) -> Tensor:
    out_TNV = x_TX.new_empty(len(x_TX), spec.heads, spec.value_dim)
    to_T = states.to_T.tolist()
    for (first, end), page in zip(pairwise(states.starts), states.from_B.tolist(), strict=True):
        held_E = states.pool_PE[page].clone() if page >= 0 else states.pool_PE.new_zeros(spec.elements)
        tail = (spec.taps - 1) * spec.channels
        tail_WX = held_E[:tail].view(-1, spec.channels)
        z_NSV = held_E[tail:].view(spec.heads, spec.key_dim, spec.value_dim)
        for t in range(first, end):
            taps_WX = torch.cat((tail_WX, x_TX[t:t + 1].float()))
            tail_WX, y_X = taps_WX[1:], (taps_WX * weights.conv_WX).sum(0)
            q_NS, k_NS, v_NV = _parts(y_X if weights.bias_X is None else y_X + weights.bias_X, spec)
            s_N = F.softplus(step_TN[t].float() + weights.step_N)
            s_N = s_N if spec.delta else s_N.clamp(spec.least, spec.most)
            z_NSV = z_NSV * (weights.decay_N * s_N).exp()[:, None, None]
            if write_TN is None:
                d_NV = v_NV * s_N[:, None]
            else:
                d_NV = (v_NV - (z_NSV * k_NS[:, :, None]).sum(1)) * write_TN[t].float().sigmoid()[:, None]
            z_NSV = z_NSV + k_NS[:, :, None] * d_NV[:, None]
            o_NV = (z_NSV * q_NS[:, :, None]).sum(1)
            out_TNV[t] = o_NV if weights.skip_N is None else o_NV + weights.skip_N[:, None] * v_NV
            if to_T[t] >= 0:
                states.pool_PE[to_T[t]] = torch.cat((tail_WX.flatten(), z_NSV.flatten()))
    return out_TNV


def _parts(y_X: Tensor, spec: ScanSpec) -> tuple[Tensor, Tensor, Tensor]:
    """q_NS, k_NS, v_NV of one token."""
    keys = spec.key_heads * spec.key_dim
    q_KS, k_KS, v_NV = (part.view(heads, -1) for part, heads in zip(
        torch.split(F.silu(y_X), [keys, keys, spec.heads * spec.value_dim]),
        (spec.key_heads, spec.key_heads, spec.heads), strict=True))
    if spec.delta:
        q_KS = q_KS * torch.rsqrt((q_KS * q_KS).sum(-1, keepdim=True) + EPS) * spec.key_dim ** -0.5
        k_KS = k_KS * torch.rsqrt((k_KS * k_KS).sum(-1, keepdim=True) + EPS)
    each = spec.heads // spec.key_heads
    return q_KS.repeat_interleave(each, 0), k_KS.repeat_interleave(each, 0), v_NV
