"""Items of an answer, and the text that they are read from as it comes.

A format is a generator over a `Source`: it takes what it is sure of, tells items, and yields where it needs
more text. So what it tells does not depend on how the text was cut into pieces.
"""
from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias


@dataclass(frozen=True, slots=True)
class TextItem:
    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """`id`: as the model wrote it; "" where its format has none."""

    name: str
    id: str = ""


@dataclass(frozen=True, slots=True)
class Arguments:
    """More of the JSON text of the call that was begun last. All of it is an object, unless the answer was
    cut off or the model wrote another thing."""

    text: str


@dataclass(frozen=True, slots=True)
class CallEnded:
    pass


Item: TypeAlias = "TextItem | Reasoning | CallBegun | Arguments | CallEnded"
Reading: TypeAlias = "Generator[None, None, None]"
_JUMPS = re.compile(r'["{}\[\]]')
_JUMPS_OR_MARK = re.compile(r'["{}\[\]<]')
_IN_STRING = re.compile(r'["\\]')
_STRING_END = re.compile(r'((?:[^"\\]|\\.)*)"', re.DOTALL)


class Source:
    """The text from `at` on; `final` once no more will come. `tools`: schemas of arguments by the names
    that a call may have."""

    def __init__(self, tools: Mapping[str, Mapping[str, Any]]) -> None:
        self.tools = tools
        self.items: list[Item] = []
        self.final = False
        self._text, self.at = "", 0
        self._marked: tuple[int, int] | None = None      # what is text after all if no call begins

    def feed(self, text: str) -> None:
        gone = self.at if self._marked is None else self._marked[0]
        self._text, self.at = self._text[gone:] + text, self.at - gone
        if self._marked is not None:
            self._marked = 0, self._marked[1] - gone

    @property
    def rest(self) -> str:
        return self._text[self.at:]

    # ------------------------------------------------------------ what generators call
    def until(self, *markers: str, kind: type[TextItem] | type[Reasoning] = TextItem,
              behind_call: bool = False, kept: bool = False) -> Generator[None, None, str]:
        """Tell text up to the first of `markers`, which is taken, without the white space before it; returns
        that, or "" at the end. behind_call: white space alone is nothing. kept: the mark is emitted as well."""
        blank, self._marked = behind_call, None
        while True:
            text = self.rest
            at, marker = _first(text, markers)
            if marker:
                shown = text[:at + len(marker)] if kept else text[:at].rstrip()
                self._marked = self.at + len(shown), self.at + at + len(marker)
                self.at += at + len(marker)
            elif self.final:
                shown, self.at = text, self.at + len(text)
                if blank and not shown.strip():
                    shown = ""
            else:
                shown = text[:_safe(text, markers)]
                self.at += len(shown)
            if shown:
                blank = False
                self.tell(kind, shown)
            if marker or self.final:
                return marker
            yield

    def take(self, *markers: str) -> Generator[None, None, tuple[str, str]]:
        """Text before the first of `markers`, and that, both taken. At the end without one: ("", ""), and
        nothing is taken."""
        while True:
            at, marker = _first(self.rest, markers)
            if marker:
                found = self.rest[:at]
                self.at += at + len(marker)
                return found, marker
            if self.final:
                return "", ""
            yield

    def one_of(self, *markers: str, closing: bool = False) -> Generator[None, None, str]:
        """Skip white space, then take the one of `markers` that comes; "" for anything else, taken is
        nothing. closing: half of one at the end is not text, but cut off."""
        while True:
            text = self.rest
            stripped = text.lstrip()
            for marker in markers:
                if stripped.startswith(marker):
                    self.at += len(text) - len(stripped) + len(marker)
                    return marker
            if not any(m.startswith(stripped) for m in markers):
                return ""
            if self.final:
                self.at += len(text) if closing else 0
                return ""
            yield

    def blanks(self) -> Reading:
        """Skip white space."""
        while True:
            text = self.rest
            self.at += len(text) - len(text.lstrip())
            if self.rest or self.final:
                return
            yield

    def string(self) -> Generator[None, None, str | None]:
        """Take a JSON string; None: none comes, or it is broken."""
        if not (yield from self.one_of('"')):
            return None
        while (found := _STRING_END.match(self._text, self.at)) is None:
            if self.final:
                return None
            yield
        self.at = found.end()
        try:
            value: str = json.loads(f'"{found.group(1)}"')
        except ValueError:
            return None
        return value

    def json_value(self, *, as_arguments: bool, depth: int = 0, stop: str = "") -> Generator[None, None, bool]:
        """Take an object or a list to its end, or what closes `depth` of them; emitted as Arguments if `as_arguments`.
        stop: "<" if that ends it as well, outside of strings. Returns whether it ended by itself."""
        in_string, done, jumps = False, 0, _JUMPS_OR_MARK if stop else _JUMPS
        while True:
            text = self.rest
            while (found := (_IN_STRING if in_string else jumps).search(text, done)) is not None:
                done, char = found.end(), found.group()
                if char == "\\":
                    if done == len(text) and not self.final:
                        done -= 1
                        break
                    done += 1
                elif char == '"':
                    in_string = not in_string
                elif char == "<":
                    self._take_value(text[:done - 1], as_arguments)
                    return False
                else:
                    depth += 1 if char in "{[" else -1
                    if depth <= 0:
                        self._take_value(text[:done], as_arguments)
                        return True
            else:
                done = len(text)
            self._take_value(text[:done], as_arguments)
            done = 0
            if self.final:
                return False
            yield

    def mark(self) -> None:
        """What is taken from here on is text after all if no call begins."""
        self._marked = self.at, self.at

    def begin(self, name: str, call_id: str = "") -> bool:
        """Tell a call of `name`, or that it is no call, if there is no such tool."""
        if name not in self.tools:
            return self.no_call()
        self._marked = None
        self.items.append(CallBegun(name, call_id))
        return True

    def no_call(self) -> bool:
        """What the last `until` took, or all since `mark`, is text; what came behind that is read again."""
        if self._marked is not None:
            begun, self.at = self._marked
            self._marked = None
            self.tell(TextItem, self._text[begun:self.at])
        return False

    def end(self) -> None:
        self.items.append(CallEnded())

    def drop_rest(self) -> None:
        """Drop the rest of a call that was cut off."""
        self.at = len(self._text)

    def _take_value(self, text: str, as_arguments: bool) -> None:
        self.at += len(text)
        if as_arguments:
            self.tell(Arguments, text)

    def tell(self, kind: type[TextItem] | type[Reasoning] | type[Arguments], text: str) -> None:
        """One item for what comes at once; none for nothing."""
        if not text:
            return
        if self.items and isinstance(last := self.items[-1], kind):
            self.items[-1] = kind(last.text + text)
        else:
            self.items.append(kind(text))


