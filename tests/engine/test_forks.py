"""s17: fork with threads at work, spawn, forkserver, handles that travel; forks by C; leases over forks and at exit."""

from __future__ import annotations

import ctypes
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest

import forebay
from forebay import errors
from forebay._engine import publish
from forebay._engine.catalog import connection, writer_lock
from forebay._engine.space import budget
from forebay._engine.store import Store
from forebay._kernel import host
from forebay._model import Entry, ObjectInfo
from forebay.cache import entries
from tests.harness import KiB, MiB, assert_settled, bytes_of, opened
from tests.items import until
from tests.processes import HANG, Child, Gate, end, ended, fork, in_child

BLOB = os.urandom(60 * KiB)


def use(store: Store, number: int) -> None:
    """What a worker does after the fork: with handles of before, and what it remembers."""
    assert bytes_of(store, "before") == BLOB
    store.put("v", f"child{number}", BLOB)
    assert bytes_of(store, f"child{number}") == BLOB
    lease = store.lease("v", "before")
    assert lease is not None
    assert Path(lease).read_bytes() == BLOB


def test_a_chain_of_forks_keeps_no_descriptor_of_the_catalog(tmp_path: Path) -> None:
    place = tmp_path / "root"

    def count(store: Store, depth: int) -> list[int]:
        store.put("v", f"{depth}", b"x")
        mine = sum(_target(fd) == str(place / "catalog.sqlite") for fd in os.listdir("/proc/self/fd"))
        return [mine, *(in_child(lambda: count(store, depth - 1)) if depth else ())]

    with opened(place, 4 * MiB) as store:
        found = count(store, 4)
        assert len(set(found)) == 1, found


