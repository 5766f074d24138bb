"""The fields by which clients offer tools, OpenAI's, as one offer.

Owns those fields' types. How calls are written and read is `parsers`.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import msgspec

from penstock.serve.parsers.asked import Offer


class Function(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None    # a JSON schema; none: there are no arguments
    strict: bool | None = None


class Tool(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["function"]
    function: Function


class FunctionName(msgspec.Struct, forbid_unknown_fields=True):
    name: str


class NamedTool(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["function"]
    function: FunctionName


ToolChoice: TypeAlias = Literal["none", "auto", "required"] | NamedTool


def offer_of(tools: Sequence[Tool] | None, choice: ToolChoice | None, parallel: bool | None) -> Offer:
    """Raises RequestError. With `none` the model is not told of the tools."""
    only = choice.function.name if isinstance(choice, NamedTool) else ""
    required = choice == "required" or bool(only)
    given = [] if choice == "none" else list(tools or ())
    Offer([_shown(t) for t in tools or ()])         # what is wrong is told also with `none`
    return Offer([_shown(t) for t in given], required, only, parallel is not False and not only,
                 frozenset(t.function.name for t in given if t.function.strict))


def _shown(tool: Tool) -> dict[str, Any]:
    """As templates know it, `strict` apart: the model is not told, it is made to."""
    given = msgspec.structs.asdict(tool.function)
    return {"type": "function",
            "function": {k: v for k, v in given.items() if k != "strict" and v is not None}}
