"""Byte-range locks that the kernel releases when their holder dies: open-file-description locks (``F_OFD_SETLK``).

Such a lock belongs to an open file description, not to a thread: two threads that share one would not exclude each other, and a forked
child shares its parent's. So each `LockFile` counts the holders within its process, and a forked child opens descriptions of its own."""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import errno
import fcntl
import os
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

from forebay import errors
from forebay._kernel import host, interrupts
from forebay._logs import logger

log = logger("forebay.locks")

LOOK_AGAIN = 1.0
_BUSY = frozenset((errno.EAGAIN, errno.EACCES))
_UNKNOWN = frozenset((errno.EINVAL, errno.ENOSYS, errno.EPERM, errno.EOPNOTSUPP, errno.ENOLCK))
"""What kernels and sandboxes without these locks answer; no call of this module is wrong in itself."""
_LAYOUT = struct.Struct("hhqqi0q")  # struct flock: type, whence, start, length, pid


# The call never blocks and takes 2 us: less than releasing and reacquiring the interpreter's lock, as `fcntl.fcntl` does, while
# other threads compete for it.
_fcntl = ctypes.PyDLL(None, use_errno=True).fcntl
_fcntl.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_char_p]
_fcntl.restype = ctypes.c_int


def _set(fd: int, kind: int, offset: int, length: int = 1) -> bool:
    if _fcntl(fd, fcntl.F_OFD_SETLK, _LAYOUT.pack(kind, os.SEEK_SET, offset, length, 0)) == 0:
        return True
    number = ctypes.get_errno()
    if number in _BUSY:
        return False
    if kind == fcntl.F_UNLCK and number in _UNKNOWN:
        return True  # nothing is locked
    raise _refused(OSError(number, os.strerror(number)))


def _refused(error: OSError) -> OSError:
    return errors.NoLocks.of(os.strerror(error.errno)) if error.errno in _UNKNOWN else error


