"""Objects in an archive tier: an error of its own, which says how to restore them, at each door."""

from __future__ import annotations

import errno
import http.server
import pickle
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar
from urllib.parse import unquote

import pytest

from forebay import Cache, errors
from forebay.cli.main import run
from forebay.remote.filesystems import helper

pytest.importorskip("botocore")

REFUSAL = """<?xml version="1.0"?><Error><Code>{code}</Code><Message>The operation is not valid for the object's storage class</Message>
<StorageClass>{tier}</StorageClass></Error>"""
OBJECTS = {  # the storage class, whether a GET is refused, what a listing says of a restoration
    "run/cold": ("GLACIER", True, ""),
    "run/colder[1]": ("DEEP_ARCHIVE", True, "<RestoreStatus><IsRestoreInProgress>true</IsRestoreInProgress></RestoreStatus>"),
    "run/frozen": ("INTELLIGENT_TIERING", True, ""),
    "run/instant": ("GLACIER_IR", False, ""),
    "run/restored": ("GLACIER", False, "<RestoreStatus><RestoreExpiryDate>2030-01-01T00:00:00Z</RestoreExpiryDate></RestoreStatus>"),
    "run/warm": ("STANDARD", False, ""),
}


class Glacier(http.server.BaseHTTPRequestHandler):
    """S3, as far as a reader sees of it."""

    protocol_version = "HTTP/1.1"
    code = "InvalidObjectState"
    status = 403

    def do_GET(self) -> None:
        key = unquote(self.path.partition("?")[0]).removeprefix("/b/")
        if key not in OBJECTS:
            self._answer(200, self._listing())
        elif OBJECTS[key][1]:
            self._answer(self.status, REFUSAL.format(code=self.code, tier=OBJECTS[key][0]).encode())
        else:
            self._answer(200, b"warm")

    def do_HEAD(self) -> None:
        self._answer(200, b"warm")

    def _listing(self) -> bytes:
        items = (
            f"<Contents><Key>{key}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified><ETag>&quot;1&quot;</ETag><Size>4</Size>"
            f"<StorageClass>{tier}</StorageClass>{status if 'x-amz-optional-object-attributes' in self.headers else ''}</Contents>"
            for key, (tier, _, status) in OBJECTS.items()
        )
        return f"<ListBucketResult><Name>b</Name><IsTruncated>false</IsTruncated>{''.join(items)}</ListBucketResult>".encode()

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", '"1"')
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *args: object) -> None: ...


@pytest.fixture
def glacier(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Glacier) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        settings = {"ACCESS_KEY_ID": "a", "SECRET_ACCESS_KEY": "b", "DEFAULT_REGION": "us-east-1", "ENDPOINT_URL": url}
        for name, value in settings.items():
            monkeypatch.setenv(f"AWS_{name}", value)
        monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
        yield url
        server.shutdown()


def refused(call: Callable[[], object]) -> errors.Archived:
    with pytest.raises(errors.Archived) as caught:
        call()
    error: errors.Archived = pickle.loads(pickle.dumps(caught.value))
    assert (str(error), error.facts) == (str(caught.value), caught.value.facts)
    assert "credentials" not in str(error)
    assert not isinstance(error, PermissionError)
    return error


def test_an_archived_object_says_how_to_restore_it(glacier: str, cache: Cache) -> None:
    error = refused(lambda: cache.read("s3://b/run/colder[1]"))
    assert (error.url, error.status, error.tier) == ("s3://b/run/colder[1]", 403, "DEEP_ARCHIVE")
    assert "aws s3api restore-object --bucket b --key 'run/colder[1]' --restore-request Days=7`" in str(error)
    assert "--restore-request '{}'`" in str(refused(lambda: cache.read("s3://b/run/frozen")))
    assert "--version-id v1`" in str(refused(lambda: cache.read("s3://b/run/cold?versionId=v1")))
    refused(lambda: cache.local("s3://b/run/cold"))
    refused(lambda: cache.open("s3://b/run/cold", block_size=1 << 16).read(2))
    assert cache.read("s3://b/run/restored") == cache.read("s3://b/run/instant") == b"warm"


