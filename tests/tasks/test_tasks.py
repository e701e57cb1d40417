"""`Tasks` as a store: what is written is read, what cannot be stored is told, and nothing but pickle ever unpickles."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import pickle
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import forebay
from forebay import Cache, errors
from forebay.tasks import Tasks
from tests.harness import KiB, MiB
from tests.processes import Gate, fork, in_child
from tests.remote_directories import checksum_of


@pytest.fixture
def cache(quick_path: Path) -> Iterator[Cache]:
    with Cache(quick_path / "root", budget="64MiB", min_free=0) as cache:
        yield cache
        assert cache.check(deep=True) == []


@pytest.fixture
def tasks(cache: Cache) -> Tasks:
    return cache.tasks("flow")


Told = Callable[[], list[str]]


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Told:
    caplog.set_level(logging.WARNING, "forebay")
    return lambda: [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


class Result:
    """Of a module that others can import too."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Result) and self.value == other.value

    __hash__ = None  # type: ignore[assignment]


# -- write and read ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [None, b"", {"a": [1, (2,)]}, Result(3), os.urandom(3 * MiB)], ids=lambda value: type(value).__name__)
def test_what_is_written_is_read(tasks: Tasks, value: Any) -> None:
    assert tasks.read("t") == (False, None)
    assert tasks.write("t", value)
    assert tasks.read("t") == (True, value)
    assert in_child(lambda: tasks.read("t")) == (True, value)
    assert tasks.has("t")
    assert "t" in tasks
    assert 3 not in tasks
    assert (tasks.keys(), len(tasks)) == (["t"], 1)


@pytest.mark.parametrize("size", [10, 10_000, 300_000], ids=["row", "small file", "file"])
def test_arrays_are_read_only_views_of_the_mapping(tasks: Tasks, size: int) -> None:
    array = np.arange(size, dtype="f8").reshape(2, -1)
    assert tasks.write("t", {"a": array, "b": array.T})
    found = tasks.read("t")[1]
    np.testing.assert_array_equal(found["a"], array)
    np.testing.assert_array_equal(found["b"], array.T)
    assert not found["a"].flags.writeable
    assert not found["a"].flags.owndata
    if size > 10:
        assert found["a"].ctypes.data % 64 == 0
    assert tasks.evict("t")
    np.testing.assert_array_equal(found["a"], array)  # good after an eviction


@pytest.mark.parametrize("size", [100, 1_000_000])
def test_tensors_are_written_to_by_their_reader_alone(tasks: Tasks, size: int, torch: Any) -> None:
    tasks.write("t", torch.ones(size))
    first, second = tasks.read("t")[1], tasks.read("t")[1]
    first.zero_()
    assert second.sum() == size
    assert tasks.read("t")[1].sum() == size
    tasks.evict("t")
    assert (first + second).sum() == size


def test_a_value_in_place_of_another(tasks: Tasks) -> None:
    large = os.urandom(MiB)
    for value in ("small", large, "again", large[::-1]):
        assert tasks.write("t", value)
        assert tasks.read("t") == (True, value)
        assert in_child(lambda: tasks.read("t")[1]) == value
        assert len(tasks) == 1
    assert MiB < tasks.size_bytes() < MiB + 100


def test_what_another_process_writes_is_seen_at_once(tasks: Tasks) -> None:
    tasks.write("t", 1)
    assert tasks.read("t") == (True, 1)
    in_child(lambda: tasks.write("t", 2))
    assert tasks.read("t") == (True, 2)
    in_child(lambda: tasks.evict("t"))
    assert tasks.read("t") == (False, None)


@pytest.mark.parametrize("size", [10, 300_000], ids=["row", "file"])
@pytest.mark.parametrize("copy", [False, True])
def test_the_first_read_of_a_process_is_a_hit(tasks: Tasks, size: int, copy: bool) -> None:
    tasks.write("t", np.arange(size))

    def young() -> None:
        found = tasks.read("t", copy=copy)[1]
        np.testing.assert_array_equal(found, np.arange(size))
        assert found.flags.writeable is copy
        assert (tasks.stats().hits, tasks.stats().misses) == (1, 0)
        if copy:
            found[:] = 0
        np.testing.assert_array_equal(tasks.read("t")[1], np.arange(size))

    in_child(young)


