"""Files of this host."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from forebay import errors, remote
from forebay._model import Partial, Span
from forebay.remote.local import BLOCK, LocalRemote
from forebay.testing import MemorySink

BODY = os.urandom(3 * BLOCK + 17)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "a b.bin"
    found.write_bytes(BODY)
    return found


@pytest.fixture
def local() -> LocalRemote:
    return LocalRemote()


@pytest.mark.parametrize("size", [0, 1, BLOCK, len(BODY)])
def test_fetch(path: Path, local: LocalRemote, size: int) -> None:
    path.write_bytes(BODY[:size])
    for url in (str(path), remote.canonical(path)):
        sink = MemorySink()
        transfer = local.fetch(url, sink)
        assert sink.data == BODY[:size]
        assert (transfer.received, transfer.requests, transfer.resumed) == (size, 0, 0)
        assert transfer.info == local.stat(url)


def test_stat(path: Path, local: LocalRemote) -> None:
    info = local.stat(str(path))
    assert info is not None
    assert (info.size, info.strong, info.modified) == (len(BODY), True, path.stat().st_mtime)
    assert local.stat(str(path), known=info.validator) is None
    os.utime(path, ns=(0, 1))
    assert local.stat(str(path), known=info.validator) is not None


def test_read(path: Path, local: LocalRemote) -> None:
    info = local.stat(str(path))
    assert info is not None
    assert local.read(str(path), Span(5, BLOCK), validator=info.validator) == BODY[5 : 5 + BLOCK]
    assert local.read(str(path), Span(len(BODY) - 5, 50)) == BODY[-5:]
    assert local.read(str(path), Span(len(BODY) + 5, 50)) == b""
    path.write_bytes(BODY[1:])
    with pytest.raises(errors.RemoteChanged, match=r"a%20b\.bin"):
        local.read(str(path), Span(5, 6), validator=info.validator)


def test_a_partial_is_completed(path: Path, local: LocalRemote) -> None:
    info = local.stat(str(path))
    assert info is not None
    missing = (Span(5, 10), Span(BLOCK, len(BODY) - BLOCK))
    data = bytearray(BODY)
    data[5:15], data[BLOCK:] = bytes(10), bytes(len(BODY) - BLOCK)
    sink = MemorySink(Partial(len(BODY), info.validator or "", missing), data)
    transfer = local.fetch(str(path), sink)
    assert sink.data == BODY
    assert transfer.received == 10 + len(BODY) - BLOCK
    assert transfer.resumed == len(BODY) - transfer.received


@pytest.mark.parametrize("change", [lambda path: path.write_bytes(BODY[:10]), lambda path: path.open("ab").write(b"more")])
def test_a_file_that_is_written_to_meanwhile(path: Path, local: LocalRemote, change: object) -> None:
    sink = MemorySink()
    sink.on_write = lambda offset, count: change(path) if offset == BLOCK else None  # type: ignore[operator]
    with pytest.raises(errors.RemoteChanged):
        local.fetch(str(path), sink)


def test_what_is_no_file(tmp_path: Path, local: LocalRemote) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "to-pipe").symlink_to("pipe")
    for name, error in (("none", errors.NotFound), ("pipe/x", errors.NotFound), ("", errors.RemoteError), ("pipe", errors.RemoteError)):
        with pytest.raises(error, match="file://"):
            local.stat(str(tmp_path / name))
    with pytest.raises(errors.RemoteError, match="not a regular file"):
        local.fetch(str(tmp_path / "to-pipe"), MemorySink())


@pytest.mark.root
def test_a_file_that_may_not_be_read(path: Path, local: LocalRemote) -> None:
    path.chmod(0)
    path.parent.chmod(0o755)
    os.seteuid(65534)
    try:
        with pytest.raises(errors.AccessDenied):
            local.stat(str(path))
    finally:
        os.seteuid(0)


def test_list(tmp_path: Path, local: LocalRemote) -> None:
    for name in ("b/2", "b/1", "b.txt", "b-c", "bb/x/y", "a", "c"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(name.encode())
    (tmp_path / "bb" / "round").symlink_to(tmp_path)
    (tmp_path / "b" / "link").symlink_to("1")

    def names(prefix: str) -> list[str]:
        found = list(local.list(str(tmp_path) + prefix))
        assert all(local.stat(info.url, known=info.validator) is None for info in found)
        return [info.url.removeprefix(f"file://{tmp_path}/") for info in found]

    assert names("/b") == ["b-c", "b.txt", "b/1", "b/2", "b/link", "bb/x/y"]
    assert names("/b/") == ["b/1", "b/2", "b/link"]
    assert names("/a") == ["a"]
    assert names("/none/") == []
