"""The header of one safetensors file, checked completely before any tensor is read.

Owns the format's rules (huggingface/safetensors, README "Format"): an 8-byte little-endian length, a JSON
header, then tensors that cover the rest without overlap or hole. Knows neither torch nor names.
"""
from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

from penstock.config.base.errors import ConfigError, show
from penstock.model.weights.files import open_regular, parse_json_object

HEADER_BYTES_MAX = 32 << 20          # 200,000 tensors; parsing takes about 10x that in memory
DIMS_MAX = 8
DTYPE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "U8": 1,
               "I64": 8, "BOOL": 1}
# Named so that the message says what the file is, not that the file is broken.
_REFUSED_DTYPES = {
    "F8_E5M2", "F8_E8M0", "F4", "F6_E2M3", "F6_E3M2", "I8", "I16", "U16", "I32", "U32",
    "I64", "U64", "BOOL", "C64", "F8_E4M3FNUZ", "F8_E5M2FNUZ",
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor: `begin` is its offset from the start of the file, `num_bytes` its length."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    num_bytes: int


def read_safetensors_header(path: Path) -> dict[str, StoredTensor]:
    """Every tensor of the file by name, in the order of the data. Raises ConfigError."""
    file, size = open_regular(path)
    with file:
        return parse_safetensors_header(file, size, str(path))


def parse_safetensors_header(file: BinaryIO, size: int, where: str) -> dict[str, StoredTensor]:
    """As `read_safetensors_header`, from any stream of `size` bytes."""
    prefix = file.read(8)
    if len(prefix) != 8:
        raise ConfigError(f"{where}: {size} bytes are too few for a safetensors file")
    length = int.from_bytes(prefix, "little")
    if not 2 <= length <= HEADER_BYTES_MAX or length > size - 8:
        raise ConfigError(f"{where}: header of {length} bytes in a file of {size}: not a safetensors "
                          "file, or a truncated one")
    data = file.read(length)
    if len(data) != length:
        raise ConfigError(f"{where}: truncated in the header")
    header = parse_json_object(data, f"{where}: header")
    header.pop("__metadata__", None)
    base = 8 + length
    tensors = [_tensor(where, name, entry, base) for name, entry in header.items()]
    tensors.sort(key=lambda t: t.begin)
    expected = base
    for tensor in tensors:
        if tensor.begin != expected:
            raise ConfigError(f"{where}: tensor {show(tensor.name)} starts at byte {tensor.begin}, "
                              f"expected {expected}: tensors overlap or leave a hole")
        expected += tensor.num_bytes
    if expected != size:
        raise ConfigError(f"{where}: {size} bytes, but its tensors end at {expected}: the file is "
                          + ("truncated; download it again" if size < expected else "damaged"))
    return {tensor.name: tensor for tensor in tensors}


def _tensor(where: str, name: str, entry: Any, base: int) -> StoredTensor:
    what = f"{where}: tensor {show(name)}"
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ConfigError(f"{what}: expected dtype, shape and data_offsets, found {show(entry)}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        why = ("this type is not supported" if isinstance(dtype, str) and dtype in _REFUSED_DTYPES
               else "no such type")
        raise ConfigError(f"{what} has dtype {show(dtype)}: {why}; "
                          f"penstock loads {', '.join(DTYPE_BYTES)}")
    if not _sizes(shape) or len(shape) > DIMS_MAX or 0 in shape:
        raise ConfigError(f"{what}: bad shape {show(shape)}")
    if not _sizes(offsets) or len(offsets) != 2 or offsets[1] < offsets[0]:
        raise ConfigError(f"{what}: bad data_offsets {show(offsets)}")
    num_bytes = offsets[1] - offsets[0]
    if prod(shape) * DTYPE_BYTES[dtype] != num_bytes:
        raise ConfigError(f"{what}: {dtype} {show(shape)} needs {prod(shape) * DTYPE_BYTES[dtype]} "
                          f"bytes, the file has {num_bytes}")
    return StoredTensor(name, dtype, tuple(shape), base + offsets[0], num_bytes)


def _sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(v) is int and 0 <= v < 1 << 48 for v in value)
