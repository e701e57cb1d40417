"""The directory of a claim: made whole before it gets its name, and removed only after it lost it.

While it is made it is called ``.new.*``, while it is removed ``.old.*``: whoever finds one of his own under such a name, under the
registry's lock, finds what a killed process left.

The registry is open to everybody, and its owner can put another directory, or a link, under any name in it at any time. So the directory
is opened once, checked by its descriptor, and its files are named in that. A file that another user owns is refused too: he could cut it
short, which kills the process that has it mapped.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from forebay import errors
from forebay._kernel import host, locks
from forebay._kernel.waits import COUNT
from forebay._logs import logger
from forebay.claims import records
from forebay.claims.processes import passing
from forebay.claims.records import Record


class Gone(errors.Closed, FileNotFoundError):
    """There is no claim of this user under that name: it was freed, or something else stands there."""

    def __init__(self, message: str, **facts: Any) -> None:
        super().__init__(message, **{"what": "claim", **facts})


@contextlib.contextmanager
def inside(directory: str | Path, access: int = os.O_PATH) -> Iterator[int]:
    """A descriptor of a claim's directory, to name files in; with ``os.O_RDONLY`` also for `os.listdir`. Raises `Gone`, OSError."""
    try:
        fd = os.open(directory, access | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        raise Gone(f"{directory} was freed") from None
    try:
        _check_owner(fd, directory)
        yield fd
    finally:
        os.close(fd)


def open_write(directory: str | Path, name: str) -> int:
    """A descriptor to change a file of a claim. Raises `Gone`, OSError."""
    with inside(directory) as parent:
        try:
            fd = host.open_write(name, parent)
        except FileNotFoundError:
            raise Gone(f"{directory}/{name} is missing") from None
    try:
        _check_owner(fd, f"{directory}/{name}")
    except BaseException:
        os.close(fd)
        raise
    return fd


def opener(path: str, flags: int) -> int:
    """`open_write` as the `Opener` of locks and futex words: ``path`` lies in a claim's directory, and ``flags`` are always to write."""
    return open_write(os.path.dirname(path), os.path.basename(path))


def _check_owner(fd: int, path: str | Path) -> None:
    if os.fstat(fd).st_uid != os.geteuid():
        raise Gone(f"{path} belongs to another user")


log = logger("forebay.claims")

CLAIM, TABLE, LOCKS, WORDS, LANDMARK = "claim", "members", "locks", "words", "landmark"
"""The files of a claim's directory."""
SLOTS = 1024
LEADER = 0
"""The slot of who registered the claim. Nobody else ever has it."""
TABLE_BYTES = SLOTS + SLOTS * 64
NEW, OLD = ".new.", ".old."
_LAST = f"{LANDMARK} {CLAIM}"  # these tell what is beside
_NEED = TABLE_BYTES + COUNT * 4 + 4096
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
            for name, size in ((TABLE, TABLE_BYTES), (LOCKS, 0), (WORDS, COUNT * 4)):
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
    with inside(directory) as parent:
        host.chmod(parent, 0o755)  # whatever the umask
        yield parent


def _make_claim(inside: int, data: bytes) -> int:
    _make_file(inside, CLAIM, 0, data, mode=0o644)
    fd = passing.take_in(lambda: host.out_of_the_way(host.open_write(CLAIM, inside)))
    locks.take(fd, LEADER)
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
        with inside(directory, os.O_RDONLY) as parent:
            for name in sorted(os.listdir(parent), key=_LAST.find):
                with contextlib.suppress(IsADirectoryError):  # then the directory is not empty at the end
                    host.unlink(name, parent)
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
    with contextlib.suppress(Gone), inside(directory) as parent:
        _remove_beside(f"/proc/self/fd/{parent}")


def _remove_beside(inside: str) -> None:
    try:
        fd = os.open(f"{inside}/{CLAIM}", os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
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
