"""Records lead to the right bytes, or to none, whatever became of them and of their files."""

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
from forebay._engine.catalog import recovery
from forebay._engine.catalog.writer_lock import WriterLock
from forebay._engine.files.root import Root
from forebay._engine.index import records as module
from forebay._engine.index.head import PAIRS, SharedBroken, SharedHead
from forebay._engine.index.records import EXPIRED, ID, PROBES, RECORDS, USED, VALIDATED, EntryIndex
from forebay._engine.store import Store
from forebay._kernel import host
from forebay._model import Entry
from forebay.testing import ScriptedServer
from tests.harness import MiB, bytes_of, lose_cells, opened
from tests.processes import fork, in_child

LARGE = b"l" * 100_000
HEADER, WORDS = 512, 16
FACTS = range(4, 12)
"""Words that any process may store: the hash, the proof, what the row has, and that it is sound."""


@pytest.fixture
def store(quick_path: Path) -> Iterator[Store]:
    with opened(quick_path / "root", 64 * MiB) as store:
        store.put("v", "small", b"s" * 1_000)
        store.put("v", "large", LARGE)
        store.spaces.number("v")
        yield store


def another(root: Root) -> EntryIndex:
    """The index as another process has it."""
    return EntryIndex(root, SharedHead(root), lambda: 64 * MiB)


def touched(store: Store, key: str) -> bytes | None:
    data = store.first_touch("v", key, 1 << 63)
    return None if data is None else bytes(data)


def records(store: Store) -> memoryview:
    words = store.engine.index._file(0)
    assert words is not None
    return words


def base_of(store: Store, key: str) -> int:
    entry = store.entry("v", key)
    assert entry is not None
    return HEADER + entry.slot * WORDS


def test_what_is_published_is_led_to_in_a_young_process(store: Store) -> None:
    def young() -> None:
        with opened(store.root.path) as mine:
            mine.spaces.number("v")
            assert touched(mine, "small") == b"s" * 1_000
            assert touched(mine, "large") == LARGE
            assert touched(mine, "none") is None

    in_child(young)


