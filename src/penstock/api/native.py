"""Routes beside OpenAI's, in the shapes of vLLM (`/tokenize`, `/detokenize`) and SGLang (`/abort_request`),
and the paths that others have and this server has not.

Owns those requests' fields. Knows no HTTP.
"""
from __future__ import annotations

from typing import Any

from penstock.api.completions import OpenAI, Reply
from penstock.api.openai_format import encode
from penstock.api.protocol.body import Body
from penstock.api.protocol.openai import ChatRequest, parse
from penstock.api.protocol.tools import Tool
from penstock.config.base.errors import RequestError

# By path or its beginning: what is not built, in words.
UNBUILT_PATHS = {
    "/api": "Ollama's API", "/classify": "classification", "/encode": "embeddings",
    "/get_weights_by_name": "reading weights",
    "/invocations": "SageMaker's API",
    "/load_lora_adapter": "LoRA", "/unload_lora_adapter": "LoRA", "/pause_generation": "pausing the engine",
    "/pooling": "embeddings", "/rerank": "scoring", "/score": "scoring", "/sleep": "pausing the engine",
    "/start_profile": "profiling", "/stop_profile": "profiling", "/v1/assistants": "the Assistants API",
    "/v1/audio": "audio", "/v1/batches": "the Batch API", "/v1/conversations": "stored conversations",
    "/v1/embeddings": "embeddings", "/v1/files": "files", "/v1/fine_tuning": "training",
    "/v1/images": "images",
    "/v1/load_lora_adapter": "LoRA", "/v1/moderations": "moderation",
    "/v1/realtime": "the Realtime API", "/v1/rerank": "scoring",
    "/v1/score": "scoring", "/v1/threads": "the Assistants API", "/v1/unload_lora_adapter": "LoRA",
    "/v1/uploads": "files", "/v1/vector_stores": "files", "/v1/videos": "video", "/v2/rerank": "scoring",
    "/wake_up": "pausing the engine", "/update_weights_from_disk": "changing weights",
}


def no_such_path(path: str) -> tuple[str, str]:
    """What a 404 says of a path, and its code."""
    listed = "/openapi.json lists the paths that there are"
    for known, feature in UNBUILT_PATHS.items():
        if path == known or path.startswith(known + "/"):
            return f"{known}: {feature} is not built here; {listed}", "not_built"
    return f"there is no such path; {listed}", "not_found"


class TokenizeRequest(Body, kw_only=True, forbid_unknown_fields=True):
    """A text, or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None      # of a text unless this is false, of a chat if it is true
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Tool] | None = None             # of a conversation

    def checked(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise RequestError("give prompt or messages, one of them", "prompt")


class DetokenizeRequest(Body, kw_only=True, forbid_unknown_fields=True):
    tokens: list[int]
    model: str | None = None


class AbortRequest(Body, kw_only=True, forbid_unknown_fields=True):
    """`rid`: what the request was sent with, or the id of its answer."""

    rid: str | None = None
    abort_all: bool | None = None

    def checked(self) -> None:
        if (self.rid is None) == (not self.abort_all):
            raise RequestError("give rid, or abort_all: true", "rid")


async def tokenize(api: OpenAI, body: bytes, tenant: bytes, reply: Reply) -> None:
    """POST /tokenize."""
    request = parse(body, TokenizeRequest)
    api.check_model(request.model)
    if request.messages is not None:
        chat = ChatRequest(
            messages=request.messages, add_special_tokens=request.add_special_tokens,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
            chat_template_kwargs=request.chat_template_kwargs, tools=request.tools)
        _, ids = await api.chat_prompt(chat, tenant, chat.offer)
    else:
        assert request.prompt is not None
        [ids] = await api.encode([request.prompt], tenant, special=request.add_special_tokens is not False)
    strings = [api.token_bytes(i).decode("utf-8", "replace") for i in ids]
    await reply.whole(200, encode({
        "count": len(ids), "max_model_len": api.engine.ready.max_model_len, "tokens": ids,
        "token_strs": strings if request.return_token_strs else None}), {})


async def detokenize(api: OpenAI, body: bytes, _: bytes, reply: Reply) -> None:
    """POST /detokenize."""
    request = parse(body, DetokenizeRequest)
    api.check_model(request.model)
    if api.tokenizer is None:
        raise RequestError("this model has no tokenizer", "tokens")
    try:
        text = api.tokenizer.decode(request.tokens, skip_special=False)
    except (OverflowError, TypeError):
        raise RequestError("a token id is outside the vocabulary", "tokens") from None
    await reply.whole(200, encode({"prompt": text}), {})


async def abort(api: OpenAI, body: bytes, tenant: bytes, reply: Reply) -> None:
    """POST /abort_request, of the tenant's own requests; an unknown rid aborts none."""
    request = parse(body, AbortRequest)
    count = api.running.abort(tenant, request.rid)
    await reply.whole(200, encode({"success": True, "aborted": count}), {})
