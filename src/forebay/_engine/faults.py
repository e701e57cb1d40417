"""Where errors of the disk become faults of the cache, which calls survive by reading past it."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator

from forebay import errors

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


@contextlib.contextmanager
def faults(key: str, need: int = 0) -> Iterator[None]:
    """Around what only the cache does: any OSError of the disk becomes `NoSpace` or `CacheFault`, with its cause."""
    try:
        yield
    except errors.ForebayError:
        raise
    except OSError as error:
        if error.errno in FULL:
            found = errors.NoSpace(f"no room for {key!r} on the disk: {error}", key=key, need=need, free=0, budget=0)
        else:
            found = errors.CacheFault(f"the cache failed for {key!r}: {error}", key=key)  # type: ignore[assignment]
        raise found from error
