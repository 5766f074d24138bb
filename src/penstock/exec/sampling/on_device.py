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

    def again(self, logits_BV: Tensor, token_B: Tensor, states: Sequence[Sampling],
              rows: Sequence[int]) -> None:
        """`draw` from other logits for rows, by table index, that have just drawn, with the same uniforms."""
        drew = [row for row, s in zip(rows, states, strict=True) if s.params.temperature > 0]
        if drew:
            self._stream_R2[on_device(drew, self._device, torch.int64), 1] -= 1
            row_B = on_device(rows, self._device, torch.int32)
            self.draw(logits_BV, token_B, row_B, torch.zeros_like(row_B))
