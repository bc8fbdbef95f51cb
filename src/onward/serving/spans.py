"""Traces of requests for OpenTelemetry, sent by OTLP over HTTP; needs the extra `otel`."""

from __future__ import annotations

from typing import Any

from onward.base.errors import UserError
from onward.serving.request_log import PROBES, RequestRecord

NANO = 1_000_000_000


class Spans:
    """Sends a span of each request, except PROBES, to the collector at `endpoint`, such as
    http://127.0.0.1:4318/v1/traces. The span has the attributes of the semantic conventions for HTTP servers and
    generative AI, continues the trace that the client names in the header traceparent, and holds no prompts. Raises a
    UserError without the libraries."""

    def __init__(self, endpoint: str) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError:
            raise UserError(
                "otlp_traces_endpoint needs the libraries of OpenTelemetry: pip install 'onward[otel]'"
            ) from None
        self.provider = TracerProvider(resource=Resource.create({"service.name": "onward"}), shutdown_on_exit=False)
        self.provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        self.tracer = self.provider.get_tracer("onward.serving")

    def __call__(self, record: RequestRecord) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        if record.path in PROBES:
            return
        start = int(record.began * NANO)
        span = self.tracer.start_span(
            f"{record.method} {record.path}",
            TraceContextTextMapPropagator().extract({"traceparent": record.trace}),
            kind=SpanKind.SERVER,
            start_time=start,
        )
        first = record.first_token
        attributes: dict[str, Any] = {
            "http.request.method": record.method,
            "url.path": record.path,
            "http.response.status_code": record.status,
            "onward.request.id": record.id,
            "onward.key.name": record.key,
            "gen_ai.request.model": record.model,
            "gen_ai.usage.input_tokens": record.prompt_tokens,
            "gen_ai.usage.output_tokens": record.new_tokens,
            "gen_ai.response.finish_reasons": record.finish_reasons,
        }
        span.set_attributes({name: value for name, value in attributes.items() if value not in ("", [])})
        if first is not None:
            span.add_event("first token", timestamp=start + int(first * NANO))
        if record.status >= 500:
            span.set_status(Status(StatusCode.ERROR))
        span.end(start + int(record.seconds * NANO))

    def close(self) -> None:
        """Send the remaining spans."""
        self.provider.shutdown()
