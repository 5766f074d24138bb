"""Inputs of index_pair on a grid where sums are exact: everyone agrees to the bit."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from cases import DTYPES, Case, Workload
from penstock.kernels.choose.index_pair import IndexPair

_HEADS = ((64, 128), (8, 32), (1, 16), (17, 64))       # index heads, index head dim
_TOKENS = (1, 3, 64)


def cases(device: str) -> Iterator[Case]:
    for name, dtype in DTYPES:
        for heads, dim in _HEADS:
            for tokens in _TOKENS:
                yield Case(f"{name}-{tokens} tokens of ({heads}, {dim})",
                           partial(_run, dtype, heads, dim, tokens, device), 0.0)


def _run(dtype: torch.dtype, heads: int, dim: int, tokens: int, device: str,
         run: IndexPair) -> tuple[Tensor, ...]:
    """Keys and weights lie in longer lines; the first of keys is 0 throughout, and of queries."""
    generator = torch.Generator().manual_seed(dim + tokens)
    q, line = (torch.randint(-3, 4, shape, generator=generator).to(dtype).to(device)
               for shape in ((tokens, heads, dim), (tokens, dim + 24)))
    weight = torch.randn(tokens, heads + 3, generator=generator).to(device)
    line[0] = q[0, 0] = 0
    code, *rest = run(q, weight[:, :heads], line[:, 8:8 + dim])
    assert code.dtype == torch.float8_e4m3fn
    return code.float(), *rest


def workloads() -> Iterator[Workload]:
    """DeepSeek-V3.2's indexer: 64 rows that decode."""
    yield Workload("bfloat16 (64, 128) 64", _prepare, 4 * 64 * 64 * 128, 2 * 64 * 65 * 128 * 128)


def _prepare(run: IndexPair) -> Callable[[int], object]:
    q, key = torch.randn(64, 64, 128).bfloat16(), torch.randn(64, 128).bfloat16()
    weight = torch.rand(64, 64)
    return lambda layer: run(q, weight, key)
