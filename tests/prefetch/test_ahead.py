"""`Cache.lookahead`: objects in a known order are there, or on their way, when their turn comes."""

from __future__ import annotations

import os
import pickle
import queue
import random
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count, islice
from pathlib import Path
from typing import Any

import pytest

import forebay
from forebay import errors
from forebay.testing import ScriptedServer
from tests.harness import MiB
from tests.interrupts.every_line import Moments, interrupt
from tests.items import until
from tests.processes import fork

NAMES = [f"{number}.bin" for number in range(20)]
SIZE = 100_000
Start = Callable[..., Any]


def body(number: int) -> bytes:
    return ((b"%d " % number) * SIZE)[:SIZE]


@pytest.fixture
def urls(server: ScriptedServer) -> list[str]:
    return [server.put(f"/d/{number}.bin", body(number)) for number in range(20)]


def test_the_bytes_come_in_order(cache: forebay.Cache, server: ScriptedServer, urls: list[str]) -> None:
    cache.read_many(urls[::3])
    with cache.lookahead(urls) as ahead:
        assert [bytes(view) for view in ahead] == [body(number) for number in range(20)]
        assert ahead.progress == (20, 0, 0, 20)
        with pytest.raises(StopIteration):
            next(ahead)
    assert server.gets == len(urls)
    assert cache.stats().fallbacks == 0


def test_the_next_ones_come_while_the_loop_works(cache: forebay.Cache, server: ScriptedServer, urls: list[str]) -> None:
    with cache.lookahead(urls, workers=4) as ahead:
        assert bytes(next(ahead)) == body(0)
        until(lambda: ahead.progress.ready == ahead.progress.ahead, "what is ahead")
        assert ahead.progress.ahead > 4
        server.rate = 1.0  # nothing more would come in time
        ready = [bytes(view) for view in islice(ahead, 5)]
        assert ready == [body(number) for number in range(1, 6)]
        server.rate = None


def test_the_window_bounds_what_is_ahead(cache: forebay.Cache, server: ScriptedServer, urls: list[str]) -> None:
    with cache.lookahead(urls, window=3 * SIZE, workers=2) as ahead:
        next(ahead)
        next(ahead)
        until(lambda: ahead.progress.ready == ahead.progress.ahead, "what is ahead")
        assert 3 <= ahead.progress.ahead <= 5
        assert server.gets == 2 + ahead.progress.ahead
        assert [bytes(view) for view in ahead] == [body(number) for number in range(2, 20)]


def test_a_number_of_objects_bounds_what_is_ahead(cache: forebay.Cache, server: ScriptedServer, urls: list[str]) -> None:
    with cache.lookahead(urls, most=2) as ahead:
        next(ahead)
        until(lambda: ahead.progress.ready == 2, "what is ahead")
        assert (server.gets, ahead.progress.ahead) == (3, 2)
        assert [bytes(view) for view in ahead] == [body(number) for number in range(1, 20)]
    assert server.gets == len(urls)


def test_an_order_may_be_endless_and_repeat(cache: forebay.Cache, server: ScriptedServer, urls: list[str]) -> None:
    drawn: list[int] = []

    def order() -> Iterator[str]:
        for number in count():
            drawn.append(number)
            yield urls[number % 5]

    with cache.lookahead(order(), window=4 * SIZE) as ahead:
        assert [bytes(view) for view in islice(ahead, 23)] == [body(number % 5) for number in range(23)]
        assert ahead.progress.total is None
        assert len(drawn) < 23 + 40
    assert server.gets == 5


def test_batches_take_what_is_ahead(cache: forebay.Cache, server: ScriptedServer, urls: list[str]) -> None:
    order = random.Random(1).sample(range(20), 20)
    with cache.lookahead([urls[number] for number in order]) as ahead:
        for at in range(0, 20, 5):
            batch = order[at : at + 5]
            batch.reverse()  # within a batch in any order
            assert [bytes(view) for view in ahead.read_many([urls[number] for number in batch])] == [body(number) for number in batch]
        assert ahead.progress.read == 20
    assert server.gets == 20


def test_an_order_that_is_not_kept_costs_only_the_look_ahead(cache: forebay.Cache, server: ScriptedServer, urls: list[str]) -> None:
    """What was passed by goes on its own: the window does not fill with what is never read."""
    with cache.lookahead(urls[:10], window=3 * SIZE, workers=2) as ahead:
        for _ in range(3):
            assert [bytes(view) for view in ahead.read_many(urls[10:])] == [body(number) for number in range(10, 20)]
        assert ahead.progress.ahead == 0
        assert bytes(ahead.read(urls[0])) == body(0)
    assert server.gets <= 20


