"""HTTP by SOCKS proxies, as the environment names them."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from forebay import errors
from forebay._model import Span
from forebay.remote import RemoteOptions
from forebay.remote.http import HttpRemote
from forebay.testing import ScriptedServer
from tests.servers.nginx import Nginx
from tests.servers.nginx import nginx as running
from tests.servers.ports import free_port
from tests.servers.socks import Asked, SocksServer
from tests.servers.socks import socks as socks

SECRET = "hush-hush"
BODY = b"through the proxy"


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nginx]:
    with running(tmp_path_factory.mktemp("nginx") / "tls", tls=True) as found:
        found.put("a", BODY)
        yield found


def read(url: str, **options: object) -> bytes:
    return HttpRemote(RemoteOptions(attempts=1, **options)).read(url, Span(0, 100))  # type: ignore[arg-type]


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2].partition("/")[0])


@pytest.mark.parametrize(("kind", "version"), [("socks5h", 5), ("socks4a", 4)])
def test_the_proxy_resolves_the_name(
    server: ScriptedServer, socks: SocksServer, monkeypatch: pytest.MonkeyPatch, kind: str, version: int
) -> None:
    """No resolver of this machine is asked for it: the name exists at the proxy only."""
    port = port_of(server.put("/a", BODY))
    socks.names["far.invalid"] = "127.0.0.1"
    monkeypatch.setenv("all_proxy", f"{kind}://127.0.0.1:{socks.port}")
    assert read(f"http://far.invalid:{port}/a") == BODY
    assert socks.asked == [Asked(version, "far.invalid", port, "")]
    assert server.requests[-1].path == "/a"
    assert server.requests[-1].headers["Host"] == f"far.invalid:{port}"


@pytest.mark.parametrize(("kind", "version"), [("socks5", 5), ("socks4", 4)])
def test_this_machine_resolves_the_name(
    server: ScriptedServer, socks: SocksServer, monkeypatch: pytest.MonkeyPatch, kind: str, version: int
) -> None:
    port = port_of(server.put("/a", BODY))
    socks.names["::1"] = "127.0.0.1"  # where the server listens
    monkeypatch.setenv("http_proxy", f"{kind}://127.0.0.1:{socks.port}")
    assert read(f"http://localhost:{port}/a") == BODY
    [asked] = socks.asked
    assert asked in (Asked(version, "127.0.0.1", port, ""), Asked(version, "::1", port, ""))


def test_tls_by_a_proxy_with_a_password(
    tls: Nginx, socks: SocksServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(tls.ca))
    socks.user = f"me:{SECRET}"
    monkeypatch.setenv("https_proxy", f"socks5h://me:{SECRET}@127.0.0.1:{socks.port}")
    assert read(f"{tls.url}/a") == BODY
    assert socks.asked == [Asked(5, "127.0.0.1", port_of(tls.url), f"me:{SECRET}")]
    assert SECRET not in caplog.text


def test_a_password_that_is_refused_is_not_shown(
    socks: SocksServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    socks.user = "me:another"
    monkeypatch.setenv("all_proxy", f"socks5h://me:{SECRET}@127.0.0.1:{socks.port}")
    with pytest.raises(errors.RemoteUnavailable, match="its proxy accepts no such user and password, after 1 attempt") as caught:
        HttpRemote(RemoteOptions(attempts=3)).read("http://far.invalid/a", Span(0, 1))
    assert SECRET not in caplog.text + str(caught.value)


@pytest.mark.parametrize(
    ("code", "message"), [(1, "cannot connect to it"), (2, "may not connect to it"), (4, "cannot be reached"), (5, "it refuses")]
)
def test_a_proxy_that_does_not_connect_says_why(socks: SocksServer, monkeypatch: pytest.MonkeyPatch, code: int, message: str) -> None:
    socks.names["far.invalid"], socks.refuses = "127.0.0.1", code
    monkeypatch.setenv("all_proxy", f"socks5h://127.0.0.1:{socks.port}")
    with pytest.raises(errors.RemoteUnavailable, match=message):
        read("http://far.invalid/a")


def test_a_proxy_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("all_proxy", f"socks5h://me:{SECRET}@127.0.0.1:{free_port()}")
    with pytest.raises(errors.RemoteUnavailable, match="its proxy cannot be reached") as caught:
        read("http://far.invalid/a")
    assert SECRET not in str(caught.value)


def test_no_proxy_goes_for_socks_too(server: ScriptedServer, socks: SocksServer, monkeypatch: pytest.MonkeyPatch) -> None:
    url = server.put("/a", BODY)
    monkeypatch.setenv("all_proxy", f"socks5h://127.0.0.1:{socks.port}")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    assert read(url) == BODY
    monkeypatch.delenv("no_proxy")
    assert read(url, proxies=False) == BODY
    assert socks.asked == []


def test_a_kind_of_proxy_that_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("all_proxy", f"quic://me:{SECRET}@far:1080")
    with pytest.raises(errors.ConfigError, match="a quic:// proxy for http:// URLs") as caught:
        HttpRemote().stat("http://far.example/a")
    assert SECRET not in str(caught.value)
