"""Drafters of tests: one knows the answer and errs by dice, one proposes noise, one what nobody may say."""
from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence

import torch

from penstock.core.plan import RequestId
from penstock.exec.drafts.device import OnDevice
from penstock.exec.drafts.drafter import Drafter, DraftQuery

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

    def propose(self, asks: Sequence[DraftQuery]) -> Sequence[Sequence[int]]:
        return [self._of(ask) for ask in asks]

    def _of(self, ask: DraftQuery) -> list[int]:
        self.asked[ask.most] += 1
        had = len(ask.outputs)
        found = list(self._answer(tuple(ask.prompt), had + ask.most)[had:])
        much = self._random.choice((ask.most, ask.most, self._random.randint(0, ask.most)))
        return [token if self._random.random() < self._chance else (token + 1) % self._vocab
                for token in found[:much]]

    def forget(self, rid: RequestId) -> None:
        self.forgotten.append(rid)

    def on_device(self, rows: int, max_len: int, device: torch.device) -> OnDevice:
        return DiceOnDevice(self, rows, max_len, device)

    def thrown(self, prompt: tuple[int, ...], much: int) -> list[int]:
        """Drafts of all of an answer, of so many tokens; -1: none."""
        found = list(self._answer(prompt, much))
        return [-1 if self._random.random() < 0.1 else
                token if self._random.random() < self._chance else (token + 1) % self._vocab
                for token in found]


class DiceOnDevice(OnDevice):
    """What is thrown for a row when it is bound."""

    def __init__(self, dice: Dice, rows: int, max_len: int, device: torch.device, much: int = 24) -> None:
        self._dice, self._much = dice, much
        self._draft_RL = torch.full((rows + 1, max_len + 64), -1, device=device)

    def put(self, row: int, first: int, prompt: Sequence[int], outputs: Sequence[int]) -> None:
        if first == 0:
            drafts = self._dice.thrown(tuple(prompt), self._much)
            self._draft_RL[row] = -1
            self._draft_RL[row, len(prompt):len(prompt) + len(drafts)] = torch.tensor(drafts)

    def propose(self, index_N: torch.Tensor, at_N: torch.Tensor, last_N: torch.Tensor,
                most_N: torch.Tensor, most: int) -> torch.Tensor:
        self._dice.asked[most] += 1
        next_ND = at_N.clamp(min=0).long()[:, None] + torch.arange(1, most + 1, device=at_N.device)
        return self._draft_RL[index_N[:, None], next_ND]


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

    def propose(self, asks: Sequence[DraftQuery]) -> Sequence[Sequence[int]]:
        wrong: list[list] = [[self._vocab], [-1], [0] * 99, [float("nan")], [2.0], [1 << 70]]
        self.turn += 1
        return [wrong[(self.turn + i) % len(wrong)] for i in range(len(asks))]

    def forget(self, rid: RequestId) -> None:
        pass
