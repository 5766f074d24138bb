"""Mutated safetensors and GGUF headers: a ConfigError of one line, or a table that fits the file.

The parsers run on bytes in memory, so that a million cases fit into `make soak`.
"""
from __future__ import annotations

import io
import json
import random
import re
import resource
import struct
from collections.abc import Callable, Iterator
from math import prod
from typing import Any

import pytest

from penstock.config.base.errors import ConfigError
from penstock.model.weights.gguf_config import check_config, hf_config, hf_name
from penstock.model.weights.gguf_file import BLOCKS, GGUFHeader, parse_gguf_header
from penstock.model.weights.safetensors_file import _OTHER_BITS, DTYPE_BYTES, parse_safetensors_header

MEMORY_GROWTH_BYTES_MAX = 64 << 20


Chunks = list[bytes]                 # a file, cut where its fields begin


def a_safetensors_file(rng: random.Random) -> Chunks:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}} if rng.random() < 0.5 else {}
    offset = 0
    for i in range(rng.randint(1, 5)):
        dtype = rng.choice(list(DTYPE_BYTES))
        shape = [rng.randint(1, 6) for _ in range(rng.randint(0, 3))]
        size = prod(shape) * DTYPE_BYTES[dtype]
        header[f"model.layers.{i}.w"] = {"dtype": dtype, "shape": shape,
                                         "data_offsets": [offset, offset + size]}
        offset += size
    # Cut before every JSON value, so that a mutation replaces a whole one.
    text = re.split(rb"(?<=[:,\[ ])(?=[\w\"\[{])", json.dumps(header).encode())
    return [struct.pack("<Q", len(b"".join(text))), *text, bytes(offset)]


def string(text: str) -> Chunks:
    return [struct.pack("<Q", len(text.encode())), text.encode()]


def number(form: str, *values: float) -> Chunks:
    return [struct.pack("<" + code, v) for code, v in zip(form, values, strict=True)]


