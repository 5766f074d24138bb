"""A collector of OpenTelemetry traces: takes OTLP/HTTP, and keeps spans as they were sent."""
from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

WAIT_S = 30.0


@dataclass
class Sent:
    """One span. Times are nanoseconds since 1970."""

    name: str
    trace: str
    id: str
    parent: str
    kind: int
    begin: int
    end: int
    failed: bool
    told: dict[str, Any]
    resource: dict[str, Any] = field(repr=False)


class Collector:
    def __init__(self) -> None:
        self.spans: list[Sent] = []
        self.bodies: list[bytes] = []
        self.url = ""

    def take(self, body: bytes) -> None:
        self.bodies.append(body)
        for batch in ExportTraceServiceRequest.FromString(body).resource_spans:
            resource = _told(batch.resource.attributes)
            self.spans += [Sent(
                s.name, s.trace_id.hex(), s.span_id.hex(), s.parent_span_id.hex(), s.kind, s.start_time_unix_nano,
                s.end_time_unix_nano, s.status.code == 2, _told(s.attributes), resource)
                for scope in batch.scope_spans for s in scope.spans]

    def until(self, what) -> list[Sent]:
        """The spans of which `what` is true, once there are any and each has all of its phases."""
        began = time.monotonic()
        while not (found := [s for s in list(self.spans) if what(s)]):
            assert time.monotonic() - began < WAIT_S, [s.name for s in self.spans]
            time.sleep(.02)
        return found

    def trace(self, id: str, last: str, count: int = 1) -> tuple[Sent, list[Sent]]:
        """The span of a request and those below it in the order of their begin, once `count` phases called `last`
        are there."""
        def whole(s: Sent) -> bool:
            return s.told.get("gen_ai.response.id") == id and sum(
                t.parent == s.id and t.name == last for t in list(self.spans)) >= count

        [root] = self.until(whole)
        return root, self.below(root)

    def below(self, root: Sent) -> list[Sent]:
        return sorted([s for s in self.spans if s.parent == root.id], key=lambda s: (s.begin, s.end))


def _told(attributes) -> dict[str, Any]:
    def value(v) -> Any:
        kind = v.WhichOneof("value")
        return [value(each) for each in v.array_value.values] if kind == "array_value" else getattr(v, kind)

    return {a.key: value(a.value) for a in attributes}


@contextmanager
def collecting(monkeypatch) -> Iterator[Collector]:
    """Servers that are started here send spans every 50 ms."""
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces" and self.headers["content-type"] == "application/x-protobuf"
            collector.take(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    collector.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield collector
    finally:
        server.shutdown()
        server.server_close()