def test_the_first_read_of_a_process_takes_no_value_of_other_arguments_or_codecs(cache: Cache) -> None:
    tasks, plain = cache.tasks("flow"), cache.tasks("flow", codec="json")
    named = tasks.cached(tag="k")(lambda argument: argument)
    assert named("one") == "one"
    assert plain.write("t", "text")
    assert in_child(lambda: (tasks.read("t"), plain.read("t"))) == ((False, None), (True, "text"))
    assert in_child(lambda: (named("one"), tasks.stats().hits)) == ("one", 1)
    assert in_child(lambda: (named("two"), tasks.stats().hits)) == ("two", 0)
    assert tasks.write(named.tag_of("one"), "by hand")
    assert in_child(lambda: named("one")) == "one"


@pytest.mark.parametrize("tag", ["m.f:x", "ä" * 300, "a/b?c#d", "", "line\nline", "\0"])
def test_tags_are_any_text(tasks: Tasks, tag: str) -> None:
    assert tasks.write(tag, tag)
    assert tasks.read(tag) == (True, tag)
    assert tasks.keys() == [tag]
    assert tasks.evict(tag)


@pytest.mark.parametrize("tag", [None, b"t", "\ud800"])
def test_what_is_no_tag_is_the_callers_error(tasks: Tasks, tag: Any) -> None:
    for call in (tasks.read, tasks.has, tasks.evict, lambda tag: tasks.write(tag, 1)):
        with pytest.raises(errors.ConfigError, match="a tag is a str"):
            call(tag)


def test_a_tag_that_has_a_key_leads_to_it(tasks: Tasks) -> None:
    class Tag(str):
        key = "m.f:t"

    tasks.write(Tag("t"), 1)
    assert tasks.keys() == ["m.f:t"]
    assert tasks.read(Tag("t")) == tasks.read("m.f:t") == (True, 1)
    assert not tasks.has("t")


def test_evict_and_flush(tasks: Tasks) -> None:
    for n in range(5):
        tasks.write(f"t{n}", os.urandom(n * 100_000), pin=n == 3)
    assert tasks.evict("t1")
    assert not tasks.evict("t1")
    assert tasks.flush() == 3
    assert tasks.keys() == ["t3"]
    assert tasks.flush() == 0
    assert tasks.evict("t3")  # by its name a pinned one goes too
    assert (tasks.keys(), tasks.size_bytes(), len(tasks)) == ([], 0, 0)


def test_spaces_are_apart(cache: Cache, tasks: Tasks) -> None:
    other = cache.tasks("other")
    tasks.write("t", 1)
    assert other.read("t") == (False, None)
    other.write("t", 2)
    assert tasks.flush() == 1
    assert other.read("t") == (True, 2)


def test_names_that_are_taken_or_cannot_be(cache: Cache) -> None:
    for name in ("", "a:b", "\ud800", "urls", "listings", "directories", "samples", "values"):
        with pytest.raises(errors.ConfigError):
            cache.tasks(name)


@pytest.mark.parametrize("made", [{"budget": "much"}, {"budget": -1}, {"codec": "jpeg"}, {"codec": 3}])
def test_what_makes_no_sense_makes_no_space(cache: Cache, made: dict[str, Any]) -> None:
    with pytest.raises(errors.ConfigError):
        cache.tasks("flow", **made)
    assert "flow" not in cache.stats().spaces


# -- order and budget --------------------------------------------------------------------------------------------------


