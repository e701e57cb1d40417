"""Objects that are opened by blocks: what is fetched and kept, by how many requests, of which version."""

from __future__ import annotations

import os
import signal
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pytest

import forebay
from forebay import errors
from forebay._engine.flight import Flight
from forebay.cache import fetcher_of
from forebay.fetch import blocks as blocks_module
from forebay.fetch.request import FetchOptions, block_key, index_key
from forebay.remote import RemoteOptions
from forebay.testing import Request, ScriptedServer
from tests.processes import Child, Gate, ProcessGroup, fork
from tests.servers.nginx import Nginx
from tests.servers.nginx import nginx as running
from tests.servers.rgw import RgwServer, rgw_server  # noqa: F401 (a fixture)

SIZE = 100_000
BODY = os.urandom(SIZE * 10 + 333)
COUNT = 11


def blocks_in(cache: forebay.Cache) -> list[str]:
    return [entry.key for entry in cache.entries("urls") if "#block=" in entry.key]


def ranges(server: ScriptedServer) -> list[str | None]:
    return [request.headers.get("Range") for request in server.requests if request.method == "GET"]


def asked(first: int, last: int) -> str:
    """The range of some neighbouring blocks."""
    return f"bytes={first * SIZE}-{min((last + 1) * SIZE, len(BODY)) - 1}"


def piece(file: BinaryIO, number: int, count: int = 1) -> bool:
    """Whether some blocks are read as they are."""
    file.seek(number * SIZE)
    return file.read(count * SIZE) == BODY[number * SIZE : (number + count) * SIZE]


@pytest.fixture
def url(server: ScriptedServer) -> str:
    return server.put("/a.bin", BODY)


# -- what is fetched ----------------------------------------------------------------------------------------------------


def test_only_what_is_touched_is_fetched_and_each_block_once(cache: forebay.Cache, server: ScriptedServer, url: str) -> None:
    for _ in range(2):
        with cache.open(url, block_size=SIZE) as file:
            assert piece(file, 3)
            file.seek(7 * SIZE + 50)
            assert file.read(10) == BODY[7 * SIZE + 50 : 7 * SIZE + 60]
            assert piece(file, 10)
    assert ranges(server) == [asked(3, 3), asked(7, 7), asked(10, 10)]
    assert server.sent == 2 * SIZE + 333
    assert server.heads == 1
    stats = cache.stats()
    assert (stats.misses, stats.fills, stats.requests, stats.bytes_remote) == (3, 3, 4, server.sent)
    assert stats.hits >= 3


def test_neighbours_are_fetched_by_one_request_and_gaps_side_by_side(
    cache: forebay.Cache, server: ScriptedServer, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks_module, "RUN", 3 * SIZE)
    with cache.open(url, block_size=SIZE) as file:
        assert piece(file, 4)
        together = threading.Barrier(3, timeout=30)  # the first requests wait until there are three
        server.on_request = _meeting({asked(0, 2), asked(3, 3), asked(5, 7)}, together)
        file.seek(0)
        assert file.read() == BODY
    assert sorted(map(str, ranges(server))) == sorted([asked(4, 4), asked(0, 2), asked(3, 3), asked(5, 7), asked(8, 10)])


def _meeting(these: set[str], barrier: threading.Barrier) -> Callable[[Request], None]:
    def on_request(request: Request) -> None:
        if request.headers.get("Range") in these:
            barrier.wait()

    return on_request


def test_blocks_of_another_size_are_other_entries_of_the_same_version(cache: forebay.Cache, server: ScriptedServer, url: str) -> None:
    for size in (SIZE, 2 * SIZE, "auto"):
        with cache.open(url, block_size=size) as file:
            assert file.read(10) == BODY[:10]
    assert server.heads == 1
    assert len(blocks_in(cache)) == 2
    assert cache.entry(url) is not None, "an object of at most one block is fetched whole"


