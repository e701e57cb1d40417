"""A server that speaks TLS to who begins so, and plain HTTP to the others: both schemes of one host and port."""

from __future__ import annotations

import shutil
import socket
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from forebay.testing import ScriptedServer

HELLO = b"\x16"
"""The first byte of a TLS connection."""


@pytest.fixture
def both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedServer]:
    """With a certificate of its own, which this process trusts. Its ``url`` is plain HTTP's."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    words = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    words += ["-keyout", str(key), "-out", str(certificate), "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(words, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(certificate))
    with ScriptedServer() as server:
        inner: Any = server._server
        accept = inner.get_request

        def get_request() -> tuple[socket.socket, Any]:
            connection, address = accept()
            connection.settimeout(60)
            if connection.recv(1, socket.MSG_PEEK) == HELLO:
                connection = context.wrap_socket(connection, server_side=True)
            return connection, address

        inner.get_request = get_request
        yield server
