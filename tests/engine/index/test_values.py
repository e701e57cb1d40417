"""The cells of small values are hints: each serves the bytes of its entry, or none, whatever became of the file."""

from __future__ import annotations

import errno
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay._engine.index import values
from forebay._engine.index.values import LARGEST, SHARE
from forebay._engine.store import Settings, Store
from forebay._kernel import host
from tests.harness import MiB, bytes_of, lose_cells, opened
from tests.processes import fork, in_child

SMALL, OTHER = b"s" * 1_000, b"o" * 1_000
HEADER, CELL, OWNER = 8192, 2048, 16
FOREVER = 1 << 63


@pytest.fixture
def store(quick_path: Path) -> Iterator[Store]:
    with opened(quick_path / "root", 64 * MiB) as store:
        store.put("v", "small", SMALL, meta="meta")
        store.spaces.number("v")
        yield store


def touched(store: Store, key: str) -> bytes | None:
    data = store.first_touch("v", key, FOREVER)
    return None if data is None else bytes(data)


def cell_of(store: Store, key: str) -> tuple[memoryview, int]:
    """The file, and where the value of a key begins in it."""
    entry, cells = store.entry("v", key), store.engine.index.cells._usable()
    assert entry is not None
    return cells.view, HEADER + (entry.slot & cells.mask) * CELL + OWNER


def by_its_cell(store: Store, key: str) -> bytes | None:
    hint = store.engine.index.find("v", key)
    assert hint is not None
    _, _, slot, _, size, _, mark, *_ = hint
    return store.engine.index.cells.get(slot, size, mark)


def no_statement(store: Store) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("the catalog was asked")

    store.engine.history.use = None  # which asks every 10 s, whatever is read
    for name in ("one", "all", "quick_one"):
        setattr(store.engine.parts.catalog, name, refuse)


@pytest.mark.parametrize("size", [0, 1, 1_000, LARGEST])
def test_no_statement_is_needed_for_a_small_value(store: Store, size: int) -> None:
    store.put("v", "key", b"k" * size, meta="meta")

    def young() -> None:
        with opened(store.root.path) as mine:
            mine.spaces.number("v")
            no_statement(mine)
            value = mine.first_value("v", "key", "meta")
            assert value is not None
            assert value == b"k" * size

    in_child(young)
    no_statement(store)
    assert touched(store, "key") == b"k" * size


def test_of_many_that_are_put_together_each_has_a_cell(store: Store) -> None:
    bodies = {f"k{number}": bytes([number]) * 500 for number in range(20)}
    store.put_many("v", list(bodies.items()))
    for key, body in bodies.items():
        assert by_its_cell(store, key) == body


def test_a_larger_value_has_no_cell(store: Store) -> None:
    store.put("v", "key", b"k" * (LARGEST + 1))
    assert by_its_cell(store, "key") is None
    assert touched(store, "key") == b"k" * (LARGEST + 1)


def test_what_is_served_stays_when_the_cell_gets_another_value(store: Store) -> None:
    data = store.first_touch("v", "small", FOREVER)
    assert data is not None
    view, at = cell_of(store, "small")
    view[at : at + 1_000] = OTHER
    assert data == SMALL


@pytest.mark.parametrize("length", [1, 500, 999, 1_000])
def test_a_torn_cell_is_not_believed_and_written_again(store: Store, length: int) -> None:
    view, at = cell_of(store, "small")
    view[at : at + length] = OTHER[:length]
    assert touched(store, "small") == SMALL
    assert bytes(view[at : at + 1_000]) == SMALL


def test_the_cell_of_another_entry_is_not_believed(store: Store) -> None:
    store.put("v", "other", OTHER)
    view, at = cell_of(store, "small")
    _, others = cell_of(store, "other")
    view[at - OWNER : at + 1_000] = bytes(view[others - OWNER : others + 1_000])
    assert touched(store, "small") == SMALL


def test_the_value_that_was_in_the_slot_before_is_not_served(store: Store) -> None:
    """P1 publishes an entry, and is stopped before it stores to the cell / P2 reads it: the cell has the bytes of the one before."""
    view, at = cell_of(store, "small")
    old = bytes(view[at - OWNER : at + 1_000])
    store.put("v", "small", OTHER, meta="meta")
    view, at = cell_of(store, "small")
    view[at - OWNER : at + 1_000] = old
    assert touched(store, "small") == OTHER