@pytest.mark.parametrize("length", [0, 1, SIZE - 1, SIZE])
def test_an_object_of_at_most_one_block_is_fetched_whole(cache: forebay.Cache, server: ScriptedServer, length: int) -> None:
    url = server.put("/short", BODY[:length])
    with cache.open(url, block_size=SIZE) as file:
        assert file.read() == BODY[:length]
        assert file.seek(0, os.SEEK_END) == length
    assert bytes(cache.read(url)) == BODY[:length]
    assert blocks_in(cache) == []
    assert [request.status for request in server.requests if request.method == "GET"][-1] == 200 if length == 0 else server.gets == 1


def test_a_whole_object_in_the_cache_serves_its_blocks(cache: forebay.Cache, server: ScriptedServer, url: str) -> None:
    cache.read(url)
    asked_before = len(server.requests)
    with cache.open(url, block_size=SIZE) as file:
        assert piece(file, 5, 3)
    assert len(server.requests) == asked_before
    assert blocks_in(cache) == []


def test_a_whole_object_of_the_version_of_the_blocks_needs_no_validation_of_its_own(cache: forebay.Cache, server: ScriptedServer) -> None:
    url = server.put("/a.bin", BODY)
    cache.read(url)
    with cache.open(url, block_size=SIZE, max_age=0):
        assert (server.gets, server.heads) == (1, 1)  # what was read is validated
    entry = cache.entry(url)
    assert entry is not None
    fetcher = fetcher_of(cache)
    fetcher.store.invalidate([entry])
    with cache.open(url, block_size=SIZE) as file:
        assert piece(file, 1)
    assert (server.gets, server.heads) == (1, 2)


def test_a_cached_block_is_mapped_and_copied_once(tmp_path: Path, url: str) -> None:
    for _ in range(2):
        with forebay.Cache(tmp_path / "root", budget=8 << 20, min_free=0) as cache, cache.open(url, block_size=SIZE) as file:
            assert piece(file, 3)
            is_mapped = "/root/blobs/" in Path("/proc/self/maps").read_text()
    assert is_mapped


def test_a_read_of_the_object_fetches_it_whole_beside_its_blocks(cache: forebay.Cache, server: ScriptedServer, url: str) -> None:
    with cache.open(url, block_size=SIZE) as file:
        assert piece(file, 1)
    assert bytes(cache.read(url)) == BODY
    assert server.sent == SIZE + len(BODY)


# -- which version ------------------------------------------------------------------------------------------------------


def test_the_remote_is_asked_once_a_period_for_all_blocks(cache: forebay.Cache, server: ScriptedServer, url: str) -> None:
    for number in range(3):
        with cache.open(url, block_size=SIZE) as file:
            assert piece(file, number)
    assert server.heads == 1
    with cache.open(url, block_size=SIZE, max_age=0) as file:
        assert piece(file, 0)
    assert server.heads == 2
    assert server.requests[-1].status == 304
    with cache.open(url, block_size=SIZE, refresh=True), cache.open(url, block_size=SIZE, max_age="forever"):
        assert server.heads == 3
    cache.invalidate(url)
    with cache.open(url, block_size=SIZE, max_age="forever"):
        assert server.heads == 4
    assert server.gets == 3


def test_an_open_file_goes_on_with_its_version_and_mixes_none(cache: forebay.Cache, server: ScriptedServer, url: str) -> None:
    other = BODY[::-1]
    with cache.open(url, block_size=SIZE) as file:
        assert piece(file, 0)
        assert piece(file, 2)
        server.put("/a.bin", other)
        assert piece(file, 0)
        file.seek(SIZE)
        with pytest.raises(errors.RemoteChanged):
            file.read(10)
        assert file.tell() == SIZE
        with cache.open(url, block_size=SIZE) as new:  # it was noted: asked again before max_age
            assert new.read(SIZE) == other[:SIZE]
        assert piece(file, 2)
        with pytest.raises(errors.RemoteChanged):
            piece(file, 5, 2)


def test_the_index_is_as_old_as_the_question(cache: forebay.Cache, server: ScriptedServer, url: str) -> None:
    store, when = fetcher_of(cache).store, list[int]()
    server.on_request = lambda request: when.append(store.now())
    with cache.open(url, block_size=SIZE) as file:
        assert piece(file, 0)
    validator = server.objects["/a.bin"].etag
    for key, moment in zip((index_key(url), block_key(url, 0, SIZE, validator)), when, strict=True):
        entry = store.entry("urls", key)
        assert entry is not None
        assert 0 < store.validated(entry) < moment