def _first(text: str, markers: Sequence[str]) -> tuple[int, str]:
    """Where the first of `markers` is in `text`, and which; the longer of two at one place."""
    found = [(at, -len(m), m) for m in markers if (at := text.find(m)) >= 0]
    if not found:
        return -1, ""
    at, _, marker = min(found)
    return at, marker


def overlap(text: str, mark: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `mark`."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n])), 0)


def _safe(text: str, markers: Sequence[str]) -> int:
    """How much of `text` is in no marker, whatever follows, and not white space before one."""
    kept = max((overlap(text, marker) for marker in markers), default=0)
    return len(text[:len(text) - kept].rstrip()) if markers else len(text)


Read: TypeAlias = "Callable[[Source], Reading]"


class AnswerReader:
    """Items of one answer: give it the text as it comes."""

    def __init__(self, read: Read, tools: Mapping[str, Mapping[str, Any]]) -> None:
        self._source = Source(tools)
        self._reading: Reading | None = read(self._source)

    def take(self, text: str, final: bool = False) -> list[Item]:
        """What `text` adds; `final`: it is the last."""
        source = self._source
        source.feed(text)
        source.final = source.final or final
        if self._reading is not None:
            try:
                next(self._reading)
            except StopIteration:
                self._reading = None
        if self._reading is None and source.rest:
            source.tell(TextItem, source.rest)
            source.at += len(source.rest)
        found, source.items = source.items, []
        return found
