"""The catalog, or the whole root, is deleted and recovered by one thread while another one is in the middle of a call."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sqlite3
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from forebay import errors
from forebay._engine.catalog import recovery, spaces
from forebay._engine.catalog.connection import Catalog
from forebay._engine.engine import Engine
from forebay._engine.files import blobs
from forebay._engine.files.layout import CatalogBroken
from forebay._engine.index.memo import Memo
from forebay._engine.index.records import EntryIndex
from forebay._engine.parts import Parts
from forebay._engine.store import Store
from forebay._kernel.below import Below
from forebay._model import ObjectInfo
from forebay.fetch import Fetcher
from forebay.samples import Samples, open_samples
from tests.harness import KiB, MiB, bytes_of, opened
from tests.processes import ended, forked, in_child

SMALL, FILE = b"small" * 10, os.urandom(50 * KiB)
FOREVER = 1 << 62


@pytest.fixture
def store(quick_path: Path) -> Iterator[Store]:
    with opened(quick_path / "root", 32 * MiB) as store:
        store.put("v", "before", SMALL)
        yield store
        assert store.check() == []


def in_thread(call: Callable[[], object]) -> None:
    """Make a call in another thread, and wait for it."""
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


def unlink_catalog(store: Store) -> None:
    for ending in ("", "-wal", "-shm"):
        (store.root.path / f"catalog.sqlite{ending}").unlink(missing_ok=True)


def lose_catalog(store: Store) -> None:
    unlink_catalog(store)
    in_thread(lambda: store.put("other", "first", SMALL))  # finds it gone, and makes another, in which `v` is no space


def lose_before_a_write(store: Store, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Let the next transaction find that another thread has recovered a deleted catalog. Returns whether it was, once it was."""
    write, lost = Catalog.write, list[bool]()

    def lose_before(self: Catalog, timeout: float | None = None) -> Any:
        if not lost:
            lost.append(True)
            lose_catalog(store)
        return write(self, timeout)

    monkeypatch.setattr(Catalog, "write", lose_before)
    return lost


