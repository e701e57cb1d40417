"""Threads share transactions: each gets its own result, and its own failure."""

from __future__ import annotations

import os
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from forebay import errors
from forebay._engine.store import Store
from forebay._engine.write import combine
from forebay._engine.write.combine import Combiner
from forebay._kernel import host
from tests.crash.conftest import Scene
from tests.harness import KiB, MiB, assert_settled, bytes_of, opened
from tests.processes import fork

BODY = os.urandom(100 * KiB)


class Queue(deque[Any]):
    """Tells how many came."""

    def __init__(self) -> None:
        super().__init__()
        self.came = threading.Semaphore(0)

    def append(self, item: Any) -> None:
        super().append(item)
        self.came.release()

    def wait_for(self, count: int) -> None:
        for _ in range(count):
            assert self.came.acquire(timeout=60)


def run(works: Sequence[Callable[[], Any]], go: Callable[[], None], queue: Queue, first: threading.Event) -> list[Any]:
    """The first work leads and waits for ``go``, which is called when all others stand behind it. What they gave, or raised."""
    found: list[Any] = [None] * len(works)

    def one(n: int) -> None:
        try:
            found[n] = works[n]()
        except BaseException as error:
            found[n] = error

    threads = [threading.Thread(target=one, args=(n,)) for n in range(len(works))]
    threads[0].start()
    assert first.wait(60)
    queue.wait_for(1)
    for thread in threads[1:]:
        thread.start()
    queue.wait_for(len(works) - 1)
    go()
    for thread in threads:
        thread.join()
    return found


