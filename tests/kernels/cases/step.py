"""Inputs of a step's ends: every kind of table, padding, ties, rows that are not finite, vocabularies around
a part. `run` of a case takes a module that has all three."""
from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cases import DTYPES, TOLERANCE, Case
from penstock.kernels.fused.step.spec import BlockTableRef, Looks

_ROWS = 150
_TABLES = {"no table": (), "of one tier": ((4, 1), (0, 1), (4, 2)), "of two": ((16, 1), (16, 1), (16, 1)),
           "keys": ((3, 1),)}


def cases(device: str = "cpu") -> Iterator[Case]:
    for num in (1, 5, 130):
        for name, tables in _TABLES.items():
            for asks in (False, True):
                yield Case(f"{num} begin, {name}{', budgets' * asks}",
                           partial(_begin, device, num, tables, asks))
    for tokens, freqs, own in ((1, 32, False), (7, 3, False), (7, 64, True), (70, 20, False)):
        for kind, dtype in DTYPES:
            yield Case(f"{kind}: {tokens} tokens by {freqs} angles{' of their own' * own}",
                       partial(_angles, device, tokens, freqs, own, dtype), TOLERANCE[dtype])
    for vocab, num in ((1, 1), (61, 130), (4096, 3), (9001, 5)):
        for kind, dtype in DTYPES:
            for shape in ((), (3, 2), (1, 1)):
                yield Case(f"{kind}: {num} say one of {vocab:,}{f', counts of {shape}' if shape else ''}",
                           partial(_say, device, num, vocab, dtype, shape))


def _queries(num: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Rows of the tables, each once, and positions, the last of them padding."""
    row = torch.randperm(_ROWS, generator=generator)[:num].int()
    position = torch.randint(0, 30, (num,), generator=generator).int()
    row[num - num // 3:], position[num - num // 3:] = 0, -1
    return row, position


def _begin(device: str, num: int, tables: tuple[tuple[int, int], ...], asks: bool,
           ends: Any) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(num)
    row, position = (x.to(device) for x in _queries(num, generator))

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator).to(device)
    places = tuple(BlockTableRef(integers(-1, 99, _ROWS, 11).int() if size else None, size, unit)
                   for size, unit in tables)
    looks = Looks(places, integers(0, 3, _ROWS).int() if asks else None,
                  torch.tensor([7], dtype=torch.int32, device=device) if asks else None)
    found = ends.begin(row, position, integers(0, 61, _ROWS + 1), looks)
    return tuple(x.contiguous() for x in (
        found.row_B, found.position_B, found.context_B, found.own_B, found.index_B, found.token_B, found.at_B,
        *found.slot_LB, found.budget_B, found.select_B, looks.now_1) if x is not None)


def _angles(device: str, tokens: int, freqs: int, own: bool, dtype: torch.dtype,
            ends: Any) -> tuple[Tensor, ...]:
    """At positions up to a million, of which a fast cosine knows little."""
    position = (torch.arange(1, tokens + 1) * 14_057 % 1_000_003).to(device)
    freq = (1e4 ** (-torch.arange(freqs) / freqs)).to(device)
    found: tuple[Tensor, ...] = ends.angles(
        position, freq * (position[:, None] % 3 + 1) if own else freq, 1.3, dtype)
    return found


def _say(device: str, num: int, vocab: int, dtype: torch.dtype, shape: tuple[int, ...],
         ends: Any) -> tuple[Tensor, ...]:
    """Of rows beside others; some are drawn, some have no finite maximum."""
    generator = torch.Generator().manual_seed(vocab)
    row, position = (x.to(device) for x in _queries(num, generator))
    head = (torch.randn(num, vocab + 3, generator=generator) * 2).round() / 2
    if num > 3:
        head[0, vocab // 2], head[1], head[2, vocab - 1] = torch.nan, -torch.inf, torch.inf
        head[3, :vocab // 2] = -torch.inf
    head = head.to(device, dtype)[:, :vocab]
    logits = torch.empty(num, vocab, device=device)
    found = ends.best(head, logits)
    found.token_B[2::3] = vocab - 1
    last = torch.full((_ROWS + 1,), -5, device=device)
    count = (torch.randint(0, 9, (shape[0], _ROWS, shape[1], 4), generator=generator).to(device)
             if shape else None)
    answer = ends.say(found, row, position, last, count)
    return logits.nan_to_num(1e3, 2e3, -1e3), answer, last[:-1], found.token_B.clamp(min=-1)
