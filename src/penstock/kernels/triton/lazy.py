"""Kernels in Triton in the lists of ops: imported when one is to run, as most machines have no Triton."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from penstock.kernels.c.build import triton_version
from penstock.kernels.op import Implementation
from penstock.kernels.platform import Platform


def probe(_: Platform) -> str:
    """Raises Unusable: no Triton."""
    return f"Triton {triton_version()}"


def lazy(name: str, where: str, probe: Callable[[Platform], str] = probe) -> Implementation[Any]:
    """An implementation for CUDA devices. where: as `Implementation.code`."""
    return Implementation(name, where, probe, ("cuda",))
