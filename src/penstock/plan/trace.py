"""A trace: sessions of turns, and the tokens of their prompts.

A session is a closed loop: a turn arrives a pause after the answer before it. A trace of single requests has one
turn a session. Prompts are kept as spans, and become tokens when they arrive, because long ones fill memory.
"""
from __future__ import annotations

import csv
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from penstock.config.base.errors import ConfigError

Keys = list[int]                # of the full pages of a prompt: each of one page and all before it
BLOCK_TOKENS = 512              # of a `hash_ids` entry of a Mooncake trace
BLOCKS_KEPT = 4_096             # of tokens of spans, in memory
COLUMNS = ("arrival_s", "input_tokens", "output_tokens")
CONTEXT_MAX = 1 << 24           # tokens of a prompt and its answer, before `scale`: the largest --max-model-len
TIME_MAX = 1e13                 # Unix time in ms, for the next 250 years


class Span(NamedTuple):
    """`tokens` tokens; spans with the same `name` begin with the same tokens."""

    name: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Turn:
    """One request. With `continues` its prompt is the prompt before it, the answer to that, then `spans`.

    `output` is the number of tokens of the answer, `pause_s` seconds from the answer before it to this request.
    """

    spans: tuple[Span, ...]
    output: int
    pause_s: float = 0.0
    continues: bool = False


@dataclass(frozen=True, slots=True)
class Session:
    """The first turn arrives `start_s` seconds after the trace begins."""

    start_s: float
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class Trace:
    name: str
    sessions: tuple[Session, ...]

    @property
    def num_turns(self) -> int:
        return sum(len(session.turns) for session in self.sessions)

    def prompts(self) -> Iterator[int]:
        """Tokens of each prompt, session by session."""
        for session in self.sessions:
            context = 0
            for turn in session.turns:
                context = context * turn.continues + sum(span.tokens for span in turn.spans)
                yield context
                context += turn.output


def part_of(trace: Trace, share: float) -> Trace:
    """Return every so manieth session, spread over the trace as all of them are."""
    n = len(trace.sessions)
    picked = dict.fromkeys(int(i / share) for i in range(max(1, round(n * share))))
    return Trace(trace.name, tuple(trace.sessions[i] for i in picked if i < n))


class Text:
    """Tokens of spans, below `vocab`; the same in every process."""

    def __init__(self, vocab: int) -> None:
        self._ids = range(vocab)
        self._of = lru_cache(BLOCKS_KEPT)(self._make)

    def _make(self, span: Span) -> tuple[int, ...]:
        return tuple(Random(span.name).choices(self._ids, k=span.tokens))

    def answer(self, span: Span) -> tuple[int, ...]:
        """Its tokens, which are not kept: answers come once."""
        return self._make(span)

    def tokens(self, spans: tuple[Span, ...]) -> list[int]:
        return [token for span in spans for token in self._of(span)]


class Conversation:
    """The tokens of one session so far."""

    def __init__(self, text: Text) -> None:
        self._text = text
        self.tokens: list[int] = []
        self._keys: Keys = []

    def arrive(self, turn: Turn) -> list[int]:
        """Return the prompt of the next turn."""
        if not turn.continues:
            self.tokens, self._keys = [], []
        self.tokens += self._text.tokens(turn.spans)
        return self.tokens

    def answer(self, tokens: Sequence[int]) -> None:
        """The answer to the prompt before."""
        self.tokens += tokens

    def keys(self, page_size: int) -> Keys:
        """Return a key of each full page. page_size: the same at each call."""
        for end in range((len(self._keys) + 1) * page_size, len(self.tokens) + 1, page_size):
            before = self._keys[-1] if self._keys else 0
            self._keys.append(hash((before, *self.tokens[end - page_size:end])))
        return self._keys


