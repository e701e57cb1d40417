"""Tar shards as sources: indexes of all formats, what they cost, where they are kept, and shards that change or are damaged."""

from __future__ import annotations

import io
import os
import pickle
import shutil
import signal
import subprocess
import tarfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import forebay
from forebay import errors
from forebay._kernel import interrupts
from forebay._model import ObjectInfo, Span
from forebay.cache import fetcher_of
from forebay.fetch.prefix import RemoteAccess
from forebay.remote import RemoteOptions
from forebay.sources import SourceInfo, TarSource, shards, tar_index
from forebay.sources.tar_index import Index
from forebay.testing import Request, ScriptedServer
from tests.harness import KiB, MiB
from tests.interrupts.signals import NUMBER, handler_that_raises
from tests.processes import fork, in_child
from tests.servers.nginx import nginx
from tests.strikes import interrupted

FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}
every_format = pytest.mark.parametrize("kind", FORMATS)
FAST = RemoteOptions(backoff=0.01, attempts=3)


def tar_of(members: Mapping[str, bytes], kind: str = "pax", **pax: str) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=FORMATS[kind]) as tar:
        for name, body in members.items():
            info = tarfile.TarInfo(name)
            info.size, info.pax_headers = len(body), dict(pax)
            tar.addfile(info, io.BytesIO(body))
    return out.getvalue()


def samples(count: int, size: int = 1000) -> dict[str, bytes]:
    """As webdataset writes them."""
    found = {}
    for i in range(count):
        found[f"{i:06d}.jpg"] = bytes([i % 251]) * size
        found[f"{i:06d}.json"] = b'{"label": %d}' % i
    return found


class Reads:
    """A tar in memory that counts what is read of it."""

    def __init__(self, data: bytes) -> None:
        self.data, self.spans = data, list[Span]()

    def __call__(self, span: Span) -> bytes:
        self.spans.append(span)
        return self.data[span.start : span.end]

    @property
    def read(self) -> int:
        return sum(max(0, min(span.end, len(self.data)) - span.start) for span in self.spans)


def index_of(data: bytes, *, sized: bool = True, window: int = 4096) -> Index:
    return Index(tar_index.build(Reads(data), len(data) if sized else None, "x.tar", window=window, most=4 * window, jump=window))


def members_of(data: bytes, index: Index) -> dict[str, bytes]:
    spans = {name: index.get(name) for name in index}
    return {name: data[span.start : span.end] for name, span in spans.items() if span is not None}


# -- formats -------------------------------------------------------------------------------------------------------------


@every_format
@pytest.mark.parametrize("sized", [True, False])
def test_members_of_every_format(kind: str, sized: bool) -> None:
    members = {**samples(50), "empty": b"", "block": b"b" * 512, "d" * 60 + "/" + "f" * 90: b"a long name"}
    data = tar_of(members, kind)
    index = index_of(data, sized=sized)
    assert list(index) == list(members)
    assert members_of(data, index) == members
    assert index.get("nothing") is None


@pytest.mark.parametrize("kind", ["gnu", "pax"])
def test_long_names_and_other_letters(kind: str) -> None:
    members = {"x" * 300: b"1", "é/ü" * 70: b"2", "\udcff raw": b"3", "a" * 100: b"4", "a" * 101: b"5", "日本": b"6"}
    data = tar_of(members, kind)
    assert members_of(data, index_of(data)) == members


names = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0/"), min_size=1, max_size=120).filter(
    lambda n: n not in (".", "..")
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.dictionaries(st.lists(names, min_size=1, max_size=3).map("/".join), st.binary(max_size=1500), max_size=8),
    st.sampled_from(["gnu", "pax"]), st.sampled_from([512, 1024, 4096]),
)  # fmt: skip
def test_whatever_is_in_it_is_found_as_by_python(members: dict[str, bytes], kind: str, window: int) -> None:
    data = tar_of(members, kind)
    index = index_of(data, window=window)
    assert members_of(data, index) == members
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        assert [(m.name, m.offset_data, m.size) for m in tar] == [(name, s.start, s.length) for name in index if (s := index.get(name))]


@settings(max_examples=200)
@given(st.data())
def test_a_damaged_tar_is_an_error_or_an_index(data: st.DataObject) -> None:
    body = bytearray(tar_of(samples(3, 600), data.draw(st.sampled_from(list(FORMATS)))))
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    try:
        index = index_of(bytes(body), sized=data.draw(st.booleans()))
    except errors.BadArchive:
        return
    assert all(span.end <= len(body) for name in index if (span := index.get(name)))


def test_what_gnu_tar_writes(tmp_path: Path) -> None:
    program = shutil.which("tar")
    if program is None:
        pytest.skip("tar is not installed")
    place = tmp_path / "in"
    (place / "deep").mkdir(parents=True)
    (place / "deep" / ("n" * 200)).write_bytes(b"long")
    (place / "a").write_bytes(b"body")
    os.link(place / "a", place / "b")
    os.symlink("a", place / "c")
    for kind in ("v7", "oldgnu", "gnu", "ustar", "posix"):
        if kind == "oldgnu":  # v7 knows none
            os.mkfifo(place / "fifo")
        left_out = [] if kind in ("oldgnu", "gnu", "posix") else ["--exclude", "n" * 200]
        subprocess.run([program, "-C", place, f"--format={kind}", *left_out, "-cf", tmp_path / "x.tar", "."], check=True)
        data = (tmp_path / "x.tar").read_bytes()
        wanted = {"a": b"body", "b": b"body"} | ({} if left_out else {"deep/" + "n" * 200: b"long"})
        assert members_of(data, index_of(data)) == wanted, kind


