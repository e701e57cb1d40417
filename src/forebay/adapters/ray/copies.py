"""Directories that processes of this host share under one name, and that go when the last of them has ended, in whatever way.

A process that uses one holds a lock in it until it ends, and so does each child that it forks. One small process for all of them looks
which locks are free, and removes those directories. If that process was killed too, the next one that makes such a directory removes them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

from forebay import errors
from forebay._kernel import host, interrupts
from forebay._logs import logger
from forebay.adapters.ray import cleanup

log = logger("forebay.ray")

CONTENT = "checkpoint"
"""The name of the content in a directory."""
_held: dict[str, tuple[int, os.stat_result]] = {}
"""The locks that this process holds, by directory, until it ends: the descriptor, and which file it is."""
_new: set[str] = set()
"""Those of them for which `settle` was not called yet."""


def hold(name: str) -> Path:
    """The directory of this name (32 hex digits) in the temporary directory, which only this user can read: created if it is missing, and
    kept until all processes that called this, and the children that they forked since, have ended. Raises `Foreign`, OSError."""
    directory = os.path.join(tempfile.gettempdir(), cleanup.PREFIX + name)
    lock = os.path.join(directory, cleanup.LOCK)
    _new.add(directory)
    _release_removed()
    if (held := _held.get(directory)) is not None:
        if cleanup.is_named(held[0], lock):
            return Path(directory)
        _close(_held.pop(directory, None))
    for _ in interrupts.turns():
        try:
            os.makedirs(directory, 0o700)
            cleanup.remove_unused(os.path.dirname(directory), _open, but=directory)
        except FileExistsError:
            _check_own(directory)
        try:
            fd = _open(lock, cleanup.FLAGS, 0o600)
        except FileNotFoundError:  # it was removed meanwhile
            continue
        try:
            host.flock(fd, fcntl.LOCK_SH)
            if not cleanup.is_named(fd, lock):
                continue
            _close(_held.pop(directory, None))
            _held[directory], fd = (fd, os.fstat(fd)), -1
        finally:
            if fd >= 0:
                os.close(fd)
        break
    _watch(os.path.dirname(directory))
    return Path(directory)


def settle(directory: Path) -> None:
    """The directory has its content, or will not have it: when the caller has removed it, it is not in use any more."""
    _new.discard(str(directory))


def _release_removed() -> None:
    """Let go of directories whose content the user has removed: a process may go through thousands."""
    for directory in _held.keys() - _new:
        if os.path.lexists(os.path.join(directory, CONTENT)) or (held := _held.pop(directory, None)) is None:
            continue
        # T1 sees that the content is gone / T2 asks for the directory, and finds its lock held / T1 takes the lock out
        if directory not in _new or _held.setdefault(directory, held) is not held:
            _close(held)


def _close(held: tuple[int, os.stat_result] | None) -> None:
    """Let a lock go, unless the program has closed it: its number may be another file's by now."""
    if held is not None:
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(held[0]), held[1]):
                os.close(held[0])


def _open(path: str, flags: int, mode: int) -> int:
    return host.open_fd(Path(path), flags, mode)


def _check_own(directory: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        status = os.lstat(directory)
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
            raise errors.Foreign(f"{directory} is not a directory of this user: remove it, or set TMPDIR", path=directory)


def _watch(place: str) -> None:
    """Start the process that removes the directories, unless there is one."""
    words = [sys.executable or "python3", "-I", "-S", cleanup.__file__, place]
    quiet = subprocess.DEVNULL
    try:
        subprocess.run(words, stdin=quiet, stdout=quiet, stderr=quiet, cwd="/", start_new_session=True, check=True)
    except (OSError, ValueError, subprocess.CalledProcessError) as error:  # such as no interpreter of its own in an embedded Python
        log.warning("shared directories in %s are not removed when their last process ends, but by the next: %s", place, error)
