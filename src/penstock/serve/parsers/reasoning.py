"""Reasoning between `<think>` and `</think>` (Qwen3, DeepSeek, GLM), before whatever format the rest has."""
from __future__ import annotations

from penstock.serve.parsers.source import Read, Reading, Reasoning, Source

OPEN, CLOSE = "<think>", "</think>"


def begins_within(prompt: str) -> bool:
    """Whether a prompt ends inside of reasoning: the template has opened it."""
    return prompt.rstrip().endswith(OPEN)


def is_over(prompt: str) -> bool:
    """Whether a prompt ends behind reasoning, which the template has closed."""
    return prompt.rstrip().endswith(CLOSE)


def behind_reasoning(read: Read, *, within: bool, separate: bool) -> Read:
    """within: the answer's text begins inside of it. Not `separate`: it is text, with its marks."""
    def reading(source: Source) -> Reading:
        source.mark()
        if within or (yield from source.one_of(OPEN)):
            if not separate:
                source.no_call()            # what was taken is text
                yield from source.until(CLOSE, kept=True)
            else:
                yield from source.blanks()
                yield from source.until(CLOSE, kind=Reasoning)
                yield from source.blanks()
        yield from read(source)
    return reading
