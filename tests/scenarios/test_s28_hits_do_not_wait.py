"""Scenario 28: a hit takes no lock and makes no system call; a slow writer delays no reader. (Rates are measured by the benchmarks.)"""

from __future__ import annotations

import os
import re
import shutil
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

SCRIPT = """
import os, sys
import forebay
with forebay.Cache(sys.argv[1], max_age="forever") as cache:
    ask = (lambda i: cache.read(sys.argv[3])) if sys.argv[2] == "read" else (lambda i: cache.get(str(i % 100)))
    for i in range(200):
        assert len(ask(i)) == 100_000
    os.path.exists("/begin-of-the-hits")
    for i in range(1000):
        ask(i)
    os.path.exists("/end-of-the-hits")
"""


def traced(trace: Path, *job: object) -> list[str]:
    """The system calls of the job's thousand hits."""
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    strace = ["strace", "-qq", "-o", str(trace), sys.executable, "-c", *map(str, job)]
    done = subprocess.run(strace, capture_output=True, text=True, timeout=100)
    if "ptrace" in done.stderr.lower() and "not permitted" in done.stderr:
        pytest.skip("strace is not permitted here")
    assert done.returncode == 0, done.stderr
    text = trace.read_text()
    return text[text.index("/begin-of-the-hits") : text.index("/end-of-the-hits")].splitlines()[1:-1]


@pytest.mark.parametrize("how", ["read", "get"])
def test_s28_no_system_call(root: Path, tmp_path: Path, server: ScriptedServer, how: str) -> None:
    url = server.put("/x.bin", os.urandom(100_000))
    with forebay.Cache(root) as cache:
        cache.read(url)
        for i in range(100):
            cache.put(str(i), os.urandom(100_000))
    trace = tmp_path / "trace"
    between = traced(trace, SCRIPT, root, how, url)
    calls = [line for line in between if not re.match(r"(brk|mmap|munmap|madvise|mremap)\(", line)]  # Python's own memory
    assert len(calls) <= 12, calls[:20]  # the look for evictions, once a second at most
    assert not any("F_OFD_SETLK" in line or "futex" in line for line in calls)


def test_s28_a_stopped_writer_delays_no_reader(
    root: Path, server: ScriptedServer, children: Callable[..., Any], flag: Callable[[], Any]
) -> None:
    url = server.put("/x.bin", os.urandom(100_000))
    inside = flag()

    def writer() -> None:
        with writer_lock(root):
            inside.set()
            time.sleep(600)

    with forebay.Cache(root, max_age="forever", timeout=600) as cache:
        cache.put("key", b"value" * 10_000)
        cache.read(url)
        cache.get("key")
        stopped = children(writer)
        assert inside.wait(60)
        stopped.stop()
        began = time.monotonic()
        for _ in range(2000):
            assert len(cache.read(url)) == 100_000
            assert len(cache.get("key") or b"") == 50_000
            with cache.local(url):
                pass
        assert time.monotonic() - began < 120  # less than one wait for the writer's lock
        stopped.kill()


def test_s28_a_lease_costs_two_system_calls(root: Path, tmp_path: Path, server: ScriptedServer) -> None:
    url = server.put("/x.bin", os.urandom(2_000_000))
    with forebay.Cache(root) as cache:
        cache.read(url)
    script = SCRIPT.replace('(lambda i: cache.read(sys.argv[3])) if sys.argv[2] == "read" else (lambda i: cache.get(str(i % 100)))', "ask")
    script = script.replace("with forebay", "def ask(i):\n    with cache.local(sys.argv[3]):\n        return b'x' * 100_000\nwith forebay")
    trace = tmp_path / "trace"
    between = traced(trace, script, root, "local", url)
    locks = sum("F_OFD_SETLK" in line for line in between)
    assert locks == 2000  # taken and let go
    assert not any("F_WRLCK" in line for line in between)