def test_the_least_recently_used_goes_first_also_after_a_restart(tmp_path: Path) -> None:
    def opened() -> Cache:
        return Cache(tmp_path / "root", budget="64MiB", min_free=0)

    with opened() as cache:
        tasks = cache.tasks("flow", budget=4000)
        for n in range(4):
            tasks.write(f"t{n}", bytes(900))
        tasks.read("t0")
        in_child(lambda: tasks.read("t2"))
        tasks.has("t1")  # no use
        assert tasks.keys() == ["t1", "t3", "t0", "t2"]
    with opened() as cache:
        tasks = cache.tasks("flow")
        assert tasks.budget == 4000
        tasks.write("t4", bytes(900))
        assert tasks.keys() == ["t3", "t0", "t2", "t4"]
        tasks.write("t0", bytes(1800))
        assert tasks.keys() == ["t2", "t4", "t0"]
        assert tasks.size_bytes() <= 4000


def test_small_values_have_no_file_each(cache: Cache, tasks: Tasks) -> None:
    for n in range(200):
        tasks.write(f"t{n}", bytes(10 * KiB))
    assert list((cache.path / "blobs").glob("*/*")) == []


def test_a_value_larger_than_the_budget(cache: Cache, told: Told) -> None:
    tasks = cache.tasks("flow", budget=100_000)
    tasks.write("a", bytes(40_000))
    tasks.write("b", bytes(40_000))
    for _ in range(3):
        assert not tasks.write("c", bytes(200_000))
        assert not tasks.write("a", bytes(200_000))
    assert tasks.keys() == ["a", "b"]  # nothing went for it
    assert tasks.read("a") == (True, bytes(40_000))
    [message] = told()  # the reason, once
    assert "flow:c" in message
    assert "200,0" in message  # the item's size
    assert "100,000" in message  # and the limit
    assert tasks.stats().store_failures == 6


def test_a_lower_budget_is_applied_at_once_and_for_all(cache: Cache) -> None:
    tasks = cache.tasks("flow", budget="1MB")
    for n in range(9):
        tasks.write(f"t{n}", os.urandom(100_000), pin=n == 0)
    in_child(lambda: cache.tasks("flow", budget="350kB") and None)
    assert tasks.keys() == ["t0", "t7", "t8"]
    assert tasks.budget == 350_000


def test_what_is_pinned_stays(cache: Cache, told: Told) -> None:
    tasks = cache.tasks("flow", budget=4000)
    tasks.write("p", bytes(900), pin=True)
    for n in range(20):
        tasks.write(f"t{n}", bytes(900))
    assert tasks.read("p") == (True, bytes(900))
    tasks.write("p", bytes(1500))  # a pin follows the name
    for n in range(20):
        tasks.write(f"t{n}", bytes(900))
    assert tasks.has("p")
    tasks.write("q", bytes(2000), pin=True)
    assert told() == []
    assert not tasks.write("r", bytes(900))
    assert [message for message in told() if "pinned" in message]


def test_writers_take_turns_where_the_budget_holds_few(cache: Cache) -> None:
    cache.tasks("flow", budget=4 * MiB)

    def write(seed: int) -> int:
        tasks = cache.tasks("flow")
        return sum(tasks.write(f"{seed}-{n % 4}", bytes(MiB - 2000)) for n in range(12))

    assert [child.result() for child in [fork(functools.partial(write, seed)) for seed in range(6)]] == [12] * 6
    assert cache.tasks("flow").size_bytes() <= 4 * MiB


def test_a_budget_of_nothing_keeps_nothing(cache: Cache) -> None:
    tasks = cache.tasks("flow", budget=0)
    assert not tasks.write("t", 1)
    assert tasks.keys() == []


# -- what cannot be stored ---------------------------------------------------------------------------------------------


class Stubborn:
    def __reduce__(self) -> Any:
        raise ValueError("not me")


@pytest.mark.parametrize("value", [threading.Lock(), (n for n in range(3)), Stubborn()], ids=["lock", "generator", "stubborn"])
def test_what_cannot_be_encoded_is_told_once_and_the_old_value_stays(tasks: Tasks, told: Told, value: Any) -> None:
    tasks.write("t", "old")
    for _ in range(3):
        assert not tasks.write("t", value)
    assert tasks.read("t") == (True, "old")
    assert len(told()) == 1
    assert "flow:t" in told()[0]
    assert tasks.stats().store_failures == 3


