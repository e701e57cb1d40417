"""`RemoteOptions.key_url`: the user's rules for the queries of URLs, and the signatures that need none."""

from __future__ import annotations

import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest

import forebay
from forebay import errors
from forebay.remote import Realm, RemoteOptions, UrlNaming, canonical
from forebay.testing import ScriptedServer

OSS = "OSSAccessKeyId=a&Expires=1&Signature=s"
OSS4 = (
    "x-oss-signature-version=OSS4-HMAC-SHA256&x-oss-credential=a%2F20260101&x-oss-date=20260101T000000Z&x-oss-expires=60&x-oss-signature=s"
)
OSS2 = "x-oss-signature-version=OSS2&x-oss-expires=1&x-oss-access-key-id=a&x-oss-signature=s"
COS = "q-sign-algorithm=sha1&q-ak=a&q-sign-time=1;2&q-key-time=1;2&q-header-list=host&q-url-param-list=&q-signature=s"
OBS = "AccessKeyId=a&Expires=1&Signature=s"


def key(url: str, rule: object = None) -> str:
    return canonical(url, UrlNaming(7, Realm(RemoteOptions(key_url=rule))))  # type: ignore[arg-type]


def without_token(url: str) -> str:
    head, _, query = url.partition("?")
    return f"{head}?{'&'.join(pair for pair in query.split('&') if not pair.startswith('token='))}"


def fails(url: str) -> str:
    raise KeyError(url)


@pytest.mark.parametrize("signature", [OSS, OSS4, OSS2, COS, OBS])
@pytest.mark.parametrize("more", ["", "&x-oss-additional-headers=", "&v=2"])
def test_signatures_of_other_stores(signature: str, more: str) -> None:
    base = "https://bucket.store.example/a"
    if "additional" in more and not signature.startswith("x-oss"):
        more = ""
    wanted = key(base + ("?v=2" if "v=2" in more else ""))
    other = re.sub("(signature=s|Signature=s)", r"\1tu", signature)
    assert key(f"{base}?{signature}{more}") == key(f"{base}?{other}{more}") == wanted
    part = signature.partition("&")[2]
    assert key(f"{base}?{part}") != key(base)
    assert key(f"{base}?{signature.replace('ignature=s', 'ignature=')}") != key(base)


def test_with_a_session_token() -> None:
    for signature, token in (
        (OSS, "security-token"),
        (OSS4, "x-oss-security-token"),
        (COS, "x-cos-security-token"),
        (OBS, "x-obs-security-token"),
    ):
        assert key(f"https://h/a?{signature}&{token}=x") == "https://h/a"


@pytest.mark.parametrize("rule", ["token|expires", re.compile("token|expires"), {"cdn.example.com": "token|expires"}])
def test_a_pattern_of_parameters(rule: object) -> None:
    base = "https://cdn.example.com/a"
    assert key(f"{base}?token=1&expires=2", rule) == key(f"{base}?expires=3&token=4", rule) == base
    assert key(f"{base}?token=1&v=2", rule) == key(f"{base}?v=2", rule) == key(f"{base}?v=2") != base
    assert key(f"{base}?tokens=1", rule) != base  # a whole name


def test_a_function() -> None:
    assert key("https://h/a?v=1&token=2", without_token) == key("https://h/a?v=1")
    assert key("https://h/a?token=2", without_token) == key("https://h/a?token=3", without_token) == "https://h/a"
    assert key("https://h/a?token=2", lambda url: url.partition("?")[0] + "#f") == "https://h/a"


def test_what_a_function_gets() -> None:
    got: list[str] = []

    def note(url: str) -> str:
        got.append(url)
        return url

    key(f"HTTPS://me:pw@CDN.Example.com:443/A?{OSS}&token=1#x", note)
    key("https://h/a", note)
    key("s3://b/a?token=1", note)
    key("ftp://b/a?token=1", note)
    assert got == ["https://cdn.example.com/A?token=1"]


