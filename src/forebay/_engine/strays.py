"""What lies in a root and is counted by nobody: files of ours that no row names, and files that Forebay did not make.

The first are left by crashes of the machine, by a catalog that was lost, or put there: `check.remove_strays` removes them. The others are
somebody's: they are told, with their bytes, and stay.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from forebay._engine.catalog import Catalog, entries
from forebay._engine.layout import FANS, BlobName, Root, TmpName, parse_blob_below, parse_directory_name, parse_tmp_name
from forebay._engine.root import foreign as foreign
from forebay._engine.slots import Slots
from forebay._kernel.below import LinkInTheWay
from forebay._model import Strays


def look(root: Root, catalog: Catalog, slots: Slots) -> Strays:
    """How much there is of both, in blocks of the disk. Lists names a directory at a time; what came or went meanwhile is not counted."""
    ours = [(id, path) for id, path in _unknown(root, catalog, slots)]
    known = entries.known(catalog, [id for id, _ in ours])  # a file that was being published has its row by now
    sizes = [size for id, path in ours if id not in known and (size := size_of(path)) is not None]
    others = [size for name in foreign(root.path) if (size := size_of(root.path / name)) is not None]
    return Strays(len(sizes), sum(sizes), len(others), sum(others))


def size_of(path: str | Path) -> int | None:
    """The bytes of disk that a file takes, or a directory with all that is in it; None if it is gone. No link is followed."""
    try:
        status = os.lstat(path)
        size = status.st_blocks * 512
        for above, _, names in os.walk(path) if stat.S_ISDIR(status.st_mode) else ():
            size += sum(os.lstat(os.path.join(above, name)).st_blocks * 512 for name in names)
    except FileNotFoundError:
        return None
    return size


def _unknown(root: Root, catalog: Catalog, slots: Slots) -> Iterator[tuple[int, Path]]:
    """What has one of our names where it belongs, and no row or reservation when it is looked at."""
    places: list[tuple[Path, Callable[[str], BlobName | TmpName | None]]] = [
        *((root.blobs_dir / fan, partial(parse_blob_below, fan)) for fan in FANS),
        *((directory, parse_directory_name) for directory in (root.trees_dir, root.packs_dir)),
        (root.tmp_dir, parse_tmp_name),
    ]
    for directory, parse in places:
        try:
            names = root.files.names_in(directory)
        except (FileNotFoundError, LinkInTheWay):
            continue
        found = {parsed.id: name for name in names if (parsed := parse(name)) is not None}
        intended = slots.intent()  # after the names: what is being written stands there, or has its row by now
        for id in found.keys() - entries.known(catalog, list(found)):
            if id not in intended:
                yield id, directory / found[id]