@every_format
def test_what_is_no_file_of_a_directory_is_left_out(tmp_path: Path, kind: str) -> None:
    """As `tarfile` packs a directory of a machine; a link leads to nothing if its target is missing, or was left out by whoever packed."""
    place = tmp_path / "in"
    place.mkdir()
    Path(os.fsdecode(bytes(place) + b"/\xff")).write_bytes(b"no UTF-8")
    (place / "outside").write_bytes(b"outside")
    os.link(place / "outside", place / "a link to a file outside")
    os.link(place / os.fsdecode(b"\xff"), place / "hard")
    (place / "secret").write_bytes(b"secret")
    (place / "secret").chmod(0)
    os.mkfifo(place / "fifo")
    (place / "dangling").symlink_to("/nonexistent")
    (place / "soft").symlink_to("hard")
    with tarfile.open(tmp_path / "x.tar", "w", format=FORMATS[kind]) as tar:
        for path in sorted(place.iterdir(), reverse=True):  # hard links before what they are links to, too
            if path.name == "outside":
                tar.gettarinfo(path)  # as if it was in another shard: its links lead to nothing here
            elif os.access(path, os.R_OK, follow_symlinks=False) or path.is_symlink():
                tar.add(path, arcname=path.name)
    source = TarSource(str(tmp_path / "x.tar"))
    assert {key: source[key] for key in list(source.keys())} == {
        "x.tar/\udcff": b"no UTF-8", "x.tar/hard": b"no UTF-8", **({"x.tar/secret": b"secret"} if os.geteuid() == 0 else {}),
    }  # fmt: skip
    for name in ("dangling", "soft", "fifo", "a link to a file outside"):
        with pytest.raises(errors.NotFound, match="has no member"):
            source[f"x.tar/{name}"]


@pytest.mark.parametrize("kind", ["gnu", "posix", "oldgnu"])
def test_a_file_with_holes_is_left_out_and_told(tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    program = shutil.which("tar")
    if program is None:
        pytest.skip("tar is not installed")
    with open(tmp_path / "holes", "wb") as file:
        for i in range(40):
            file.seek(i << 20)
            file.write(b"x" * 4096)
    (tmp_path / "z").write_bytes(b"after")
    subprocess.run([program, "-C", tmp_path, f"--format={kind}", "-S", "-cf", tmp_path / "x.tar", "holes", "z"], check=True)
    data = (tmp_path / "x.tar").read_bytes()
    if len(data) > 10 << 20:
        pytest.skip("this file system keeps no holes")
    assert members_of(data, index_of(data)) == {"z": b"after"}
    assert "holes" in caplog.text


def test_a_size_beyond_what_octal_digits_hold() -> None:
    for kind in ("gnu", "pax"):
        info = tarfile.TarInfo("huge")
        info.size = 9 << 30
        head = info.tobuf(FORMATS[kind])
        tail = tar_of({"next": b"n"}, kind)

        def read(span: Span, head: bytes = head, tail: bytes = tail) -> bytes:
            start = len(head) + (9 << 30)
            return head[span.start : span.end] if span.start < start else tail[span.start - start : span.end - start]

        index = Index(tar_index.build(read, len(head) + (9 << 30) + len(tail), "x.tar", window=512, most=512, jump=512))
        assert index.get("huge") == Span(len(head), 9 << 30)
        assert list(index) == ["huge", "next"]


def test_records_for_all_members() -> None:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT, pax_headers={"comment": "x" * 700}) as tar:
        info = tarfile.TarInfo("a")
        info.size = 1
        tar.addfile(info, io.BytesIO(b"a"))
    assert members_of(out.getvalue(), index_of(out.getvalue())) == {"a": b"a"}


def test_of_several_with_one_name_the_last_counts() -> None:
    one, two = tar_of({"a": b"1", "b": b"2"}), tar_of({"a": b"3"})
    data = one.rstrip(b"\0") + b"\0" * (-len(one.rstrip(b"\0")) % 512) + two
    assert members_of(data, index_of(data)) == {"a": b"3", "b": b"2"}


def test_an_empty_tar_has_no_members() -> None:
    assert list(index_of(tar_of({}))) == []


# -- what is no tar --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sized", [True, False])
@pytest.mark.parametrize("cut", [1, 511, 600, 1023, 1536, 2047])
def test_a_tar_that_is_cut_short_says_so(cut: int, sized: bool) -> None:
    data = tar_of({"a": b"a" * 1000, "b": b"b" * 1000}, "ustar")[:cut]
    if cut == 1536:  # the whole of a; between two members nobody can tell
        assert members_of(data, index_of(data, sized=sized)) == {"a": b"a" * 1000}
        return
    with pytest.raises(errors.BadArchive, match=r"x\.tar: cut short within .*, at byte") as caught:
        index_of(data, sized=sized)
    assert (caught.value.offset, caught.value.url) == (1536 if cut > 1536 else 0, "x.tar")


