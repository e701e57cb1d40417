"""Sources of items: objects below a prefix of any kind, decoders, and what else may be one."""

from __future__ import annotations

import functools
import multiprocessing
import pickle
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

import forebay
from forebay import errors
from forebay.cache import fetcher_of
from forebay.fetch.prefix import Prefix
from forebay.remote import RemoteOptions
from forebay.sources import DecodedSource, SourceInfo, TarSource, UrlSource, by_extension, name_of, source_of
from forebay.testing import ScriptedServer
from tests.harness import MiB
from tests.processes import in_child
from tests.servers.nginx import nginx
from tests.servers.rgw import RgwServer, rgw_server  # noqa: F401 (a fixture)

NAMES = ["a.jpg", "a b.jpg", "ü/é.json", "what?.txt", "#1", "100%", "a+b&c=d;e", "%41", "~x", "deep/er/down/x"]
FAST = RemoteOptions(backoff=0.01, attempts=3)


class Place(NamedTuple):
    source: UrlSource
    put: Callable[[str, bytes], object]
    lists: bool = True


def in_folder(folder: Path) -> Callable[[str, bytes], None]:
    def put(name: str, body: bytes) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(body)

    return put


def local(request: pytest.FixtureRequest) -> Place:
    folder = request.getfixturevalue("tmp_path") / "what's in #here"
    return Place(UrlSource(folder), in_folder(folder))


def file_url(request: pytest.FixtureRequest) -> Place:
    folder = request.getfixturevalue("tmp_path") / "data"
    return Place(UrlSource(f"file://{folder}/"), in_folder(folder))


def http(request: pytest.FixtureRequest) -> Place:
    serve = nginx(request.getfixturevalue("tmp_path_factory").mktemp("nginx"))
    found = serve.__enter__()
    request.addfinalizer(lambda: serve.__exit__(None, None, None))
    return Place(UrlSource(f"{found.url}/set"), in_folder(found.files / "set"), lists=False)


def s3(request: pytest.FixtureRequest) -> Place:
    server: RgwServer = request.getfixturevalue("rgw_server")
    monkeypatch: pytest.MonkeyPatch = request.getfixturevalue("monkeypatch")
    for name, value in {"AWS_ACCESS_KEY_ID": server.key, "AWS_SECRET_ACCESS_KEY": server.secret, "AWS_ENDPOINT_URL": server.url}.items():
        monkeypatch.setenv(name, value)
    client, bucket, folder = server.client(), "sources", uuid.uuid4().hex
    client.create_bucket(Bucket=bucket)
    return Place(
        UrlSource(f"s3://{bucket}/{folder}", options=RemoteOptions(part=MiB)),  # options of its own: an account of its own
        lambda name, body: client.put_object(Bucket=bucket, Key=f"{folder}/{name}", Body=body),
    )


def memory_url(request: pytest.FixtureRequest) -> Place:
    fsspec = pytest.importorskip("fsspec")
    base = f"memory://{uuid.uuid4().hex}"
    return Place(UrlSource(base), lambda name, body: fsspec.filesystem("memory").pipe_file(f"{base}/{name}", body))


def fsspec_object(request: pytest.FixtureRequest) -> Place:
    memory = pytest.importorskip("fsspec").filesystem("memory")
    base = f"/{uuid.uuid4().hex}"
    return Place(UrlSource(base, filesystem=memory), lambda name, body: memory.pipe_file(f"{base}/{name}", body))


def pyarrow_object(request: pytest.FixtureRequest) -> Place:
    arrow = pytest.importorskip("pyarrow.fs")
    folder = request.getfixturevalue("tmp_path") / "data"
    return Place(UrlSource(str(folder), filesystem=arrow.LocalFileSystem()), in_folder(folder))


PLACES = [local, file_url, http, s3, memory_url, fsspec_object, pyarrow_object]


@pytest.fixture(params=PLACES, ids=lambda make: make.__name__)
def place(request: pytest.FixtureRequest) -> Place:
    made: Place = request.param(request)
    return made


# -- what each owes ------------------------------------------------------------------------------------------------------


def test_names_of_all_kinds_are_read_and_listed(place: Place) -> None:
    for name in NAMES:
        place.put(name, name.encode())
    assert [place.source[name] for name in NAMES] == [name.encode() for name in NAMES]
    assert all(type(place.source[name]) is bytes for name in NAMES)
    if place.lists:
        assert sorted(place.source.keys()) == sorted(NAMES)
    else:
        with pytest.raises(errors.RemoteError, match="list"):
            next(place.source.keys())


