"""`read_many`, `local_many` and `warm`: many objects by one path."""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import forebay
from forebay import errors
from forebay._kernel import locks
from forebay.testing import ScriptedServer
from tests.items import until
from tests.processes import Line, ProcessGroup, in_child, talk_to

SMALL = 256 << 10
"""The largest object that a bulk call fetches in one request."""
SIZES = [1, 100, 5_000, 100_000, SMALL, SMALL + 1, 700_000, 3_000_000]


def several(server: ScriptedServer, sizes: list[int], **script: Any) -> tuple[list[str], list[bytes]]:
    bodies = [os.urandom(size) for size in sizes]
    return [server.put(f"/{number}.bin", body, **script) for number, body in enumerate(bodies)], bodies


def as_bytes(views: list[memoryview]) -> list[bytes]:
    return [bytes(view) for view in views]


@pytest.mark.parametrize("jobs", [math.nan, math.inf, 1.5, 0, -1, True, "4", b"4", [4]])
def test_a_number_of_jobs_is_a_whole_number(cache: forebay.Cache, server: ScriptedServer, jobs: Any) -> None:
    urls, _ = several(server, [10, 300_000])
    for some in (urls, iter(urls)):
        with pytest.raises(errors.ConfigError, match="jobs must be an integer of at least 1"):
            cache.warm(some, jobs=jobs)
    assert not server.requests


OTHERS: list[Any] = [5, b"x", ["x"], object()]


