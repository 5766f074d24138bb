"""Output tokens to text, one token at a time, with stop strings.

Owns when text may be shown: never half a character, never the beginning of what may become a stop
string. Knows a tokenizer and token ids; knows no request, no engine and no HTTP.
"""
from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from penstock.text.tokenizer import Tokenizer
from penstock.text.tools.source import overlap

# A character is at most 4 bytes, so a window that still ends in U+FFFD after this many tokens of
# one byte each is broken text, not an unfinished character.
TOKENS_HELD_MAX = 8
BROKEN = "�"


@dataclass(slots=True)
class TextDelta:
    """New text. `stop` is the stop string that ended it, completed by output token `count`."""

    text: str
    stop: str | None = None
    count: int = 0


class Detokenizer:
    """Text of one choice.

    skip_special  hide special tokens, but for those of `shown`
    stop          strings that end the text
    include_stop  show the stop string too    min_tokens    tokens in which no stop is completed
    context       prompt ids before the output: decoders that strip a leading space need them

    The deltas of `push` and the one of `flush`, joined, are `decode(all ids)`, cut at the stop
    string that is complete first (of two complete at one character, the longer). It does not
    matter how the ids were split over calls. An added token is its own text, also where `decode`
    takes its letters for bytes. Tokenizers that fall back to byte tokens show broken
    UTF-8 as it comes; their own `decode` may take back a character that was shown already.
    """

    def __init__(self, tokenizer: Tokenizer | None, *, skip_special: bool = True,
                 stop: Sequence[str] = (), include_stop: bool = False, min_tokens: int = 0,
                 context: Sequence[int] = (), shown: frozenset[int] = frozenset()) -> None:
        self._pieces = _Pieces()
        if tokenizer is not None:
            hidden = tokenizer.special_ids - shown if skip_special else frozenset()
            self._pieces = (_ByteLevel(tokenizer, hidden) if tokenizer.byte_level else
                            _PrefixDiff(tokenizer, hidden, context))
        self._stops = tuple(stop)
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._held = ""                  # decoded, not shown: may begin a stop string
        self._stopped = False
        self.count = 0                   # tokens pushed, up to the stop
        self.chars = 0                   # characters decoded so far, shown or held

    def push(self, token_ids: Iterable[int]) -> TextDelta:
        """What these tokens add. After a stop everything else is ignored."""
        if self._stopped:
            return TextDelta("")
        if not self._stops:
            new = [self._pieces.add(token) for token in token_ids]
            self.count += len(new)
            return self._take(new[0] if len(new) == 1 else "".join(new))
        shown: list[str] = []
        for token in token_ids:
            self.count += 1
            delta = self._take(self._pieces.add(token))
            shown.append(delta.text)
            if delta.stop is not None:
                return TextDelta("".join(shown), delta.stop, self.count)
        return TextDelta("".join(shown))

    def flush(self) -> TextDelta:
        """What was held back; the output has ended."""
        if self._stopped:
            return TextDelta("")
        delta = self._take(self._pieces.end())
        if delta.stop is not None:
            return TextDelta(delta.text, delta.stop, self.count)
        held, self._held, self._stopped = self._held, "", True
        return TextDelta(delta.text + held)

    def _take(self, new: str) -> TextDelta:
        self.chars += len(new)
        if not self._stops:
            return TextDelta(new)
        if not new:
            return TextDelta("")
        text, held = self._held + new, len(self._held)
        # What is held was searched before, or not wanted: a stop ends in what is new.
        found = [(at + len(s), at, s) for s in self._stops
                 if (at := text.find(s, max(0, held + 1 - len(s)))) >= 0]
        if found and self.count > self._min_tokens:
            end, at, stop = min(found)
            self._stopped, self._held = True, ""
            return TextDelta(text[:end if self._include_stop else at], stop)
        keep = max(overlap(text, s) for s in self._stops)
        self._held = text[len(text) - keep:]
        return TextDelta(text[:len(text) - keep])


class _Pieces:
    """Pieces of a model without a tokenizer: ids only."""

    def add(self, token: int) -> str:
        return ""

    def end(self) -> str:
        return ""


class _ByteLevel(_Pieces):
    """Byte-level BPE: a token is bytes, text is their UTF-8 with U+FFFD for what is broken."""

    def __init__(self, tokenizer: Tokenizer, hidden: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._between = True                     # two characters, not within one

    def add(self, token: int) -> str:
        if token in self._hidden:
            return ""
        data = self._tokenizer.token_bytes(token)
        if self._between and data.isascii():
            return data.decode("ascii")
        text = self._decoder.decode(data)
        self._between = not self._decoder.getstate()[0]
        return text

    def end(self) -> str:
        return self._decoder.decode(b"", final=True)


class _PrefixDiff(_Pieces):
    """Any other decoder: decode a short window with and without the new token, show the rest.

    The window starts at the last token but one that showed text, so that a decoder which strips
    the space of a first word sees a word before it.
    """

    def __init__(self, tokenizer: Tokenizer, hidden: frozenset[int], context: Sequence[int]) -> None:
        self._raw = tokenizer.raw
        self._hidden = hidden
        self._ids = [t for t in context[-TOKENS_HELD_MAX:] if t not in self._hidden]
        self._read = len(self._ids)                  # ids[:read] are shown
        self._shown = self._decode()

    def add(self, token: int) -> str:
        if token in self._hidden:
            return ""
        self._ids.append(token)
        return self._show(final=len(self._ids) - self._read >= TOKENS_HELD_MAX)

    def end(self) -> str:
        return self._show(final=True)

    def _show(self, final: bool) -> str:
        text = self._decode()
        if text.endswith(BROKEN) and not final:
            return ""
        new = text[len(self._shown):]
        if new.strip():
            del self._ids[:self._read]
            self._shown = self._decode()
        else:
            self._shown = text
        self._read = len(self._ids)
        return new

    def _decode(self) -> str:
        if not self._ids:
            return ""
        return self._raw.decode(self._ids, skip_special_tokens=False)
