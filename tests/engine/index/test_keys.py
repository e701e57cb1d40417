"""The index of keys is a hint: it leads to the right bytes, or to none, whatever became of its files."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import forebay
from forebay import errors
from forebay._engine.index import keys
from forebay._engine.index.keys import PROBES, RECORDS, KeyIndex
from forebay._engine.store import Store
from forebay._kernel import host
from forebay._model import Entry
from forebay.testing import ScriptedServer
from tests.harness import MiB, bytes_of, lose_cells, opened
from tests.processes import fork, in_child

LARGE = b"l" * 100_000
HEADER, WORDS = 512, 8
ID_WORD, SOUND_WORD = 2, 7


@pytest.fixture
def store(quick_path: Path) -> Iterator[Store]:
    with opened(quick_path / "root", 64 * MiB) as store:
        store.put("v", "small", b"s" * 1_000)
        store.put("v", "large", LARGE)
        store.spaces.lookup("v")
        yield store


def touched(store: Store, key: str) -> bytes | None:
    data = store.first_touch("v", key, 1 << 63)
    return None if data is None else bytes(data)


def records(store: Store) -> memoryview:
    words = store.engine.keys._words_of(0)
    assert words is not None
    return words


def base_of(store: Store, key: str) -> int:
    entry = store.entry("v", key)
    assert entry is not None
    return HEADER + entry.slot * WORDS


def test_what_is_published_is_led_to_in_a_young_process(store: Store) -> None:
    def young() -> None:
        with opened(store.root.path) as mine:
            mine.spaces.lookup("v")
            assert touched(mine, "small") == b"s" * 1_000
            assert touched(mine, "large") == LARGE
            assert touched(mine, "none") is None

    in_child(young)


def test_no_statement_is_needed_for_a_file(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_statement(*_: object) -> None:
        raise AssertionError("the catalog was asked")

    monkeypatch.setattr(store.engine.history, "use", None)  # which asks every 10 s, whatever is read
    monkeypatch.setattr(store.engine.catalog, "one", no_statement)
    monkeypatch.setattr(store.engine.catalog, "all", no_statement)
    assert touched(store, "large") == LARGE


def test_the_second_read_of_a_process_maps_the_file_and_the_third_is_remembered(store: Store) -> None:
    hit = store.hot_lookup("v")
    assert hit("large", 1 << 63) is None
    first, second = store.first_touch("v", "large", 1 << 63), store.first_touch("v", "large", 1 << 63)
    assert first is not None
    assert second is not None
    assert isinstance(first.obj, bytes)
    assert not isinstance(second.obj, bytes)
    third = hit("large", 1 << 63)
    assert third is not None
    assert third.obj is second.obj


def test_a_first_touch_is_a_hit_and_a_use(store: Store) -> None:
    entry = store.entry("v", "large")
    assert entry is not None
    store.engine.slots.touch(entry.slot, 1)
    before = store.counts()
    touched(store, "large")
    after = store.counts()
    assert after["hits"] - before["hits"] == 1
    assert after["bytes_hit"] - before["bytes_hit"] == len(LARGE)
    assert store.engine.slots.used(entry.slot) > 1


def test_what_was_validated_too_long_ago_is_not_served(store: Store) -> None:
    entry = store.entry("v", "large")
    assert entry is not None
    for age, is_served in ((1 << 40, True), (1, False)):
        assert (store.first_touch("v", "large", age) is not None) is is_served
    store.engine.slots.set_validated(entry.slot, store.now() + 10**15)
    assert store.first_touch("v", "large", 1 << 63) is None  # a time of the future was damaged
    store.engine.slots.set_validated(entry.slot, 0)
    assert store.first_touch("v", "large", 1 << 60) is None  # it was invalidated


def test_what_is_evicted_is_not_led_to(store: Store) -> None:
    entry = store.entry("v", "large")
    assert entry is not None
    space = store.spaces.lookup("v").id
    assert store.engine.keys.find(space, "large") is not None
    assert store.discard(entry)
    assert store.engine.keys.find(space, "large") is None  # the record is still there, but the slot is empty
    assert touched(store, "large") is None


def test_a_new_version_is_led_to_at_once_in_every_process(store: Store) -> None:
    with opened(store.root.path) as other:
        assert touched(store, "large") == LARGE
        for size in (90_000, 200, 80_000):
            fork(lambda size=size: other.put("v", "large", b"n" * size)).wait()
            assert touched(store, "large") == b"n" * size


def test_a_key_of_another_space_is_another_key(store: Store) -> None:
    store.put("w", "large", b"w" * 60_000)
    store.spaces.lookup("w")
    assert bytes(store.first_touch("w", "large", 1 << 63) or b"") == b"w" * 60_000
    assert touched(store, "large") == LARGE
    assert store.first_touch("w", "small", 1 << 63) is None


def test_what_is_replaced_while_it_is_read_is_not_served(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its time of validation may have been that of the next entry in its slot."""
    read = store.engine.reading._file_of

    def replaced(*args: Any, **options: Any) -> memoryview | None:
        data = read(*args, **options)
        store.put("v", "large", b"n" * 70_000)
        return data

    with monkeypatch.context() as m:
        m.setattr(store.engine.reading, "_file_of", replaced)
        assert touched(store, "large") is None
    assert touched(store, "large") == b"n" * 70_000


