"""Uploads in parts that were cut off: what came is not sent again, and what was never meant to go together does not."""

from __future__ import annotations

import os
import random
import signal
import threading
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from forebay import errors
from forebay.remote.s3 import S3Remote
from tests.processes import ProcessGroup
from tests.remote.test_s3 import OPTIONS, aws, client, endpoint, fetched, no_aws, s3  # noqa: F401 (fixtures)
from tests.servers.rgw import RgwServer, rgw_server  # noqa: F401 (a fixture)

pytest.importorskip("botocore")

PART = 5 << 20
BODY = random.Random(3).randbytes(3 * PART + 17)


@pytest.fixture
def bucket(client: Any) -> str:  # noqa: F811
    name = f"resume-{uuid.uuid4().hex[:12]}"
    client.create_bucket(Bucket=name)
    return name


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "source").write_bytes(BODY)
    return tmp_path / "source"


class Watched(S3Remote):
    """Notes what is asked, and lets a test step in before and after."""

    def __init__(self) -> None:
        super().__init__(OPTIONS)
        self.asked: list[tuple[str, dict[str, str]]] = []
        self.before: Callable[[str, Mapping[str, str]], object] = lambda method, query: None
        self.after: Callable[[str, Mapping[str, str]], object] = lambda method, query: None

    def request(self, method: str, url: str, *, query: Mapping[str, str], **more: Any) -> Any:
        self.before(method, query)
        reply = super().request(method, url, query=query, **more)
        self.asked.append((method, dict(query)))
        self.after(method, query)
        return reply

    @property
    def parts(self) -> list[int]:
        """The numbers of the parts that were sent."""
        return sorted(int(query["partNumber"]) for method, query in self.asked if method == "PUT" and "partNumber" in query)


def cut_off(url: str, source: Path) -> None:
    """A write that fails at its last part, the fourth, once the server has stored the three before it."""
    remote = Watched()
    stored = {str(number): threading.Event() for number in (1, 2, 3)}

    def fail(method: str, query: Mapping[str, str]) -> None:
        if query.get("partNumber") == "4" and all(event.wait(60) for event in stored.values()):
            raise errors.AccessDenied("no more", url=url)

    remote.before = fail
    remote.after = lambda _, query: stored[query["partNumber"]].set() if "partNumber" in query else None
    with pytest.raises(errors.AccessDenied):
        remote.write(url, source, resume=True)


def left(client: Any, bucket: str) -> int:  # noqa: F811
    return len(client.list_multipart_uploads(Bucket=bucket).get("Uploads", []))


@pytest.mark.parametrize("key", ["plain", "dir/a b+c%20d&e=f?g#h", "\u65e5\u672c/\u00fc"])
def test_what_came_is_not_sent_again(aws: RgwServer, client: Any, bucket: str, source: Path, key: str) -> None:  # noqa: F811
    url = f"s3://{bucket}/{key}"
    cut_off(url, source)
    assert left(client, bucket) == 1
    remote, told = Watched(), []
    written = remote.write(url, source, resume=True, on_sent=told.append)
    assert remote.parts == [4]
    assert fetched(remote, url) == BODY
    assert remote.stat(url, known=written.validator) is None
    assert max(told) == len(BODY)
    assert left(client, bucket) == 0


def test_after_kill_9(aws: RgwServer, client: Any, bucket: str, source: Path, children: ProcessGroup) -> None:  # noqa: F811
    url = f"s3://{bucket}/killed"

    def die() -> None:
        remote = Watched()
        sent = []

        def count(method: str, query: Mapping[str, str]) -> None:
            if "partNumber" in query:
                sent.append(query)
                if len(sent) == 2:
                    os.kill(os.getpid(), signal.SIGKILL)

        remote.after = count
        remote.write(url, source, resume=True)

    assert children(die).wait() == -signal.SIGKILL
    remote = Watched()
    remote.write(url, source, resume=True)
    assert len(remote.parts) <= 2
    assert fetched(remote, url) == BODY
    assert left(client, bucket) == 0


def test_without_resume_nothing_is_left(aws: RgwServer, client: Any, bucket: str, source: Path) -> None:  # noqa: F811
    remote = Watched()

    def fail(method: str, query: Mapping[str, str]) -> None:
        if "partNumber" in query:
            raise errors.AccessDenied("no more", url="")

    remote.before = fail
    with pytest.raises(errors.AccessDenied):
        remote.write(f"s3://{bucket}/x", source)
    assert left(client, bucket) == 0


def test_a_resumed_upload_sends_parts_that_changed_again(aws: RgwServer, bucket: str, source: Path) -> None:  # noqa: F811
    url = f"s3://{bucket}/changed"
    cut_off(url, source)
    other = BODY[:PART] + bytes(reversed(BODY[PART:]))  # of the same size: one part is as it was
    source.write_bytes(other)
    remote = Watched()
    remote.write(url, source, resume=True)
    assert remote.parts == [2, 3, 4]
    assert fetched(remote, url) == other


def test_a_shorter_one_leaves_the_rest_out(aws: RgwServer, client: Any, bucket: str, source: Path) -> None:  # noqa: F811
    url = f"s3://{bucket}/shorter"
    cut_off(url, source)
    source.write_bytes(BODY[: 2 * PART])
    remote = Watched()
    remote.write(url, source, resume=True)
    assert fetched(remote, url) == BODY[: 2 * PART]
    assert left(client, bucket) == 0


def test_somebody_else_ends_what_is_gone_on_with(aws: RgwServer, client: Any, bucket: str, source: Path) -> None:  # noqa: F811
    url = f"s3://{bucket}/gone"
    cut_off(url, source)
    remote = Watched()

    once = iter([True])

    def meddle(method: str, query: Mapping[str, str]) -> None:
        if method == "PUT" and next(once, False):
            for upload in client.list_multipart_uploads(Bucket=bucket).get("Uploads", []):
                client.abort_multipart_upload(Bucket=bucket, Key="gone", UploadId=upload["UploadId"])

    remote.before = meddle
    remote.write(url, source, resume=True)
    assert fetched(remote, url) == BODY
    assert left(client, bucket) == 0


def test_the_answer_to_the_end_is_lost(aws: RgwServer, bucket: str, source: Path) -> None:  # noqa: F811
    """Sent again, the server knows no such upload any more: the object is there."""
    url = f"s3://{bucket}/lost"
    remote = Watched()

    def twice(method: str, query: Mapping[str, str]) -> None:
        if method == "POST" and "uploadId" in query:
            remote.after = lambda method, query: None
            raise errors.NotFound("NoSuchUpload", url=url)

    remote.after = twice
    written = remote.write(url, source)
    assert fetched(remote, url) == BODY
    assert remote.stat(url, known=written.validator) is None


def test_a_conflict_leaves_nothing(aws: RgwServer, client: Any, bucket: str, source: Path) -> None:  # noqa: F811
    url = f"s3://{bucket}/conflict"
    remote = Watched()

    def meddle(method: str, query: Mapping[str, str]) -> None:
        if method == "POST" and "uploadId" in query:
            raise errors.Conflict("another", url=url)

    remote.before = meddle
    with pytest.raises(errors.Conflict):
        remote.write(url, source, resume=True)
    assert left(client, bucket) == 0
