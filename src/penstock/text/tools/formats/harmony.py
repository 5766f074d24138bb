"""Harmony, of gpt-oss: an answer is messages, `<|channel|>CHANNEL<|message|>TEXT<|end|>`, each after the first behind
`<|start|>assistant`. Channel analysis is reasoning, a message `to=functions.NAME` is a call, any other is text.

Owns the whole answer: its reader sees reasoning, calls and text. No mark and no header of it is shown.
"""
from __future__ import annotations

import re
from collections.abc import Generator

from penstock.text.tools.formats.json_calls import read_arguments
from penstock.text.tools.lark import Lark
from penstock.text.tools.parameters import Schemas
from penstock.text.tools.source import Read, Reading, Reasoning, Source, TextItem, overlap

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
ENDS = (END, CALL, RETURN)
MARKS = (START, CHANNEL, MESSAGE, CONSTRAIN, *ENDS)
ROLE, NAMESPACE = "assistant", "functions."
HEADER_CHARS_MAX = 400
_MARK = re.compile("|".join(map(re.escape, MARKS)))
_CALLEE = re.compile(r"(?:^|\s)to=(\S+)")
_BEFORE_CHANNEL = re.compile(rf"\s*(?:{ROLE})?(?:\s*to=\S+)?\s*")
_SEPARATOR = "\n\n"


def opened(prompt: str) -> str:
    """Return the header of the message within which a prompt ends; "": it ends before a header."""
    _, begun, rest = prompt.rpartition(START)
    header, within, text = rest.partition(MESSAGE)
    return header if begun and within and not any(m in text for m in ENDS) else ""


def reading(*, separate: bool = True, header: str = "") -> Read:
    """Return a reader of answers. separate: reasoning is apart, else it is text. header: see `opened`."""
    def read(source: Source) -> Reading:
        kinds: set[type[TextItem] | type[Reasoning]] = set()
        found: str | None = header or None
        begun = False                           # behind START
        while True:
            if found is None:
                found = yield from _header(source, begun)
            kind: type[TextItem] | type[Reasoning] = TextItem
            called = False
            if found is None:                   # broken: its marks are dropped, the rest is text
                if source.rest.startswith(CHANNEL):
                    source.at += len(CHANNEL)
            elif (name := _callee(found)) in source.tools:
                called = source.begin(name) or True
                yield from read_arguments(source, stop="<")
            elif separate and _channel(found) == "analysis":
                kind = Reasoning
            mark = yield from _message(source, kind, kinds, called)
            if not mark:
                return
            found, begun = None, mark == START
            if mark == CHANNEL:
                source.at -= len(CHANNEL)
            elif mark in ENDS:
                begun = bool((yield from source.one_of(START)))
    return read


read = reading()


def _header(source: Source, begun: bool) -> Generator[None, None, str | None]:
    """Take a header and its MESSAGE. None: there is none, and nothing is taken, but for one that is cut off."""
    while True:
        text = source.rest
        found = min(((at, m) for m in (MESSAGE, START, *ENDS) if (at := text.find(m)) >= 0), default=None)
        head = text[:found[0]] if found else text[:len(text) - max(overlap(text, m) for m in MARKS)]
        fits = _fits(head, begun)
        if found and fits and found[1] == MESSAGE:
            source.at += len(head) + len(MESSAGE)
            return head
        if found or not fits:
            return None
        if source.final:
            if begun or CHANNEL in head:
                source.drop_rest()
            return None
        yield


def _fits(head: str, begun: bool) -> bool:
    """Whether a header may begin in this way; behind START its role may be any."""
    if len(head) > HEADER_CHARS_MAX or "\n" in head.strip():
        return False
    before, channel, _ = head.partition(CHANNEL)
    if begun:
        return True
    if channel:
        return _BEFORE_CHANNEL.fullmatch(before) is not None
    rest = before.lstrip()
    if ROLE.startswith(rest):
        return True
    rest = rest.removeprefix(ROLE).lstrip()
    return "to=".startswith(rest) or re.fullmatch(r"to=\S*\s*", rest) is not None


def _callee(header: str) -> str:
    found = _CALLEE.search(_MARK.sub(" ", header))
    return "" if found is None else found[1].removeprefix(NAMESPACE)


def _channel(header: str) -> str:
    words = _MARK.sub(" ", header.partition(CHANNEL)[2]).split()
    return words[0] if words else ""


def _message(source: Source, kind: type[TextItem] | type[Reasoning], kinds: set[type[TextItem] | type[Reasoning]],
             called: bool) -> Generator[None, None, str]:
    """Tell the text of a message, apart from an earlier one of its kind (`kinds`). Returns the mark behind it,
    taken; "" at the end."""
    first = True
    while True:
        if first and (called or kind in kinds):
            yield from source.blanks()
        while not source.final and any(m.startswith(source.rest) for m in MARKS):
            yield
        if first and source.rest and not source.rest.startswith(MARKS):
            first = False
            if kind in kinds:
                source.tell(kind, _SEPARATOR)
            kinds.add(kind)
        mark = yield from source.until(*MARKS, kind=kind)
        if mark not in (MESSAGE, CONSTRAIN):
            return mark


def body(lark: Lark, tools: Schemas, many: bool) -> str:
    """One call, in a grammar. The model ends its answer with it, so there are never `many`."""
    def calls() -> Generator[str, None, None]:
        typed = f"({lark.text(' ')}? {lark.mark(CONSTRAIN)} {lark.text('json')} | {lark.text(' json')})?"
        json = f"{typed} {lark.mark(MESSAGE)}"
        for name, schema in tools.items():
            to = f"to={NAMESPACE}{name}"
            yield f"{lark.mark(CHANNEL)} {lark.text(f'commentary {to}')} {json} {lark.json(schema)}"
            yield f"{lark.text(f' {to}')} {lark.mark(CHANNEL)} {lark.text('commentary')} {json} {lark.json(schema)}"
    return lark.any_of(*calls())


def answer(lark: Lark, tools: Schemas, *, required: bool, text: bool, header: str) -> str:
    """The expression of a whole answer: reasoning, then a call or a final text.

    required   there is a call
    text       the final text is `@answer`, and nothing else is shown before it
    header     see `opened`
    """
    def message(channel: str) -> str:
        return f"{lark.mark(CHANNEL)} {lark.text(channel)} {lark.mark(MESSAGE)}"

    again = f"{lark.mark(START)} {lark.text(ROLE)}"
    ended = f"{lark.until(END)} {again}"
    before = [f"{message('analysis')} {ended}", *([] if text else [f"{message('commentary')} {ended}"])]
    shown = "@answer" if text else lark.without(END)
    last = [] if required else [f"{message('final')} {shown}"]
    if tools:
        last.append(body(lark, tools, False))
    start = f"({lark.any_of(*before)})* {lark.any_of(*last)}" if not text else (
        f"({lark.any_of(*before)})* ({' | '.join(last)})")
    if not header:
        return start
    if required or _channel(header) == "analysis":
        return f"{ended} {start}"
    return "@answer" if text else f"({ended} {start} | {lark.without(END)})"
