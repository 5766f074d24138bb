"""SGLang's own `/generate`: its fields as a completion request, and its answers, which routers pass on.

Owns both. What a completion request means, and what runs it, is `completions`.
"""
from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from penstock.config.base.errors import RequestError
from penstock.serve.client.generate import Piece, Usage
from penstock.serve.http.completions import OpenAI, Reply
from penstock.serve.http.format import Whole
from penstock.serve.http.types import Body, CompletionRequest, parse

NEW_TOKENS = 128


class Sampling(msgspec.Struct, forbid_unknown_fields=True):
    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    logit_bias: dict[str, float] | None = None
    sampling_seed: int | None = None
    json_schema: dict[str, Any] | str | None = None
    regex: str | None = None
    ebnf: str | None = None


class GenerateRequest(Body, kw_only=True, forbid_unknown_fields=True):
    """`text` or `input_ids`, one or several."""

    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    sampling_params: Sampling | None = None
    stream: bool | None = None
    rid: str | None = None
    model: str | None = None
    return_logprob: bool | None = None
    return_text_in_logprobs: bool | None = None
    log_metrics: bool | None = None
    priority: int | None = None
    data_parallel_rank: int | None = None

    def checked(self) -> None:
        if (self.text is None) == (self.input_ids is None):
            raise RequestError("give text or input_ids, one of them", "text")
        if self.return_logprob:
            raise RequestError("return_logprob is not built for this path: ask /v1/completions for logprobs",
                               "return_logprob")

    def completion(self) -> CompletionRequest:
        """The same as a completion request."""
        given = msgspec.structs.asdict(self.sampling_params or Sampling())
        most, least, seed = (given.pop(k) for k in ("max_new_tokens", "min_new_tokens", "sampling_seed"))
        prompt: Any = self.text if self.text is not None else self.input_ids
        return CompletionRequest(
            prompt=prompt, stream=self.stream, rid=self.rid, priority=self.priority, model=self.model,
            data_parallel_rank=self.data_parallel_rank, min_tokens=least, seed=seed,
            max_tokens=NEW_TOKENS if most is None else most, **given)


@dataclass(slots=True)
class GenerateFormat:
    """Events have all of the text so far; those of several prompts, and its `index`."""

    several: bool
    id: str
    named: bool = False
    _said: dict[int, Whole] = field(default_factory=dict)

    def openings(self, _: Usage) -> list[dict[str, Any]]:
        return []

    def chunks(self, piece: Piece) -> list[dict[str, Any]]:
        whole = self._said.setdefault(piece.index, Whole())
        whole.add(piece)
        if not piece.text and piece.finish is None:
            return []
        return [self._answer(piece.index, whole, None) | ({"index": piece.index} if self.several else {})]

    def endings(self, usage: Usage) -> list[dict[str, Any]]:
        return []

    def whole(self, choices: Sequence[Whole], usage: Usage) -> Any:
        found = [self._answer(i, c, usage) for i, c in enumerate(choices)]
        return found if self.several else found[0]

    def _answer(self, index: int, whole: Whole, usage: Usage | None) -> dict[str, Any]:
        ended: dict[str, Any] | None = None
        if whole.finish == "length":
            ended = {"type": "length", "length": len(whole.tokens)}
        elif whole.finish is not None:
            last = whole.tokens[-1] if whole.tokens else None
            ended = {"type": "stop", "matched": whole.stop_reason or last}
        # Of a request with several prompts the usage is known of all together only.
        known = {} if usage is None or self.several else {
            "prompt_tokens": usage.prompt_tokens, "cached_tokens": usage.cached_tokens}
        return {"text": whole.text, "output_ids": whole.tokens, "meta_info": {
            "id": f"{self.id}-{index}" if self.several else self.id, "finish_reason": ended,
            "completion_tokens": len(whole.tokens), **known}}


_NAMES = {"prompt": "text", "max_tokens": "sampling_params.max_new_tokens",
          "seed": "sampling_params.sampling_seed", "min_tokens": "sampling_params.min_new_tokens"}


class Generate:
    """Its handler."""

    def __init__(self, api: OpenAI) -> None:
        self._api = api

    async def create(self, body: bytes, tenant: bytes, reply: Reply) -> None:
        began = time.monotonic()
        given = parse(body, GenerateRequest)
        request = given.completion()
        try:
            await self._api.complete(request, tenant, reply, began, lambda count, _: GenerateFormat(
                count > 1 or isinstance(given.text, list), given.rid or secrets.token_hex(16)))
        except RequestError as e:
            raise RequestError(str(e), _NAMES.get(e.param or "", e.param), e.code) from None
