"""Inputs of scan: rows that begin, that go on, that leave states on their way. What no row reads is NaN."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from cases import TOLERANCE, Case, Workload
from penstock.kernels.state.scan import Scan, ScanSpec, ScanWeights, reference
from penstock.kernels.types.states import States

# Tokens of a row, whether it goes on, every how many tokens and behind the last it leaves a state; or where.
_Row: TypeAlias = tuple[int, bool, int | tuple[int, ...]]
_STEPS: dict[str, tuple[_Row, ...]] = {
    "first token": ((1, False, 1),),
    "decode": ((1, True, 1), (1, True, 1), (1, False, 1)),
    "drafts": ((4, True, (0,)), (4, True, (0,)), (3, True, (1,)), (3, True, (0, 2)), (3, True, ())),
    "chunks": ((7, False, 3), (2, True, 5), (1, True, 1), (70, True, 16)),
    "a prompt": ((130, False, 64),),
}
# Of prompts, with the positions of the rows' first tokens: whole blocks of them are computed together, but not of rows
# that begin inside one, nor of those that decode.
_BLOCKS: dict[str, tuple[tuple[_Row, ...], tuple[int, ...]]] = {
    "a block": (((64, False, 64),), (0,)),
    "blocks and a rest": (((203, False, 64),), (0,)),
    "blocks of a state that goes on": (((130, True, 128), (192, True, 64)), (64, 1024)),
    "blocks of some rows": (((1, True, 1), (129, False, 128), (63, False, 64), (70, True, 64), (4, True, (0,)),
                             (128, True, 128)), (77, 0, 0, 3, -1, 192)),
}
_SHAPES = {
    "delta": ScanSpec(heads=4, key_heads=2, key_dim=24, value_dim=20, taps=4, delta=True),
    "delta large": ScanSpec(heads=2, key_heads=1, key_dim=128, value_dim=128, taps=4, delta=True),
    "delta wide": ScanSpec(heads=2, key_heads=2, key_dim=16, value_dim=144, taps=2, delta=True),
    "ssd": ScanSpec(heads=6, key_heads=2, key_dim=16, value_dim=8, taps=4, delta=False),
    "ssd bounded": ScanSpec(heads=2, key_heads=1, key_dim=9, value_dim=64, taps=3, delta=False, least=0.2,
                            most=0.9),
    "delta split": ScanSpec(heads=4, key_heads=1, key_dim=12, value_dim=20, taps=3, delta=True, split=2),
    "ssd split": ScanSpec(heads=6, key_heads=2, key_dim=16, value_dim=8, taps=4, delta=False, split=3),
}


def cases(device: str) -> Iterator[Case]:
    for dtype in (torch.float32, torch.bfloat16):
        for name, spec in _SHAPES.items():
            for step, rows in _STEPS.items():
                yield Case(f"{dtype}-{name}-{step}", partial(_run, dtype, spec, rows, None, device),
                           TOLERANCE[dtype])
            for step, (rows, at) in _BLOCKS.items():
                yield Case(f"{dtype}-{name}-{step}", partial(_run, dtype, spec, rows, at, device), TOLERANCE[dtype])


def make(dtype: torch.dtype, spec: ScanSpec, rows: tuple[_Row, ...], device: str = "cpu",
         at: tuple[int, ...] | None = None) -> tuple[Tensor, Tensor, Tensor | None, ScanWeights, States, ScanSpec]:
    """The arguments of `scan`. A row goes on in place, or from a page that it leaves. at: as `Blocks.of`."""
    draw = torch.Generator().manual_seed(len(rows) + spec.channels)
    starts, from_, to = [0], [], []
    pages = torch.randperm(200, generator=draw).tolist()
    for i, (count, goes_on, every) in enumerate(rows):
        from_.append(pages.pop() if goes_on else -1)
        starts.append(starts[-1] + count)
        left = [t in every if isinstance(every, tuple) else (t + 1) % every == 0 or t == count - 1
                for t in range(count)]
        own = [from_[-1]] if goes_on and i % 2 else []
        to += [-1 if not leaves else own.pop() if own else pages.pop() for leaves in left]
    pool = torch.full((200, 2, spec.elements), float("nan"))
    for page in (page for page in from_ if page >= 0):      # parts of one key head have the same inputs
        held = reference.taken(torch.randn(spec.elements, generator=draw), spec)
        pool[page, 1] = reference.kept(*held, spec)
    tokens = starts[-1]
    x = torch.randn(tokens, spec.channels + 2 * spec.heads, generator=draw).to(dtype).to(device)
    x, step, write = torch.split(x, [spec.channels, spec.heads, spec.heads], 1)
    weights = ScanWeights(
        conv_WX=torch.randn(spec.taps, spec.channels, generator=draw).to(device),
        bias_X=None if spec.delta else torch.randn(spec.channels, generator=draw).to(device),
        decay_N=-torch.rand(spec.heads, generator=draw).to(device),
        step_N=torch.randn(spec.heads, generator=draw).to(device),
        skip_N=None if spec.delta else torch.randn(spec.heads, generator=draw).to(device))
    states = States.of(pool.to(device)[:, 1], tuple(starts), torch.tensor(from_, device=device),
                       torch.tensor(to, device=device), at)
    return x, step, write if spec.delta else None, weights, states, spec


def _run(dtype: torch.dtype, spec: ScanSpec, rows: tuple[_Row, ...], at: tuple[int, ...] | None, device: str, run: Scan,
         ) -> tuple[Tensor, ...]:
    args = make(dtype, spec, rows, device, at)
    out, states = run(*args), args[4]
    return out, states.pool_PE[states.to_T[states.to_T >= 0]]


def workloads() -> Iterator[Workload]:
    """A layer of Qwen3-Next and of Nemotron-H: decode, and a chunk of a prompt, which begins with a block."""
    shapes = {"delta": ScanSpec(heads=32, key_heads=16, key_dim=128, value_dim=128, taps=4, delta=True),
              "ssd": ScanSpec(heads=128, key_heads=8, key_dim=128, value_dim=64, taps=4, delta=False)}
    for name, spec in shapes.items():
        for rows in (((1, True, 1),), ((1, True, 1),) * 8, ((512, True, 512),)):
            tokens = sum(count for count, _, _ in rows)
            yield Workload(f"{name} {len(rows)} x {rows[0][0]}", partial(_prepare, spec, rows),
                           8 * len(rows) * spec.elements,
                           tokens * spec.heads * spec.key_dim * spec.value_dim * (7 if spec.delta else 5), 1)


def _prepare(spec: ScanSpec, rows: tuple[_Row, ...], run: Scan) -> Callable[[int], object]:
    args = make(torch.float32, spec, rows, at=(0,) * len(rows))
    return lambda layer: run(*args)
