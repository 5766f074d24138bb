"""Answers of OpenAI's API: items of text as JSON objects, whole or one server-sent event at a time.

Owns the shape of answers. Knows no engine, no HTTP and no request field.
"""
from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import msgspec

from penstock.config.request.scores import Scores
from penstock.engine.client.generation import ChoicePiece, Usage
from penstock.engine.client.metrics import TIERS
from penstock.engine.wire import TokenLogprob
from penstock.text.tools.asked import AnswerForm
from penstock.text.tools.source import AnswerReader, Arguments, CallBegun, Item, Reasoning, TextItem

LOGPROB_MIN = -9999.0        # JSON has no infinity
_ENCODER = msgspec.json.Encoder()
encode = _ENCODER.encode
_TEXT = "\0"                   # stands for any text
DONE = b"data: [DONE]\n\n"


def unix_time() -> int:
    return int(time.time())


def event(value: dict[str, Any], named: bool = False) -> bytes:
    """One server-sent event, `named` by its type. JSON has no raw newline, so it is one line."""
    name = f"event: {value['type']}\n".encode() if named else b""
    return name + b"data: " + encode(value) + b"\n\n"


PADDED_BYTES = 64


def padded(value: dict[str, Any]) -> dict[str, Any]:
    """With OpenAI's `obfuscation`: random characters, so that the event's length tells little of its text."""
    filled = {**value, "obfuscation": ""}
    room = -len(event(filled)) % PADDED_BYTES
    return {**filled, "obfuscation": secrets.token_hex(room)[:room]}


def usage_json(usage: Usage) -> dict[str, Any]:
    details: dict[str, Any] = {"kv_reads": usage.kv_reads} if usage.kv_reads else {}
    if usage.draft_tokens:
        details |= {"draft_tokens": usage.draft_tokens, "accepted_draft_tokens": usage.accepted_draft_tokens}
    # `peer_tokens` and `cached_tokens_by_tier` are old names, for one release.
    remote = dict.fromkeys(("remote_tokens", "peer_tokens"), usage.peer_tokens) if usage.peer_tokens else {}
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {
            "cached_tokens": usage.cached_tokens,
            "cached_tokens_details": {TIERS[tier]: count for tier, count in usage.cached_by_tier.items()},
            "cached_tokens_by_tier": usage.cached_by_tier, **remote},
        **({"completion_tokens_details": details} if details else {}), **clipped_json(usage),
    }


def clipped_json(usage: Usage) -> dict[str, int]:
    """Return the field of a usage: the maximum that an answer had, where it had to be clipped."""
    most = usage.clipped_max_tokens
    return {} if most is None else {"clipped_max_tokens": most}


def token_score(token_bytes: Callable[[int], bytes], token: int, of: TokenLogprob) -> dict[str, Any]:
    """A token of an answer, its logprob and the best ones beside it, as OpenAI shows them."""
    def entry(one: int, logprob: float) -> dict[str, Any]:
        raw = token_bytes(one)
        return {"token": raw.decode("utf-8", "replace"), "logprob": max(logprob, LOGPROB_MIN),
                "bytes": list(raw)}

    return {**entry(token, of.logprob), "top_logprobs": [entry(t, p) for t, p in of.top]}


