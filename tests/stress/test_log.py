"""The log of the catalog for a minute of short processes, and of a listing beside writers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import forebay
from forebay._engine.catalog.transactions import PART
from tests import parts
from tests.harness import MiB, data_usage
from tests.processes import fork

pytestmark = pytest.mark.stress
MINUTE = parts.share(60)
BOUND = 16 * MiB


def log_of(place: Path) -> int:
    try:
        return (place / "catalog.sqlite-wal").stat().st_size
    except FileNotFoundError:
        return 0


def test_many_short_processes_beside_an_idle_one(tmp_path: Path) -> None:
    place = tmp_path / "root"
    with forebay.Cache(place, budget=64 * MiB) as cache:
        cache.put("mine", b"x")
        until, n, largest = time.monotonic() + MINUTE, 0, 0
        while time.monotonic() < until:

            def work(n: int = n) -> None:
                with forebay.Cache(place) as other:
                    for k in range(8):
                        other.put(f"{n}-{k}", os.urandom(12_000))

            fork(work).result()
            largest, n = max(largest, log_of(place)), n + 1
        assert largest <= BOUND
        assert data_usage(place) <= 64 * MiB + sum(cache.overhead().values())
        assert cache.check(deep=True) == []


def test_a_long_listing_beside_writers(tmp_path: Path) -> None:
    """Stopped and continued at any moment, as by Ctrl-Z: processes that write go on, and the log grows by a part of the budget at most."""
    place = tmp_path / "root"
    with forebay.Cache(place, budget=256 * MiB) as cache:
        for n in range(20_000):
            cache.put(f"there{n}", b"x" * 100)
        until, largest, n = time.monotonic() + MINUTE, 0, 0
        while time.monotonic() < until:
            command = [sys.executable, "-m", "forebay.cli", "-C", str(place), "ls"]
            listing = subprocess.Popen(command, stdout=subprocess.DEVNULL)
            while listing.poll() is None and time.monotonic() < until:
                listing.send_signal(signal.SIGSTOP if n % 200 < 100 else signal.SIGCONT)
                for _ in range(20):
                    assert cache.put(f"new{n % 2000}", b"y" * 5000)
                    largest, n = max(largest, log_of(place)), n + 1
            listing.send_signal(signal.SIGCONT)
            if time.monotonic() < until:
                assert listing.wait(60) == 0
            listing.kill()
            listing.wait()
        assert largest <= BOUND + 256 * MiB // PART
        assert n > parts.share(6000)  # ten a second where each checkpoint waits for the reader; by SQLite's busy handler one in 2 s
        assert cache.check() == []
