"""A model on disk as Hugging Face tensors, one at a time: safetensors (single, sharded) and GGUF.

Everything is checked from the headers when it is opened; then each tensor is read into its own memory (no
mapping: mapped pages would count as ours until the kernel takes them back), that of a device through a little
pinned memory. Knows no family's layers.
"""
from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeAlias, TypeVar, cast

import numpy as np
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from penstock.config.base.errors import ConfigError, show
from penstock.config.base.sizes import counted
from penstock.kernels.types.packed import Packed
from penstock.model.base import Checkpoint, Wants, everything
from penstock.model.weights.files import digest_of_files, open_regular
from penstock.model.weights.formats import gguf
from penstock.model.weights.formats.blocks import quantises
from penstock.model.weights.formats.reader import Format, WeightReader
from penstock.model.weights.formats.table import format_of, reader_of
from penstock.model.weights.gguf_config import ROPE_FREQS, HFName, hf_name
from penstock.model.weights.gguf_file import GGUFTensor
from penstock.model.weights.locate import ModelFiles, read_weight_map, some
from penstock.model.weights.safetensors_file import StoredTensor, read_shards

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
           "F8_E4M3": torch.float8_e4m3fn, "U8": torch.uint8, "I8": torch.int8, "I32": torch.int32,
           "I64": torch.int64, "BOOL": torch.bool}
# Elements dequantised at once by each thread: the temporaries of numpy (about ten of this size) stay in the cache.
_CHUNK_ELEMENTS = 1 << 16
_DEQUANTISERS = 4                               # threads: numpy leaves others the interpreter while it computes
# Of what is pinned while a device's weights are read: parts, and threads that fill them.
_STAGED, _PART_BYTES, _READERS = 16, 8 << 20, 8
Weight = TypeVar("Weight", bound=Tensor | Packed)
Read: TypeAlias = Callable[[BinaryIO, StoredTensor, Path], Tensor]


def open_checkpoint(files: ModelFiles, keeps: Collection[str] = ()) -> Checkpoint:
    """The checkpoint in `files`, its headers checked. keeps: kinds of `Packed`; weights of two dimensions whose
    format is of one of these stay packed, others become floats.

    Raises ConfigError: a damaged or truncated file, a type or an architecture that is not supported.
    `tensors()` of it raises ConfigError too, if a file changes or cannot be read.
    """
    if files.load_format == "dummy":
        return ConfigOnly(files, keeps)
    return GGUFCheckpoint(files, keeps) if files.gguf is not None else SafetensorsCheckpoint(files, keeps)


def weights_digest(files: ModelFiles, *, sampled: bool = False) -> str:
    """Return a digest of all bytes of the weights' files, or of some. Raises ConfigError."""
    return digest_of_files([files.gguf] if files.gguf is not None else files.safetensors, sampled=sampled)


class ConfigOnly:
    """For random weights: the config of a model whose weights are not read."""

    def __init__(self, files: ModelFiles, keeps: Collection[str]) -> None:
        self._files, self.config, self.eos_ids = files, files.config, files.eos_ids
        found = format_of(self.config, f"{files.folder}/config.json")
        self._format = found if _stays(found, keeps) else None
        given = self.config.get("quantization_config")
        said = given.get("ignore") if isinstance(given, dict) else None
        self._ignored = [str(pattern) for pattern in said] if isinstance(said, list) else []
        self.dequantised = ""

    def tensors(self, wants: Wants = everything, device: str = "cpu") -> Iterator[tuple[str, Tensor]]:
        """Nothing."""
        return iter(())

    def format(self, name: str) -> Format | None:
        module = name.removesuffix(".weight")
        return self._format if quantises(name) and not any(_is_of(module, p) for p in self._ignored) else None

    def unread(self, ignores: Callable[[str], bool]) -> list[str]:
        return [f"text of {self._files.name}; {self._files.towers({})}"] if self._files.wrapper else []


