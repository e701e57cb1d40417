"""What the tests of the engine share: a root, kills at each step, another user."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from forebay._engine.files.root import Root, open_root
from forebay._kernel import host
from tests.processes import death_of, fork_to_die


@pytest.fixture
def kill_at() -> Callable[[int, Callable[[], object]], bool]:
    """Run work in a child that is killed before its so-many-th change of a file; False if it made fewer."""
    return lambda step, work: death_of(fork_to_die(step, work)) is not None


@pytest.fixture
def root(tmp_path: Path) -> Root:
    return open_root(tmp_path / "root")


def become(uid: int, gid: int) -> None:
    """Be another user from now on, in a child."""
    os.setgroups([])
    os.setgid(gid)
    os.setuid(uid)


@pytest.fixture
def as_user() -> Callable[[int, int], None]:
    return become


@pytest.fixture
def public_path() -> Iterator[Path]:
    """A directory that other users can get into, unlike `tmp_path`."""
    with tempfile.TemporaryDirectory() as place:
        os.chmod(place, 0o755)
        yield Path(place)


@pytest.fixture(autouse=True)
def no_hook_left() -> Iterator[None]:
    yield
    host.on_step(None)
