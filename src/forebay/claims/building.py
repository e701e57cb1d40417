"""The directory of a claim: made whole before it gets its name, and removed only after it lost it.

While it is made it is called ``.new.*``, while it is removed ``.old.*``: whoever finds one of his own under such a name, under the
registry's lock, finds what a killed process left.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from forebay import errors
from forebay._kernel import host, locks
from forebay._kernel.waits import COUNT
from forebay._logs import logger
from forebay.claims import claim_files, records, table
from forebay.claims.inherited_fds import passing
from forebay.claims.records import Record

log = logger("forebay.claims")

NEW, OLD = ".new.", ".old."
LANDMARK = "landmark"
_LAST = f"{LANDMARK} {table.CLAIM}"  # these tell what is beside
_NEED = table.TABLE_BYTES + COUNT * 4 + 4096
_told: set[str] = set()


def scrap_name(kind: str) -> str:
    return f"{kind}{secrets.token_hex(8)}"


def build(directory: Path, record: Record, content: bytes | None = None) -> int:
    """Make the directory of a claim; gives a descriptor of its file, with the leader's byte locked. ``content``: of its landmark.
    Raises `NoSpace`, OSError; FileExistsError where another file has the landmark's name.

    Caller: holds the registry's lock, and hands the descriptor over."""
    fd = -1
    try:
        with _new(directory) as inside:
            fd = _make_claim(inside, record.dump())
            for name, size in ((table.TABLE, table.TABLE_BYTES), ("locks", 0), ("words", COUNT * 4)):
                _make_file(inside, name, size)
            if record.beside is not None and content is not None:
                _make_landmark(inside, Path(record.beside.landmark), content)
        return fd
    except BaseException as error:
        passing.close(fd)
        remove_beside(directory)
        remove(directory)
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise _no_space(directory.parent) from error
        raise


def _make_landmark(inside: int, landmark: Path, content: bytes) -> None:
    _make_file(inside, LANDMARK, len(content), content)
    try:
        host.link(LANDMARK, landmark, inside)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        _make_copy(landmark, content)


def _make_copy(landmark: Path, content: bytes) -> None:
    fd = host.create_unnamed(landmark.parent, 0o600)
    try:
        _fill(fd, len(content), content)
        host.give_name(fd, landmark)  # only now: what is not whole would be known by nobody
    finally:
        os.close(fd)


def _no_space(registry: Path) -> errors.NoSpace:
    disk = host.disk(registry)
    what = "has no inodes left" if disk.free >= _NEED else f"is full: a claim needs {_NEED:,} bytes, {disk.free:,} are free"
    return errors.NoSpace(
        f"{registry} {what}: remove what is not needed there, or make it larger",
        key=str(registry), need=_NEED, free=disk.free, budget=disk.total, limit="disk",
    )  # fmt: skip


def build_refusal(directory: Path, data: bytes) -> int:
    """Make the directory of a claim that was refused, which says why; gives a descriptor as `build` does."""
    with _new(directory) as inside:
        return _make_claim(inside, data)


@contextlib.contextmanager
def _new(directory: Path) -> Iterator[int]:
    """A new directory, by a descriptor: all that is made in it is named there."""
    host.mkdir(directory, 0o755)
    with claim_files.inside(directory) as inside:
        host.chmod(inside, 0o755)  # whatever the umask
        yield inside


def _make_claim(inside: int, data: bytes) -> int:
    _make_file(inside, table.CLAIM, 0, data, mode=0o644)
    fd = passing.take_in(lambda: host.out_of_the_way(host.open_write(table.CLAIM, inside)))
    locks.take(fd, table.LEADER)
    return fd


def _make_file(inside: int, name: str, size: int, content: bytes = b"", *, mode: int = 0o600) -> None:
    fd = host.create(name, mode, directory=inside)
    try:
        _fill(fd, size, content)
    finally:
        os.close(fd)


def _fill(fd: int, size: int, content: bytes) -> None:
    host.allocate(fd, 0, size)
    if content:
        host.pwrite(fd, content, 0)


def read(fd: int) -> bytes:
    """What the file of a claim says; of one that is too large for that, the beginning."""
    data = os.pread(fd, 1 << 14, 0)
    return data if len(data) < 1 << 14 else data + os.pread(fd, records.LARGEST, len(data))


def remove(directory: Path) -> None:
    """Remove a directory that lost its name. What is not ours stays, and is told once."""
    try:
        with claim_files.inside(directory, os.O_RDONLY) as inside:
            for name in sorted(os.listdir(inside), key=_LAST.find):
                with contextlib.suppress(IsADirectoryError):  # then the directory is not empty at the end
                    host.unlink(name, inside)
        host.rmdir(directory)
    except FileNotFoundError:
        return  # another process removes it too, or it is not ours
    except OSError as error:
        if directory.name not in _told:
            _told.add(directory.name)
            log.warning("%s cannot be removed: %s", directory, str(error))


def remove_beside(directory: Path) -> None:
    """Remove what a claim had beside its directory. Caller: holds the registry's lock, and makes no claim before: names and texts may be
    the same again."""
    if not os.path.lexists(f"{directory}/{LANDMARK}"):
        return  # there is nothing, or a killed process removed it
    with contextlib.suppress(claim_files.Gone), claim_files.inside(directory) as inside:
        _remove_beside(f"/proc/self/fd/{inside}")


def _remove_beside(inside: str) -> None:
    try:
        fd = os.open(f"{inside}/{table.CLAIM}", os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return
    try:
        record = records.load(read(fd))
    except OSError:
        return  # it is a directory, or the like
    finally:
        os.close(fd)
    if record is None or record.beside is None or not _is_landmark(inside, record.beside.landmark):
        return
    for path in record.beside.paths:
        with contextlib.suppress(PermissionError, IsADirectoryError):
            host.unlink(path)
    host.unlink(record.beside.landmark)


def _is_landmark(inside: str, landmark: str) -> bool:
    """Whether the file outside is still the one that the claim made: the same, or, on another file system, one with the same text."""
    try:
        ours, there = os.lstat(f"{inside}/{LANDMARK}"), os.lstat(landmark)
        if ours.st_dev == there.st_dev:
            return ours.st_ino == there.st_ino
        return there.st_uid == ours.st_uid and Path(inside, LANDMARK).read_bytes()[4:] == Path(landmark).read_bytes()[4:]
    except OSError:
        return False


def is_released(directory: Path) -> bool:
    """Whether the claim's landmark says, by a size of 0, that its directories are free again."""
    try:
        fd = os.open(directory / LANDMARK, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        return os.pread(fd, 4, 0) == bytes(4)  # of an int32, the size of what follows
    finally:
        os.close(fd)
