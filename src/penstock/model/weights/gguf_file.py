"""The header of one GGUF file (version 2 or 3, little-endian), checked before anything is allocated.

Owns the binary format (ggml-org/ggml, docs/gguf.md); knows neither torch, nor architectures, nor how blocks
are dequantised. The `gguf` package's reader is not used: it trusts the counts in the file.
"""
from __future__ import annotations

import struct
from array import array
from dataclasses import dataclass
from io import BufferedReader
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, cast

from penstock.config.base.errors import ConfigError, show
from penstock.model.weights.files import open_regular

ARRAY_MAX = 1 << 21                  # elements of one metadata array; vocabularies have 2**18
STRING_BYTES_MAX = 16 << 20
NAME_BYTES_MAX = 1024
ALIGNMENT_MAX = 1 << 20

# ggml type id -> (name, elements per block, bytes per block)
BLOCKS: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 30: ("BF16", 1, 2),
    2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136), 29: ("IQ1_M", 256, 56), 34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36),
}

# metadata value type id -> (struct code, bytes); 8 is a string, 9 an array
_SCALARS = {0: ("B", 1), 1: ("b", 1), 2: ("H", 2), 3: ("h", 2), 4: ("I", 4), 5: ("i", 4), 6: ("f", 4),
            7: ("?", 1), 10: ("Q", 8), 11: ("q", 8), 12: ("d", 8)}
_STRING, _ARRAY, _BOOL = 8, 9, 7


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One tensor: `shape` in torch's order (rows first), `begin` from the start of the file."""

    name: str
    block: str                       # name of the block type, e.g. Q4_1
    shape: tuple[int, ...]
    begin: int
    num_bytes: int
    block_elements: int
    block_bytes: int


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """`metadata` holds str, int, float, bool, list[str] and array.array values."""

    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]


def read_gguf_header(path: Path) -> GGUFHeader:
    """The metadata and the tensor table. Raises ConfigError."""
    raw, size = open_regular(path)
    with BufferedReader(cast(Any, raw), 1 << 18) as file:
        return parse_gguf_header(file, size, str(path))


def parse_gguf_header(file: BinaryIO, size: int, where: str) -> GGUFHeader:
    """Read a header, see `read_gguf_header`, from any stream of `size` bytes at its beginning."""
    cursor = _Cursor(file, size, where)
    if cursor.take(4) != b"GGUF":
        raise ConfigError(f"{where}: not a GGUF file")
    version = cursor.scalar("I", 4)
    if version not in (2, 3):
        why = " (big-endian)" if version in (2 << 24, 3 << 24) else ""
        raise ConfigError(f"{where}: GGUF version {version}{why}; versions 2 and 3, little-endian, "
                          "are supported")
    num_tensors, num_keys = cursor.scalar("Q", 8), cursor.scalar("Q", 8)
    # The shortest key and the shortest tensor record bound both counts by the bytes there are.
    if num_keys * 13 + num_tensors * 32 > cursor.left:
        raise ConfigError(f"{where}: {num_keys} keys and {num_tensors} tensors do not fit in "
                          f"{size} bytes: the file is truncated or damaged")
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        key = cursor.string(NAME_BYTES_MAX)
        if key in metadata:
            raise ConfigError(f"{where}: key {show(key)} is there twice")
        metadata[key] = _value(cursor, key)
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 8 <= alignment <= ALIGNMENT_MAX or alignment & (alignment - 1):
        raise ConfigError(f"{where}: general.alignment {show(alignment)}; expected a power of two from 8")
    return GGUFHeader(metadata, _tensors(cursor, num_tensors, alignment))


class _Cursor:
    """Reads forward; every length is compared with the bytes left before it is used."""

    def __init__(self, file: BinaryIO, size: int, where: str) -> None:
        self.file, self.left, self.size, self.where = file, size, size, where

    def take(self, num_bytes: int) -> bytes:
        if num_bytes <= self.left:
            data = self.file.read(num_bytes)
            self.left -= num_bytes
            if len(data) == num_bytes:
                return data
        raise self._ended()

    def scalar(self, code: str, num_bytes: int) -> Any:
        return struct.unpack("<" + code, self.take(num_bytes))[0]

    def string(self, bytes_max: int) -> str:
        length = int.from_bytes(self.take(8), "little")
        if length > bytes_max:
            raise self._too_long(length, bytes_max)
        try:
            return self.take(length).decode("utf-8")
        except UnicodeDecodeError:
            raise self._not_text() from None

    def strings(self, count: int) -> list[str]:
        """Read `count` strings: a vocabulary and its merges are a hundred thousand, and each
        process reads them at its start."""
        read, left, found = self.file.read, self.left, []
        for _ in range(count):
            length = int.from_bytes(read(8), "little")
            left -= 8 + length
            if length > STRING_BYTES_MAX:
                raise self._too_long(length, STRING_BYTES_MAX)
            data = read(length) if left >= 0 else b""
            if len(data) != length or left < 0:
                raise self._ended()
            try:
                found.append(data.decode("utf-8"))
            except UnicodeDecodeError:
                raise self._not_text() from None
        self.left = left
        return found

    def _ended(self) -> ConfigError:
        return ConfigError(f"{self.where}: ends in the middle of its header: the file is truncated or "
                           "damaged")

    def _too_long(self, length: int, bytes_max: int) -> ConfigError:
        return ConfigError(f"{self.where}: a string of {length} bytes in the header; at most "
                           f"{bytes_max} are expected")

    def _not_text(self) -> ConfigError:
        return ConfigError(f"{self.where}: a string in the header is not UTF-8")


