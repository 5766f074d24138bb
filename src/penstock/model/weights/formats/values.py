"""The arithmetic of quantised formats, on the device of the tensors.

    O rows   I columns   G groups of columns with one scale   W words of 32 bits   R x J blocks
"""
from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels.types.packed import Packed


def unpacked(word: Tensor, bits: int) -> Tensor:
    """uint8 [.., W * 32 / bits]: the values in words of int32, lowest bits first. bits: 4 or 8."""
    # Flat first: the last axis of a "contiguous" tensor may have any stride where it has one element.
    byte = word.reshape(-1).view(torch.uint8).view(*word.shape[:-1], -1)
    return byte if bits == 8 else torch.stack((byte & 15, byte >> 4), -1).flatten(-2)


def groups(code_OI: Tensor, scale_OG: Tensor, zero_OG: Tensor | int, size: int,
           group_I: Tensor | None = None) -> Packed | Tensor:
    """The weight (code - zero) * scale, of float32 where columns of a group do not lie together.

    size      columns of a group; the last one may have fewer
    group_I   the group of each column, where it is not column // size
    Raises    ValueError: a group that has no scale
    """
    if group_I is None or group_I.equal(torch.arange(len(group_I), device=group_I.device) // size):
        return packed(code_OI, scale_OG, zero_OG, 1, size)
    if int(group_I.min()) < 0 or int(group_I.max()) >= scale_OG.shape[1]:
        raise ValueError(f"g_idx names groups {int(group_I.min())} to {int(group_I.max())} of {scale_OG.shape[1]}")
    group_I = group_I.long()
    zero = zero_OG if isinstance(zero_OG, int) else zero_OG.float()[:, group_I]
    return code_OI.float().sub_(zero).mul_(scale_OG.float()[:, group_I])


def packed(code_OI: Tensor, scale_RJ: Tensor, zero_RJ: Tensor | int, rows: int, cols: int) -> Packed:
    """(code - zero) * scale of blocks of `rows` x `cols`; codes u8, i8 or, without zeros, e4m3."""
    scale_RJ = scale_RJ.float().contiguous()
    if code_OI.dtype == torch.float8_e4m3fn:
        return Packed(code_OI, scale_RJ, rows, cols)
    if isinstance(zero_RJ, int):
        zero_RJ = torch.full_like(scale_RJ, zero_RJ, dtype=torch.int16)
    zero_RJ = zero_RJ.to(torch.int16).contiguous()
    if code_OI.dtype == torch.int8:
        code_OI, zero_RJ = code_OI.view(torch.uint8) ^ 128, zero_RJ + 128
    return Packed(code_OI.contiguous(), scale_RJ, rows, cols, zero_RJ)


def e2m1(byte: Tensor, scale_OG: Tensor, size: int) -> Packed:
    """The weight e2m1 * scale, of two elements in a byte, the low half first; groups of `size` columns."""
    return Packed(byte.contiguous(), scale_OG.float().contiguous(), 1, size, four="e2m1")


def power(byte: Tensor) -> Tensor:
    """float32: 2 ** (byte - 127), the scales of MX formats; 255 is NaN."""
    return torch.exp2(byte.float() - 127).where(byte < 255, torch.nan)