def _is_of(module: str, pattern: str) -> bool:
    """Whether `ignore` of compressed-tensors names a module: as it is, maybe below a wrapper, or by an expression."""
    if not pattern.startswith("re:"):
        return f".{pattern}".endswith(f".{module}")
    try:
        return re.match(pattern[3:], module) is not None
    except re.error:
        raise ConfigError(f"config.json: ignore has {show(pattern)}, which is no regular expression") from None


class SafetensorsCheckpoint:
    """One file, or the shards of an index. Tensors keep their dtype; quantised weights become float32 where they
    do not stay packed."""

    def __init__(self, files: ModelFiles, keeps: Collection[str]) -> None:
        self.config: dict[str, Any] = files.config
        self.eos_ids = files.eos_ids
        self._files = files
        self.stored = read_shards(files.safetensors, None if files.index is None else
                                  read_weight_map(files.index), files.name_of)
        self.shards = self.stored.files
        if not any(self.shards.values()):
            raise ConfigError(f"{files.folder}: the safetensors files hold no tensors")
        self._reader = reader_of(self.config, f"{files.folder}/config.json")
        self._quantised, self._beside = _quantised(self.shards, self._reader)
        self._formats = {name: stored.format for stored in self._quantised.values() for name in stored.names
                         if stored.format is not None and _stays(stored.format, keeps)}
        if self._reader is not None and self._reader.stacked:
            self._formats = {name.format(expert): form for stored in self._quantised.values() for name in stored.names
                             for expert in range(stored.experts) if (form := self._formats.get(name))}
        plain = sum(not _stays(stored.format, keeps) for stored in self._quantised.values())
        self.dequantised = "" if self._reader is None or not plain else (
            f"{'its' if not self._formats else f'{plain} of its'} quantised weights ({self._reader.label})")

    def format(self, name: str) -> Format | None:
        return self._formats.get(name)

    def tensors(self, wants: Wants = everything,
                device: str = "cpu") -> Iterator[tuple[str, Tensor | Packed]]:
        """Every wanted weight once, in the order of the files; scales are read with their weight."""
        self._check_absent(wants)
        read: Read = _read if device == "cpu" else _Staged(device)
        for path, stored in self.shards.items():
            file, _ = open_regular(path)
            with file:
                for entry in stored.values():
                    if entry.name in self._quantised:
                        yield from self._made(self._quantised[entry.name], path, wants, read)
                    elif entry.name not in self._beside and wants(entry.name):
                        yield entry.name, _finite(read(file, entry, path), entry.name, path)

    def _check_absent(self, wants: Wants) -> None:
        """Raises ConfigError: the index places a wanted tensor in a shard that lacks it. A head may: where
        the model has none of its own, that is the embedding, and the model says what it lacks."""
        for name, shard in self.stored.absent.items():
            if wants(name) and name != "lm_head.weight":
                raise ConfigError(f"{self._files.index}: tensor {show(name)} is not in {shard}: the shards "
                                  "are not of one checkpoint, or a file is damaged")

    def unread(self, ignores: Callable[[str], bool]) -> list[str]:
        """Lines for the log: which tensors of the files are not read, and why."""
        why = dict(self.stored.unread)
        if extra := [name for stored in self.shards.values() for name in stored if ignores(name)]:
            why["not of this model"] = extra
        lines = [f"text of {self._files.name}; {self._files.towers(self.stored.towers)}"
                 ] if self._files.wrapper else []
        if why:
            num = sum(map(len, why.values()))
            lines.append(f"{counted(num, 'tensor')} {'is' if num == 1 else 'are'} not read: " + "; ".join(
                f"{len(names)} {kind} ({some(names)})" for kind, names in why.items()))
        return lines

    def _made(self, stored: _Quantised, path: Path, wants: Wants,
              read: Read) -> Iterator[tuple[str, Tensor | Packed]]:
        """The wanted weights that these tensors store, which are in any shards. Raises ConfigError."""
        assert self._reader is not None
        for expert in range(stored.experts):
            names = [name.format(expert) if self._reader.stacked else name for name in stored.names]
            if not any(map(wants, names)):
                continue
            tensors = {}
            for part, (where, entry) in stored.parts.items():
                file, _ = open_regular(where)
                with file:
                    tensors[part] = read(file, _item(entry, expert) if self._reader.stacked else entry, where)
            try:
                made = self._reader.read(tensors)
            except ValueError as why:
                raise ConfigError(f"{path}: tensor {show(names[0])}: {why}: the file is damaged") from None
            del tensors
            for first, name in enumerate(names):
                if wants(name):
                    weight = made if len(names) == 1 else made[first::len(names)]
                    if isinstance(weight, Packed) and name not in self._formats:
                        weight = weight.floats()
                    weight = _finite(weight, name, path)
                    yield name, weight.compact() if isinstance(weight, Packed) and read is not _read else weight
                    del weight          # before the next one is made


