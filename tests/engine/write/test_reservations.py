"""Space that is reserved ahead: counted from the start, turned into entries many at a time, gone with its process."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay import errors
from forebay._engine.locks.lease import Lease
from forebay._engine.space.ranking import Scope
from forebay._engine.store import Store
from forebay._engine.write.reservations import NOTHING, Item, Need
from tests.crash.conftest import victim_of
from tests.harness import KiB, MiB, bytes_of, opened
from tests.processes import Gate, fork


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with opened(tmp_path / "root", MiB) as found:
        yield found
        assert found.check(deep=True) == []


def promised(store: Store) -> int:
    return store.seeing.usage().reserved


def items(count: int, size: int, begin: str = "k") -> list[Item]:
    return [Item(f"{begin}{n}", bytes([n % 251]) * size) for n in range(count)]


@pytest.mark.parametrize("size", [0, 100, 16 * KiB, 16 * KiB + 1, 100 * KiB])
def test_what_is_promised_becomes_entries(store: Store, size: int) -> None:
    credit = store.reservations.open("ahead")
    credit.ask(credit.need(size).times(5))
    before = promised(store)
    assert before == credit.promised.charge == 5 * credit.need(size).charge
    leases = credit.keep(items(3, size))
    assert [bytes(store.bytes_leased(lease) or b"") for lease in leases] == [item.data for item in items(3, size)]
    assert credit.promised == credit.need(size).times(2)
    assert promised(store) == credit.promised.charge
    credit.give_back(credit.promised)
    assert promised(store) == 0
    for lease in leases:
        lease.close()


def test_a_large_one_comes_out_of_the_promise_too(store: Store) -> None:
    credit = store.reservations.open("ahead")
    credit.ask(credit.need(400 * KiB).plus(credit.need(10)))
    lease = credit.keep_large(Item("large", bytes(400 * KiB)))
    with lease:
        assert store.bytes_leased(lease) == bytes(400 * KiB)
        assert credit.promised == credit.need(10)
    credit.give_back(credit.promised)


def test_more_than_was_promised_is_not_kept(store: Store) -> None:
    credit = store.reservations.open("ahead")
    credit.ask(credit.need(1000))
    with pytest.raises(errors.CacheFault, match="were not promised"):
        credit.keep(items(2, 1000))
    assert store.seeing.entries("ahead") == []
    credit.keep(items(1, 1000))[0].close()


def test_bytes_that_an_entry_did_not_take_stay_promised(store: Store) -> None:
    """Its loader, which knew no size, reserves only what the next one lacks."""
    credit = store.reservations.open("ahead")
    credit.ask(credit.need(100 * KiB))
    credit.keep(items(1, 60 * KiB))[0].close()
    assert credit.promised.size == 40 * KiB
    credit.ask(credit.need(90 * KiB).minus(credit.promised))
    credit.keep(items(1, 90 * KiB, begin="next"))[0].close()
    credit.give_back(credit.promised)
    assert promised(store) == 0


def test_a_promise_counts_against_the_budget(store: Store) -> None:
    credit = store.reservations.open("ahead")
    credit.ask(credit.need(900 * KiB))
    with pytest.raises(errors.NoSpace):
        store.put("v", "k", bytes(200 * KiB))
    credit.give_back(credit.promised)
    store.put("v", "k", bytes(200 * KiB))


@pytest.mark.parametrize(("quota", "count"), [(10_000, None), (None, 3)])
def test_a_promise_counts_against_the_limits_of_its_space(store: Store, quota: int | None, count: int | None) -> None:
    store.spaces.ensure("ahead", policy="wait", quota=quota, max_count=count)
    first, second = store.reservations.open("ahead"), store.reservations.open("ahead")
    first.ask(first.need(3000).times(3))
    with pytest.raises(errors.NoSpace):
        second.ask(second.need(3000))
    assert second.free().fits(second.need(3000)) == 0
    assert second.promised == NOTHING
    first.give_back(first.need(3000))
    second.ask(second.need(3000))
    with pytest.raises(errors.NoSpace):  # it grows beside a younger one
        first.ask(first.need(3000))
    for credit in (first, second):
        for lease in credit.keep(items(credit.promised.entries, 3000, begin=f"{id(credit)}-")):
            lease.close()
    first.ask(first.need(3000))  # evicts
    assert len(store.seeing.entries("ahead")) == 2
    first.give_back(first.promised)


def test_more_is_promised_with_what_is_kept_if_it_costs_nobody_anything(store: Store) -> None:
    store.spaces.ensure("ahead", policy="wait", quota=10_000)
    credit = store.reservations.open("ahead")
    each = credit.need(2000)
    credit.ask(each)
    (lease,) = credit.keep(items(1, 2000), more=each.times(3))
    assert credit.promised == each.times(3)
    (other,) = credit.keep(items(1, 2000, begin="other"), more=each.times(2))  # would not fit
    assert credit.promised == each.times(2)
    assert len(store.seeing.entries("ahead")) == 2
    lease.close()
    other.close()
    credit.give_back(credit.promised)


def test_a_dead_process_has_no_promise(tmp_path: Path) -> None:
    with opened(tmp_path / "root", MiB) as store:
        asked, never = Gate(), Gate()

        def child() -> None:
            store.reservations.open("ahead").ask(Need(900_000, 900 * KiB, 7))
            asked.open()
            never.wait()

        its = fork(child)
        asked.wait()
        with pytest.raises(errors.NoSpace):
            store.put("v", "k", bytes(500 * KiB))
        its.kill()
        with store.engine.parts.catalog.write() as txn:
            store.engine.parts.owners.reap(txn)  # as whoever lacks room does; there are no files that a successor could go on with
        assert promised(store) == 0
        store.put("v", "k", bytes(500 * KiB))


def test_a_small_value_that_is_leased_makes_no_way(store: Store) -> None:
    """Where small values make way in the transaction that adds another: a lazy may hold one of them."""
    credit = store.reservations.open("ahead")
    credit.ask(credit.need(10 * KiB))
    (lease,) = credit.keep(items(1, 10 * KiB))
    for n in range(90):
        store.put("v", f"v{n}", bytes(10 * KiB))
    store.engine.parts.writers.ranking.pick(Scope())  # it is the coldest of those that are picked
    for n in range(100, 200):
        store.put("v", f"v{n}", bytes(10 * KiB))
    assert store.bytes_leased(lease) == items(1, 10 * KiB)[0].data
    lease.close()
    for n in range(200):
        store.put("v", f"w{n}", bytes(10 * KiB))
    assert store.take("ahead", "k0") is None


def lease_of(store: Store, key: str, space: str = "a") -> Lease:
    lease = store.lease(space, key)
    assert lease is not None
    return lease


def test_leased_files_get_a_second_name_together_with_what_is_written(store: Store) -> None:
    for n in range(3):
        store.put("a", f"k{n}", bytes([n]) * 50_000)
    sources = [lease_of(store, f"k{n}") for n in range(3)]
    credit = store.reservations.open("ahead")
    credit.ask(credit.need(50_000).times(3).plus(credit.need(100)))
    leases = credit.keep([Item("small", b"x" * 100), *(Item(f"link{n}", source) for n, source in enumerate(sources))])
    assert credit.promised == NOTHING
    assert [bytes(store.bytes_leased(lease) or b"") for lease in leases] == [b"x" * 100, *(bytes([n]) * 50_000 for n in range(3))]
    for source, lease in zip(sources, leases[1:], strict=True):
        assert os.stat(source).st_ino == os.stat(lease).st_ino
        assert (lease.entry.checksum, lease.entry.charge) == (source.entry.checksum, source.entry.charge), "each name is charged"
    for lease in (*sources, *leases):
        lease.close()
    store.remove([victim_of(entry) for entry in store.seeing.entries("a")])
    assert [bytes_of(store, f"link{n}", "ahead") for n in range(3)] == [bytes([n]) * 50_000 for n in range(3)]


def test_one_file_that_is_gone_keeps_the_others_of_its_group_out(store: Store) -> None:
    """All or none: the names that were made are removed by the next writer."""
    for n in range(3):
        store.put("a", f"k{n}", bytes([n]) * 50_000)
    sources = [lease_of(store, f"k{n}") for n in range(3)]
    os.unlink(sources[2].path)
    credit = store.reservations.open("ahead")
    credit.ask(credit.need(50_000).times(3))
    with pytest.raises(errors.CacheFault):
        credit.keep([Item(f"link{n}", source) for n, source in enumerate(sources)])
    assert store.seeing.entries("ahead") == []
    store.put("a", "next", b"x")
    assert [os.stat(source).st_nlink for source in sources[:2]] == [1, 1]
    credit.keep([Item("link", sources[0])])[0].close()
    credit.give_back(credit.promised)
    for source in sources:
        source.close()
    assert store.lease("a", "k2") is None
    store.put("a", "next", b"y")  # sweeps what was set aside


def test_what_is_leased_in_another_root_is_not_linked(tmp_path: Path) -> None:
    """The same number is of another entry there."""
    with opened(tmp_path / "mine", MiB):
        pass
    shutil.copytree(tmp_path / "mine", tmp_path / "other")  # else each begins with a number of its own
    with opened(tmp_path / "mine") as mine, opened(tmp_path / "other") as other:
        assert mine.put("a", "mine", b"m" * 50_000).id == other.put("a", "other", b"o" * 50_000).id
        credit = mine.reservations.open("b")
        credit.ask(credit.need(50_000))
        with lease_of(other, "other"), contextlib.closing(lease_of(other, "other")) as lease:
            assert not mine.is_own_file(lease)
            with pytest.raises(errors.CacheFault, match="not a file of"):
                credit.keep([Item("k", lease)])
        assert bytes_of(mine, "k", "b") is None


def test_a_session_takes_its_entries_along(store: Store) -> None:
    session = store.reservations.join("ahead", "~session")
    same = store.reservations.join("ahead", "~session")
    assert session.entry.id == same.entry.id
    credit = store.reservations.open("ahead")
    credit.ask(credit.need(10).times(40))
    bound = [Item(f"bound{n}", b"x" * 10, session.entry.id) for n in range(20)]
    leases = credit.keep([*bound, *items(20, 10, begin="free")])
    for lease in leases[1:]:
        lease.close()
    session.close()
    store.put("v", "k", b"a write")
    assert len(store.seeing.entries("ahead")) == 41  # the other one is of it too
    same.close()
    for _ in range(5):
        store.put("v", "k", b"a write")
    assert {entry.key.strip("0123456789") for entry in store.seeing.entries("ahead")} == {"bound", "free"}
    assert len(store.seeing.entries("ahead")) == 21  # one is leased
    leases[0].close()
    store.put("v", "k", b"a write")
    assert len(store.seeing.entries("ahead")) == 20


def test_entries_made_together_keep_the_time_of_their_validation(store: Store) -> None:
    """As one that is made alone does: it was seen to be the remote's before it was published."""
    earlier = store.now() - 10**12
    store.put_many("v", [("a", b"x"), ("b", b"x")], validated=earlier)
    assert [store.validated(entry) for entry in store.seeing.entries("v")] == [earlier, earlier]
