"""Space: which entries are evicted, how many, and which are spared."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from forebay import errors
from forebay._engine.catalog import writer_lock
from forebay._engine.catalog.reservations import Reservation
from forebay._engine.space import budget, free_space, ranking
from forebay._engine.space.free_space import SpaceRequest
from forebay._engine.store import Settings, Store
from forebay._kernel import host
from forebay._model import ObjectInfo, Victim
from tests.harness import KiB, MiB, assert_settled, bytes_of, data_usage, opened
from tests.processes import Gate, fork, in_child


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with opened(tmp_path / "root", MiB) as found:
        yield found
        assert found.check(deep=True) == []


def one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let others write after each entry that is evicted."""
    monkeypatch.setattr(budget, "BATCH", 1)
    monkeypatch.setattr(budget, "AT_MOST", 0.0)


def reserved_ids(store: Store) -> list[int]:
    return [id for (id,) in store.engine.parts.catalog.all("SELECT id FROM reservations")]


def test_more_victims_than_are_picked_at_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranking, "PICKED", 64)
    for n in range(1000):
        store.put("v", f"k{n}", b"x" * 500)
    store.put("v", "big", bytes(900 * KiB))
    assert bytes_of(store, "big") == bytes(900 * KiB)


def test_what_is_read_all_the_time_can_be_evicted(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for n in range(9):
        store.put("v", f"k{n}", bytes(100 * KiB))
    pick = ranking.Ranking.pick

    def pick_and_read(self: ranking.Ranking, scope: ranking.Scope) -> None:
        pick(self, scope)
        for entry in store.seeing.entries("v"):
            store.touch(entry)

    with monkeypatch.context() as patch:
        patch.setattr(ranking.Ranking, "pick", pick_and_read)
        store.put("v", "new", bytes(300 * KiB))
    assert bytes_of(store, "new") == bytes(300 * KiB)


def test_leases_alone_make_it_full(store: Store) -> None:
    for n in range(9):
        store.put("v", f"k{n}", bytes(100 * KiB))
    leases = [store.lease("v", f"k{n}") for n in range(9)]
    with pytest.raises(errors.NoSpace) as found:
        store.put("v", "new", bytes(300 * KiB))
    assert (found.value.need, found.value.budget) == (300 * KiB, MiB)
    assert all(lease is not None and Path(lease).exists() for lease in leases)
    for lease in leases:
        assert lease is not None
        lease.close()
    store.put("v", "new", bytes(300 * KiB))


def test_who_can_do_without_does_not_search_in_vain_again_and_again(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is served from memory anyway: until a moment has passed, less is wanted, or there is room."""
    for n in range(9):
        store.put("v", f"k{n}", bytes(100 * KiB), life="pinned")

    def fetch(size: int, key: str = "new") -> None:
        with store.writing("v", key) as writing:
            writing.spills = True
            writing.begin(ObjectInfo("", size))
            writing.write(0, bytes(size))
            writing.publish()

    searches: list[object] = []
    pick = ranking.Ranking.pick
    monkeypatch.setattr(ranking.Ranking, "pick", lambda self, scope: (searches.append(scope), pick(self, scope)))
    monkeypatch.setattr(budget, "IN_VAIN", 1000.0)
    found = 0
    for again in (False, True):
        with pytest.raises(errors.NoSpace, match="are available"):
            fetch(300 * KiB)
        assert (len(searches) > found) is not again
        found = len(searches)
    with pytest.raises(errors.NoSpace):
        fetch(200 * KiB)
    assert len(searches) > found
    fetch(30 * KiB, "small")
    for n in range(4):
        store.set_life("v", f"k{n}", "cached")
    assert (
        len(store.remove([Victim(e.key, e.size, e.charge, e.used, e.id) for e in store.seeing.entries("v") if e.life == "cached"]).removed)
        == 5
    )
    fetch(300 * KiB)
    assert bytes_of(store, "new") == bytes(300 * KiB)


def test_lru_is_exact(store: Store) -> None:
    for n in range(9):
        store.put("v", f"k{n}", bytes(100 * KiB))
    for entry in store.seeing.entries("v"):
        if entry.key in ("k0", "k3"):
            store.touch(entry)
    store.put("v", "new", bytes(400 * KiB))
    assert [entry.key for entry in store.seeing.entries("v")] == ["k5", "k6", "k7", "k8", "k0", "k3", "new"]


@pytest.mark.parametrize("size", [10, 20 * KiB], ids=["value", "blob"])
def test_a_replaced_entry_of_the_only_one_allowed(tmp_path: Path, size: int) -> None:
    with opened(tmp_path / "one", MiB, max_entries=1) as store:
        store.put("v", "a", b"1" * size)
        store.put("v", "a", b"2" * size)
        assert bytes_of(store, "a") == b"2" * size
        store.put("v", "b", b"3" * size)
        assert [entry.key for entry in store.seeing.entries("v")] == ["b"]


def test_a_lease_is_never_taken_on_a_version_that_was_replaced(store: Store) -> None:
    """P1 reads the row / P2 replaces it, while P3 leases the old one, so that its file stays / P1 locks: it must look again."""
    store.put("v", "a", bytes(30 * KiB))
    old = store.lease("v", "a")
    assert old is not None
    store.put("v", "a", b"1" * 30 * KiB)
    assert store.engine.parts.leases._try(old.entry) is None
    new = store.lease("v", "a")
    assert new is not None
    assert Path(new).read_bytes() == b"1" * 30 * KiB
    assert Path(old).read_bytes() == bytes(30 * KiB)
    new.close()
    old.close()
    store.put("v", "next", b"")


@pytest.mark.parametrize("how", ["removes", "replaces", "evicts"])
def test_nobody_gets_the_room_of_files_that_are_yet_to_be_unlinked(quick_path: Path, how: str) -> None:
    """A process is stopped between its commit and the unlinking, then killed."""
    place, said = quick_path / "root", Gate()

    def remover() -> None:
        def hook(call: str, subject: str) -> None:
            if call == "unlink":
                said.open()
                signal.pause()

        with opened(place, MiB) as store:
            for n in range(9):
                store.put("v", f"k{n}", bytes(100 * KiB))
            host.on_step(hook)
            if how == "removes":
                store.remove([Victim(e.name, e.size, e.charge, e.used, e.id) for e in store.seeing.entries()[:3]])
            store.put("v", "k0", bytes(100 * KiB if how == "replaces" else 300 * KiB))

    def other() -> None:
        writer_lock.LONGEST_WAIT = 0.3
        with opened(place) as store:
            for n in range(3):
                with pytest.raises(errors.WriterBusy):
                    store.put("v", f"new{n}", bytes(100 * KiB))
                assert data_usage(place) <= MiB

    child = fork(remover)
    said.wait()
    in_child(other)
    child.kill()
    said.close()
    in_child(lambda: brim(place))
    assert_settled(place, MiB)


def brim(place: Path) -> None:
    with opened(place) as store:
        store.put("v", "brim", bytes(MiB))


def test_a_partial_of_the_only_entry_allowed(tmp_path: Path) -> None:
    with opened(tmp_path / "one", 8 * MiB, max_entries=1) as store:
        hold = store.locks.hold("v", "a")
        with store.writing("v", "a") as writing:
            writing.begin(ObjectInfo("", 2 * MiB, '"1"', strong=True))
            writing.write(0, bytes(MiB))
        hold.release()
        assert len(reserved_ids(store)) == 1
        store.put("v", "b", b"3")
        assert [entry.key for entry in store.seeing.entries("v")] == ["b"]
        assert store.check() == []


def test_max_entries_is_what_the_message_names(tmp_path: Path) -> None:
    with contextlib.closing(Store.open(tmp_path / "full", Settings(budget=MiB, max_entries=1))) as store:
        store.put("v", "held", bytes(100 * KiB))
        lease = store.lease("v", "held")
        assert lease is not None
        with lease, pytest.raises(errors.NoSpace, match="max_entries"):
            store.put("v", "more", bytes(100 * KiB))


def test_what_was_replaced_is_not_counted_for_people(store: Store) -> None:
    store.put("v", "k", bytes(100 * KiB))
    lease = store.lease("v", "k")
    assert lease is not None
    with lease:
        store.put("v", "k", bytes(120 * KiB))
        assert [space.entries for space in store.seeing.usage().spaces if space.name == "v"] == [1]


# -- a busy catalog ----------------------------------------------------------------------------------------------------


@pytest.fixture
def other(store: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[writer_lock.WriterLock]:
    """Another process that writes, as this one sees it; nobody waits for it long."""
    monkeypatch.setattr(writer_lock, "LONGEST_WAIT", 0.05)
    found = writer_lock.WriterLock(store.root, store.engine.parts.words)
    yield found
    found.close()


@pytest.mark.parametrize("error", [None, RuntimeError], ids=["busy", "another fault"])
def test_what_was_asked_for_is_given_back_once_the_catalog_is_free(
    store: Store, other: writer_lock.WriterLock, monkeypatch: pytest.MonkeyPatch, error: type[Exception] | None
) -> None:
    """A large write has its room in several batches, and another process writes between two of them."""
    for n in range(9):
        store.put("v", f"k{n}", bytes(100 * KiB))
    one_by_one(monkeypatch)
    pick, turns = store.engine.parts.writers.budget._pick, []

    def first(search: budget.Search) -> None:
        pick(search)
        turns.append(search.id)
        if search.id:
            other.take(0)
            if error is not None:
                raise error

    with monkeypatch.context() as patch:
        patch.setattr(store.engine.parts.writers.budget, "_pick", first)
        with pytest.raises(error or errors.WriterBusy):
            store.put("v", "new", bytes(300 * KiB))
    assert len(reserved_ids(store)) == 1
    other.release()
    store.put("v", "brim", bytes(MiB))
    assert bytes_of(store, "brim") == bytes(MiB)
    assert reserved_ids(store) == []


def test_a_reservation_is_given_back_once_the_catalog_is_free(store: Store, other: writer_lock.WriterLock) -> None:
    store.put("v", "k", b"x")
    reserved = store.engine.parts.writers.budget.reserve(SpaceRequest("v", "a", 7, 100 * KiB))
    other.take(0)
    store.engine.parts.writers.budget.cancel(reserved.id)
    other.release()
    assert reserved_ids(store) == [reserved.id]
    store.engine.parts.writers.budget.cancel(store.engine.parts.writers.budget.reserve(SpaceRequest("v", "b", 8, 100 * KiB)).id)
    assert reserved_ids(store) == []


def test_what_was_rolled_back_withdraws_nothing_of_others(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """P1 enters a reservation, and fails: no id was given / P2 gets that id / P1 gives up."""
    for n in range(9):
        store.put("v", f"k{n}", bytes(100 * KiB))
    one_by_one(monkeypatch)
    found = store.engine.parts.writers.budget
    grow, give_up, others = found._grow, found._give_up, list[Reservation]()

    def and_fail(*args: Any) -> None:
        grow(*args)
        raise OSError(24, "Too many open files")

    def and_another_first(search: budget.Search) -> None:
        if not others:
            others.append(found.reserve(SpaceRequest("v", "b", 8, KiB)))
        give_up(search)

    store.engine.parts.catalog._ids = [0, 0]  # so that it takes ids in the transaction that fails, which are given again
    with monkeypatch.context() as patch:
        patch.setattr(found, "_grow", and_fail)
        patch.setattr(found, "_give_up", and_another_first)
        with pytest.raises(OSError, match="Too many"):
            found.reserve(SpaceRequest("v", "a", 7, 600 * KiB))
    (reserved,) = others
    assert reserved_ids(store) == [reserved.id]
    store.engine.parts.writers.budget.cancel(reserved.id)


def test_a_lower_limit_that_met_a_busy_catalog_is_applied_by_the_next_write(
    store: Store, other: writer_lock.WriterLock, monkeypatch: pytest.MonkeyPatch
) -> None:
    for n in range(9):
        store.put("v", f"k{n}", bytes(100 * KiB))
    fit = store.engine.parts.writers.budget.fit

    def while_another_writes() -> bool:
        other.take(0)
        return fit()

    with monkeypatch.context() as patch:
        patch.setattr(store.engine.parts.writers.budget, "fit", while_another_writes)
        assert store.configure(Settings(budget=300 * KiB))
    assert len(store.seeing.entries("v")) == 9
    assert store.seeing.usage().budget == 300 * KiB
    other.release()
    store.put("v", "small", b"x")
    assert store.seeing.usage().used <= 300 * KiB
    store.configure(Settings(budget=MiB))


def test_a_budget_that_another_process_lowers_binds_the_next_small_value(store: Store) -> None:
    """What this process remembers of the totals is of the budget before."""
    for n in range(60):
        store.put("v", f"k{n}", bytes(10 * KiB))

    def lower() -> None:
        with opened(store.root.path) as mine:
            mine.engine.settings.set(Settings(budget=300 * KiB))

    in_child(lower)
    store.put("v", "next", b"x")
    assert store.seeing.usage().used <= store.seeing.usage().budget == 300 * KiB
    store.configure(Settings(budget=MiB))


def test_what_was_to_be_replaced_is_gone_by_now(tmp_path: Path) -> None:
    """P1 asks for room to replace an entry / P2 evicts that, and fills its place / P1 is to be granted the room."""
    with opened(tmp_path / "root", 4 * MiB) as store:
        store.spaces.ensure("q", quota=100 * KiB)
        store.put("q", "other", bytes(40 * KiB), life="pinned")
        store.put("q", "k", bytes(60 * KiB))
        asked = SpaceRequest("q", "k", 7, 60 * KiB, replaces=["k"])
        (old,) = [entry for entry in store.seeing.entries("q") if entry.key == "k"]
        assert store.remove([Victim(old.name, old.size, old.charge, old.used, old.id)]).removed
        store.put("q", "third", bytes(60 * KiB), life="pinned")
        with pytest.raises(errors.NoSpace):
            store.engine.parts.writers.budget.reserve(asked)
        assert store.spaces.used("q") == (100 * KiB, 2)


MUCH = 1 << 40


@pytest.mark.parametrize(("free", "inodes", "looks"), [(free_space.EASY // 2, MUCH, 3), (MUCH, 500, 3), (MUCH, MUCH, 0)])
def test_a_disk_with_little_room_is_looked_at_by_each_put(
    store: Store, monkeypatch: pytest.MonkeyPatch, free: int, inodes: int, looks: int
) -> None:  # fmt: skip
    """Where there is much no other program can have filled it since."""
    monkeypatch.setattr(free_space, "COUNT_AGAIN", 1000)
    asked: list[object] = []
    monkeypatch.setattr(host, "disk", lambda path: asked.append(path) or host.Disk(4096, MUCH, free, inodes))
    store.engine.parts.writers.budget.room._count_at = 0
    store.put("v", "first", b"x")
    asked.clear()
    for n in range(3):
        store.put("v", f"k{n}", b"x")
    assert len(asked) == looks
    store.engine.parts.writers.budget.room._count_at = 0  # a moment has passed
    store.put("v", "last", b"x")
    assert len(asked) > looks


def test_what_a_dead_process_had_reserved_is_free(tmp_path: Path) -> None:
    with opened(tmp_path / "root", MiB) as store:
        asked, never = Gate(), Gate()

        def child() -> None:
            store.spaces.ensure("v")
            store.engine.parts.writers.budget.reserve(SpaceRequest("v", "growing", 0, 900_000))
            asked.open()
            never.wait()

        its = fork(child)
        asked.wait()
        with pytest.raises(errors.NoSpace):
            store.put("v", "k", bytes(500 * KiB))
        its.kill()
        with store.engine.parts.catalog.write() as txn:
            store.engine.parts.owners.reap(txn)  # as whoever lacks room does; there are no files that a successor could go on with
        assert store.seeing.usage().reserved == 0
        store.put("v", "k", bytes(500 * KiB))
