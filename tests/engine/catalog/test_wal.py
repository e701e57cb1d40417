"""The write-ahead log is copied before it is large; what a stopped reader makes it grow by counts against the budget."""

from __future__ import annotations

import contextlib
import errno
import signal
import sqlite3
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from forebay import errors
from forebay._engine.catalog import connection, entries, transactions
from forebay._engine.catalog.transactions import PART, LogFiles, Wal
from forebay._engine.store import Settings, Store
from tests.harness import KiB, MiB, bytes_of, opened
from tests.processes import Gate, death_of, fork, fork_to_die, in_child

SOFT, STEP, FREE, WARN = 256 * KiB, 32 * KiB, MiB, 2 * MiB
BUDGET = 8 * MiB
SETTINGS = Settings(budget=64 * MiB, min_free=0)


@pytest.fixture
def place(quick_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A root whose log may have a megabyte, here and in forked children."""
    for name, value in (("KEEP", 0), ("SOFT", SOFT), ("STEP", STEP), ("FREE", FREE), ("WARN", WARN)):
        monkeypatch.setattr(transactions, name, value)
    return quick_path / "root"


def log_of(store: Store) -> int:
    return Path(f"{store.root.catalog}-wal").stat().st_size


def put_many(store: Store, count: int, name: str = "k", size: int = 12 * KiB) -> int:
    """The largest size of the log meanwhile."""
    largest = 0
    for n in range(count):
        store.put("v", f"{name}{n}", b"x" * size)
        largest = max(largest, log_of(store))
    return largest


def on_disk(place: Path) -> int:
    return sum(path.lstat().st_blocks * 512 for path in [place, *place.rglob("*")])


def sound(place: Path) -> bool:
    return sqlite3.connect(place / "catalog.sqlite").execute("PRAGMA integrity_check").fetchone() == ("ok",)


def stand_still_in_a_statement(store: Store, here: Gate, on: Gate) -> list[tuple[int, str]]:
    """Every row, by a statement that stops in the middle once."""
    met = []

    def stop() -> int:
        if not met:
            met.append(True)
            here.open()
            on.wait()
        return 0

    with store.engine.parts.catalog._mutex:
        store.engine.parts.catalog._connection_locked().set_progress_handler(stop, 200)
    return store.engine.parts.catalog.all("SELECT id, key FROM entries ORDER BY key")


def test_what_a_directory_adds_to_the_log(place: Path) -> None:
    """As the README says: 100 bytes and the name for each of its files, when it comes, and when it goes."""
    count, names = 20_000, "a/directory/of/theirs/{:08d}.jpg"
    with opened(place, 64 * MiB) as store:
        store.put("v", "k", b"x")
        for link in (True, False):
            before = log_of(store)
            with store.engine.parts.catalog.write() as txn:
                if link:
                    entries.link(txn, 1 << 40, [(names.format(n), (1 << 41) + n * 7919 % count) for n in range(count)])
                else:
                    txn.run("DELETE FROM links WHERE tree = ?", 1 << 40)
            assert log_of(store) - before < 768 * KiB + count * (100 + len(names.format(0)))
        assert store.check() == []


def test_many_values_at_once_are_several_transactions(quick_path: Path) -> None:
    with opened(quick_path / "root", 256 * MiB) as store:
        assert len(store.put_many("v", [(f"k{n}", b"x" * 12_000) for n in range(3000)])) == 3000
        assert log_of(store) < 8 * MiB


def test_many_short_processes_beside_an_idle_one(place: Path) -> None:
    """No process commits often enough to think of the log by itself."""
    with opened(place, 64 * MiB) as store:
        put_many(store, 1)
        largest = 0
        for n in range(24):

            def work(n: int = n) -> int:
                with opened(place) as other:
                    return put_many(other, 4, f"p{n}-")

            largest = max(largest, fork(work).result())
        assert 24 * 4 * 12 * KiB > largest
        assert largest < SOFT + 128 * KiB
        assert store.check() == []


@pytest.fixture
def checkpoints(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The checkpoints of this process, as SQLite is asked for them."""
    found: list[str] = []
    real = connection.Catalog._connected

    def traced(self: connection.Catalog, how: str) -> sqlite3.Connection:
        con = real(self, how)
        con.set_trace_callback(lambda sql: found.append(sql) if "checkpoint(" in sql else None)
        return con

    monkeypatch.setattr(connection.Catalog, "_connected", traced)
    return found


def test_a_log_that_a_stopped_reader_needs_counts_against_the_budget(
    place: Path, checkpoints: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Files make room for it, up to a part of the budget. Nobody waits for the reader: of all checkpoints only a passive one does not, the
    others ask SQLite's busy handler for two seconds. Once it goes on, the log starts again."""
    here, on = Gate(), Gate()

    def reader() -> list[tuple[int, str]]:
        with opened(place) as store:
            return stand_still_in_a_statement(store, here, on)

    with opened(place, BUDGET) as store:
        for n in range(60):
            store.put("v", f"file{n}", bytes(64 * KiB))
        put_many(store, 300)
        child = fork(reader)
        here.wait()
        child.stop()
        there = store.seeing.counts()["evictions"]
        with pytest.raises(errors.CacheFault, match=f"since process {child.pid} .* stands still inside a query"):
            for n in range(300):
                put_many(store, 1, f"new{n}-")
                assert store.seeing.usage().used <= BUDGET + 256 * KiB  # what the last transaction wrote
                assert on_disk(place) <= store.seeing.usage().used + sum(store.seeing.overhead().values())
        size = log_of(store)
        assert WARN < size < FREE + BUDGET // PART + 256 * KiB
        assert store.seeing.counts()["evictions"] > there
        assert {bytes_of(store, name) for name in ("k0", "k299", "new7-0")} == {b"x" * 12 * KiB}
        with pytest.raises(errors.CacheFault, match="stands still"):
            put_many(store, 1, "more")
        assert log_of(store) == size
        assert set(checkpoints) == {"PRAGMA wal_checkpoint(PASSIVE)"}
        (warning,) = [record.getMessage() for record in caplog.records if "count against the budget" in record.getMessage()]
        assert f"process {child.pid} " in warning
        child.signal(signal.SIGCONT)
        on.open()
        assert len(child.result()) > 300
        put_many(store, 3)
        assert log_of(store) < SOFT
        assert store.check() == []
    assert sound(place)


def test_beside_a_stopped_reader_no_value_is_evicted_for_the_log(place: Path) -> None:
    """That would make the log grow by more, and so on until nothing is left."""
    here, on = Gate(), Gate()

    def reader() -> None:
        with opened(place) as store:
            stand_still_in_a_statement(store, here, on)

    with opened(place, BUDGET) as store:
        put_many(store, 700)
        child = fork(reader)
        here.wait()
        with pytest.raises(errors.NoSpace, match=r"the log of the catalog has .* since a process stands still"):
            put_many(store, 60, "new")
        evictions = store.seeing.counts()["evictions"]
        for _ in range(5):
            with pytest.raises(errors.NoSpace):
                put_many(store, 1, "more")
        assert store.seeing.counts()["evictions"] == evictions < 100
        on.open()
        child.result()
        put_many(store, 10, "later")
        assert store.check() == []


def delete_index(place: Path) -> None:
    (place / "catalog.sqlite-shm").unlink()


def test_all_go_on_by_another_index_once_theirs_is_deleted(place: Path) -> None:
    """Else one group of processes would overwrite in the log what the other has written there."""
    ready, on = Gate(), Gate()

    def other() -> tuple[bytes | None, int]:
        with opened(place) as store:
            bytes_of(store, "k1")
            ready.open()
            on.wait()
            found = bytes_of(store, "later3")
            put_many(store, 30, "other")
            return found, len(store.engine.parts.catalog.all("SELECT id FROM entries"))

    with opened(place, 64 * MiB) as store, contextlib.closing(Store.open(place, SETTINGS, read_only=True)) as looking:
        put_many(store, 20)
        assert bytes_of(looking, "k1") == b"x" * 12 * KiB
        child = fork(other)
        ready.wait()
        delete_index(place)
        put_many(store, 30, "later")
        assert bytes_of(looking, "later3") == b"x" * 12 * KiB
        on.open()
        assert child.result() == (b"x" * 12 * KiB, 80)
        put_many(store, 30, "last")
        assert len(store.engine.parts.catalog.all("SELECT id FROM entries")) == 110
        assert bytes_of(looking, "other29") == b"x" * 12 * KiB
        assert store.check(deep=True) == []
    assert sound(place)


def test_a_process_with_a_deleted_index_that_closes_last_does_not_copy_the_log_by_it(place: Path) -> None:
    """The process that closes a catalog last copies its log into the database: by the index that it has."""
    ready, on = Gate(), Gate()

    def idle() -> None:
        with opened(place, 64 * MiB) as store:
            store.put("v", "first", b"x")
            ready.open()
            on.wait()

    def write(count: int, name: str) -> None:
        put_many(Store.open(place, SETTINGS), count, name)  # and is gone without closing it

    waiting = fork(idle)
    ready.wait()
    fork(lambda: write(4, "k")).result()  # of which nothing is copied yet
    delete_index(place)
    fork(lambda: write(300, "new")).result()
    on.open()
    waiting.result()
    assert sound(place)
    with opened(place) as store:
        assert bytes_of(store, "new299") == b"x" * 12 * KiB
        assert store.check(deep=True) == []


def delete_log(place: Path) -> None:
    (place / "catalog.sqlite-wal").unlink()


@pytest.fixture
def others(place: Path) -> Iterator[None]:
    """Another process has put and pinned ten values, idles once the log was deleted, and goes on at the end."""
    ready, on = Gate(), Gate()

    def idle() -> None:
        with opened(place, 64 * MiB) as store:
            put_many(store, 10, "idle")
            assert store.set_life("v", "idle3", "pinned")
            ready.open()
            on.wait()
            assert bytes_of(store, "idle9") == bytes_of(store, "new9") == b"x" * 12 * KiB
            put_many(store, 10, "later")
            assert bytes_of(store, "idle9") == bytes_of(store, "new9") == b"x" * 12 * KiB

    with opened(place, 64 * MiB):
        pass
    child = fork(idle)
    ready.wait()
    delete_log(place)
    yield
    on.open()
    child.result()
    with opened(place) as store:
        assert [entry.key for entry in store.seeing.entries() if entry.life == "pinned"] == ["idle3"]
        assert [name for name in ("idle", "new", "later") if bytes_of(store, f"{name}9") != b"x" * 12 * KiB] == []
        assert store.check(deep=True) == []
    assert sound(place)
    assert not (place / "catalog.damaged.sqlite").exists()


@pytest.mark.usefixtures("others")
def test_a_deleted_log_is_written_anew_from_a_process_that_has_it_open(place: Path) -> None:
    def work() -> None:
        with opened(place, 64 * MiB) as store:
            assert bytes_of(store, "idle9") == b"x" * 12 * KiB
            put_many(store, 10, "new")
            assert store.engine.recovered == []

    in_child(work)


@pytest.mark.usefixtures("others")
def test_a_process_that_writes_the_log_anew_is_killed_at_each_step(place: Path) -> None:
    def work() -> None:
        with opened(place, 64 * MiB) as store:
            put_many(store, 10, "new")

    deaths = list[str]()
    while len(deaths) < 40 and (death := death_of(fork_to_die(len(deaths), work))) is not None:
        deaths.append(death)
    assert [death for death in deaths if death.startswith("rename")], deaths
    in_child(work)


def test_a_deleted_log_of_the_only_process(place: Path) -> None:
    """It is noticed before the next transaction; else no other process would see that one's commits."""
    with opened(place, 64 * MiB) as store:
        put_many(store, 10, "idle")
        delete_log(place)
        put_many(store, 10, "new")
        in_child(lambda: look(place, "idle9", "new9"))
        delete_log(place)
    look(place, "idle9", "new9")  # copied by the close


def look(place: Path, *keys: str) -> None:
    with opened(place) as store:
        assert [key for key in keys if bytes_of(store, key) != b"x" * 12 * KiB] == []
        assert store.check(deep=True) == []


def test_a_log_that_is_deleted_twice_while_a_process_idles_with_the_first_one_open(place: Path) -> None:
    """The idle process has what is older than what the index counts."""
    with opened(place, 64 * MiB):
        pass

    def idle(name: str) -> None:
        with opened(place, 64 * MiB) as store:
            put_many(store, 10, name)
            ready.open()
            on.wait()
            assert [name for name in names if bytes_of(store, f"{name}9") != b"x" * 12 * KiB] == []

    names, children = ["first", "second", "third"], []
    for name in names:
        ready, on = Gate(), Gate()
        children.append((fork(partial(idle, name)), on))
        ready.wait()
        delete_log(place)
    look(place, "first9", "second9", "third9")
    for child, on in children:
        on.open()
        child.result()
    look(place, "first9", "second9", "third9")
    assert not (place / "catalog.damaged.sqlite").exists()


def test_an_older_log_that_an_idle_process_has_open_is_not_written_anew(place: Path) -> None:
    """All processes with the present one were killed: its commits are lost, and none that are in the catalog."""
    with opened(place, 64 * MiB):
        pass
    ready, on = Gate(), Gate()

    def idle() -> None:
        with opened(place, 64 * MiB) as store:
            put_many(store, 10, "idle")
            ready.open()
            on.wait()
            assert bytes_of(store, "idle9") == bytes_of(store, "new9") == b"x" * 12 * KiB

    def work() -> None:
        store = Store.open(place, SETTINGS)
        put_many(store, 10, "old")
        store.engine.parts.catalog._copy_log_locked()
        put_many(store, 100, "lost")

    child = fork(idle)
    ready.wait()
    delete_log(place)
    fork(work).result()  # and is gone without closing it
    delete_log(place)
    with opened(place, 64 * MiB) as store:
        assert bytes_of(store, "idle9") == bytes_of(store, "old9") == b"x" * 12 * KiB
        put_many(store, 10, "new")
    on.open()
    child.result()
    look(place, "idle9", "old9", "new9")
    assert not (place / "catalog.damaged.sqlite").exists()


def test_a_deleted_log_is_written_anew_on_a_full_disk(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(place, 64 * MiB) as store:
        put_many(store, 10, "idle")
        delete_log(place)
        root = store.engine.parts.catalog._root
        replace = root.replace

        def without_ballast(path: Path, content: bytes) -> None:
            if root.ballast.exists():
                raise OSError(errno.ENOSPC, "")
            replace(path, content)

        monkeypatch.setattr(root, "replace", without_ballast)
        put_many(store, 10, "new")
    look(place, "idle9", "new9")


def test_a_deleted_log_that_no_process_has_open(place: Path) -> None:
    """Its commits are lost, as by a power cut; the index that is left says that they are there."""

    def work() -> None:
        store = Store.open(place, SETTINGS)
        put_many(store, 10, "old")
        store.engine.parts.catalog._copy_log_locked()
        put_many(store, 10, "lost")

    fork(work).result()  # and is gone without closing it
    delete_log(place)
    with opened(place, 64 * MiB) as store:
        assert bytes_of(store, "old9") == b"x" * 12 * KiB
        put_many(store, 10, "new")
    look(place, "old9", "new9")
    assert not (place / "catalog.damaged.sqlite").exists()


def test_an_index_that_is_always_deleted_is_a_fault(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(place, 64 * MiB) as store:
        put_many(store, 5)
        numbers = iter(range(100))
        with monkeypatch.context() as changing:
            changing.setattr(Wal, "files", lambda self: LogFiles((0, 0), (0, next(numbers))))
            with pytest.raises(errors.CacheFault, match="faster than the catalog can be read"):
                store.engine.parts.catalog.all("SELECT id FROM entries")
        assert bytes_of(store, "k1") == b"x" * 12 * KiB


def test_an_index_that_is_being_written_is_read_again(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader cannot mend what a writer is in the middle of: SQLite says so, and the next look finds it whole."""
    here, on = Gate(), Gate()

    def attached() -> None:
        with opened(place, 64 * MiB) as store:
            put_many(store, 5)
            here.open()
            on.wait()

    child = fork(attached)
    here.wait()
    store = Store.open(place, Settings(), read_only=True)
    fetched, left = connection.fetched, [1, 2, 3, 4]

    def being_written(con: sqlite3.Connection, sql: str, values: tuple[object, ...]) -> list[object]:
        if left and "FROM entries" in sql:
            left.pop()
            error = sqlite3.OperationalError("attempt to write a readonly database")
            error.sqlite_errorcode, error.sqlite_errorname = sqlite3.SQLITE_READONLY_RECOVERY, "SQLITE_READONLY_RECOVERY"
            raise error
        return fetched(con, sql, values)

    monkeypatch.setattr(connection, "fetched", being_written)
    assert len(store.engine.parts.catalog.all("SELECT id FROM entries")) == 5
    assert left == []
    store.close()
    on.open()
    child.result()