def _target(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except FileNotFoundError:  # of the listing itself
        return ""


def fork_while_threads_work(place: Path, forks: int) -> None:
    stop = threading.Event()
    faults: list[BaseException] = []
    budget.PATIENCE = publish.PATIENCE = writer_lock.LONGEST_WAIT = (
        HANG  # on a busy machine many wait for one lock, and nobody is to give up
    )

    def put(store: Store, number: int) -> None:
        try:
            while not stop.is_set():
                for n in range(8):
                    store.put("v", f"{number}-{n}", BLOB if n % 2 else b"small" * 50)
                    bytes_of(store, f"{number}-{n - 1}")
        except BaseException as error:
            faults.append(error)

    def fetch(store: Store) -> None:
        """A long one: there is always a write under way when the process forks."""
        try:
            while not stop.is_set():
                hold = store.locks.hold("v", "fetched")
                with store.writing("v", "fetched") as writing:
                    writing.begin(ObjectInfo("", 3 * MiB, '"1"', strong=True))
                    for at in range(0, 3 * MiB, 256 * KiB):
                        writing.write(at, bytes(256 * KiB))
                    writing.publish()
                hold.release()
        except BaseException as error:
            faults.append(error)

    with opened(place, 10 * MiB) as store:
        store.put("v", "before", BLOB, life="pinned")
        threads = [threading.Thread(target=put, args=(store, n)) for n in range(3)] + [threading.Thread(target=fetch, args=(store,))]
        for thread in threads:
            thread.start()
        try:
            for number in range(forks):
                fork(lambda number=number: use(store, number)).result()  # type: ignore[misc]
        finally:
            stop.set()
            for thread in threads:
                thread.join(HANG)
        assert not any(thread.is_alive() for thread in threads)
        assert faults == []
        assert store.check(deep=True) == []


@pytest.mark.rotates
def test_s17_forks_while_threads_write_and_fetch(quick_path: Path) -> None:
    place = quick_path / "root"
    in_child(lambda: fork_while_threads_work(place, 60))
    in_child(lambda: settle(place))
    assert_settled(place, 10 * MiB)


def fork_while_a_transaction_takes_a_lock(place: Path) -> None:
    inside, forking = threading.Event(), threading.Event()

    class Listener:
        def before_fork(self) -> None:
            forking.set()

        def after_fork_parent(self) -> None: ...
        def after_fork_child(self) -> None: ...

    with opened(place, MiB) as store:
        mutex, entry = store.engine.parts.leases._held[7]._mutex, store.put("v", "k", b"x")

        def write() -> None:
            with store.engine.parts.catalog.write():
                inside.set()
                assert forking.wait(HANG)
                for _ in range(50):  # who forks may take this mutex only after the catalog's, which is ours
                    if mutex.locked():
                        break
                    threading.Event().wait(0.01)
                store.engine.parts.leases.new(entry._replace(id=7))

        thread = threading.Thread(target=write)
        thread.start()
        assert inside.wait(HANG)
        listener = Listener()
        host.at_fork(listener)  # the last to register is the first to be told
        fork(lambda: None).result()
        thread.join(HANG)
        assert not thread.is_alive()


def test_s17_a_fork_waits_for_a_transaction_that_takes_locks(quick_path: Path) -> None:
    fork(lambda: fork_while_a_transaction_takes_a_lock(quick_path / "root")).result()


def settle(place: Path) -> None:
    with opened(place) as store:
        store.put("v", "next", b"1")
        store.put("v", "next", b"2")
        assert store.check(deep=True) == []


def test_s17_a_lease_pins_for_parent_and_child_alike(quick_path: Path, children: Callable[..., Child]) -> None:
    """The parent lets go, the child's pin stands; the child dies, and the entry can be evicted."""
    place, leased, said, go = quick_path / "root", Gate(), Gate(), Gate()

    def parent() -> None:
        with opened(place, MiB) as store:
            store.put("v", "a", BLOB)
            lease = store.lease("v", "a")
            assert lease is not None

            def child() -> None:
                leased.open()
                go.wait()
                assert Path(lease).read_bytes() == BLOB
                signal.pause()

            pid = fork(child).pid
            leased.wait()
            lease.close()
            (quick_path / "pid").write_text(str(pid))
            said.open()
            signal.pause()

    def press(kept: bool) -> None:
        with opened(place) as store:
            for n in range(30):
                store.put("v", f"k{n}", bytes(90 * KiB))
            assert (bytes_of(store, "a") == BLOB) is kept
            assert store.check(deep=True) == []

    children(parent)
    said.wait()
    in_child(lambda: press(True))
    go.open()
    end(int((quick_path / "pid").read_text()))
    in_child(lambda: press(False))
    for gate in (leased, said, go):
        gate.close()


def test_s17_a_dead_parents_locks_do_not_live_on_in_the_child(quick_path: Path, children: Callable[..., Child]) -> None:
    """A fetcher forks and is killed: its key is free at once, and what it wrote is a partial."""
    place, said = quick_path / "root", Gate()

    def fetcher() -> None:
        with opened(place, 8 * MiB) as store:
            with store.locks.hold("v", "a"), store.writing("v", "a") as writing:
                writing.begin(ObjectInfo("", 3 * MiB, '"1"', strong=True))
                writing.write(0, bytes(MiB))
                pid = os.fork()
                if not pid:
                    signal.pause()
                (quick_path / "pid").write_text(str(pid))
                said.open()
                signal.pause()

    def successor() -> None:
        with opened(place) as store:
            store.locks.hold("v", "a", timeout=HANG).release()
            with store.writing("v", "a") as writing:
                assert writing.partial is not None
                assert [(span.start, span.length) for span in writing.begin(ObjectInfo("", 3 * MiB, '"1"', strong=True))] == [
                    (MiB, 2 * MiB)
                ]
                writing.write(MiB, bytes(2 * MiB))
                writing.publish()
            assert bytes_of(store, "a") == bytes(3 * MiB)
            assert store.check(deep=True) == []

    child = children(fetcher)
    said.wait()
    os.kill(child.pid, signal.SIGKILL)
    child.wait()  # the kernel frees the lock of its key a moment before the one that says that it lives: a successor may begin anew then
    try:
        in_child(successor)
    finally:
        end(int((quick_path / "pid").read_text()))
    assert_settled(place, 8 * MiB)
    said.close()


def test_s17_a_child_knows_no_catalogs_of_its_ancestors(quick_path: Path) -> None:
    """A process number comes round: what an ancestor had under it, his mutex too, is not the descendant's."""
    with opened(quick_path / "root", 8 * MiB):
        known = in_child(lambda: list(connection._peers))
    assert known
    assert os.getpid() not in {pid for pid, _ in known}
    assert len({pid for pid, _ in known}) == 1


def test_a_fork_by_c_code_is_passed_by(quick_path: Path) -> None:
    """It runs no hook: calls fail as faults of the cache, and neither the parent's lease nor its catalog is harmed."""
    place = quick_path / "root"

    def parent() -> int:
        with opened(place, MiB) as store:
            store.put("v", "a", BLOB)
            lease = store.lease("v", "a")
            assert lease is not None
            pid = ctypes.CDLL(None).fork()
            if not pid:
                code = 1
                try:
                    for call in (lambda: store.put("v", "b", b"1"), lambda: store.lease("v", "a"), lambda: store.view("v", "b")):
                        with pytest.raises(errors.CacheFault):
                            call()
                    lease.close()
                    store.close()
                    code = 0
                finally:
                    os._exit(code)
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

            def press() -> None:
                with opened(place) as other:
                    for n in range(30):
                        other.put("v", f"k{n}", bytes(90 * KiB))

            subprocess.run([sys.executable, "-c", PRESS, str(place)], check=True)
            assert Path(lease).read_bytes() == BLOB
            store.put("v", "b", b"1")
            assert store.check(deep=True) == []
            return status

    assert in_child(parent) == 0


PRESS = """
import sys
from forebay._engine.store import Settings, Store
store = Store.open(sys.argv[1], Settings())
for n in range(30):
    store.put("v", f"k{n}", bytes(90 << 10))
store.close()
"""


def test_interpreter_exit_with_leases_and_buffers_held(quick_path: Path) -> None:
    """Nothing is said, nothing hangs, and all is let go."""
    place = quick_path / "root"
    script = """
import sys, threading
from forebay._engine.store import Settings, Store
store = Store.open(sys.argv[1], Settings(budget=1 << 20, min_free=0))
for n in range(10):
    store.put("v", f"k{n}", bytes(60 << 10))
leases = [store.lease("v", f"k{n}") for n in range(10)]
views = [store.view("v", f"k{n}").view for n in range(10)]
class Late:
    def __del__(self):
        leases[0].close()
late = Late()
knot = [leases, views]
knot.append(knot)
threading.Thread(target=lambda: store.lease("v", "k1"), daemon=True).start()
"""
    found = subprocess.run([sys.executable, "-X", "dev", "-c", script, place], capture_output=True, text=True, timeout=HANG, check=False)
    assert (found.returncode, found.stdout, found.stderr) == (0, "", "")

    def look() -> None:
        with opened(place) as store:
            store.put("v", "brim", bytes(MiB))
            assert store.check(deep=True) == []

    in_child(look)
    assert_settled(place, MiB)


class Watched(sqlite3.Connection):
    """Notes of each statement whether a fork would wait for its end."""

    locks: ClassVar[list[Any]] = []
    uses: ClassVar[list[bool]] = []

    def execute(self, *statement: Any) -> sqlite3.Cursor:
        self.uses.append(any(lock._is_owned() for lock in self.locks) or threading.get_ident() in host.uncopied._depths)
        return super().execute(*statement)


def lose_and_write(store: Store) -> None:
    (store.root.path / "catalog.sqlite").unlink()
    store.put("v", "next", b"value")


def damage_and_repair(store: Store, at: int) -> None:
    with (store.root.path / "catalog.sqlite").open("r+b") as file:
        file.seek(at)
        file.write(os.urandom(4096))
    store.repair()


def lose_format(store: Store) -> None:
    (store.root.path / "FORMAT").write_bytes(b"forebay of another kind")
    with opened(store.root.path):
        pass


def list_sorted(store: Store) -> None:
    with forebay.Cache(store.root.path) as cache:
        assert [entry.key for entry in cache.entries().sorted_by(lambda entry: entry.size)] == ["k"]


@pytest.mark.parametrize(
    "act",
    [
        pytest.param(lose_and_write, id="a catalog is made"),
        pytest.param(lambda store: damage_and_repair(store, 0), id="its first page is made anew"),
        pytest.param(lambda store: damage_and_repair(store, 2 * 4096), id="it is salvaged"),
        pytest.param(lambda store: store.check(), id="its tables are compared"),
        pytest.param(lose_format, id="its root is read"),
        pytest.param(list_sorted, id="a listing is sorted"),
    ],
)
def test_a_fork_waits_for_every_use_of_sqlite(tmp_path: Path, act: Callable[[Store], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """T1 is inside SQLite, and holds a lock of it / T2 forks: the child would wait for that lock for ever at its first call of SQLite."""
    connect = sqlite3.connect
    with opened(tmp_path / "root", 4 * MiB) as store:
        store.put("v", "k", b"value")
        monkeypatch.setattr(Watched, "locks", [store.engine.parts.catalog._mutex])
        monkeypatch.setattr(Watched, "uses", [])
        monkeypatch.setattr(entries, "IN_MEMORY", 1)
        monkeypatch.setattr(sqlite3, "connect", lambda *where, **how: connect(*where, **how, factory=Watched))
        act(store)
        monkeypatch.setattr(sqlite3, "connect", connect)
    assert Watched.uses
    assert all(Watched.uses)


def fork_and_end() -> None:
    pid = os.fork()
    if not pid:
        os._exit(0)
    assert ended(pid) == 0


class During:
    """A listener for forks: ``call`` is called in each, when it has all locks but those of `host.uncopied`."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._call = call
        host._listeners.insert(1, weakref.ref(self, host._listeners.remove))

    def before_fork(self) -> None:
        self._call()

    def after_fork_child(self) -> None: ...


def test_a_thread_that_begins_to_use_sqlite_during_a_fork_waits_for_the_fork() -> None:
    """Also where it is the first that does: the child has what the thread holds for free."""
    inside, seen = threading.Event(), list[str]()

    def use() -> None:
        with host.uncopied, host.uncopied:
            inside.set()
            until(lambda: bool(host.uncopied._forking), "the fork waits")
            seen.append("used")
        with host.uncopied:
            seen.append("used again")

    thread = threading.Thread(target=use)
    watched = During(lambda: (thread.start(), inside.wait(20)))
    pid = os.fork()
    if not pid:
        with host.uncopied:
            os._exit(len(host.uncopied._depths.keys() - {threading.get_ident()}))
    assert seen[0] == "used"
    assert ended(pid) == 0
    thread.join()
    assert seen == ["used", "used again"]
    del watched


def test_uses_of_sqlite_do_not_wait_for_one_another() -> None:
    """T1 salvages one root for minutes / T2 opens another."""
    other = list[bool]()
    with host.uncopied:
        thread = threading.Thread(
            target=lambda: host.uncopied.__enter__() or host.uncopied.__exit__(None, None, None) or other.append(True)
        )
        thread.start()
        thread.join(20)
    assert other


def test_a_listing_is_sorted_by_a_function_that_uses_the_cache_during_a_fork(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """T1 sorts, and calls a function of the user's / T2 forks, and has the catalog's mutex / T1's function waits for that."""
    monkeypatch.setattr(entries, "IN_MEMORY", 1)
    inside, forking, listed = threading.Event(), threading.Event(), list[str]()
    with forebay.Cache(tmp_path / "root", budget=4 * MiB) as cache:
        cache.put("k", b"value")

        def number(entry: Entry) -> float:
            inside.set()
            forking.wait(20)
            cache.get("none such")
            return 0.0

        thread = threading.Thread(target=lambda: listed.extend(entry.key for entry in cache.entries().sorted_by(number)))
        thread.start()
        inside.wait(20)
        watched = During(forking.set)
        fork_and_end()
        thread.join()
        del watched
    assert listed == ["k"]


def test_a_thread_logs_while_a_fork_waits_for_it() -> None:
    """T1 has a lock that a fork takes / T2 forks: `logging`, imported later than Forebay, takes its own lock first / T1 logs first."""
    code = """
import os, sys, threading
from forebay._kernel import host
assert "logging" not in sys.modules
import logging
inside, forking = threading.Event(), threading.Event()
class First:
    def before_fork(self):
        forking.set()
    def after_fork_child(self): ...
first = First()
host.at_fork(first)
def use():
    with host.uncopied:
        inside.set()
        forking.wait(20)
        host.log.info("the first record of this module")
thread = threading.Thread(target=use)
thread.start()
inside.wait(20)
pid = os.fork()
if not pid:
    logging.getLogger("in the child").warning("this is logged")
    os._exit(0)
thread.join()
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout, done.stderr) == (0, "0\n", "this is logged\n")
