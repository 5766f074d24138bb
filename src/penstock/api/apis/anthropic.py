"""Anthropic's Messages API: its fields as a chat request, and its answers.

Owns both. What a chat request means, and what runs it, is `completions`.
"""
from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias

import msgspec

from penstock.api.apis.blocks import Block, BlockFormat, arguments_object, joined_text
from penstock.api.completions import OpenAI, Reply
from penstock.api.openai_format import clipped_json, encode
from penstock.api.protocol.body import Body, Neutral, Unbuilt
from penstock.api.protocol.openai import ApiError, ChatRequest, parse
from penstock.api.protocol.structured import JsonSchemaFormat, ResponseFormat
from penstock.api.protocol.tools import ChosenTool, Function, Tool, ToolChoice
from penstock.config.base.errors import RequestError, show
from penstock.config.request.ignored import OBEYED_ELSEWHERE, OfPart, OfTool
from penstock.engine.client.generation import Usage


class TextBlock(OfPart, forbid_unknown_fields=True, tag="text", tag_field="type"):
    text: str


class ToolDefinition(OfTool, forbid_unknown_fields=True):
    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None


class AnthropicToolChoice(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None            # without effect: max_tokens is for both
    display: Any = None


class OutputFormat(msgspec.Struct, forbid_unknown_fields=True, tag="json_schema", tag_field="type"):
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, forbid_unknown_fields=True):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None
    task_budget: Any = None                     # without effect, as `budget_tokens`


class _Conversation(Body, kw_only=True, forbid_unknown_fields=True):
    messages: list[dict[str, Any]]
    model: str | None = None
    system: str | list[TextBlock] | None = None
    tools: list[ToolDefinition] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    # Not built.
    container: Unbuilt = None
    mcp_servers: Annotated[Any, Neutral([])] = None

    def chat(self, api: OpenAI, **more: Any) -> ChatRequest:
        """The same as a chat request to `api`. Raises RequestError."""
        choice, config = self.tool_choice, self.output_config
        api.check_turns(self.messages)
        messages = [m for i, given in enumerate(self.messages) for m in _messages(given, i, api.only_text)]
        if self.system:
            text = self.system if isinstance(self.system, str) else "\n".join(b.text for b in self.system)
            messages.insert(0, {"role": "system", "content": text})
        effort: str | None = None if config is None else config.effort
        if self.thinking is not None:
            effort = "none" if self.thinking.type == "disabled" else effort or "high"
        form = None if config is None or config.format is None else ResponseFormat(
            type="json_schema", json_schema=JsonSchemaFormat(schema=config.format.schema))
        prefilled = bool(messages) and messages[-1]["role"] == "assistant"
        return ChatRequest(
            messages=messages, model=self.model, continue_final_message=prefilled, response_format=form,
            reasoning_effort=effort,        # type: ignore[arg-type]    # the same words
            tools=None if self.tools is None else [Tool("function", Function(
                t.name, t.description, t.input_schema, t.strict)) for t in self.tools],
            tool_choice=_choice(choice),
            parallel_tool_calls=not choice.disable_parallel_tool_use if choice is not None else None, **more)


class MessagesRequest(_Conversation, kw_only=True, forbid_unknown_fields=True):
    max_tokens: int
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None
    metadata: dict[str, Any] | None = None      # without effect


class CountRequest(_Conversation, kw_only=True, forbid_unknown_fields=True):
    """What a prompt costs."""


def _choice(given: AnthropicToolChoice | None) -> ToolChoice | None:
    if given is None:
        return None
    if given.type == "tool":
        if given.name is None:
            raise RequestError("tool_choice.name is missing", "tool_choice.name")
        return ChosenTool("function", name=given.name)
    return "required" if given.type == "any" else "none" if given.type == "none" else "auto"


Message: TypeAlias = "dict[str, Any]"


def _messages(given: Mapping[str, Any], index: int, only: str) -> list[Message]:
    """One message as those of a chat: results of tools are messages of their own. only: as for
    `joined_text`."""
    where = f"messages[{index}]"
    role, content = given.get("role"), given.get("content")
    if role not in ("user", "assistant", "system"):
        raise RequestError(f"{where} is not {{\"role\": \"user\" or \"assistant\", \"content\": ...}}", where)
    if (asks := next((n for n in OBEYED_ELSEWHERE if given.get(n)), None)) is not None:
        raise RequestError(f"{where}.{asks} is not supported: leave it out", f"{where}.{asks}")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        raise RequestError(f"{where}.content is neither a string nor a list of blocks", f"{where}.content")
    results: list[Message] = []
    texts: list[str] = []
    calls: list[Message] = []
    reasons: list[str] = []
    for i, block in enumerate(content):
        at = f"{where}.content[{i}]"
        match block:
            case {"type": "text", "text": str(text)}:
                texts.append(text)
            case {"type": "tool_result", "tool_use_id": str(call)} if role == "user":
                said = joined_text(block.get("content") or "", f"{at}.content", ["text"], only)
                results.append({"role": "tool", "tool_call_id": call, "content": said})
            case {"type": "tool_use", "id": str(call), "name": str(name), "input": dict(args)} if (
                    role == "assistant"):
                calls.append({"id": call, "type": "function", "function": {
                    "name": name, "arguments": json.dumps(args, ensure_ascii=False)}})
            case {"type": "thinking", "thinking": str(text)} if role == "assistant":
                reasons.append(text)
            case {"type": "redacted_thinking"} if role == "assistant":
                pass                        # of another model, encrypted: dropped
            case {"type": "image" | "document" as kind}:
                raise RequestError(f"{at}.type is {show(kind)}: {only}", f"{at}.type")
            case {"type": str(kind)}:
                raise RequestError(f"{at}.type is {show(kind)}: not supported in a message of the {role}",
                                   f"{at}.type")
            case _:
                raise RequestError(f"{at} is not a block", at)
    if texts or calls or not results:
        message: Message = {"role": role, "content": "\n".join(texts)}
        if calls:
            message["tool_calls"] = calls
        if reasons:
            message["reasoning_content"] = "\n".join(reasons)
        results.append(message)
    return results