def test_no_statement_is_needed_for_a_file(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_statement(*_: object) -> None:
        raise AssertionError("the catalog was asked")

    monkeypatch.setattr(store.engine.history, "use", None)  # which asks every 10 s, whatever is read
    monkeypatch.setattr(store.engine.parts.catalog, "one", no_statement)
    monkeypatch.setattr(store.engine.parts.catalog, "all", no_statement)
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
    store.engine.index.touch(entry.slot, 1)
    before = store.seeing.counts()
    touched(store, "large")
    after = store.seeing.counts()
    assert after["hits"] - before["hits"] == 1
    assert after["bytes_hit"] - before["bytes_hit"] == len(LARGE)
    assert store.engine.index.used(entry.slot) > 1


def test_what_was_validated_too_long_ago_is_not_served(store: Store) -> None:
    entry = store.entry("v", "large")
    assert entry is not None
    for age, is_served in ((1 << 40, True), (1, False)):
        assert (store.first_touch("v", "large", age) is not None) is is_served
    words, base = store.engine.index.record(entry.slot)
    words[base + VALIDATED] = store.now() + 10**15
    assert store.first_touch("v", "large", 1 << 63) is None  # a time of the future was damaged
    store.invalidate([entry])
    assert store.first_touch("v", "large", 1 << 60) is None


def test_what_a_request_found_that_began_before_an_invalidation_does_not_count(store: Store) -> None:
    """P1 asks the remote / P2 writes there, and invalidates / P1 notes that its version is current."""
    entry = store.entry("v", "large")
    assert entry is not None
    began = store.now(exact=True)
    in_child(lambda: store.invalidate([entry]))
    store.set_validated([(entry, began)], began)
    assert store.validated(entry) == 0
    began = store.now(exact=True)
    store.set_validated([(entry, began)], began)
    assert store.validated(entry) == began


def test_while_another_writes_an_invalidation_counts_and_a_validation_is_noted_by_the_next_write(store: Store) -> None:
    entry, small = store.entry("v", "large"), store.entry("v", "small")
    assert entry is not None
    assert small is not None
    other = WriterLock(store.root, store.engine.parts.words)
    other.take(0)
    before, began = store.validated(entry), store.now(exact=True)
    store.set_validated([(entry, began)], began)
    assert store.validated(entry) == before
    store.invalidate([small])
    assert store.validated(small) == 0
    other.release()
    store.put("v", "other", b"o")
    assert store.validated(entry) == began
    assert store.validated(small) == 0


def test_a_validation_that_comes_late_is_not_one_of_the_entry_that_has_the_record_by_now(store: Store) -> None:
    """P1 asks the remote / P2 writes, so that P1 has to wait / P2 replaces the entry / P1 notes what it found, for the older one."""
    entry = store.entry("v", "large")
    assert entry is not None
    other = WriterLock(store.root, store.engine.parts.words)
    other.take(0)
    began = store.now(exact=True)
    store.set_validated([(entry, began)], began)
    words, base = store.engine.index.record(entry.slot)
    words[base + ID], words[base + VALIDATED] = entry.id + 1, 7
    other.release()
    store.put("v", "other", b"o")
    assert words[base + VALIDATED] == 7
    words[base + ID] = entry.id


def test_a_damaged_time_of_validation_is_overwritten(store: Store) -> None:
    entry = store.entry("v", "large")
    assert entry is not None
    words, base = store.engine.index.record(entry.slot)
    for damaged in (EXPIRED | 1 << 62, EXPIRED, (1 << 64) - 1, 1 << 62):
        words[base + VALIDATED] = damaged
        began = store.now(exact=True)
        store.set_validated([(entry, began)], began)
        assert store.validated(entry) == began


def test_what_is_evicted_is_not_led_to(store: Store) -> None:
    entry = store.entry("v", "large")
    assert entry is not None
    assert store.engine.index.find("v", "large") is not None
    assert store.discard(entry)
    assert store.engine.index.find("v", "large") is None  # the rest of the record is still there
    assert touched(store, "large") is None


def test_a_new_version_is_led_to_at_once_in_every_process(store: Store) -> None:
    with opened(store.root.path) as other:
        assert touched(store, "large") == LARGE
        for size in (90_000, 200, 80_000):
            fork(lambda size=size: other.put("v", "large", b"n" * size)).wait()
            assert touched(store, "large") == b"n" * size


def test_a_key_of_another_space_is_another_key(store: Store) -> None:
    store.put("w", "large", b"w" * 60_000)
    store.spaces.number("w")
    assert bytes(store.first_touch("w", "large", 1 << 63) or b"") == b"w" * 60_000
    assert touched(store, "large") == LARGE
    assert store.first_touch("w", "small", 1 << 63) is None


def test_what_is_replaced_while_it_is_read_is_not_served(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its time of validation may have been that of the next entry in its slot."""
    read = store.engine._file_of

    def replaced(*args: Any, **options: Any) -> memoryview | None:
        data = read(*args, **options)
        store.put("v", "large", b"n" * 70_000)
        return data

    with monkeypatch.context() as m:
        m.setattr(store.engine, "_file_of", replaced)
        assert touched(store, "large") is None
    assert touched(store, "large") == b"n" * 70_000


@pytest.mark.parametrize("kind", ["large", "small"])
def test_nothing_is_led_to_before_its_commit(store: Store, kind: str) -> None:
    body = LARGE if kind == "large" else b"x"

    seen: list[Any] = []
    others = another(store.root)

    def stop_at_commit(call: str, subject: str) -> None:
        if call == "commit":
            seen.append(others.find("v", "new"))
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


@pytest.mark.parametrize("word", FACTS)
def test_a_record_with_one_word_of_another_is_not_believed(store: Store, word: int) -> None:
    store.put("v", "other", b"o" * 50_000)
    words, mine, others = records(store), base_of(store, "large"), base_of(store, "other")
    words[mine + word] = words[others + word] ^ (word in (7, 8, 9, 10))  # which may be the same
    assert touched(store, "large") is None
    assert bytes_of(store, "large") == LARGE  # the catalog knows, and it is noted again
    assert touched(store, "large") == LARGE


def test_no_mixture_of_two_records_of_a_slot_is_believed(store: Store) -> None:
    """P1 has read an entry, and is stopped before it notes it / P2 evicts it, and publishes another one in its slot / P1 goes on: each word
    may be of either, but for the id, which only the holder of the writer lock stores."""
    base, former = base_of(store, "large"), store.entry("v", "large")
    whole = list(records(store)[base : base + WORDS])
    assert former is not None
    assert store.discard(former)
    body = b"o" * len(LARGE)
    store.put("v", "other", body)
    assert base_of(store, "other") == base
    words, present = records(store), list(records(store)[base : base + WORDS])
    for taken in range(1 << len(FACTS)):
        for bit, at in enumerate(FACTS):
            words[base + at] = whole[at] if taken >> bit & 1 else present[at]
        assert touched(store, "large") is None, bin(taken)
        assert touched(store, "other") in (None, body), bin(taken)


def test_a_bucket_that_leads_elsewhere_is_not_believed(store: Store) -> None:
    store.put("v", "other", b"o" * 50_000)
    table = store.engine.index._keys
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
    monkeypatch.setattr(store.engine.index, "_epoch", 12345)
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
    with store.engine.parts.catalog.write() as txn:
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
    table = store.engine.index._keys
    assert table is not None
    table.words[module._MOVED] = 1
    table.words[HEADER:] = memoryview(bytes(8 * (len(table.words) - HEADER))).cast("Q")
    assert touched(store, key) is None


@pytest.mark.parametrize("what", ["head", "keys", "records-000", "cells"])
@pytest.mark.parametrize("damage", ["removed", "empty", "noise", "directory", "of another root"])
def test_whatever_becomes_of_a_file_of_the_index_the_bytes_are_right(store: Store, tmp_path: Path, what: str, damage: str) -> None:
    path = store.root.shared_dir / what
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
            shutil.copy(other.root.shared_dir / what, path)

    def young() -> None:
        with opened(store.root.path) as mine:
            mine.spaces.number("v")
            assert touched(mine, "large") in (None, LARGE)
            assert bytes_of(mine, "large") == LARGE
            mine.put("v", "next", b"next" * 10_000)
            assert touched(mine, "next") in (None, b"next" * 10_000)
            mine.put("v", "next", b"last" * 10_000)
            assert touched(mine, "next") == b"last" * 10_000  # the index was created again
            assert mine.check() == []

    in_child(young)


def test_a_root_without_an_index_gets_one_as_its_entries_are_read(store: Store) -> None:
    shutil.rmtree(store.root.shared_dir)

    def young() -> None:
        with opened(store.root.path) as mine:
            assert bytes_of(mine, "large") == LARGE
            assert touched(mine, "large") == LARGE

    in_child(young)


def test_a_read_only_root_is_read_by_its_index_and_not_changed(store: Store) -> None:
    before = {path: path.stat().st_mtime_ns for path in store.root.shared_dir.iterdir()}

    def young() -> None:
        from forebay._engine.index.settings import Settings

        mine = Store.open(store.root.path, Settings(), read_only=True)
        mine.spaces.number("v")
        assert touched(mine, "large") == LARGE
        mine.close()

    in_child(young)
    assert {path: path.stat().st_mtime_ns for path in store.root.shared_dir.iterdir()} == before


def entries_of(store: Store, count: int) -> list[Entry]:
    """Entries with slots of their own, as the records have them."""
    first = store.entry("v", "large")
    assert first is not None
    made = [
        Entry(1_000_000 + n, "v", f"k{n}", "blob", n, 4096, 10 + n, first.checksum, None, 0.0, first.boot, "cached", ".bin")
        for n in range(count)
    ]
    for entry in made:
        while entry.slot >= store.engine.index.slots:
            store.engine.index._create_file(store.engine.index.head.files)
        store.engine.index.store(1, entry, 1, 1)
        store.engine.index.note(entry)
    return made


def begun(store: Store) -> None:
    store.root.files.mkdir(store.root.shared_dir, store.root.dir_mode)
    store.engine.index.create()


def test_the_table_grows_and_other_processes_go_on_with_the_new_one(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BUCKETS", 256)
    shutil.rmtree(store.root.shared_dir)
    begun(store)
    other = another(store.root)
    few = entries_of(store, 20)
    assert all(other.find(entry.space, entry.key) for entry in few)
    size = (store.root.shared_dir / "keys").stat().st_size
    many = entries_of(store, RECORDS + 500)
    assert (store.root.shared_dir / "keys").stat().st_size > 8 * size
    assert sum(other.find(entry.space, entry.key) is None for entry in many) == 0
    for entry in many[::97]:
        hint = other.find(entry.space, entry.key)
        assert hint is not None
        assert hint[2:] == (entry.slot, entry.id, entry.size, True, module.seal_of(entry.checksum), ".bin", None)


def test_the_table_does_not_grow_where_entries_come_and_go(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BUCKETS", 256)
    shutil.rmtree(store.root.shared_dir)
    begun(store)
    for generation in range(60):
        for entry in entries_of(store, 50):
            renamed = entry._replace(id=entry.id + 1000 * generation, key=f"{generation} {entry.key}")
            store.engine.index.store(1, renamed, 1, 1)
            store.engine.index.note(renamed)
            hint = store.engine.index.find(renamed.space, renamed.key)
            assert hint is not None
            assert hint[3] == renamed.id
    assert (store.root.shared_dir / "keys").stat().st_size <= (HEADER + 512 + PROBES) * 8


def test_an_entry_whose_key_looks_like_a_part_of_an_object_is_not_served_for_it(tmp_path: Path) -> None:
    with ScriptedServer() as server, forebay.Cache(tmp_path / "root", budget=64 * MiB) as cache:
        url = server.put("/object", bytes(range(256)) * 400)
        with cache.open(url, block_size=64_000) as file:
            assert len(file.read(10)) == 10
        key = next(entry.key for entry in cache.entries() if "#block=" in entry.key)
        assert len(cache.read(key)) == 256 * 400
        assert len(cache.read(url)) == 256 * 400


# -- one record, and many -------------------------------------------------------------------------------------------------


@pytest.fixture
def index(root: Root) -> EntryIndex:
    index = another(root)
    index.create()
    return index


def live(index: EntryIndex, slot: int, id: int, used: int = 1) -> None:
    index.store(1, Entry(id, "v", f"k{id}", "blob", 10, 4096, slot, b"s" * 16, None, 0.0, "", "cached"), used, 0)


def test_a_new_slot_is_empty(index: EntryIndex) -> None:
    assert (index.id_of(7), index.used(7), index.validated(7)) == (0, 0, 0)


def test_words_are_where_record_says(index: EntryIndex) -> None:
    live(index, 9, 1 << 61)
    index.touch(9, 5)
    words, base = index.record(9)
    words[base + VALIDATED] = 6
    assert (words[base + ID], words[base + USED], words[base + VALIDATED]) == (1 << 61, 5, 6)
    assert (index.id_of(8), index.id_of(10)) == (0, 0)


def test_what_one_process_stores_another_sees(root: Root, index: EntryIndex) -> None:
    def other() -> None:
        mine = another(root)
        live(mine, 3, 33)
        mine.touch(RECORDS - 1, 44)

    in_child(other)
    assert (index.id_of(3), index.used(RECORDS - 1)) == (33, 44)


def test_mappings_work_on_both_sides_of_a_fork(index: EntryIndex) -> None:
    index.id_of(3)
    in_child(lambda: live(index, 3, 33))
    assert index.id_of(3) == 33


def test_clear_spares_a_successor_and_notes_what_it_does(index: EntryIndex) -> None:
    live(index, 3, 2)
    assert not index.clear(3, 1)
    assert (index.id_of(3), index.head.intent()) == (2, [])
    assert index.clear(3, 2)
    assert (index.id_of(3), index.head.intent()) == (0, [(2, 3)])
    index.head.finish()
    assert index.head.intent() == []


def test_every_eviction_changes_the_word(root: Root, index: EntryIndex) -> None:
    words, at = index.head.evictions()
    seen = {words[at]}
    for _ in range(100):
        index.head.bump_evictions()
        seen.add(words[at])
    assert len(seen) == 101
    words, at = SharedHead(root).evictions()
    assert words[at] in seen - {0}


def test_the_intent_is_what_one_process_notes_and_the_next_one_finds(root: Root, index: EntryIndex) -> None:
    index.head.intend([(1 << 61, 3), (5, 4)])
    index.head.intend([(7, 0)])
    assert SharedHead(root).intent() == [(1 << 61, 3), (5, 4), (7, 0)]
    with pytest.raises(errors.CacheFault, match="more than"):
        index.head.intend([(9, 9)] * PAIRS)
    assert len(SharedHead(root).intent()) == 3


@pytest.mark.parametrize("count", [PAIRS + 1, 1 << 63])
def test_an_intent_that_is_none_of_forebays_is_none(index: EntryIndex, count: int) -> None:
    index.head.words()[3] = count
    index.head.words()[6] = (1 << 64) - 1  # so many slots became free, or it is forged
    live(index, 3, 7)
    assert index.head.intent() == []
    index.empty(3, 7)
    assert index.id_of(3) == 0
    index.head.finish()
    assert index.head.words()[3] == 0


def test_each_new_entry_gets_a_free_slot_of_its_own(root: Root, index: EntryIndex) -> None:
    for id, slot in enumerate(index.take(range(1, 101)), 1):
        live(index, slot, id)
    index.head.finish()
    assert sorted(index.ids(0))[-100:] == list(range(1, 101))
    taken = {slot for slot, id in enumerate(index.ids(0)) if id}
    others = another(root).take(range(200, 250)) + another(root).take([300])
    assert len(set(others)) >= 50
    assert not taken & set(others)


def test_a_transaction_gives_no_slot_twice_though_it_needs_a_new_file(index: EntryIndex) -> None:
    for slot in range(RECORDS - 10):
        live(index, slot, slot + 1)
    several = [slot for first in range(20_000, 20_100, 25) for slot in index.take(range(first, first + 25))]
    assert len(set(several)) == 100
    assert min(several) >= RECORDS - 10
    assert index.head.files == 2


def test_a_slot_that_a_process_knew_to_be_free_and_frees_itself_is_given_once(root: Root, index: EntryIndex) -> None:
    """P1 knows the slot to be free / P2 uses it / P1 evicts that entry / P1 stores many in one transaction."""
    live(index, index.take([1])[0], 1)
    index.head.finish()
    slot = 2000
    live(another(root), slot, 2)
    assert index.clear(slot, 2)
    index.head.finish()
    several = [taken for first in range(100, 100 + 3200, 100) for taken in index.take(range(first, first + 100))]
    assert slot in several
    assert len(set(several)) == len(several)


def test_a_slot_that_became_free_is_used_again_by_every_process(root: Root, index: EntryIndex) -> None:
    for slot in range(RECORDS):
        live(index, slot, slot + 1)
    other = another(root)
    for slot in (5, 4000, 17):
        index.clear(slot, slot + 1)
    index.head.finish()
    assert sorted(other.take([20_000, 20_001, 20_002])) == [5, 17, 4000]
    assert index.head.files == 1


def test_32_processes_make_one_head_and_one_file(root: Root) -> None:
    gate = os.pipe()

    def make(n: int) -> None:
        os.close(gate[1])
        os.read(gate[0], 1)
        mine = another(root)
        mine.create()
        live(mine, n, n + 1)

    born = [fork(lambda n=n: make(n)) for n in range(32)]
    os.close(gate[0])
    os.close(gate[1])
    assert [child.wait() for child in born] == [0] * 32
    assert another(root).ids(0)[:32] == list(range(1, 33))
    assert set(os.listdir(root.shared_dir)) == {"head", "records-000"}


def test_files_are_allocated_whole(root: Root, index: EntryIndex) -> None:
    for path in root.shared_dir.iterdir():
        assert path.stat().st_blocks * 512 >= path.stat().st_size


def test_a_maker_killed_at_any_step_blocks_nobody(root: Root, kill_at: Any) -> None:
    step = 0
    while kill_at(step, lambda: another(root).create()):
        mine = another(root)
        mine.create()
        live(mine, step, 5)
        assert mine.id_of(step) == 5
        shutil.rmtree(root.shared_dir)
        root.shared_dir.mkdir()
        step += 1
    assert step > 2


@pytest.mark.parametrize("count", [10, 5000])
def test_used_many_is_used_of_each(index: EntryIndex, count: int) -> None:
    index._create_file(1)
    wanted = [n * 7919 % (2 * RECORDS) for n in range(count)]
    for n, slot in enumerate(wanted):
        index.touch(slot, n + 1)
    assert index.used_many(wanted) == [index.used(slot) for slot in wanted] == list(range(1, count + 1))
    assert index.used_many([]) == []


def test_an_entry_that_is_used_while_times_are_read_was_used(index: EntryIndex) -> None:
    """P1 asks for the time, or reads the words / P2 uses the entry / P1 does the other one."""
    index.touch(7, index.head.clock.now())
    look = index.head.clock.look

    def looking() -> int:
        now = look()
        in_child(lambda: index.touch(7, look()))
        return now

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index.head.clock, "look", looking)
        assert index.times([7])[0][0] > 0
        assert index.used_many([7])[0] > 0


@pytest.mark.parametrize("slot", [RECORDS, 100 * RECORDS, 1 << 61, -7])
def test_a_slot_that_there_is_not_is_empty(root: Root, index: EntryIndex, slot: int) -> None:
    index.touch(slot, 5)
    assert (index.id_of(slot), another(root).id_of(slot)) == (0, 0)
    assert set(os.listdir(root.shared_dir)) == {"head", "records-000"}


@pytest.mark.parametrize("harm", ["missing", "truncate", "magic", "other root", "link"])
@pytest.mark.parametrize("name", ["head", "records-000"])
def test_a_damaged_file_is_a_fault_of_the_cache(root: Root, index: EntryIndex, name: str, harm: str) -> None:
    path = root.shared_dir / name
    if harm in ("truncate", "missing"):
        other = path.rename(root.tmp_dir / "x")  # never under a mapping
        if harm == "truncate":
            path.write_bytes(other.read_bytes()[:-1])
    elif harm == "link":
        path.rename(root.tmp_dir / "x")
        path.mkdir()
    else:
        with path.open("r+b") as file:
            file.seek(0 if harm == "magic" else 8)
            file.write(b"\xff" if harm == "magic" else bytes([root.id & 0xFF ^ 0xFF]))  # another byte than that of the id
    with pytest.raises(SharedBroken, match=name):
        another(root).id_of(0)
    another(root).create()
    assert another(root).id_of(0) == 0


def test_a_file_that_was_replaced_is_noticed(root: Root, index: EntryIndex) -> None:
    for name in ("records-000", "head"):
        index.id_of(0)
        assert index.is_same()
        (root.shared_dir / name).unlink()
        assert not index.is_same()
        another(root).create()
        assert not index.is_same()
        index.forget()


def test_a_full_disk_leaves_no_file(root: Root, index: EntryIndex) -> None:
    def full(name: str, subject: str) -> None:
        if name == "pwrite":
            raise OSError(28, "No space left on device")

    before = set(os.listdir(root.shared_dir))
    host.on_step(full)
    with pytest.raises(OSError, match="No space"):
        index._create_file(1)
    host.on_step(None)
    assert set(os.listdir(root.shared_dir)) == before
    assert index.head.files == 1


def test_a_read_only_root_is_read_and_not_touched(root: Root, index: EntryIndex) -> None:
    live(index, 3, 33)
    index.touch(3, 1)
    reader = another(Root(root.path, root.id, read_only=True))
    reader.touch(3, 2)
    assert (reader.id_of(3), reader.used(3), reader.validated(3)) == (33, 1, 0)
    with pytest.raises(TypeError):
        live(reader, 3, 4)


def test_what_a_power_cut_left_of_the_table_of_keys_is_made_anew_at_once(quick_path: Path) -> None:
    """The first opening of an epoch stores records, and works."""
    place = quick_path / "torn"
    with opened(place, MiB) as store:
        entry = store.put("v", "k", bytes(50_000))
    keys = place / "shared/keys"
    keys.write_bytes(bytes(keys.stat().st_size))
    with opened(place, MiB) as store:
        parts = store.engine.parts
        store.engine.index.clear(entry.slot, entry.id)
        recovery.reconcile(parts.catalog, store.engine.index)
        assert store.engine.index.find("v", "k") is not None
