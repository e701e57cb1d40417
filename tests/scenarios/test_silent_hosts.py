"""A host that gave no answer is left alone for some seconds, by all processes of the node."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import forebay
from forebay import errors
from forebay._engine.files import silent_hosts
from forebay.remote import RemoteOptions
from forebay.sources import UrlSource
from tests.servers.raw import RawServer
from tests.servers.raw import raw as raw

OPTIONS = RemoteOptions(connect_timeout=10, read_timeout=10, attempts=1)
IMPATIENT = RemoteOptions(connect_timeout=10, read_timeout=1, attempts=1)
"""For those who are to find a host silent: an answer that comes is waited for as long as a crowded machine may take."""
WELL = b'HTTP/1.1 200 OK\r\nContent-Length: 5\r\nETag: "1"\r\nConnection: close\r\n\r\n12345'


@pytest.fixture(autouse=True)
def longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is crowded takes more than 5 s for less."""
    monkeypatch.setattr(silent_hosts, "PERIOD", 600.0)


def silent(server: RawServer) -> None:
    server.answer = lambda connection, head: server.ended.wait(60) and None


def well(server: RawServer) -> None:
    def answer(connection: socket.socket, head: bytes) -> None:
        if b" /slow" in head:
            server.ended.wait(60)
        else:
            connection.sendall(WELL)

    server.answer = answer


def opened(root: Path, options: RemoteOptions = OPTIONS, **how: object) -> forebay.Cache:
    return forebay.Cache(root, budget=64 << 20, min_free=0, remote_options=options, **how)  # type: ignore[arg-type]


CHILD = """
import sys, forebay
from forebay import errors
from forebay._engine.files import silent_hosts
from forebay.remote import RemoteOptions
silent_hosts.PERIOD = 600.0
options = RemoteOptions(connect_timeout=10, read_timeout=float(sys.argv[3]), attempts=1)
with forebay.Cache(sys.argv[1], remote_options=options) as cache:
    try:
        print(bytes(cache.read(sys.argv[2])).decode())
    except errors.RemoteTimeout as error:
        print("timeout", error.attempts)
"""


def test_a_cold_key_of_a_silent_host(raw: RawServer, tmp_path: Path) -> None:
    silent(raw)
    with opened(tmp_path / "root", IMPATIENT) as cache:
        with pytest.raises(errors.RemoteTimeout, match="nothing came"):
            cache.read(f"{raw.url}/a")
        assert len(raw.requests) == 1
        doors = [
            lambda: cache.read(f"{raw.url}/b"), lambda: cache.local(f"{raw.url}/c"), lambda: cache.open(f"{raw.url}/d"),
            lambda: cache.read(f"{raw.url}/e", bypass=True), lambda: cache.open(f"{raw.url}/f", bypass=True),
            lambda: cache.directory(f"{raw.url}/g/"),
        ]  # fmt: skip
        for door in doors:
            with pytest.raises(errors.RemoteTimeout, match=r"gave no answer .* s ago"):
                door()
        with cache.prefetcher(UrlSource(raw.url, options=IMPATIENT)) as prefetcher, pytest.raises(errors.RemoteTimeout):
            prefetcher.get_lazy("h").get()
        words = [sys.executable, "-c", CHILD, str(cache.path), f"{raw.url}/i", "1"]
        said = subprocess.run(words, capture_output=True, text=True, check=True)
        assert said.stdout == "timeout 0\n"
        pid = os.fork()
        if not pid:
            try:
                cache.read(f"{raw.url}/j")
            except errors.RemoteTimeout:
                os._exit(7)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
        assert len(raw.requests) == 1
        well(raw)
        with opened(tmp_path / "root") as patient:
            assert patient.read(f"{raw.url}/b", refresh=True) == b"12345"  # asks all the same
            assert patient.read(f"{raw.url}/c") == b"12345"  # and what it heard is known