def are_available() -> bool:
    """Whether this process can lock anything. Changes nothing."""
    fd = host.open_fd(__file__, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return _set(fd, fcntl.F_RDLCK, 0)
    except errors.NoLocks:
        return False
    finally:
        os.close(fd)


def take(fd: int, start: int, length: int = 1) -> bool:
    """Lock bytes exclusively through this description. Returns False if another holder has one of them. Raises OSError."""
    return _set(fd, fcntl.F_WRLCK, start, length)


def give_back(fd: int, start: int, length: int = 1) -> None:
    """Unlock bytes, for every process that shares this description. Raises OSError."""
    _set(fd, fcntl.F_UNLCK, start, length)


def locked_at(fd: int, start: int, length: int = 1) -> int | None:
    """A byte of the range that is locked through another description, if there is one. The file may be open to be read only."""
    asked = _LAYOUT.pack(fcntl.F_WRLCK, os.SEEK_SET, start, length, 0)
    try:
        kind, _, at, *_ = _LAYOUT.unpack(fcntl.fcntl(fd, fcntl.F_OFD_GETLK, asked))
    except OSError as error:
        raise _refused(error) from None
    return None if kind == fcntl.F_UNLCK else max(at, start)


def file_of(file: int | str) -> tuple[int, int] | None:
    """Which file a descriptor is of, or a path leads to; None if it is closed, or there is none."""
    try:
        status = os.stat(file)
    except OSError:
        return None
    return status.st_dev, status.st_ino


Opener: TypeAlias = Callable[[str, int], int]
"""Opens a path with these flags and returns the descriptor: see `Below.open`."""


def open_plainly(path: str, flags: int) -> int:
    """The `Opener` of a path whose directories only the user can change; the file itself must not be a symbolic link."""
    return host.open_fd(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)


Holds: TypeAlias = dict[int, list[int]]  # offset -> [holders in this process, exclusive]


class LockFile:
    """Locks on the bytes of one file, through one open file description. Callable from any thread; no method blocks.

    ``writable`` False: the file can only be read, so exclusive locks are not available. ``keep``: a forked child has the shared locks that
    its parent holds, too; else none. The file is opened at the first lock, by ``opener``, and closed with this object. If the job's own
    code closes the descriptor, the locks are taken again by the first `try_lock` more than a second later."""

    _mutex: threading.Lock  # guards what follows
    _fd: int
    _file: tuple[int, int] | None  # the file that _fd was opened on: the job may close all descriptors and open others
    _look_at: float  # when _fd is next compared with _file
    _held: Holds
    _second: tuple[int, Holds] | None  # from before_fork on: a child's own description, and what is held there
    _later: deque[int]  # appended to without the mutex
    _pid: int

    def __init__(self, path: str | os.PathLike[str], opener: Opener = open_plainly, *, writable: bool = True, keep: bool = False) -> None:
        self._begin()
        self._path, self._opener, self._writable, self._keep, self._retired = os.fspath(path), opener, writable, keep, False

    def _begin(self) -> None:
        """Nothing open, nothing held: at first, and in a child."""
        self._mutex = threading.Lock()
        self._fd, self._file, self._look_at, self._held, self._second = -1, None, 0.0, {}, None
        self._later = deque()
        self._pid = os.getpid()

    def try_lock(self, offset: int, *, exclusive: bool) -> bool:
        """Lock the byte at ``offset`` if no holder, in this process or another, conflicts. Raises OSError."""
        if self._pid != os.getpid():
            self._part_if_forked()
        if exclusive and not self._writable:
            return False
        with self._mutex:
            got = self._try_locked(offset, exclusive)
        if self._later:
            self.drain()
        return got

    def _try_locked(self, offset: int, exclusive: bool) -> bool:
        held = self._held.get(offset)
        if held is not None:
            if exclusive or held[1]:
                return False
            held[0] += 1
            return True
        if not self._ask_locked(fcntl.F_WRLCK if exclusive else fcntl.F_RDLCK, offset):
            self._close_if_retired()
            return False
        self._held[offset] = [1, int(exclusive)]
        return True

    def _ask_locked(self, kind: int, offset: int) -> bool:
        if self._fd < 0:
            self._open_locked()
        elif time.monotonic() >= self._look_at:
            self._mend_locked()
        try:
            return _set(self._fd, kind, offset)
        except OSError:
            if not self._mend_locked():
                raise
        return _set(self._fd, kind, offset)

    def _mend_locked(self) -> bool:
        """If the job closed our descriptor, all locks went with it, and its number may now be another file's. Open the file again and take
        the locks that no other process has meanwhile."""
        self._look_at = time.monotonic() + LOOK_AGAIN
        if file_of(self._fd) == self._file:
            return False
        log.warning("the descriptor of %s was closed by this process's own code: its locks are taken again", self._path)
        self._open_locked()
        self._held = _take(self._fd, self._held)
        return True

    def _open(self) -> int:
        return self._opener(self._path, os.O_RDWR if self._writable else os.O_RDONLY)

    def _open_locked(self) -> None:
        self._fd = self._open()
        self._file = file_of(self._fd)
        self._look_at = time.monotonic() + LOOK_AGAIN

    def unlock(self, offset: int) -> None:
        """Release one hold. Does nothing if none is held: in a child that inherited none, or after `close`."""
        if self._pid != os.getpid():
            return
        with self._mutex:
            self._unlock_locked(offset)
        if self._later:
            self.drain()

    def _unlock_locked(self, offset: int) -> None:
        held = self._held.get(offset)
        if held is None:
            return
        if held[0] > 1:
            held[0] -= 1
            return
        del self._held[offset]
        try:
            _set(self._fd, fcntl.F_UNLCK, offset)
        except OSError as error:
            if file_of(self._fd) == self._file:  # else the job closed our descriptor, and the lock went with it
                log.warning("%s: byte %d stays locked until this process ends: %s", self._path, offset, str(error))
        if self._retired:
            self._close_if_retired()

    def unlock_soon(self, offset: int) -> None:
        """Release without blocking: for finalizers, which may run at any point, inside this object's own methods too."""
        self._later.append(offset)  # also in a child whose hook has not run yet
        self.drain()

    def drain(self) -> None:
        """Do what `unlock_soon` deferred. Every holder of the mutex checks again after releasing it, so nothing is left undone."""
        while self._later and self._pid == os.getpid() and self._mutex.acquire(blocking=False):
            try:
                while self._later:
                    self._unlock_locked(self._later.popleft())
            finally:
                self._mutex.release()

    def held(self, offset: int) -> bool:
        """Whether this process holds a lock on the byte, through this object."""
        return self._pid == os.getpid() and offset in self._held

    def locked_among(self, offsets: Sequence[int]) -> list[int]:
        """Those of some sorted offsets of which `is_locked` is true. Asks for whole ranges, so that few locks take few calls."""
        locked: list[int] = []
        ranges = [(0, len(offsets))]
        while ranges:
            low, high = ranges.pop()
            if low < high and (at := self.first_locked(offsets[low], offsets[high - 1])) is not None:
                middle = bisect.bisect_left(offsets, at, low, high)
                beyond = bisect.bisect_right(offsets, at, middle, high)
                locked += offsets[middle:beyond]
                ranges += (low, middle), (beyond, high)
        return locked

    def first_locked(self, first: int, last: int) -> int | None:
        """A byte of a range that is locked elsewhere: see `is_locked`. None: none is. Raises OSError."""
        self._part_if_forked()
        with self._mutex:
            if self._fd < 0:
                self._open_locked()
            try:
                return locked_at(self._fd, first, last - first + 1)
            except OSError:
                if not self._mend_locked():
                    raise
            return locked_at(self._fd, first, last - first + 1)

    def is_locked(self, offset: int) -> bool:
        """Whether a lock on the byte is held elsewhere: by another process, or through another description. Takes none. Raises OSError."""
        return self.first_locked(offset, offset) is not None

    def read(self, size: int) -> bytes:
        """The first bytes of the file. Raises OSError."""
        self._part_if_forked()
        with self._mutex:
            if self._fd < 0:
                self._open_locked()
            try:
                return os.pread(self._fd, size, 0)
            except OSError:
                if not self._mend_locked():
                    raise
            return os.pread(self._fd, size, 0)

    def is_lost(self) -> bool:
        """Whether the job closed the descriptor: its number may be another file's now, and other descriptors may be closed too."""
        return self._fd >= 0 and file_of(self._fd) != self._file

    def is_same(self) -> bool:
        """Whether what is open here is still the file that the path names. True while nothing is open."""
        fd = self._fd
        if fd < 0:
            return True
        try:
            there = os.stat(self._path)
        except OSError:
            return False
        return file_of(fd) == (there.st_dev, there.st_ino)

    def has_name(self) -> bool:
        """Whether the open file has a name, as far as one system call tells: `is_same` sees, too, that it was moved. True while nothing is
        open."""
        if self._fd < 0:
            return True
        try:
            status = os.fstat(self._fd)
        except OSError:
            return False
        return (status.st_dev, status.st_ino) == self._file and status.st_nlink > 0

    def close(self) -> None:
        """Release all locks and close the file. A later lock opens it again."""
        self._part_if_forked()
        with self._mutex:
            self._held = {}
            self._later.clear()
            self._close_locked()

    def retire(self) -> None:
        """Close when nothing is held any more: now, or after the last unlock."""
        self._part_if_forked()
        with self._mutex:
            self._retired = True
            self._close_if_retired()
        self.drain()

    def _close_if_retired(self) -> None:
        if self._retired and not self._held:
            self._close_locked()

    def _close_locked(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0 and file_of(fd) == self._file:  # else the number belongs to another file now
            os.close(fd)

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_finalizing() and self._pid == os.getpid():
            with interrupts.shielded():
                self._held = {}  # in a reference cycle, the holder of a lock may be finalized after this
                self._close_locked()

    # -- forks -----------------------------------------------------------------------------------------------------

    def before_fork(self) -> None:
        """Block all changes; with ``keep``, take the held locks a second time, for the child: shared locks overlap, so there is no gap."""
        self._mutex.acquire()  # held over the fork, so that the child inherits a table that fits its descriptor
        if self._keep and self._held:
            self._second = self._taken_twice()

    def _taken_twice(self) -> tuple[int, Holds] | None:
        """The held shared locks, on a second description; an exclusive lock cannot be held twice."""
        fd = -1
        try:
            fd = self._open()
            return fd, _take(fd, {offset: hold for offset, hold in self._held.items() if not hold[1]})
        except OSError as error:
            # Only the text: a log record that is kept would keep the error, its frames and their objects.
            log.warning("%s: a forked child cannot have the %d locks that are held there yet", str(error), len(self._held))
            if fd >= 0:
                os.close(fd)
            return None

    def after_fork_parent(self) -> None:
        """The second description belongs to the child now; if the fork failed, to no process."""
        second, self._second = self._second, None
        self._mutex.release()
        if second is not None:
            os.close(second[0])
        self.drain()

    def after_fork_child(self) -> None:
        """With ``keep`` go on with the second description. The first is closed, never unlocked: its locks are the parent's."""
        if self._pid == os.getpid():
            return  # another hook asked for a lock before this hook ran
        second, later = self._second, self._later
        self._close_locked()
        if self._keep and self._held and second is None:
            second = self._taken_twice()  # now that a descriptor was given back
        self._begin()
        if self._keep and second is not None:
            self._fd, self._held = second
            self._file = file_of(self._fd)
            self._later.extend(later)
            self.drain()

    def _part_if_forked(self) -> None:
        """After a fork by C code, which ran no hook, the description is still shared with the parent: closing it here does not affect
        the parent."""
        if self._pid != os.getpid():
            self._close_locked()
            self._begin()


class Claims:
    """Locks on the bytes of one file that are held for a moment, by one thread of the process at a time: two system calls, no table.

    A forked child closes it, and makes its own."""

    _fd = -1

    def __init__(self, path: str | os.PathLike[str], opener: Opener = open_plainly) -> None:
        self._fd = host.out_of_the_way(opener(os.fspath(path), os.O_RDWR))
        self._file, self._pid = file_of(self._fd), os.getpid()

    def try_claim(self, offset: int) -> bool:
        """Lock a byte, if no other process has it. Then the caller calls `let_go`, in any event. Raises OSError."""
        try:
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _LAYOUT.pack(fcntl.F_WRLCK, 0, offset, 1, 0))
        except OSError as error:
            if error.errno in _BUSY:
                return False
            raise _refused(error) from None
        return True

    def let_go(self, offset: int) -> None:
        fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _LAYOUT.pack(fcntl.F_UNLCK, 0, offset, 1, 0))

    def close(self) -> None:
        """Unlock all bytes and close the file, once. In a child of a fork that takes nothing from the parent."""
        is_open, fd, self._fd = self.is_open(), self._fd, -1
        if is_open:
            if self._pid == os.getpid():  # a child that was forked meanwhile may have the file open, and with it the locks
                give_back(fd, 0, 0)
            os.close(fd)

    def is_open(self) -> bool:
        """Whether the job has not closed the descriptor, and with it all locks."""
        return self._fd >= 0 and file_of(self._fd) == self._file

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_finalizing():
            with interrupts.shielded():
                self.close()


