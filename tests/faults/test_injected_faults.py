"""The system refuses one call, or the process is killed at it: each byte is right all the same, what may not fail does not, and the next
process finds a root that is sound."""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

import forebay
from forebay import errors
from forebay.testing import ScriptedServer
from tests import parts
from tests.fronts import Fronts, content
from tests.harness import MiB
from tests.items import until
from tests.processes import fork, in_child
from tests.servers.counting import Shelf

pytestmark = pytest.mark.stress

KEYS, SLOTS, BUDGET, ACTS, TIMES = 10, 30, 12 * MiB, 40, 12
DEAD, FULL, GONE = ["error=EIO"], ["error=ENOSPC"], ["signal=KILL"]
NAMES = [*DEAD, *FULL, "error=EROFS", *GONE]
FAULTS = {
    "openat": [*NAMES, "error=EMFILE"],
    "read": DEAD,
    "pread64": DEAD + GONE,
    "write": DEAD + FULL,
    "pwrite64": DEAD + FULL + GONE,
    "ftruncate": DEAD + FULL + GONE,
    "fallocate": DEAD + FULL + GONE,
    "linkat": NAMES,
    "unlinkat": [*DEAD, *GONE, "error=EROFS"],
    "unlink": [*DEAD, *GONE, "error=EROFS"],
    "mkdir": NAMES,
    "mkdirat": NAMES,
    "mmap": ["error=ENOMEM"],
    "newfstatat": DEAD,
    "fcntl": DEAD + GONE,
    "fdatasync": DEAD + FULL + GONE,
    "fsync": DEAD + FULL + GONE,
}
"""What the engine asks of the system, and what may come of it."""
MAY_FAIL = dict.fromkeys(["path", "directory", "eviction"], errors.CacheFault) | {"opening": (errors.RootError, errors.CacheFault)}
"""What has to give a path, or to do something to the root; and what it raises then."""


class Failed(NamedTuple):
    """An act that raised. ``by_test``: what the test itself asked the system for was refused."""

    act: str
    error: Exception
    by_test: bool


class Traced:
    """A process that does something, and stops itself first: when it goes on, strace refuses one of its calls, or kills it there.

    ``calls``: how many there were, of the thread with the most. ``refused``: lines of strace's log."""

    def __init__(self, work: Callable[[], list[Failed]], log: Path, call: str, fault: str = "", number: int | str = 0) -> None:
        inject = ["-e", f"inject={call}:{fault}:when={number}"] if fault else []
        with fork(work) as child:
            until(lambda: "State:\tT" in status(child.pid), "the stop")
            words = ["strace", "-f", "-y", "-qq", "-o", str(log), "-e", f"trace={call}", *inject, "-p", str(child.pid)]
            with subprocess.Popen(words, stderr=subprocess.PIPE) as strace:
                until(lambda: strace.poll() is not None or "TracerPid:\t0\n" not in status(child.pid), "strace")
                if strace.returncode:
                    pytest.skip(f"strace is not permitted here: {strace.communicate()[1].decode()}")
                child.signal(signal.SIGCONT)
                try:
                    is_killed = child.wait() == -signal.SIGKILL and "KILL" in fault
                    self.failed = [] if is_killed else child.result()
                except Exception as error:  # closing, the answer to this process; Python waits for ever for a thread without memory
                    self.failed = [Failed("process", error, by_test=False)]
                    child.kill()
        threads: dict[str, int] = {}
        self.refused = []
        for line in log.read_text().splitlines():
            thread, _, what = line.partition(" ")
            threads[thread] = threads.get(thread, 0) + what.lstrip().startswith(f"{call}(")
            if "(INJECTED)" in what:
                self.refused.append(what)
        self.calls = max(threads.values(), default=0)

    def faults(self, place: Path) -> list[str]:
        """What failed, and may not: only calls for files of the root were refused."""
        if not all(str(place) in line for line in self.refused):
            return [str(one.error) for one in self.failed if one.act != "process" and isinstance(one.error, AssertionError)]
        return [
            f"{act}: {type(error).__name__}: {error}"
            for act, error, by_test in self.failed
            if not by_test and not (isinstance(error, MAY_FAIL.get(act, ())) or is_scarce(error))
        ]


