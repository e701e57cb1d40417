"""Jobs of Streaming, each a process group of its own that can be killed whole. They are forked from the process that loaded Streaming:
loading it takes longer than most of what they do."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import itertools
import json
import os
import random
import secrets
import select
import shutil
import signal
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest

from forebay import claims
from forebay.adapters.streaming import names as names
from forebay.claims import members

SAMPLES = 60


def make_shards(remote: Path) -> None:
    """A few small MDS shards of numbered samples."""
    from streaming import MDSWriter

    with MDSWriter(out=str(remote), columns={"number": "int", "text": "str"}, size_limit=512) as out:
        for number in range(SAMPLES):
            out.write({"number": number, "text": f"sample {number}"})


class Node:
    """What jobs have on this node: a registry, and a directory for lock files, of the test's own."""

    def __init__(self, registry: Path) -> None:
        self.registry = registry

    def claims(self) -> list[str]:
        """Live and dead ones."""
        return sorted(name for name in os.listdir(self.registry) if name[0].isdecimal()) if self.registry.exists() else []

    def things(self, prefix: int) -> list[str]:
        """All that Streaming has there for this number."""
        return [os.path.basename(path) for path in names.paths_of(prefix) if os.path.lexists(path)]

    @contextlib.contextmanager
    def number(self) -> Iterator[int]:
        """One that no job has; what it had is removed."""
        prefix = random.randrange(500_000, 999_999)
        try:
            yield prefix
        finally:
            for path in names.paths_of(prefix):
                Path(path).unlink(missing_ok=True)


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """No two test processes at once: jobs with Streaming as it is share names of the whole machine.

    A job that was killed between the creation of its memory and its sizing leaves it empty, and Streaming cannot map that."""
    machine = os.open("/dev/shm", os.O_RDONLY)
    try:
        fcntl.flock(machine, fcntl.LOCK_EX)
        for path in itertools.chain.from_iterable(map(names.paths_of, names.prefixes())):
            with contextlib.suppress(FileNotFoundError):
                if path.startswith("/dev/shm/") and os.path.getsize(path) == 0:
                    os.unlink(path)
        yield
    finally:
        fcntl.flock(machine, fcntl.LOCK_UN)  # forked children have it too
        os.close(machine)


@contextlib.contextmanager
def own_node(monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    # Not below `tmp_path`: multiprocessing makes a socket there, whose path must not be long, and loses what is sent if it is.
    registry, locks = Path(f"/dev/shm/forebay-test-{secrets.token_hex(6)}"), Path(tempfile.mkdtemp(prefix="fb-"))
    monkeypatch.setattr(tempfile, "tempdir", str(locks))
    monkeypatch.setenv("TMPDIR", str(locks))
    monkeypatch.setenv("FOREBAY_CLAIMS", str(registry))
    with alone():
        try:
            yield Node(registry)
        finally:
            claims.prune_claims()  # with what they have outside of it
            shutil.rmtree(registry, ignore_errors=True)
            shutil.rmtree(locks, ignore_errors=True)


Say = Callable[[Any], None]


class Job:
    """A process group that runs ``body(say)``: what it says comes out of `said`. Left, it is killed."""

    def __init__(self, body: Callable[[Say], None]) -> None:
        read, write = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(read)
            _run(body, write)
        os.close(write)
        os.set_inheritable(read, False)
        self._said = os.fdopen(read, "rb", 0)  # without a buffer, in which `select` would not see a line
        self.code: int | None = None

    def said(self, seconds: float = 120.0) -> Any:
        """The next that it says; None at its end."""
        assert select.select([self._said], [], [], seconds)[0], "it says nothing"
        line = self._said.readline()
        return json.loads(line) if line else None

    def kill(self) -> None:
        """All its processes, at once."""
        if self.code is None:
            os.killpg(self.pid, signal.SIGKILL)
            self.wait()

    def wait(self) -> int:
        if self.code is None:
            self.code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.code

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.kill()
        if error is not None:
            print(f"job {self.pid} ended with {self.code}")
        self._said.close()


def _run(body: Callable[[Say], None], write: int) -> None:
    """As a program: what is registered for its end runs, and nothing of the tests' process does: Ray's would crash in a child."""
    os.setsid()
    atexit._clear()
    atexit.register(members.leave_all)
    out = os.fdopen(write, "w")

    def say(value: Any) -> None:
        out.write(json.dumps(value) + "\n")
        out.flush()

    code = 1
    try:
        body(say)
        atexit._run_exitfuncs()
        code = 0
    except BaseException:
        traceback.print_exc()
        say({"error": traceback.format_exc()})
    finally:  # also where PyTorch's handler of SIGCHLD raises in the lines above
        os._exit(code)
