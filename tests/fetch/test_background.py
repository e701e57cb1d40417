"""`Cache.warm` of a lazy iterable: what yields the URLs may be slow, fail, be interrupted, and need its own thread."""

from __future__ import annotations

import os
import signal
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import forebay
from forebay import errors
from forebay.fetch import background
from forebay.testing import ScriptedServer
from tests.processes import Line, in_child, talk_to

SIZES = [10, 20_000, 300_000]


def several(server: ScriptedServer, count: int) -> list[str]:
    return [server.put(f"/{number}", bytes([number]) * SIZES[number % len(SIZES)]) for number in range(count)]


def are_free(cache: forebay.Cache, urls: list[str]) -> bool:
    holds = [cache._store.locks.try_hold("urls", url) for url in urls]
    for hold in holds:
        if hold is not None:
            hold.release()
    return None not in holds


def test_what_has_come_is_there_for_others_while_the_next_url_is_waited_for(tmp_path: Path, server: ScriptedServer) -> None:
    urls = several(server, 25)

    def other(line: Line) -> None:
        with forebay.Cache(tmp_path / "root") as cache:
            line.hear()
            line.say([len(view) for view in cache.read_many(urls[:20], timeout=20)])

    with forebay.Cache(tmp_path / "root", max_connections=2) as cache, talk_to(other) as reader:

        def listing() -> Iterator[str]:
            yield from urls[:20]
            reader.say()
            assert reader.hear() == [SIZES[number % len(SIZES)] for number in range(20)]  # this generator waits for the other process
            yield from urls[20:]

        assert sorted(cache.warm(listing()).done) == sorted(urls)
    assert len({request.path for request in server.requests}) == len(urls)
    assert sum(request.headers.get("Range", "").startswith("bytes=0-") for request in server.requests) == len(urls)


def test_what_yields_the_urls_may_wait_for_an_object_of_the_same_call(cache: forebay.Cache, server: ScriptedServer) -> None:
    urls = several(server, 9)

    def listing() -> Iterator[str]:
        for url in urls:
            yield url
            assert len(cache.read(url)) in SIZES

    assert sorted(cache.warm(listing()).done) == sorted(urls)
    assert cache.stats().fills == len(urls)
    assert cache.stats().fallbacks == 0


def test_it_is_read_in_the_thread_of_the_caller(cache: forebay.Cache, server: ScriptedServer) -> None:
    urls = several(server, 5)
    with sqlite3.connect(":memory:") as connection:
        connection.execute("CREATE TABLE urls (url)")
        connection.executemany("INSERT INTO urls VALUES (?)", [(url,) for url in urls])
        assert sorted(cache.warm(url for (url,) in connection.execute("SELECT url FROM urls")).done) == sorted(urls)
    connection.close()


def test_many_more_than_are_taken_ahead(cache: forebay.Cache, server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "AHEAD", 20)
    urls, taken, settled, most = several(server, 200), 0, 0, 0

    def listing() -> Iterator[str]:
        nonlocal taken, most
        for url in urls:
            taken += 1
            most = max(most, taken - settled)
            yield url

    def on_progress(step: forebay.Progress) -> None:
        nonlocal settled
        settled += step.state == "done"

    report = cache.warm(listing(), on_progress=on_progress)
    assert sorted(report.done) == sorted(urls)
    assert most <= 21
    assert cache.warm(iter([])).done == ()


def test_leases_do_not_pile_up_while_the_next_url_is_waited_for(tmp_path: Path, server: ScriptedServer) -> None:
    urls = [server.put(f"/{number}", os.urandom(100_000)) for number in range(20)]
    done = threading.Semaphore(0)

    def on_progress(step: forebay.Progress) -> None:
        if step.state in ("done", "direct"):
            done.release()

    def listing() -> Iterator[str]:
        yield from urls
        for _ in urls:
            assert done.acquire(timeout=60)

    with forebay.Cache(tmp_path / "root", budget=400_000, min_free=0) as cache:
        assert len(cache.warm(listing(), jobs=1, on_progress=on_progress).done) == 20


def test_what_it_raises_is_raised_and_no_key_stays_held(cache: forebay.Cache, server: ScriptedServer) -> None:
    urls = [server.put(f"/{number}", b"%d" % number) for number in range(5)] + [server.put("/5", b"x" * 100, stall_after=1)]

    def listing() -> Iterator[str]:
        yield from urls
        assert server.stalled.wait(60)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        cache.warm(listing())
    assert are_free(cache, urls)
    server.go.set()
    assert sorted(cache.warm(urls).done) == sorted(urls)


def test_what_on_progress_raises_is_raised_and_the_generator_is_closed(cache: forebay.Cache, server: ScriptedServer) -> None:
    urls, closed = [server.put(f"/{number}", b"%d" % number) for number in range(40)], list[bool]()

    def listing() -> Iterator[str]:
        try:
            yield from urls
        finally:
            closed.append(True)

    def fail(step: forebay.Progress) -> None:
        if step.state == "done":
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        cache.warm(listing(), on_progress=fail)
    assert closed == [True]
    assert are_free(cache, urls)


@pytest.mark.parametrize("where", ["in the generator", "at the end"])
def test_an_interrupt_gives_up_what_is_under_way(where: str, tmp_path: Path, server: ScriptedServer) -> None:
    urls = [server.put(f"/{number}", b"%d" % number) for number in range(3)] + [server.put("/3", b"x" * 100, stall_after=1)]

    def interrupted() -> tuple[bool, int]:
        def listing() -> Iterator[str]:
            yield from urls
            if where == "in the generator":
                server_stalled()
                os.kill(os.getpid(), signal.SIGINT)
                signal.pause()

        def server_stalled() -> None:
            while len(cache.entries()) < 3:
                os.sched_yield()

        def press() -> None:
            server_stalled()
            os.kill(os.getpid(), signal.SIGINT)

        with forebay.Cache(tmp_path / "root") as cache:
            if where == "at the end":
                threading.Thread(target=press, daemon=True).start()
            with pytest.raises(KeyboardInterrupt):
                cache.warm(listing())
            return are_free(cache, urls), len(cache.entries())

    assert in_child(interrupted) == (True, 3)
    server.go.set()


def test_one_url_is_refused_as_ever(cache: forebay.Cache) -> None:
    with pytest.raises(errors.ConfigError, match="several URLs"):
        cache.warm("http://host/a")
