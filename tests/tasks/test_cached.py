"""Functions whose outputs are kept: when they run, how often, and what comes of it."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import forebay
from forebay import errors
from forebay._kernel.threads import in_thread
from forebay.tasks import Tasks, values
from tests.items import until
from tests.processes import Gate, fork

HERE = __name__


@pytest.fixture
def tasks(cache: forebay.Cache) -> Tasks:
    return cache.tasks("flow")


class Journal:
    """How often something ran, in whatever process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.touch()

    def note(self, word: object = "run") -> None:
        with open(self.path, "ab", buffering=0) as file:
            file.write(f"{word}\n".encode())

    def __len__(self) -> int:
        return len(self.lines())

    def lines(self) -> list[str]:
        return self.path.read_text().splitlines()


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path / "journal")


# -- hits --------------------------------------------------------------------------------------------------------------


def test_a_function_runs_once_for_each_call(tasks: Tasks, journal: Journal) -> None:
    @tasks.cached
    def add(a: int, b: int = 2) -> int:
        """Adds."""
        journal.note((a, b))
        return a + b

    assert [add(1), add(1), add(a=1, b=2), add(2), add(1, 3)] == [3, 3, 3, 4, 4]
    assert journal.lines() == ["(1, 2)", "(2, 2)", "(1, 3)"]
    stats = tasks.stats()
    assert (stats.hits, stats.misses, stats.runs, stats.entries) == (2, 3, 3, 3)
    assert (add.__name__, add.__doc__, add.__module__) == ("add", "Adds.", HERE)
    assert str(inspect.signature(add)) == "(a: 'int', b: 'int' = 2) -> 'int'"
    assert "cached function" in repr(add)


@pytest.mark.parametrize("value", [None, False, 0, "", [], {}, float("inf"), {"a": {1, 2}}])
def test_any_output_is_kept(tasks: Tasks, journal: Journal, value: Any) -> None:
    @tasks.cached
    def give() -> Any:
        journal.note()
        return value

    assert [give(), give()] == [value, value]
    assert len(journal) == 1


def test_arrays_come_as_views(tasks: Tasks) -> None:
    @tasks.cached
    def features(n: int) -> Any:
        return np.arange(n)

    features(100_000)
    found = features(100_000)
    assert not found.flags.writeable
    assert found.sum() == sum(range(100_000))


SIZES = [10, 10_000, 300_000]
"""Of arrays that are kept as a row, as a small file, and as a file."""


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("is_async", [False, True])
def test_who_computes_gets_what_a_hit_gives(tasks: Tasks, journal: Journal, size: int, is_async: bool) -> None:
    """Else a program that changes an output in place passes in its first run, and fails in its second."""
    made: list[Any] = []

    def work() -> Any:
        journal.note()
        made.append({"a": np.arange(size), "l": [1]})
        return made[0]

    async def awork() -> Any:
        return work()

    call: Callable[[], Any] = tasks.cached(work)
    if is_async:
        cached = tasks.cached(awork)
        call = lambda: asyncio.run(cached())  # noqa: E731
    for found in (call(), call()):
        assert found is not made[0]
        assert not found["a"].flags.writeable
        np.testing.assert_array_equal(found["a"], np.arange(size))
    assert made[0]["a"].flags.writeable
    assert len(journal) == 1
    stats = tasks.stats()
    assert (stats.hits, stats.misses, stats.waits) == (1, 1, 0)


@pytest.mark.parametrize("size", SIZES)
def test_a_copy_is_the_callers_own(cache: forebay.Cache, journal: Journal, size: int) -> None:
    def work() -> Any:
        journal.note()
        return np.zeros(size)

    plain, copies = cache.tasks("flow"), cache.tasks("flow", copy=True)
    for function in (copies.cached(work), plain.cached(work, copy=True), pickle.loads(pickle.dumps(copies)).cached(work)):
        for _ in range(2):
            found = function()
            assert not found.any()
            found += 1
        function.evict()  # type: ignore[attr-defined]
    assert len(journal) == 3
    assert not copies.cached(work, copy=False)().flags.writeable
    tag = plain.cached(work).tag_of()
    for found in (copies.read(tag)[1], plain.read(tag, copy=True)[1]):
        found += 1
    for found in (plain.read(tag)[1], copies.read(tag, copy=False)[1]):
        assert not found.any()
        with pytest.raises(ValueError, match="read-only"):
            found += 1


@pytest.mark.parametrize("codec", ["raw", "numpy"])
def test_copies_by_other_codecs(cache: forebay.Cache, codec: str) -> None:
    tasks = cache.tasks("flow", codec=codec)
    work = tasks.cached(lambda: b"x" * 8 if codec == "raw" else np.zeros(8, "u1"), copy=True)
    for _ in range(2):
        memoryview(work())[0] = 7
    assert memoryview(tasks.read(work.tag_of())[1])[0] == (0 if codec == "numpy" else ord("x"))


def test_a_replayed_output_is_as_a_hit(cache: forebay.Cache) -> None:
    config = {"bypass": {"simulate": True}, "cache": {"simulate": True}}
    tasks = cache.tasks("flow", config=config)
    tasks.set_provider("simulate", lambda tag, data_path, step: np.zeros(step))

    @tasks.cached(tag="{step}")
    def simulate(step: int) -> Any:
        raise AssertionError

    assert not simulate(3).flags.writeable


def test_where_it_is_not_kept_the_output_is_as_it_was_made(cache: forebay.Cache, caplog: pytest.LogCaptureFixture) -> None:
    work = cache.tasks("flow", budget=1 << 20).cached(lambda: np.zeros(1 << 20))
    with caplog.at_level(logging.WARNING, "forebay"):
        assert work().flags.writeable
    assert len(caplog.records) == 1


