"""The protocol ``forebay`` of fsspec: where bytes come from, what is fetched, what writes do, and who may use it."""

from __future__ import annotations

import asyncio
import os
import pickle
import random
import signal
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

fsspec = pytest.importorskip("fsspec")
pytest.importorskip("fsspec.implementations.chained")

import forebay  # noqa: E402
from forebay import errors  # noqa: E402
from forebay.adapters.fsspec import ForebayFileSystem, _opened  # noqa: E402
from forebay.adapters.fsspec.files import MappedFile, WrittenFile  # noqa: E402
from forebay.testing import ScriptedServer  # noqa: E402
from tests.processes import HANG, ProcessGroup  # noqa: E402
from tests.servers.nginx import Nginx, nginx  # noqa: E402
from tests.strikes import soon, strike_once  # noqa: E402

BODY = random.Random(1).randbytes(1_000_000)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nginx]:
    pytest.importorskip("aiohttp")
    with nginx(tmp_path_factory.mktemp("nginx")) as found:
        yield found


@pytest.fixture
def url(server: Nginx, request: pytest.FixtureRequest) -> str:
    """The URL of an object that no other test asks for."""
    return server.put(f"{request.node.name.partition('[')[0]}.bin", BODY)


@pytest.fixture
def memory() -> Iterator[Any]:
    found = fsspec.filesystem("memory")
    found.store.clear()
    found.pseudo_dirs[:] = [""]
    yield found
    found.store.clear()


def of(cache: forebay.Cache, url: str, **options: Any) -> tuple[ForebayFileSystem, str]:
    """The filesystem behind the cache, and the path, of a chained URL."""
    found: tuple[ForebayFileSystem, str] = fsspec.url_to_fs(f"forebay::{url}", forebay={"cache": cache, **options})
    return found


def sent(server: Nginx, url: str) -> int:
    """Bytes of an object that the server has sent."""
    lines = [line for line in server.lines() if f"/{url.rpartition('/')[2]} " in line and '"GET ' in line]
    return sum(int(line.rsplit('"', 1)[1].split()[1]) for line in lines)


# -- reading -----------------------------------------------------------------------------------------------------------


def test_the_package_registers_the_protocol() -> None:
    assert fsspec.get_filesystem_class("forebay") is ForebayFileSystem


@pytest.mark.rotates
def test_an_object_is_fetched_once_whatever_reads_it(server: Nginx, cache: forebay.Cache, url: str, tmp_path: Path) -> None:
    fs, path = of(cache, url)
    with fs.open(path) as file:
        assert file.read() == BODY
        assert file.size == len(BODY)
    with fsspec.open(f"forebay::{url}", forebay={"cache": cache}) as file:
        assert isinstance(file, MappedFile)
        assert file.read(10) == BODY[:10]
    assert fs.cat(path) == fs.cat_file(path) == fs.cat([path])[path] == cache.read(url) == BODY
    assert fs.cat_file(path, 10, 20) == BODY[10:20]
    assert fs.cat_file(path, -10) == BODY[-10:]
    assert fs.cat_file(path, 20, 10) == b""
    assert fs.head(path, 3) + fs.tail(path, 3) + fs.read_block(path, 5, 5) == BODY[:3] + BODY[-3:] + BODY[5:10]
    assert fs.cat_ranges([path] * 3, [0, -5, 7], [5, None, 9]) == [BODY[:5], BODY[-5:], BODY[7:9]]
    fs.get(path, str(tmp_path / "copy"))
    assert (tmp_path / "copy").read_bytes() == BODY
    assert server.gets(path.rpartition("/")[2]).total() == 1


def test_what_glob_names_is_read_through_the_cache(server: Nginx, cache: forebay.Cache, url: str) -> None:
    """`datasets` makes a chain of each name, with what stands behind `forebay::` once more at the end, and options of its own for that."""
    filesystem, path = of(cache, url)
    for asked in (path, url, f"forebay::{url}"):
        assert filesystem.glob(asked) == [f"forebay::{path}"] == list(filesystem.glob(asked, detail=True))
    (name,) = filesystem.glob(path)
    options = {"client_kwargs": {"trust_env": True}}
    again, last = fsspec.core.url_to_fs(f"{name}::{url}", forebay={"cache": cache}, http=options)
    assert again.fs.storage_options == options
    assert filesystem.cat_file(name) == filesystem.cat(name) == again.cat_file(last) == BODY
    assert [entry.key for entry in cache.entries()] == [path]


