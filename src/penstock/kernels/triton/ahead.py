"""Kernels compiled before they are needed, several at a time.

Imported only where a CUDA device was asked for.
"""
from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any

import torch
import triton
from triton.runtime.jit import JITFunction

from penstock.kernels.c.device import held_back

_LARGE_BYTES = 64 << 20         # of floats: nothing is indexed by them


@contextlib.contextmanager
def compiling(threads: int) -> Iterator[None]:
    """Kernels that this thread launches meanwhile do not run: so many threads compile and load them, which
    has ended when this ends. Their tensors, all but large ones of floats, become zeros, so that an index is
    one: for tensors without another user. Other threads launch as ever. Raises what a compiler raises."""
    launch, here = JITFunction.run, threading.get_ident()

    def asked(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        if threading.get_ident() != here:
            return launch(self, *args, grid=grid, warmup=warmup, **kwargs)
        _clear(args)
        return launch(self, *args, grid=grid, warmup=True, **kwargs)

    JITFunction.run = asked
    try:
        with (ThreadPoolExecutor(threads, "penstock-compile") as pool,
              triton.AsyncCompileMode(_Loading(pool)), held_back(_clear)):
            yield
    finally:
        JITFunction.run = launch


def _clear(arguments: tuple[Any, ...]) -> None:
    for x in arguments:
        if isinstance(x, torch.Tensor) and not (x.is_floating_point() and x.nbytes > _LARGE_BYTES):
            x.zero_()


class _Loading(Executor):
    """Compile, and load the kernel, for which Triton builds a launcher in C."""

    def __init__(self, pool: Executor) -> None:
        self._pool = pool

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        def work() -> Any:
            kernel = fn(*args, **kwargs)
            _ = kernel.run
            return kernel
        return self._pool.submit(work)

