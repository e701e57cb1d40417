"""The directory of a claim: built completely before it gets its name, and removed only after it lost its name.

While it is built it is called ``.new.*``, while it is removed ``.old.*``. A directory with such a name that is found under the
registry's lock was left by a killed process.

Every user may write to the registry, and its owner can put another directory, or a link, under any name in it at any time. So the
directory is opened once, checked through its descriptor, and its files are named relative to that. A file that another user owns is
refused as well: its owner could truncate it, which kills every process that has it mapped.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from forebay import errors
from forebay._kernel import host, locks
from forebay._kernel.waits import COUNT
from forebay._logs import logger
from forebay.claims import records
from forebay.claims.processes import inherited_fds

log = logger("forebay.claims")

CLAIM, TABLE, LOCKS, WORDS, MARKER = "claim", "members", "locks", "words", "landmark"
"""The files of a claim's directory. Versions of Forebay share a registry, so these names stay."""
SLOTS = 1024
LEADER = 0
"""The slot of the process that registered the claim. No other process ever gets it."""
TABLE_BYTES = SLOTS + SLOTS * 64
FILES = {TABLE: TABLE_BYTES, LOCKS: 0, WORDS: COUNT * 4}
NEW, OLD = ".new.", ".old."
_REMOVED_LAST = f"{MARKER} {CLAIM}"  # they say which files outside the directory belong to the claim
_NEED = TABLE_BYTES + COUNT * 4 + 4096
_TO_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # any user may have put a FIFO there
_OWN_LIMITS = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOMEM))  # these say nothing about the file that was to be opened
_FIRST_READ = 1024  # bytes: the marks of a few directories
_reported: set[str] = set()  # directories that could not be removed


class Gone(errors.Closed, FileNotFoundError):
    """This user has no claim of that name: it was freed, or something else has the name."""

    def __init__(self, message: str, **facts: Any) -> None:
        super().__init__(message, **{"what": "claim", **facts})


