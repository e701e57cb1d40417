"""Where the claims of a node are: one directory for all users, in memory that a boot clears."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from forebay import errors
from forebay._kernel import host, locks
from forebay.claims.backoff import Patience
from forebay.claims.building import NEW, scrap_name
from forebay.claims.inherited_fds import passing

VARIABLE = "FOREBAY_CLAIMS"
DEFAULT = "/dev/shm/forebay-claims"
LOCK = "lock"
_OPEN_TO_ALL = 0o1777
_LONGEST_PAUSE = 0.02
_PID = re.compile(rb"([1-9][0-9]{0,9})\n")
_TAKEN = frozenset((errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR))
_UNFIT = frozenset((errno.EACCES, errno.EPERM, errno.EISDIR, errno.ELOOP, errno.ENXIO))


def default() -> Path:
    """Where the environment says. Raises `ConfigError` for what is no absolute path: processes elsewhere would see another one."""
    said = os.environ.get(VARIABLE) or DEFAULT
    if not os.path.isabs(said) or "\0" in said:
        raise errors.ConfigError(f"{VARIABLE}={said}: must be an absolute path", name=VARIABLE, value=said)
    return Path(said)


def prepare(place: Path) -> None:
    """Have the directory, fit for all users. Raises `RootRefused` with what to do."""
    try:
        status = os.lstat(place)
    except FileNotFoundError:
        _make(place)
        status = os.lstat(place)
    if not stat.S_ISDIR(status.st_mode):
        _refuse(place, "it is a symbolic link" if stat.S_ISLNK(status.st_mode) else "it is no directory")
    if status.st_mode & 0o1002 == 0o0002:
        if status.st_uid != os.geteuid():
            _refuse(place, "anybody may remove what others have there (chmod +t)")
        host.chmod(place, _OPEN_TO_ALL)
    if status.st_uid not in (0, os.geteuid()) and status.st_mode & _OPEN_TO_ALL != _OPEN_TO_ALL:
        _refuse(place, f"it is user {status.st_uid}'s alone, and not open to all (chmod 1777)")
    if not os.access(place, os.W_OK | os.X_OK, effective_ids=True):
        _refuse(place, "this user may not write there")
    if not host.is_local(kind := host.fs_kind(place)):
        _refuse(place, f"it lies on a {kind} file system, whose locks other machines may not share")


def _refuse(place: Path, why: str) -> NoReturn:
    raise errors.RootRefused(f"{place} cannot hold the claims of this node: {why}: set {VARIABLE} to a directory that can", path=str(place))


def _make(place: Path) -> None:
    """Under another name first: nobody else may find it with the mode that the umask leaves."""
    new = place.with_name(scrap_name(NEW))
    try:
        for above in [*reversed(place.parents), new]:
            if not os.path.isdir(above):
                host.mkdir(above, 0o700 if above is new else 0o755)
    except OSError as error:
        _refuse(place, f"it cannot be made ({error.strerror})")
    try:
        _make_lock(new / LOCK)
        host.chmod(new, _OPEN_TO_ALL)
        host.rename(new, place)
    except OSError as error:
        host.unlink(new / LOCK)
        host.rmdir(new)
        if error.errno not in _TAKEN:  # else another process was first
            raise


def _make_lock(path: Path) -> None:
    with contextlib.suppress(FileExistsError):
        os.close(host.create(path, 0o666))


def _open_lock(path: Path) -> int:
    try:
        try:
            return host.out_of_the_way(host.open_write(path))  # without O_CREAT: in a sticky directory that is refused for another's file
        except FileNotFoundError:
            _make_lock(path)
            return host.out_of_the_way(host.open_write(path))
    except OSError as error:
        if error.errno in _UNFIT:  # somebody put there what is no file of ours
            _refuse(path.parent, f"{LOCK!r} in it cannot be opened ({error.strerror})")
        raise


def _holder(path: Path, fd: int) -> str:
    """Who has the lock, in words: by /proc, else by what the last holder wrote."""
    if found := locks.holders(path, 0) or locks.posix_holders(path, 0):
        return ", ".join(map(locks.describe_process, found))
    said = _PID.match(os.pread(fd, 16, 0))
    try:
        user = os.stat(f"/proc/{int(said[1])}").st_uid if said else None
    except OSError:
        user = None
    if said is None or user is None:
        return "an unknown process, probably another user's: the superuser sees it in /proc/*/fdinfo"
    return f"{locks.describe_process(int(said[1]))} of user {user}, as {LOCK!r} says, which every user can write to"


@contextlib.contextmanager
def locked(place: Path, timeout: float | None) -> Iterator[None]:
    """Hold the lock of all claims of the node. Raises `RootRefused`, `WaitTimeout`."""
    patience = Patience(timeout, _LONGEST_PAUSE)
    fd = passing.take_in(lambda: _open_lock(place / LOCK))
    try:
        while not locks.take(fd, 0):
            patience.sleep(lambda: ("the list of this node's claims", _holder(place / LOCK, fd) if timeout else "another"))
        with contextlib.suppress(OSError):  # on a full file system: it needs a block, and is only for people
            host.pwrite(fd, f"{os.getpid()}\n".encode().ljust(16), 0)  # the kernel tells other users of no holder
        yield
    finally:
        passing.close(fd, unlocking=1)
