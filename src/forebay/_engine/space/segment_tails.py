"""The empty ends of pack segments.

An open segment counts with all that its writer may fill. The rest behind its last record is given back when the writer leaves it, or once
the writer is dead, by the next process that needs room. A writer holds its segment's byte of the pack's index, and so does whoever
measures a segment: only this lock tells whether something appends to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from forebay._engine.catalog import segments
from forebay._engine.catalog.connection import Catalog
from forebay._engine.catalog.transactions import Rows
from forebay._engine.files import pack_files
from forebay._engine.files.layout import faults
from forebay._engine.files.root import Root
from forebay.errors import Damaged


def measure(root: Root, catalog: Catalog) -> None:
    """Count all segments by their files and records: a crash of the machine may have lost rows. Caller: holds no lock."""
    with catalog.write() as txn:
        segments.open_all(txn)
        for pack, number, length in unnamed(root, txn):
            segments.open_one(txn, pack, number, length)
    reclaim(root, catalog)


def unnamed(root: Root, rows: Rows) -> Iterator[tuple[int, int, int]]:
    """The segments that no row names: pack, number, length of the file."""
    named = {(row.pack, row.number) for row in segments.every(rows)}
    for pack in segments.packs(rows):
        for number in pack_files.list_segments(root, pack):
            if (pack, number) not in named and (length := pack_files.segment_length(root, pack, number)):
                yield pack, number, length


def any_left(root: Root, rows: Rows) -> bool:
    """Whether `reclaim` would give anything back."""
    return bool(_left(root, rows))


def _left(root: Root, rows: Rows) -> dict[int, list[int]]:
    """The numbers of the open segments that no process appends to, by pack."""
    numbers: dict[int, list[int]] = {}
    for segment in segments.opened(rows):
        numbers.setdefault(segment.pack, []).append(segment.number)
    left = {pack: pack_files.unlocked(root, pack, several) for pack, several in numbers.items()}
    return {pack: several for pack, several in left.items() if several}


def reclaim(root: Root, catalog: Catalog) -> None:
    """Close the open segments that no process appends to, in all packs. Caller: holds no lock."""
    for pack, numbers in _left(root, catalog).items():
        with faults(f"pack {pack:x}"):
            try:
                claims = pack_files.claims(root, pack)
            except FileNotFoundError:
                continue  # it is being removed
            try:
                # P1 sees that segment 1 is left / P2 closes it; P3 takes it and appends / P1: only now that it has the byte, the words
                # tell where the last record ends.
                mine = [number for number in numbers if claims.try_claim(pack_files.byte_of(number))]
                words = pack_files.map_index(root, pack, None, writable=False)
                close(root, catalog, pack, {number: end.tail for number, end in pack_files.find_ends(root, pack, mine, words).items()})
            except (FileNotFoundError, Damaged):
                continue
            finally:
                claims.close()


def close(root: Root, catalog: Catalog, pack: int, tails: Mapping[int, int]) -> None:
    """Give back what segments have behind their last records. Caller: holds their bytes, and appends no more."""
    kept = {number: pack_files.punch_segment(root, pack, number, tail) for number, tail in tails.items()}
    with catalog.write() as txn:
        for number, size in kept.items():
            segments.close(txn, pack, number, size)
