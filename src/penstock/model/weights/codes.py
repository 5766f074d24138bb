"""Weights as the codes that a GGUF file stores, not as the floats they mean.

    O rows   I columns   G groups of columns that share a scale   B scale, then shift

A weight is `code * scale + shift`. Owns how nine block types are read so; the file's layout of them is in
ggml's `ggml-quants.c`. Kernels keep codes of four bits in four, all others in eight.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.kernels.types.scaled import Scaled

_U8: TypeAlias = npt.NDArray[np.uint8]
_F32: TypeAlias = npt.NDArray[np.float32]
_Read: TypeAlias = tuple[_U8, _F32, _F32]       # codes, scales, shifts
_HALF_MAX = 65504.0                 # scales are kept as f16


@dataclass(frozen=True, slots=True, eq=False)
class Codes:
    """A weight of two dimensions.    code_OI   u8     scale_OGB   f32, B = 2; G divides I"""

    code_OI: Tensor
    scale_OGB: Tensor

    @property
    def shape(self) -> torch.Size:
        return self.code_OI.shape

    def __getitem__(self, rows: Tensor | slice) -> Codes:
        """Some rows of it, in the order of `rows`."""
        return Codes(self.code_OI[rows], self.scale_OGB[rows])

    def part(self, rows: slice, columns: slice) -> Codes:
        """Some rows and columns of it; in smaller groups where these begin or end in one."""
        inputs, groups = self.code_OI.shape[1], self.scale_OGB.shape[1]
        group = math.gcd(inputs // groups, columns.start, columns.stop)
        scale_OGB = self.scale_OGB[rows].repeat_interleave(inputs // groups // group, 1)
        return Codes(self.code_OI[rows, columns].contiguous(),
                     scale_OGB[:, columns.start // group:columns.stop // group].contiguous())

    def floats(self) -> Tensor:
        """float32 [O, I]: what it means."""
        outputs, inputs = self.shape
        code_OGJ = self.code_OI.float().view(outputs, self.scale_OGB.shape[1], -1)
        return (code_OGJ * self.scale_OGB[:, :, :1] + self.scale_OGB[:, :, 1:]).view(outputs, inputs)

    @property
    def num_bytes(self) -> int:
        """What kernels keep of it."""
        bits = 4 if int(self.code_OI.max()) < 16 else 8
        return self.code_OI.numel() * bits // 8 + self.scale_OGB.numel() * 2

    def finite(self) -> bool:
        return bool((self.scale_OGB.abs() <= _HALF_MAX).all())

    def equals(self, other: Codes) -> bool:
        return torch.equal(self.code_OI, other.code_OI) and torch.equal(self.scale_OGB, other.scale_OGB)


Packed: TypeAlias = Codes | Scaled      # weights that are kept as files have them


def joined(parts: Sequence[Codes]) -> Codes:
    """Rows of all of them, one after the other, with the finest of their groups."""
    groups = max(part.scale_OGB.shape[1] for part in parts)
    return Codes(torch.cat([part.code_OI for part in parts]), torch.cat([
        part.scale_OGB.repeat_interleave(groups // part.scale_OGB.shape[1], 1) for part in parts]))


def codes_of(block: str, raw_NB: _U8, shape: Sequence[int]) -> Codes:
    """`shape` [O, I] of blocks raw_NB, one a row, of a type in `PACKED`."""
    with np.errstate(all="ignore"):             # `finite` looks at the result
        code, scale, shift = _READERS[block](raw_NB)
    outputs = shape[0]
    scale_OGB = np.stack([scale.reshape(outputs, -1), shift.reshape(outputs, -1)], -1)
    return Codes(torch.from_numpy(code.reshape(tuple(shape))), torch.from_numpy(scale_OGB))


def _half(raw: _U8, at: int) -> _F32:
    """[N, 1] of the f16 at byte `at` of every block."""
    return raw[:, at : at + 2].copy().view(np.float16).astype(np.float32)


def _nibbles(raw: _U8) -> _U8:
    """[N, 2 x bytes]: all low halves, then all high ones."""
    return np.concatenate([raw & 15, raw >> 4], -1)


def _q4_0(raw: _U8) -> _Read:
    d = _half(raw, 0)
    return _nibbles(raw[:, 2:]), d, -8 * d


def _q4_1(raw: _U8) -> _Read:
    return _nibbles(raw[:, 4:]), _half(raw, 0), _half(raw, 2)


def _fifth(raw: _U8) -> _U8:
    """[N, 32]: four bytes, whose bits are the fifth ones of 32 codes, in their place."""
    bits: _U8 = np.unpackbits(raw, axis=-1, bitorder="little") << np.uint8(4)
    return bits


def _q5_0(raw: _U8) -> _Read:
    d = _half(raw, 0)
    return _nibbles(raw[:, 6:]) | _fifth(raw[:, 2:6]), d, -16 * d


def _q5_1(raw: _U8) -> _Read:
    return _nibbles(raw[:, 8:]) | _fifth(raw[:, 4:8]), _half(raw, 0), _half(raw, 2)


def _q8_0(raw: _U8) -> _Read:
    d = _half(raw, 0)
    return raw[:, 2:] ^ np.uint8(128), d, -128 * d


def _k_scales(raw: _U8) -> tuple[_F32, _F32]:
    """[N, 8] scales and shifts of Q4_K and Q5_K: six bits each in twelve bytes."""
    low, middle, high = raw[:, 4:8], raw[:, 8:12], raw[:, 12:16]
    scale = np.concatenate([low & 63, high & 15 | low >> 6 << 4], -1)
    least = np.concatenate([middle & 63, high >> 4 | middle >> 6 << 4], -1)
    return scale * _half(raw, 0), -(least * _half(raw, 2))


def _k_nibbles(raw: _U8) -> _U8:
    """[N, 8, 32] of the 128 bytes that hold 256 codes, 64 at a time."""
    return _nibbles(raw.reshape(-1, 4, 32)).reshape(-1, 8, 32)


def _q4_k(raw: _U8) -> _Read:
    return _k_nibbles(raw[:, 16:]), *_k_scales(raw)


def _q5_k(raw: _U8) -> _Read:
    fifth = raw[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    code: _U8 = (_k_nibbles(raw[:, 48:]) | fifth << 4).astype(np.uint8)
    return code, *_k_scales(raw)


def _q6_k(raw: _U8) -> _Read:
    # Two halves of 128; of each, bytes 0 to 63 hold low nibbles of its quarters 0 and 1, then of 2 and 3.
    low = _nibbles(raw[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    two = raw[:, 128:192].reshape(-1, 2, 1, 32) >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3
    code: _U8 = (low | two << 4).astype(np.uint8)
    scale: _F32 = raw[:, 192:208].copy().view(np.int8) * _half(raw, 208)
    return code, scale, -32 * scale


# Of MXFP4 twice what a code means; those of equal steps count from the least.
_E2M1 = np.array((0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12), np.int8)
_LEAST = 12


def _mxfp4(raw: _U8) -> _Read:
    d = np.ldexp(np.float32(1), raw[:, :1].astype(np.int32) - 128).astype(np.float32)
    return (_E2M1[_nibbles(raw[:, 1:])] + _LEAST).astype(np.uint8), d, -_LEAST * d


_READERS: dict[str, Callable[[_U8], _Read]] = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0, "Q4_K": _q4_k,
    "Q5_K": _q5_k, "Q6_K": _q6_k, "MXFP4": _mxfp4}
PACKED = frozenset(_READERS)                    # block types that stay codes


def codes_bytes(block: str, shape: Sequence[int]) -> int:
    """`num_bytes` of a weight of so many blocks of a type in `PACKED`, by its header alone: at most."""
    bits, group = 4 if block.startswith("Q4_") else 8, 16 if block == "Q6_K" else 32
    return math.prod(shape) * bits // 8 + math.prod(shape) // group * 4
