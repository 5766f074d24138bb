"""What the Python library takes and returns: prompts in their accepted forms, results as records.

Names follow vLLM's and SGLang's. Knows no engine.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import msgspec

from penstock.config.base.errors import RequestError, show
from penstock.config.request.params import SamplingParams

Prompt: TypeAlias = "str | Mapping[str, Any]"          # text, {"prompt"}, or {"prompt_token_ids"}
Message: TypeAlias = "Mapping[str, Any]"               # {"role": ..., "content": ...}
Params: TypeAlias = "SamplingParams | Sequence[SamplingParams] | None"


@dataclass(frozen=True, slots=True)
class Session:
    """Requests that belong together, such as the turns of an agent.

    id        1 to 256 characters
    retain_s  0 to 86,400 seconds: so long after it the pages of this request are evicted after all others, as far as
              those of all such sessions fit into `retained_share`. None: as the request before it; 0: no more
    """

    id: str
    retain_s: int | None = None


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token at one place. `rank` is 1 for the most likely."""

    logprob: float
    rank: int
    decoded_token: str


@dataclass(slots=True)
class CompletionOutput:
    """One of the `n` answers to a prompt."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None        # "stop" or "length"
    stop_reason: str | None = None          # the stop string that ended it
    # For each output token its own logprob and the best `logprobs` ones, by token id.
    logprobs: list[dict[int, Logprob]] | None = None


@dataclass(slots=True)
class RequestOutput:
    """A prompt and its answers."""

    prompt: str | None                      # None when token ids were given
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int = 0              # of the prompt: found in the cache, not computed
    # Of answers that select their KV, all together: what the selected units were read from, by name.
    kv_reads: dict[str, int] = field(default_factory=dict)
    draft_tokens: int = 0                   # that were proposed for the answers,
    accepted_draft_tokens: int = 0          # and those that are part of them
    # For each prompt token its own logprob and the best `prompt_logprobs` ones, by token id; None for the
    # first, and before `prompt_logprobs_start`.
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None


@dataclass(frozen=True, slots=True)
class Delta:
    """News of one answer while it streams. Text may come later than its tokens."""

    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    index: int = 0


def one_or_many(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """The prompts as a list. Raises RequestError that says which forms there are."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if not isinstance(prompts, Sequence) or not all(isinstance(p, (str, Mapping)) for p in prompts):
        raise RequestError('prompts: text, {"prompt": text}, {"prompt_token_ids": [...]}, or a list '
                           "of those", "prompts")
    return list(prompts)


def text_or_ids(prompt: Prompt) -> str | list[int]:
    """The one thing in a prompt. Raises RequestError."""
    if isinstance(prompt, str):
        return prompt
    match dict(prompt):
        case {"prompt": str(text), **rest} if not rest:
            return text
        case {"prompt_token_ids": ids, **rest} if not rest and not isinstance(ids, (str, bytes)):
            # bool is an int to Python and 1.0 equals 1: neither is a token id.
            if isinstance(ids, Sequence) and all(type(i) is int for i in ids):
                return list(ids)
            raise RequestError("prompt_token_ids is not a list of whole numbers", "prompts")
    raise RequestError(f"a prompt has the fields {show(sorted(map(str, prompt)))}: one of prompt (text) "
                       "and prompt_token_ids (a list) is needed", "prompts")


def conversations(messages: Sequence[Message] | Sequence[Sequence[Message]],
                  ) -> list[Sequence[Message]]:
    """A conversation, or a list of them, as a list. Raises RequestError."""
    if isinstance(messages, Sequence) and not isinstance(messages, str) and messages:
        if all(isinstance(m, Mapping) for m in messages):
            return [messages]               # type: ignore[list-item]
        if all(isinstance(m, Sequence) and not isinstance(m, str) for m in messages):
            return list(messages)           # type: ignore[arg-type]
    raise RequestError('messages: a list of {"role": ..., "content": ...}, or a list of such lists',
                       "messages")


def one_each(params: Params, count: int, default: SamplingParams) -> list[SamplingParams]:
    """Checked sampling parameters for each of `count` prompts; `default` where there are none. Raises
    RequestError."""
    if params is None or isinstance(params, SamplingParams):
        return [checked_types(params or default)] * count
    if (not isinstance(params, Sequence) or len(params) != count
            or not all(isinstance(p, SamplingParams) for p in params)):
        raise RequestError(f"sampling_params: one SamplingParams, or a list of {count}, one for each "
                           "prompt", "sampling_params")
    return [checked_types(p) for p in params]


def checked_types(params: SamplingParams) -> SamplingParams:
    """`params` with the types that its fields declare: a constructor call in Python checks none.
    A list, or for `stop` one string, becomes a tuple. Raises RequestError that names the field."""
    given = msgspec.structs.asdict(params)
    if isinstance(params.stop, str):
        given["stop"] = (params.stop,)
    try:
        return msgspec.convert(given, SamplingParams).checked()
    except msgspec.ValidationError as e:
        raise RequestError(f"sampling_params: {e}", "sampling_params") from None
