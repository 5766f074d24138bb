"""Inputs of the layer operations: odd widths, one token to many, heads that are views."""
from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from penstock.kernels.cases import TOLERANCE, Case
from penstock.kernels.layer import LayerOps

_TOKENS = (1, 2, 9, 70)
_WIDTHS = (1, 7, 64, 576)
_HEADS = ((1, 2), (3, 6), (12, 64), (2, 80))


def cases() -> Iterator[Case]:
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        for tokens in _TOKENS:
            for width in _WIDTHS:
                for add in (False, True):
                    yield Case(f"{name}-norm-{tokens}x{width}{'-add' if add else ''}",
                               partial(_norm, dtype, tokens, width, add), TOLERANCE[dtype])
                yield Case(f"{name}-gate-{tokens}x{width}",
                           partial(_gate, dtype, tokens, width), TOLERANCE[dtype])
            for heads, dim in _HEADS:
                yield Case(f"{name}-rotate-{tokens}x{heads}x{dim}",
                           partial(_rotate, dtype, tokens, heads, dim), TOLERANCE[dtype])


def _randn(dtype: torch.dtype, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(*shape, generator=generator) * 3).to(dtype)


def _norm(dtype: torch.dtype, tokens: int, width: int, add: bool, ops: LayerOps) -> Tensor:
    """The norm and the h that it leaves."""
    h = _randn(dtype, tokens, width)
    x = ops.norm(h, _randn(dtype, tokens + 1, width)[1:] if add else None,
                 _randn(dtype, width), 1e-5)
    return torch.cat((x, h))


def _rotate(dtype: torch.dtype, tokens: int, heads: int, dim: int, ops: LayerOps) -> Tensor:
    """All heads, of which those rotated are a view: the others must stay."""
    x = _randn(dtype, tokens, heads + 2, dim)
    ops.rotate(x[:, 1:heads + 1], _randn(dtype, tokens, 1, dim), _randn(dtype, tokens + 1, 1, dim)[1:])
    return x


def _gate(dtype: torch.dtype, tokens: int, width: int, ops: LayerOps) -> Tensor:
    """Large values too: silu of -300 is 0 and of 300 is 300."""
    x = _randn(dtype, tokens, 2 * width + 5)[:, :2 * width]
    x[0, 0] = -300.0
    out = ops.gate(x)
    x[0, 0] = 300.0
    return torch.cat((out, ops.gate(x)))
