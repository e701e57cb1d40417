"""What the scenarios share: a counting server, real processes that are forked or started, killed and stopped, and the oracle at the end."""

from __future__ import annotations

import contextlib
import gc
import logging
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import forebay
import forebay.cache
import forebay.remote.http
import forebay.remote.local  # here, so that forked children need not
from tests.claiming import registry  # noqa: F401 (a fixture)
from tests.processes import HANG, ProcessGroup

MiB = 1 << 20


@pytest.fixture
def children() -> Iterator[ProcessGroup]:
    """Starts processes that share no connection with this one; what still runs at the end of the test is killed."""
    group = ProcessGroup(sockets=False)
    yield group
    group.kill()


@pytest.fixture
def barrier() -> Callable[[int], Any]:
    """A barrier for so many processes of one fork."""
    return multiprocessing.get_context("fork").Barrier


@pytest.fixture
def flag() -> Callable[[], Any]:
    """An event between forked processes."""
    return multiprocessing.get_context("fork").Event


@pytest.fixture
def collecting() -> Iterator[None]:
    """Garbage is collected at every allocation."""
    before = gc.get_threshold()
    gc.set_threshold(1)
    yield
    gc.set_threshold(*before)


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """A place for a root. What is there at the end is sound."""
    place = tmp_path / "root"
    yield place
    if (place / "FORMAT").exists():
        with forebay.Cache(place) as cache:
            assert cache.check(deep=True) == []


@pytest.fixture
def run() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a Python script (its text) in an interpreter of its own, with arguments."""

    def run(script: str, *arguments: object, **how: Any) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", script, *map(str, arguments)]
        how = {"capture_output": True, "text": True, "timeout": HANG, "check": True} | how
        try:
            return subprocess.run(command, **how)
        except subprocess.CalledProcessError as error:
            raise AssertionError(f"ended with {error.returncode}: {error.stderr}") from error

    return run


@pytest.fixture
def command() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run the `forebay` command."""

    def run(*arguments: object, **how: Any) -> subprocess.CompletedProcess[str]:
        how = {"capture_output": True, "text": True, "timeout": HANG} | how
        return subprocess.run([sys.executable, "-m", "forebay.cli", *map(str, arguments)], **how)

    return run


@pytest.fixture
def disk_usage() -> Callable[[Path], int]:
    """Bytes of blocks under a directory; a file with several names counts once."""

    def usage(place: Path) -> int:
        found = {}
        for folder, _, names in os.walk(place):
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    status = os.lstat(os.path.join(folder, name))
                    found[status.st_dev, status.st_ino] = status.st_blocks * 512
        return sum(found.values())

    return usage


@pytest.fixture
def tmpfs(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Callable[[str], Path]]:
    """Mount a small tmpfs."""
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    mounted: list[Path] = []

    def mount(size: str) -> Path:
        place = tmp_path / f"tmpfs-{len(mounted)}"
        place.mkdir()
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size},mode=0700", "forebay-test", place], capture_output=True, text=True
        )
        if done.returncode:
            pytest.skip(f"a tmpfs cannot be mounted here: {done.stderr.strip()}")
        mounted.append(place)
        return place

    yield mount
    for place in mounted:
        subprocess.run(["umount", "-l", place], check=True)


@contextlib.contextmanager
def _warnings() -> Iterator[list[str]]:
    said: list[str] = []

    class Keeper(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    keeper = Keeper(logging.WARNING)
    logging.getLogger("forebay").addHandler(keeper)
    try:
        yield said
    finally:
        logging.getLogger("forebay").removeHandler(keeper)


@pytest.fixture
def warnings() -> Callable[[], contextlib.AbstractContextManager[list[str]]]:
    """What Forebay says in the log, from warnings on, while the block runs. For children, too."""
    return _warnings
