"""Servers for the tests of remotes."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def no_setting_of_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """No proxy, netrc or certificate bundle of who runs the tests."""
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    for name in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "AWS_CA_BUNDLE", "FOREBAY_CLIENT_CERT", "FOREBAY_CLIENT_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path_factory.mktemp("home") / "no-netrc"))
