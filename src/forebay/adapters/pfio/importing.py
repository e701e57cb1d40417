"""What PFIO preserved, as an array of the node's cache."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from forebay import codecs, errors
from forebay.adapters.pfio.file import PfioFile
from forebay.cache import Cache
from forebay.samples import Samples


def import_pfio(
    path: str | os.PathLike[str], name: str, cache: Cache | None = None, *, codec: str = "raw", overwrite: bool = False
) -> Samples[Any]:  # fmt: skip
    """An array of this name, frozen, with what PFIO's ``MultiprocessFileCache.preserve`` wrote to the file ``path``.

    It goes into ``cache``, else into the default one, which stays open as long as the array. ``codec``: ``raw``, or ``pickle`` for what
    was put with ``do_pickle``; nothing is unpickled here. Raises `ConfigError` where the name is taken and not to be overwritten,
    `Damaged` where the file is none of PFIO's or was cut short, `NoSpace` where not all of it fits, OSError."""
    wrap: Callable[[Any], bytes] | None = bytes if codec == "raw" else codecs.framed if codec == "pickle" else None
    if wrap is None:
        raise errors.ConfigError(f"codec={codec!r}: what PFIO stored is 'raw', or 'pickle'", name="codec", value=codec)
    file = PfioFile(path)
    home = Cache() if cache is None else cache
    found: Samples[Any] = home.samples(length=len(file), codec=codec)
    try:
        for slot in file:
            data = file.get(slot)
            if data is not None and not found._pack.put(slot, lambda stream: (wrap(stream),), data):
                raise errors.NoSpace.of(f"slot {slot} of {path}", len(data), 0, home.budget)
        if not found.preserve(name, overwrite):
            message = f"there is an array {name!r} already: choose another name, or overwrite=True"
            raise errors.ConfigError(message, name="name", value=name)
    except BaseException:
        found.close()
        raise
    return found
