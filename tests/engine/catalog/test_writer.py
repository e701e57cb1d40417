"""The writer lock: bursts are let be, and nobody starves."""

from __future__ import annotations

import mmap
import os
import signal
import statistics
import threading
from pathlib import Path

import pytest

from forebay import errors
from forebay._engine.catalog import writer_lock as module
from forebay._engine.catalog.transactions import IDS
from forebay._engine.store import Store
from forebay._kernel import host, locks, waits
from tests.harness import MiB, bytes_of, opened
from tests.items import until
from tests.processes import Gate, fork


@pytest.mark.rotates
def test_a_process_that_writes_without_end_lets_one_that_waits_long_in(quick_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within some turns of his own after he was told, not within as many as fit into the patience of the other."""
    place, said = quick_path / "root", Gate()
    turns = memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("Q")  # how often he had it

    def greedy() -> None:
        with opened(place, 64 * MiB) as store:
            store.put("v", "begun", b"x")
            said.open()
            while bytes_of(store, "end") is None:
                with store.engine.parts.catalog.writer():
                    turns[0] += 1

    child = fork(greedy)
    said.wait()
    monkeypatch.setattr(module, "HUNGRY", 0)
    ask, asked, waited = module.WriterLock._ask_hungry, list[int](), list[int]()

    def asking(writer: module.WriterLock) -> bool | None:
        asked.append(turns[0])
        got = ask(writer)
        if got:
            waited.append(turns[0] - asked[0])
            asked.clear()
        return got

    monkeypatch.setattr(module.WriterLock, "_ask_hungry", asking)
    with opened(place) as store:
        while len(waited) < 20:
            store.put("v", f"k{len(waited)}", b"x")
        store.put("v", "end", b"x")
    child.result()
    said.close()
    assert statistics.median(waited) < 100, waited


def test_who_waits_says_that_he_is_hungry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And who lets go wakes him: he need not find out by himself."""
    with opened(tmp_path / "root", MiB) as store:
        writer = store.engine.parts.catalog._writer
        before = store.engine.parts.words.value(module.HUNGRY_WORD)
        other = module.WriterLock(store.root, store.engine.parts.words)
        hungry = threading.Event()
        ask = module.WriterLock._ask_hungry

        def asking(self: module.WriterLock) -> bool | None:
            found = ask(self)
            hungry.set()
            return found

        monkeypatch.setattr(module.WriterLock, "_ask_hungry", asking)
        with writer.holding():
            waiting = threading.Thread(target=lambda: _take(other))
            waiting.start()
            assert hungry.wait(60)
            assert store.engine.parts.words.value(module.HUNGRY_WORD) != before
            seen = store.engine.parts.words.value(module.WRITER_WORD)
        assert store.engine.parts.words.value(module.WRITER_WORD) != seen
        waiting.join()
        with writer.holding():  # he said so once more when he was woken
            pass
        with writer.holding():
            seen = store.engine.parts.words.value(module.WRITER_WORD)
        assert store.engine.parts.words.value(module.WRITER_WORD) == seen  # nobody is hungry: nobody is woken


def test_who_waits_tries_less_and_less_often(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path / "root", MiB) as store:
        other = module.WriterLock(store.root, store.engine.parts.words)
        pauses: list[float] = []
        monkeypatch.setattr(module.time, "sleep", pauses.append)
        with store.engine.parts.catalog.writer(), pytest.raises(errors.WriterBusy):
            other.take(module.HUNGRY)
        other.close()
    assert pauses[0] <= module.PAUSE < pauses[2] < pauses[4] <= max(pauses) <= module.LONGEST_PAUSE


def test_who_has_little_time_announces_it_while_there_is_some_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path / "root", MiB) as store:
        other = module.WriterLock(store.root, store.engine.parts.words)
        ask, asked = module.WriterLock._ask_hungry, list[None]()

        def asking(self: module.WriterLock) -> bool | None:
            asked.append(None)
            return ask(self)

        monkeypatch.setattr(module.WriterLock, "_ask_hungry", asking)
        monkeypatch.setattr(module, "HUNGRY", 60)  # half of the timeout comes sooner
        with store.engine.parts.catalog.writer(), pytest.raises(errors.WriterBusy):
            other.take(1)
        other.close()
    assert len(asked) > 1  # it slept in between, and could have been woken


def _take(writer: module.WriterLock) -> None:
    with writer.holding():
        writer.close()


def test_a_killed_writer_lets_go(quick_path: Path) -> None:
    place, said = quick_path / "root", Gate()

    def dying() -> None:
        with opened(place, MiB) as store, store.engine.parts.catalog.writer():
            said.open()
            signal.pause()

    child = fork(dying)
    said.wait()
    os.kill(child.pid, signal.SIGKILL)
    with opened(place) as store:
        store.put("v", "k", b"x")
        assert bytes_of(store, "k") == b"x"
    said.close()


def test_a_busy_writer_lock_names_its_holder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LONG", 0.04)
    with opened(tmp_path / "root", MiB) as store:
        other = module.WriterLock(store.root, store.engine.parts.words)
        with store.engine.parts.catalog.writer(), pytest.raises(errors.CacheFault, match=rf"busy.*{os.getpid()}"):
            other.take(0.05)
        other.take(0.05)
        other.release()
        other.close()


