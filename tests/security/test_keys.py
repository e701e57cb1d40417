"""What a key tells, and whose bytes it leads to: other servers and other credentials have entries of their own."""

from __future__ import annotations

import asyncio
import hashlib
import io
import itertools
import os
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

import forebay
from forebay import errors
from forebay._model import URLS
from forebay.adapters.huggingface import snapshot_download
from forebay.adapters.streaming import get_shm_prefix
from forebay.cache import fetcher_of
from forebay.claims.registry import VARIABLE, Registry
from forebay.cli.checkup import check_up
from forebay.remote import Realm, RemoteOptions
from forebay.sources import TarSource, UrlSource
from forebay.testing import ScriptedServer
from forebay.world import World
from tests.items import Items
from tests.processes import USERS, Gate, as_user, in_child
from tests.servers.hub import Hub, hub

ATTACKER, VICTIM = USERS
WORDS = ("letmein", "swordfish", "hunter2", "qwerty")


def of(user: str) -> RemoteOptions:
    return RemoteOptions(token=user)


def by_header(user: str) -> RemoteOptions:
    return RemoteOptions(headers={"X-Api-Key": user})


@pytest.fixture
def private(server: ScriptedServer) -> str:
    """The URL of a private object: each user gets other bytes, under one ETag, as from a server that knows versions only."""

    def on_request(request: Any) -> None:
        user = request.headers.get("X-Api-Key") or request.headers.get("Authorization", "nobody").removeprefix("Bearer ")
        server.objects["/x.bin"].body = f"for {user}".ljust(200_000).encode()

    url = server.put("/x.bin", b"", etag='"1"')
    server.on_request = on_request
    return url


def text(data: Any) -> str:
    return bytes(data).decode().strip()


WAYS: dict[str, Callable[[forebay.Cache, str], Any]] = {
    "read": lambda cache, url: cache.read(url),
    "read_many": lambda cache, url: cache.read_many([url])[0],
    "aread": lambda cache, url: asyncio.run(_aread(cache, url)),
    "local": lambda cache, url: Path(cache.local(url).path).read_bytes(),
    "open": lambda cache, url: cache.open(url).read(),
    "blocks": lambda cache, url: cache.open(url, block_size="64KiB").read(),
    "lookahead": lambda cache, url: next(iter(cache.lookahead([url]))),
    "prefetch": lambda cache, url: cache.prefetcher(url.rpartition("/")[0]).get(url.rpartition("/")[2]),
    "fsspec": lambda cache, url: _by_fsspec(cache, url),
}


async def _aread(cache: forebay.Cache, url: str) -> memoryview:
    return await cache.aread(url)


def _by_fsspec(cache: forebay.Cache, url: str) -> bytes:
    pytest.importorskip("fsspec")
    from forebay.adapters.fsspec import ForebayFileSystem

    data: bytes = ForebayFileSystem(target_protocol="http", cache=cache).cat_file(url)
    return data


# -- credentials ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("of", [of, by_header])
def test_what_one_token_got_is_not_served_for_another(private: str, tmp_path: Path, way: str, of: Callable[[str], RemoteOptions]) -> None:
    """In one process, whose memo both caches share, and by each way to an object; a second time as a hit."""
    root = tmp_path / "root"
    with forebay.Cache(root, remote_options=of("alice")) as alice, forebay.Cache(root, remote_options=of("bob")) as bob:
        with forebay.Cache(root) as public:
            for _ in range(3):
                for cache, user in ((alice, "alice"), (bob, "bob"), (public, "nobody")):
                    if not (way == "fsspec" and user != "nobody"):  # its own client asks, if the cache does not
                        assert text(WAYS[way](cache, private)) == f"for {user}"


def test_nor_in_another_process_or_without_a_remote(private: str, tmp_path: Path, server: ScriptedServer) -> None:
    def read(user: str, **options: Any) -> str:
        with forebay.Cache(tmp_path / "root", remote_options=of(user), **options) as cache:
            return text(cache.read(private))

    assert in_child(lambda: read("alice")) == "for alice"
    assert in_child(lambda: read("bob")) == "for bob"
    assert server.gets == 2
    assert in_child(lambda: read("alice")) == "for alice"
    assert server.gets == 2
    with pytest.raises(errors.Offline):
        read("carol", offline=True)


