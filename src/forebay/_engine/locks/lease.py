"""What callers hold: a lease on one entry, or on a file that is not the cache's."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from forebay import errors
from forebay._model import Entry


class Lease:
    """A hold on one cached file or directory: while it is open, the path exists and the bytes do not change. Returned by `Cache.local`.

    ``with lease as path`` gives the path, a plain ``str``, and releases the lease at the end of the block. Without a ``with``, `path` or
    ``os.fspath(lease)`` gives the same string, until `close`, garbage collection, or the death of every process that holds it. The
    attribute ``entry`` is the entry, with its size and validator.

    Callable from any thread. A lease taken before a ``fork`` also holds the entry for the child. A pickled or copied lease is separate:
    unpickling opens the same URL again in that process and cache, without asking the remote for cached bytes."""

    _reopen: tuple[Callable[..., Lease], tuple[Any, ...]] | None = None

    def __init__(self, release: Callable[[int], None], entry: Entry, path: str) -> None:
        self.entry, self.path = entry, path
        self._release = [release]  # a list, since `pop` is one step: of two threads that close, one does

    def close(self) -> None:
        """Release the lease. A second call does nothing."""
        try:
            release = self._release.pop()
        except IndexError:
            return
        release(self.entry.id)

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_finalizing():  # at exit the kernel releases it, whatever is left of the interpreter
            self.close()

    @property
    def closed(self) -> bool:
        """Whether this lease has been released."""
        return not self._release

    def reopened_by(self, function: Callable[..., Lease], *args: Any) -> Self:
        """Make a pickled copy of this lease open with ``function(*args)``. Returns the lease itself."""
        self._reopen = function, args
        return self

    def __fspath__(self) -> str:
        self._check_open()
        return self.path

    def __str__(self) -> str:
        return self.path

    def __repr__(self) -> str:
        return f"<forebay.Lease {self.path!r} of {self.entry.name!r}{' closed' if self.closed else ''}>"

    def __enter__(self) -> str:
        self._check_open()
        return self.path

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __reduce__(self) -> tuple[Callable[..., Lease], tuple[Any, ...]]:
        self._check_open()
        if self._reopen is None:
            raise TypeError(
                f"the lease on {self.entry.name!r} is internal and cannot be pickled: pickle what Cache.local or Cache.directory gave"
            )
        return self._reopen

    def _check_open(self) -> None:
        if self.closed:
            raise errors.Closed.of(f"lease on {self.entry.name!r}")


def in_place(path: str) -> Lease:
    """The hold on a file or directory that is not the cache's: nothing is locked, and it is never removed. Raises NotFound."""
    try:
        return _InPlace(path)
    except (OSError, ValueError) as error:
        raise errors.NotFound(f"{path}: there is no such file or directory", url=path) from error


class _InPlace(Lease):
    def __init__(self, path: str) -> None:
        self.path, self._release = path, []  # closed, for its finalizer, if there is no such file
        info = os.stat(path)
        kind = "directory" if stat.S_ISDIR(info.st_mode) else "file"
        self.entry = Entry(0, "", path, kind, info.st_size, 0, 0, b"", None, info.st_mtime, "", "cached")
        self._release = [_nothing]


def _nothing(id: int) -> None:
    """Nothing to release."""
