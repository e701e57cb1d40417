"""`Pipeline` from inside: the second look, and responses that are not what they say."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

import forebay
from forebay import errors
from forebay.cache import fetcher_of
from forebay.fetch import pipeline
from forebay.fetch.job import Job, publish_together
from forebay.fetch.pipeline import Pipeline
from forebay.fetch.request import FetchOptions
from forebay.remote.base import sent_together, wake_at_end
from forebay.testing import ScriptedServer
from tests.servers.counting import Shelf, content


def test_what_was_fetched_between_the_look_and_the_lock_is_not_fetched_again(
    cache: forebay.Cache, server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P1 looks: absent / P2 fetches it, and releases its key / P1 holds the key."""
    url, hold = server.put("/a", b"a" * 1000), Pipeline._hold

    def late(self: Pipeline, wanted: Any) -> None:
        assert url in wanted
        cache.read(url)
        hold(self, wanted)

    with monkeypatch.context() as patch:
        patch.setattr(Pipeline, "_hold", late)
        assert cache.read_many([url]) == [b"a" * 1000]
    assert server.gets == 1


@pytest.mark.parametrize("is_there", [True, False])
def test_what_another_call_validated_after_the_first_look_of_a_refresh_is_not_validated_again(
    is_there: bool, cache: forebay.Cache, server: ScriptedServer
) -> None:
    """P2 refreshes many / P1 looks at them: they are P2's / P2 releases them / P1 looks again."""
    store, urls, results = fetcher_of(cache).store, [server.put(f"/{number}", b"%d" % number) for number in range(3)], list[list[bytes]]()
    if is_there:
        cache.read_many(urls)
    holds = [store.locks.try_hold("urls", url) for url in urls]
    reader = threading.Thread(target=lambda: results.append([bytes(view) for view in cache.read_many(urls, refresh=True)]))
    reader.start()
    while cache.stats().waits == 0:  # for the first of them
        os.sched_yield()
    for url in urls:
        job = Job(fetcher_of(cache), fetcher_of(cache).target(url), FetchOptions(), has_entry=is_there)
        job.make()
        if job.writing is not None:
            assert publish_together([job]) is None
    asked = len(server.requests)
    for hold in holds:
        assert hold is not None
        hold.release()
    reader.join()
    assert results == [[b"0", b"1", b"2"]]
    assert len(server.requests) == asked


def test_what_nobody_needs_by_then_is_not_published(cache: forebay.Cache, server: ScriptedServer) -> None:
    fetcher, urls = fetcher_of(cache), [server.put(f"/{number}", b"%d" % number) for number in range(4)]
    jobs = [Job(fetcher, fetcher.target(url), FetchOptions(), number) for number, url in enumerate(urls)]
    ended = {job.number: job for job in Pipeline(fetcher, needed=lambda job: job.number % 2 == 1).run(jobs)}
    assert {number: bytes(job.data) for number, job in ended.items() if job.data is not None} == {1: b"1", 3: b"3"}
    assert sorted(ended) == [0, 1, 2, 3]
    assert fetcher.store.entry("urls", urls[1]) is not None
    assert fetcher.store.entry("urls", urls[2]) is None
    assert cache.read(urls[2]) == b"2"  # its key is free


def test_a_range_that_says_there_is_more_is_not_the_whole(cache: forebay.Cache, server: ScriptedServer) -> None:
    body = os.urandom(1000)
    url = server.put("/lie", body, content_range="bytes 0-999/5000")
    assert cache.read_many([url]) == [body]
    assert server.requests[-1].status == 200  # it was asked for without a range


@pytest.mark.parametrize("stated", ["bytes 5-1004/1000", "bytes 0-499/500", "nonsense"])
def test_a_range_that_is_not_the_whole_is_not_taken_for_it(stated: str, cache: forebay.Cache, server: ScriptedServer) -> None:
    url = server.put("/lie", os.urandom(1000), content_range=stated)
    with pytest.raises(errors.RemoteError):
        cache.read_many([url])
    assert cache.stats().entries == 0


