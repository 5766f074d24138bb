"""Routes, keys and errors of the HTTP server; one handler a path.

Every route wants the API key but /health and /ready; ADMIN_PATHS want an admin's. Owns what goes over
HTTP; knows no process and no signal (`main`) and no field of a request (`types`).
"""
from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from penstock.api import native
from penstock.api.apis import anthropic, responses, sessions
from penstock.api.apis import generate as sglang
from penstock.api.completions import OpenAI, as_api_error
from penstock.api.limits import CLOSE, Disconnected, Keys, read_body, while_connected
from penstock.api.openai_format import encode, event
from penstock.api.openapi import document
from penstock.api.page import FILES, Page
from penstock.api.protocol.openai import ApiError
from penstock.config.base import collector
from penstock.config.base.errors import show
from penstock.config.base.version import version
from penstock.config.request.params import SamplingParams
from penstock.config.settings.refuse import is_local, is_local_origin
from penstock.config.settings.tree import ServerConfig
from penstock.engine.client.client import EngineClient, EngineDied
from penstock.engine.client.dialect import CacheUsage
from penstock.engine.client.metrics import CONTENT_TYPE, STATS_AGE, Metrics
from penstock.engine.client.replicas import Engines, Member, together
from penstock.engine.client.supervised import Kept

if TYPE_CHECKING:
    from penstock.engine.traces.spans import RequestSpan

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
ReceiveCall = Callable[[], Awaitable[Message]]
SendCall = Callable[[Message], Awaitable[None]]
Shape = Callable[[ApiError, bool], dict[str, Any]]
Handler = Callable[[OpenAI, bytes, bytes, "HttpReply"], Awaitable[None]]

OPEN_PATHS = ("/health", "/ready")
# What belongs to every tenant: where there are keys, one of an admin.
ADMIN_PATHS = ("/metrics", "/server_info", "/get_server_info", "/flush_cache", "/reset_prefix_cache",
               "/get_load", "/v1/loads", "/live")
STATS_S_MAX = 5.0
GENERATE_S_MAX = 20.0
JSON_TYPE = "application/json"
SESSION_HEADER = b"x-dynamo-session-id"
DISCONNECTED = "client_disconnected"          # `error.type` of a span
BODY_BYTES, BYTES_A_TOKEN = 4 << 20, 16     # largest body: at least, and for each token of the context


@dataclass(slots=True)
class Health:
    """What /ready and /health tell."""

    draining: bool = False
    died: bool = False


@dataclass(frozen=True, slots=True)
class PeerView:
    """The other end of a pair. `serves`: this end has the endpoints; the prefill instance has none, unless a
    router sends it prompts. `here`: its engines, where this server runs them."""

    engine: Engines
    role: str
    serves: bool
    here: Sequence[Kept] = ()

    @property
    def missing(self) -> str:
        """What is not there, in words; "" if nothing is."""
        why = self.engine.peer_missing
        return f"the {self.role} engine: {why}" if why else ""