def test_what_is_skipped_is_in_the_cache_for_others(cache: forebay.Cache, server: ScriptedServer, urls: list[str]) -> None:
    with cache.lookahead(urls, workers=2, window=4 * SIZE) as ahead:
        for url in urls:
            until(lambda url=url: cache.entry(url) is not None, url)
            assert ahead.skip()
            assert ahead.progress.ahead <= 6
        assert not ahead.skip()
    assert server.gets == len(urls)


def test_an_error_is_raised_at_its_turn(cache: forebay.Cache, urls: list[str]) -> None:
    order = [urls[0], urls[1].replace("1.bin", "none.bin"), "no://scheme/x", urls[2]]
    with cache.lookahead(order) as ahead:
        assert bytes(next(ahead)) == body(0)
        with pytest.raises(errors.NotFound):
            next(ahead)
        with pytest.raises(errors.ForebayError):
            next(ahead)
        assert bytes(next(ahead)) == body(2)
        results = ahead.read_many(order, return_exceptions=True)
        assert [isinstance(result, Exception) for result in results] == [False, True, True, False]
        with pytest.raises(errors.NotFound):
            ahead.read_many(order[:2])


def test_what_the_order_raises_comes_at_its_turn(cache: forebay.Cache, urls: list[str]) -> None:
    def order() -> Iterator[str]:
        yield from urls[:5]
        raise KeyError("the sampler's own")

    with cache.lookahead(order()) as ahead:
        assert [bytes(next(ahead)) for _ in range(5)] == [body(number) for number in range(5)]
        with pytest.raises(KeyError, match="the sampler's own"):
            next(ahead)
        with pytest.raises(StopIteration):
            next(ahead)


def test_empty_objects_and_entries_of_directories(cache: forebay.Cache, server: ScriptedServer, tmp_path: Path) -> None:
    url = server.put("/d/empty", b"")
    cache.read(url)
    gets = server.gets
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "a").write_bytes(b"local")
    with cache.lookahead([url, *os.scandir(tmp_path / "files"), url]) as ahead:
        assert [bytes(view) for view in ahead] == [b"", b"local", b""]
    assert server.gets == gets


def test_out_of_more_than_fits(tmp_path: Path, server: ScriptedServer, urls: list[str]) -> None:
    with forebay.Cache(tmp_path / "root", budget=8 * SIZE, min_free=0) as cache:
        for epoch in range(3):
            order = random.Random(epoch).sample(range(20), 20)
            with cache.lookahead([urls[number] for number in order], workers=2) as ahead:
                assert [bytes(view) for view in ahead] == [body(number) for number in order]
        assert cache.stats().fallbacks == 0
        assert cache.check(deep=True) == []


def test_local_files_are_read_in_place(cache: forebay.Cache, tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"{number}").write_bytes(body(number))
    with cache.lookahead([tmp_path / f"{number}" for number in range(3)]) as ahead:
        assert [bytes(view) for view in ahead] == [body(number) for number in range(3)]
    assert cache.entries() == []


def test_what_is_too_large_for_the_cache_waits_in_memory_for_its_turn(tmp_path: Path, server: ScriptedServer) -> None:
    urls = [server.put(f"/{number}.bin", body(number) * 10) for number in range(6)]
    with forebay.Cache(tmp_path / "root", budget=5 * SIZE, min_free=0) as cache:
        with cache.lookahead(urls, workers=2, horizon=0) as ahead:
            for number in range(6):
                until(lambda: ahead.progress.ready == ahead.progress.ahead, "what is ahead")
                assert bytes(next(ahead)) == body(number) * 10
        assert cache.stats().fallbacks == 6
    assert server.gets == 6


@pytest.mark.parametrize("options", [{"enabled": False}, {"read_only": True}], ids=["no cache", "a root that is only read"])
def test_what_cannot_be_stored_is_fetched_ahead_into_memory(
    tmp_path: Path, server: ScriptedServer, urls: list[str], options: dict[str, bool]
) -> None:
    with forebay.Cache(tmp_path / "root", budget=64 * MiB, min_free=0) as cache:
        cache.read(urls[2])
    for number in range(4, 20):
        server.objects[f"/d/{number}.bin"].stall_after = 0
    is_there = "read_only" in options
    with forebay.Cache(tmp_path / "root", **options) as cache, cache.lookahead(urls, workers=3) as ahead:  # type: ignore[arg-type]
        assert bytes(next(ahead)) == body(0)
        until(lambda: ahead.progress.ready >= 3, "what is ahead")
        assert [bytes(view) for view in islice(ahead, 3)] == [body(number) for number in range(1, 4)]
        server.go.set()
        assert [bytes(view) for view in ahead] == [body(number) for number in range(4, 20)]
    assert server.gets == len(urls) + (not is_there)