class Seen:
    """All pages of all prompts and answers so far: what a cache without a limit has."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._keys: set[int] = set()
        self.prompt_tokens = self.cached_tokens = 0

    def prompt(self, talk: Conversation) -> None:
        """Count a prompt that has just arrived. At least one token of it is computed."""
        keys = talk.keys(self._page_size)
        most = (len(talk.tokens) - 1) // self._page_size
        pages = next((n for n in range(most) if keys[n] not in self._keys), most)
        self.prompt_tokens += len(talk.tokens)
        self.cached_tokens += pages * self._page_size
        self._keys.update(keys)

    def answered(self, talk: Conversation) -> None:
        """Its answer has ended; nothing has computed the KV of the last token."""
        keys = talk.keys(self._page_size)
        self._keys.update(keys[:(len(talk.tokens) - 1) // self._page_size])

    @property
    def share(self) -> float:
        return self.cached_tokens / max(1, self.prompt_tokens)


def largest_hits(trace: Trace, page_size: int) -> float:
    """Share of the prompt tokens that a cache without a limit has, sessions one after the other."""
    text, seen = Text(1 << 30), Seen(page_size)
    for n, session in enumerate(trace.sessions):
        talk = Conversation(text)
        for t, turn in enumerate(session.turns):
            talk.arrive(turn)
            seen.prompt(talk)
            talk.answer(text.answer(Span(f"answer {n} {t}", turn.output)))
            seen.answered(talk)
    return seen.share


# ---------------------------------------------------------------- files
def read(path: str, scale: float = 1.0) -> Trace:
    """Read a trace: Mooncake JSONL, or CSV where the name ends with .csv. `scale` divides all lengths.

    Mooncake: a line has `timestamp` (ms), `input_length`, `output_length`, and `hash_ids`, one for each 512 tokens
    of the prompt. Lines with the same `session_id` are turns of one session, each `delay` ms after the answer before
    it; one without `hash_ids` continues the turn before it, and its `input_length` is what that adds.
    CSV: a header with `arrival_s`, `input_tokens`, `output_tokens`; `session` and `pause_s` if turns have them.
    Raises ConfigError that names the file and the line.
    """
    lines = _csv_lines(path) if path.endswith(".csv") else _mooncake_lines(path)
    sessions: dict[str | int, tuple[float, list[Turn]]] = {}
    contexts: Counter[str | int] = Counter()
    for number, (where, name, start_s, turn) in enumerate(lines):
        key = name or number
        contexts[key] = contexts[key] * turn.continues + sum(span.tokens for span in turn.spans) + turn.output
        if contexts[key] > CONTEXT_MAX:
            raise ConfigError(f"{where}: prompt and answer have {contexts[key]:,} tokens: at most {CONTEXT_MAX:,}")
        turns = sessions.setdefault(key, (start_s, []))[1]
        turns.append(_scaled(turn, scale) if turns else _scaled(turn, scale, first=True))
    if not sessions:
        raise ConfigError(f"--trace {path}: there is no request in it")
    first = min(start_s for start_s, _ in sessions.values())
    made = [Session(start_s - first, tuple(turns)) for start_s, turns in sessions.values()]
    return Trace(Path(path).name, tuple(sorted(made, key=lambda session: session.start_s)))


def _scaled(turn: Turn, scale: float, *, first: bool = False) -> Turn:
    spans = tuple(Span(name, max(1, round(tokens / scale))) for name, tokens in turn.spans)
    return Turn(spans, max(1, round(turn.output / scale)), turn.pause_s, turn.continues and not first)


Line = tuple[str, str, float, Turn]     # file and line, name of the session or "", seconds of its arrival, what arrives


def _mooncake_lines(path: str) -> Iterator[Line]:
    for number, text in _lines_of(path):
        where = f"--trace {path}, line {number}"
        try:
            line = json.loads(text)
        except (ValueError, RecursionError) as e:
            raise ConfigError(f"{where}: not JSON: {e}") from None
        if not isinstance(line, dict):
            raise ConfigError(f"{where}: an object is needed")
        length, output = _tokens(line, "input_length", where), _tokens(line, "output_length", where)
        name, ids = line.get("session_id"), line.get("hash_ids")
        name, alone = "" if name is None else str(name), ids in (None, [])      # a session may be number 0
        turn = Turn((Span(f"{number} of {path}", length),) if alone else _blocks(ids, length, where),
                    output, _seconds(line, "delay", where, 0.0) / 1e3, bool(name) and alone)
        yield where, name, _seconds(line, "timestamp", where, 0.0) / 1e3, turn


def _blocks(ids: object, length: int, where: str) -> tuple[Span, ...]:
    if not isinstance(ids, list) or not (len(ids) - 1) * BLOCK_TOKENS < length <= len(ids) * BLOCK_TOKENS:
        raise ConfigError(f"{where}: hash_ids needs one number for each {BLOCK_TOKENS} tokens of input_length {length}")
    return tuple(Span(f"block {name}", min(BLOCK_TOKENS, length - i * BLOCK_TOKENS)) for i, name in enumerate(ids))


def _csv_lines(path: str) -> Iterator[Line]:
    number = 0                          # of the last line that was read

    def texts() -> Iterator[str]:
        nonlocal number
        for number, text in _lines_of(path):        # noqa: B007  (the loop below reads it)
            yield text

    rows = csv.DictReader(texts())
    missing = [name for name in COLUMNS if name not in (rows.fieldnames or ())]
    if missing:
        raise ConfigError(f"--trace {path}: the first line needs the columns {', '.join(COLUMNS)}; "
                          f"{', '.join(missing)} is missing")
    for row in _rows(rows, path):
        where, name = f"--trace {path}, line {number}", row.get("session") or ""
        if any(row.get(None, ())):
            raise ConfigError(f"{where}: more values than the {len(rows.fieldnames or ())} columns of the first line")
        length, output = _tokens(row, "input_tokens", where), _tokens(row, "output_tokens", where)
        yield where, name, _seconds(row, "arrival_s", where), Turn(
            (Span(f"{number} of {path}", length),), output, _seconds(row, "pause_s", where, 0.0), bool(name))


def _rows(rows: csv.DictReader[str], path: str) -> Iterator[dict[Any, Any]]:
    try:
        yield from rows
    except csv.Error as e:
        raise ConfigError(f"--trace {path}, after line {rows.line_num}: {e}") from None


def _lines_of(path: str) -> Iterator[tuple[int, str]]:
    try:
        with open(path, encoding="utf-8-sig") as file:
            yield from ((number, text) for number, text in enumerate(file, 1) if text.strip())
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"--trace {path}: {e}") from None


def _tokens(row: Mapping[str, Any], name: str, where: str) -> int:
    return int(_number(row, name, where, None, 1, CONTEXT_MAX, "whole number"))


def _seconds(row: Mapping[str, Any], name: str, where: str, default: float | None = None) -> float:
    return _number(row, name, where, default, 0, TIME_MAX, "number")


def _number(row: Mapping[str, Any], name: str, where: str, default: float | None, least: float, most: float,
            kind: str) -> float:
    given = row.get(name)
    given = default if given in (None, "") else given
    try:
        value = math.nan if isinstance(given, bool) else float(given)   # type: ignore[arg-type]  # None: a TypeError
    except (TypeError, ValueError):
        value = math.nan
    except OverflowError:               # an integer of hundreds of digits
        value = math.inf
    if value < least or value > most:
        raise ConfigError(f"{where}: {name} is {_short(given)}: {least} to {most:,.0f}")
    if math.isnan(value) or (kind == "whole number" and value % 1):
        raise ConfigError(f"{where}: {name} is {_short(given)}: a {kind} is needed")
    return value


def _short(given: object) -> str:
    try:
        text = repr(given)
    except ValueError:                  # more digits than Python writes
        return "too long"
    return text if len(text) <= 40 else f"{text[:40]}..."