class HttpReply:
    """One answer over ASGI. `started` once a status has been sent."""

    def __init__(self, send: SendCall, metrics: Metrics, shape: Shape | None = None) -> None:
        """send: the server's own. shape: the body of an error, and of one in a stream; None: OpenAI's."""
        self._send = send
        self._shape = shape or (lambda error, _: error.body)
        self._metrics = metrics
        self.started = False
        self.ended = False
        self.status = 0              # that was sent
        self.span: RequestSpan | None = None
        self.session: str | None = None     # that the path or a header names

    async def whole(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.started = self.ended = True
        self.status = status
        self._metrics.answers.labels(str(status)).inc()
        await self._send({"type": "http.response.start", "status": status, "headers": [
            (b"content-type", JSON_TYPE.encode()), (b"content-length", b"%d" % len(body)),
            *((k.encode(), v.encode()) for k, v in headers.items())]})
        await self._send({"type": "http.response.body", "body": body})

    async def start(self) -> None:
        self.started, self.status = True, 200
        self._metrics.answers.labels("200").inc()
        await self._send({"type": "http.response.start", "status": 200, "headers": [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]})

    async def events(self, data: bytes, *, last: bool = False) -> None:
        self.ended = last
        if data or last:
            await self._send({"type": "http.response.body", "body": data, "more_body": not last})

    async def error(self, error: ApiError) -> None:
        """As a status, or, once a stream runs, as its last event."""
        body = self._shape(error, self.started)
        if self.span is not None:
            self.span.failed(str(error.body["error"]["code"] or error.status), error.status)
        if not self.started:
            await self.whole(error.status, encode(body), error.headers)
        elif not self.ended:
            await self.events(event(body, "type" in body), last=True)


class Generating:
    """ASGI endpoint of a POST that runs in the engine: it ends at once when its client has gone."""

    def __init__(self, api: OpenAI, handler: Handler, bytes_max: int,
                 shape: Shape | None = None, operation: str = "") -> None:
        """operation: what a span of such a request is called; "": it has none."""
        self._api = api
        self._shape, self._operation = shape, operation
        self._handler = handler
        self._bytes_max = bytes_max

    async def __call__(self, scope: Scope, receive: ReceiveCall, send: SendCall) -> None:
        # Past the frameworks' wrappers, which each event of a stream would pay for.
        reply = HttpReply(scope["send"], self._api.metrics, self._shape)
        api = self._api
        # As paths are read: UTF-8. A name that is none keeps its bytes, and is refused where its number is made.
        named = [v.decode(errors="surrogateescape") for k, v in scope["headers"] if k == SESSION_HEADER]
        reply.session = scope.get("path_params", {}).get("session", named[0] if named else None)
        if self._operation and api.traces is not None:
            reply.span = api.traces.begin(self._operation, scope["headers"])
        api.num_open += 1
        api.idle.clear()
        try:
            body = await self._body(scope, receive)
            if len(body) > collector.LARGE_BYTES:
                collector.trim_later()
            await while_connected(self._handler(self._api, body, scope["tenant"], reply), receive)
        except Disconnected:
            if reply.span is not None:
                reply.span.failed(DISCONNECTED)
        # One request's error is one request's answer, whatever it is: left to the frameworks, an
        # unknown one would end a stream without a word and print its text, which may be a prompt.
        except Exception as e:
            await reply.error(as_api_error(e))
        finally:
            if reply.span is not None:
                reply.span.end(reply.status)
            api.num_open -= 1
            if not api.num_open:
                api.idle.set()

    async def _body(self, scope: Scope, receive: ReceiveCall) -> bytes:
        for name, value in scope["headers"]:
            kind = value.partition(b";")[0].strip().lower()
            if name == b"content-type" and kind != JSON_TYPE.encode():
                raise ApiError(
                    415, "the body's Content-Type is not application/json: send that header (curl -d "
                    "says application/x-www-form-urlencoded unless -H names another)",
                    code="unsupported_media_type", headers=CLOSE)
            if name == b"content-encoding" and kind not in (b"", b"identity"):
                raise ApiError(
                    415, f"the body's Content-Encoding is {show(kind.decode('latin-1'))}: send it as it is",
                    code="unsupported_media_type", headers=CLOSE | {"accept-encoding": "identity"})
        return await read_body(scope["headers"], receive, self._bytes_max)


class Guard:
    """The one place where it is checked who asks: in front of every route.

    By key; without keys by name: a page in the browser of this machine's user can send requests to
    a loopback port, also under a name of its own that it lets resolve to it (DNS rebinding).
    """

    def __init__(self, app: Callable[[Scope, ReceiveCall, SendCall], Awaitable[None]], keys: Keys,
                 metrics: Metrics) -> None:
        self._app = app
        self._keys = keys
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: ReceiveCall, send: SendCall) -> None:
        if scope["type"] == "http":
            given = [*_values(scope, b"authorization"),      # Anthropic's clients have another header
                     *(f"Bearer {key}" for key in _values(scope, b"x-api-key"))]
            tenant = self._keys.tenant(given[0].encode("latin-1") if len({*given}) == 1 else None)
            if scope["path"] not in OPEN_PATHS and (error := self._refusal(scope, tenant)):
                await HttpReply(send, self._metrics).error(error)
                return
            scope["tenant"] = tenant or b""
            scope["send"] = send
        await self._app(scope, receive, send)

    def _refusal(self, scope: Scope, tenant: bytes | None) -> ApiError | None:
        if self._keys and scope["path"] in FILES:
            return None                 # a browser's first question has no key, and these tell nothing
        if tenant is None:
            return ApiError(401, "the API key is missing or wrong: send Authorization: Bearer KEY",
                            code="invalid_api_key", headers={"www-authenticate": "Bearer"})
        if self._keys:
            if scope["path"] not in ADMIN_PATHS or self._keys.is_admin(tenant):
                return None
            return ApiError(403, "this path is for a key of --admin-key-file or --admin-api-key: it shows or "
                            "changes what belongs to all keys", code="admin_key_required")
        hosts = _values(scope, b"host")
        if len(hosts) != 1 or not is_local(hosts[0]):
            name = "Host"
        elif not all(is_local_origin(o) for o in _values(scope, b"origin")):
            name = "Origin"
        else:
            return None
        return ApiError(403, f"the {name} header does not name this machine: without API keys only "
                        "its own programs may ask; use http://localhost, or start the server with "
                        "--api-key-file", code="not_local")


