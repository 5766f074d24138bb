"""A decode step in two halves of its rows: while one's misses come from the host, the other's layers run.

Alone a step uses the link and the processors in turn: a layer's misses are known when it has chosen, and it attends
when they are there. Halves read the weights twice, which costs less than it gives where a step misses much.
"""
from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from penstock.kernels.fused.step import Queries

LEAST = 16              # rows of a step: of fewer, weights read twice cost what the copy beside them saves (an H200)
# A step is worth halving when what it misses, so many times, is more than its weights: the ratio of memory to link.
LINK_SHARE = 64


@dataclass(slots=True)
class Copies:
    """Where a half copies its misses: on a stream of their own, which goes before others where the device has
    room for one, layer by layer behind those of the half before it."""

    stream: Any
    before: Copies | None = None
    done: dict[int, Any] = field(default_factory=dict)

    @contextlib.contextmanager
    def of(self, layer: int) -> Iterator[None]:
        here = torch.cuda.current_stream()
        self.stream.wait_stream(here)
        if self.before is not None:
            self.stream.wait_event(self.before.done[layer])
        with torch.cuda.stream(self.stream):
            yield
            self.done[layer] = self.stream.record_event()
        here.wait_stream(self.stream)


class Halves:
    """The streams of such steps, one for all that are captured: cuBLAS keeps a workspace for each."""

    def __init__(self) -> None:
        self._side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._copies = [torch.cuda.Stream(priority=-1) for _ in range(2)]  # type: ignore[no-untyped-call]

    def run(self, queries: Queries, forward: Callable[[Queries, Copies], Tensor]) -> Tensor:
        """hidden_BD of all queries. forward: the layers of some of them. Capturable."""
        here = torch.cuda.current_stream()
        first, second = halved(queries)
        self._side.wait_stream(here)
        copies = Copies(self._copies[0])
        hidden = [forward(first, copies)]
        with torch.cuda.stream(self._side):
            hidden.append(forward(second, Copies(self._copies[1], copies)))
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
