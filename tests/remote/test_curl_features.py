"""What is relied on in libcurl itself, and what is not: the reasons are shown here."""

from __future__ import annotations

import datetime
from urllib.parse import quote

import pycurl
import pytest

from forebay.remote.s3.aws import Keys, sign
from forebay.testing import ScriptedServer
from tests.servers.raw import RawServer
from tests.servers.raw import raw as raw

KEYS = Keys("AKIA", "secret/+")


def test_the_build_has_what_is_relied_on() -> None:
    number, features, tls, protocols = (pycurl.version_info()[at] for at in (2, 4, 5, 8))
    assert number >= 0x080000
    assert features & pycurl.VERSION_SSL
    assert tls.startswith("OpenSSL/3.")
    assert features & pycurl.VERSION_ASYNCHDNS, "resolving a name would block the loop"
    assert features & pycurl.VERSION_IPV6
    assert features & pycurl.VERSION_HTTP2
    assert {"http", "https"} <= set(protocols)
    assert {"PROXYTYPE_SOCKS5_HOSTNAME", "AWS_SIGV4", "REQUEST_TARGET", "M_SOCKETFUNCTION", "SOCKOPTFUNCTION"} <= set(dir(pycurl))


# -- redirects: not followed by libcurl ----------------------------------------------------------------------------------


def test_libcurl_sends_the_users_headers_to_where_it_is_redirected(server: ScriptedServer) -> None:
    """It keeps back ``Authorization`` and ``Cookie``, but a token may stand in any header: so redirects are followed by us."""
    with ScriptedServer() as other:
        curl = pycurl.Curl()
        curl.setopt(pycurl.URL, server.put("/a", b"", redirect=other.put("/b", b"x")))
        curl.setopt(pycurl.FOLLOWLOCATION, 1)
        curl.setopt(pycurl.HTTPHEADER, ["X-Key: k", "Authorization: Bearer t", "Cookie: c"])
        curl.setopt(pycurl.WRITEFUNCTION, lambda piece: None)
        curl.perform()
        curl.close()
        assert {"Authorization", "Cookie"}.isdisjoint(other.requests[-1].headers)
        assert other.requests[-1].headers["X-Key"] == "k"


# -- AWS_SIGV4 -----------------------------------------------------------------------------------------------------------


def signed_by_libcurl(raw: RawServer, target: str, headers: list[str] | None = None, *, as_is: bool = False) -> tuple[str, dict[str, str]]:
    """The target and the headers of a request that libcurl signs."""
    raw.says("Content-Length: 0")
    curl = pycurl.Curl()
    curl.setopt(pycurl.URL, raw.url + target)
    curl.setopt(pycurl.PATH_AS_IS, as_is)
    curl.setopt(pycurl.AWS_SIGV4, "aws:amz:eu-west-9:s3")
    curl.setopt(pycurl.USERPWD, f"{KEYS.access}:{KEYS.secret}")
    curl.setopt(pycurl.HTTPHEADER, headers or [])
    curl.setopt(pycurl.WRITEFUNCTION, lambda piece: None)
    try:
        curl.perform()
    finally:
        curl.close()
    first, *lines = raw.requests[-1].decode("latin-1").split("\r\n")
    return first.split(" ")[1], {line.partition(":")[0].lower(): line.partition(":")[2].strip() for line in lines}


def signed_by_us(raw: RawServer, target: str, sent: dict[str, str], headers: dict[str, str] | None = None) -> str:
    moment = datetime.datetime.strptime(sent["x-amz-date"], "%Y%m%dT%H%M%SZ").replace(tzinfo=datetime.UTC)
    return sign("GET", raw.url + target, headers or {}, KEYS, "eu-west-9", moment)["authorization"]


ODD_KEYS = [
    "a b", "a+b", "a%b", "100%25", "a%2Fb", "~x", "é/ü", "日本", "\udc80", "a//b", "/first", "a?b", "a#b", "x=1&y=2", "q'!()*",
    "$@,:;", "tab\t", "x" * 900,
]  # fmt: skip
QUERIES = ["versionId=a", "list-type=2&prefix=a%20b&encoding-type=url", "partNumber=1&uploadId=x~y", "b=2&a=1", "a=&b", "prefix=%2B%2F"]


@pytest.mark.parametrize("target", [f"/bucket/{quote(key.encode('utf-8', 'surrogateescape'), safe='/-_.~')}" for key in ODD_KEYS])
def test_libcurl_signs_odd_keys_as_we_do(raw: RawServer, target: str) -> None:
    asked, sent = signed_by_libcurl(raw, target)
    assert asked == target
    assert sent["authorization"] == signed_by_us(raw, target, sent)


@pytest.mark.parametrize("query", QUERIES)
def test_libcurl_signs_queries_as_we_do(raw: RawServer, query: str) -> None:
    asked, sent = signed_by_libcurl(raw, f"/bucket/key?{query}")
    assert asked == f"/bucket/key?{query}"
    assert sent["authorization"] == signed_by_us(raw, asked, sent)


def test_libcurl_signs_a_session_token_as_we_do(raw: RawServer) -> None:
    token = {"x-amz-security-token": "to/ken=="}
    asked, sent = signed_by_libcurl(raw, "/bucket/key", [f"{name}: {value}" for name, value in token.items()])
    assert sent["authorization"] == signed_by_us(raw, asked, sent, token)


@pytest.mark.parametrize(("key", "becomes"), [("..", "/"), ("a/../b", "/bucket/b"), ("./a", "/bucket/a"), ("a/.", "/bucket/a/")])
def test_libcurl_signs_another_object_where_a_key_has_dots(raw: RawServer, key: str, becomes: str) -> None:
    """And refuses to sign where it is told to leave them as they are: so requests to S3 are signed by us."""
    assert signed_by_libcurl(raw, f"/bucket/{key}")[0] == becomes
    with pytest.raises(pycurl.error, match="path-as-is"):
        signed_by_libcurl(raw, f"/bucket/{key}", as_is=True)
