"""A request of Dynamo's frontend as ours, and our answers as Dynamo's. Both are plain dictionaries.

Owns what the fields mean. A field that is set and has no effect here is refused by name. Knows no type of Dynamo.
"""
from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from penstock.api.openai_format import usage_json
from penstock.api.pd_router import BOOTSTRAP, ROOM_BITS, room_at, room_number
from penstock.api.protocol.structured import Structured, StructuredOutputs, grammar_of
from penstock.config.base.errors import RequestError, show
from penstock.config.request.grammar import Grammar
from penstock.config.request.params import SamplingParams
from penstock.config.request.scores import Scores
from penstock.engine.client.generation import ChoicePiece, Usage
from penstock.engine.wire import BootstrapRoom, TokenLogprob

PROBE = "_HEALTH_CHECK"             # of Dynamo's own requests: they go to one worker only
# By group: fields that are taken, and those that Dynamo's frontend acts on by itself.
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
            "seed", "logit_bias")
TAKEN = {
    "sampling_options": {*SAMPLING, "n", "best_of", "guided_decoding", "include_stop_str_in_output"},
    "stop_conditions": {"max_tokens", "min_tokens", "ignore_eos", "stop", "stop_token_ids", "stop_token_ids_visible",
                        "stop_token_ids_hidden"},
    "output_options": {"logprobs", "prompt_logprobs", "skip_special_tokens", "formatted_prompt",
                       "return_tokens_as_token_ids", "no_stop_trim"}}
NEUTRAL: dict[str, Any] = {"use_beam_search": False, "length_penalty": 1.0}
NO_MEDIA = ("multi_modal_data", "mm_processor_kwargs", "encoder_result", "prompt_embeds")


@dataclass(frozen=True, slots=True)
class Asked:
    """One request. `rank`: the engine that the router has chosen; `handoff`: what a prefill worker answers, for the
    decode worker; `session`: its name, "" for none; `ends_session`: no request of it follows."""

    prompt: list[int]
    params: SamplingParams
    eos_ids: tuple[int, ...]
    rank: int | None
    salt: str | None
    room: BootstrapRoom | None = None
    handoff: dict[str, Any] | None = None
    session: str = ""
    ends_session: bool = False


def read(request: Mapping[str, Any], defaults: SamplingParams, mode: str | None = None, address: str = "") -> Asked:
    """Return what is asked. Raises RequestError.

    defaults   sampling values of requests that name none
    mode       of this worker: prefill, decode, or None for both
    address    of a prefill worker: HOST:PORT at which decode workers connect
    """
    for name in NO_MEDIA:
        if request.get(name):
            raise RequestError(f"{name}: this worker takes text only: leave it out", name)
    sampling, stop, output = (_group(request, group) for group in TAKEN)
    for name in ("n", "best_of"):
        if sampling.get(name) not in (None, 1):
            raise RequestError(f"{name} is {show(sampling[name])}: a worker behind Dynamo gives one answer to a "
                               "request: send several requests", name)
    given = {name: sampling[name] for name in SAMPLING if sampling.get(name) is not None}
    given |= {name: output[name] for name in ("logprobs", "prompt_logprobs") if output.get(name) is not None}
    least = stop.get("min_tokens") or 0
    limit = stop.get("max_tokens")
    if mode == "prefill" and limit is not None:
        limit = max(limit, least)               # cut to one token for this worker: both choose the first one alike
    routing = request.get("routing") or {}
    given |= {"max_tokens": limit, "min_tokens": least, "ignore_eos": bool(stop.get("ignore_eos")),
              "stop_token_ids": [*(stop.get("stop_token_ids") or ()), *(stop.get("stop_token_ids_visible") or ())],
              "priority": -(routing.get("priority") or 0)}          # there the larger number goes first
    try:
        params = msgspec.convert(msgspec.to_builtins(defaults, str_keys=True) | given, SamplingParams, strict=False,
                                 str_keys=True)
    except msgspec.ValidationError as e:
        raise RequestError(f"sampling: {e}") from None
    if (grammar := _grammar(sampling.get("guided_decoding"))) is not None:
        params = msgspec.structs.replace(params, grammar=grammar)
    room, handoff = (None, None) if request.get(PROBE) else _meeting(request, mode, address)
    return Asked(list(request.get("token_ids") or ()), params.checked(), tuple(stop.get("stop_token_ids_hidden") or ()),
                 routing.get("dp_rank"), routing.get("cache_salt"), room, handoff, *_session(request))