@pytest.mark.parametrize("kind", ["large", "small"])
def test_nothing_is_led_to_before_its_commit(store: Store, kind: str) -> None:
    body = LARGE if kind == "large" else b"x"

    space, seen = store.spaces.lookup("v").id, []
    others = KeyIndex(store.root, store.engine.slots, store.engine.keys.values)

    def stop_at_commit(call: str, subject: str) -> None:
        if call == "commit":
            seen.append(others.find(space, "new"))
            raise OSError(5, "the disk failed")

    host.on_step(stop_at_commit)
    with pytest.raises(errors.CacheFault):
        store.put("v", "new", body)
    host.on_step(None)
    assert seen
    assert not any(seen)
    assert touched(store, "new") is None
    store.put("v", "new", body)
    assert touched(store, "new") == body


@pytest.mark.parametrize("word", range(WORDS))
def test_a_record_with_one_word_of_another_is_not_believed(store: Store, word: int) -> None:
    store.put("v", "other", b"o" * 50_000)
    words, mine, others = records(store), base_of(store, "large"), base_of(store, "other")
    words[mine + word] = words[others + word] ^ (word in (4, 5, 6))  # both have one kind and no suffix
    assert touched(store, "large") is None
    assert bytes_of(store, "large") == LARGE  # the catalog knows, and it is noted again
    assert touched(store, "large") == LARGE


def test_no_mixture_of_two_records_of_a_slot_is_believed(store: Store) -> None:
    """P1 publishes an entry, and is stopped before it has written the record / P2 evicts it, and publishes another one in its slot / P1
    goes on: each word may be of either."""
    base, former = base_of(store, "large"), store.entry("v", "large")
    whole = list(records(store)[base : base + WORDS])
    assert former is not None
    assert store.discard(former)
    body = b"o" * len(LARGE)
    store.put("v", "other", body)
    assert base_of(store, "other") == base
    words, present = records(store), list(records(store)[base : base + WORDS])
    for taken in range(1 << WORDS):
        for at in range(WORDS):
            words[base + at] = whole[at] if taken >> at & 1 else present[at]
        assert touched(store, "large") is None, bin(taken)
        assert touched(store, "other") in (None, body), bin(taken)


def test_a_bucket_that_leads_elsewhere_is_not_believed(store: Store) -> None:
    store.put("v", "other", b"o" * 50_000)
    table = store.engine.keys._table
    assert table is not None
    large, other = store.entry("v", "large"), store.entry("v", "other")
    assert large is not None
    assert other is not None
    for bucket in range(HEADER, len(table.words)):
        word = table.words[bucket]
        if word and (word & 0xFFFFFFFF) - 1 == large.slot:
            table.words[bucket] = word & ~0xFFFFFFFF | other.slot + 1
    assert touched(store, "large") is None
    assert bytes_of(store, "large") == LARGE
    assert touched(store, "large") == LARGE


