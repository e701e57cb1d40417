"""fsspec and pyarrow: each filesystem gives what a remote owes, wherever it is asked."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from forebay import errors, remote
from forebay._model import ObjectInfo, Partial, Span, is_near
from forebay.remote import RemoteOptions
from forebay.remote.filesystems import FilesystemRemote, InProcess
from forebay.remote.filesystems.helper import InHelper
from forebay.testing import MemorySink, ScriptedServer
from tests.processes import fork, in_child
from tests.servers.rgw import RgwServer, rgw_server  # noqa: F401 (a fixture)

fsspec = pytest.importorskip("fsspec")

PART = 128 << 10
BODY = random.Random(1).randbytes(10 * PART + 17)
OPTIONS = RemoteOptions(part=PART, backoff=0.01, read_timeout=20, attempts=3)


class Place(NamedTuple):
    """``base``: URL of an empty directory of ``remote``; ``put``: writes a file below it."""

    remote: FilesystemRemote
    base: str
    put: Callable[[str, bytes], None]
    ranges: bool = True


def memory_url(request: pytest.FixtureRequest) -> Place:
    base = f"memory://{uuid.uuid4().hex}"
    return Place(
        FilesystemRemote(None, OPTIONS), base, lambda name, body: fsspec.filesystem("memory").pipe_file(f"{base}/{name}", body), False
    )


def fsspec_local(request: pytest.FixtureRequest) -> Place:
    folder: Path = request.getfixturevalue("tmp_path")
    return Place(FilesystemRemote(fsspec.filesystem("file"), OPTIONS), str(folder), written(folder), False)


def fsspec_dir(request: pytest.FixtureRequest) -> Place:
    folder: Path = request.getfixturevalue("tmp_path")
    inner = fsspec.filesystem("dir", path=str(folder), fs=fsspec.filesystem("file"))
    return Place(FilesystemRemote(inner, OPTIONS), "x", lambda name, body: written(folder)(f"x/{name}", body))


def pyarrow_local(request: pytest.FixtureRequest) -> Place:
    arrow = pytest.importorskip("pyarrow.fs")
    folder: Path = request.getfixturevalue("tmp_path")
    return Place(FilesystemRemote(arrow.LocalFileSystem(), OPTIONS), str(folder), written(folder))


def pyarrow_subtree(request: pytest.FixtureRequest) -> Place:
    arrow = pytest.importorskip("pyarrow.fs")
    folder: Path = request.getfixturevalue("tmp_path")
    below = arrow.SubTreeFileSystem(str(folder), arrow.LocalFileSystem())
    return Place(FilesystemRemote(below, OPTIONS), "x", lambda name, body: written(folder)(f"x/{name}", body))


def pyarrow_over_fsspec(request: pytest.FixtureRequest) -> Place:
    arrow = pytest.importorskip("pyarrow.fs")
    memory, base = fsspec.filesystem("memory"), f"/{uuid.uuid4().hex}"
    dressed = arrow.PyFileSystem(arrow.FSSpecHandler(memory))
    return Place(FilesystemRemote(dressed, OPTIONS), base, lambda name, body: memory.pipe_file(f"{base}/{name}", body), False)


def s3fs_object(request: pytest.FixtureRequest) -> Place:
    s3fs = pytest.importorskip("s3fs")
    server, folder, put = on_rgw(request)
    made = s3fs.S3FileSystem(key=server.key, secret=server.secret, endpoint_url=server.url)
    return Place(FilesystemRemote(made, OPTIONS), f"s3://{folder}", put)


def pyarrow_s3(request: pytest.FixtureRequest) -> Place:
    arrow = pytest.importorskip("pyarrow.fs")
    server, folder, put = on_rgw(request)
    made = arrow.S3FileSystem(access_key=server.key, secret_key=server.secret, endpoint_override=server.url, region="us-east-1")
    return Place(FilesystemRemote(made, OPTIONS), folder, put)


def written(folder: Path) -> Callable[[str, bytes], None]:
    def put(name: str, body: bytes) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(body)

    return put


def on_rgw(request: pytest.FixtureRequest) -> tuple[RgwServer, str, Callable[[str, bytes], None]]:
    server: RgwServer = request.getfixturevalue("rgw_server")
    client, folder = server.client(), uuid.uuid4().hex
    client.create_bucket(Bucket="filesystems")
    return server, f"filesystems/{folder}", lambda name, body: client.put_object(Bucket="filesystems", Key=f"{folder}/{name}", Body=body)


PLACES = [memory_url, fsspec_local, fsspec_dir, pyarrow_local, pyarrow_subtree, pyarrow_over_fsspec, s3fs_object, pyarrow_s3]


@pytest.fixture(params=PLACES, ids=lambda make: make.__name__)
def place(request: pytest.FixtureRequest) -> Place:
    made: Place = request.param(request)
    return made


def fetched(place: Place, name: str) -> bytes:
    sink = MemorySink()
    place.remote.fetch(f"{place.base}/{name}", sink)
    assert not sink.missing
    return bytes(sink.data)


# -- what every remote owes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, PART, len(BODY)])
def test_fetch(place: Place, size: int) -> None:
    place.put("sized", BODY[:size])
    sink = MemorySink()
    transfer = place.remote.fetch(f"{place.base}/sized", sink)
    assert sink.data == BODY[:size]
    assert not sink.missing
    assert transfer.received == size
    assert transfer.info is not None
    assert transfer.info.size == size
    assert transfer.info == place.remote.stat(f"{place.base}/sized")
    assert transfer.requests == 2 + (-(-size // PART) if place.ranges else bool(size))


NAMES = ["a b", "plus+plus", "per%cent%20", "ünï/日本", "a=b;c@d,e", "q?x=1", "h#ash", "it's"]


def test_names_are_taken_as_they_are(place: Place) -> None:
    for name in NAMES:
        place.put(name, name.encode())
        assert fetched(place, name) == name.encode()
        assert [info.url for info in place.remote.list(f"{place.base}/{name}")] == [f"{place.base}/{name}"]


def test_read(place: Place) -> None:
    place.put("read", b"0123456789")
    url = f"{place.base}/read"
    info = place.remote.stat(url)
    assert info is not None
    assert place.remote.stat(url, known=info.validator) is None
    assert place.remote.read(url, Span(3, 4), validator=info.validator) == b"3456"
    assert place.remote.read(url, Span(8, 10)) == b"89"
    place.put("read", b"another version")
    changed = place.remote.stat(url, known=info.validator)
    assert changed is not None
    assert changed.size == 15
    with pytest.raises(errors.RemoteChanged):
        place.remote.read(url, Span(3, 4), validator=info.validator)


def test_what_is_not_there(place: Place) -> None:
    place.put("folder/file", b"x")
    for name in ("none", "none/none", "folder"):
        with pytest.raises(errors.NotFound):
            place.remote.stat(f"{place.base}/{name}")
        with pytest.raises(errors.NotFound, match=r"\w://"):
            fetched(place, name)
    assert list(place.remote.list(f"{place.base}/none/")) == []


def test_list(place: Place) -> None:
    names = ["a/1", "a/b/2", "a-b", "ab/3", "ac", "b"]
    for name in names:
        place.put(name, name.encode())

    def listed(prefix: str) -> list[str]:
        return [info.url.removeprefix(place.base + "/") for info in place.remote.list(f"{place.base}/{prefix}")]

    assert listed("") == sorted(names)
    assert listed("a") == sorted(name for name in names if name.startswith("a"))
    assert listed("a/") == ["a/1", "a/b/2"]
    assert listed("a/b") == ["a/b/2"]
    assert listed("x") == []
    for info in place.remote.list(f"{place.base}/a"):
        told = place.remote.stat(info.url)
        assert told is not None
        assert info.size == told.size
        assert info.validator in (None, told.validator)


def test_what_changes_while_it_is_fetched_is_begun_anew(place: Place) -> None:
    place.put("changing", bytes(4 * PART))

    class Changing(MemorySink):
        def begin(self, info: Any) -> tuple[Span, ...]:
            if not self.infos:
                place.put("changing", BODY)
            return super().begin(info)

    sink = Changing()
    transfer = place.remote.fetch(f"{place.base}/changing", sink)
    assert sink.data == BODY
    assert len(sink.infos) == 2
    assert transfer.info == place.remote.stat(f"{place.base}/changing")


def test_what_always_changes_is_given_up(place: Place) -> None:
    place.put("changing", b"0")

    class Changing(MemorySink):
        def begin(self, info: Any) -> tuple[Span, ...]:
            place.put("changing", b"0" * (len(self.infos) + 2))
            return super().begin(info)

    sink = Changing()
    with pytest.raises(errors.RemoteChanged):
        place.remote.fetch(f"{place.base}/changing", sink)
    assert len(sink.infos) == 3


def listed(place: Place, name: str) -> ObjectInfo:
    (info,) = place.remote.list(f"{place.base}/{name}")
    return info


def test_what_a_listing_told_is_not_asked_for_again(place: Place) -> None:
    place.put("listed", BODY[:PART])
    info, sink = listed(place, "listed"), MemorySink()
    transfer = place.remote.fetch(f"{place.base}/listed", sink, listed=info)
    assert sink.data == BODY[:PART]
    assert transfer.requests == (3 if info.validator is None else 2)  # the read, and the look whether it is still that version
    assert transfer.info is not None
    assert transfer.info.validator == getattr(place.remote.stat(f"{place.base}/listed"), "validator", None)


@pytest.mark.parametrize("size", [PART - 1, PART + 1])
def test_a_listing_that_is_out_of_date_is_not_believed(place: Place, size: int) -> None:
    place.put("listed", bytes(PART))
    info, sink = listed(place, "listed"), MemorySink()
    place.put("listed", BODY[:size])
    transfer = place.remote.fetch(f"{place.base}/listed", sink, listed=info)
    assert sink.data == BODY[:size]
    assert transfer.info == place.remote.stat(f"{place.base}/listed")


def test_an_object_that_changes_while_it_is_read_as_listed_is_fetched_again(place: Place) -> None:
    place.put("listed", bytes(4 * PART))
    info = listed(place, "listed")

    class Changing(MemorySink):
        def begin(self, info: Any) -> tuple[Span, ...]:
            if not self.infos:
                place.put("listed", BODY)
            return super().begin(info)

    sink = Changing()
    transfer = place.remote.fetch(f"{place.base}/listed", sink, listed=info)
    assert sink.data == BODY
    assert transfer.info == place.remote.stat(f"{place.base}/listed")


def test_a_large_object_is_looked_at_before_it_is_read(place: Place) -> None:
    """It would be read in vain where the listing is out of date."""
    place.put("listed", BODY)
    transfer = place.remote.fetch(f"{place.base}/listed", MemorySink(), listed=listed(place, "listed"))
    assert transfer.requests == 2 + (-(-len(BODY) // PART) if place.ranges else 1)


@pytest.mark.parametrize("make", [s3fs_object, pyarrow_s3])
def test_an_etag_is_strong_and_can_be_resumed_from(make: Callable[..., Place], request: pytest.FixtureRequest) -> None:
    place = make(request)
    place.put("resumed", BODY)
    info = place.remote.stat(f"{place.base}/resumed")
    assert info is not None
    assert info.validator is not None
    assert info.strong
    lacking = (Span(PART, 10), Span(5 * PART, 2 * PART))
    kept = bytearray(BODY)
    for span in lacking:
        kept[span.start : span.end] = bytes(span.length)
    sink = MemorySink(Partial(len(BODY), info.validator, lacking), kept)
    transfer = place.remote.fetch(info.url, sink)
    assert sink.data == BODY
    assert (transfer.received, transfer.resumed) == (2 * PART + 10, len(BODY) - 2 * PART - 10)


def test_a_sink_that_refuses_ends_the_fetch(place: Place) -> None:
    place.put("refused", BODY)

    class Refusing(MemorySink):
        def write(self, offset: int, data: Any) -> None:
            raise errors.NoSpace.of("refused", len(BODY), 0, 0)

    with pytest.raises(errors.NoSpace):
        place.remote.fetch(f"{place.base}/refused", Refusing())
    assert fetched(place, "refused") == BODY


# -- servers that do it their own way ---------------------------------------------------------------------------------


@pytest.fixture
def http() -> FilesystemRemote:
    pytest.importorskip("aiohttp")
    return FilesystemRemote(fsspec.filesystem("http"), OPTIONS)


def test_a_server_that_ignores_range_gives_no_foreign_bytes(http: FilesystemRemote, server: ScriptedServer) -> None:
    """fsspec then gives the whole file for each range."""
    url = server.put("/a", BODY, ranges=False)
    with pytest.raises(errors.RemoteProtocolError, match="were requested"):
        http.read(url, Span(5, 10))
    sink = MemorySink()
    with pytest.raises(errors.RemoteProtocolError):
        http.fetch(url, sink)
    assert sink.missing == [Span(0, len(BODY))]


def test_an_object_whose_size_nobody_tells(http: FilesystemRemote, server: ScriptedServer) -> None:
    sink = MemorySink()
    transfer = http.fetch(server.put("/a", BODY, chunked=True, ranges=False), sink)
    assert sink.data == BODY
    assert sink.infos[0].size is None
    assert transfer.received == len(BODY)


def test_what_is_refused_for_a_while_is_asked_again(http: FilesystemRemote, server: ScriptedServer) -> None:
    sink = MemorySink()
    transfer = http.fetch(server.put("/a", BODY, statuses=[503, 500]), sink)
    assert sink.data == BODY
    assert transfer.retries > 0


def test_secrets_are_not_told(http: FilesystemRemote, server: ScriptedServer) -> None:
    url = server.put("/a", BODY, statuses=[500] * 20).replace("http://", "http://me:sikrit@") + "?X-Amz-Signature=sikrit&token=sikrit"
    with pytest.raises(errors.RemoteUnavailable) as caught:
        http.fetch(url, MemorySink())
    assert "sikrit" not in f"{caught.value} {caught.value.facts} {caught.value.__cause__}"
    assert caught.value.attempts == 3


# -- where it is asked ------------------------------------------------------------------------------------------------


def test_which_filesystems_are_asked_in_this_process(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow.fs")
    pytest.importorskip("aiohttp")
    by_url = FilesystemRemote()
    assert isinstance(by_url._access("memory://a"), InProcess)
    assert isinstance(by_url._access("zip://a::memory://b"), InProcess)
    assert isinstance(by_url._access("gs://a/b"), InHelper)
    assert isinstance(by_url._access("zip://a::gs://b/c"), InHelper)
    local = fsspec.filesystem("file")
    for made, way in [
        (local, InProcess),
        (fsspec.filesystem("dir", path="/", fs=local), InProcess),
        (fsspec.filesystem("http"), InHelper),
        (fsspec.filesystem("dir", path="http://a", fs=fsspec.filesystem("http")), InHelper),
        (arrow.LocalFileSystem(), InProcess),
        (arrow.SubTreeFileSystem("/tmp", arrow.LocalFileSystem()), InProcess),
        (arrow.PyFileSystem(arrow.FSSpecHandler(local)), InProcess),
        (arrow.PyFileSystem(arrow.FSSpecHandler(fsspec.filesystem("http"))), InHelper),
        (arrow.S3FileSystem(anonymous=True, region="us-east-1"), InHelper),
    ]:
        assert isinstance(FilesystemRemote(made)._access("a/b"), way), made
        assert is_near(FilesystemRemote(made), "a/b") == (way is InProcess), made
    assert not is_near(remote.resolve("https://a/b"), "https://a/b")


def test_urls_find_their_filesystem() -> None:
    assert isinstance(remote.resolve("memory://a/b"), FilesystemRemote)
    assert isinstance(remote.resolve("gs://a/b"), FilesystemRemote)


@pytest.mark.processes
def test_an_unknown_scheme() -> None:
    with pytest.raises(errors.RemoteError, match="Protocol not known"):
        FilesystemRemote(None, OPTIONS).stat("nonsense://a/b")


@pytest.mark.processes
def test_a_package_that_is_missing() -> None:
    pytest.importorskip("fsspec")
    if "gcsfs" in fsspec.available_protocols() and _is_there("gcsfs"):
        pytest.skip("gcsfs is installed")
    with pytest.raises(errors.MissingExtra, match=r"^gs:// needs .*gcsfs"):
        FilesystemRemote(None, OPTIONS).stat("gs://a/b")


def _is_there(name: str) -> bool:
    import importlib.util

    return importlib.util.find_spec(name) is not None


def test_s17_memory_is_read_in_a_fork_too() -> None:
    place = memory_url(None)  # type: ignore[arg-type]
    place.put("a", BODY)
    assert fetched(place, "a") == BODY
    children = [fork(lambda: fetched(place, "a") == BODY) for _ in range(2)]
    assert fetched(place, "a") == BODY
    assert [child.result() for child in children] == [True, True]


class Bound(fsspec.AbstractFileSystem):  # type: ignore[misc]
    """A filesystem with a thing of this process in it."""

    protocol = "bound"

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()

    def __reduce__(self) -> Any:
        raise TypeError("cannot pickle a lock")

    def info(self, path: str, **more: Any) -> dict[str, Any]:
        return {"name": path, "size": 3, "type": "file", "mtime": 5.0}

    def _open(self, path: str, *more: Any, **most: Any) -> Any:
        import io

        return io.BytesIO(b"abc")


def test_a_filesystem_that_does_not_pickle_stays_in_its_process(caplog: pytest.LogCaptureFixture) -> None:
    place = Place(FilesystemRemote(Bound(), OPTIONS), "bound://x", lambda *_: None)
    assert "Bound cannot be pickled" in caplog.text
    assert fetched(place, "a") == b"abc"

    def in_fork() -> str:
        with pytest.raises(errors.RemoteError) as caught:
            fetched(place, "a")
        return str(caught.value)

    assert "cannot be pickled: create it after the fork" in in_child(in_fork)
    assert fetched(place, "a") == b"abc"


def test_a_filesystem_object_has_a_key_of_its_own() -> None:
    one, other = (fsspec.filesystem("http", client_kwargs={"headers": {"x": x}}) for x in "12")
    naming = remote.UrlNaming(7)
    keys = {remote.on_filesystem(made).key("http://a/b", naming) for made in (one, one, other, Bound())}
    assert len(keys) == 3
    assert [key for key in keys if len(key.rpartition("#")[2]) != 32] == []  # settings may be secrets: none can be found by trying
    key = remote.on_filesystem(one).key("http://a/b", naming)
    assert key == in_child(lambda: remote.on_filesystem(one).key("http://a/b", naming))


@pytest.mark.parametrize(
    ("kind", "one", "other"),
    [
        ("http", "http://h/a", "https://h/a"),
        ("memory", "b", "x://b"),  # a name below a directory `x:`
        ("sftp", "a/b", "/a/b"),  # below the user's directory
        ("sftp", "/h/b", "sftp://h/b"),  # a host, no directory
        ("s3", "b/a", "b/a#block"),
    ],
)
def test_what_a_filesystem_reads_as_two_objects_has_two_keys(kind: str, one: str, other: str) -> None:
    made = fsspec.get_filesystem_class(kind).__new__(fsspec.get_filesystem_class(kind))  # connects to nothing
    place, naming = FilesystemRemote(made), remote.UrlNaming(7)
    assert place.key(one, naming) != place.key(other, naming)
    assert place.key(one, None) != place.key(other, None)


@pytest.mark.parametrize(
    ("kind", "spellings"),
    [("s3", ("b/a", "s3://b/a", "s3a://b/a")), ("memory", ("a/b", "/a/b", "memory://a/b")), ("http", ("http://h/a", "HTTP://H:80/a"))],
)
def test_spellings_of_a_path_have_one_key(kind: str, spellings: tuple[str, ...]) -> None:
    place, naming = FilesystemRemote(fsspec.filesystem(kind)), remote.UrlNaming(7)
    assert len({place.key(each, naming) for each in spellings}) == 1


def test_a_path_that_a_filesystem_refuses_is_named() -> None:
    class Refusing(Bound):
        @classmethod
        def _strip_protocol(cls, path: str) -> str:
            raise ValueError("no colon, please")

    with pytest.raises(errors.ConfigError, match=r"a:b is no path of this filesystem \(bound\): no colon, please"):
        FilesystemRemote(Refusing()).key("a:b", remote.UrlNaming(7))


MINE = """
import fsspec

