"""Processes of tests: forked, led by a line to each, killed at will or at a step of their own."""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import select
import signal
import stat
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, Pipe
from typing import Any, NoReturn, Self

from forebay._kernel import host

HANG = 60.0
"""Seconds after which a process is taken to hang: a guard, not a measure."""

_prctl = ctypes.CDLL(None).prctl
_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Let this process be killed when the thread that forked it ends: a test that fails leaves nobody behind."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Line:
    """One end of the talk between a test and its child."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def say(self, what: object = None) -> None:
        self._pipe.send(what)

    def hear(self) -> Any:
        """What the other side says next; raises EOFError if it is gone."""
        if not self._pipe.poll(HANG):
            raise AssertionError("the other process says nothing")
        return self._pipe.recv()

    def close(self) -> None:
        self._pipe.close()


class Child(Line):
    """A forked process that runs one function. A context manager that kills it at the end."""

    def __init__(self, pid: int, pipe: Connection) -> None:
        super().__init__(pipe)
        self.pid = pid
        self._status: int | None = None
        self._heard: deque[Any] = deque()
        self._end: _End | None = None

    def hear(self) -> Any:
        """What it says next. What it raised is raised here."""
        while not self._heard:
            if self._end is not None:
                self._end.value()
                raise EOFError(f"process {self.pid} has ended")
            self._keep(super().hear())
        return self._heard.popleft()

    def wait(self, timeout: float = HANG) -> int:
        """Its exit status, 1 if the function raised; or the negative signal that killed it. Reads what it says meanwhile."""
        deadline = time.monotonic() + timeout
        while self._end is None and self._status is None and not self._pipe.closed:
            try:
                if self._pipe.poll(min(0.2, max(0.0, deadline - time.monotonic()))):
                    self._keep(self._pipe.recv())
                    continue
            except (EOFError, ConnectionError):
                break  # its end of the line is closed
            if not self._has_ended() and time.monotonic() > deadline:  # one that has ended may have forked, and its child keeps the line
                raise AssertionError(f"process {self.pid} hangs")
        if self._status is None:
            self._status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self._status

    def result(self, timeout: float = HANG) -> Any:
        """What the function gave; what it raised is raised here."""
        status = self.wait(timeout)
        if self._end is None:
            raise AssertionError(f"process {self.pid} ended with {status} and no answer")
        return self._end.value()

    def last_words(self) -> str:
        """What it said last before it was killed."""
        self.wait()
        return self._heard[-1] if self._heard else ""

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def stop(self) -> None:
        """Stopped when this returns, or gone: until then it may still run on another processor."""
        self.signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def kill(self) -> None:
        """Gone when this returns, and its group if it leads one."""
        if self._status is None:
            for kill in (os.killpg, os.kill):
                with contextlib.suppress(ProcessLookupError):
                    kill(self.pid, signal.SIGKILL)
            self._status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def _keep(self, message: Any) -> None:
        if isinstance(message, _End):
            self._end = message
        else:
            self._heard.append(message)

    def _has_ended(self) -> bool:
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if pid:
            self._status = os.waitstatus_to_exitcode(status)
            with contextlib.suppress(EOFError, ConnectionError):
                while self._pipe.poll():  # what it said between the last look and its end
                    self._keep(self._pipe.recv())
        return bool(pid)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self.close()


class _End:
    """What a function gave or raised."""

    def __init__(self, given: object, error: Exception | None = None, text: str = "") -> None:
        self.given, self.error, self.text = given, error, text

    @classmethod
    def of(cls, error: BaseException) -> _End:
        text = "".join(traceback.format_exception(error))
        with contextlib.suppress(Exception):
            if isinstance(pickle.loads(pickle.dumps(error)), Exception):
                return cls(None, error, text)  # type: ignore[arg-type]
        return cls(None, None, text)

    def value(self) -> Any:
        if self.error is not None:
            self.error.add_note(self.text)
            raise self.error
        if self.text:
            raise AssertionError(self.text)
        return self.given


def fork(work: Callable[[], object], *, group: bool = False, user: int | None = None, sockets: bool = True) -> Child:
    """Run ``work`` in a child. ``group``: it leads a process group. ``user``: it is another user. Without ``sockets`` it lets go of those
    of its parent: a connection that a child holds open too would not end when the server closes it."""

    def run(line: Line) -> object:
        if not sockets:
            _let_go_of_sockets(line._pipe.fileno())
        if group:
            os.setpgid(0, 0)
        if user is not None:
            os.setgroups([])
            os.setgid(user)
            os.setuid(user)
        return work()

    return talk_to(run)


def forked(work: Callable[[], object]) -> int:
    """The pid of a child that runs ``work``, and ends with 0 if that returns True. Unlike a `Child` it has no pipe: for tests that look at
    the sockets of a process."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        status = 0 if work() is True else 2
    finally:
        os._exit(status)


def ended(pid: int, limit: float = 60) -> int:
    """The exit status of a child of `forked`; killed if it hangs."""
    killer = threading.Timer(limit, os.kill, (pid, signal.SIGKILL))
    killer.start()
    try:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    finally:
        killer.cancel()


