"""The batch of a step: its rows, positions and input ids, on the host and as lines of one int32 tensor on the device.

`StepBatch.of` makes it from a plan. Eager steps and captured ones, with prompts or drafts, read the same batch: each
names the lines that it reads, and a bucket says how far they are padded. Knows table indices and positions; knows
neither pages nor how tokens are sampled.

    B entries: a chunk of a row each, or one position of a row that decodes   T tokens   D entries of one token
    S entries that sample
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain, compress, islice
from operator import add
from types import MappingProxyType
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.core.plan import RequestId, Row, StepId, StepPlan
from penstock.kernels.types.ragged import on_device
from penstock.model.base import Boundary

Line: TypeAlias = npt.NDArray[np.int32] | Sequence[int]
Bucket: TypeAlias = tuple[int, int]         # T, B
Inputs: TypeAlias = tuple[int, ...]     # of each row that decodes: its start, how many drafts, and these
# What lines have behind their own values where that is not 0; None: the last of them.
PADDING: Mapping[str, int | None] = MappingProxyType({
    "position_T": -1, "decode_T": -1, "context_B": 1, "start_B1": None, "position_S": -1, "position_N": -1})
MIXED = ("id_T", "row_T", "position_T", "at_S", "decode_T", "row_B", "context_B", "start_B1", "at_D", "row_D",
         "context_D", "row_S", "position_S")         # lines of `StepBatch.mixed`


def sizes(names: Iterable[str], bucket: Bucket) -> list[int]:
    """How long lines are in a bucket: as it has tokens, or entries."""
    return [bucket[0] if name.endswith("_T") else bucket[1] + name.endswith("_B1") for name in names]


def pad(lines: Mapping[str, Line], bucket: Bucket, out: npt.NDArray[np.int32]) -> None:
    """Lay out these lines one after the other."""
    at = 0
    for size, (name, values) in zip(sizes(lines, bucket), lines.items(), strict=True):
        end, padding = at + len(values), PADDING.get(name, 0)
        out[at:end], out[end:at + size] = values, values[-1] if padding is None else padding
        at += size


def parts(values: Tensor, names: Sequence[str], bucket: Bucket) -> dict[str, Tensor]:
    """What `pad` has laid out, as views."""
    of_each = sizes(names, bucket)
    return dict(zip(names, torch.split(values[:sum(of_each)], of_each), strict=True))


@dataclass(frozen=True)
class StepBatch:
    """The entries of a plan; rows are table indices. An id of -1 is the row's last sampled token.

    turns    which of its row's positions an entry is: 0 the first, others are draft tokens
    waits    whether its layers wait for copies
    inputs   where the host makes drafts: what the next pipeline stages compute
    before   boundary from the stage in front, if it was needed for `inputs`
    heard    on a first stage whose rows decode: input ids, with the tokens that the last stage has sampled

    Lines, of tokens:
    id_T, row_T, position_T, decode_T    decode_T: which of the D entries it is, or -1
    at_D, row_D, context_D               token, row and context of entries of one token
    row_B, context_B, start_B1           of all entries, as prompts: an entry of one token has a context of 1
    at_S, row_S, position_S              last token of entries that sample, its row and position
    """

    step: StepId
    rids: Sequence[RequestId]
    rows: Sequence[int]
    start: Sequence[int]
    count: Sequence[int]
    samples: Sequence[bool]
    tokens: Sequence[int]
    turns: Sequence[int]
    waits: bool = False
    inputs: Inputs | None = None
    before: Boundary | None = None
    heard: Sequence[int] = ()

    @staticmethod
    def of(plan: StepPlan, index: Callable[[Row], int], inputs: Inputs | None = None,
           before: Boundary | None = None) -> StepBatch:
        """Each row an entry; or, with what the host has found of rows that decode, each of their positions: the
        first takes the row's last sampled token, further ones the drafts. Asserts that no row is ahead of its plan."""
        rows = tuple(map(index, plan.rows))
        if inputs is None:
            return StepBatch(plan.step, plan.rids, rows, plan.start, plan.count, plan.samples, plan.tokens,
                             (0,) * len(rows), bool(plan.waits))
        entries, tokens = list[tuple[RequestId, int, int, int, bool, int]](), list[int]()
        at, left = 0, iter(inputs)
        for rid, row, start, count, samples in zip(plan.rids, rows, plan.start, plan.count, plan.samples, strict=True):
            known = plan.tokens[at:at + count]
            at += count
            if known[0] >= 0:
                entries.append((rid, row, start, count, samples, 0))
            else:
                first, drafts = next(left), next(left)
                assert 0 < first <= start and drafts < count, (
                    f"row {row} is at {first} with {drafts} drafts, its plan at {start} with {count} positions")
                known = (-1, *islice(left, drafts))
                entries += [(rid, row, first + turn, 1, samples, turn) for turn in range(1 + drafts)]
            tokens += known
        rids, rows, starts, counts, sampled, turns = zip(*entries, strict=True)
        return StepBatch(plan.step, rids, rows, starts, counts, sampled, tokens, turns, bool(plan.waits), inputs,
                         before)

    @cached_property
    def first(self) -> tuple[int, ...]:
        """[B+1]: where the tokens of each entry begin."""
        return (0, *accumulate(self.count))

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """The position behind each entry: what its last token sees."""
        return tuple(map(add, self.start, self.count))

    @cached_property
    def sample_rows(self) -> tuple[int, ...]:
        return tuple(compress(self.rows, self.samples))

    @property
    def sampled(self) -> tuple[RequestId, ...]:
        """Requests that sample, in order."""
        return tuple([rid for rid, turn in compress(zip(self.rids, self.turns, strict=True), self.samples) if not turn])

    @property
    def takes(self) -> list[tuple[RequestId, int]]:
        """Whose each entry is that samples, and the draft that it takes, -1: none."""
        return [(rid, self.tokens[end - 1] if turn else -1) for rid, samples, turn, end in
                zip(self.rids, self.samples, self.turns, self.first[1:], strict=True) if samples]

    @cached_property
    def _numbers(self) -> npt.NDArray[np.int64]:
        return np.array((self.rows, self.start, self.count, self.first[:-1]))

    @property
    def launched(self) -> dict[str, Line]:
        """The lines of a step that is launched."""
        row_T: Line = self.rows
        position_T: Line = self.start
        if len(self.tokens) > len(self.rows):
            row_B, start_B, count_B, first_B = self._numbers
            row_T = row_B.repeat(count_B)
            position_T = (start_B - first_B).repeat(count_B) + np.arange(len(self.tokens))
        return {"id_T": self.heard or self.tokens, "row_T": row_T, "position_T": position_T,
                "at_S": [end - 1 for end in compress(self.first[1:], self.samples)]}

    @property
    def mixed(self) -> dict[str, Line]:
        """All of them, as one that is captured with prompts reads them."""
        row, start, count, first = self._numbers
        decode, sample, end = (count == 1).nonzero()[0], np.array(self.samples).nonzero()[0], start + count
        at_D = first[decode]
        decode_T = np.full(len(self.tokens), -1)
        decode_T[at_D] = np.arange(len(decode))
        return self.launched | {
            "decode_T": decode_T, "row_B": row, "context_B": np.where(count == 1, 1, end), "start_B1": self.first,
            "at_D": at_D, "row_D": row[decode], "context_D": end[decode],
            "row_S": row[sample], "position_S": end[sample] - 1}

    def on(self, device: torch.device) -> list[Tensor]:
        """`launched`, int64, by one copy that the host does not wait for."""
        lines, short = self.launched.values(), len(self.tokens) == len(self.rows)
        values = [*chain.from_iterable(lines)] if short else np.concatenate([*lines], dtype=np.int64, casting="unsafe")
        return list(torch.split(on_device(values, device, torch.int64), [len(line) for line in lines]))