def test_a_tar_without_its_end_is_taken_and_told(caplog: pytest.LogCaptureFixture) -> None:
    data = tar_of({"a": b"a" * 512}, "ustar")[:1024]
    assert list(index_of(data)) == ["a"]
    assert "no mark at its end" in caplog.text


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "empty"),
        (b"\x1f\x8b" + b"z" * 2000, "compressed"),
        (b"<html>not here</html>" * 50, "damaged, or no tar"),
        (tar_of({"a": b"a"}, "ustar")[:1024] + b"x" * 512, "damaged, or no tar"),
    ],
)
def test_what_is_no_tar_says_so(data: bytes, why: str) -> None:
    with pytest.raises(errors.BadArchive, match=why):
        index_of(data)


def test_a_header_that_would_fill_the_memory_is_refused() -> None:
    info = tarfile.TarInfo("x")
    info.type, info.size = tarfile.GNUTYPE_LONGNAME, 1 << 33
    head = info.tobuf(tarfile.GNU_FORMAT)
    with pytest.raises(errors.BadArchive, match="a header of"):
        tar_index.build(Reads(head), len(head) + (1 << 33), "x.tar", window=512, most=512, jump=512)


# -- the index -------------------------------------------------------------------------------------------------------------


def test_an_index_is_looked_up_where_it_lies() -> None:
    data = tar_of(samples(2000, 10))
    packed = bytes(index_of(data).data)
    assert len(packed) < 2 * 2000 * 60
    assert list(Index(memoryview(packed))) == list(samples(2000))
    assert members_of(data, Index(packed)) == samples(2000, 10)


@pytest.mark.parametrize(
    "change", [lambda d: d[:-1], lambda d: d + b"x", lambda d: b"other!!!" + d[8:], lambda d: b"", lambda d: d[:8] + b"\xff" * 16 + d[24:]]
)
def test_what_is_no_index_is_refused(change: object) -> None:
    packed = bytes(index_of(tar_of(samples(3))).data)
    with pytest.raises(ValueError, match=r"cut short|no index"):
        Index(change(packed))  # type: ignore[operator]


def test_names_with_one_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tar_index, "_hash", lambda name: len(name))
    members = {"aa": b"1", "bb": b"2", "c": b"3", "dd": b"4"}
    data = tar_of(members)
    index = index_of(data)
    assert members_of(data, index) == members
    assert index.get("ee") is None


# -- what an index costs -----------------------------------------------------------------------------------------------------


def cost(data: bytes) -> Reads:
    reads = Reads(data)
    tar_index.build(reads, len(data), "x.tar", window=MiB, most=8 * MiB, jump=MiB)
    return reads


def test_many_small_members_are_a_few_reads() -> None:
    assert len(cost(tar_of(samples(400, 50 * KiB), "ustar")).spans) <= 6  # 20 MiB


def test_large_members_are_jumped_over() -> None:
    data = tar_of({str(i): bytes(5 * MiB) for i in range(8)}, "ustar")
    reads = cost(data)
    assert len(reads.spans) == 9
    assert reads.read < 2 * MiB + 100 * KiB


def test_a_small_tar_is_one_read() -> None:
    assert len(cost(tar_of(samples(10))).spans) == 1


# -- shards ------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "set"
    (place / "b").mkdir(parents=True)
    for i, name in enumerate(["a-00.tar", "a-01.tar", "b/c d.tar"]):
        (place / name).write_bytes(tar_of({f"{i}.jpg": b"jpg", f"{i}.json": b"{}"}, list(FORMATS)[i]))
    (place / "notes.txt").write_bytes(b"no shard")
    return place


KEYS = ["a-00.tar/0.jpg", "a-00.tar/0.json", "a-01.tar/1.jpg", "a-01.tar/1.json", "b/c d.tar/2.jpg", "b/c d.tar/2.json"]


def test_a_directory_of_shards(folder: Path) -> None:
    for source in (TarSource(folder), TarSource(f"file://{folder}/"), TarSource(f"{folder}/")):
        assert list(source.keys()) == KEYS
        assert [source[key] for key in KEYS] == [b"jpg", b"{}"] * 3
        assert source.uri == f"file://{folder}"
        assert source.shards() == ["a-00.tar", "a-01.tar", "b/c d.tar"]
        assert source.info(KEYS[5]) == SourceInfo(source.uri, KEYS[5], "b/c d.tar", ("2.json",))
        assert (source.size(KEYS[0]), source.size("a-00.tar/none"), source.size("none.tar/x")) == (3, None, None)


def test_one_shard_and_lists_of_them_share_keys(folder: Path) -> None:
    whole = TarSource(folder)
    one, several, ranged = (
        TarSource(folder / "a-00.tar"),
        TarSource([folder / "a-00.tar", folder / "a-01.tar"]),
        TarSource(folder / "a-{00..01}.tar"),
    )
    assert list(one.keys()) == KEYS[:2]
    assert list(several.keys()) == list(ranged.keys()) == KEYS[:4]
    assert one.uri == several.uri == ranged.uri == whole.uri
    assert list(TarSource([folder / "a-01.tar", folder / "b" / "c d.tar"]).keys()) == KEYS[2:]
    assert [one.version_of(KEYS[0]), several.version_of(KEYS[0])] == [whole.version_of(KEYS[0])] * 2 != [None, None]


