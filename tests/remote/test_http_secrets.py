"""Credentials go where they belong, and nowhere else: not to other hosts, not into errors, logs or reprs."""

from __future__ import annotations

import base64
import logging
import pickle
import socket
import threading
import traceback
from collections.abc import Mapping
from pathlib import Path

import pytest

from forebay import errors
from forebay._model import Span
from forebay.remote import RemoteOptions
from forebay.remote.http import HttpRemote
from forebay.remote.http.requests import Exchange, endpoint_of
from forebay.testing import MemorySink, ScriptedServer
from tests.servers.ports import free_port
from tests.servers.tls import both as both

SECRET = "5ec3e7"


def sent(server: ScriptedServer, url: str, **options: object) -> Mapping[str, str]:
    """The headers of the one request that a stat of ``url`` makes."""
    HttpRemote(RemoteOptions(**options)).stat(url)  # type: ignore[arg-type]
    return server.requests[-1].headers


def basic(user: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


@pytest.fixture
def other() -> ScriptedServer:
    """A second host: the same address, another port."""
    return ScriptedServer()


def netrc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    (tmp_path / "netrc").write_text(text)
    (tmp_path / "netrc").chmod(0o600)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


def test_headers_and_token(server: ScriptedServer) -> None:
    url = server.put("/a", b"x")
    headers = sent(server, url, headers={"X-Key": "k"}, token="t")
    assert (headers["X-Key"], headers["Authorization"]) == ("k", "Bearer t")
    assert headers["Accept-Encoding"] == "identity"
    assert sent(server, url, headers={"authorization": "Mine"}, token="t")["authorization"] == "Mine"
    assert "Authorization" not in sent(server, url)


def test_a_header_of_the_user_replaces_ours(server: ScriptedServer) -> None:
    headers = sent(server, server.put("/a", b"x"), headers={"user-agent": "mine"})
    assert [value for name, value in headers.items() if name.lower() == "user-agent"] == ["mine"]


def test_user_and_password_of_the_url(server: ScriptedServer) -> None:
    url = server.put("/a", b"x").replace("://", "://me:p%40ss@")
    assert sent(server, url)["Authorization"] == basic("me", "p@ss")


def test_netrc(server: ScriptedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = server.put("/a", b"x")
    netrc(tmp_path, monkeypatch, "machine 127.0.0.1 login me password pass\n")
    assert sent(server, url)["Authorization"] == basic("me", "pass")
    assert "Authorization" not in sent(server, url, netrc=False)
    assert sent(server, url, token="t")["Authorization"] == "Bearer t"
    netrc(tmp_path, monkeypatch, "machine elsewhere login me password pass\n")
    assert "Authorization" not in sent(server, url)


def test_a_netrc_that_is_damaged_is_told_without_its_text(
    server: ScriptedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    netrc(tmp_path, monkeypatch, f"machine 127.0.0.1 login me {SECRET}\n")
    assert "Authorization" not in sent(server, server.put("/a", b"x"))
    assert "cannot be used" in caplog.text
    assert SECRET not in caplog.text


def test_a_redirect_to_another_host_takes_no_credentials_along(server: ScriptedServer, other: ScriptedServer) -> None:
    with other:
        target = other.put("/b", b"x")
        url = server.put("/a", b"", redirect=target)
        for where in (url, url.replace("://", "://me:pass@")):
            sent(server, where, token="t", headers={"Cookie": "c", "X-Key": "k"})
            assert {"Authorization", "Cookie", "X-Key"}.isdisjoint(other.requests[-1].headers)
            assert server.requests[-1].headers["Cookie"] == "c"


def test_a_redirect_to_the_same_host_keeps_them(server: ScriptedServer) -> None:
    server.put("/b", b"x", require={"Authorization": "Bearer t", "X-Key": "k"})
    assert sent(server, server.put("/a", b"", redirect="/b"), token="t", headers={"X-Key": "k"})["X-Key"] == "k"
    server.put("/c", b"x", require={"Authorization": basic("me", "pass")})
    sent(server, server.put("/a", b"", redirect="/c").replace("://", "://me:pass@"))


def test_a_redirect_to_a_host_of_netrc(server: ScriptedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    netrc(tmp_path, monkeypatch, "machine localhost login me password pass\n")
    server.put("/b", b"x")
    sent(server, server.put("/a", b"", redirect=server.url.replace("127.0.0.1", "localhost") + "/b"), token="t")
    assert server.requests[-1].headers["Authorization"] == basic("me", "pass")


def test_netrc_stays_with_the_port(server: ScriptedServer, other: ScriptedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    netrc(tmp_path, monkeypatch, "machine 127.0.0.1 login me password pass\nmachine localhost login me password pass\n")
    with other:
        for host in ("127.0.0.1", "localhost"):
            sent(server, server.put("/a", b"", redirect=other.put("/b", b"x").replace("127.0.0.1", host)))
            assert server.requests[-1].headers["Authorization"] == basic("me", "pass")
            assert "Authorization" not in other.requests[-1].headers


def test_credentials_come_back_with_a_redirect_home(server: ScriptedServer, other: ScriptedServer) -> None:
    with other:
        server.put("/c", b"x", require={"Authorization": basic("me", "pass")})
        other.put("/b", b"", redirect=f"{server.url}/c")
        url = server.put("/a", b"", redirect=f"{other.url}/b").replace("://", "://me:pass@")
        for options in ({}, {"token": "t"}):
            server.objects["/c"].require = {"Authorization": "Bearer t"} if options else {"Authorization": basic("me", "pass")}
            sent(server, url, **options)
            assert "Authorization" not in other.requests[-1].headers


@pytest.mark.parametrize(
    ("home", "target", "may"),
    [
        ("https://a", "http://a", False),
        ("https://a", "https://a:8443", False),
        ("http://a", "https://a", False),
        ("https://a", "http://b", False),
        ("https://a", "https://b", True),
        ("https://a", "https://b:8443", False),
        ("https://a:8443", "https://b:8443", True),
        ("http://a", "http://b", True),
        ("http://a:81", "http://b:82", False),
        ("https://A", "http://a", False),
        ("https://a.", "http://a", False),
    ],
)
def test_whom_netrc_is_for(home: str, target: str, may: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Schemes and ports that no server here can have."""
    netrc(tmp_path, monkeypatch, "default login me password pass\n")
    exchange = Exchange(RemoteOptions(token="t", headers={"Cookie": "c"}))
    places = [endpoint_of(*url.split("://")) for url in (home, target)]
    assert exchange._default_headers(places[0], "", places[0])["Authorization"] == "Bearer t"
    away = exchange._default_headers(places[1], "", places[0])
    assert away.get("Authorization") == (basic("me", "pass") if may else None)
    assert "Cookie" not in away


def test_netrc_does_not_go_in_clear(both: ScriptedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A redirect from https to http, on one host and even one port."""
    netrc(tmp_path, monkeypatch, f"machine 127.0.0.1 login me password {SECRET}\n")
    both.put("/b", b"x")
    safe = both.url.replace("http://", "https://")
    for how in ({}, {"token": SECRET, "headers": {"Cookie": SECRET}}):
        both.put("/a", b"", redirect="/b")
        assert sent(both, f"{safe}/a", **how)["Authorization"] in (basic("me", SECRET), f"Bearer {SECRET}")
        both.put("/a", b"", redirect=f"{both.url}/b")
        with pytest.raises(errors.RemoteProtocolError, match="allow_downgrade=True"):
            sent(both, f"{safe}/a", **how)
        assert {"Authorization", "Cookie"}.isdisjoint(sent(both, f"{safe}/a", **how, allow_downgrade=True))
        assert "Authorization" in both.requests[-2].headers


def test_signing(server: ScriptedServer) -> None:
    """A signer turns foreign URLs into HTTP ones, is asked anew for each attempt, and its judge explains refusals."""
    asked: list[tuple[str, str]] = []

    def sign(method: str, url: str, headers: Mapping[str, str]) -> tuple[str, Mapping[str, str]]:
        asked.append((method, url))
        return url.replace("x://bucket", server.url), {**headers, "Authorization": f"Signed {len(asked)}"}

    def judge(url: str, status: int, headers: Mapping[str, str], body: bytes) -> Exception | None:
        return errors.AccessDenied(f"{url}: {body!r}", url=url) if status == 400 else None

    server.put("/a", b"12345", statuses=[503], require={"Authorization": "Signed 2"})
    server.put("/bad", b"", statuses=[400])
    http, sink = HttpRemote(RemoteOptions(backoff=0.01, token=SECRET), sign, judge), MemorySink()
    server.objects["/a"].require = {}
    http.fetch("x://bucket/a", sink)
    assert sink.data == b"12345"
    assert asked == [("GET", "x://bucket/a")] * 2
    assert server.requests[-1].headers["Authorization"] == "Signed 2"
    with pytest.raises(errors.AccessDenied, match=r"x://bucket/bad: b'no"):
        http.read("x://bucket/bad", Span(0, 1))


# -- proxies -------------------------------------------------------------------------------------------------------------


def test_a_proxy_for_http(server: ScriptedServer, other: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with other:
        server.put("/a", b"through the proxy")
        server.put("/b", b"x")
        monkeypatch.setenv("http_proxy", server.url.replace("://", "://me:pass@"))
        sink = MemorySink()
        HttpRemote().fetch("http://far.example:81/a?b=c", sink)
        assert sink.data == b"through the proxy"
        assert server.requests[-1].path == "http://far.example:81/a?b=c"
        headers = server.requests[-1].headers
        assert (headers["Host"], headers["Proxy-Authorization"]) == ("far.example:81", basic("me", "pass"))
        HttpRemote().stat(other.put("/b", b"x").replace("127.0.0.1", "localhost").replace("http://", "http://me:pass@"))
        assert "me" not in server.requests[-1].path
        seen = len(server.requests)
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        HttpRemote().stat(other.put("/b", b"x"))
        HttpRemote(RemoteOptions(proxies=False)).stat(other.url + "/b")
        assert len(server.requests) == seen


def test_a_header_that_cannot_be_sent_is_named_without_its_value() -> None:
    for options in ({"headers": {"X-Key": f"{SECRET}\r\nX: y"}}, {"token": f"{SECRET}\u2100"}):
        with pytest.raises(errors.ConfigError, match="cannot be sent") as caught:
            RemoteOptions(**options)  # type: ignore[arg-type]
        assert SECRET not in str(caught.value)


def test_a_proxy_for_https(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked for a tunnel, with its own credentials and none of the URL's."""
    said: list[bytes] = []

    def serve() -> None:
        with listener.accept()[0] as connection:
            said.append(connection.recv(1 << 16))
            connection.sendall(b"HTTP/1.1 407 No\r\n\r\n")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        monkeypatch.setenv("https_proxy", f"127.0.0.1:{listener.getsockname()[1]}".join(["http://me:pass@", ""]))
        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(errors.RemoteUnavailable, match="407"):
            HttpRemote(RemoteOptions(attempts=1, token=SECRET)).stat("https://far.example/a")
        thread.join()
    assert said[0].startswith(b"CONNECT far.example:443 ")
    assert basic("me", "pass").encode() in said[0]
    assert SECRET.encode() not in said[0]


# -- nothing of it is said -----------------------------------------------------------------------------------------------


def failures(server: ScriptedServer, tmp_path: Path) -> list[str]:
    signed = f"?X-Amz-Signature={SECRET}&token={SECRET}"
    nobody = f"http://me:{SECRET}@127.0.0.1:{free_port()}/a{signed}"
    urls = [
        nobody,
        f"http://{SECRET}:\u2100@h/",
        f"http://{SECRET}@[1/",
        f"http://me:{SECRET}@no-such-host.invalid/{signed}",
        f"http://me:{SECRET}@h:port/{signed}",
    ]
    where = server.url.replace("://", f"://me:{SECRET}@")
    for status in (400, 401, 403, 404, 503, 301):
        server.put(f"/{status}", b"x", statuses=[status] * 99)
        urls.append(f"{where}/{status}{signed}")
    server.put("/cut", bytes(100), cut_after=10)
    server.put("/stall", bytes(100), stall_after=10)
    server.put("/range", bytes(100), content_range="bytes 5-6/7")
    server.put("/loop", b"", redirect=f"{where}/loop{signed}")
    server.put("/away", b"", redirect=f"{nobody}")
    server.put("/ftp", b"", redirect=f"ftp://me:{SECRET}@h/a{signed}")
    return urls + [f"{where}/{name}{signed}" for name in ("cut", "stall", "range", "loop", "away", "ftp", "\x01")]


def test_errors_logs_and_reprs_hold_no_secret(server: ScriptedServer, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="forebay")
    options = RemoteOptions(attempts=2, backoff=0.01, read_timeout=0.5, token=SECRET, headers={"X-Key": SECRET})
    http = HttpRemote(options)
    urls = failures(server, tmp_path)
    for url in urls:
        with pytest.raises(errors.ForebayError) as caught:
            http.fetch(url, MemorySink())
        told = "".join(traceback.format_exception(caught.value)) + repr(caught.value) + repr(caught.value.facts)
        assert SECRET not in told, told
        assert SECRET.encode() not in pickle.dumps(caught.value)
    assert "attempt 2" in caplog.text
    assert SECRET not in caplog.text
    assert SECRET not in repr(options)
    assert SECRET not in repr(http)


def test_a_certificate_that_nobody_signed(server: ScriptedServer) -> None:
    """TLS to a server that speaks none."""
    with pytest.raises(errors.RemoteUnavailable, match="after 1 attempt"):
        HttpRemote(RemoteOptions(attempts=1)).stat(server.url.replace("http://", "https://") + "/a")
