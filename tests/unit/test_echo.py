"""What errors say of a large value in any field of any body: at most 80 characters of it in a row. No 500."""
from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from msgspec import inspect
from scripted import Scripted, template

from penstock.api.apis.anthropic import CountRequest, MessagesRequest
from penstock.api.apis.generate import GenerateRequest
from penstock.api.apis.responses import ResponsesRequest
from penstock.api.native import AbortRequest, DetokenizeRequest, TokenizeRequest
from penstock.api.protocol.body import Body
from penstock.api.protocol.openai import ChatRequest, CompletionRequest

LONG = "Q" * 3000
USER = {"messages": [{"role": "user", "content": "x"}]}
BODIES: dict[str, tuple[type[Body], dict[str, Any]]] = {
    "/v1/chat/completions": (ChatRequest, USER), "/v1/completions": (CompletionRequest, {"prompt": "x"}),
    "/v1/messages": (MessagesRequest, {**USER, "max_tokens": 5}),
    "/v1/messages/count_tokens": (CountRequest, USER), "/v1/responses": (ResponsesRequest, {"input": "x"}),
    "/generate": (GenerateRequest, {"text": "x"}), "/tokenize": (TokenizeRequest, {"prompt": "x"}),
    "/detokenize": (DetokenizeRequest, {"tokens": [1]}), "/abort_request": (AbortRequest, {"rid": "x"})}
SCHEMAS = ({"type": LONG}, {"type": "string", "pattern": f"({LONG}"}, {"$ref": LONG}, {LONG: {}},
           {"enum": []}, {"type": "string", "format": LONG}, {"properties": {LONG: {"type": LONG}}})


def least(of: inspect.Type) -> Any:
    """The smallest value that may be one of this type."""
    match of:
        case inspect.UnionType():
            return least(of.types[0])
        case inspect.StrType():
            return "x"
        case inspect.LiteralType():
            return of.values[0]
        case inspect.StructType():
            return required(of)
        case inspect.ListType() | inspect.VarTupleType():
            return []
        case inspect.DictType():
            return {}
    return 1


def required(of: inspect.StructType) -> dict[str, Any]:
    return {field.encode_name: least(field.type) for field in of.fields if field.required}


def large(of: inspect.Type, depth: int = 0) -> Iterator[Any]:
    """Large values of a type, and large parts of what would be one."""
    match of:
        case inspect.UnionType():
            for one in of.types:
                yield from large(one, depth)
        case inspect.StructType():
            for field in of.fields:
                yield from ({**required(of), field.encode_name: value}
                            for value in large(field.type, depth + 1))
            yield {**required(of), LONG: 1}
        case inspect.ListType() | inspect.VarTupleType():
            yield from ([value] * 3 for value in large(of.item_type, depth + 1))
        case inspect.DictType():
            yield {LONG: LONG}
            if depth < 6:
                yield from ({LONG: value} for value in large(of.value_type, depth + 1))
        case inspect.StrType():
            yield from (LONG, f"({LONG}", f"{LONG}\n(")
        case inspect.LiteralType():
            yield from (of.values[0], LONG)
        case inspect.IntType() | inspect.FloatType():
            yield from (10**30, -3)
        case inspect.AnyType():
            yield from (LONG, *SCHEMAS)


@pytest.fixture(scope="module")
def server() -> Iterator[Scripted]:
    made = Scripted(template("hermes"))
    made.says = "x"
    yield made
    made.close()


@pytest.mark.parametrize("path", BODIES)
def test_no_error_echoes_a_large_value(server: Scripted, path: str) -> None:
    kind, base = BODIES[path]
    type_info = inspect.type_info(kind)
    assert isinstance(type_info, inspect.StructType)
    bodies = [{**base, field.encode_name: value} for field in type_info.fields
              for value in (*large(field.type), LONG, [LONG], [[LONG]], {LONG: LONG}, {"type": LONG})]

    async def post() -> list[httpx.Response]:
        async with httpx.AsyncClient(transport=server.transport(), base_url="http://localhost") as http:
            return [await http.post(path, json=body) for body in bodies]

    refused = 0
    for answer, body in zip(asyncio.run(post()), bodies, strict=True):
        assert answer.status_code < 500, (answer.text, str(body)[:200])
        if answer.status_code >= 400:
            refused += 1
            error = answer.json()["error"]
            told = (error["message"], error.get("param") or "")
            assert all(len(run) <= 80 for text in told for run in re.findall("Q+", text)), told
            assert sum(map(len, told)) < 600, told
    assert refused > 5