def test_an_evicted_value_is_not_served_though_its_cell_has_it(store: Store) -> None:
    view, at = cell_of(store, "small")
    entry = store.entry("v", "small")
    assert entry is not None
    assert store.discard(entry)
    assert bytes(view[at : at + 1_000]) == SMALL
    assert touched(store, "small") is None
    assert store.first_value("v", "small", "meta") is None


@pytest.mark.parametrize("owner", [b"\xff" * 16, b"\xff" * 8 + bytes(7) + b"\1", bytes(16), b"\0" * 7 + b"\1" * 9])
def test_whatever_a_cell_says_of_its_owner_a_value_gets_it(store: Store, owner: bytes) -> None:
    view, at = cell_of(store, "small")
    view[at - OWNER : at + 1_000] = owner + OTHER
    assert touched(store, "small") == SMALL
    assert by_its_cell(store, "small") == SMALL


def test_a_size_beyond_the_cell_is_not_read(store: Store) -> None:
    cells = store.engine.index.cells
    for size in (LARGEST + 1, 1 << 40, 1 << 60):
        assert cells.get(0, size, 0) is None


def test_values_that_are_read_in_turn_do_not_replace_each_other(quick_path: Path) -> None:
    with opened(quick_path / "root", 2 * MiB) as store:  # 32 cells
        for number in range(33):
            store.put("v", f"k{number}", b"%4d" % number * 100)
        slots = {key: entry.slot for entry in store.seeing.entries("v") if (key := entry.key)}
        late = max(slots, key=lambda key: slots[key])
        early = next(key for key in slots if slots[key] == slots[late] - 32)
        bodies = {key: b"%4d" % int(key[1:]) * 100 for key in (early, late)}
        assert by_its_cell(store, late) == bodies[late]
        assert touched(store, early) == bodies[early]
        assert by_its_cell(store, late) == bodies[late]  # it was stored last, and lives
        entry = store.entry("v", late)
        assert entry is not None
        assert store.discard(entry)
        store.engine.memo.restart(store.engine.index)
        assert touched(store, early) == bodies[early]
        assert by_its_cell(store, early) == bodies[early]


# -- the file ----------------------------------------------------------------------------------------------------------


def test_a_removed_file_is_created_again_by_a_reader(store: Store) -> None:
    lose_cells(store)

    def young() -> None:
        with opened(store.root.path) as mine:
            assert touched(mine, "small") == SMALL
            assert by_its_cell(mine, "small") == SMALL

    in_child(young)


def test_a_file_that_is_removed_while_it_is_mapped_serves_on(store: Store) -> None:
    (store.root.shared_dir / "cells").unlink()
    assert by_its_cell(store, "small") == SMALL
    store.put_many("v", [(f"k{number}", OTHER) for number in range(100)])  # more cells than have blocks
    assert touched(store, "k99") == OTHER
    assert (store.root.shared_dir / "cells").exists()
    assert touched(store, "small") == SMALL


@pytest.mark.parametrize("size", [0, 4096, HEADER, HEADER + 65_535, HEADER + 3 * 65_536, 1 << 40, (1 << 62) + HEADER])
def test_a_file_of_another_size_is_replaced(store: Store, size: int) -> None:
    path = store.root.shared_dir / "cells"
    right = path.stat().st_size
    lose_cells(store)
    path.write_bytes(b"FBVALS01" + store.root.id.to_bytes(8, "little"))
    try:
        os.truncate(path, size)
    except OSError as error:
        pytest.skip(f"the file system has no such files: {error.strerror}")

    def young() -> None:
        with opened(store.root.path) as mine:
            mine.spaces.number("v")
            assert touched(mine, "small") == SMALL
            mine.put("v", "next", OTHER)
            mine.put("v", "last", OTHER)
            assert by_its_cell(mine, "last") == OTHER

    in_child(young)
    assert path.stat().st_size == right


def test_noise_in_a_file_of_the_right_size_is_not_believed(store: Store) -> None:
    path, noise = store.root.shared_dir / "cells", random.Random(3)
    size = path.stat().st_size
    lose_cells(store)
    path.write_bytes(b"FBVALS01" + store.root.id.to_bytes(8, "little") + bytes(8) + noise.randbytes(size - 24))
    in_child(lambda: _reads(store))


def test_the_file_of_another_root_is_not_believed(store: Store, tmp_path: Path) -> None:
    with opened(tmp_path / "other", 64 * MiB) as other:
        other.put("v", "small", OTHER)
        lose_cells(store)
        shutil.copy(other.root.shared_dir / "cells", store.root.shared_dir / "cells")
    in_child(lambda: _reads(store))