@dataclass(slots=True)
class Whole:
    """One choice, complete."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    finish: str | None = None
    stop_reason: str | None = None
    prompt: Scores | None = None

    def add(self, piece: ChoicePiece) -> None:
        self.text += piece.text
        self.tokens += piece.tokens
        self.logprobs += piece.logprobs
        self.offsets += piece.offsets
        self.finish = piece.finish
        self.stop_reason = piece.stop_reason
        self.prompt = self.prompt if piece.prompt is None else piece.prompt


@dataclass(slots=True)
class Prompts:
    """The prompts of one request: the tokens of each prompt, how many answers each gets, the text shown before
    those."""

    ids: list[list[int]]
    n: int
    echoes: list[str] | None = None

    @property
    def num_choices(self) -> int:
        return len(self.ids) * self.n

    @property
    def longest(self) -> int:
        return max(map(len, self.ids))


class AnswerFormat(Protocol):
    """How one endpoint writes its answers; `chunks` are the events of one piece, `event` their
    bytes, of a piece that has nothing but text: None for other pieces. `named`: events have names, and
    the last is no [DONE]."""

    named: bool
    id: str

    def openings(self, usage: Usage) -> list[dict[str, Any]]: ...
    def event(self, piece: ChoicePiece) -> bytes | None: ...
    def chunks(self, piece: ChoicePiece) -> list[dict[str, Any]]: ...
    def endings(self, usage: Usage) -> list[dict[str, Any]]: ...
    def whole(self, choices: Sequence[Whole], usage: Usage) -> dict[str, Any]: ...


@dataclass(slots=True)
class _Common:
    model: str
    token_bytes: Callable[[int], bytes]
    logprobs: bool                    # asked for
    include_usage: bool
    return_token_ids: bool
    prompts: Prompts
    num_prompt: int | None = None     # logprobs of each token of a prompt, beside its own
    created: int = field(default_factory=unix_time)
    id: str = ""
    named: bool = False
    _waiting: dict[int, Whole] = field(default_factory=dict)
    _around: dict[tuple[int, str], tuple[bytes, bytes]] = field(default_factory=dict)
    kind: ClassVar[str]               # of its events

    def _only_text(self, piece: ChoicePiece) -> bool:
        return bool(piece.text) and piece.finish is None and piece.prompt is None and not (
            self.logprobs or self.return_token_ids or piece.index in self._waiting)

    def _filled(self, made: Callable[[int, str, str], dict[str, Any]], index: int, name: str,
                text: str) -> bytes:
        """Event of a choice that adds `text` under a name, as `made`; what is around that is made once."""
        around = self._around.get((index, name))
        if around is None:
            before, _, behind = event(made(index, name, _TEXT)).rpartition(encode(_TEXT))
            around = self._around[index, name] = before, behind
        return around[0] + encode(text) + around[1]

    def _frame(self, kind: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model,
                "choices": choices, **more}

    def _streamed(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        if self.include_usage:        # null in every chunk but the last, as OpenAI sends it
            return self._frame(self.kind, choices, usage=None)
        return self._frame(self.kind, choices)

    def endings(self, usage: Usage) -> list[dict[str, Any]]:
        return [self._frame(self.kind, [], usage=usage_json(usage))] if self.include_usage else []

    def _ids(self, whole: Whole) -> dict[str, Any]:
        return {"token_ids": whole.tokens} if self.return_token_ids else {}

    def _name(self, token: int) -> str:
        return self.token_bytes(token).decode("utf-8", "replace")

    def _of_prompt(self, number: int, scores: Scores | None) -> dict[str, Any]:
        """vLLM's field: of each token itself and the best, by id; null before the first that has any."""
        if self.num_prompt is None or scores is None:
            return {}
        ids = self.prompts.ids[number]
        rows: list[dict[str, Any] | None] = [None] * min(scores.first, len(ids))
        for token, (own, rank, best) in zip(ids[scores.first:], scores.rows(), strict=True):
            row = {str(t): self._ranked(t, p, place)
                   for place, (t, p) in enumerate(best[:self.num_prompt], 1)}
            row.setdefault(str(token), self._ranked(token, own, rank))
            rows.append(row)
        return {"prompt_logprobs": rows}

    def _ranked(self, token: int, logprob: float, rank: int) -> dict[str, Any]:
        return {"logprob": max(logprob, LOGPROB_MIN), "rank": rank, "decoded_token": self._name(token)}


