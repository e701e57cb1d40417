"""How entries make way: in one transaction, batch by batch, and with files that cannot be removed."""

from __future__ import annotations

import contextlib
import errno
import os
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from forebay import errors
from forebay._engine.space import budget
from forebay._engine.space.ranking import Ranking, Scope
from forebay._engine.store import Store
from forebay._kernel import host
from forebay._model import Victim
from tests.harness import KiB, MiB, assert_settled, bytes_of, data_usage, opened
from tests.processes import fork

VALUE = os.urandom(4 * KiB)


def fill(store: Store, count: int = 300) -> None:
    for n in range(count):
        store.put("v", f"k{n}", VALUE)


def commits(store: Store, work: int) -> int:
    """How many transactions ``work`` puts of new values take."""
    steps: Counter[str] = Counter()
    host.on_step(lambda call, subject: steps.update([call]))
    try:
        for n in range(work):
            store.put("v", f"new{n}", VALUE)
    finally:
        host.on_step(None)
    return steps["committed"]


def test_a_put_under_pressure_is_one_transaction(tmp_path: Path) -> None:
    with opened(tmp_path / "root", MiB) as store:
        fill(store)
        store.put("v", "one", VALUE)  # picks the coldest
        assert commits(store, 40) == 40
        assert store.check(deep=True) == []
    assert_settled(tmp_path / "root", MiB)


def test_the_coldest_go_first_and_are_counted(tmp_path: Path) -> None:
    with opened(tmp_path / "root", MiB) as store:
        fill(store)
        store.put("v", "one", VALUE)
        left = [entry.key for entry in store.seeing.entries("v")]
        before = store.seeing.counts()["evictions"]
        store.view("v", left[0])
        store.touch(store.seeing.entries("v")[0])
        commits(store, 60)
        now = {entry.key for entry in store.seeing.entries("v")}
        gone = [key for key in left if key not in now]
        assert gone == left[1 : len(gone) + 1]  # in the order of their last use; the one that was read stays
        assert left[0] in now
        assert store.seeing.counts()["evictions"] - before == len(gone)


def test_what_others_evict_and_replace_all_the_time_makes_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P1 picks the entries of a small space / P2 evicts them and adds others / P1 waits for the writer lock meanwhile: six times."""
    with opened(tmp_path / "root", 8 * MiB) as store:
        store.spaces.open("small", quota=2 * MiB)
        size, turns = MiB - 2000, iter(range(6))
        for n in range(2):
            store.put("small", f"k{n}", bytes(size))
        pick = Ranking.pick

        def pick_too_early(ranking: Ranking, scope: Scope) -> None:
            pick(ranking, scope)
            if next(turns, None) is not None:
                store.remove([Victim.of(entry) for entry in store.seeing.entries("small")])
                for n in range(2):
                    store.put("small", f"k{n}", bytes(size))

        with monkeypatch.context() as patched:
            patched.setattr(Ranking, "pick", pick_too_early)
            store.put("small", "new", bytes(size))
        assert next(turns, None) is None


def test_who_remembers_what_made_way_finds_nothing(tmp_path: Path) -> None:
    with opened(tmp_path / "root", MiB) as store:
        fill(store)
        remembered = {entry.key: store.view("v", entry.key) for entry in store.seeing.entries("v")}

        def press() -> None:
            with opened(tmp_path / "root") as other:
                for n in range(100):
                    other.put("v", f"new{n}", VALUE)
                other.put("v", "large", VALUE * 4)
                assert other.seeing.counts()["evictions"] > 100  # some have no successor in their slot

        fork(press).result()
        left = {entry.key for entry in store.seeing.entries("v")}
        assert 0 < len(left & set(remembered)) < len(remembered)
        for key, found in remembered.items():
            assert found is not None
            assert found.is_current() == (key in left), key
            assert bytes(found.view) == VALUE
            assert bytes_of(store, key) == (VALUE if key in left else None)


@pytest.mark.parametrize("how", ["pinned", "another space", "file"])
def test_what_is_not_plain_goes_the_long_way(tmp_path: Path, how: str) -> None:
    """What is pinned stays; a space that may not evict its own takes others'; a coldest entry that is a file goes as files go."""
    with opened(tmp_path / "root", MiB) as store:
        if how == "another space":
            store.spaces.ensure("f", policy="freeze")
            store.put("f", "stays", VALUE)
        if how == "file":
            store.put("v", "stays", os.urandom(100 * KiB))
        else:
            store.put("v", "stays", VALUE, life="pinned" if how == "pinned" else "cached")
        fill(store)
        assert (bytes_of(store, "stays") is not None) == (how == "pinned")
        assert bytes_of(store, "k299") == VALUE
        if how == "another space":
            assert bytes_of(store, "stays", "f") is None  # frozen against its own, not against the root's needs
        assert store.check(deep=True) == []
    assert_settled(tmp_path / "root", MiB)