def test_a_later_process_hits(cache: forebay.Cache, journal: Journal) -> None:
    def again() -> int:
        @cache.tasks("flow").cached(tag="iter-{step}")
        def work(step: int) -> int:
            journal.note()
            return step * 2

        return int(work(4))

    assert [again(), fork(again).result(), again()] == [8, 8, 8]
    assert len(journal) == 1


def test_an_exception_is_not_kept(tasks: Tasks, journal: Journal) -> None:
    @tasks.cached
    def fail(x: int) -> int:
        journal.note()
        if len(journal) < 3:
            raise LookupError(x)
        return x

    for _ in range(2):
        with pytest.raises(LookupError, match="7"):
            fail(7)
    assert fail(7) == fail(7) == 7
    assert len(journal) == 3


@pytest.mark.parametrize("tag", [None, "t-{x}"])
def test_what_an_older_version_kept_by_the_name_alone_is_not_found(tasks: Tasks, journal: Journal, tag: str | None) -> None:
    """Whatever its code was then: nobody knows."""

    def work(x: int) -> int:
        journal.note()
        return x + 1

    kept = tasks.cached(work, tag=tag)
    name, mark, rest = kept.tag_of(1).partition("#")
    code, colon, said = rest.partition(":")
    assert (mark, colon) == ("#", ":")
    assert len(code) >= 16
    assert tasks.write(f"{name}:{said}", "of another code")
    assert [kept(1), kept(1)] == [2, 2]
    assert len(journal) == 1


def test_versions_are_kept_apart(tasks: Tasks) -> None:
    def made(version: object, n: int) -> Any:
        def work(x: int) -> int:
            return x + [10, 20, 30][n]

        return tasks.cached(work, tag="x{x}", version=version)

    assert [made(None, 0)(1), made(1, 1)(1), made("1", 1)(1), made(2, 2)(1)] == [11, 21, 21, 31]
    assert len(tasks) == 3


def test_what_was_stored_under_other_arguments_is_a_miss(tasks: Tasks, journal: Journal, caplog: pytest.LogCaptureFixture) -> None:
    @tasks.cached(tag="iter-{step}")
    def train(step: int, rate: float) -> float:
        journal.note()
        return step * rate

    with caplog.at_level(logging.WARNING, "forebay.tasks"):
        assert [train(1, 0.5), train(1, 2.0), train(1, 2.0), train(1, 0.5)] == [0.5, 2.0, 2.0, 0.5]
    assert len(journal) == 3
    assert len(tasks) == 1
    assert [r.getMessage() for r in caplog.records if "different arguments" in r.getMessage()] == [caplog.records[0].getMessage()]


def test_a_tag_of_a_call_is_what_read_takes(tasks: Tasks) -> None:
    @tasks.cached(tag="iter-{step}", version=2)
    def work(step: int) -> str:
        return f"<{step}>"

    @tasks.cached
    def other(step: int) -> str:
        return f"[{step}]"

    assert tasks.read(work.tag_of(3)) == (False, None)
    work(3), other(step=3)
    assert work.tag_of(3).endswith(".work@2:iter-3")
    assert tasks.read(work.tag_of(step=3)) == (True, "<3>")
    assert tasks.read(other.tag_of(3)) == (True, "[3]")
    assert tasks.keys() == [work.tag_of(3), other.tag_of(3)]
    assert work.evict(3)
    assert not work.evict(3)
    assert not tasks.has(work.tag_of(3))
    assert other.evict(step=3)


def test_call_uncached(tasks: Tasks, journal: Journal) -> None:
    @tasks.cached
    def work() -> int:
        journal.note()
        return len(journal)

    assert [work(), work.call_uncached(), work(), work.__wrapped__()] == [1, 2, 1, 3]
    assert tasks.stats().runs == 2


def test_cache_info_and_cache_clear_are_those_of_functools(tasks: Tasks) -> None:
    def square(x: int) -> int:
        return x * x

    cached, remembered, other = tasks.cached(square), functools.lru_cache(maxsize=None)(square), tasks.cached(lambda x: x)
    other(1)
    for function in (cached, remembered):
        assert [function(x) for x in (2, 3, 2, 2)] == [4, 9, 4, 4]
    assert cached.cache_info() == remembered.cache_info() == (2, 2, None, 2)
    assert cached.cache_info()._asdict() == remembered.cache_info()._asdict()
    for function in (cached, remembered):
        function.cache_clear()
        assert function.cache_info() == (0, 0, None, 0)
    assert tasks.keys() == [other.tag_of(1)]
    assert (cached(2), cached.cache_info(), other.cache_info()) == (4, (0, 1, None, 1), (0, 1, None, 1))


def test_cache_clear_leaves_the_outputs_of_another_version(tasks: Tasks) -> None:
    first, second = (tasks.cached(lambda x: x, version=version) for version in (1, 2))
    first(1), second(1), second(2)
    second.cache_clear()
    assert (first.cache_info().currsize, second.cache_info().currsize) == (1, 0)


def test_cache_clear_removes_pinned_outputs(cache: forebay.Cache) -> None:
    pinned = cache.tasks("pinned", config={"cache": {"work": {"cache": True, "pin": True}}})

    @pinned.cached
    def work(x: int) -> int:
        return x

    work(1)
    assert pinned.flush() == 0
    work.cache_clear()
    assert (work.cache_info(), pinned.keys()) == ((0, 0, None, 0), [])