def _stays(form: Format | None, keeps: Collection[str]) -> bool:
    """Whether a weight of this format stays packed, as a GPU keeps it if codes of four bits are among these kinds."""
    return form is not None and form.kind in keeps and ("u4" not in keeps or form.cols % 16 == 0)


class _Quantised(NamedTuple):
    """Weights that several tensors store: names in the model, where each part is, how many experts have such
    ones, and how they may stay packed."""

    names: tuple[str, ...]
    parts: dict[str, tuple[Path, StoredTensor]]
    experts: int
    format: Format | None


def _quantised(shards: dict[Path, dict[str, StoredTensor]],
               reader: WeightReader | None) -> tuple[dict[str, _Quantised], set[str]]:
    """Return the weights that the reader makes, by the name of the first tensor of each, and the names of
    their other tensors. Raises ConfigError: one that it does not read, or a type that no weight has."""
    modules: dict[str, dict[str, tuple[Path, StoredTensor]]] = {}
    made: dict[str, _Quantised] = {}
    beside: set[str] = set()
    if reader is not None:
        for path, stored in shards.items():
            for entry in stored.values():
                module, _, part = entry.name.rpartition(reader.between)
                if part in reader.beside:
                    modules.setdefault(module, {})[part] = path, entry
        for module, found in modules.items():
            path, entry = max(found.values(), key=lambda where: where[1].num_bytes)
            names = reader.names(module)
            entries = {part: stored for part, (_, stored) in found.items()}
            parts = names and reader.parts(entries, _what(path, entry))
            if parts:
                first = found[parts[0]][1]
                made[first.name] = _Quantised(names, {p: found[p] for p in parts},
                                              first.shape[0] if reader.stacked else 1, reader.format_of(entries))
                beside.update(stored.name for part, (_, stored) in found.items() if part != parts[0])
    for path, stored in shards.items():
        for entry in stored.values():
            if entry.dtype in ("F8_E4M3", "U8", "I8", "I32") and entry.name not in made and (
                    entry.name not in beside):
                if reader is not None:
                    raise ConfigError(f"{_what(path, entry)}, but config.json says {reader.label}, which has no "
                                      "such tensor")
                if entry.dtype != "F8_E4M3":
                    raise ConfigError(f"{path}: tensor {show(entry.name)} has dtype {show(entry.dtype)}: this type "
                                      "is not supported where config.json has no quantization_config")
                raise ConfigError(f"{_what(path, entry)}, but config.json has no quantization_config that says "
                                  "its blocks")
    return made, beside


def _what(path: Path, entry: StoredTensor) -> str:
    return f"{path}: tensor {show(entry.name)} is {entry.dtype} of shape {entry.shape}"


def _item(entry: StoredTensor, index: int) -> StoredTensor:
    """One item of its first axis."""
    each = entry.num_bytes // entry.shape[0]
    return replace(entry, shape=entry.shape[1:], begin=entry.begin + index * each, num_bytes=each)


def _read(file: BinaryIO, entry: StoredTensor, path: Path) -> Tensor:
    tensor = torch.empty(entry.shape, dtype=_DTYPES[entry.dtype])
    _read_into(file, entry.begin, _bytes_of(tensor), path)
    return tensor


