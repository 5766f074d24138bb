"""Logprobs of prompt tokens: what the model thought of each, from the hidden states of the step that read it.

Owns who asked. Knows no pages and no sampling.

    T tokens of the step   N of them whose next token is told   V vocabulary   K best ones   D model dim
"""
from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from penstock.config.request.params import SamplingParams
from penstock.config.request.scores import Scores
from penstock.core.plan import RequestId
from penstock.exec.step.step_batch import StepBatch

SLICE_BYTES = 64 << 20              # of logits at a time

# Request, first token, and (logprob_N float32, rank_N int32, ids_NK int32, best_NK float32) on their way to
# the host.
Read: TypeAlias = tuple[RequestId, int, list[Tensor]]


class PromptReader:
    """Of the last stage."""

    def __init__(self, logits: Callable[[Tensor], Tensor], vocab_size: int) -> None:
        """logits: hidden_ND behind the final norm to logits_NV float32."""
        self._logits, self._vocab = logits, vocab_size
        self._open: dict[RequestId, tuple[tuple[int, ...], SamplingParams]] = {}

    def open(self, rid: RequestId, prompt: tuple[int, ...], params: SamplingParams) -> None:
        if params.prompt_logprobs is not None:
            self._open[rid] = prompt, params

    def close(self, rid: RequestId) -> None:
        self._open.pop(rid, None)

    def wants(self, batch: StepBatch) -> bool:
        """Whether hidden states of this step are read beside those that sample."""
        return bool(self._open) and any(
            rid in self._open and self._range(rid, start, count)
            for rid, start, count in zip(batch.rids, batch.start, batch.count, strict=True))

    def _range(self, rid: RequestId, start: int, count: int) -> range:
        """Tokens of the prompt that follow on one of this chunk."""
        prompt, params = self._open[rid]
        return range(max(start + 1, params.prompt_from), min(start + count + 1, len(prompt)))

    def read(self, batch: StepBatch, hidden_TD: Tensor) -> list[Read]:
        """Of each part of a prompt in the step what belongs to its tokens. Does not wait for a device."""
        found, at = [], 0
        for rid, start, count in zip(batch.rids, batch.start, batch.count, strict=True):
            if rid in self._open and (told := self._range(rid, start, count)):
                prompt, params = self._open[rid]
                first = at + told.start - 1 - start
                hidden_ND = hidden_TD[first:first + len(told)]
                next_N = torch.tensor(prompt[told.start:told.stop], device=hidden_TD.device)
                found.append((rid, told.start, self._scores(hidden_ND, next_N, params.prompt_logprobs or 0)))
            at += count
        return found

    def _scores(self, hidden_ND: Tensor, next_N: Tensor, best: int) -> list[Tensor]:
        size = max(1, SLICE_BYTES // (4 * self._vocab))
        columns = zip(*(self._slice(self._logits(hidden_ND[at:at + size]), next_N[at:at + size], best)
                        for at in range(0, len(hidden_ND), size)), strict=True)
        return [torch.cat(parts).to("cpu", non_blocking=True) for parts in columns]

    @staticmethod
    def _slice(logits_NV: Tensor, next_N: Tensor, best: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        own_N1 = logits_NV.gather(1, next_N.unsqueeze(1))
        rank_N = (logits_NV > own_N1).sum(-1, dtype=torch.int32) + 1
        sum_N1 = logits_NV.logsumexp(-1, keepdim=True)
        top_NK = logits_NV.topk(best, dim=-1)
        return (own_N1 - sum_N1).squeeze(1), rank_N, top_NK.indices.int(), top_NK.values - sum_N1


def landed(reads: list[Read]) -> tuple[tuple[RequestId, Scores], ...]:
    """Once the step has executed."""
    return tuple((rid, Scores(first, *(column.numpy().tobytes() for column in columns)))
                 for rid, first, columns in reads)
