"""The OpenAPI document of /openapi.json, made from the types that requests are decoded with.

Owns which answers each route has. A schema is what a request may look like; that a value is also in range,
and that a field's feature is built, is checked at run time: a 400.
"""
from __future__ import annotations

from collections.abc import Collection
from typing import Any

import msgspec

from penstock.api.apis.anthropic import CountRequest, MessagesError, MessagesRequest
from penstock.api.apis.generate import GenerateRequest
from penstock.api.apis.responses import ResponsesRequest
from penstock.api.apis.sessions import SessionRequest
from penstock.api.native import AbortRequest, DetokenizeRequest, TokenizeRequest
from penstock.api.page import FILES
from penstock.api.protocol.body import Body, unbuilt
from penstock.api.protocol.openai import ChatRequest, CompletionRequest
from penstock.config.base.version import version

_REF = "#/components/schemas/{name}"


class ErrorBody(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(msgspec.Struct):
    error: ErrorBody


_WHAT = {
    400: "A field is wrong or not supported: `param` names it.", 401: "The API key is missing or wrong.",
    403: "Not from this machine, or not an admin's key.", 404: "No such model.",
    408: "The body took too long to arrive.", 413: "The body is too large.",
    415: "The body's Content-Type is not application/json, or it is compressed.",
    500: "The model failed at this request, and would again.",
    503: "Overloaded, shutting down, or the engine is gone.",
}
_POST = (400, 401, 403, 404, 408, 413, 415, 500, 503)
_GET = (401, 403)


def document(served: Collection[str] | None = None) -> dict[str, Any]:
    """OpenAPI 3.1, as JSON types; of the paths `served` only, where they are given."""
    posts: dict[str, type[Body]] = {
        "/v1/chat/completions": ChatRequest, "/v1/completions": CompletionRequest,
        "/v1/messages": MessagesRequest, "/v1/messages/count_tokens": CountRequest,
        "/v1/responses": ResponsesRequest, "/generate": GenerateRequest,
        "/tokenize": TokenizeRequest, "/detokenize": DetokenizeRequest, "/abort_request": AbortRequest,
        "/v1/sessions/{session}": SessionRequest}
    (error, anthropic, *bodies), schemas = msgspec.json.schema_components(
        [Error, MessagesError, *posts.values()], ref_template=_REF)
    for kind in posts.values():
        for name, mark in unbuilt(kind).items():
            schemas[kind.__name__]["properties"][name]["enum"] = mark.values
    objects = {"application/json": {"schema": {"type": "object"}}}
    errors = {"application/json": {"schema": error}}
    others = {"application/json": {"schema": {"anyOf": [error, anthropic]}}}     # a missing key is OpenAI's

    def answers(*statuses: int, ok: dict[str, Any], wrong: dict[str, Any] = errors) -> dict[str, Any]:
        return {"200": {"description": "The answer.", "content": ok},
                **{str(s): {"description": _WHAT[s], "content": wrong} for s in statuses}}

    def generating(path: str, schema: dict[str, Any]) -> dict[str, Any]:
        several = {"application/json": {"schema": {"type": ["object", "array"]}}}
        whole = several if path == "/generate" else objects
        named = {"name": "session", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        return {"post": {
            **({"parameters": [named]} if "{session}" in path else {}),
            "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
            "responses": answers(*_POST, ok=whole | {"text/event-stream": {"schema": {}}},      # of one event
                                 wrong=others if path.startswith("/v1/messages") else errors)}}

    def get(*statuses: int, ok: dict[str, Any] = objects, **more: Any) -> dict[str, Any]:
        return {"get": {**more, "responses": answers(*statuses, ok=ok)}}

    def health(what: str, *statuses: int) -> dict[str, Any]:
        found = get(*statuses)
        found["get"]["responses"]["503"] = {"description": what, "content": objects}
        return found

    model = {"name": "name", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    flush = {"post": {"responses": answers(*_GET, ok=objects)}}
    paths = {
        **{path: generating(path, body) for path, body in zip(posts, bodies, strict=True)},
        "/v1/models": get(*_GET), "/v1/models/{name}": get(*_GET, 404, parameters=[model]),
        "/health_generate": health("No token was made in time.", *_GET),
        "/health": health("The engine process is gone."), "/ready": health("No new requests are taken."),
        "/metrics": get(*_GET, ok={"text/plain": {"schema": {"type": "string"}}}),
        **{path: get(*_GET) for path in ("/version", "/server_info", "/get_server_info", "/model_info",
                                         "/get_model_info", "/openapi.json", "/v1/loads")},
        "/get_load": get(*_GET, ok={"application/json": {"schema": {"type": "array"}}}),
        "/live": get(*_GET, ok={"text/event-stream": {"schema": {"type": "string"}}}),
        **{path: {"get": {"security": [], "responses": answers(ok={kind: {"schema": {"type": "string"}}})}}
           for path, (_, kind) in FILES.items()},
        "/flush_cache": flush, "/reset_prefix_cache": flush,
    }
    return {
        "openapi": "3.1.0", "info": {"title": "penstock", "version": version()},
        "paths": {p: item for p, item in paths.items() if served is None or p in served},
        "components": {"schemas": schemas, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{"key": []}, {}],
    }
