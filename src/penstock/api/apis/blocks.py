"""One answer as blocks, each of reasoning, text or one call, which Anthropic's API and OpenAI's Responses
write."""
from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from penstock.api.openai_format import Whole
from penstock.config.base.errors import RequestError, show
from penstock.engine.client.generation import ChoicePiece, Usage
from penstock.engine.wire import TokenLogprob
from penstock.text.tools.asked import AnswerForm
from penstock.text.tools.source import AnswerReader, Arguments, CallBegun, Item, Reasoning, TextItem


@dataclass(slots=True)
class Block:
    """`text` so far; of a call its arguments, and it has a `name` and an `id`."""

    kind: Literal["reasoning", "text", "call"]
    index: int
    text: str = ""
    name: str = ""
    id: str = ""
    scores: list[Score] = field(default_factory=list)      # of a text's tokens
    num_new: int = 0                                        # of those, how many the last text brought


Score: TypeAlias = "tuple[int, TokenLogprob]"


@dataclass(slots=True)
class BlockScores:
    """Which tokens, with their logprobs, an answer's texts are made of.

    A token belongs to the text in which it begins; tokens of marks, calls and ends belong to none."""

    _text: str = ""
    _at: int = 0
    _tokens: deque[tuple[int, Score]] = field(default_factory=deque)       # where each begins in the text

    def add(self, piece: ChoicePiece | Whole) -> None:
        """What has come, before it is read."""
        self._text += piece.text
        self._tokens += zip(piece.offsets, zip(piece.tokens, piece.logprobs, strict=True), strict=True)

    def take(self, text: str) -> list[Score]:
        """Tokens of the next `text` that was read."""
        begin = self._text.find(text, self._at)
        if begin < 0:                           # what separates it from an earlier text is no token's
            text = text.lstrip()
            begin = max(self._text.find(text, self._at), self._at)
        self._at = begin + len(text)
        found = []
        while self._tokens and self._tokens[0][0] < self._at:
            place, score = self._tokens.popleft()
            if place >= begin:
                found.append(score)
        return found


@dataclass(slots=True)
class BlockFormat(ABC):
    """A form of one choice. Its events are made by `begun`, `more` and `ended`, which a subclass has."""

    model: str
    asked: AnswerForm
    id: str = ""
    blocks: list[Block] = field(default_factory=list)
    named: bool = True
    scores: BlockScores | None = None         # None: no logprobs are asked for
    _open: bool = False
    _reader: AnswerReader | None = None

    # ------------------------------------------------------------ of a subclass
    @abstractmethod
    def begun(self, block: Block) -> list[dict[str, Any]]: ...

    @abstractmethod
    def more(self, block: Block, text: str) -> list[dict[str, Any]]: ...

    @abstractmethod
    def ended(self, block: Block) -> list[dict[str, Any]]: ...

    @abstractmethod
    def stopped(self, finish: str, stop_reason: str | None) -> None:
        """Hear why the answer ended."""

    @abstractmethod
    def answer(self, usage: Usage) -> dict[str, Any]:
        """All of it, from `blocks`."""

    # ------------------------------------------------------------ as Format
    def event(self, piece: ChoicePiece) -> bytes | None:
        return None

    def chunks(self, piece: ChoicePiece) -> list[dict[str, Any]]:
        if self.scores is not None:
            self.scores.add(piece)
        items = self._items(piece.text, piece.finish is not None)
        found = [event for item in items for event in self._took(item)]
        if piece.finish is not None:
            found += self._end()
            self.stopped(piece.finish, piece.stop_reason)
        return found

    def whole(self, choices: Sequence[Whole], usage: Usage) -> dict[str, Any]:
        [choice] = choices
        if self.scores is not None:
            self.scores.add(choice)
        for item in self._items(choice.text, True):
            for _ in self._took(item):
                pass
        self._end()
        self.stopped(choice.finish or "stop", choice.stop_reason)
        return self.answer(usage)

    @property
    def called(self) -> bool:
        return any(b.kind == "call" for b in self.blocks)

    def _items(self, text: str, final: bool) -> list[Item]:
        if self._reader is None:
            self._reader = self.asked.reader()
        return self._reader.take(text, final)

    def _took(self, item: Item) -> Iterator[dict[str, Any]]:
        match item:
            case CallBegun(name):
                yield from self._begin(Block("call", len(self.blocks), "", name, self.asked.call_id(item)))
            case Arguments(text):
                yield from self._add(text)
            case TextItem(text) | Reasoning(text):
                kind: Literal["text", "reasoning"] = "text" if isinstance(item, TextItem) else "reasoning"
                if not self._open or self.blocks[-1].kind != kind:
                    yield from self._begin(Block(kind, len(self.blocks)))
                yield from self._add(text)
            case _:
                yield from self._end()

    def _begin(self, block: Block) -> Iterator[dict[str, Any]]:
        yield from self._end()
        self.blocks.append(block)
        self._open = True
        yield from self.begun(block)

    def _add(self, text: str) -> Iterator[dict[str, Any]]:
        block = self.blocks[-1]
        block.text += text
        if self.scores is not None and block.kind != "call":
            new = self.scores.take(text)
            block.scores, block.num_new = block.scores + new, len(new)
        yield from self.more(block, text)

    def _end(self) -> list[dict[str, Any]]:
        if not self._open:
            return []
        self._open = False
        return self.ended(self.blocks[-1])


def joined_text(content: Any, where: str, kinds: Sequence[str], only: str) -> str:
    """Text of a string or of parts {"type", "text"} of these kinds. only: what to say to a part of another
    type. Raises RequestError."""
    if isinstance(content, str):
        return content
    texts = []
    for i, part in enumerate(content if isinstance(content, list) else [content]):
        match part:
            case {"type": str(kind), "text": str(text)} if kind in kinds:
                texts.append(text)
            case {"type": "refusal", "refusal": str(text)} if "output_text" in kinds:
                texts.append(text)                      # what an assistant said instead
            case {"type": str(kind)} if kind not in kinds:
                raise RequestError(f"{where}[{i}].type is {show(kind)}: {only}", f"{where}[{i}].type")
            case _:
                at = f"{where}[{i}]"
                raise RequestError(f"{at} is not text, which is all that is supported", at)
    return "\n".join(texts)


def arguments_object(text: str) -> dict[str, Any]:
    """Return the arguments of a call; nothing if it was cut off."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