def test_methods_and_coroutines_have_cache_info(tasks: Tasks) -> None:
    class Wide(Model):
        @tasks.cached
        def area(self, x: int) -> int:
            return self.size * x

        @tasks.cached
        async def later(self, x: int) -> int:
            return self.size * x

    wide = Wide(2)
    assert [wide.area(3), wide.area(3), Wide(5).area(3)] == [6, 6, 15]
    assert wide.area.cache_info() == Wide.area.cache_info() == (1, 2, None, 2)  # of all objects, as in functools
    assert [asyncio.run(wide.later(x)) for x in (1, 1)] == [2, 2]
    assert wide.later.cache_info() == (1, 1, None, 1)
    Wide.area.cache_clear()
    assert (wide.area.cache_info(), wide.later.cache_info().currsize) == ((0, 0, None, 0), 1)


def test_functions_that_call_each_other(tasks: Tasks, journal: Journal) -> None:
    @tasks.cached
    def fib(n: int) -> int:
        journal.note(n)
        return n if n < 2 else int(fib(n - 1)) + int(fib(n - 2))

    assert fib(20) == 6765
    assert len(journal) == 21


def test_functions_of_one_name_stay_apart(tasks: Tasks) -> None:
    adders = [tasks.cached(lambda x, n=n: x + n) for n in range(3)]
    assert [add(1) for add in adders] == [1, 2, 3]

    def times(n: int) -> Any:
        @tasks.cached(tag="{x}")
        def product(x: int) -> int:
            return x * n

        return product

    assert [times(n)(5) for n in (2, 3, 2)] == [10, 15, 10]
    assert [tasks.cached(functools.partial(pow, 2))(n) for n in (3, 4)] == [8, 16]
    assert tasks.cached(functools.partial(pow, 3))(3) == 27


def test_a_call_that_does_not_fit_raises_as_it_would(tasks: Tasks) -> None:
    @tasks.cached
    def work(a: int) -> int:
        return a

    with pytest.raises(TypeError, match=r"work\(\) missing 1 required positional argument: 'a'"):
        work()
    with pytest.raises(TypeError, match="unexpected keyword argument 'b'"):
        work(1, b=2)


def test_arguments_without_content(tasks: Tasks, journal: Journal, caplog: pytest.LogCaptureFixture) -> None:
    def work(step: int, lock: Any) -> int:
        journal.note()
        return step

    by_digest, by_tag = tasks.cached(work), tasks.cached(work, tag="s{step}")
    with caplog.at_level(logging.WARNING, "forebay.tasks"):
        assert [function(3, threading.Lock()) for function in (by_digest, by_digest, by_tag, by_tag)] == [3] * 4
    assert len(journal) == 3
    assert len(caplog.records) == 2
    assert "work runs uncached: argument 'lock' (a _thread.lock)" in caplog.text
    assert tasks.cached(work, ignore="lock")(3, threading.Lock()) == 3
    assert tasks.cached(work, ignore="lock")(3, threading.Lock()) == 3
    assert len(journal) == 4


def test_s36_an_output_that_cannot_be_kept(tasks: Tasks, caplog: pytest.LogCaptureFixture) -> None:
    @tasks.cached
    def opens() -> Any:
        return open(os.devnull)

    with caplog.at_level(logging.WARNING, "forebay.tasks"):
        for _ in range(3):
            opens().close()
    assert tasks.stats().store_failures == 3
    told = [r.getMessage() for r in caplog.records]
    assert len(told) == 1
    assert "test_s36_an_output_that_cannot_be_kept.<locals>.opens" in told[0]
    assert "TextIOWrapper" in told[0]


def refuse(x: int) -> Any:
    raise RuntimeError("cannot be made")


class OneWay:
    """It pickles, and does not unpickle."""

    def __reduce__(self) -> Any:
        return refuse, (1,)


def test_an_output_that_does_not_unpickle_is_told_once(tasks: Tasks, caplog: pytest.LogCaptureFixture) -> None:
    @tasks.cached
    def one_way(x: int) -> Any:
        return OneWay()

    with caplog.at_level(logging.WARNING, "forebay"):
        assert [type(one_way(x)) for x in (1, 1, 2)] == [OneWay] * 3
    why = f"its {HERE}.OneWay cannot be recreated from what the codec 'pickle' stores: RuntimeError: cannot be made"
    told = [r.getMessage() for r in caplog.records]
    assert told == [f"the output of {one_way.__module__}.{one_way.__qualname__} is not stored: {why}"]
    assert (tasks.stats().store_failures, tasks.stats().damaged, tasks.keys()) == (3, 0, [])


def test_with_the_cache_off_everything_runs(tmp_path: Path, journal: Journal) -> None:
    with forebay.Cache(tmp_path / "root", enabled=False) as cache:

        @cache.tasks("flow").cached
        def work(x: int) -> int:
            journal.note()
            return x

        assert [work(1), work(1)] == [1, 1]
        assert len(journal) == 2


# -- what can be cached ------------------------------------------------------------------------------------------------


def test_what_cannot_be_cached_is_told_at_once(tasks: Tasks) -> None:
    def pieces() -> Iterator[int]:
        yield 1

    async def later() -> Any:
        yield 1

    class Pieces:
        def __call__(self) -> Iterator[int]:
            yield 1

    for function in (pieces, later, Pieces(), functools.partial(pieces)):
        with pytest.raises(errors.ConfigError, match=r"cannot be cached: it yields its output piece by piece"):
            tasks.cached(function)
    with pytest.raises(errors.ConfigError, match=r"'iter-\{step\}' cannot be cached: it is not a function"):
        tasks.cached("iter-{step}")  # type: ignore[arg-type]


