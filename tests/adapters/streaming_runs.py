"""Jobs of Streaming, each a process group of its own that can be killed whole. They are forked from the process that loaded Streaming:
loading it takes longer than most of what they do."""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

SAMPLES = 60


def make_shards(remote: Path) -> None:
    """A few small MDS shards of numbered samples."""
    from streaming import MDSWriter

    with MDSWriter(out=str(remote), columns={"number": "int", "text": "str"}, size_limit=512) as out:
        for number in range(SAMPLES):
            out.write({"number": number, "text": f"sample {number}"})


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
        self._said = os.fdopen(read)
        self.code: int | None = None

    def said(self, seconds: float = 60.0) -> Any:
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
        self._said.close()


def _run(body: Callable[[Say], None], write: int) -> None:
    """As a program: what is registered for its end runs, and nothing of the tests does."""
    os.setsid()
    out = os.fdopen(write, "w")

    def say(value: Any) -> None:
        out.write(json.dumps(value) + "\n")
        out.flush()

    try:
        body(say)
    except BaseException:
        traceback.print_exc()
        say({"error": traceback.format_exc()})
        os._exit(1)
    atexit._run_exitfuncs()
    os._exit(0)
