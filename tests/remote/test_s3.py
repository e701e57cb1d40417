"""S3 against Ceph RGW, which checks signatures; a scripted answer only for what RGW never says."""

from __future__ import annotations

import datetime
import gzip
import http.server
import json
import logging
import os
import random
import sys
import threading
import traceback
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from forebay import errors, remote
from forebay._model import Partial, Span
from forebay.fetch.prefix import Prefix
from forebay.remote import RemoteOptions
from forebay.remote.http import SmallResponse
from forebay.remote.s3 import S3Name, S3Remote
from forebay.remote.s3.aws import Keys, S3Endpoint, sign
from forebay.testing import MemorySink
from tests.processes import fork
from tests.servers.rgw import RgwServer, rgw_server  # noqa: F401 (a fixture)

pytest.importorskip("botocore")

PART = 256 << 10
BODY = random.Random(1).randbytes(10 * PART + 17)
OPTIONS = RemoteOptions(part=PART, backoff=0.01, read_timeout=20, attempts=3)
SECRETS = ("testsecret", "othersecret", "sikrit", "X-Amz-Signature=", "Signature=")


@pytest.fixture
def no_aws(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No setting of the user's reaches the test. Gives the place of the config file, which is not there."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    return tmp_path / "config"


@pytest.fixture
def endpoint(no_aws: Path, rgw_server: RgwServer, monkeypatch: pytest.MonkeyPatch) -> RgwServer:  # noqa: F811
    monkeypatch.setenv("AWS_ENDPOINT_URL", rgw_server.url)
    return rgw_server


@pytest.fixture
def aws(endpoint: RgwServer, monkeypatch: pytest.MonkeyPatch) -> RgwServer:
    """The server, with credentials for it in the environment."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", endpoint.key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", endpoint.secret)
    return endpoint


@pytest.fixture(scope="module")
def client(rgw_server: RgwServer) -> Any:  # noqa: F811
    return rgw_server.client()


@pytest.fixture(scope="module")
def bucket(client: Any) -> str:
    name = f"tests-{uuid.uuid4().hex[:12]}"
    client.create_bucket(Bucket=name)
    return name


@pytest.fixture
def s3() -> S3Remote:
    return S3Remote(OPTIONS)


@pytest.fixture
def put(client: Any, bucket: str) -> Callable[..., str]:
    def put(key: str, body: bytes = b"thirteen bytes", **more: Any) -> str:
        client.put_object(Bucket=bucket, Key=key, Body=body, **more)
        return f"s3://{bucket}/{key}"

    return put


def fetched(s3: S3Remote, url: str) -> bytes:
    sink = MemorySink()
    s3.fetch(url, sink)
    assert not sink.missing
    return bytes(sink.data)


# -- reading ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, PART - 1, PART, PART + 1, len(BODY)])
def test_fetch(aws: RgwServer, client: Any, bucket: str, s3: S3Remote, put: Callable[..., str], size: int) -> None:
    url, sink = put("sized", BODY[:size]), MemorySink()
    transfer = s3.fetch(url, sink)
    assert sink.data == BODY[:size]
    assert not sink.missing
    assert transfer.info is not None
    assert (transfer.info.size, transfer.info.validator, transfer.info.strong) == (
        size,
        client.head_object(Bucket=bucket, Key="sized")["ETag"],
        True,
    )
    assert transfer.info == s3.stat(url)


KEYS = [
    "a b", "plus+plus", "per%cent%20%2F", "ünï/ço∂é/日本", "double//slash///x", "/leading", "trailing/", "a/../b", "./dot/.", "q?x=1&y",
    "h#ash", "it's \"quoted\" <&>", "a=b;c@d:e,f$g!h*i(j)k[l]", "~tilde-_.", "back\\slash", "tab\tand\x01control", "x?versionId", "é" * 400,
]  # fmt: skip


@pytest.mark.parametrize("key", KEYS)
def test_a_key_is_taken_as_it_is(aws: RgwServer, s3: S3Remote, put: Callable[..., str], key: str) -> None:
    url = put(key, key.encode())
    assert fetched(s3, url) == key.encode()
    assert s3.read(url, Span(1, 2)) == key.encode()[1:3]
    assert [info.url for info in s3.list(url)] == [url]


def test_the_scheme_in_any_case(aws: RgwServer, s3: S3Remote, put: Callable[..., str]) -> None:
    assert fetched(s3, put("Any Case").replace("s3://", "S3://")) == b"thirteen bytes"


def test_conditions(aws: RgwServer, s3: S3Remote, put: Callable[..., str]) -> None:
    url = put("conditions", b"0123456789")
    first = s3.stat(url)
    assert first is not None
    assert s3.stat(url, known=first.validator) is None
    assert s3.read(url, Span(3, 4), validator=first.validator) == b"3456"
    assert s3.read(url, Span(8, 100)) == b"89"
    assert s3.read(url, Span(100, 5)) == b""
    put("conditions", b"abcdefghij")
    second = s3.stat(url, known=first.validator)
    assert second is not None
    assert second.validator != first.validator
    with pytest.raises(errors.RemoteChanged):
        s3.read(url, Span(3, 4), validator=first.validator)


def test_an_object_that_changes_while_it_is_fetched_is_begun_anew(aws: RgwServer, s3: S3Remote, put: Callable[..., str]) -> None:
    old, new = b"a" * (4 * PART), b"b" * (4 * PART + 1)
    url = put("changing", old)

    class Changing(MemorySink):
        begun = 0

        def begin(self, info: Any) -> tuple[Span, ...]:
            self.begun += 1
            if self.begun == 1:
                put("changing", new)
            return super().begin(info)

    sink = Changing()
    transfer = s3.fetch(url, sink)
    assert sink.data == new
    assert sink.begun == 2
    assert transfer.info == s3.stat(url)


def test_the_etag_of_a_multipart_upload_is_strong_and_can_be_resumed_from(aws: RgwServer, client: Any, bucket: str, s3: S3Remote) -> None:
    body = random.Random(2).randbytes((11 << 20) + 5)
    url = f"s3://{bucket}/multipart"
    written = s3.write(url, body)
    assert written.validator is not None
    assert written.validator.endswith('-3"')
    known = s3.stat(url)
    assert known is not None
    assert (known.size, known.validator, known.strong) == (len(body), written.validator, True)
    assert written.validator == client.head_object(Bucket=bucket, Key="multipart")["ETag"]
    lacking = (Span(5 * PART, 2 * PART), Span(20 * PART, 3))
    damaged = bytearray(body)
    for span in lacking:
        damaged[span.start : span.end] = bytes(span.length)
    sink = MemorySink(Partial(len(body), written.validator, lacking), damaged)
    transfer = s3.fetch(url, sink)
    assert sink.data == body
    assert transfer.resumed == len(body) - 2 * PART - 3
    assert transfer.received <= 2 * PART + 3


def test_what_is_stored_compressed_is_brought_as_it_is_stored(aws: RgwServer, s3: S3Remote, put: Callable[..., str]) -> None:
    stored = gzip.compress(BODY)
    assert fetched(s3, put("encoded", stored, ContentEncoding="gzip")) == stored


def test_versions(aws: RgwServer, client: Any, s3: S3Remote) -> None:
    bucket = f"versions-{uuid.uuid4().hex[:12]}"
    client.create_bucket(Bucket=bucket)
    client.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})
    old, new = (client.put_object(Bucket=bucket, Key="a b", Body=body)["VersionId"] for body in (b"old", b"newer"))
    url = f"s3://{bucket}/a b"
    assert fetched(s3, url) == b"newer"
    assert fetched(s3, f"{url}?versionId={old}") == b"old"
    assert s3.read(f"{url}?versionId={new}", Span(0, 3)) == b"new"
    marker = client.delete_object(Bucket=bucket, Key="a b")["VersionId"]
    for gone in (url, f"{url}?versionId={marker}"):
        with pytest.raises(errors.NotFound):
            s3.stat(gone)
        with pytest.raises(errors.NotFound):
            fetched(s3, gone)
    assert fetched(s3, f"{url}?versionId={old}") == b"old"
    naming = remote.UrlNaming()
    assert remote.canonical(f"{url}?versionId={old}", naming) != remote.canonical(f"{url}?versionId={new}", naming)


def test_what_is_not_there(aws: RgwServer, s3: S3Remote, bucket: str) -> None:
    with pytest.raises(errors.NotFound, match="NoSuchKey"):
        fetched(s3, f"s3://{bucket}/none")
    with pytest.raises(errors.NotFound, match="NoSuchKey"):
        s3.stat(f"s3://{bucket}/none")
    with pytest.raises(errors.NotFound, match="NoSuchBucket"):
        list(s3.list("s3://no-such-bucket-anywhere/x"))
    with pytest.raises(errors.ConfigError, match="names no bucket"):
        s3.stat("s3:///key")
    for bare in (f"s3://{bucket}", f"s3://{bucket}/"):
        with pytest.raises(errors.ConfigError, match="names no object"):
            s3.stat(bare)
        with pytest.raises(errors.ConfigError, match="names no object"):
            s3.read(bare, Span(0, 1))
        with pytest.raises(errors.ConfigError, match="names no object"):
            s3.fetch(bare, MemorySink())


# -- who asks --------------------------------------------------------------------------------------------------------


def test_a_wrong_signature_is_refused(aws: RgwServer, s3: S3Remote, put: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    url = put("signed")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "sikrit")
    for ask in (lambda: s3.stat(url), lambda: fetched(s3, url), lambda: s3.read(url, Span(0, 1)), lambda: list(s3.list(url))):
        with pytest.raises(errors.AccessDenied, match="SignatureDoesNotMatch: the secret key does not fit") as caught:
            ask()
        assert caught.value.status == 403


def test_an_unknown_key_is_refused(aws: RgwServer, s3: S3Remote, put: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    url = put("signed")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    with pytest.raises(errors.AccessDenied, match="InvalidAccessKeyId"):
        s3.stat(url)


def test_anothers_object_is_refused(endpoint: RgwServer, s3: S3Remote, put: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    url = put("private")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", endpoint.other_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", endpoint.other_secret)
    with pytest.raises(errors.AccessDenied, match="AccessDenied: these credentials"):
        s3.stat(url)


def test_without_credentials(endpoint: RgwServer, s3: S3Remote, put: Callable[..., str]) -> None:
    assert fetched(s3, put("public", ACL="public-read")) == b"thirteen bytes"
    with pytest.raises(errors.AccessDenied, match="no AWS credentials were found, and it is not public: set AWS_ACCESS_KEY_ID"):
        fetched(s3, put("private"))


@pytest.mark.parametrize("how", ["option", "FOREBAY_S3_ANONYMOUS", "AWS_NO_SIGN_REQUEST"])
def test_anonymous(aws: RgwServer, put: Callable[..., str], monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    if how != "option":
        monkeypatch.setenv(how, "YES")
    s3 = S3Remote(RemoteOptions(anonymous=True if how == "option" else None))
    assert fetched(s3, put("public", ACL="public-read")) == b"thirteen bytes"
    with pytest.raises(errors.AccessDenied, match="asked without credentials"):
        s3.stat(put("private"))


def test_requester_pays(endpoint: RgwServer, client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = f"pays-{uuid.uuid4().hex[:12]}"
    client.create_bucket(Bucket=bucket, ACL="public-read")
    client.put_object(Bucket=bucket, Key="a", Body=b"dear", ACL="public-read")
    client.put_bucket_request_payment(Bucket=bucket, RequestPaymentConfiguration={"Payer": "Requester"})
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", endpoint.other_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", endpoint.other_secret)
    with pytest.raises(errors.AccessDenied, match="requester pays"):
        S3Remote(OPTIONS).stat(f"s3://{bucket}/a")
    paying = S3Remote(RemoteOptions(requester_pays=True))
    assert fetched(paying, f"s3://{bucket}/a") == b"dear"
    assert [info.size for info in paying.list(f"s3://{bucket}")] == [4]


def presigned(client: Any, bucket: str, key: str, seconds: int = 600) -> str:
    return str(client.generate_presigned_url("get_object", Params={"Bucket": bucket, "Key": key}, ExpiresIn=seconds))


def test_presigned_urls(no_aws: Path, client: Any, bucket: str, put: Callable[..., str]) -> None:
    put("pre signed+1", BODY)
    url = presigned(client, bucket, "pre signed+1")
    http = remote.resolve(url, OPTIONS)
    sink = MemorySink()
    transfer = http.fetch(url, sink)
    assert sink.data == BODY
    assert http.stat(url) == transfer.info  # by GET: the signature does not hold for HEAD
    assert remote.canonical(url) == remote.canonical(presigned(client, bucket, "pre signed+1", 700))
    with pytest.raises(errors.AccessDenied) as caught:
        http.stat(url[:-4] + "0000")
    assert not any(secret in "".join(traceback.format_exception(caught.value)) for secret in SECRETS)


def test_presigned_https_urls(rgw_server: RgwServer, bucket: str, put: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    import dataclasses

    put("tls", BODY)
    url = presigned(dataclasses.replace(rgw_server, url=rgw_server.tls_url).client(), bucket, "tls")
    assert url.startswith("https://")
    with pytest.raises(errors.RemoteUnavailable, match="not trusted"):
        remote.resolve(url, RemoteOptions(part=PART, attempts=1)).stat(url)
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", rgw_server.ca)
    sink = MemorySink()
    remote.resolve(url, RemoteOptions(part=PART, attempts=2)).fetch(url, sink)
    assert sink.data == BODY


def test_secrets_are_told_to_nobody(
    aws: RgwServer, put: Callable[..., str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    url = put("told").replace("s3://", "s3://me:sikrit@")
    caplog.clear()
    s3 = S3Remote(OPTIONS)
    assert fetched(s3, url) == b"thirteen bytes"
    said = [repr(s3._account.keys())]
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "sikrit")
    with pytest.raises(errors.AccessDenied) as caught:
        S3Remote(OPTIONS).stat(url)
    said += [*traceback.format_exception(caught.value), repr(caught.value.facts), caplog.text]
    assert [secret for secret in SECRETS for text in said if secret in text] == []


# -- settings --------------------------------------------------------------------------------------------------------


def test_a_profile_and_its_files(
    no_aws: Path, rgw_server: RgwServer, s3: S3Remote, put: Callable[..., str], monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:  # fmt: skip
    url = put("profile")
    no_aws.write_text(f"[default]\nendpoint_url = http://127.0.0.1:9\n[profile lab]\nregion = eu-west-9\nendpoint_url = {rgw_server.url}\n")
    (no_aws.parent / "credentials").write_text(
        f"[lab]\naws_access_key_id = {rgw_server.key}\naws_secret_access_key = {rgw_server.secret}\n"
    )
    monkeypatch.setenv("AWS_PROFILE", "lab")
    assert fetched(s3, url) == b"thirteen bytes"
    assert s3._account.endpoint() == S3Endpoint(rgw_server.url, "eu-west-9", "auto")


def test_a_profile_that_is_not_there(no_aws: Path, s3: S3Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(errors.ConfigError, match="nobody"):
        s3.stat("s3://bucket/key")


def test_which_endpoint(no_aws: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def place() -> S3Endpoint:
        return S3Remote()._account.endpoint()

    assert place() == S3Endpoint(None, "us-east-1", "auto")
    monkeypatch.setenv("AWS_REGION", "eu-north-1")
    no_aws.write_text("[default]\nendpoint_url = http://profile/\ns3 =\n  addressing_style = virtual\n")
    assert place() == S3Endpoint("http://profile", "eu-north-1", "virtual")
    no_aws.write_text("[default]\nservices = mine\nendpoint_url = http://profile\n[services mine]\ns3 =\n  endpoint_url = http://service\n")
    assert place().endpoint == "http://service"
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://everything")
    assert place().endpoint == "http://everything"
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://s3")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-south-1")
    assert place() == S3Endpoint("http://s3", "eu-south-1", "auto")
    monkeypatch.setenv("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "true")
    monkeypatch.setenv("AWS_USE_DUALSTACK_ENDPOINT", "true")
    assert place() == S3Endpoint(None, "eu-south-1", "auto", ".dualstack")
    monkeypatch.delenv("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "localhost:9000")
    with pytest.raises(errors.ConfigError, match="http://host"):
        place()


@pytest.mark.parametrize(
    ("place", "bucket", "address"),
    [
        (S3Endpoint(None, "us-east-1", "auto"), "data", "https://data.s3.us-east-1.amazonaws.com/a%20b"),
        (S3Endpoint(None, "cn-north-1", "auto"), "data", "https://data.s3.cn-north-1.amazonaws.com.cn/a%20b"),
        (S3Endpoint(None, "us-east-1", "auto"), "da.ta", "https://s3.us-east-1.amazonaws.com/da.ta/a%20b"),
        (S3Endpoint(None, "us-east-1", "path"), "data", "https://s3.us-east-1.amazonaws.com/data/a%20b"),
        (S3Endpoint(None, "us-east-1", "auto", "-fips.dualstack"), "data", "https://data.s3-fips.dualstack.us-east-1.amazonaws.com/a%20b"),
        (S3Endpoint("http://10.0.0.1:9000", "us-east-1", "auto"), "data", "http://10.0.0.1:9000/data/a%20b"),
        (S3Endpoint("https://store.lab", "us-east-1", "virtual"), "data", "https://data.store.lab/a%20b"),
        (S3Endpoint(None, "us-east-1", "auto"), "ü日", "https://s3.us-east-1.amazonaws.com/%C3%BC%E6%97%A5/a%20b"),
        (S3Endpoint("http://store.lab", "us-east-1", "auto"), "x\udcff", "http://store.lab/x%FF/a%20b"),
        (S3Endpoint("https://日.lab", "us-east-1", "virtual"), "日", "https://日.日.lab/a%20b"),
    ],
)
def test_where_a_bucket_is_asked(place: S3Endpoint, bucket: str, address: str) -> None:
    assert place.address(bucket, "a%20b") == address
    assert place.may_sign_for(address)
    assert sign("GET", address, {}, Keys("id", "secret"), place.region, datetime.datetime.now(datetime.UTC))["authorization"]


def test_only_the_hosts_of_s3_see_a_signature() -> None:
    for place in (S3Endpoint(None, "us-east-1", "auto"), S3Endpoint("https://store.lab", "us-east-1", "auto")):
        for url in ("https://evil.example/x", "https://amazonaws.com.evil.example/x", "https://evilstore.lab/x"):
            assert not place.may_sign_for(url)
    aws = S3Endpoint(None, "us-east-1", "auto")
    assert not aws.may_sign_for("http://data.s3.us-east-1.amazonaws.com/x")
    assert aws.region_in("https://data.s3-eu-west-1.amazonaws.com/x") == "eu-west-1"
    assert aws.region_in("https://data.s3.dualstack.eu-west-2.amazonaws.com/x") == "eu-west-2"
    assert aws.region_in("https://data.s3.amazonaws.com/x") == "us-east-1"


def test_credentials_are_refreshed(
    endpoint: RgwServer, no_aws: Path, s3: S3Remote, put: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that gives credentials is asked again when they end, here: at once."""
    url, calls = put("refreshed"), tmp_path / "calls"
    soon = (datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=30)).isoformat()
    given = {"Version": 1, "AccessKeyId": endpoint.key, "SecretAccessKey": endpoint.secret, "Expiration": soon}
    script = tmp_path / "give.py"
    script.write_text(f"open({str(calls)!r}, 'a').write('x')\nprint({json.dumps(given)!r})")
    no_aws.write_text(f"[default]\ncredential_process = {sys.executable} {script}\n")
    assert fetched(s3, url) == b"thirteen bytes"
    first = len(calls.read_text())
    assert fetched(s3, url) == b"thirteen bytes"
    assert len(calls.read_text()) > first