def _take(fd: int, holds: Holds) -> Holds:
    """Lock all of ``holds``; returns those that were free."""
    return {offset: hold for offset, hold in holds.items() if _set(fd, fcntl.F_WRLCK if hold[1] else fcntl.F_RDLCK, offset)}


# -- holders of locks, for messages ------------------------------------------------------------------------------------


def holders(path: str | os.PathLike[str], offset: int, among: Iterable[int] | None = None, *, length: int = 1) -> tuple[int, ...]:
    """The processes that hold a lock on this byte, or on one of ``length`` bytes, as far as /proc shows them: those of other users it shows
    to root only. ``among`` these alone: all of a machine take a while."""
    try:
        status = os.stat(path)
    except OSError:
        return ()
    inode = f":{status.st_ino} "
    return tuple(
        pid
        for pid in (numbers("/proc") if among is None else among)
        if any(_covers(line, inode, offset, length) for line in _locks_of(pid, status))
    )


def numbers(directory: str) -> list[int]:
    """The names in a directory of /proc that are numbers: processes, or the descriptors of one."""
    try:
        return [int(name) for name in os.listdir(directory) if name.isdigit()]
    except OSError:
        return []  # the process ended, or is another user's


def _locks_of(pid: int, file: os.stat_result) -> list[str]:
    """What the kernel says of the locks of a process on one file."""
    lines: list[str] = []
    for fd in numbers(f"/proc/{pid}/fd"):
        try:
            if not os.path.samestat(os.stat(f"/proc/{pid}/fd/{fd}"), file):  # takes a tenth of the next look
                continue
            text = Path(f"/proc/{pid}/fdinfo/{fd}").read_text()
        except OSError:
            continue  # closed meanwhile
        lines += [line for line in text.splitlines() if line.startswith("lock:") and "OFDLCK" in line]
    return lines