@pytest.mark.parametrize("etag", [None, 'W/"weak"'])
def test_without_a_strong_validator_the_object_is_fetched_whole(cache: forebay.Cache, server: ScriptedServer, etag: str | None) -> None:
    url = server.put("/a.bin", BODY, etag=etag)
    for _ in range(2):
        with cache.open(url, block_size=SIZE) as file:
            assert piece(file, 5)
    assert server.sent == len(BODY)
    assert blocks_in(cache) == []


def test_a_server_without_ranges_is_asked_for_the_whole_object_and_never_again_for_parts(
    cache: forebay.Cache, server: ScriptedServer
) -> None:
    url = server.put("/a.bin", BODY, ranges=False)
    with cache.open(url, block_size=SIZE) as file:
        assert piece(file, 5, 3)
        assert piece(file, 0)
        assert file.seek(0, os.SEEK_END) == len(BODY)
    gets = server.gets
    with cache.open(url, block_size=SIZE) as file:
        assert piece(file, 7)
    whole = cache.entry(url)
    assert whole is not None
    cache.evict(whole)
    assert (server.gets, server.heads) == (gets, 1)


def test_a_server_that_refuses_ranges_is_asked_for_the_whole_object(cache: forebay.Cache, server: ScriptedServer, url: str) -> None:
    """With 416, as for one that lies beyond the end."""
    server.on_request = lambda request: server.objects["/a.bin"].statuses.extend([416] if "Range" in request.headers else [])
    with cache.open(url, block_size=SIZE) as file:
        assert piece(file, 5, 3)
        assert piece(file, 0)


def test_a_server_that_forgets_ranges_and_changes_mixes_no_versions(cache: forebay.Cache, server: ScriptedServer, url: str) -> None:
    with cache.open(url, block_size=SIZE) as file:
        assert piece(file, 0)
        server.put("/a.bin", BODY[::-1], ranges=False, conditions=False)
        file.seek(5 * SIZE)
        with pytest.raises(errors.RemoteChanged):
            file.read(10)


def test_an_object_that_became_shorter_is_another_version(cache: forebay.Cache, server: ScriptedServer, url: str) -> None:
    with cache.open(url, block_size=SIZE) as file:
        server.put("/a.bin", BODY[: 2 * SIZE])
        file.seek(5 * SIZE)
        with pytest.raises(errors.RemoteChanged):
            file.read(10)


