"""OpenAI's Responses API: its fields as a chat request, and its answers. Nothing is stored.

Owns both. What a chat request means, and what runs it, is `completions`.
"""
from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeAlias

import msgspec

from penstock.api.apis.blocks import Block, BlockFormat, BlockScores, Score, joined_text
from penstock.api.completions import OpenAI, Reply
from penstock.api.openai_format import clipped_json, token_score, unix_time
from penstock.api.protocol.body import Body, Neutral, Unbuilt
from penstock.api.protocol.openai import ApiError, ChatRequest, StreamOptions, parse
from penstock.api.protocol.structured import JsonSchemaFormat, ResponseFormat
from penstock.api.protocol.tools import Function, Tool, ToolChoice
from penstock.config.base.errors import RequestError, show
from penstock.config.request.ignored import OfTool, names
from penstock.engine.client.generation import Usage


class FunctionTool(OfTool, forbid_unknown_fields=True):
    type: Literal["function"]
    name: str
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class ResponseTextFormat(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class TextConfig(msgspec.Struct, forbid_unknown_fields=True):
    format: ResponseTextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningConfig(msgspec.Struct, forbid_unknown_fields=True):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: str | None = None                  # there are none: reasoning is shown as it is
    generate_summary: str | None = None


Included: TypeAlias = Literal[
    "message.output_text.logprobs", "reasoning.encrypted_content", "code_interpreter_call.outputs",
    "computer_call_output.output.image_url", "file_search_call.results", "message.input_image.image_url",
    "web_search_call.action.sources", "web_search_call.results"]


class ResponsesRequest(Body, kw_only=True, forbid_unknown_fields=True):
    input: str | list[dict[str, Any]]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningConfig | None = None
    text: TextConfig | None = None
    top_logprobs: int | None = None             # of the text's tokens, with its item of `include` or without
    # Without effect.
    metadata: dict[str, str] | None = None
    store: bool | None = None                   # the answer has `store: false`
    # Not built.
    background: Annotated[Any, Neutral(False)] = None
    conversation: Unbuilt = None
    # What OpenAI's built-in tools would add is never there; reasoning is, and in the open.
    include: list[Included] | None = None
    moderation: Unbuilt = None
    previous_response_id: Unbuilt = None
    prompt: Unbuilt = None
    truncation: Annotated[Any, Neutral("disabled")] = None

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.top_logprobs) or "message.output_text.logprobs" in (self.include or ())

    def chat(self, api: OpenAI) -> ChatRequest:
        """The same as a chat request to `api`. Raises RequestError."""
        api.check_turns(self.input)
        messages = [{"role": "system", "content": self.instructions}] if self.instructions else []
        text, reasoning = self.text or TextConfig(), self.reasoning or ReasoningConfig()
        form = text.format or ResponseTextFormat()
        schema = JsonSchemaFormat(form.name, form.schema, form.strict) if form.type == "json_schema" else None
        return ChatRequest(
            messages=messages + _messages(self.input, api.only_text), model=self.model, stream=self.stream,
            stream_options=self.stream_options, max_completion_tokens=self.max_output_tokens,
            temperature=self.temperature, top_p=self.top_p, verbosity=text.verbosity,
            logprobs=self.wants_logprobs, top_logprobs=self.top_logprobs,
            reasoning_effort=reasoning.effort, parallel_tool_calls=self.parallel_tool_calls,
            response_format=ResponseFormat(form.type, schema), tool_choice=self.tool_choice,
            tools=None if self.tools is None else [Tool("function", Function(
                t.name, t.description, t.parameters, t.strict)) for t in self.tools])


