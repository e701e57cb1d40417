"""One remote in many processes, and calls that are interrupted."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from forebay import remote
from forebay._model import Span
from forebay.remote import RemoteOptions
from forebay.remote.http import HttpRemote, loop
from forebay.testing import MemorySink, ScriptedServer
from tests.processes import ended, forked
from tests.remote_objects import connections

PART = 64 << 10
BODIES = [random.Random(n).randbytes(PART * 3 + n) for n in range(8)]
OPTIONS = RemoteOptions(part=PART, backoff=0.01)


def read_all(http: remote.Remote, urls: list[str], rounds: int) -> bool:
    """Whether whole objects and ranges of them are what they should be, again and again."""
    for turn in range(rounds):
        for url, body in zip(urls, BODIES, strict=True):
            sink = MemorySink()
            http.fetch(url, sink)
            if sink.data != body or http.read(url, Span(turn, 1000)) != body[turn : turn + 1000]:
                return False
    return True


def test_s17_parent_and_children_read_at_once_after_a_fork(server: ScriptedServer) -> None:
    """Connections are idle and in use when the process forks: no side may read what the other asked for."""
    urls = [server.put(f"/{n}", body) for n, body in enumerate(BODIES)]
    http = remote.resolve(urls[0], OPTIONS)
    assert read_all(http, urls, 1)
    busy = [threading.Thread(target=read_all, args=(http, urls, 8)) for _ in range(2)]
    for thread in busy:
        thread.start()
    children = [forked(lambda: read_all(http, urls, 3)) for _ in range(4)]
    assert read_all(http, urls, 3)
    assert [ended(pid) for pid in children] == [0] * 4
    for thread in busy:
        thread.join()


def test_s17_a_child_that_runs_no_fork_hook(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a fork by C: only the process id tells."""
    urls = [server.put(f"/{n}", body) for n, body in enumerate(BODIES)]
    http = HttpRemote(OPTIONS)
    assert read_all(http, urls, 1)
    inherited = loop._current
    monkeypatch.setattr("forebay.remote.http.loop._Loop.leave_to_parent", lambda loop: None)

    def work() -> bool:
        loop._current = inherited  # which the hook has dropped
        return read_all(http, urls, 3)

    child = forked(work)
    assert read_all(http, urls, 3)
    assert ended(child) == 0


def test_a_fork_closes_the_parents_connections_in_the_child_only(server: ScriptedServer) -> None:
    url, http = server.put("/a", b"small: one connection"), HttpRemote(OPTIONS)
    http.fetch(url, MemorySink())
    port = int(server.url.rpartition(":")[2])

    def held() -> list[int]:
        found = []
        for name in os.listdir("/proc/self/fd"):
            try:
                with socket.socket(fileno=os.dup(int(name))) as sock:
                    found += [int(name)] if sock.family == socket.AF_INET and sock.getpeername()[1] == port else []
            except OSError:
                continue
        return found

    assert held()
    assert ended(forked(lambda: held() == [])) == 0
    before = connections(server)
    http.fetch(url, MemorySink())
    assert connections(server) == before


# -- Ctrl-C --------------------------------------------------------------------------------------------------------------

SOON = 20.0
"""Seconds: less than the shortest pause, 30 s, and the time-out, 60 s."""
INTERRUPTED = """
import sys, threading
from forebay.remote import RemoteOptions, base
from forebay.remote.http import HttpRemote, loop
from forebay.testing import MemorySink
base.MAX_PAUSE = 60
http = HttpRemote(RemoteOptions(part=65536, read_timeout=60, streams=int(sys.argv[2]), backoff=60))
print("ready", flush=True)
try:
    http.fetch(sys.argv[1], MemorySink())
except KeyboardInterrupt:
    print("interrupted", [t.name for t in threading.enumerate() if t.name.startswith("forebay")], flush=True)
"""


def interrupted(url: str, streams: int, ready: threading.Event) -> tuple[float, str]:
    """Seconds from SIGINT to the end of a process that fetches ``url``, and what it said. ``ready``: when to send it."""
    command = [sys.executable, "-c", INTERRUPTED, url, str(streams)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert ready.wait(60)
        sent = time.monotonic()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
        # Pauses are drawn by lot, and one of many seconds is told.
        assert (process.returncode, [line for line in err.splitlines() if "; attempt " not in line]) == (0, [])
        return time.monotonic() - sent, out


@pytest.mark.parametrize("streams", [1, 4])
def test_ctrl_c_ends_a_stalled_fetch_within_a_second(server: ScriptedServer, streams: int) -> None:
    url, all_stalled = server.put("/a", bytes(PART * 40), stall_after=PART // 2), threading.Event()
    count = threading.Semaphore(0)
    server.on_request = lambda request: count.release()

    def watch() -> None:
        for _ in range(streams):
            count.acquire()
        server.stalled.wait()
        all_stalled.set()

    watching = threading.Thread(target=watch)
    watching.start()
    took, said = interrupted(url, streams, all_stalled)
    watching.join()
    assert said == "ready\ninterrupted []\n"
    assert took < SOON


def test_ctrl_c_ends_a_pause_between_attempts(server: ScriptedServer) -> None:
    asked = threading.Event()
    server.on_request = lambda request: asked.set()
    took, said = interrupted(server.put("/a", b"x", statuses=[503] * 9), 4, asked)
    assert said == "ready\ninterrupted []\n"
    assert took < SOON


def test_ctrl_c_before_the_transfers_are_woken_loses_no_later_wake_up(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    url, http, write = server.put("/a", b"x"), HttpRemote(OPTIONS), os.eventfd_write

    def interrupted(descriptor: int, number: int) -> None:
        monkeypatch.setattr(os, "eventfd_write", write)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "eventfd_write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        while True:  # until the loop sleeps when one begins
            http.stat(url)
    assert http.stat(url).size == 1


# -- memory --------------------------------------------------------------------------------------------------------------

SMALL_MEMORY = """
import os, resource, sys
from forebay.remote.http import HttpRemote, loop
from forebay._model import Span
class Sink:
    partial = None
    def begin(self, info):
        os.ftruncate(fd, info.size)
        return (Span(0, info.size),)
    def write(self, offset, data):
        os.pwrite(fd, data, offset)
fd = os.open(sys.argv[2], os.O_RDWR | os.O_CREAT)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
HttpRemote().fetch(sys.argv[1], Sink())
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_memory_does_not_grow_with_the_object(server: ScriptedServer, tmp_path: Path) -> None:
    """256 MiB in ranges of 8 MiB, four at once."""
    url = server.put("/a", bytes(256 << 20), etag='"zeros"')
    out = subprocess.run([sys.executable, "-c", SMALL_MEMORY, url, tmp_path / "out"], check=True, capture_output=True, text=True).stdout
    assert (tmp_path / "out").stat().st_size == 256 << 20
    assert int(out) * 1024 < 30 << 20
