"""The header of one safetensors file, checked completely before any tensor is read.

Owns the format's rules (huggingface/safetensors, README "Format"): an 8-byte little-endian length, a JSON
header, then tensors that cover the rest without overlap or hole. Knows neither torch nor names.
"""
from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

from penstock.config.base.errors import ConfigError, show
from penstock.model.weights.files import open_regular, parse_json_object

HEADER_BYTES_MAX = 32 << 20          # 200,000 tensors; parsing takes about 10x that in memory
DIMS_MAX = 8
DTYPE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "U8": 1, "I8": 1,
               "I32": 4, "I64": 8, "BOOL": 1}
# Types that a file may have in tensors that nothing reads, in bits.
_OTHER_BITS = {"F8_E5M2": 8, "F8_E8M0": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "I16": 16,
               "U16": 16, "U32": 32, "U64": 64, "C64": 64, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8}
# Tensors that every family computes or does without: old buffers of RoPE, static scales of an fp8 KV cache
# and of activations.
_BESIDE = re.compile(r"\.rotary_emb\.\w+$|\.(q|k|v|kv|prob|attn|input|input_global|output|activation)_scale$")


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
    """Read a header, see `read_safetensors_header`, from any stream of `size` bytes."""
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
    if not isinstance(dtype, str) or dtype not in {*DTYPE_BYTES, *_OTHER_BITS}:
        raise ConfigError(f"{what} has dtype {show(dtype)}: no such type; "
                          f"penstock loads {', '.join(DTYPE_BYTES)}")
    bits = _OTHER_BITS.get(dtype) or 8 * DTYPE_BYTES[dtype]
    if not _sizes(shape) or len(shape) > DIMS_MAX or 0 in shape:
        raise ConfigError(f"{what}: bad shape {show(shape)}")
    if not _sizes(offsets) or len(offsets) != 2 or offsets[1] < offsets[0]:
        raise ConfigError(f"{what}: bad data_offsets {show(offsets)}")
    num_bytes = offsets[1] - offsets[0]
    if prod(shape) * bits != 8 * num_bytes:
        raise ConfigError(f"{what}: {dtype} {show(shape)} needs {prod(shape) * bits // 8} "
                          f"bytes, the file has {num_bytes}")
    return StoredTensor(name, dtype, tuple(shape), base + offsets[0], num_bytes)


@dataclass(frozen=True, slots=True)
class Shards:
    """The tensors of one checkpoint under the model's names, and what of its files nothing reads.

    files     tensors to read by file, under the names that the model has for them
    absent    name -> shard: listed by the index, but not in that shard
    unread    why -> names in the files
    towers    first part of a name -> how many tensors of other modalities begin with it
    """

    files: dict[Path, dict[str, StoredTensor]]
    absent: dict[str, str]
    unread: dict[str, list[str]]
    towers: Counter[str]


def read_shards(paths: Sequence[Path], weight_map: Mapping[str, str] | None,
                name_of: Callable[[str], str | None]) -> Shards:
    """Read the headers of all shards. The index decides: of a tensor that is in two shards, and of one that
    no index lists, only what it places in a shard is taken.

    weight_map   name -> file name; None: one file without an index
    name_of      the model's name for one in the files; None: it belongs to another modality
    Raises       ConfigError: a damaged file, two tensors with one name, a type that is not read
    """
    found = Shards({}, {}, {}, Counter())
    taken: dict[str, str] = {}
    for path in paths:
        kept = found.files[path] = {}
        stored = read_safetensors_header(path)
        for name, entry in stored.items():
            if weight_map is not None and weight_map.get(name) != path.name:
                found.unread.setdefault("not in the index", []).append(name)
            elif (known := name_of(name)) is None:
                found.towers[tower_of(name)] += 1
            elif _BESIDE.search(known):
                found.unread.setdefault("buffers and static scales", []).append(name)
            elif known in taken:
                raise ConfigError(f"{path}: tensors {show(taken[known])} and {show(name)} are both {known}")
            else:
                _check_dtype(entry, str(path))
                taken[known], kept[known] = name, replace(entry, name=known)
        for name, shard in (weight_map or {}).items():
            known = name_of(name)
            if shard == path.name and name not in stored and known is not None and not _BESIDE.search(known):
                found.absent[known] = shard
    return found


def tower_of(name: str) -> str:
    """Return the part of a tensor's name that says which tower it is of."""
    return name.removeprefix("model.").split(".")[0]


def _check_dtype(entry: StoredTensor, where: str) -> None:
    if entry.dtype not in DTYPE_BYTES:
        raise ConfigError(f"{where}: tensor {show(entry.name)} has dtype {show(entry.dtype)}: this type is "
                          f"not supported; penstock loads {', '.join(DTYPE_BYTES)}")


def _sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(v) is int and 0 <= v < 1 << 48 for v in value)