def _delta(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    """What a choice adds."""
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


@dataclass(slots=True)
class ChatFormat(_Common):
    kind = "chat.completion.chunk"
    asked: AnswerForm = AnswerForm()
    _readers: dict[int, AnswerReader] = field(default_factory=dict)
    _num_calls: dict[int, int] = field(default_factory=dict)     # of choices that have begun one

    def __post_init__(self) -> None:
        self.id = f"chatcmpl-{secrets.token_hex(16)}"

    def openings(self, _: Usage) -> list[dict[str, Any]]:
        return [self._streamed([_delta(i, {"role": "assistant", "content": ""})])
                for i in range(self.prompts.num_choices)]

    def event(self, piece: ChoicePiece) -> bytes | None:
        if not self._only_text(piece):
            return None
        if self.asked.plain:
            return self._filled(self._added, piece.index, "content", piece.text)
        parts = []
        for delta in self._deltas(piece):
            [(name, value)] = delta.items()
            text = isinstance(value, str)
            parts.append(self._filled(self._added, piece.index, name, value) if text
                        else event(self._added(piece.index, name, value)))
        return b"".join(parts)

    def _added(self, index: int, name: str, value: Any) -> dict[str, Any]:
        return self._streamed([_delta(index, {name: value})])

    def chunks(self, piece: ChoicePiece) -> list[dict[str, Any]]:
        prompt = self._of_prompt(0, piece.prompt)
        deltas = self._deltas(piece)
        whole = self._waiting.setdefault(piece.index, Whole())
        whole.add(piece)
        if not deltas and piece.finish is None and not self.return_token_ids:
            return [self._streamed([]) | prompt] if prompt else []
        del self._waiting[piece.index]
        if not deltas and whole.tokens:
            deltas = [{"content": ""}]
        found = [_delta(piece.index, d) for d in deltas]
        if found:                     # the first delta has all logprobs and ids
            found[0] |= {"logprobs": self._logprobs(whole), **self._ids(whole)}
        if piece.finish is not None:
            found.append(_delta(piece.index, {}) | {
                "finish_reason": self._finish(piece.finish, self._num_calls.get(piece.index, 0)),
                "stop_reason": piece.stop_reason})
        events = [self._streamed([choice]) for choice in found]
        return [events[0] | prompt, *events[1:]] if prompt else events

    def _deltas(self, piece: ChoicePiece) -> list[dict[str, Any]]:
        if self.asked.plain:
            return [{"content": piece.text}] if piece.text else []
        if piece.index not in self._readers:
            self._readers[piece.index] = self.asked.reader()
        items = self._readers[piece.index].take(piece.text, piece.finish is not None)
        return [delta for item in items if (delta := self._delta(piece.index, item))]

    def _delta(self, index: int, item: Item) -> dict[str, Any]:
        match item:
            case TextItem(text):
                return {"content": text}
            case Reasoning(text):
                return {"reasoning_content": text}
            case CallBegun(name):
                number = self._num_calls.setdefault(index, 0)
                self._num_calls[index] += 1
                return {"tool_calls": [{"index": number, "id": self.asked.call_id(item), "type": "function",
                                        "function": {"name": name, "arguments": ""}}]}
            case Arguments(text):
                return {"tool_calls": [{"index": self._num_calls[index] - 1,
                                        "function": {"arguments": text}}]}
        return {}

    def whole(self, choices: Sequence[Whole], usage: Usage) -> dict[str, Any]:
        return self._frame("chat.completion", [self._choice(i, c) for i, c in enumerate(choices)],
                           usage=usage_json(usage), **self._of_prompt(0, choices[0].prompt))

    def _choice(self, index: int, whole: Whole) -> dict[str, Any]:
        said = self.asked.answered(whole.text)
        empty = not said.text and (said.calls or said.reasoning)
        message: dict[str, Any] = {
            "role": "assistant", "content": None if empty else said.text, "refusal": None}
        if said.reasoning:
            message["reasoning_content"] = said.reasoning
        if said.calls:
            message["tool_calls"] = [{"id": c.id, "type": "function", "function": {
                "name": c.name, "arguments": c.arguments}} for c in said.calls]
        return {"index": index, "message": message, "logprobs": self._logprobs(whole),
                "finish_reason": self._finish(whole.finish, len(said.calls)),
                "stop_reason": whole.stop_reason, **self._ids(whole)}

    @staticmethod
    def _finish(reason: str | None, num_calls: int) -> str | None:
        return "tool_calls" if num_calls and reason == "stop" else reason

    def _logprobs(self, whole: Whole) -> dict[str, Any] | None:
        if not self.logprobs:
            return None
        return {"content": [token_score(self.token_bytes, token, of) for token, of in zip(
            whole.tokens, whole.logprobs, strict=True)], "refusal": None}


@dataclass(slots=True)
class TextFormat(_Common):
    """An answer begins with its prompt's part: echo, logprobs. It waits for those that the first
    answer to the prompt brings."""

    kind = "text_completion"
    num_echoed: int | None = None     # logprobs of each token of an echo, beside its own
    offsets: Callable[[Sequence[int]], list[int]] = lambda ids: [0] * len(ids)
    _scores: dict[int, Scores | None] = field(default_factory=dict)      # of prompts
    _begun: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.id = f"cmpl-{secrets.token_hex(16)}"

    @property
    def _scored(self) -> bool:
        return self.num_echoed is not None or self.num_prompt is not None

    def openings(self, _: Usage) -> list[dict[str, Any]]:
        if self._scored or self.prompts.echoes is None:
            return []
        return [self._streamed([self._opened(i, Whole())]) for i in range(self.prompts.num_choices)]

    def event(self, piece: ChoicePiece) -> bytes | None:
        return self._filled(self._added, piece.index, "text", piece.text) if self._only_text(piece) else None

    def _added(self, index: int, name: str, value: Any) -> dict[str, Any]:
        return self._streamed([
            {"index": index, name: value, "logprobs": None, "finish_reason": None, "stop_reason": None}])

    def chunks(self, piece: ChoicePiece) -> list[dict[str, Any]]:
        number, first = piece.index // self.prompts.n, piece.index % self.prompts.n == 0
        self._waiting.setdefault(piece.index, Whole()).add(piece)
        if not self._scored:
            return self._news(piece.index)
        if first and (piece.prompt is not None or piece.finish is not None):
            self._scores.setdefault(number, piece.prompt)
        if number not in self._scores:
            return []
        chunks = []
        for index in range(number * self.prompts.n, (number + 1) * self.prompts.n):
            if index not in self._begun:
                self._begun.add(index)
                chunks.append(self._streamed([self._opened(index, Whole())]))
            chunks += self._news(index)
        return chunks

    def _news(self, index: int) -> list[dict[str, Any]]:
        """What has waited of a choice, once there is text to send or the end has come."""
        whole = self._waiting.get(index)
        if whole is None or not (whole.text or whole.finish is not None or (
                self.return_token_ids and whole.tokens)):
            return []
        return [self._streamed([self._choice(index, self._waiting.pop(index))])]

    def whole(self, choices: Sequence[Whole], usage: Usage) -> dict[str, Any]:
        self._scores = dict(enumerate(c.prompt for c in choices[::self.prompts.n]))
        return self._frame(self.kind, [self._opened(i, c) for i, c in enumerate(choices)],
                           usage=usage_json(usage))

    def _choice(self, index: int, whole: Whole) -> dict[str, Any]:
        echo = "" if self.prompts.echoes is None else self.prompts.echoes[index // self.prompts.n]
        return {"index": index, "text": whole.text, "logprobs": self._columns(whole, len(echo)),
                "finish_reason": whole.finish, "stop_reason": whole.stop_reason,
                **self._ids(whole)}

    def _opened(self, index: int, whole: Whole) -> dict[str, Any]:
        """A choice with its prompt's echo and logprobs."""
        number = index // self.prompts.n
        choice, scores = self._choice(index, whole), self._scores.get(number)
        if self.prompts.echoes is not None:
            choice["text"] = self.prompts.echoes[number] + choice["text"]
        if self.num_echoed is not None:
            columns = self._columns_of_prompt(self.prompts.ids[number], scores)
            choice["logprobs"] = {name: columns[name] + column for name, column in choice["logprobs"].items()}
        return choice | self._of_prompt(number, scores)

    def _columns(self, whole: Whole, shift: int) -> dict[str, list[Any]] | None:
        """The older shape: columns, and the chosen token among the best."""
        if not self.logprobs:
            return None
        return {
            "tokens": [self._key(t) for t in whole.tokens],
            "token_logprobs": [max(of.logprob, LOGPROB_MIN) for of in whole.logprobs],
            "top_logprobs": [self._best(token, of.logprob, of.top)
                             for token, of in zip(whole.tokens, whole.logprobs, strict=True)],
            "text_offset": [shift + at for at in whole.offsets],
        }

    def _columns_of_prompt(self, ids: Sequence[int], scores: Scores | None) -> dict[str, list[Any]]:
        """null for tokens that have none: the first, and those before `prompt_logprobs_start`."""
        first, rows = len(ids), []
        if scores is not None:
            first, rows = min(scores.first, len(ids)), list(scores.rows())
        none: list[Any] = [None] * first
        best = [self._best(token, own, others[:self.num_echoed])
                for token, (own, _, others) in zip(ids[first:], rows, strict=True)]
        return {"tokens": [self._key(t) for t in ids], "text_offset": self.offsets(ids),
                "token_logprobs": none + [max(own, LOGPROB_MIN) for own, _, _ in rows],
                "top_logprobs": none + best}

    def _best(self, token: int, own: float, best: Sequence[tuple[int, float]]) -> dict[str, float]:
        return {self._key(t): max(p, LOGPROB_MIN) for t, p in [*best, (token, own)]}

    def _key(self, token: int) -> str:
        """Text, or OpenAI's escape for a part of a character, which keeps keys distinct."""
        data = self.token_bytes(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{b:02x}" for b in data)