def test_what_is_not_there_is_not_found(place: Place) -> None:
    place.put("a", b"")
    assert place.source["a"] == b""
    with pytest.raises(errors.NotFound):
        place.source["b"]
    assert place.source.size("b") is None
    assert place.source.version_of("b") is None


@pytest.mark.parametrize("key", ["", "/etc/passwd", "../x", "a/../../x", "./a", "a/..", "nul\0", 7])
def test_no_key_leads_out_of_the_prefix(tmp_path: Path, key: Any) -> None:
    with pytest.raises(errors.ConfigError, match="not a key"):
        UrlSource(tmp_path)[key]


def test_a_copy_by_pickle_reads_the_same(place: Place) -> None:
    place.put("a b", b"body")
    copy = pickle.loads(pickle.dumps(place.source))
    assert (copy.uri, copy["a b"]) == (place.source.uri, b"body")
    assert in_child(lambda: place.source["a b"]) == b"body"


def test_provenance(place: Place) -> None:
    assert place.source.info("x/y.jpg") == SourceInfo(place.source.uri, "x/y.jpg", None, ("x/y.jpg",))


def test_colons_are_a_part_of_a_name_or_refused(place: Place) -> None:
    place.put("x::y", b"1")
    if place.source.uri.startswith("memory://") and "#" not in place.source.uri:  # a URL of fsspec's
        with pytest.raises(errors.ConfigError, match="filesystem="):
            place.source["x::y"]
    else:
        assert place.source["x::y"] == b"1"


def test_large_objects_come_whole(place: Place) -> None:
    body = bytes(range(256)) * 12_289  # 3 MiB and a bit: more than one range of the S3 server's options
    place.put("big", body)
    assert place.source["big"] == body


# -- prefixes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prefix", "uri", "url"),
    [
        ("s3://b/data/", "s3://b/data", "s3://b/data/a b?#%"),
        ("s3://b", "s3://b", "s3://b/a b?#%"),
        ("https://H.example:443/data//", "https://h.example/data", "https://H.example:443/data/a%20b%3F%23%25"),
        ("https://h/d?sig=s&sv=1&sr=c&si=p", "https://h/d", "https://h/d/a%20b%3F%23%25?sig=s&sv=1&sr=c&si=p"),
        ("https://me:pass@h/d#top", "https://...@h/d", "https://me:pass@h/d/a%20b%3F%23%25"),
        ("gs://b/d", "gs://b/d", "gs://b/d/a b?#%"),
        ("file:///d%20x", "file:///d%20x", "/d x/a b?#%"),
        ("/d x/../y/", "file:///y", "/y/a b?#%"),
        ("/", "file:///", "/a b?#%"),
    ],
)
def test_prefixes(prefix: str, uri: str, url: str) -> None:
    assert UrlSource(prefix).uri == uri
    assert Prefix(prefix).join("a b?#%") == url


def test_a_directory_is_the_one_it_was_when_the_source_was_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a").write_bytes(b"1")
    monkeypatch.chdir(tmp_path)
    source = UrlSource("data")
    monkeypatch.chdir("/")
    assert source["a"] == b"1"


names = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0/"), min_size=1, max_size=30).filter(
    lambda n: n not in (".", "..")
)


@given(st.lists(names, min_size=1, max_size=3).map("/".join), st.sampled_from(["s3://b/p", "/p", "/"]))
def test_a_name_in_a_listing_is_the_one_that_reads_it(name: str, prefix: str) -> None:
    from forebay import remote

    made = Prefix(prefix)
    listed = remote.canonical(made.join(name)) if made.local else made.join(name)
    assert made.name_of(listed) == name


@given(st.lists(names, min_size=1, max_size=3).map("/".join))
def test_a_name_is_one_path_of_an_http_url(name: str) -> None:
    from urllib.parse import unquote, urlsplit

    url = urlsplit(Prefix("http://h/p?sig=1").join(name))
    assert (unquote(url.path), url.query, url.fragment) == (f"/p/{name}", "sig=1", "")


