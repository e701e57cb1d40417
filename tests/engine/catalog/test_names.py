"""Before each transaction: has what this process has open still its names in the root?"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from forebay._engine.store import Store
from tests.harness import MiB, bytes_of, opened
from tests.processes import in_child


@pytest.fixture
def store(quick_path: Path) -> Iterator[Store]:
    """A store of a root whose names have not changed for a while, as its last transaction saw."""
    with opened(quick_path / "root", 8 * MiB) as found:
        found.put("v", "first", b"x")
        os.utime(found.root.path, (1, 1))
        found.put("v", "second", b"x")
        assert found.engine.catalog._names.noted is not None
        yield found


def delete_catalog(store: Store) -> None:
    for ending in ("", "-wal", "-shm"):
        os.unlink(f"{store.root.catalog}{ending}")


def move_root(store: Store) -> None:
    os.rename(store.root.path, f"{store.root.path}.old")


def delete_lock(store: Store) -> None:
    os.unlink(store.root.lock("writer"))


def move_lock(store: Store) -> None:
    os.rename(store.root.lock("writer"), f"{store.root.lock('writer')}.old")


@pytest.mark.parametrize("change", [delete_catalog, move_root, delete_lock, move_lock])
def test_a_writer_notices_that_a_file_has_lost_its_name(store: Store, change: Callable[[Store], None]) -> None:
    """Else its next entries are in files that no other process sees, or it writes together with another one."""
    change(store)
    store.put("v", "third", b"third")
    assert store.engine.catalog.has_its_lock()

    def other() -> bytes | None:
        with opened(store.root.path) as fresh:
            return bytes_of(fresh, "third")

    assert in_child(other) == b"third"


def test_a_writer_notices_that_the_index_of_the_log_was_retired(store: Store) -> None:
    def retire() -> None:
        with opened(store.root.path) as other, other.engine.catalog.writer(), other.engine.catalog._mutex:
            other.engine.catalog._connection_locked()
            other.engine.catalog._retire_index_locked()

    before = store.engine.catalog._index
    in_child(retire)
    store.put("v", "third", b"x")
    assert store.engine.catalog._index not in (before, None)
    assert store.check() == []


def test_a_change_a_moment_ago_may_hide_another_one(store: Store) -> None:
    """File systems note the times of a directory by ticks: two changes in one of them give it the same time."""
    os.utime(store.root.path)
    store.put("v", "third", b"x")
    assert store.engine.catalog._names.noted is None


def test_a_change_of_the_future_says_nothing(store: Store) -> None:
    later = time.time() + 1000
    os.utime(store.root.path, (later, later))
    store.put("v", "third", b"x")
    assert store.engine.catalog._names.noted is None


def test_while_no_name_changes_nothing_is_looked_at_closely(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(self: object) -> bool:
        raise AssertionError

    monkeypatch.setattr(type(store.engine.catalog._writer), "is_same", never)
    assert [store.put("v", f"k{n}", b"x").key for n in range(10)] == [f"k{n}" for n in range(10)]
