"""What a chat request asks of its answers: which tools they may call, what of them is reasoning; and how such
answers are read. Knows a model's format; knows no request's fields and no engine."""
from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.config.base.errors import RequestError, show
from penstock.config.request.grammar import Grammar
from penstock.text.tools.formats import harmony
from penstock.text.tools.lark import TokenId
from penstock.text.tools.parameters import Schemas
from penstock.text.tools.reasoning import THINK, Marks, behind_reasoning
from penstock.text.tools.source import (
    AnswerReader,
    Arguments,
    CallBegun,
    Item,
    Reasoning,
    TextItem,
)
from penstock.text.tools.table import CallFormat, calls_grammar, channels_grammar, grammar_behind_reasoning, plain

TOOLS_MAX = 128
_NAME = re.compile("[A-Za-z0-9_.:-]{1,128}")
NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class ToolOffer:
    """Tools of a request.

    tools      as the template shows them: {"type": "function", "function": {"name", "description",
    "parameters"}} required   the answer is calls; of `only`, if that is not ""
    many       several calls in one answer
    strict     names whose arguments match their schema, whatever the answer is
    """

    tools: Sequence[Mapping[str, Any]]
    required: bool = False
    only: str = ""
    many: bool = True
    strict: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        """Raises RequestError."""
        names = [t["function"]["name"] for t in self.tools]
        if len(names) > TOOLS_MAX:
            raise RequestError(f"tools has {len(names)} tools: at most {TOOLS_MAX}", "tools")
        for i, name in enumerate(names):
            at = f"tools[{i}].function.name"
            if _NAME.fullmatch(name) is None:
                raise RequestError(f"{at} is {show(name)}: 1 to 128 letters, digits, _, -, : and .", at)
            if name in names[:i]:
                raise RequestError(f"{at} is {show(name)}, as of another tool", at)
        if self.required and not names:
            raise RequestError("tool_choice wants a call, and there are no tools", "tool_choice")
        if self.only and self.only not in names:
            raise RequestError(f"tool_choice names {show(self.only)}, which is none of the tools",
                               "tool_choice")

    @property
    def schemas(self) -> Schemas:
        """Return the schemas of the arguments, by name."""
        return {t["function"]["name"]: t["function"].get("parameters") or NO_PARAMETERS for t in self.tools
                if not self.only or t["function"]["name"] == self.only}


NOTHING = ToolOffer(())


@dataclass(frozen=True, slots=True)
class Answered:
    """One answer, whole."""

    text: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)


@dataclass(slots=True)
class Call:
    id: str
    name: str
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """How the answers of one request are read.

    form       of calls; None: there are none
    reasoning  None: there is none to look for; True: answers begin within it, False: it may come first
    around     its marks
    header     of the message within which the prompt ends, of a format of channels
    """

    form: CallFormat | None = None
    offer: ToolOffer = NOTHING
    reasoning: bool | None = None
    separate: bool = True
    around: Marks = THINK
    header: str = ""

    @property
    def channels(self) -> bool:
        """Calls, reasoning and text are messages, which one reader reads."""
        return (self.form is not None and self.form.channels) or (self.reasoning is not None and self.around.channels)

    @property
    def plain(self) -> bool:
        """All is text."""
        apart = self.reasoning is not None and (self.separate or self.around.kept)
        return self.form is None and not apart and not self.channels

    def reader(self) -> AnswerReader:
        read = plain if self.form is None else self.form.read
        if self.channels:
            read = harmony.reading(separate=self.reasoning is not None and self.separate, header=self.header)
        elif self.reasoning is not None:
            calls = self.form.opening if self.form is not None and self.form.ends_reasoning else ""
            read = behind_reasoning(read, within=self.reasoning, separate=self.separate, marks=self.around,
                                    calls=calls)
        return AnswerReader(read, {} if self.form is None else self.offer.schemas)

    def call_id(self, begun: CallBegun) -> str:
        """Return the id that the model wrote, else a new one."""
        if begun.id:
            return begun.id
        return f"call_{secrets.token_hex(12)}" if self.form is None else self.form.call_id()

    def answered(self, text: str) -> Answered:
        """Read the text of a whole answer."""
        if self.plain:
            return Answered(text)
        texts: dict[type[Item], str] = {TextItem: "", Reasoning: ""}
        calls: list[Call] = []
        for item in self.reader().take(text, final=True):
            if isinstance(item, CallBegun):
                calls.append(Call(self.call_id(item), item.name))
            elif isinstance(item, Arguments):
                calls[-1].arguments += item.text
            elif isinstance(item, TextItem | Reasoning):
                texts[type(item)] += item.text
        return Answered(texts[TextItem], texts[Reasoning], calls)

    def marks(self) -> tuple[str, ...]:
        """What readers must see, also where it is a special token."""
        if self.channels:
            return harmony.MARKS
        calls = () if self.form is None else self.form.special
        return calls if self.reasoning is None else (*calls, self.around.open, self.around.close)

    def grammar(self, token_id: TokenId, given: Grammar | None) -> Grammar | None:
        """Return the grammar of the answers; `given`: what text must match. Raises RequestError."""
        offer, before = self.offer, self.reasoning
        if self.channels:
            free = self.form is None or not (offer.required or offer.strict or not offer.many)
            return None if free and given is None else channels_grammar(
                {} if self.form is None else offer.schemas, token_id, required=offer.required, text=given,
                header=self.header)
        if self.form is not None and (offer.required or offer.strict or not offer.many or given is not None):
            return calls_grammar(self.form, offer.schemas, token_id, required=offer.required, many=offer.many,
                                 reasoning=before, text=given, marks=self.around)
        if given is None or before is None:
            return given
        return grammar_behind_reasoning(given, token_id, before, self.around)


def asked_of(form: CallFormat | None, offer: ToolOffer, prompt: str, *, reasons: Marks | None,
             separate: bool) -> AnswerForm:
    """form, reasons: of the model, None where it has no such thing. `prompt`: the text before the answers."""
    reasoning = None if reasons is None or reasons.is_over(prompt) else reasons.begins_within(prompt)
    around, form = reasons or THINK, form if offer.tools else None
    if around.channels:                 # a prompt ends after no reasoning and before any
        reasoning = False
    return AnswerForm(form, offer, reasoning, separate and not around.kept, around, harmony.opened(prompt))