def test_soundness_of_another_epoch_is_not_believed(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    assert touched(store, "large") == LARGE
    monkeypatch.setattr(store.engine.keys, "_epoch", 12345)
    assert touched(store, "large") is None


def test_a_file_that_was_written_to_is_not_served(store: Store) -> None:
    entry = store.entry("v", "large")
    assert entry is not None
    path = store.root.blob(entry.id, entry.suffix)
    path.chmod(0o600)
    with open(path, "r+b") as file:
        file.write(b"?")
    assert touched(store, "large") is None
    assert bytes_of(store, "large") is None  # it is set aside


def test_a_damaged_value_is_not_served(store: Store) -> None:
    lose_cells(store)
    with store.engine.catalog.write() as txn:
        txn.run("UPDATE payloads SET data = ?", b"S" * 1_000)
    assert touched(store, "small") is None
    assert bytes_of(store, "small") is None


def test_a_link_in_place_of_a_file_is_not_followed(store: Store) -> None:
    entry = store.entry("v", "large")
    assert entry is not None
    path = store.root.blob(entry.id, entry.suffix)
    elsewhere = store.root.path.parent / "elsewhere"
    os.rename(path, elsewhere)
    path.symlink_to(elsewhere)
    assert touched(store, "large") is None


def test_a_link_in_place_of_a_directory_is_not_followed(store: Store) -> None:
    """Not even to the very same file: what lies outside of the root is not Forebay's."""
    entry = store.entry("v", "large")
    assert entry is not None
    fan = store.root.blob(entry.id, entry.suffix).parent
    elsewhere = store.root.path.parent / "elsewhere"
    os.rename(fan, elsewhere)
    fan.symlink_to(elsewhere)
    assert touched(store, "large") is None
    fan.unlink()
    os.rename(elsewhere, fan)
    assert touched(store, "large") == LARGE


@pytest.mark.parametrize("size", [0, 4096, len(LARGE) - 1, len(LARGE) + 1])
def test_a_file_of_another_size_is_not_served(store: Store, size: int) -> None:
    entry = store.entry("v", "large")
    assert entry is not None
    path = store.root.blob(entry.id, entry.suffix)
    status = path.stat()
    path.chmod(0o600)
    os.truncate(path, size)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))  # the seal alone does not tell
    assert touched(store, "large") is None


def test_another_file_in_place_of_a_file_is_not_served(store: Store) -> None:
    entry = store.entry("v", "large")
    assert entry is not None
    path = store.root.blob(entry.id, entry.suffix)
    path.unlink()
    path.write_bytes(b"L" * len(LARGE))
    assert touched(store, "large") is None
    assert bytes_of(store, "large") is None


@pytest.mark.parametrize("key", ["large", "none"])
def test_a_table_that_is_said_to_have_moved_is_looked_at_once_more(store: Store, key: str) -> None:
    touched(store, key)
    table = store.engine.keys._table
    assert table is not None
    table.words[keys._MOVED] = 1
    table.words[HEADER:] = memoryview(bytes(8 * (len(table.words) - HEADER))).cast("Q")
    assert touched(store, key) is None


@pytest.mark.parametrize("what", ["table", "000", "values"])
@pytest.mark.parametrize("damage", ["removed", "empty", "noise", "directory", "of another root"])
def test_whatever_becomes_of_a_file_of_the_index_the_bytes_are_right(store: Store, tmp_path: Path, what: str, damage: str) -> None:
    path = store.root.index_dir / what
    size = path.stat().st_size
    path.unlink()
    if damage == "empty":
        path.touch()
    elif damage == "noise":
        path.write_bytes(random.Random(7).randbytes(size))
    elif damage == "directory":
        path.mkdir()
    elif damage == "of another root":
        with opened(tmp_path / "other", 10 * MiB) as other:
            other.put("v", "large", b"other" * 100)
            shutil.copy(other.root.index_dir / what, path)

    def young() -> None:
        with opened(store.root.path) as mine:
            mine.spaces.lookup("v")
            assert touched(mine, "large") in (None, LARGE)
            assert bytes_of(mine, "large") == LARGE
            mine.put("v", "next", b"next" * 10_000)
            assert touched(mine, "next") in (None, b"next" * 10_000)
            mine.put("v", "next", b"last" * 10_000)
            assert touched(mine, "next") == b"last" * 10_000  # the index was created again
            assert mine.check() == []

    in_child(young)


