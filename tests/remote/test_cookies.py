"""Logins that redirect and set cookies: these live within one call, and passwords go to their own host."""

from __future__ import annotations

import base64
import http.server
import random
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import forebay
from forebay import errors
from forebay._model import Span
from forebay.remote import RemoteOptions
from forebay.remote.base import Call
from forebay.remote.cookies import MAX_COOKIES, Cookies
from forebay.remote.http import HttpRemote
from forebay.testing import MemorySink, ScriptedServer
from tests.servers.tls import both as both

PART = 64 << 10
BODY = random.Random(1).randbytes(10 * PART + 17)
OPTIONS = RemoteOptions(part=PART, backoff=0.01, attempts=2)
PASSWORD = "Basic " + base64.b64encode(b"me:pw").decode()


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Any

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""

    def do_GET(self) -> None:
        self.server.asked.append((self.command, self.path, self.headers.get("Cookie"), self.headers.get("Authorization")))
        self.server.app(self)

    do_HEAD = do_GET

    def answer(self, status: int, *headers: tuple[str, str], body: bytes = b"") -> None:
        self.send_response(status)
        for name, value in (*headers, ("Content-Length", str(len(body)))):
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def give(self, body: bytes) -> None:
        """The body, or the range of it that is wanted."""
        first, _, last = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")
        piece = body[int(first) : int(last or len(body)) + 1]
        span = f"bytes {first}-{int(first) + len(piece) - 1}/{len(body)}"
        self.answer(206 if "Range" in self.headers else 200, ("ETag", '"1"'), ("Content-Range", span), body=piece)


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, host: str, app: Callable[[Handler], None], port: int = 0) -> None:
        super().__init__((host, port), Handler)
        self.app = app
        self.asked: list[tuple[str, str, str | None, str | None]] = []
        self.url = f"http://{host}:{self.server_port}"


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def make(host: str, app: Callable[[Handler], None], port: int = 0) -> Server:
        servers.append(Server(host, app, port))
        threading.Thread(target=servers[-1].serve_forever, args=(0.01,), daemon=True).start()
        return servers[-1]

    yield make
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def earthdata(serve: Callable[..., Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Server, Server]:
    """A server of data, and the one where its users log in, by a password in netrc: both set cookies."""

    def data(handler: Handler) -> None:
        path, _, query = handler.path.partition("?")
        if "session=ok" in (handler.headers.get("Cookie") or ""):
            return handler.give(BODY)
        if query == "code=42":
            return handler.answer(302, ("Location", path), ("Set-Cookie", "session=ok; Path=/; HttpOnly"), ("Set-Cookie", "other=1"))
        return handler.answer(302, ("Location", f"{auth.url}/authorize?to={urllib.parse.quote(store.url + path)}"))

    def login(handler: Handler) -> None:
        if handler.headers.get("Authorization") != PASSWORD:
            return handler.answer(401, ("WWW-Authenticate", "Basic"))
        back = urllib.parse.parse_qs(handler.path.partition("?")[2])["to"][0]
        return handler.answer(302, ("Location", f"{back}?code=42"), ("Set-Cookie", "sso=1; Expires=Wed, 21 Oct 2099 07:28:00 GMT"))

    store = serve("127.0.0.1", data)
    auth = serve("127.0.0.2", login, store.server_port)
    (tmp_path / "netrc").write_text("machine 127.0.0.2 login me password pw\n")
    (tmp_path / "netrc").chmod(0o600)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    return store, auth


def test_a_login_opens_all_ranges_of_a_call(earthdata: tuple[Server, Server]) -> None:
    store, auth = earthdata
    sink = MemorySink()
    HttpRemote(OPTIONS).fetch(f"{store.url}/a", sink)
    assert sink.data == BODY
    assert [given for *_, given in auth.asked] == [PASSWORD]
    assert {given for *_, given in store.asked} == {None}
    assert {cookie for _, _, cookie, _ in store.asked[2:]} == {"session=ok; other=1"}
    assert len(store.asked) == 2 + 11


@pytest.mark.parametrize("options", [OPTIONS, RemoteOptions(part=PART, headers={"Cookie": "mine=1; session=old"})])
def test_no_call_knows_the_cookies_of_another(earthdata: tuple[Server, Server], options: RemoteOptions) -> None:
    store, auth = earthdata
    remote = HttpRemote(options)
    for number in range(1, 4):
        assert remote.read(f"{store.url}/a", Span(5, 10)) == BODY[5:15]
        assert len(auth.asked) == number
        own = options.headers.get("Cookie")
        assert [cookie for _, _, cookie, _ in store.asked[-3:]] == [own, own, f"{'mine=1; ' if own else ''}session=ok; other=1"]
        assert auth.asked[-1][2] is None


def test_through_a_cache_in_every_way(earthdata: tuple[Server, Server], tmp_path: Path) -> None:
    store, _ = earthdata
    with forebay.Cache(tmp_path / "root", budget="100MB", remote_options=OPTIONS) as cache:
        assert bytes(cache.read(f"{store.url}/a")) == BODY
        assert bytes(cache.read(f"{store.url}/a", max_age=0)) == BODY
        with cache.open(f"{store.url}/b", block_size="64KB") as file:
            assert file.read() == BODY
        with cache.local(f"{store.url}/c") as path:
            assert Path(path).read_bytes() == BODY
    assert {given for *_, given in store.asked} == {None}


def test_without_a_password_the_login_refuses(earthdata: tuple[Server, Server]) -> None:
    store, auth = earthdata
    with pytest.raises(errors.AccessDenied, match="netrc"):
        HttpRemote(RemoteOptions(netrc=False, attempts=1)).fetch(f"{store.url}/a", MemorySink())
    assert len(auth.asked) == 1


def test_a_circle_of_redirects_names_where_it_ended(serve: Callable[..., Server]) -> None:
    def around(handler: Handler) -> None:
        handler.answer(302, ("Location", f"/b?code={random.random()}"), ("Set-Cookie", "a=b"))

    server = serve("127.0.0.1", around)
    with pytest.raises(errors.RemoteProtocolError, match=rf"redirected more than 20 times, last to {server.url}/b\?\.\.\.: .*netrc"):
        HttpRemote(OPTIONS).stat(f"{server.url}/a")
    with pytest.raises(errors.RemoteProtocolError, match="last to"):  # a name with half a character
        HttpRemote(OPTIONS).stat(f"{server.url}/\udcff\xe4 b?\udcff")


def test_what_came_encrypted_is_not_sent_in_clear(both: ScriptedServer) -> None:
    cookies = Cookies()
    cookies.keep("https://h.example/a", ["a=1"])
    cookies.keep("http://h.example/a", ["b=2", "c=3; Secure"])
    assert cookies.added_to({}, "http://h.example/b") == {"Cookie": "b=2"}
    assert set(cookies.added_to({}, "https://h.example/b")["Cookie"].split("; ")) == {"a=1", "b=2", "c=3"}


def test_whose_cookies_they_are() -> None:
    cookies = Cookies()
    cookies.keep("https://data.example.co.uk/deep/a", ["host=1", "domain=1; Domain=example.co.uk; Path=/", "all=1; Domain=co.uk; Path=/"])
    cookies.keep("https://data.example.co.uk/deep/a", ["away=1; Domain=other.uk; Path=/", "gone=1; Path=/; Max-Age=0"])
    names = {
        url: {pair.partition("=")[0] for pair in cookies.added_to({}, f"https://{url}").get("Cookie", "").split("; ")}
        for url in ("data.example.co.uk/deep/b", "data.example.co.uk/b", "x.example.co.uk/", "example.com/", "other.uk/", "y.co.uk/")
    }
    assert names == {
        "data.example.co.uk/deep/b": {"host", "domain"}, "data.example.co.uk/b": {"domain"}, "x.example.co.uk/": {"domain"},
        "example.com/": {""}, "other.uk/": {""}, "y.co.uk/": {""},
    }  # fmt: skip


def test_a_server_cannot_fill_the_memory_or_break_the_next_request() -> None:
    cookies = Cookies()
    for number in range(1000):
        cookies.keep("http://h.example/a", [f"a{number}=1", f"long=1{'x' * 5000}", "control=\x01"])
    sent = cookies.added_to({"cookie": "mine=1"}, "http://h.example/a")
    assert list(sent) == ["cookie"]
    assert sent["cookie"].count("=") == MAX_COOKIES + 1
    assert not {"long", "control"} & {pair.partition("=")[0] for pair in sent["cookie"].split("; ")}


def test_threads_share_those_of_their_call() -> None:
    call = Call("http://h.example/a", OPTIONS)

    def use(number: int) -> None:
        for age in (60, 0, 60):
            call.keep_cookies("http://h.example/a", [f"a{number}=1; Max-Age={age}"])
            assert call.cookies is not None
            call.cookies.added_to({}, "http://h.example/a")

    threads = [threading.Thread(target=use, args=(number,)) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert call.cookies is not None
    assert len(call.cookies.added_to({}, "http://h.example/")["Cookie"].split("; ")) == 20
    assert call.restarted().cookies is call.cookies
