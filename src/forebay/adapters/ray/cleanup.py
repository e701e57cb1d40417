"""Removes a directory when no process holds its lock any more. Also a program, ``python cleanup.py DIRECTORY``, which imports nothing of
Forebay: Ray kills its workers, so that no code of their own runs when they end."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import sys
from collections.abc import Callable

LOCK, WATCH = "lock", "watch"
"""Files in the directory: who uses it has the first locked shared, and the process that waits to remove it has the second locked."""

FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
"""With which these files are opened."""


def is_named(fd: int, path: str) -> bool:
    """Whether the open file still has this path. False if the program has closed it."""
    try:
        return os.path.samestat(os.fstat(fd), os.lstat(path))
    except OSError:
        return False


def remove_unused(directory: str, opener: Callable[[str, int, int], int] = os.open, *, wait: bool) -> bool:
    """Remove the directory unless a process holds its lock. ``wait``: until none does. ``opener``: as `os.open`. False if it is in use, or
    is gone."""
    lock = os.path.join(directory, LOCK)
    try:
        fd = opener(lock, FLAGS, 0o600)
    except (FileNotFoundError, NotADirectoryError):
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        if not is_named(fd, lock):  # P1 holds / we wait / P2 removes it first, and P3 creates another
            return False
        gone = f"{directory}.{os.getpid()}"
        os.rename(directory, gone)  # P1 removes file by file / P2 would take the lock file that is not removed yet
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    shutil.rmtree(gone, ignore_errors=True)
    return True


def main() -> None:
    """Wait in a process that is nobody's child: when Ray ends a worker, it kills the worker's children first."""
    if os.fork():
        return
    os.setsid()
    directory = sys.argv[1]
    with contextlib.suppress(FileNotFoundError, BlockingIOError):  # it is gone, or another process waits
        watch = os.open(os.path.join(directory, WATCH), FLAGS, 0o600)
        fcntl.flock(watch, fcntl.LOCK_EX | fcntl.LOCK_NB)
        remove_unused(directory, wait=True)


if __name__ == "__main__":
    main()
