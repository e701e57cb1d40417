"""Keys, suffixes and local paths."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import ConfigError
from forebay.fetch.request import block_key, index_key
from forebay.remote import Realm, RemoteOptions, urls
from forebay.remote.filesystems import FilesystemRemote
from forebay.remote.urls import UrlNaming, canonical, local_path, scheme, suffix_of_key

SIGNED_S3 = (
    "X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Credential=AKIA%2F5ec3e7&X-Amz-Date=20260101T000000Z&X-Amz-Expires=60"
    "&X-Amz-SignedHeaders=host&X-Amz-Signature=5ec3e7"
)
SIGNED_GCS = SIGNED_S3.replace("Amz", "Goog").replace("AWS4-HMAC", "GOOG4-RSA")
SIGNED_OLD = "AWSAccessKeyId=AKIA&Signature=5ec3e7%3D&Expires=17"
SIGNED_OLD_GCS = "GoogleAccessId=me%40x&Signature=5ec3e7%3D&Expires=17"
SIGNED_AZURE = "sv=2024-01-01&se=2026-01-01&sr=b&sp=r&sig=5ec3e7%3D"
SIGNED_BY_POLICY = "sv=2024-01-01&sr=c&si=readers&sig=5ec3e7%3D"
SIGNED_ACCOUNT = "sv=2024-01-01&ss=b&srt=o&sp=r&se=2026-01-01&spr=https&sig=5ec3e7%3D"
SIGNED_CLOUDFRONT = "Policy=eyJ5ec3e7&Signature=5ec3e7&Key-Pair-Id=K2"
SIGNED_CANNED = "Expires=17&Signature=5ec3e7&Key-Pair-Id=K2"
SIGNED_HF = f"{SIGNED_CANNED}&Policy=eyJ5ec3e7"
SIGNED = [
    SIGNED_S3, SIGNED_GCS, SIGNED_OLD, SIGNED_OLD_GCS, SIGNED_AZURE, SIGNED_BY_POLICY, SIGNED_ACCOUNT, SIGNED_CLOUDFRONT, SIGNED_CANNED,
    SIGNED_HF, f"{SIGNED_S3}&X-Amz-Security-Token=5ec3e7", f"{SIGNED_OLD}&x-amz-security-token=5ec3e7",
]  # fmt: skip


NAMING = UrlNaming(7)


def key_of(url: str) -> str:
    return canonical(url, NAMING)


@pytest.mark.parametrize(
    ("url", "key"),
    [
        ("HTTPS://Host.Example/Path/A.bin", "https://host.example/Path/A.bin"),
        ("https://h:443/a", "https://h/a"),
        ("http://h:80/a", "http://h/a"),
        ("http://h:443/a", "http://h:443/a"),
        ("https://h/a#part", "https://h/a"),
        ("https://h/a?", "https://h/a?"),
        ("https://h/a%20b", "https://h/a%20b"),
        ("https://h/a b", "https://h/a b"),
        ("s3://Bucket/a#1", "s3://Bucket/a#1"),
        ("s3://bucket/a?", "s3://bucket/a?"),
        ("zip://a?::https://h/a.zip?", "zip://a?::https://h/a.zip?"),
        ("s3://@bucket/a", "s3://bucket/a"),
        ("https://@h/a", "https://h/a"),
        ("https://h:443/a?#", "https://h/a?"),
        ("zip://a.csv::HTTPS://H:443/a.zip#x", "zip://a.csv::https://h/a.zip"),
        ("hf://Org/Repo/a", "hf://Org/Repo/a"),
        ("abfs://box@account.dfs.core.windows.net/a", "abfs://box@account.dfs.core.windows.net/a"),
        *((f"https://h/a?{signed}", "https://h/a") for signed in SIGNED),
    ],
)
def test_the_key_of_a_url(url: str, key: str) -> None:
    assert key_of(url) == key


ALL_DIFFERENT = [
    "https://h/a", "https://h/A", "https://h/a/", "https://h/a?v=1", "https://h/a?v=2", "https://h/a?v=1&w", "http://h/a", "https://h:8443/a",
    "https://h/é", "https://h/e\u0301", "https://h/" + 200 * "x" + "1", "https://h/" + 200 * "x" + "2", "s3://h/a", "s3://h/a#1", "s3://h/a#2",
    "s3://h/a?", "s3://h/a??", "s3://h/a#", "s3://h/a#?", "s3://h/a?#", "s3://h/a/?", "s3://h/a?/", "s3://h?", "s3://h", "gs://h/a",
    "gs://h/a?", "gs://h/a#?", "memory://a", "memory://a?", "gs://me:1@h/a?", "gs://me:1@h/a",
    "s3://h/a?versionId=1", "https://h/a?Expires=1", "https://h/a?Policy=x", "https://h/a?sv=1", "github://org:repo@main/a", "github://org:other@main/a",
    "ssh://me@h/a", "ssh://you@h/a", "/a", "/A", "/a b",
    "https://alice@h/a", "https://bob@h/a", "https://Alice@h/a", "https://al%69ce@h/a", "https://alice:@h/a", "https://alice:1@h/a",
    "https://alice:2@h/a", "https://alice@h:8443/a", "http://alice@h/a", "s3://h@h/a", "s3://h:1@h/a", "s3://h:2@h/a",
    "https://h/a?sig=a&st=1", "https://h/a?sig=b&st=2", "https://h/a?sig=b&st=1", "https://h/a?sig=a", "https://h/a?sig=a&sv=1",
    "https://h/a?signature=a&expires=1", "https://h/a?signature=b&expires=2", "https://h/a?Signature=a&Expires=1",
    "https://h/a?Signature=b&Expires=2", "https://h/a?X-Amz-Signature=1", "https://h/a?X-Amz-Signature=2", "https://h/a?X-Amz-Meta=1",
    "https://h/a?X-Amz-Meta=2", "https://h/a?v=1&v=2", "https://h/a?v=2&v=1", "https://h/a?v=1&v=1", "https://h/a?v=1&w=2",
    "https://h/a?w=2&v=1", "https://h/a?v=", "https://h/a?v", "https://h/a?=v", "https://h/a?&v", "https://h/a?v&", "https://h/a?%76",
    "https://h/a?V", "https://h/a?v;w", "https://h/a??v", f"https://h/b?{SIGNED_S3}",
    f"https://h/a?{SIGNED_S3}&versionId=1", f"https://h/a?{SIGNED_S3}&versionId=2", f"https://h/a?{SIGNED_S3}&X-Amz-Meta=1&v",
    f"s3://h/a?{SIGNED_S3}", f"s3://h/a?{SIGNED_S3}1", f"memory://h/a?{SIGNED_S3}", f"memory://h/a?{SIGNED_S3}1",
    "zip://a::https://alice@h/a", "zip://a::https://bob@h/a", "zip://b::https://bob@h/a", "zip://a::https://bob@h/a?v",
]  # fmt: skip


def test_different_objects_have_different_keys() -> None:
    for one, other in itertools.combinations(ALL_DIFFERENT, 2):
        assert key_of(one) != key_of(other)


def test_each_link_of_a_chain_keeps_its_question_mark() -> None:
    assert len({key_of(f"zip://a{one}::s3://h/a{other}") for one in ("", "?", "#") for other in ("", "?", "#?")}) == 9


def test_without_the_secret_of_a_root_no_key_can_be_tried() -> None:
    for url in ("https://alice:hunter2@h/a", "https://h/a?token=hunter2", "ftp://alice:hunter2@h/a"):
        assert len({canonical(url, UrlNaming(secret)) for secret in range(10)}) == 10


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("https://alice:hunter2@h/a?token=hunter2#x", "https://...@h/a?..."),
        ("s3://hunter2@b/a?versionId=1", "s3://...@b/a?..."),
        ("ftp://alice:hunter2@h/a", "ftp://...@h/a"),
        ("abfs://box@account/a", "abfs://box@account/a"),
        ("zip://a::https://hunter2@h/a", "zip://a::https://...@h/a"),
        (f"https://h/a?{SIGNED_S3}", "https://h/a"),
        ("https://...@h/a?...", "https://...@h/a?..."),
    ],
)
def test_a_url_that_is_shown_has_neither_user_nor_query(url: str, text: str) -> None:
    assert canonical(url) == canonical(canonical(url)) == urls.redacted(canonical(url)) == text
    assert urls.is_masked(text) == ("..." in text)
    assert canonical(text, NAMING) in (text, canonical(canonical(text, NAMING)))


def test_what_is_masked_is_no_user_of_a_key() -> None:
    """Else a URL with this user would be one key for all partitions."""
    realms = [Realm(RemoteOptions(partition=name)) for name in ("one", "other")]
    keys = {canonical("https://...@h/a?...", NAMING._replace(realm=realm)) for realm in realms}
    assert len(keys) == 2
    assert not any("..." in key for key in keys)


def test_the_key_of_a_key_is_itself() -> None:
    """But for that of a URL with a user: whose it is cannot be told."""
    for url in (*ALL_DIFFERENT, "file:///a%20b%2525", "relative/../x y"):
        if "@" in key_of(url):
            assert (key_of(key_of(url)) != key_of(url)) == ("u=" in key_of(url))
            continue
        assert key_of(key_of(url)) == key_of(url)
        other = NAMING._replace(realm=Realm(RemoteOptions(partition="p")))
        key = canonical(url, other)
        assert canonical(key, other) == canonical(canonical(url, other)) == key
        assert key != key_of(url) or key.startswith("file:")
        assert urls.without_user(key) == key_of(url) or "@" in key_of(url)


@pytest.mark.parametrize("kind", ["http", "https", "s3", "hf", "gs", "abfs"])
def test_a_caller_cannot_write_the_key_of_another_realm(kind: str) -> None:
    """Of another partition, other headers, or other servers; but that of the caller's own."""
    none, one, other = (NAMING._replace(realm=Realm(RemoteOptions(partition=name))) for name in (None, "one", "other"))
    of_one = canonical(f"{kind}://owner/name/a", one)
    assert canonical(of_one, one) == of_one
    keys = [canonical(of_one, naming) for naming in (none, other)]
    users = [canonical(f"{kind}://{user}@owner/name/a", one) for user in ("me:mine", of_one.partition("://")[2].partition("@")[0])]
    assert len({of_one, *keys, users[0], canonical(users[0], one), canonical(users[0], other)}) == 6
    assert users[1] == of_one


