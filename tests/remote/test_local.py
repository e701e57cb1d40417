"""Files of this host."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

import pytest

from forebay import errors, remote
from forebay._kernel import host
from forebay._model import Partial, Span
from forebay.remote.local import BLOCK, UNFINISHED, LocalRemote, staged, sweep
from forebay.testing import MemorySink
from tests.clocks import Clocks
from tests.processes import fork, in_child

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
    with pytest.raises(errors.RemoteError, match="a directory, not a file"):
        local.fetch(str(tmp_path), MemorySink())


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


def test_what_lies_behind_links_is_listed_once(tmp_path: Path, local: LocalRemote) -> None:
    for name in ("top/a/1", "top/b/2", "elsewhere/sub/3"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    for name in ("top/only", "top/none"):
        (tmp_path / name).mkdir()
    links = {"a/to_b": "../b", "b/to_a": "../a", "b/self": ".", "b/up": "../..", "far": "../elsewhere", "only/broken": "nothing"}
    for name, to in links.items():
        (tmp_path / "top" / name).symlink_to(to)
    found = [info.url.removeprefix(f"file://{tmp_path}/top/") for info in local.list(f"{tmp_path}/top/")]
    assert found == ["a/1", "a/to_b/2", "b/2", "b/to_a/1", "far/sub/3", "none/", "only/"]


def test_what_goes_while_it_is_listed_is_left_out(tmp_path: Path, local: LocalRemote) -> None:
    for name in ("a", "b", "c/1", "d/1", "e"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "f").symlink_to("f")  # leads to itself
    listing = local.list(f"{tmp_path}/")
    first = next(listing)
    (tmp_path / "b").unlink()
    (tmp_path / "c/1").unlink()
    (tmp_path / "c").rmdir()
    (tmp_path / "d/1").unlink()
    (tmp_path / "d").rmdir()
    (tmp_path / "d").write_bytes(b"a file where a directory was")
    assert [info.url.removeprefix(f"file://{tmp_path}/") for info in (first, *listing)] == ["a", "e"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_directory_below_that_cannot_be_read_is_told(tmp_path: Path, local: LocalRemote) -> None:
    (tmp_path / "closed").mkdir(0)
    with pytest.raises(errors.AccessDenied, match="closed"):
        list(local.list(f"{tmp_path}/"))


# -- writing ---------------------------------------------------------------------------------------------------------


def there(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("size", [0, 1, BLOCK, len(BODY)])
def test_write(path: Path, local: LocalRemote, tmp_path: Path, size: int) -> None:
    path.write_bytes(BODY[:size])
    told: list[int] = []
    for name, source in {"d/e/buffer": memoryview(BODY)[:size], "d/a file": path, "d/e/../text": str(path)}.items():
        written = local.write(str(tmp_path / name), source, on_sent=told.append)
        assert (tmp_path / name).read_bytes() == BODY[:size]
        assert written == local.stat(str(tmp_path / name))
    assert max(told, default=0) == size
    assert there(tmp_path / "d") == ["a file", "e/buffer", "text"]


def test_a_file_is_written_as_its_user_would(local: LocalRemote, tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        local.write(str(tmp_path / "x"), b"x")
    finally:
        os.umask(old)
    assert (tmp_path / "x").stat().st_mode & 0o777 == 0o640


def test_who_reads_keeps_what_he_reads(path: Path, local: LocalRemote) -> None:
    with open(path, "rb") as reader:
        local.write(str(path), b"another")
        assert reader.read() == BODY
    assert path.read_bytes() == b"another"


def test_conditional_writes(local: LocalRemote, tmp_path: Path) -> None:
    url = str(tmp_path / "x")
    with pytest.raises(errors.Conflict):
        local.write(url, b"none", if_match="1-2-3")
    first = local.write(url, b"first", if_none_match="*")
    with pytest.raises(errors.Conflict, match="nothing was written") as caught:
        local.write(url, b"second", if_none_match="*")
    assert isinstance(caught.value, FileExistsError)
    second = local.write(url, b"third", if_match=first.validator)
    with pytest.raises(errors.Conflict):
        local.write(url, b"fourth", if_match=first.validator)
    assert local.stat(url) == second
    assert there(tmp_path) == ["x"]


def test_of_many_conditional_writes_one_succeeds(local: LocalRemote, tmp_path: Path) -> None:
    url = str(tmp_path / "x")

    def attempt(number: int) -> bool:
        try:
            local.write(url, str(number).encode(), if_none_match="*")
        except errors.Conflict:
            return False
        return True

    children = [fork(lambda number=number: attempt(number)) for number in range(8)]
    assert [child.result() for child in children].count(True) == 1


def test_without_hard_links(local: LocalRemote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(*_: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
    with pytest.raises(errors.Unsupported, match="hard links"):
        local.write(str(tmp_path / "x"), b"x", if_none_match="*")
    assert there(tmp_path) == []


def test_what_ends_a_write_leaves_nothing(path: Path, local: LocalRemote, tmp_path: Path) -> None:
    def stop(done: int) -> None:
        assert [info.url for info in local.list(f"{tmp_path}/out/") if not info.is_folder] == []  # what is not finished is not listed
        assert there(tmp_path / "out") != []
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        local.write(str(tmp_path / "out" / "x"), BODY, on_sent=stop)
    assert there(tmp_path / "out") == []


def test_a_source_that_grows_or_shrinks(path: Path, local: LocalRemote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "clone", lambda *_: False)
    for size in (len(BODY) + 5, 2 * BLOCK + 1):
        path.write_bytes(BODY)
        with pytest.raises(errors.SourceChanged, match=r"a b\.bin changed while"):
            local.write(str(tmp_path / "out" / "x"), path, on_sent=lambda _, size=size: os.truncate(path, size))
    assert there(tmp_path / "out") == []


def test_a_write_that_cannot_be(path: Path, local: LocalRemote, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        local.write(str(tmp_path / "x"), tmp_path / "no source")
    assert not isinstance(caught.value, errors.ForebayError)
    (tmp_path / "folder").mkdir()
    with pytest.raises(errors.RemoteError, match="folder") as told:
        local.write(str(tmp_path / "folder"), b"x")
    assert told.value.errno == errno.EISDIR
    with pytest.raises(errors.RemoteError, match="File exists"):
        local.write(f"{path}/below", b"x")
    assert there(tmp_path) == ["a b.bin"]


def test_delete(path: Path, local: LocalRemote) -> None:
    for _ in range(2):
        local.delete(str(path))
        assert not path.exists()
    local.delete(f"{path}/below/it")
    with pytest.raises(errors.RemoteError):
        local.delete(str(path.parent))


def test_what_is_being_written_is_no_leftover_though_the_clock_jumped(tmp_path: Path) -> None:
    """P1 writes / the clock jumps by a day / P2 sweeps what nobody has written to for an hour."""
    dead = tmp_path / f".x.0123{UNFINISHED}"
    dead.write_bytes(b"half")
    with Clocks() as clocks, staged(tmp_path / "y") as (part, fd):
        os.write(fd, b"half")
        sweep(str(tmp_path))
        assert dead.exists()
        clocks.step(86_400 * 1_000_000_000)
        sweep(str(tmp_path))
        assert not dead.exists()
        assert Path(part).read_bytes() == b"half"
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("kind", ["fifo", "link to an old file", "link to itself", "socket"])
def test_what_is_no_file_is_no_leftover(tmp_path: Path, kind: str) -> None:
    """What others put there neither hangs nor ends an upload to the directory."""
    planted = tmp_path / f".a.0123{UNFINISHED}"
    dead = tmp_path / f".b.0123{UNFINISHED}"
    old = tmp_path / "old"
    for path in (dead, old):
        path.write_bytes(b"half")
        os.utime(path, (1, 1))
    with socket.socket(socket.AF_UNIX) as listener:
        if kind == "fifo":
            os.mkfifo(planted)
        elif kind == "socket":
            listener.bind(str(planted))
        else:
            planted.symlink_to(old if kind == "link to an old file" else planted)
        os.utime(planted, (1, 1), follow_symlinks=False)
        assert in_child(lambda: sweep(str(tmp_path))) is None
    assert os.path.lexists(planted)
    assert not dead.exists()
