"""Directories that processes of this host share under one name, and that go when the last of them has ended, in whatever way.

A process that uses one holds a lock in it until it ends, and so does each child that it forks. A small process waits for that lock, and
then removes the directory. If that process was killed too, the next one that makes such a directory removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
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

PREFIX = "forebay-ray-"
_OURS = re.compile(re.escape(PREFIX) + r"[0-9a-f]{32}(\.\d+)?")
"""Names of these directories, also while they are removed."""

_held: dict[str, int] = {}
"""The locks that this process holds, by directory, until it ends."""


def hold(name: str) -> Path:
    """The directory of this name (32 hex digits) in the temporary directory, which only this user can read: created if it is missing, and
    kept until all processes that called this, and the children that they forked since, have ended. Raises `Foreign`, OSError."""
    directory = os.path.join(tempfile.gettempdir(), PREFIX + name)
    lock = os.path.join(directory, cleanup.LOCK)
    if (held := _held.get(directory)) is not None and cleanup.is_named(held, lock):
        return Path(directory)
    for _ in interrupts.turns():
        try:
            os.makedirs(directory, 0o700)
            _remove_unused(but=directory)
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
            _held[directory], fd = fd, -1
        finally:
            if fd >= 0:
                os.close(fd)
        break
    _watch(directory)
    return Path(directory)


def _open(path: str, flags: int, mode: int) -> int:
    return host.open_fd(Path(path), flags, mode)


def _check_own(directory: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        status = os.lstat(directory)
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
            raise errors.Foreign(f"{directory} is not a directory of this user: remove it, or set TMPDIR", path=directory)


def _remove_unused(*, but: str) -> None:
    """Remove what killed processes left, whose watching process was killed too."""
    with os.scandir(os.path.dirname(but)) as scan:
        names = [entry.path for entry in scan if _OURS.fullmatch(entry.name) and entry.path != but]
    for path in interrupts.paced(names):
        with contextlib.suppress(OSError):  # another user's, or just removed
            if os.lstat(path).st_uid == os.geteuid():
                cleanup.remove_unused(path, _open, wait=False)


def _watch(directory: str) -> None:
    """Start the process that removes the directory, unless there is one."""
    words = [sys.executable or "python3", "-I", "-S", cleanup.__file__, directory]
    quiet = subprocess.DEVNULL
    try:
        subprocess.run(words, stdin=quiet, stdout=quiet, stderr=quiet, cwd="/", start_new_session=True, check=True)
    except (OSError, ValueError, subprocess.CalledProcessError) as error:  # such as no interpreter of its own in an embedded Python
        log.warning("%s is not removed when its last process ends, but by the next `to_directory`: %s", directory, error)