HASH = 32 * "a"
MARKED = ["a#blocks", 'a#block=0&size=64000&version="1"', 'a#version="1"', f"a#{HASH}", "a#~block", "a#~", "a##block", "a#block#block"]


@pytest.mark.parametrize("head", ["s3://b/", "gs://b/", "memory://", "zip://x::s3://b/", "abfs://box@account/"])
def test_no_name_is_a_key_that_forebay_makes(head: str) -> None:
    """Of blocks and their index, of the index of a shard, of a path on a filesystem object."""
    keys = [key_of(f"{head}{name}") for name in ("a", *MARKED)]
    assert len({*keys}) == len(keys)
    made = [index_key(key) for key in keys] + [block_key(key, 0, 64_000, '"1"') for key in keys]
    assert len({*keys, *made}) == 3 * len(keys)
    assert not any(key.startswith((f"{head}a#version=", f"{head}a#{HASH}")) for key in keys)


@given(*2 * [st.lists(st.sampled_from(["#", "~", "?", "block", "version=", "s", HASH])).map("".join)])
def test_names_with_marks_stay_different(one: str, other: str) -> None:
    first, second = key_of(f"s3://b/{one}"), key_of(f"s3://b/{other}")
    assert (first == second) == (one == other)
    assert "#block" not in first
    assert (index_key(first) == index_key(second)) == (one == other)


