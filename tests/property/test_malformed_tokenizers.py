"""Damaged tokenizers, as tokenizer.json and as GGUF metadata: a ConfigError, or one that works."""
from __future__ import annotations

import json
import random
from array import array
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from penstock.config.base.errors import ConfigError
from penstock.model.weights.locate import locate
from penstock.text.gguf_tokenizer import tokenizer_of_gguf
from penstock.text.tokenizer import open_tokenizer

TEXT = "hello <s> é\U0001f600 123\n"
VALUES: list[Any] = [None, True, 0, -1, 2**40, 1.5, float("inf"), "", "a", "a b", "▁", "<s>", "\ud800",
                     [], {}, ["a"], ["a", "b"], [["a", "b"]], {"a": 0}, {"a": -1}, "ByteLevel", "WordPiece"]


def replace_one(value: Any, rng: random.Random) -> Any:
    """`value` with one part, at any depth, replaced, removed or repeated."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        rest = {k: v for k, v in value.items() if k != key}
        return rest if rng.random() < 0.1 else rest | {key: replace_one(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.9:
        i = rng.randrange(len(value))
        if rng.random() < 0.2:
            return value[:i] + rng.choice(([], [value[i]] * 2)) + value[i + 1:]
        return [*value[:i], replace_one(value[i], rng), *value[i + 1:]]
    return rng.choice(VALUES)


def a_tokenizer() -> dict[str, Any]:
    raw = Tokenizer(models.BPE(vocab={"h": 0, "e": 1, "he": 2, "Ġ": 3}, merges=[("h", "e")]))
    raw.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True),
                                                 pre_tokenizers.ByteLevel(add_prefix_space=False)])
    raw.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteLevel()])
    raw.add_special_tokens(["<s>"])
    raw.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 4)])
    made: dict[str, Any] = json.loads(raw.to_str())
    return made


def test_tokenizer_json_with_parts_replaced(tmp_path: Path) -> None:
    whole, rng, refused, count = a_tokenizer(), random.Random(7), 0, 800
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    files = locate(str(tmp_path), load_format="dummy")
    for _ in range(count):
        (tmp_path / "tokenizer.json").write_text(json.dumps(replace_one(whole, rng)))
        try:
            made = open_tokenizer(files, str(tmp_path))
        except ConfigError as e:
            refused += 1
            assert "\n" not in str(e)
            continue
        assert made is not None
        ids = made.encode(TEXT)
        made.decode(ids)
        assert all(isinstance(made.token_bytes(i), bytes) for i in ids)
    assert 0.3 * count < refused < count


def as_parsed(value: Any) -> Any:
    """As the header's parser gives it: a list holds strings, an array numbers; nothing else exists."""
    if isinstance(value, list):
        if all(isinstance(v, str) and v != "\ud800" for v in value):
            return value
        numbers = [v for v in value if isinstance(v, (int, float)) and abs(v) < 2**31]
        return array("f" if any(isinstance(v, float) for v in numbers) else "i", numbers)
    return None if isinstance(value, dict) or value == "\ud800" else value


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_gguf_metadata_with_parts_replaced(kind: str) -> None:
    rng, refused, count = random.Random(8), 0, 2000
    tokens = ["<unk>", "<s>", "</s>", "h", "e", "he", "Ġ", "▁", "<0x0A>", "<tool>"]
    whole = {"model": kind, "pre": "smollm", "tokens": tokens,
             "token_type": [2, 3, 3, 1, 1, 1, 1, 1, 6, 4], "scores": [0.0] * 10, "merges": ["h e"],
             "bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0, "add_bos_token": True}
    for _ in range(count):
        changed = replace_one(whole, rng)
        given = {f"tokenizer.ggml.{key}": as_parsed(value)
                 for key, value in (changed.items() if isinstance(changed, dict) else ())}
        try:
            made = tokenizer_of_gguf(given, "file")
        except ConfigError as e:
            refused += 1
            assert str(e).startswith("file: ") and "\n" not in str(e)
            continue
        made.decode(made.encode(TEXT).ids)
    assert 0.2 * count < refused < count
