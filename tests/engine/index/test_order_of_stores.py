"""What another core may see of a record while it is stored, where cores keep no order: no wrong byte, and no time of another entry."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay._engine.files import pack_files
from forebay._engine.index.records import ID, USED, VALIDATED
from forebay._engine.store import Store
from forebay._kernel import fences
from forebay._model import Entry
from tests.harness import MiB, opened

HEADER, WORDS, STORED = 512, 16, 12
LARGE = b"l" * 100_000
AGE = 1 << 50
RECORD = 0x4F88_A1D8_E2A7_4FEF
HINT = 0xAAC4_54F6_5600_0BB8


@pytest.fixture
def store(quick_path: Path) -> Iterator[Store]:
    with opened(quick_path / "root", 64 * MiB) as store:
        store.put("v", "large", LARGE)
        store.spaces.number("v")
        yield store


def entry_of(store: Store, key: str) -> Entry:
    entry = store.entry("v", key)
    assert entry is not None
    return entry


def record_of(store: Store, entry: Entry) -> memoryview:
    words, base = store.engine.index.record(entry.slot)
    return words[base : base + WORDS]


def stages(store: Store, entry: Entry, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The words of a record before it is stored with no time of validation, at each fence, and after. The slot is that of an entry that
    is gone, and was validated just now."""
    record, space = record_of(store, entry), store.engine.index.space(entry.slot)
    record[ID], record[VALIDATED] = 0, store.now()
    for word in range(4, STORED):
        record[word] ^= 1
    seen = [record.tolist()]
    with monkeypatch.context() as m:
        m.setattr(fences, "fence", lambda: seen.append(record.tolist()))
        store.engine.index.store(space, entry, store.now(), 0)
    return [*seen, record.tolist()]


def views(stages: list[list[int]]) -> Iterator[list[int]]:
    """All that another core may see: the stores between two fences in any order."""
    for before, after in itertools.pairwise(stages):
        changed = [word for word in range(WORDS) if before[word] != after[word]]
        for count in range(len(changed) + 1):
            for some in itertools.combinations(changed, count):
                yield [after[word] if word in some else before[word] for word in range(WORDS)]


def test_the_time_of_validation_of_the_entry_before_counts_for_no_other(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = entry_of(store, "large")
    record, whole = record_of(store, entry), stages(store, entry, monkeypatch)
    assert whole[0] == whole[1]  # a reader that loads the id before the time, in spite of its program, sees the first fence in between
    assert store.first_touch("v", "large", AGE) is None  # it was never validated
    record[VALIDATED] = store.now()
    assert store.first_touch("v", "large", AGE) == LARGE
    seen = 0
    for words in views(whole):
        record[:] = memoryview(b"".join(word.to_bytes(8, "little") for word in words)).cast("Q")
        assert store.first_touch("v", "large", AGE) is None, words
        seen += 1
    assert seen > 1 << 8


@pytest.mark.parametrize("loads", range(1, 6))
def test_a_hit_whose_entry_is_replaced_between_two_loads_takes_no_time_of_the_next(store: Store, loads: int) -> None:
    for _ in range(2):
        store.first_touch("v", "large", AGE)
    hit = store.hot_lookup("v")
    assert hit("large", AGE) == LARGE
    item = store.engine.memo._known["v"]["large"]
    old, new = [item.id, 0, 1, 0], [item.id + 1, 0, store.now(), 0]

    class Replaced(list[int]):
        """The words of the entry, which never was validated; after some loads those of the next one."""

        left = loads

        def __getitem__(self, index: int) -> int:  # type: ignore[override]
            self.left -= 1
            return (old if self.left >= 0 else new)[index]

    item.slot = Replaced()  # type: ignore[assignment]
    assert hit("large", AGE) is None


def test_a_look_up_whose_entry_is_replaced_takes_no_time_of_the_next(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = entry_of(store, "large")
    assert store.validated(entry)
    store.put("v", "large", b"n" * 70_000)
    record = record_of(store, entry)
    record[ID], record[VALIDATED] = entry.id + 1000, store.now()  # another one has the slot by now
    assert store.validated(entry) == 0
    record[ID] = 0


def test_no_words_of_two_entries_lead_to_bytes_of_another(store: Store) -> None:
    """In no order at all, with no fence: each word may be of the entry before or of the next one, the id none, too."""
    former = entry_of(store, "large")
    before = record_of(store, former).tolist()
    assert store.discard(former)
    body = b"o" * len(LARGE)
    store.put("v", "other", body)
    record = record_of(store, entry_of(store, "other"))
    assert entry_of(store, "other").slot == former.slot
    after = record.tolist()
    differ = [word for word in range(STORED) if before[word] != after[word] and word not in (ID, USED)]
    for id in (0, before[ID], after[ID]):
        for taken in range(1 << len(differ)):
            for word in differ:
                record[word] = before[word] if taken >> differ.index(word) & 1 else after[word]
            record[ID] = id
            assert store.first_touch("v", "large", AGE) is None, bin(taken)
            assert store.first_touch("v", "other", AGE) in (None, body), bin(taken)


def test_proofs_are_the_same_in_each_python(store: Store) -> None:
    """Processes with other interpreters share the root: a proof is no `hash`."""
    entry = entry_of(store, "large")._replace(id=7, size=5, charge=4096, suffix="", checksum=b"12345678")
    first, proof, *_ = store.engine.index._facts_of(entry, is_sound=True)
    assert (first, proof ^ store.engine.index._hash("v", "large")[1]) == (store.engine.index._hash("v", "large")[0], RECORD)
    assert pack_files.length_hint(1 << 40 | 3, 1 << 40 | 2, 3000) == HINT
