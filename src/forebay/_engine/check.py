"""The oracle: is this root sound? Used by every test, and by ``forebay verify``. And repair.

Everything is looked at while others work: what is seen to be wrong is looked at again under the lock that makes it still.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from forebay._engine import blobs, packs, stages, trees
from forebay._engine.budget import Budget
from forebay._engine.catalog import Catalog, entries, reservations, segments, spaces
from forebay._engine.catalog.schema import DOOMED, LIVE
from forebay._engine.eviction import Eviction
from forebay._engine.fill import Fill
from forebay._engine.reading import Reading
from forebay._engine.root import Root, parse_tmp_name
from forebay._engine.slots import Slots
from forebay._kernel import host, locks
from forebay._model import Entry, Problem
from forebay.errors import Damaged


def check(root: Root, catalog: Catalog, slots: Slots, budget: Budget, *, deep: bool = False) -> list[Problem]:
    """What is wrong. ``deep`` reads every byte and compares checksums.

    The names are listed and the rows read under the writer lock, so that no publish and no eviction is between its row and its
    file; what is still on its way (doomed rows, reservations) is known by its row."""
    if root.read_only:
        return list(_check_files(root, catalog, deep))
    with catalog.writer():
        found = [*_check_rows(catalog, slots, root), *_check_names(root, catalog, slots.intent()), *_check_totals(catalog, budget)]
    return [*found, *_check_files(root, catalog, deep)]


def _check_rows(catalog: Catalog, slots: Slots, root: Root) -> Iterator[Problem]:
    known = entries.names(catalog)
    for row in catalog.all("SELECT id, state, slot, key FROM entries"):
        id, state, slot, key = row
        if state != LIVE and slots.id_of(slot) == id:
            yield Problem("slot", key, "it left, and its slot still names it", key)
    free = {row[0] for row in catalog.all("SELECT slot FROM free_slots")}
    taken = {row[0] for row in catalog.all("SELECT slot FROM entries")}
    top = int(spaces.setting(catalog, "next_slot") or 0)
    if free & taken:
        yield Problem("slot", str(min(free & taken)), "it is both free and taken")
    if len(free) + len(taken) != top:
        yield Problem("slot", "the table", f"{top} were given out, but {len(taken)} are taken and {len(free)} free")
    for tree, name, member in catalog.all("SELECT tree, name, member FROM links"):
        if tree not in known or member not in known:
            yield Problem("link", name, f"tree {tree:x} or its file {member:x} has no entry")
    lost = catalog.all(
        "SELECT e.key FROM entries e LEFT JOIN payloads p ON p.id = e.id WHERE e.kind = 'value' AND p.id IS NULL"
        " UNION ALL SELECT 'payload ' || p.id FROM payloads p LEFT JOIN entries e ON e.id = p.id WHERE e.id IS NULL"
    )
    for (key,) in lost:
        yield Problem("payload", str(key), "a row and its payload are not both there")


def _check_names(root: Root, catalog: Catalog, intent: range) -> Iterator[Problem]:
    """Files and rows name each other. ``intent``: files that the next writer removes if they have no row."""
    files = dict(blobs.list_blobs(root))
    rows = {row[0]: row for row in catalog.all("SELECT id, state, kind, suffix, key FROM entries")}
    promised = {r.id: r for r in reservations.every(catalog)}
    for id, path in files.items():
        if id not in rows and id not in promised and id not in intent:
            yield Problem("stray", str(path), "a file that no row names")
    for id, state, kind, suffix, key in rows.values():
        if state == DOOMED:
            continue
        if kind == "blob" and files.get(id) != root.blob(id, suffix):
            yield Problem("lost", str(root.blob(id, suffix)), "an entry whose file is gone", key, id)
        directory = {"tree": root.tree, "pack": root.pack}.get(kind)
        if directory is not None and not os.path.isdir(directory(id)):
            yield Problem("lost", str(directory(id)), "an entry whose directory is gone", key, id)
    directories = [(id, root.tree(id)) for id in trees.list_trees(root)] + [(id, root.pack(id)) for id in packs.list_packs(root)]
    for id, path in directories:
        if id not in rows and id not in promised:
            yield Problem("stray", str(path), "a directory that no row names")
    yield from _check_segments(root, catalog)
    for name in os.listdir(root.tmp_dir):
        parsed = parse_tmp_name(name)
        if parsed is None or parsed.id not in promised:
            yield Problem("stray", str(root.tmp_dir / name), "a write that no reservation counts")


def _check_segments(root: Root, catalog: Catalog) -> Iterator[Problem]:
    """Each segment has its row; a row may be ahead of its file, while it is made or after its maker was killed."""
    rows = {(row.pack, row.number) for row in segments.every(catalog)}
    charged = segments.sums(catalog)
    for id, key, size in catalog.all("SELECT id, key, size FROM entries WHERE kind = 'pack'"):
        for number, path in packs.list_segments(root, id):
            if (id, number) not in rows:
                yield Problem("segment", str(path), "a segment that no row names", key)
        try:
            index = packs.PAGE + os.stat(root.pack(id) / "index").st_size
        except FileNotFoundError:
            continue  # it is lost, or on its way out
        if size != index + charged.get(id, 0):
            yield Problem("total", key, f"{size:,} bytes are noted, and its index and segments take {index + charged.get(id, 0):,}", key)


def _check_totals(catalog: Catalog, budget: Budget) -> Iterator[Problem]:
    sums = catalog.all(
        "SELECT s.name, s.bytes, s.charge, s.inline, s.entries, coalesce(sum(e.size * (e.state = 0)), 0), coalesce(sum(e.charge), 0),"
        " coalesce(sum(e.charge * (e.kind = 'value')), 0), count(e.id) FROM spaces s LEFT JOIN entries e ON e.space = s.id GROUP BY s.id"
    )
    for name, *numbers in sums:
        if numbers[:4] != numbers[4:]:
            yield Problem("total", name, f"bytes, charge, inline and entries are noted as {numbers[:4]}, and add up to {numbers[4:]}")
    (state,) = catalog.all("PRAGMA quick_check(1)")[0]
    if state != "ok":
        yield Problem("catalog", "catalog.sqlite", str(state))


def _check_files(root: Root, catalog: Catalog, deep: bool) -> Iterator[Problem]:
    """Sizes, and bytes if ``deep``: of what is still there when it is looked at."""
    for entry in entries.live(catalog):
        if entry.kind == "value":
            data = entries.payload(catalog, entry.id) if deep else None
            wrong = data is not None and blobs.checksum_of(data) != entry.checksum
        elif entry.kind == "blob":
            path = root.blob(entry.id, entry.suffix)
            try:
                wrong = path.lstat().st_size != entry.size or (deep and not blobs.verify_blob(path, entry.size, entry.checksum))
            except FileNotFoundError:
                continue  # evicted meanwhile; what is lost for good is found by its name
        elif entry.kind == "pack" and deep:
            yield from _check_samples(root, entry)
            continue
        elif entry.kind == "tree":
            yield from _check_tree(root, catalog, entry)
            continue
        else:
            continue
        if wrong:
            yield Problem("damaged", entry.name, "its bytes are not what was stored", entry.key, entry.id)


def _check_tree(root: Root, catalog: Catalog, entry: Entry) -> Iterator[Problem]:
    """A tree holds links to its files, under their names, and nothing else."""
    files = {name: root.blob_name(member.id, member.suffix) for name, member in entries.members(catalog, entry.id)}
    try:
        names = set(trees.list_files(root, entry.id))
        others = {name for name in names & set(files) if not os.path.samefile(root.tree(entry.id) / name, files[name])}
    except FileNotFoundError:
        return  # evicted meanwhile; what is lost for good is found by its name
    wrong = sorted((names ^ set(files)) | others)
    if wrong and entries.by_id(catalog, entry.id) is not None:  # else it is being removed
        yield Problem("damaged", entry.name, f"{wrong[0]!r} in it is not what was put there", entry.key, entry.id)


def _check_samples(root: Root, entry: Entry) -> Iterator[Problem]:
    try:
        bad = packs.bad_slots(root, entry.id, packs.map_index(root, entry.id, None, writable=False))
    except FileNotFoundError:
        return  # evicted meanwhile; what is lost for good is found by its name
    except Damaged as error:
        yield Problem("damaged", entry.name, str(error), entry.key, entry.id)
        return
    if bad:
        shown = ", ".join(map(str, bad[:5])) + ("..." if len(bad) > 5 else "")
        yield Problem("samples", entry.name, f"{len(bad):,} of its samples, not what was stored: {shown}", entry.key, entry.id)


def _empty_samples(root: Root, id: int) -> None:
    """Empty the slots of what is damaged: they can be filled again. Under the slots' locks, as writers do."""
    words = packs.map_index(root, id, None, writable=True)
    claims = locks.Claims(root.pack(id) / "index")
    try:
        for slot in packs.bad_slots(root, id, words):
            packs.empty_slot(words[packs.HEADER_WORDS :], claims, slot, words[packs.HEADER_WORDS + slot])
    finally:
        claims.close()