def test_a_pattern_of_http(server: Nginx, cache: forebay.Cache, tmp_path: Path) -> None:
    folder = server.files / "linked"
    folder.mkdir()
    for name in ("index.html", "a.csv", "b.csv"):
        (folder / name).write_text('<a href="a.csv">a</a> <a href="b.csv">b</a>' if name == "index.html" else name)
    fs, pattern = of(cache, f"{server.url}/linked/*.csv")
    urls = [f"{server.url}/linked/{name}.csv" for name in "ab"]
    assert sorted(fs.glob(pattern)) == sorted(fs.glob(pattern, detail=True)) == [f"forebay::{url}" for url in urls]
    with fsspec.open_files(f"forebay::{pattern}", forebay={"cache": cache}) as files:
        assert [file.read() for file in files] == [b"a.csv", b"b.csv"]
    assert fs.expand_path(pattern) == fs.expand_path(pattern, recursive=True) == urls
    assert fs.cat(pattern) == dict(zip(urls, (b"a.csv", b"b.csv"), strict=True))
    fs.get(pattern, str(tmp_path / "copies"))
    assert sorted(path.name for path in (tmp_path / "copies").iterdir()) == ["a.csv", "b.csv"]
    assert server.gets("a.csv") == {"a.csv": 1}


@pytest.mark.parametrize("fetch", ["file", "blocks"])
def test_a_file_reads_as_a_file_does(cache: forebay.Cache, memory: Any, fetch: str) -> None:
    memory.pipe("/lines", b"one\ntwo\nthree")
    fs, path = of(cache, "memory://lines", fetch=fetch)
    for _ in range(2):  # a miss, and a hit
        with fs.open(path) as file:
            assert [file.readable(), file.seekable(), file.writable()] == [True, True, False]
            assert [file.readline(), file.tell(), file.readlines()] == [b"one\n", 4, [b"two\n", b"three"]]
            assert [file.seek(-5, os.SEEK_END), file.peek()[:2], file.read(2), file.read1(), file.read()] == [8, b"th", b"th", b"ree", b""]
            buffer = bytearray(4)
            assert [file.seek(0), file.readinto(buffer), buffer] == [0, 4, b"one\n"]
            with pytest.raises((ValueError, OSError)):
                file.seek(-1)
        with pytest.raises(ValueError, match="closed"):
            file.read()
        with fs.open(path, "rt") as text:
            assert text.read() == "one\ntwo\nthree"


def test_blocks_fetch_what_is_touched(server: Nginx, cache: forebay.Cache, url: str) -> None:
    options = {"cache": cache, "fetch": "blocks", "block_size": 100_000}
    with fsspec.open(f"forebay::{url}", forebay=options) as file:
        file.seek(500_000)
        assert file.read(1000) == BODY[500_000:501_000]
    assert sent(server, url) == 100_000
    fs, path = fsspec.url_to_fs(f"forebay::{url}", forebay=options)
    assert fs.cat_ranges([path] * 3, [0, 500_500, 900_000], [10, 500_600, None]) == [BODY[:10], BODY[500_500:500_600], BODY[900_000:]]
    assert sent(server, url) == 300_000


def test_what_is_missing_comes_side_by_side_and_an_error_in_its_place(server: Nginx, cache: forebay.Cache) -> None:
    fs, first = of(cache, server.put("side-0.bin", BODY[:100]))
    paths = [first, server.put("side-1.bin", BODY[100:200]), f"{server.url}/side-none.bin"]
    found = fs.cat(paths, on_error="return")
    assert [found[path] for path in paths[:2]] == [BODY[:100], BODY[100:200]]
    assert isinstance(found[paths[2]], FileNotFoundError)
    assert list(fs.cat(paths, on_error="omit")) == paths[:2]
    with pytest.raises(FileNotFoundError):
        fs.cat(paths)
    assert [type(each) for each in fs.cat_ranges(paths, 0, 9)] == [bytes, bytes, errors.NotFound]
    with pytest.raises(FileNotFoundError):
        fs.cat_ranges(paths, 0, 9, on_error="raise")
    assert server.gets("side-0") == {"side-0.bin": 1}


