"""The lanes of a stage in processes of their own: sums and joins over gloo, on the loopback interface.

Owns the process group. A lane that is gone is a ConnectionError for the others, as any neighbour is.

    T tokens of the step   D model dim   B rows   V words
"""
from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.model.parts import Lane, even

INTERFACE = {"GLOO_SOCKET_IFNAME": "lo"}        # for the environment of the ranks: nobody else connects


class GlooLanes:
    """`model.base.Lanes`."""

    def __init__(self, meeting: int, lane: Lane, timeout_s: float) -> None:
        """meeting: descriptor of memory of the lanes of this stage alone, where they meet; returns when
        all have. timeout_s: of one call."""
        self._lane, self._timeout_s = lane, timeout_s
        # Its name in /proc is good for who has the descriptor: no file is left, no port asks who comes.
        met = dist.FileStore(f"/proc/self/fd/{meeting}", lane.size)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=met, rank=lane.index, world_size=lane.size,
                                timeout=timedelta(seconds=timeout_s))

    def add(self, x_TD: Tensor) -> None:
        self._call(dist.all_reduce, x_TD)

    def join(self, x_BV: Tensor, num: int) -> Tensor:
        shares = even(num, self._lane.size)
        padded_BV = x_BV.new_zeros(len(x_BV), shares[0])        # the first has the most
        padded_BV[:, :x_BV.shape[1]] = x_BV
        found = [torch.empty_like(padded_BV) for _ in shares]
        self._call(dist.all_gather, found, padded_BV)
        return torch.cat([part[:, :share] for part, share in zip(found, shares, strict=True)], 1)

    def _call(self, what: Callable[..., object], *tensors: object) -> None:
        try:
            what(*tensors)
        except RuntimeError as e:
            if "Timed out" in str(e):
                print(f"lane {self._lane.index} has waited {self._timeout_s:g} s for another of its stage",
                      file=sys.stderr, flush=True)
            raise ConnectionError("another lane is gone, or hangs") from e
