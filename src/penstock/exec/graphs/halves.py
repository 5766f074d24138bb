"""A decode step in two halves of its rows: while one's misses come from the host, the other's layers run.

Alone a step uses the link and the processors in turn: a layer's misses are known when it has chosen, and it attends
when they are there. Halves read the weights twice, which costs less than it gives where a step misses much.
"""
from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from penstock.kernels.fused.step import Queries

LEAST = 16              # rows of a step: of fewer, weights read twice cost what the copy beside them saves (an H200)
# A step is worth halving when what it misses, so many times, is more than its weights: the ratio of memory to link.
LINK_SHARE = 64


class Turns:
    """Two halves are recorded in turn, each up to its next copy, and their copies go over the link in that order,
    one at a time: two at once would end together, and then both halves would compute and none copy."""

    def __init__(self, alone: bool) -> None:
        """alone: one half is recorded behind the other, and does not wait for it."""
        self._may, self._alone, self.last = [threading.Semaphore(not i) for i in range(2)], alone, None

    def begin(self, half: int) -> None:
        if not self._alone:
            self._may[half].acquire()

    def hand_over(self, half: int) -> None:
        if not self._alone:
            self._may[1 - half].release()
            self._may[half].acquire()

    def end(self, half: int) -> None:
        """What is left of the other half is recorded without a wait."""
        self._alone = True
        self._may[1 - half].release()


@dataclass(slots=True)
class Copies:
    """Where a half copies its misses: on a stream of their own, which goes before others where the device has
    room for one."""

    half: int
    stream: Any
    turns: Turns

    @contextlib.contextmanager
    def of(self, layer: int) -> Iterator[None]:
        here = torch.cuda.current_stream()
        self.stream.wait_stream(here)
        if self.turns.last is not None:
            self.stream.wait_event(self.turns.last)
        with torch.cuda.stream(self.stream):
            yield
            self.turns.last = self.stream.record_event()
        here.wait_stream(self.stream)
        self.turns.hand_over(self.half)


class Halves:
    """The streams of such steps, one for all that are captured: cuBLAS keeps a workspace for each."""

    def __init__(self) -> None:
        self._side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._copies = [torch.cuda.Stream(priority=-1) for _ in range(2)]  # type: ignore[no-untyped-call]

    def run(self, queries: Queries, forward: Callable[[Queries, Copies], Tensor]) -> Tensor:
        """hidden_BD of all queries. forward: the layers of some of them. Capturable: then a thread of its own
        records the second half."""
        here, parts = torch.cuda.current_stream(), halved(queries)
        together = torch.cuda.is_current_stream_capturing()
        turns, hidden, faults = Turns(not together), list[Any]((None, None)), list[BaseException]()
        self._side.wait_stream(here)

        def half(i: int, stream: Any) -> None:
            turns.begin(i)
            try:
                with torch.inference_mode(), torch.cuda.stream(stream):
                    hidden[i] = forward(parts[i], Copies(i, self._copies[i], turns))
            except BaseException as fault:
                faults.append(fault)
            turns.end(i)
        if together:
            second = threading.Thread(target=half, args=(1, self._side), name="penstock-half")
            second.start()
            half(0, here)
            second.join()
        else:
            half(0, here)
            half(1, self._side)
        if faults:
            raise faults[0]
        here.wait_stream(self._side)
        return torch.cat(hidden)


def halved(queries: Queries) -> Sequence[Queries]:
    """Both halves, whose tensors are dense."""
    size = len(queries.row_B)
    half = (size + 1) // 2

    def part(at: slice) -> Queries:
        given = {of.name: getattr(queries, of.name) for of in fields(queries)}
        own: dict[str, Any] = {name: x if x is None else x[..., at].contiguous() for name, x in given.items()}
        return replace(queries, **own)
    return part(slice(0, half)), part(slice(half, size))
