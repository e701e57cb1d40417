"""Removes shared directories that no process uses any more. Also a program, ``python cleanup.py PLACE``, which imports nothing of Forebay,
and does this until none is left in PLACE: Ray kills its workers, so that no code of their own runs when they end."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import socket
import sys
import time
import zlib
from collections.abc import Callable, Iterator

PREFIX = "forebay-ray-"
_OURS = re.compile(rf"({re.escape(PREFIX)}[0-9a-f]{{32}})(\.\d+)?")
"""Names of these directories, also while they are removed."""
LOCK = "lock"
"""The file in a directory that each process which uses it has locked, shared."""
FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
"""With which it is opened."""
PERIOD = 0.5
"""Seconds between two looks of the program."""

Opener = Callable[[str, int, int], int]


def is_named(fd: int, path: str) -> bool:
    """Whether the open file still has this path. False if the program has closed it."""
    try:
        return os.path.samestat(os.fstat(fd), os.lstat(path))
    except OSError:
        return False


def remove_unused(place: str, opener: Opener = os.open, but: str | None = None) -> bool:
    """Remove this user's shared directories below ``place`` that no process has locked, except ``but``. Returns whether one is left.
    ``opener``: as `os.open`."""
    left = [path for path in _directories(place) if path != but and not _remove(path, opener)]
    return bool(left)


def _directories(place: str) -> Iterator[str]:
    with contextlib.suppress(OSError), os.scandir(place) as scan:
        for entry in list(scan):
            with contextlib.suppress(OSError):  # removed meanwhile
                if _OURS.fullmatch(entry.name) and os.lstat(entry.path).st_uid == os.geteuid():
                    yield entry.path


def _remove(directory: str, opener: Opener) -> bool:
    """False if it is in use."""
    lock = os.path.join(directory, LOCK)
    try:
        fd = opener(lock, FLAGS, 0o600)
    except OSError:
        return True  # it is gone, or no directory
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not is_named(fd, lock):  # P1 has it locked / P2 opens the file / P1 removes the directory / P2 gets the lock
            return True
        gone = f"{directory.partition('.')[0]}.{os.getpid()}"
        os.rename(directory, gone)  # P1 removes file by file / P2 would take the lock file that is not removed yet
    except BlockingIOError:
        return False
    except OSError:
        return True  # the directory may not be written to
    finally:
        os.close(fd)
    shutil.rmtree(gone, ignore_errors=True)
    return True


def main() -> None:
    """Watch from a process that is nobody's child: when Ray ends a worker, it kills the worker's children first. One process of a user
    watches a place: it is known by a socket, which leaves no file."""
    if os.fork():
        return
    os.setsid()
    place = sys.argv[1]
    name = f"\0{PREFIX}{os.geteuid()}-{zlib.crc32(os.fsencode(place)):08x}"
    is_left = True
    while is_left:
        with socket.socket(socket.AF_UNIX) as mark:
            try:
                mark.bind(name)
            except OSError:
                return
            while remove_unused(place):
                time.sleep(PERIOD)
        # P1 sees no directory / P2 makes one, and its watcher ends since P1 watches / P1 would end
        is_left = remove_unused(place)


if __name__ == "__main__":
    main()
