"""Drafters of tests: one knows the answer and errs by dice, one proposes noise, one what nobody may say."""
from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from penstock.core.plan import RequestId
from penstock.exec.drafts.drafter import Ask, Drafter
from penstock.exec.sampling.on_device import Draws
from penstock.exec.sampling.tokens import Drawn

# answer(prompt, n): the first n output tokens
Answer = Callable[[tuple[int, ...], int], Sequence[int]]


class Dice(Drafter):
    """Says the next tokens of the answer, each with this chance, and another one else. Fewer at times."""

    name = "dice"

    def __init__(self, answer: Answer, chance: float, vocab: int = 61, seed: int = 0) -> None:
        self._answer, self._chance, self._vocab = answer, chance, vocab
        self._random = random.Random(seed)
        self.asked: Counter[int] = Counter()        # how many drafts a row was asked for
        self.forgotten: list[RequestId] = []

    def propose(self, asks: Sequence[Ask]) -> Sequence[Sequence[int]]:
        return [self._of(ask) for ask in asks]

    def _of(self, ask: Ask) -> list[int]:
        self.asked[ask.most] += 1
        had = len(ask.outputs)
        found = list(self._answer(tuple(ask.prompt), had + ask.most)[had:])
        much = self._random.choice((ask.most, ask.most, self._random.randint(0, ask.most)))
        return [token if self._random.random() < self._chance else (token + 1) % self._vocab
                for token in found[:much]]

    def forget(self, rid: RequestId) -> None:
        self.forgotten.append(rid)


class Noise(Dice):
    """Never mind what the row has said."""

    name = "noise"

    def __init__(self, vocab: int = 61, seed: int = 0) -> None:
        super().__init__(lambda _, n: [self._random.randrange(vocab) for _ in range(n)], 1.0, vocab, seed)


class Broken(Drafter):
    """What no drafter may say."""

    name = "broken"

    def __init__(self, vocab: int = 61) -> None:
        self._vocab, self.turn = vocab, 0

    def propose(self, asks: Sequence[Ask]) -> Sequence[Sequence[int]]:
        wrong: list[list] = [[self._vocab], [-1], [0] * 99, [float("nan")], [2.0], [1 << 70]]
        self.turn += 1
        return [wrong[(self.turn + i) % len(wrong)] for i in range(len(asks))]

    def forget(self, rid: RequestId) -> None:
        pass


def as_a_device(engine: Any) -> Any:
    """Its rank launches ahead, draws for rows and finds what counts, as a CUDA device does."""
    rank = engine.rank
    if not rank._ahead:
        rank._ahead, old = True, rank._tokens
        rank._tokens = Drawn(old._sampler, rank._tables,
                             Draws(61, rank._tables.last_R.numel() - 1, torch.device("cpu"), "reference"))
        narrowing = rank._widths._narrowing
        narrowing._history, narrowing._may, narrowing._beside = (
            rank._tokens.history, rank._tokens.drafts, False)
        narrowing._at_once = lambda row: rank._attending.at_once(rank._tables.index(row))
    return engine