def _values(scope: Scope, name: bytes) -> list[str]:
    return [v.decode("latin-1") for k, v in scope["headers"] if k == name]


def build_app(api: OpenAI, health: Health, keys: Keys, config: ServerConfig,
              info: dict[str, Any], stats: Sequence[dict[str, float]],
              peer: PeerView | None = None) -> ASGIApp:
    """The ASGI app. `info` is what /server_info shows: no key, no path of a secret. `stats` are each
    engine's numbers until it tells others. `peer`: of one end of a pair."""
    views = _Views(api, health, info, stats, peer, peer if config.ready_needs_prefill else None)
    body_max = config.body_bytes_max or max(BODY_BYTES, BYTES_A_TOKEN * int(info.get("max_model_len", 0)))

    def get(path: str, view: Callable[[Request], Awaitable[Response]]) -> Route:
        return Route(path, view, methods=["GET"])

    def generating(path: str, handler: Handler, shape: Shape | None = None, operation: str = "") -> Route:
        return Route(path, Generating(api, handler, body_max, shape, operation), methods=["POST"])

    page = Page(api.engine, views.numbers, views.shown, lambda: health.died or health.draining)
    serving = () if peer is not None and not peer.serves else (
        generating("/v1/chat/completions", OpenAI.chat, operation="chat"),
        generating("/v1/completions", OpenAI.completion, operation="text_completion"),
        generating("/v1/messages", anthropic.create, anthropic.error_body, "chat"),
        generating("/v1/messages/count_tokens", anthropic.count, anthropic.error_body),
        generating("/v1/responses", responses.create, responses.error_body, "chat"),
        generating("/generate", sglang.create, operation="text_completion"),
        get("/v1/models", views.models),
        get("/v1/models/{name:path}", views.model),
        generating("/tokenize", native.tokenize),
        generating("/detokenize", native.detokenize),
        generating("/abort_request", native.abort),
        generating("/v1/sessions/{session:path}", sessions.change),
        *([] if api.routed.prefills else [get("/health_generate", views.health_generate)]))
    app = Starlette(routes=[
        *serving,
        *(get(path, page.file) for path in FILES),
        get("/live", page.live),
        get("/health", views.health),
        get("/ready", views.ready),
        get("/metrics", views.metrics),
        get("/get_load", views.get_load),
        get("/v1/loads", views.loads),
        *([get("/version", views.version)] if config.router_dialect != "sglang" else []),
        get("/openapi.json", views.openapi),
        get("/server_info", views.server_info),
        get("/get_server_info", views.server_info),
        get("/model_info", views.model_info),
        get("/get_model_info", views.model_info),
        Route("/flush_cache", views.flush, methods=["POST"]),
        Route("/reset_prefix_cache", views.flush, methods=["POST"]),
    ], exception_handlers={
        HTTPException: _http_error, ApiError: _any_error, Exception: _any_error})
    app.router.redirect_slashes = False
    guard = Guard(app, keys, api.metrics)
    if not config.cors_origins:
        return guard
    # In front of the guard: a browser asks without a key whether it may ask.
    return CORSMiddleware(guard, allow_origins=config.cors_origins, allow_methods=("GET", "POST"),
                          allow_headers=("*",), max_age=3600)