def test_what_pickle_cannot_cloudpickle_does(tasks: Tasks) -> None:
    array = np.arange(100_000)

    class Local:
        def __init__(self, array: Any) -> None:
            self.array = array

    assert tasks.write("t", [lambda: array.sum(), Local(array), array])
    function, local, back = tasks.read("t")[1]
    assert function() == array.sum()
    assert (local.array == array).all()
    assert not back.flags.owndata


def test_an_open_file_is_not_a_value(tasks: Tasks, told: Told) -> None:
    with open(__file__) as file:
        assert not tasks.write("t", file)
    assert "TextIOWrapper" in told()[0]


# -- damage and foreign values -----------------------------------------------------------------------------------------


def overwrite_in_the_catalog(root: Path, key: str, data: bytes, *, honest: bool) -> None:
    """What somebody does who can write to the root: another payload, with its own checksum or not, and no copy of the right one."""
    import sqlite3

    con = sqlite3.connect(root / "catalog.sqlite")
    with con:
        (id,) = con.execute("SELECT id FROM entries WHERE key = ?", (key,)).fetchone()
        con.execute("UPDATE payloads SET data = ? WHERE id = ?", (data, id))
        if honest:
            con.execute("UPDATE entries SET size = ?, checksum = ? WHERE id = ?", (len(data), checksum_of(data), id))
            con.execute("UPDATE spaces SET bytes = (SELECT sum(size) FROM entries WHERE space = spaces.id) WHERE bytes > 0")
    con.close()
    (root / "shared" / "cells").unlink(missing_ok=True)


@pytest.mark.parametrize("honest", [False, True])
def test_a_damaged_row_is_a_miss_and_cleared_away(tmp_path: Path, told: Told, honest: bool) -> None:
    with Cache(tmp_path / "root", min_free=0, budget="64MiB") as cache:
        cache.tasks("flow").write("t", [1, 2, 3])
    overwrite_in_the_catalog(tmp_path / "root", "t", b"fbp1 and nonsense", honest=honest)
    with Cache(tmp_path / "root") as cache:
        tasks = cache.tasks("flow")
        assert tasks.read("t") == (False, None)
        assert not tasks.has("t")
        assert (tasks.stats().hits, tasks.stats().misses, cache.stats().damaged) == (0, 1, 1)
        assert tasks.stats().damaged == honest  # the other one never came so far
        assert tasks.write("t", 4)
        assert tasks.read("t") == (True, 4)
        assert cache.check(deep=True) == []


@pytest.mark.parametrize("where", [3, 1000, -1], ids=["front", "pickle", "cut"])
@pytest.mark.parametrize("size", [20_000, 4_000_000])
def test_a_damaged_file_is_a_miss_and_cleared_away(tmp_path: Path, where: int, size: int) -> None:
    value = ["x" * size]
    with Cache(tmp_path / "root", min_free=0, budget="64MiB") as cache:
        cache.tasks("flow").write("t", value)
        [path] = (cache.path / "blobs").glob("*/*")
    path.chmod(0o600)
    data = bytearray(path.read_bytes())
    if where >= 0:
        data[where if where < 1000 or size < MiB else len(data) - 3] ^= 0xFF  # a large one is only looked at where it does not decode
    else:
        del data[-1]
    path.write_bytes(data)
    with Cache(tmp_path / "root") as cache:
        tasks = cache.tasks("flow")
        assert tasks.read("t") == (False, None)
        assert not tasks.has("t")
        assert cache.stats().damaged == 1
        assert tasks.write("t", value)
        assert tasks.read("t") == (True, value)


