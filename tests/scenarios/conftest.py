"""What the scenarios share: a counting server, real processes that are forked or started, killed and stopped, and the oracle at the end."""

from __future__ import annotations

import contextlib
import gc
import logging
import multiprocessing
import os
import pickle
import select
import shutil
import signal
import stat
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import forebay
import forebay.cache
import forebay.remote.http
import forebay.remote.local  # here, so that forked children need not
from tests.claiming import registry  # noqa: F401 (a fixture)

HANG = 60.0
"""Seconds after which a child is taken to hang: a guard, not a measure."""
MiB = 1 << 20


@dataclass
class Child:
    """A forked process that runs one function and sends back what that gave, or raised."""

    pid: int
    _from: int
    _status: int | None = None
    _data: bytearray = field(default_factory=bytearray)

    def result(self, timeout: float = HANG) -> Any:
        """What the function gave; what it raised is raised here."""
        deadline = time.monotonic() + timeout
        while self._from >= 0:
            if not select.select([self._from], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise AssertionError(f"process {self.pid} gave no answer within {timeout:.0f} s")
            block = os.read(self._from, 1 << 20)
            self._data += block
            if not block:
                os.close(self._from)
                self._from = -1
        status = self.wait()
        if status or not self._data:
            raise AssertionError(f"process {self.pid} ended with {status} and no answer")
        good, value, text = pickle.loads(self._data)
        if not good:
            raise value if isinstance(value, Exception) else AssertionError(text)
        return value

    def wait(self) -> int:
        """Its exit status; the negative signal that killed it."""
        if self._status is None:
            self._status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self._status

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL to it, and to its group if it leads one."""
        if self._status is None:
            for kill in (os.killpg, os.kill):
                with contextlib.suppress(ProcessLookupError):
                    kill(self.pid, signal.SIGKILL)
            self.wait()

    def close(self) -> None:
        self.kill()
        if self._from >= 0:
            os.close(self._from)
            self._from = -1


def _let_go_of_sockets() -> None:
    """The server's connections are the parent's: one that a child holds open too would not end when the server closes it."""
    null = os.open(os.devnull, os.O_RDWR)
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                os.dup2(null, int(name))


def fork(work: Callable[[], object], *, group: bool = False, user: int | None = None) -> Child:
    """Run ``work`` in a child; with ``group`` it leads a process group, with ``user`` it is another user."""
    ours, its = os.pipe()
    pid = os.fork()
    if pid:
        os.close(its)
        return Child(pid, ours)
    code = 1
    try:
        os.close(ours)
        _let_go_of_sockets()
        if group:
            os.setpgid(0, 0)
        if user is not None:
            os.setgroups([])
            os.setgid(user)
            os.setuid(user)
        answer: tuple[bool, object, str] = (True, work(), "")
        code = 0
    except BaseException as error:
        answer = (False, error, traceback.format_exc())
        code = 0
    try:
        data = pickle.dumps(answer)
    except Exception:
        data = pickle.dumps((False, None, f"{answer!r} does not pickle\n{answer[2]}"))
    view = memoryview(data)
    while view:
        view = view[os.write(its, view) :]
    os._exit(code)


@pytest.fixture
def children() -> Iterator[Callable[..., Child]]:
    """`fork`; what still runs at the end of the test is killed."""
    born: list[Child] = []

    def start(work: Callable[[], object], **how: Any) -> Child:
        born.append(fork(work, **how))
        return born[-1]

    yield start
    for child in born:
        child.close()


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


@pytest.fixture
def public(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory that other users can get into, unlike `tmp_path`."""
    place = Path(f"/tmp/forebay-public-{os.getpid()}-{time.monotonic_ns()}")
    place.mkdir()
    place.chmod(0o755)
    yield place
    shutil.rmtree(place)


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
