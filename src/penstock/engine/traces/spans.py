"""OpenTelemetry traces: a span for each request, with the phases that its engines report as children.

Owns the names of spans and attributes (GenAI semantic conventions; others begin with `penstock.`), and the way to the
collector. Spans have numbers, names of models, codes of errors, and the names that clients give sessions and answers:
never text of prompts or answers, or token ids. Imported only with `--otlp-traces-endpoint`. The SDK reads its own
variables: OTEL_SERVICE_NAME, OTEL_TRACES_SAMPLER and others.
"""
from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Any
from urllib.parse import urlsplit

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from penstock.config.base.version import version
from penstock.config.request.params import SamplingParams
from penstock.engine.client.generation import Generation
from penstock.engine.wire import Timeline

CLOSE_S = 5.0           # for the last spans to be sent
ID_CHARS_MAX = 128      # of an id that the client has given
HEADERS = {b"traceparent": "traceparent", b"tracestate": "tracestate"}
TIERS = {"hbm": "device", "dram": "host", "disk": "storage"}
_CONTEXT = TraceContextTextMapPropagator()


class RequestSpan:
    """The span of one request. `trace`: its name for others that add to it; "": it is not recorded."""

    def __init__(self, span: Span, operation: str) -> None:
        self._span, self._operation = span, operation
        carrier: dict[str, str] = {}
        if span.is_recording():
            _CONTEXT.inject(carrier, set_span_in_context(span))
        self.trace = carrier.get("traceparent", "")

    def answered(self, id: str, model: str, params: SamplingParams, streams: bool, generation: Generation,
                 session: str) -> None:
        """What was asked for, and what came of it, also if that was cut short."""
        if not self.trace:
            return
        usage = generation.usage
        attributes: dict[str, Any] = {
            "gen_ai.request.model": model, "gen_ai.response.model": model, "gen_ai.response.id": id[:ID_CHARS_MAX],
            "gen_ai.request.stream": streams, "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p, "gen_ai.request.top_k": params.top_k,
            "gen_ai.request.frequency_penalty": params.frequency_penalty,
            "gen_ai.request.presence_penalty": params.presence_penalty,
            "gen_ai.response.finish_reasons": generation.finishes,
            "gen_ai.usage.input_tokens": usage.prompt_tokens, "gen_ai.usage.output_tokens": usage.completion_tokens,
            "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
            **{f"penstock.cached_tokens.{TIERS[tier]}": n for tier, n in usage.cached_by_tier.items()}}
        if params.max_tokens is not None:
            attributes["gen_ai.request.max_tokens"] = params.max_tokens
        if params.seed is not None:
            attributes["gen_ai.request.seed"] = params.seed
        if session:
            attributes["gen_ai.conversation.id"] = session[:ID_CHARS_MAX]
        if params.n > 1:
            attributes["gen_ai.request.choice.count"] = params.n
        if usage.peer_tokens:
            attributes["penstock.remote_tokens"] = usage.peer_tokens
        if generation.first_s is not None:
            attributes["gen_ai.response.time_to_first_chunk"] = generation.first_s
        self._span.update_name(f"{self._operation} {model}")
        self._span.set_attributes(attributes)

    def failed(self, kind: str, status: int = 0) -> None:
        """It has no whole answer. kind: a word for why; status: of HTTP, 0: it is not the server's fault."""
        self._span.set_attribute("error.type", kind)
        if status >= 500:
            self._span.set_status(Status(StatusCode.ERROR))

    def end(self, status: int) -> None:
        """The answer with this HTTP status is over; 0: there was none."""
        if status:
            self._span.set_attribute("http.response.status_code", status)
        self._span.end()


class Traces:
    """Makes spans, and sends them in batches from a thread of its own."""

    def __init__(self, endpoint: str, role: str) -> None:
        """endpoint: URL of the collector; without a path, that is /v1/traces. role: of one end of a pair."""
        self._role = role
        url = endpoint if urlsplit(endpoint).path.strip("/") else f"{endpoint.rstrip('/')}/v1/traces"
        resource = Resource.create({SERVICE_VERSION: version()})
        if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):
            resource = resource.merge(Resource({SERVICE_NAME: "penstock"}))
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=url)))
        self._tracer: Tracer = self._provider.get_tracer("penstock", version())

    def begin(self, operation: str, headers: Iterable[tuple[bytes, bytes]]) -> RequestSpan:
        """A request has come. Its `traceparent` says which trace it belongs to; without one it has its own."""
        carrier = {HEADERS[name]: value.decode("latin-1") for name, value in headers if name in HEADERS}
        span = self._tracer.start_span(operation, _CONTEXT.extract(carrier), SpanKind.SERVER, {
            "gen_ai.operation.name": operation, "gen_ai.provider.name": "penstock"})
        return RequestSpan(span, operation)

    def phases(self, engine: str, timelines: Sequence[Timeline]) -> None:
        """Make spans of the phases of requests that an engine of this name has ended."""
        attributes: dict[str, Any] = {}
        if engine:
            attributes["penstock.engine"] = engine
        if self._role:
            attributes["penstock.role"] = self._role
        for timeline in timelines:
            parent = _CONTEXT.extract({"traceparent": timeline.trace})
            for name, begin, end in timeline.phases:
                self._tracer.start_span(name, parent, attributes={"penstock.choice": timeline.choice, **attributes},
                                        start_time=begin).end(end)

    def close(self) -> None:
        """Send what is left, for a few seconds at most: a collector may be away."""
        sending = threading.Thread(target=self._provider.shutdown, daemon=True, name="penstock-traces")
        sending.start()
        sending.join(CLOSE_S)
