"""A hit of `read` or `get` takes no lock and makes no system call, and copies nothing: looked at from outside, by strace."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import forebay

HITS = 2_000
CHILD = f"""
import os, sys
import forebay
from forebay.testing import ScriptedServer

with ScriptedServer() as server, forebay.Cache(sys.argv[1], budget=64_000_000) as cache:
    url = server.put("/object", b"x" * 100_000)
    cache.put("small", b"y" * 1_000)
    cache.put("large", b"z" * 100_000)
    calls = {{"read": lambda: cache.read(url), "get small": lambda: cache.get("small"), "get large": lambda: cache.get("large")}}
    for call in calls.values():
        call(), call()
    for call in calls.values():
        os.getpgid(0)  # a mark that nothing else makes
        for _ in range({HITS}):
            call()
        os.getpgid(0)
"""


@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
def test_a_hit_makes_no_system_call(tmp_path: Path) -> None:
    log = tmp_path / "calls"
    done = subprocess.run(
        ["strace", "-o", str(log), "-e", "trace=all", sys.executable, "-c", CHILD, str(tmp_path / "root")], capture_output=True, text=True
    )
    if "PTRACE" in done.stderr or "ptrace" in done.stderr:
        pytest.skip("strace may not look at processes here")
    assert done.returncode == 0, done.stderr
    parts = log.read_text().split("getpgid(0")
    assert len(parts) == 7
    for name, between in zip(("read", "get small", "get large"), parts[1::2], strict=True):
        calls = [line for line in between.splitlines()[1:] if line and not line.startswith(("---", "+++"))]
        assert len(calls) < HITS // 100, f"{name}: {calls[:5]}"  # a rare one is the interpreter's own, such as the memory allocator's


@pytest.mark.parametrize("size", [1_000, 100_000])
def test_two_remembered_hits_are_views_of_the_same_bytes(tmp_path: Path, size: int) -> None:
    numpy = pytest.importorskip("numpy")
    with forebay.Cache(tmp_path / "root", budget=64_000_000) as cache:
        cache.put("key", b"v" * size)
        cache.get("key")  # the first touch may copy
        first, second = (numpy.frombuffer(cache.get("key"), numpy.uint8) for _ in range(2))
        assert not first.flags.writeable
        assert first.tobytes() == b"v" * size
        assert first.ctypes.data == second.ctypes.data
