"""One URL or path names several objects: on a filesystem object, with other headers, as a copy of a local file, in another directory."""

from __future__ import annotations

import asyncio
import itertools
import os
import pickle
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

import forebay
from forebay.fetch import Fetcher
from forebay.remote import RemoteOptions
from forebay.sources import UrlSource

Door = Callable[..., bytes]


def opened(path: str | os.PathLike[str]) -> bytes:
    return Path(path).read_bytes()


async def read_later(cache: forebay.Cache, url: str, **options: Any) -> bytes:
    return bytes(await cache.aread(url, **options))


async def opened_later(cache: forebay.Cache, url: str, **options: Any) -> bytes:
    with await cache.aopen(url, **options) as file:
        return file.read()


def read_blocks(cache: forebay.Cache, url: str, **options: Any) -> bytes:
    with cache.open(url, block_size=64_000, **options) as file:
        return file.read()


def read_opened(cache: forebay.Cache, url: str, **options: Any) -> bytes:
    with cache.open(url, **options) as file:
        return file.read()


def read_local(cache: forebay.Cache, url: str, **options: Any) -> bytes:
    with cache.local(url, **options) as path:
        return opened(path)


def read_local_many(cache: forebay.Cache, url: str, **options: Any) -> bytes:
    with cache.local_many([url], **options) as (path,):
        return opened(path)


def prefetched(cache: forebay.Cache, url: str, filesystem: Any = None, options: RemoteOptions | None = None) -> bytes:
    prefix, _, name = url.rpartition("/")
    with closing(cache.prefetcher(UrlSource(prefix + "/", filesystem=filesystem, options=options))) as items:
        return bytes(items.get_lazy(name).get())


def looked_ahead(cache: forebay.Cache, url: str) -> bytes:
    with closing(cache.lookahead([url])) as ahead:
        return bytes(next(ahead))


DOORS: dict[str, Door] = {
    "read": lambda cache, url, **options: bytes(cache.read(url, **options)),
    "read_many": lambda cache, url, **options: bytes(cache.read_many([url], **options)[0]),
    "aread": lambda cache, url, **options: asyncio.run(read_later(cache, url, **options)),
    "aopen": lambda cache, url, **options: asyncio.run(opened_later(cache, url, **options)),
    "open": read_opened,
    "blocks": read_blocks,
    "local": read_local,
    "local_many": read_local_many,
    "prefetcher": prefetched,
}
PLAIN = {**DOORS, "lookahead": looked_ahead}
FORCED = {name: door for name, door in DOORS.items() if name != "prefetcher"}
TIMES = 3
"""The first read fetches, the second is a hit, and the third one finds what the second remembers."""


def check_turns(one: Callable[[], bytes], is_one: bytes, other: Callable[[], bytes], is_other: bytes) -> None:
    """Both are read in turn, until both are remembered."""
    for _ in range(2):
        assert [one() for _ in range(TIMES)] == [is_one] * TIMES
        assert [other() for _ in range(TIMES)] == [is_other] * TIMES