def test_a_root_without_an_index_gets_one_as_its_entries_are_read(store: Store) -> None:
    shutil.rmtree(store.root.index_dir)

    def young() -> None:
        with opened(store.root.path) as mine:
            assert bytes_of(mine, "large") == LARGE
            assert touched(mine, "large") == LARGE

    in_child(young)


def test_a_read_only_root_is_read_by_its_index_and_not_changed(store: Store) -> None:
    before = {path: path.stat().st_mtime_ns for path in store.root.index_dir.iterdir()}

    def young() -> None:
        from forebay._engine.space.settings import Settings

        mine = Store.open(store.root.path, Settings(), read_only=True)
        mine.spaces.lookup("v")
        assert touched(mine, "large") == LARGE
        mine.close()

    in_child(young)
    assert {path: path.stat().st_mtime_ns for path in store.root.index_dir.iterdir()} == before


def entries_of(store: Store, count: int) -> list[Entry]:
    """Entries with slots of their own, as the table of slots and the index know them."""
    first = store.entry("v", "large")
    assert first is not None
    made = [
        Entry(1_000_000 + n, "v", f"k{n}", "blob", n, 4096, 10 + n, first.checksum, None, 0.0, first.boot, "cached", ".bin")
        for n in range(count)
    ]
    for entry in made:
        store.engine.slots.settle(entry.slot, entry.id, 1, 1, 1)
        store.engine.keys.note(1, entry)
    return made


def test_the_table_grows_and_other_processes_go_on_with_the_new_one(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "BUCKETS", 256)
    shutil.rmtree(store.root.index_dir)
    store.engine.keys._forget()
    other = KeyIndex(store.root, store.engine.slots, store.engine.keys.values)
    few = entries_of(store, 20)
    assert all(other.find(1, entry.key) for entry in few)
    size = (store.root.index_dir / "table").stat().st_size
    many = entries_of(store, RECORDS + 500)
    assert (store.root.index_dir / "table").stat().st_size > 8 * size
    assert sum(other.find(1, entry.key) is None for entry in many) == 0
    for entry in many[::97]:
        hint = other.find(1, entry.key)
        assert hint is not None
        assert hint[2:] == (entry.slot, entry.id, entry.size, True, keys.seal_of(entry.checksum), ".bin", None)


def test_the_table_does_not_grow_where_entries_come_and_go(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "BUCKETS", 256)
    shutil.rmtree(store.root.index_dir)
    store.engine.keys._forget()
    for generation in range(60):
        for entry in entries_of(store, 50):
            renamed = entry._replace(id=entry.id + 1000 * generation, key=f"{generation} {entry.key}")
            store.engine.slots.settle(renamed.slot, renamed.id, 1, 1, 1)
            store.engine.keys.note(1, renamed)
            hint = store.engine.keys.find(1, renamed.key)
            assert hint is not None
            assert hint[3] == renamed.id
    assert (store.root.index_dir / "table").stat().st_size <= (HEADER + 512 + PROBES) * 8


def test_an_entry_whose_key_looks_like_a_part_of_an_object_is_not_served_for_it(tmp_path: Path) -> None:
    with ScriptedServer() as server, forebay.Cache(tmp_path / "root", budget=64 * MiB) as cache:
        url = server.put("/object", bytes(range(256)) * 400)
        with cache.open(url, block_size=64_000) as file:
            assert len(file.read(10)) == 10
        key = next(entry.key for entry in cache.entries() if "#block=" in entry.key)
        assert len(cache.read(key)) == 256 * 400
        assert len(cache.read(url)) == 256 * 400
