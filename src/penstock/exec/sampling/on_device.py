"""What a CUDA device knows of each row's sampling, so that it draws the next token without the host.

Of requests whose tokens follow from temperature, top-k, top-p, min-p and seed. What else there is (grammars,
penalties, bias, logprobs, forced tokens, minimal lengths) `sampler.py` does behind the captured steps, and
these tokens are provisional.

    B rows of a step   R rows of the tables   V vocabulary
"""
from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.exec.sampling.sampler import Sampling
from penstock.exec.sampling.verify import counted
from penstock.exec.step.edits import Edits
from penstock.kernels.sample import draw
from penstock.kernels.types.ragged import on_device


class Draws:
    """Changed by binds and by the draws themselves only. Has one row more than the tables.

    backend   the implementation of `kernels.sample.draw` that draws
    """

    def __init__(self, vocab_size: int, rows: int, device: torch.device, backend: str) -> None:
        self._vocab, self._device, self._draw = vocab_size, device, draw.OP.use(backend)
        self._params_R4 = torch.zeros(rows + 1, 4, dtype=torch.float64, device=device)
        self._stream_R2 = torch.zeros(rows + 1, 2, dtype=torch.int64, device=device)

    def bind(self, row: int, s: Sampling, edits: Edits) -> None:
        """Once they are applied `row` samples for `s`, of which all tokens in `s.outputs` have retired."""
        p, key = s.params, s.key - (1 << 64) if s.key >> 63 else s.key
        top_k = p.top_k if 1 <= p.top_k < self._vocab else self._vocab
        edits.put(self._params_R4, enumerate((p.temperature, top_k, p.top_p, p.min_p), 4 * row))
        edits.put(self._stream_R2, enumerate((key, len(s.outputs)), 2 * row))

    def draw(self, logits_BV: Tensor, token_B: Tensor, row_B: Tensor, position_B: Tensor) -> None:
        """Overwrites the tokens of rows that draw: see `kernels.sample.draw`."""
        self._draw(logits_BV, token_B, row_B, position_B, self._params_R4, self._stream_R2)

    def checked(self, logits_BV: Tensor, last_R: Tensor, row_B: Tensor, index_B: Tensor, position_B: Tensor,
                id_B: Tensor, turn_B: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """answer_3B int64, of positions of which some follow others of their row (`exec.drafts`): the token
        that the logits of each say, whether they are finite, and `id_B`. And counts_B bool: which count.

        row_B, position_B   int32; position -1: padding     index_B   int64, into last_R; padding: its last
        id_B                int32: what a position that follows took as its input; else -1
        turn_B              int32, below `width`: 0 for the first position of a row, then 1, 2, ...

        Each draws with the uniform of its own index. The last that counts is the row's last token, and uniforms of
        those behind it are not used.
        """
        best_B, token_B = logits_BV.max(-1)
        for turn in range(width):
            self.draw(logits_BV, token_B, row_B, position_B.where(turn_B == turn, -1))
        fine_B, first_B = best_B.abs() < float("inf"), turn_B == 0
        counts_B = counted(token_B, id_B, fine_B, first_B)
        ends_B = counts_B & ~(counts_B & ~first_B).roll(-1)
        last_R.index_copy_(0, torch.where(ends_B, index_B, len(last_R) - 1), token_B)
        unused_B = ~counts_B & (position_B >= 0) & (self._params_R4[index_B, 0] > 0)
        self._stream_R2[:, 1].index_add_(0, index_B, -unused_B.long())
        return torch.stack((token_B, fine_B.long(), id_B.long())), counts_B

    def again(self, logits_BV: Tensor, token_B: Tensor, states: Sequence[Sampling],
              rows: Sequence[int]) -> None:
        """`draw` from other logits for rows, by table index, with the uniforms of `len(outputs)`."""
        drew = [(row, s) for row, s in zip(rows, states, strict=True) if s.params.temperature > 0]
        if drew:
            of = [row for row, _ in drew] + [len(s.outputs) for _, s in drew]
            at_b, index_b = on_device(of, self._device, torch.int64).view(2, -1)
            self._stream_R2[at_b, 1] = index_b
            row_B = on_device(rows, self._device, torch.int32)
            self.draw(logits_BV, token_B, row_B, torch.zeros_like(row_B))
