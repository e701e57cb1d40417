"""Which hosts NO_PROXY names, as curl and requests read it."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest

from forebay._model import Span
from forebay.remote.http import HttpRemote
from forebay.remote.http.requests import is_direct
from forebay.testing import ScriptedServer

CASES = [
    ("10.1.2.3", "10.0.0.0/8", True),
    ("10.1.2.3", "10.9.9.9/8", True),
    ("11.1.2.3", "10.0.0.0/8", False),
    ("10.1.2.3", "192.168.0.0/16, 10.1.2.0/24", True),
    ("10.1.2.3", "192.168.0.0/16 10.1.2.0/24", True),
    ("10.1.2.3", "10.1.2.3", True),
    ("10.1.2.3", "10.1.2.3/32", True),
    ("10.1.2.3", "10.1.2.4/32", False),
    ("10.1.2.3", "0.0.0.0/0", False),
    ("10.1.2.3", "10.0.0.0/33", False),
    ("10.1.2.3", "10.0.0.0/255.0.0.0", False),
    ("10.1.2.3", "10.", False),
    ("10.1.2.3", "2.3", False),
    ("10.1.2.3", "10.0.0.0/8/8", False),
    ("::1", "::1", True),
    ("fd00::5", "fd00::/8", True),
    ("fd00::5", "fe80::/10", False),
    ("fd00::5", "FD00::5", True),
    ("fd00::5", "10.0.0.0/8", False),
    ("example.com", "example.com", True),
    ("example.com", "EXAMPLE.com", True),
    ("data.example.com", "example.com", True),
    ("data.example.com", ".example.com", True),
    ("example.com", ".example.com", True),
    ("notexample.com", "example.com", False),
    ("example.com", "data.example.com", False),
    ("example.com", "10.0.0.0/8", False),
    ("example.com", "*", True),
    ("10.1.2.3", "*", True),
    ("10.1.2.3", "a, *", False),
    ("data.example.com", "*.example.com", False),
    ("example.com", "", False),
    ("example.com", ",,", False),
]


@pytest.mark.parametrize(("host", "no_proxy", "direct"), CASES)
def test_whom_no_proxy_names(host: str, no_proxy: str, direct: bool) -> None:
    assert is_direct(host, 443, no_proxy) == direct


@pytest.mark.parametrize(
    ("host", "no_proxy", "direct"),
    [
        ("10.1.2.3", "10.1.2.3:8080", True),
        ("10.1.2.3", "10.1.2.3:9090", False),
        ("data.example.com", "example.com:8080", True),
        ("data.example.com", "example.com:9090", False),
        ("fd00::5", "[fd00::5]", True),
        ("fd00::5", "[fd00::5]:8080", True),
        ("fd00::5", "[fd00::5]:9090", False),
        ("fe80::1%eth0", "fe80::/10", True),
        ("example.com.", "example.com", True),
        ("example.com", "example.com.", True),
    ],
)
def test_ports_brackets_zones_and_dots(host: str, no_proxy: str, direct: bool) -> None:
    """Of which only one of the two knows something."""
    assert is_direct(host, 8080, no_proxy) == direct


def as_requests(host: str, no_proxy: str) -> bool:
    from requests.utils import should_bypass_proxies  # type: ignore[import-untyped]

    return bool(should_bypass_proxies(f"http://{f'[{host}]' if ':' in host else host}/", no_proxy))


def as_curl(host: str, no_proxy: str, proxy: str) -> bool:
    """A direct connection to a port where nobody listens fails, and leaves this machine never; the proxy answers all."""
    where = f"[{host}]" if ":" in host else host
    command = ["curl", "-s", "-o", os.devnull, "--interface", "lo", "--resolve", f"{where}:1:127.0.0.1", "--connect-timeout", "0.1"]
    command.append(f"http://{where}:1/")
    environ = {"PATH": os.environ["PATH"], "http_proxy": proxy, "no_proxy": no_proxy}
    return subprocess.run(command, env=environ, stdin=subprocess.DEVNULL).returncode != 0


@pytest.mark.parametrize(("host", "no_proxy", "direct"), CASES)
def test_what_curl_and_requests_agree_on(host: str, no_proxy: str, direct: bool, server: ScriptedServer) -> None:
    pytest.importorskip("requests")
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    both = {as_requests(host, no_proxy), as_curl(host, no_proxy, server.url)}
    assert direct in both, f"neither says {direct}"


@pytest.mark.parametrize("name", ["no_proxy", "NO_PROXY"])
def test_a_network_is_reached_directly(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.setenv("no_proxy", "")
    monkeypatch.setenv(name, "10.0.0.0/8,127.0.0.0/8")
    assert HttpRemote().read(server.put("/a", b"direct"), Span(0, 10)) == b"direct"
