"""The fields by which clients offer tools, OpenAI's, as one offer.

Owns those fields' types. How calls are written and read is `parsers`.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import msgspec

from penstock.config.base.errors import RequestError, show
from penstock.config.request.ignored import OfTool, names
from penstock.text.tools.asked import ToolOffer

Mode: TypeAlias = Literal["none", "auto", "required"]


class Function(OfTool, forbid_unknown_fields=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None    # a JSON schema; none: there are no arguments
    strict: bool | None = None


class Tool(OfTool, forbid_unknown_fields=True):
    type: Literal["function"]
    function: Function


class FunctionName(msgspec.Struct, forbid_unknown_fields=True):
    name: str


class NamedTool(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A function by its name, in the form of chat or, without `function`, of Responses."""

    type: Literal["function"]
    function: FunctionName | None = None
    name: str | None = None


class AllowedTools(msgspec.Struct, forbid_unknown_fields=True):
    mode: Literal["auto", "required"]
    tools: list[NamedTool]


class ChosenTool(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """`tool_choice` as an object: a mode, one function, or the tools that are allowed.

    The last two are objects of their own in chat; their fields stand beside `type` in Responses."""

    type: Literal["none", "auto", "required", "function", "allowed_tools"]
    function: FunctionName | None = None
    name: str | None = None
    allowed_tools: AllowedTools | None = None
    mode: Literal["auto", "required"] | None = None
    tools: list[NamedTool] | None = None

    def plain(self) -> tuple[Mode, frozenset[str] | None, str]:
        """The mode, names of the only tools that may be called, and the one that must be. Raises
        RequestError."""
        if self.type == "function":
            return "required", None, _named(self.function, self.name, "tool_choice")
        if self.type != "allowed_tools":
            return self.type, None, ""
        allowed = self.allowed_tools or (
            None if self.mode is None or self.tools is None else AllowedTools(self.mode, self.tools))
        if allowed is None:
            raise RequestError('tool_choice.allowed_tools is missing: give {"mode": "auto" or "required", '
                               '"tools": [...]}', "tool_choice.allowed_tools")
        found = [_named(t.function, t.name, f"tool_choice.tools[{i}]") for i, t in enumerate(allowed.tools)]
        return allowed.mode, frozenset(found), ""


ToolChoice: TypeAlias = Mode | ChosenTool


def _named(function: FunctionName | None, name: str | None, where: str) -> str:
    found = name if function is None else function.name
    if found is None:
        raise RequestError(f"{where}.function is missing: give the name of a tool", f"{where}.function")
    return found


def offer_of(tools: Sequence[Tool] | None, choice: ToolChoice | None, parallel: bool | None) -> ToolOffer:
    """Raises RequestError. The model is not shown tools that `choice` does not allow."""
    mode, allowed, only = choice.plain() if isinstance(choice, ChosenTool) else (choice or "auto", None, "")
    all_tools = list(tools or ())
    ToolOffer([_shown(t) for t in all_tools])           # a wrong tool is refused with `none` too
    if unknown := sorted((allowed or frozenset()) - {t.function.name for t in all_tools}):
        raise RequestError(f"tool_choice allows {show(unknown[0])}, which is none of the tools",
                           "tool_choice")
    given = [] if mode == "none" else [t for t in all_tools if allowed is None or t.function.name in allowed]
    return ToolOffer([_shown(t) for t in given], mode == "required", only, parallel is not False and not only,
                 frozenset(t.function.name for t in given if t.function.strict))


def _shown(tool: Tool) -> dict[str, Any]:
    """The tool as templates know it, without `strict`: a grammar enforces that."""
    hidden = {"strict", *names(OfTool)}
    given = {k: v for k, v in msgspec.structs.asdict(tool.function).items() if k not in hidden}
    return {"type": "function", "function": {k: v for k, v in given.items() if v is not None}}
