"""Opening and parsing small files that strangers wrote: whatever is wrong is one ConfigError line.

Knows JSON and bytes; knows neither models nor tensors.
"""
from __future__ import annotations

import json
import math
import os
import stat
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

import xxhash

from penstock.config.base.errors import ConfigError, show

_CONSTANTS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
JSON_BYTES_MAX = 64 << 20           # the index of a model with a million tensors is 100 MB; none is


def open_regular(path: Path) -> tuple[BinaryIO, int]:
    """An unbuffered handle to a regular file, and its size in bytes. Raises ConfigError."""
    try:
        # A FIFO would block the open for ever: look first.
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise ConfigError(f"{path}: not a regular file")
        file = open(path, "rb", buffering=0)
        return file, os.fstat(file.fileno()).st_size
    except (OSError, ValueError) as e:          # ValueError: a NUL in the name
        if isinstance(e, ConfigError):
            raise
        raise ConfigError(f"{path}: cannot be read: {getattr(e, 'strerror', None) or e}") from None


def read_bytes(path: Path, bytes_max: int) -> bytes:
    """The whole file; refused when it is larger than `bytes_max`. Raises ConfigError."""
    file, size = open_regular(path)
    with file:
        if size > bytes_max:
            raise ConfigError(f"{path}: {size} bytes; at most {bytes_max} are expected here")
        try:
            data = file.read(bytes_max + 1)
        except OSError as e:
            raise ConfigError(f"{path}: cannot be read: {e.strerror}") from None
    if len(data) != size:
        raise ConfigError(f"{path}: changed while it was read")
    return data


def read_text(path: Path, bytes_max: int = 4 << 20) -> str:
    """A UTF-8 file. Raises ConfigError."""
    try:
        return read_bytes(path, bytes_max).decode("utf-8")
    except UnicodeDecodeError as e:
        raise ConfigError(f"{path}: not UTF-8 (byte {e.start})") from None


def parse_json_object(data: bytes, where: str, *, constants: bool = False) -> dict[str, Any]:
    """Return a JSON object; duplicate keys are refused.

    constants   read NaN, Infinity and -Infinity, as Python's json module writes them, and {"__float__":
                "Infinity"} and its like, as transformers 5 does; else they are refused
    Raises      ConfigError
    """

    def constant(text: str) -> float:
        if not constants:
            raise ValueError(f"{text} is not JSON")
        return _CONSTANTS[text]

    def no_duplicates(pairs: list[tuple[str, Any]]) -> Any:
        made = dict(pairs)
        if constants and len(pairs) == 1 and pairs[0][0] == "__float__" and pairs[0][1] in [*_CONSTANTS]:
            return _CONSTANTS[pairs[0][1]]
        if len(made) != len(pairs):
            again = Counter(key for key, _ in pairs).most_common(1)[0][0]
            raise ValueError(f"duplicate key {show(again)}")
        return made

    try:
        value = json.loads(data.decode("utf-8"), parse_constant=constant,
                           object_pairs_hook=no_duplicates)
    except RecursionError:
        raise ConfigError(f"{where}: JSON is nested too deeply") from None
    except UnicodeDecodeError as e:
        raise ConfigError(f"{where}: not UTF-8 (byte {e.start})") from None
    except ValueError as e:
        raise ConfigError(f"{where}: not valid JSON: {e}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: expected a JSON object, found {type(value).__name__}")
    return value


def read_json_object(path: Path, bytes_max: int = JSON_BYTES_MAX) -> dict[str, Any]:
    """Return the JSON object of a model's small file, which Python wrote: constants are read."""
    return parse_json_object(read_bytes(path, bytes_max), str(path), constants=True)


SAMPLES, SAMPLE_BYTES, BETWEEN_BYTES = 64, 16 << 10, 64 << 20


def digest_of_files(paths: Iterable[Path], *, sampled: bool = False) -> str:
    """Return a digest of all bytes of large files, whatever their names: 7 GB a second and core where they are in
    the page cache. Not against an attacker, who would need other bytes with the same digest. sampled: of their sizes,
    and of 16 KiB at SAMPLES places of each or, if those are more, each 64 MiB: all of small ones. Raises
    ConfigError."""
    found, chunk = [], bytearray(SAMPLE_BYTES if sampled else 4 << 20)
    for path in paths:
        file, size = open_regular(path)
        digest = xxhash.xxh3_128(b"%d" % size if sampled else b"")
        places = max(SAMPLES, size // BETWEEN_BYTES)
        with file:
            try:
                for i in range(places if sampled else 0):
                    file.seek(i * size // places)
                    digest.update(memoryview(chunk)[:file.readinto(chunk)])     # type: ignore[attr-defined]
                while not sampled and (num_bytes := file.readinto(chunk)):      # type: ignore[attr-defined]
                    digest.update(memoryview(chunk)[:num_bytes])
            except OSError as e:
                raise ConfigError(f"{path}: cannot be read: {e.strerror}") from None
        found.append(digest.hexdigest())
    return xxhash.xxh3_128("".join(sorted(found)).encode()).hexdigest()
