"""Blocks of a GGUF file as the codes that it stores, not as the floats they mean.

A weight is `code * scale + shift`. Owns how nine block types are read so; the file's layout of them is in
ggml's `ggml-quants.c`.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from penstock.kernels.types.packed import E2M1, LEAST, Packed
from penstock.model.weights.formats.reader import Format

_U8: TypeAlias = npt.NDArray[np.uint8]
_F32: TypeAlias = npt.NDArray[np.float32]
_Read: TypeAlias = tuple[_U8, _F32, _F32]       # codes, scales, shifts


def packed_of(block: str, raw_NB: _U8, shape: Sequence[int]) -> Packed:
    """`shape` [O, I] of blocks raw_NB, one a row, of a type in `PACKED`."""
    with np.errstate(all="ignore"):             # `finite` looks at the result
        code, scale, shift = _READERS[block](raw_NB)
    scale_OG, shift_OG = (torch.from_numpy(part.reshape(shape[0], -1)) for part in (scale, shift))
    return Packed(torch.from_numpy(code.reshape(tuple(shape))), scale_OG, 1, shape[1] // scale_OG.shape[1], shift_OG)


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


def _mxfp4(raw: _U8) -> _Read:
    d = np.ldexp(np.float32(1), raw[:, :1].astype(np.int32) - 128).astype(np.float32)
    return np.array(E2M1, np.uint8)[_nibbles(raw[:, 1:])], d, -LEAST * d


_READERS: dict[str, Callable[[_U8], _Read]] = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0, "Q4_K": _q4_k,
    "Q5_K": _q5_k, "Q6_K": _q6_k, "MXFP4": _mxfp4}
PACKED = frozenset(_READERS)                    # block types that stay codes


def format_of(block: str) -> Format:
    """How a weight of blocks of a type in `PACKED` is packed."""
    return Format("u8", 1, 16 if block == "Q6_K" else 32, 4 if block.startswith("Q4_") else 8)