def test_without_botocore(no_aws: Path, s3: S3Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "botocore", None)
    monkeypatch.setitem(sys.modules, "botocore.exceptions", None)
    with pytest.raises(errors.MissingExtra, match="extra 's3'"):
        s3.stat("s3://bucket/key")


def test_names() -> None:
    assert S3Name.of("s3://bucket/a?b#c") == ("bucket", "a?b#c", None)
    assert S3Name.of("s3://bucket/a?versionId=x.Y_z-1") == ("bucket", "a", "x.Y_z-1")
    assert S3Name.of("s3://key:secret@bucket") == ("bucket", "", None)
    assert S3Name.of("s3://bucket/a?versionId=1?versionId=") == ("bucket", "a?versionId=1", None)
    assert S3Name.of("s3://bucket/a?versionId=1?versionId=2") == ("bucket", "a?versionId=1", "2")


@pytest.mark.parametrize("name", ["a?versionId=1", "a?versionId=", "a?versionId=1?versionId=", "a?b#c", "a?versionId=1/b", "a#b", "a"])
def test_a_name_that_looks_like_a_version_is_a_name(name: str) -> None:
    """In listings, below a prefix, and so in uploads: else `a` would be read, replaced or removed instead."""

    class Listing(S3Remote):
        def request(self, *args: Any, **options: Any) -> SmallResponse:
            item = f"<Contents><Key>{quote('d/' + name)}</Key><Size>1</Size><LastModified>2026-01-01T00:00:00Z</LastModified></Contents>"
            return SmallResponse(200, {}, f"<ListBucketResult>{item}</ListBucketResult>".encode())

    prefix = Prefix("s3://bucket/d")
    (info,) = Listing().list(prefix.folder)
    assert info.url == prefix.join(name)
    assert prefix.name_of(info.url) == name
    assert S3Name.of(info.url) == ("bucket", f"d/{name}", None)


