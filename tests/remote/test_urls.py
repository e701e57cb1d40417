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
from forebay.remote.urls import canonical, local_path, scheme, suffix

SIGNED_S3 = "X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Credential=AKIA%2F1&X-Amz-Date=20260101T000000Z&X-Amz-Expires=60&X-Amz-Signature=5ec3e7"
SIGNED_GCS = "X-Goog-Algorithm=GOOG4-RSA-SHA256&X-Goog-Credential=5ec3e7&x-goog-signature=5ec3e7"
SIGNED_OLD = "AWSAccessKeyId=AKIA&Signature=5ec3e7%3D&Expires=17"
SIGNED_AZURE = "sv=2024-01-01&se=2026-01-01&sr=b&sp=r&sig=5ec3e7%3D"
SIGNED_CLOUDFRONT = "Policy=eyJ5ec3e7&Signature=5ec3e7&Key-Pair-Id=K2"


@pytest.mark.parametrize(
    ("url", "key"),
    [
        ("HTTPS://Host.Example/Path/A.bin", "https://host.example/Path/A.bin"),
        ("https://h:443/a", "https://h/a"),
        ("http://h:80/a", "http://h/a"),
        ("http://h:443/a", "http://h:443/a"),
        ("https://h/a#part", "https://h/a"),
        ("https://user:5ec3e7@h/a", "https://h/a"),
        ("https://h/a?", "https://h/a"),
        ("https://h/a%20b", "https://h/a%20b"),
        ("https://h/a b", "https://h/a b"),
        ("s3://Bucket/a#1", "s3://Bucket/a#1"),
        ("s3://KEY:5ec3e7@bucket/a", "s3://bucket/a"),
        ("hf://Org/Repo/a", "hf://Org/Repo/a"),
        ("abfs://box@account.dfs.core.windows.net/a", "abfs://box@account.dfs.core.windows.net/a"),
        *((f"https://h/a?{signed}", "https://h/a") for signed in (SIGNED_S3, SIGNED_GCS, SIGNED_OLD, SIGNED_AZURE, SIGNED_CLOUDFRONT)),
    ],
)
def test_key(url: str, key: str) -> None:
    assert canonical(url) == key


ALL_DIFFERENT = [
    "https://h/a", "https://h/A", "https://h/a/", "https://h/a?v=1", "https://h/a?v=2", "https://h/a?v=1&w", "http://h/a", "https://h:8443/a",
    "https://h/é", "https://h/e\u0301", "https://h/" + 200 * "x" + "1", "https://h/" + 200 * "x" + "2", "s3://h/a", "s3://h/a#1", "s3://h/a#2",
    "s3://h/a?versionId=1", "https://h/a?Expires=1", "https://h/a?Policy=x", "https://h/a?sv=1", "github://org:repo@main/a", "github://org:other@main/a",
    "ssh://me@h/a", "ssh://you@h/a", "/a", "/A", "/a b",
]  # fmt: skip


def test_different_objects_have_different_keys() -> None:
    for one, other in itertools.combinations(ALL_DIFFERENT, 2):
        assert canonical(one) != canonical(other)


@pytest.mark.parametrize("url", [*ALL_DIFFERENT, "file:///a%20b%2525", "relative/../x y"])
def test_the_key_of_a_key_is_itself(url: str) -> None:
    assert canonical(canonical(url)) == canonical(url)


@given(st.text(alphabet=st.characters(exclude_characters="\0", exclude_categories=["Cs"])))
def test_any_text_has_a_key(text: str) -> None:
    for url in (f"https://h/{text}", f"s3://b/{text}"):
        assert canonical(canonical(url)) == canonical(url)
        assert len(suffix(url)) <= 16


@pytest.mark.parametrize(
    "url",
    ["https://me:5ec3e7@h/a?token=5ec3e7&v=1", *(f"https://h/a?v=1&{s}" for s in (SIGNED_S3, SIGNED_GCS, SIGNED_OLD, SIGNED_AZURE))],
)
def test_no_secret_in_a_key(url: str) -> None:
    assert "5ec3e7" not in canonical(url)


def test_a_signature_beside_a_query_does_not_change_the_key() -> None:
    assert canonical(f"https://h/a?v=1&{SIGNED_S3}") == canonical("https://h/a?v=1")
    assert canonical(f"https://h/a?{SIGNED_S3}&v=1") == canonical("https://h/a?v=1")


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
def test_suffix(url: str, wanted: str) -> None:
    assert suffix(url) == wanted


def test_local_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert local_path("a b") == local_path(Path("a b")) == local_path(f"file://{tmp_path}/a%20b") == f"{tmp_path}/a b"
    assert local_path("file://localhost/x") == "/x"
    assert local_path("https://h/a") is None
    assert canonical("a b") == f"file://{tmp_path}/a%20b"
    assert local_path(canonical(os.fsdecode(b"/\xff"))) == os.fsdecode(b"/\xff")
    with pytest.raises(ConfigError, match="other"):
        local_path("file://other/x")


@pytest.mark.parametrize("ask", [canonical, local_path, scheme, suffix])
def test_a_chain_of_fsspec_is_no_path(ask: Callable[[str], object]) -> None:
    with pytest.raises(ConfigError, match=r"^s3://b/a is wanted, without the simplecache::"):
        ask("simplecache::s3://KEY:5ec3e7@b/a")
    assert scheme("zip://inner.csv::s3://b/a.zip") == "zip"  # fsspec's own way to look into an archive
    assert scheme("a::b") == "file"


def test_scheme() -> None:
    assert [scheme(u) for u in ("HTTP://h", "s3://b", "/a", "c:/a", "a")] == ["http", "s3", "file", "file", "file"]
