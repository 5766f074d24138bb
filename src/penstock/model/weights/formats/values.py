"""The arithmetic of quantised formats, on the device of the tensors.

    O rows   I columns   G groups of columns with one scale   W words of 32 bits   R x J blocks
"""
from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels.types.scaled import Scaled


def scaled(weight_OI: Tensor, scale_RJ: Tensor, rows: int, cols: int) -> Scaled:
    """Elements of e4m3 with a scale, of float32, for each block of `rows` x `cols`."""
    return Scaled(weight_OI, scale_RJ.float(), rows, cols)


def unpacked(word: Tensor, bits: int) -> Tensor:
    """uint8 [.., W * 32 / bits]: the values in words of int32, lowest bits first. bits: 4 or 8."""
    # Flat first: the last axis of a "contiguous" tensor may have any stride where it has one element.
    byte = word.reshape(-1).view(torch.uint8).view(*word.shape[:-1], -1)
    return byte if bits == 8 else torch.stack((byte & 15, byte >> 4), -1).flatten(-2)


def floats(code_OI: Tensor, scale_OG: Tensor, zero_OG: Tensor | int, size: int,
           group_I: Tensor | None = None) -> Tensor:
    """float32 [O, I]: (code - zero) * scale.

    size      columns of a group; the last one may have fewer
    group_I   the group of each column, where it is not column // size
    Raises    ValueError: a group that has no scale
    """
    rows, columns = code_OI.shape
    scale_OG = scale_OG.float()
    out_OI = code_OI.float()
    if group_I is not None:
        if int(group_I.min()) < 0 or int(group_I.max()) >= scale_OG.shape[1]:
            raise ValueError(f"g_idx names groups {int(group_I.min())} to {int(group_I.max())} of "
                             f"{scale_OG.shape[1]}")
        group_I = group_I.long()
    elif size * scale_OG.shape[1] != columns:
        group_I = torch.arange(columns, device=code_OI.device) // size
    if group_I is not None:
        zero = zero_OG if isinstance(zero_OG, int) else zero_OG.float()[:, group_I]
        return out_OI.sub_(zero).mul_(scale_OG[:, group_I])
    out_OGJ = out_OI.view(rows, scale_OG.shape[1], size)
    out_OGJ.sub_(zero_OG if isinstance(zero_OG, int) else zero_OG.float()[:, :, None])
    return out_OGJ.mul_(scale_OG[:, :, None]).view(rows, columns)


def in_blocks(weight_OI: Tensor, scale_RJ: Tensor, zero_RJ: Tensor | None, rows: int, cols: int) -> Tensor:
    """float32 [O, I]: (weight - zero) * scale, of int8 or e4m3, in blocks of `rows` x `cols`."""
    if weight_OI.dtype == torch.float8_e4m3fn:
        return scaled(weight_OI, scale_RJ, rows, cols).floats()
    out_OI = weight_OI.float()
    if zero_RJ is not None:
        out_OI -= _spread(zero_RJ.float(), weight_OI.shape, rows, cols)
    return out_OI.mul_(_spread(scale_RJ.float(), weight_OI.shape, rows, cols))


def _spread(value_RJ: Tensor, shape: torch.Size, rows: int, cols: int) -> Tensor:
    """[O, I]: to each element the value of its block."""
    return value_RJ.repeat_interleave(rows, 0)[:shape[0]].repeat_interleave(cols, 1)[:, :shape[1]]