def test_both_processes_go_on_after_a_fork(cache: forebay.Cache, urls: list[str]) -> None:
    with cache.lookahead(urls, window=5 * SIZE) as ahead:
        assert bytes(next(ahead)) == body(0)
        child = fork(lambda: [bytes(view) for view in ahead])
        mine = [bytes(view) for view in ahead]
        assert child.result() == mine == [body(number) for number in range(1, 20)]


class Order:
    """An order that is no list, and goes on after what a handler raises."""

    def __init__(self, urls: list[str]) -> None:
        self._urls = iter(urls)

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        return next(self._urls)


@pytest.mark.parametrize("order", [list, Order])
def test_what_a_signal_handler_raises_costs_no_object(
    cache: forebay.Cache, urls: list[str], order: Callable[[list[str]], Iterable[str]]
) -> None:
    """A signal at each line of a call in the middle of the order, for one after the other: the rest comes, and what was interrupted."""
    cache.read_many(urls)
    before, moments, at = signal.signal(signal.SIGUSR1, interrupt), Moments(), 1
    try:
        while at == 1 or moments.where:
            with cache.lookahead(order(urls * 4), most=4) as ahead:  # the 64th of a list is drawn meanwhile
                came = [bytes(next(ahead)) for _ in range(60)]
                moments.run(lambda ahead=ahead, came=came: came.append(bytes(next(ahead))), at)
                came += [bytes(view) for view in ahead]
            assert came == [body(number) for number in [*range(20)] * 4], moments.where
            at += 3
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_nothing_waits_for_an_order_that_waits(cache: forebay.Cache, urls: list[str]) -> None:
    """Another thread feeds the order: until it does, a process is forked, and the look-ahead tells how far it is, and is closed."""
    fed, asked = queue.SimpleQueue[str](), threading.Event()

    def order() -> Iterator[str]:
        yield from urls[:10]
        asked.set()
        yield fed.get()

    with cache.lookahead(order(), most=4) as ahead, ThreadPoolExecutor(1) as thread:
        reading = thread.submit(lambda: [bytes(view) for view in ahead])
        try:
            assert asked.wait(60)
            came = fork(lambda: [bytes(view) for view in islice(ahead, 3)]).result()
            assert came == [body(number) for number in range(7, 10)]
            ahead.close()
        finally:
            fed.put(urls[10])
        assert reading.result() == [body(number) for number in range(len(reading.result()))]


def test_a_killed_process_stops_nobody(tmp_path: Path, server: ScriptedServer, urls: list[str], children: Start) -> None:
    """Two jobs with different orders; one dies in the middle of its look-ahead."""
    root = tmp_path / "root"
    server.put("/d/5.bin", body(5), stall_after=1000, stalls=1)

    def job() -> None:
        with forebay.Cache(root, budget=64 * MiB, min_free=0) as cache, cache.lookahead(urls) as ahead:
            list(ahead)

    with forebay.Cache(root, budget=64 * MiB, min_free=0) as cache:
        other = children(job)
        assert server.stalled.wait(60)
        with cache.lookahead(urls[::-1]) as ahead:
            assert bytes(next(ahead)) == body(19)
            other.kill()
            server.go.set()
            assert [bytes(view) for view in ahead] == [body(number) for number in range(18, -1, -1)]
        assert cache.check(deep=True) == []


def test_one_closed_early_fetches_no_more(cache: forebay.Cache, server: ScriptedServer, urls: list[str]) -> None:
    with cache.lookahead(urls, window=3 * SIZE, workers=2) as ahead:
        view = next(ahead)
    gets = server.gets
    assert bytes(view) == body(0)
    with pytest.raises(StopIteration):
        next(ahead)
    assert server.gets == gets < 20


def test_closing_waits_for_no_server(cache: forebay.Cache, server: ScriptedServer) -> None:
    urls = [server.put(f"/d/{number}.bin", body(number), stall_after=1000) for number in range(4)]
    ahead = cache.lookahead(urls)
    assert server.stalled.wait(60)
    ahead.close()
    assert not server.go.is_set()
    with cache.prefetcher(f"{server.url}/d") as pool:  # no key is held
        lazy = pool.get_lazy("3.bin")
        server.go.set()
        assert lazy.get() == body(3)


def test_it_is_not_pickled(cache: forebay.Cache, urls: list[str]) -> None:
    with cache.lookahead(urls) as ahead, pytest.raises(errors.ConfigError):
        pickle.dumps(ahead)


@pytest.mark.parametrize(
    "wrong", [{"urls": "http://host/a"}, {"urls": 5}, {"workers": 0}, {"most": 0}, {"window": 0}, {"window": "much"}], ids=str
)
def test_what_makes_no_sense_is_refused(cache: forebay.Cache, wrong: dict[str, Any]) -> None:
    with pytest.raises(errors.ConfigError):
        cache.lookahead(**{"urls": ["http://host/a"]} | wrong)