@pytest.mark.parametrize("wrong", OTHERS, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("name", ["max_age", "filesystem", "sha256", "etag", "timeout", "on_wait"])
def test_an_option_of_a_wrong_type_is_named(cache: forebay.Cache, server: ScriptedServer, name: str, wrong: Any) -> None:
    """Whether the object is in the cache or not."""
    if wrong == 5 and name in ("max_age", "timeout"):
        return

    def warm(url: str, **given: Any) -> None:
        for _, error in cache.warm([url], **given).failed:
            raise error

    def read_many(url: str, **given: Any) -> None:
        cache.read_many([url], **given)

    def local_many(url: str, **given: Any) -> None:
        cache.local_many([url], **given)

    url = server.put("/a", b"a" * 10)
    calls = [
        cache.local,
        cache.open,
        cache.pull,
        warm,
        read_many,
        local_many,
        *([cache.read] if name not in ("on_wait", "timeout") else []),
    ]  # its hits do not wait
    for _ in range(2):
        for call in calls:
            with pytest.raises(errors.ConfigError, match=name):
                call(url, **{name: wrong})
        assert cache.read(url) == b"a" * 10


# -- read_many ---------------------------------------------------------------------------------------------------------


def test_bytes_come_in_order_and_each_object_once(cache: forebay.Cache, server: ScriptedServer) -> None:
    urls, bodies = several(server, SIZES * 5)
    assert as_bytes(cache.read_many([*urls, urls[3], urls[0]])) == [*bodies, bodies[3], bodies[0]]
    objects = {request.path for request in server.requests if request.headers.get("Range", "").startswith("bytes=0-")}
    assert len(objects) == len(urls)
    before, counts = server.gets, cache.stats()
    assert counts.misses == counts.fills == len(urls)
    assert as_bytes(cache.read_many(urls)) == bodies
    assert server.gets == before
    assert cache.stats().hits == counts.hits + len(urls)


def test_an_object_that_is_named_twice_costs_nothing_else(cache: forebay.Cache, server: ScriptedServer) -> None:
    """Under one name, under two names of one key, in each call for several; what was stored before stays."""
    assert cache.put("before", b"stays")
    (url,), (body,) = several(server, [20_000])
    names = [url, url, url.replace("http:", "HTTP:"), f"{url}#part"]
    assert as_bytes(cache.read_many(names)) == [body] * 4
    cache.evict(url)
    with cache.local_many(names) as paths:
        cache_files = {Path(path).read_bytes() for path in paths}
    assert cache_files == {body}
    cache.evict(url)
    assert cache.warm(names).failed == ()
    with cache.samples("s", 10) as samples:
        assert [bytes(one) for one in samples.get_or_put_many([3, 3, 3], lambda some: [b"%d" % i for i in some])] == [b"3"] * 3
    assert cache.get("before") == b"stays"
    assert cache.check(deep=True) == []


def test_hits_and_misses_in_one_call(cache: forebay.Cache, server: ScriptedServer) -> None:
    urls, bodies = several(server, [20_000] * 30)
    for url in urls[::3]:
        cache.read(url)
    before = server.gets
    assert as_bytes(cache.read_many(urls)) == bodies
    assert server.gets - before == 20


def test_a_call_of_hits_sets_up_no_fetch(cache: forebay.Cache, server: ScriptedServer) -> None:
    urls, bodies = several(server, [20_000] * 4)
    cache.warm(urls)
    for _ in range(3):  # copied, mapped, remembered
        assert as_bytes(cache.read_many([*urls, urls[0]])) == [*bodies, bodies[0]]


def test_hits_behind_a_miss_are_read_while_it_is_fetched(cache: forebay.Cache, server: ScriptedServer) -> None:
    miss, found = server.put("/miss", b"m" * 1_000, stall_after=10), list[Any]()
    hits, bodies = several(server, [20_000] * 2)
    cache.warm(hits)
    thread = threading.Thread(target=lambda: found.append(cache.read_many([miss, *hits])))
    thread.start()
    assert server.stalled.wait(60)
    until(lambda: cache.stats().hits == 2, "the hits")
    server.go.set()
    thread.join()
    assert as_bytes(found[0]) == [b"m" * 1_000, *bodies]
    assert server.gets == 3


def test_a_hit_whose_file_is_gone_when_it_is_read_is_fetched(cache: forebay.Cache, server: ScriptedServer) -> None:
    urls, bodies = several(server, [400_000] * 5)
    cache.warm(urls)
    for path in (cache.path / "blobs").glob("*/*"):
        path.unlink()
    assert as_bytes(cache.read_many([*urls, urls[2]])) == [*bodies, bodies[2]]
    assert server.gets == 10


@pytest.mark.parametrize(
    "script",
    [
        {"ranges": False}, {"etag": None}, {"etag": None, "modified": None}, {"etag": 'W/"weak"'}, {"chunked": True}, {"gzip": True},
        {"statuses": [503]}, {"statuses": [429, 500], "retry_after": "0"}, {"cut_after": 50, "cuts": 1}, {"conditions": False},
    ],
    ids=str,
)  # fmt: skip
def test_servers_of_every_kind(script: dict[str, Any], tmp_path: Path, server: ScriptedServer) -> None:
    quick = forebay.RemoteOptions(backoff=0.001)
    urls, bodies = several(server, [0, 1, 3_000, 100_000, 600_000], **script)
    with forebay.Cache(tmp_path / "root", budget=64 << 20, remote_options=quick) as cache:
        assert as_bytes(cache.read_many(urls)) == bodies
        assert as_bytes(cache.read_many(urls)) == bodies
        assert cache.check(deep=True) == []


def test_redirects_are_followed(cache: forebay.Cache, server: ScriptedServer) -> None:
    targets, bodies = several(server, [2_000, 400_000])
    urls = [server.put(f"/to/{number}", b"", redirect=url) for number, url in enumerate(targets)]
    assert as_bytes(cache.read_many(urls)) == bodies


def test_the_first_error_is_raised_after_the_others_have_ended(cache: forebay.Cache, server: ScriptedServer) -> None:
    urls, bodies = several(server, [10_000] * 12)
    asked = [*urls[:5], f"{server.url}/missing", *urls[5:], f"{server.url}/denied"]
    server.put("/denied", b"", statuses=[403] * 9)
    with pytest.raises(errors.NotFound):
        cache.read_many(asked)
    before = server.gets
    assert as_bytes(cache.read_many(urls)) == bodies
    assert server.gets == before
    results = cache.read_many(asked, return_exceptions=True)
    kinds = [type(result) for result in results if isinstance(result, Exception)]
    assert kinds == [errors.NotFound, errors.AccessDenied]
    assert results[0] == bodies[0]


def test_an_invalid_url_stands_in_its_place(cache: forebay.Cache, server: ScriptedServer) -> None:
    url = server.put("/a", b"a")
    first, second, third, fourth = cache.read_many([url, "", "what://b", "simplecache::s3://b/a"], return_exceptions=True)
    assert first == b"a"
    assert all(isinstance(each, errors.ConfigError | errors.MissingExtra) for each in (second, third, fourth))
    with pytest.raises(errors.ConfigError, match="several URLs"):
        cache.read_many(url)
    assert cache.read_many([]) == []


@pytest.mark.parametrize("size", [100_000, 900_000])
def test_together_they_may_exceed_the_budget(size: int, tmp_path: Path, server: ScriptedServer) -> None:
    urls, bodies = several(server, [size] * (6_000_000 // size))
    with forebay.Cache(tmp_path / "root", budget=2_000_000, min_free=0) as cache:
        for _ in range(2):
            assert as_bytes(cache.read_many(urls)) == bodies
            now = cache.stats()
            assert now.bytes_used + now.bytes_reserved <= 2_000_000
        if size < SMALL:  # of the large ones, too many may be under way for one to have room
            assert now.evictions
            assert now.fallbacks == 0
        assert cache.check(deep=True) == []


def test_what_never_fits_is_served_from_memory(tmp_path: Path, server: ScriptedServer) -> None:
    urls, bodies = several(server, [10_000, 3_000_000, 10_000, 250_000])
    with forebay.Cache(tmp_path / "root", budget=200_000, min_free=0) as cache:
        assert as_bytes(cache.read_many(urls)) == bodies
        assert server.gets == len(urls)
        assert cache.stats().fallbacks == 2


def test_what_changed_is_fetched_again_and_what_did_not_is_only_asked_for(cache: forebay.Cache, server: ScriptedServer) -> None:
    urls, bodies = several(server, [30_000] * 6)
    cache.read_many(urls)
    bodies[2] = os.urandom(40_000)
    server.put("/2.bin", bodies[2])
    server.requests.clear()
    assert as_bytes(cache.read_many(urls, refresh=True)) == bodies
    assert sorted((request.method, request.status) for request in server.requests) == [("GET", 206)] + [("GET", 304)] * 5
    assert as_bytes(cache.read_many(urls, max_age=0)) == bodies


def test_options_of_read(tmp_path: Path, cache: forebay.Cache, server: ScriptedServer) -> None:
    urls, bodies = several(server, [1_000] * 3)
    assert as_bytes(cache.read_many(urls, bypass=True)) == bodies
    assert cache.stats().entries == 0
    assert as_bytes(cache.read_many(urls, pin=True)) == bodies
    assert {entry.life for entry in cache.entries()} == {"pinned"}
    (tmp_path / "file").write_bytes(b"local")
    assert as_bytes(cache.read_many([tmp_path / "file", urls[0]])) == [b"local", bodies[0]]
    assert as_bytes(cache.read_many([tmp_path / "file"], force=True)) == [b"local"]
    assert cache.stats().entries == 4
    missing = cache.read_many([tmp_path / "none"], return_exceptions=True)
    assert isinstance(missing[0], errors.NotFound)


def test_offline(tmp_path: Path, server: ScriptedServer) -> None:
    urls, bodies = several(server, [1_000] * 3)
    with forebay.Cache(tmp_path / "root") as cache:
        cache.read_many(urls[:2])
    with forebay.Cache(tmp_path / "root", offline=True) as cache:
        assert as_bytes(cache.read_many(urls[:2])) == bodies[:2]
        with pytest.raises(errors.Offline):
            cache.read_many(urls)
    assert server.gets == 2


def test_without_a_cache_and_in_a_read_only_root(tmp_path: Path, server: ScriptedServer) -> None:
    urls, bodies = several(server, [1_000, 400_000, 2_000])
    with forebay.Cache(enabled=False) as cache:
        assert as_bytes(cache.read_many(urls)) == bodies
    with forebay.Cache(tmp_path / "root") as cache:
        cache.read_many(urls[:1])
    before = server.gets
    with forebay.Cache(tmp_path / "root", read_only=True) as cache:
        assert as_bytes(cache.read_many(urls)) == bodies
    assert server.gets - before == 2


def test_the_upstream_is_asked_first(tmp_path: Path, server: ScriptedServer) -> None:
    urls, bodies = several(server, [1_000] * 4)
    with forebay.Cache(tmp_path / "above") as cache:
        cache.read_many(urls)
    before = server.gets
    with forebay.Cache(tmp_path / "root", upstream=tmp_path / "above") as cache:
        assert as_bytes(cache.read_many(urls)) == bodies
    assert server.gets == before


def test_four_processes_fetch_each_object_once(tmp_path: Path, server: ScriptedServer) -> None:
    urls, bodies = several(server, [20_000] * 80, latency=0.002)

    def reader(line: Line) -> bool:
        with forebay.Cache(tmp_path / "root", budget=64 << 20) as cache:
            line.say("open")
            line.hear()
            return as_bytes(cache.read_many(urls)) == bodies

    with contextlib.ExitStack() as readers:
        every = [readers.enter_context(talk_to(reader)) for _ in range(4)]
        assert [each.hear() for each in every] == ["open"] * 4
        for each in every:
            each.say()
        assert all(each.result() for each in every)
    assert server.gets == len(urls)


def test_the_objects_of_a_killed_process_are_taken_over(tmp_path: Path, server: ScriptedServer, children: Callable[..., Any]) -> None:
    urls, bodies = several(server, [20_000] * 20, stall_after=10, stalls=20)

    def reader() -> None:
        with forebay.Cache(tmp_path / "root") as cache:
            cache.read_many(urls)

    first = children(reader)
    assert server.stalled.wait(60)
    first.signal(signal.SIGKILL)
    first.wait()
    server.go.set()
    with forebay.Cache(tmp_path / "root") as cache:
        assert as_bytes(cache.read_many(urls)) == bodies
        assert cache.check(deep=True) == []


def test_a_large_object_is_resumed(tmp_path: Path, server: ScriptedServer) -> None:
    body = os.urandom(40 << 20)
    url = server.put("/large", body, stall_after=6 << 20)

    def reader(line: Line) -> None:
        def tell(step: forebay.Progress) -> None:
            if step.done > 5 << 20:
                line.say("far")

        with forebay.Cache(tmp_path / "root", remote_options=forebay.RemoteOptions(streams=1)) as cache:
            cache.warm([url], on_progress=tell)

    with talk_to(reader) as first:
        assert first.hear() == "far"
        first.kill()
    before = server.sent
    server.objects["/large"].stall_after = None
    server.go.set()
    with forebay.Cache(tmp_path / "root") as cache:
        assert cache.read_many([url]) == [body]
        assert server.sent - before < len(body) - (2 << 20)


def test_an_error_reaches_the_process_that_waits(tmp_path: Path, server: ScriptedServer) -> None:
    url = server.put("/slow", b"x" * 1000, stall_after=10, stalls=1)

    def reader(line: Line) -> str:
        with forebay.Cache(tmp_path / "root", remote_options=forebay.RemoteOptions(attempts=1)) as cache:
            line.say("open")
            try:
                cache.read_many([url])
            except errors.RemoteError as error:
                return type(error).__name__
        return "none"

    with talk_to(reader) as first:
        assert first.hear() == "open"
        assert server.stalled.wait(60)
        with forebay.Cache(tmp_path / "root") as cache, talk_to(reader) as second:
            assert second.hear() == "open"
            while cache.stats().waits == 0:
                os.sched_yield()
            server.drop()
            assert first.result() == second.result() == "RemoteUnavailable"
    assert server.gets == 1


def read_until_given_up(cache: forebay.Cache, urls: list[str], line: Line) -> None:
    """Read in a child until Ctrl-C ends the call; the process then lives on until its line closes."""
    with pytest.raises(KeyboardInterrupt):
        cache.read_many(urls)
    line.say("given up")
    line.hear()


def test_a_call_that_is_given_up_releases_its_keys(cache: forebay.Cache, server: ScriptedServer) -> None:
    urls, bodies = several(server, [1_000] * 40)
    server.objects["/5.bin"].stall_after = 10
    with talk_to(lambda line: read_until_given_up(cache, urls, line)) as other:
        assert server.stalled.wait(60)
        other.signal(signal.SIGINT)
        assert other.hear() == "given up"
        server.go.set()
        with cache.local_many(urls, timeout=0) as paths:
            assert [Path(path).read_bytes() for path in paths] == bodies


def test_a_key_that_this_process_fetches_already_is_waited_for(cache: forebay.Cache, server: ScriptedServer) -> None:
    """The same object under two spellings is one key; and a call by another thread that has the key is joined."""
    url = server.put("/a", b"a" * 1000)
    assert as_bytes(cache.read_many([url, url.replace("http:", "HTTP:"), f"{url}#part"])) == [b"a" * 1000] * 3
    assert server.gets == 1


def test_all_waits_of_a_call_share_its_timeout(
    cache: forebay.Cache, server: ScriptedServer, children: ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    urls, bodies = several(server, [1_000] * 8, stall_after=10, stalls=1)
    for url in urls:
        children(lambda url=url: cache.read(url) and None)
    until(lambda: server.gets == len(urls), "the requests of the others")
    began = time.monotonic()
    assert as_bytes(cache.read_many(urls, timeout=3)) == bodies  # past the cache
    assert time.monotonic() - began < 3 * len(urls) / 2
    look, looks = locks.holders_by_byte, []
    monkeypatch.setattr(locks, "holders_by_byte", lambda path: looks.append(path) or look(path))
    results = list(cache.local_many(urls, timeout=0, return_exceptions=True))
    assert {type(result) for result in results} == {errors.WaitTimeout}
    assert all("process " in str(result) for result in results)
    assert len(looks) <= 2  # each goes through the descriptors of all processes


# -- local_many --------------------------------------------------------------------------------------------------------


def test_local_many_gives_paths_that_stay(cache: forebay.Cache, server: ScriptedServer, tmp_path: Path) -> None:
    urls, bodies = several(server, [1_000, 400_000, 50_000])
    (tmp_path / "own").write_bytes(b"own")
    with cache.local_many([*urls, urls[0], tmp_path / "own"]) as paths:
        assert [Path(path).read_bytes() for path in paths] == [*bodies, bodies[0], b"own"]
        assert paths[-1] == str(tmp_path / "own")
        assert paths[:1] == [paths[0]]
        assert not cache.evict(urls[0]).removed
    assert cache.evict(urls[0]).removed
    assert server.gets == 3


def test_local_many_without_room_raises_and_leaves_no_lease(tmp_path: Path, server: ScriptedServer) -> None:
    urls, bodies = several(server, [300_000] * 10)
    with forebay.Cache(tmp_path / "root", budget=1_000_000, min_free=0) as cache:
        with pytest.raises(errors.NoSpace):
            cache.local_many(urls)
        with cache.local_many(urls, return_exceptions=True) as found:
            there = [path for path in found if isinstance(path, str)]
            assert 1 <= len(there) <= 3
        with cache.local_many(urls[:2]) as paths:
            assert [Path(path).read_bytes() for path in paths] == bodies[:2]


def test_leases_of_local_many_can_be_pickled(cache: forebay.Cache, server: ScriptedServer) -> None:
    urls, bodies = several(server, [1_000] * 3)
    with cache.local_many(urls) as paths:
        copy = pickle.loads(pickle.dumps(paths))
    assert [Path(path).read_bytes() for path in copy] == bodies
    copy.close()


# -- warm --------------------------------------------------------------------------------------------------------------


def test_warm_reports_what_is_there_and_what_is_not(tmp_path: Path, server: ScriptedServer) -> None:
    urls, _ = several(server, [10_000] * 20 + [5_000_000])
    steps: list[forebay.Progress] = []
    with forebay.Cache(tmp_path / "root", budget=2_000_000, min_free=0) as cache:
        report = cache.warm([*urls, f"{server.url}/missing", "what://x"], on_progress=steps.append)
        assert sorted(report.done) == sorted(urls[:20])
        assert {(url, type(error)) for url, error in report.failed} >= {
            (urls[20], errors.NoSpace), (f"{server.url}/missing", errors.NotFound),
        }  # fmt: skip
        assert len(report.failed) == 3
        assert {step.url for step in steps if step.state == "done"} == set(urls[:20])
        assert [step.url for step in steps if step.state == "direct"] == [urls[20]]
        before = server.gets
        assert len(cache.warm(iter(urls[:20]), jobs=3).done) == 20
        assert server.gets == before


def test_what_gives_the_urls_may_read_other_objects_meanwhile(tmp_path: Path, server: ScriptedServer) -> None:
    """Large responses that have begun take the connections that the node may have."""
    large = [server.put(f"/large/{number}", bytes(2_000_000)) for number in range(12)]
    lists = [server.put(f"/list/{number}", b"%d" % number) for number in range(3)]
    with forebay.Cache(tmp_path / "root", budget=128 << 20, max_connections=2) as cache:

        def urls() -> Iterator[str]:
            for number, url in enumerate(lists):
                assert cache.read(url) == b"%d" % number
                yield from large[4 * number : 4 * number + 4]

        assert len(cache.warm(urls(), on_progress=lambda step: None if step.state != "done" else tell(cache, lists)).done) == 12


def test_on_progress_may_read_other_objects_of_the_same_call(cache: forebay.Cache, server: ScriptedServer) -> None:
    urls, bodies = several(server, [1_000, 400_000, 20_000, 2_000_000] * 5)
    results: list[bool] = []

    def look(step: forebay.Progress) -> None:
        number = (urls.index(step.url) + 1 + len(results)) % len(urls)
        results.append(bytes(cache.read(urls[number])) == bodies[number])

    assert sorted(cache.warm(urls, on_progress=look).done) == sorted(urls)
    assert len(results) > len(urls)
    assert all(results)
    assert cache.check(deep=True) == []


def tell(cache: forebay.Cache, urls: list[str]) -> None:
    for url in urls:
        cache.read(url, refresh=True)


@pytest.mark.parametrize("what", ["written to", "removed"])
def test_a_damaged_copy_is_not_given_out(what: str, tmp_path: Path, server: ScriptedServer) -> None:
    urls, bodies = several(server, [50_000] * 3)
    with forebay.Cache(tmp_path / "root") as cache, cache.local_many(urls) as paths:
        damaged = Path(paths[1])
    if what == "removed":
        damaged.unlink()
    else:
        damaged.chmod(0o600)
        damaged.write_bytes(bytes(50_000))

    def look() -> list[bytes]:
        with forebay.Cache(tmp_path / "root") as cache, cache.local_many(urls) as paths:
            return [Path(path).read_bytes() for path in paths]

    assert in_child(look) == bodies
    assert server.gets == 4


def test_threads_of_a_call_that_is_given_up_release_their_keys(tmp_path: Path, server: ScriptedServer) -> None:
    urls, bodies = several(server, [1_000] * 3, statuses=[503])
    with forebay.Cache(tmp_path / "root", remote_options=forebay.RemoteOptions(backoff=60)) as cache:
        with talk_to(lambda line: read_until_given_up(cache, urls, line)) as other:
            until(lambda: server.gets == len(urls), "the failures, after which the threads wait")
            other.signal(signal.SIGINT)
            assert other.hear() == "given up"
            assert as_bytes([cache.read(url) for url in urls]) == bodies
