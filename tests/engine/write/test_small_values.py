"""Puts of small values one after the other: what one transaction knows of the next, and when it knows nothing."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from forebay import errors
from forebay._engine.catalog import entries, spaces
from forebay._engine.store import Settings, Store
from tests.harness import KiB, MiB, bytes_of, opened
from tests.processes import Line, talk_to


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with opened(tmp_path / "root", 64 * MiB) as store:
        yield store


@contextmanager
def statements(store: Store) -> Iterator[list[str]]:
    """Those that the process runs meanwhile."""
    con, seen = store.engine.parts.catalog._con, list[str]()
    assert con is not None
    con.set_trace_callback(seen.append)
    try:
        yield seen
    finally:
        con.set_trace_callback(None)


def _puts(store: Store, name: str, count: int) -> None:
    for number in range(count):
        store.put("v", f"{name}{number}", b"x" * 100)


@contextmanager
def _another_process(work: Callable[[], object]) -> Iterator[Callable[[], object]]:
    """A process that does this work each time that the function is called."""

    def run(line: Line) -> None:
        while line.hear():
            work()
            line.say()

    def ask() -> None:
        child.say(True)
        child.hear()

    with talk_to(run) as child:
        yield ask
        child.say(False)
        child.result()


def _queries(seen: list[str]) -> list[str]:
    """Those of a put itself: the copies of small values ask for the budget when it may have changed."""
    return [sql for sql in seen if sql.lstrip().startswith("SELECT") and not sql.startswith("SELECT name, value FROM meta")]


def test_a_put_after_a_put_queries_nothing(store: Store) -> None:
    _puts(store, "a", 3)
    with statements(store) as seen:
        _puts(store, "b", 10)
    assert not _queries(seen)
    assert store.check() == []


def test_several_values_query_once(store: Store) -> None:
    _puts(store, "a", 1)
    store.set_life("v", "a0", "pinned")
    with statements(store) as seen:
        store.put_many("v", [(f"b{number}", b"x") for number in range(10)])
    assert len(_queries(seen)) == 1  # of what there is room for
    assert store.check() == []


@pytest.mark.processes
@pytest.mark.parametrize(
    "change",
    [
        lambda store: store.put("v", "other", b"y" * 20_000),
        lambda store: store.put("w", "other", b"y"),
        lambda store: store.discard(store.entry("v", "a1")),
        lambda store: store.set_life("v", "a1", "pinned"),
        lambda store: store.spaces.ensure("new"),
        lambda store: store.configure(Settings(budget=32 * MiB)),
    ],
    ids=["file", "other space", "remove", "pin", "space", "limit"],
)
@pytest.mark.parametrize("elsewhere", [False, True], ids=["here", "in another process"])
def test_a_put_after_any_other_change_queries(store: Store, change: Callable[[Store], object], elsewhere: bool) -> None:
    with _another_process(lambda: change(store)) as change_there:  # forked first: a fork closes the connection
        _puts(store, "a", 3)
        if elsewhere:
            change_there()
        else:
            change(store)
    with statements(store) as seen:
        _puts(store, "b", 1)
    assert _queries(seen)
    _puts(store, "c", 3)
    assert store.check() == []
    assert {bytes_of(store, f"{name}0") for name in "abc"} == {b"x" * 100}


@pytest.mark.processes
def test_processes_that_take_turns_use_no_slot_twice(store: Store) -> None:
    names = map("there{}-".format, range(3))
    with _another_process(lambda: _puts(store, next(names), 3)) as puts_there:
        for turn in range(3):
            _puts(store, f"here{turn}-", 3)
            puts_there()
    slots = [entry.slot for entry in store.seeing.entries("v")]
    assert len(set(slots)) == len(slots) == 18
    assert store.check() == []


def test_a_key_that_has_a_value_gets_the_new_one(store: Store) -> None:
    _puts(store, "a", 3)
    for size in (100, 50, 300):
        store.put("v", "a1", b"y" * size)
        assert bytes_of(store, "a1") == b"y" * size
        _puts(store, f"b{size}-", 2)
    assert store.check() == []
    assert store.seeing.usage().spaces[0].entries == 9


def test_what_was_rolled_back_is_not_counted_on(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    _puts(store, "a", 3)

    def fail(*args: object) -> bool:
        raise errors.CacheFault("no more")

    with monkeypatch.context() as patched:
        patched.setattr(entries, "insert", fail)
        with pytest.raises(errors.CacheFault, match="no more"):
            store.put("v", "b", b"x")
    _puts(store, "c", 2)
    assert len({entry.slot for entry in store.seeing.entries("v")}) == 5
    assert store.check() == []


@pytest.mark.parametrize("is_lost", [False, True])
@pytest.mark.parametrize("size", [100, 100 * KiB], ids=["value", "file"])
def test_an_id_that_is_given_twice_replaces_nothing(store: Store, size: int, is_lost: bool) -> None:
    """As from a catalog that somebody wrote to, and with the file gone that would have been in the way."""
    for number in range(3):
        store.put("v", f"a{number}", bytes([number]) * size)
    first, *others = sorted(store.seeing.entries("v"), key=lambda entry: entry.id)
    if is_lost and first.kind == "blob":
        os.unlink(store.root.blob_name(first.id, first.suffix))
    store.engine.parts.catalog._ids[:] = first.id, first.id + 1
    try:
        store.put("v", "b", b"b" * size)
    except errors.CacheFault:
        store.put("v", "b", b"b" * size)
    assert bytes_of(store, "b") == b"b" * size
    assert [bytes_of(store, entry.key) for entry in others] == [bytes([number]) * size for number in (1, 2)]
    assert bytes_of(store, first.key) in (bytes(size), None)
    store.repair()
    assert store.check(deep=True) == []


@pytest.mark.parametrize("limit", ["quota", "max_count", "max_entries"])
def test_a_limit_is_met_exactly(tmp_path: Path, limit: str) -> None:
    with opened(tmp_path / "root", 64 * MiB, **({"max_entries": 10} if limit == "max_entries" else {})) as store:
        store.spaces.ensure("v", policy="freeze", quota=1000 if limit == "quota" else None, max_count=10 if limit == "max_count" else None)
        _puts(store, "a", 10)
        with pytest.raises(errors.NoSpace):
            store.put("v", "b", b"x")
        assert store.check() == []


def test_the_budget_holds_whatever_the_catalog_grows_by(tmp_path: Path) -> None:
    """Long keys take more pages than a value is charged for."""
    with opened(tmp_path / "root", 12 * MiB) as store:
        for number in range(1500):
            store.put("v", f"{number}".ljust(6000, "k"), b"x" * 5000)
            assert store.seeing.usage().used <= 12 * MiB
        size = (tmp_path / "root" / "catalog.sqlite").stat().st_size
        assert size <= 12 * MiB + spaces.ALLOWANCE + 64 * KiB  # what the last one let it grow by is counted with the next


def test_files_are_put_together_and_with_what_they_were_given(store: Store) -> None:
    files = [(f"f{number}", bytes([number]) * 100_000) for number in range(20)]
    large = ("large", bytes(5 * MiB))
    with statements(store) as seen:
        stored = store.put_many("v", [*files, large, ("f0", b"new" * 20_000), ("small", b"x")], validator='"v"', validated=7)
    assert len([text for text in seen if text.startswith("BEGIN")]) < 12  # 16 and 4 files by one each, the rest one by one
    assert [entry.key for entry in stored] == [name for name, _ in files] + ["large", "f0", "small"]
    for entry in stored:
        assert entry.validator == '"v"'
    assert store.validated(stored[-1]) == 7
    assert [bytes_of(store, name) for name, _ in files[1:]] == [data for _, data in files[1:]]
    assert bytes_of(store, "f0") == b"new" * 20_000
    assert store.check(deep=True) == []


def test_files_that_do_not_fit_together_are_put_one_by_one(store: Store) -> None:
    usage = store.seeing.usage()
    files = [(f"f{number}", bytes(1_000_000)) for number in range(4)]
    store.put("v", "pinned", bytes(usage.budget - 2_500_000), life="pinned")
    assert len(store.put_many("v", files)) == 4
    assert [bytes_of(store, name) is not None for name, _ in files] == [False, False, True, True]
    assert store.check(deep=True) == []
