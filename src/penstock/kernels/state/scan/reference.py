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
        tail_WX, z_NSV = taken(held_E, spec)
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
                states.pool_PE[to_T[t]] = kept(tail_WX, z_NSV, spec)
    return out_TNV


def taken(held_E: Tensor, spec: ScanSpec) -> tuple[Tensor, Tensor]:
    """The inputs [W - 1, X] and states [N, S, V] of a state in its parts."""
    held_RE, tail = held_E.view(spec.parts, -1), (spec.taps - 1) * spec.part_channels
    tail_RWY = held_RE[:, :tail].view(spec.parts, -1, spec.part_channels)
    q_RWS, k_RWS, v_RWV = torch.split(tail_RWY, [spec.key_dim, spec.key_dim, spec.each * spec.value_dim], 2)
    tail_WX = torch.cat([part.transpose(0, 1).flatten(1) for part in (
        q_RWS[::spec.split], k_RWS[::spec.split], v_RWV)], 1)
    return tail_WX, held_RE[:, tail:].reshape(spec.heads, spec.key_dim, spec.value_dim)


def kept(tail_WX: Tensor, z_NSV: Tensor, spec: ScanSpec) -> Tensor:
    """The reverse."""
    keys = spec.key_heads * spec.key_dim
    q_WX, k_WX, v_WX = torch.split(tail_WX, [keys, keys, spec.heads * spec.value_dim], 1)
    q_WRS, k_WRS = (part.view(len(part), spec.key_heads, -1).repeat_interleave(spec.split, 1)
                    for part in (q_WX, k_WX))
    tail_WRY = torch.cat((q_WRS, k_WRS, v_WX.view(len(v_WX), spec.parts, -1)), 2)
    return torch.cat((tail_WRY.transpose(0, 1).flatten(1), z_NSV.reshape(spec.parts, -1)), 1).flatten()


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
