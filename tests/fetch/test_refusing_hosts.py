"""Hosts that refuse connections, and objects that have changed: what reads cost then."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import forebay
from forebay import errors
from forebay._engine.files.silent_hosts import SilentHosts
from forebay._model import Victim
from forebay.cache import fetcher_of
from forebay.fetch import Fetcher
from forebay.remote.base import Call
from forebay.testing import ScriptedServer
from tests.processes import in_child
from tests.servers.ports import free_port

BODY = b"x" * 300_000


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The requests that were to be sent; the hosts that refuse do not see them."""
    seen: list[str] = []
    count = Call.count

    def counting(self: Call, *, requests: int = 0, **more: Any) -> None:
        seen.extend([self.url] * requests)
        count(self, requests=requests, **more)

    monkeypatch.setattr(Call, "count", counting)
    return seen


def expired(cache: forebay.Cache, count: int) -> list[str]:
    """URLs of a host that refuses connections, of which the cache has objects that must be validated."""
    with ScriptedServer() as gone:
        urls = [gone.put(f"/{n}", BODY + bytes([n])) for n in range(count)]
        for url in urls:
            cache.read(url)
    return urls


def test_a_host_that_refuses_is_asked_by_one_call(cache: forebay.Cache, asked: list[str]) -> None:
    urls = expired(cache, 20)
    asked.clear()
    assert [bytes(cache.read(url, max_age=0))[-1] for url in urls] == list(range(20))
    assert len(asked) == 2  # of the first
    assert [data[-1] for data in cache.read_many(urls, max_age=0)] == list(range(20))
    assert in_child(lambda: [bytes(cache.read(url, max_age=0))[-1] for url in urls]) == list(range(20))
    assert len(asked) == 2
    for read in (cache.read, cache.local, lambda url: cache.open(url, block_size="64KB")):
        with pytest.raises(errors.RemoteUnavailable, match="refused the connection") as caught:
            read(urls[0] + "-none")
        assert caught.value.attempts == 0
    assert len(asked) == 2
    with pytest.raises(errors.RemoteUnavailable, match="after 5 attempts"):
        cache.read(urls[0] + "-none", refresh=True)
    assert len(asked) == 7


def test_a_proxy_that_refuses_is_named(cache: forebay.Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    proxy = f"http://127.0.0.1:{free_port()}"
    monkeypatch.setenv("http_proxy", proxy.replace("//", "//user:secret@"))
    monkeypatch.setenv("no_proxy", "")
    with pytest.raises(errors.RemoteUnavailable, match="its proxy cannot be reached"):
        cache.read("http://data.example/a")
    with pytest.raises(errors.RemoteUnavailable, match=f"the proxy http://...@{proxy[7:]} refused the connection") as caught:
        cache.read("http://data.example/b")
    assert "secret" not in str(caught.value)


def test_a_server_that_only_restarts_is_left_alone_by_nobody(cache: forebay.Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    """It refuses the first attempt of a call, and listens before the next."""
    port, told, servers = free_port(), list[str](), list[ScriptedServer]()
    monkeypatch.setattr(SilentHosts, "failed", lambda self, host, *more: told.append(host))

    def listen(self: Call, seconds: float) -> None:
        if not servers:
            servers.append(ScriptedServer(port))
            servers[0].put("/a", BODY)

    monkeypatch.setattr(Call, "_pause_for", listen)
    try:
        assert cache.read(f"http://127.0.0.1:{port}/a") == BODY
    finally:
        for server in servers:
            server.close()
    assert len(servers) == 1
    assert told == []


@pytest.mark.parametrize("size", [10, len(BODY)])
def test_a_changed_object_costs_one_request(cache: forebay.Cache, server: ScriptedServer, size: int) -> None:
    url = server.put("/a", BODY[:size])
    assert cache.read(url) == BODY[:size]
    server.requests.clear()
    assert cache.read(url, max_age=0) == BODY[:size]
    assert [(request.method, request.status) for request in server.requests] == [("GET", 304)]
    server.put("/a", BODY[:size].upper())
    server.requests.clear()
    assert cache.read(url, max_age=0) == BODY[:size].upper()
    with cache.local(url) as path:
        assert Path(path).read_bytes() == BODY[:size].upper()
    assert [request.method for request in server.requests] == ["GET"]
    assert cache.read(url) == BODY[:size].upper()


def test_an_entry_that_is_evicted_during_its_check_is_fetched(
    cache: forebay.Cache, server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = server.put("/a", BODY)
    cache.read(url)
    validate = Fetcher.validate

    def evicting(self: Fetcher, *args: Any) -> Any:
        found = validate(self, *args)
        (entry,) = cache.entries()
        fetcher_of(cache).store.remove([Victim.of(entry)])
        return found

    monkeypatch.setattr(Fetcher, "validate", evicting)
    assert cache.read(url, max_age=0) == BODY
    monkeypatch.undo()  # it refers to the cache


def test_a_changed_object_that_breaks_off_raises(cache: forebay.Cache, server: ScriptedServer) -> None:
    """That it has changed is known: the old version would be wrong."""
    url = server.put("/a", BODY)
    cache.read(url)
    server.put("/a", BODY.upper(), cut_after=1000)
    with pytest.raises(errors.RemoteError):
        cache.read(url, max_age=0)
    server.put("/a", BODY.upper())
    assert cache.read(url, max_age=0) == BODY.upper()