def _messages(given: str | Sequence[Mapping[str, Any]], only: str) -> list[dict[str, Any]]:
    """Items as messages: reasoning and calls belong to the assistant's message that they stand beside. only:
    as for `joined_text`."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    found: list[dict[str, Any]] = []
    said: dict[str, Any] | None = None          # the assistant's message that is still open
    for i, item in enumerate(given):
        at = f"input[{i}]"
        match item:
            case {"type": "function_call", "call_id": str(call), "name": str(name), "arguments": str(text)}:
                said = _assistant(found, said)
                said.setdefault("tool_calls", []).append(
                    {"id": call, "type": "function", "function": {"name": name, "arguments": text}})
            case {"type": "function_call_output", "call_id": str(call), "output": output}:
                said = None
                found.append({"role": "tool", "tool_call_id": call, "content": joined_text(
                    output, f"{at}.output", ["input_text", "output_text"], only)})
            case {"type": "reasoning"}:
                said = _assistant(found, None)
                if item.get("content"):
                    said["reasoning_content"] = joined_text(
                        item["content"], f"{at}.content", ["reasoning_text"], only)
            case {"role": "assistant", "content": content} if item.get("type", "message") == "message":
                said = _assistant(found, None if said is None or said["content"] else said)
                said["content"] = joined_text(
                    content, f"{at}.content", ["output_text", "input_text", "text"], only)
            case {"role": str(role), "content": content} if item.get("type", "message") == "message":
                said = None
                found.append({"role": role, "content": joined_text(
                    content, f"{at}.content", ["input_text", "output_text", "text"], only)})
            case {"type": str(kind)}:
                raise RequestError(f"{at}.type is {show(kind)}: not supported, or something is missing",
                                   f"{at}.type")
            case _:
                raise RequestError(f"{at} is not an item", at)
    return [m for m in found if m["role"] != "assistant" or len(m) > 2 or m["content"]]


def _assistant(found: list[dict[str, Any]], said: dict[str, Any] | None) -> dict[str, Any]:
    if said is None:
        said = {"role": "assistant", "content": ""}
        found.append(said)
    return said


@dataclass(slots=True)
class ResponseForm(BlockFormat):
    request: ResponsesRequest = field(default_factory=lambda: ResponsesRequest(input=""))
    token_bytes: Callable[[int], bytes] = lambda _: b""
    sampling: Mapping[str, float] = field(default_factory=dict)    # of requests that name none
    created: int = field(default_factory=unix_time)
    _status: str = "in_progress"
    _sequence: int = 0
    _ids: list[str] = field(default_factory=list)               # of blocks

    def __post_init__(self) -> None:
        self.id = f"resp_{secrets.token_hex(24)}"

    def openings(self, _: Usage) -> list[dict[str, Any]]:
        return [self._event(f"response.{kind}", response=self._response(None))
                for kind in ("created", "in_progress")]

    def begun(self, block: Block) -> list[dict[str, Any]]:
        kind = {"reasoning": "rs_", "text": "msg_", "call": "fc_"}[block.kind]
        self._ids.append(kind + secrets.token_hex(24))
        found = [self._event("response.output_item.added", output_index=block.index,
                             item={**self._item(block), "status": "in_progress"} | _empty(block))]
        if block.kind != "call":
            found.append(self._event("response.content_part.added", **self._at(block),
                                     part=_part(block, "", [])))
        return found

    def more(self, block: Block, text: str) -> list[dict[str, Any]]:
        new = block.scores[len(block.scores) - block.num_new:]
        more: dict[str, Any] = {"logprobs": self._scores(new)} if block.kind == "text" else {}
        return [self._event(f"response.{_DELTAS[block.kind]}.delta", **self._at(block), delta=text, **more)]

    def ended(self, block: Block) -> list[dict[str, Any]]:
        kind = f"response.{_DELTAS[block.kind]}.done"
        if block.kind == "call":
            found = [self._event(kind, **self._at(block), name=block.name, arguments=block.text)]
        else:
            scores = self._scores(block.scores)
            more: dict[str, Any] = {"logprobs": scores} if block.kind == "text" else {}
            found = [self._event(kind, **self._at(block), text=block.text, **more),
                     self._event("response.content_part.done", **self._at(block),
                                 part=_part(block, block.text, scores))]
        return [*found, self._event("response.output_item.done", output_index=block.index,
                                    item=self._item(block))]

    def stopped(self, finish: str, stop_reason: str | None) -> None:
        self._status = "incomplete" if finish == "length" else "completed"

    def endings(self, usage: Usage) -> list[dict[str, Any]]:
        return [self._event(f"response.{self._status}", response=self._response(usage))]

    def answer(self, usage: Usage) -> dict[str, Any]:
        return self._response(usage)

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._sequence += 1
        return {"type": kind, "sequence_number": self._sequence - 1, **fields}

    def _at(self, block: Block) -> dict[str, Any]:
        place = {} if block.kind == "call" else {"content_index": 0}
        return {"item_id": self._ids[block.index], "output_index": block.index, **place}

    def _item(self, block: Block) -> dict[str, Any]:
        item: dict[str, Any] = {"id": self._ids[block.index], "status": "completed"}
        if self._status == "incomplete" and block is self.blocks[-1]:
            item["status"] = "incomplete"
        if block.kind == "call":
            return item | {"type": "function_call", "call_id": block.id, "name": block.name,
                           "arguments": block.text}
        if block.kind == "reasoning":
            return item | {"type": "reasoning", "summary": [], "content": [_part(block, block.text, [])]}
        return item | {"type": "message", "role": "assistant",
                       "content": [_part(block, block.text, self._scores(block.scores))]}

    def _sampled(self, name: str, asked: float | None) -> float:
        return self.sampling.get(name, 1.0) if asked is None else asked

    def _scores(self, scores: Sequence[Score]) -> list[dict[str, Any]]:
        return [token_score(self.token_bytes, token, of) for token, of in scores]

    def _response(self, usage: Usage | None) -> dict[str, Any]:
        asked, text = self.request, self.request.text or TextConfig()
        counts = None if usage is None else {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens, **clipped_json(usage)}
        return {
            "id": self.id, "object": "response", "created_at": self.created, "status": self._status,
            "error": None, "instructions": asked.instructions, "model": self.model,
            "incomplete_details": {"reason": "max_output_tokens"} if self._status == "incomplete" else None,
            "max_output_tokens": asked.max_output_tokens,
            "output": [self._item(b) for b in self.blocks],
            "parallel_tool_calls": asked.parallel_tool_calls is not False, "previous_response_id": None,
            "reasoning": asked.reasoning or {"effort": None, "summary": None},
            "store": False, "temperature": self._sampled("temperature", asked.temperature),
            "text": {"format": text.format or {"type": "text"}, "verbosity": text.verbosity},
            "tool_choice": asked.tool_choice or "auto", "tools": [_declared(t) for t in asked.tools or ()],
            "top_logprobs": asked.top_logprobs or 0,
            "top_p": self._sampled("top_p", asked.top_p), "truncation": "disabled", "usage": counts,
            "metadata": asked.metadata or {}}


_DELTAS = {"text": "output_text", "reasoning": "reasoning_text", "call": "function_call_arguments"}


def _part(block: Block, text: str, scores: Sequence[dict[str, Any]]) -> dict[str, Any]:
    if block.kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": scores}


def _declared(tool: FunctionTool) -> dict[str, Any]:
    """As it was sent, without what has no effect."""
    return {k: v for k, v in msgspec.structs.asdict(tool).items() if k not in names(OfTool)}


def _empty(block: Block) -> dict[str, Any]:
    return {"arguments": ""} if block.kind == "call" else {"content": []}


def error_body(error: ApiError, streamed: bool) -> dict[str, Any]:
    """OpenAI's shape, and in a stream an event."""
    body = error.body["error"]
    if not streamed:
        return error.body
    return {"type": "error", "code": body["code"], "message": body["message"], "param": body["param"],
            "sequence_number": 0}


_NAMES = {"messages": "input", "max_completion_tokens": "max_output_tokens",
          "response_format": "text.format", "reasoning_effort": "reasoning.effort"}


async def create(api: OpenAI, body: bytes, tenant: bytes, reply: Reply) -> None:
    """POST /v1/responses."""
    began = time.monotonic()
    given = parse(body, ResponsesRequest)
    try:
        await api.converse(given.chat(api), tenant, reply, began,
                           lambda asked, _: ResponseForm(
                               api.named(given.model), asked, request=given, token_bytes=api.token_bytes,
                               sampling=api.text.sampling,
                               scores=BlockScores() if given.wants_logprobs else None))
    except RequestError as e:
        raise e.named(_NAMES.get(e.param or "", e.param)) from None