def test_a_thread_does_not_wait_for_ever_for_another_one(tmp_path: Path) -> None:
    with opened(tmp_path / "root", MiB) as store:
        found: list[BaseException] = []

        def other() -> None:
            try:
                store.engine.parts.catalog._writer.take(0.05)
            except errors.CacheFault as error:
                found.append(error)

        with store.engine.parts.catalog.writer():
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()
        assert "other threads of this process" in str(found[0])


def test_a_sweeper_leaves_a_file_alone_that_is_about_to_be_published(quick_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P1 writes a small file / P2 lists it, and finds no row / P1 commits."""
    place, said = quick_path / "root", Gate()
    body = os.urandom(100_000)

    def writer() -> None:
        def hook(call: str, subject: str) -> None:
            if call == "commit":
                host.on_step(None)
                said.open()
                os.kill(os.getpid(), signal.SIGSTOP)

        with opened(place, MiB) as store:
            host.on_step(hook)
            store.put("v", "k", body)

    with opened(place, MiB) as store:
        store.spaces.ensure("v")
        child = fork(writer)
        said.wait()
        (file,) = (place / "blobs").glob("*/*")
        orphan = int(file.name, 16), "blob", ""
        assert store.strays().files == 0  # the intent names it
        with monkeypatch.context() as patch:
            patch.setattr(module, "LONGEST_WAIT", 0.2)
            with pytest.raises(errors.CacheFault, match="busy"):
                store.engine.parts.writers.eviction.remove_orphan(orphan)
        os.kill(child.pid, signal.SIGCONT)
        child.result()
        assert not store.engine.parts.writers.eviction.remove_orphan(orphan)
        assert bytes_of(store, "k") == body
        assert store.check(deep=True) == []
    said.close()


# -- ids ---------------------------------------------------------------------------------------------------------------


def ids_of(store: Store) -> list[int]:
    return [entry.id for entry in store.seeing.entries()]


def test_no_id_is_given_twice(quick_path: Path) -> None:
    """A process takes many at once: those that a forked child, a rolled back transaction or another process could take too are not its."""
    place = quick_path / "root"
    with opened(place, 8 * MiB) as store:
        store.put("v", "a", b"x")

        def child(name: str) -> None:
            for n in range(100):
                store.put("v", f"{name}{n}", b"x")

        children = [fork(lambda name=name: child(name)) for name in ("c", "d")]  # type: ignore[misc]
        for n in range(100):
            store.put("v", f"p{n}", b"x")
        for one in children:
            one.result()
        with pytest.raises(RuntimeError), store.engine.parts.catalog.write() as txn:
            for _ in range(IDS):
                txn.new_ids()
            raise RuntimeError
        for n in range(100):
            store.put("v", f"q{n}", b"x")
        found = ids_of(store)
        assert len(found) == len(set(found)) == 401
        assert store.check(deep=True) == []


def test_any_number_of_ids_is_taken_at_once(tmp_path: Path) -> None:
    with opened(tmp_path / "root", MiB) as store:
        with store.engine.parts.catalog.write() as txn:
            many = txn.new_ids(3 * IDS + 7)
            then, after = txn.new_ids(5), txn.new_ids(IDS)[0]
        assert many[-1] < then[0]
        assert then[-1] < after


def test_a_short_wait_in_vain_says_nothing_of_the_holder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What could not be done in 10 ms is a hint: the next write waits, and nobody looks through the machine for a name."""
    monkeypatch.setattr(locks, "holders", lambda *_, **__: pytest.fail("it looks for the holder"))
    with opened(tmp_path / "root", MiB) as store:
        store.put("v", "k", b"x")
        words, other = store.engine.parts.words, module.WriterLock(store.root, store.engine.parts.words)
        with other.holding():
            with pytest.raises(errors.WriterBusy), store.engine.parts.catalog.writer(0.01):
                pytest.fail("two have the lock")
            hungry = words.value(module.HUNGRY_WORD)
            writing = threading.Thread(target=store.put, args=("v", "k", b"y"))
            writing.start()
            until(lambda: words.value(module.HUNGRY_WORD) != hungry or not writing.is_alive(), "its wait")
            assert writing.is_alive()
        writing.join()
        assert bytes_of(store, "k") == b"y"
        other.close()


def test_a_call_waits_beyond_its_time_once(tmp_path: Path) -> None:
    """Not for each of its objects."""
    with opened(tmp_path / "root", MiB) as store:
        other = module.WriterLock(store.root, store.engine.parts.words)
        with other.holding(), waits.time_limit(0):
            waited = []
            for _ in range(4):
                with pytest.raises(errors.WriterBusy) as caught:
                    store.put("v", "k", b"x")
                waited.append(caught.value.waited)
            assert waited[0] > module.GRACE / 2
            assert waited[1:] == [0.0] * 3
        other.close()


def test_an_unlock_that_fails_lets_the_next_thread_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path / "root", MiB) as store:
        unlock = locks.LockFile.unlock

        def failing(file: locks.LockFile, offset: int) -> None:
            unlock(file, offset)
            raise OSError(5, "the disk is gone")

        with monkeypatch.context() as patch:
            patch.setattr(locks.LockFile, "unlock", failing)
            with pytest.raises(OSError, match="the disk is gone"), store.engine.parts.catalog.writer():
                pass
        with store.engine.parts.catalog.writer(1):
            pass
