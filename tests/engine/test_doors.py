"""The calls of the store that the rooms above build on: batches, names, trees, locks, held entries."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay import errors
from forebay._engine.files import stages
from forebay._engine.leases import Lease
from forebay._engine.store import Settings, Store
from forebay._model import ObjectInfo
from tests.crash.conftest import victim_of
from tests.harness import write_whole


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store.open(tmp_path / "root", Settings(budget=64 << 20, min_free=0))
    yield store
    assert store.check(deep=True) == []
    store.close()


def text_of(store: Store, space: str, key: str) -> bytes | None:
    found = store.view(space, key)
    return bytes(found.view) if found else None


def test_a_look_for_a_key_makes_no_space(store: Store) -> None:
    store.put("there", "key", b"x")
    assert store.spaces.has_any("there", "ke")
    assert not store.spaces.has_any("nowhere", "ke")
    assert store.spaces.number("nowhere") == 0


def test_a_partial_that_cannot_be_taken_over_is_left_to_the_next(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else what it takes is counted as this process's, and nobody may have it, as long as that lives."""
    body = bytes(3 << 20)

    def begun(*, resume: bool) -> None:
        with store.writing("v", "k", resume=resume) as writing:
            writing.begin(ObjectInfo("", len(body), '"1"', strong=True))
            writing.write(0, body[: 1 << 20])
            raise KeyError  # it is kept for a successor

    with pytest.raises(KeyError):
        begun(resume=False)

    def fail(*_: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr(stages, "read", fail)
        hold = store.locks.hold("v", "k")
        with pytest.raises(errors.CacheFault):
            begun(resume=True)
        hold.release()
    assert write_whole(store, "k", body)


def test_many_values_in_one_call(store: Store) -> None:
    found = store.put_many("values", [("a", b"1"), ("b", b"2" * 100_000), ("c", b"3")])
    assert [entry.kind for entry in found] == ["value", "blob", "value"]
    assert [text_of(store, "values", key) for key in "abc"] == [b"1", b"2" * 100_000, b"3"]


def test_what_was_replaced_but_is_still_held_is_not_counted_as_served(store: Store) -> None:
    store.put("values", "k", b"1" * 100_000)
    with store.lease("values", "k"):  # type: ignore[union-attr]
        store.put("values", "k", b"2" * 90_000)
        assert store.spaces.used("values") == (90_000, 1)
    assert store.spaces.used("nothing") == (0, 0)


def test_many_values_that_need_room(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "root", Settings(budget=100_000, min_free=0))
    store.put_many("values", [(f"k{i}", b"x" * 10_000) for i in range(30)])
    assert len(store.seeing.entries("values")) == 9
    assert text_of(store, "values", "k29") == b"x" * 10_000
    assert store.check(deep=True) == []
    store.close()


@pytest.mark.parametrize("left", [1, 1000])
def test_a_catalog_becomes_as_small_as_what_is_left(tmp_path: Path, left: int) -> None:
    place = tmp_path / "root"
    store = Store.open(place, Settings(budget=64 << 20, min_free=0))
    store.put_many("values", [(f"k{number}", bytes([number % 256]) * 10_000) for number in range(2000)])
    gone = [victim_of(entry) for entry in store.seeing.entries("values")][left:]
    assert len(store.remove(gone).removed) == 2000 - left
    assert len(store.seeing.entries("values")) == left
    assert text_of(store, "values", "k0") == bytes(10_000)
    assert store.check(deep=True) == []
    store.close()  # now the log is in the catalog
    size = (place / "catalog.sqlite").stat().st_size
    assert size < left * 13_000 + (1 << 20)


SIZES = [0, 5, 50_000, 256 << 10, (256 << 10) + 1, (1 << 20) + 1, None]


@pytest.mark.rotates
@pytest.mark.parametrize("first", SIZES)
@pytest.mark.parametrize("then", SIZES)
def test_an_object_that_changed_is_begun_anew(store: Store, first: int | None, then: int | None) -> None:
    """From memory to the disk and back: what was written of the version before is void, and no room is kept for it."""
    body = os.urandom(1_500_000 if then is None else then)
    with store.writing("urls", "http://h/a", resume=False) as writing:
        writing.begin(ObjectInfo("", first, '"1"', strong=True))
        writing.write(0, b"x" * min(5, 5 if first is None else first))
        spans = writing.begin(ObjectInfo("", then, '"2"', strong=True))
        assert sum(span.length for span in spans) == (-1 if then is None else then)
        writing.write(0, body)
        assert writing.publish(validator='"2"').size == len(body)
    assert text_of(store, "urls", "http://h/a") == body
    usage = store.seeing.usage()
    assert usage.reserved == 0


def test_a_tree_keeps_its_files_and_frees_them_when_it_goes(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "root", Settings(budget=200_000, min_free=0))
    for name in ("one", "two"):
        store.put("urls", name, name.encode() * 20_000)
    leases = [(f"dir/{name}.bin", store.lease("urls", name)) for name in ("one", "two")]
    tree = store.publish_tree("trees", "model", [(name, lease) for name, lease in leases if lease], validator="v1")
    for _, lease in leases:
        assert lease is not None
        lease.close()
    with tree:
        assert (Path(os.fspath(tree)) / "dir" / "one.bin").read_bytes() == b"one" * 20_000
        assert tree.entry.validator == "v1"
        with pytest.raises(errors.NoSpace):  # the tree is leased, its files are linked: nothing may go
            store.put("values", "large", b"x" * 150_000)
    assert [(name, entry.key) for name, entry in store.members(tree.entry)] == [("dir/one.bin", "one"), ("dir/two.bin", "two")]
    store.put("values", "large", b"x" * 150_000)  # the tree goes, then its files
    assert store.entry("trees", "model") is None
    assert store.check(deep=True) == []
    store.close()


def test_a_tree_refuses_names_that_leave_it(store: Store) -> None:
    store.put("urls", "one", b"x" * 20_000)
    lease = store.lease("urls", "one")
    assert lease is not None
    with lease:
        with pytest.raises(ValueError, match="name"):
            store.publish_tree("trees", "bad", [("../escape", lease)])
    assert store.entry("trees", "bad") is None


def test_a_key_lock_is_let_go_by_another_thread(store: Store) -> None:
    hold = store.locks.hold("values", "k")
    with pytest.raises(errors.WaitTimeout, match="held by process"):
        store.locks.hold("values", "k", timeout=0.2)
    thread = threading.Thread(target=hold.release)
    thread.start()
    thread.join()
    store.locks.hold("values", "k", timeout=60).release()


def test_a_named_lock_excludes(store: Store) -> None:
    first = store.locks.named("merge")
    with pytest.raises(errors.WaitTimeout):
        store.locks.named("merge", timeout=0.1)
    store.locks.named("other", timeout=60).release()
    first.release()
    store.locks.named("merge", timeout=60).release()


def test_a_key_lock_is_awaited_while_the_loop_goes_on(store: Store) -> None:
    async def main() -> int:
        hold, turns = store.locks.hold("values", "k"), 0
        waiting = asyncio.create_task(store.locks.hold_async("values", "k", timeout=20))
        for turns in range(1, 4):  # noqa: B007 - told at the end
            await asyncio.sleep(0)
        hold.release()
        (await waiting).release()
        return turns

    assert asyncio.run(main()) == 3


def test_a_held_entry_goes_with_its_last_lease(store: Store) -> None:
    with store.writing("scratch", "k", life="held", resume=False) as writing:
        writing.begin(ObjectInfo("", 50_000))
        writing.write(0, b"x" * 50_000)
        lease = writing.publish_leased()
    store.put("values", "another", b"writer")
    assert os.path.getsize(lease) == 50_000
    lease.close()
    store.put("values", "the next", b"writer")
    assert store.entry("scratch", "k") is None
    assert not os.path.exists(store.root.blob(lease.entry.id))


def test_a_waiting_space_waits_for_a_lease_and_says_no_when_the_time_is_up(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "root", Settings(budget=1 << 20, min_free=0))
    store.spaces.ensure("pool", policy="wait", quota=100_000)
    store.put("pool", "a", b"x" * 80_000)
    lease = store.lease("pool", "a")
    assert lease is not None
    assert lease is not None
    with pytest.raises(errors.NoSpace):
        store.put("pool", "b", b"y" * 80_000, timeout=0.3)
    done = threading.Event()
    thread = threading.Thread(target=lambda: (store.put("pool", "b", b"y" * 80_000), done.set()))
    thread.start()
    lease.close()
    assert done.wait(60)
    thread.join()
    assert store.entry("pool", "a") is None
    with pytest.raises(errors.NoSpace):  # could never fit: no waiting
        store.put("pool", "c", b"z" * 200_000)
    assert store.check(deep=True) == []
    store.close()


def test_a_frozen_space_admits_nothing_more_and_evicts_none_of_its_own(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "root", Settings(budget=1 << 20, min_free=0))
    store.spaces.ensure("data", policy="freeze", quota=100_000)
    store.put("data", "a", b"x" * 80_000)
    with pytest.raises(errors.NoSpace):
        store.put("data", "b", b"y" * 80_000)
    assert text_of(store, "data", "a") == b"x" * 80_000
    store.close()


def test_a_lower_quota_is_applied_at_once(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "root", Settings(budget=1 << 20, min_free=0))
    store.spaces.ensure("data", quota=500_000)
    for number in range(10):
        store.put("data", f"k{number}", b"x" * 40_000)
    store.spaces.ensure("data", quota=100_000)
    assert [entry.key for entry in store.seeing.entries("data")] == ["k8", "k9"]
    assert store.check(deep=True) == []
    store.close()


@pytest.mark.parametrize("harm", ["added", "removed", "replaced"])
def test_a_tree_that_somebody_changed_is_found_and_set_aside(store: Store, harm: str) -> None:
    store.put("urls", "one", b"x" * 20_000)
    lease = store.lease("urls", "one")
    assert lease is not None
    with lease:
        tree = store.publish_tree("trees", "model", [("dir/one.bin", lease)])
        with tree:
            folder = Path(tree.path) / "dir"
    assert store.check() == []
    folder.chmod(0o755)
    if harm != "added":
        (folder / "one.bin").unlink()
    if harm != "removed":
        (folder / ("one.bin" if harm == "replaced" else "mine")).write_bytes(b"y" * 20_000)
    (problem,) = store.check()
    assert (problem.kind, problem.subject) == ("damaged", "trees:model")
    assert store.repair() == [problem]
    assert store.entry("trees", "model") is None
    assert not folder.exists()
    assert store.check(deep=True) == []


def test_a_tree_that_grows_is_charged_and_keeps_the_files_that_were_added(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "root", Settings(budget=400_000, min_free=0))
    for name in ("one", "two"):
        store.put("urls", name, name.encode() * 20_000)

    def part(name: str) -> Lease:
        lease = store.lease("urls", name)
        assert lease is not None
        with lease:
            return store.publish_tree("trees", f"part {name}", [(f"dir/{name}.bin", lease)])

    whole = store.publish_tree("trees", "whole", [], meta='{"grows": true}')
    before = store.seeing.usage().used
    with contextlib.closing(part("one")) as one, contextlib.closing(part("two")) as two:
        parts = store.seeing.usage().used - before
        for each in (one, two, two):  # nothing is added twice
            assert store.extend_tree(whole, each)
            assert store.holds(whole, each)
            assert store.holds(whole, two) is (each is two)
    grown = store.entry("trees", "whole")
    assert grown is not None
    assert store.seeing.usage().used - before - parts == grown.charge - whole.entry.charge > 0
    for name in ("one", "two"):
        entry = store.entry("trees", f"part {name}")
        assert entry is not None
        assert store.discard(entry)
    store.put("values", "large", b"x" * 150_000)
    assert {file.name for file in Path(whole.path, "dir").iterdir()} == {"one.bin", "two.bin"}
    assert [name for name, _ in store.members(whole.entry)] == ["dir/one.bin", "dir/two.bin"]
    assert store.check(deep=True) == []
    # Killed between rows and links, or removed by somebody: a name that nobody was given, which the next call makes up for.
    Path(whole.path, "dir").chmod(0o755)
    Path(whole.path, "dir", "two.bin").unlink()
    assert store.check(deep=True) == []
    assert store.is_sound(whole)
    Path(whole.path, "dir", "other").write_bytes(b"")
    assert [problem.kind for problem in store.check()] == ["damaged"]
    assert not store.is_sound(whole)
    whole.close()
    store.close()