def test_where_the_remote_cannot_be_reached_blocks_are_served_and_others_raise(
    tmp_path: Path, server: ScriptedServer, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    options = RemoteOptions(attempts=1)
    with forebay.Cache(tmp_path / "root", budget=8 << 20, min_free=0, max_age=0, remote_options=options) as cache:
        with cache.open(url, block_size=SIZE) as file:
            assert piece(file, 4)
        server.objects["/a.bin"].statuses = [503, 503]
        with cache.open(url, block_size=SIZE) as file:
            assert piece(file, 4)
            with pytest.raises(errors.RemoteUnavailable):
                piece(file, 5)
            assert piece(file, 5)
    assert caplog.text.count("cannot be reached") == 1


def test_a_remote_that_cannot_be_reached_validates_nothing(tmp_path: Path, server: ScriptedServer, url: str) -> None:
    """It is asked again after some seconds, not after ``max_age``."""
    options = RemoteOptions(attempts=1)
    with forebay.Cache(tmp_path / "root", budget=8 << 20, min_free=0, max_age=300, remote_options=options) as cache:
        cache.open(url, block_size=SIZE).close()
        store = fetcher_of(cache).store
        index = store.entry("urls", index_key(url))
        assert index is not None
        store.set_validated([(index, store.now() - 1000 * 10**9)], store.now())
        server.objects["/a.bin"].statuses = [503]
        cache.open(url, block_size=SIZE).close()
        cache.open(url, block_size=SIZE).close()
        assert server.heads == 2
        index = store.entry("urls", index_key(url))
        assert index is not None
        assert store.now() - store.validated(index) > 200 * 10**9


def test_an_object_that_is_gone_is_not_found(cache: forebay.Cache, server: ScriptedServer, url: str) -> None:
    with cache.open(url, block_size=SIZE) as file:
        assert piece(file, 4)
    del server.objects["/a.bin"]
    with pytest.raises(errors.NotFound):
        cache.open(url, block_size=SIZE, max_age=0)
    with pytest.raises(errors.NotFound):
        cache.open(url, block_size=SIZE)  # it was noted


def test_a_refresh_takes_what_another_call_validated_meanwhile(cache: forebay.Cache, server: ScriptedServer, url: str) -> None:
    with cache.open(url, block_size=SIZE):
        pass
    fetcher = fetcher_of(cache)
    hold = fetcher.store.locks.try_hold("urls", index_key(url))
    opened: list[BinaryIO] = []
    reader = threading.Thread(target=lambda: opened.append(cache.open(url, block_size=SIZE, refresh=True)))
    reader.start()
    while cache.stats().waits == 0:
        os.sched_yield()
    index = fetcher.store.entry("urls", index_key(url))
    assert index is not None
    assert fetcher.validate(fetcher.target(url), FetchOptions(), index) is None
    assert hold is not None
    hold.release()
    reader.join()
    opened[0].close()
    assert server.heads == 2


# -- options ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{"sha256": "0" * 64}, {"pin": True}, {"block_size": 1000}, {"block_size": "65MiB"}, {"block_size": "50%"}, {"block_size": "much"},
     {"block_size": 0}, {"block_size": True}],
)  # fmt: skip
def test_options_that_make_no_sense_with_blocks_are_refused(
    cache: forebay.Cache, server: ScriptedServer, url: str, options: dict[str, Any]
) -> None:
    with pytest.raises(errors.ConfigError, match=next(iter(options))):
        cache.open(url, **({"block_size": SIZE} | options))
    assert server.requests == []


@pytest.mark.parametrize(
    ("text", "size"), [("8MB", 8_000_000), (8 << 20, 8 << 20), ("64KB", 64_000), ("64MiB", 64 << 20), ("auto", 8 << 20)]
)
def test_sizes_of_blocks(text: int | str, size: int) -> None:
    assert blocks_module.parse_block_size(text) == size


def test_a_version_that_is_not_the_expected_one_is_refused(cache: forebay.Cache, server: ScriptedServer, url: str) -> None:
    etag = server.objects["/a.bin"].etag
    with pytest.raises(errors.ChecksumMismatch):
        cache.open(url, block_size=SIZE, etag='"other"')
    with cache.open(url, block_size=SIZE, etag=etag) as file:
        assert piece(file, 1)
    with pytest.raises(errors.ChecksumMismatch):
        cache.open(url, block_size=SIZE, etag='"other"')


def test_offline_serves_the_blocks_that_are_cached(tmp_path: Path, server: ScriptedServer, url: str) -> None:
    with forebay.Cache(tmp_path / "root", budget=8 << 20, min_free=0) as cache, cache.open(url, block_size=SIZE) as file:
        assert piece(file, 4)
    server.close()
    with forebay.Cache(tmp_path / "root", offline=True) as cache:
        with cache.open(url, block_size=SIZE, max_age=0) as file:
            assert piece(file, 4)
            with pytest.raises(errors.Offline):
                piece(file, 5)
            with pytest.raises(errors.Offline):
                piece(file, 5, 2)
        with pytest.raises(errors.Offline):
            cache.open(f"{server.url}/other", block_size=SIZE)


def test_past_the_cache_nothing_is_kept(cache: forebay.Cache, server: ScriptedServer, url: str) -> None:
    with cache.open(url, block_size=SIZE, bypass=True) as file:
        assert piece(file, 4)
    assert cache.entries() == []


