"""Events: what is told, to whom, and that listeners harm nothing."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay import Cache, Event, errors
from forebay.adapters.opentelemetry import instrument
from forebay.testing import ScriptedServer
from tests.processes import in_child


@pytest.fixture
def cache(quick_path: Path) -> Iterator[Cache]:
    with Cache(quick_path / "root", budget="64MiB", min_free=0) as cache:
        yield cache


@pytest.fixture
def seen(cache: Cache) -> Iterator[list[Event]]:
    events: list[Event] = []
    remove = cache.on_event(events.append)
    yield events
    remove()


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer() as server:
        yield server


def test_fetches_are_told_with_their_size_and_failures_with_their_error(cache: Cache, seen: list[Event], server: ScriptedServer) -> None:
    small, large = server.put("/small", bytes(1000)), server.put("/large", bytes(3_000_000))
    cache.read(small)
    cache.read(large)
    cache.read(small)
    cache.read_many([server.put(f"/many/{number}", bytes(100 + number)) for number in range(5)])
    with pytest.raises(errors.NotFound):
        cache.read(f"{server.url}/missing")
    assert {event.kind for event in seen} == {"fetch"}
    assert [(event.key, event.size) for event in seen[:2]] == [(small, 1000), (large, 3_000_000)]
    assert sorted(event.size for event in seen[2:7]) == [100, 101, 102, 103, 104]
    assert seen[7].key.endswith("/missing")
    assert "404" in seen[7].error
    assert [event.error for event in seen[:7]] == [""] * 7
    assert all(event.seconds > 0 and event.began > 1e9 and event.root == str(cache.path) for event in seen)


def test_blocks_and_ranges_are_told_as_they_come(cache: Cache, seen: list[Event], server: ScriptedServer) -> None:
    url = server.put("/large", bytes(1_000_000))
    with cache.open(url, block_size="100KB") as file:
        file.seek(150_000)
        file.read(1000)
        file.seek(850_000)
        file.read(100_000)
    assert {(event.kind, event.key, event.error) for event in seen} == {("fetch", url, "")}
    assert sum(event.size for event in seen) == cache.stats().bytes_remote >= 300_000
    del server.objects["/large"]
    seen.clear()
    with cache.open(url, block_size="100KB", max_age="forever") as file, pytest.raises(errors.RemoteError):
        file.read(1000)
    assert [(event.kind, event.key, bool(event.error)) for event in seen] == [("fetch", url, True)]


def test_a_read_past_the_cache_is_a_fetch_too(cache: Cache, seen: list[Event], server: ScriptedServer) -> None:
    cache.read(server.put("/a", bytes(1000)), bypass=True)
    assert [(event.kind, event.size) for event in seen] == [("fetch", 1000)]


def test_waits_of_threads_are_told(cache: Cache, seen: list[Event], server: ScriptedServer) -> None:
    url = server.put("/stalls", bytes(2_000_000), stall_after=1_000_000, stalls=1)
    threads = [threading.Thread(target=cache.read, args=(url,)) for _ in range(2)]
    threads[0].start()
    assert server.stalled.wait(60)
    threads[1].start()
    while cache.stats().waits == 0:
        threads[1].join(0.01)
    server.go.set()
    for thread in threads:
        thread.join()
    (wait,) = [event for event in seen if event.kind == "wait"]
    assert (wait.key, wait.seconds > 0) == (url, True)


def test_evictions_are_told_by_their_number(cache: Cache, seen: list[Event]) -> None:
    for number in range(20):
        cache.put(f"large{number}", bytes(10_000_000))
    for number in range(3):
        cache.put(f"small{number}", bytes(100))
    evicted = cache.stats().evictions
    assert evicted >= 14
    assert sum(event.entries for event in seen if event.kind == "evict") == evicted
    cache.clear().execute()
    assert sum(event.entries for event in seen if event.kind == "evict") == cache.stats().evictions


def test_damage_is_a_fault(cache: Cache, seen: list[Event], server: ScriptedServer) -> None:
    url = server.put("/a", bytes(100_000))
    entry = cache.pull(url)
    assert entry is not None
    with cache.hold(entry) as path:
        os.chmod(path, 0o644)
        Path(path).write_bytes(b"x" * 100_000)
    assert bytes(cache.read(url)) == bytes(100_000)
    (fault,) = [event for event in seen if event.kind == "fault"]
    assert (fault.key, "not what was stored" in fault.error) == (url, True)


def test_a_listener_that_fails_is_logged_once_and_harms_nobody(
    cache: Cache, seen: list[Event], server: ScriptedServer, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(event: Event) -> None:
        raise ZeroDivisionError("of the listener")

    remove, again = cache.on_event(fails), []
    end = cache.on_event(again.append)
    with caplog.at_level(logging.ERROR, "forebay"):
        for number in range(3):
            assert len(cache.read(server.put(f"/{number}", bytes(10)))) == 10
    assert caplog.text.count("ZeroDivisionError: of the listener") == 1
    assert len(seen) == len(again) == 3
    remove()
    remove()  # does nothing
    end()
    cache.read(server.put("/last", bytes(10)))
    assert (len(seen), len(again)) == (4, 3)


def test_listeners_belong_to_a_root_and_a_forked_child_goes_on(
    cache: Cache, seen: list[Event], server: ScriptedServer, tmp_path: Path
) -> None:
    url = server.put("/a", bytes(10))
    with Cache(tmp_path / "other", budget="64MiB", min_free=0) as other:
        other.read(url)
    assert seen == []
    with Cache(cache.path) as same:
        same.read(url)
    assert len(seen) == 1
    second = server.put("/b", bytes(10))
    assert in_child(lambda: (cache.read(second) and None, len(seen))[1]) == 2
    assert len(seen) == 1


def test_opentelemetry_gets_metrics_and_spans(cache: Cache, server: ScriptedServer) -> None:
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    reader, exporter, tracers = InMemoryMetricReader(), InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    meters = MeterProvider([reader], shutdown_on_exit=False)
    tracers.add_span_processor(SimpleSpanProcessor(exporter))
    end = instrument(cache, meter_provider=meters, tracer_provider=tracers)
    url = server.put("/a", bytes(1000))
    with tracers.get_tracer("test").start_as_current_span("step") as step:
        cache.read(url)
    with pytest.raises(errors.NotFound):
        cache.read(f"{server.url}/missing")
    for number in range(9):
        cache.put(f"large{number}", bytes(10_000_000))
    end()
    cache.read(server.put("/unseen", bytes(10)))

    spans = exporter.get_finished_spans()
    fetch, failed = [span for span in spans if span.name == "forebay.fetch"]
    assert fetch.parent is not None
    assert fetch.parent.span_id == step.get_span_context().span_id
    assert fetch.attributes is not None
    assert (fetch.attributes["forebay.key"], fetch.attributes["forebay.size"]) == (url, 1000)
    assert (fetch.end_time or 0) > (fetch.start_time or 0)
    assert not failed.status.is_ok
    assert any(span.name == "forebay.evict" for span in spans)
    data = reader.get_metrics_data()
    assert data is not None
    metrics = {metric.name: metric for metric in data.resource_metrics[0].scope_metrics[0].metrics}
    assert sum(point.value for point in metrics["forebay.fetches"].data.data_points) == 2
    assert sum(point.value for point in metrics["forebay.fetched"].data.data_points) == 1000
    assert sum(point.value for point in metrics["forebay.evictions"].data.data_points) == cache.stats().evictions
    assert sum(point.count for point in metrics["forebay.fetch.duration"].data.data_points) == 2
    meters.shutdown()
    tracers.shutdown()


def test_where_opentelemetry_is_missing_the_error_says_what_to_install(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(errors.MissingExtra, match="opentelemetry-api"):
        instrument(cache)
