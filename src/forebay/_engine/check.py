"""Checks whether a root is sound, repairs it, and counts stray files. Used by the tests and by ``forebay verify``.

Everything is checked while other processes work; what seems wrong is checked again under the lock that keeps it unchanged.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

from forebay._engine.catalog import checked, entries, making, recovery, reservations, segments, spaces
from forebay._engine.catalog.connection import Catalog
from forebay._engine.files import blobs, pack_files, stages
from forebay._engine.files.layout import (
    FANS,
    BlobName,
    Root,
    TmpName,
    parse_blob_below,
    parse_directory_name,
    parse_policy_name,
    parse_tmp_name,
)  # fmt: skip
from forebay._engine.files.root import foreign
from forebay._engine.index.records import RECORDS, EntryIndex
from forebay._engine.reading import Reading
from forebay._engine.space import eviction
from forebay._engine.space.eviction import Eviction
from forebay._kernel import interrupts
from forebay._kernel.locks import LockFile
from forebay._model import Entry, Problem, Strays
from forebay.errors import Damaged

AT_ONCE = 2048
"""Rows, or names, that are in memory at once."""
_NOT_COUNTED = "a write that no reservation counts"


def check(root: Root, catalog: Catalog, index: EntryIndex, *, deep: bool = False) -> list[Problem]:
    """The problems of a root. ``deep`` reads every byte and compares checksums.

    Rows are read in pages, and names a directory at a time, while other processes work. An entry that is being published or evicted has
    only a name or only a row, so whatever seems wrong is checked again under the writer lock, where no entry is in between."""
    with catalog.still():
        lost = index.lost()
    if lost:
        return [Problem("slots", str(path), "a part of the records of entries is lost or damaged") for path in lost]
    problems = [*_check_rows(catalog, index), *_check_strays(root, catalog, index)]
    with catalog.still():  # packs are few
        problems += _check_segments(root, catalog)
    problems += [*_check_totals(catalog), *_check_files(root, catalog, deep)]
    return [*problems, *(Problem("row", row, "it holds what no row of ours would") for row in catalog.unreadable_rows)]


def _check_rows(catalog: Catalog, index: EntryIndex) -> Iterator[Problem]:
    yield from _check_records(catalog, index)
    for low, high in entries.ranges(catalog, "entries"):
        checked.files(catalog, catalog.all("SELECT id, slot, kind, suffix, key FROM entries WHERE id > ? AND id <= ?", low, high), "iskxt")
        for (key,) in catalog.all(
            "SELECT key FROM entries WHERE id > ? AND id <= ? AND kind = 'value' AND id NOT IN (SELECT id FROM payloads)", low, high
        ):
            yield Problem("payload", str(key), "a row and its payload are not both there")
    for low, high in entries.ranges(catalog, "payloads"):
        for (id,) in catalog.all("SELECT id FROM payloads WHERE id > ? AND id <= ? AND id NOT IN (SELECT id FROM entries)", low, high):
            yield Problem("payload", f"payload {id}", "a row and its payload are not both there")
    reservations.every(catalog)  # reports those that are invalid
    yield from _check_links(catalog)


def _check_records(catalog: Catalog, index: EntryIndex) -> Iterator[Problem]:
    """Each live entry has its record, and each record its entry."""
    seen = bytearray(index.slots)
    for low, high in entries.ranges(catalog, "entries"):
        for slot, id in entries.slots_between(catalog, low, high):
            if slot < len(seen) and index.id_of(slot) == id:
                seen[slot] = 1
            else:
                with catalog.still():
                    lost = [entry for entry in entries.by_ids(catalog, [id]) if index.id_of(entry.slot) != id]
                if lost and id not in dict(index.head.intent()):
                    yield Problem("slot", lost[0].name, "it has no record", lost[0].key, id)
    for number in range(len(seen) // RECORDS):
        interrupts.point()
        for slot, id in enumerate(index.ids(number), number * RECORDS):
            if id and not seen[slot]:
                with catalog.still():
                    entry = entries.by_id(catalog, id)
                    stale = index.id_of(slot) == id and (entry is None or entry.slot != slot)
                if stale and id not in dict(index.head.intent()):
                    yield Problem("slot", f"{id:x}", "a record names it, and no row does")


def _check_links(catalog: Catalog) -> Iterator[Problem]:
    after: tuple[int, str] = (-1 << 63, "")
    while page := catalog.all(
        "SELECT tree, name, member, tree IN (SELECT id FROM entries) AND member IN (SELECT id FROM entries) FROM links"
        " WHERE (tree, name) > (?, ?) ORDER BY tree, name LIMIT ?", *after, AT_ONCE,
    ):  # fmt: skip
        for tree, name, member, both in page:
            if not both:
                ids = [f"{id:x}" if isinstance(id, int) else repr(id) for id in (tree, member)]
                yield Problem("link", name, f"tree {ids[0]} or its file {ids[1]} has no entry")
        after = page[-1][:2]


def _check_strays(root: Root, catalog: Catalog, index: EntryIndex) -> Iterator[Problem]:
    """Files and directories that no row names. The next writer removes those of an intent."""
    kinds = {"blob": "a file that no row names", "policy": "the policy of a space that is gone", "": _NOT_COUNTED}
    for path, name in _strays(root, catalog, index):
        with catalog.still():
            stray = bool(_unnamed(catalog, [name])) and name[0] not in dict(index.head.intent()) and _is_there(root, path)
        if stray:
            yield Problem("stray", str(path), kinds.get(name[1], "a directory that no row names"))
    for other in root.files.names_in(root.tmp_dir):
        if parse_tmp_name(other) is None:
            yield Problem("stray", str(root.tmp_dir / other), _NOT_COUNTED)


def _is_there(root: Root, path: Path) -> bool:
    try:
        root.files.lstat(path)
    except FileNotFoundError:
        return False
    return True


def _check_lost(root: Root, catalog: Catalog, id: int, path: Path, key: str, what: str) -> Iterator[Problem]:
    """Check again an entry that had a row and no file: it is lost unless it is being evicted."""
    with catalog.still():
        rows = catalog.all("SELECT 1 FROM entries WHERE id = ?", id)
        lost = bool(rows) and not (root.files.is_directory(path) if what == "directory" else _is_there(root, path))
    if lost:
        yield Problem("lost", str(path), f"an entry whose {what} is gone", key, id)


def _check_segments(root: Root, catalog: Catalog) -> Iterator[Problem]:
    """Each segment has its row. A row may have no file yet, while the file is created or after the process that did so was killed."""
    unnamed = list(eviction.unnamed(root, catalog))
    charged = segments.sums(catalog)
    for id, key, size in catalog.all("SELECT id, key, size FROM entries WHERE kind = 'pack'"):
        for number in [number for pack, number, _ in unnamed if pack == id]:
            yield Problem("segment", str(pack_files.segment_path(root, id, number)), "a segment that no row names", key)
        index = pack_files.size_of_index(root, id)
        if index is not None and size != (total := index + charged.get(id, 0)):
            yield Problem("total", key, f"{size:,} bytes are noted, and its index and segments take {total:,}", key)


def _check_totals(catalog: Catalog) -> list[Problem]:
    """Check again what differs, while no process writes."""
    if not _uneven(catalog):
        return []
    with catalog.still():
        return _uneven(catalog)


def _uneven(catalog: Catalog) -> list[Problem]:
    noted, sums = catalog.all("SELECT id, name, bytes, charge, inline, entries FROM spaces"), spaces.sums(catalog)
    return [
        Problem("total", name, f"bytes, charge, inline and entries are noted as {numbers}, and add up to {there}")
        for id, name, *numbers in noted
        if numbers != (there := list(sums.get(id, (0, 0, 0, 0))))
    ]


def _check_files(root: Root, catalog: Catalog, deep: bool) -> Iterator[Problem]:
    """Check that each row has its files with the right sizes, and if ``deep`` the right bytes."""
    for id, _, kind, suffix in entries.superseded(catalog, 1 << 20):
        path = root.blob(id, suffix)
        if kind == "blob" and not _is_there(root, path):
            yield from _check_lost(root, catalog, id, path, "", "file")
    for low, high in entries.ranges(catalog, "entries"):
        for entry in interrupts.paced(entries.between(catalog, low, high, values=deep)):
            yield from _check_entry(root, catalog, entry, deep)


def _check_entry(root: Root, catalog: Catalog, entry: Entry, deep: bool) -> Iterator[Problem]:
    wrong = False
    if entry.kind == "value":
        data = entries.payload(catalog, entry.id) if deep else None
        wrong = data is not None and blobs.checksum_of(data) != entry.checksum
    elif entry.kind == "blob":
        path = root.blob(entry.id, entry.suffix)
        try:
            wrong = root.files.lstat(path).st_size != entry.size
            wrong = wrong or (deep and not blobs.verify_blob(root, path, entry.size, entry.checksum))
        except FileNotFoundError:
            yield from _check_lost(root, catalog, entry.id, path, entry.key, "file")
    elif entry.kind in ("tree", "pack"):
        path = root.tree(entry.id) if entry.kind == "tree" else root.pack(entry.id)
        if not root.files.is_directory(path):
            yield from _check_lost(root, catalog, entry.id, path, entry.key, "directory")
        elif entry.kind == "tree":
            yield from _check_tree(root, catalog, entry)
        elif deep:
            yield from _check_samples(root, entry)
    if wrong:
        yield Problem("damaged", entry.name, "its bytes are not what was stored", entry.key, entry.id)


def _check_tree(root: Root, catalog: Catalog, entry: Entry) -> Iterator[Problem]:
    """Check that a tree holds links to its files under their names, and nothing else."""
    try:
        names = set(interrupts.paced(blobs.list_files(root, entry.id)))  # first: of what is added meanwhile the rows come first
        files = {name: root.blob_name(member.id, member.suffix) for name, member in entries.members(catalog, entry.id)}
        others = {
            name for name in interrupts.paced(names & set(files)) if not _is_one_file(root, f"{root.tree(entry.id)}/{name}", files[name])
        }
    except FileNotFoundError:
        return  # evicted meanwhile; a directory that is lost is reported by its name
    wrong = sorted((names - set(files) if blobs.grows(entry.meta) else names ^ set(files)) | others)
    if wrong and entries.by_id(catalog, entry.id) is not None:  # else it is being removed
        yield Problem("damaged", entry.name, f"{wrong[0]!r} in it has changed since it was stored", entry.key, entry.id)


def _is_one_file(root: Root, one: str, other: str) -> bool:
    try:
        return os.path.samestat(root.files.lstat(one), root.files.lstat(other))
    except FileNotFoundError:
        return False


def _check_samples(root: Root, entry: Entry) -> Iterator[Problem]:
    try:
        bad = pack_files.bad_slots(root, entry.id, pack_files.map_index(root, entry.id, None, writable=False))
    except FileNotFoundError:
        return  # evicted meanwhile; a directory that is lost is reported by its name
    except Damaged as error:
        yield Problem("damaged", entry.name, str(error), entry.key, entry.id)
        return
    if bad:
        shown = ", ".join(map(str, bad[:5])) + ("..." if len(bad) > 5 else "")
        yield Problem("samples", entry.name, f"{len(bad):,} of its samples, not what was stored: {shown}", entry.key, entry.id)


def _empty_samples(root: Root, id: int) -> None:
    """Empty the slots of damaged records so that they can be filled again. Takes the slots' locks, as writers do."""
    words = pack_files.map_index(root, id, None, writable=True)
    cells = pack_files.cells_of(words)
    for slot in pack_files.bad_slots(root, id, words):
        pack_files.empty_slot(root, id, cells, slot, cells[slot])


