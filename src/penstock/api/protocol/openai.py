"""Requests of OpenAI's API, as typed data: what is understood, what is neutral, what is refused.

Owns the fields' names and types. A field that this server does not know or cannot honour is an
error that names it, never silence. Knows no engine and no tokenizer.

Accepted and without effect: what `fields.ignored` lists, and `metadata`, an object of strings (tags of the
caller); `store`, as nothing is stored, and the answer says so.
Fields of what is not built are accepted at the values that mark them, which include what routers fill in.
"""
from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import inspect

from penstock.api.protocol.body import Body, Neutral, Unbuilt
from penstock.api.protocol.structured import Structured, grammar_of
from penstock.api.protocol.tools import Tool, ToolChoice, offer_of
from penstock.config.base.errors import RequestError, cut
from penstock.config.request.params import COUNT_MAX, SamplingParams
from penstock.engine.client.namespaces import check_retention
from penstock.text.tools.asked import ToolOffer

NO_DEFAULTS: Mapping[str, float] = {}


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # vLLM's: with it, usage so far in every event
    include_obfuscation: bool | None = None     # events are padded to a multiple of 64 bytes


class _Request(Structured, kw_only=True, forbid_unknown_fields=True):
    """What chat and completions share. None is "not given"."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    seed: int | None = None
    # Not OpenAI's; the names are those of vLLM and SGLang.
    min_tokens: int | None = None
    include_stop_str_in_output: bool | None = None
    priority: int | None = None
    sparse_top_k: int | None = None             # ours: tokens of KV that a decode step reads; 0 is all of it
    top_k_tokens: int | None = None             # its old name, for one release more
    speculative_tokens: int | None = None       # ours: drafts a step, at most; 0 is none
    cache_salt: str | None = None
    data_parallel_rank: int | None = None       # of --dp: the engine that computes it
    return_token_ids: bool | None = None
    add_special_tokens: bool | None = None      # to a text: yes; to a chat, whose template writes its own: no
    prompt_logprobs: int | None = None          # of each prompt token, with so many of the best
    prompt_logprobs_start: int | None = None    # ours: of this token and those behind it
    rid: str | None = None                      # names it for /abort_request
    session_id: str | None = None               # of /v1/sessions
    session_retain_s: int | None = None         # ours: seconds after it for which that is retained; 0 ends it
    # What a router puts in for a pair: `routed` beside this file knows what they mean.
    bootstrap_host: str | None = None
    bootstrap_port: int | None = None
    bootstrap_room: int | None = None
    kv_transfer_params: dict[str, Any] | None = None
    separate_reasoning: bool | None = None      # of a chat: unless this is false, it is not in the content
    # Without effect.
    metadata: dict[str, str] | None = None
    store: bool | None = None                   # the answer has `store: false`
    # Not built.
    custom_params: Unbuilt = None
    log_metrics: Annotated[Any, Neutral(True)] = None      # every request is counted
    lora_path: Unbuilt = None
    moderation: Unbuilt = None
    return_hidden_states: Annotated[Any, Neutral(False)] = None
    session_params: Unbuilt = None
    stream_reasoning: Annotated[Any, Neutral(True)] = None     # all text is streamed

    def checked(self) -> None:
        super().checked()
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options needs stream: true", "stream_options")
        check_retention(self.session_retain_s)
        if self.data_parallel_rank is not None and not 0 <= self.data_parallel_rank <= COUNT_MAX:
            raise RequestError("data_parallel_rank is the number of an engine, from 0", "data_parallel_rank")
        if self.cache_salt is not None and not 0 < len(self.cache_salt) <= 1024:
            raise RequestError("cache_salt has 1 to 1024 characters", "cache_salt")

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def usage_so_far(self) -> bool:
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @property
    def padded(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_obfuscation)

    def _params(self, sampling: Mapping[str, float], *, max_tokens: int | None, logprobs: int | None,
                echoed: int | None = None) -> SamplingParams:
        """sampling: values of fields that are not given. echoed: how many logprobs an echo of the prompt
        shows; None: none."""
        given: dict[str, Any] = {name: value for name in _SAME_NAME
                                 if (value := getattr(self, name)) is not None}
        given = dict(sampling) | given
        asked = grammar_of(self)
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        scores = [k for k in (self.prompt_logprobs, echoed) if k is not None]
        if self.prompt_logprobs_start is not None and not scores:
            raise RequestError("prompt_logprobs_start needs prompt_logprobs", "prompt_logprobs_start")
        return SamplingParams(
            **given, max_tokens=max_tokens, logprobs=logprobs, stop=stop,
            prompt_logprobs=max(scores) if scores else None,
            prompt_logprobs_start=self.prompt_logprobs_start or 0,
            grammar=None if asked is None else asked[1],
            logit_bias={_token_id(k): v for k, v in (self.logit_bias or {}).items()},
            stop_token_ids=tuple(self.stop_token_ids or ()),
            include_stop_str_in_output=bool(self.include_stop_str_in_output or self.no_stop_trim),
        ).checked()


_SAME_NAME = ("n", "temperature", "top_p", "presence_penalty", "frequency_penalty", "seed",
              "min_tokens", "top_k", "min_p", "repetition_penalty", "ignore_eos",
              "skip_special_tokens", "priority", "sparse_top_k", "top_k_tokens", "speculative_tokens")


class ChatRequest(_Request, kw_only=True, forbid_unknown_fields=True):
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None      # for templates that read it
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    # Not built.
    audio: Unbuilt = None
    chat_template: Unbuilt = None
    documents: Annotated[Any, Neutral([])] = None
    function_call: Annotated[Any, Neutral("none", instead="tool_choice")] = None
    functions: Annotated[
        Any, Neutral([], instead='tools, each {"type": "function", "function": {...}}')] = None
    modalities: Annotated[Any, Neutral(["text"])] = None
    web_search_options: Unbuilt = None

    @property
    def variables(self) -> dict[str, Any]:
        """Variables for the template, next to what is always there."""
        given = {} if self.verbosity is None else {"verbosity": self.verbosity}
        return given | (self.chat_template_kwargs or {})

    @property
    def offer(self) -> ToolOffer:
        """Raises RequestError."""
        return offer_of(self.tools, self.tool_choice, self.parallel_tool_calls)

    def params(self, sampling: Mapping[str, float] = NO_DEFAULTS) -> SamplingParams:
        """Raises RequestError. Without a maximum the answer may fill the context."""
        most = self.max_completion_tokens
        if most is None:
            most = self.max_tokens
        elif self.max_tokens is not None and self.max_tokens != most:
            raise RequestError("max_tokens and max_completion_tokens differ: give one of them",
                               "max_tokens")
        if self.max_completion_tokens is not None and not 1 <= self.max_completion_tokens <= COUNT_MAX:
            raise RequestError(f"max_completion_tokens is {self.max_completion_tokens}: 1 to {COUNT_MAX}",
                               "max_completion_tokens")
        if self.top_logprobs is not None and not 0 <= self.top_logprobs <= 20:
            raise RequestError(f"top_logprobs is {self.top_logprobs}: 0 to 20", "top_logprobs")
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs: true", "top_logprobs")
        return self._params(sampling, max_tokens=most,
                            logprobs=(self.top_logprobs or 0) if self.logprobs else None)


class CompletionRequest(_Request, kw_only=True, forbid_unknown_fields=True):
    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: Annotated[Any, Neutral("")] = None

    def params(self, sampling: Mapping[str, float] = NO_DEFAULTS) -> SamplingParams:
        """Raises RequestError. Without a maximum there are 16 tokens, as in OpenAI's API."""
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise RequestError("best_of is not supported yet: leave it out", "best_of")
        most = 16 if self.max_tokens is None else self.max_tokens
        return self._params(sampling, max_tokens=1 if self.silent else most,
                            logprobs=None if self.silent else self.logprobs, echoed=self.echoed)

    @property
    def echoed(self) -> int | None:
        """How many logprobs an echo of the prompt shows."""
        return self.logprobs if self.echo else None

    @property
    def silent(self) -> bool:
        """Only the prompt is asked about: the one token that the engine makes all the same is not shown."""
        return self.max_tokens == 0 and (bool(self.echo) or self.prompt_logprobs is not None)

    def prompts(self, most: int) -> list[str | list[int]]:
        """One entry for each prompt. Raises RequestError: empty, mixed, or more than `most`."""
        if isinstance(self.prompt, str):
            found: list[str | list[int]] = [self.prompt]
        elif all(isinstance(p, int) for p in self.prompt):
            found = [[p for p in self.prompt if isinstance(p, int)]]
        elif all(isinstance(p, str) for p in self.prompt) or all(
                isinstance(p, list) for p in self.prompt):
            found = [p for p in self.prompt if not isinstance(p, int)]
        else:
            raise RequestError("prompt mixes strings, token ids and lists: give a string, a list of "
                               "strings, a list of token ids or a list of those", "prompt")
        if any(len(p) == 0 for p in found):
            raise RequestError("the prompt is empty: send at least one token", "prompt")
        if len(found) > most:
            raise RequestError(f"prompt has {len(found)} prompts: at most {most} in one request",
                               "prompt")
        return found