class Model:
    runs: int = 0

    def __init__(self, size: int) -> None:
        self.size = size


def with_methods(tasks: Tasks, journal: Journal) -> Any:
    class Wide(Model):
        @tasks.cached(tag="{self.size}-{x}")
        def tagged(self, x: int) -> int:
            journal.note("tagged")
            return self.size * x

        @tasks.cached
        def hashed(self, x: int) -> int:
            """Of the size."""
            journal.note("hashed")
            return self.size * x

        @tasks.cached(ignore="self")
        def alike(self, x: int) -> int:
            journal.note("alike")
            return x

        @tasks.cached
        @classmethod
        def inner_class(cls, x: int) -> tuple[str, int]:
            journal.note("inner_class")
            return cls.__name__, x

        @classmethod
        @tasks.cached
        def outer_class(cls, x: int) -> tuple[str, int]:
            journal.note("outer_class")
            return cls.__name__, x

        @tasks.cached
        @staticmethod
        def inner_static(x: int) -> int:
            journal.note("inner_static")
            return x

        @staticmethod
        @tasks.cached
        def outer_static(x: int) -> int:
            journal.note("outer_static")
            return x

        @property
        @tasks.cached
        def doubled(self) -> int:
            journal.note("doubled")
            return 2 * self.size

    return Wide


def test_methods(tasks: Tasks, journal: Journal) -> None:
    kind = with_methods(tasks, journal)
    one, two = kind(1), kind(2)
    for _ in range(2):
        assert [one.tagged(3), two.tagged(3), kind(1).tagged(x=3), kind.tagged(two, 3)] == [3, 6, 3, 6]
        assert [one.hashed(3), two.hashed(3), kind(1).hashed(x=3), kind.hashed(two, 3)] == [3, 6, 3, 6]
        assert [one.alike(5), two.alike(5)] == [5, 5]
        assert [kind.inner_class(4), one.inner_class(4), kind.outer_class(4), one.outer_class(4)] == [("Wide", 4)] * 4
        assert [kind.inner_static(4), one.inner_static(4), kind.outer_static(4), one.outer_static(4)] == [4] * 4
        assert [one.doubled, two.doubled] == [2, 4]
    names = [
        "alike",
        "doubled",
        "doubled",
        "hashed",
        "hashed",
        "inner_class",
        "inner_static",
        "outer_class",
        "outer_static",
        "tagged",
        "tagged",
    ]
    assert sorted(journal.lines()) == names


def test_what_a_method_shows(tasks: Tasks, journal: Journal) -> None:
    kind = with_methods(tasks, journal)
    one = kind(1)
    one.tagged(3)
    assert one.tagged.tag_of(3) == kind.tagged.tag_of(one, 3)
    assert tasks.read(one.tagged.tag_of(3)) == (True, 3)
    assert one.tagged.call_uncached(5) == 5
    assert one.tagged.evict(3)
    assert not tasks.has(one.tagged.tag_of(3))
    assert kind.inner_class.tag_of(1) != type("Other", (kind,), {}).inner_class.tag_of(1)
    assert (one.hashed.__name__, one.hashed.__doc__, one.hashed.__self__) == ("hashed", "Of the size.", one)
    assert one.hashed == one.hashed != kind(1).hashed
    assert len({one.hashed, one.hashed}) == 1
    assert inspect.isfunction(kind.hashed)
    assert kind.hashed is kind.hashed
    assert "cached method" in repr(one.hashed)
    assert [str(inspect.signature(m)) for m in (one.hashed, kind.hashed)] == ["(x: 'int') -> 'int'", "(self, x: 'int') -> 'int'"]


def test_a_method_of_one_object(tasks: Tasks) -> None:
    class Plain(Model):
        def fit(self, x: int) -> int:
            return self.size + x

    one = Plain(1)
    fit = tasks.cached(one.fit)
    assert fit(2) == 3
    one.size = 5
    assert fit(2) == 7
    assert tasks.cached(Plain(1).fit)(2) == 3
    assert tasks.stats().runs == 2


def test_what_is_no_method_as_it_is(tasks: Tasks) -> None:
    class Tools:
        size = tasks.cached(len)
        power = tasks.cached(functools.partial(pow, 2))

    assert (Tools().size([1, 2]), Tools.size([1]), Tools().power(3)) == (2, 1, 8)


def test_classes_and_objects_that_can_be_called(tasks: Tasks) -> None:
    class Adder(Model):
        def __call__(self, x: int) -> int:
            return self.size + x

    assert tasks.cached(Adder(1))(2) == 3
    assert tasks.cached(Adder(2))(2) == 4
    assert tasks.cached(Adder(1)).tag_of(2) == tasks.cached(Adder(1)).tag_of(2)
    assert tasks.cached(str)(5) == tasks.cached(str)(5) == "5"


# -- one at a time -----------------------------------------------------------------------------------------------------


def test_s06_threads_wait_for_one_run(tasks: Tasks, journal: Journal) -> None:
    begun, may_end = threading.Event(), threading.Event()

    @tasks.cached
    def work(x: int) -> int:
        journal.note()
        begun.set()
        assert may_end.wait(60)
        return x * 2

    with ThreadPoolExecutor(8) as pool:
        found = [pool.submit(work, 21) for _ in range(8)]
        assert begun.wait(60)
        may_end.set()
        assert {future.result(60) for future in found} == {42}
    assert len(journal) == 1