def test_a_class_that_is_not_there_is_a_miss_and_stays(tmp_path: Path, told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "theirs.py").write_text("class Thing:\n    n = 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    with Cache(tmp_path / "root", min_free=0, budget="64MiB") as cache:
        tasks = cache.tasks("flow")
        import theirs  # type: ignore[import-not-found]

        tasks.write("t", theirs.Thing())
        monkeypatch.delitem(sys.modules, "theirs")
        monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry != str(tmp_path)])
        for _ in range(2):
            assert tasks.read("t") == (False, None)
        assert len(told()) == 1
        assert "theirs" in told()[0]
        assert tasks.has("t")
        monkeypatch.syspath_prepend(tmp_path)
        assert tasks.read("t")[1].n == 3
        assert tasks.stats().damaged == 0


def test_what_another_codec_stored_is_a_miss_and_stays(cache: Cache, told: Told) -> None:
    cache.tasks("flow", codec="json").write("t", [1])
    tasks = cache.tasks("flow")
    assert tasks.read("t") == (False, None)
    assert "json" in told()[0]
    assert cache.tasks("flow", codec="json").read("t") == (True, [1])
    assert tasks.write("t", (2,))
    assert cache.tasks("flow", codec="json").read("t") == (False, None)


def test_bytes_that_no_tasks_wrote_are_a_miss(cache: Cache) -> None:
    cache.space("flow").put("t", b"bytes")
    assert cache.tasks("flow", codec="raw").read("t") == (False, None)


class Trap:
    """Unpickled, it leaves a mark."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("codec", ["raw", "numpy", "arrow", "json"])
def test_s32_only_pickle_unpickles(tmp_path: Path, codec: str) -> None:
    mark, root = tmp_path / "mark", tmp_path / "root"
    good = {"raw": b"bytes", "numpy": np.arange(3), "arrow": __import__("pyarrow").table({"a": [1]}), "json": [1]}[codec]
    with Cache(root, min_free=0, budget="64MiB") as cache:
        cache.tasks("flow", codec=codec).write("t", good)
        cache.tasks("flow").write("p", 1)
    evil = b"".join(forebay.codecs.codec("pickle").encode(Trap(mark)))  # type: ignore[attr-defined]
    overwrite_in_the_catalog(root, "t", evil, honest=True)
    overwrite_in_the_catalog(root, "p", evil, honest=True)
    with Cache(root) as cache:
        tasks = cache.tasks("flow", codec=codec)
        with contextlib.suppress(errors.ConfigError):
            tasks.read("t")
        tasks.read("p")
        assert cache.check(deep=True) == []
        [tasks.keys(), tasks.stats(), cache.entries(), cache.stats(), tasks.has("p"), tasks.size_bytes()]
        assert not mark.exists()
        cache.tasks("flow").read("p")
        assert mark.exists()  # it is one


@pytest.mark.parametrize(
    ("codec", "good", "bad"),
    [
        ("raw", b"bytes", "text"),
        ("numpy", np.arange(6).reshape(2, 3), np.array([object()])),
        ("json", {"a": [1, 2.5, None, True, "ä\ud800"]}, {"a": (1,)}),
        ("json", [], {1: 2}),
        ("json", "x", np.float64(3)),
    ],
)
def test_codecs_give_back_what_they_took_or_refuse(cache: Cache, told: Told, codec: str, good: Any, bad: Any) -> None:
    tasks = cache.tasks("flow", codec=codec)
    assert tasks.write("t", good)
    found = tasks.read("t")[1]
    assert np.array_equal(found, good) if codec == "numpy" else found == good
    with pytest.raises(errors.ConfigError, match=f"codec='{codec}'"):
        tasks.write("t", bad)
    assert told() == []
    assert tasks.has("t")  # what was there stays


@pytest.mark.parametrize("rows", [3, 300_000])
def test_tables_come_back_over_the_mapping(cache: Cache, rows: int) -> None:
    pa = pytest.importorskip("pyarrow")
    tasks = cache.tasks("flow", codec="arrow")
    table = pa.table({"n": np.arange(rows), "s": [f"{n}" for n in range(rows)]})
    for value in (table, table.slice(1, 2), table.slice(0, 0), table.to_batches()[0], pa.table({"a": []})):
        assert tasks.write("t", value)
        before = pa.total_allocated_bytes()
        found = tasks.read("t")[1]
        assert type(found) is type(value)
        assert found.equals(value)
        assert pa.total_allocated_bytes() - before < 100_000
        found.validate(full=True)
    with pytest.raises(errors.ConfigError, match=r"codec='arrow' stores a pyarrow\.Table"):
        tasks.write("t", [1])


# -- one at a time -----------------------------------------------------------------------------------------------------


def test_what_it_raises_reaches_the_threads_that_waited(cache: Cache, tasks: Tasks) -> None:
    entered, go = threading.Event(), threading.Event()
    seen: list[BaseException] = []

    @tasks.cached
    def make() -> Any:
        entered.set()
        go.wait(60)
        raise LookupError("no such thing")

    def ask() -> None:
        try:
            make()
        except LookupError as error:
            seen.append(error)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    entered.wait(60)
    _wait_until(lambda: cache.stats().waits >= 3)
    go.set()
    for thread in threads:
        thread.join()
    assert [str(error) for error in seen] == ["no such thing"] * 4


class Own(Exception):
    """Of the program's own, with more than its arguments."""

    def __init__(self, message: str, lock: bool) -> None:
        super().__init__(message, lock)
        self.lock = threading.Lock() if lock else None