def test_stale_keys_of_a_silent_host(raw: RawServer, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    well(raw)
    with opened(tmp_path / "root", max_age=0) as cache:
        for number in range(50):
            cache.read(f"{raw.url}/{number}")
    silent(raw)
    before = len(raw.requests)
    with opened(tmp_path / "root", IMPATIENT, max_age=0) as cache:
        for _ in range(2):
            for number in range(50):
                assert cache.read(f"{raw.url}/{number}") == b"12345"
        assert len(raw.requests) == before + 1
        assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 1


def test_after_a_while_it_is_asked_again(raw: RawServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    silent(raw)
    with opened(tmp_path / "root", IMPATIENT) as cache, pytest.raises(errors.RemoteTimeout):
        cache.read(f"{raw.url}/a")
    well(raw)
    monkeypatch.setattr(silent_hosts, "PERIOD", 0.0)
    with opened(tmp_path / "root") as cache:
        assert cache.read(f"{raw.url}/a") == b"12345"


def test_attempts_of_one_call_go_on(raw: RawServer, tmp_path: Path) -> None:
    def answer(connection: socket.socket, head: bytes) -> None:
        if len(raw.requests) == 1:
            raw.ended.wait(60)
        connection.sendall(WELL)

    raw.answer = answer
    options = RemoteOptions(connect_timeout=10, read_timeout=1, attempts=8, backoff=0.001)
    with forebay.Cache(tmp_path / "root", budget=64 << 20, min_free=0, remote_options=options) as cache:
        assert cache.read(f"{raw.url}/a") == b"12345"
        assert cache.read(f"{raw.url}/b") == b"12345"


@pytest.mark.rotates
@pytest.mark.parametrize("who", ["thread", "process"])
def test_a_slow_object_does_not_make_its_host_silent(raw: RawServer, tmp_path: Path, who: str) -> None:
    well(raw)
    options = RemoteOptions(connect_timeout=10, read_timeout=10 if who == "process" else 4, attempts=1)
    raised: list[Exception] = []
    with forebay.Cache(tmp_path / "root", budget=64 << 20, min_free=0, remote_options=options) as cache:

        def read() -> None:
            try:
                cache.read(f"{raw.url}/slow")
            except errors.RemoteTimeout as error:
                raised.append(error)

        reading = threading.Thread(target=read)
        reading.start()
        while not any(b" /slow" in head for head in list(raw.requests)):
            time.sleep(0.01)
        if who == "thread":
            assert cache.read(f"{raw.url}/a") == b"12345"
        else:
            words = [sys.executable, "-c", CHILD, str(cache.path), f"{raw.url}/a", "10"]
            said = subprocess.run(words, capture_output=True, text=True, check=True)
            assert said.stdout == "12345\n"
        reading.join()
        assert len(raised) == 1
        assert cache.read(f"{raw.url}/b") == b"12345"


def test_a_host_that_refuses_or_fails_is_not_silent(raw: RawServer, tmp_path: Path) -> None:
    raw.answer = lambda connection, head: connection.sendall(b"HTTP/1.1 503 No\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
    with opened(tmp_path / "root") as cache:
        for _ in range(2):
            with pytest.raises(errors.RemoteUnavailable):
                cache.read(f"{raw.url}/a")
        assert len(raw.requests) == 2


# -- the table -----------------------------------------------------------------------------------------------------------


def is_left_alone(raw: RawServer, root: Path, **how: object) -> bool:
    """Whether a process that is as impatient as the first one does not ask the host."""
    before = len(raw.requests)
    with opened(root, IMPATIENT, **how) as cache, pytest.raises(errors.RemoteTimeout):
        cache.read(f"{raw.url}/left")
    return len(raw.requests) == before


def test_an_impatient_process_tells_impatient_ones_only(raw: RawServer, tmp_path: Path) -> None:
    silent(raw)
    assert not is_left_alone(raw, tmp_path / "root")
    assert is_left_alone(raw, tmp_path / "root")
    well(raw)
    with opened(tmp_path / "root") as patient:
        assert patient.read(f"{raw.url}/a") == b"12345"


@pytest.mark.parametrize("what", ["random", "short", "empty", "fifo", "link", "directory"])
def test_what_lies_there_is_not_believed(raw: RawServer, tmp_path: Path, what: str) -> None:
    silent(raw)
    assert not is_left_alone(raw, tmp_path / "root")
    path = tmp_path / "root" / "hosts"
    data = path.read_bytes()
    path.unlink()
    match what:
        case "random":
            path.write_bytes(os.urandom(len(data)))
        case "short":
            path.write_bytes(data[:100])
        case "empty":
            path.write_bytes(b"")
        case "fifo":
            os.mkfifo(path)
        case "link":
            (tmp_path / "elsewhere").write_bytes(data)
            path.symlink_to(tmp_path / "elsewhere")
        case "directory":
            path.mkdir()
    with opened(tmp_path / "root", IMPATIENT) as cache:
        with pytest.raises(errors.RemoteTimeout, match="nothing came"):
            cache.read(f"{raw.url}/a")
        with pytest.raises(errors.RemoteTimeout, match="gave no answer"):
            cache.read(f"{raw.url}/b")
    if what == "link":
        assert (tmp_path / "elsewhere").read_bytes() == data


def test_in_a_root_that_is_read_only_a_process_knows_it_by_itself(raw: RawServer, tmp_path: Path) -> None:
    opened(tmp_path / "root").close()
    silent(raw)
    with forebay.Cache(tmp_path / "root", read_only=True, remote_options=IMPATIENT) as cache:
        for words in ("nothing came", "gave no answer"):
            with pytest.raises(errors.RemoteTimeout, match=words):
                cache.read(f"{raw.url}/a")
    assert not (tmp_path / "root" / "hosts").exists()