@pytest.fixture
def echo() -> Iterator[str]:
    """The URL of a server that answers with the header ``X-Who`` of the request."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = self.headers.get("X-Who", "nobody").encode() * 10
            self.send_response(200)
            self.send_header("ETag", f'"{body[:8].decode()}"')
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/{uuid.uuid4().hex}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("door", DOORS)
def test_a_path_leads_to_the_file_and_on_a_filesystem_to_its_object(cache: forebay.Cache, tmp_path: Path, door: str) -> None:
    memory = pytest.importorskip("fsspec").filesystem("memory")
    for (name, plain), is_first in itertools.product(PLAIN.items(), (True, False)):
        path = tmp_path / f"{name}-{is_first}"
        path.write_bytes(b"here")
        memory.pipe(str(path), b"there")
        turns = (lambda path=path: DOORS[door](cache, str(path), filesystem=memory)), b"there"
        others = (lambda path=path, plain=plain: plain(cache, str(path))), b"here"
        check_turns(*turns, *others) if is_first else check_turns(*others, *turns)


@pytest.mark.parametrize("door", DOORS)
def test_a_url_leads_to_the_server_and_on_a_filesystem_to_its_object(cache: forebay.Cache, echo: str, door: str) -> None:
    fsspec = pytest.importorskip("fsspec")
    memory = fsspec.filesystem("dir", path=f"/{uuid.uuid4().hex}", fs=fsspec.filesystem("memory"))
    for (name, plain), is_first in itertools.product(PLAIN.items(), (True, False)):
        url = f"{echo}/{name}/{is_first}"
        memory.makedirs(os.path.dirname(url), exist_ok=True)
        memory.pipe(url, b"there")
        turns = (lambda url=url: DOORS[door](cache, url, filesystem=memory)), b"there"
        others = (lambda url=url, plain=plain: plain(cache, url)), b"nobody" * 10
        check_turns(*turns, *others) if is_first else check_turns(*others, *turns)


@pytest.mark.parametrize("door", PLAIN)
def test_a_url_leads_to_what_the_headers_of_the_caller_get(cache: forebay.Cache, tmp_path: Path, echo: str, door: str) -> None:
    options = RemoteOptions(headers={"X-Who": "me"})
    with forebay.Cache(tmp_path / "root", remote_options=options) as mine:
        asks: list[Callable[[str], bytes]] = [
            lambda url: PLAIN[door](mine, url), lambda url: prefetched(cache, url, options=options),
        ]  # fmt: skip
        for ask, (name, plain), is_first in itertools.product(asks, PLAIN.items(), (True, False)):
            url = f"{echo}/{asks.index(ask)}/{name}/{is_first}"
            turns = (lambda url=url, ask=ask: ask(url)), b"me" * 10
            others = (lambda url=url, plain=plain: plain(cache, url)), b"nobody" * 10
            check_turns(*turns, *others) if is_first else check_turns(*others, *turns)


@pytest.mark.parametrize("form", [str, "file://{}".format], ids=["path", "URL"])
@pytest.mark.parametrize("door", FORCED)
def test_only_who_asks_for_it_gets_the_copy_of_a_local_file(
    tmp_path: Path, cache: forebay.Cache, door: str, form: Callable[[Path], str]
) -> None:  # fmt: skip
    with forebay.Cache(tmp_path / "root", remote_options=RemoteOptions(partition="other")) as other:
        for each, (name, plain) in itertools.product((cache, other), PLAIN.items()):
            path = tmp_path / f"{each is cache}-{name}"
            path.write_bytes(b"before")
            url = form(path)
            assert [FORCED[door](each, url, force=True) for _ in range(TIMES)] == [b"before"] * TIMES
            path.write_bytes(b"after")
            check_turns(lambda: plain(each, url), b"after", lambda: FORCED[door](each, url, force=True), b"before")  # noqa: B023


@pytest.mark.parametrize(("door", "force"), [*((name, False) for name in PLAIN), *((name, True) for name in FORCED)])
def test_a_relative_path_leads_to_the_file_of_the_present_directory(
    cache: forebay.Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, door: str, force: bool
) -> None:
    for folder in ("one", "two"):
        (tmp_path / folder / "below").mkdir(parents=True)
        for name in ("x", "below/x"):
            (tmp_path / folder / name).write_bytes(folder.encode())
    for name, folder in itertools.product(("below/x", "./below/x", "below/../below/x"), ("one", "two", "one", "two")):
        monkeypatch.chdir(tmp_path / folder)
        for _ in range(TIMES):
            assert PLAIN[door](cache, name, **({"force": True} if force else {})) == folder.encode()


def of_fsspec() -> Any:
    return pytest.importorskip("fsspec").filesystem("file")


def of_pyarrow() -> Any:
    return pytest.importorskip("pyarrow.fs").LocalFileSystem()


@pytest.mark.parametrize("door", ["read", "read_many", "open", "blocks", "local"])
@pytest.mark.parametrize("filesystem", [of_fsspec, of_pyarrow])
def test_so_does_a_relative_path_on_a_filesystem_of_this_host(
    cache: forebay.Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, filesystem: Callable[[], Any], door: str
) -> None:
    place = filesystem()
    for folder in ("one", "two", "one", "two"):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "x").write_bytes(folder.encode())
        monkeypatch.chdir(tmp_path / folder)
        for _ in range(TIMES):
            assert DOORS[door](cache, "x", filesystem=place) == folder.encode()


def test_a_target_of_a_relative_path_is_fetched_from_the_directory_in_which_it_was_made(
    tmp_path: Path, cache: forebay.Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the bytes of one file would be stored under the key of another."""
    fetcher: Fetcher = cache._fetcher
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x").write_bytes(folder.encode())
    monkeypatch.chdir(tmp_path / "one")
    targets = [fetcher.target("x"), fetcher.target("x", of_fsspec()), fetcher.target("x", of_pyarrow())]
    monkeypatch.chdir(tmp_path / "two")
    for target in targets:
        assert "/one/x" in target.key
        assert bytes(target.remote.read(target.url, forebay._model.Span(0, 3))) == b"one"


@pytest.mark.parametrize(
    "options", [{}, {"force": True}, {"filesystem": of_fsspec}, {"filesystem": of_pyarrow}], ids=["plain", "force", "fsspec", "pyarrow"]
)
def test_a_pickled_lease_of_a_relative_path_opens_the_same_file_elsewhere(
    cache: forebay.Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    options = {name: value() if callable(value) else value for name, value in options.items()}
    for folder in ("one", "two"):
        (tmp_path / folder / "below").mkdir(parents=True)
        (tmp_path / folder / "below" / "x").write_bytes(folder.encode())
    monkeypatch.chdir(tmp_path / "one")
    with cache.local("below/x", **options) as _, cache.directory("below", **options) as _:
        file, folder_of_file = cache.local("below/x", **options), cache.directory("below", **options)
    pickled = pickle.dumps(file), pickle.dumps(folder_of_file)
    monkeypatch.chdir(tmp_path / "two")
    with pickle.loads(pickled[0]) as path, pickle.loads(pickled[1]) as folder:
        assert (opened(path), opened(f"{folder}/x")) == (b"one", b"one")
    file.close()
    folder_of_file.close()


def test_a_root_and_an_upstream_root_stay_where_they_were_when_they_were_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    forebay.Cache("above", budget=8 << 20, min_free=0).close()
    with forebay.Cache("root", budget=8 << 20, min_free=0, upstream="above") as cache:
        monkeypatch.chdir(tmp_path / "elsewhere")
        root, options = cache._fetcher.init_args
        assert (root, str(options["upstream"])) == (str(tmp_path / "root"), str(tmp_path / "above"))
        with pickle.loads(pickle.dumps(cache)) as again:
            assert again.path == tmp_path / "root"
    assert os.listdir(tmp_path / "elsewhere") == []
