"""A real S3 server for the tests: Ceph RGW on loopback, with one monitor and one OSD of its own.

`rgw_server` is one server for all pytest-xdist workers of a run. A keeper process (this module, run as a program) starts the daemons as its
children and stops them when the last test process that uses them is gone, by whatever death: each user holds a shared POSIX lock on
FOLDER/users, and the keeper waits for the exclusive one. The daemons die with the keeper (PR_SET_PDEATHSIG).
To keep one for several runs: `python -m tests.servers.rgw hold FOLDER`, and RGW_FOLDER=FOLDER for pytest.
Needs root and Debian's packages radosgw, ceph-mon, ceph-osd, ceph-common, and openssl.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.servers.ports import free_port

PROGRAMS = ("ceph", "ceph-authtool", "ceph-mon", "ceph-osd", "monmaptool", "openssl", "radosgw", "radosgw-admin")
PR_SET_PDEATHSIG = 1
ROOT = Path(__file__).parents[2]
START_LIMIT = 120.0


@dataclasses.dataclass(frozen=True)
class RgwServer:
    """``url``, ``tls_url``: the endpoint without and with TLS; ``ca``: file of the certificate that signs the latter.
    ``key``, ``secret``: the user that owns what the tests put; ``other_*``: a second user."""

    url: str
    tls_url: str
    ca: str
    key: str = "testkey"
    secret: str = "testsecret"
    other_key: str = "otherkey"
    other_secret: str = "othersecret"

    def client(self, *, other: bool = False) -> Any:
        """A botocore S3 client that takes nothing from the environment."""
        import botocore.config
        import botocore.session

        session = botocore.session.Session(profile=None)
        return session.create_client(
            "s3", region_name="us-east-1", endpoint_url=self.url,
            aws_access_key_id=self.other_key if other else self.key,
            aws_secret_access_key=self.other_secret if other else self.secret,
            config=botocore.config.Config(s3={"addressing_style": "path"}, proxies={}),
        )  # fmt: skip


def missing() -> str | None:
    """Why no server can run here, or None."""
    if os.geteuid() != 0:
        return "Ceph RGW: needs root"
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    return f"Ceph RGW: not installed: {', '.join(absent)}" if absent else None


@pytest.fixture(scope="session")
def rgw_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RgwServer]:
    if reason := missing():
        pytest.skip(reason)
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "rgw"
    with joined(Path(os.environ.get("RGW_FOLDER", folder))) as server:
        yield server


@contextlib.contextmanager
def joined(folder: Path) -> Iterator[RgwServer]:
    """The server that runs in ``folder``; the first to come starts it."""
    folder.mkdir(exist_ok=True)
    # A POSIX lock belongs to the process, so a child that a test forks does not prolong the server's life.
    with open(folder / "users", "a+b") as users, open(folder / "start", "a+b") as start:
        fcntl.lockf(start, fcntl.LOCK_EX)
        fcntl.lockf(users, fcntl.LOCK_SH)  # waits here while the keeper of earlier users stops
        address = folder / "address"
        if not address.exists():
            _start_keeper(folder)
        fcntl.lockf(start, fcntl.LOCK_UN)
        yield RgwServer(**json.loads(address.read_text()))


def _start_keeper(folder: Path) -> None:
    with open(folder / "keeper.log", "wb") as log:
        program = [sys.executable, "-m", "tests.servers.rgw", str(folder.absolute())]  # `hold` has another name here
        keeper = subprocess.Popen(program, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
    deadline = time.monotonic() + START_LIMIT
    while not (folder / "address").exists():
        if keeper.poll() is not None or time.monotonic() > deadline:
            keeper.kill()
            pytest.fail(f"Ceph RGW did not start:\n{(folder / 'keeper.log').read_text()[-4000:]}")
        time.sleep(0.1)


class Keeper:
    """Starts the daemons in ``folder``/data; they die with the process that made this object."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.data = folder / "data"
        self.config = self.data / "ceph.conf"
        self.daemons: list[subprocess.Popen[bytes]] = []

    def run(self) -> None:
        with open(self.folder / "users", "r+b") as users:
            try:
                server = self.start()
                (self.folder / "address.new").write_text(json.dumps(dataclasses.asdict(server)))
                (self.folder / "address.new").rename(self.folder / "address")
                fcntl.lockf(users, fcntl.LOCK_EX)
                (self.folder / "address").unlink()
            finally:
                for daemon in self.daemons:
                    daemon.kill()
                    daemon.wait()
                shutil.rmtree(self.data)

    def start(self) -> RgwServer:
        shutil.rmtree(self.data, ignore_errors=True)
        for folder in (self.data, self.data / "mon", self.data / "osd"):
            folder.mkdir(mode=0o700)
        monitor, plain, tls = (free_port() for _ in range(3))
        fsid, osd = str(uuid.uuid4()), str(uuid.uuid4())
        address = f"[v2:127.0.0.1:{monitor}]"
        self._certificate()
        self.config.write_text(self._config(fsid, address, plain, tls))
        self._keyring()
        self._call("monmaptool", "--create", "--fsid", fsid, "--addv", "a", address, f"{self.data}/monmap")
        self._ceph("ceph-mon", "--mkfs", "-i", "a", "--monmap", f"{self.data}/monmap", "--keyring", f"{self.data}/keyring")
        self._daemon("ceph-mon", "-i", "a")
        self._ceph("ceph", "osd", "new", osd)
        self._ceph("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", osd)
        self._daemon("ceph-osd", "-i", "0")
        self._daemon("radosgw", "-n", "client.rgw.a")
        server = RgwServer(f"http://127.0.0.1:{plain}", f"https://localhost:{tls}", f"{self.data}/tls.crt")
        self._wait_until_it_answers(server.url)
        for name, key, secret in (("test", server.key, server.secret), ("other", server.other_key, server.other_secret)):
            user = ("user", "create", f"--uid={name}", f"--display-name={name}", f"--access-key={key}", f"--secret-key={secret}")
            self._ceph("radosgw-admin", *user)
        return server

    def _config(self, fsid: str, address: str, plain: int, tls: int) -> str:
        d = self.data
        frontend = f"beast endpoint=127.0.0.1:{plain} ssl_endpoint=127.0.0.1:{tls} ssl_certificate={d}/tls.pem tcp_nodelay=1"
        general = {
            "fsid": fsid, "mon host": address, "keyring": f"{d}/keyring", "public network": "127.0.0.0/8",
            "run dir": d, "admin socket": "", "log file": f"{d}/$name.log", "mon data": f"{d}/mon", "osd data": f"{d}/osd",
            "osd pool default size": 1, "osd pool default min size": 1, "osd pool default pg num": 1, "osd pool default pgp num": 1,
            "osd pool default pg autoscale mode": "off", "osd crush chooseleaf type": 0, "mon allow pool size one": "true",
            "mon data avail warn": 1, "mon data avail crit": 1,
            "bluestore block size": 8 << 30, "bluestore block create": "true", "osd memory target": 1 << 30,
        }  # fmt: skip
        gateway = {"rgw frontends": frontend, "rgw dns name": "localhost", "rgw data": d}
        lines = ["[global]", *(f"{k} = {v}" for k, v in general.items())]
        return "\n".join([*lines, "[client.rgw.a]", *(f"{k} = {v}" for k, v in gateway.items()), ""])

    def _certificate(self) -> None:
        key, crt = self.data / "tls.key", self.data / "tls.crt"
        self._call(
            "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "30",
            "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-keyout", str(key), "-out", str(crt),
        )  # fmt: skip
        (self.data / "tls.pem").write_text(key.read_text() + crt.read_text())

    def _keyring(self) -> None:
        ring = f"{self.data}/keyring"
        self._call("ceph-authtool", "--create-keyring", ring, "--gen-key", "-n", "mon.", "--cap", "mon", "allow *")
        caps = [word for service in ("mon", "osd", "mgr") for word in ("--cap", service, "allow *")]
        for name in ("client.admin", "osd.0", "client.rgw.a"):
            self._call("ceph-authtool", ring, "--gen-key", "-n", name, *caps)

    def _ceph(self, program: str, *args: str) -> None:
        self._call(program, "-c", str(self.config), *args)

    def _call(self, *command: str) -> None:
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL)

    def _daemon(self, program: str, *args: str) -> None:
        libc, keeper = ctypes.CDLL(None), os.getpid()

        def die_with_keeper() -> None:
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != keeper:
                os._exit(1)

        self.daemons.append(subprocess.Popen([program, "-c", str(self.config), "-f", *args], preexec_fn=die_with_keeper))

    def _wait_until_it_answers(self, url: str) -> None:
        deadline = time.monotonic() + START_LIMIT
        while True:
            try:
                urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=5).close()
                return
            except (urllib.error.URLError, OSError):
                if self.daemons[-1].poll() is not None or time.monotonic() > deadline:
                    raise
                time.sleep(0.1)


if __name__ == "__main__":
    if sys.argv[1] == "hold":
        with joined(Path(sys.argv[2])) as held:
            print(held, flush=True)
            signal.pause()
    else:
        Keeper(Path(sys.argv[1])).run()
