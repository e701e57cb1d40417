"""Real processes for the engine's tests: children that are forked, watched, and killed at a step of their own."""

from __future__ import annotations

import os
import signal
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from forebay._engine.files.root import Root, open_root
from forebay._kernel import host


@dataclass
class Child:
    """A forked process that runs one function."""

    pid: int
    status: int | None = None

    def wait(self) -> int:
        """Its exit status; the negative signal that killed it."""
        if self.status is None:
            self.status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.status

    def kill(self) -> None:
        if self.status is None:
            os.kill(self.pid, signal.SIGKILL)
            self.wait()


def fork(work: Callable[[], object]) -> Child:
    """Run ``work`` in a child: it ends with 0, or with 1 after an exception."""
    pid = os.fork()
    if pid:
        return Child(pid)
    try:
        work()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def killed_at(step: int, work: Callable[[], object]) -> bool:
    """Run ``work`` in a child that is killed before its ``step``-th change of a file; False if it made fewer."""

    def dying() -> None:
        left = [step]

        def hook(name: str, subject: str) -> None:
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1

        host.on_step(hook)
        work()

    status = fork(dying).wait()
    assert status in (0, -signal.SIGKILL)
    return status != 0


@pytest.fixture
def children() -> Iterator[Callable[[Callable[[], object]], Child]]:
    """`fork`; what still runs at the end of the test is killed."""
    born: list[Child] = []

    def start(work: Callable[[], object]) -> Child:
        born.append(fork(work))
        return born[-1]

    yield start
    for child in born:
        child.kill()


@pytest.fixture
def kill_at() -> Callable[[int, Callable[[], object]], bool]:
    return killed_at


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
