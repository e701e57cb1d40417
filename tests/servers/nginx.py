"""nginx on loopback, as one process of its own that dies with the tests."""

from __future__ import annotations

import collections
import contextlib
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.servers.ports import free_port

PR_SET_PDEATHSIG = 1

CONFIG = """
daemon off; master_process off; pid {folder}/pid; error_log {folder}/error.log;
events {{ worker_connections 256; }}
http {{
    log_format tests '$remote_addr - $remote_user [$time_local] "$request" $status $body_bytes_sent $connections_active';
    access_log {folder}/access.log tests;
    default_type application/octet-stream;
    client_body_temp_path {folder}/tmp1; proxy_temp_path {folder}/tmp2; fastcgi_temp_path {folder}/tmp3;
    uwsgi_temp_path {folder}/tmp4; scgi_temp_path {folder}/tmp5;
    sendfile on; tcp_nopush on; keepalive_requests 100000;
    server {{
        listen 127.0.0.1:{port}; {tls}
        root {folder}/files;
        location /gzip/ {{ alias {folder}/files/; gzip on; gzip_types *; gzip_min_length 1; }}
        location /no-ranges/ {{ alias {folder}/files/; max_ranges 0; }}
        location /private/ {{ alias {folder}/files/; auth_basic "tests"; auth_basic_user_file {folder}/users; }}
        location /moved/ {{ rewrite ^/moved/(.*)$ /$1 redirect; }}
        location /slow/ {{ alias {folder}/files/; limit_rate 100k; }}
        location = /who {{ return 200 "$ssl_client_s_dn"; }}
        location /medium/ {{ alias {folder}/files/; limit_rate 2m; }}
    }}
}}
"""


@dataclass(frozen=True)
class Nginx:
    """``files``: the directory that is served; ``url``: where. ``/gzip/``, ``/no-ranges/``, ``/private/`` (user ``me``, password
    ``pass``), ``/moved/``, ``/slow/`` and ``/medium/`` (100 KB, or 2 MB, at once, then as much a second of a connection) show the same
    files in their own way. ``log``: one line for each request, at whose end is how many connections were open then. ``ca``: signs its
    certificate."""

    url: str
    files: Path
    log: Path
    ca: Path | None = None

    def put(self, name: str, body: bytes) -> str:
        """Write a file; its URL."""
        (self.files / name).write_bytes(body)
        return f"{self.url}/{name}"

    def replace(self, name: str, body: bytes) -> None:
        """Put another version in the place of a file, at once. Its ETag is another one even in the same second, and of the same size."""
        path, new = self.files / name, self.files / f"{name}.new"
        new.write_bytes(body)
        later = path.stat().st_mtime_ns + 2 * 10**9
        os.utime(new, ns=(later, later))
        new.replace(path)

    def lines(self) -> list[str]:
        """The lines of the log, without one that nginx is just writing."""
        return self.log.read_text().rpartition("\n")[0].splitlines()

    def gets(self, beginning: str = "") -> collections.Counter[str]:
        """How often each file whose name begins so was requested. A request that was cut off counts once nginx has seen its end."""
        requests = [line.split('"')[1].split() for line in self.lines()]
        names = [words[1].rpartition("/")[2] for words in requests if words[0] == "GET"]
        return collections.Counter(name for name in names if name.startswith(beginning))


@contextlib.contextmanager
def nginx(folder: Path, *, tls: bool = False, verify: str = "off") -> Iterator[Nginx]:
    """A running nginx. Skips the test where there is none. ``verify``: whether clients have to show a certificate (``on``, ``optional``):
    the only good one is the server's own, with its key in ``key.pem`` beside it. ``/who`` tells whose was shown."""
    program = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    if program is None:
        pytest.skip("nginx is not installed")
    files = folder / "files"
    files.mkdir(parents=True)
    (folder / "users").write_text("me:{PLAIN}pass\n")
    secure = f"ssl_certificate {folder}/cert.pem; ssl_certificate_key {folder}/key.pem;" if tls else ""
    secure += f" ssl_client_certificate {folder}/cert.pem; ssl_verify_client {verify};" if verify != "off" else ""
    if tls:
        _certificate(folder)
    port = free_port()
    config = CONFIG.format(folder=folder, port=port, tls=secure)
    (folder / "nginx.conf").write_text(config.replace(f":{port};", f":{port} ssl;") if tls else config)
    command = [program, "-p", folder, "-c", folder / "nginx.conf"]
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, preexec_fn=_die_with_parent)
    try:
        _wait_for(port, server)
        scheme = "https" if tls else "http"
        yield Nginx(f"{scheme}://127.0.0.1:{port}", files, folder / "access.log", folder / "cert.pem" if tls else None)
    finally:
        server.terminate()
        server.wait()


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _wait_for(port: int, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 20
    while server.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.02)
    raise RuntimeError(f"nginx did not start: {server.poll()}")


def _certificate(folder: Path) -> None:
    what = ["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=127.0.0.1"]
    what += ["-addext", "subjectAltName=IP:127.0.0.1"]
    command = ["openssl", *what, "-keyout", folder / "key.pem", "-out", folder / "cert.pem"]
    subprocess.run(command, check=True, capture_output=True)
