"""What a call costs, counted: a busy machine changes nothing."""
from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def bytecodes(call: Callable[[], object]) -> int:
    """How many `call` executes. The collector rests meanwhile: what it would free may be left by any
    other test, and end with bytecodes of its own."""
    count, collects, before = 0, gc.isenabled(), sys.gettrace()

    def trace(frame: FrameType, what: str, arg: object) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += what == "opcode"
        return trace

    gc.disable()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
        if collects:
            gc.enable()
    return count
