"""Scenario 8: who waits says for what and for whom, and goes on or raises at its time-out. Barriers and locks: test_claims_together.py."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import forebay
from forebay.testing import ScriptedServer
from tests.harness import writer_lock

MiB = 1 << 20


def names(said: list[str], key: str, pid: int) -> bool:
    """Whether a line names the key, the holder with its host, and how long it has been."""
    return any(key in line and f"{pid} on {socket.gethostname()}" in line and " s" in line for line in said)


@pytest.mark.rotates
@pytest.mark.parametrize("end", [signal.SIGCONT, signal.SIGKILL])
def test_s08_a_stopped_download(
    root: Path, server: ScriptedServer, children: Callable[..., Any], flag: Callable[[], Any], warnings: Any, end: signal.Signals
) -> None:
    body = os.urandom(3 * MiB)
    url = server.put("/x.bin", body, stall_after=2 * MiB, stalls=1)

    came = flag()

    def fetch() -> None:
        with forebay.Cache(root) as cache:
            cache.pull(url, on_progress=lambda step: came.set() if step.done > MiB else None)

    def patient() -> tuple[bytes, list[str]]:
        with warnings() as said, forebay.Cache(root) as cache:
            return bytes(cache.read(url)), said

    def impatient_reader() -> tuple[bytes, list[str]]:
        with warnings() as said, forebay.Cache(root) as cache:
            return bytes(cache.read(url, timeout=1)), said

    def impatient_stream() -> bytes:
        with forebay.Cache(root, timeout=1) as cache, cache.open(url) as file:
            return file.read()

    def impatient_path() -> forebay.errors.WaitTimeout:
        with forebay.Cache(root, timeout=1) as cache:
            try:
                cache.local(url)
            except forebay.errors.WaitTimeout as error:
                return error
        raise AssertionError("no WaitTimeout")

    holder = children(fetch)
    assert came.wait(60)
    holder.stop()
    waiting = children(patient)
    readers = children(impatient_reader), children(impatient_stream), children(impatient_path)
    data, said = readers[0].result()
    assert data == body  # it went on alone
    assert names(said, url, holder.pid)
    assert readers[1].result() == body
    error = readers[2].result()
    assert error.what == url
    assert error.waited >= 1
    assert f"process {holder.pid} on {socket.gethostname()}" in error.holder
    assert url in str(error)
    if end == signal.SIGCONT:
        time.sleep(6)  # longer than what is waited in silence
    server.go.set()
    holder.signal(end)
    data, said = waiting.result()
    assert data == body
    assert names(said, url, holder.pid) or end != signal.SIGCONT


def test_s08_a_stopped_function(root: Path, children: Callable[..., Any], flag: Callable[[], Any], warnings: Any) -> None:
    inside = flag()

    def slow() -> None:
        def fn() -> bytes:
            inside.set()
            time.sleep(600)
            return b""

        with forebay.Cache(root) as cache:
            cache.get_or_put("key", fn)

    holder = children(slow)
    assert inside.wait(60)
    holder.stop()
    with warnings() as said, forebay.Cache(root) as cache:
        assert cache.get_or_put("key", lambda: b"mine", timeout=0.5) == b"mine"
    assert names(said, "key", holder.pid)


@pytest.mark.parametrize("end", [signal.SIGSTOP, signal.SIGKILL])
def test_s08_a_process_that_holds_the_writer_lock(
    root: Path, server: ScriptedServer, children: Callable[..., Any], flag: Callable[[], Any], warnings: Any, end: signal.Signals
) -> None:
    inside = flag()
    bodies = [os.urandom(100_000), os.urandom(50_000)]
    old, new = (server.put(f"/{i}.bin", body) for i, body in enumerate(bodies))

    def hold() -> None:
        with forebay.Cache(root) as cache:
            cache.read(old)
            with writer_lock(root):
                inside.set()
                time.sleep(600)

    with forebay.Cache(root, timeout=2) as cache:
        cache.get("nothing")
        holder = children(hold)
        assert inside.wait(60)
        holder.signal(end)
        if end == signal.SIGKILL:
            holder.wait()
        with warnings() as said:
            assert cache.read(old) == bodies[0]
            assert cache.read(new) == bodies[1]
        if end == signal.SIGKILL:
            assert said == []
            assert cache.entry(new) is not None
        else:
            assert any(str(holder.pid) in line for line in said)
            assert server.gets == 2  # what was fetched for the cache is returned
            assert cache.put("key", b"value") is False
        holder.kill()
        assert cache.put("key", b"value") is True


@pytest.mark.rotates
def test_s08_the_command_line_shows_who_is_waited_for(root: Path, server: ScriptedServer, children: Callable[..., Any]) -> None:
    url = server.put("/x.bin", os.urandom(2 * MiB), stall_after=MiB, stalls=1)

    def plain() -> None:
        with forebay.Cache(root) as cache:
            cache.read(url)

    holder = children(plain)
    assert server.stalled.wait(60)
    with subprocess.Popen([sys.executable, "-m", "forebay.cli", "pull", "--root", root, url], stderr=subprocess.PIPE, text=True) as second:
        assert second.stderr is not None
        line = second.stderr.readline()
        server.go.set()
        assert second.wait(60) == 0
    holder.result()
    assert names([line], url, holder.pid)
    assert server.gets == 1


def test_s08_nothing_of_a_framework_is_needed(root: Path, run: Callable[..., Any]) -> None:
    script = """if True:
        import sys, forebay
        with forebay.Cache(sys.argv[1]) as cache:
            assert cache.get_or_put("key", lambda: b"value") == b"value"
        print(sorted({name.partition(".")[0] for name in sys.modules} & {"torch", "numpy", "fsspec", "botocore", "pyarrow", "ray"}))
    """
    assert run(script, root).stdout == "[]\n"