def _value(cursor: _Cursor, key: str) -> Any:
    kind = cursor.scalar("I", 4)
    if kind == _STRING:
        return cursor.string(STRING_BYTES_MAX)
    if kind == _ARRAY:
        return _array_value(cursor, key)
    if kind not in _SCALARS:
        raise ConfigError(f"{cursor.where}: key {show(key)} has the unknown type {kind}")
    if kind == _BOOL:
        flag = cursor.take(1)
        if flag not in (b"\0", b"\1"):
            raise ConfigError(f"{cursor.where}: key {show(key)} is neither true nor false")
        return flag == b"\1"
    return cursor.scalar(*_SCALARS[kind])


def _array_value(cursor: _Cursor, key: str) -> Any:
    kind, count = cursor.scalar("I", 4), cursor.scalar("Q", 8)
    if kind not in _SCALARS and kind != _STRING:
        raise ConfigError(f"{cursor.where}: key {show(key)} is an array of the unsupported type {kind}")
    least = _SCALARS[kind][1] if kind in _SCALARS else 8
    if count > ARRAY_MAX or count * least > cursor.left:
        raise ConfigError(f"{cursor.where}: key {show(key)} is an array of {count} elements; at most "
                          f"{ARRAY_MAX} and what the file holds")
    if kind == _STRING:
        return cursor.strings(count)
    # array.array keeps a hostile gigabyte of int8 a gigabyte. "B" for booleans.
    values = array("B" if kind == _BOOL else _SCALARS[kind][0])
    values.frombytes(cursor.take(count * least))
    return values


def _tensors(cursor: _Cursor, count: int, alignment: int) -> dict[str, GGUFTensor]:
    where = cursor.where
    found: dict[str, GGUFTensor] = {}
    for _ in range(count):
        name = cursor.string(NAME_BYTES_MAX)
        what = f"{where}: tensor {show(name)}"
        if name in found:
            raise ConfigError(f"{what} is there twice")
        num_dims = cursor.scalar("I", 4)
        if not 1 <= num_dims <= 4:
            raise ConfigError(f"{what} has {num_dims} dimensions; 1 to 4 are allowed")
        dims: tuple[int, ...] = struct.unpack(f"<{num_dims}Q", cursor.take(8 * num_dims))
        kind, offset = cursor.scalar("I", 4), cursor.scalar("Q", 8)
        if kind not in BLOCKS:
            raise ConfigError(f"{what} has block type {kind}; supported are "
                              f"{', '.join(name for name, _, _ in BLOCKS.values())}")
        block, elements, block_bytes = BLOCKS[kind]
        if not all(0 < d < 1 << 48 for d in dims) or dims[0] % elements:
            raise ConfigError(f"{what}: bad shape {show(dims)} for {block}")
        found[name] = GGUFTensor(name, block, dims[::-1], offset, prod(dims) // elements * block_bytes,
                                 elements, block_bytes)
    return _place(found, cursor.size - cursor.left, cursor.size, alignment, where)


def _place(tensors: dict[str, GGUFTensor], header_bytes: int, size: int, alignment: int,
           where: str) -> dict[str, GGUFTensor]:
    """`tensors` in the order of the data, offsets made absolute; checks that they tile the file."""
    base = -(-header_bytes // alignment) * alignment
    placed: dict[str, GGUFTensor] = {}
    expected = 0
    for t in sorted(tensors.values(), key=lambda t: t.begin):
        if t.begin != expected:
            raise ConfigError(f"{where}: tensor {show(t.name)} starts at byte {t.begin} of the data, "
                              f"expected {expected}: tensors overlap or leave a hole")
        if base + t.begin + t.num_bytes > size:
            raise ConfigError(f"{where}: tensor {show(t.name)} ends at byte {base + t.begin + t.num_bytes}"
                              f" of a file of {size}: the file is truncated; download it again")
        placed[t.name] = GGUFTensor(t.name, t.block, t.shape, base + t.begin, t.num_bytes,
                                    t.block_elements, t.block_bytes)
        expected = -(-(t.begin + t.num_bytes) // alignment) * alignment
    return placed