def test_a_replaced_value_is_not_its_own_victim(tmp_path: Path) -> None:
    with opened(tmp_path / "root", 64 * KiB) as store:
        for n in range(200):
            store.put("v", "same", VALUE + bytes([n]))
            store.put("v", f"k{n}", VALUE)
            store.touch(store.seeing.entries("v")[0])
        assert bytes_of(store, "same") == VALUE + bytes([199])
        assert store.check(deep=True) == []


# -- batch by batch ----------------------------------------------------------------------------------------------------


@pytest.fixture
def full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """A root of nine files, where others may write after each victim."""
    monkeypatch.setattr(budget, "BATCH", 1)
    monkeypatch.setattr(budget, "AT_MOST", 0.0)
    with opened(tmp_path / "root", MiB) as store:
        for n in range(9):
            store.put("v", f"k{n}", os.urandom(100 * KiB))
        yield store
        assert store.check(deep=True) == []
    assert_settled(tmp_path / "root", MiB)


@contextlib.contextmanager
def between_batches(store: Store, work: Callable[[int], object]) -> Iterator[None]:
    """Have ``work`` done each time that a search lets others write, but not by itself. It is told the bytes that the search holds."""
    found, inside = store.engine.parts.writers.budget, []
    pick = found._pick

    def and_work(search: budget.Search) -> None:
        if search.reserved is not None and not inside:
            inside.append(search)
            work(search.reserved.charge)
            inside.clear()
        pick(search)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(found, "_pick", and_work)
        yield


def test_small_writers_do_not_take_what_a_large_write_has_freed(full: Store) -> None:
    written: list[int] = []

    def small(held: int) -> None:
        full.put("v", f"small{len(written)}", os.urandom(40 * KiB))
        written.append(data_usage(full.root.path))

    large = os.urandom(800 * KiB)
    with between_batches(full, small):
        full.put("v", "large", large)
    assert bytes_of(full, "large") == large
    assert 3 < len(written) < 30
    assert max(written) <= MiB


def test_of_two_that_grow_and_cannot_both_have_room_one_does(full: Store) -> None:
    failed: list[errors.NoSpace] = []

    def another(held: int) -> None:
        if held > 500 * KiB and not failed:
            with pytest.raises(errors.NoSpace) as found:
                full.put("v", "another", os.urandom(700 * KiB))
            failed.append(found.value)

    large = os.urandom(900 * KiB)
    with between_batches(full, another):
        full.put("v", "large", large)
    assert bytes_of(full, "large") == large
    assert failed


# -- files that stay ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["evicted", "removed", "replaced"])
def test_a_file_that_the_system_does_not_let_go_stays_counted_and_goes_later(
    tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """As in a directory that somebody made immutable."""
    place = tmp_path / "root"

    def refuse(call: str, subject: str) -> None:
        if call == "unlink" and "/blobs/" in subject:
            raise PermissionError(errno.EPERM, "Operation not permitted", subject)

    with opened(place, MiB) as store:
        for n in range(9):
            store.put("v", f"k{n}", os.urandom(100 * KiB))
        host.on_step(refuse)
        try:
            if how == "removed":
                one = store.seeing.entries("v")[0]
                store.remove([Victim(one.name, one.size, one.charge, one.used, one.id)])
            elif how == "replaced":
                store.put("v", "k0", b"small")
            with pytest.raises(errors.NoSpace):
                store.put("v", "new", os.urandom(300 * KiB))
        finally:
            host.on_step(None)
        assert "cannot be removed" in caplog.text
        assert len(store.seeing.entries("v")) >= 5, "it does not go on evicting in vain"
        assert data_usage(place) <= MiB
        assert store.check(deep=True) == []
        store.put("v", "new", bytes(900 * KiB))
        assert bytes_of(store, "new") == bytes(900 * KiB)
    assert_settled(place, MiB)


def test_a_reader_that_stands_still_costs_no_more_than_was_lacking(tmp_path: Path) -> None:
    """Values that were evicted give their pages back only when nobody reads an older state of the catalog."""
    with opened(tmp_path / "root", 4 * MiB) as store:
        for n in range(600):
            store.put("v", f"k{n}", VALUE)
        con = sqlite3.connect(tmp_path / "root" / "catalog.sqlite", isolation_level=None)
        with contextlib.closing(con):
            con.execute("BEGIN")
            con.execute("SELECT count(*) FROM entries").fetchone()
            before = len(store.seeing.entries("v"))
            for n in range(5):
                store.put("v", f"new{n}", os.urandom(100 * KiB))
            gone = before - len([entry for entry in store.seeing.entries("v") if entry.kind == "value"])
            assert gone * (4 * KiB) < 4 * 5 * 100 * KiB
        assert store.check(deep=True) == []