def holders_by_byte(path: str | os.PathLike[str]) -> dict[int, int]:
    """The process that holds each byte, as `holders` finds them; of several one."""
    try:
        status = os.stat(path)
    except OSError:
        return {}
    return {int(line.split()[-2]): pid for pid in numbers("/proc") for line in _locks_of(pid, status)}


def _covers(line: str, inode: str, offset: int, length: int = 1) -> bool:
    # lock: 1: OFDLCK ADVISORY  WRITE -1 08:01:1234 7 7
    if inode not in line:
        return False
    start, end = line.split()[-2:]
    return int(start) < offset + length and (end == "EOF" or offset <= int(end))


def posix_holders(path: str | os.PathLike[str], offset: int) -> tuple[int, ...]:
    """The processes, of any user, that have locked this byte by ``fcntl`` or ``lockf``: the kernel lists such locks for every user."""
    try:
        status = os.stat(path)
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return ()
    file = f" {os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino} "
    pids = (int(line.split()[-4]) for line in lines if " POSIX " in line and "->" not in line and _covers(line, file, offset))
    return tuple(pid for pid in pids if pid > 0)  # 0: of another PID namespace


def describe_process(pid: int) -> str:
    """A process in words for people, without its arguments, which may hold secrets."""
    import socket

    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        words = []
    names = [os.path.basename(word.decode(errors="replace")) for word in words[:2] if word and not word.startswith(b"-")]
    return f"process {pid} on {socket.gethostname()} ({' '.join(names) or 'unknown'})"


def describe_holders(path: str | os.PathLike[str], offset: int) -> str:
    """A description of the processes that hold a byte."""
    return ", ".join(describe_process(pid) for pid in holders(path, offset)) or "an unknown process"


def deleted_files(name: str) -> Iterator[str]:
    """The files that had this name in any directory, since that may have another path in the mounts of a process, and have none any more:
    paths below /proc, of descriptors of the processes that it shows to this one."""
    for pid in numbers("/proc"):
        for fd in numbers(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):  # closed meanwhile
                if os.readlink(file := f"/proc/{pid}/fd/{fd}").endswith(f"/{name} (deleted)"):
                    yield file


def read_open(path: str, length: int) -> bytes:
    """The first bytes of a file that a process has open. ``path``: below /proc. Raises OSError."""
    fd = host.open_fd(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.pread(fd, length, 0)
    finally:
        os.close(fd)
