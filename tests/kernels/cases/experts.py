"""Inputs of experts: one token to hundreds, to few experts or to all, odd sizes, floats and fp8 in blocks."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from cases import DTYPES, TOLERANCE, Case, Workload
from penstock.kernels.gemm.experts import Biases, Clamped, ExpertOps, Gate, Rule, TanhGelu
from penstock.kernels.types.packed import Kind, Packed, joined, quantised

_TOKENS = (1, 3, 64, 150)
# experts, chosen, model dim, width, rows and columns of a scaled block
_SHAPES = ((5, 2, 40, 24, 16, 16), (16, 8, 128, 96, 32, 64), (3, 3, 33, 7, 5, 16), (1, 1, 16, 17, 128, 128))
_PACKED: tuple[tuple[Kind, tuple[int, ...]], ...] = (
    ("u4", (16, 8, 128, 96, 1, 32)), ("e2m1", (5, 2, 64, 48, 1, 16)), ("u8", (5, 2, 40, 24, 1, 40)),
    ("u4", (3, 2, 256, 128, 1, 128)), ("e2m1", (3, 3, 320, 192, 1, 32)))
# experts, rule
_RULES = {
    "softmax": (128, Rule(num_chosen=8, renormalize=True)),
    "softmax as it is": (7, Rule(num_chosen=7, renormalize=False, scale=2.5)),
    "sigmoid": (24, Rule(num_chosen=3, renormalize=True, sigmoid=True, scale=2.5)),
    "groups": (24, Rule(num_chosen=4, renormalize=True, sigmoid=True, groups=6, groups_chosen=2, scale=1.5)),
    "groups of softmax": (64, Rule(num_chosen=6, renormalize=False, groups=8, groups_chosen=3)),
}


def cases(device: str = "cpu") -> Iterator[Case]:
    for name, dtype in DTYPES:
        for rule, (experts, how) in _RULES.items():
            for tokens in (1, 37):
                yield Case(f"{name}-route {rule}-{tokens}",
                           partial(_route, device, dtype, experts, how, tokens), 1e-5)
        for shape in _SHAPES:
            for kind in ("", "e4m3"):
                for tokens in _TOKENS:
                    yield Case(f"{name}-{kind} {'x'.join(map(str, shape))}-{tokens}",
                               partial(_mlp, device, dtype, shape, kind, tokens), TOLERANCE[dtype])
        for kind, shape in _PACKED:
            for tokens in _TOKENS:
                yield Case(f"{name}-{kind} {'x'.join(map(str, shape))}-{tokens}",
                           partial(_mlp, device, dtype, shape, kind, tokens), TOLERANCE[dtype])
        for tokens, (_, shape) in ((3, _PACKED[1]), (150, _PACKED[1]), (1, _PACKED[4])):
            yield Case(f"{name}-clamped of {shape[0]} in e2m1-{tokens}", partial(
                _mlp, device, dtype, shape, "e2m1", tokens, gate=Clamped(alpha=1.7, limit=0.5)), TOLERANCE[dtype])
        for tokens in (1, 37, 150):
            for last in (True, False):
                yield Case(f"{name}-clamped of 5{' by another lane' * (not last)}-{tokens}", partial(
                    _mlp, device, dtype, _SHAPES[0], "", tokens, gate=Clamped(alpha=1.7, limit=0.5),
                    adds=last), TOLERANCE[dtype])
        for tokens in (1, 37, 150):
            yield Case(f"{name}-gelu-{tokens}", partial(_mlp, device, dtype, _SHAPES[0], "", tokens,
                                                        gate=TanhGelu()), TOLERANCE[dtype])
        for shape in _SHAPES[:2]:
            for kind in ("", "e4m3"):
                for tokens in _TOKENS:
                    yield Case(f"{name}-ungated {kind} {'x'.join(map(str, shape))}-{tokens}",
                               partial(_mlp, device, dtype, shape, kind, tokens, gated=False),
                               TOLERANCE[dtype])
        for first, kept in ((0, 3), (2, 2), (4, 1)):
            for tokens in (1, 37, 150):
                yield Case(f"{name}-experts {first} to {first + kept} of 5-{tokens}",
                           partial(_mlp, device, dtype, _SHAPES[0], "", tokens, first=first, kept=kept),
                           TOLERANCE[dtype])


def _route(device: str, dtype: torch.dtype, experts: int, rule: Rule, tokens: int, ops: ExpertOps) -> Tensor:
    """What each expert weighs, 0 where it is not chosen. Logits of a token differ by more than a rounding."""
    generator = torch.Generator().manual_seed(experts + tokens)
    order = torch.stack([torch.randperm(experts, generator=generator) for _ in range(tokens)])
    logit = torch.cat([(order - experts // 2) / 16, torch.full((tokens, 3), 99.0)], 1).to(device, dtype)
    bias = torch.randperm(experts, generator=generator).float().to(device) / 64 if rule.sigmoid else None
    expert, weight = ops.route(logit[:, :experts], bias, rule)
    assert expert.dtype == torch.int64 and weight.dtype == torch.float32
    assert expert.shape == weight.shape == (tokens, rule.num_chosen)
    return torch.zeros(tokens, experts, device=device).scatter_add_(1, expert, weight)


def stack(generator: torch.Generator, experts: int, rows: int, cols: int, block: tuple[int, int],
          dtype: torch.dtype, kind: Kind | Literal[""]) -> Tensor | Packed:
    """Random weights of all experts; packed ones as a model joins those of each."""
    parts = [torch.randn(rows, cols, generator=generator) * cols ** -0.5 for _ in range(experts)]
    return joined([quantised(part, *block, kind) for part in parts]) if kind else torch.cat(parts).to(dtype)


def _mlp(device: str, dtype: torch.dtype, shape: tuple[int, ...], kind: Kind | Literal[""], tokens: int,
         ops: ExpertOps, *, first: int = 0, kept: int | None = None, gate: Gate | None = None,
         adds: bool = True, gated: bool = True) -> Tensor:
    """A third of the tokens visits the same experts, of which `kept` from `first` on are here. Those that
    clamp have biases, the last of which this lane `adds`, or not."""
    experts, chosen, dim, width, *block = shape
    generator = torch.Generator().manual_seed(sum(shape) + tokens)
    x = torch.randn(tokens, dim, generator=generator).to(device, dtype)
    expert = torch.stack([torch.randperm(experts, generator=generator)[:chosen] for _ in range(tokens)])
    expert[::3] = expert[0].clone()
    weight = torch.rand(tokens, chosen, generator=generator)
    here = experts if kept is None else kept
    gate_up = stack(generator, here, width * (1 + gated), dim, (block[0], block[1]), dtype, kind)
    down = stack(generator, here, dim, width, (block[0], block[1]), dtype, kind)
    biases = None
    if isinstance(gate, Clamped):
        bias_in, bias_out = (torch.randn(here * rows, generator=generator).to(device, dtype)
                             for rows in (2 * width, dim))
        biases = Biases(bias_in, bias_out if adds else None)
    return ops.mlp(x, expert.to(device), weight.to(device), gate_up.to(device), down.to(device), first,
                   biases, gate)


def workloads() -> Iterator[Workload]:
    """A small layer: 16 experts of which a token visits 4."""
    dim, width, experts, chosen = 512, 256, 16, 4
    for tokens in (1, 32):
        used = min(experts, tokens * chosen)
        yield Workload(f"bfloat16 {experts} experts {dim}x{width}, {tokens} tokens",
                       partial(_prepare, tokens, experts, chosen, dim, width), 2 * used * 3 * dim * width,
                       6 * tokens * chosen * dim * width)


def _prepare(tokens: int, experts: int, chosen: int, dim: int, width: int,
             ops: ExpertOps) -> Callable[[int], object]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, dim, generator=generator).bfloat16()
    expert = torch.rand(tokens, experts, generator=generator).topk(chosen).indices
    weight = torch.rand(tokens, chosen, generator=generator)
    gate_up, down = (stack(generator, experts, rows, cols, (1, 1), torch.bfloat16, "")
                     for rows, cols in ((2 * width, dim), (dim, width)))
    return lambda _: ops.mlp(x, expert, weight, gate_up, down)
