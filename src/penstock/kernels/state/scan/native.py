"""`scan` in C (`scan.c`)."""
from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from penstock.kernels.c.build import entry, library, packed
from penstock.kernels.op import WrongResult
from penstock.kernels.platform import Platform
from penstock.kernels.state.scan import reference
from penstock.kernels.state.scan.spec import ScanSpec, ScanWeights
from penstock.kernels.types.states import States

_SOURCE = Path(__file__).with_name("scan.c")


def probe(platform: Platform) -> str:
    """Builds the kernel and compares one small step with the reference."""
    _, compiler = library(_SOURCE, platform.cache)
    spec = ScanSpec(heads=2, key_heads=1, key_dim=5, value_dim=19, taps=3, delta=True, split=2)
    generator = torch.Generator().manual_seed(0)
    x, step, write, conv, decay, add = (torch.randn(shape, generator=generator) for shape in (
        (4, spec.channels), (4, 2), (4, 2), (3, spec.channels), (2,), (2,)))
    weights = ScanWeights(conv_WX=conv, bias_X=None, decay_N=-decay.abs(), step_N=add, skip_N=None)
    found = []
    for run in (scan, reference.scan):
        pool = torch.zeros(2, spec.elements)
        states = States.of(pool, (0, 3, 4), torch.tensor([-1, 0]), torch.tensor([-1, -1, 1, 0]))
        found += [run(x, step, write, weights, states, spec), pool]
    gap = max(float((a - b).abs().max()) for a, b in zip(found[:2], found[2:], strict=True))
    if not gap <= 1e-5:
        raise WrongResult(f"{compiler}: differs by {gap:.2g} on a small case")
    return f"{platform.best('avx512_f', 'avx2', 'sve')}, {compiler}"


def scan(x_TX: Tensor, step_TN: Tensor, write_TN: Tensor | None, weights: ScanWeights, states: States,
         spec: ScanSpec) -> Tensor:
    tokens, pool = len(x_TX), states.pool_PE
    out_TNV = x_TX.new_empty(tokens, spec.heads, spec.value_dim)
    y, gate = torch.empty(tokens, spec.channels), torch.empty(tokens, spec.heads, 2)
    assert pool.dtype == torch.float32 and pool.stride(1) == x_TX.stride(1) == step_TN.stride(1) == 1
    assert (write_TN is not None) == spec.delta and states.to_T.dtype == states.from_B.dtype == torch.int64
    args = packed((
        x_TX, step_TN, write_TN, out_TNV, weights.conv_WX, weights.bias_X, weights.decay_N, weights.step_N,
        weights.skip_N, pool, states.start_B, states.from_B, states.to_T, y, gate), (
        x_TX.stride(0), step_TN.stride(0), 0 if write_TN is None else write_TN.stride(0), pool.stride(0),
        len(states.starts) - 1, tokens, spec.heads, spec.key_heads, spec.key_dim, spec.value_dim, spec.taps,
        spec.parts),
        (spec.least, spec.most))
    entry(_SOURCE, "penstock_scan", ctypes.c_int)(
        args, x_TX.dtype is torch.bfloat16, torch.get_num_threads())
    return out_TNV