def test_a_local_file_is_opened_in_place_and_kept_by_force(cache: forebay.Cache, tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(BODY)
    with cache.open(path, block_size=SIZE) as file:
        assert piece(file, 4)
    assert cache.entries() == []
    with cache.open(path, block_size=SIZE, force=True) as file:
        assert piece(file, 4)
        path.write_bytes(BODY[::-1])
        with pytest.raises(errors.RemoteChanged):
            piece(file, 5)
    assert len(blocks_in(cache)) == 1


def test_a_filesystem_object_is_read_by_blocks_where_it_tells_versions(cache: forebay.Cache) -> None:
    fsspec = pytest.importorskip("fsspec")
    memory = fsspec.filesystem("memory")
    memory.pipe("/dir/a.bin", BODY)
    with cache.open("/dir/a.bin", filesystem=memory, block_size=SIZE) as file:
        assert piece(file, 4)
    assert blocks_in(cache) == []  # a time is no strong validator: it is fetched whole


@pytest.mark.parametrize("options", [{"enabled": False}, {"read_only": True}])
def test_without_a_cache_to_write_to_blocks_are_read_past_it(
    tmp_path: Path, server: ScriptedServer, url: str, options: dict[str, Any]
) -> None:
    forebay.Cache(tmp_path / "root", budget=8 << 20, min_free=0).close()
    with forebay.Cache(tmp_path / "root", **options) as cache, cache.open(url, block_size=SIZE) as file:
        for at in range(0, SIZE, 1000):
            file.seek(4 * SIZE + at)
            assert file.read(1000) == BODY[4 * SIZE + at : 4 * SIZE + at + 1000]
        assert piece(file, 1, 5)
    assert [range for range in ranges(server) if range == asked(4, 4)] == [asked(4, 4)]
    assert server.sent == 5 * SIZE


def test_a_root_that_may_only_be_read_serves_the_blocks_that_it_has(tmp_path: Path, server: ScriptedServer, url: str) -> None:
    with forebay.Cache(tmp_path / "root", budget=8 << 20, min_free=0) as cache, cache.open(url, block_size=SIZE) as file:
        assert piece(file, 4, 2)
    before = len(server.requests)
    with forebay.Cache(tmp_path / "root", read_only=True) as cache, cache.open(url, block_size=SIZE) as file:
        assert piece(file, 4, 2)
        assert len(server.requests) == before


def test_blocks_of_an_upstream_root_are_served_and_others_kept_in_the_own_one(tmp_path: Path, server: ScriptedServer, url: str) -> None:
    upper, lower = tmp_path / "upper", tmp_path / "lower"
    with forebay.Cache(upper, budget=8 << 20, min_free=0) as cache, cache.open(url, block_size=SIZE) as file:
        assert piece(file, 4)
    before = len(server.requests)
    with forebay.Cache(lower, budget=8 << 20, min_free=0, upstream=upper) as cache:
        with cache.open(url, block_size=SIZE) as file:
            assert piece(file, 4)
            assert len(server.requests) == before
            assert piece(file, 4, 2)
        assert ranges(server)[-1] == asked(5, 5)
        assert len(blocks_in(cache)) == 1
        with cache.open(url, block_size=SIZE, max_age=0) as file:
            assert piece(file, 4)
        assert server.heads == 2
    with forebay.Cache(lower, upstream=upper, offline=True) as cache, cache.open(url, block_size=SIZE) as file:
        assert piece(file, 4, 2)
    with forebay.Cache(upper) as cache:
        cache.read(url)
    before = len(server.requests)
    with forebay.Cache(lower, upstream=upper) as cache, cache.open(url, block_size=SIZE) as file:
        assert piece(file, 7, 2)
        assert len(server.requests) == before


def test_where_there_is_no_room_blocks_are_served_with_one_warning(
    tmp_path: Path, server: ScriptedServer, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    with forebay.Cache(tmp_path / "root", budget=8 << 20, min_free=0) as cache:
        cache.put("pinned", bytes((8 << 20) - 150_000))
        cache.pin("values:pinned")
        with cache.open(url, block_size=2 * SIZE) as file:
            for number in range(0, COUNT, 2):
                assert piece(file, number)
            file.seek(0)
            assert file.read() == BODY
        assert cache.stats().fallbacks >= 1
        assert cache.check(deep=True) == []
    assert caplog.text.count("is served past the cache") == 1


def test_a_closed_cache_lets_its_files_read_on(tmp_path: Path, server: ScriptedServer, url: str) -> None:
    cache = forebay.Cache(tmp_path / "root", budget=8 << 20, min_free=0)
    with cache.open(url, block_size=SIZE) as file:
        assert piece(file, 4)
        cache.close()
        assert piece(file, 4)
        assert piece(file, 5)
        assert piece(file, 6, 3)


# -- in the cache -------------------------------------------------------------------------------------------------------


def test_the_blocks_of_an_object_are_evicted_with_it(cache: forebay.Cache, server: ScriptedServer, url: str) -> None:
    other = server.put("/a.bin2", BODY)
    for one in (url, other):
        with cache.open(one, block_size=SIZE) as file:
            assert piece(file, 4, 3)
    assert cache.entry(url) is None
    report = cache.evict(url)
    assert len(report.removed) == 4
    assert report.spared == ()
    assert len(blocks_in(cache)) == 3
    with pytest.raises(errors.NotCached):
        cache.evict(url)
    cache.read(other)
    entry = cache.entry(other)
    assert entry is not None
    assert len(cache.evict(entry).removed) == 5
    assert cache.entries() == []


def test_the_index_of_an_object_stands_for_its_blocks_and_a_block_for_itself(cache: forebay.Cache, url: str) -> None:
    with cache.open(url, block_size=SIZE) as file:
        assert piece(file, 4, 3)
    (removed,) = cache.evict(blocks_in(cache)[0]).removed
    assert "#block=" in removed
    assert len(cache.evict(index_key(url)).removed) == 3
    assert cache.entries() == []


def test_blocks_are_evicted_one_by_one_and_fetched_again(tmp_path: Path, server: ScriptedServer, url: str) -> None:
    with forebay.Cache(tmp_path / "root", budget=700_000, min_free=0) as cache, cache.open(url, block_size=SIZE) as file:
        for number in range(COUNT):
            assert piece(file, number)
        assert 0 < len(blocks_in(cache)) < COUNT
        assert piece(file, 0)
        assert cache.stats().evictions > 0
        assert cache.check(deep=True) == []
    assert ranges(server).count(asked(0, 0)) == 2


def test_a_damaged_block_is_fetched_again(cache: forebay.Cache, server: ScriptedServer, url: str) -> None:
    with cache.open(url, block_size=SIZE) as file:
        assert piece(file, 4)
    (path,) = [path for path in (cache.path / "blobs").rglob("*") if path.is_file()]
    path.chmod(0o600)
    path.write_bytes(bytes(SIZE))
    with cache.open(url, block_size=SIZE) as file:
        assert piece(file, 4)
    assert server.gets == 2


def test_an_index_that_another_program_wrote_is_replaced(cache: forebay.Cache, server: ScriptedServer, url: str) -> None:
    fetcher_of(cache).store.put("urls", index_key(url), b"", meta="[1]", validator='"x"', validated=fetcher_of(cache).store.now())
    with cache.open(url, block_size=SIZE) as file:
        assert piece(file, 4)
    with cache.open(url, block_size=SIZE):
        assert server.heads == 1


# -- processes ----------------------------------------------------------------------------------------------------------


def test_processes_that_touch_the_same_blocks_fetch_each_once(
    tmp_path: Path, server: ScriptedServer, url: str, children: ProcessGroup
) -> None:
    root, start = tmp_path / "root", Gate()
    forebay.Cache(root, budget=64 << 20, min_free=0).close()
    server.objects["/a.bin"].latency = 0.02  # that all meet

    def read(number: int) -> bool:
        start.wait()
        with forebay.Cache(root) as cache, cache.open(url, block_size=SIZE) as file:
            if number % 2:
                file.seek(number * SIZE)
                assert file.read() == BODY[number * SIZE :]
            file.seek(0)
            return file.read() == BODY

    readers = [children(lambda number=number: read(number)) for number in range(4)]
    for _ in readers:
        start.open()
    assert all(reader.result() for reader in readers)
    start.close()
    assert server.sent == len(BODY)
    assert server.heads == 1


def stalled_reader(root: Path, url: str, server: ScriptedServer, count: int) -> Child:
    """A process that is in the middle of fetching blocks."""

    def read() -> bool:
        with forebay.Cache(root) as cache, cache.open(url, block_size=SIZE) as file:
            return piece(file, 2, count)

    forebay.Cache(root, budget=64 << 20, min_free=0).close()
    server.objects["/a.bin"].stall_after, server.objects["/a.bin"].stalls = SIZE // 2, 1
    child = fork(read, sockets=False)
    assert server.stalled.wait(30)
    return child


@pytest.mark.parametrize("count", [1, 3])
def test_when_the_process_that_fetches_is_killed_another_one_goes_on(tmp_path: Path, server: ScriptedServer, url: str, count: int) -> None:
    with stalled_reader(tmp_path / "root", url, server, count) as child, forebay.Cache(tmp_path / "root") as cache:
        results: list[bool] = []

        def read() -> None:
            with cache.open(url, block_size=SIZE) as file:
                results.append(piece(file, 1, count + 1))

        reader = threading.Thread(target=read)
        reader.start()
        while cache.stats().waits == 0:
            os.sched_yield()
        child.kill()
        server.go.set()
        reader.join(60)
        assert results == [True]
        assert len(blocks_in(cache)) == count + 1
        assert cache.check(deep=True) == []


def test_a_reader_waits_for_another_process_no_longer_than_its_timeout(tmp_path: Path, server: ScriptedServer, url: str) -> None:
    with stalled_reader(tmp_path / "root", url, server, 1) as child, forebay.Cache(tmp_path / "root") as cache:
        with cache.open(url, block_size=SIZE, timeout=0.1) as file:
            assert piece(file, 2)
        assert cache.stats().fallbacks == 1
        server.go.set()
        assert child.result() is True


def test_ctrl_c_ends_a_wait_for_another_process(tmp_path: Path, server: ScriptedServer, url: str) -> None:
    with stalled_reader(tmp_path / "root", url, server, 1) as child:

        def wait() -> str:
            with forebay.Cache(tmp_path / "root") as cache, cache.open(url, block_size=SIZE) as file:
                threading.Thread(target=lambda: _interrupt(cache), daemon=True).start()
                try:
                    piece(file, 2)
                except KeyboardInterrupt:
                    return "interrupted"
            return "read"

        with fork(wait, sockets=False) as waiting:
            assert waiting.result() == "interrupted"
        server.go.set()
        assert child.result() is True


def _interrupt(cache: forebay.Cache) -> None:
    while cache.stats().waits == 0:
        os.sched_yield()
    os.kill(os.getpid(), signal.SIGINT)


def test_an_error_reaches_those_that_wait_and_the_next_read_tries_again(tmp_path: Path, server: ScriptedServer, url: str) -> None:
    options = RemoteOptions(attempts=1)
    with forebay.Cache(tmp_path / "root", budget=8 << 20, min_free=0, remote_options=options) as cache:
        one, two = cache.open(url, block_size=SIZE), cache.open(url, block_size=SIZE)
        results: list[Exception] = []
        server.objects["/a.bin"].statuses = [503]

        def read() -> None:
            try:
                two.read(10)
            except errors.RemoteUnavailable as error:
                results.append(error)

        waiting = threading.Thread(target=read)

        def on_request(_: Request) -> None:
            waiting.start()
            _until_it_waits(cache)

        server.on_request = on_request
        with pytest.raises(errors.RemoteUnavailable):
            one.read(2 * SIZE)
        waiting.join()
        server.on_request = None
        assert len(results) == 1
        assert server.gets == 1
        assert one.read(10) == BODY[:10]
        one.close()
        two.close()


def _until_it_waits(cache: forebay.Cache) -> None:
    while cache.stats().waits == 0:
        os.sched_yield()


def test_what_was_fetched_between_the_look_and_the_lock_is_not_fetched_again(
    cache: forebay.Cache, server: ScriptedServer, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P1 looks: missing / P2 fetches the blocks, and releases their keys / P1 holds them."""
    hold = Flight.holding_free
    first, second = cache.open(url, block_size=SIZE), cache.open(url, block_size=SIZE)

    def late(self: Flight, space: str, keys: list[str]) -> Any:
        monkeypatch.undo()
        assert piece(second, 0, 3)
        return hold(self, space, keys)

    monkeypatch.setattr(Flight, "holding_free", late)
    with first, second:
        assert piece(first, 0, 3)
    assert server.gets == 1


# -- real servers -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def nginx(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nginx]:
    with running(tmp_path_factory.mktemp("nginx") / "plain") as found:
        yield found


def logged(nginx: Nginx, name: str) -> list[tuple[str, int, int]]:
    """Method, status and bytes of each request for a file."""
    lines = [line.split('"') for line in nginx.lines()]
    return [(parts[1].split()[0], *map(int, parts[2].split()[:2])) for parts in lines if name in parts[1]]  # type: ignore[misc]


def test_nginx_sends_only_the_blocks(cache: forebay.Cache, nginx: Nginx) -> None:
    url = nginx.put("plain.bin", BODY)
    for _ in range(2):
        with cache.open(url, block_size=SIZE) as file:
            assert piece(file, 2, 3)
            assert piece(file, 10)
    assert logged(nginx, "plain.bin") == [("HEAD", 200, 0), ("GET", 206, 3 * SIZE), ("GET", 206, 333)]


@pytest.mark.parametrize("place", ["no-ranges", "gzip", "moved"])
def test_nginx_in_other_ways(cache: forebay.Cache, nginx: Nginx, place: str) -> None:
    """It compresses nothing for a client that does not ask for it."""
    name = f"{place}.bin"
    nginx.put(name, BODY)
    for _ in range(2):
        with cache.open(f"{nginx.url}/{place}/{name}", block_size=SIZE) as file:
            assert piece(file, 2, 3)
    whole = sum(size for method, status, size in logged(nginx, name) if method == "GET" and status == 200)
    if place != "no-ranges":
        assert whole == 0
        assert len(blocks_in(cache)) == 3
    else:
        assert blocks_in(cache) == []
        assert bytes(cache.read(f"{nginx.url}/{place}/{name}")) == BODY


@pytest.fixture
def s3(rgw_server: RgwServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[bytes], str]:  # noqa: F811
    """Puts an object; gives its URL."""
    pytest.importorskip("botocore")
    settings = {
        "ENDPOINT_URL": rgw_server.url,
        "ACCESS_KEY_ID": rgw_server.key,
        "SECRET_ACCESS_KEY": rgw_server.secret,
        "REGION": "us-east-1",
    }
    for name, value in settings.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    for name in ("CONFIG_FILE", "SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(f"AWS_{name}", str(tmp_path / "no-such-file"))
    client, bucket = rgw_server.client(), f"blocks-{uuid.uuid4().hex[:12]}"
    client.create_bucket(Bucket=bucket)

    def put(body: bytes) -> str:
        client.put_object(Bucket=bucket, Key="a.bin", Body=body)
        return f"s3://{bucket}/a.bin"

    return put


def test_s3_sends_only_the_blocks_and_of_one_version(cache: forebay.Cache, s3: Callable[[bytes], str]) -> None:
    url = s3(BODY)
    for _ in range(2):
        with cache.open(url, block_size=SIZE) as file:
            assert piece(file, 2, 3)
            assert piece(file, 10)
    assert (cache.stats().bytes_remote, cache.stats().requests) == (3 * SIZE + 333, 3)
    with cache.open(url, block_size=SIZE) as file:
        s3(BODY[::-1])
        assert piece(file, 2, 3)
        with pytest.raises(errors.RemoteChanged):
            piece(file, 7)
    with cache.open(url, block_size=SIZE) as file:
        assert file.read(10) == BODY[:-11:-1]
