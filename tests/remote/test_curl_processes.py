"""HTTP transfers by libcurl in many processes and threads: forks at any moment, Ctrl-C, the end of a process, memory."""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay.remote.base import AttemptFailed
from forebay.remote.http import loop
from forebay.remote.http.loop import start
from forebay.remote.http.transfers import HttpTransfer, TransferRequest
from forebay.testing import ScriptedServer
from tests.processes import ended, forked
from tests.remote.responses import whole
from tests.remote_objects import connections
from tests.servers.nginx import Nginx
from tests.servers.nginx import nginx as running

BODIES = [random.Random(n).randbytes(50_000 * n + n) for n in range(8)]


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nginx]:
    with running(tmp_path_factory.mktemp("nginx") / "tls", tls=True) as found:
        for number, body in enumerate(BODIES):
            found.put(str(number), body)
        yield found


def request(url: str, **more: object) -> TransferRequest:
    scheme, _, rest = url.partition("://")
    host, slash, path = rest.partition("/")
    return TransferRequest("GET", f"{scheme}://{host}", slash + path, {}, **more)  # type: ignore[arg-type]


def read_all(base: str, rounds: int) -> bool:
    """Whether all bodies are what they should be, again and again, one after the other and side by side."""
    for _ in range(rounds):
        for number, body in enumerate(BODIES):
            if whole(start(HttpTransfer(request(f"{base}/{number}"), limit=64 << 10))).body != body:
                return False
        incomings = [start(HttpTransfer(request(f"{base}/{number}"))) for number in range(len(BODIES))]
        if [whole(incoming).body for incoming in incomings] != BODIES:
            return False
    return True


