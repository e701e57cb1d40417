"""What a process reads of a value for the first time, by the index of keys: the right bytes, or none."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from forebay._engine.store import Store
from forebay.fetch.request import FOREVER
from tests.harness import MiB, bytes_of, lose_cells, opened
from tests.processes import fork, in_child

LARGE = b"l" * 100_000
BODIES = {"small": b"s" * 1_000, "large": LARGE, "empty": b""}


@pytest.fixture
def store(quick_path: Path) -> Iterator[Store]:
    with opened(quick_path / "root", 64 * MiB) as store:
        for key, body in BODIES.items():
            store.put("v", key, body, meta=f"meta of {key}")
        store.spaces.number("v")
        yield store


def first(store: Store, key: str, meta: str | None = None) -> bytes | None:
    value = store.first_value("v", key, f"meta of {key}" if meta is None else meta)
    return None if value is None else bytes(value)


@pytest.mark.parametrize("key", BODIES)
def test_a_young_process_reads_a_value_and_its_meta_without_a_look_for_the_key(store: Store, key: str) -> None:
    def young() -> None:
        with opened(store.root.path) as mine:
            mine.spaces.number("v")

            def no_key(*_: object) -> None:
                raise AssertionError("the catalog was asked for the key")

            mine.engine.parts.leases.current = no_key  # type: ignore[method-assign, assignment]
            assert first(mine, key) == BODIES[key]
            assert first(mine, "none") is None

    in_child(young)


@pytest.mark.parametrize("key", BODIES)
def test_a_forked_child_reads_it_too(store: Store, key: str) -> None:
    assert in_child(lambda: first(store, key)) == BODIES[key]
    assert first(store, key) == BODIES[key]


@pytest.mark.parametrize("key", BODIES)
@pytest.mark.parametrize("meta", ["", "meta of another", "meta"])
def test_a_value_that_carries_another_text_is_not_served(store: Store, key: str, meta: str) -> None:
    assert first(store, key, meta) is None
    assert first(store, key) == BODIES[key]  # it does not count as read


def test_of_a_record_of_an_earlier_version_the_text_is_not_known(store: Store) -> None:
    """It had the words of an empty suffix there."""
    entry = store.entry("v", "small")
    assert entry is not None
    store.engine.index.note(entry._replace(meta=""))
    assert first(store, "small") is None
    assert bytes_of(store, "small") == BODIES["small"]  # it is noted again
    with opened(store.root.path) as mine:
        assert first(mine, "small") == BODIES["small"]


def test_what_was_read_before_is_left_to_the_call_that_remembers(store: Store) -> None:
    assert first(store, "large") is not None
    assert first(store, "large") is None
    assert bytes_of(store, "large") == LARGE


def test_a_file_is_mapped_and_stays_after_its_eviction(store: Store) -> None:
    value, entry = store.first_value("v", "large", "meta of large"), store.entry("v", "large")
    assert value is not None
    assert entry is not None
    assert not isinstance(value.obj, bytes)
    assert value.readonly
    assert store.discard(entry)
    assert value == LARGE


def test_it_is_a_use_and_no_hit_until_its_reader_says_so(store: Store) -> None:
    entry = store.entry("v", "large")
    assert entry is not None
    store.engine.index.touch(entry.slot, 1)
    before = store.seeing.counts()
    assert store.first_value("v", "large", "another") is None
    assert store.engine.index.used(entry.slot) == 1
    assert store.first_value("v", "large", "meta of large") is not None
    assert store.seeing.counts() == before
    assert store.engine.index.used(entry.slot) > 1


@pytest.mark.parametrize("value", [b"S" * 1_000, "s" * 1_000])
def test_a_damaged_row_is_not_served(store: Store, value: bytes | str) -> None:
    lose_cells(store)
    with store.engine.parts.catalog.write() as txn:
        assert txn.run("UPDATE payloads SET data = ? WHERE length(data) = 1000", value) == 1
    assert first(store, "small") is None
    assert bytes_of(store, "small") is None


def test_the_sound_row_of_another_value_is_not_served(store: Store) -> None:
    """Two rows changed places: their bytes and checksums agree, but the index knows others."""
    store.put("v", "other", b"o" * 1_000)
    small, other = store.entry("v", "small"), store.entry("v", "other")
    assert small is not None
    assert other is not None
    with store.engine.parts.catalog.write() as txn:
        for table in ("entries", "payloads"):
            for old, new in ((small.id, -1), (other.id, small.id), (-1, other.id)):
                txn.run(f"UPDATE {table} SET id = ? WHERE id = ?", new, old)
    lose_cells(store)
    assert first(store, "small") is None
    assert store.first_touch("v", "other", 1 << 63, alias="other") is None


@pytest.mark.parametrize("change", ["written to", "cut", "removed", "link", "directory"])
def test_a_file_that_is_not_as_it_was_published_is_not_served(store: Store, change: str) -> None:
    entry = store.entry("v", "large")
    assert entry is not None
    path = store.root.blob(entry.id, entry.suffix)
    path.chmod(0o600)
    if change == "written to":
        with open(path, "r+b") as file:
            file.write(b"?")
    elif change == "cut":
        os.truncate(path, 5_000)
    else:
        path.rename(store.root.path.parent / "elsewhere")
        if change == "link":
            path.symlink_to(store.root.path.parent / "elsewhere")
        elif change == "directory":
            path.mkdir()
    assert first(store, "large") is None
    assert bytes_of(store, "large") is None  # it is set aside


@pytest.mark.parametrize("size", [200, 70_000])
def test_a_new_version_of_another_process_is_read_at_once(store: Store, size: int) -> None:
    with opened(store.root.path) as other:
        fork(lambda: other.put("v", "large", b"n" * size, meta="new")).wait()
    assert first(store, "large", "new") == b"n" * size


def test_what_is_replaced_while_it_is_read_is_not_served(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its meta may be that of the one, and its use that of the other."""
    read = store.engine._file_of

    def replaced(*args: Any, **options: Any) -> memoryview | None:
        data = read(*args, **options)
        store.put("v", "large", b"n" * 70_000, meta="new")
        return data

    with monkeypatch.context() as m:
        m.setattr(store.engine, "_file_of", replaced)
        assert first(store, "large") is None
    assert first(store, "large", "new") == b"n" * 70_000


def test_a_statement_that_fails_is_asked_again_by_the_long_way(store: Store) -> None:
    catalog = store.engine.parts.catalog
    assert catalog.quick_one("SELECT 1 + ?", 2) == (3,)
    assert catalog.quick_one("SELECT 1 FROM entries WHERE id = -1") is None
    catalog.before_fork()  # closes the connection
    catalog.after_fork_parent()
    assert catalog._con is None
    assert catalog.quick_one("SELECT 1 + ?", 2) == (3,)


def test_what_is_expected_is_the_last_to_be_evicted(store: Store) -> None:
    entry = store.entry("v", "large")
    assert entry is not None
    store.engine.index.touch(entry.slot, 1)
    assert not store.prefetching.expect("v", "none", FOREVER)
    assert not store.prefetching.expect("no space", "large", FOREVER)
    assert store.prefetching.expect("v", "large", FOREVER)
    assert store.engine.index.used(entry.slot) > 1
    assert store.discard(entry)
    assert not store.prefetching.expect("v", "large", FOREVER)
