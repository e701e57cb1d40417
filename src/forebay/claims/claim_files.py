"""The files of a claim, opened through its directory, which must be this user's.

The registry is open to everybody, and its owner can put another directory, or a link, under any name in it at any time. So the directory
is opened once, checked by its descriptor, and its files are named in that. A file that another user owns is refused too: he could cut it
short, which kills the process that has it mapped.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from forebay import errors
from forebay._kernel import host


class Gone(errors.Closed, FileNotFoundError):
    """There is no claim of this user under that name: it was freed, or something else stands there."""

    def __init__(self, message: str, **facts: Any) -> None:
        super().__init__(message, **{"what": "claim", **facts})


@contextlib.contextmanager
def inside(directory: str | Path, access: int = os.O_PATH) -> Iterator[int]:
    """A descriptor of a claim's directory, to name files in; with ``os.O_RDONLY`` also for `os.listdir`. Raises `Gone`, OSError."""
    try:
        fd = os.open(directory, access | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        raise Gone(f"{directory} was freed") from None
    try:
        _check_owner(fd, directory)
        yield fd
    finally:
        os.close(fd)


def open_write(directory: str | Path, name: str) -> int:
    """A descriptor to change a file of a claim. Raises `Gone`, OSError."""
    with inside(directory) as parent:
        try:
            fd = host.open_write(name, parent)
        except FileNotFoundError:
            raise Gone(f"{directory}/{name} is missing") from None
    try:
        _check_owner(fd, f"{directory}/{name}")
    except BaseException:
        os.close(fd)
        raise
    return fd


def opener(path: str, flags: int) -> int:
    """`open_write` as the `Opener` of locks and futex words: ``path`` lies in a claim's directory, and ``flags`` are always to write."""
    return open_write(os.path.dirname(path), os.path.basename(path))


def _check_owner(fd: int, path: str | Path) -> None:
    if os.fstat(fd).st_uid != os.geteuid():
        raise Gone(f"{path} belongs to another user")
