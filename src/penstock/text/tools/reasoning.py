"""Reasoning between marks that its family writes, before whatever format the rest of an answer has."""
from __future__ import annotations

from dataclasses import dataclass

from penstock.text.tools.formats import harmony
from penstock.text.tools.source import Read, Reading, Reasoning, Source, TextItem


@dataclass(frozen=True, slots=True)
class Marks:
    """Marks of one family.

    open, close   around reasoning; each may be a special token
    label         text that always follows `open`
    kept          reasoning stays in the text, with its marks, also where the prompt has opened it
    channels      reasoning is messages among others of an answer, which `harmony` reads as a whole
    """

    open: str
    close: str
    label: str = ""
    kept: bool = False
    channels: bool = False

    def begins_within(self, prompt: str) -> bool:
        """Return whether a prompt ends inside of reasoning: the template has opened it."""
        return prompt.rstrip().endswith(self.open + self.label)

    def is_over(self, prompt: str) -> bool:
        """Return whether a prompt ends after reasoning, which the template has closed."""
        return prompt.rstrip().endswith(self.close)


THINK = Marks("<think>", "</think>")
# By the name of --reasoning-parser. The first whose closing mark a template has is meant.
MARKS = {
    "gpt_oss": Marks(harmony.CHANNEL, harmony.END, label="analysis" + harmony.MESSAGE, channels=True),
    "mistral": Marks("[THINK]", "[/THINK]"), "seed_oss": Marks("<seed:think>", "</seed:think>"),
    "minimax_m3": Marks("<mm:think>", "</mm:think>"),
    "gemma4": Marks("<|channel>", "<channel|>", label="thought"),
    "kimi_vl": Marks("◁think▷", "◁/think▷"),
    "think": THINK,
    "minimax_m2_append_think": Marks(THINK.open, THINK.close, kept=True),
}


def marks_of(template: str) -> Marks | None:
    """Return the marks of the model whose chat template this is; None: its answers have no reasoning."""
    return next((m for m in MARKS.values() if m.close in template and (m.open in template or not m.channels)), None)


def behind_reasoning(read: Read, *, within: bool, separate: bool, marks: Marks = THINK,
                     calls: str = "") -> Read:
    """Read reasoning, then what `read` reads.

    within    the answer's text begins inside of it
    separate  False: it is text, with its marks
    calls     a mark that ends reasoning as well, and begins calls; "": there is none
    """
    def reading(source: Source) -> Reading:
        source.mark()
        if within or (yield from source.one_of(marks.open + marks.label)):
            ends = (marks.close, calls) if calls else (marks.close,)
            if not separate:
                source.no_call()            # what was taken is text
                if within and marks.kept:
                    source.tell(TextItem, marks.open + marks.label)
                yield from source.until(marks.close, kept=True)
            else:
                yield from source.blanks()
                if (mark := (yield from source.until(*ends, kind=Reasoning))) != marks.close:
                    source.at -= len(mark)
                    source.mark()
                yield from source.blanks()
        yield from read(source)
    return reading
