"""Fields that are taken without effect: the one table for every API, and for each place in a request.

Such a field is a hint to another service (its caches, its accounts, its speed) or a note of the caller's. It
cannot change an answer of this server, so any value is taken. A field that changes an answer never belongs
here: it is obeyed, or it is a 400 that names it.
"""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec


class OfBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields of a request's body, on any route."""

    access_programs: Any = None
    anthropic_beta: Any = None
    anthropic_version: Any = None
    betas: Any = None
    billing_policy: Any = None
    cache_control: Any = None
    client_metadata: Any = None
    context_management: Any = None
    diagnostics: Any = None
    fallback_credit_token: Any = None
    fallbacks: Any = None
    inference_geo: Any = None
    max_tool_calls: Any = None
    prediction: Any = None
    prompt_cache_breakpoint: Any = None
    prompt_cache_key: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    safety_identifier: Any = None
    service_tier: Any = None
    speed: Any = None
    user: Any = None
    user_profile_id: Any = None


class OfTool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields of a tool, and of the `function` in it."""

    allowed_callers: Any = None
    cache_control: Any = None
    defer_loading: Any = None
    eager_input_streaming: Any = None
    input_examples: Any = None
    prompt_cache_breakpoint: Any = None


class OfPart(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields of a text part, in a message or in the system prompt."""

    annotations: Any = None
    cache_control: Any = None
    citations: Any = None
    id: Any = None
    logprobs: Any = None
    prompt_cache_breakpoint: Any = None


# Of a message every field is a note, but those of its role and these, which other servers obey.
OBEYED_ELSEWHERE = ("audio", "function_call", "images", "partial", "prefix", "videos")
_PLACES: Mapping[str, type[msgspec.Struct]] = {
    "the body": OfBody, "a tool, or its `function`": OfTool, "a text part": OfPart}


def names(place: type[msgspec.Struct]) -> frozenset[str]:
    """Return the field names of OfBody, OfTool or OfPart."""
    return frozenset(place.__struct_fields__)


def table() -> str:
    """All of it in Markdown, as docs/reference/http-api.md has it."""
    rows = [f"| {where} | {', '.join(f'`{n}`' for n in place.__struct_fields__)} |"
            for where, place in _PLACES.items()]
    other = ", ".join(f"`{n}`" for n in OBEYED_ELSEWHERE)
    return "\n".join(["| place | without effect, whatever the value |", "|---|---|", *rows,
                      f"| a message | every field that is not of its role, except {other} |"])
