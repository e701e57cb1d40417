"""A check and a repair of many rows: a page of them at a time, while others work."""

from __future__ import annotations

from pathlib import Path

import pytest

from forebay._engine.catalog import schema, spaces
from forebay._engine.catalog.transactions import Rows
from tests.harness import MiB, bytes_of, opened


@pytest.fixture
def place(quick_path: Path) -> Path:
    return quick_path / "root"


def test_a_check_and_a_repair_have_a_page_of_rows_in_memory(place: Path) -> None:
    """No statement sorts or collects all rows: SQLite would do that in memory, since a read that takes long keeps the log from starting
    again."""
    with opened(place, 8 * MiB) as store:
        said: list[str] = []
        store.put("v", "k", b"x")
        con = store.engine.parts.catalog._con
        assert con is not None
        con.set_trace_callback(said.append)
        assert store.check() == []
        with store.engine.parts.catalog.write() as txn:
            spaces.recount(txn)
        assert schema.damage(con) is None
        con.set_trace_callback(None)
        for sql in {sql for sql in said if sql.startswith(("SELECT", "DELETE", "UPDATE", "INSERT"))}:
            plan = [row[-1] for row in con.execute(f"EXPLAIN QUERY PLAN {sql}")]
            if " > " not in sql:  # of a page, whatever is done with it
                assert not [step for step in plan if step.startswith(("USE TEMP", "LIST")) or "AUTOMATIC" in step], sql


def test_totals_that_change_while_they_are_added_up_are_no_problem(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sums, left = spaces.sums, ["other"]

    def added_up(rows: Rows) -> dict[int, tuple[int, ...]]:
        while left:
            store.put("v", left.pop(), b"x")
        return sums(rows)

    with opened(place, 8 * MiB) as store:
        store.put("v", "k", b"x")
        monkeypatch.setattr(spaces, "sums", added_up)
        assert store.check() == []
        with store.engine.parts.catalog.write() as txn:
            txn.run("UPDATE spaces SET charge = charge + 1")
        assert [problem.kind for problem in store.check()] == ["total"]
        store.repair()
        assert store.check() == []


@pytest.mark.parametrize("harm", ["a record that no row names", "a row without a record", "two records of one entry"])
def test_rows_and_records_are_compared(place: Path, harm: str) -> None:
    with opened(place, 8 * MiB) as store:
        for n in range(20):
            store.put("v", f"k{n}", b"x")
        index, entry = store.engine.index, store.seeing.entries("v")[0]
        if harm == "a row without a record":
            index.clear(entry.slot, entry.id)
        else:
            stranger = entry._replace(slot=5000, id=entry.id if "two" in harm else 4711)
            index.store(1, stranger, 1, 1)
        index.head.finish()
        (problem,) = store.check()
        assert problem.kind == "slot"
        store.repair()
        assert store.check() == []
        assert {bytes_of(store, f"k{n}") for n in range(20)} == {b"x"}
        assert sum(map(bool, index.ids(0))) == 20


def test_only_names_of_ours_in_their_places_are_strays(place: Path) -> None:
    with opened(place, 8 * MiB) as store:
        ours = store.root.blob(0x1FF, ".bin")
        theirs = [place / "blobs/00/notes.txt", place / f"blobs/00/{0x1FF:016x}", place / "trees/linux", place / "packs/0.5"]
        too_large = f"{1 << 62:016x}"  # no row has such an id
        theirs += [place / f"{folder}/{too_large}" for folder in ("blobs/00", "trees", "packs")]
        for path in (ours, *theirs):
            path.write_bytes(b"left")
        assert (store.strays().files, store.strays().foreign) == (1, len(theirs))
        assert {problem.subject for problem in store.check() if problem.kind == "stray"} == {str(ours)}
        assert store.remove_strays().files == 1
        assert not ours.exists()
        assert all(path.read_bytes() == b"left" for path in theirs)
