"""What the tests of the command line share: a server, a place, the command inside this process and as one of its own."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import pytest

from forebay import Cache
from forebay.cli import main, output

COMMAND = [sys.executable, "-m", "forebay.cli"]
HANG = 60.0
"""Seconds after which a command is taken to hang: a guard, not a measure."""


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()


Run = Callable[..., Ran]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = tmp_path / "cache"
    monkeypatch.setenv("FOREBAY_HOME", str(place))
    monkeypatch.setenv("FOREBAY_CLAIMS", str(tmp_path / "claims"))  # else what jobs left on this machine is shown, and freed
    return place


@pytest.fixture
def run(home: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """One command line in this process: its exit code, standard output and standard error."""
    log = logging.getLogger("forebay")

    def run(*arguments: object) -> Ran:
        capsys.readouterr()
        code = main.run([str(a) for a in arguments])
        out, err = capsys.readouterr()
        return Ran(code, out, err)

    yield run
    log.removeHandler(output.LOG_LINES)
    log.setLevel(logging.NOTSET)


@pytest.fixture
def cache(home: Path) -> Iterator[Cache]:
    """The same cache as a program sees it; sound at the end."""
    with Cache(home, budget=50_000_000) as cache:
        yield cache
        assert cache.check(deep=True) == []


class Terminal:
    """A command on a terminal of its own, 100 columns wide. A context manager that leaves no process."""

    def __init__(self, *arguments: object, **environ: str) -> None:
        self._screen, inside = pty.openpty()
        env = os.environ | {"TERM": "xterm", "COLUMNS": "100", "LINES": "40"} | environ
        self.process = subprocess.Popen([*COMMAND, *map(str, arguments)], stdin=inside, stdout=inside, stderr=inside, env=env)
        os.close(inside)
        self.seen = ""

    def read(self, until: str | None = None) -> str:
        """All that is shown until ``until`` stands there, or until the end."""
        deadline = time.monotonic() + HANG
        while until is None or until not in self.seen:
            if not select.select([self._screen], [], [], max(deadline - time.monotonic(), 0))[0]:
                raise AssertionError(f"{until!r} was not shown within {HANG:.0f} s, but {self.seen!r}")
            try:
                block = os.read(self._screen, 65536)
            except OSError:  # EIO: nobody has the terminal open any more
                break
            if not block:
                break
            self.seen += block.decode(errors="replace")
        return self.seen

    def end(self) -> int:
        self.read()
        return self.process.wait(HANG)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()
        os.close(self._screen)
