"""Inputs of the layer operations: odd widths, one token to many, heads that are views."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from cases import DTYPES, TOLERANCE, Case, Workload
from penstock.kernels.fused.layer import LatentNorms, LayerOps, Weighs

_TOKENS = (1, 2, 9, 70)
_WIDTHS = (1, 7, 64, 576)
_HEADS = ((1, 2), (3, 6), (12, 64), (2, 80))


def cases(device: str) -> Iterator[Case]:
    for name, dtype in DTYPES:
        for tokens in _TOKENS:
            for width in _WIDTHS:
                for add in (False, True):
                    yield Case(f"{name}-norm-{tokens}x{width}{'-add' if add else ''}",
                               partial(_norm, device, dtype, tokens, width, add), TOLERANCE[dtype])
                yield Case(f"{name}-gate-{tokens}x{width}",
                           partial(_gate, device, dtype, tokens, width), TOLERANCE[dtype])
            for heads, dim in _HEADS:
                yield Case(f"{name}-rotate-{tokens}x{heads}x{dim}",
                           partial(_rotate, device, dtype, tokens, heads, dim), TOLERANCE[dtype])
                yield Case(f"{name}-norm_rotate-{tokens}x{heads}x{dim}",
                           partial(_norm_rotate, device, dtype, tokens, heads, dim), TOLERANCE[dtype])
        for tokens in (1, 9, 70):
            for heads, inputs, outputs in ((3, 20, 70), (2, 128, 512), (2, 512, 128)):
                yield Case(f"{name}-by_head-{tokens}x{heads}x{inputs}x{outputs}",
                           partial(_by_head, device, dtype, tokens, heads, inputs, outputs), TOLERANCE[dtype])
            for index in (0, 24, 128):
                yield Case(f"{name}-latent-{tokens}x{index}",
                           partial(latent, device, dtype, tokens, index), TOLERANCE[dtype])


def _randn(device: str, dtype: torch.dtype, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(*shape, generator=generator) * 3).to(device, dtype)


def _norm(device: str, dtype: torch.dtype, tokens: int, width: int, add: bool,
          ops: LayerOps) -> Tensor:
    """The norm and the h that it leaves."""
    randn = partial(_randn, device, dtype)
    h = randn(tokens, width)
    x = ops.norm(h, randn(tokens + 1, width)[1:] if add else None, randn(width), 1e-5)
    return torch.cat((x, h))


def _rotate(device: str, dtype: torch.dtype, tokens: int, heads: int, dim: int,
            ops: LayerOps) -> Tensor:
    """All heads, of which those rotated are a view: the others must stay."""
    randn = partial(_randn, device, dtype)
    x = randn(tokens, heads + 2, dim)
    ops.rotate(x[:, 1:heads + 1], randn(tokens, 1, dim), randn(tokens + 1, 1, dim)[1:])
    return x


def _norm_rotate(device: str, dtype: torch.dtype, tokens: int, heads: int, dim: int,
                 ops: LayerOps) -> Tensor:
    randn = partial(_randn, device, dtype)
    x, weights = randn(tokens, heads + 2, dim), randn(2, dim)
    ops.norm_rotate(x[:, 1:heads + 1], randn(tokens, 1, dim), randn(tokens + 1, 1, dim)[1:], weights[0],
                    weights[1], heads * 3 // 4, 1e-5)
    return x


def latent(device: str, dtype: torch.dtype, tokens: int, index: int, ops: LayerOps) -> Tensor:
    """All parts of rows and queries; index: dim of the indexer's heads, 0 without one."""
    randn, heads, turned, queries, rank = partial(_randn, device, dtype), 5, 12, 40, 24
    x = randn(tokens, queries + rank + turned + index + 3)[:, :queries + rank + turned + index]
    norms = LatentNorms(randn(queries), randn(rank), randn(index) if index else None,
                        randn(index + 1)[1:] if index else None, 1e-6)
    cos, sin = randn(tokens, 1, turned), randn(tokens + 1, 1, turned)[1:]
    index_heads = 3 if index else 0
    weighs = Weighs(randn(tokens, 300), randn(3, 300).float(), 0.1) if index else None
    residual, key, weight = ops.latent_rows(x, norms, cos, sin, weighs)
    up = randn(tokens, heads * (7 + turned) + index_heads * index)
    q = torch.zeros(tokens, heads, rank + turned, dtype=dtype, device=device)
    q_index = ops.latent_queries(up, q, index_heads, index, cos, sin)
    return torch.cat([part.flatten(1) for part in (x, residual, key, q, q_index, weight.to(dtype))], 1)


def _by_head(device: str, dtype: torch.dtype, tokens: int, heads: int, inputs: int, outputs: int,
             ops: LayerOps) -> Tensor:
    """Weights whose inputs lie side by side, and whose outputs do; between other elements each."""
    randn = partial(_randn, device, dtype)
    out = torch.zeros(2, tokens, heads, outputs + 3, dtype=dtype, device=device)
    x = randn(tokens, heads, inputs + 5)[..., :inputs]
    ops.by_head(x, randn(heads, outputs + 1, inputs)[:, 1:], out[0, ..., :outputs])
    ops.by_head(x, randn(heads, inputs + 1, outputs)[:, 1:].transpose(1, 2), out[1, ..., :outputs])
    return out


def _gate(device: str, dtype: torch.dtype, tokens: int, width: int, ops: LayerOps) -> Tensor:
    """Large values too: silu of -300 is 0 and of 300 is 300."""
    x = _randn(device, dtype, tokens, 2 * width + 5)[:, :2 * width]
    x[0, 0] = -300.0
    out = ops.gate(x)
    x[0, 0] = 300.0
    return torch.cat((out, ops.gate(x)))


def workloads() -> Iterator[Workload]:
    """One layer of SmolLM2-135M: 576 wide, 12 rotated heads of 64, MLP of 1,536."""
    for kind, dtype in DTYPES:
        for tokens in (1, 8, 512):
            name = f"{kind} {tokens} tokens"
            size = dtype.itemsize * tokens
            yield Workload(f"norm {name}", partial(_prepare, "norm", dtype, tokens),
                           size * 4 * 576, 4 * tokens * 576)
            yield Workload(f"rotate {name}", partial(_prepare, "rotate", dtype, tokens),
                           size * (2 * 768 + 128), 3 * tokens * 768)
            yield Workload(f"gate {name}", partial(_prepare, "gate", dtype, tokens),
                           size * 3 * 1536, 4 * tokens * 1536)


def _prepare(op: str, dtype: torch.dtype, tokens: int, ops: LayerOps) -> Callable[[int], object]:
    randn = partial(_randn, "cpu", dtype)
    h, delta, weight = randn(tokens, 576), torch.zeros(tokens, 576, dtype=dtype), randn(576)
    heads, gate_up = randn(tokens, 15, 64)[:, :12], randn(tokens, 3072)
    cos, sin = torch.ones(tokens, 1, 64, dtype=dtype), torch.zeros(tokens, 1, 64, dtype=dtype)
    calls: dict[str, Callable[[int], object]] = {
        "norm": lambda _: ops.norm(h, delta, weight, 1e-5),
        "rotate": lambda _: ops.rotate(heads, cos, sin),
        "gate": lambda _: ops.gate(gate_up),
    }
    return calls[op]
