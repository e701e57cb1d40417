"""Objects of which a server has other bytes for other callers, though their keys are the same (``Vary``)."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import forebay
from forebay import errors
from forebay.remote import RemoteOptions
from forebay.sources import UrlSource
from forebay.testing import ScriptedServer

WAYS: dict[str, Callable[[forebay.Cache, str], Any]] = {
    "read": lambda cache, url: cache.read(url),
    "read_many": lambda cache, url: cache.read_many([url])[0],
    "local": lambda cache, url: Path(cache.local(url).path).read_bytes(),
    "local_many": lambda cache, url: Path(cache.local_many([url])[0]).read_bytes(),
    "open": lambda cache, url: cache.open(url).read(),
    "blocks": lambda cache, url: cache.open(url, block_size="64KiB").read(),
    "lookahead": lambda cache, url: next(iter(cache.lookahead([url]))),
    "prefetch": lambda cache, url: cache.prefetcher(url.rpartition("/")[0]).get(url.rpartition("/")[2]),
    "versioned": lambda cache, url: prefetcher_of(cache, url).get("x.bin"),
    "stream": lambda cache, url: next(iter(prefetcher_of(cache, url).stream(["x.bin"]))),
    "limited": lambda cache, url: prefetcher_of(cache, url, budget="8MiB").get_many(["x.bin"])[0],
}


def prefetcher_of(cache: forebay.Cache, url: str, **options: Any) -> forebay.Prefetcher[bytes]:
    """One whose items have a version, so that nobody asks whether they are current."""
    return cache.prefetcher(UrlSource(url.rpartition("/")[0], version="1"), name="pool", **options)


@pytest.fixture
def varying(server: ScriptedServer) -> str:
    """The URL of an object that has other bytes for each agent."""

    def on_request(request: Any) -> None:
        served = server.objects["/d/x.bin"]
        served.body = f"for {request.headers.get('User-Agent')}".ljust(300_000).encode()
        served.etag = f'"{hashlib.md5(served.body).hexdigest()}"' if served.etag else None

    url = server.put("/d/x.bin", b"", etag='"1"', vary="Accept-Encoding, User-agent")
    server.on_request = on_request
    return url


@pytest.fixture
def caches(tmp_path: Path) -> Iterator[dict[str, forebay.Cache]]:
    """Caches over one root, by the agents for which they ask."""
    options = {name: RemoteOptions(headers={"User-Agent": name}, attempts=1) for name in ("one", "other")}
    options["forebay"] = RemoteOptions(attempts=1)
    caches = {name: forebay.Cache(tmp_path / "root", remote_options=each) for name, each in options.items()}
    yield caches
    for cache in caches.values():
        cache.close()


def text(data: Any) -> str:
    return bytes(data).decode().strip()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("etag", [True, False])
def test_each_caller_gets_its_own_bytes(
    varying: str, server: ScriptedServer, caches: dict[str, forebay.Cache], way: str, etag: bool
) -> None:
    """Without an ETag, the bytes of both have one time and one size, so that nothing tells them apart."""
    server.objects["/d/x.bin"].etag = '"1"' if etag else None
    for _ in range(3):
        for name, cache in caches.items():
            assert text(WAYS[way](cache, varying)) == f"for {name}"


@pytest.mark.parametrize("vary", ["*", "Origin, *", "user-agent", "Traceparent"])
def test_such_an_object_is_sent_once_if_its_etag_says_so(vary: str, server: ScriptedServer, caches: dict[str, forebay.Cache]) -> None:
    url = server.put("/a", b"x" * 300_000, vary=vary)
    for _ in range(2):
        for cache in caches.values():
            assert cache.read(url) == b"x" * 300_000
    assert [request.status for request in server.requests] == [206, *[304] * 5]


@pytest.mark.parametrize("vary", ["Accept-Encoding", "Origin, Cookie", "Accept,Range", "", ","])
def test_what_the_key_has_or_no_request_sends_makes_no_difference(
    vary: str, server: ScriptedServer, caches: dict[str, forebay.Cache]
) -> None:
    url = server.put("/a", b"body", vary=vary)
    assert [bytes(cache.read(url)) for cache in caches.values()] == [b"body"] * 3
    assert len(server.requests) == 1


def test_without_the_server_nobody_gets_the_bytes_of_another(
    varying: str, server: ScriptedServer, tmp_path: Path, caches: dict[str, forebay.Cache]
) -> None:
    caches["one"].read(varying)
    caches["other"].read(varying, sha256=hashlib.sha256(b"for other".ljust(300_000)).hexdigest())
    with forebay.Cache(tmp_path / "below", upstream=tmp_path / "root", remote_options=RemoteOptions(attempts=1)) as below:
        assert text(below.read(varying)) == "for forebay"
        server.close()
        for cache in (below, *caches.values()):
            with pytest.raises(errors.RemoteUnavailable):
                cache.read(varying)
    for root in (tmp_path / "below", tmp_path / "root"):
        with forebay.Cache(root, upstream=tmp_path / "root", offline=True) as cache, pytest.raises(errors.Offline):
            cache.read(varying)


def test_a_redirect_that_varies_leads_elsewhere(server: ScriptedServer, caches: dict[str, forebay.Cache]) -> None:
    def on_request(request: Any) -> None:
        if request.path == "/a":
            server.objects["/a"].redirect = f"/for-{request.headers['User-Agent']}"

    for name in caches:
        server.put(f"/for-{name}", name.encode())
    url = server.put("/a", b"", redirect="/", vary="User-Agent")
    server.on_request = on_request
    for _ in range(2):
        for name, cache in caches.items():
            assert bytes(cache.read(url)) == name.encode()
