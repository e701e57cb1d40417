"""Before each transaction: do the files that this process has open still have their names in the root?"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from forebay._engine.store import Store
from tests.harness import MiB, bytes_of, opened
from tests.processes import in_child


@pytest.fixture
def store(quick_path: Path) -> Iterator[Store]:
    with opened(quick_path / "root", 8 * MiB) as found:
        found.put("v", "first", b"x")
        yield found


def delete_catalog(store: Store) -> None:
    for ending in ("", "-wal", "-shm"):
        os.unlink(f"{store.root.catalog}{ending}")


def move_root(store: Store) -> None:
    os.rename(store.root.path, f"{store.root.path}.old")


def delete_lock(store: Store) -> None:
    os.unlink(store.root.lock("writer"))


@pytest.mark.parametrize("change", [delete_catalog, move_root, delete_lock])
def test_a_writer_notices_that_a_file_has_lost_its_name(store: Store, change: Callable[[Store], None]) -> None:
    """Else its next entries are in files that no other process sees, or it writes together with another one."""
    change(store)
    store.put("v", "third", b"third")
    assert store.engine.parts.catalog.has_its_lock()

    def other() -> bytes | None:
        with opened(store.root.path) as fresh:
            return bytes_of(fresh, "third")

    assert in_child(other) == b"third"