def _reads(store: Store) -> None:
    with opened(store.root.path) as mine:
        mine.spaces.number("v")
        assert touched(mine, "small") == SMALL
        for body in (OTHER, b"n" * 900):
            mine.put("v", "next", body)
            mine.engine.memo.restart(mine.engine.index)
            assert touched(mine, "next") == body
        assert mine.check() == []


@pytest.mark.parametrize("there", [False, True])
def test_on_a_full_disk_a_value_has_no_cell(store: Store, there: bool) -> None:
    if there:  # and the cell of the new one has no blocks yet
        store.put_many("v", [(f"k{number}", SMALL) for number in range(31)])
    else:
        lose_cells(store)
    steps = []

    def full(call: str, subject: str) -> None:
        steps.append(call)
        if call == "pwrite":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    host.on_step(full)
    try:
        store.put("v", "new", OTHER)
        assert by_its_cell(store, "new") is None
        assert touched(store, "new") == OTHER
    finally:
        host.on_step(None)
    assert "pwrite" in steps
    assert "set_bytes" not in steps
    store.engine.memo.restart(store.engine.index)
    assert touched(store, "new") == OTHER
    assert by_its_cell(store, "new") == OTHER


def test_a_cell_is_not_stored_to_before_it_has_blocks(store: Store) -> None:
    """Else a store would kill the process where the disk is full."""
    steps = []
    host.on_step(lambda call, subject: steps.append((call, subject)))
    try:
        store.put_many("v", [(f"k{number}", OTHER) for number in range(100)])
    finally:
        host.on_step(None)
    mapped = store.engine.index.cells._usable().view
    stored = [int(at) - HEADER for call, at in steps if call == "set_bytes" and int(at) >= HEADER]
    allocated = [int(at) - 4096 for call, at in steps if call == "set_byte" and 4096 <= int(at) < HEADER]
    assert len(stored) == 100
    assert len(allocated) == 3  # the first has blocks already
    assert {at // 65_536 for at in stored} == {0, *allocated}
    assert all(mapped[4096 + at // 65_536] for at in stored)


def test_a_read_only_root_is_read_by_its_cells_and_gets_none(store: Store) -> None:
    path = store.root.shared_dir / "cells"

    def young() -> None:
        mine = Store.open(store.root.path, Settings(), read_only=True)
        mine.spaces.number("v")
        if path.exists():
            no_statement(mine)
        assert touched(mine, "small") == SMALL
        mine.close()

    before = path.stat().st_mtime_ns
    in_child(young)
    assert path.stat().st_mtime_ns == before
    path.unlink()
    in_child(young)
    assert not path.exists()


# -- the disk ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [1 * MiB, 3 * MiB, 64 * MiB, 1000 * MiB, 1 << 40])
def test_the_cells_take_a_small_part_of_the_budget(quick_path: Path, budget: int) -> None:
    with opened(quick_path / "root", budget) as store:
        store.put("v", "small", SMALL)
        path = store.root.shared_dir / "cells"
        cells = path.stat().st_size - HEADER
        assert cells <= max(budget // SHARE, values._LEAST)
        assert cells > min(budget // SHARE // 2, values._MOST - 1)
        assert path.stat().st_blocks * 512 <= HEADER + 65_536
        assert by_its_cell(store, "small") == SMALL


def test_values_that_come_and_go_take_no_more_disk(quick_path: Path) -> None:
    with opened(quick_path / "root", 1 * MiB) as store:
        for number in range(300):
            store.put("v", f"k{number}", random.Random(number).randbytes(2_000))
        assert (store.root.shared_dir / "cells").stat().st_blocks * 512 <= HEADER + 65_536


def test_another_budget_replaces_the_file_for_every_process(store: Store) -> None:
    path = store.root.shared_dir / "cells"
    size = path.stat().st_size

    def lower() -> None:
        with opened(store.root.path, 8 * MiB) as mine:
            mine.put("v", "new", OTHER)

    fork(lower).wait()
    assert path.stat().st_size < size / 4
    assert by_its_cell(store, "small") is None
    assert touched(store, "small") == SMALL
    assert by_its_cell(store, "small") == SMALL
    assert by_its_cell(store, "new") == OTHER
    assert store.engine.index.cells._usable().mask + 1 == (path.stat().st_size - HEADER) // CELL
    assert bytes_of(store, "small") == SMALL
