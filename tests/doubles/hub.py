"""A hub of models: the part of its HTTP API that a download asks for, on a port of this machine.

Large files (*.safetensors, *.gguf) are redirected to another place, as the hub does with its storage.
"""
from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

SHA = hashlib.sha1(b"main").hexdigest()
OTHER = hashlib.sha1(b"other").hexdigest()


class Hub:
    """`repos`: name -> files. `gated` names want the token; `cut` files end in the middle, once."""

    def __init__(self, repos: Mapping[str, Mapping[str, bytes]], *, gated: tuple[str, ...] = (),
                 token: str = "hf_double") -> None:
        self.repos, self.gated, self.token = repos, gated, token
        self.asked: list[tuple[str, str, str]] = []         # method, path, Range
        self.cut: set[str] = set()
        self.url = ""

    def files(self, method: str = "GET") -> list[str]:
        """Names of what was downloaded, in order."""
        return [path.rpartition("/")[2] for m, path, _ in self.asked
                if (m == method and path.startswith("/cdn/")) or (m == method and "/resolve/" in path)]


@contextmanager
def running(hub: Hub) -> Iterator[Hub]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None:
            pass

        def do_HEAD(self) -> None:
            _answer(hub, self)

        def do_GET(self) -> None:
            _answer(hub, self)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _answer(hub: Hub, ask: BaseHTTPRequestHandler) -> None:
    path = unquote(urlsplit(ask.path).path)
    hub.asked.append((ask.command, path, ask.headers.get("Range", "")))
    parts = path.strip("/").split("/")
    api = parts[:2] == ["api", "models"]
    if parts[0] == "cdn":
        return _bytes(hub, ask, hub.repos["/".join(parts[1:3])][parts[3]], parts[3])
    name = "/".join(parts[2:4] if api else parts[:2])
    if name not in hub.repos:
        return _send(ask, 404, {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"})
    files = hub.repos[name]
    revision = (parts[5] if len(parts) > 5 else "main") if api else parts[3]
    if revision not in ("main", "other", SHA, OTHER):
        return _send(ask, 404, {"X-Error-Code": "RevisionNotFound", "X-Error-Message": "Invalid rev id"})
    sha = OTHER if revision in ("other", OTHER) else SHA
    if api:
        return _listing(ask, name, files, sha, tree=parts[4:5] == ["tree"])
    if name in hub.gated and ask.headers.get("Authorization") != f"Bearer {hub.token}":
        return _send(ask, 401, {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted"})
    if parts[4] not in files:
        return _send(ask, 404, {"X-Error-Code": "EntryNotFound", "X-Error-Message": "Entry not found"})
    data = files[parts[4]]
    tag = f'"{hashlib.sha256(data).hexdigest()}"'
    head = {"X-Repo-Commit": sha, "ETag": tag}
    if not parts[4].endswith((".safetensors", ".gguf")):
        return _bytes(hub, ask, data, parts[4], head)
    _send(ask, 302, {**head, "X-Linked-Etag": tag, "X-Linked-Size": str(len(data)),
                     "Location": f"{hub.url.replace('127.0.0.1', 'localhost')}/cdn/{name}/{parts[4]}"})


def _listing(ask: BaseHTTPRequestHandler, name: str, files: Mapping[str, bytes], sha: str, *,
             tree: bool) -> None:
    entries = [{"type": "file", "path": n, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
               for n, data in files.items()]
    siblings = [{"rfilename": e["path"], "size": e["size"], "blobId": e["oid"]} for e in entries]
    body = entries if tree else {"_id": "1", "id": name, "sha": sha, "private": False, "siblings": siblings}
    _send(ask, 200, {"Content-Type": "application/json"}, json.dumps(body).encode())


def _bytes(hub: Hub, ask: BaseHTTPRequestHandler, data: bytes, name: str,
           head: Mapping[str, str] | None = None) -> None:
    given = ask.headers.get("Range", "")
    first = int(given.removeprefix("bytes=").split("-")[0]) if given else 0
    part = data[first:]
    more = {"Content-Range": f"bytes {first}-{len(data) - 1}/{len(data)}"} if given else {}
    if name in hub.cut and ask.command == "GET":
        hub.cut.discard(name)
        _send(ask, 200, {**(head or {}), "Content-Length": str(len(part))}, part[:len(part) // 2])
        ask.close_connection = True
        return
    _send(ask, 206 if given else 200, {**(head or {}), **more}, part)


def _send(ask: BaseHTTPRequestHandler, status: int, head: Mapping[str, str], body: bytes = b"") -> None:
    ask.send_response(status)
    for name, value in {"Content-Length": str(len(body)), **head}.items():
        ask.send_header(name, value)
    ask.end_headers()
    if ask.command != "HEAD":
        ask.wfile.write(body)