def repair(
    root: Root, catalog: Catalog, index: EntryIndex, eviction: Eviction, keys: LockFile, reading: Reading, problems: list[Problem]
) -> None:  # fmt: skip
    """Set aside entries that are damaged or lost, remove files that no row names, store lost records, and recount the totals."""
    for problem in problems:
        entry = entries.by_id(catalog, problem.id) if problem.kind in ("lost", "damaged") else None
        if entry is not None:
            reading.set_aside(entry, str(problem))
        if problem.kind == "samples":
            _empty_samples(root, problem.id)
    if any(problem.kind == "stray" for problem in problems):
        remove_strays(root, catalog, index, eviction, keys)
    if any(problem.kind in ("segment", "total") for problem in problems):
        _repair_segments(root, catalog)
    if any(problem.kind in ("segment", "total", "link", "payload", "row") for problem in problems):
        with catalog.write() as txn:
            spaces.recount(txn)
    if any(problem.kind == "slot" for problem in problems):
        recovery.reconcile(catalog, index)
    eviction.sweep()


def _repair_segments(root: Root, catalog: Catalog) -> None:
    """Count the segments of packs, and set the sizes of packs to those of their files and rows."""
    eviction.measure(root, catalog)
    with catalog.write() as txn:
        for id in segments.packs(txn):
            if (index := pack_files.size_of_index(root, id)) is not None:
                segments.recount(txn, id, index)