class Regional(http.server.BaseHTTPRequestHandler):
    """S3 as it answers who signs for another region than the bucket's: only the header, or the body, tells which one it is."""

    asked: list[str]
    by_header = True

    def do_GET(self) -> None:
        scope = self.headers["Authorization"].partition("Credential=")[2].split("/")[2]
        self.asked.append(scope)
        status, body = (200, b"thirteen bytes") if scope == "eu-west-1" else (301 if self.by_header else 400, b"")
        if status == 400:
            body = b"<Error><Code>AuthorizationHeaderMalformed</Code><Region>eu-west-1</Region></Error>"
        self.send_response(status)
        if status == 301:
            self.send_header("x-amz-bucket-region", "eu-west-1")
        self.send_header("ETag", '"1"')
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None: ...


@pytest.fixture(params=["header", "body"])
def regional(request: pytest.FixtureRequest, no_aws: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    asked: list[str] = []
    handler = type("Handler", (Regional,), {"asked": asked, "by_header": request.param == "header"})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        yield asked
        server.shutdown()
        thread.join()


def test_threads_find_the_region_at_once(regional: list[str], s3: S3Remote) -> None:
    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(lambda n: fetched(s3, f"s3://bucket/{n}"), range(8))) == {b"thirteen bytes"}


def test_a_fetch_that_was_started_finds_the_region(regional: list[str], s3: S3Remote) -> None:
    started, sink = s3.start("s3://bucket/a", lambda: None), MemorySink()
    assert started is not None
    assert started.into(sink).requests == 2
    assert sink.data == b"thirteen bytes"
    assert regional == ["us-east-1", "eu-west-1"]