def test_a_directory_names_its_archived_files_and_the_patterns_that_leave_them_out(glacier: str, cache: Cache, tmp_path: Path) -> None:
    calls: list[Callable[[], object]] = [
        lambda: cache.directory("s3://b/run/", exclude="frozen"),
        lambda: cache.copy_directory("s3://b/run/", tmp_path / "copy", exclude="frozen"),
    ]
    for call in calls:
        error = refused(call)
        assert error.names == ["cold", "colder[1]"]
        assert "exclude=['cold', 'colder[[]1]']" in str(error)
    error = refused(lambda: cache.directory("s3://b/run/", include=["frozen", "restored"]))
    assert error.names == ["frozen"]  # the listing does not tell, the refusal does
    with cache.directory("s3://b/run/", exclude=["cold", "colder[[]1]", "frozen"]) as path:
        assert sorted(each.name for each in Path(path).iterdir()) == ["instant", "restored", "warm"]


def test_a_directory_of_a_filesystem_names_the_file_that_was_refused(cache: Cache) -> None:
    memory = pytest.importorskip("fsspec.implementations.memory")

    class Cold(memory.MemoryFileSystem):  # type: ignore[misc]
        store: ClassVar[dict[str, object]] = {}
        protocol, cachable = "cold", False

        def cat_file(self, path: str, *args: object, **how: object) -> bytes:
            raise OfAzure("This operation is not permitted on an archived blob.")

        def _open(self, path: str, mode: str = "rb", **how: object) -> object:
            if mode == "rb":
                raise OfAzure("This operation is not permitted on an archived blob.")
            return super()._open(path, mode, **how)

    there = Cold()
    there.pipe_file("/run/sub/cold", b"cold")
    error = refused(lambda: cache.directory("/run", filesystem=there))
    assert error.names == ["sub/cold"]
    assert "exclude=['sub/cold']" in str(error)


def test_a_copy_past_the_cache_names_them_too(glacier: str, tmp_path: Path) -> None:
    with Cache(tmp_path / "root", enabled=False) as cache:
        assert refused(lambda: cache.copy_directory("s3://b/run/", tmp_path / "copy", exclude="frozen")).names == ["cold", "colder[1]"]


@pytest.mark.parametrize("url", ["s3://b/run/cold", "s3://b/run/"])
def test_the_command_line_says_what_to_do(glacier: str, cache: Cache, capsys: pytest.CaptureFixture[str], url: str) -> None:
    assert run(["pull", "--root", str(cache.path), url]) == 1
    said = capsys.readouterr().err
    assert "aws s3api restore-object" in said
    assert "hint: restore it in its store" in said
    assert "credentials" not in said


@pytest.mark.parametrize(("status", "code"), [(403, "InvalidObjectState"), (409, "BlobArchived"), (409, "BlobBeingRehydrated")])
def test_signed_urls_of_s3_and_azure_are_recognized(
    glacier: str, cache: Cache, monkeypatch: pytest.MonkeyPatch, status: int, code: str
) -> None:
    monkeypatch.setattr(Glacier, "status", status)
    monkeypatch.setattr(Glacier, "code", code)
    assert "restore it" in str(refused(lambda: cache.read(f"{glacier}/b/run/cold")))


class OfAzure(Exception):
    error_code, status_code = "BlobArchived", 409


class OfBotocore(Exception):
    response: ClassVar = {"Error": {"Code": "InvalidObjectState"}, "ResponseMetadata": {"HTTPStatusCode": 403}}


def as_s3fs_raises() -> Exception:
    error = PermissionError("The operation is not valid for the object's storage class")
    error.__cause__ = OfBotocore("refused")
    return error


@pytest.mark.parametrize(
    "error",
    [
        as_s3fs_raises(),
        OfBotocore("refused"),
        OfAzure("This operation is not permitted on an archived blob."),
        OSError(errno.EIO, "AWS Error INVALID_OBJECT_STATE during GetObject operation: The operation is not valid"),
        OSError(errno.EIO, "AWS Error UNKNOWN (HTTP status 403): The operation is not valid for the object's storage class"),
        OSError(errno.EIO, "An error occurred (InvalidObjectState) when calling the GetObject operation"),
    ],
    ids=["s3fs", "botocore", "adlfs", "pyarrow", "unknown to pyarrow", "text"],
)
def test_errors_of_filesystems_are_recognized(error: Exception) -> None:
    failed = helper.failed_by(error)
    assert isinstance(failed, helper.AttemptFailed)
    assert (failed.error, failed.retryable) == (errors.Archived, False)