def test_what_is_there_comes_from_the_source(cache: forebay.Cache, memory: Any) -> None:
    memory.pipe({"/a/x": b"1", "/a/b/y": b"22"})
    fs, path = of(cache, "memory://a")
    assert fs.find(path) == memory.find("/a")
    assert fs.glob("/a/*") == memory.glob("/a/*")
    assert list(fs.walk(path)) == list(memory.walk("/a"))
    assert fs.ls("forebay::memory://a", detail=False) == memory.ls("/a", detail=False)
    assert (fs.info("/a/x"), fs.size("/a/b/y"), fs.exists("/a/z"), fs.isdir("/a/b"), fs.isfile("/a/b")) == (
        memory.info("/a/x"), 2, False, True, False,
    )  # fmt: skip
    assert fs.unstrip_protocol("/a/x") == "forebay::memory:///a/x"
    assert fs.cat(path, recursive=True) == {"/a/x": b"1", "/a/b/y": b"22"}
    assert cache.stats().entries == 2


def test_local_files_are_not_copied_unless_forced(cache: forebay.Cache, tmp_path: Path) -> None:
    (tmp_path / "a 100%").write_bytes(BODY)
    for force in (False, True):
        with fsspec.open(f"forebay::file://{tmp_path}/a 100%", forebay={"cache": cache, "force": force}) as file:
            assert file.read() == BODY
        assert cache.stats().entries == force


