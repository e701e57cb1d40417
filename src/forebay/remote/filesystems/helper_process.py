"""The helper process as its user sees it: a new channel to it for each call, and a process for each that forks."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

from forebay._kernel import host
from forebay._logs import logger
from forebay.errors import RemoteTimeout
from forebay.remote.base import Call, Trouble

log = logger("forebay.remote.filesystems.helper_process")

_START = "from forebay.remote.filesystems.helper import main; main()"  # with -m, Python would warn of a module that its package imports


@contextmanager
def helper_errors() -> Iterator[None]:
    """What a channel raises becomes `Trouble`."""
    try:
        yield
    except TimeoutError as error:
        raise Trouble("nothing came for too long", RemoteTimeout) from error
    except EOFError as error:
        raise Trouble("its helper process went away") from error
    except OSError as error:
        raise Trouble(f"its helper process cannot be used: {error.strerror}") from error


@contextmanager
def channel(call: Call) -> Iterator[socket.socket]:
    """A new channel to the helper process; closed, the helper gives up what was asked on it."""
    with helper_errors():
        made = _processes.channel()
    with made:
        call.hold(made)
        try:
            yield made
        finally:
            call.let_go(made)
            try:
                made.shutdown(socket.SHUT_RDWR)  # a forked child may hold it too: then closing would tell the helper nothing
            except OSError as error:
                log.debug("the helper closed its end before: %s", error)


class Process:
    """One helper process, which lives no longer than this object, nor than the process that made it."""

    def __init__(self) -> None:
        self.control, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _START, str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=[theirs.fileno()],
                process_group=0,  # Ctrl-C is for us: we tell the helper what is given up
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            )  # fmt: skip
        self.pid = self._process.pid
        self._end = weakref.finalize(self, _end, self.control, self._process)

    def channel(self) -> socket.socket:
        """Raises OSError if the process is gone."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self.control, [b"c"], [theirs.fileno()])
            except OSError:
                ours.close()
                raise
        return ours

    def leave_to_parent(self) -> None:
        """In a forked child: it is not ours."""
        self._end.detach()
        self.control.close()
        self._process.returncode = 0  # else its finalizer warns of a child of ours that still runs


def _end(control: socket.socket, process: subprocess.Popen[bytes]) -> None:
    control.close()
    process.kill()
    process.wait()


class _Processes:
    """The helper of this process: started at the first call, again if it died, and never shared with a fork."""

    def __init__(self) -> None:
        self._forget()
        host.at_fork(self)

    def _forget(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()  # guards _process
        self._process: Process | None = None

    def channel(self) -> socket.socket:
        if self._pid != os.getpid():  # forked by C, which runs no hook
            self.after_fork_child()
        with self._lock:
            if self._process is not None:
                try:
                    return self._process.channel()
                except OSError as error:
                    log.warning("the helper process %d is gone (%s): starting another", self._process.pid, error)
            self._process = Process()
            return self._process.channel()

    def before_fork(self) -> None: ...

    def after_fork_parent(self) -> None: ...

    def after_fork_child(self) -> None:
        if self._process is not None:
            self._process.leave_to_parent()
        self._forget()


_processes = _Processes()