@given(st.text(alphabet=st.characters(exclude_characters="\0#@", exclude_categories=["Cs"])))
def test_any_text_has_a_key(text: str) -> None:
    for url in (f"https://h/{text}", f"s3://b/{text}"):
        assert key_of(key_of(url)) == key_of(url)
        assert len(suffix_of_key(canonical(url))) <= 16


@pytest.mark.parametrize("signed", SIGNED)
def test_a_signature_that_is_not_whole_drops_nothing(signed: str) -> None:
    pairs = signed.split("&")
    for n, pair in enumerate(pairs):
        name, _, value = pair.partition("=")
        rest = [*pairs[:n], *pairs[n + 1 :]]
        for broken in (
            [*rest, f"{name}="],
            [*rest, pair, pair],
            [*rest, f"{name.swapcase()}={value}"],
            [*rest, f"%{ord(name[0]):x}{name[1:]}={value}"],
        ):
            one = "https://h/a?" + "&".join(broken)
            assert key_of(one) != key_of("https://h/a")
            assert key_of(one) != key_of(f"{one}0")
            assert "5ec3e7" not in key_of(one)


@pytest.mark.parametrize("signed", [SIGNED_S3, SIGNED_GCS, SIGNED_OLD, SIGNED_OLD_GCS, SIGNED_AZURE, SIGNED_BY_POLICY, SIGNED_ACCOUNT])
def test_without_one_of_its_parameters_it_is_no_signature(signed: str) -> None:
    pairs = [pair for pair in signed.split("&") if not pair.startswith("spr=")]
    for n in range(len(pairs)):
        query = "&".join([*pairs[:n], *pairs[n + 1 :]])
        assert key_of(f"https://h/a?{query}") != key_of("https://h/a")