@pytest.mark.parametrize(
    "rule",
    [lambda url: "", lambda url: None, lambda url: "https://h/b", lambda url: "https://other/a", lambda url: "http://h/a", lambda url: 5],
)
def test_user_host_and_path_stay(rule: object) -> None:
    with pytest.raises(errors.ConfigError, match=r"key_url did not return https://h/a with a query.*it can only change the query"):
        key("https://me:pw@h/a?token=1", rule)
    one, other = (key(f"https://{user}@h/a?token=1", lambda url: "https://h/a") for user in ("me:pw", "you:pw"))
    assert len({one, other, "https://h/a"}) == 3


def test_a_function_that_raises_is_a_config_error() -> None:
    with pytest.raises(errors.ConfigError, match="key_url raised KeyError for https://h/a") as caught:
        key("https://h/a?token=5ec3e7", fails)
    assert "5ec3e7" not in str(caught.value)
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_rule_for_each_host() -> None:
    rules = {"CDN.example.com": "a", "cdn.example.com:8443": "b", "*.example.com": "c", "*.deep.example.com": "d", "*": "e", "[::1]": "f"}
    hosts = ["cdn.example.com", "cdn.example.com:8443", "x.example.com", "x.deep.example.com", "example.com", "[::1]:80"]
    places = dict(zip("abcdef", hosts, strict=True))
    for name, host in places.items():
        left = {other for other in places if key(f"https://{host}/p?{other}=1", rules) == f"https://{host}/p"}
        assert left == {name}
    assert key("https://h/a?b=1", {"other": "b"}) == key("https://h/a?b=1")


@pytest.mark.parametrize(
    "wrong", [5, "(", {"h/a": "b"}, {"https://h": "b"}, {5: "b"}, {"h": "("}, {"h": None}, {"": "a"}, [], re.compile(b"a"), b"a"]
)
def test_rules_that_are_none(wrong: object) -> None:
    with pytest.raises(errors.ConfigError, match="key_url"):
        RemoteOptions(key_url=wrong)  # type: ignore[arg-type]


def test_pickling() -> None:
    for rule in (without_token, "a", {"h": without_token, "g": re.compile("a")}):
        options = RemoteOptions(key_url=rule)
        copy = pickle.loads(pickle.dumps(options))
        assert copy == options
        assert hash(copy) == hash(options)
    assert "token" not in repr(RemoteOptions(key_url=without_token))
    mine = {"h": "token"}
    options = RemoteOptions(key_url=mine)
    mine["h"] = "v"
    assert options.key_url == {"h": "token"}


def test_one_that_cannot_be_pickled_is_told_when_it_matters(server: ScriptedServer, tmp_path: Path) -> None:
    options = RemoteOptions(key_url=lambda url: url.partition("?")[0])
    with forebay.Cache(tmp_path / "root", budget="100MB", remote_options=options) as cache:
        assert bytes(cache.read(server.put("/a", b"x") + "?token=1")) == b"x"
        with pytest.raises(errors.ConfigError, match=r"key_url cannot be pickled.*at the top of a module"):
            pickle.dumps(cache)


def test_in_a_cache(server: ScriptedServer, tmp_path: Path) -> None:
    url = server.put("/a", b"one")
    options = RemoteOptions(key_url={"127.0.0.1": without_token})
    with forebay.Cache(tmp_path / "root", budget="100MB", remote_options=options) as cache:
        for number in range(3):
            assert bytes(cache.read(f"{url}?token={number}")) == b"one"
        assert server.gets == 1
        with cache.local(f"{url}?token=9") as path:
            assert Path(path).read_bytes() == b"one"
        assert [bytes(each) for each in cache.read_many([f"{url}?token=8", f"{url}?token=7"])] == [b"one", b"one"]
        with cache.open(f"{url}?token=9", block_size="64KB") as file:
            assert file.read() == b"one"
        assert server.gets == 1
        with forebay.Cache(tmp_path / "root") as plain:  # in the same process, without a rule
            assert bytes(plain.read(f"{url}?token=0")) == b"one"
            assert server.gets == 2
        program = "import pickle, sys; sys.stdout.write(bytes(pickle.load(sys.stdin.buffer).read(sys.argv[1])).decode())"
        done = subprocess.run(
            [sys.executable, "-c", program, f"{url}?token=77"],
            input=pickle.dumps(cache),
            capture_output=True,
            cwd=Path(__file__).parents[2],
            check=True,
        )
        assert done.stdout == b"one"
    assert server.gets == 2