def a_gguf_file(rng: random.Random) -> Chunks:
    pairs = [string("general.architecture") + number("I", 8) + string("llama"),
             string("general.alignment") + number("II", 4, 32),
             string("llama.attention.layer_norm_rms_epsilon") + number("If", 6, 1e-5),
             string("tokenizer.ggml.tokens") + number("IIQ", 9, 8, 3) + string("a") + string("é")
             + string("<s>"),
             string("tokenizer.ggml.scores") + number("IIQfff", 9, 6, 3, 0, 1, 2),
             string("tokenizer.ggml.add_bos_token") + number("IB", 7, 1)]
    for key, value in (("block_count", 1), ("embedding_length", 32), ("context_length", 64),
                       ("feed_forward_length", 64), ("attention.head_count", 2)):
        pairs.append(string(f"llama.{key}") + number("II", 4, value))
    rng.shuffle(pairs)
    table: list[Chunks] = []
    offset = 0
    names = ["token_embd.weight", "blk.0.attn_q.weight", "output_norm.weight", "blk.0.ffn_up.weight"]
    for name in names[:rng.randint(1, 4)]:
        kind = rng.choice((0, 1, 2, 3, 8, 30))
        dims = [32 * rng.randint(1, 2), rng.randint(1, 4)][:rng.randint(1, 2)]
        table.append(string(name) + number("I" + "Q" * len(dims) + "IQ", len(dims), *dims, kind, offset))
        _, elements, size = BLOCKS[kind]
        offset = -(-(offset + prod(dims) // elements * size) // 32) * 32
    head = [b"GGUF", *number("IQQ", 3, len(table), len(pairs)),
            *(chunk for part in pairs + table for chunk in part)]
    return [*head, bytes(-len(b"".join(head)) % 32) + bytes(offset)]


EXTREMES = [0, 1, 2, 3, 9, 24, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63, 2**64 - 1]
WORDS = [b"null", b"-1", b"1e999", b"NaN", b"true", b'"F32"', b'"F8_E4M3"', b"[]", b"{}", b"[[[[", b'""',
         b"99999999999999999999999", b"\\ud800", b"../", b"0", b",", b'"shape"', b"\xff\xfe", b"[" * 9999]


def mutate(file: Chunks, rng: random.Random) -> bytes:
    """One or two changes: a field replaced, dropped or doubled, or bytes changed anywhere."""
    chunks = list(file)
    for _ in range(rng.choice((1, 1, 2))):
        at = rng.randrange(len(chunks) - 1)              # not the data
        chunk = chunks[at]
        match rng.randrange(8):
            case 0:
                chunks[at] = (rng.choice(EXTREMES) % (1 << 8 * len(chunk))).to_bytes(len(chunk), "little")
            case 1:
                chunks[at] = b""
            case 2:
                chunks[at] = chunk + chunk
            case 3:
                # JSON: the comma or bracket that ends the chunk stays.
                chunks[at] = rng.choice(WORDS) + re.sub(rb"^[^,}\]:]*", b"", chunk)
            case 4:
                chunks[at] = chunks[rng.randrange(len(chunks) - 1)]
            case 5:
                where = rng.randrange(len(chunk) or 1)
                chunks[at] = chunk[:where] + bytes([rng.randrange(256)]) + chunk[where + 1:]
            case 6:
                chunks = [b"".join(chunks)[:rng.randrange(len(b"".join(chunks)) + 1)], b""]
            case _:
                chunks[-1] = chunks[-1][:-1] if rng.random() < 0.5 else chunks[-1] + b"\0"
    if file[0] != b"GGUF" and rng.random() < 0.8:        # else every changed length is refused first
        chunks[0] = struct.pack("<Q", len(b"".join(chunks[1:-1])))
    return b"".join(chunks)


def check_safetensors(data: bytes) -> None:
    tensors = parse_safetensors_header(io.BytesIO(data), len(data), "file")
    at = 8 + int.from_bytes(data[:8], "little")
    for t in tensors.values():          # what was accepted tiles the file exactly
        bits = 8 * DTYPE_BYTES[t.dtype] if t.dtype in DTYPE_BYTES else _OTHER_BITS[t.dtype]
        assert t.begin == at and 8 * t.num_bytes == prod(t.shape) * bits > 0
        at += t.num_bytes
    assert at == len(data)


def check_gguf(data: bytes) -> None:
    header = parse_gguf_header(io.BytesIO(data), len(data), "file")
    end = 0
    for t in header.tensors.values():
        assert end <= t.begin <= t.begin + t.num_bytes <= len(data)
        assert prod(t.shape) * t.block_bytes == t.num_bytes * t.block_elements > 0
        end = t.begin + t.num_bytes
    check_gguf_config(header)


def check_gguf_config(header: GGUFHeader) -> None:
    config = hf_config(header, "file")
    check_config(config, "file")
    assert 1 <= config["num_attention_heads"] <= config["hidden_size"] < 2**28
    for name in header.tensors:
        assert hf_name(name, config, "file").name


def cases(make: Callable[[random.Random], Chunks], count: int, seed: int) -> Iterator[bytes]:
    rng = random.Random(seed)
    for i in range(count):
        if i % 50 == 0:
            whole = make(rng)
        yield mutate(whole, rng)


def peak_rss_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


FORMATS = {"safetensors": (a_safetensors_file, check_safetensors), "gguf": (a_gguf_file, check_gguf)}


def run(kind: str, count: int, seed: int) -> None:
    make, check = FORMATS[kind]
    check(b"".join(make(random.Random(seed))))                    # unchanged files are accepted
    refused = 0
    before = peak_rss_bytes()
    for data in cases(make, count, seed):
        try:
            check(data)
        except ConfigError as e:
            refused += 1
            message = str(e)
            assert message.startswith("file") and "\n" not in message and len(message) < 600, message
            message.encode()
    assert peak_rss_bytes() - before < MEMORY_GROWTH_BYTES_MAX
    # The mutations hit the header: most of them are noticed, and some are harmless.
    assert 0.5 * count < refused < count


@pytest.mark.parametrize("kind", FORMATS)
def test_mutated_header_is_refused_or_fits(kind: str) -> None:
    run(kind, 5000, seed=1)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("count, seed", [pytest.param(30_000, 0, marks=pytest.mark.sweep),
                                         *(pytest.param(100_000, seed, marks=pytest.mark.soak) for seed in range(10))])
def test_a_million_mutated_headers(kind: str, count: int, seed: int) -> None:
    run(kind, count, seed=100 + seed)


@pytest.mark.parametrize("kind", FORMATS)
def test_every_truncation_is_refused(kind: str) -> None:
    make, check = FORMATS[kind]
    rng = random.Random(5)
    for _ in range(5):
        whole = b"".join(make(rng))
        padding = 31 if kind == "gguf" else 0            # the last tensor's own padding may be cut
        for size in range(len(whole) - padding):
            with pytest.raises(ConfigError):
                check(whole[:size])
