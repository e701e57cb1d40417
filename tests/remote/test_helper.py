"""The helper process: it lives and dies with its process, forks do no harm, and what it says is whole."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from forebay import errors
from forebay._model import Span
from forebay.remote import RemoteOptions
from forebay.remote.base import AttemptFailed, Trouble
from forebay.remote.filesystems import FilesystemRemote, helper
from forebay.testing import MemorySink, ScriptedServer
from tests.processes import fork, in_child
from tests.servers.rgw import RgwServer, rgw_server  # noqa: F401 (a fixture)

fsspec = pytest.importorskip("fsspec")

PART = 64 << 10
BODY = random.Random(1).randbytes(20 * PART + 17)
OPTIONS = RemoteOptions(part=PART, backoff=0.01, read_timeout=20, attempts=3)
HANG = 30.0


@pytest.fixture
def http() -> FilesystemRemote:
    pytest.importorskip("aiohttp")
    return FilesystemRemote(fsspec.filesystem("http"), OPTIONS)


def helper_pid() -> int:
    assert helper._helper._process is not None
    return helper._helper._process.pid


def is_gone(pid: int, within: float = HANG) -> bool:
    """Whether a process, of ours or not, ends in time. A zombie has ended."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([fd], [], [], within)[0])
    finally:
        os.close(fd)


