"""Scenario 7: two unrelated jobs share one local directory. (A true conflict of claims comes later.)"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forebay
from forebay.testing import ScriptedServer

JOB = """
import sys, forebay
before = len(sys.argv)
with forebay.Cache(sys.argv[1], budget="64MiB") as cache:
    print("ready", flush=True)
    sys.stdin.readline()
    for url in sys.argv[2:]:
        assert len(cache.read(url)) == 200_000
        with cache.local(url):
            pass
    print(len(cache.entries()), flush=True)
"""


def test_s07_both_run_and_the_second_reports_hits(root: Path, server: ScriptedServer, tmp_path: Path, command: Callable[..., Any]) -> None:
    urls = [server.put(f"/{i}.bin", os.urandom(200_000)) for i in range(12)]
    jobs = []
    for i in range(2):
        where = tmp_path / f"job-{i}"
        where.mkdir()
        environ = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "MASTER_ADDR")}
        jobs.append(subprocess.Popen([sys.executable, "-c", JOB, root, *urls], cwd=where, env=environ, text=True, stdin=subprocess.PIPE,
                                     stdout=subprocess.PIPE, stderr=subprocess.PIPE))  # fmt: skip
    for job in jobs:
        assert job.stdout is not None
        assert job.stdout.readline() == "ready\n"  # both have it open
    for job in jobs:
        out, err = job.communicate("go\n", timeout=60)
        assert (job.returncode, out, err) == (0, "12\n", "")
    stats = json.loads(command("stats", "--json", "--root", root).stdout)
    assert server.gets == stats["misses"] == 12
    assert stats["hits"] == 2 * 2 * 12 - 12
    with forebay.Cache(root) as third:
        assert third.read(urls[0])
        assert third.stats().hits == stats["hits"] + 1