def remove_strays(root: Root, catalog: Catalog, index: EntryIndex, eviction: Eviction, keys: LockFile) -> int:
    """Remove files that no row names; returns how many. Files that are being written stay. Those that are leased are counted, and removed
    when they no longer are."""
    removed = 0
    for path, name in _strays(root, catalog, index):
        if name[1] == "policy":  # a hint: whoever has it mapped goes on
            removed += root.files.unlink(path)
            continue
        if name[1]:
            if eviction.remove_orphan(name):
                removed += 1
            elif (size := _size_of(path)) is not None:
                eviction.count_orphan(name, size)
            continue
        keyhash = tmp.keyhash if (tmp := parse_tmp_name(path.name)) else 0
        if keys.try_lock(keyhash, exclusive=True):
            try:
                # Listed before its reservation was seen: look again, now that its key is ours.
                if _unnamed(catalog, [name]):
                    removed += stages.remove_partial(root, keyhash, name[0]) | root.files.remove_whole(path)
            finally:
                keys.unlock(keyhash)
    return removed


def count_strays(root: Root, catalog: Catalog, index: EntryIndex) -> Strays:
    """The files that nobody counts: those of ours that no row names, and those that Forebay did not make, in blocks of the disk.

    The first are left by a crash of the machine or a lost catalog; `remove_strays` removes them. The others belong to somebody, and stay.
    A damaged catalog that was set aside is one of the first. Names are listed a directory at a time; what comes or goes meanwhile is not
    counted."""
    files, taken = _counted([*map(Path, making.names_of_set_aside(root)), *(path for path, _ in _strays(root, catalog, index))])
    return Strays(files, taken, *_counted(root.path / name for name in foreign(root.path)))


