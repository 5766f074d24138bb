"""Attention of a prompt over selected MLA KV entries in CUDA C++, on Hopper: as many blocks as processors, which
take one query after another.

Imported only where a CUDA device was asked for. What cannot be had runs in Gluon.
"""
from __future__ import annotations

import functools
import struct
from pathlib import Path

import torch
from torch import Tensor

from penstock.kernels.c.device import Launch, launcher

GROUP, VALUE, ROW = 64, 512, 576        # heads of a block, values and dims of a row
_THREADS, _BUFFERS, _BESIDE = 384, 3 * 64 * ROW * 2, 2048       # bytes: queries and rows; what groups tell each other
_SOURCE = Path(__file__).with_name("attend_prompt.cu")


def _launch(size: int) -> Launch | None:
    return launcher(_SOURCE, "attend_prompt", shared=_BUFFERS + _BESIDE, SIZE=size)


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def attend(q_BNH: Tensor, pool_PGH: Tensor, slot_BS: Tensor, out_BNR: Tensor, lse_BN: Tensor, scale: float) -> bool:
    """As `LatentAttention` has it, of bfloat16, into `out_BNR` and `lse_BN`. Returns whether it could: rows must begin
    at 16 bytes. Capturable."""
    if pool_PGH.stride(0) % 8 or pool_PGH.data_ptr() % 16 or (launch := _launch(pool_PGH.shape[1])) is None:
        return False
    queries, heads, _ = q_BNH.shape
    work = queries * -(-heads // GROUP)
    [bits] = struct.unpack("i", struct.pack("f", scale * 1.4426950408889634))
    launch((min(work, _processors(q_BNH.device)), 1), _THREADS, q_BNH, pool_PGH, slot_BS, out_BNR, lse_BN, bits,
           pool_PGH.stride(0), heads, slot_BS.shape[1], work)
    return True
