"""The write-ahead log has a bound, whoever writes and whoever stands still while he reads."""

from __future__ import annotations

import errno
import os
import signal
import sqlite3
import struct
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from forebay import errors
from forebay._engine.catalog import connection, entries, peers, writer
from forebay._engine.catalog.wal import Wal
from forebay._engine.store import Settings, Store
from forebay._kernel import host
from tests.harness import KiB, MiB, bytes_of, opened
from tests.processes import HANG, Gate, death_of, fork, fork_to_die, in_child

SOFT, STEP, RETIRE, REFUSE = 256 * KiB, 32 * KiB, 512 * KiB, 768 * KiB
SETTINGS = Settings(budget=64 * MiB, min_free=0)


@pytest.fixture
def place(quick_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A root whose log may have a megabyte, here and in forked children."""
    for name, value in (("KEEP", 0), ("SOFT", SOFT), ("STEP", STEP), ("RETIRE", RETIRE), ("REFUSE", REFUSE)):
        monkeypatch.setattr(connection, name, value)
    return quick_path / "root"


def put_many(store: Store, count: int, name: str = "k", size: int = 12 * KiB) -> int:
    """The largest size of the log meanwhile."""
    log, largest = Wal(str(store.root.catalog), store.root.files), 0
    for n in range(count):
        store.put("v", f"{name}{n}", b"x" * size)
        largest = max(largest, log.size())
    return largest


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

    with store.engine.catalog._mutex:
        store.engine.catalog._connection_locked().set_progress_handler(stop, 200)
    return store.engine.catalog.all("SELECT id, key FROM entries ORDER BY key")


def test_what_a_directory_adds_to_the_log(place: Path) -> None:
    """As the README says: 100 bytes and the name for each of its files, when it comes, and when it goes."""
    count, names = 20_000, "a/directory/of/theirs/{:08d}.jpg"
    with opened(place, 64 * MiB) as store:
        store.put("v", "k", b"x")
        log = Wal(str(store.root.catalog), store.root.files)
        for link in (True, False):
            before = log.size()
            with store.engine.catalog.write() as txn:
                if link:
                    entries.link(txn, 1 << 40, [(names.format(n), (1 << 41) + n * 7919 % count) for n in range(count)])
                else:
                    entries.delete(txn, 1 << 40, "tree")
            assert log.size() - before < REFUSE + count * (100 + len(names.format(0)))
        assert store.check() == []


def test_many_values_at_once_are_several_transactions(quick_path: Path) -> None:
    with opened(quick_path / "root", 256 * MiB) as store:
        assert len(store.put_many("v", [(f"k{n}", b"x" * 12_000) for n in range(3000)])) == 3000
        assert Wal(str(store.root.catalog), store.root.files).size() < 8 * MiB


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


def test_a_reader_that_stands_still_is_left_behind(place: Path, checkpoints: list[str]) -> None:
    """Its log goes on without it, and what it had read of the older pages is read again. Nobody waits for it: of all checkpoints only a
    passive one does not, the others ask SQLite's busy handler for two seconds."""
    here, on = Gate(), Gate()

    def reader() -> list[tuple[int, str]]:
        with opened(place) as store:
            return stand_still_in_a_statement(store, here, on)

    with opened(place, 64 * MiB) as store:
        put_many(store, 50)
        child = fork(reader)
        here.wait()
        child.stop()
        largest = max(put_many(store, 200, "new"), put_many(store, 50))
        assert largest < MiB
        assert set(checkpoints) == {"PRAGMA wal_checkpoint(PASSIVE)"}
        assert bytes_of(store, "new7") == b"x" * 12 * KiB
        child.signal(signal.SIGCONT)
        on.open()
        rows = child.result()
        assert rows == store.engine.catalog.all("SELECT id, key FROM entries ORDER BY key")
        assert store.check() == []
    assert sound(place)


def test_nothing_is_written_to_a_log_that_cannot_be_bounded(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where not even the index can be retired: a write is refused, what is kept is read, and it goes on once the log can be copied."""
    here, on = Gate(), Gate()

    def reader() -> None:
        with opened(place) as store:
            stand_still_in_a_statement(store, here, on)

    def failing(self: Wal) -> bool:
        raise OSError(errno.EIO, "the index cannot be opened")

    with opened(place, 64 * MiB) as store:
        put_many(store, 50)
        child = fork(reader)
        here.wait()
        with monkeypatch.context() as broken:
            broken.setattr(Wal, "retire_index", failing)
            with pytest.raises(errors.CacheFault, match="cannot be copied into the catalog"):
                put_many(store, 400, "new")
            size = Wal(str(store.root.catalog), store.root.files).size()
            assert REFUSE < size < MiB
            with pytest.raises(errors.CacheFault, match="cannot be copied into the catalog"):
                store.put("v", "more", b"x")
            assert Wal(str(store.root.catalog), store.root.files).size() == size
            assert bytes_of(store, "k7") == b"x" * 12 * KiB
        assert store.put("v", "more", b"x")
        on.open()
        child.result()
        assert store.check() == []


def test_who_was_left_behind_and_closes_last_does_not_copy_an_old_log(place: Path) -> None:
    """What closes a catalog last copies its log into the database: by the index that it has."""
    here, on, still = Gate(), Gate(), Gate()

    def idle() -> None:
        store = Store.open(place, SETTINGS)
        bytes_of(store, "k1")
        here.open()
        on.wait()
        store.close()

    def reader() -> None:
        with opened(place) as store:
            stand_still_in_a_statement(store, here, still)

    def writer() -> None:
        store = Store.open(place, SETTINGS)
        put_many(store, 100)
        here.open()
        on.wait()

    first = fork(writer)
    here.wait()
    waiting, stopped = fork(idle), fork(reader)
    here.wait()
    here.wait()
    other = fork(lambda: put_many(Store.open(place, SETTINGS), 300, "new"))
    assert other.result() < MiB
    stopped.kill()
    first.kill()
    on.open()
    waiting.result()  # the last one that has it open
    assert sound(place)
    with opened(place) as store:
        assert bytes_of(store, "new299") == b"x" * 12 * KiB
        assert store.check() == []


def test_killed_at_each_step_of_leaving_a_reader_behind(place: Path) -> None:
    """Whoever comes next goes on, to read and to write."""
    here, on = Gate(), Gate()

    def reader() -> None:
        with opened(place) as store:
            stand_still_in_a_statement(store, here, on)

    with opened(place, 64 * MiB) as store:
        put_many(store, 20)
        for step in range(6):
            child = fork(reader)
            here.wait()

            def retiring(step: int = step) -> None:
                with opened(place) as other, other.engine.catalog.writer(), other.engine.catalog._mutex:
                    other.engine.catalog._retire_index_locked()

            dead = fork_to_die(step, retiring)
            death = death_of(dead)
            assert bytes_of(store, "k3") == b"x" * 12 * KiB
            assert fork(lambda: _looks(place)).result() == b"x" * 12 * KiB
            put_many(store, 2, f"s{step}")
            child.kill()
            if death is None:
                break
        assert step >= 2
        assert store.check() == []
    assert sound(place)


def retire(place: Path, between: Callable[[], object]) -> None:
    """Retire the index of the log; ``between`` is called once it is marked, before it is unlinked."""

    def hook(call: str, subject: str) -> None:
        if call == "unlink" and subject.endswith("-shm"):
            between()

    with opened(place) as store, store.engine.catalog.writer(), store.engine.catalog._mutex:
        host.on_step(hook)
        store.engine.catalog._retire_index_locked()


def test_who_has_the_writer_lock_goes_on_where_a_killed_one_left_a_marked_index(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not wait for itself."""
    monkeypatch.setattr(writer, "LONGEST_WAIT", 0.2)

    here, on, killed = Gate(), Gate(), Gate()

    def idle() -> None:
        with opened(place) as store:
            bytes_of(store, "k1")
            here.open()
            on.wait()

    def retiring() -> None:
        retire(place, lambda: os.kill(os.getpid(), signal.SIGKILL))

    def look() -> None:
        killed.wait()
        with opened(place) as other:
            assert bytes_of(other, "k1") == b"x" * 12 * KiB
            assert len(other.engine.catalog.all("SELECT id FROM entries")) == 5

    newcomer = fork(look)
    with opened(place, 64 * MiB) as store:
        put_many(store, 5)
        child = fork(idle)  # else SQLite removes the index with its last connection
        here.wait()
        assert fork(retiring).wait() == -signal.SIGKILL
        killed.open()
        newcomer.result()
        assert fork(retiring).wait() == -signal.SIGKILL
        with store.engine.catalog.still():
            assert len(store.engine.catalog.all("SELECT id FROM entries")) == 5
        put_many(store, 5)
        on.open()
        child.result()
        assert store.check() == []


def test_a_marked_index_is_not_made_anew_before_it_is_gone(place: Path) -> None:
    """Not even by a process that has the catalog to itself but for the one that marked it: it would close by what is outdated."""
    marked, on = Gate(), Gate()

    with opened(place, 64 * MiB) as store:
        put_many(store, 5)
    child = fork(lambda: retire(place, lambda: (marked.open(), on.wait())))
    marked.wait()
    con = sqlite3.connect(place / "catalog.sqlite")
    with pytest.raises(sqlite3.OperationalError, match="unable to open"):
        con.execute("SELECT id FROM entries").fetchall()
    con.close()
    on.open()
    child.result()
    with opened(place) as store:
        assert bytes_of(store, "k1") == b"x" * 12 * KiB
        assert store.check(deep=True) == []


def test_a_mark_that_goes_with_its_index_while_a_reader_looks_for_it(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P1 marks the index / P2 cannot read it, and sees the same file still / P1 unlinks it / P2 asks whether it was marked."""
    begun, marked, on, gone = Gate(), Gate(), Gate(), Gate()

    def retiring() -> None:
        begun.wait()
        retire(place, lambda: (marked.open(), on.wait()))
        gone.open()

    is_retired = Wal.is_retired

    def looks_late(self: Wal) -> bool:
        if not late:
            late.append(True)
            on.open()
            gone.wait()
        return is_retired(self)

    late: list[bool] = []
    with opened(place, 64 * MiB) as store:
        put_many(store, 5)
        child = fork(retiring)
        assert bytes_of(store, "k1") == b"x" * 12 * KiB
        begun.open()
        marked.wait()
        monkeypatch.setattr(Wal, "is_retired", looks_late)
        assert len(store.engine.catalog.all("SELECT id FROM entries")) == 5
        assert late
        child.result()
        assert store.check() == []


def test_an_index_that_is_being_written_is_read_again(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who only looks cannot mend what a writer is in the middle of: SQLite tells him so, and the next look finds it whole."""
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
    assert len(store.engine.catalog.all("SELECT id FROM entries")) == 5
    assert left == []
    store.close()
    on.open()
    child.result()


def _looks(place: Path) -> bytes | None:
    with opened(place) as store:
        return bytes_of(store, "k3")


def test_a_statement_that_is_always_overtaken_runs_under_the_writer_lock(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(place, 64 * MiB) as store:
        put_many(store, 5)
        locked: list[bool] = []
        tries = connection.Catalog._try_all

        def trying(self: connection.Catalog, sql: str, values: tuple[object, ...]) -> list[object] | None:
            locked.append(not self._writer._turn.acquire(blocking=False))
            if not locked[-1]:
                self._writer._turn.release()
            return tries(self, sql, values) if locked[-1] else None

        monkeypatch.setattr(connection.Catalog, "_try_all", trying)
        assert len(store.engine.catalog.all("SELECT id FROM entries")) == 5
        assert locked == [False, False, False, True]


def test_who_has_a_retired_index_can_neither_read_nor_copy_by_it(place: Path) -> None:
    here, on = Gate(), Gate()

    def other() -> str:
        con = sqlite3.connect(place / "catalog.sqlite")
        con.execute("SELECT count(*) FROM entries").fetchone()
        here.open()
        on.wait()
        try:
            con.execute("PRAGMA wal_checkpoint").fetchone()
            return "copied"
        except sqlite3.OperationalError as error:
            return str(error)

    with opened(place, 64 * MiB) as store:
        put_many(store, 5)
        child = fork(other)
        here.wait()
        with store.engine.catalog.writer(), store.engine.catalog._mutex:
            store.engine.catalog._retire_index_locked()
        on.open()
        assert child.result() == "unable to open database file"


def test_an_index_of_another_form_is_left_alone(place: Path) -> None:
    """A later SQLite's, say."""
    with opened(place, 64 * MiB) as store:
        put_many(store, 2)
        index = Path(store.engine.catalog._wal.index)
        head = index.read_bytes()
    other = place / "other"
    Path(f"{other}-shm").write_bytes(struct.pack("=I", 4_007_000) + head[4:])
    assert not Wal(str(other), store.root.files).retire_index()
    assert os.path.exists(f"{other}-shm")


def test_a_read_only_handle_of_the_same_process_goes_along(place: Path) -> None:
    """SQLite lets the connections of a process share the index."""
    with opened(place, 64 * MiB) as store:
        put_many(store, 20)
        looking = Store.open(place, SETTINGS, read_only=True)
        try:
            assert bytes_of(looking, "k1") == b"x" * 12 * KiB
            with store.engine.catalog.writer(), store.engine.catalog._mutex:
                store.engine.catalog._retire_index_locked()
            put_many(store, 5, "later")
            assert bytes_of(looking, "later3") == b"x" * 12 * KiB
            assert bytes_of(store, "k7") == b"x" * 12 * KiB
        finally:
            looking.close()
        assert store.check() == []


@pytest.fixture
def at_pages(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """A check of all pages stops in the middle: it is there, and it may go on."""
    here, on = threading.Event(), threading.Event()
    begin = peers.Peers.begin_apart

    def wait() -> int:
        here.set()
        on.wait(HANG)
        return 0

    def beginning(self: peers.Peers, one: peers.Apart, con: sqlite3.Connection) -> None:
        con.set_progress_handler(wait, 1)
        begin(self, one, con)

    monkeypatch.setattr(peers.Peers, "begin_apart", beginning)
    return here, on


def test_a_check_of_all_pages_holds_up_no_other_thread(place: Path, at_pages: tuple[threading.Event, threading.Event]) -> None:
    here, on = at_pages
    with opened(place, 64 * MiB) as store:
        put_many(store, 5)
        found: list[str | None] = []
        checking = threading.Thread(target=lambda: found.append(store.engine.catalog.problem()))
        checking.start()
        assert here.wait(10)
        put_many(store, 5, "later")
        assert bytes_of(store, "later3") == b"x" * 12 * KiB
        assert not found
        on.set()
        checking.join()
        assert found == [None]


@pytest.mark.parametrize("why", ["a fork", "another index"])
def test_a_check_of_all_pages_stops_and_begins_again(
    place: Path, at_pages: tuple[threading.Event, threading.Event], monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """No thread is inside SQLite when the process is copied, and none keeps an index that nobody else has."""
    here, on = at_pages
    stop, stopped = peers.Peers.stop_apart, []

    def stopping(self: peers.Peers) -> None:
        on.set()
        stopped.append(len(self._apart))
        stop(self)
        assert not self._apart

    with opened(place, 64 * MiB) as store:
        put_many(store, 5)
        monkeypatch.setattr(peers.Peers, "stop_apart", stopping)
        found: list[str | None] = []
        checking = threading.Thread(target=lambda: found.append(store.engine.catalog.problem()))
        checking.start()
        assert here.wait(10)
        if why == "a fork":
            assert in_child(lambda: bytes_of(store, "k1")) == b"x" * 12 * KiB
        else:
            with store.engine.catalog.writer(), store.engine.catalog._mutex:
                store.engine.catalog._retire_index_locked()
            put_many(store, 5, "later")
        on.set()
        checking.join()
        assert found == [None]
    assert stopped[0] == 1