class Mine(fsspec.AbstractFileSystem):
    protocol = "mine"
    def info(self, path, **more):
        import os
        return {"name": path, "size": 5, "type": "file", "ETag": f"pid{os.getpid()}"}
    def _open(self, path, *more, **most):
        import io
        return io.BytesIO(b"hello")
"""

MAIN = """
import json
from forebay.remote.filesystems import FilesystemRemote
from forebay.remote.filesystems.helper import InHelper
from forebay._model import Span
from mine import Mine

if __name__ == "__main__":
    remote = FilesystemRemote(Mine())
    print(json.dumps([isinstance(remote._fixed, InHelper), remote.read("mine://a", Span(1, 3)).decode(), remote.stat("mine://a").validator]))
"""


def test_a_filesystem_of_a_module_beside_the_script_reaches_the_helper(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "main.py").write_text(MAIN)
    done = subprocess.Popen([sys.executable, str(tmp_path / "main.py")], stdout=subprocess.PIPE, text=True)
    answer, _ = done.communicate()
    there, text, who = json.loads(answer)
    assert there
    assert text == "ell"
    assert who != f"pid{done.pid}"


@pytest.fixture(autouse=True)
def no_instances_kept() -> Iterator[None]:
    """fsspec keeps its filesystems for ever."""
    yield
    Bound.clear_instance_cache()