@pytest.mark.parametrize(("codec", "lock", "whole"), [("pickle", False, True), ("pickle", True, False), ("json", False, False)])
def test_an_error_of_the_programs_own_reaches_another_process(cache: Cache, tmp_path: Path, codec: str, lock: bool, whole: bool) -> None:
    """As itself; who cannot be given that is told its name and its text. Nobody runs the function again."""
    tasks = cache.tasks("flow", codec=codec)
    entered, go = Gate(), Gate()

    @tasks.cached
    def make() -> Any:
        (tmp_path / f"ran{os.getpid()}").touch()
        entered.open()
        go.wait()
        raise Own("mine", lock) from KeyError("why")

    def ask() -> Any:
        try:
            return make()
        except Own as error:
            return error.args, repr(error.__cause__)
        except errors.FillFailed as error:
            return error.facts["kind"], str(error)

    first = fork(ask)
    entered.wait()
    second = fork(ask)
    _wait_until(lambda: cache.stats().waits >= 1)
    go.open()
    go.open()
    assert first.result() == (("mine", lock), "KeyError('why')")
    name, text = second.result()
    assert name == (("mine", lock) if whole else "Own")
    assert whole or "mine" in text
    assert len(list(tmp_path.glob("ran*"))) == 1
    entered.close()
    go.close()


def _wait_until(what: Callable[[], bool]) -> None:
    for _ in range(2000):
        if what():
            return
        threading.Event().wait(0.01)
    raise AssertionError("it did not come about")


def test_where_it_cannot_be_kept_those_who_waited_make_it_in_parallel(cache: Cache, tasks: Tasks) -> None:
    entered, go = threading.Event(), threading.Event()
    together = threading.Barrier(3, timeout=20)
    first: list[int] = []

    @tasks.cached(version=1)
    def make() -> Any:
        if not first:
            first.append(1)
            entered.set()
            go.wait(60)
        else:
            together.wait()  # one after the other would never meet
        return threading.Lock()

    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(make())) for _ in range(4)]
    threads[0].start()
    entered.wait(60)
    for thread in threads[1:]:
        thread.start()
    _wait_until(lambda: cache.stats().waits >= 3)
    go.set()
    for thread in threads:
        thread.join()
    assert len({id(lock) for lock in found}) == 4


def test_a_call_that_waited_for_its_timeout_runs_the_function_itself(cache: Cache) -> None:
    entered, go = threading.Event(), threading.Event()
    slow = threading.local()
    with Cache(cache.path, timeout=0.05) as impatient:

        @impatient.tasks("flow").cached(version=1)
        def make() -> str:
            if not hasattr(slow, "first"):
                return "mine"
            entered.set()
            go.wait(60)
            return "slow"

        def first() -> None:
            slow.first = True
            make()

        thread = threading.Thread(target=first)
        thread.start()
        entered.wait(60)
        assert make() == "mine"
        go.set()
        thread.join()
        assert make() == "slow"