class _Views:
    """The routes that answer at once."""

    def __init__(self, api: OpenAI, health: Health, info: dict[str, Any],
                 stats: Sequence[dict[str, float]], peer: PeerView | None, needed: PeerView | None) -> None:
        """needed: the other end of a pair, where this server is not ready without it."""
        self._api = api
        self._peer, self._needed = peer, needed
        self._health = health
        self._info = info
        self._others = () if peer is None else peer.here
        self._numbers = list(map(_Numbers, stats))
        self._other_numbers = [_Numbers({}) for _ in self._others]
        self._created = int(time.time())

    def shown(self) -> dict[str, Any]:
        return {"model": self._api.model, "max_model_len": self._api.engine.ready.max_model_len,
                "device": self._info["device"], "page_size": self._info["page_size"]}

    async def numbers(self) -> dict[str, float]:
        """Return the counters of all engines together."""
        return _total(await self._each())

    async def _each(self) -> list[dict[str, float]]:
        members = self._api.engine.members
        return await asyncio.gather(*(n.of(m.engine) for n, m in zip(self._numbers, members, strict=True)))

    async def models(self, _: Request) -> Response:
        return _json({"object": "list", "data": list(map(self._model, self._api.listed))})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in self._api.own_names:
            raise self._api.no_such_model(name)
        return _json(self._model(name))

    def _model(self, name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": self._created,
                "owned_by": "penstock", "max_model_len": self._api.engine.ready.max_model_len}

    async def health(self, _: Request) -> Response:
        """Alive: 200 unless the engine process is gone, also while it drains, and without the other engine
        of a pair."""
        missing = "; ".join(filter(None, [
            self._api.engine.missing, "" if self._peer is None else self._peer.missing]))
        return _json({"status": "engine died" if self._health.died else "ok",
                      **({"missing": missing} if missing else {})}, 503 if self._health.died else 200)

    async def health_generate(self, _: Request) -> Response:
        """200 once each engine has made one token of a prompt of one, before whatever else waits."""
        made = await asyncio.gather(*map(_makes_a_token, self._api.engine.members))
        status = "ok" if all(made) else "engine died" if self._health.died else "no token"
        return _json({"status": status}, 200 if all(made) else 503)

    async def ready(self, _: Request) -> Response:
        """Whether new requests should be sent here: by one engine at least they are served."""
        died = self._health.died or all(member.missing for member in self._api.engine.members)
        why = ("engine died" if died else "draining" if self._health.draining else
               "" if self._needed is None or self._needed.engine.peer_connected else self._needed.missing)
        return _json({"status": why or "ready"}, 503 if why else 200)

    async def metrics(self, _: Request) -> Response:
        others = [n.of(k.last) for n, k in zip(self._other_numbers, self._others, strict=True) if k.last]
        own, of_others = await asyncio.gather(self._each(), asyncio.gather(*others))
        return Response(self._api.metrics.text(own, of_others), media_type=CONTENT_TYPE)

    async def get_load(self, _: Request) -> Response:
        return _json([{"dp_rank": rank, "num_reqs": load["num_running_reqs"] + load["num_waiting_reqs"],
                       "num_waiting_reqs": load["num_waiting_reqs"], "num_tokens": load["num_used_tokens"]}
                      for rank, load in enumerate(await self._loads())])

    async def loads(self, _: Request) -> Response:
        loads, now = await self._loads(), datetime.now(UTC).isoformat()
        running, waiting = self._api.engine.num_running, self._api.engine.num_waiting
        return _json({
            "timestamp": now, "version": version(), "dp_rank_count": len(loads),
            "loads": [{"dp_rank": rank, "timestamp": time.time(), **load} for rank, load in enumerate(loads)],
            "aggregate": {"total_running_reqs": running, "total_waiting_reqs": waiting,
                          "total_reqs": running + waiting,
                          "avg_token_usage": sum(load["token_usage"] for load in loads) / len(loads),
                          "avg_utilization": sum(load["utilization"] for load in loads) / len(loads)}})

    async def _loads(self) -> list[dict[str, float]]:
        """Return the load of each engine, in SGLang's words; tokens are those that requests hold."""
        page, rows, usage = self._info["page_size"], self._info["max_num_seqs"], CacheUsage.of(self._info)
        loads = []
        for m, stats in zip(self._api.engine.members, await self._each(), strict=True):
            used, room = (int(of(stats)) * page for of in (usage.used, usage.pages))
            loads.append({
                "num_running_reqs": m.engine.num_running, "num_waiting_reqs": m.engine.num_waiting,
                "num_used_tokens": used, "max_total_num_tokens": room, "token_usage": used / max(1, room),
                "max_running_requests": rows, "utilization": m.engine.num_running / rows})
        return loads

    async def version(self, _: Request) -> Response:
        return _json({"version": version()})

    async def openapi(self, request: Request) -> Response:
        return _json(document({route.path.replace(":path", "") for route in request.app.routes}))

    async def server_info(self, _: Request) -> Response:
        other: dict[str, Any] = {} if self._peer is None else {self._peer.role: {
            "missing": self._peer.engine.peer_missing, "restarts": sum(k.num_restarts for k in self._others),
            **self._peer.engine.peer_info}}
        each = await self._each()
        engines = [] if len(each) == 1 else [
            {"pid": m.ready.pid, "restarts": m.num_restarts, "missing": m.missing, "stats": stats}
            for m, stats in zip(self._api.engine.members, each, strict=True)]
        return _json({**_renewed(self._info), "version": version(), "stats": _total(each),
                      "max_running_requests": len(each) * self._info["max_num_seqs"],      # smg asks for it
                      "dp_size": len(each), **({"engines": engines} if engines else {}), **other})

    async def model_info(self, _: Request) -> Response:
        tokenizer = self._api.tokenizer
        return _json({
            "model_path": self._info["model"], "served_model_name": self._api.model,
            "tokenizer_path": self._info["model"] if tokenizer else None, "is_generation": True,
            "max_model_len": self._api.engine.ready.max_model_len,
            "vocab_size": self._api.engine.ready.vocab_size})

    async def flush(self, _: Request) -> Response:
        self._api.engine.flush()
        for kept in self._others:
            if kept.last is not None:
                kept.last.flush()
        return _json({"success": True, "message": "pages that no request holds are forgotten"})


