"""Links between stages in processes of their own: hidden states and sampled tokens over socket pairs.

A thread takes what arrives off the socket at once, so that whoever sends never waits for a step of
whoever receives. What lies there is bounded by the plans in flight.

    T tokens of the step   D model dim   S chosen tokens of a query
"""
from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Generic, TypeVar

import msgspec
import torch
from torch import Tensor

from penstock.core.plan import StepId
from penstock.exec.pipeline.beats import STAGE, Waits
from penstock.exec.pipeline.wire import Channel, encode
from penstock.exec.step.links import Sampled
from penstock.model.base import Boundary

# Step; T; D of h; D of delta, 0: none; S, 0: none; how many inputs, and one more, 0: none; how many taps.
_HEAD = struct.Struct("<QIIIIII")
_SAMPLED = msgspec.msgpack.Decoder(tuple[StepId, Sampled])
T = TypeVar("T")


class PutBoundary:
    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def put(self, step: StepId, what: Boundary) -> None:
        h_TD, delta_TD, chosen_TS, inputs, tapped = what
        self._channel.send(_HEAD.pack(step, *h_TD.shape, 0 if delta_TD is None else delta_TD.shape[1],
                                      0 if chosen_TS is None else chosen_TS.shape[1],
                                      0 if inputs is None else len(inputs) + 1, len(tapped)))
        if inputs:
            self._channel.send(struct.pack(f"<{len(inputs)}I", *inputs))
        for part in (h_TD, delta_TD, chosen_TS, *tapped):
            if part is not None:
                self._channel.send(part.contiguous().view(-1).view(torch.uint8).cpu().numpy().data)


class PutSampled:
    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def put(self, step: StepId, what: Sampled) -> None:
        self._channel.send(encode((step, what)))


class Taker(Generic[T]):
    """What `receive` reads off a link, by step. A link that ends leaves `take` waiting: the front, which
    has seen it too, ends this process."""

    def __init__(self, receive: Callable[[], tuple[StepId, T] | None], waits: Waits) -> None:
        self._waits = waits
        self._arrived: SimpleQueue[tuple[StepId, T]] = SimpleQueue()
        self.taken_at = 0.0                         # monotonic seconds: when the last `take` ended
        threading.Thread(target=self._run, args=(receive,), daemon=True, name="penstock-link").start()

    def _run(self, receive: Callable[[], tuple[StepId, T] | None]) -> None:
        while (found := receive()) is not None:
            self._arrived.put(found)

    def take(self, step: StepId) -> T:
        with self._waits.on(STAGE):
            found, what = self._arrived.get()
        assert found == step, f"step {step} was handed what step {found} made"
        self.taken_at = time.monotonic()
        return what


def boundaries(channel: Channel, dtype: torch.dtype,
               device: str) -> Callable[[], tuple[StepId, Boundary] | None]:
    """Reads what PutBoundary sends, onto the device."""
    def part(rows: int, columns: int, kind: torch.dtype) -> Tensor | None:
        data = channel.read(rows * columns * kind.itemsize)
        return None if data is None else torch.frombuffer(
            data, dtype=kind).view(rows, columns).to(device)

    def receive() -> tuple[StepId, Boundary] | None:
        if (head := channel.read(_HEAD.size)) is None:
            return None
        step, rows, hidden, delta, chosen, num, taps = _HEAD.unpack(head)
        told = channel.read(4 * (num - 1)) if num > 1 else b""
        h_TD = part(rows, hidden, dtype)
        delta_TD = part(rows, delta, dtype) if delta else None
        chosen_TS = part(rows, chosen, torch.int32) if chosen else None
        tapped = tuple(x_TD for _ in range(taps) if (x_TD := part(rows, hidden, dtype)) is not None)
        if (told is None or h_TD is None or (delta and delta_TD is None) or (chosen and chosen_TS is None)
                or len(tapped) < taps):
            return None
        inputs = struct.unpack(f"<{num - 1}I", told) if num else None
        return StepId(step), Boundary(h_TD, delta_TD, chosen_TS, inputs, tapped)
    return receive


def sampled(channel: Channel) -> Callable[[], tuple[StepId, Sampled] | None]:
    """Reads what PutSampled sends."""
    def receive() -> tuple[StepId, Sampled] | None:
        body = channel.receive()
        return None if body is None else _SAMPLED.decode(body)
    return receive