def test_nor_from_the_upstream_root(private: str, tmp_path: Path, server: ScriptedServer) -> None:
    with forebay.Cache(tmp_path / "above", remote_options=of("alice")) as above:
        above.read(private)
        above.open(private, block_size="64KiB").read()
    for user, gets in (("bob", 2), ("alice", 2)):
        with forebay.Cache(tmp_path / user, upstream=tmp_path / "above", remote_options=of(user)) as cache:
            assert text(cache.read(private)) == f"for {user}"
        assert server.gets == gets


def test_a_source_with_its_own_token_has_its_own_entries(private: str, tmp_path: Path) -> None:
    """The options of a source are those of its requests; the cache that it is bound to has others."""
    prefix, _, name = private.rpartition("/")
    with forebay.Cache(tmp_path / "root") as cache:
        for version in (None, "1"):
            for user in ("alice", "bob"):
                with cache.prefetcher(UrlSource(prefix, options=of(user), version=version)) as prefetcher:
                    assert text(prefetcher.get(name)) == f"for {user}"
        assert text(cache.read(private)) == "for nobody"


def test_shards_with_another_token_are_other_shards(server: ScriptedServer, tmp_path: Path) -> None:
    import tarfile

    def on_request(request: Any) -> None:
        user, file = request.headers.get("Authorization", "").removeprefix("Bearer ").encode(), io.BytesIO()
        with tarfile.open(fileobj=file, mode="w") as tar:
            info = tarfile.TarInfo("a")
            info.size = len(user)
            tar.addfile(info, io.BytesIO(user))
        server.objects["/s.tar"].body = file.getvalue()

    url = server.put("/s.tar", b"", etag='"1"')
    server.on_request = on_request
    with forebay.Cache(tmp_path / "root") as cache:
        for user in ("alice", "bob12", "alice"):
            with cache.prefetcher(TarSource([url], options=of(user))) as prefetcher:
                assert bytes(prefetcher.get("s.tar/a")) == user.encode()


def test_a_source_tells_by_its_identity_what_it_may_not_show(tmp_path: Path) -> None:
    def is_read(version: str, identity: object) -> bool:
        source = Items(uri="https://...@h/data", version=version)
        source.identity = identity  # type: ignore[attr-defined]
        with cache.prefetcher(source) as prefetcher:
            prefetcher.warm(["a"])
        return bool(source.reads)

    with forebay.Cache(tmp_path / "root") as cache:
        assert [is_read("1", identity) for identity in ("alice", "bob", "alice")] == [True, True, False]
        assert [is_read("2", identity) for identity in (None, object(), len)] == [True, False, False]  # no texts


def test_a_partition_is_shared_by_who_names_it(private: str, tmp_path: Path, server: ScriptedServer) -> None:
    """``""``: whatever the token is; a text: those with the same text, for each scheme."""
    for partition in ("", "team"):
        for user in ("alice", "bob"):
            options = RemoteOptions(token=user, partition=partition)
            with forebay.Cache(tmp_path / "root", remote_options=options) as cache:
                assert text(cache.read(private)) == "for alice"
    assert server.gets == 2
    names = []
    for options in (RemoteOptions(), RemoteOptions(partition="one"), RemoteOptions(partition="two"), RemoteOptions(token="t")):
        with forebay.Cache(tmp_path / "root", remote_options=options) as cache:
            names.append([fetcher_of(cache).target(url).key for url in ("s3://b/k", "hf://o/n@main/f", "memory://x")])
    plain, one, two, token = names
    assert plain == token == ["s3://b/k", "hf://o/n@main/f", "memory://x"]  # by default it is for HTTP
    assert not set(plain) & set(one)
    assert not set(one) & set(two)


