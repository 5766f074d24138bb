"""Links between stages in processes of their own: hidden states and sampled tokens over socket pairs.

Between GPUs of one machine hidden states go from memory to memory, and only their place goes over the socket. A
thread takes what arrives off the socket at once, so that whoever sends never waits for a step of whoever
receives, but for one of the slots in its memory. What lies there is bounded by the plans in flight.

    T tokens of the step   D model dim   S chosen tokens of a query
"""
from __future__ import annotations

import contextlib
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Generic, TypeAlias, TypeVar

import torch
from torch import Tensor

from penstock.config.streams.frames import Kinds, Message
from penstock.core.plan import StepId
from penstock.exec.pipeline.hangs import STAGE, Waits
from penstock.exec.pipeline.wire import Channel
from penstock.exec.step.links import Sampled
from penstock.memory import across
from penstock.model.base import Boundary

# Step; T; D of h; D of delta, 0: none; S, 0: none; how many inputs, and one more, 0: none; how many taps;
# columns of what layers add of the token, 0: none; where in an inbox the parts are, and one more, 0: they follow.
_HEAD = struct.Struct("<QIIIIIIII")
_INBOX = struct.Struct(f"<Q{across.HANDLE_BYTES}s")
_SLOTS, _ALIGNED = 2, 256
T = TypeVar("T")


class SampledTokens(Message, frozen=True):
    step: StepId
    what: Sampled


SAMPLED: Kinds[SampledTokens] = Kinds("stages", (SampledTokens,), 1 << 32)
LinkChannel: TypeAlias = Channel[SampledTokens]