# -- opening -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def inside(directory: str | Path, access: int = os.O_PATH) -> Iterator[int]:
    """Open a claim's directory, to name files relative to it; with ``os.O_RDONLY`` also for `os.listdir`. Raises `Gone`, OSError."""
    try:
        fd = host.open_fd(directory, access | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        raise Gone(f"{directory} was freed") from None
    try:
        _check_owner(fd, directory)
        yield fd
    finally:
        os.close(fd)


def open_write(path: str | Path, flags: int = os.O_RDWR) -> int:
    """Open a file of a claim, which lies in the claim's directory, for writing, as the `Opener` of locks and futex words: their ``flags``
    are always these. Raises `Gone`, OSError."""
    directory, name = os.path.split(path)
    with inside(directory) as parent:
        try:
            fd = host.open_write(name, parent)
        except FileNotFoundError:
            raise Gone(f"{path} is missing") from None
    try:
        _check_owner(fd, path)
    except BaseException:
        os.close(fd)
        raise
    return fd


def open_read(path: str, directory: int | None = None) -> int | None:
    """Open a file of a claim for reading; None if there is none, or this user may not read it. Raises OSError if this process cannot open
    any file."""
    try:
        return host.open_fd(path, _TO_READ, dir_fd=directory)
    except OSError as error:
        if error.errno in _OWN_LIMITS:
            raise  # taken for dead, the claim would be given away
        return None


def _check_owner(fd: int, path: str | Path) -> None:
    if os.fstat(fd).st_uid != os.geteuid():
        raise Gone(f"{path} belongs to another user")


def read(fd: int) -> bytes:
    """Return the contents of a claim's file, of an oversized one the beginning."""
    data = os.pread(fd, 1 << 14, 0)  # a buffer for the largest would take longer than the rest
    return data if len(data) < 1 << 14 else data + os.pread(fd, records.LARGEST, len(data))


def read_marks(fd: int) -> bytes:
    """Return the beginning of a claim's file, as far as the marks of its directories reach."""
    data = os.pread(fd, _FIRST_READ, 0)
    end = records.length_of_marks(data)
    return data if end <= len(data) else os.pread(fd, min(end, records.LARGEST), 0)


def is_released(directory: Path) -> bool:
    """Whether the claim's process gave up its directories: the claim's marker then begins with four zeros."""
    fd = open_read(f"{directory}/{MARKER}")
    if fd is None:
        return False
    try:
        return os.pread(fd, 4, 0) == bytes(4)
    finally:
        os.close(fd)


# -- building ----------------------------------------------------------------------------------------------------------


def scrap_name(kind: str) -> str:
    return f"{kind}{secrets.token_hex(8)}"


def build(directory: Path, data: bytes, files: Mapping[str, int] = FILES, create_marker: Callable[[int], None] | None = None) -> int:
    """Create the directory of a claim and return a descriptor of its file with the leader's byte locked.

    ``data``: the contents of the claim's file; ``files``: the sizes of the others. ``create_marker``: creates the claim's marker, given a
    descriptor of the directory. The caller holds the registry's lock, and hands the returned descriptor over. Raises `NoSpace`, OSError;
    FileExistsError if another file has the marker's name."""
    fd = -1
    try:
        host.mkdir(directory, 0o755)
        with inside(directory) as parent:
            host.chmod(parent, 0o755)  # whatever the umask
            make_file(parent, CLAIM, 0, data, mode=0o644)
            fd = inherited_fds.register(lambda: host.out_of_the_way(host.open_write(CLAIM, parent)))
            locks.take(fd, LEADER)
            for name, size in files.items():
                make_file(parent, name, size)
            if create_marker is not None:
                create_marker(parent)
        return fd
    except BaseException as error:
        inherited_fds.close(fd)
        remove_external(directory)
        remove(directory)
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise _no_space(directory.parent) from error
        raise


def make_file(parent: int, name: str, size: int, content: bytes = b"", *, mode: int = 0o600) -> None:
    """Create a file of a claim with its blocks. Raises OSError."""
    fd = host.create(name, mode, directory=parent)
    try:
        host.store_in_place(fd)
        host.allocate(fd, 0, size)
        if content:
            host.pwrite(fd, content, 0)
    finally:
        os.close(fd)


def _no_space(registry: Path) -> errors.NoSpace:
    disk = host.disk(registry)
    what = "has no inodes left" if disk.free >= _NEED else f"is full: a claim needs {_NEED:,} bytes, {disk.free:,} are free"
    return errors.NoSpace(
        f"{registry} {what}: remove what is not needed there, or make it larger",
        key=str(registry), need=_NEED, free=disk.free, budget=disk.total, limit="disk",
    )  # fmt: skip


# -- removing ----------------------------------------------------------------------------------------------------------


def remove(directory: Path) -> None:
    """Remove a directory that lost its name. A directory that cannot be removed stays, and is logged once."""
    try:
        with inside(directory, os.O_RDONLY) as parent:
            for name in sorted(os.listdir(parent), key=_REMOVED_LAST.find):
                with contextlib.suppress(IsADirectoryError):  # then rmdir fails
                    host.unlink(name, parent)
        host.rmdir(directory)
    except FileNotFoundError:
        return  # another process is removing it too, or another user owns it
    except OSError as error:
        if directory.name not in _reported:
            _reported.add(directory.name)
            log.warning("%s cannot be removed: %s", directory, str(error))


def remove_external(directory: Path) -> None:
    """Remove the files of a claim outside its directory, if the marker outside is still the claim's.

    The caller holds the registry's lock, and creates no claim before: the names and contents of the files may repeat."""
    if not os.path.lexists(f"{directory}/{MARKER}"):
        return  # there are none, or a killed process removed them
    with contextlib.suppress(Gone), inside(directory) as parent:
        fd = open_read(CLAIM, parent)
        if fd is None:
            return
        try:
            record = records.load(read(fd))
        except OSError:
            return  # not a regular file
        finally:
            os.close(fd)
        if record is None or record.beside is None or not _is_marker(f"/proc/self/fd/{parent}/{MARKER}", record.beside.marker):
            return
        for path in record.beside.paths:
            with contextlib.suppress(PermissionError, IsADirectoryError):
                host.unlink(path)
        host.unlink(record.beside.marker)


def identity(status: os.stat_result) -> bytes:
    """Return the marker of a file outside that is no copy: its contents change."""
    return f"    file {status.st_dev} {status.st_ino}".encode()


def _is_marker(own: str, outside: str) -> bool:
    """Whether the file outside is the claim's marker: a link to it, or, on another file system, a copy, or what `identity` says of it. The
    first four bytes may differ: see `is_released`."""
    try:
        ours, theirs = os.lstat(own), os.lstat(outside)
        if ours.st_dev == theirs.st_dev:
            return ours.st_ino == theirs.st_ino
        data = Path(own).read_bytes()
        return theirs.st_uid == ours.st_uid and (data == identity(theirs) or data[4:] == Path(outside).read_bytes()[4:])
    except OSError:
        return False
