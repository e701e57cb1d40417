"""Roots of these tests lie in memory, where there is one: a root has hundreds of directories, and each test makes one of its own."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import forebay
from forebay._kernel import host
from tests.processes import Child, Line, talk_to


@pytest.fixture
def tmp_path(tmp_path: Path) -> Iterator[Path]:
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="forebay-test-", dir="/dev/shm") as name:
        yield Path(name)


@pytest.fixture
def another_writes(cache: forebay.Cache) -> Iterator[Callable[[], Child]]:
    """Lets another process stand still in the middle of a write, until it hears something: this one writes nothing meanwhile."""
    born: list[Child] = []

    def write(line: Line) -> None:
        def stop(call: str, subject: str) -> None:
            if call == "commit":
                host.on_step(None)
                line.say("writes")
                line.hear()

        with forebay.Cache(cache.path) as its:
            host.on_step(stop)
            its.space("others").put("a", bytes(100))

    def start() -> Child:
        born.append(talk_to(write))
        assert born[-1].hear() == "writes"
        return born[-1]

    yield start
    for child in born:
        child.kill()
        child.close()


@pytest.fixture
def on_step() -> Iterator[Callable[[Callable[[str, str], object] | None], None]]:
    """Sets what is called before each change of a file: it may wait, or raise what the disk could raise."""
    yield host.on_step
    host.on_step(None)