def _behind(at: int, nbytes: int) -> int:
    return -(-(at + nbytes) // _ALIGNED) * _ALIGNED


class Inbox:
    """Memory of this stage's GPU that the stage in front, on another GPU of the machine, writes into: one slot
    holds the step that runs, the other the next, and behind them is how many steps have arrived. The place of a
    step is told when its copy has begun: the device waits for its end. How many slots are free again it writes into
    memory of the stage in front, whose device waits for that."""

    def __init__(self, channel: LinkChannel, nbytes: int) -> None:
        """nbytes: of the largest step."""
        self._channel, self.nbytes = channel, _behind(0, nbytes)
        self.memory, handle = across.allocated(_SLOTS * self.nbytes + _ALIGNED)
        self.memory[-_ALIGNED:].zero_()
        torch.cuda.synchronize()
        self.lent = deque[bool]()               # of what was received and not freed: whether it has a slot
        self._arrived, self._freed = 0, 0
        self._front: across.TensorMemory | None = None
        self._device = torch.cuda.current_device()
        channel.send(_INBOX.pack(self.nbytes, handle))

    def reach(self) -> bool:
        """What the stage in front answers to the handle, before all else; False: it is gone."""
        if (told := self._channel.read(_INBOX.size)) is None:
            return False
        nbytes, handle = _INBOX.unpack(told)
        if nbytes:                                              # GPUs that reach each other do so both ways
            self._front = across.reached(handle, nbytes, self._device)
        return True

    def wait(self) -> None:
        """What is launched from now on reads what was received first of all that is lent."""
        if self.lent[0]:
            self._arrived += 1
            across.wait_flag(self.memory.data_ptr() + _SLOTS * self.nbytes, self._arrived,
                             torch.cuda.current_stream().cuda_stream)

    def free(self) -> None:
        """That is not read by what is launched from now on."""
        if self.lent.popleft():
            assert self._front is not None
            self._freed += 1
            across.flag(self._front.address, self._freed, torch.cuda.current_stream().cuda_stream)


class PutBoundary:
    """To the stage behind: over the socket, or into its `Inbox`, if it has one and the step fits."""

    def __init__(self, channel: LinkChannel, near: bool = False) -> None:
        """near: the other end has an inbox, which is asked for with the first step: by then it has loaded."""
        self._channel, self._near = channel, near
        self._inbox: across.TensorMemory | None = None
        self._nbytes, self._used, self._freed = 0, 0, torch.empty(0)

    def _reach(self) -> None:
        self._near = False
        if (told := self._channel.read(_INBOX.size)) is not None:
            self._nbytes, handle = _INBOX.unpack(told)
            with contextlib.suppress(RuntimeError):             # these GPUs do not reach each other
                self._inbox = across.reached(handle, _SLOTS * self._nbytes + _ALIGNED,
                                              torch.cuda.current_device())
        answer = 0, b""
        if self._inbox is not None:
            self._freed, freed = across.allocated(_ALIGNED)
            self._freed.zero_()
            torch.cuda.synchronize()
            answer = _ALIGNED, freed
        self._channel.send(_INBOX.pack(*answer))

    def put(self, step: StepId, what: Boundary) -> None:
        if self._near:
            self._reach()
        h_TD, delta_TD, chosen_TS, inputs, tapped, own_TX = what
        parts, slot = [part.contiguous() for part in what.parts], 0
        if self._inbox is not None and sum(_behind(0, part.nbytes) for part in parts) <= self._nbytes:
            slot = 1 + self._write(self._inbox.address, parts)
        self._channel.send(_HEAD.pack(step, *h_TD.shape, 0 if delta_TD is None else delta_TD.shape[1],
                                      0 if chosen_TS is None else chosen_TS.shape[1],
                                      0 if inputs is None else len(inputs) + 1, len(tapped),
                                      0 if own_TX is None else own_TX.shape[1], slot))
        if inputs:
            self._channel.send(struct.pack(f"<{len(inputs)}I", *inputs))
        for part in () if slot else parts:
            self._channel.send(part.view(-1).view(torch.uint8).cpu().numpy().data)

    def _write(self, inbox: int, parts: list[Tensor]) -> int:
        """The slot in which they will be, once it is free."""
        slot = self._used % _SLOTS
        at, stream = slot * self._nbytes, torch.cuda.current_stream().cuda_stream
        self._used += 1
        across.wait_flag(self._freed.data_ptr(), self._used - _SLOTS, stream)
        for part in parts:
            across.write(inbox + at, part, stream)
            at = _behind(at, part.nbytes)
        across.flag(inbox + _SLOTS * self._nbytes, self._used, stream)
        return slot


class TokenInbox:
    """`Sees`: memory of the first stage's GPU that the last stage's writes last tokens into, and behind them how
    many steps have sampled."""

    def __init__(self, channel: LinkChannel, rows: int) -> None:
        self._channel, self._nbytes, self._expected = channel, _behind(0, 8 * rows), 0
        self._memory, handle = across.allocated(self._nbytes + _ALIGNED)
        self._memory.zero_()
        torch.cuda.synchronize()
        channel.send(_INBOX.pack(self._nbytes, handle))

    def reached(self) -> bool:
        """What the last stage says of it."""
        return bytes(self._channel.read(1) or b"") == b"\1"

    def expect(self) -> int:
        self._expected += 1
        return self._expected

    def wait(self, number: int, last_R: Tensor) -> None:
        across.wait_flag(self._memory.data_ptr() + self._nbytes, number, torch.cuda.current_stream().cuda_stream)
        last_R.copy_(self._memory[:last_R.nbytes].view(last_R.dtype))


class PutSampled:
    def __init__(self, channel: LinkChannel) -> None:
        self._channel, self._nbytes, self._shown = channel, 0, 0
        self._inbox: across.TensorMemory | None = None

    def reach(self) -> bool:
        """Whether the first stage's `TokenInbox` can be written to; waits until that stage has loaded."""
        if (told := self._channel.read(_INBOX.size)) is not None:
            self._nbytes, handle = _INBOX.unpack(told)
            with contextlib.suppress(RuntimeError):
                self._inbox = across.reached(handle, self._nbytes + _ALIGNED, torch.cuda.current_device())
        self._channel.send(b"\1" if self._inbox is not None else b"\0")
        return self._inbox is not None

    def show(self, last_R: Tensor) -> None:
        """Into that inbox, behind what has been launched."""
        assert self._inbox is not None and last_R.nbytes <= self._nbytes, f"{len(last_R)} rows"
        self._shown += 1
        stream = torch.cuda.current_stream().cuda_stream
        across.write(self._inbox.address, last_R, stream)
        across.flag(self._inbox.address + self._nbytes, self._shown, stream)

    def put(self, step: StepId, what: Sampled) -> None:
        self._channel.send(SAMPLED.frames(SampledTokens(step, what)))


class Taker(Generic[T]):
    """What `receive` reads off a link, by step. A link that ends leaves `take` waiting: the executor, which
    has seen it too, ends this process."""

    def __init__(self, receive: Callable[[], tuple[StepId, T] | None], waits: Waits,
                 inbox: Inbox | None = None, wake: Callable[[], None] | None = None) -> None:
        """inbox: where some of it lies until the next is taken, when no step reads it any more. wake: called in
        another thread when something has arrived: steps are launched ahead of answers, once it has."""
        self._waits, self._inbox, self._wake = waits, inbox, wake
        self._arrived: SimpleQueue[tuple[StepId, T]] = SimpleQueue()
        self.taken_at = 0.0                         # monotonic seconds: when the last `take` ended
        threading.Thread(target=self._run, args=(receive,), daemon=True, name="penstock-link").start()

    def _run(self, receive: Callable[[], tuple[StepId, T] | None]) -> None:
        while (found := receive()) is not None:
            self._arrived.put(found)
            if self._wake is not None:
                self._wake()

    def arrived(self) -> bool | None:
        return None if self._wake is None else not self._arrived.empty()

    def take(self, step: StepId) -> T:
        if self._inbox is not None and self.taken_at:
            self._inbox.free()
        with self._waits.on(STAGE):
            found, what = self._arrived.get()
        assert found == step, f"step {step} was handed what step {found} made"
        if self._inbox is not None:
            self._inbox.wait()
        self.taken_at = time.monotonic()
        return what


def boundaries(channel: LinkChannel, dtype: torch.dtype, device: str,
               inbox: Inbox | None = None) -> Callable[[], tuple[StepId, Boundary] | None]:
    """Reads what PutBoundary sends, onto the device."""
    def part(rows: int, columns: int, kind: torch.dtype) -> Tensor | None:
        data = channel.read(rows * columns * kind.itemsize)
        return None if data is None else torch.frombuffer(
            data, dtype=kind).view(rows, columns).to(device)

    reached = inbox is None

    def receive() -> tuple[StepId, Boundary] | None:
        nonlocal reached
        if inbox is not None and not reached and not (reached := inbox.reach()):
            return None
        if (head := channel.read(_HEAD.size)) is None:
            return None
        step, rows, hidden, delta, chosen, num, taps, own, slot = _HEAD.unpack(head)
        told = channel.read(4 * (num - 1)) if num > 1 else b""
        kinds = [(hidden, dtype), (delta, dtype), (chosen, torch.int32), *((hidden, dtype),) * taps, (own, dtype)]
        found: list[Tensor | None] = []
        at = (slot - 1) * inbox.nbytes if slot and inbox is not None else 0
        for columns, kind in kinds:
            nbytes = rows * columns * kind.itemsize
            if not columns:
                found.append(None)
            elif slot and inbox is not None:
                found.append(inbox.memory[at:at + nbytes].view(kind).view(rows, columns))
                at = _behind(at, nbytes)
            elif (x := part(rows, columns, kind)) is not None:
                found.append(x)
            else:
                return None
        if told is None:
            return None
        if inbox is not None:
            inbox.lent.append(slot > 0)
        h_TD, delta_TD, chosen_TS, *tapped, own_TX = found
        assert h_TD is not None
        inputs = struct.unpack(f"<{num - 1}I", told) if num else None
        return StepId(step), Boundary(h_TD, delta_TD, chosen_TS, inputs,
                                      tuple(x for x in tapped if x is not None), own_TX)
    return receive


def sampled(channel: LinkChannel) -> Callable[[], tuple[StepId, Sampled] | None]:
    """Reads what PutSampled sends."""
    def receive() -> tuple[StepId, Sampled] | None:
        told = channel.receive()
        return None if told is None else (told.step, told.what)
    return receive