# -- other roots, other processes --------------------------------------------------------------------------------------


def test_without_a_cache_nothing_is_kept_and_nothing_fails(tmp_path: Path, told: Told) -> None:
    with Cache(tmp_path / "root", enabled=False) as cache:
        tasks = cache.tasks("flow", budget="1MB")
        assert not tasks.write("t", 1)
        assert tasks.read("t") == (False, None)
        assert tasks.cached(lambda: 5)() == 5
        assert (tasks.keys(), tasks.has("t"), tasks.evict("t"), tasks.flush(), tasks.size_bytes(), len(tasks)) == (
            [],
            False,
            False,
            0,
            0,
            0,
        )
        assert tasks.stats().misses == 2
        assert tasks.budget is None
    assert told() == []


def test_a_root_that_may_only_be_read(tmp_path: Path) -> None:
    array = np.arange(100_000)
    with Cache(tmp_path / "root", min_free=0, budget="64MiB") as cache:
        cache.tasks("flow").write("t", array)
    with Cache(tmp_path / "root", read_only=True) as cache:
        tasks = cache.tasks("flow", budget=10)
        assert (tasks.read("t")[1] == array).all()
        assert (tasks.read("t")[1] == array).all()
        assert not tasks.write("u", 1)
        assert tasks.cached(lambda: 5)() == 5
        assert not tasks.evict("t")
        assert tasks.flush() == 0
        assert tasks.keys() == ["t"]


@pytest.mark.parametrize("size", [100, 200_000])
def test_a_root_upstream_is_looked_into_second(tmp_path: Path, size: int, torch: Any) -> None:
    with Cache(tmp_path / "above", min_free=0, budget="64MiB") as cache:
        cache.tasks("flow").write("t", torch.ones(size))
    with Cache(tmp_path / "root", upstream=tmp_path / "above", min_free=0, budget="64MiB") as cache:
        tasks = cache.tasks("flow")
        assert tasks.has("t")
        found = tasks.read("t")[1]
        found.zero_()
        assert tasks.read("t")[1].sum() == size
        tasks.write("t", "mine")
        assert tasks.read("t") == (True, "mine")
        assert tasks.stats().hits == 3


