"""Calls of a program that ends: in functions of `atexit`, where Python 3.12 starts no thread any more."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from forebay.testing import ScriptedServer

PROGRAM = """
import atexit, sys, threading
url, root = sys.argv[1:]
def last():
    # As in Python 3.12, whatever version runs this.
    def refuse(*args, **kwargs):
        raise RuntimeError("can't create new thread at interpreter shutdown")
    threading.Thread.start = refuse
    many = cache.read_many([url + "/1", url + "/2"])
    print(len(cache.read(url + "/small")), len(cache.read(url + "/large")), [len(each) for each in many])
atexit.register(last)
import forebay
cache = forebay.Cache(root, budget="100MB")
"""


def test_a_function_of_atexit_that_can_start_no_thread_reads(tmp_path: Path) -> None:
    with ScriptedServer() as server:
        for name in ("small", "1", "2"):
            server.put(f"/{name}", b"q" * 1000)
        server.put("/large", b"q" * 20_000_000)
        program = [sys.executable, "-c", PROGRAM, server.url, tmp_path / "root"]
        done = subprocess.run(program, capture_output=True, text=True, timeout=60)
    assert done.stdout == "1000 20000000 [1000, 1000]\n", done.stderr