def _counted(paths: Iterable[Path]) -> tuple[int, int]:
    count = taken = 0
    for path in paths:
        size = _size_of(path)
        if size is not None:
            count, taken = count + 1, taken + size
    return count, taken


def _size_of(path: str | Path) -> int | None:
    """The bytes of disk that a file takes, or a directory with all that is in it; None if it is gone. No link is followed."""
    try:
        status = os.lstat(path)
        size = status.st_blocks * 512
        for above, _, names in os.walk(path) if stat.S_ISDIR(status.st_mode) else ():
            size += sum(os.lstat(os.path.join(above, name)).st_blocks * 512 for name in names)
    except FileNotFoundError:
        return None
    return size


def _strays(root: Root, catalog: Catalog, index: EntryIndex) -> Iterator[tuple[Path, entries.FileName]]:
    """What has one of our names where it belongs, and no row or reservation that names it, when it is looked at. The kind of what is in
    ``tmp/`` is empty."""
    places: list[tuple[str, Path, Callable[[str], BlobName | TmpName | None]]] = [
        *(("blob", root.blobs_dir / fan, partial(parse_blob_below, fan)) for fan in FANS),
        ("tree", root.trees_dir, parse_directory_name),
        ("pack", root.packs_dir, parse_directory_name),
        ("policy", root.shared_dir, parse_policy_name),
        ("", root.tmp_dir, parse_tmp_name),
    ]
    for kind, directory, parse in places:
        files = [(parsed, name) for name in root.files.names_in(directory) if (parsed := parse(name)) is not None]
        intended = dict(index.head.intent())  # after the names: what is being written stands there, or has its row by now
        while some := files[-AT_ONCE:]:
            del files[-AT_ONCE:]
            of = {directory / name: (parsed.id, kind, parsed.suffix) for parsed, name in some if parsed.id not in intended}
            stray = _unnamed(catalog, list(_unnamed(catalog, list(of.values()))))  # twice: what was published has its row by now
            yield from ((path, name) for path, name in of.items() if name in stray)


def _unnamed(catalog: Catalog, names: Sequence[entries.FileName]) -> set[entries.FileName]:
    """Those of some names, of the same kind, that no row names, or no reservation."""
    if names and names[0][1] == "policy":
        return {name for name in names if spaces.by_id(catalog, name[0]) is None}
    if names and not names[0][1]:
        return {name for name in names if reservations.by_id(catalog, name[0]) is None}
    return entries.unnamed(catalog, names)
