"""Scenario 33: opening a large root reads no payload, also after an unclean stop. (Times are measured by the benchmarks.)"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import forebay
from tests import parts

SCRIPT = """
import json, os, sys, time
import forebay, forebay.cache
from forebay._engine.index import memo
from forebay._kernel import below
opened, listed = [], []

def hook(event, arguments):
    if event == "open" and isinstance(arguments[0], (str, bytes)):
        opened.append(os.fsdecode(arguments[0]))
    elif event in ("os.listdir", "os.scandir"):
        listed.append(str(arguments[0]))

open_below, open_quickly = below.Below._open, memo.open_quickly  # they ask the kernel past Python

def noting(self, path, flags):
    opened.append(os.fspath(path))
    return open_below(self, path, flags)

def noting_quickly(path):
    opened.append(path)
    return open_quickly(path)

below.Below._open, memo.open_quickly = noting, noting_quickly
sys.addaudithook(hook)
began = time.perf_counter()
cache = forebay.Cache(sys.argv[1])
mid = time.perf_counter()
blobs = [path for path in opened if "/blobs/" in path]
data = cache.get(sys.argv[2])
end = time.perf_counter()
hit = [path for path in opened if "/blobs/" in path]
print(json.dumps({"at_open": blobs, "at_hit": len(hit), "size": len(data), "seconds": [mid - began, end - mid], "opened": len(opened),
                  "listed": [path for path in listed if "/blobs/" in path]}))
"""


@pytest.mark.rotates
@pytest.mark.parametrize("count", [3000, pytest.param(parts.share(100_000), marks=[pytest.mark.stress, pytest.mark.timeout(900)])])
@pytest.mark.parametrize("clean", [True, False])
def test_s33_open_and_first_hit(count: int, clean: bool, root: Path, children: Callable[..., Any], run: Callable[..., Any]) -> None:
    def fill() -> None:
        cache = forebay.Cache(root, budget="8GiB")
        for i in range(count):
            cache.put(str(i), b"v" * (30_000 if i % 10 == 0 else 100))
        if clean:
            cache.close()
        else:
            import os

            os.kill(os.getpid(), signal.SIGKILL)

    child = children(fill)
    if clean:
        child.result(600)
    else:
        assert child.wait(600) == -signal.SIGKILL
    done = run(SCRIPT, root, count // 2)
    found = json.loads(done.stdout)
    assert found["at_open"] == []
    assert found["listed"] == []
    assert (found["at_hit"], found["size"]) == (1, 30_000)
    assert found["opened"] < 60  # files of its own, whatever the number of entries
    assert found["seconds"][0] < 20  # a guard; the benchmarks measure
    print(found["seconds"], file=sys.stderr)