def give_every_catalog_one_inode(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """As ext4 does, which gives the number of a file that was deleted to the next one that is made."""
    stat = os.stat

    def reused(path: Any, **how: Any) -> os.stat_result:
        status = stat(path, **how)
        return os.stat_result((status[0], 1, *status[2:])) if path == str(store.root.catalog) else status

    monkeypatch.setattr(os, "stat", reused)
    store.engine.parts.catalog.close()
    store.put("v", "before", SMALL)


def put_collected(store: Store) -> None:
    with store.writing("v", "k", collect=MiB) as writing:
        writing.begin(ObjectInfo("", len(FILE), '"1"', strong=True))
        writing.write(0, FILE)
        store.publish_collected([writing], [False])


def put_leased(store: Store) -> None:
    with store.put_held("v", "k", FILE):
        assert bytes_of(store, "k") == FILE
    store.put("v", "k", FILE)


def make_pack(store: Store) -> None:
    store.packs.make("v", "k", 10).close()


def publish_tree(store: Store) -> None:
    store.publish_tree("v", "k", []).close()


def ensure_space(store: Store) -> None:
    store.spaces.ensure("w")
    store.put("v", "k", SMALL)
    assert store.spaces.number("w") == spaces.find(store.engine.parts.catalog, "w").id  # type: ignore[union-attr]


def name_held(store: Store) -> None:
    pack = store.packs.make("v", "~held", 10, life="held")
    try:
        assert store.packs.name(pack, "v", "k", overwrite=False)
    finally:
        pack.close()


def join_session(store: Store) -> None:
    store.prefetching.join("v", "session").close()
    store.put("v", "k", FILE)


DOORS: dict[str, Callable[[Store], Any]] = {
    "a value": lambda store: store.put("v", "k", SMALL),
    "a file": lambda store: store.put("v", "k", FILE),
    "a large file": lambda store: store.put("v", "k", FILE * 10),
    "pieces": lambda store: store.put_pieces("v", "k", [FILE, FILE]),
    "several": lambda store: store.put_many("v", [("k", FILE), ("l", SMALL)]),
    "collected": put_collected,
    "a held entry": put_leased,
    "a pack": make_pack,
    "a session": join_session,
    "a tree": publish_tree,
    "a space": ensure_space,
    "a held pack": name_held,
}


@pytest.mark.parametrize("door", DOORS)
def test_what_is_written_is_in_a_space_of_the_present_catalog(store: Store, door: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """T1 is about to write / T2 recovers a deleted catalog / T1 writes: its entry is found and counted."""
    lost = lose_before_a_write(store, monkeypatch)
    DOORS[door](store)
    assert lost
    assert store.entry("v", "k") is not None
    spaces = {space.name: space for space in store.seeing.usage().spaces}
    assert spaces["v"].entries == len(store.seeing.entries("v"))


def test_a_pack_that_is_to_be_named_went_with_its_catalog(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """T1 is about to name a held pack / T2 recovers a deleted catalog / T1 names it: its row is gone, and no other gets the name."""
    pack = store.packs.make("v", "~held", 10, life="held")
    lose_before_a_write(store, monkeypatch)
    with pytest.raises(errors.CacheFault, match="is gone"):
        store.packs.name(pack, "v", "k", overwrite=False)
    assert pack.is_lost
    pack.close()
    assert store.entry("v", "k") is None
    assert store.seeing.entries("v") == []
    store.repair()


SAMPLES: dict[str, Callable[[Samples[Any]], Any]] = {
    "put": lambda samples: samples.put(5, FILE * 100),
    "get_or_put": lambda samples: samples.get_or_put(5, lambda: FILE * 100),
    "get_or_put_many": lambda samples: samples.get_or_put_many([5, 6], lambda missing: [FILE * 100 for _ in missing]),
}


@pytest.mark.parametrize("door", SAMPLES)
@pytest.mark.parametrize("at", ["the array is made", "its first segment", "its next segment"])
def test_a_sample_is_in_an_array_of_the_present_catalog(store: Store, door: str, at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """T1 is about to write / T2 recovers a deleted catalog / T1 writes: the sample is in the array that others find."""
    fetcher = Fetcher(store)

    def open_array() -> Samples[Any]:
        return open_samples(fetcher, "a", 10, codec="raw", fingerprint="1")

    if at == "the array is made":
        lose_before_a_write(store, monkeypatch)
        samples = open_array()
    else:
        samples = open_array()
        assert at == "its first segment" or samples.put(1, SMALL)
        lose_before_a_write(store, monkeypatch)
    SAMPLES[door](samples)
    assert store.seeing.entries("other")
    assert samples.get(5) == open_array().get(5) == FILE * 100
    fetcher.closed = True  # the store is the fixture's
    for handle in list(fetcher._handles.values()):
        handle.close()
    store.repair()


@pytest.mark.parametrize("size", [10, 50 * KiB], ids=["a value", "a file"])
@pytest.mark.parametrize("lose", ["root", "shared"])
def test_no_bytes_of_a_deleted_root_are_remembered(store: Store, monkeypatch: pytest.MonkeyPatch, size: int, lose: str) -> None:
    """T1 reads the record of an entry / T2 recovers the deleted root / T1 remembers the entry, whose record nobody changes any more."""
    old, new = os.urandom(size), os.urandom(size)
    store.put("v", "k", old)
    record, lost = EntryIndex.record, list[bool]()

    def lose_behind(self: EntryIndex, slot: int) -> tuple[memoryview, int]:
        found = record(self, slot)
        if not lost and threading.current_thread() is threading.main_thread():
            lost.append(True)
            shutil.rmtree(store.root.path if lose == "root" else store.root.shared_dir)
            in_thread(lambda: store.put("v", "k", new))
        return found

    add = Memo.add

    def add_losing(self: Memo, *arguments: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(EntryIndex, "record", lose_behind)
            return add(self, *arguments)

    monkeypatch.setattr(Memo, "add", add_losing)
    for _ in range(3):  # the first ones open and map
        assert bytes_of(store, "k") in (old, new)
    monkeypatch.undo()
    assert lost
    assert bytes_of(store, "k") == new
    store.put("v", "k", b"newest")
    assert bytes_of(store, "k") == b"newest"


def test_a_file_is_not_installed_in_a_directory_that_is_gone(store: Store) -> None:
    path = store.root.path / "gone" / "file"
    with pytest.raises(FileNotFoundError):
        store.root.install(path, lambda fd: None)
    with pytest.raises(FileNotFoundError):
        store.root.replace(path, b"content")
    assert not [name for name in os.listdir(store.root.path) if name.startswith("new-")]


@pytest.mark.parametrize("lost", ["the catalog and the locks", "the catalog, whose inode the next one gets"])
def test_an_epoch_begins_before_the_first_write_of_whichever_thread(store: Store, monkeypatch: pytest.MonkeyPatch, lost: str) -> None:
    """T1 is about to write / T2 opens the root again, which has lost its catalog, and has yet to begin the epoch in the new one / T1
    writes, or waits for T2: it does not find the record of the lost catalog's entry."""
    if lost != "the catalog and the locks":
        give_every_catalog_one_inode(store, monkeypatch)
    begin, reached, wrote = Parts.begin_epoch, threading.Event(), threading.Event()

    def wait_before(self: Parts) -> None:
        if threading.current_thread() is thread and store.root.catalog.exists():
            reached.set()
            assert wrote.wait(60)
        begin(self)

    usable = Engine.check_usable

    def lose_behind(self: Engine, *, writing: bool = False) -> None:
        usable(self, writing=writing)
        if writing and not reached.is_set() and threading.current_thread() is threading.main_thread():
            if lost == "the catalog and the locks":
                shutil.rmtree(store.root.path / "locks")
            unlink_catalog(store)
            thread.start()
            assert reached.wait(60)

    open_parts = Engine._open_parts

    def wait_for_it(self: Engine) -> Parts:
        if threading.current_thread() is threading.main_thread():
            wrote.set()  # will be: it waits for T2
        return open_parts(self)

    thread = threading.Thread(target=lambda: store.put("other", "first", SMALL))
    monkeypatch.setattr(Parts, "begin_epoch", wait_before)
    monkeypatch.setattr(Engine, "check_usable", lose_behind)
    monkeypatch.setattr(Engine, "_open_parts", wait_for_it)
    try:
        store.put("v", "before", b"new")
        assert reached.is_set()
        found = store.first_touch("v", "before", FOREVER)
        assert found is None or bytes(found) == b"new"
        assert bytes_of(store, "before") == b"new"
    finally:
        wrote.set()
        thread.join()
    assert bytes_of(store, "before") == b"new"


def test_an_epoch_begins_in_the_catalog_that_it_was_prepared_for(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """T1 compares rows and records of a new epoch / T2 finds the catalog deleted, and makes another / T1 would note that the epoch has
    begun, and T2 that there is nothing to compare: no record of the lost catalog is served."""
    begin, reconcile, reached, ended = Parts.begin_epoch, recovery.reconcile, threading.Event(), threading.Event()

    def begin_in_turn(self: Parts) -> None:
        if threading.current_thread() is not thread:
            try:
                begin(self)
            finally:
                ended.set()
        else:
            if store.root.catalog.exists():
                reached.set()
                assert ended.wait(60)
            begin(self)

    def lose_behind(catalog: Catalog, index: EntryIndex) -> int:
        lacking = reconcile(catalog, index)
        if not reached.is_set():
            unlink_catalog(store)
            thread.start()
            assert reached.wait(60)
        return lacking

    thread = threading.Thread(target=lambda: store.put("other", "first", SMALL))
    with store.engine.parts.catalog.write() as txn:
        spaces.set_setting(txn, "boot", "an earlier one")
    store.engine.parts.catalog.begun(None)
    monkeypatch.setattr(Parts, "begin_epoch", begin_in_turn)
    monkeypatch.setattr(recovery, "reconcile", lose_behind)
    store.put("v", "k", SMALL)
    thread.join()
    assert reached.is_set()
    assert store.first_touch("v", "before", FOREVER) is None
    assert bytes_of(store, "before") is None


def exchange(store: Store) -> None:
    """Let the root and the one at "spare", if there is one, change places."""
    place, spare, aside = (store.root.path.with_name(name) for name in (store.root.path.name, "spare", "aside"))
    place.rename(aside)
    if spare.exists():
        spare.rename(place)
    aside.rename(spare)


@pytest.mark.parametrize("door", ["a file", "a large file", "several", "collected"])
def test_no_file_stays_in_a_root_that_takes_the_place(store: Store, door: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """T1 is about to put a file into a root / another root takes its place / T1 puts the file there, and commits nothing."""
    spare = store.root.path.with_name("spare")
    with opened(spare, 32 * MiB) as other:
        other.put("v", "k", SMALL)
    create, rename, swapped = Below.create, Below.rename, list[bool]()

    def swap_before(path: Any) -> None:
        if not swapped and "/blobs/" in os.fspath(path):
            swapped.append(True)
            exchange(store)

    monkeypatch.setattr(Below, "create", lambda self, path, *how, **more: (swap_before(path), create(self, path, *how, **more))[1])
    monkeypatch.setattr(Below, "rename", lambda self, old, new: (swap_before(new), rename(self, old, new))[1])
    with contextlib.suppress(CatalogBroken) if door == "collected" else contextlib.nullcontext():  # its caller has the bytes still
        DOORS[door](store)
    assert swapped
    assert store.check() == []
    with opened(spare) as other:
        assert bytes_of(other, "before") == SMALL
        assert other.check() == []


@pytest.mark.parametrize("then", ["another root takes the place", "there is none"])
@pytest.mark.parametrize("at", ["the eviction", "what a killed process left of one"])
def test_no_file_stays_in_a_root_that_is_moved_while_it_goes(store: Store, at: str, then: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """T1 commits that an entry goes / the root is moved / T1 removes the file, finds none, and must not forget it."""
    spare = store.root.path.with_name("spare")
    if then == "another root takes the place":
        with opened(spare, 32 * MiB) as other:
            other.put("v", "k", SMALL)
    store.put("v", "going", FILE)
    name = "remove_blob" if at == "the eviction" else "remove_whatever_suffix"
    remove, swapped = getattr(blobs, name), list[bool]()

    def swap_before(*arguments: Any) -> Any:
        if not swapped:
            swapped.append(True)
            exchange(store)
        return remove(*arguments)

    entry = store.entry("v", "going")
    assert entry is not None

    def die() -> None:
        blobs.remove_blob = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        store.remove([entry])

    if at != "the eviction":
        assert ended(forked(die)) == -signal.SIGKILL
    monkeypatch.setattr(blobs, name, swap_before)
    if at == "the eviction":
        store.remove([entry])
    else:
        store.put("v", "k", SMALL)
    assert swapped
    assert store.check() == []
    with opened(spare) as other:
        other.put("v", "next", SMALL)
        assert other.entry("v", "going") is None
        assert other.check() == []


def exchange_around(store: Store, first: tuple[object, str], second: tuple[object, str], patch: pytest.MonkeyPatch) -> list[str]:
    """Let the roots change places before one function is called, and again before another one is. Returns which have been."""
    done = list[str]()

    def wrapped(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def exchanging(*arguments: Any, **more: Any) -> Any:
            if name not in done and (name == first[1] or first[1] in done):
                done.append(name)
                exchange(store)
            return call(*arguments, **more)

        return exchanging

    for owner, name in (first, second):
        patch.setattr(owner, name, wrapped(name, getattr(owner, name)))
    return done


@pytest.mark.parametrize("door", ["a file", "a large file", "several", "collected"])
def test_no_file_goes_to_a_root_that_has_the_place_for_a_moment(store: Store, door: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """T1 begins to publish / another root takes the place / T1 puts a file there / the roots change places again / T1 commits."""
    with opened(store.root.path.with_name("spare"), 32 * MiB) as other:
        other.put("v", "k", SMALL)
    done = exchange_around(store, (blobs, "publish" if door == "a large file" else "write"), (Catalog, "_commit_locked"), monkeypatch)
    with contextlib.suppress(CatalogBroken) if door == "collected" else contextlib.nullcontext():
        DOORS[door](store)
    monkeypatch.undo()
    if len(done) == 1:
        exchange(store)
    assert done
    assert store.check(deep=True) == []
    with opened(store.root.path.with_name("spare")) as other:
        assert other.check() == []


def test_no_file_stays_where_another_root_has_the_place_for_a_moment(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """T1 commits that an entry goes / another root takes the place / T1 finds no file there / the roots change places again / T1 forgets
    the file."""
    with opened(store.root.path.with_name("spare"), 32 * MiB) as other:
        other.put("v", "k", SMALL)
    store.put("v", "going", FILE)
    entry = store.entry("v", "going")
    assert entry is not None
    done = exchange_around(store, (blobs, "remove_blob"), (Catalog, "check_named"), monkeypatch)
    store.remove([entry])
    monkeypatch.undo()
    if len(done) == 1:
        exchange(store)
    assert done
    store.put("v", "next", SMALL)
    assert store.check() == []
    with opened(store.root.path.with_name("spare")) as other:
        assert other.check() == []


def test_no_thread_writes_by_parts_that_have_not_begun(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process was killed while it evicted / T1 opens the root again, and has yet to end what that one began / T2 writes: it would declare
    that as ended."""
    store.put("v", "going", FILE)
    entry = store.entry("v", "going")
    assert entry is not None

    def die() -> None:
        blobs.remove_blob = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        store.remove([entry])

    assert ended(forked(die)) == -signal.SIGKILL
    with opened(store.root.path.with_name("spare"), 32 * MiB):
        pass
    exchange(store)
    store.put("v", "other", SMALL)
    exchange(store)
    start, open_parts, went_on = Parts.start, Engine._open_parts, threading.Event()

    def put() -> None:
        store.put("v", "beside", FILE)
        went_on.set()

    thread = threading.Thread(target=put)

    def start_beside(self: Parts) -> None:
        if not went_on.is_set():
            thread.start()
            assert went_on.wait(60)
        start(self)

    def wait_for_it(self: Engine) -> Parts:
        if threading.current_thread() is thread:
            went_on.set()
        return open_parts(self)

    monkeypatch.setattr(Parts, "start", start_beside)
    monkeypatch.setattr(Engine, "_open_parts", wait_for_it)
    store.put("v", "k", SMALL)
    thread.join()
    assert store.check() == []


def test_a_fork_copies_no_half_of_a_root_that_is_opened_again(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """T1 opens a deleted root again / T2 forks: it waits, since the hook before the fork takes the locks of parts that T1 replaces."""
    connect, waits = Engine.connect, list[bool]()

    def fork_between(self: Engine, *arguments: Any) -> None:
        connect(self, *arguments)
        in_thread(lambda: waits.append(not (self.making.acquire(blocking=False) and not self.making.release())))

    monkeypatch.setattr(Engine, "connect", fork_between)
    shutil.rmtree(store.root.path)
    store.put("v", "k", FILE)
    assert waits == [True]


# -- what another program changes --------------------------------------------------------------------------------------

CHANGES = [
    "UPDATE entries SET slot = slot + 1",
    "UPDATE entries SET slot = 0",
    "UPDATE entries SET key = 'zz' || id WHERE id % 2 = 0",
    "UPDATE entries SET space = space + 1 WHERE id % 2 = 0",
    "UPDATE entries SET id = id + 1000 WHERE id % 2 = 0",
    "DELETE FROM entries WHERE id % 2 = 0",
    "DELETE FROM spaces",
    "UPDATE spaces SET id = id + 5",
    "DROP INDEX entry_key",
]


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_put_is_served_though_rows_were_changed(quick_path: Path, change: str) -> None:
    """The row of the entry before is not found by its key: its record must not be, either."""
    keys = [f"k{number}" for number in range(20)]
    with opened(quick_path / "root", 32 * MiB) as store:
        for number, key in enumerate(keys):
            store.put("v", key, b"old" * (10 if number % 3 else 10_000))
            assert bytes_of(store, key)
        with contextlib.closing(sqlite3.connect(store.root.catalog, isolation_level=None)) as other:
            other.execute(change)
        for key in keys:
            store.put("v", key, b"new")
        assert {bytes_of(store, key) for key in keys} == {b"new"}
        assert in_child(lambda: {bytes_of(store, key) for key in keys}) == {b"new"}
    with opened(quick_path / "root", 32 * MiB) as store:
        assert {bytes_of(store, key) for key in keys} == {b"new"}


def test_an_older_copy_is_put_beside_the_log(quick_path: Path) -> None:
    """SQLite takes the log for the copy's own, and what comes of it is neither: an index lacks rows that its table has."""
    keys, copy = [f"k{number}" for number in range(60)], quick_path / "copy"
    with opened(quick_path / "root", 32 * MiB) as store:
        store.put("v", "first", SMALL)
        shutil.copy(store.root.catalog, copy)
        for turn in range(5):
            for number, key in enumerate(keys):
                store.put("v", key, b"old %d" % turn * (1 + 100 * (number % 7)))
        copy.rename(store.root.catalog)
        for key in keys:
            store.put("v", key, b"new")
        assert {bytes_of(store, key) for key in keys} == {b"new"}
    with opened(quick_path / "root", 32 * MiB) as store:
        assert {bytes_of(store, key) for key in keys} == {b"new"}
        assert store.check() == []


@pytest.mark.parametrize("lost", ["records-000", "."])
def test_who_reads_by_a_deleted_file_of_records_gets_what_was_put(store: Store, lost: str) -> None:
    store.put("v", "k", SMALL)
    assert bytes_of(store, "k") == SMALL

    def put() -> None:
        place = store.root.shared_dir / lost
        shutil.rmtree(place) if lost == "." else place.unlink()
        store.put("v", "k", b"new")

    in_child(put)
    assert bytes_of(store, "k") == b"new"


def test_the_contents_of_the_root_move_to_another_directory_which_takes_its_place(store: Store) -> None:
    """All files are the same, the directory is another: as after ``mv root/* new; rmdir root; mv new root``."""
    store.put("v", "a file", FILE)
    new = store.root.path.with_name("new")
    new.mkdir(0o700)
    for name in os.listdir(store.root.path):
        (store.root.path / name).rename(new / name)
    store.root.path.rmdir()
    new.rename(store.root.path)
    for number in range(3):
        assert store.put("v", f"file {number}", FILE)
        assert store.put("v", f"value {number}", SMALL)
        assert bytes_of(store, f"file {number}") == FILE
    assert bytes_of(store, "a file") == FILE
    assert bytes_of(store, "before") == SMALL
    assert store.engine.recoveries == 1
    assert store.check() == []
    assert in_child(lambda: bytes_of_new(store.root.path, "file 2")) == FILE


def bytes_of_new(path: Path, key: str) -> bytes | None:
    with opened(path, 32 * MiB) as other:
        return bytes_of(other, key)