def test_pickled_to_another_process_it_is_the_same(tasks: Tasks, tmp_path: Path) -> None:
    tasks.write("t", 1)
    (tmp_path / "tasks.pkl").write_bytes(pickle.dumps(tasks))
    code = f"""
        import pickle
        tasks = pickle.load(open({str(tmp_path / "tasks.pkl")!r}, "rb"))
        print(tasks.read("t"), tasks.write("u", 2), tasks.name)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "(True, 1) True flow"
    assert tasks.read("u") == (True, 2)


@pytest.mark.parametrize("defined", [True, False])
def test_a_class_of_the_script_is_found_by_its_name_else_by_its_code(cache: Cache, tmp_path: Path, defined: bool) -> None:
    script = f"""
        import sys, forebay
        class Point:
            def __init__(self, x): self.x = x
            def twice(self): return 2 * self.x
        tasks = forebay.Cache({str(cache.path)!r}).tasks("flow")
        if "write" in sys.argv:
            tasks.write("p", [Point(3), Point])
        if "{defined}" == "False":
            del Point
        (point, kind) = tasks.read("p")[1]
        print(point.twice(), type(point) is kind, kind is globals().get("Point"))
    """
    (tmp_path / "script.py").write_text(textwrap.dedent(script))
    for arguments in (["write"], []):
        done = subprocess.run([sys.executable, str(tmp_path / "script.py"), *arguments], capture_output=True, text=True)
        assert done.stdout.strip() == f"6 True {defined}", done.stderr


def test_what_arrives_is_what_is_open_here(cache: Cache, tasks: Tasks) -> None:
    back = pickle.loads(pickle.dumps(tasks))
    other = pickle.loads(pickle.dumps(cache.tasks("flow", codec="json")))
    back.write("t", 1)
    back.read("t")
    assert (tasks.stats().hits, other.stats().hits) == (1, 0)


def test_closed_is_closed(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "root")
    tasks = cache.tasks("flow")
    tasks.write("t", 1)
    tasks.read("t")
    cache.close()
    for call in (lambda: tasks.read("t"), lambda: tasks.write("t", 1), tasks.keys, lambda: tasks.has("t"), tasks.stats, tasks.flush):
        with pytest.raises(errors.Closed):
            call()
    with pytest.raises(errors.Closed):
        cache.tasks("flow")


def test_stats_say_what_this_process_did(cache: Cache, tasks: Tasks) -> None:
    tasks.write("t", 1)
    tasks.read("t")
    tasks.read("u")
    tasks.write("l", threading.Lock())
    stats = tasks.stats()
    assert (stats.entries, stats.hits, stats.misses, stats.store_failures, stats.budget) == (1, 1, 1, 1, None)
    assert stats.bytes == tasks.size_bytes() > 0
    assert in_child(lambda: tasks.read("t") and tasks.stats().hits) == 1
    assert tasks.stats().hits == 1
    assert cache.stats().hits == 2
    with pytest.raises(AttributeError):
        stats.hits = 3  # type: ignore[misc]


# -- CHIA's -------------------------------------------------------------------------------------------------------------


def as_chia_writes(directory: Path, tag: str, value: Any, *, age: int = 0) -> Path:
    import re

    slug = re.sub(r"[^A-Za-z0-9._-]", "_", tag)[:80]
    path = directory / f"{slug}_{hashlib.sha256(tag.encode()).hexdigest()[:16]}.pkl"
    path.write_bytes(pickle.dumps((tag, value)))
    os.utime(path, (10_000 - age, 10_000 - age))
    return path


def test_a_directory_of_chia_is_taken_over(tasks: Tasks, tmp_path: Path, told: Told) -> None:
    theirs = tmp_path / "chia"
    theirs.mkdir()
    as_chia_writes(theirs, "iter-1", {"n": 1}, age=1)
    as_chia_writes(theirs, "iter/2 ä", [2], age=3)
    as_chia_writes(theirs, "x" * 300, None, age=2)
    damaged = as_chia_writes(theirs, "damaged", "x" * 1000)
    damaged.write_bytes(damaged.read_bytes()[:-20])
    as_chia_writes(theirs, "other", 1).rename(theirs / f"else_{'0' * 16}.pkl")
    (theirs / "notes.pkl").write_bytes(pickle.dumps(Trap(tmp_path / "mark")))
    (theirs / f"link_{'1' * 16}.pkl").symlink_to(theirs / "notes.pkl")
    tasks.write("iter-1", "mine")
    assert tasks.import_chia(theirs) == 2
    assert tasks.keys() == ["iter-1", "iter/2 ä", "x" * 300]
    assert tasks.read("iter-1") == (True, "mine")
    assert tasks.read("iter/2 ä") == (True, [2])
    assert tasks.read("x" * 300) == (True, None)
    assert len(told()) == 2
    assert not (tmp_path / "mark").exists()
    assert tasks.import_chia(theirs, overwrite=True) == 3
    assert tasks.read("iter-1") == (True, {"n": 1})
    assert len(list(theirs.iterdir())) == 7
    with pytest.raises(FileNotFoundError):
        tasks.import_chia(tmp_path / "nowhere")


def test_an_import_that_does_not_fit_keeps_what_was_used_last(cache: Cache, tmp_path: Path) -> None:
    for n in range(9):
        as_chia_writes(tmp_path, f"t{n}", bytes(900), age=n)
    tasks = cache.tasks("flow", budget=3000)
    tasks.import_chia(tmp_path)
    assert tasks.keys() == ["t2", "t1", "t0"]
