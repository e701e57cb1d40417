"""What lies in a root and is counted by nobody: files of ours that no row names, and files that Forebay did not make.

The first are left by crashes of the machine, by a catalog that was lost, or put there: `check.remove_strays` removes them. The others are
somebody's: they are told, with their bytes, and stay.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

from forebay._engine.catalog import Catalog, entries
from forebay._engine.files.layout import FANS, BlobName, Root, TmpName, parse_blob_below, parse_directory_name, parse_tmp_name
from forebay._engine.files.root import foreign
from forebay._engine.index.slots import Slots
from forebay._kernel.below import LinkInTheWay
from forebay._model import Strays

_AT_ONCE = 2048
"""Names that are asked for at once."""


def look(root: Root, catalog: Catalog, slots: Slots) -> Strays:
    """How much there is of both, in blocks of the disk. Lists names a directory at a time; what came or went meanwhile is not counted."""
    files, taken = _counted(_unknown(root, catalog, slots))
    return Strays(files, taken, *_counted(root.path / name for name in foreign(root.path)))


def _counted(paths: Iterable[Path]) -> tuple[int, int]:
    count = taken = 0
    for path in paths:
        size = size_of(path)
        if size is not None:
            count, taken = count + 1, taken + size
    return count, taken


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


def _unknown(root: Root, catalog: Catalog, slots: Slots) -> Iterator[Path]:
    """What has one of our names where it belongs, and no row that names it, nor a reservation, when it is looked at."""
    places: list[tuple[str, Path, Callable[[str], BlobName | TmpName | None]]] = [
        *(("blob", root.blobs_dir / fan, partial(parse_blob_below, fan)) for fan in FANS),
        ("tree", root.trees_dir, parse_directory_name),
        ("pack", root.packs_dir, parse_directory_name),
        ("", root.tmp_dir, parse_tmp_name),
    ]
    for kind, directory, parse in places:
        try:
            names = root.files.names_in(directory)
        except (FileNotFoundError, LinkInTheWay):
            continue
        found = [(parsed, name) for name in names if (parsed := parse(name)) is not None]
        intended = slots.intent()  # after the names: what is being written stands there, or has its row by now
        while some := found[-_AT_ONCE:]:
            del found[-_AT_ONCE:]
            of = {name: (parsed.id, kind, parsed.suffix) for parsed, name in some if parsed.id not in intended}
            stray = _not_named(catalog, kind, list(of.values()))
            yield from (directory / name for name, what in of.items() if what in stray)


def _not_named(catalog: Catalog, kind: str, names: Sequence[entries.FileName]) -> set[entries.FileName]:
    if not kind:  # what is being written, which a row or a reservation only has the id of
        ours = entries.known(catalog, [id for id, _, _ in names])
        ours |= entries.known(catalog, [id for id, _, _ in names if id not in ours])
        return {name for name in names if name[0] not in ours}
    return entries.unnamed(catalog, list(entries.unnamed(catalog, names)))  # twice: what was being published has its row by now
