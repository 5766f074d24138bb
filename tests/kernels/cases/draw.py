"""Inputs of draw: every mix of parameters, ties, padding, rows in any order, vocabularies around a block."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

import torch
from torch import Tensor

from cases import Case, Workload
from penstock.kernels.sample import filters, uniform
from penstock.kernels.sample.draw import Draw

_NEAR = 1e-5                    # of a row's mass: so close to an edge a weight of another rounding decides


def cases(device: str = "cpu") -> Iterator[Case]:
    for vocab, ties in ((150, True), (150, False), (64, True), (4097, False)):
        inputs = _inputs(vocab, ties)
        yield Case(f"{vocab} tokens{' with ties' * ties}", partial(_run, inputs, device),
                   check=partial(_differ, inputs))


def _inputs(vocab: int, ties: bool) -> tuple[Tensor, ...]:
    """As `Draw` takes them. Rows of the tables are drawn in another order than theirs."""
    generator = torch.Generator().manual_seed(vocab)
    grid = [*product((0.0, 0.7, 1.0, 2.5), (1, 7, vocab), (0.05, 0.6, 1.0), (0.0, 0.1))]
    rows = len(grid)
    logits = torch.randn(rows, vocab, generator=generator) * 3
    logits = (logits * 2).round() / 2 if ties else logits
    position = torch.full((rows,), 3, dtype=torch.int32)
    position[3::7] = -1
    stream = torch.tensor([(uniform.stream(5, r) - (1 << 63), r) for r in range(rows)])
    return (logits, torch.full((rows,), -9), torch.randperm(rows, generator=generator).int(), position,
            torch.tensor(grid, dtype=torch.float64), stream)


def _run(inputs: tuple[Tensor, ...], device: str, draw: Draw) -> tuple[Tensor, Tensor]:
    logits, token, row, position, params, stream = (x.to(device, copy=True) for x in inputs)
    draw(logits, token, row, position, params, stream)
    assert torch.equal(logits.cpu(), inputs[0]) and torch.equal(params.cpu(), inputs[4]), "inputs changed"
    return token, stream


def _differ(inputs: tuple[Tensor, ...], out: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor]) -> str:
    """Tokens are the same, but where the uniform falls on the edge between the two."""
    if not torch.equal(out[1], want[1]):
        return "other streams"
    logits, _, row, _, params, stream = inputs
    for b in (out[0] != want[0]).nonzero().flatten().tolist():
        low, high = sorted((int(out[0][b]), int(want[0][b])))
        if low < 0 or high >= logits.shape[1]:
            return f"row {b}: {low} and {high}"
        t, k, top_p, min_p = params[row[b]].tolist()
        cdf = filters.weights(logits[b:b + 1], [t], [int(k)], [top_p], [min_p])[0].double().cumsum(0)
        target = uniform.uniform(*stream[row[b]].tolist()) * cdf[-1]
        if max(abs(cdf[low] - target), abs(cdf[high - 1] - target)) > _NEAR * cdf[-1]:
            return f"row {b}: {int(out[0][b])} and not {int(want[0][b])}"
    return ""


def workloads() -> Iterator[Workload]:
    """Eight rows of SmolLM2-135M's vocabulary, with a top-p."""
    yield Workload("8 x 49,152, top-p 0.9", _prepare, 8 * 49152 * 4, 8 * 49152)


def _prepare(draw: Draw) -> Callable[[int], object]:
    logits, row = torch.randn(8, 49152) * 3, torch.arange(8, dtype=torch.int32)
    params = torch.tensor([[0.8, 49152, 0.9, 0.0]] * 8, dtype=torch.float64)
    stream = torch.zeros(8, 2, dtype=torch.int64)
    return lambda layer: draw(logits, torch.zeros(8, dtype=torch.int64), row, row, params, stream)