def _session(request: Mapping[str, Any]) -> tuple[str, bool]:
    """Return what the headers x-dynamo-session-id and x-dynamo-session-final have said, as the frontend passes it."""
    agent = request.get("agent_context") or {}
    name = agent.get("session_id")
    return name.strip() if isinstance(name, str) else "", agent.get("session_final") is True


def _group(request: Mapping[str, Any], group: str) -> dict[str, Any]:
    found: dict[str, Any] = request.get(group) or {}
    for name, value in found.items():
        if name not in TAKEN[group] and value is not None and value != NEUTRAL.get(name):
            raise RequestError(f"{name} is {show(value)}: a penstock worker has no such option: leave it out", name)
    return found


def _grammar(guided: Mapping[str, Any] | None) -> Grammar | None:
    """Return what the answer must match, None: anything."""
    asked = {name: value for name, value in (guided or {}).items() if value is not None}
    asked.pop("backend", None)                  # --grammar-backend of the worker says it
    if unknown := sorted(asked.keys() - {*StructuredOutputs.__struct_fields__}):
        raise RequestError(f"guided_decoding.{unknown[0]} is not supported: json, regex, choice and grammar are",
                           unknown[0])
    try:
        found = grammar_of(Structured(structured_outputs=msgspec.convert(asked, StructuredOutputs)))
    except msgspec.ValidationError as e:
        raise RequestError(f"guided_decoding: {e}", "guided_decoding") from None
    return None if found is None else found[1]


def _meeting(request: Mapping[str, Any], mode: str | None,
             address: str) -> tuple[BootstrapRoom | None, dict[str, Any] | None]:
    """Return where prefill and decode worker meet, and of a prefill worker what names that to the other one."""
    info = request.get("bootstrap_info")
    if mode == "prefill":
        host, _, port = address.rpartition(":")
        if info is None:                        # the router sends the prompt to a decode worker once this has ended
            room = BootstrapRoom(secrets.randbits(ROOM_BITS), holds=True)
            return room, dict(zip(BOOTSTRAP, (host, int(port), room.number), strict=True))
        return BootstrapRoom(room_number(info.get(BOOTSTRAP[2]), BOOTSTRAP[2])), info
    if mode == "decode":
        info = info or (request.get("prefill_result") or {}).get("disaggregated_params")
        if info is not None:                    # else the router has left it to this worker
            return room_at(BOOTSTRAP, [info.get(name) for name in BOOTSTRAP]), None
    elif info is not None:
        raise RequestError("bootstrap_info is for prefill and decode workers: start this one with "
                           "--disaggregation-mode", "bootstrap_info")
    return None, None


# ---------------------------------------------------------------- answers
def chunk(piece: ChoicePiece, token_text: Callable[[int], str]) -> dict[str, Any]:
    """What a piece adds: new tokens, with their logprobs where these were asked for."""
    found: dict[str, Any] = {"token_ids": piece.tokens, "index": 0}
    if piece.logprobs:
        found["log_probs"] = [of.logprob for of in piece.logprobs]
        found["top_logprobs"] = [_top(token, of, token_text)
                                 for token, of in zip(piece.tokens, piece.logprobs, strict=True)]
    return found


def last(finish: str, usage: Usage, prompt: list[Any] | None) -> dict[str, Any]:
    """What the last chunk has beside its tokens. prompt: logprobs of the prompt, see `prompt_logprobs`."""
    found: dict[str, Any] = {"finish_reason": finish, "completion_usage": usage_json(usage)}
    return found if prompt is None else found | {"engine_data": {"prompt_logprobs": prompt}}


def _top(token: int, of: TokenLogprob, token_text: Callable[[int], str]) -> list[dict[str, Any]]:
    ranked = [(one, logprob, rank) for rank, (one, logprob) in enumerate(of.top, 1)]
    if token not in [one for one, _, _ in ranked]:
        ranked.append((token, of.logprob, of.rank))
    return [{"rank": rank, "token_id": one, "token": token_text(one), "logprob": logprob,
             "bytes": list(token_text(one).encode())} for one, logprob, rank in ranked]


def prompt_logprobs(prompt: Sequence[int], scores: Scores, token_text: Callable[[int], str]) -> list[Any]:
    """Return, per token of a prompt, its logprob and the best ones next to it, by token id; None without one."""
    found: list[Any] = [None] * scores.first
    for token, (logprob, rank, top) in zip(prompt[scores.first:], scores.rows(), strict=True):
        entries = [(one, other, place) for place, (one, other) in enumerate(top, 1)] + [(token, logprob, rank)]
        found.append({str(one): {"logprob": value, "rank": place, "decoded_token": token_text(one)}
                      for one, value, place in entries})
    return found
