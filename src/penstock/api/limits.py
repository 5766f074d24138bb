"""What one client may take: bytes, seconds, and other clients' cached pages; and who may ask at all.

Owns reading a request body under limits, API keys, this machine's names, cache namespaces and slow
connections. Knows no route.
"""
from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import hmac
import secrets
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

import msgspec
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from penstock.api.descriptors import Connections
from penstock.api.protocol.openai import ApiError
from penstock.config.base.errors import ConfigError
from penstock.config.settings.pairkey import read_secret
from penstock.config.settings.tree import ServerConfig
from penstock.engine.client.gate import Gate

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]

HEADER_S_MAX = 10.0
BODY_S_MAX = 30.0
CLOSE = {"connection": "close"}          # what follows on the connection is not a request
HEADER_BYTES_MAX = 16 << 10
HEADERS_MAX = 100


class Disconnected(Exception):
    """The client has gone and reads no answer."""


async def while_connected(work: Awaitable[None], receive: Receive) -> None:
    """Await `work`; cancel it as soon as the client disconnects. Raises Disconnected then."""
    task = asyncio.ensure_future(work)
    gone = asyncio.create_task(_disconnect(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Disconnected
        task.result()
    finally:
        gone.cancel()
        if not task.done():
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        # An error's traceback has this frame, and the task has the error: a cycle, with all that was read of
        # the body in it, which is collected after hours.
        del task, work


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def read_body(headers: Iterable[tuple[bytes, bytes]], receive: Receive, bytes_max: int,
                    seconds_max: float = BODY_S_MAX) -> bytes:
    """The whole body, of at most `bytes_max`, which is checked before and while it arrives.

    Raises ApiError, Disconnected.
    """
    large = ApiError(413, f"the body is over {bytes_max} bytes", code="body_too_large", headers=CLOSE)
    for name, value in headers:
        if name == b"content-length" and int(value) > bytes_max:
            raise large
    body = bytearray()
    try:
        async with asyncio.timeout(seconds_max):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise Disconnected
                body += message.get("body", b"")
                if len(body) > bytes_max:
                    raise large
                if not message.get("more_body", False):
                    return bytes(body)
    except TimeoutError:
        raise ApiError(408, "the body took too long to arrive", code="body_too_slow",
                       headers=CLOSE) from None


class Keys:
    """The API keys, as keyed hashes. Without any, everybody may ask. `admins` are keys too."""

    def __init__(self, keys: Iterable[str], admins: Iterable[str] = (), secret: bytes | None = None) -> None:
        """secret: see `namespace`: what a tenant is called with it is the same in every process."""
        self._secret = secret or secrets.token_bytes(32)
        self._admins = frozenset(self._hash(k.encode()) for k in admins)
        self._hashes = [*(self._hash(k.encode()) for k in keys), *self._admins]

    def __bool__(self) -> bool:
        return bool(self._hashes)

    def tenant(self, authorization: bytes | None) -> bytes | None:
        """Whose cache the bearer of this header uses: b"" when no key is asked for, None when the
        key is missing or wrong. Compares with every key, in constant time."""
        if not self._hashes:
            return b""
        scheme, _, key = (authorization or b"").partition(b" ")
        given = self._hash(key.strip())
        same = [h for h in self._hashes if hmac.compare_digest(h, given)]
        return same[0] if same and scheme.lower() == b"bearer" else None

    def is_admin(self, tenant: bytes) -> bool:
        """Whether this tenant may see and change what belongs to all of them."""
        return not self._hashes or tenant in self._admins

    def __len__(self) -> int:
        return len(self._hashes)

    def turn_of(self, tenant: bytes) -> int:
        """The number by which this key's turn among the others is counted; 0: there are no others."""
        return int.from_bytes(tenant[:7], "little") + 1 if len(self._hashes) > 1 else 0

    def cache_of(self, tenant: bytes, *, published: bool) -> bytes:
        """The name of the tenant's cache. If pages are `published`, the only key needs no cache apart from others:
        routers find then what its prompts find."""
        return b"" if published and len(self._hashes) == 1 else tenant

    @property
    def says(self) -> str:
        """A line for the start: who may read metrics; "" where it needs no word."""
        if not self._hashes:
            return ""
        if not self._admins:
            return ("keys: /metrics, /server_info and /flush_cache are closed to all of them: give an "
                    "admin's key with --admin-key-file or --admin-api-key")
        if len(self._hashes) == 1:
            return ("keys: the only one is an admin's: it may read /metrics and /server_info and flush the "
                    "cache; --admin-key-file names another")
        return ""

    def _hash(self, key: bytes) -> bytes:
        return hashlib.blake2b(key, key=self._secret, digest_size=32).digest()


def load_keys(config: ServerConfig, secret: bytes | None = None) -> Keys:
    """The keys of the command line and of the key files. One key alone is an admin's, where no flag names
    one. Raises ConfigError."""
    keys = [config.api_key] if config.api_key else []
    if config.api_key_file is not None:
        keys += _read_keys("--api-key-file", config.api_key_file)
    admins = [] if config.admin_key_file is None else _read_keys("--admin-key-file", config.admin_key_file)
    if config.admin_api_key:
        admins.append(config.admin_api_key)
    alone = len(keys) == 1 and not admins
    return Keys([] if alone else keys, keys if alone else admins, secret)


def _read_keys(flag: str, path: str) -> list[str]:
    try:
        lines = read_secret(flag, path).decode().splitlines()
    except UnicodeDecodeError as e:
        raise ConfigError(f"{flag} {path}: {e}: give a file with one key a line") from e
    found = [line.strip() for line in lines if line.strip() and not line.strip().startswith("#")]
    if not found:
        raise ConfigError(f"{flag} {path} has no key: one a line")
    return found


class _HeadTooLarge(Exception):
    pass


# What `LimitedProtocol` overrides, calls or sets of uvicorn's own classes, which are not part of its API.
_OVERRIDDEN = ("connection_made", "connection_lost", "data_received", "on_message_begin", "on_url",
               "on_header", "on_headers_complete", "on_response_complete", "send_400_response")
_SET = {HttpToolsProtocol: ("flow", "headers", "pipeline", "scope", "transport", "cycle", "loop",
                            "timeout_keep_alive_task"),
        RequestResponseCycle: ("chunked_encoding", "disconnected", "expected_content_length", "message_event",
                               "response_complete")}


def check_uvicorn() -> None:
    """Raises ConfigError where the installed uvicorn is another than this module builds on."""
    lacks = [name for name in _OVERRIDDEN if not hasattr(HttpToolsProtocol, name)]
    lacks += [f"{kind.__name__}.{name}" for kind, names in _SET.items() for name in names
              if name not in vars(kind)["__init__"].__code__.co_names and not hasattr(kind, name)]
    if lacks:
        raise ConfigError(f"uvicorn {uvicorn.__version__} has no {', '.join(lacks)}, on which the limits of "
                          "connections are built: pip install 'uvicorn>=0.34,<=0.54'")


def _unframe(cycle: RequestResponseCycle) -> None:
    """HTTP/1.0 knows no chunks: what has no length ends with its connection, which uvicorn closes."""
    send = cycle.send
    cycle.chunked_encoding = False

    async def unframed(message: Any) -> None:
        if message["type"] == "http.response.body":
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    cycle.send = unframed  # type: ignore[method-assign]


class LimitedProtocol(HttpToolsProtocol):
    """uvicorn's HTTP/1.1 with what it leaves open: a time and a size for the head of a request,
    errors in OpenAI's shape also for what is not HTTP, and a disconnect that reaches every request
    of a pipelined connection. What arrives waits at a gate for its turn."""

    def __init__(self, *args: Any, gate: Gate, connections: Connections | None = None,
                 **kwargs: Any) -> None:
        """gate, connections: of all together, None: as many as come. The others: as uvicorn has them."""
        super().__init__(*args, **kwargs)
        self._gate, self._connections = gate, connections
        self._admitted = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._head = 0                       # which request of the connection
        self._in_head = False                # headers that come now are its own
        self._head_bytes = 0                 # of its head so far; complete lines only
        self._head_parts = 0                 # as they arrived, of a head that arrives in several
        self._head_too_large = False
        self._open_cycles: list[RequestResponseCycle] = []
        self._head_timer: asyncio.TimerHandle | None = None
        self._admitted = self._connections is None or self._connections.admit()
        if not self._admitted:
            self._refuse(503, "Service Unavailable", "too many connections are open: come back later")
            return
        self._await_head()

    def data_received(self, data: bytes) -> None:
        if not self._admitted:
            return
        if self._connections is not None:
            self._connections.busy(id(self))
        self.transport.pause_reading()       # no more of one connection than this waits
        self._gate.later(functools.partial(self._take, data))

    def _take(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        head = self._head
        super().data_received(data)
        same = head in (0, self._head)
        if self._head_timer is not None and same and not self.transport.is_closing():
            self._head_parts += len(data)    # the parser does not report a line that never ends
            if self._head_parts > HEADER_BYTES_MAX:
                self._refuse_head()
        if not (self.flow.read_paused or self.transport.is_closing()):
            self.transport.resume_reading()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True
        self._head += 1
        self._head_bytes = self._head_parts = 0
        if self._head_timer is None:         # the second and later requests of a connection
            self._await_head()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count_head(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_head:                # a trailer, which is none (RFC 9110, 6.5.1): counted, not kept
            self._count_head(len(name) + len(value) + 4)
            return
        super().on_header(name, value)
        self._count_head(len(name) + len(value) + 4)

    def _count_head(self, count: int) -> None:
        self._head_bytes += count
        if self._head_bytes > HEADER_BYTES_MAX or len(self.headers) > HEADERS_MAX:
            self._head_too_large = True
            raise _HeadTooLarge              # the parser stops, and asks for send_400_response

    def on_headers_complete(self) -> None:
        self._stop_timer()
        self._in_head = False
        super().on_headers_complete()
        if self.scope["http_version"] == "1.0":
            _unframe(self.cycle)
        self._open_cycles = [c for c in self._open_cycles if not c.response_complete]
        self._open_cycles.append(self.cycle)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.timeout_keep_alive_task is not None and self._connections is not None:
            self._connections.idle(id(self), self.timeout_keep_alive_handler)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        if self._admitted and self._connections is not None:
            self._connections.busy(id(self))
            self._connections.left()
        for cycle in self._open_cycles:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        self._open_cycles = []
        self.pipeline.clear()                # requests that have not begun have no reader
        super().connection_lost(exc)

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(HEADER_S_MAX, self._head_late)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_late(self) -> None:
        self._head_timer = None
        if not self.transport.is_closing():
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        if self._head_too_large:
            self._refuse_head()
        else:
            self._refuse(400, "Bad Request", "this is not an HTTP/1.1 request")

    def _refuse_head(self) -> None:
        self._refuse(431, "Request Header Fields Too Large",
                     f"the request's head is over {HEADER_BYTES_MAX} bytes or {HEADERS_MAX} fields")

    def _refuse(self, status: int, phrase: str, message: str) -> None:
        """Answer what never became a request, and close."""
        self._stop_timer()
        body = msgspec.json.encode(ApiError(status, message).body)
        self.transport.write(
            f"HTTP/1.1 {status} {phrase}\r\ncontent-type: application/json\r\ncontent-length: "
            f"{len(body)}\r\nconnection: close\r\n\r\n".encode() + body)
        self.transport.close()