def test_shards_on_a_filesystem_object(folder: Path) -> None:
    memory = pytest.importorskip("fsspec").filesystem("memory")
    arrow = pytest.importorskip("pyarrow.fs")
    for name in TarSource(folder).shards():
        memory.pipe_file(f"/tars/{name}", (folder / name).read_bytes())
    for source in (
        TarSource("/tars", filesystem=memory),
        TarSource("memory://tars"),
        TarSource(str(folder), filesystem=arrow.LocalFileSystem()),
    ):
        assert list(source.keys()) == KEYS
        assert source[KEYS[4]] == b"jpg"
        assert source.version_of(KEYS[4]) is not None
    assert TarSource("tars/a-01.tar", filesystem=memory)["a-01.tar/1.jpg"] == b"jpg"


def test_shards_of_a_web_server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    with nginx(tmp_path_factory.mktemp("nginx")) as web:
        shutil.copytree(folder, web.files / "set")
        source = TarSource([f"{web.url}/set/a-{{00..01}}.tar", f"{web.url}/set/b/c%20d.tar?token=x"])
        assert list(source.keys()) == KEYS
        assert [source[key] for key in KEYS] == [b"jpg", b"{}"] * 3
        assert source.uri == f"{web.url}/set"


def test_shards_in_several_buckets() -> None:
    fsspec = pytest.importorskip("fsspec")
    shards = ["memory://one/x.tar", "memory://two/x.tar"]
    for url in shards:
        fsspec.filesystem("memory").pipe_file(url, tar_of({"a/b": url.encode()}))
    source = TarSource(shards)
    assert source.shards() == shards
    assert [source[f"{url}/a/b"] for url in shards] == [url.encode() for url in shards]


def test_no_shards(tmp_path: Path) -> None:
    with pytest.raises(errors.NotFound, match=r"no \.tar"):
        list(TarSource(tmp_path).keys())
    with pytest.raises(errors.ConfigError, match=r"HTTP has no listings.*\{000\.\.099\}"):
        TarSource("https://host/set?sig=secret")
    with pytest.raises(errors.ConfigError, match="no shards"):
        TarSource([])
    with pytest.raises(errors.ConfigError, match="named twice"):
        TarSource(["/d/a.tar", "/d/a.tar"])


def test_keys_that_name_nothing(folder: Path) -> None:
    source = TarSource(folder)
    for key in ("", "a-00.tar", "c.tar/0.jpg", "/a-00.tar/0.jpg", "../set/a-00.tar/0.jpg"):
        with pytest.raises(errors.NotFound, match="no shard"):
            source[key]
    with pytest.raises(errors.NotFound, match="no member 'x'"):
        source["a-00.tar/x"]
    with pytest.raises(errors.NotFound):
        TarSource(folder / "gone.tar")["gone.tar/x"]


def test_copies_and_forks(folder: Path) -> None:
    source = TarSource(folder)
    assert source[KEYS[0]] == b"jpg"
    copy = pickle.loads(pickle.dumps(source))
    assert [copy[key] for key in KEYS] == [b"jpg", b"{}"] * 3
    assert in_child(lambda: [source[key] for key in KEYS]) == [b"jpg", b"{}"] * 3


def test_a_version_of_the_whole_stands_for_those_of_shards(server: ScriptedServer) -> None:
    source = TarSource(server.put("/a.tar", tar_of(samples(1))), version="2026-11")
    assert (source.version, source.version_of("a.tar/000000.jpg")) == ("2026-11", None)
    assert server.requests == []


# -- what reading costs ------------------------------------------------------------------------------------------------------


def test_a_member_is_one_ranged_read(server: ScriptedServer) -> None:
    members = samples(30, 100_000)
    data = tar_of(members)
    source = TarSource(server.put("/a.tar", data))
    assert source["a.tar/000007.jpg"] == members["000007.jpg"]
    before, sent = len(server.requests), server.sent
    assert source["a.tar/000023.jpg"] == members["000023.jpg"]
    assert len(server.requests) == before + 1
    assert server.sent - sent == 100_000
    assert server.requests[-1].status == 206


def test_headers_only_are_read_of_large_members(server: ScriptedServer) -> None:
    data = tar_of({f"{i}.bin": bytes(4 * MiB) for i in range(6)})
    source = TarSource(server.put("/a.tar", data))
    assert len(list(source.keys())) == 6
    assert server.sent < 2 * MiB + 100 * KiB < len(data) / 4