@pytest.fixture(params=["http", "https"])
def base(request: pytest.FixtureRequest, server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where the bodies are served: by the scripted server, and by nginx over TLS."""
    if request.param == "https":
        nginx: Nginx = request.getfixturevalue("tls")
        monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(nginx.ca))
        return nginx.url
    for number, body in enumerate(BODIES):
        server.put(f"/{number}", body)
    return server.url


def test_parent_and_children_read_at_once_after_a_fork(base: str) -> None:
    """Connections are idle and in use when the process forks: no side may read what the other asked for."""
    assert read_all(base, 1)
    busy = [threading.Thread(target=read_all, args=(base, 6)) for _ in range(2)]
    for thread in busy:
        thread.start()
    children = [forked(lambda: read_all(base, 2)) for _ in range(6)]
    assert read_all(base, 2)
    assert [ended(pid) for pid in children] == [0] * 6
    for thread in busy:
        thread.join()


FREEING = """
import gc, os, sys
from forebay.remote.http import loop
from forebay.remote.base import AttemptFailed
from forebay.remote.http.transfers import TransferRequest
from forebay.remote.http.loop import start
from forebay.remote.http.transfers import HttpTransfer
def asked(name):
    return TransferRequest("GET", sys.argv[1], name, {})
def body_of(incoming):
    data = b""
    while piece := incoming.read(1 << 20):
        data += piece
    return data
incoming = start(HttpTransfer(asked("/7"), limit=16 << 10))
incoming.wait_for_head()
for other in [start(HttpTransfer(asked("/1"))) for _ in range(4)]:
    body_of(other)
resolved = [start(HttpTransfer(TransferRequest("GET", f"http://no-such-host-{number}.invalid", "/", {}))) for number in range(4)]
for child in range(4):
    pid = os.fork()
    if pid == 0:
        for each in (incoming, *resolved):
            each.close()
        del incoming, resolved, each
        if child % 2:
            body_of(start(HttpTransfer(asked("/1"))))
        gc.collect()
        sys.exit(7)  # as a program ends, with all that Python frees then
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
print(len(body_of(incoming)), len(loop._current.sockets))
for each in resolved:
    try:
        each.wait_for_head()
    except AttemptFailed as failed:
        assert "resolved" in failed.reason
"""


def test_a_child_that_frees_all_disturbs_no_transfer_of_its_parent(base: str) -> None:
    """Freeing a handle in the child would send a TLS goodbye on the parent's connection, or wait for threads that are not there."""
    words = [sys.executable, "-W", "ignore:This process:DeprecationWarning", "-c", FREEING, base]  # Python 3.12 and later, of each fork
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split()[0] == str(len(BODIES[7]))


def test_a_child_holds_no_connection_of_its_parent(server: ScriptedServer) -> None:
    """So that a server sees when the parent closes one."""
    incoming = start(HttpTransfer(request(server.put("/a", bytes(1 << 20), stall_after=1000))))
    incoming.wait_for_head()
    assert server.stalled.wait(60)
    assert list_sockets()
    assert ended(forked(lambda: list_sockets() == [])) == 0
    reading, writing = os.pipe()
    child = forked(lambda: os.read(reading, 1) == b"x")
    incoming.close()
    server.go.set()
    while connections(server):
        time.sleep(0.01)
    os.write(writing, b"x")
    assert ended(child) == 0
    os.close(reading)
    os.close(writing)


def list_sockets() -> list[int]:
    """The descriptors of libcurl's sockets that are still what they were."""
    running = loop._current
    noted = dict(running.sockets) if running is not None else SOCKETS
    SOCKETS.update(noted)
    inodes = {f"socket:[{inode}]" for inode in noted.values()}
    return [int(name) for name in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{name}") and link(name) in inodes]


def link(name: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{name}")
    except OSError:  # the descriptor of the listing itself
        return ""


SOCKETS: dict[int, int] = {}


def test_a_descriptor_that_libcurl_closed_is_not_touched(server: ScriptedServer, tmp_path: Path) -> None:
    """Its number may be another file's since."""
    transfer = start(HttpTransfer(request(server.put("/a", b"12345"))))
    transfer.wait_for_head()
    assert transfer.read(10) == b"12345"
    running = loop._current
    assert running is not None
    with open(tmp_path / "ours", "w+b", buffering=0) as ours:
        running.sockets[ours.fileno()] = 1

        def work() -> bool:
            ours.write(b"still ours")
            return (tmp_path / "ours").read_bytes() == b"still ours"

        assert ended(forked(work)) == 0
        del running.sockets[ours.fileno()]


def test_a_child_that_runs_no_fork_hook(base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a fork by C: only the process id tells."""
    assert read_all(base, 1)
    monkeypatch.setattr("forebay.remote.http.loop._Loop.leave_to_parent", lambda loop: None)
    hook = loop._current

    def work() -> bool:
        loop._current = hook
        return read_all(base, 2)

    child = forked(work)
    assert read_all(base, 2)
    assert ended(child) == 0


def test_a_child_waits_for_no_thread_of_its_parent(server: ScriptedServer) -> None:
    """The loop may be about to hand over bytes when another thread forks."""
    incoming, held, done = (
        start(HttpTransfer(request(server.put("/a", bytes(1 << 20), stall_after=1000)))),
        threading.Event(),
        threading.Event(),
    )
    incoming.wait_for_head()

    def hold() -> None:
        with incoming._changed:
            held.set()
            done.wait(60)

    holder = threading.Thread(target=hold)
    holder.start()
    assert held.wait(60)

    def work() -> bool:
        incoming.abort()
        incoming.close()
        with pytest.raises(AttemptFailed, match="parent"):
            incoming.read(1)
        return True

    try:
        assert ended(forked(work), limit=10) == 0
    finally:
        done.set()
        holder.join()
        incoming.close()


def test_libcurls_objects_of_the_parent_are_never_freed_in_a_child() -> None:
    def work() -> bool:
        running = loop._Loop()
        freed = weakref.finalize(running, list)
        running.stop()  # a child has no thread of its parent's, which would hold the loop
        running.leave_to_parent()
        del running
        gc.collect()
        return freed.alive

    assert ended(forked(work)) == 0


def test_a_process_without_descriptors_is_told_so(base: str) -> None:
    asked = TransferRequest("GET", base, "/1", {})

    def work() -> bool:
        own = loop._current
        loop._current = None  # as in a process that has requested nothing yet
        most = max(map(int, os.listdir("/proc/self/fd")))
        taken = [os.dup(0) for _ in range(most)]
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(taken) + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        try:
            with pytest.raises(AttemptFailed, match="cannot begin a request"):
                start(HttpTransfer(asked))
            return True
        finally:
            loop._current = own

    assert ended(forked(work)) == 0


def test_spawned_processes(base: str) -> None:
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        assert pool.starmap(read_all, [(base, 2)] * 2) == [True] * 2


# -- Ctrl-C, and the end of a process ------------------------------------------------------------------------------------

WAITING = """
import sys
from forebay.remote.http.transfers import TransferRequest
from forebay.remote.http.loop import start
from forebay.remote.http.transfers import HttpTransfer
asked = TransferRequest("GET", sys.argv[1], "/a", {}, read_timeout=60)
try:
    others = [start(HttpTransfer(asked)) for _ in range(int(sys.argv[2]))]
    incoming = start(HttpTransfer(asked))
    incoming.wait_for_head()
    while incoming.read(1 << 20, 1 << 20):
        continue
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


@pytest.mark.parametrize("others", [0, 4])
@pytest.mark.parametrize("after", [0, 1000])
def test_ctrl_c_ends_a_stalled_transfer(server: ScriptedServer, others: int, after: int) -> None:
    server.put("/a", bytes(1 << 20), stall_after=after)
    command = [sys.executable, "-c", WAITING, server.url, str(others)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert server.stalled.wait(60)
        sent = time.monotonic()
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=60) == ("interrupted\n", "")
        assert process.returncode == 0
        assert time.monotonic() - sent < 20


LEFT = """
import sys, threading
from forebay.remote.base import CallAborted
from forebay.remote.http.transfers import TransferRequest
from forebay.remote.http.loop import start
from forebay.remote.http.transfers import HttpTransfer
incoming = start(HttpTransfer(TransferRequest("GET", sys.argv[1], "/a", {}, read_timeout=60)))
incoming.wait_for_head()
def read():
    try:
        incoming.read(1 << 20, 1 << 20)
    except CallAborted:
        print("ended", flush=True)
thread = threading.Thread(target=read, daemon=True)
thread.start()
"""


def test_a_process_ends_while_transfers_run(server: ScriptedServer) -> None:
    server.put("/a", bytes(1 << 20), stall_after=1000)
    done = subprocess.run([sys.executable, "-c", LEFT, server.url], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


# -- memory, and a loop that fails ---------------------------------------------------------------------------------------

MEMORY = """
import resource, sys
from forebay.remote.base import AttemptFailed
from forebay.remote.http.transfers import TransferRequest
from forebay.remote.http.loop import start
from forebay.remote.http.transfers import HttpTransfer
asked = TransferRequest("GET", sys.argv[1], "/0", {"X": "y"})
sent = TransferRequest("PUT", sys.argv[1], "/0", {}, bytes(1 << 16))
gone = TransferRequest("GET", "http://127.0.0.1:1", "/", {})
def heads(request, count):
    for _ in range(0, count, 16):
        for incoming in [start(HttpTransfer(request)) for _ in range(16)]:
            try:
                incoming.wait_for_head()
            except AttemptFailed:
                yield None, b""
            else:
                yield incoming.status, incoming.read(1 << 20, 1 << 20)
def run(count):
    wrong = [1 for status, body in heads(asked, count) if (status, len(body)) != (200, 10000)]
    wrong += [1 for status, body in heads(gone, count // 10) if status is not None]
    wrong += [1 for status, body in heads(sent, count // 100) if status != 405]
    for _ in range(count // 10):
        incoming = start(HttpTransfer(asked))
        incoming.wait_for_head()
        incoming.close()
    return wrong
assert run(2000) == []
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
assert run(10000) == []
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_memory_does_not_grow_with_the_number_of_transfers(tmp_path: Path) -> None:
    """Transfers that end well, that fail, and that are cancelled."""
    with running(tmp_path / "plain") as nginx:
        nginx.put("0", bytes(10_000))
        done = subprocess.run([sys.executable, "-c", MEMORY, nginx.url], capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert int(done.stdout) * 1024 < 4 << 20


def test_a_loop_that_fails_ends_its_transfers_and_is_replaced(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    stalling, good = server.put("/a", bytes(1 << 20), stall_after=1000), server.put("/b", b"12345")
    incoming = start(HttpTransfer(request(stalling)))
    incoming.wait_for_head()
    running = loop._current
    assert running is not None
    running.attend(None)  # type: ignore[arg-type]
    with pytest.raises(AttemptFailed, match="the client failed: AttributeError"):
        while incoming.read(1 << 20, 1 << 20):
            continue
    assert whole(start(HttpTransfer(request(good)))).body == b"12345"
    assert loop._current is not running