def test_a_bucket_in_another_region_is_found(regional: list[str], s3: S3Remote) -> None:
    assert fetched(s3, "s3://bucket/a") == b"thirteen bytes"
    assert fetched(s3, "s3://bucket/b") == b"thirteen bytes"
    assert regional == ["us-east-1", "eu-west-1", "eu-west-1"]


# -- listing ---------------------------------------------------------------------------------------------------------


def test_listing_more_than_a_page(aws: RgwServer, client: Any, s3: S3Remote) -> None:
    bucket = f"many-{uuid.uuid4().hex[:12]}"
    client.create_bucket(Bucket=bucket)
    keys = [f"dir {n % 3}/{n:04d}" for n in range(1005)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda key: s3.write(f"s3://{bucket}/{key}", b"x"), keys))
    assert [info.url for info in s3.list(f"s3://{bucket}")] == [f"s3://{bucket}/{key}" for key in sorted(keys)]
    some = list(s3.list(f"s3://{bucket}/dir 1/00"))
    assert [info.url for info in some] == [f"s3://{bucket}/{key}" for key in sorted(keys) if key.startswith("dir 1/00")]
    told = s3.stat(some[0].url)
    assert told is not None
    assert (some[0].size, some[0].validator, some[0].strong) == (told.size, told.validator, told.strong)
    assert some[0].modified == pytest.approx(told.modified, abs=1)
    assert list(s3.list(f"s3://{bucket}/none")) == []