@contextlib.contextmanager
def script(text: str, *args: str, **more: Any) -> Iterator[subprocess.Popen[str]]:
    """A Python process; killed at the end if it still runs."""
    with subprocess.Popen(
        [sys.executable, "-c", text, *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **more
    ) as process:
        try:
            yield process
        finally:
            process.kill()


# -- forks -----------------------------------------------------------------------------------------------------------


def hammer(remote: FilesystemRemote, url: str, seed: int) -> int:
    """Read and compare many ranges; the pid of the helper that gave them."""
    for at in random.Random(seed).sample(range(len(BODY) - 5000), 30):
        assert remote.read(url, Span(at, 5000)) == BODY[at : at + 5000]
    return helper_pid()


def at_once(remote: FilesystemRemote, url: str) -> None:
    sink = MemorySink()
    remote.fetch(url, sink)
    assert sink.data == BODY
    ours = helper_pid()
    children = [fork(lambda seed=seed: hammer(remote, url, seed)) for seed in (1, 2)]
    assert hammer(remote, url, 3) == ours
    theirs = [child.result() for child in children]
    assert len({ours, *theirs}) == 3
    assert all(is_gone(pid) for pid in theirs)


def test_s17_fsspec_in_parent_and_children_at_once(http: FilesystemRemote, server: ScriptedServer) -> None:
    at_once(http, server.put("/a", BODY))


@pytest.fixture
def key(rgw_server: RgwServer) -> str:  # noqa: F811
    client, bucket = rgw_server.client(), f"forks-{uuid.uuid4().hex[:12]}"
    client.create_bucket(Bucket=bucket)
    client.put_object(Bucket=bucket, Key="a", Body=BODY)
    return f"{bucket}/a"


def test_s17_s3fs_in_parent_and_children_at_once(rgw_server: RgwServer, key: str) -> None:  # noqa: F811
    s3fs = pytest.importorskip("s3fs")
    made = s3fs.S3FileSystem(key=rgw_server.key, secret=rgw_server.secret, endpoint_url=rgw_server.url)
    at_once(FilesystemRemote(made, OPTIONS), f"s3://{key}")


def test_s17_pyarrow_in_parent_and_children_at_once(rgw_server: RgwServer, key: str) -> None:  # noqa: F811
    arrow = pytest.importorskip("pyarrow.fs")
    made = arrow.S3FileSystem(access_key=rgw_server.key, secret_key=rgw_server.secret, endpoint_override=rgw_server.url, region="us-east-1")
    at_once(FilesystemRemote(made, OPTIONS), key)


def test_s17_a_fork_while_threads_fetch(http: FilesystemRemote, server: ScriptedServer) -> None:
    url, other = server.put("/a", BODY, rate=4e6), server.put("/b", BODY)
    started, failed = threading.Event(), []

    class Sink(MemorySink):
        def write(self, offset: int, data: Any) -> None:
            started.set()
            super().write(offset, data)

    def fetch() -> None:
        sink = Sink()
        http.fetch(url, sink)
        if sink.data != BODY:
            failed.append(sink)

    threads = [threading.Thread(target=fetch) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert started.wait(HANG)
    child = fork(lambda: hammer(http, other, 1))
    for thread in threads:
        thread.join()
    assert child.result() != helper_pid()
    assert failed == []


# -- life and death --------------------------------------------------------------------------------------------------

TALK = """
import os, sys, time
import fsspec
from forebay._model import Span
from forebay.remote import filesystems
from forebay.remote.filesystems import helper
remote = filesystems.FilesystemRemote(fsspec.filesystem("http"))
remote.read(sys.argv[1], Span(0, 1))
print(helper._helper._process.pid, flush=True)
"""


@pytest.mark.parametrize("end", ["killed", "killed with a child", "regular"])
def test_the_helper_dies_with_its_process(server: ScriptedServer, end: str) -> None:
    pytest.importorskip("aiohttp")
    after = {
        "killed": "time.sleep(60)",
        "killed with a child": "print(os.fork() or '', flush=True); time.sleep(60)",
        "regular": "",
    }[end]
    with script(TALK + after, server.put("/a", BODY)) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        child = 0
        try:
            if end == "killed with a child":
                child = next(int(line) for line in process.stdout if line.strip())
            if end != "regular":
                process.kill()
            assert is_gone(pid)
            if end == "regular":
                assert process.communicate()[1] == ""
                assert process.returncode == 0
        finally:
            if child:
                os.kill(child, signal.SIGKILL)


def test_the_helper_outlives_the_thread_that_started_it(http: FilesystemRemote, server: ScriptedServer) -> None:
    url = server.put("/a", BODY)

    def work() -> bool:
        thread = threading.Thread(target=http.read, args=(url, Span(0, 1)))
        thread.start()
        thread.join()
        first = helper_pid()
        return http.read(url, Span(0, 5)) == BODY[:5] and helper_pid() == first and not is_gone(first, 0)

    assert in_child(work)


def test_another_takes_the_place_of_one_that_was_killed(http: FilesystemRemote, server: ScriptedServer) -> None:
    url = server.put("/a", BODY)
    assert http.read(url, Span(0, 5)) == BODY[:5]
    first = helper_pid()
    os.kill(first, signal.SIGKILL)
    assert is_gone(first)
    assert http.read(url, Span(5, 5)) == BODY[5:10]
    assert helper_pid() != first


def test_a_fetch_goes_on_when_its_helper_is_killed(server: ScriptedServer) -> None:
    pytest.importorskip("aiohttp")
    body = os.urandom(8 << 20)
    http = FilesystemRemote(fsspec.filesystem("http"), replace(OPTIONS, part=len(body)))  # one range, and more than a socket holds
    url = server.put("/a", body)

    class Sink(MemorySink):
        killed = 0

        def write(self, offset: int, data: Any) -> None:
            super().write(offset, data)
            if not self.killed:
                self.killed = helper_pid()
                os.kill(self.killed, signal.SIGKILL)

    sink = Sink()
    transfer = http.fetch(url, sink)
    assert sink.data == body
    assert transfer.retries > 0
    assert helper_pid() != sink.killed


def test_nothing_is_started_for_what_is_asked_here() -> None:
    def work() -> bool:
        fsspec.filesystem("memory").pipe_file("/helper/a", b"x")
        return FilesystemRemote().read("memory://helper/a", Span(0, 1)) == b"x" and helper._helper._process is None

    assert in_child(work)


def test_the_helper_writes_no_file(server: ScriptedServer, tmp_path: Path) -> None:
    pytest.importorskip("aiohttp")
    with script(
        TALK + "sys.stdin.read()", server.put("/a", BODY), stdin=subprocess.PIPE, cwd=tmp_path, env={**os.environ, "TMPDIR": str(tmp_path)}
    ) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        opened = {os.path.realpath(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")}
        assert [path for path in opened if path.startswith(str(tmp_path))] == []
    assert list(tmp_path.iterdir()) == []


# -- what takes too long -----------------------------------------------------------------------------------------------


@pytest.mark.rotates
def test_s26_a_stall_ends_in_time(server: ScriptedServer) -> None:
    pytest.importorskip("aiohttp")
    options = RemoteOptions(part=PART, backoff=0.01, read_timeout=1.5, attempts=2)
    remote = FilesystemRemote(fsspec.filesystem("http"), options)
    url = server.put("/a", BODY)
    assert remote.read(url, Span(0, 1)) == BODY[:1]
    server.put("/a", BODY, stall_after=10)
    began = time.monotonic()
    with pytest.raises(errors.RemoteTimeout, match=r"/a: nothing came for too long, after 2 attempts") as caught:
        remote.read(url, Span(0, PART))
    assert time.monotonic() - began < 30
    assert caught.value.attempts == 2


STALL = """
import sys, fsspec
from forebay.remote.filesystems import FilesystemRemote
from forebay.testing import MemorySink
class Sink(MemorySink):
    def begin(self, info):
        print("begun", flush=True)
        return super().begin(info)
try:
    FilesystemRemote(fsspec.filesystem("http")).fetch(sys.argv[1], Sink())
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


def test_ctrl_c_is_prompt(server: ScriptedServer) -> None:
    pytest.importorskip("aiohttp")
    stalled = threading.Event()
    server.on_request = lambda request: stalled.set() if request.method == "GET" else None
    with script(STALL, server.put("/a", BODY, stall_after=10), start_new_session=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        assert stalled.wait(HANG)
        began = time.monotonic()
        os.killpg(process.pid, signal.SIGINT)
        assert process.stdout.readline() == "interrupted\n"
        assert time.monotonic() - began < 15
        assert process.communicate()[1] == ""


# -- the wire ----------------------------------------------------------------------------------------------------------


def test_messages_are_whole_or_an_error() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, ours.makefile("rb") as file:
        big = bytes(range(256)) * 4000
        sender = threading.Thread(target=helper.send, args=(theirs, helper.DATA, big))
        sender.start()
        assert helper.receive(file) == (helper.DATA, big)
        sender.join()
        helper.send(theirs, helper.END)
        assert helper.receive(file) == (helper.END, b"")
        theirs.sendall(helper.HEADER.pack(helper.DATA, 10) + b"short")
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises(EOFError):
            helper.receive(file)


class Foreign(Exception):
    def __init__(self, text: str, status: int | None = None, cause: Exception | None = None) -> None:
        super().__init__(text)
        self.status, self.__cause__ = status, cause


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


class NoCredentialsError(Exception): ...


MEANINGS: list[tuple[Exception, type[Exception], bool]] = [
    (FileNotFoundError("x"), errors.NotFound, False),
    (NotADirectoryError("x"), errors.NotFound, False),
    (IsADirectoryError("x"), errors.NotFound, False),
    (PermissionError("x"), errors.AccessDenied, False),
    (NoCredentialsError("x"), errors.AccessDenied, False),
    (TimeoutError("x"), errors.RemoteTimeout, True),
    (ConnectionResetError("x"), errors.RemoteUnavailable, True),
    (OSError("x"), errors.RemoteUnavailable, True),
    (Foreign("x", 403), errors.AccessDenied, False),
    (Foreign("x", 404), errors.NotFound, False),
    (Foreign("x", 503), errors.RemoteUnavailable, True),
    (Foreign("x", 400), errors.RemoteUnavailable, False),
    (caused(FileNotFoundError("x"), Foreign("x", 503)), errors.RemoteUnavailable, True),
    (caused(FileNotFoundError("x"), Foreign("x", 404)), errors.NotFound, False),
    (caused(FileNotFoundError("x"), Foreign("x")), errors.NotFound, False),
    (caused(FileNotFoundError("x"), OSError("it does not exist")), errors.NotFound, False),
    (caused(FileNotFoundError("x"), TimeoutError("x")), errors.RemoteTimeout, True),
    (caused(FileNotFoundError("x"), ConnectionRefusedError(errno.ECONNREFUSED, "x")), errors.RemoteUnavailable, True),
    (caused(FileNotFoundError("x"), OSError(errno.EHOSTUNREACH, "x")), errors.RemoteUnavailable, True),
    (ValueError("x"), errors.RemoteError, False),
    (errors.RemoteProtocolError("x"), errors.RemoteProtocolError, False),
]


@pytest.mark.parametrize(
    ("text", "trouble"),
    [
        ("AWS Error NETWORK_CONNECTION during HeadObject operation: curlCode: 7, Could not connect to server", Trouble.REFUSED),
        ("AWS Error NETWORK_CONNECTION during HeadObject operation: curlCode: 6, Could not resolve host: x", Trouble.NO_NAME),
        ("UNAVAILABLE: PerformWork() - CURL error [7]=Couldn't connect to server", Trouble.REFUSED),
        ("AWS Error NETWORK_CONNECTION during HeadObject operation: curlCode: 77, Problem with the SSL CA cert", None),
    ],
)
def test_hosts_that_refuse_pyarrow_are_recognized(text: str, trouble: Trouble | None) -> None:
    failed = helper.failed_by(OSError(text))
    assert isinstance(failed, AttemptFailed)
    assert failed.trouble == trouble


@pytest.mark.parametrize(("error", "means", "again"), MEANINGS, ids=lambda value: repr(value))
def test_what_a_filesystem_raises_has_a_meaning(error: Exception, means: type[Exception], again: bool) -> None:
    trouble = helper.failed_by(error)
    assert isinstance(trouble, AttemptFailed)
    assert (trouble.error, trouble.retryable) == (means, again)
    told = helper.from_wire(helper.to_wire(trouble))
    assert isinstance(told, AttemptFailed)
    assert (told.error, told.retryable, told.reason, told.status) == (trouble.error, trouble.retryable, trouble.reason, trouble.status)


@pytest.mark.parametrize(("url", "named"), [("gs://b/a", "gs://"), ("GS://b/a", "gs://"), ("b/a", "this filesystem")])
def test_a_package_that_a_client_wants_is_named(url: str, named: str) -> None:
    found = helper.failed_by(ImportError("Please install gcsfs to access Google Storage"), url)
    assert isinstance(found, errors.MissingExtra)
    assert str(found).startswith(f"{named} needs a package of its own beside the extra 'fsspec' (ImportError: Please install gcsfs")