T = TypeVar("T", bound=Body)
_AT = re.compile(r" - at `\$?\.?([^`]*)`$")
_FIELD = re.compile(r"field `([^`]+)`")
_STEP = re.compile(r"\[[^\]]*\]|[^.\[]+")


def parse(body: bytes, kind: type[T]) -> T:
    """The typed request. Raises RequestError that names the field."""
    try:
        request = msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as e:
        raise _named(str(e), kind) from None
    except (msgspec.MsgspecError, ValueError, RecursionError, OverflowError) as e:
        # UnicodeDecodeError is a ValueError; its text would quote the body.
        why = str(e) if isinstance(e, msgspec.MsgspecError) else type(e).__name__
        raise RequestError(f"the body is not valid JSON: {why}") from None
    request.checked()
    return request


def _named(text: str, kind: type[Body]) -> RequestError:
    """msgspec's message about a body of type `kind`, with the field as OpenAI's `param`."""
    at = _AT.search(text)
    path = at.group(1) if at else ""
    field = _FIELD.search(text)
    name = cut(".".join(filter(None, [path, field.group(1) if field else ""])))
    what = cut(text[:at.start()] if at else text)
    if "unknown field" in text:
        return RequestError(f"{name} is not a field of this API, or not supported yet", name)
    if "missing required field" in text:
        return RequestError(f"{name} is missing", name)
    if "nvalid enum value" in text and (allowed := _literals(kind, path)):
        what += f": allowed: {', '.join(map(repr, allowed))}"
    return RequestError(f"{name or 'the body'}: {what[:1].lower() + what[1:]}", name or None)


