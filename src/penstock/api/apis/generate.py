"""SGLang's own `/generate`: its fields as a completion request, and its answers, which routers pass on.

Owns both. What a completion request means, and what runs it, is `completions`.
"""
from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec

from penstock.api.completions import OpenAI, Reply
from penstock.api.openai_format import LOGPROB_MIN, Prompts, Whole
from penstock.api.protocol.body import Body, Neutral, SamplingBody, Unbuilt
from penstock.api.protocol.openai import CompletionRequest, parse
from penstock.config.base.errors import RequestError
from penstock.config.request.scores import Scores
from penstock.engine.client.generation import ChoicePiece, Usage

NEW_TOKENS = 128
class GenerateSampling(SamplingBody, kw_only=True, forbid_unknown_fields=True):
    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    sampling_seed: int | None = None


class GenerateRequest(Body, kw_only=True, forbid_unknown_fields=True):
    """`text` or `input_ids`, one or several."""

    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    sampling_params: GenerateSampling | None = None
    stream: bool | None = None
    rid: str | None = None
    model: str | None = None
    return_logprob: bool | None = None
    logprob_start_len: int | None = None        # prompt tokens without a logprob; -1: all but one
    top_logprobs_num: int | None = None
    return_text_in_logprobs: bool | None = None
    log_metrics: bool | None = None
    priority: int | None = None
    data_parallel_rank: int | None = None
    bootstrap_host: str | None = None
    bootstrap_port: int | None = None
    bootstrap_room: int | None = None
    kv_transfer_params: dict[str, Any] | None = None
    max_tokens: int | None = None               # smg's, to a prefill instance, beside sampling_params
    # Not built.
    audio_data: Unbuilt = None
    background: Annotated[Any, Neutral(False)] = None
    bootstrap_pair_key: Unbuilt = None
    conversation_id: Unbuilt = None
    custom_labels: Unbuilt = None
    custom_logit_processor: Unbuilt = None
    extra_key: Unbuilt = None
    image_data: Unbuilt = None
    input_embeds: Unbuilt = None
    lora_id: Unbuilt = None
    lora_path: Unbuilt = None
    modalities: Annotated[Any, Neutral([])] = None
    no_logs: Annotated[Any, Neutral(False)] = None
    return_bytes: Annotated[Any, Neutral(False)] = None
    return_entropy: Annotated[Any, Neutral(False)] = None
    return_hidden_states: Annotated[Any, Neutral(False)] = None
    session_params: Unbuilt = None
    token_ids_logprob: Unbuilt = None
    video_data: Unbuilt = None

    def checked(self) -> None:
        super().checked()
        if (self.text is None) == (self.input_ids is None):
            raise RequestError("give text or input_ids, one of them", "text")
        for name in ("logprob_start_len", "top_logprobs_num"):
            if getattr(self, name) not in (None, -1, 0) and not self.return_logprob:
                raise RequestError(f"{name} needs return_logprob: true", name)
        if self.first < -1:
            raise RequestError(f"logprob_start_len is {self.first}: -1 (none of the prompt) or more",
                               "logprob_start_len")

    @property
    def several(self) -> bool:
        """Whether the answer is a list."""
        return isinstance(self.text, list) or any(isinstance(i, list) for i in self.input_ids or ())

    @property
    def first(self) -> int:
        return -1 if self.logprob_start_len is None else self.logprob_start_len

    @property
    def num_best(self) -> int | None:
        """Logprobs per token, next to its own; None: no logprobs."""
        return (self.top_logprobs_num or 0) if self.return_logprob else None

    def completion(self) -> CompletionRequest:
        """The same as a completion request."""
        given = msgspec.structs.asdict(self.sampling_params or GenerateSampling())
        most, least, seed = (given.pop(k) for k in ("max_new_tokens", "min_new_tokens", "sampling_seed"))
        prompt: Any = self.text if self.text is not None else self.input_ids
        asks = self.return_logprob and self.first >= 0
        return CompletionRequest(
            prompt=prompt, stream=self.stream, rid=self.rid, priority=self.priority, model=self.model,
            data_parallel_rank=self.data_parallel_rank, min_tokens=least, seed=seed,
            bootstrap_host=self.bootstrap_host, bootstrap_port=self.bootstrap_port,
            bootstrap_room=self.bootstrap_room, kv_transfer_params=self.kv_transfer_params,
            max_tokens=self.max_tokens or (NEW_TOKENS if most is None else most), logprobs=self.num_best,
            prompt_logprobs=self.num_best if asks else None,
            prompt_logprobs_start=self.first + 1 if asks else None, **given)


