"""Logprobs of prompt tokens on their way from a rank to the client: columns of bytes, not objects.

A prompt of 100,000 tokens with five alternatives each is 5 MB so, and 100 MB as Python's numbers.

    N tokens of the prompt, the first of which is `first`   K best ones of each
"""
from __future__ import annotations

from collections.abc import Iterator

import msgspec

from penstock.config.request.params import SamplingParams

ENTRIES_MAX = 1 << 23                   # N * (K + 1) of one prompt


def scores_fit(params: SamplingParams, num_prompt: int) -> bool:
    """Whether what is asked of a prompt of so many tokens has at most ENTRIES_MAX entries."""
    return (params.prompt_logprobs is None
            or (num_prompt - params.prompt_from) * (params.prompt_logprobs + 1) <= ENTRIES_MAX)


class Scores(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Little-endian: logprob f32 [N], rank i32 [N] from 1, ids i32 [N, K], best f32 [N, K] descending."""

    first: int
    logprob: bytes
    rank: bytes
    ids: bytes
    best: bytes

    def __len__(self) -> int:
        return len(self.logprob) // 4

    def rows(self) -> Iterator[tuple[float, int, list[tuple[int, float]]]]:
        """Return, per token, its logprob, its rank, and the best (id, logprob)."""
        logprob, rank = memoryview(self.logprob).cast("f"), memoryview(self.rank).cast("i")
        ids, best = memoryview(self.ids).cast("i"), memoryview(self.best).cast("f")
        k = len(ids) // max(1, len(self))
        for i, (own, place) in enumerate(zip(logprob, rank, strict=True)):
            yield own, place, list(zip(ids[i * k:i * k + k], best[i * k:i * k + k], strict=True))


class PromptScores:
    """Prompt logprobs of one request: parts come in, in any order and some twice, and the whole is taken once."""

    def __init__(self, params: SamplingParams, num_prompt: int) -> None:
        """params: with `prompt_logprobs`."""
        self.first = params.prompt_from
        self._count, self._best = max(0, num_prompt - self.first), params.prompt_logprobs or 0
        self._missing = bytearray(b"\1" * self._count)
        self._columns = [bytearray(4 * self._count * k) for k in (1, 1, self._best, self._best)]

    def add(self, part: Scores) -> bool:
        """Whether it is a part of this; nothing is kept of one that is not."""
        at, num = part.first - self.first, len(part)
        columns = part.logprob, part.rank, part.ids, part.best
        if not 0 <= at <= at + num <= self._count or any(
                len(column) != 4 * num * k for column, k in
                zip(columns, (1, 1, self._best, self._best), strict=True)):
            return False
        for mine, column in zip(self._columns, columns, strict=True):
            width = len(column) // max(1, num)
            mine[at * width:(at + num) * width] = column
        self._missing[at:at + num] = bytes(num)
        return True

    @property
    def is_whole(self) -> bool:
        return not any(self._missing)

    def whole(self) -> Scores:
        return Scores(self.first, *map(bytes, self._columns))

    def parts(self, most: int) -> list[Scores]:
        """The whole in parts of about `most` bytes."""
        step = max(1, most // (8 * (self._best + 1)))
        return [Scores(self.first + at, *(
            bytes(column[at * width:(at + step) * width]) for column, width in
            zip(self._columns, (4, 4, 4 * self._best, 4 * self._best), strict=True)))
            for at in range(0, self._count, step)]
