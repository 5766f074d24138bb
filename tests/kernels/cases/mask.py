"""Inputs of mask: 1 to 256 rows, some without a mask, vocabularies that end within a word, masks that are
shorter or longer than they, and logits that are not finite."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from cases import Case, Workload
from penstock.kernels.sample.mask import Mask

# rows, masks of them, vocabulary, words
SHAPES = ((1, 1, 1, 1), (1, 1, 31, 1), (2, 1, 33, 2), (3, 3, 64, 2), (5, 2, 4097, 129), (5, 5, 100, 3),
          (5, 3, 90, 4), (7, 0, 40, 2), (32, 32, 5000, 157), (256, 256, 203, 7), (256, 91, 203, 7))
EMPTY, NAN, INFINITY = -1e30, -2e30, -3e30          # in an output, for what has no difference to itself


def cases(device: str = "cpu") -> Iterator[Case]:
    for shape in SHAPES:
        rows, masks, vocab, words = shape
        for odd in (False, True):
            yield Case(f"{masks} masks of {rows} rows of {vocab} tokens, {words} words"
                       f"{', not all finite' * odd}", partial(_run, shape, odd, device))


def _inputs(shape: tuple[int, int, int, int], odd: bool) -> tuple[Tensor, Tensor, Tensor]:
    """As `Mask` takes them. Masks admit all, nothing, one token, and half of them, in turns."""
    rows, masks, vocab, words = shape
    generator = torch.Generator().manual_seed(vocab + rows)
    logits = torch.randn(rows, vocab, generator=generator)
    if odd:
        for value, every in ((torch.nan, 3), (torch.inf, 4), (-torch.inf, 2)):
            some = torch.rand(rows, vocab, generator=generator) < 0.3
            logits[(torch.arange(rows) % every == 0).unsqueeze(1) & some] = value
    packed = torch.randint(-2 ** 31, 2 ** 31, (masks, words), generator=generator).int()
    packed[0::4], packed[1::8], packed[5::8] = -1, 0, 0
    for m in range(2, masks, 4):
        packed[m] = 0
        token = int(torch.randint(0, 32 * words, (1,), generator=generator))
        packed[m, token // 32] = (1 << token % 32) - (1 << 32 if token % 32 == 31 else 0)
    return logits, packed, torch.randperm(rows, generator=generator)[:masks]


def _run(shape: tuple[int, int, int, int], odd: bool, device: str, mask: Mask) -> tuple[Tensor, Tensor]:
    given = _inputs(shape, odd)
    logits, words, at = (x.to(device, copy=True) for x in given)
    ok = mask(logits, words, at)
    assert torch.equal(words.cpu(), given[1]) and torch.equal(at.cpu(), given[2]), "inputs changed"
    others = [row for row in range(shape[0]) if row not in given[2].tolist()]
    assert torch.equal(logits.cpu()[others].view(torch.int32), given[0][others].view(torch.int32)), (
        "a row without a mask was touched")
    return logits.nan_to_num(nan=NAN, posinf=INFINITY, neginf=EMPTY), torch.cat((ok, ok.new_ones(1)))


def workloads() -> Iterator[Workload]:
    """Rows of SmolLM2-135M's vocabulary and of Qwen3's: each logit is read and written."""
    for rows, vocab in ((8, 49152), (32, 151936)):
        yield Workload(f"{rows} x {vocab:,}", partial(_prepare, rows, vocab), rows * vocab * 8, rows * vocab)


def _prepare(rows: int, vocab: int, mask: Mask) -> Callable[[int], object]:
    logits, at = torch.randn(rows, vocab), torch.arange(rows)
    words = torch.randint(-2 ** 31, 2 ** 31, (rows, vocab // 32)).int()
    return lambda layer: mask(logits, words, at)