@dataclass(slots=True)
class GenerateFormat:
    """Events have all of the text so far; those of several prompts, and its `index`."""

    several: bool
    id: str
    prompts: Prompts
    asked: GenerateRequest
    shown: Callable[[int], str]
    named: bool = False
    _said: dict[int, Whole] = field(default_factory=dict)
    _of_prompts: dict[int, dict[str, Any]] = field(default_factory=dict)

    def openings(self, _: Usage) -> list[dict[str, Any]]:
        return []

    def event(self, piece: ChoicePiece) -> bytes | None:
        return None

    def chunks(self, piece: ChoicePiece) -> list[dict[str, Any]]:
        whole = self._said.setdefault(piece.index, Whole())
        whole.add(piece)
        self._heard(piece.index, piece.prompt)
        if not piece.text and piece.finish is None:
            return []
        return [self._answer(piece.index, whole, None) | ({"index": piece.index} if self.several else {})]

    def endings(self, usage: Usage) -> list[dict[str, Any]]:
        return []

    def whole(self, choices: Sequence[Whole], usage: Usage) -> Any:
        for i, choice in enumerate(choices):
            self._heard(i, choice.prompt)
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
            "completion_tokens": len(whole.tokens), **known,
            **self._logprobs(index // self.prompts.n, whole)}}

    def _heard(self, index: int, scores: Scores | None) -> None:
        """Return what was received of a prompt's first choice. Prompt logprobs begin with a token that has no
        logprob."""
        if self.asked.return_logprob and index % self.prompts.n == 0 and (
                scores is not None or index // self.prompts.n not in self._of_prompts):
            ids = self.prompts.ids[index // self.prompts.n]
            first = len(ids) - 1 if scores is None else min(scores.first, len(ids)) - 1
            rows = list(zip(ids[first + 1:], [] if scores is None else scores.rows(), strict=False))
            entries: dict[str, Any] = {"input_token_logprobs": [
                self._entry(None, ids[first]), *(self._entry(own, t) for t, (own, _, _) in rows)]}
            if self.asked.num_best:
                entries["input_top_logprobs"] = [None, *(self._entries(best) for _, (_, _, best) in rows)]
            self._of_prompts[index // self.prompts.n] = entries

    def _logprobs(self, prompt: int, whole: Whole) -> dict[str, Any]:
        """[logprob, id, text] of each token: SGLang's form."""
        if not self.asked.return_logprob:
            return {}
        pairs = list(zip(whole.tokens, whole.logprobs, strict=False))      # none of an answer not wanted
        scores = dict(self._of_prompts.get(prompt, {}))
        if self.asked.num_best:
            scores["output_top_logprobs"] = [self._entries(of.top) for _, of in pairs]
        return {**scores, "output_token_logprobs": [self._entry(of.logprob, token) for token, of in pairs]}

    def _entries(self, best: Sequence[tuple[int, float]]) -> list[Any]:
        return [self._entry(p, t) for t, p in best]

    def _entry(self, logprob: float | None, token: int) -> list[Any]:
        return [None if logprob is None else max(logprob, LOGPROB_MIN), token,
                self.shown(token) if self.asked.return_text_in_logprobs else None]


_NAMES = {"prompt": "text", "max_tokens": "sampling_params.max_new_tokens",
          "seed": "sampling_params.sampling_seed", "min_tokens": "sampling_params.min_new_tokens",
          "logprobs": "top_logprobs_num", "prompt_logprobs": "top_logprobs_num",
          "prompt_logprobs_start": "logprob_start_len"}


async def create(api: OpenAI, body: bytes, tenant: bytes, reply: Reply) -> None:
    """POST /generate."""
    began = time.monotonic()
    given = parse(body, GenerateRequest)
    try:
        await api.complete(given.completion(), tenant, reply, began, lambda prompts: GenerateFormat(
            prompts.num_choices > 1 or given.several, given.rid or secrets.token_hex(16),
            prompts, given, lambda t: api.token_bytes(t).decode("utf-8", "replace")))
    except RequestError as e:
        raise e.named(_NAMES.get(e.param or "", e.param)) from None
