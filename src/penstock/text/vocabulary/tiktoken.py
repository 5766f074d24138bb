"""A `tokenizers.Tokenizer` from tiktoken.model, which Kimi's repositories have: ranks of byte strings.

The pattern and the ids of special tokens are code in such a repository, which is never run: a table here has
them by the class that tokenizer_config.json names, and other classes are refused by name.
"""
from __future__ import annotations

import base64
import binascii
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models

from penstock.config.base.errors import ConfigError, show
from penstock.model.weights.files import read_bytes
from penstock.text.gguf_tokenizer import library_errors
from penstock.text.vocabulary.patterns import KIMI, split_by

_BYTES_MAX = 64 << 20
_TOKEN_BYTES_MAX = 512                  # splitting a token is quadratic in it; Kimi's have up to 128
# By tokenizer_class: the pattern, and how many ids for special tokens follow the ranks.
CLASSES = {"TikTokenTokenizer": (KIMI, 256)}


def tokenizer_of_tiktoken(path: Path, config: dict[str, Any]) -> Tokenizer:
    """Return the tokenizer of the ranks at `path` and the special tokens of `config`, tokenizer_config.json.

    Raises ConfigError: a damaged file, or a class whose pattern is not known.
    """
    name = config.get("tokenizer_class")
    if not isinstance(name, str) or name not in CLASSES:
        raise ConfigError(f"{path}: tokenizer_class {show(name)} is not known, so neither is how it splits "
                          f"text; {', '.join(CLASSES)} is. Add a tokenizer.json, which transformers makes: "
                          "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)")
    pattern, num_special = CLASSES[name]
    ranks = read_ranks(path)
    with library_errors(str(path)):
        made = Tokenizer(models.BPE(vocab={_spelled(t): rank for t, rank in ranks.items()},
                                    merges=_merges(ranks), ignore_merges=True))
        made.pre_tokenizer = split_by(pattern)
        made.decoder = decoders.ByteLevel()
        made.add_tokens(_special(len(ranks), num_special, config, path))
    return made


def read_ranks(path: Path) -> dict[bytes, int]:
    """Return the rank of each token. Raises ConfigError: not lines of base64 and a number from 0 on."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(read_bytes(path, _BYTES_MAX).splitlines(), 1):
        if not line:
            continue
        text, _, rank = line.partition(b" ")
        try:
            token = base64.b64decode(text, validate=True)
        except binascii.Error:
            token = b""
        if not token or len(token) > _TOKEN_BYTES_MAX or not rank.isdigit() or token in ranks:
            raise ConfigError(f"{path}: line {number} is not a token of its own in base64 and its rank")
        ranks[token] = int(rank)
    missing = [b for b in range(256) if bytes([b]) not in ranks]
    if missing or sorted(ranks.values()) != list(range(len(ranks))):
        raise ConfigError(f"{path}: its {len(ranks)} tokens do not have the ranks from 0 on and every byte "
                          "among them")
    return ranks


def _merges(ranks: dict[bytes, int]) -> list[tuple[str, str]]:
    """Every split of a token into two tokens, the lowest rank of the whole first."""
    found = [(rank, ranks[token[:cut]], ranks[token[cut:]], token, cut)
             for token, rank in ranks.items() for cut in range(1, len(token))
             if token[:cut] in ranks and token[cut:] in ranks]
    return [(_spelled(token[:cut]), _spelled(token[cut:])) for *_, token, cut in sorted(found)]


def _special(first: int, count: int, config: dict[str, Any], path: Path) -> list[AddedToken]:
    """The special tokens in order of their ids, which follow the ranks; those without a name are reserved."""
    given = config.get("added_tokens_decoder", {})
    given = given if isinstance(given, dict) else {}
    names = {int(i): v["content"] for i, v in given.items()
             if i.isdecimal() and isinstance(v, dict) and isinstance(v.get("content"), str)}
    if wrong := sorted(i for i in names if not first <= i < first + count):
        raise ConfigError(f"{path}: the special token {show(names[wrong[0]])} has the id {wrong[0]}; {first} "
                          f"to {first + count - 1} follow its ranks")
    return [AddedToken(names.get(i, f"<|reserved_token_{i}|>"), special=True, normalized=False)
            for i in range(first, first + count)]


def _alphabet() -> list[str]:
    """GPT-2's spelling of bytes: printable ones as themselves, the others from U+0100 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(b) if b in printable else chr(next(others)) for b in range(256)]


ALPHABET = _alphabet()


def _spelled(token: bytes) -> str:
    return "".join(ALPHABET[b] for b in token)
