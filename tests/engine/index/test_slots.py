from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

from forebay._engine.files.root import Root
from forebay._engine.index.slots import ID, RECORDS, USED, VALIDATED, Slots
from forebay._kernel import host
from forebay.errors import CacheFault


@pytest.fixture
def slots(root: Root) -> Slots:
    slots = Slots(root)
    slots.ensure(0)
    return slots


def test_a_new_slot_is_empty(slots: Slots) -> None:
    assert (slots.id_of(7), slots.used(7), slots.validated(7)) == (0, 0, 0)


def test_words_are_where_record_says(slots: Slots) -> None:
    slots.set_id(9, 1 << 61)
    slots.touch(9, 5)
    slots.set_validated(9, 6)
    words, base = slots.record(9)
    assert (words[base + ID], words[base + USED], words[base + VALIDATED]) == (1 << 61, 5, 6)
    assert (slots.id_of(8), slots.id_of(10)) == (0, 0)


def test_what_one_process_stores_another_sees(root: Root, slots: Slots, children: Callable[..., object]) -> None:
    def other() -> None:
        mine = Slots(root)
        mine.set_id(3, 33)
        mine.touch(RECORDS - 1, 44)

    assert children(other).wait() == 0
    assert (slots.id_of(3), slots.used(RECORDS - 1)) == (33, 44)


def test_mappings_work_on_both_sides_of_a_fork(slots: Slots, children: Callable[..., object]) -> None:
    assert children(lambda: slots.set_id(3, 33)).wait() == 0
    assert slots.id_of(3) == 33


def test_clear_spares_a_successor(slots: Slots) -> None:
    slots.set_id(3, 2)
    assert not slots.clear(3, 1)
    assert slots.id_of(3) == 2
    assert slots.clear(3, 2)
    assert slots.id_of(3) == 0


def test_every_eviction_changes_the_word(slots: Slots, root: Root) -> None:
    words, index = slots.evictions()
    seen = {words[index]}
    for _ in range(100):
        slots.bump_evictions()
        seen.add(words[index])
    assert len(seen) == 101
    words, index = Slots(root).evictions()
    assert words[index] in seen - {0}


def test_chunks_are_made_when_they_are_needed_and_allocated_whole(root: Root, slots: Slots) -> None:
    assert os.listdir(root.slots_dir) == ["000"]
    slots.ensure(3 * RECORDS)
    assert sorted(os.listdir(root.slots_dir)) == ["000", "003"]
    for path in root.slots_dir.iterdir():
        assert path.stat().st_blocks * 512 >= path.stat().st_size == 4096 + 32 * RECORDS
    slots.set_id(3 * RECORDS + 1, 5)
    assert (slots.id_of(3 * RECORDS + 1), slots.id_of(1)) == (5, 0)


def test_32_processes_make_one_chunk(root: Root, children: Callable[..., object]) -> None:
    gate = os.pipe()

    def make(n: int) -> None:
        os.close(gate[1])
        os.read(gate[0], 1)
        slots = Slots(root)
        slots.ensure(0)
        slots.set_id(n, n + 1)

    born = [children(lambda n=n: make(n)) for n in range(32)]
    os.close(gate[0])
    os.close(gate[1])
    assert [child.wait() for child in born] == [0] * 32
    assert [Slots(root).id_of(n) for n in range(32)] == list(range(1, 33))
    assert os.listdir(root.slots_dir) == ["000"]


def test_a_maker_killed_at_any_step_blocks_nobody(root: Root, kill_at: Callable[..., bool]) -> None:
    step = 0
    while kill_at(step, lambda slot=step * RECORDS: Slots(root).ensure(slot)):
        slots = Slots(root)
        slots.ensure(step * RECORDS)
        slots.set_id(step * RECORDS, 5)
        assert slots.id_of(step * RECORDS) == 5
        assert all(name.isdigit() for name in os.listdir(root.slots_dir))
        step += 1
    assert step > 2


@pytest.mark.parametrize("count", [10, 5000])
def test_used_many_is_used_of_each(slots: Slots, count: int) -> None:
    slots.ensure(RECORDS)
    wanted = [n * 7919 % (2 * RECORDS) for n in range(count)]
    for n, slot in enumerate(wanted):
        slots.touch(slot, n + 1)
    assert slots.used_many(wanted) == [slots.used(slot) for slot in wanted] == list(range(1, count + 1))
    assert slots.used_many([]) == []


def test_an_entry_that_is_used_while_times_are_read_was_used(slots: Slots, children: Callable[..., Any]) -> None:
    """P1 asks for the time, or reads the words / P2 uses the entry / P1 does the other one."""
    slots.touch(7, slots.clock.now())
    look = slots.clock.look

    def looking() -> int:
        now = look()
        assert children(lambda: slots.touch(7, look())).wait() == 0
        return now

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slots.clock, "look", looking)
        assert slots.times([7])[0][0] > 0
        assert slots.used_many([7])[0] > 0


def test_a_missing_chunk_is_a_fault_of_the_cache(slots: Slots) -> None:
    with pytest.raises(CacheFault, match="003 is missing"):
        slots.id_of(3 * RECORDS)


@pytest.mark.parametrize("harm", ["truncate", "magic", "other root", "link"])
def test_a_damaged_chunk_is_a_fault_of_the_cache(root: Root, slots: Slots, harm: str) -> None:
    path = root.slots_dir / "000"
    if harm == "truncate":
        other = path.rename(root.tmp_dir / "x")  # never under a mapping
        path.write_bytes(other.read_bytes()[:-1])
    elif harm == "link":
        path.rename(root.tmp_dir / "x")
        path.mkdir()
    else:
        with path.open("r+b") as file:
            file.seek(0 if harm == "magic" else 8)
            file.write(b"\xff" if harm == "magic" else bytes([root.id & 0xFF ^ 0xFF]))  # another byte than that of the id
    with pytest.raises((CacheFault, OSError)):
        Slots(root).id_of(0)


def test_a_table_that_was_replaced_is_noticed(root: Root, slots: Slots) -> None:
    assert slots.is_same()
    (root.slots_dir / "000").unlink()
    assert not slots.is_same()
    Slots(root).ensure(0)
    assert not slots.is_same()


def test_a_full_disk_leaves_no_chunk(root: Root, slots: Slots) -> None:
    def full(name: str, subject: str) -> None:
        if name == "allocate":
            raise OSError(28, "No space left on device")

    host.on_step(full)
    with pytest.raises(OSError, match="No space"):
        slots.ensure(RECORDS)
    host.on_step(None)
    assert os.listdir(root.slots_dir) == ["000"]
    slots.ensure(RECORDS)
    assert slots.id_of(RECORDS) == 0


def test_a_read_only_root_is_read_and_not_touched(root: Root, slots: Slots) -> None:
    slots.set_id(3, 33)
    slots.touch(3, 1)
    reader = Slots(Root(root.path, root.id, read_only=True))
    reader.touch(3, 2)
    reader.set_validated(3, 2)
    assert (reader.id_of(3), reader.used(3), reader.validated(3)) == (33, 1, 0)
    with pytest.raises(TypeError):
        reader.set_id(3, 4)