def test_a_url_that_names_nothing_is_the_result_of_its_place(tmp_path: Path, private: str) -> None:
    with forebay.Cache(tmp_path / "root", remote_options=of("alice")) as cache:
        results = cache.read_many(["nothing://a/b", private, "https://me:a/b@h/x"], return_exceptions=True)
    assert isinstance(results[0], errors.ForebayError)
    assert text(results[1]) == "for alice"
    assert isinstance(results[2], errors.ConfigError)


def test_a_header_counts_as_a_token_does() -> None:
    assert RemoteOptions(headers={"authorization": "Bearer t"}).authorization == RemoteOptions(token="t").authorization
    assert RemoteOptions(headers={"authorization": ""}, token="t").authorization == ""  # which is sent
    assert "5ec3e7" not in repr(RemoteOptions(partition="5ec3e7"))


def realms(**options: Any) -> list[str]:
    """What decides, besides a URL, about the bytes, for each scheme that sends the headers of the user, and one that does not."""
    return [Realm(RemoteOptions(**options))(kind) for kind in ("http", "https", "s3", "hf", "gs")]


@pytest.mark.parametrize("name", ["Accept", "accept-language", "PRIVATE-TOKEN", "X-Api-Key", "Cookie", "Host", "Proxy-Authorization"])
def test_a_header_of_the_user_is_part_of_the_key(name: str) -> None:
    one, other, empty, none = (realms(headers=headers) for headers in ({name: "a"}, {name: "b"}, {name: ""}, {}))
    assert all(len(set(texts)) == 4 for texts in list(zip(one, other, empty, none, strict=True))[:-1])
    assert one[-1] == none[-1] == ""
    assert not Realm(RemoteOptions(headers={name: "a"})).is_usual


@pytest.mark.parametrize("name", ["User-Agent", "range", "If-None-Match", "If-Modified-Since", "TraceParent", "X-Request-ID"])
def test_what_differs_with_each_request_is_not(name: str) -> None:
    assert realms(headers={name: "a"}) == realms()
    assert Realm(RemoteOptions(headers={name: "a"})).is_usual


def test_spelling_and_order_of_headers_do_not_matter() -> None:
    one = {"X-Api-Key": "k", "Accept": "a"}
    assert realms(headers=one) == realms(headers={"accept": " a", "ACCEPT": "a", "x-api-key": "k"}) != realms()
    assert realms(headers={"X": "a", "x": "b"}) != realms(headers={"x": "b", "X": "a"})  # each is sent, in this order


def test_what_the_caller_does_to_the_headers_later_changes_nothing(private: str, tmp_path: Path) -> None:
    headers = {"X-Api-Key": "alice"}
    with forebay.Cache(tmp_path / "root", remote_options=RemoteOptions(headers=headers)) as cache:
        headers["X-Api-Key"] = "bob"
        assert text(cache.read(private)) == "for alice"


def test_keys_of_a_token_alone_are_those_of_older_versions() -> None:
    """Else each root would fetch all of it again."""
    older = [repr(("", "Bearer t"))] * 2
    assert realms(token="t")[:2] == realms(headers={"Authorization": "Bearer t"})[:2] == older
    assert realms(token="t")[2:] == realms()[2:] == ["", "", ""]
    assert realms(partition="p") == [repr(("", "p"))] * 5


@pytest.mark.parametrize("partition", ["", "team"])
def test_a_partition_stands_for_all_headers_but_those_that_negotiate(partition: str) -> None:
    plain = realms(partition=partition)
    assert realms(partition=partition, token="t", headers={"Cookie": "c", "X-Api-Key": "k", "Authorization": "a"}) == plain
    for name in ("Accept", "Accept-Encoding"):
        assert not set(realms(partition=partition, headers={name: "a"})[:-1]) & set(plain)


def test_ranges_and_conditions_are_never_those_of_the_user(server: ScriptedServer, tmp_path: Path) -> None:
    url = server.put("/a", b"0123456789")
    headers = {"range": "bytes=0-3", "Range": "bytes=0-3", "if-match": '"no"', "If-None-Match": "*"}
    with forebay.Cache(tmp_path / "root", remote_options=RemoteOptions(headers=headers)) as cache:
        assert cache.read(url) == b"0123456789"
        assert cache.open(url, max_age=0).read() == b"0123456789"
    assert not any(value in headers.values() for request in server.requests for value in request.headers.values())


