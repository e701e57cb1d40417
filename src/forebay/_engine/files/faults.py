"""Where errors of the disk become faults of the cache, which calls survive by reading past it."""

from __future__ import annotations

import errno
from types import TracebackType

from forebay import errors

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
SCARCE = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
"""What the process or the machine has too little of for now: nothing is wrong with the root."""


class CatalogBroken(errors.CacheFault):
    """The catalog is gone, damaged, or another root's: it has to be rebuilt. ``damaged``: what it answers is what no sound one does."""

    damaged: bool = False


class DiskFull(errors.NoSpace):
    """SQLite ran out of disk space, or the disk quota is used up. ``relieved``: there is room now, since the ballast was released."""

    relieved: bool = False


class faults:
    """Around what only the cache does: any OSError of the disk becomes `NoSpace` or `CacheFault`, with its cause.

    A class, since a generator takes thrice as long, and this is around every block that is written."""

    __slots__ = ("_key", "_need")

    def __init__(self, key: str, need: int = 0) -> None:
        self._key, self._need = key, need

    def __enter__(self) -> None:
        """Nothing is to be done."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if not isinstance(error, OSError) or isinstance(error, errors.ForebayError):
            return
        if error.errno in FULL:
            raise errors.NoSpace(
                f"no room for {self._key!r} on the disk: {error}", key=self._key, need=self._need, free=0, budget=0, limit="disk"
            ) from error
        raise errors.CacheFault(f"the cache failed for {self._key!r}: {error}", key=self._key) from error