def mend(root: Root, catalog: Catalog, eviction: Eviction, fill: Fill, reading: Reading, found: list[Problem]) -> None:
    """Set aside what is damaged or lost, remove what no row names, note the totals anew."""
    for problem in found:
        entry = entries.by_id(catalog, problem.id) if problem.kind in ("lost", "damaged") else None
        if entry is not None:
            reading.set_aside(entry, str(problem))
        if problem.kind == "samples":
            _empty_samples(root, problem.id)
    if any(problem.kind == "stray" for problem in found):
        remove_strays(root, catalog, eviction, fill)
    if any(problem.kind in ("segment", "total") for problem in found):
        _mend_segments(root, catalog)
    if any(problem.kind in ("slot", "total", "link", "payload") for problem in found):
        with catalog.write() as txn:
            spaces.recount(txn)
    eviction.sweep()


def _mend_segments(root: Root, catalog: Catalog) -> None:
    """Remove segments without a row, and note the sizes of packs as their files and rows have them."""
    with catalog.write() as txn:
        rows = {(row.pack, row.number) for row in segments.every(txn)}
        for (id,) in txn.all("SELECT id FROM entries WHERE kind = 'pack'"):
            for number, path in packs.list_segments(root, id):
                if (id, number) not in rows:
                    host.unlink(path)
            try:
                index = packs.PAGE + os.stat(root.pack(id) / "index").st_size
            except FileNotFoundError:
                continue
            segments.recount(txn, id, index)


def remove_strays(root: Root, catalog: Catalog, eviction: Eviction, fill: Fill) -> int:
    """Remove files that no row names: never from under a lease, nor from under a writer."""
    removed = eviction.remove_orphans()
    for name in os.listdir(root.tmp_dir):
        parsed = parse_tmp_name(name)
        if parsed is None or reservations.by_id(catalog, parsed.id) is not None:
            continue
        hold = fill.try_hold_hash(parsed.keyhash)
        if hold is None:
            continue
        try:
            # Listed before its reservation was seen: look again, now that its key is ours.
            if reservations.by_id(catalog, parsed.id) is None:
                removed += stages.remove_partial(root, parsed.keyhash, parsed.id) | trees.remove_whole(root.tmp_dir / name)
        finally:
            hold.release()
    return removed