def test_a_filesystem_with_other_settings_is_another_source(tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    one, other = (fsspec.filesystem("dir", path=path, fs=fsspec.filesystem("file")) for path in ("/a", "/b"))
    sources = [UrlSource("x", filesystem=one), UrlSource("dir://x/", filesystem=one), UrlSource("x", filesystem=other)]
    with forebay.Cache(tmp_path / "root") as cache:
        for source in sources:
            source.bind(fetcher_of(cache))
        first, same, another = (source.identity for source in sources)
    assert first == same != another
    assert {source.uri for source in sources} == {"dir://x#..."}


# -- versions and sizes --------------------------------------------------------------------------------------------------


def test_a_local_file_that_is_written_again_has_another_version(tmp_path: Path) -> None:
    source = UrlSource(tmp_path)
    (tmp_path / "a").write_bytes(b"12")
    before = source.version_of("a")
    assert source.size("a") == 2
    assert before == source.version_of("a") is not None
    (tmp_path / "b").write_bytes(b"21")
    (tmp_path / "b").rename(tmp_path / "a")
    assert source.version_of("a") != before


def test_size_and_version_cost_no_request(server: ScriptedServer) -> None:
    server.put("/d/a", b"body")
    source = UrlSource(f"{server.url}/d", version="7")
    assert (source.size("a"), source.version_of("a"), source.version) == (None, None, "7")
    assert server.requests == []


# -- with a cache --------------------------------------------------------------------------------------------------------


def bound(cache: forebay.Cache, prefix: Any, **how: Any) -> UrlSource:
    """One that asks as a cache does: made by a prefetcher of it."""
    with cache.prefetcher(UrlSource(prefix, **how)) as pool:
        assert isinstance(pool.source, UrlSource)
        return pool.source


def test_an_object_is_one_request(server: ScriptedServer, cache: forebay.Cache) -> None:
    server.put("/d/a", b"body")
    source = bound(cache, f"{server.url}/d")
    assert source["a"] == b"body"
    assert len(server.requests) == 1
    assert (cache.stats().requests, cache.stats().bytes_remote) == (1, 4)


def test_a_source_asks_as_its_cache_does(server: ScriptedServer, tmp_path: Path) -> None:
    server.put("/d/a", b"body", require={"X-Key": "k"})
    source = UrlSource(f"{server.url}/d")
    with pytest.raises(errors.AccessDenied):
        source["a"]
    with forebay.Cache(tmp_path / "root", budget=MiB, min_free=0, remote_options=RemoteOptions(headers={"X-Key": "k"})) as cache:
        cache.prefetcher(source).close()
        assert source["a"] == b"body"
    assert source["a"] == b"body"  # of a cache that was closed, too
    assert UrlSource(f"{server.url}/d", options=RemoteOptions(headers={"X-Key": "k"}))["a"] == b"body"


def test_a_cached_object_is_served_while_its_server_is_down(server: ScriptedServer, tmp_path: Path) -> None:
    url = server.put("/d/a", b"body")
    with forebay.Cache(tmp_path / "root", budget=MiB, min_free=0, max_age=0, remote_options=FAST) as cache:
        cache.read(url)
        source = bound(cache, f"{server.url}/d")
        server.objects["/d/a"].statuses[:] = [503] * 9
        assert source["a"] == b"body"
    assert len(server.requests) > 1


def test_a_server_that_is_busy_for_a_moment(server: ScriptedServer) -> None:
    server.put("/d/a", b"body", statuses=[503, 503])
    assert UrlSource(f"{server.url}/d", options=FAST)["a"] == b"body"


def test_a_connection_that_breaks_is_resumed(server: ScriptedServer) -> None:
    body = bytes(range(256)) * 4096
    server.put("/d/a", body, cut_after=300_000, cuts=1)
    assert UrlSource(f"{server.url}/d", options=FAST)["a"] == body
    assert server.sent < 1.5 * len(body)


def test_offline_only_local_files_are_read(server: ScriptedServer, cache: forebay.Cache, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"here")
    server.put("/d/a", b"body")
    with forebay.Cache(cache.path, offline=True) as offline:
        there, here = bound(offline, f"{server.url}/d"), bound(offline, tmp_path)
        with pytest.raises(errors.Offline):
            there["a"]
        assert here["a"] == b"here"
    assert server.requests == []


def test_what_fails_is_counted(server: ScriptedServer, cache: forebay.Cache) -> None:
    server.put("/d/a", b"body", statuses=[503] * 9)
    source = bound(cache, f"{server.url}/d", options=FAST)
    with pytest.raises(errors.RemoteUnavailable):
        source["a"]
    assert cache.stats().requests == 3


# -- decoders ------------------------------------------------------------------------------------------------------------


class Items:
    """The least that is a source."""

    def __init__(self, **items: bytes) -> None:
        self.uri, self._items = "test:items", items

    def __getitem__(self, key: str) -> bytes:
        return self._items[key]


def upper(key: str, data: bytes) -> str:
    return f"{key}:{data.decode().upper()}"


def test_a_decoded_source_does_what_its_inner_one_does(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"text")
    inner = UrlSource(tmp_path, version="3")
    source = DecodedSource(inner, upper, version="2")
    assert source["a"] == "a:TEXT"
    assert (source.uri, source.version, source.decoder_version) == (inner.uri, "3", "2")
    assert (source.size("a"), source.version_of("a"), source.info("a")) == (4, inner.version_of("a"), inner.info("a"))
    assert (source.inner, list(source.keys())) == (inner, ["a"])
    assert source.decoder.endswith("test_sources.upper")
    assert pickle.loads(pickle.dumps(source))["a"] == "a:TEXT"


def test_a_decoded_source_of_the_least_source() -> None:
    source = DecodedSource(Items(a=b"x"), upper)
    assert source["a"] == "a:X"
    assert (source.version, source.size, source.version_of, source.bind) == (None, None, None, None)
    assert source.info("a") == SourceInfo("test:items", "a", None, ("a",))


def test_what_a_decoder_raises_is_raised() -> None:
    def broken(key: str, data: bytes) -> None:
        raise ZeroDivisionError(key)

    with pytest.raises(ZeroDivisionError, match="a"):
        DecodedSource(Items(a=b""), broken)["a"]


def test_the_extension_chooses_the_decoder() -> None:
    decode = by_extension({".png": lambda k, d: "png", "seg.png": lambda k, d: "seg", ".tar.gz": lambda k, d: "tgz"})
    assert [decode(key, b"") for key in ("a.png", "x.y/b.PNG", "a.seg.png", "1.2.tar.gz", ".png")] == ["png", "png", "seg", "tgz", "png"]
    for key in ("a.jpg", "png", "a.png/b", "a."):
        with pytest.raises(errors.ConfigError, match=r"no decoder for .* for \.png"):
            decode(key, b"")
    assert by_extension({"": lambda k, d: "rest"})("a.jpg", b"") == "rest"
    assert DecodedSource(Items(a=b"x"), {"": upper})["a"] == "a:X"


class Decoder:
    name, version = "mine", "4"

    def __call__(self, key: str, data: bytes) -> bytes:
        return data

    def method(self, key: str, data: bytes) -> bytes:
        return data


def test_names_of_decoders() -> None:
    here = __name__
    assert name_of(upper) == f"{here}.upper"
    assert name_of(Decoder()) == "mine"
    assert name_of(Decoder().method) == f"{here}.Decoder.method"
    assert name_of(functools.partial(upper, data=b"x")) == f"{here}.upper(data=b'x')"
    source = DecodedSource(Items(), Decoder())
    assert (source.decoder, source.decoder_version) == ("mine", "4")
    assert DecodedSource(Items(), {".a": upper, "b": Decoder()}).decoder == f".a={here}.upper,.b=mine@4"


def lambdas(n: int) -> list[Any]:
    return [lambda k, d: d[:n], lambda k, d: d[n:], lambda k, d, m=n: d[:m]]


def test_decoders_without_a_name_are_told_apart_by_what_they_do() -> None:
    one, again, other = ([name_of(decode) for decode in lambdas(n)] for n in (1, 1, 2))
    assert one == again
    assert len({*one, *other}) == 6


def _name_in_a_script() -> str:
    def inner(key: str, data: bytes) -> bytes:
        return data if key in {"a", "b", "c"} else key.encode()

    return name_of(inner)


def test_a_decoder_has_the_same_name_in_all_processes() -> None:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(_name_in_a_script) == _name_in_a_script()


def test_functions_of_two_scripts_are_two_decoders() -> None:
    names = []
    for body in ("data", "data + data"):
        scope: dict[str, Any] = {"__name__": "__main__"}
        exec(f"def decode(key, data): return {body}", scope)
        names.append(name_of(scope["decode"]))
    assert names[0] != names[1]
    assert all(name.startswith("__main__.decode#") for name in names)


# -- what may be a source ------------------------------------------------------------------------------------------------


def test_what_is_meant_by_a_path_or_url(tmp_path: Path) -> None:
    assert isinstance(source_of(tmp_path), UrlSource)
    assert isinstance(source_of("s3://b/p"), UrlSource)
    assert isinstance(source_of("https://h/x.tar?sig=1"), TarSource)
    assert isinstance(source_of(tmp_path / "x-{00..11}.tar"), TarSource)
    assert isinstance(source_of(["s3://b/a.tar", "s3://b/b.tar"]), TarSource)
    items = Items()
    assert source_of(items) is items


@pytest.mark.parametrize("thing", [None, 3, {"a": b""}, [], ["a.tar", "b"], object()])
def test_anything_else_is_none(thing: Any) -> None:
    with pytest.raises(errors.ConfigError, match="is not a source"):
        source_of(thing)