def is_scarce(error: Exception) -> bool:
    return isinstance(error, errors.CacheFault) and "Too many open files" in str(error)


def status(pid: int) -> str:
    return Path(f"/proc/{pid}/status").read_text()


def stop() -> None:
    """Until strace looks: to wait for a word would be a call that counts."""
    signal.raise_signal(signal.SIGSTOP)


def live(it: Fronts, seed: int) -> list[Failed]:
    chance, failed = random.Random(seed), []
    stop()
    try:
        cache = forebay.Cache(it.place, budget=BUDGET, min_free=0)
    except Exception as error:
        return [Failed("opening", error, by_test=False)]
    with cache:
        acts = it.acts(cache)
        for _ in range(ACTS):
            act = chance.choice(acts)
            try:
                act(chance.randrange(KEYS))
            except Exception as error:
                frames = traceback.extract_tb(error.__traceback__)
                failed.append(Failed(act.__name__, error, not any("/forebay/" in frame.filename for frame in frames)))
    return failed


def look(it: Fronts) -> None:
    with forebay.Cache(it.place) as cache:
        assert cache.check(deep=True) == []
        it.all_is_right(cache)
        assert cache.check(deep=True) == []


@pytest.fixture
def it(server: ScriptedServer, shelf: Shelf, tmp_path: Path) -> Fronts:
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    return Fronts(tmp_path / "root", server, shelf, keys=KEYS, slots=SLOTS)


@pytest.mark.parametrize(("call", "fault"), [(call, fault) for call, faults in FAULTS.items() for fault in faults])
def test_injected_faults(it: Fronts, tmp_path: Path, call: str, fault: str) -> None:
    log, chance = tmp_path / "log", random.Random()
    calls = Traced(lambda: live(it, 0), log, call).calls
    assert calls, f"{call} is not used"
    for _ in range(parts.share(TIMES)):
        number, seed = chance.randint(1, calls), chance.getrandbits(32)
        traced = Traced(lambda seed=seed: live(it, seed), log, call, fault, number)
        assert traced.faults(it.place) == [], f"{call}:{fault}:when={number}, {seed=}: {traced.refused}"
        in_child(lambda: look(it))


def test_a_lease_whose_lock_cannot_be_released(it: Fronts, tmp_path: Path) -> None:
    def work() -> list[Failed]:
        with forebay.Cache(it.place) as cache:
            lease = cache.local(it.urls[0])
            stop()
            lease.close()
            assert cache.read(it.urls[1]) == content("object 1")
        return []

    in_child(lambda: look(it))
    traced = Traced(work, tmp_path / "log", "fcntl", "error=EIO", "1+")
    assert "F_UNLCK" in traced.refused[0]
    assert traced.failed == []
    in_child(lambda: look(it))


def test_a_lock_of_sqlite_that_cannot_be_released(it: Fronts, tmp_path: Path) -> None:
    """SQLite waits ten seconds in vain for a lock that its own process keeps: one call does, not every one."""

    def work() -> list[Failed]:
        with forebay.Cache(it.place) as cache:
            assert cache.put("before", b"1")
            stop()
            kept = [cache.put(f"kept {n}", b"2") for n in range(4)]
        return [Failed("put", AssertionError(kept), by_test=False)] if kept.count(False) > 1 or not kept[-1] else []

    log = tmp_path / "log"
    assert Traced(work, log, "fcntl").failed == []
    calls = [line for line in log.read_text().splitlines() if "fcntl(" in line]
    for start in (120, 124):  # https://www.sqlite.org/walformat.html: the writer's lock, and the first of the readers'
        taken = next(n for n, call in enumerate(calls) if "F_WRLCK" in call and f"l_start={start}," in call)
        released = next(n for n, call in enumerate(calls) if n > taken and "F_UNLCK" in call and f"l_start={start}," in call)
        traced = Traced(work, log, "fcntl", "error=EIO", released + 1)
        assert "F_UNLCK" in traced.refused[0]
        assert f"l_start={start}," in traced.refused[0]
        assert traced.failed == []
        in_child(lambda: look(it))
