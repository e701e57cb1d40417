"""HTTP against nginx."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from forebay import errors
from forebay._model import Partial, Span
from forebay.remote import RemoteOptions
from forebay.remote.http import HttpRemote
from forebay.remote.http.requests import JOIN_UP_TO
from forebay.testing import MemorySink
from tests.servers.nginx import Nginx
from tests.servers.nginx import nginx as running

PART = 1 << 20
BODY = random.Random(3).randbytes(10 * PART + 17)
OPTIONS = RemoteOptions(part=PART, backoff=0.01)


@pytest.fixture(scope="module")
def nginx(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nginx]:
    with running(tmp_path_factory.mktemp("nginx") / "plain") as found:
        found.put("big.bin", BODY)
        found.put("small", b"thirteen bytes")
        found.put("empty", b"")
        yield found


@pytest.fixture
def http() -> HttpRemote:
    return HttpRemote(OPTIONS)


@pytest.mark.parametrize("place", ["", "/gzip", "/no-ranges", "/moved"])
@pytest.mark.parametrize(("name", "body"), [("big.bin", BODY), ("small", b"thirteen bytes"), ("empty", b"")])
def test_fetch(nginx: Nginx, http: HttpRemote, place: str, name: str, body: bytes) -> None:
    url, sink = f"{nginx.url}{place}/{name}", MemorySink()
    transfer = http.fetch(url, sink)
    assert sink.data == body
    assert (transfer.retries, transfer.received) == (0, len(body))
    info = http.stat(url)
    assert info is not None
    assert (info.size, info.strong) == (len(body), True)
    assert info == transfer.info
    assert http.stat(url, known=info.validator) is None
    assert http.read(url, Span(3, 10)) == body[3:13]


def test_a_new_version_is_seen(nginx: Nginx, http: HttpRemote) -> None:
    url = nginx.put("changing", b"old")
    info = http.stat(url)
    assert info is not None
    os.utime(nginx.files / "changing", (1e9, 1e9))
    nginx.put("changing", b"newer")
    assert http.stat(url, known=info.validator) is not None
    with pytest.raises(errors.RemoteChanged):
        http.read(url, Span(0, 3), validator=info.validator)
    sink = MemorySink(Partial(3, info.validator or "", (Span(1, 2),)), b"o  ")
    http.fetch(url, sink)
    assert sink.data == b"newer"


def test_a_partial_is_completed(nginx: Nginx, http: HttpRemote) -> None:
    url = f"{nginx.url}/big.bin"
    info = http.stat(url)
    assert info is not None
    sink = MemorySink(
        Partial(len(BODY), info.validator or "", (Span(5 * PART, len(BODY) - 5 * PART),)), BODY[: 5 * PART] + bytes(5 * PART + 17)
    )
    transfer = http.fetch(url, sink)
    assert sink.data == BODY
    assert (transfer.received, transfer.resumed) == (len(BODY) - 5 * PART, 5 * PART)


def test_credentials(nginx: Nginx, http: HttpRemote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"{nginx.url}/private/small"
    with pytest.raises(errors.AccessDenied, match="401"):
        http.fetch(url, MemorySink())
    assert http.stat(url.replace("://", "://me:pass@")) is not None
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password pass\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert http.stat(url) is not None


def test_not_found(nginx: Nginx, http: HttpRemote) -> None:
    with pytest.raises(errors.NotFound, match="404"):
        http.stat(f"{nginx.url}/none")
    with pytest.raises(FileNotFoundError):
        http.fetch(f"{nginx.url}/none", MemorySink())


def test_many_small_objects_cost_one_request_each(nginx: Nginx) -> None:
    bodies = {nginx.put(f"small-{n}", random.Random(n).randbytes(10_000 + n)): random.Random(n).randbytes(10_000 + n) for n in range(100)}
    http = HttpRemote()

    def fetch(url: str) -> int:
        sink = MemorySink()
        transfer = http.fetch(url, sink)
        assert sink.data == bodies[url]
        return transfer.requests

    with ThreadPoolExecutor(16) as pool:
        assert sum(pool.map(fetch, bodies)) == len(bodies)
    lines = nginx.lines()
    assert sum("/small-" in line for line in lines) == len(bodies)


def test_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(tmp_path / "tls", tls=True) as nginx:
        url, sink = nginx.put("big.bin", BODY), MemorySink()
        with pytest.raises(errors.RemoteUnavailable, match=r"certificate is not trusted: self-signed certificate.* after 1 attempt"):
            HttpRemote(OPTIONS).fetch(url, sink)
        monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(nginx.ca))
        writes: list[int] = []
        sink.on_write = lambda at, size: writes.append(size)
        transfer = HttpRemote(replace(OPTIONS, part=JOIN_UP_TO)).fetch(url, sink)
        assert sink.data == BODY
        assert len(writes) == transfer.requests  # though TLS gives 16 KiB at a time
        with pytest.raises(errors.RemoteUnavailable, match="not trusted"):
            HttpRemote(OPTIONS).stat(url.replace("127.0.0.1", "localhost"))