STARTS = ["https://me:5ec3e7@h/a", "https://5ec3e7@h/a", "s3://5ec3e7@h/a", "ftp://me:5ec3e7@h/a", "zip://a::http://5ec3e7@h/a"]
SECRET = ["token=5ec3e7&v=1", *(f"v=1&{signed}" for signed in SIGNED), *SIGNED]


@pytest.mark.parametrize(("start", "query"), [*((start, SECRET[0]) for start in STARTS), *((STARTS[0], query) for query in SECRET[1:])])
def test_no_secret_in_a_key(start: str, query: str) -> None:
    assert "5ec3e7" not in key_of(f"{start}?{query}")


@pytest.mark.parametrize("signed", SIGNED)
def test_a_signature_beside_a_query_does_not_change_the_key(signed: str) -> None:
    plain = key_of("https://h/a?v=1&w=2")
    assert (
        key_of(f"https://h/a?v=1&w=2&{signed}")
        == key_of(f"https://h/a?{signed}&v=1&w=2")
        == key_of(f"https://h/a?v=1&{signed}&w=2")
        == plain
    )


@pytest.mark.parametrize("url", ["https://h/\ud800", "s3://b/\udc00\ud800", "/a/\ud800", "https://h/a?v=\ud800", "\ud800://h/a"])
def test_half_a_character_is_no_url(url: str) -> None:
    with pytest.raises(ConfigError, match="half a character"):
        canonical(url)


