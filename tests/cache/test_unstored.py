"""Results that cannot be stored: the callers that wait get that of the one that ran."""

from __future__ import annotations

import asyncio
import multiprocessing
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from forebay import Cache
from forebay._engine.files.waiters import Waiters
from forebay.codecs import Codec, codec
from tests.items import until

CALLERS = 4
FEW, MANY = 10_000, 1_000_000


@pytest.fixture
def cache(quick_path: Path) -> Iterator[Cache]:
    with Cache(quick_path / "root", budget="64MiB", min_free=0) as cache:
        cache.space("small", quota=1000)
        cache.tasks("flow", budget=1000)
        yield cache


class Made:
    """A function that returns once all other callers wait for it, and notes its runs beside the root, for all processes."""

    def __init__(self, cache: Cache, size: int, waiting: int = CALLERS - 1) -> None:
        self._cache, self._size, self._waiting = cache, size, waiting
        self._runs = cache.path.parent / "runs"
        self._runs.mkdir(exist_ok=True)

    @property
    def runs(self) -> int:
        return len(list(self._runs.iterdir()))

    def __call__(self, *args: object) -> bytes:
        try:
            (self._runs / "first").touch(exist_ok=False)
        except FileExistsError:
            (self._runs / f"{threading.get_native_id()}").touch()
        else:
            until(lambda: self._cache.stats().waits == self._waiting, "the other callers")
        return bytes([7]) * self._size


Call = Callable[[Cache, Made], bytes]


def as_value(cache: Cache, make: Made) -> bytes:
    return bytes(cache.space("small").get_or_put("k", make))


def as_output(cache: Cache, make: Made) -> bytes:
    def step(x: int) -> bytes:
        return make()

    value: bytes = cache.tasks("flow").cached(step, version="1")(1)
    return value


of_both = pytest.mark.parametrize("call", [as_value, as_output])


@of_both
@pytest.mark.parametrize("size", [FEW, MANY])
def test_threads_get_the_result_of_the_one_that_ran(cache: Cache, call: Call, size: int) -> None:
    make = Made(cache, size)
    with ThreadPoolExecutor(CALLERS) as pool:
        found = [running.result() for running in [pool.submit(call, cache, make) for _ in range(CALLERS)]]
    assert found == [bytes([7]) * size] * CALLERS
    assert make.runs == 1


def test_coroutines_get_the_result_of_the_one_that_ran(cache: Cache) -> None:
    make, space = Made(cache, MANY), cache.space("small")

    async def crowd() -> list[memoryview]:
        return await asyncio.gather(*(space.aget_or_put("k", make) for _ in range(CALLERS)))

    assert asyncio.run(crowd()) == [bytes([7]) * MANY] * CALLERS
    assert make.runs == 1


@of_both
def test_processes_get_a_small_result(cache: Cache, children: Callable[..., Any], call: Call) -> None:
    make = Made(cache, FEW)
    assert [child.result() for child in [children(lambda: call(cache, make)) for _ in range(CALLERS)]] == [bytes([7]) * FEW] * CALLERS
    assert make.runs == 1


@of_both
def test_processes_make_a_large_result_at_the_same_time(
    cache: Cache, children: Callable[..., Any], call: Call
) -> None:  # fmt: skip
    together = multiprocessing.get_context("fork").Barrier(CALLERS - 1)

    class Together(Made):
        def __call__(self, *args: object) -> bytes:
            is_first = self.runs == 0
            value = super().__call__(*args)
            if not is_first:
                together.wait(60)  # of those that ran one after the other, the first would wait here for ever
            return value

    make = Together(cache, MANY)
    assert [child.result() for child in [children(lambda: call(cache, make)) for _ in range(CALLERS)]] == [bytes([7]) * MANY] * CALLERS
    assert make.runs == CALLERS


def test_a_result_without_bytes_is_made_by_each_caller(cache: Cache) -> None:
    """A generator cannot be stored, and belongs to one caller."""
    runs, tasks = [], cache.tasks("flow")

    def step(x: int) -> Iterator[int]:
        runs.append(x)
        if len(runs) == 1:
            until(lambda: cache.stats().waits == 1, "the other caller")
        return (n for n in range(3))

    cached = tasks.cached(step, version="1")
    with ThreadPoolExecutor(2) as pool:
        found = [running.result() for running in [pool.submit(cached, 1) for _ in range(2)]]
    assert [list(one) for one in found] == [[0, 1, 2]] * 2


def test_what_another_codec_made_is_not_decoded(cache: Cache) -> None:
    """Of two handles of one space the one waits for the other: the bytes of a value of `raw` may be anybody's, and `pickle` runs them."""
    runs, stored = list[int](), b"".join(codec("pickle").encode("not to be run" * 100))

    def step(x: int) -> bytes:
        runs.append(x)
        if len(runs) == 1:
            until(lambda: cache.stats().waits == 1, "the other caller")
        return stored

    calls = [cache.tasks("flow", codec=name).cached(step, version="1") for name in ("raw", "pickle")]
    with ThreadPoolExecutor(2) as pool:
        found = [running.result() for running in [pool.submit(call, 1) for call in calls]]
    assert found == [stored] * 2
    assert len(runs) == 2


def test_what_nobody_waits_for_is_encoded_once(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[object] = []
    kind = type(codec("pickle"))
    encode = kind.encode

    def counted(self: Codec[Any], value: Any) -> Any:
        encoded.append(value)
        return encode(self, value)

    monkeypatch.setattr(kind, "encode", counted)
    as_output(cache, Made(cache, MANY, waiting=0))
    assert len(encoded) == 1


def test_a_later_call_runs_again(cache: Cache) -> None:
    make = Made(cache, FEW, waiting=0)
    for _ in range(3):
        assert as_value(cache, make) == bytes([7]) * FEW
    assert make.runs == 2  # "first", and one of this thread


@pytest.mark.parametrize("error", [StopIteration("none"), RuntimeError("coroutine raised StopIteration"), KeyboardInterrupt()], ids=repr)
def test_what_a_function_raises_reaches_its_caller(cache: Cache, error: BaseException) -> None:
    def fails(*args: object) -> bytes:
        raise error

    for call in (lambda: cache.get_or_put("k", fails), lambda: cache.tasks("flow").cached(fails, version="2")(1)):
        with pytest.raises(type(error)) as caught:
            call()
        assert caught.value is error


@of_both
def test_a_value_that_was_made_is_returned_whatever_became_of_the_root(cache: Cache, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """T1 makes a value, which cannot be stored / T2 deletes the root / T1 looks who waits for the value."""

    def fail(_: object) -> None:
        raise FileNotFoundError(2, "No such file or directory", str(cache.path))

    monkeypatch.setattr(Waiters, "every", fail)
    made = Made(cache, FEW, waiting=0)
    assert call(cache, made) == bytes([7]) * FEW
    assert made.runs == 1