def test_an_index_is_made_once_by_all_threads(server: ScriptedServer) -> None:
    source = TarSource(server.put("/a.tar", tar_of(samples(20))))
    together = threading.Barrier(8)
    found: list[bytes] = []

    def read() -> None:
        together.wait()
        found.append(source["a.tar/000003.json"])

    threads = [threading.Thread(target=read) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [b'{"label": 3}'] * 8
    assert server.heads == 1
    assert server.gets == 1 + 8


def test_a_child_that_was_forked_while_an_index_is_made_makes_its_own(server: ScriptedServer) -> None:
    source = TarSource(server.put("/a.tar", tar_of(samples(20)), stall_after=100, stalls=1), options=FAST)
    thread = threading.Thread(target=lambda: source["a.tar/000003.json"])
    thread.start()
    assert server.stalled.wait(20)
    child = fork(lambda: source["a.tar/000003.json"])
    try:
        assert child.result() == b'{"label": 3}'
    finally:
        child.kill()
        server.go.set()
        thread.join()


# -- indexes in the cache ------------------------------------------------------------------------------------------------------


def bound(cache: forebay.Cache, *shards: str) -> TarSource:
    """One that asks as the cache does: made by a prefetcher of it."""
    with cache.prefetcher(TarSource(shards)) as pool:
        assert isinstance(pool.source, TarSource)
        return pool.source


def test_an_index_is_kept_for_all_processes(server: ScriptedServer, cache: forebay.Cache) -> None:
    url = server.put("/a.tar", tar_of(samples(20)))
    assert bound(cache, url)["a.tar/000003.json"] == b'{"label": 3}'
    assert [entry.key for entry in cache.entries("indexes")][-1].startswith(f"{url}#version=")
    before, heads = server.gets, server.heads
    assert bound(cache, url)["a.tar/000004.json"] == b'{"label": 4}'
    assert in_child(lambda: bound(cache, url)["a.tar/000005.json"]) == b'{"label": 5}'
    assert (server.gets, server.heads) == (before, heads)  # what is known of the shard was asked for not long ago
    assert (cache.stats().requests, cache.stats().bytes_remote) == (len(server.requests), server.sent)


def test_processes_that_want_one_shard_index_it_once(server: ScriptedServer, cache: forebay.Cache) -> None:
    url = server.put("/a.tar", tar_of(samples(20)), latency=0.2)
    children = [fork(lambda: bound(cache, url).size("a.tar/000003.json")) for _ in range(4)]
    assert [child.result() for child in children] == [12] * 4
    assert server.gets == 1


@pytest.mark.parametrize("size", [5_000, 50_000])
def test_a_shard_of_small_members_is_fetched_once(server: ScriptedServer, cache: forebay.Cache, size: int) -> None:
    """What is read to make the index is kept: the shard, from which the members come."""
    members = samples(100, size)
    data = tar_of(members)
    url = server.put("/a.tar", data)
    with cache.prefetcher(TarSource(url)) as pool:
        keys = list(pool.source.keys())
        assert {key.removeprefix("a.tar/"): body for key, body in zip(keys, pool.get_many(keys), strict=True)} == members
    assert server.sent <= 1.02 * len(data)
    assert cache.read(url) == data
    assert server.sent <= 1.02 * len(data)


def test_members_of_a_shard_that_is_kept_are_not_stored_once_more(server: ScriptedServer, cache: forebay.Cache) -> None:
    members = samples(50, 10_000)
    url = server.put("/a.tar", tar_of(members))
    keys = [f"a.tar/{name}" for name in members]

    def read() -> list[object]:
        with cache.prefetcher(TarSource(url)) as pool:
            lazies = [pool.get_lazy(key) for key in keys]
            return [[lazy.get() for lazy in lazies], list(pool.stream(keys)), pool.warm(keys).failed]

    assert read() == [list(members.values()), list(members.values()), ()]
    assert in_child(read) == [list(members.values()), list(members.values()), ()]
    assert cache.entries("prefetch") == []
    assert server.gets == 1
    cache.evict(url)
    assert read() == [list(members.values()), list(members.values()), ()]
    assert cache.stats().fallbacks == 0


def test_a_prefetcher_with_limits_stores_members_as_items_of_its_own(server: ScriptedServer, cache: forebay.Cache) -> None:
    members = samples(50, 10_000)
    url = server.put("/a.tar", tar_of(members))
    with cache.prefetcher(TarSource(url), budget=MiB) as pool:
        assert pool.warm(f"a.tar/{name}" for name in members).failed == ()
        assert pool.get_many([f"a.tar/{name}" for name in members]) == list(members.values())
        assert pool.count == len(members)


def test_of_a_shard_of_large_members_only_these_are_read(server: ScriptedServer, cache: forebay.Cache) -> None:
    members = {f"{number}.bin": os.urandom(2 * MiB) for number in range(8)}
    data = tar_of(members)
    with cache.prefetcher(TarSource(server.put("/a.tar", data))) as pool:
        keys = list(pool.source.keys())
        assert server.sent < 300 * KiB
        assert pool.get_many(keys) == list(members.values())
    assert server.sent <= 1.02 * len(data)
    assert cache.entries("urls") == []


def test_a_shard_that_would_take_much_of_the_cache_is_not_kept(server: ScriptedServer, tmp_path: Path) -> None:
    members = samples(100, 10_000)
    url = server.put("/a.tar", tar_of(members))
    with forebay.Cache(tmp_path / "small", budget=4 * MiB, min_free=0) as cache:
        assert bound(cache, url)["a.tar/000003.jpg"] == members["000003.jpg"]
        assert cache.entries("urls") == []


def test_a_shard_that_changes_before_it_is_fetched_whole(server: ScriptedServer, cache: forebay.Cache) -> None:
    """Its version was asked for before: the index is that of the new one."""
    url = server.put("/a.tar", tar_of({"x": b"old"}))
    source = bound(cache, url)
    source.version_of("a.tar/x")
    server.put("/a.tar", tar_of({"w": b"longer than before", "x": b"new"}))
    assert source["a.tar/x"] == b"new"


def test_the_size_of_members_is_estimated_from_what_is_there() -> None:
    def typical(members: dict[str, bytes], seen: int) -> int:
        data = tar_of(members, "gnu")
        return tar_index.typical_size(data[:seen], len(data))

    assert 1000 <= typical({f"{i}": bytes(1000) for i in range(50)}, 10_000) <= 2000
    assert typical({"a.json": b"{}", "a.mp4": bytes(3 * MiB)}, 10_000) > MiB
    assert typical({"a": bytes(100)}, 100) == 0
    assert tar_index.typical_size(b"no tar" * 1000, 6000) == 0


@pytest.mark.parametrize("which", [0, 1])
def test_what_is_kept_but_makes_no_sense_is_made_anew(server: ScriptedServer, cache: forebay.Cache, which: int) -> None:
    url = server.put("/a.tar", tar_of(samples(20)))
    bound(cache, url).size("a.tar/000003.json")
    key = cache.entries("indexes")[which].key
    fetcher_of(cache).store.put("indexes", key, b"something else")
    assert bound(cache, url)["a.tar/000003.json"] == b'{"label": 3}'
    assert cache.space("indexes").get(key) != b"something else"


def test_the_node_asks_for_a_version_once(server: ScriptedServer, cache: forebay.Cache) -> None:
    url = server.put("/a.tar", tar_of(samples(2)), latency=0.1)
    children = [fork(lambda: bound(cache, url).version_of("a.tar/000001.json")) for _ in range(4)]
    assert {child.result() for child in children} == {server.objects["/a.tar"].etag}
    assert server.heads == 1


def test_a_cache_that_always_asks_asks_for_versions(server: ScriptedServer, cache: forebay.Cache) -> None:
    url = server.put("/a.tar", tar_of({"x": b"old"}))
    before = bound(cache, url).version_of("a.tar/x")
    server.put("/a.tar", tar_of({"x": b"new"}))
    assert bound(cache, url).version_of("a.tar/x") == before
    with forebay.Cache(cache.path, max_age=0) as eager:
        assert bound(eager, url).version_of("a.tar/x") != before


def test_a_server_that_is_gone_leaves_what_was_known(server: ScriptedServer, cache: forebay.Cache) -> None:
    url = server.put("/a.tar", tar_of(samples(20)))
    known = bound(cache, url)
    assert known.size("a.tar/000003.json") == 12
    server.close()
    with forebay.Cache(cache.path, max_age=0, remote_options=FAST) as eager:
        source = bound(eager, url)
        assert source.version_of("a.tar/000003.json") == known.version_of("a.tar/000003.json")
        assert source.size("a.tar/000003.json") == 12
        assert source["a.tar/000003.json"] == b'{"label": 3}', "the shard itself is kept"
        eager.evict(url)
        with pytest.raises(errors.RemoteUnavailable):
            source["a.tar/000003.json"]


def test_a_server_that_does_not_answer_is_not_asked_for_each_version(server: ScriptedServer) -> None:
    url = server.put("/a.tar", tar_of(samples(2)), statuses=[503] * 3)
    source = TarSource(url, options=FAST)
    assert [source.version_of("a.tar/000001.json") for _ in range(5)] == [None] * 5
    assert server.heads == 3
    assert source["a.tar/000001.json"] == b'{"label": 1}'


def test_offline_nobody_is_asked(server: ScriptedServer, cache: forebay.Cache) -> None:
    url, other = server.put("/a.tar", tar_of(samples(20))), server.put("/b.tar", tar_of(samples(2)))
    known = bound(cache, url)
    assert known.size("a.tar/000003.json") == 12
    before = len(server.requests)
    with forebay.Cache(cache.path, offline=True) as offline:
        source = bound(offline, url, other)
        assert source.version_of("a.tar/000003.json") == known.version_of("a.tar/000003.json") is not None
        assert (source.size("a.tar/000003.json"), source.size("b.tar/000001.json")) == (12, None)
        assert source.version_of("b.tar/000001.json") is None
        assert source["a.tar/000003.json"] == b'{"label": 3}', "the shard itself is kept"
        offline.evict(url)
        for key in ("a.tar/000003.json", "b.tar/000001.json"):
            with pytest.raises(errors.Offline):
                source[key]
    assert len(server.requests) == before


def test_a_shard_without_a_version_is_indexed_by_each_process(server: ScriptedServer, cache: forebay.Cache) -> None:
    url = server.put("/a.tar", tar_of(samples(20)), etag=None, modified=None)
    source = bound(cache, url)
    assert source["a.tar/000003.json"] == b'{"label": 3}'
    assert source.version_of("a.tar/000003.json") is None
    assert cache.entries("indexes") == []


def test_a_cache_that_cannot_keep_it_is_done_without(server: ScriptedServer, tmp_path: Path) -> None:
    url = server.put("/a.tar", tar_of(samples(20)))
    with forebay.Cache(tmp_path / "none", enabled=False) as off, forebay.Cache(tmp_path / "tiny", budget=4 * KiB, min_free=0) as tiny:
        for cache in (off, tiny):
            source = bound(cache, url)
            assert source["a.tar/000003.json"] == b'{"label": 3}'
            assert source["a.tar/000004.json"] == b'{"label": 4}'
        closed = bound(tiny, url)
    assert closed["a.tar/000003.json"] == b'{"label": 3}'
    assert cache.closed


def test_a_root_that_may_only_be_read_gives_its_indexes(server: ScriptedServer, cache: forebay.Cache) -> None:
    kept, other = server.put("/a.tar", tar_of(samples(20))), server.put("/b.tar", tar_of(samples(3)))
    bound(cache, kept).size("a.tar/000003.json")
    before = server.gets
    with forebay.Cache(cache.path, read_only=True) as reader:
        source = TarSource([kept, other])
        source.bind(fetcher_of(reader))
        assert source.size("a.tar/000003.json") == 12
        assert server.gets == before
        assert source.size("b.tar/000002.json") == 12


def test_an_upstream_root_gives_its_indexes(server: ScriptedServer, cache: forebay.Cache, tmp_path: Path) -> None:
    url = server.put("/a.tar", tar_of(samples(20)))
    bound(cache, url).size("a.tar/000003.json")
    before = server.gets
    with forebay.Cache(tmp_path / "second", budget=MiB, min_free=0, upstream=cache.path) as second:
        assert bound(second, url).size("a.tar/000003.json") == 12
    assert server.gets == before


# -- shards that change, and servers that fail ---------------------------------------------------------------------------------


@pytest.mark.parametrize("is_bound", [False, True])
def test_a_shard_that_changes_is_indexed_again(server: ScriptedServer, tmp_path: Path, is_bound: bool) -> None:
    url = server.put("/a.tar", tar_of({"x": b"old", "y": b"other"}))
    with forebay.Cache(tmp_path / "root", budget=64 * MiB, min_free=0, max_age=0) as always_asks:
        source = bound(always_asks, url) if is_bound else TarSource(url)
        assert source["a.tar/x"] == b"old"
        before = source.version_of("a.tar/x")
        server.put("/a.tar", tar_of({"before": bytes(5000), "y": b"other", "x": b"new"}))
        assert source["a.tar/x"] == b"new"
        assert source.version_of("a.tar/x") != before
        assert list(source.keys()) == ["a.tar/before", "a.tar/y", "a.tar/x"]


def test_a_shard_that_is_kept_is_served_until_its_period_ends(
    server: ScriptedServer, cache: forebay.Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = server.put("/a.tar", tar_of({"x": b"old", "y": b"other"}))
    source = bound(cache, url)
    assert source["a.tar/x"] == b"old"
    server.put("/a.tar", tar_of({"before": bytes(5000), "y": b"other", "x": b"new"}))
    assert (source["a.tar/x"], source["a.tar/y"]) == (b"old", b"other")
    cache.invalidate(url)
    cache.clear("indexes").execute()  # what is noted of its version for all processes
    ahead = time.monotonic_ns() + 301 * 10**9
    monkeypatch.setattr(shards.time, "monotonic_ns", lambda: ahead)
    assert (source["a.tar/x"], source["a.tar/y"]) == (b"new", b"other")


def test_a_shard_whose_ranges_tell_no_etag_is_indexed_again(server: ScriptedServer, cache: forebay.Cache) -> None:
    """What is noted of it for all processes is enough to tell that it changed."""
    url, versions = server.put("/a.tar", tar_of({"x": b"old", "y": b"other"})), iter(['W/"1"', 'W/"2"'])

    def answer(request: Request) -> None:
        server.objects["/a.tar"].etag = next(versions) if request.method == "HEAD" else None

    server.on_request = answer
    assert bound(cache, url)["a.tar/x"] == b"old"
    server.put("/a.tar", tar_of({"y": b"other", "x": b"new"}), modified=1.7e9)
    assert bound(cache, url)["a.tar/x"] == b"new"
    assert next(versions, None) is None  # the second asked for the version only once it saw another one


def test_a_local_shard_that_changes_is_indexed_again(folder: Path) -> None:
    source = TarSource(folder)
    assert source[KEYS[0]] == b"jpg"
    (folder / "new").write_bytes(tar_of({"before": bytes(5000), "0.jpg": b"new"}))
    (folder / "new").rename(folder / "a-00.tar")
    assert source[KEYS[0]] == b"new"


def test_a_member_that_is_not_in_the_new_shard_is_not_found(server: ScriptedServer) -> None:
    source = TarSource(server.put("/a.tar", tar_of({"x": b"old"})))
    assert source["a.tar/x"] == b"old"
    server.put("/a.tar", tar_of({"y": b"new"}))
    with pytest.raises(errors.NotFound, match="no member 'x'"):
        source["a.tar/x"]


def test_a_shard_without_a_version_that_shrinks_is_indexed_again(server: ScriptedServer) -> None:
    source = TarSource(server.put("/a.tar", tar_of({"x": bytes(50_000), "y": b"old"}), etag=None, modified=None))
    assert source["a.tar/y"] == b"old"
    server.put("/a.tar", tar_of({"y": b"new"}), etag=None, modified=None)
    assert source["a.tar/y"] == b"new"


def test_a_shard_that_was_cut_short_says_which_and_where(server: ScriptedServer) -> None:
    url = server.put("/a.tar", tar_of({"x": b"1" * 1000, "y": b"2" * 1000}, "ustar")[:2500])
    with pytest.raises(errors.BadArchive, match=r"/a\.tar: cut short within 'y', of 1,000 bytes, at byte 1,536"):
        TarSource(url)["a.tar/x"]


def test_a_shard_that_changes_while_it_is_indexed(server: ScriptedServer, cache: forebay.Cache) -> None:
    old, new = tar_of({"x": b"old"}), tar_of({"before": bytes(5000), "x": b"new"})
    url = server.put("/a.tar", old)

    def change(request: Request) -> None:
        if request.method == "GET" and server.gets == 1:
            server.put("/a.tar", new)

    server.on_request = change
    assert bound(cache, url)["a.tar/x"] == b"new"


def test_an_error_is_not_remembered(server: ScriptedServer, cache: forebay.Cache) -> None:
    url = server.put("/a.tar", b"")
    source = bound(cache, url)
    with pytest.raises(errors.BadArchive, match="empty"):
        source["a.tar/000001.json"]
    assert source.size("a.tar/000001.json") is None
    server.put("/a.tar", tar_of(samples(3)))
    assert source["a.tar/000001.json"] == b'{"label": 1}'


def test_a_server_that_is_busy_for_a_moment(server: ScriptedServer) -> None:
    url = server.put("/a.tar", tar_of(samples(3)), statuses=[503, 503])
    assert TarSource(url, options=FAST)["a.tar/000001.json"] == b'{"label": 1}'
    server.objects["/a.tar"].statuses[:] = [503] * 9
    with pytest.raises(errors.RemoteUnavailable):
        TarSource(url, options=FAST)["a.tar/000001.json"]


@pytest.mark.rotates
def test_keys_end_when_nobody_wants_more(server: ScriptedServer) -> None:
    urls = [server.put(f"/{i:02d}.tar", tar_of(samples(2))) for i in range(40)]
    keys = TarSource(urls).keys()
    assert next(keys) == "00.tar/000000.jpg"
    keys.close()
    assert server.heads <= 9


@pytest.fixture
def tars_without_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TarSource:
    """Three shards with one member each, where no thread can be started."""

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    for number in range(3):
        (tmp_path / f"{number}.tar").write_bytes(tar_of({"a": b"1"}))
    monkeypatch.setattr(threading.Thread, "start", start)
    return TarSource([tmp_path / f"{number}.tar" for number in range(3)])


def test_keys_come_where_no_thread_can_be_started(tars_without_threads: TarSource) -> None:
    assert list(tars_without_threads.keys()) == [f"{number}.tar/a" for number in range(3)]


def test_what_a_handler_raises_while_keys_come_in_this_thread_ends_the_step(
    tars_without_threads: TarSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the next one, which has the members of another shard."""
    keys = tars_without_threads.keys()
    real = shards.ShardIndexes.index

    def index(self: shards.ShardIndexes, url: str) -> shards.Indexed:
        found = real(self, url)
        if url.endswith("1.tar"):
            signal.raise_signal(NUMBER)
            interrupts.point()
        return found

    with handler_that_raises(), monkeypatch.context() as patch, pytest.raises(TimeoutError, match="of the handler"):
        patch.setattr(shards.ShardIndexes, "index", index)
        next(keys)


def test_keys_that_end_do_not_wait_for_a_shard_that_stalls(server: ScriptedServer) -> None:
    urls = [server.put(f"/{i}.tar", tar_of(samples(2)), stall_after=10 if i == 3 else None) for i in range(4)]
    keys = TarSource(urls).keys()
    assert next(keys) == "0.tar/000000.jpg"
    assert server.stalled.wait(60)
    keys.close()
    stalled = [thread for thread in threading.enumerate() if thread.name.startswith("forebay-index")]
    assert stalled
    server.go.set()
    for thread in stalled:
        thread.join(60)
        assert not thread.is_alive()


def test_an_error_of_one_shard_comes_at_its_turn(server: ScriptedServer) -> None:
    urls = [server.put(f"/{i}.tar", b"no tar" if i == 2 else tar_of(samples(1))) for i in range(5)]
    keys = TarSource(urls).keys()
    assert [next(keys) for _ in range(4)] == [f"{i}.tar/000000.{kind}" for i in range(2) for kind in ("jpg", "json")]
    with pytest.raises(errors.BadArchive):
        next(keys)


def test_shards_that_lead_out_of_the_prefix_are_left_out(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    names = ["../../evil.tar", "ok.tar", "../worse.tar", "a/./b.tar"]
    listed = [ObjectInfo(f"s3://b/p/{name}", 10, "x", True, 1.0) for name in names]
    monkeypatch.setattr(RemoteAccess, "list", lambda self, url: iter(listed))
    assert TarSource("s3://b/p/").shards() == ["ok.tar"]
    assert [record.message for record in caplog.records if "skipped" in record.message] == [
        "s3://b/p: '../../evil.tar' is outside the source; such shards are skipped"
    ]


def test_a_signal_ends_the_wait_for_an_index_that_is_being_built(server: ScriptedServer) -> None:
    keys = TarSource(server.put("/0.tar", tar_of(samples(2)), stall_after=10)).keys()
    with interrupted("keys", server.go.set):
        next(keys)
