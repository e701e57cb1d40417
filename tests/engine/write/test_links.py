"""Second names of leased files, bytes that live as long as their lease, and sessions."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay import errors
from forebay._engine.catalog.entries import session_of
from forebay._engine.leases import Lease
from forebay._engine.publish import Writing
from forebay._engine.space.ranking import Scope
from forebay._engine.store import Store
from forebay._model import Entry, ObjectInfo
from tests.crash.conftest import victim_of
from tests.harness import KiB, MiB, bytes_of, opened


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with opened(tmp_path / "root", MiB) as found:
        yield found
        assert found.check(deep=True) == []


def lease_of(store: Store, key: str, space: str = "a") -> Lease:
    lease = store.lease(space, key)
    assert lease is not None
    return lease


def test_a_small_value_that_is_leased_makes_no_way(store: Store) -> None:
    """Where small values make way in the transaction that adds another: a lazy may hold one of them."""
    lease = store.put_held("ahead", "k0", b"x" * 10 * KiB)
    for n in range(90):
        store.put("v", f"v{n}", bytes(10 * KiB))
    store.engine.parts.writers.ranking.pick(Scope())  # it is the coldest of those that are picked
    for n in range(100, 200):
        store.put("v", f"v{n}", bytes(10 * KiB))
    assert store.bytes_leased(lease) == b"x" * 10 * KiB
    lease.close()
    for n in range(200):
        store.put("v", f"w{n}", bytes(10 * KiB))
    assert store.take("ahead", "k0") is None


def test_leased_files_get_second_names_and_tiny_ones_are_copied(store: Store) -> None:
    bodies = [b"tiny", *(bytes([n]) * 50_000 for n in range(3))]
    for n, body in enumerate(bodies):
        with store.writing("a", f"k{n}", resume=False) as writing:
            writing.begin(ObjectInfo("", len(body)))
            writing.write(0, body)
            writing.publish()
    sources = [lease_of(store, f"k{n}") for n in range(4)]
    leases = store.publish_links("ahead", [(f"link{n}", source, f"v{n}") for n, source in enumerate(sources)])
    assert [bytes(store.bytes_leased(lease) or b"") for lease in leases] == bodies
    assert [lease.entry.validator for lease in leases] == [f"v{n}" for n in range(4)]
    assert leases[0].entry.kind == "value"
    for source, lease in zip(sources[1:], leases[1:], strict=True):
        assert os.stat(source).st_ino == os.stat(lease).st_ino
        assert (lease.entry.checksum, lease.entry.charge) == (source.entry.checksum, source.entry.charge), "each name is charged"
    for lease in (*sources, *leases):
        lease.close()
    store.remove([victim_of(entry) for entry in store.seeing.entries("a")])
    assert [bytes_of(store, f"link{n}", "ahead") for n in range(4)] == bodies


def test_one_file_that_is_gone_keeps_the_others_of_its_group_out(store: Store) -> None:
    """All or none: the names that were made are removed by the next writer."""
    for n in range(3):
        store.put("a", f"k{n}", bytes([n]) * 50_000)
    sources = [lease_of(store, f"k{n}") for n in range(3)]
    os.unlink(sources[2].path)
    with pytest.raises(errors.CacheFault):
        store.publish_links("ahead", [(f"link{n}", source, None) for n, source in enumerate(sources)])
    assert store.seeing.entries("ahead") == []
    store.put("a", "next", b"x")
    assert [os.stat(source).st_nlink for source in sources[:2]] == [1, 1]
    store.publish_links("ahead", [("link", sources[0], None)])[0].close()
    for source in sources:
        source.close()
    assert store.lease("a", "k2") is None
    store.put("a", "next", b"y")  # sweeps what was set aside


def collected(store: Store, data: bytes) -> Writing:
    writing = store.writing("v", "twice", resume=False)
    writing.begin(ObjectInfo("", len(data)))
    writing.write(0, data)
    return writing


@pytest.mark.parametrize("size", [100, 50_000], ids=["value", "file"])
def test_of_a_key_that_one_transaction_has_twice_the_last_one_stays(store: Store, size: int) -> None:
    """Each caller gets the entry that is there, and a lease of its own; nothing else is lost."""
    bodies = [bytes([n]) * size for n in range(3)]
    store.put("v", "before", b"stays")
    store.put("v", "twice", b"old", life="pinned")
    first, second = store.put_many("v", [("twice", bodies[0]), ("other", bodies[1]), ("twice", bodies[2])])[::2]
    assert first.id == second.id
    assert (bytes_of(store, "twice"), bytes_of(store, "other")) == (bodies[2], bodies[1])
    entry, lease = store.publish_collected([collected(store, bodies[0]), collected(store, bodies[1])], [False, True])
    assert isinstance(lease, Lease)
    assert isinstance(entry, Entry)
    assert entry.id == lease.entry.id
    assert entry.life == "pinned"
    assert store.bytes_leased(lease) == bodies[1]
    lease.close()
    for n, body in enumerate(bodies[:2]):
        with store.writing("a", f"k{n}", resume=False) as writing:
            writing.begin(ObjectInfo("", size))
            writing.write(0, body)
            writing.publish()
    sources = [lease_of(store, f"k{n}") for n in (0, 1)]
    one, two = store.publish_links("ahead", [("twice", source, None) for source in sources])
    one.close()
    assert store.bytes_leased(two) == bodies[1]
    assert two.closed is False
    store.publish_tree("trees", "t", [("same", sources[0]), ("same", sources[1])]).close()
    assert bytes_of(store, "before") == b"stays"
    for lease in (*sources, two):
        lease.close()


def test_what_is_leased_in_another_root_is_not_linked(tmp_path: Path) -> None:
    """The same number is of another entry there."""
    with opened(tmp_path / "mine", MiB):
        pass
    shutil.copytree(tmp_path / "mine", tmp_path / "other")  # else each begins with a number of its own
    with opened(tmp_path / "mine") as mine, opened(tmp_path / "other") as other:
        assert mine.put("a", "mine", b"m" * 50_000).id == other.put("a", "other", b"o" * 50_000).id
        with contextlib.closing(lease_of(other, "other")) as lease, pytest.raises(errors.CacheFault, match="not a file of"):
            mine.publish_links("b", [("k", lease, None)])
        assert bytes_of(mine, "k", "b") is None


def test_a_session_takes_its_entries_along(store: Store) -> None:
    session = store.prefetching.join("ahead", "~session")
    same = store.prefetching.join("ahead", "~session")
    assert session.entry.id == same.entry.id
    for n in range(20):
        store.put("ahead", f"bound{n}", b"x" * 10, validator=session_of(session.entry.id))
        store.put("ahead", f"free{n}", b"x" * 10)
    leased = store.take("ahead", "bound0")
    assert leased is not None
    session.close()
    store.put("v", "k", b"a write")
    assert len(store.seeing.entries("ahead")) == 41  # the other one is of it too
    same.close()
    for _ in range(5):
        store.put("v", "k", b"a write")
    assert {entry.key.strip("0123456789") for entry in store.seeing.entries("ahead")} == {"bound", "free"}
    assert len(store.seeing.entries("ahead")) == 21  # one is leased
    leased.close()
    store.put("v", "k", b"a write")
    assert len(store.seeing.entries("ahead")) == 20
