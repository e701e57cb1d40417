"""What the rooms above ask of `Fetcher`: local files as entries, files that are opened past the cache."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import forebay
from forebay import errors
from forebay._engine.flight import Flight
from forebay._engine.store import Settings, Store
from forebay.fetch import Fetcher
from forebay.fetch.opening import CacheOptions
from forebay.fetch.request import FetchOptions
from forebay.remote import RemoteOptions
from forebay.testing import ScriptedServer
from tests.conftest import descriptors


@pytest.fixture
def fetcher(tmp_path: Path) -> Iterator[Fetcher]:
    store = Store.open(tmp_path / "root", Settings(budget=8 << 20, min_free=0))
    yield Fetcher(store, RemoteOptions(attempts=1))
    assert store.check(deep=True) == []
    store.close()


def test_threads_that_close_a_cache_at_once_leave_the_other_caches_of_its_root_open(tmp_path: Path) -> None:
    class Meeting:
        threads = threading.Barrier(2)

        def close(self) -> None:
            self.threads.wait(10)

    other, closed = (Fetcher.for_root(CacheOptions(tmp_path / "root")) for _ in range(2))
    meeting = Meeting()
    closed.register(meeting)  # both threads have found the cache open when they leave it
    threads = [threading.Thread(target=closed.close) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert descriptors(tmp_path / "root")
    other.close()
    assert descriptors(tmp_path / "root") == set()


def test_a_cache_is_closed_while_a_thread_opens_files_of_it(tmp_path: Path) -> None:
    class Handle:
        def close(self) -> None:
            """It holds nothing."""

    def register() -> None:
        began.set()
        while not fetcher.closed:
            handles.append(Handle())
            fetcher.register(handles[-1])

    fetcher, handles, began = Fetcher.for_root(CacheOptions(tmp_path / "root")), [Handle() for _ in range(10_000)], threading.Event()
    for handle in handles:
        fetcher.register(handle)
    thread, interval = threading.Thread(target=register), sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        thread.start()
        began.wait()
        fetcher.close()
    finally:
        sys.setswitchinterval(interval)
        fetcher.closed = True
        thread.join()


def test_a_filesystem_object_is_a_source(tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    memory = fsspec.filesystem("memory")
    memory.pipe("/dir/a.bin", b"hello" * 1000)
    with forebay.Cache(tmp_path / "root", budget=8_000_000, min_free=0) as cache:
        assert bytes(cache.read("/dir/a.bin", filesystem=memory)) == b"hello" * 1000
        with cache.local("dir/a.bin", filesystem=memory) as path, open(path, "rb") as file:
            assert file.read(5) == b"hello"
        (entry,) = cache.entries()
        assert cache.evict(entry.name).removed == (entry.name,)
        assert cache.check(deep=True) == []


def test_filesystems_with_other_settings_have_other_keys(tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    (tmp_path / "one" / "x").write_bytes(b"one")
    (tmp_path / "two" / "x").write_bytes(b"two")
    one = fsspec.filesystem("dir", path=str(tmp_path / "one"), target_protocol="file")
    two = fsspec.filesystem("dir", path=str(tmp_path / "two"), target_protocol="file")
    with forebay.Cache(tmp_path / "root", budget=8_000_000, min_free=0) as cache:
        assert bytes(cache.read("x", filesystem=one)) == b"one"
        assert bytes(cache.read("x", filesystem=two)) == b"two"


def test_a_pyarrow_filesystem_is_a_source(tmp_path: Path) -> None:
    fs = pytest.importorskip("pyarrow.fs")
    (tmp_path / "x.bin").write_bytes(b"arrow")
    with forebay.Cache(tmp_path / "root", budget=8_000_000, min_free=0) as cache:
        assert bytes(cache.read(str(tmp_path / "x.bin"), filesystem=fs.LocalFileSystem())) == b"arrow"
        assert len(cache.entries()) == 1


def test_a_local_file_that_is_not_there_is_not_found_by_open_too(fetcher: Fetcher, tmp_path: Path) -> None:
    with pytest.raises(errors.NotFound, match="nowhere"):
        fetcher.open(fetcher.target(tmp_path / "nowhere"), FetchOptions())


def test_offline_no_block_is_asked_for_though_the_cache_is_at_fault(fetcher: Fetcher, monkeypatch: pytest.MonkeyPatch) -> None:
    def busy(*args: object, **kwargs: object) -> object:
        raise errors.WaitTimeout.of("a key", 1.0, "somebody")

    with ScriptedServer() as server:
        target = fetcher.target(server.put("/a", bytes(100_000)))
        fetcher.open(target, FetchOptions(), 64_000).close()
        monkeypatch.setattr(Flight, "make_once", busy)
        with fetcher.open(target, FetchOptions(offline=True, since=-1), 64_000) as file, pytest.raises(errors.Offline):
            file.read(3)
        assert server.gets == 0
        with fetcher.open(target, FetchOptions(), 64_000) as file:
            assert file.read(3) == bytes(3)
    assert fetcher.store.seeing.counts()["requests"] == 2


def test_an_object_that_is_gone_leases_nothing(fetcher: Fetcher) -> None:
    with ScriptedServer() as server:
        url = server.put("/a", b"12345")
        target = fetcher.target(url)
        fetcher.lease(target, FetchOptions()).close()
        del server.objects["/a"]
        with pytest.raises(errors.NotFound) as kept:
            fetcher.lease(target, FetchOptions(since=fetcher.store.now(), refresh=True))
        entry = fetcher.store.entry("urls", target.key)
        assert entry is not None
        assert not fetcher.store.is_leased(entry), str(kept.value)


def test_ranges_of_a_host_that_fell_silent_are_not_waited_for(fetcher: Fetcher, monkeypatch: pytest.MonkeyPatch) -> None:
    with ScriptedServer() as server:
        target = fetcher.target(server.put("/a", bytes(10 << 20)))
        with fetcher.open(target, FetchOptions(bypass=True)) as file:
            file.read(10)
            asked = server.gets
            with monkeypatch.context() as silent:
                silent.setattr(fetcher.store.hosts, "trouble_with", lambda host, patience, **how: (1.0, 0))
                with pytest.raises(errors.RemoteTimeout, match="gave no answer"):
                    file.read()
            assert server.gets == asked


@pytest.mark.parametrize("kind", [errors.RemoteTimeout, errors.RemoteUnavailable])
def test_an_error_that_tells_no_attempts_made_one(kind: type[errors.RemoteError]) -> None:
    error = kind("no", url="http://h/a")
    assert (error.attempts, error.done) == (1, 0)  # type: ignore[attr-defined]


@pytest.mark.parametrize("options", [{}, {"force": True}, {"bypass": True}], ids=str)
@pytest.mark.parametrize("kind", ["directory", "pipe", "socket"])
def test_a_path_that_is_no_file_is_refused_by_every_call(cache: forebay.Cache, tmp_path: Path, kind: str, options: dict[str, bool]) -> None:
    """To open a pipe would be to wait for ever."""
    path = tmp_path / kind
    with contextlib.ExitStack() as stack:
        if kind == "directory":
            path.mkdir()
        elif kind == "pipe":
            os.mkfifo(path)
        else:
            stack.enter_context(socket.socket(socket.AF_UNIX)).bind(str(path))
        for url in (path, f"file://{path}"):
            for call in (
                lambda url: cache.read(url, **options), lambda url: cache.read_many([url], **options),
                lambda url: cache.local(url, **options), lambda url: cache.local_many([url], **options),
                lambda url: cache.open(url, **options), lambda url: cache.open(url, block_size=64_000, **options),
                lambda url: asyncio.run(cache.aread(url, **options)),
            ):  # fmt: skip
                with pytest.raises(errors.RemoteError, match=f"file://{path}: ") as caught:
                    call(url)
                assert kind != "directory" or "a directory, not a file" in str(caught.value)


@pytest.mark.parametrize("options", [{}, {"force": True}, {"bypass": True}], ids=str)
def test_a_path_with_a_null_byte_is_refused_by_every_call(cache: forebay.Cache, tmp_path: Path, options: dict[str, bool]) -> None:
    for url in (f"{tmp_path}/a\0b", "a\0b", Path("a\0b"), f"file://{tmp_path}/a\0b", f"file://{tmp_path}/a%00b"):
        for call in (
            lambda url: cache.read(url, **options), lambda url: cache.read_many([url], **options),
            lambda url: cache.local(url, **options), lambda url: cache.local_many([url], **options),
            lambda url: cache.open(url, **options), lambda url: cache.open(url, block_size=64_000, **options),
            lambda url: asyncio.run(cache.aread(url, **options)), lambda url: asyncio.run(cache.aopen(url, **options)),
            lambda url: cache.pull(url), lambda url: next(cache.lookahead([url])), lambda url: cache.prefetcher(url),
            lambda url: cache.directory(url), lambda url: cache.copy_directory(url), lambda url: cache.invalidate(url),
        ):  # fmt: skip
            with pytest.raises(errors.ConfigError, match="contains a null byte"):
                call(url)
        with pytest.raises(errors.NotCached):
            cache.evict(url)
        (refused,) = cache.read_many([url], return_exceptions=True, **options)
        assert isinstance(refused, errors.ConfigError)
        assert [type(error) for _, error in cache.warm([url]).failed] == [errors.ConfigError]
    with pytest.raises(errors.ConfigError):
        cache.copy_directory(tmp_path, f"{tmp_path}/a\0b")


@pytest.mark.parametrize("library", ["fsspec", "pyarrow.fs"])
@pytest.mark.parametrize("kind", ["pipe", "socket", "device"])
def test_what_is_no_file_on_a_filesystem_is_refused_too(cache: forebay.Cache, tmp_path: Path, kind: str, library: str) -> None:
    """It would be stored, and served, as an empty object."""
    package = pytest.importorskip(library)
    place = package.filesystem("file") if library == "fsspec" else package.LocalFileSystem()
    path = Path("/dev/null") if kind == "device" else tmp_path / kind
    with contextlib.ExitStack() as stack:
        if kind == "pipe":
            os.mkfifo(path)
        elif kind == "socket":
            stack.enter_context(socket.socket(socket.AF_UNIX)).bind(str(path))
        for call in (
            lambda: cache.read(path, filesystem=place), lambda: cache.read_many([path], filesystem=place),
            lambda: cache.local(path, filesystem=place), lambda: cache.open(path, filesystem=place),
            lambda: cache.open(path, filesystem=place, block_size=64_000), lambda: cache.pull(path, filesystem=place),
            lambda: asyncio.run(cache.aread(path, filesystem=place)), lambda: cache.read(path, filesystem=place, bypass=True),
        ):  # fmt: skip
            with pytest.raises(errors.RemoteError, match="not a regular file"):
                call()
    assert list(cache.entries()) == []


@pytest.mark.parametrize("kind", ["file", "link", None, "blob"])
def test_a_filesystem_may_name_other_kinds_than_files(cache: forebay.Cache, kind: str | None) -> None:
    """``link``: a file that an SFTP or SMB server reached by a link."""
    memory_type = type(pytest.importorskip("fsspec").filesystem("memory"))

    class Place(memory_type):  # type: ignore[misc, valid-type]
        cachable = False
        store: dict[str, object] = {}  # noqa: RUF012 (fsspec's own way)

        def info(self, path: str, **arguments: object) -> dict[str, object]:
            info = {**super().info(path, **arguments), "type": kind}
            return {name: value for name, value in info.items() if value is not None}

    place = Place()
    place.pipe("/x", b"there")
    assert bytes(cache.read("/x", filesystem=place)) == b"there"
