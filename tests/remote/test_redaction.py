"""What people read holds no secret."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay import errors
from forebay.remote import canonical, redacted, shown


@pytest.mark.parametrize(
    "text",
    [
        "cannot get https://me:SIKRIT@host/a?X-Amz-Signature=SIKRIT&X-Amz-Credential=SIKRIT",
        "url='https://a.blob.core.windows.net/c/b?sv=1&sig=SIKRIT', message='no'",
        "headers {'Authorization': 'Bearer SIKRIT', 'x': 1}",
        "Authorization: Basic SIKRIT",
        "aws_secret_access_key=SIKRIT, region=x",
        '{"account_key": "SIKRIT", "password":"SIKRIT"}',
        "token: SIKRIT",
        "no such object: s3://AKIA:SIKRIT@bucket/a.bin: see the docs",
        "(ftp://me:SIKRIT@host/a), [https://SIKRIT@host/a]",
        "zip://a.csv::https://me:SIKRIT@host/a.zip?sig=SIKRIT is damaged",
        "zip://a::b::s3://me:SIKRIT@bucket/k",
        "simplecache::s3://me:SIKRIT@bucket/k",
        "https://host/a?AWSAccessKeyId=SIKRIT&Signature=SIKRIT&Expires=1",
        "a name with a blank: https://host/a b?sig=SIKRIT&Policy=SIKRIT",
        "https://host/a#SIKRIT",
        "file://me:SIKRIT@host/a",
        "https://me:SIK/SIKRIT@host/x names no host",
        "https://me:SIK#SIKRIT@host/x",
        "https://me:SIK?SIKRIT@host/x",
        "cannot open 'https://me:SIK'SIKRIT@host/x'",
        "s3://me:SIK/SIKRIT@bucket/x",
        "sftp://me:SIK/SIKRIT@host/x",
        "https://SIKRIT@host/x and https://me:SIKRIT@host:80/y",
        f"{'a' * 40}http://me:SIKRIT@host/a",
        f"{'my-' * 40}token=SIKRIT",
    ],
)
def test_what_is_told_holds_no_secret(text: str) -> None:
    assert "SIKRIT" not in redacted(text)


@pytest.mark.parametrize("url", ["https://me:SIK/SIKRIT@h/x", "http://me:SIK?SIKRIT@h/x", "s3://me:SIK#SIKRIT@h/x"])
def test_a_password_that_no_url_can_have_is_refused_and_not_told(url: str) -> None:
    with pytest.raises(errors.ConfigError, match=r"://\.\.\.@h/x names no valid host: .* in a password %2F for /") as refused:
        canonical(url)
    assert "SIK" not in str(refused.value)
    assert "SIK" not in shown(url)


@pytest.mark.parametrize(
    "name",
    [
        "'http://h/x?X-Amz-Signature=SIKRIT'",
        "'http://h/x?SIKRIT'",
        "'http://me:SIKRIT@h/x'",
        " http://h/x?a=1&sig=SIKRIT&x=SIKRIT",
        "http:/h/x?sig=SIKRIT",
        "http//h/x?sig=SIKRIT",
        "https:h/x?a=1&sig=SIKRIT",
    ],
)
def test_a_url_that_was_taken_for_a_path_holds_no_secret(name: str) -> None:
    told = redacted(f"{canonical(name)}: No such file or directory")
    assert "SIKRIT" not in told
    assert redacted(told) == told


@pytest.mark.parametrize("path", ["/a/b%3Fc%3Dd", "/a%3A/b%3F", "/a%3A/b"])
def test_a_path_is_told(path: str) -> None:
    assert redacted(f"file://{path}: no") == f"file://{path}: no"


@pytest.mark.parametrize(
    "text",
    [
        "NoSuchKey: The specified key does not exist",
        "https://host/path/key of token",
        "[Errno 111] Connect call failed",
        "see https://host/a: it is https://host/b.",
        "s3://b/k#1",
        "http://host:8080/a@b",
        "http://[fe80::1%25eth0]:8080/a@b",
        "s3://tenant:bucket/a",
        "abfs://box@account/a",
        "zip://a::https://host/a@b",
        "/a/b?c=d",
    ],
)
def test_what_is_no_secret_is_told(text: str) -> None:
    assert redacted(text) == text


@given(st.text())
def test_any_text_can_be_told(text: str) -> None:
    for each in (text, f"https://{text}", f"s3://{text}", f"zip://a::{text}", f"file://{text}"):
        assert redacted(redacted(each)) == redacted(each)


@pytest.mark.parametrize(
    "piece", ["a-", "a", "-", ".", "token ", "token", "bearer ", "a://", "http://h/", "a.a:", "a://b:c", "http://b:c@", "http://@"]
)
def test_long_texts_take_no_longer_than_their_length(piece: str) -> None:
    """In seconds of this machine's processor, of which what grows with the square of it would take hours."""
    text = piece * (300_000 // len(piece))
    script = "import resource, sys; resource.setrlimit(resource.RLIMIT_CPU, (60, 60)); "
    script += "from forebay.remote import redacted; redacted(sys.stdin.read()); redacted('http://h/' + sys.argv[1] * 300_000 + 'x')"
    done = subprocess.run([sys.executable, "-c", script, piece[-1]], input=text, text=True, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