def test_s06_processes_wait_for_one_run(cache: forebay.Cache, tasks: Tasks, journal: Journal) -> None:
    gate = Gate()

    @tasks.cached(tag="x{x}")
    def work(x: int) -> int:
        journal.note(os.getpid())
        until(lambda: cache.stats().waits >= 7, "the wait of the others")
        return x * 2

    def one() -> int:
        gate.wait()
        return int(work(21))

    children = [fork(one) for _ in range(8)]
    for _ in children:
        gate.open()
    assert {child.result() for child in children} == {42}
    assert len(journal) == 1


def test_what_is_raised_reaches_all_who_wait(cache: forebay.Cache, tasks: Tasks, journal: Journal) -> None:
    gate, begun = Gate(), Gate()

    @tasks.cached
    def work(x: int) -> int:
        journal.note()
        begun.open()
        gate.wait()
        raise ValueError("not today")

    def one() -> str:
        try:
            work(1)
        except ValueError as error:
            return str(error)
        return "nothing"

    first = fork(one)
    begun.wait()
    others = [fork(one) for _ in range(4)]
    while cache.stats().waits < 4:
        os.sched_yield()
    gate.open()
    assert {child.result() for child in (first, *others)} == {"not today"}
    assert len(journal) == 1


def test_what_another_call_of_the_same_tag_raises_is_its_own(cache: forebay.Cache, tasks: Tasks) -> None:
    begun, may_end = Gate(), Gate()

    @tasks.cached(tag="iter-{step}")
    def train(step: int, rate: float) -> float:
        if rate < 0:
            begun.open()
            may_end.wait()
            raise ValueError(rate)
        return step * rate

    def one() -> str:
        try:
            train(1, -1.0)
        except ValueError as error:
            return str(error)
        return "nothing"

    first = fork(one)
    begun.wait()
    assert train(1, 2.0) == 2.0  # without a wait
    waiting = fork(one)
    while cache.stats().waits < 1:
        os.sched_yield()
    may_end.open()
    assert (first.result(), waiting.result()) == ("-1.0", "-1.0")
    assert train(1, 2.0) == 2.0


def test_a_killed_runner_is_followed(cache: forebay.Cache, tasks: Tasks, journal: Journal) -> None:
    begun = Gate()

    @tasks.cached
    def work(x: int) -> int:
        journal.note()
        if len(journal) == 1:
            begun.open()
            signal.pause()
        return x

    first = fork(lambda: work(1))
    begun.wait()
    second = fork(lambda: work(1))
    while cache.stats().waits < 1:
        os.sched_yield()
    first.kill()
    assert second.result() == 1
    assert len(journal) == 2


# -- coroutines --------------------------------------------------------------------------------------------------------


def test_coroutine_functions(tasks: Tasks, journal: Journal) -> None:
    @tasks.cached(tag="x{x}")
    async def work(x: int) -> int:
        """Waits."""
        journal.note()
        await asyncio.sleep(0)
        return x * 2

    async def both() -> list[int]:
        return list(await asyncio.gather(work(1), work(1), work(2), work(x=1)))

    assert asyncio.run(both()) == [2, 2, 4, 2]
    assert asyncio.run(work(1)) == 2
    assert asyncio.run(work.call_uncached(1)) == 2
    assert len(journal) == 3
    assert inspect.iscoroutinefunction(work)
    assert tasks.read(work.tag_of(2)) == (True, 4)
    assert work.evict(2)
    assert work.__doc__ == "Waits."


def test_the_loop_goes_on_while_another_process_runs(cache: forebay.Cache, tasks: Tasks, journal: Journal) -> None:
    begun, may_end = Gate(), Gate()

    def work(x: int) -> int:
        journal.note()
        begun.open()
        may_end.wait()
        return x * 2

    async def work_async(x: int) -> int:
        return work(x)

    function = tasks.cached(work_async)
    child = fork(lambda: asyncio.run(function(4)))
    begun.wait()

    async def main() -> int:
        waiting = asyncio.create_task(function(4))
        while cache.stats().waits < 1:
            await asyncio.sleep(0)
        may_end.open()
        return int(await waiting)

    assert asyncio.run(main()) == child.result() == 8
    assert len(journal) == 1