# -- writing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 5 << 20, (5 << 20) + 1, (10 << 20) + 5])
def test_upload(aws: RgwServer, s3: S3Remote, bucket: str, tmp_path: Path, size: int) -> None:
    body = random.Random(size).randbytes(size)
    (tmp_path / "source").write_bytes(body)
    for key, source in {"up/buf": memoryview(body), "up/a file+": tmp_path / "source"}.items():
        written = s3.write(f"s3://{bucket}/{key}", source)
        assert fetched(s3, f"s3://{bucket}/{key}") == body
        assert written.validator is not None
        assert s3.stat(f"s3://{bucket}/{key}", known=written.validator) is None
        assert written.size == size


def test_conditional_uploads(aws: RgwServer, s3: S3Remote, bucket: str) -> None:
    url = f"s3://{bucket}/conditional"
    first = s3.write(url, b"first", if_none_match="*")
    with pytest.raises(errors.Conflict, match="nothing was written") as caught:
        s3.write(url, b"second", if_none_match="*")
    assert isinstance(caught.value, FileExistsError)
    assert fetched(s3, url) == b"first"
    assert first.validator is not None
    s3.write(url, b"third", if_match=first.validator)
    with pytest.raises(errors.Conflict):
        s3.write(url, b"fourth", if_match=first.validator)
    assert fetched(s3, url) == b"third"


