"""Kernels in Triton in the lists of ops: imported when one is to run, as most machines have no Triton.

An op with better kernels than Triton's for some shapes (CUDA C++, Gluon, flash-attn-4) is listed twice: under
their name it takes them for those shapes and Triton for the others, under `triton` it does without them.
"""
from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from penstock.kernels.c.build import triton_version
from penstock.kernels.op import Implementation
from penstock.kernels.platform import Platform

F = TypeVar("F", bound=Callable[..., Any])
_here = threading.local()


def probe(_: Platform) -> str:
    """Raises Unusable: no Triton."""
    return f"Triton {triton_version()}"


def lazy(name: str, where: str, probe: Callable[[Platform], str] = probe,
         kinds: tuple[str, ...] = ()) -> Implementation[Any]:
    """An implementation for CUDA devices. where: as `Implementation.code`."""
    return Implementation(name, where, probe, ("cuda",), kinds)


def alone(run: F) -> F:
    """Return `run` without the kernels that are better than Triton's, on the thread that calls it."""
    @functools.wraps(run)
    def limited(*args: Any, **kwargs: Any) -> Any:
        before, _here.alone = is_alone(), True
        try:
            return run(*args, **kwargs)
        finally:
            _here.alone = before
    return limited  # type: ignore[return-value]


def is_alone() -> bool:
    """Return whether this thread is in a function that `alone` made."""
    return getattr(_here, "alone", False)
