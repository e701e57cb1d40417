"""HTTP as servers should speak it, and as some do: each answer ends in the right bytes or in an error that says what is wrong."""

from __future__ import annotations

import ipaddress
import random
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from forebay import errors
from forebay._model import Span
from forebay.remote import RemoteOptions, base
from forebay.remote.http import HttpRemote
from forebay.testing import MemorySink, Request, ScriptedServer

PART = 64 << 10
BODY = random.Random(1).randbytes(10 * PART + 17)
SMALL = b"thirteen bytes"
OPTIONS = RemoteOptions(part=PART, backoff=0.01, read_timeout=5)


@pytest.fixture
def http() -> HttpRemote:
    return HttpRemote(OPTIONS)


# -- the plain case ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, PART - 1, PART, PART + 1, len(BODY)])
def test_fetch(server: ScriptedServer, http: HttpRemote, size: int) -> None:
    url, sink = server.put("/a", BODY[:size]), MemorySink()
    transfer = http.fetch(url, sink)
    assert sink.data == BODY[:size]
    assert not sink.missing
    assert transfer.requests == server.gets == (-(-size // PART) or 2)  # an empty object has no range to ask for
    assert transfer.received == server.sent == size
    assert (transfer.retries, transfer.resumed) == (0, 0)
    assert transfer.info is not None
    assert transfer.info.strong
    assert (transfer.info.size, transfer.info.validator, transfer.info.modified) == (size, server.objects["/a"].etag, 1.6e9)


def test_connections_are_kept(server: ScriptedServer, http: HttpRemote) -> None:
    seen = set()
    url = server.put("/a", SMALL)
    server.on_request = lambda request: seen.add(threading.current_thread())
    for _ in range(5):
        http.fetch(url, MemorySink())
        http.stat(url)
        with pytest.raises(errors.NotFound):
            http.stat(server.url + "/none")
        with pytest.raises(errors.NotFound):
            http.fetch(server.url + "/none", MemorySink())
    assert len(seen) == 1


def test_a_connection_that_the_server_closed_is_not_used(server: ScriptedServer, http: HttpRemote) -> None:
    url = server.put("/a", SMALL)
    http.fetch(url, MemorySink())
    server.drop()
    assert http.fetch(url, MemorySink()).retries == 0


def test_s27_ranges_come_at_once(server: ScriptedServer, http: HttpRemote) -> None:
    """Four parts stand still together: none of them waits for another one's end."""
    url, sink = server.put("/a", BODY, stall_after=100), MemorySink()
    begun = threading.Semaphore(0)
    server.on_request = lambda request: begun.release()
    fetching = threading.Thread(target=http.fetch, args=(url, sink))
    fetching.start()
    for _ in range(OPTIONS.streams):
        assert begun.acquire(timeout=60)
    server.go.set()
    fetching.join()
    assert sink.data == BODY


def test_many_threads_share_a_remote(server: ScriptedServer, http: HttpRemote) -> None:
    bodies = {server.put(f"/{n}", BODY[n : n + 2 * PART + n]): BODY[n : n + 2 * PART + n] for n in range(30)}
    sinks = {url: MemorySink() for url in bodies}
    threads = [threading.Thread(target=http.fetch, args=item) for item in sinks.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {url: bytes(sink.data) for url, sink in sinks.items()} == bodies


def test_names_are_quoted(server: ScriptedServer, http: HttpRemote) -> None:
    server.put("/a%20b%C3%A9", SMALL)
    for name in ("/a b\u00e9", "/a%20b%C3%A9"):
        sink = MemorySink()
        http.fetch(server.url + name + "#x", sink)
        assert sink.data == SMALL


# -- stat ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head", [True, False])
@pytest.mark.parametrize("body", [b"", BODY])
def test_stat(server: ScriptedServer, http: HttpRemote, head: bool, body: bytes) -> None:
    url = server.put("/a", body, head=head)
    info = http.stat(url)
    assert info is not None
    assert (info.size, info.validator, info.strong, info.modified) == (len(body), server.objects["/a"].etag, True, 1.6e9)
    assert server.sent <= 1


@pytest.mark.parametrize("status", [400, 401, 403, 404, 405, 406, 410, 418, 500, 501])
def test_stat_where_head_is_refused(server: ScriptedServer, http: HttpRemote, status: int) -> None:
    """A URL that was signed for GET answers 403 to HEAD; a server that routes GET alone 404."""
    info = http.stat(server.put("/a", BODY, statuses=[status]))
    assert info is not None
    assert info.size == len(BODY)
    known = info.validator
    assert http.stat(server.put("/a", BODY, statuses=[status]), known=known) is None


def test_what_get_does_not_find_either_is_missing(server: ScriptedServer, http: HttpRemote) -> None:
    with pytest.raises(errors.NotFound):
        http.stat(server.put("/a", BODY, statuses=[404, 404]))
    busy = server.put("/b", BODY, statuses=[503])
    assert http.stat(busy) is not None
    assert [request.method for request in server.requests] == ["HEAD", "GET", "HEAD", "HEAD"]  # who is busy is not asked otherwise


# -- one request that compares and fetches -------------------------------------------------------------------------------


SCRIPTS = [{}, {"etag": None}, {"etag": 'W/"1"'}, {"conditions": False}, {"etag": None, "conditions": False}]


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("body", [SMALL, BODY], ids=len)
def test_a_changed_object_takes_one_request(
    server: ScriptedServer, http: HttpRemote, body: bytes, script: dict[str, object]
) -> None:  # fmt: skip
    info = http.stat(url := server.put("/a", body, head=False, **script))
    assert info is not None
    server.requests.clear()
    assert http.fetch_changed(url, sink := MemorySink(), info.validator) is None
    assert (sink.data, len(server.requests)) == (b"", 1)
    server.put("/a", body[1:], head=False, modified=1.7e9, **{**script, "etag": script.get("etag", "") and 'W/"2"'})
    server.requests.clear()
    transfer = http.fetch_changed(url, sink := MemorySink(), info.validator)
    assert sink.data == body[1:]
    assert transfer is not None
    assert transfer.requests == len(server.requests)
    assert {request.method for request in server.requests} == {"GET"}
    if len(body) <= PART:
        assert len(server.requests) == 1


def test_an_object_that_became_empty_or_had_no_version(server: ScriptedServer, http: HttpRemote) -> None:
    url = server.put("/a", b"")
    assert http.fetch_changed(url, sink := MemorySink(), '"old"') is not None
    assert (sink.data, sink.missing) == (b"", [])
    url = server.put("/b", SMALL)
    assert http.fetch_changed(url, sink := MemorySink(), None) is not None
    assert sink.data == SMALL


def test_the_time_of_a_check_is_for_its_answer_alone(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "CHECK_TIMEOUT", 1.0)
    http = HttpRemote(OPTIONS)
    url = server.put("/a", BODY, etag='W/"2"', rate=len(BODY) / 2.5)  # one stream
    transfer = http.fetch_changed(url, sink := MemorySink(), 'W/"1"')
    assert sink.data == BODY
    assert transfer is not None
    assert (transfer.requests, transfer.retries) == (1, 0) or transfer.requests == 2  # it is asked as a range first
    url, began = server.put("/b", BODY, latency=30), time.monotonic()
    with pytest.raises(errors.RemoteTimeout):
        http.fetch_changed(url, MemorySink(), '"1"')
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("head", [True, False])
@pytest.mark.parametrize("script", [{}, {"etag": None}, {"etag": 'W/"1"'}, {"conditions": False}, {"etag": None, "conditions": False}])
def test_stat_of_what_is_known(server: ScriptedServer, http: HttpRemote, head: bool, script: dict[str, object]) -> None:
    url = server.put("/a", BODY, head=head, **script)
    info = http.stat(url)
    assert info is not None
    assert http.stat(url, known=info.validator) is None
    server.put("/a", BODY[1:], head=head, modified=1.7e9, **{**script, "etag": script.get("etag", "") and 'W/"2"'})
    changed = http.stat(url, known=info.validator)
    assert changed is not None
    assert changed.size == len(BODY) - 1


def test_stat_without_validators(server: ScriptedServer, http: HttpRemote) -> None:
    info = http.stat(server.put("/a", BODY, etag=None, modified=None))
    assert info is not None
    assert (info.validator, info.strong) == (None, False)


def test_stat_of_unknown_size(server: ScriptedServer, http: HttpRemote) -> None:
    for name, script in (("/a", {"chunked": True, "ranges": False}), ("/b", {"gzip": True})):
        info = http.stat(server.put(name, BODY, **script))
        assert info is not None
        assert (info.size, info.strong) == (None, False)


# -- read ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("span", "script"),
    [
        *((span, {}) for span in (Span(0, 10), Span(1000, PART), Span(len(BODY) - 5, 5), Span(len(BODY) - 5, 50), Span(3, 0))),
        *((Span(1000, PART), script) for script in ({"ranges": False}, {"chunked": True}, {"gzip": True})),
        (Span(len(BODY) - 5, 50), {"chunked": True, "ranges": False}),
    ],
)
def test_read(server: ScriptedServer, http: HttpRemote, span: Span, script: dict[str, bool]) -> None:
    assert http.read(server.put("/a", BODY, **script), span) == BODY[span.start : span.end]


def test_read_past_the_end(server: ScriptedServer, http: HttpRemote) -> None:
    assert http.read(server.put("/a", BODY), Span(len(BODY), 5)) == b""


@pytest.mark.parametrize("script", [{}, {"conditions": False}, {"ranges": False, "conditions": False}])
def test_read_of_a_version(server: ScriptedServer, http: HttpRemote, script: dict[str, bool]) -> None:
    url = server.put("/a", BODY, **script)
    validator = server.objects["/a"].etag
    assert http.read(url, Span(0, 10), validator=validator) == BODY[:10]
    server.put("/a", BODY[1:], **script)
    with pytest.raises(errors.RemoteChanged):
        http.read(url, Span(0, 10), validator=validator)


def test_read_goes_on_after_a_cut(server: ScriptedServer, http: HttpRemote) -> None:
    assert http.read(server.put("/a", BODY, cut_after=1000, cuts=2), Span(0, 5000)) == BODY[:5000]


# -- servers that do it their own way ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "script",
    [
        {"ranges": False},
        {"chunked": True, "ranges": False},
        {"chunked": True},
        {"gzip": True},
        {"gzip": True, "chunked": True},
        {"etag": None},
        {"etag": None, "modified": None},
        {"etag": 'W/"weak"'},
        {"etag": "unquoted"},
        {"conditions": False},
        {"head": False},
        {"latency": 0.01},
    ],
    ids=str,
)
@pytest.mark.parametrize("body", [b"", BODY], ids=len)
def test_fetch_of_any_server(server: ScriptedServer, http: HttpRemote, script: dict[str, object], body: bytes) -> None:
    url, sink = server.put("/a", body, **script), MemorySink()
    transfer = http.fetch(url, sink)
    assert sink.data == body
    assert not sink.missing
    assert transfer.requests == server.gets
    assert transfer.retries == 0


@pytest.mark.parametrize("script", [{"etag": None}, {"etag": 'W/"weak"'}])
def test_what_has_no_strong_validator_is_not_put_together(server: ScriptedServer, http: HttpRemote, script: dict[str, object]) -> None:
    http.fetch(server.put("/a", BODY, **script), MemorySink())
    assert [request.headers.get("Range") is None for request in server.requests] == [False, True]


LIES = [
    "bytes 1-65536/655377",
    "bytes 0-65535/10",
    "bytes 0-65535/0",
    "bytes 0-9/655377",
    "bytes 0-65534/655377",
    "items 0-1/2",
    "-",
    "bytes */*",
]


@pytest.mark.parametrize("lie", LIES)
def test_a_wrong_content_range(server: ScriptedServer, http: HttpRemote, lie: str) -> None:
    url, sink = server.put("/a", BODY, content_range=lie), MemorySink()
    with pytest.raises(errors.RemoteProtocolError, match="asked for"):
        http.fetch(url, sink)
    with pytest.raises(errors.RemoteProtocolError, match="asked for"):
        http.read(url, Span(0, PART))
    assert not sink.infos


def test_a_content_range_that_is_wrong_later(server: ScriptedServer, http: HttpRemote) -> None:
    url = server.put("/a", BODY)

    def lie(request: Request) -> None:
        server.objects["/a"].content_range = None if request.headers["Range"].startswith("bytes=0-") else "bytes 5-10/655377"

    server.on_request = lie
    with pytest.raises(errors.RemoteProtocolError, match="bytes 5-10"):
        HttpRemote(RemoteOptions(part=PART, streams=1)).fetch(url, MemorySink())


def test_an_encoding_that_nobody_asked_for(server: ScriptedServer, http: HttpRemote, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay.testing.gzip.compress", lambda body: body)
    with pytest.raises(errors.RemoteProtocolError, match="compressed"):
        http.fetch(server.put("/a", b"no gzip at all", gzip=True), MemorySink())


# -- redirects -----------------------------------------------------------------------------------------------------------


def test_redirects_are_followed(server: ScriptedServer, http: HttpRemote) -> None:
    server.put("/a", BODY)
    for name, where in (("/b", "/a"), ("/c", server.url + "/b"), ("/d/e", "../c")):
        server.put(name, b"", redirect=where)
    sink = MemorySink()
    http.fetch(server.url + "/d/e", sink)
    assert sink.data == BODY
    info = http.stat(server.url + "/b")
    assert info is not None
    assert info.size == len(BODY)


def test_the_way_of_a_redirect_is_gone_once(server: ScriptedServer, http: HttpRemote) -> None:
    server.put("/signed", BODY)
    sink = MemorySink()
    http.fetch(server.put("/a", b"", redirect="/signed"), sink)
    assert sink.data == BODY
    assert [request.path for request in server.requests].count("/a") == 1


def test_where_a_redirect_led_is_left_when_it_refuses(server: ScriptedServer, http: HttpRemote) -> None:
    """As when a signature becomes too old in the middle of a large object."""
    server.put("/one", BODY)
    server.put("/two", BODY)
    url, sink = server.put("/a", b"", redirect="/one"), MemorySink()

    def expire(request: Request) -> None:
        if request.path == "/one" and not request.headers["Range"].startswith("bytes=0-"):
            server.objects["/one"].statuses = [403]
            server.objects["/a"].redirect = "/two"

    server.on_request = expire
    http.fetch(url, sink)
    assert sink.data == BODY
    assert "/two" in [request.path for request in server.requests]


@pytest.mark.parametrize("where", ["/a", "ftp://h/a", "//", "http://[1", "http://h:99999/"])
def test_redirects_that_lead_nowhere(server: ScriptedServer, http: HttpRemote, where: str) -> None:
    with pytest.raises(errors.RemoteProtocolError, match="redirect"):
        http.fetch(server.put("/a", b"", redirect=where), MemorySink())


# -- versions ------------------------------------------------------------------------------------------------------------


def changing(server: ScriptedServer, bodies: list[bytes], **script: object) -> Callable[[Request], None]:
    """Each time a second part is asked for, the object becomes the next of ``bodies``."""

    def change(request: Request) -> None:
        if bodies and not request.headers["Range"].startswith("bytes=0-"):
            server.put("/a", bodies.pop(0), **script)

    return change


@pytest.mark.parametrize("conditions", [True, False])
@pytest.mark.parametrize("streams", [1, 4])
def test_s23_an_object_that_changes_meanwhile_is_begun_anew(server: ScriptedServer, conditions: bool, streams: int) -> None:
    url, sink, new = server.put("/a", BODY, conditions=conditions), MemorySink(), bytes(reversed(BODY))
    server.on_request = changing(server, [new], conditions=conditions)
    transfer = HttpRemote(RemoteOptions(part=PART, streams=streams)).fetch(url, sink)
    assert sink.data == new
    assert [info.validator for info in sink.infos][1:] == [server.objects["/a"].etag]
    assert transfer.info == sink.infos[-1]
    assert 0 <= transfer.requests - server.gets < streams  # the server may not have read what the other streams have just sent


def test_an_object_that_changes_all_the_time_is_taken_as_one_stream(server: ScriptedServer, http: HttpRemote) -> None:
    """So do servers behind one name that do not agree on ETags."""
    url, sink = server.put("/a", BODY), MemorySink()

    def change(request: Request) -> None:
        server.objects["/a"].etag = f'"{len(server.requests)}"'

    server.on_request = change
    http.fetch(url, sink)
    assert sink.data == BODY
    assert len(sink.infos) == 3
    assert "Range" not in server.requests[-1].headers


def test_an_object_that_changes_all_the_time_and_is_cut(server: ScriptedServer, http: HttpRemote) -> None:
    url, sink = server.put("/a", BODY), MemorySink()

    def change(request: Request) -> None:
        server.put("/a", BODY[len(server.requests) :], cut_after=None if "Range" in request.headers else PART)

    server.on_request = change
    with pytest.raises(errors.RemoteChanged, match="/a changed to another object"):
        http.fetch(url, sink)
    assert len(sink.infos) == 3


def test_an_object_that_shrinks_or_goes_meanwhile(server: ScriptedServer, http: HttpRemote) -> None:
    url, sink = server.put("/a", BODY, conditions=False), MemorySink()
    server.on_request = changing(server, [SMALL], conditions=False)
    http.fetch(url, sink)
    assert sink.data == SMALL
    server.put("/a", BODY)
    server.on_request = lambda request: None if request.headers["Range"].startswith("bytes=0-") else server.objects.clear()
    with pytest.raises(errors.NotFound):
        http.fetch(url, MemorySink())


def links() -> list[str]:
    """Link-local addresses of this machine, each with its zone."""
    path = Path("/proc/net/if_inet6")
    lines = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
    return [f"{ipaddress.IPv6Address(bytes.fromhex(line[0]))}%{line[5]}" for line in lines if line[0].startswith("fe80")]


@pytest.mark.skipif(not links(), reason="this machine has no link-local address")
def test_an_address_with_a_zone() -> None:
    address, heads = links()[0], list[bytes]()
    with socket.socket(socket.AF_INET6) as listener:
        listener.bind(socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0][4])
        listener.listen()

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                heads.append(connection.recv(1 << 16))
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nConnection: close\r\n\r\n12345")

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        port = listener.getsockname()[1]
        assert HttpRemote().read(f"http://[{address}]:{port}/a", Span(0, 5)) == b"12345"
        thread.join()
    assert f"\r\nHost: [{address.partition('%')[0]}]:{port}\r\n".encode() in heads[0]  # a zone means nothing to the host


@pytest.mark.rotates
@pytest.mark.parametrize("host", ["[fe80::1%lo]", "[fe80::1%25lo]", "[fe80::1%no-such.0]"])
def test_an_address_with_a_zone_that_leads_nowhere(host: str) -> None:
    options = RemoteOptions(attempts=1, connect_timeout=0.5)
    for scheme in ("http", "https"):
        with pytest.raises((errors.RemoteUnavailable, errors.RemoteTimeout)):
            HttpRemote(options).stat(f"{scheme}://{host}:9/a")


def test_nothing_is_written_over_http(server: ScriptedServer) -> None:
    for ask in (lambda: HttpRemote().write(f"{server.url}/a?X-Amz-Signature=sikrit", b"x"), lambda: HttpRemote().delete(f"{server.url}/a")):
        with pytest.raises(errors.Unsupported, match="over HTTP") as caught:
            ask()
        assert isinstance(caught.value, NotImplementedError)
        assert "sikrit" not in str(caught.value)
    assert server.requests == []


# -- ETags without quotes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dated", [True, False])
@pytest.mark.parametrize("etag", ["abc123", "5f3-1000", '"abc', "'abc'", "W/abc", "1600000000-77", f"1600000000-{len(BODY)}"])
def test_an_etag_without_quotes(server: ScriptedServer, http: HttpRemote, etag: str, dated: bool) -> None:
    url, sink = server.put("/a", BODY, etag=etag, modified=1.6e9 if dated else None), MemorySink()
    info = http.fetch(url, sink).info
    assert sink.data == BODY
    assert info is not None
    assert (info.validator, info.strong) == (etag, False)
    assert http.stat(url, known=etag) is None
    assert http.stat(url, known="another") is not None
    for span in (Span(0, 10), Span(PART, PART), Span(len(BODY) - 5, 100)):
        assert http.read(url, span, validator=etag) == http.read(url, span, info=info) == BODY[span.start : span.end]
    assert http.read(url, Span(len(BODY) + 1, 5), info=info) == b""
    server.put("/a", BODY[1:], etag="other", modified=1.7e9 if dated else None)
    assert http.stat(url, known=etag) is not None
    for known in ({"validator": etag}, {"info": info}):
        with pytest.raises(errors.RemoteChanged):
            http.read(url, Span(0, 10), **known)  # type: ignore[arg-type]


def test_an_etag_without_quotes_is_sent_back_as_it_came(server: ScriptedServer, http: HttpRemote) -> None:
    """Home-made servers compare texts, and would otherwise send an unchanged object again."""
    url = server.put("/a", BODY, etag="abc123")
    assert http.stat(url, known="abc123") is None
    assert (server.requests[-1].headers["If-None-Match"], server.requests[-1].status) == ("abc123", 304)


def test_quotes_make_no_other_version(server: ScriptedServer, http: HttpRemote) -> None:
    """A listing may have none where responses have some."""
    url = server.put("/a", BODY, etag='"abc"')
    assert http.stat(url, known="abc") is None
    assert http.read(url, Span(0, 10), validator="abc") == BODY[:10]