@pytest.mark.parametrize("size", [100, 2_000_000])
def test_where_no_thread_can_be_started_the_event_loop_waits_for_the_output(
    tasks: Tasks, journal: Journal, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    @tasks.cached
    async def work(x: int) -> bytes:
        journal.note()
        return b"x" * size

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def both() -> list[bytes]:
        return await asyncio.gather(work(1), work(1))

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert asyncio.run(both()) == [b"x" * size] * 2
    assert asyncio.run(work(1)) == b"x" * size
    assert len(journal) == 1


def test_outputs_of_many_coroutines_are_stored_by_few_threads(tasks: Tasks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process may have the writer lock, so that all of them wait for it."""
    kept, most = values.Values.kept, list[int]()

    def keep(self: values.Values, *arguments: Any, **options: Any) -> Any:
        most.append(sum(thread.name == "forebay-call" for thread in threading.enumerate()))
        return kept(self, *arguments, **options)

    @tasks.cached
    async def work(x: int) -> int:
        return x

    async def all_of_them() -> list[int]:
        return await asyncio.gather(*(work(x) for x in range(200)))

    monkeypatch.setattr(values.Values, "kept", keep)
    assert asyncio.run(all_of_them()) == list(range(200))
    assert 1 <= max(most) <= 2 * values.AT_ONCE  # a thread that is done may not have ended yet


@pytest.mark.parametrize("cached", [True, False])
def test_a_function_that_raises_what_no_future_takes(cache: forebay.Cache, cached: bool) -> None:
    def stop() -> bytes:
        raise StopIteration

    async def call() -> object:
        return await (cache.aget_or_put("k", stop) if cached else in_thread(stop))

    with pytest.raises(RuntimeError, match="StopIteration"):
        asyncio.run(call())
    assert cache.get_or_put("k", lambda: b"v", timeout=5) == b"v"


def test_what_a_coroutine_raises(tasks: Tasks, journal: Journal) -> None:
    @tasks.cached
    async def fail(x: int) -> int:
        journal.note()
        await asyncio.sleep(0)
        raise LookupError(x)

    async def both() -> list[Any]:
        return await asyncio.gather(fail(1), fail(1), return_exceptions=True)

    assert [type(error) for error in asyncio.run(both())] == [LookupError] * 2


def test_asynchronous_methods(tasks: Tasks, journal: Journal) -> None:
    class Client(Model):
        @tasks.cached
        async def ask(self, x: int) -> int:
            journal.note()
            await asyncio.sleep(0)
            return self.size * x

    assert [asyncio.run(Client(2).ask(3)) for _ in range(2)] == [6, 6]
    assert asyncio.run(Client.ask(Client(2), 3)) == 6
    assert len(journal) == 1
    assert inspect.iscoroutinefunction(Client.ask)
    assert inspect.iscoroutinefunction(Client(1).ask)


def test_a_cancelled_run_is_followed(tasks: Tasks, journal: Journal) -> None:
    begun: list[asyncio.Event] = []

    @tasks.cached
    async def work(x: int) -> int:
        journal.note()
        if len(journal) == 1:
            begun[0].set()
            await asyncio.Event().wait()
        return x

    async def main() -> int:
        begun.append(asyncio.Event())
        first = asyncio.create_task(work(1))
        await begun[0].wait()
        second = asyncio.create_task(work(1))
        await asyncio.sleep(0)
        first.cancel()
        return int(await second)

    assert asyncio.run(main()) == 1
    assert len(journal) == 2


def test_coroutines_that_call_others(tasks: Tasks, journal: Journal) -> None:
    @tasks.cached
    def plain(x: int) -> int:
        journal.note()
        return x + 1

    @tasks.cached
    async def inner(x: int) -> int:
        return int(plain(x)) * 2

    @tasks.cached
    async def outer(x: int) -> int:
        return sum(await asyncio.gather(*(inner(n % 3) for n in range(x))))

    async def main() -> list[int]:
        return list(await asyncio.gather(*(outer(n) for n in (5, 6, 5, 7))))

    assert asyncio.run(main()) == [18, 24, 18, 26] == [asyncio.run(outer(n)) for n in (5, 6, 5, 7)]
    assert len(journal) == 3


# -- whatever happens --------------------------------------------------------------------------------------------------


def calls_at_random(tasks: Tasks, seed: int, seconds: float) -> int:
    """Calls of functions that share tags and call each other, each compared with what it must give; how many there were."""
    chance = random.Random(seed)

    @tasks.cached(tag="{n}")
    def shared(n: int, size: int) -> bytes:
        if n == 3:
            raise LookupError(n)
        return bytes([n]) * size

    @tasks.cached
    def nested(n: int, size: int) -> bytes:
        return bytes(shared(n, size)) + bytes(shared((n + 1) % 3, size))

    @tasks.cached(tag="all of them")
    async def later(n: int, size: int) -> bytes:
        await asyncio.sleep(0)
        return bytes(nested(n, size))

    count, end = 0, time.monotonic() + seconds
    while time.monotonic() < end:
        n, size = chance.randrange(3), chance.choice((1, 500, 30_000))
        wanted = bytes([n]) * size
        assert shared(n, size) == wanted
        both = wanted + bytes([(n + 1) % 3]) * size
        assert nested(n, size=size) == both
        assert asyncio.run(later(n, size)) == both
        with pytest.raises(LookupError):
            shared(3, size)
        if chance.random() < 0.1:
            chance.choice((shared, nested, later)).evict(n, size)
        if chance.random() < 0.02:
            tasks.flush()
        count += 1
    return count


@pytest.mark.rotates
def test_whatever_happens_the_output_is_right(cache: forebay.Cache) -> None:
    tasks = cache.tasks("flow", budget=200_000)
    children = [fork(functools.partial(calls_at_random, tasks, seed, 3.0)) for seed in range(4)]
    assert all(child.result() > 0 for child in children)
    assert tasks.size_bytes() <= 200_000


# -- configuration and replay ------------------------------------------------------------------------------------------


def counting(tasks: Tasks, journal: Journal, **options: Any) -> Any:
    @tasks.cached(**options)
    def simulate(step: int, scale: int = 1) -> int:
        journal.note()
        return step * scale

    return simulate


@pytest.mark.parametrize(
    ("section", "runs"),
    [
        ({}, 4),
        ({"simulate": True}, 2),
        ({"simulate": False}, 4),
        ({"other": True}, 4),
        ({"simulate": {"cache": True, "tags": "iter-[0-1]"}}, 3),
    ],
)
def test_what_is_not_listed_runs_uncached(cache: forebay.Cache, journal: Journal, section: Any, runs: int) -> None:
    tasks = cache.tasks("flow", config={"cache": section})
    simulate = counting(tasks, journal, tag="iter-{step}")
    assert [simulate(step) for step in (1, 2, 1, 2)] == [1, 2, 1, 2]
    assert len(journal) == runs == tasks.stats().runs
    assert tasks.keys() == sorted({simulate.tag_of(step) for step in (1, 2) if runs == 2 or (runs == 3 and step == 1)})


def test_a_digest_fits_no_list_of_tags(cache: forebay.Cache, journal: Journal) -> None:
    simulate = counting(cache.tasks("flow", config={"cache": {"simulate": {"cache": True, "tags": [".*"]}}}), journal)
    simulate(1), simulate(1)
    assert len(journal) == 2


def test_s39_pinned_by_configuration(cache: forebay.Cache, journal: Journal) -> None:
    tasks = cache.tasks("flow", config={"cache": {"simulate": {"cache": True, "pin": True}}})
    simulate = counting(tasks, journal, tag="iter-{step}")
    simulate(1)
    assert [entry.life for entry in cache.entries("flow")] == ["pinned"]


def test_replay(cache: forebay.Cache, journal: Journal) -> None:
    tasks = cache.tasks(
        "flow", config={"cache": {"simulate": True}, "bypass": {"simulate": {"bypass": True, "tags": "iter-[0-4]", "data": "p"}}}
    )
    simulate = counting(tasks, journal, tag="iter-{step}")
    seen: list[Any] = []

    def provider(tag: Any, data_path: Any, step: int, scale: int = 1) -> int:
        seen.append((tag, tag.key, data_path, step, scale))
        return 1000 + step

    tasks.set_provider("simulate", provider)
    assert [simulate(3, scale=2), simulate(5), simulate(5)] == [1003, 5, 5]
    assert seen == [("iter-3", simulate.tag_of(3), "p", 3, 2)]
    assert len(journal) == 1
    stats = tasks.stats()
    assert (stats.replays, stats.runs) == (1, 1)
    # Cached as any output: under its arguments.
    assert tasks.read(simulate.tag_of(3)) == (True, 1003)
    tasks.set_condition("simulate", lambda tag, data_path, step, scale=1: False)
    assert simulate(3, scale=2) == 1003
    assert simulate(3) == 3


def test_replay_from_the_cache(cache: forebay.Cache, journal: Journal) -> None:
    recorded = cache.tasks("flow")
    counting(recorded, journal, tag="iter-{step}")(3)
    config = {"bypass": {"simulate": True}, "cache": {"simulate": True}}
    tasks = cache.tasks("flow", config=config)
    simulate = counting(tasks, journal, tag="iter-{step}")
    tasks.set_provider("simulate", tasks.from_cache)
    assert simulate(3) == 3
    with pytest.raises(errors.NotCached, match=r"'iter-4'.*simulate#[0-9a-f]{16}:iter-4"):
        simulate(4)
    tasks.set_condition("simulate", tasks.if_cached)
    assert simulate(4) == 4
    assert len(journal) == 2
    assert tasks.stats().replays == 1


def test_replay_of_a_coroutine_function(cache: forebay.Cache, journal: Journal) -> None:
    tasks = cache.tasks("flow", config={"bypass": {"simulate": True, "ask": True}, "cache": {"ask": {"cache": True, "tags": "a1"}}})

    async def simulate(x: int) -> int:
        journal.note()
        return x

    async def ask(x: int) -> int:
        journal.note()
        return x

    async def provider(tag: Any, data_path: Any, x: int) -> int:
        return -x

    tasks.set_provider("simulate", provider)
    assert asyncio.run(tasks.cached(simulate)(3)) == -3
    asks = tasks.cached(ask, tag="a{x}")
    assert [asyncio.run(asks(x)) for x in (1, 1, 2, 2)] == [1, 1, 2, 2]
    assert len(journal) == 3


def test_a_file_in_place_of_a_call(cache: forebay.Cache, journal: Journal, tmp_path: Path) -> None:
    (tmp_path / "recorded.json").write_text("[1]")
    (tmp_path / "flow.yaml").write_text(f"bypass:\n  simulate: {{bypass: true, data: {tmp_path}/recorded.json}}\n")
    tasks = cache.tasks("flow", config=tmp_path / "flow.yaml")
    assert counting(tasks, journal, tag="iter-{step}")(1) == "[1]"
    assert len(journal) == 0
    assert tasks.keys() == []


def test_what_is_neither_listed_nor_replayed_costs_nothing(cache: forebay.Cache) -> None:
    tasks = cache.tasks("flow", config={})

    @tasks.cached(tag="{x.missing}")
    def work(x: Any) -> Any:
        return x

    assert work(3) == 3


# -- other processes ---------------------------------------------------------------------------------------------------

FLOW = """
import concurrent.futures, multiprocessing, os, pickle, sys, threading
import forebay
cache = forebay.Cache(sys.argv[1] if len(sys.argv) > 1 else os.environ["PLACE"], budget=10_000_000, min_free=0)
tasks = cache.tasks("flow")

def note(word):
    with open(os.environ["JOURNAL"], "a") as file:
        print(word, file=file)

@tasks.cached
def by_digest(x, names=frozenset()):
    note(f"by_digest {x}")
    return x * 2

@tasks.cached(tag="x{x}")
def by_tag(x):
    note(f"by_tag {x}")
    return x * 3

class Model:
    def __init__(self, size): self.size = size
    @tasks.cached
    def fit(self, x):
        note(f"fit {self.size} {x}")
        return self.size * x
    @tasks.cached
    @classmethod
    def name(cls, x):
        note(f"name {x}")
        return cls.__name__ * x

def through(map_):
    print(sorted(map_(by_digest, [1, 2, 1, 2])), sorted(map_(by_tag, [1, 2, 1, 2])),
          sorted(map_(Model(3).fit, [1, 1])), sorted(map_(Model.name, [1, 1])))

if __name__ == "__main__":
    os.environ["PLACE"] = sys.argv[1]
    how = sys.argv[2]
    by_digest(1, frozenset("abcdef"))
    if how == "threads":
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            through(pool.map)
    elif how == "loky":
        import joblib
        parallel = joblib.Parallel(2)
        through(lambda f, values: parallel(joblib.delayed(f)(value) for value in values))
    else:
        with concurrent.futures.ProcessPoolExecutor(2, mp_context=multiprocessing.get_context(how)) as pool:
            through(pool.map)
"""


@pytest.mark.parametrize("how", ["threads", "fork", "spawn", "forkserver", "loky"])
def test_a_script_and_its_pools(tmp_path: Path, how: str) -> None:
    if how == "loky":
        pytest.importorskip("joblib")
    script, journal = tmp_path / "flow.py", Journal(tmp_path / "journal")
    script.write_text(FLOW)
    for seed in ("1", "2") if how == "threads" else ("random",):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "JOURNAL": str(journal.path)}
        command = [sys.executable, str(script), str(tmp_path / "root"), how]
        place = tmp_path if seed == "1" else "/"
        done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment, cwd=place, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stdout == "[2, 2, 4, 4] [3, 3, 6, 6] [3, 3] ['Model', 'Model']\n"
    assert sorted(journal.lines()) == ["by_digest 1", "by_digest 1", "by_digest 2", "by_tag 1", "by_tag 2", "fit 3 1", "name 1"]


def test_it_is_pickled_by_reference_to_its_function(tasks: Tasks) -> None:
    def of_module(x: int) -> int:
        return x + 1

    module = ModuleType("module_of_a_flow")
    of_module.__module__, of_module.__qualname__ = module.__name__, "of_module"
    cached = module.of_module = tasks.cached(of_module)  # type: ignore[attr-defined]
    assert cached(1) == 2
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, module.__name__, module)
        arrived = pickle.loads(pickle.dumps(cached))
    assert arrived.__wrapped__ is of_module
    assert arrived.tag_of(1) == cached.tag_of(1)
    assert arrived(1) == 2
    assert tasks.keys() == [cached.tag_of(1)]
    assert tasks.cached(of_module).tag_of(1) == cached.tag_of(1)


def test_the_function_itself_stays_as_it_is(tasks: Tasks) -> None:
    cached = tasks.cached(Journal.lines)
    assert pickle.loads(pickle.dumps(cached)).__wrapped__ is Journal.lines
    assert pickle.loads(pickle.dumps(Journal.lines)) is Journal.lines
    assert Journal.lines.__qualname__ == "Journal.lines"


def test_what_was_cached_can_be_an_argument(tasks: Tasks, journal: Journal) -> None:
    @tasks.cached
    def inner(x: int) -> int:
        return x

    @tasks.cached
    def outer(function: Callable[[int], int], x: int) -> int:
        journal.note()
        return function(x)

    assert outer(inner, 1) == outer(inner, 1) == 1
    assert len(journal) == 1
    assert outer(Model(1).__eq__, 1) is not None


def test_cached_functions_of_one_name_are_different_arguments(tasks: Tasks) -> None:
    def scaled(n: int) -> Callable[[int], int]:
        @tasks.cached
        def scale(x: int) -> int:
            return n * x

        return scale

    @tasks.cached
    def applied(function: Callable[[int], int]) -> int:
        return function(1)

    assert [applied(scaled(n)) for n in (1, 2, 1)] == [1, 2, 1]
    assert tasks.stats().runs == 4  # scale and applied, for 1 and for 2


def test_attributes_of_the_function_stay(tasks: Tasks) -> None:
    def work(x: int) -> int:
        return x

    work.owner, work.tag_of = "me", None  # type: ignore[attr-defined]
    assert tasks.cached(work).owner == "me"
    assert tasks.cached(work).tag_of(1) == tasks.cached(work).tag_of(1)


def test_names_that_are_no_valid_unicode(tasks: Tasks, journal: Journal) -> None:
    @tasks.cached(tag="{path}")
    def size(path: str) -> int:
        journal.note()
        return len(path)

    assert [size("a\udc80"), size("a\udc80"), size("a\\udc80")] == [2, 2, 7]
    assert len(journal) == 2
    assert tasks.has(size.tag_of("a\udc80"))


def test_caches_as_arguments(tmp_path: Path, tasks: Tasks, cache: forebay.Cache) -> None:
    class Flow:
        def __init__(self, cache: forebay.Cache) -> None:
            self.cache, self.tasks, self.space = cache, cache.tasks("other"), cache.space("results")

    def work(flow: Flow) -> int:
        return 1

    with forebay.Cache(tmp_path / "elsewhere", budget=1 << 20, min_free=0) as other:
        tags = {tasks.cached(work).tag_of(Flow(one)) for one in (cache, other)}
    assert len(tags) == 1


def test_after_a_fork(tasks: Tasks, journal: Journal) -> None:
    simulate = counting(tasks, journal, tag="iter-{step}")
    simulate(1)
    assert fork(lambda: (simulate(1), simulate(2))).result() == (1, 2)
    assert simulate(2) == 2
    assert len(journal) == 2


def test_a_closed_cache(tmp_path: Path) -> None:
    cache = forebay.Cache(tmp_path / "root", budget=1 << 20, min_free=0)
    work = cache.tasks("flow").cached(len)
    assert work([1]) == 1
    cache.close()
    with pytest.raises(errors.Closed):
        work([1])
    assert work.call_uncached([1]) == 1
