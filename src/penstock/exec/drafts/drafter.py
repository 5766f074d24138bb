"""Who says what a row will say next. Knows tokens; refuses to know rows, pages and how drafts are checked."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from penstock.config.settings.tree import Config
from penstock.core.plan import RequestId, Row
from penstock.exec.drafts.device import GpuNGram, OnDevice


@dataclass(frozen=True, slots=True)
class DraftQuery:
    """`rid` has said `outputs` behind `prompt`, and may say `most` further tokens in the step to come, which
    computes its last one in `row`."""

    rid: RequestId
    row: Row
    prompt: Sequence[int]
    outputs: Sequence[int]
    most: int


class Drafter(Protocol):
    """Whatever it proposes, no token changes: one that is wrong costs its position of a step."""

    name: str

    def propose(self, asks: Sequence[DraftQuery]) -> Sequence[Sequence[int]]:
        """Of each the tokens that come next, in their order: none to `most`. A list that is longer, or has an
        id outside the vocabulary, is dropped."""
        ...

    def forget(self, rid: RequestId) -> None:
        """Its outputs may be others from now on, or it has ended."""
        ...

    def on_device(self, rows: int, max_len: int, device: torch.device) -> OnDevice | None:
        """One that proposes there, of tables with so many rows; None: it asks the host."""
        return None


class NGram(Drafter):
    """Prompt lookup: what followed the newest occurrence of the last tokens, of as many of them as occur
    before, `most` to `least`, in prompt and answer.

    Source    prompt lookup decoding, as vLLM's method ngram
    """

    name = "ngram"

    def __init__(self, least: int = 2, most: int = 4) -> None:
        """Tokens that must be the same: 1 <= least <= most."""
        assert 1 <= least <= most, f"n-grams of {least} to {most} tokens"
        self._least, self._most = least, most
        self._known: dict[RequestId, tuple[npt.NDArray[np.int32], int]] = {}    # a buffer, tokens in it

    def propose(self, asks: Sequence[DraftQuery]) -> Sequence[Sequence[int]]:
        return [self._of(self._history(ask), ask.most) for ask in asks]

    def _history(self, ask: DraftQuery) -> npt.NDArray[np.int32]:
        num_prompt, size = len(ask.prompt), len(ask.prompt) + len(ask.outputs)
        buffer, had = self._known.get(ask.rid) or (np.array(ask.prompt, np.int32), num_prompt)
        if size > len(buffer):
            buffer = np.concatenate((buffer[:had], np.empty(max(256, size // 4) + size - had, np.int32)))
        if size > had:
            buffer[had:size] = ask.outputs[had - num_prompt:]
        self._known[ask.rid] = buffer, size
        return buffer[:size]

    def _of(self, tokens: npt.NDArray[np.int32], most: int) -> Sequence[int]:
        last = len(tokens) - 1
        if last < self._least:
            return ()
        # Where an n-gram ends, before the last one, for n = 1, 2, ...: each n leaves a part of those before.
        ends = np.flatnonzero(tokens[:last] == tokens[last])
        for n in range(2, self._most + 1):
            if n > self._least and not len(ends):
                break
            longer = ends[(ends >= n - 1) & (tokens[ends - (n - 1)] == tokens[last - (n - 1)])]
            if n > self._least and not len(longer):
                break
            ends = longer
        if not len(ends):
            return ()
        at = int(ends[-1]) + 1
        found: list[int] = tokens[at:at + most].tolist()
        return found

    def forget(self, rid: RequestId) -> None:
        self._known.pop(rid, None)

    def on_device(self, rows: int, max_len: int, device: torch.device) -> OnDevice | None:
        return GpuNGram(rows, max_len, self._least, self._most, device)


class OnLast(Drafter):
    """Of a stage in front of the one with the layer that drafts, whose drafts come with its tokens
    (`step.links.Sampled`)."""

    def __init__(self, name: str) -> None:
        """name: of the other."""
        self.name = name

    def propose(self, asks: Sequence[DraftQuery]) -> Sequence[Sequence[int]]:
        return [()] * len(asks)

    def forget(self, rid: RequestId) -> None:
        return


def drafter_of(config: Config) -> Drafter | None:
    """On a rank that has no layer that drafts. None: a row says one token a step. A prefill instance's rows do not
    decode, but a layer's KV grows there."""
    schedule = config.schedule
    if schedule.speculative_method in ("mtp", "eagle3"):
        return OnLast(schedule.speculative_method) if config.device.pp > 1 else None
    if schedule.speculative_method is None or config.pair.disaggregation_mode == "prefill":
        return None
    return NGram(schedule.prompt_lookup_min, schedule.prompt_lookup_max)