@pytest.mark.parametrize("kind", ["http", "https"])
def test_an_empty_authorization_is_another_one_than_none(kind: str) -> None:
    """It is sent in place of the user of a URL, or of the token."""
    empty = Realm(RemoteOptions(headers={"authorization": ""}))
    assert not empty.is_usual
    assert len({empty(kind), Realm(RemoteOptions(token="t"))(kind), Realm()(kind)}) == 3
    assert Realm(RemoteOptions(headers={"AUTHORIZATION": " "}, token="t"))(kind) == empty(kind)


@pytest.mark.parametrize("anonymous_first", [False, True])
def test_an_object_of_a_user_is_not_served_to_who_sends_none(server: ScriptedServer, tmp_path: Path, anonymous_first: bool) -> None:
    def on_request(request: Any) -> None:
        server.objects["/a"].body = request.headers.get("Authorization", "none").encode()

    url = server.put("/a", b"", etag='"1"').replace("http://", "http://me:secret@")
    server.on_request = on_request
    bodies = []
    for headers in ({"Authorization": ""}, {})[:: 1 if anonymous_first else -1]:
        with forebay.Cache(tmp_path / "root", remote_options=RemoteOptions(headers=headers)) as cache:
            bodies.append(text(cache.read(url)))
    assert [body.startswith("Basic ") for body in bodies] == [anonymous_first is False, anonymous_first is True]


LINES = [
    {"X-A": " a\t"}, {"X-A": ""}, {"X-A": "1", "x-a": "2"}, {"X-A": "1", "x-a": " 1"}, {"X-A": "\u00e9"},
    {"Authorization": "Bearer a"}, {"Authorization": ""}, {"authorization": "Digest a", "Accept": "b"}, {"Accept-Encoding": "gzip"},
    {"Connection": "close"}, {"x-ms-version": "1"}, {"User-Agent": "me", "X-A": "a"},
]  # fmt: skip


@pytest.mark.parametrize("headers", LINES, ids=str)
@pytest.mark.parametrize("kind", ["http", "s3"])
def test_what_is_sent_is_what_the_key_says(
    server: ScriptedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, headers: dict[str, str]
) -> None:  # fmt: skip
    """Each line of the user once, and none of ours beside it."""
    _s3_at(server.url, monkeypatch)
    server.put("/bucket/a", b"body")
    options = RemoteOptions(headers={**headers, "Host": "h"} if kind == "http" else headers)
    with forebay.Cache(tmp_path / "root", remote_options=options) as cache:
        assert cache.read("s3://bucket/a" if kind == "s3" else f"{server.url}/bucket/a") == b"body"
    names = {name.lower() for name in options.headers}
    for request in server.requests:
        lines = [(name.lower(), value) for name, value in request.headers.items() if name.lower() in names]
        assert sorted(line for line in lines if line[0] != "user-agent") == sorted(options.keyed_headers)
        assert [name.lower() for name in request.headers].count("host") == 1


