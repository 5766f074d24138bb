"""Tokenize long texts without holding the event loop: refuse them by length, or encode them on a thread.

Owns the limits on texts: how long, and how many at once. Knows no HTTP.
"""
from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from penstock.config.base.errors import context_exceeded
from penstock.text.tokenizer import BYTE_OF, Tokenizer
from penstock.text.turns import Turns

INLINE_CHARS_MAX = 16 << 10          # shorter ones are encoded at once: some milliseconds
TEXTS_MAX = 32                       # long requests that are encoded or wait for it
# A composed character stands for at most four (U+1F82), so normalizers of these kinds shrink as much.
_COMPOSED = {"NFC": 4, "NFKC": 4}
_SAME_LENGTH = ("NFD", "NFKD", "Prepend", "Lowercase")
_KEEPS_ALL = ("ByteLevel", "Metaspace", "Digits", "UnicodeScripts")


class Encoder:
    """The tokenizer of one server. `encode` on one event loop; `close` anywhere."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._bound = bound(tokenizer.raw.to_str())
        self._turns = Turns("encode", TEXTS_MAX)

    async def encode(self, texts: Sequence[str], *, special: bool, context: int,
                     tenant: bytes = b"") -> list[list[int]]:
        """Return the ids of each text.

        Raises RequestError: a text cannot fit `context` tokens, is not valid Unicode, or the tokenizer fails
        at it; TooManyTexts.
        """
        for text in texts:
            if self._bound is not None and (least := self._bound.tokens(text)) >= context:
                raise context_exceeded(least, context, len(text))
        if sum(map(len, texts)) <= INLINE_CHARS_MAX:
            return [self._tokenizer.encode(text, add_special=special) for text in texts]
        return await self._turns.run(tenant, functools.partial(self._encode, texts, special, context))

    def _encode(self, texts: Sequence[str], special: bool, context: int) -> list[list[int]]:
        """Runs on the thread of `Turns`. The tokenizer does not hold the interpreter's lock meanwhile."""
        found = []
        for text in texts:
            ids = self._tokenizer.encode(text, add_special=special)
            if len(ids) >= context:
                raise context_exceeded(len(ids), context)
            found.append(ids)
        return found

    def close(self) -> None:
        """Take no more texts. Idempotent."""
        self._turns.close()


@dataclass(frozen=True, slots=True)
class TokenBound:
    """`longest`: the most characters that one token stands for. `dropped`: those that become no token."""

    longest: int
    dropped: str = ""

    def tokens(self, text: str) -> int:
        """How many tokens `text` has at least."""
        return -(-(len(text) - sum(map(text.count, self.dropped))) // self.longest)


def bound(state: str) -> TokenBound | None:
    """None where there is none: the tokenizer may drop any character, or make one token of any number of
    unknown ones or spaces.

    state    `tokenizers.Tokenizer.to_str()`
    """
    found = msgspec.json.decode(state)
    model, added = found["model"], found["added_tokens"]
    splits = _kinds(found["pre_tokenizer"], "pretokenizers")
    if any(t["lstrip"] or t["rstrip"] for t in added) or not all(map(_keeps_all, splits)):
        return None
    composed = 1
    for kind in _kinds(found["normalizer"], "normalizers"):
        if kind["type"] == "Replace":
            replaced = kind["pattern"].get("String")
            if replaced is None or not len(replaced) <= max(1, len(kind["content"])) or not kind["content"]:
                return None
        elif kind["type"] not in (*_COMPOSED, *_SAME_LENGTH):
            return None
        composed *= _COMPOSED.get(kind["type"], 1)
    vocabulary = model.get("vocab", ())
    pieces = vocabulary if isinstance(vocabulary, dict) else {piece for piece, _ in vocabulary}
    dropped = _dropped(model, set(pieces), any(kind["type"] == "ByteLevel" for kind in splits))
    if dropped is None:
        return None
    return TokenBound(composed * max(len(piece) for piece in [*pieces, *(t["content"] for t in added)]), dropped)


def _kinds(part: dict[str, Any] | None, name: str) -> list[dict[str, Any]]:
    """A normalizer or pre-tokenizer as the list of its steps."""
    if part is None:
        return []
    return [k for p in part[name] for k in _kinds(p, name)] if part["type"] == "Sequence" else [part]


def _keeps_all(split: dict[str, Any]) -> bool:
    if split["type"] in ("Split", "Punctuation"):
        return bool(split["behavior"] != "Removed")
    return split["type"] in _KEEPS_ALL


def _dropped(model: dict[str, Any], pieces: set[str], byte_level: bool) -> str | None:
    """The characters that become no token; None if that may be any, or unknown ones become one together."""
    if byte_level and model["type"] == "BPE":
        # Vocabularies lack bytes that their texts did not have. A character goes if all of its bytes do.
        missing = {byte[0] for char, byte in BYTE_OF.items() if char not in pieces}
        return None if missing & {*range(0x80, 0xC0)} else "".join(chr(b) for b in missing if b < 0x80)
    unknown = model.get("unk_token")
    if model.get("byte_fallback"):
        known = pieces.issuperset(f"<0x{b:02X}>" for b in range(256))
    else:
        known = model["type"] == "BPE" and unknown in pieces and not model["fuse_unk"]
    return "" if known else None
