"""Kernels that are compiled, or read from a cache, while an engine serves: counted and logged.

A start takes a step of each kind so that there are none. One that is compiled all the same makes every
request wait, so an operator should see it. Imports Triton only where a process has used it.
"""
from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

_log = logging.getLogger("penstock.kernels")
SLOW_S = 0.05                   # what takes less is not logged: it came from a cache


class _Watch:
    """`serving`: whether what is compiled from now on counts."""

    def __init__(self) -> None:
        self.serving, self.count, self.seconds = False, 0, 0.0
        self._lock = threading.Lock()

    def note(self, name: str, seconds: float) -> None:
        if not self.serving:
            return
        with self._lock:
            self.count += 1
            self.seconds += seconds
        if seconds >= SLOW_S:
            _log.warning("kernel %s was compiled while serving: %.2f s in which no step began", name, seconds)


_watch = _Watch()


@contextlib.contextmanager
def noted(name: str) -> Iterator[None]:
    """What runs in it compiles a kernel of this name."""
    started = time.perf_counter()
    try:
        yield
    finally:
        _watch.note(name, time.perf_counter() - started)


def serve() -> None:
    """The engine is ready: what this process compiles from now on is counted."""
    _watch.serving = True
    jit: Any = sys.modules.get("triton.runtime.jit")
    if jit is None or getattr(jit.JITFunction, "penstock_noted", False):
        return
    compiles = jit.JITFunction._do_compile

    def do_compile(self: Any, *args: Any, **kwargs: Any) -> Any:
        with noted(self.fn.__name__):
            return compiles(self, *args, **kwargs)

    jit.JITFunction._do_compile, jit.JITFunction.penstock_noted = do_compile, True


def stats() -> dict[str, float]:
    """By metric name, since `serve`; nothing before."""
    if not _watch.serving:
        return {}
    return {"executor_compiled_total": float(_watch.count),
            "executor_compile_seconds_total": _watch.seconds}