def _s3_at(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (
        ("AWS_ENDPOINT_URL_S3", url),
        ("AWS_ACCESS_KEY_ID", "a"),
        ("AWS_SECRET_ACCESS_KEY", "b"),
        ("AWS_REGION", "us-east-1"),
    ):
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("name", ["Host", "X-Amz-Date", "x-amz-content-sha256", "X-AMZ-Security-Token"])
def test_what_a_signature_is_made_of_is_refused_by_name(
    server: ScriptedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:  # fmt: skip
    _s3_at(server.url, monkeypatch)
    with forebay.Cache(tmp_path / "root", remote_options=RemoteOptions(headers={name: "mine"})) as cache:
        with pytest.raises(errors.ConfigError, match=name.lower()):
            cache.read("s3://bucket/a")
        assert cache.read(server.put("/a", b"body")) == b"body"
    assert not [request for request in server.requests if request.path != "/a"]


def test_a_signature_covers_what_the_user_sends_to_s3(server: ScriptedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """AWS refuses a request with any other header of its own."""
    _s3_at(server.url, monkeypatch)
    server.put("/bucket/a", b"body")
    headers = {"X-Amz-Request-Payer": "requester", "X-Team": "a"}
    with forebay.Cache(tmp_path / "root", remote_options=RemoteOptions(headers=headers, requester_pays=True)) as cache:
        assert cache.read("s3://bucket/a") == b"body"
    for request in server.requests:
        lines = [(name.lower(), value) for name, value in request.headers.items()]
        signatures = [value for name, value in lines if name == "authorization"]
        assert "x-amz-request-payer" in signatures[0].partition("SignedHeaders=")[2]
        assert [len(signatures), lines.count(("x-amz-request-payer", "requester")), lines.count(("x-team", "a"))] == [1, 1, 1]


def test_headers_of_one_snapshot_are_part_of_its_key(hubs: tuple[Hub, Hub], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", hubs[0].url)
    with forebay.Cache(tmp_path / "root") as cache:
        for headers in (None, {"X-Team": "a"}, {"X-Team": "b"}, {"x-team": "b", "User-Agent": "me"}):
            with snapshot_download("owner/name", cache=cache, headers=headers) as path:
                assert Path(path, "x.bin").read_bytes() == b"of one"
        assert len(list(cache.entries("urls"))) == 3
        assert len(list(cache.entries("directories"))) == 6  # what a call asked for, and the commit's directory


# -- servers -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def hubs() -> Iterator[tuple[Hub, Hub]]:
    """Two hubs with one repository, and one commit of it, whose file differs."""
    with hub() as one, hub() as other:
        sha = one.commit("owner/name", {"x.bin": b"of one"})
        other.commit("owner/name", {"x.bin": b"of other"})
        repository = other.repositories["owner/name"]
        repository.commits = {sha: {"x.bin": b"of other"}}
        repository.refs["main"] = sha
        yield one, other


@pytest.mark.parametrize("revision", ["commit", "main"])
def test_a_mirror_is_another_hub(hubs: tuple[Hub, Hub], revision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of a commit is never asked for again: from whichever hub it came."""
    sha = hubs[0].repositories["owner/name"].refs["main"]
    url = f"hf://owner/name@{sha if revision == 'commit' else 'main'}/x.bin"
    for _ in range(2):
        for one, body in zip(hubs, (b"of one", b"of other"), strict=True):
            monkeypatch.setenv("HF_ENDPOINT", one.url)
            with forebay.Cache(tmp_path / "root") as cache:
                assert cache.read(url) == body
                assert cache.read(url, max_age=0) == body
                with cache.directory(url.removesuffix("/x.bin")) as path:
                    assert Path(path, "x.bin").read_bytes() == body


def test_a_snapshot_comes_from_the_hub_that_its_key_names(hubs: tuple[Hub, Hub], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment names another one meanwhile."""
    monkeypatch.setenv("HF_ENDPOINT", hubs[0].url)
    with forebay.Cache(tmp_path / "root") as cache:
        assert cache.read("hf://owner/name@main/x.bin") == b"of one"
        cache.evict("hf://owner/name@main/x.bin")
        monkeypatch.setenv("HF_ENDPOINT", hubs[1].url)
        with snapshot_download("owner/name", cache=cache) as path:
            assert Path(path, "x.bin").read_bytes() == b"of one"


def test_the_public_hub_by_name_is_the_public_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "https://huggingface.co/")
    with forebay.Cache(tmp_path / "root") as cache:
        assert fetcher_of(cache).target("hf://o/n@main/f").key == "hf://o/n@main/f"


@pytest.fixture
def buckets(server: ScriptedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[ScriptedServer, ScriptedServer]]:
    """Two servers of S3 that have a bucket of one name."""
    pytest.importorskip("botocore")
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("FOREBAY_S3_ANONYMOUS", "1")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    with ScriptedServer() as other:
        for each, body in ((server, b"of one"), (other, b"of other")):
            each.put("/bucket/k", body, etag='"1"')
        yield server, other


def by_variable(monkeypatch: pytest.MonkeyPatch, config: Path, url: str) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", url)


def by_service(monkeypatch: pytest.MonkeyPatch, config: Path, url: str) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", url)


def by_file(monkeypatch: pytest.MonkeyPatch, config: Path, url: str) -> None:
    config.write_text(f"[default]\nendpoint_url = {url}\n")


def by_profile(monkeypatch: pytest.MonkeyPatch, config: Path, url: str) -> None:
    name = f"p{url.rpartition(':')[2]}"
    if not config.exists() or name not in config.read_text():
        with config.open("a") as file:
            file.write(f"[profile {name}]\nendpoint_url = {url}\n")
    monkeypatch.setenv("AWS_PROFILE", name)


@pytest.mark.parametrize("choose", [by_variable, by_service, by_file, by_profile])
def test_a_bucket_of_other_servers_is_another_bucket(
    buckets: tuple[ScriptedServer, ScriptedServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, choose: Callable[..., None]
) -> None:
    keys = set()
    for _ in range(2):
        for one, body in zip(buckets, (b"of one", b"of other"), strict=True):
            choose(monkeypatch, tmp_path / "config", one.url)
            with forebay.Cache(tmp_path / "root") as cache:
                assert cache.read("s3://bucket/k") == body
                keys.add(cache.entry("s3://bucket/k").key)  # type: ignore[union-attr]
    assert [one.gets for one in buckets] == [1, 1]
    assert len(keys) == 2
    assert all(key.endswith("@bucket/k") for key in keys)


@pytest.mark.parametrize("url", ["s3://bucket/k", "hf://owner/name@main/x.bin"])
def test_the_servers_are_those_that_are_named_when_the_first_url_is_met(
    buckets: tuple[ScriptedServer, ScriptedServer], hubs: tuple[Hub, Hub], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    """The cache is open by then, and the root has what the public ones sent."""
    with forebay.Cache(tmp_path / "root") as cache:
        store = fetcher_of(cache).store
        store.put(URLS, url, b"public", validated=store.now())
        monkeypatch.setenv("AWS_ENDPOINT_URL", buckets[0].url)
        monkeypatch.setenv("HF_ENDPOINT", hubs[0].url)
        for _ in range(4):
            assert cache.read(url) == b"of one"
        assert asyncio.run(_aread(cache, url)) == cache.read_many([url])[0] == b"of one"


# -- what a key tells ----------------------------------------------------------------------------------------------------


def guesses(secret: str) -> set[str]:
    """What an attacker computes who knows how keys are made, and not the secret of the root."""
    kinds = [(hashlib.blake2s, {}), (hashlib.blake2b, {}), (hashlib.blake2b, {"key": bytes(8)})]
    texts = (secret, f"alice:{secret}", f"token={secret}", repr((f"alice:{secret}", "")))
    made = itertools.product(kinds, texts, (8, 16))
    return {kind(text.encode(), digest_size=size, **more).hexdigest() for (kind, more), text, size in made}  # type: ignore[operator]


def test_no_password_is_found_by_trying(server: ScriptedServer, tmp_path: Path) -> None:
    server.put("/a", b"x")
    host = server.url.removeprefix("http://")
    urls = f"http://alice:hunter2@{host}/a", f"http://{host}/a?token=hunter2"
    keys = {}
    for name in ("one", "other"):
        with forebay.Cache(tmp_path / name) as cache:
            for url in urls:
                cache.read(url)
            keys[name] = {entry.key for entry in cache.entries()}
    assert not keys["one"] & keys["other"]  # nor can one be compared with another root's
    told = " ".join(keys["one"])
    for word in WORDS:
        assert not any(guess in told for guess in guesses(word)), word
    with sqlite3.connect(tmp_path / "one/catalog.sqlite") as con:
        assert "hunter2" not in "\n".join(con.iterdump())


@pytest.mark.parametrize("user", ["", "alice:hunter2@"])
def test_a_name_that_is_listed_is_found_again(server: ScriptedServer, tmp_path: Path, user: str) -> None:
    url = server.put("/a", b"x").replace("http://", f"http://{user}") + "?v=1"
    with forebay.Cache(tmp_path / "root", remote_options=RemoteOptions(partition="p")) as cache:
        cache.read(url)
        (entry,) = cache.entries()
        assert cache.entry(url) == cache.entry(entry.name) == entry
        assert user or cache.read(entry.name) == b"x"
        cache.evict(entry.name)
        assert cache.entry(url) is None
    assert server.gets == 1


# -- what Forebay makes, and the names of users ----------------------------------------------------------------------------


def test_what_another_realm_listed_is_not_read_by_its_name(private: str, tmp_path: Path) -> None:
    with forebay.Cache(tmp_path / "root", remote_options=of("alice")) as alice, forebay.Cache(tmp_path / "root") as public:
        alice.read(private)
        (entry,) = alice.entries()
        for _ in range(3):  # the process remembers the entry by its key
            assert text(alice.read(entry.name)) == "for alice"
        for _ in range(2):
            assert text(public.read(entry.name)) != "for alice"  # the server is asked, as this user
            assert text(public.read_many([entry.name])[0]) != "for alice"
        assert text(alice.read(private)) == "for alice"


def test_an_object_may_be_named_as_the_blocks_of_another(
    buckets: tuple[ScriptedServer, ScriptedServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = buckets[0]
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    names = {"big.bin": os.urandom(300_000)}
    server.put("/bucket/big.bin", names["big.bin"], etag='"1"')
    with forebay.Cache(tmp_path / "root") as cache:
        for _ in range(3):  # the process remembers the blocks by their keys
            with cache.open("s3://bucket/big.bin", block_size=64_000) as file:
                assert file.read() == names["big.bin"]
        of_blocks = [entry.name.rpartition("/")[2] for entry in cache.entries("urls")]
        assert len(of_blocks) == 6
        for name in of_blocks:
            names[name] = f"of {name}".encode()
            server.put(f"/bucket/{quote(name, safe='')}", names[name], etag=f'"{len(names)}"')
        for _ in range(2):
            for name, body in names.items():
                assert cache.read(f"s3://bucket/{name}") == body
        cache.evict(f"s3://bucket/{of_blocks[0]}")
        with cache.open("s3://bucket/big.bin", block_size=64_000, max_age="forever") as file:
            assert file.read() == names["big.bin"]
        for name, body in names.items():
            assert cache.read(f"s3://bucket/{name}") == body


def test_a_path_on_a_filesystem_is_not_read_by_its_name(tmp_path: Path) -> None:
    memory = pytest.importorskip("fsspec").filesystem("memory")
    memory.pipe("/keys/a", b"x")
    try:
        with forebay.Cache(tmp_path / "root") as cache:
            assert cache.read("/keys/a", filesystem=memory) == b"x"
            (entry,) = cache.entries()
            assert cache.entry(entry.name) == entry
            with pytest.raises(errors.NotFound):
                cache.read(entry.name)
            cache.evict(entry.name)
    finally:
        memory.rm("/keys", recursive=True)


@pytest.mark.parametrize("with_filesystem", [False, True])
def test_directories_whose_names_have_marks_are_different(tmp_path: Path, with_filesystem: bool) -> None:
    memory = pytest.importorskip("fsspec").filesystem("memory")
    names = ["a", "a#b", "a/#b", "a?b", "a/?b", "a#b/c", f"a#{32 * 'a'}", f"a/#{32 * 'a'}"]
    for name in names:
        memory.pipe(f"/dirs/{name}/own", name.encode())
    try:
        with forebay.Cache(tmp_path / "root") as cache:
            for _ in range(2):
                for name in names:
                    options = {"filesystem": memory} if with_filesystem else {}
                    with cache.directory(f"{'' if with_filesystem else 'memory:/'}/dirs/{name}", **options) as path:
                        assert Path(path, "own").read_text() == name
            if not with_filesystem:
                found = [cache.entry(f"memory://dirs/{name}/") for name in names]
                assert all(entry is not None and entry.space == "directories" for entry in found)
                assert len({entry.id for entry in found if entry is not None}) == len(names)
    finally:
        memory.rm("/dirs", recursive=True)


def test_a_root_that_is_made_anew_has_other_keys(server: ScriptedServer, tmp_path: Path) -> None:
    """While a cache is open on it, too: as soon as that notices."""
    import shutil

    url = server.put("/a", b"x" * 1000) + "?token=hunter2"

    def keys() -> list[str]:
        with forebay.Cache(tmp_path / "root") as cache:
            cache.read(url)
            return [entry.key for entry in cache.entries()]

    with forebay.Cache(tmp_path / "root") as cache:
        fetcher = fetcher_of(cache)
        (before,) = keys()
        assert fetcher.target(url).key == before
        shutil.rmtree(tmp_path / "root")
        (after,) = in_child(keys)
        cache.put("a", b"value")
        assert fetcher.target(url).key == after != before
        assert cache.read(url) == b"x" * 1000


@pytest.mark.root
def test_a_claim_shows_neither_user_nor_query(public: Path, children: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The registry may be read by everybody, and its records are shown to whom they are in the way."""
    monkeypatch.setenv(VARIABLE, str(public / "claims"))
    Registry()
    (public / "home").mkdir()
    os.chown(public / "home", VICTIM, VICTIM)
    remote = "https://alice:hunter2@host/data?token=swordfish"

    held, read = Gate(), Gate()

    def claim() -> tuple[str | None, ...]:
        with forebay.claim(str(public / "home/a"), remote, World(1, 1, 1, 0)) as claim:
            memory = get_shm_prefix([str(public / "home/b")], [remote], World(1, 1, 1, 0))[1]
            held.open()
            read.wait()
            memory.cleanup()
            return claim.remotes

    victim = children(as_user(VICTIM, claim))
    held.wait()
    told = children(as_user(ATTACKER, _everything(public / "claims"))).result()
    read.open()
    assert victim.result() == ("https://...@host/data?...",)
    assert sum("host/data" in each for each in told) == 2
    for word in WORDS:
        assert not any(word in each or any(guess in each for guess in guesses(word)) for each in told)


def _everything(directory: Path) -> Callable[[], list[str]]:
    def read() -> list[str]:
        return [file.read_bytes().decode("latin-1") for file in directory.rglob("*") if file.is_file() and os.access(file, os.R_OK)]

    return read


def test_a_directory_is_shared_only_where_the_remote_is_known_to_be_the_same(
    tmp_path: Path, children: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is not shown may differ: the data of two users would be mixed."""
    monkeypatch.setenv(VARIABLE, str(tmp_path / "claims"))

    def claim(remote: str, job: str) -> bool:
        try:
            forebay.claim(str(tmp_path / "data"), remote, World(1, 1, 1, 0), job, shared=True)
        except errors.ClaimConflict:
            return False
        return True

    for remote, shared in (("s3://bucket/data", True), ("https://host/data?v=1", False)):
        with forebay.claim(str(tmp_path / "data"), remote, World(1, 1, 1, 0), "first", shared=True):
            assert in_child(lambda remote=remote: claim(remote, "second")) is shared  # type: ignore[misc]


# -- who may read it -----------------------------------------------------------------------------------------------------


@pytest.mark.root
def test_doctor_tells_which_group_a_root_belongs_to(public: Path, children: Callable[..., Any]) -> None:
    def make(shared: bool) -> list[str]:
        os.environ["FOREBAY_SHARED"] = str(int(shared))
        found = [finding.found for finding in check_up(public / str(shared)) if finding.name == "root"]
        forebay.Cache(public / str(shared)).close()
        return found + [finding.found for finding in check_up(public / str(shared)) if finding.name == "root"]

    public.chmod(0o777)
    shared = " ".join(children(as_user(VICTIM, lambda: make(True), gid=100)).result())
    assert "no cache at" in shared
    assert "yet: it will be one of group users (100)" in shared
    assert "members of group users (100) may read, write and remove everything in it" in shared
    assert "group" not in " ".join(children(as_user(VICTIM, lambda: make(False), gid=100)).result())