@pytest.mark.parametrize("etags", [True, False])
def test_only_what_a_successor_could_resume_is_on_the_disk_while_it_comes(etags: bool, tmp_path: Path, shelf: Shelf) -> None:
    body = content("large", 3 << 20)
    shelf.put("bucket/step/large", body)
    shelf.stall("bucket/step/large", after=2 << 20)
    options = forebay.RemoteOptions(part=1 << 20, streams=1)
    with forebay.Cache(tmp_path / "root", budget=64 << 20, remote_options=options) as cache:
        there: list[str] = []
        thread = threading.Thread(target=lambda: there.append(cache.directory("bucket/step", filesystem=shelf.fsspec(etags=etags)).path))
        thread.start()
        try:
            shelf.wait("stalled")
            partials = os.listdir(tmp_path / "root" / "tmp")
        finally:
            shelf.go("bucket/step/large")
            thread.join()
        assert bool(partials) == etags
        assert Path(there[0], "large").read_bytes() == body
        assert cache.check(deep=True) == []


def test_files_of_this_machine_come_a_few_mebibytes_at_a_time(cache: forebay.Cache, shelf: Shelf) -> None:
    """Two of six are under way at once, and small ones meanwhile."""
    files = {f"{n}": content(f"{n}", 3 << 20) for n in range(6)} | {"small": b"small"}
    shelf.fill("bucket/step", files)
    for n in range(6):
        shelf.stall(f"bucket/step/{n}")
    there: list[str] = []
    thread = threading.Thread(target=lambda: there.append(cache.directory("bucket/step", filesystem=shelf.arrow()).path))
    thread.start()
    try:
        shelf.wait("stalled", times=2)
        shelf.wait("read", "small")
    finally:
        for n in range(6):
            shelf.go(f"bucket/step/{n}")
        thread.join()
    verbs = [each.verb for each in shelf.asked() if each.verb in ("open", "read") and not each.name.endswith("small")]
    assert verbs.index("read") == 2
    assert {name: Path(there[0], name).read_bytes() for name in files} == files


def test_a_call_that_fails_releases_what_it_held_back(cache: forebay.Cache, shelf: Shelf) -> None:
    files = {f"{n}": content(f"{n}", 3 << 20) for n in range(6)}
    shelf.fill("bucket/step", files)
    shelf.fail("bucket/step/0", "PermissionError")
    shelf.stall("bucket/step/1")
    with pytest.raises(errors.RemoteError):
        cache.directory("bucket/step", filesystem=shelf.arrow())
    shelf.go("bucket/step/1")
    shelf.withdraw("fail", "bucket/step/0")
    with cache.directory("bucket/step", filesystem=shelf.arrow(), timeout=30) as path:
        assert {name: Path(path, name).read_bytes() for name in files} == files


def test_a_key_that_others_hold_is_left_to_the_caller_that_does_not_wait(cache: forebay.Cache, server: ScriptedServer) -> None:
    fetcher = fetcher_of(cache)
    urls = [server.put(f"/{number}", b"%d" % number) for number in range(3)]
    hold = fetcher.store.locks.try_hold("urls", urls[1])
    assert hold is not None
    with hold:
        requests = [Job(fetcher, fetcher.target(url), FetchOptions.of(fetcher), number) for number, url in enumerate(urls)]
        found = {request.number: request for request in Pipeline(fetcher, waits=False).run(requests)}
    assert [found[number].is_busy for number in range(3)] == [False, True, False]
    assert found[1].data is found[1].error is None
    assert found[2].data == b"2"


def test_what_only_others_hold_comes_back_too(cache: forebay.Cache, server: ScriptedServer) -> None:
    fetcher = fetcher_of(cache)
    url = server.put("/a", b"a")
    hold = fetcher.store.locks.try_hold("urls", url)
    assert hold is not None
    with hold:
        (request,) = Pipeline(fetcher, waits=False).run([Job(fetcher, fetcher.target(url), FetchOptions.of(fetcher))])
    assert request.is_busy


def test_an_object_is_not_fetched_before_there_is_a_place_for_it(cache: forebay.Cache, server: ScriptedServer) -> None:
    fetcher = fetcher_of(cache)
    urls = [server.put(f"/{number}", os.urandom(2000), stall_after=10, stalls=1) for number in range(40)]
    taken = []

    def requests() -> Any:
        for url in urls:
            taken.append(url)
            yield Job(fetcher, fetcher.target(url), FetchOptions.of(fetcher))

    at_request = []

    def note(request: Any) -> None:
        at_request.append(len(taken))
        if len(at_request) == 4:
            server.go.set()

    server.on_request = note
    assert len(list(Pipeline(fetcher, side_by_side=4).run(requests()))) == 40
    assert max(at_request[:4]) == 4


