"""What grammars admit, onto logits: packed masks, filled on the host while the device computes.

Owns the memory that masks are filled into, which a device copies from. Knows no sampling and no rows.

    B rows of logits   M of them with a grammar   W words of 32 tokens   V vocabulary
"""
from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.exec.sampling.grammar import Matcher
from penstock.kernels.sample import mask
from penstock.kernels.types.ragged import on_device

STAGES = 4                      # buffers: of so many calls a device may still copy


class Masks:
    """Not thread-safe. `backend`: the implementation of `kernels.sample.mask`."""

    def __init__(self, device: torch.device, backend: str) -> None:
        self._device, self._mask = device, mask.OP.use(backend)
        pinned = device.type == "cuda"
        self._words: list[Tensor] = [torch.empty(0, 0, dtype=torch.int32)] * (STAGES if pinned else 1)
        self._copied = [torch.cuda.Event() for _ in range(STAGES)] if pinned else []  # type: ignore[no-untyped-call]
        self._turn = 0

    def apply(self, logits_BV: Tensor, at: Sequence[int], matchers: Sequence[Matcher],
              outputs: Sequence[Sequence[int]]) -> tuple[Tensor, list[str]]:
        """Overwrite what is not admitted after `outputs` of rows `at`, by minus infinity. Does not wait for
        what the device computes, only for grammars.

        logits_BV   float32, dense
        Returns     ok_M, as `kernels.sample.mask.Mask`, on the device, and of each row "" or why its grammar
                    gave no mask: then none of its tokens is admitted.
        """
        words_MW = self._buffer(len(at), max(m.words() for m in matchers))
        faults = []
        for words_W, matcher, said in zip(words_MW, matchers, outputs, strict=True):
            faults.append(matcher.fill(said, words_W.data_ptr()))
            if faults[-1]:
                words_W.zero_()
        there_MW = words_MW
        if self._copied:
            there_MW = words_MW.to(self._device, non_blocking=True)
            self._copied[self._turn].record()
        return self._mask(logits_BV, there_MW, on_device(at, self._device, torch.int64)), faults

    def _buffer(self, masks: int, words: int) -> Tensor:
        """int32 [masks, words] of the host that no device reads any more."""
        self._turn = (self._turn + 1) % len(self._words)
        if self._copied:
            self._copied[self._turn].synchronize()
        found = self._words[self._turn]
        if found.numel() < masks * words:
            rows = 1 << (masks - 1).bit_length()
            found = self._words[self._turn] = torch.empty(rows * words, dtype=torch.int32,
                                                          pin_memory=bool(self._copied))
        return found.view(-1)[:masks * words].view(masks, words)