def _literals(kind: type[Body], path: str) -> list[Any]:
    """The values that the field at `path` (`tools[0].type`) of a body may have; [] where any may stand."""
    found = [inspect.type_info(kind)]
    for step in _STEP.findall(path):
        inner: list[inspect.Type] = []
        for one in _members(found):
            if isinstance(one, inspect.StructType):
                inner += [f.type for f in one.fields if f.encode_name == step]
            elif isinstance(one, inspect.CollectionType):
                inner.append(one.item_type)
            elif isinstance(one, inspect.DictType):
                inner.append(one.value_type)
        found = inner
    return [v for one in _members(found) if isinstance(one, inspect.LiteralType) for v in one.values]


def _members(types: list[inspect.Type]) -> list[inspect.Type]:
    """The types, with the members of a union in its place."""
    return [m for one in types for m in (one.types if isinstance(one, inspect.UnionType) else (one,))]


def _token_id(key: str) -> int:
    if not (key.isascii() and key.isdigit() and len(key) <= 10):
        raise RequestError("logit_bias has a key that is not a token id", "logit_bias")
    return int(key)


# ---------------------------------------------------------------- errors
class ApiError(Exception):
    """An answer that is an error: HTTP status, and the fields of OpenAI's shape."""

    def __init__(self, status: int, message: str, *, kind: str = "invalid_request_error",
                 param: str | None = None, code: str | None = None,
                 headers: dict[str, str] | None = None,
                 overflow: tuple[int, int, int] | None = None) -> None:
        """overflow: as of RequestError."""
        super().__init__(message)
        self.overflow = overflow
        self.status = status
        self.headers = headers or {}
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


def overloaded(message: str, code: str = "overloaded", retry_s: int = 1) -> ApiError:
    """503 that asks the client to come back."""
    return ApiError(503, message, kind="server_error", code=code,
                    headers={"retry-after": str(retry_s)})


def bad_request(error: RequestError) -> ApiError:
    return ApiError(400, str(error), param=error.param, code=error.code, overflow=error.overflow)