def test_conditional_uploads_in_parts(aws: RgwServer, s3: S3Remote, bucket: str) -> None:
    url, body = f"s3://{bucket}/conditional parts", bytes((5 << 20) + 1)
    with pytest.raises(errors.Conflict):
        s3.write(url, body, if_match='"none"')
    first = s3.write(url, body, if_none_match="*")
    with pytest.raises(errors.Conflict):
        s3.write(url, body, if_none_match="*")
    assert s3.write(url, body + b"x", if_match=first.validator).validator != first.validator
    with pytest.raises(errors.Conflict):
        s3.write(url, body, if_match=first.validator)


def test_an_upload_that_fails_leaves_nothing(aws: RgwServer, client: Any, s3: S3Remote, bucket: str) -> None:
    url, sent = f"s3://{bucket}/failing", []
    request = s3.request

    def failing(method: str, *args: Any, query: dict[str, str], **more: Any) -> Any:
        if query.get("partNumber") == "3":
            raise RuntimeError("no third part")
        sent.append(method)
        return request(method, *args, query=query, **more)

    s3.request = failing  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="no third part"):
        S3Remote.write(s3, url, bytes(16 << 20))
    assert sent[0] == "POST"
    assert sent[-1] == "DELETE"
    assert "Uploads" not in client.list_multipart_uploads(Bucket=bucket)
    with pytest.raises(errors.NotFound):
        s3.stat(url)


