"""Scenario 1: a killed run leaves nothing that hinders the next one. (That it writes nowhere but in the root: scenario 21.
Claims on shared memory come later.)"""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import forebay
from forebay.testing import ScriptedServer

MiB = 1 << 20
URLS = 6


def files_of(place: Path) -> set[str]:
    return {str(path) for path in place.rglob("*") if not path.is_dir()}


def content(i: int) -> bytes:
    return random.Random(i).randbytes(4 * MiB + i)


def run_of_a_job(root: Path, urls: list[str], ready: Any, tmp: Path) -> None:
    """A leader and seven more, all of one process group; each opens, stores, and reads everything."""
    os.environ["TMPDIR"] = str(tmp)
    rank = 0
    for i in range(1, 8):
        if os.fork() == 0:
            rank = i
            break
    with forebay.Cache(root, budget="64MiB") as cache:
        assert bytes(cache.get_or_put("config", lambda: b"c" * 50_000)) == b"c" * 50_000
        cache.put(f"rank-{rank}", bytes([rank]) * 100_000)
        ready.release()
        for url in urls[rank % URLS :] + urls[: rank % URLS]:
            with cache.local(url) as path:
                assert Path(path).read_bytes() == content(urls.index(url))
    if rank:
        os._exit(0)
    codes = [os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(7)]
    assert codes == [0] * 7


def lasting(names: set[str]) -> set[str]:
    """Without what the first cycles may have ended too soon for, and with the log what comes and goes."""
    return {name for name in names if not re.search(r"catalog\.sqlite-(wal|shm)$|/policy-\d+$|/history$", name)}


@pytest.mark.rotates
@pytest.mark.parametrize("cycles", [6, pytest.param(20, marks=pytest.mark.stress)])
def test_s01_killed_in_the_middle_of_downloads_and_started_again(
    cycles: int, root: Path, tmp_path: Path, server: ScriptedServer, children: Callable[..., Any]
) -> None:
    import multiprocessing

    tmp = tmp_path / "tmp"
    tmp.mkdir()
    shm = {name for name in os.listdir("/dev/shm") if "forebay" in name and not name.startswith("forebay-test-")}
    urls = [server.put(f"/{i}.bin", content(i)) for i in range(URLS)]
    server.rate = 2e6  # so that no cycle comes to its end
    areas: list[set[str]] = []
    for _ in range(cycles):
        ready = multiprocessing.get_context("fork").Semaphore(0)
        job = children(lambda: run_of_a_job(root, urls, ready, tmp), group=True)  # noqa: B023 - forked at once
        for _ in range(8):
            assert ready.acquire(timeout=30), "a process of the restarted job did not come so far"
        until = server.sent + random.randrange(200_000, 700_000)
        while server.sent < until and os.waitid(os.P_PID, job.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            time.sleep(0.002)
        os.killpg(job.pid, signal.SIGKILL)
        assert job.wait() == -signal.SIGKILL
        server.drop()
        areas.append(files_of(root / "locks") | files_of(root / "shared") | files_of(tmp) | {p.name for p in root.iterdir()})
        partials = [p.name for p in (root / "tmp").iterdir() if not p.name.endswith(".map")]
        assert len(partials) <= URLS
        assert len({name.partition("-")[0] for name in partials}) == len(partials)  # one for a key, resumed from cycle to cycle
    assert lasting(areas[0]) == lasting(areas[-1])
    server.rate = None
    ready = multiprocessing.get_context("fork").Semaphore(0)
    children(lambda: run_of_a_job(root, urls, ready, tmp), group=True).result()
    assert list((root / "tmp").iterdir()) == []
    assert files_of(tmp) == set()
    assert {name for name in os.listdir("/dev/shm") if "forebay" in name and not name.startswith("forebay-test-")} <= shm
    with forebay.Cache(root) as cache:
        assert {entry.name for entry in cache.entries()} == {*urls, "values:config", *(f"values:rank-{i}" for i in range(8))}
        assert cache.stats().bytes_reserved == 0


def test_s01_a_lock_of_the_dead_blocks_nobody(root: Path, children: Callable[..., Any], flag: Callable[[], Any]) -> None:
    inside = flag()

    def dying() -> None:
        def fn() -> bytes:
            inside.set()
            time.sleep(600)
            return b""

        with forebay.Cache(root) as cache:
            cache.get_or_put("key", fn)

    child = children(dying)
    assert inside.wait(30)
    child.kill()
    with forebay.Cache(root, timeout=20) as cache:
        assert cache.get_or_put("key", lambda: b"mine") == b"mine"
        assert cache.stats().fallbacks == 0
