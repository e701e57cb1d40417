"""HTTP into sinks that hold something already, and into sinks that refuse."""

from __future__ import annotations

import random
import threading

import pytest

from forebay import errors
from forebay._model import Partial, Span
from forebay.remote import RemoteOptions
from forebay.remote.base import Call
from forebay.remote.http import HttpRemote
from forebay.testing import MemorySink, ScriptedServer

PART = 64 << 10
BODY = random.Random(4).randbytes(10 * PART + 17)
SMALL = b"thirteen bytes"


@pytest.fixture
def http() -> HttpRemote:
    return HttpRemote(RemoteOptions(part=PART, backoff=0.01, read_timeout=5))


# -- going on from what is there -----------------------------------------------------------------------------------------

MISSING = (Span(PART, 3 * PART + 5), Span(len(BODY) - 100, 100))


def half(server: ScriptedServer) -> MemorySink:
    """A sink that holds all but `MISSING` of the present version."""
    data = bytearray(BODY)
    for span in MISSING:
        data[span.start : span.end] = bytes(span.length)
    return MemorySink(Partial(len(BODY), server.objects["/a"].etag or "", MISSING), data)


@pytest.mark.parametrize("conditions", [True, False])
def test_a_partial_is_completed(server: ScriptedServer, http: HttpRemote, conditions: bool) -> None:
    url = server.put("/a", BODY, conditions=conditions)
    sink = half(server)
    transfer = http.fetch(url, sink)
    assert sink.data == BODY
    missing = sum(span.length for span in MISSING)
    assert transfer.received == server.sent == missing
    assert transfer.resumed == len(BODY) - missing


def test_a_partial_that_lacks_nothing(server: ScriptedServer, http: HttpRemote) -> None:
    url = server.put("/a", BODY)
    sink = MemorySink(Partial(len(BODY), server.objects["/a"].etag or "", ()), BODY)
    http.fetch(url, sink)
    assert (bytes(sink.data), sink.missing, len(sink.infos)) == (BODY, [], 1)
    assert server.gets == 1


@pytest.mark.parametrize("conditions", [True, False])
@pytest.mark.parametrize("new", [bytes(reversed(BODY)), BODY + b"more", SMALL, b""], ids=len)
def test_a_partial_of_another_version_is_dropped(server: ScriptedServer, http: HttpRemote, conditions: bool, new: bytes) -> None:
    url = server.put("/a", BODY)
    sink = half(server)
    server.put("/a", new, conditions=conditions)
    assert http.fetch(url, sink).resumed == 0
    assert sink.data == new


def test_a_partial_where_ranges_are_ignored_takes_what_it_lacks(server: ScriptedServer, http: HttpRemote) -> None:
    url = server.put("/a", BODY, ranges=False)
    sink = half(server)
    http.fetch(url, sink)
    assert sink.data == BODY
    assert not sink.missing


# -- sinks that refuse ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["begin", "write"])
@pytest.mark.parametrize("streams", [1, 4])
def test_an_error_of_the_sink_is_raised_as_it_is(server: ScriptedServer, when: str, streams: int) -> None:
    class Full(MemorySink):
        def begin(self, info: object) -> tuple[Span, ...]:
            if when == "begin":
                raise error
            return super().begin(info)  # type: ignore[arg-type]

    error, sink = errors.NoSpace.of("a", 1, 0, 0), Full()

    def full(offset: int, count: int) -> None:
        if offset >= 5 * PART:
            raise error

    sink.on_write = full
    url = server.put("/a", BODY)
    http = HttpRemote(RemoteOptions(part=PART, streams=streams))
    with pytest.raises(errors.NoSpace) as caught:
        http.fetch(url, sink)
    assert caught.value is error
    sink = MemorySink()
    http.fetch(url, sink)
    assert sink.data == BODY


def test_no_connection_of_a_call_that_failed_is_used_again(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread has all bytes of its part, so that its connection can be kept, when another one fails and ends them all."""
    error, sink, full, ended = errors.NoSpace.of("a", 1, 0, 0), MemorySink(), threading.Event(), threading.Event()
    abort = Call.abort

    def write(offset: int, count: int) -> None:
        if offset >= 2 * PART:
            assert full.wait(60)
            raise error
        if offset + count == 2 * PART:
            full.set()
            assert ended.wait(60)

    sink.on_write = write
    url = server.put("/a", BODY)
    http = HttpRemote(RemoteOptions(part=PART, streams=2))
    with monkeypatch.context() as patch:
        patch.setattr(Call, "abort", lambda call: (abort(call), ended.set())[0])
        with pytest.raises(errors.NoSpace) as caught:
            http.fetch(url, sink)
    assert caught.value is error
    assert http.fetch(url, MemorySink()).retries == 0
