"""Sums of TP ranks whose GPUs write into each other's memory: maps it, and tries whether that works.

What is in that memory is the business of `kernels.triton.triton_ranks`.
"""
from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from penstock.memory.across import allocated, reached
from penstock.model.parts import TpRank

_LOOKS, _FOREVER = 1 << 20, 1 << 62         # for another TP rank: in the trial, a second or two; then
_TRIED = 1 << 16                            # elements


class P2PAllReduce:
    """TP ranks of one machine, each with a GPU of its own. They call it alike."""

    def __init__(self, tp_rank: TpRank, exchange: Callable[[str, bytes], list[bytes]]) -> None:
        """exchange(key, value): the values of all TP ranks, in order. Raises RuntimeError, on all of them, where
        one cannot write into another's memory, or what it writes is not seen."""
        from penstock.kernels.triton import triton_ranks  # needs Triton
        self._kernel, self._rank = triton_ranks, tp_rank.index
        nbytes = triton_ranks.inbox_bytes(tp_rank.size)
        self._inbox, handle = allocated(nbytes)
        self._inbox.zero_()
        self._count = triton_ranks.counts(0)
        torch.cuda.synchronize()
        handles, why = exchange("inbox", handle), b""
        self._others = []
        try:
            self._others = [reached(other, nbytes, torch.cuda.current_device())
                            for i, other in enumerate(handles) if i != tp_rank.index]
        except RuntimeError as e:
            why = str(e).encode()
        self._agree(exchange("reached", why))
        addresses = [one.address for one in self._others]
        addresses.insert(tp_rank.index, self._inbox.data_ptr())
        self._inboxes = torch.tensor(addresses, device="cuda")
        self._agree(exchange("tried", self._try(lambda: exchange("compiled", b""))))

    def _try(self, others: Callable[[], object]) -> bytes:
        """Why it does not work here; b"": it does. A first sum waits for nobody, as it may be compiled first;
        `others` returns when all have made it."""
        size = len(self._inboxes)
        for looks in (0, _LOOKS):
            self._count[-1] = looks
            for again in range(4 if looks else 1):
                own = torch.arange(_TRIED, device="cuda").remainder(251 + again).float() + self._rank
                whole = (own - self._rank) * size + sum(range(size))
                self.all_reduce(own)
                seen = torch.equal(own, whole)              # waits for the sum
            others() if not looks else None
            if looks and not seen:
                return b"what one GPU writes into another's memory is not seen there"
        self._count[-1] = _FOREVER
        return b""

    @staticmethod
    def _agree(told: list[bytes]) -> None:
        for why in told:
            if why:
                raise RuntimeError(why.decode())

    def takes(self, x: Tensor) -> bool:
        return self._kernel.takes(x)

    def all_reduce(self, x: Tensor) -> None:
        """The sum over the TP ranks, in place, the same bits on all; x is f32 or bf16. Capturable."""
        self._kernel.add(x, self._inboxes, self._count, self._rank)