def end(pid: int, number: int = signal.SIGKILL) -> None:
    """Send a signal that ends a process, and wait until it has ended, whosever child it is."""
    watch = os.pidfd_open(pid)
    try:
        os.kill(pid, number)
        assert select.select([watch], [], [], 60)[0]
    finally:
        os.close(watch)


def talk_to(work: Callable[[Line], object], *, by: Callable[[], int] = os.fork) -> Child:
    """Run ``work`` in a child; it talks to the test through the `Line` that it is given. ``by``: the fork."""
    ours, its = Pipe()
    is_main = threading.current_thread() is threading.main_thread()
    pid = by()
    if pid == 0:
        if is_main:  # other threads end before their children do
            die_with_parent()
        ours.close()
        _run(work, Line(its))
    its.close()
    return Child(pid, ours)


def _run(work: Callable[[Line], object], line: Line) -> NoReturn:
    code = 1
    try:
        end, code = _End(work(line)), 0
    except BaseException as error:
        end = _End.of(error)
    with contextlib.suppress(OSError):  # nobody listens any more
        try:
            line.say(end)
        except Exception as error:  # it does not pickle
            line.say(_End.of(error))
    os._exit(code)


def _let_go_of_sockets(kept: int) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if int(name) != kept and stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                os.dup2(null, int(name))


def in_child(work: Callable[[], object], *, by: Callable[[], int] = os.fork) -> Any:
    """Run ``work`` in a fresh child and wait for it; gives and raises what it does."""
    child = talk_to(lambda _: work(), by=by)
    try:
        return child.result()
    finally:
        child.close()


class ProcessGroup:
    """Starts children, and kills at the end of a test those that still run, stopped ones too. ``how``: as for `fork`."""

    def __init__(self, **how: Any) -> None:
        self._how = how
        self._children: list[Child] = []

    def __call__(self, work: Callable[[], object], **how: Any) -> Child:
        self._children.append(fork(work, **self._how | how))
        return self._children[-1]

    def kill(self) -> None:
        for child in self._children:
            child.kill()
            child.close()


# -- death -------------------------------------------------------------------------------------------------------------


def fork_to_die(step: int, work: Callable[[], object]) -> Child:
    """Run ``work`` in a child that is killed before its ``step``-th change of a file."""

    def dying(line: Line) -> None:
        left = [step]

        def hook(name: str, subject: str) -> None:
            if not left[0]:
                line.say(f"{name} {os.path.basename(subject)}")
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1

        host.on_step(hook)
        work()

    return talk_to(dying)


def steps_of(work: Callable[[], object]) -> list[str]:
    """The steps of ``work``: before each of them `fork_to_die` can kill it. Runs it in a child."""

    def count() -> list[str]:
        steps: list[str] = []
        host.on_step(lambda name, subject: steps.append(f"{name} {os.path.basename(subject)}"))
        work()
        return steps

    return list(in_child(count))


def death_of(child: Child) -> str | None:
    """Before which step a child of `fork_to_die` died; None if it came to its end."""
    try:
        if child.wait() == -signal.SIGKILL:
            return child.last_words()
        child.result()
        return None
    finally:
        child.close()


# -- other kinds of processes ------------------------------------------------------------------------------------------


def fork_in_c() -> int:
    """A fork as a C library does it: no hook of Python's runs."""
    return int(ctypes.PyDLL(None).fork())


@contextlib.contextmanager
def orphan(
    work: Callable[[Line], object], *, parent: Callable[[], object], by: Callable[[], int] = os.fork
) -> Iterator[tuple[Child, Line]]:
    """A process that does ``parent`` and forks a child for ``work``; gives the first, to be killed, and a line to the second.

    The first waits; when it is killed the second goes on, and ends when its line closes."""
    ours, its = Pipe()

    def first(line: Line) -> None:
        ours.close()
        parent()
        if by() == 0:
            line.close()
            _run(work, Line(its))
        its.close()
        line.say("forked")
        line.hear()

    with talk_to(first) as child:
        its.close()
        second = Line(ours)
        child.hear()
        try:
            yield child, second
        finally:
            second.close()


USERS, COMMON_GROUP = (61_001, 61_002), 61_003
"""Two users for tests as root, and a group of both."""


def as_user(uid: int, work: Callable[[], Any], *, gid: int | None = None, umask: int = 0o022) -> Callable[[], Any]:
    """``work``, for a child of root's that becomes this user first. ``gid``: its first group (default: one of its own)."""

    def run() -> Any:
        os.umask(umask)
        os.setgroups([])
        os.setgid(uid if gid is None else gid)
        os.setuid(uid)
        os.environ["NETRC"] = os.devnull
        return work()

    return run


def raise_it(error: BaseException) -> None:
    """For processes that import nothing else of a test."""
    raise error


class Gate:
    """Tells another process that something happened; a forked child has both ends."""

    def __init__(self) -> None:
        self._from, self._to = os.pipe()

    def open(self) -> None:
        os.write(self._to, b".")

    def wait(self, timeout: float = HANG) -> None:
        if not select.select([self._from], [], [], timeout)[0]:
            raise AssertionError("nobody opened the gate")
        os.read(self._from, 1)

    def close(self) -> None:
        os.close(self._from)
        os.close(self._to)
