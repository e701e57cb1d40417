"""Events of a cache as metrics and spans of OpenTelemetry, through the meter and the tracer that the program has set up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from forebay._kernel.events import Event
from forebay.cache import Cache
from forebay.errors import MissingExtra

NAME = "forebay"


def instrument(cache: Cache, *, meter_provider: Any = None, tracer_provider: Any = None) -> Callable[[], None]:
    """Report what this process does with a cache to OpenTelemetry; returns a function that ends this. Raises `MissingExtra`.

    Counters ``forebay.fetches``, ``forebay.fetched`` (bytes), ``forebay.waits``, ``forebay.evictions``, ``forebay.faults``; histograms
    ``forebay.fetch.duration`` and ``forebay.wait.duration`` (seconds). Spans ``forebay.fetch``, ``forebay.wait`` and ``forebay.evict``:
    children of the span that is current in the thread. ``meter_provider``, ``tracer_provider``: other ones than the program's."""
    try:
        from opentelemetry import metrics, trace
    except ImportError as error:
        raise MissingExtra.of("reporting to OpenTelemetry", "opentelemetry") from error
    meter = metrics.get_meter(NAME, meter_provider=meter_provider)
    return cache.on_event(_Reporter(meter, trace.get_tracer(NAME, tracer_provider=tracer_provider), trace))


class _Reporter:
    """Turns events into measurements and spans."""

    def __init__(self, meter: Any, tracer: Any, trace: Any) -> None:
        self._tracer, self._trace = tracer, trace
        self._counters = {
            "fetch": meter.create_counter("forebay.fetches", description="Fetches from remotes."),
            "wait": meter.create_counter("forebay.waits", description="Waits for another process or thread."),
            "evict": meter.create_counter("forebay.evictions", description="Entries that were removed."),
            "fault": meter.create_counter("forebay.faults", description="Calls without the cache, and damaged entries."),
        }
        self._fetched = meter.create_counter("forebay.fetched", unit="By", description="Bytes received from remotes.")
        self._durations = {
            kind: meter.create_histogram(f"forebay.{kind}.duration", unit="s", description=f"Seconds of a {kind}.")
            for kind in ("fetch", "wait")
        }

    def __call__(self, event: Event) -> None:
        attributes = {"forebay.root": event.root}
        failed = attributes | {"forebay.failed": bool(event.error)} if event.kind == "fetch" else attributes
        self._counters[event.kind].add(event.entries if event.kind == "evict" else 1, failed)
        if event.kind == "fetch":
            self._fetched.add(event.size, attributes)
        if event.kind in self._durations:
            self._durations[event.kind].record(event.seconds, attributes)
        if event.kind != "fault":
            self._add_span(event)

    def _add_span(self, event: Event) -> None:
        """A span that has ended: an event is told when it is over."""
        start = int(event.began * 1e9)
        attributes = {"forebay.root": event.root, "forebay.key": event.key, "forebay.size": event.size, "forebay.entries": event.entries}
        span = self._tracer.start_span(f"forebay.{event.kind}", start_time=start, attributes=attributes)
        if event.error:
            span.set_status(self._trace.Status(self._trace.StatusCode.ERROR, event.error))
        span.end(end_time=start + int(event.seconds * 1e9))