def test_the_last_requests_are_sent_before_what_has_come_is_published(
    cache: forebay.Cache, server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetcher, start, publish = fetcher_of(cache), Pipeline._start, Pipeline._publish
    urls = [server.put(f"/{number}", b"a" * 2_000, stall_after=None if number == 0 else 10) for number in range(5)]
    steps: list[str] = []

    def starts(self: Pipeline, fetch: Any) -> None:
        steps.append("send")
        start(self, fetch)

    def publishes(self: Pipeline) -> Any:
        steps.append("publish")
        server.go.set()
        return publish(self)

    monkeypatch.setattr(Pipeline, "_start", starts)
    monkeypatch.setattr(Pipeline, "_publish", publishes)
    requests = [Job(fetcher, fetcher.target(url), FetchOptions.of(fetcher)) for url in urls]
    assert len(list(Pipeline(fetcher, side_by_side=4).run(requests))) == 5
    assert steps.index("publish") == 5


def test_responses_that_come_one_after_the_other_are_published_together(
    cache: forebay.Cache, server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetcher, worked, publish, published = fetcher_of(cache), Pipeline._worked, Pipeline._publish, []
    urls = [server.put(f"/{number}", b"a" * 2_000, stall_after=10 if number else None) for number in range(2)]

    def works(self: Pipeline, job: Any) -> Any:
        try:
            return worked(self, job)
        finally:
            server.go.set()

    def publishes(self: Pipeline) -> Any:
        published.append(len(self._collected))
        return publish(self)

    monkeypatch.setattr(pipeline, "QUIET_PERIOD", 30.0)
    monkeypatch.setattr(Pipeline, "_worked", works)
    monkeypatch.setattr(Pipeline, "_publish", publishes)
    requests = [Job(fetcher, fetcher.target(url), FetchOptions.of(fetcher)) for url in urls]
    assert len(list(Pipeline(fetcher).run(requests))) == 2
    assert published == [2]


def test_what_is_sent_together_wakes_the_loop_once() -> None:
    calls: list[str] = []

    def wake() -> None:
        calls.append("wake")

    assert not wake_at_end(wake)
    with pytest.raises(KeyError), sent_together():
        assert wake_at_end(wake)
        assert wake_at_end(wake)
        assert calls == []
        raise KeyError
    assert calls == ["wake"]
    assert not wake_at_end(wake)


def test_objects_that_stall_do_not_hold_up_the_others(cache: forebay.Cache, server: ScriptedServer) -> None:
    fetcher = fetcher_of(cache)
    urls = [server.put(f"/{number}", os.urandom(2000), stall_after=10 if number < 10 else None) for number in range(40)]
    done = 0
    for _ in Pipeline(fetcher, side_by_side=16).run(Job(fetcher, fetcher.target(url), FetchOptions.of(fetcher)) for url in urls):
        done += 1
        if done == 30:
            server.go.set()
    assert done == 40


def test_a_signal_that_another_thread_gets_ends_the_wait(cache: forebay.Cache, server: ScriptedServer) -> None:
    fetcher, interrupted, late = fetcher_of(cache), threading.Event(), []
    url = server.put("/a", b"aa", stall_after=1)

    def interrupt() -> None:
        server.stalled.wait()
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)
        if not interrupted.wait(30):
            late.append(url)
        server.go.set()

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        list(Pipeline(fetcher).run([Job(fetcher, fetcher.target(url), FetchOptions.of(fetcher))]))
    interrupted.set()
    thread.join()
    assert not late


@pytest.mark.parametrize("size", [1000, 2 << 20])
def test_where_no_thread_can_be_started_the_caller_fetches(
    cache: forebay.Cache, server: ScriptedServer, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    start = threading.Thread.start

    def start_few(thread: threading.Thread) -> None:
        if thread.name.startswith("forebay-bulk-"):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_few)
    urls = [server.put(f"/{number}", bytes([number]) * size) for number in range(5)]
    assert [bytes(data) for data in cache.read_many(urls)] == [bytes([number]) * size for number in range(5)]
    assert cache.stats().fills == 5


def test_what_the_caller_was_to_fetch_is_released_where_it_is_interrupted(
    cache: forebay.Cache, server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fetch_here(self: Pipeline, fetch: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(pipeline.Threads, "submit", lambda threads, item: False)
    monkeypatch.setattr(Pipeline, "_work_here", fetch_here)
    url = server.put("/large", bytes(2 << 20))
    with pytest.raises(KeyboardInterrupt):
        cache.read_many([url])
    hold = fetcher_of(cache).store.locks.try_hold("urls", url)
    assert hold is not None
    hold.release()