@dataclass(slots=True)
class MessagesFormat(BlockFormat):
    _stop: str = "end_turn"
    _sequence: str | None = None

    def __post_init__(self) -> None:
        self.id = f"msg_{secrets.token_hex(12)}"

    def openings(self, usage: Usage) -> list[dict[str, Any]]:
        return [{"type": "message_start", "message": {**self._message([]), "usage": _usage(usage)}}]

    def begun(self, block: Block) -> list[dict[str, Any]]:
        return [{"type": "content_block_start", "index": block.index, "content_block": _block(block)}]

    def more(self, block: Block, text: str) -> list[dict[str, Any]]:
        kind, name = {"reasoning": ("thinking_delta", "thinking"), "text": ("text_delta", "text"),
                      "call": ("input_json_delta", "partial_json")}[block.kind]
        return [{"type": "content_block_delta", "index": block.index, "delta": {"type": kind, name: text}}]

    def ended(self, block: Block) -> list[dict[str, Any]]:
        signed = [{"type": "content_block_delta", "index": block.index, "delta": {
            "type": "signature_delta", "signature": ""}}] if block.kind == "reasoning" else []
        return [*signed, {"type": "content_block_stop", "index": block.index}]

    def stopped(self, finish: str, stop_reason: str | None) -> None:
        self._sequence = stop_reason
        self._stop = ("max_tokens" if finish == "length" else "stop_sequence" if stop_reason is not None else
                      "tool_use" if self.called else "end_turn")

    def endings(self, usage: Usage) -> list[dict[str, Any]]:
        return [{"type": "message_delta", "usage": _usage(usage),
                 "delta": {"stop_reason": self._stop, "stop_sequence": self._sequence}},
                {"type": "message_stop"}]

    def answer(self, usage: Usage) -> dict[str, Any]:
        return {**self._message([_block(b, whole=True) for b in self.blocks]), "stop_reason": self._stop,
                "stop_sequence": self._sequence, "usage": _usage(usage)}

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.id, "type": "message", "role": "assistant", "model": self.model,
                "content": content, "stop_reason": None, "stop_sequence": None}


def _block(block: Block, *, whole: bool = False) -> dict[str, Any]:
    text = block.text if whole else ""
    if block.kind == "call":
        return {"type": "tool_use", "id": block.id, "name": block.name, "input": arguments_object(text)}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": text, "signature": ""}
    return {"type": "text", "text": text}


def _usage(usage: Usage) -> dict[str, int]:
    """What was cached is not an input token here."""
    return {"input_tokens": usage.prompt_tokens - usage.cached_tokens,
            "output_tokens": usage.completion_tokens, "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached_tokens, **clipped_json(usage)}


_KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error",
          413: "request_too_large", 503: "overloaded_error", 500: "api_error"}


class ErrorDetail(msgspec.Struct):
    type: str
    message: str


class MessagesError(msgspec.Struct):
    type: Literal["error"]
    error: ErrorDetail


def error_body(error: ApiError, _: bool) -> dict[str, Any]:
    """An error in this API's shape."""
    body = error.body["error"]
    message, param = str(body["message"]), body["param"] or ""
    if error.overflow is not None:          # in the words by which this API's clients know it
        prompt, asked, context = error.overflow
        return {"type": "error", "error": {"type": "invalid_request_error", "message": (
            f"input length and `max_tokens` exceed context limit: {prompt} + {asked} > {context}, decrease "
            "input length or `max_tokens` and try again" if asked else
            f"prompt is too long: {prompt} tokens > {min(context, prompt - 1)} maximum")}}
    return {"type": "error", "error": {"type": _KINDS.get(error.status, "invalid_request_error"),
                                       "message": message if param in message else f"{message} ({param})"}}


async def create(api: OpenAI, body: bytes, tenant: bytes, reply: Reply) -> None:
    """POST /v1/messages."""
    began = time.monotonic()
    given = parse(body, MessagesRequest)
    request = given.chat(
        api, max_tokens=given.max_tokens, temperature=given.temperature, top_p=given.top_p,
        top_k=given.top_k, stop=given.stop_sequences, stream=given.stream)
    await api.converse(request, tenant, reply, began, lambda asked, _: MessagesFormat(
        api.named(given.model), asked))


async def count(api: OpenAI, body: bytes, tenant: bytes, reply: Reply) -> None:
    """POST /v1/messages/count_tokens."""
    request = parse(body, CountRequest).chat(api)
    api.check_model(request.model)
    _, ids = await api.chat_prompt(request, tenant, request.offer)
    await reply.whole(200, encode({"input_tokens": len(ids)}), {})