# -- forks -----------------------------------------------------------------------------------------------------------


def test_s17_parent_and_child_read_at_once(aws: RgwServer, s3: S3Remote, put: Callable[..., str]) -> None:
    """Sockets that both of them used would mix their answers."""
    url = put("forked", BODY)

    def work(seed: int) -> int:
        for at in random.Random(seed).sample(range(len(BODY) - 5000), 60):
            assert s3.read(url, Span(at, 5000)) == BODY[at : at + 5000]
        return seed

    assert fetched(s3, url) == BODY
    children = [fork(lambda seed=seed: work(seed)) for seed in (1, 2)]
    work(3)
    assert [child.result() for child in children] == [1, 2]


@pytest.mark.parametrize("change", [lambda path: path.write_bytes(bytes(6 << 20)), lambda path: path.write_bytes(bytes(30 << 20))])
def test_a_file_that_changes_while_it_is_sent(aws: RgwServer, client: Any, s3: S3Remote, bucket: str, tmp_path: Path, change: Any) -> None:
    (tmp_path / "source").write_bytes(bytes(26 << 20))
    s3 = S3Remote(RemoteOptions(part=PART, streams=1))
    with pytest.raises(errors.SourceChanged, match="source changed while being uploaded"):
        s3.write(f"s3://{bucket}/at odds", tmp_path / "source", on_sent=lambda done: change(tmp_path / "source"))
    assert "Uploads" not in client.list_multipart_uploads(Bucket=bucket, Prefix="at odds")
    with pytest.raises(errors.NotFound):
        s3.stat(f"s3://{bucket}/at odds")