def test_an_archive_is_cached_below_the_filesystem_of_its_members(server: Nginx, cache: forebay.Cache, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("inner.csv", "a,b\n")
    url = server.put("archive.zip", (tmp_path / "a.zip").read_bytes())
    for _ in range(2):
        with fsspec.open(f"zip://inner.csv::forebay::{url}", "rt", forebay={"cache": cache}) as file:
            assert file.read() == "a,b\n"
    assert server.gets("archive.zip").total() == 1


# -- settings of the source --------------------------------------------------------------------------------------------


def test_headers_of_the_source_are_sent_and_keep_its_entries_apart(server: Nginx, cache: forebay.Cache) -> None:
    server.put("secret.bin", BODY)
    private = f"{server.url}/private/secret.bin"
    secret = {"headers": {"Authorization": "Basic bWU6cGFzcw=="}}
    for _ in range(2):
        with fsspec.open(f"forebay::{private}", forebay={"cache": cache}, http=secret) as file:
            assert file.read() == BODY
    assert server.gets("secret.bin").total() == 1
    with pytest.raises(PermissionError):
        cache.read(private)


def test_keys_and_endpoint_of_s3_are_honoured(server: Nginx, cache: forebay.Cache) -> None:
    pytest.importorskip("s3fs")
    (server.files / "bucket").mkdir()
    (server.files / "bucket" / "key.bin").write_bytes(BODY)
    options = {"endpoint_url": server.url, "key": "k", "secret": "s"}
    for _ in range(2):
        with fsspec.open("forebay::s3://bucket/key.bin", forebay={"cache": cache}, s3=options) as file:
            assert file.read() == BODY
    assert server.gets("key.bin").total() == 1


def test_a_source_without_settings_shares_its_entries_with_the_cache(cache: forebay.Cache) -> None:
    pytest.importorskip("s3fs")
    fs, path = of(cache, "s3://bucket/key")
    assert fs._source(path)[:2] == ("s3://bucket/key", None)
    assert fs._source("bucket/what?")[1] is fs.fs  # as a URL it would have a query


@pytest.mark.parametrize("options", [{"anon": True}, {"fetch": "bytes"}, {"root": "x"}, {"block_size": 1}])
def test_options_that_mean_nothing_are_refused(cache: forebay.Cache, options: dict[str, Any]) -> None:
    with pytest.raises(errors.ConfigError, match=next(iter(options))):
        fsspec.filesystem("forebay", target_protocol="memory", cache=cache, **options)


def test_something_must_lie_behind_the_cache() -> None:
    with pytest.raises(errors.ConfigError, match="forebay::s3://bucket/key"):
        fsspec.filesystem("forebay")


# -- writing -----------------------------------------------------------------------------------------------------------


WRITES = {
    "pipe": lambda fs, path: fs.pipe(path, b"new"),
    "pipe several": lambda fs, path: fs.pipe({path: b"new"}),
    "write": lambda fs, path: fs.write_text(path, "new"),
    "put": lambda fs, path: fs.put(__file__, path),
    "copy": lambda fs, path: fs.copy("/d/other", path),
    "move": lambda fs, path: fs.mv("/d/other", path),
    "touch": lambda fs, path: fs.touch(path),
    "remove": lambda fs, path: fs.rm(path),
    "remove all": lambda fs, path: fs.rm("/d", recursive=True),
}


@pytest.mark.rotates
@pytest.mark.parametrize("write", WRITES)
def test_a_write_goes_to_the_source_and_the_next_reader_asks_it(cache: forebay.Cache, memory: Any, write: str) -> None:
    memory.pipe({"/d/x": b"old", "/d/x y": b"old", "/d/other": b"other"})
    fs, path = of(cache, "memory://d/x")
    for reader in (fs, of(cache, "memory://d")[0]):
        assert reader.cat(path) == b"old"
    changing: Any = WRITES[write]
    changing(fs, path)
    expected = memory.cat(path) if memory.exists(path) else None
    assert expected != b"old"
    for reader in (of(cache, "memory://d")[0], fs):
        if expected is None:
            with pytest.raises(FileNotFoundError):
                reader.cat(path)
        else:
            assert reader.cat(path) == expected


def test_files_of_a_transaction_are_seen_when_it_ends(cache: forebay.Cache, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"old")
    fs, path = of(cache, f"file://{tmp_path}/x", force=True)
    assert fs.cat(path) == b"old"
    with fs.transaction:
        fs.pipe(f"{tmp_path}/y", b"y")
        with fs.open(path, "wb") as file:
            file.write(b"new")
        assert fs.cat(path) == b"old"
    assert fs.cat(path) == b"new"
    assert (tmp_path / "y").read_bytes() == b"y"


def test_dropping_a_listing_makes_the_next_reader_ask(server: Nginx, cache: forebay.Cache, url: str) -> None:
    fs, path = of(cache, url)
    assert fs.cat(path) == BODY
    server.replace(url.rpartition("/")[2], BODY[::-1])
    assert fs.cat(path) == BODY  # for max_age
    fs.invalidate_cache(path)
    assert fs.cat(path) == BODY[::-1]


@pytest.mark.parametrize("whole", [True, False], ids=["the path", "its directory"])
def test_what_is_being_read_while_its_source_changes_is_asked_for_again(cache: forebay.Cache, whole: bool) -> None:
    with ScriptedServer() as scripted, ThreadPoolExecutor(1) as pool:
        url = scripted.put("/run/x.bin", b"old" * 1000, stall_after=1000)
        fs, path = of(cache, url)
        first = pool.submit(fs.cat, path)
        assert scripted.stalled.wait(HANG)
        scripted.put("/run/x.bin", b"new" * 1000)
        fs.invalidate_cache(path if whole else path.rpartition("/")[0])
        scripted.go.set()
        assert first.result(HANG) == b"old" * 1000
        assert fs.cat(path) == b"new" * 1000


# -- processes, threads and event loops --------------------------------------------------------------------------------


def test_a_forked_child_reads_and_lists(server: Nginx, cache: forebay.Cache, url: str, children: ProcessGroup) -> None:
    fs, path = of(cache, url)
    assert fs.info(path)["size"] == len(BODY)  # starts fsspec's thread
    other = server.put("forked.bin", BODY[::-1])

    def child() -> tuple[int, bool, bool]:
        return fs.info(path)["size"], fs.cat(path) == BODY, fs.cat(other) == BODY[::-1]

    assert children(child).result() == (len(BODY), True, True)
    assert fs.cat(path) == BODY


def test_it_is_pickled_as_its_arguments(tmp_path: Path, memory: Any) -> None:
    memory.pipe("/x", b"x")
    with forebay.Cache(tmp_path / "root", budget="1GB", min_free=0) as cache:
        fs, path = of(cache, "memory://x", fetch="blocks")
        copy = pickle.loads(pickle.dumps(fs))
        assert (copy.fetch, copy.cat(path), copy.cache.path) == ("blocks", b"x", cache.path)
        copy.cache.close()


def test_equal_arguments_share_a_cache_and_an_open_cache_is_not_taken_for_another(tmp_path: Path, memory: Any) -> None:
    memory.pipe("/x", b"x")
    for _ in range(2):
        with forebay.Cache(tmp_path / "root", budget="1GB", min_free=0) as cache:
            assert of(cache, "memory://x")[0].cat("/x") == b"x"
    given = {"root": str(tmp_path / "root"), "min_free": 0}
    one, other = (fsspec.filesystem("forebay", target_protocol=name, **given) for name in ("memory", "file"))
    assert one.cache is other.cache
    one.cache.close()
    del one, other  # and what still refers to them
    ForebayFileSystem.clear_instance_cache()
    _opened.cache_clear()


def test_coroutines_read_through_the_wrapper_of_fsspec(server: Nginx, cache: forebay.Cache, url: str) -> None:
    wrapper = pytest.importorskip("fsspec.implementations.asyn_wrapper").AsyncFileSystemWrapper
    fs, path = of(cache, url)

    async def work() -> None:
        assert fs.cat(path) == BODY  # the synchronous one, in a running loop
        assert fs.info(path)["size"] == len(BODY)
        several = wrapper(fs, asynchronous=True)
        found = await asyncio.gather(*(several._cat_file(path, at, at + 10) for at in range(100)))
        assert found == [BODY[at : at + 10] for at in range(100)]
        assert (await several._cat_ranges([path], [0], [5])) == [BODY[:5]]

    asyncio.run(work())
    assert server.gets(path.rpartition("/")[2]).total() == 1


# -- signals -----------------------------------------------------------------------------------------------------------

CALLS = {
    "info": lambda fs: fs.info("/d/a"), "ls": lambda fs: fs.ls("/d"), "find": lambda fs: fs.find("/d"), "glob": lambda fs: fs.glob("/d/*"),
    "exists": lambda fs: fs.exists("/d/a"), "isfile": lambda fs: fs.isfile("/d/a"), "isdir": lambda fs: fs.isdir("/d"),
    "modified": lambda fs: fs.modified("/d/a"), "du": lambda fs: fs.du("/d"), "mkdir": lambda fs: fs.mkdir("/e"),
    "pipe": lambda fs: fs.pipe("/d/b", b"b"), "rm": lambda fs: fs.rm("/d/a"), "cp_file": lambda fs: fs.cp_file("/d/a", "/d/b"),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_a_signal_is_delivered_within_the_filesystem(name: str, cache: forebay.Cache, memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    memory.pipe("/d/a", BODY)
    fs, after = ForebayFileSystem(fs=memory, cache=cache), []

    def struck(*_: Any, **__: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        after.append(name)

    monkeypatch.setattr(memory, name, struck)
    with pytest.raises(KeyboardInterrupt):
        CALLS[name](fs)
    assert not after


def test_a_signal_while_a_written_file_is_dropped_is_not_lost(
    cache: forebay.Cache, memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    fs = ForebayFileSystem(fs=memory, cache=cache)
    file = fs.open("/d/a", "wb")
    file.write(b"a")
    strike_once(monkeypatch, WrittenFile, "close")
    with soon():
        del file
    assert memory.cat("/d/a") == b"a"


class AnyCase(str):
    def __eq__(self, other: object) -> bool:
        return isinstance(other, str) and self.lower() == other.lower()

    def __hash__(self) -> int:
        return hash(self.lower())


def test_a_path_of_a_subclass_of_str_is_the_text_that_it_contains(cache: forebay.Cache, memory: Any) -> None:
    memory.pipe({"/A": b"upper", "/a": b"lower"})
    fs, _ = of(cache, "memory:///A")
    for _ in range(3):
        assert fs.cat_file(AnyCase("/A")) == b"upper"
        assert fs.cat_file(AnyCase("/a")) == b"lower"
        assert fs.cat([AnyCase("/a"), AnyCase("/A")]) == {"/a": b"lower", "/A": b"upper"}
        with fs.open(AnyCase("/a")) as file:
            assert file.read() == b"lower"