class _Numbers:
    """The numbers that an engine last sent, at first `last`."""

    def __init__(self, last: dict[str, float]) -> None:
        self._last, self._at = last, time.monotonic()

    async def of(self, engine: EngineClient) -> dict[str, float]:
        """The engine's numbers; its last ones, with their age, while it is busy or gone."""
        with contextlib.suppress(TimeoutError, EngineDied):
            async with asyncio.timeout(STATS_S_MAX):
                self._last = await engine.stats()
                self._at = time.monotonic()
        return {**self._last, STATS_AGE: time.monotonic() - self._at}


def _total(each: Sequence[dict[str, float]]) -> dict[str, float]:
    return together(each) | {STATS_AGE: max(values[STATS_AGE] for values in each)}


async def _makes_a_token(engine: Member) -> bool:
    """Whether it made one in time."""
    first = SamplingParams(max_tokens=1, temperature=0, priority=-(1 << 31))
    with contextlib.suppress(TimeoutError, EngineDied):
        async with asyncio.timeout(GENERATE_S_MAX):
            [stream] = engine.submit([0], first)
            try:
                async for chunk in stream:
                    if chunk.tokens:
                        return True
            finally:
                await stream.aclose()
    return False


def _renewed(info: dict[str, Any]) -> dict[str, Any]:
    """`info` with the names that its private ones have now; those stay for one release."""
    names = {"step_tokens": "max_num_batched_tokens", "overlap": "async_scheduling"}
    return info | {new: value for name, value in info.items() if (
        new := names.get(name) or name.replace("hbm", "device").replace("dram", "host")) != name}


def _json(value: Any, status: int = 200) -> Response:
    return Response(encode(value), status, media_type=JSON_TYPE)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    allowed = " or ".join(m for m in (error.headers or {}).get("Allow", "").split(", ") if m != "HEAD")
    what = {404: native.no_such_path(request.url.path),
            405: (f"method not allowed: use {allowed}", "method_not_allowed")}
    message, code = what.get(error.status_code, (str(error.detail), None))
    body = ApiError(error.status_code, message, code=code).body
    return Response(encode(body), error.status_code, headers=dict(error.headers or {}),
                    media_type=JSON_TYPE)


async def _any_error(_: Request, error: Exception) -> Response:
    refusal = as_api_error(error)
    return Response(encode(refusal.body), refusal.status, headers=refusal.headers, media_type=JSON_TYPE)