def test_what_on_sent_raises_ends_the_write(aws: RgwServer, client: Any, s3: S3Remote, bucket: str) -> None:
    told: list[int] = []

    def stop(done: int) -> None:
        told.append(done)
        if done >= 10 << 20:
            raise KeyError("enough")

    with pytest.raises(KeyError, match="enough"):
        s3.write(f"s3://{bucket}/stopped", bytes(60 << 20), on_sent=stop)
    assert max(told) < 60 << 20
    with pytest.raises(errors.NotFound):
        s3.stat(f"s3://{bucket}/stopped")


def test_delete(aws: RgwServer, s3: S3Remote, bucket: str, put: Callable[..., str]) -> None:
    url = put("to be deleted/ü +")
    kept = put("to be deleted")
    for _ in range(2):
        s3.delete(url)
        with pytest.raises(errors.NotFound):
            s3.stat(url)
    assert s3.stat(kept) is not None
    with pytest.raises(errors.ConfigError, match="names no object"):
        s3.delete(f"s3://{bucket}")


def test_a_write_that_is_refused_tells_no_secret(
    aws: RgwServer, s3: S3Remote, client: Any, monkeypatch: pytest.MonkeyPatch, bucket: str
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "sikrit")
    for ask in (lambda: s3.write(f"s3://{bucket}/x", b"x"), lambda: s3.delete(f"s3://{bucket}/x")):
        with pytest.raises(errors.AccessDenied) as caught:
            ask()
        assert [secret for secret in SECRETS if secret in str(caught.value)] == []
