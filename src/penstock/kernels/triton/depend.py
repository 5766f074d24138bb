"""Kernels that begin before the one in front of them has ended, where the device can: Hopper's and later.

A kernel calls `follow` or `wait` before it reads or writes anything that another kernel writes or reads, and
is launched with `early()`. What it does before runs beside the end of the one in front, and may read what no
kernel of a step writes: weights, tables of pages, earlier keys.
Each must call one: who waits for a kernel that waited knows that all before have ended.
"""
from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.language.target_info import cuda_capability_geq


@triton.jit
def follow():
    """Let the next kernel begin, and wait for the one in front to end."""
    if cuda_capability_geq(9, 0):
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def wait():
    """Follow as `follow` does, but the next kernel begins when this one ends: beside many programs that read all the
    time it takes more than it gives."""
    if cuda_capability_geq(9, 0):
        gdc_wait()


@triton.jit
def fetch(at):
    """The cache lines of these addresses into the L2, without waiting for them."""
    if cuda_capability_geq(9, 0):
        tl.inline_asm_elementwise("prefetch.global.L2 [$1]; // $0", "=r,l", [at.to(tl.int64, bitcast=True)],
                                  dtype=tl.int32, is_pure=False, pack=1)


@cache
def early() -> dict[str, bool]:
    """For the launch of a kernel that follows."""
    able = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
    return {"launch_pdl": True} if able else {}