@pytest.mark.parametrize(
    ("url", "wanted"),
    [
        ("https://h/a.tar", ".tar"),
        ("https://h/a.tar.gz", ".tar.gz"),
        ("https://h/a.TAR.ZST?x=.zip", ".TAR.ZST"),
        ("https://h/v1.2/model.safetensors", ".safetensors"),
        ("https://h/v1.2/model", ""),
        ("https://h.example", ""),
        ("https://h/.netrc", ""),
        ("https://h/a.b-c", ""),
        ("https://h/a.waytoolongforasuffix", ""),
        ("https://h/a.x y", ""),
        ("https://h/..%2f..", ""),
        ("https://h/a.longlonglong.gz", ".longlonglong.gz"),
        ("https://h/a.longlonglonglon.gz", ".gz"),
        ("s3://b/a.é", ""),
        ("s3://b/a.tar\n", ""),
        ("/data/a.npy", ".npy"),
    ],
)
def test_the_suffix_of_a_url(url: str, wanted: str) -> None:
    assert suffix_of_key(canonical(url)) == wanted


def test_the_key_of_a_path_of_a_filesystem_holds_no_secret() -> None:
    fsspec = pytest.importorskip("fsspec")
    web, bucket = (FilesystemRemote(fsspec.filesystem(kind)) for kind in ("http", "s3"))
    web.identity = bucket.identity = "5ec3e7"
    key = web.key(f"https://me:5ec3e7@h/a?{SIGNED_S3}", NAMING)
    assert key.startswith(f"{key_of('https://me:5ec3e7@h/a')}#")
    assert "5ec3e7" not in key
    assert key != web.key("https://me:5ec3e7@h/a", UrlNaming(8))
    assert web.key("https://me:5ec3e7@h/a", None) == "https://...@h/a#..."
    assert bucket.key("b/a?b", NAMING).startswith("s3://b/a?b#")
    assert len({bucket.key(path, NAMING) for path in ("b/a", "b/c://b/a", "b/a?", "b/a#")}) == 4
    assert bucket.key("b/a?b", NAMING) != bucket.key("b/a?b", NAMING._replace(realm=Realm(RemoteOptions(partition="p"))))


def test_local_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert local_path("a b") == local_path(Path("a b")) == local_path(f"file://{tmp_path}/a%20b") == f"{tmp_path}/a b"
    assert local_path("file://localhost/x") == "/x"
    assert local_path("https://h/a") is None
    assert canonical("a b") == f"file://{tmp_path}/a%20b"
    assert local_path(canonical(os.fsdecode(b"/\xff"))) == os.fsdecode(b"/\xff")
    with pytest.raises(ConfigError, match="other"):
        local_path("file://other/x")
    with pytest.raises(ConfigError) as caught:
        local_path("file://me:5ec3e7@other/x")
    assert "5ec3e7" not in str(caught.value) + str(caught.value.facts)


@pytest.mark.parametrize("ask", [canonical, local_path, scheme])
def test_a_chain_of_fsspec_is_no_path(ask: Callable[[str], object]) -> None:
    with pytest.raises(ConfigError, match=r"^write s3://\.\.\.@b/a, without the simplecache::"):
        ask("simplecache::s3://KEY:5ec3e7@b/a")
    assert scheme("zip://inner.csv::s3://b/a.zip") == "zip"  # fsspec's own way to look into an archive
    assert scheme("a::b") == "file"


def test_the_scheme_of_a_url() -> None:
    assert [scheme(u) for u in ("HTTP://h", "s3://b", "/a", "c:/a", "a")] == ["http", "s3", "file", "file", "file"]


@given(
    st.from_regex(r"\A(https?|s3)://[a-z0-9.:@-]{1,12}/[A-Za-z0-9_./=~%+,:?#-]{0,20}\Z")
    | st.from_regex(r"\A(/{0,2}[a.]{0,3}[A-Za-z0-9_.%~-]{0,3}){1,4}\Z")
)
def test_the_quick_way_to_a_key_gives_the_same_key(url: str) -> None:
    with pytest.MonkeyPatch.context() as m:
        m.setattr(urls, "_PLAIN", r"(?!)()")
        try:
            expected = urls.canonical(url)
        except ConfigError:
            expected = None
    try:
        assert urls.canonical(url) == expected
    except ConfigError:
        assert expected is None
