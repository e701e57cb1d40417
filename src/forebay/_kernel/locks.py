"""Byte-range locks that the kernel lets go when their holder dies: open-file-description locks (``F_OFD_SETLK``).

Such a lock belongs to an open description, not to a thread: two threads of a process would not exclude each other on one, and
a forked child shares its parent's. So a table per description counts the holders within the process, and the child of a fork
gets descriptions of its own.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import struct
import threading
from collections import deque
from pathlib import Path

_LAYOUT = struct.Struct("hhqqi0q")  # struct flock: type, whence, start, length, pid


def _set(fd: int, kind: int, offset: int) -> bool:
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _LAYOUT.pack(kind, os.SEEK_SET, offset, 1, 0))
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


class LockFile:
    """Locks on the bytes of one file, through one open description. Callable from any thread; nothing here ever waits.

    ``writable`` False: the file can only be read, so no exclusive lock can be had."""

    _mutex: threading.Lock  # guards what follows
    _fd: int
    _held: dict[int, list[int]]  # offset -> [holders, exclusive]
    _pid: int

    def __init__(self, path: str | os.PathLike[str], *, writable: bool = True) -> None:
        self._path, self._writable = os.fspath(path), writable
        self._later: deque[int] = deque()
        self._forget()
        self._second = -1
        self._retired = False

    def _forget(self) -> None:
        self._mutex = threading.Lock()
        self._fd, self._held, self._pid = -1, {}, os.getpid()

    def _open(self) -> int:
        return os.open(self._path, (os.O_RDWR if self._writable else os.O_RDONLY) | os.O_CLOEXEC | os.O_NOFOLLOW)

    def try_lock(self, offset: int, *, exclusive: bool) -> bool:
        """Lock the byte at ``offset`` if nobody, in this process or another, stands against it. Raises OSError."""
        if self._pid != os.getpid():
            self._forget()  # forked by C code: the description is the parent's too, and an unlock would drop his lock
        if exclusive and not self._writable:
            return False
        with self._mutex:
            got = self._try_locked(offset, exclusive)
        self.drain()
        return got

    def _try_locked(self, offset: int, exclusive: bool) -> bool:
        held = self._held.get(offset)
        if held is not None:
            if exclusive or held[1]:
                return False
            held[0] += 1
            return True
        if self._fd < 0:
            self._fd = self._open()
        if not _set(self._fd, fcntl.F_WRLCK if exclusive else fcntl.F_RDLCK, offset):
            return False
        self._held[offset] = [1, int(exclusive)]
        return True

    def unlock(self, offset: int) -> None:
        """Let go of one hold. Does nothing where none is held: in a process forked by C code, or after `close`."""
        if self._pid != os.getpid():
            return
        with self._mutex:
            self._unlock_locked(offset)
        self.drain()

    def _unlock_locked(self, offset: int) -> None:
        held = self._held.get(offset)
        if held is None:
            return
        held[0] -= 1
        if held[0] == 0:
            del self._held[offset]
            _set(self._fd, fcntl.F_UNLCK, offset)
            self._close_if_retired()

    def unlock_soon(self, offset: int) -> None:
        """Let go without ever waiting: for finalizers, which may run inside anything, this object's own methods included."""
        if self._pid == os.getpid():
            self._later.append(offset)
            self.drain()

    def drain(self) -> None:
        """Do what `unlock_soon` put off. Every holder of the mutex looks again after letting go, so nothing is left behind."""
        while self._later and self._pid == os.getpid() and self._mutex.acquire(blocking=False):
            try:
                while self._later:
                    self._unlock_locked(self._later.popleft())
            finally:
                self._mutex.release()

    def held(self, offset: int) -> bool:
        """Whether this process holds a lock on the byte, through this object."""
        return self._pid == os.getpid() and offset in self._held

    def is_same(self) -> bool:
        """Whether the path still names the file that is open here. True while nothing is open."""
        if self._fd < 0:
            return True
        try:
            there, here = os.stat(self._path), os.fstat(self._fd)
        except OSError:
            return False
        return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)

    def close(self) -> None:
        """Let go of everything. A later lock opens the file anew."""
        with self._mutex:
            fd, self._fd, self._held = self._fd, -1, {}
        if fd >= 0 and self._pid == os.getpid():
            os.close(fd)

    def retire(self) -> None:
        """Close when nothing is held any more: now, or after the last unlock."""
        with self._mutex:
            self._retired = True
            self._close_if_retired()
        self.drain()

    def _close_if_retired(self) -> None:
        if self._retired and not self._held and self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        if self._fd >= 0 and self._pid == os.getpid():
            os.close(self._fd)

    # -- forks -----------------------------------------------------------------------------------------------------

    def before_fork(self, *, keep: bool) -> None:
        """Stand still; with ``keep`` take what is held a second time, for the child: shared locks overlap, so there is no gap."""
        self.drain()
        self._mutex.acquire()  # held over the fork, so that the child inherits a table that fits its descriptor
        if not (keep and self._held):
            return
        second = self._open()
        for offset, (_, exclusive) in self._held.items():
            if not exclusive:
                _set(second, fcntl.F_RDLCK, offset)
        self._second = second

    def after_fork_parent(self) -> None:
        """The second description is the child's now; if the fork failed, nobody's."""
        second, self._second = self._second, -1
        if second >= 0:
            os.close(second)
        self._mutex.release()
        self.drain()

    def after_fork_child(self, *, keep: bool) -> None:
        """With ``keep`` go on with the second description. The first is closed, never unlocked: its locks are the parent's."""
        first, second, held, later = self._fd, self._second, self._held, self._later
        self._forget()
        self._second, self._later = -1, deque()
        if keep and second >= 0:
            self._fd = second
            self._held = {offset: hold for offset, hold in held.items() if not hold[1]}
            self._later.extend(later)
        if first >= 0:
            os.close(first)


# -- who holds what, for people ----------------------------------------------------------------------------------------


def holders(path: str | os.PathLike[str], offset: int) -> tuple[int, ...]:
    """The processes that hold a lock on this byte, as far as /proc shows them."""
    try:
        found = os.stat(path)
    except OSError:
        return ()
    inode = f":{found.st_ino} "
    return tuple(pid for pid in _pids() if any(_covers(line, inode, offset) for line in _locks_of(pid)))


def _pids() -> list[int]:
    try:
        return [int(name) for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        return []


def _locks_of(pid: int) -> list[str]:
    lines: list[str] = []
    try:
        for entry in os.scandir(f"/proc/{pid}/fdinfo"):
            text = Path(entry.path).read_text()
            lines += [line for line in text.splitlines() if line.startswith("lock:") and "OFDLCK" in line]
    except OSError:
        return lines  # it ended, or is another user's
    return lines


def _covers(line: str, inode: str, offset: int) -> bool:
    # lock: 1: OFDLCK ADVISORY  WRITE -1 08:01:1234 7 7
    if inode not in line:
        return False
    start, end = line.split()[-2:]
    return int(start) <= offset and (end == "EOF" or offset <= int(end))


def describe_process(pid: int) -> str:
    """A process in words for people, without its arguments, which may hold secrets."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        words = []
    names = [os.path.basename(word.decode(errors="replace")) for word in words[:2] if word and not word.startswith(b"-")]
    return f"process {pid} on {socket.gethostname()} ({' '.join(names) or 'unknown'})"


def describe_holders(path: str | os.PathLike[str], offset: int) -> str:
    """Who holds a byte, in words for people."""
    return ", ".join(describe_process(pid) for pid in holders(path, offset)) or "an unknown process"