class _Staged:
    """Reads into a device's memory, see `_read`: parts are read by several threads into pinned memory, each copied
    as soon as it has come. One thread copies out of the page cache at a few GB/s, a device takes 50."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._threads = ThreadPoolExecutor(_READERS, "penstock-read")
        pinned = torch.empty(_STAGED, _PART_BYTES, dtype=torch.uint8, pin_memory=True)
        self._free: deque[tuple[Tensor, torch.cuda.Event]] = deque(
            (part, torch.cuda.Event()) for part in pinned)      # type: ignore[no-untyped-call]

    def __call__(self, file: BinaryIO, entry: StoredTensor, path: Path) -> Tensor:
        tensor = torch.empty(entry.shape, dtype=_DTYPES[entry.dtype], device=self._device)
        flat = tensor.view(-1).view(torch.uint8)

        def read(first: int, staged: Tensor, copied: torch.cuda.Event) -> None:
            copied.synchronize()                # what was there before
            _read_into(file, entry.begin + first, staged.numpy().data, path)

        coming: deque[tuple[Future[None], Tensor, Tensor, torch.cuda.Event]] = deque()
        first = 0
        try:
            while coming or first < len(flat):
                while self._free and first < len(flat):
                    part = flat[first:first + _PART_BYTES]
                    staged, copied = self._free.popleft()
                    done = self._threads.submit(read, first, staged[:len(part)], copied)
                    coming.append((done, part, staged, copied))
                    first += len(part)
                done, part, staged, copied = coming.popleft()
                self._free.append((staged, copied))
                done.result()
                part.copy_(staged[:len(part)], non_blocking=True)
                copied.record()
        finally:
            wait([done for done, *_ in coming])         # before the file is closed
        return tensor


class GGUFCheckpoint:
    """One GGUF file. Blocks become float32, or stay packed; F32, F16 and BF16 tensors keep their type."""

    def __init__(self, files: ModelFiles, keeps: Collection[str]) -> None:
        assert files.gguf is not None
        self.path = files.gguf
        self.config = files.config
        self.eos_ids = files.eos_ids
        self.dequantised = ""
        self.wanted: list[tuple[GGUFTensor, HFName]] = []
        self._formats: dict[str, Format] = {}
        names: set[str] = set()
        for stored in files.gguf_header.tensors.values():
            if stored.name == ROPE_FREQS:                    # is in the config
                continue
            target = hf_name(stored.name, self.config, str(self.path))
            _check_shape(stored, target, self.config, self.path)
            if target.name in names:
                raise ConfigError(f"{self.path}: two tensors are {target.name}")
            names.add(target.name)
            self.wanted.append((stored, target))
            if "u8" in keeps and stored.block in gguf.PACKED and len(stored.shape) - target.experts == 2:
                self._formats |= dict.fromkeys(_names(stored, target), gguf.format_of(stored.block))

    def format(self, name: str) -> Format | None:
        return self._formats.get(name)

    def unread(self, ignores: Callable[[str], bool]) -> list[str]:
        return []

    def tensors(self, wants: Wants = everything,
                device: str = "cpu") -> Iterator[tuple[str, Tensor | Packed]]:
        """Every wanted weight once, in the order of the file; merged experts one by one."""
        file, _ = open_regular(self.path)
        with file, ThreadPoolExecutor(_DEQUANTISERS, "penstock-dequantise") as threads:
            for stored, target in self.wanted:
                names = _names(stored, target)
                shape = stored.shape[1:] if target.experts else stored.shape
                for i, name in enumerate(names):
                    if not wants(name):
                        continue
                    begin = stored.begin + i * (stored.num_bytes // len(names))
                    tensor = _read_blocks(file, stored, begin, shape, self.path, threads,
                                          packed=name in self._formats)
                    if target.rope_heads:
                        tensor = _halves(tensor, target.rope_heads)
                    if target.plus and isinstance(tensor, Tensor):
                        tensor = tensor - target.plus
                    tensor = _finite(tensor, name, self.path).to(device)
                    yield name, tensor.compact() if isinstance(tensor, Packed) and device != "cpu" else tensor
                    del tensor


def _names(stored: GGUFTensor, target: HFName) -> list[str]:
    return [target.name.format(i) for i in range(stored.shape[0])] if target.experts else [target.name]


def _check_shape(stored: GGUFTensor, target: HFName, config: dict[str, Any], path: Path) -> None:
    dims = 2 + target.name.endswith("weight")
    wrong = (len(stored.shape) != dims or stored.shape[0] != config["num_experts"] if target.experts
             else len(stored.shape) > 2)
    if wrong or (target.rope_heads and stored.shape[0] % (2 * target.rope_heads)):
        raise ConfigError(f"{path}: tensor {show(stored.name)} has shape {stored.shape}, which does not "
                          "fit the metadata")


def _read_blocks(file: BinaryIO, stored: GGUFTensor, begin: int, shape: tuple[int, ...], path: Path,
                 threads: ThreadPoolExecutor, packed: bool) -> Tensor | Packed:
    """`shape` elements from byte `begin` on: read as they are, or packed, or chunk by chunk into float32 by several
    threads."""
    if stored.block in _DTYPES:
        tensor = torch.empty(shape, dtype=_DTYPES[stored.block])
        _read_into(file, begin, _bytes_of(tensor), path)
        return tensor
    if packed:
        raw_NB = np.empty((prod(shape) // stored.block_elements, stored.block_bytes), dtype=np.uint8)
        _read_into(file, begin, raw_NB.reshape(-1).data, path)
        return gguf.packed_of(stored.block, raw_NB, shape)
    tensor = torch.empty(shape, dtype=torch.float32)
    out = tensor.view(-1).numpy()
    block_type = GGMLQuantizationType[stored.block]
    num_blocks = prod(shape) // stored.block_elements
    step = _CHUNK_ELEMENTS // stored.block_elements

    def fill(first: int) -> None:
        count = min(step, num_blocks - first)
        part = np.empty(count * stored.block_bytes, dtype=np.uint8)
        _read_into(file, begin + first * stored.block_bytes, part.data, path)
        start = first * stored.block_elements
        with np.errstate(all="ignore"):                      # _finite looks at the result
            # One long row: blocks are independent, and the package loops over rows in Python.
            out[start:start + count * stored.block_elements] = dequantize(part[None], block_type)[0]

    for _ in threads.map(fill, range(0, num_blocks, step)):
        pass
    return tensor


def _halves(weight: Weight, heads: int) -> Weight:
    """Undo llama.cpp's interleaving: rows (2i, 2i+1) of each head become rows (i, i + H/2)."""
    rows = weight.shape[0]
    order = torch.arange(rows).view(heads, rows // heads // 2, 2).transpose(1, 2).reshape(-1)
    return cast(Weight, weight[order])


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.view(-1).view(torch.uint8).numpy().data


def _read_into(file: BinaryIO, begin: int, target: memoryview, path: Path) -> None:
    """Fill `target` from byte `begin` on. Raises ConfigError when the bytes are not there."""
    try:
        done = 0
        while done < len(target):
            # It may read fewer bytes, and at most 2 GiB; several threads read one file.
            got = os.preadv(file.fileno(), [target[done:]], begin + done)
            if not got:
                raise ConfigError(f"{path}: ended at byte {begin + done}: the file has changed")
            done += got
    except OSError as e:
        raise ConfigError(f"{path}: cannot be read: {e.strerror}") from None


def _finite(weight: Weight, name: str, path: Path) -> Weight:
    """The sum tells: a NaN or an infinity anywhere stays in it. Weights never hold one. The sum of finite
    weights may overflow, so each element is looked at before the file is called damaged."""
    if isinstance(weight, Packed) and weight.kind == "u8" and not weight.finite():
        raise ConfigError(f"{path}: tensor {show(name)} has scales that f16, in which they are kept, "
                          "cannot hold: take --dtype float32, or the file is damaged")
    if (isinstance(weight, Tensor) and not weight.sum(dtype=torch.float32).isfinite()
            and not weight.isfinite().all()):
        raise ConfigError(f"{path}: tensor {show(name)} holds NaN or infinity: the file is damaged")
    return weight
