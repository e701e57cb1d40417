"""What another program kept, taken over on request."""

from __future__ import annotations

import hashlib
import os
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from forebay import errors
from forebay._logs import logger
from forebay.tasks.values import Values

log = logger("forebay.tasks")

_NAME = re.compile(r"[A-Za-z0-9._-]{0,80}_[0-9a-f]{16}\.pkl")


def import_chia(values: Values, directory: str | os.PathLike[str], *, overwrite: bool) -> int:
    """See `Tasks.import_chia`."""
    taken = 0
    for path in _oldest_first(Path(directory)):
        found = _loaded(path)
        if found is not None and (overwrite or not values.has(found[0])):
            try:
                taken += values.keep(found[0], found[1])
            except errors.ConfigError as error:
                log.warning("%s is not taken over: %s", path, str(error))
    return taken


def _oldest_first(directory: Path) -> Iterator[Path]:
    """The files that have a name of CHIA's, in order of their last change: that is how it orders them by use. Raises OSError."""
    with os.scandir(directory) as found:
        files = [
            (item.stat().st_mtime_ns, item.path) for item in found if _NAME.fullmatch(item.name) and item.is_file(follow_symlinks=False)
        ]
    return (Path(path) for _, path in sorted(files))


def _loaded(path: Path) -> tuple[str, Any] | None:
    """Tag and value of one file; None, with a warning, where it holds something else or is damaged."""
    try:
        tag, value = pickle.loads(path.read_bytes())
        if _file_name(tag) != path.name:
            raise ValueError("its name is not that of its tag")
    except Exception as error:  # noqa: BLE001  # whatever a value's own code raises when it is made anew
        log.warning("%s is not taken over: %s: %s", path, type(error).__name__, str(error))
        return None
    return tag, value


def _file_name(tag: str) -> str:
    """How CHIA calls the file of a tag."""
    slug = re.sub(r"[^A-Za-z0-9._-]", "_", tag)[:80]
    return f"{slug}_{hashlib.sha256(tag.encode()).hexdigest()[:16]}.pkl"