class Doing:
    """Doubles numbers; stands still at its first call until `go`. What is negative it cannot do."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []
        self.began, self.go = threading.Event(), threading.Event()
        self.combined = Combiner(self, shared=TimeoutError)
        self.combined._waiting = self.queue = Queue()
        self.fails: Callable[[Sequence[int]], BaseException | None] = lambda items: ValueError() if min(items) < 0 else None

    def __call__(self, items: Sequence[int]) -> list[int]:
        self.calls.append(list(items))
        self.began.set()
        assert self.go.wait(60)
        if error := self.fails(items):
            raise error
        return [2 * item for item in items]

    def run(self, items: Sequence[int]) -> list[Any]:
        works = [lambda item=item: self.combined(item) for item in items]  # type: ignore[misc]
        return run(works, self.go.set, self.queue, self.began)


def test_items_that_wait_share_a_transaction() -> None:
    doing = Doing()
    assert doing.run(range(40)) == [2 * n for n in range(40)]
    assert [len(call) for call in doing.calls] == [1, combine.MOST, combine.MOST, 7]


def test_an_item_that_fails_fails_no_other() -> None:
    doing = Doing()
    found = doing.run([1, 2, -3, 4])
    assert (found[0], found[1], found[3]) == (2, 4, 8)
    assert isinstance(found[2], ValueError)
    assert sorted(map(len, doing.calls)) == [1, 1, 1, 1, 3]


def test_a_failure_that_all_would_meet_is_met_once() -> None:
    doing = Doing()
    doing.fails = lambda items: TimeoutError() if len(items) > 1 else None
    found = doing.run([1, 2, 3, 4])
    assert found[0] == 2
    assert all(isinstance(one, TimeoutError) for one in found[1:])
    assert len(doing.calls) == 2


def test_an_interrupt_is_the_leaders_alone() -> None:
    doing = Doing()
    doing.fails = lambda items: KeyboardInterrupt() if len(items) > 1 else None
    found = doing.run([1, 2, 3, 4])
    assert sum(isinstance(one, KeyboardInterrupt) for one in found) == 1
    assert sum(isinstance(one, int) for one in found) == 3


def test_who_is_interrupted_while_he_waits_wants_nothing_any_more() -> None:
    class Interrupted:
        def __enter__(self) -> None:
            raise KeyboardInterrupt

        def __exit__(self, *what: object) -> None: ...

    doing = Doing()
    doing.go.set()
    lead, doing.combined._lead = doing.combined._lead, Interrupted()  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        doing.combined(1)
    doing.combined._lead = lead
    assert doing.combined(2) == 4
    assert doing.calls == [[2]]


def together(store: Store, keys: Sequence[str], body: bytes = BODY) -> list[Any]:
    """Put all of them: the first alone, while the others wait; then these in one transaction."""
    queue, began = Queue(), threading.Event()
    store.spaces.ensure("v")
    store.engine.writers.publisher._together._waiting = queue
    writer = store.engine.catalog.writer()
    take, caller = store.engine.catalog._writer.take, threading.get_ident()

    def taking(timeout: float | None, *, looking: bool) -> None:
        if threading.get_ident() != caller:
            began.set()
        take(timeout, looking=looking)

    store.engine.catalog._writer.take = taking  # type: ignore[method-assign]
    writer.__enter__()
    try:
        return run([lambda key=key: store.put("v", key, body) for key in keys], lambda: writer.__exit__(None, None, None), queue, began)  # type: ignore[misc]
    finally:
        store.engine.catalog._writer.take = take  # type: ignore[method-assign]


def test_small_files_of_several_threads_are_one_transaction(tmp_path: Path) -> None:
    steps: Counter[str] = Counter()
    with opened(tmp_path / "root", 8 * MiB) as store:
        store.put("v", "before", BODY)
        host.on_step(lambda call, subject: steps.update([call]))
        try:
            found = together(store, "abcdefgh")
        finally:
            host.on_step(None)
        assert [entry.key for entry in found] == list("abcdefgh")
        assert steps["committed"] == 2
        assert all(bytes_of(store, key) == BODY for key in "abcdefgh")
        assert store.check(deep=True) == []


def test_where_not_all_fit_each_makes_room(tmp_path: Path) -> None:
    with opened(tmp_path / "root", MiB) as store:
        for n in range(7):
            store.put("v", f"k{n}", BODY)
        found = together(store, "abcdefgh")
        assert [entry.key for entry in found] == list("abcdefgh")
        assert store.check(deep=True) == []
    assert_settled(tmp_path / "root", MiB)


def test_the_same_key_twice(tmp_path: Path) -> None:
    with opened(tmp_path / "root", 8 * MiB) as store:
        together(store, ["a", "b", "b", "b", "c"])
        assert [entry.key for entry in store.entries("v")].count("b") == 1
        assert all(bytes_of(store, key) == BODY for key in "abc")
        assert store.check(deep=True) == []
    assert_settled(tmp_path / "root", 8 * MiB)


def test_a_busy_writer_is_waited_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from forebay._engine.catalog import writer

    with opened(tmp_path / "root", 8 * MiB) as store:
        store.put("v", "before", BODY)
        monkeypatch.setattr(writer, "LONGEST_WAIT", 0.3)
        other = writer.WriterLock(store.root, store.engine.words)
        queue = store.engine.writers.publisher._together._waiting = Queue()
        other.take(1)
        found: list[BaseException] = []

        def one(key: str) -> None:
            with pytest.raises(errors.CacheFault, match="busy") as error:
                store.put("v", key, BODY)
            found.append(error.value)

        threads = [threading.Thread(target=one, args=(key,)) for key in "abcdefgh"]
        for thread in threads:
            thread.start()
        queue.wait_for(len(threads))
        for thread in threads:
            thread.join()
        other.release()
        other.close()
        assert len(found) == len(threads)
        assert len({id(error) for error in found}) < len(threads)
        store.put("v", "after", BODY)


def test_a_child_that_was_forked_while_others_waited(tmp_path: Path) -> None:
    with opened(tmp_path / "root", 8 * MiB) as store:
        lead = store.engine.writers.publisher._together._lead
        with lead:
            child = fork(lambda: store.put("v", "child", BODY).key)
            assert child.result() == "child"


@pytest.mark.rotates
def test_killed_at_every_step_of_a_shared_transaction(quick_path: Path) -> None:
    def after(store: Store) -> None:
        assert all(bytes_of(store, key) in (None, BODY) for key in "abcd")

    Scene(quick_path / "root", 2 * MiB).play(lambda store: None, lambda store: together(store, "abcd"), after, least=14)
