"""Where the adapter for PFIO keeps what it was told to keep in a directory of the user's: one root a cache, gone with it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator

from forebay import errors
from forebay._kernel import host
from forebay._kernel.locks import LockFile
from forebay._logs import logger
from forebay.cache import Cache

log = logger("forebay.pfio")
UNLIMITED = 1 << 60
_NAME = re.compile(r"forebay-[0-9a-f]{16}")
_GONE = re.compile(_NAME.pattern + r"\.gone")


def default_dir() -> str:
    """Where PFIO itself would keep its files."""
    return os.path.join(os.getenv("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "pfio")


def check_local(directory: str) -> None:
    """Raise `ConfigError` (a ValueError) where a cache cannot lie."""
    kind = host.fs_kind(directory)
    if not host.is_local(kind):
        message = f"dir={directory!r} lies on a file system of kind {kind}, which cannot hold a cache: choose a local disk"
        raise errors.ConfigError(message, name="dir", value=directory)


def open_private(directory: str) -> Cache:
    """A new root in ``directory``, for one cache. What processes that were killed left there is removed."""
    os.makedirs(directory, exist_ok=True)
    check_local(directory)
    with _standing(directory) as left:
        cache = Cache(os.path.join(directory, f"forebay-{secrets.token_hex(8)}"), budget=UNLIMITED, min_free=0)
    for path in left:
        remove_private(path)
    return cache


def reopen_private(path: str) -> Cache:
    """The root that another process made with `open_private`."""
    return Cache(path, budget=UNLIMITED, min_free=0)


def publish(staged: str, target: str, overwrite: bool) -> bool:
    """Let a file that is whole have the name ``target``, at once; False if that is taken, unless ``overwrite``. Raises OSError."""
    if overwrite:
        os.replace(staged, target)
        return True
    try:
        os.link(staged, target)
    except FileExistsError:
        return False
    return True


def link(source: str, target: str, overwrite: bool) -> bool:
    """Give a preserved file one name more. See `publish`."""
    if os.path.exists(target) and os.path.samefile(source, target):
        return overwrite  # it has it; to replace it by itself would leave it both names
    if not overwrite:
        return publish(source, target, overwrite)
    spare = f"{target}.forebay-{secrets.token_hex(8)}"
    os.link(source, spare)
    try:
        return publish(spare, target, overwrite)
    except BaseException:
        os.unlink(spare)
        raise


def remove_private(path: str) -> None:
    """Remove a root with all that is in it; if others write to it meanwhile, what they make too."""
    for _ in range(10):
        shutil.rmtree(path, ignore_errors=True)
        if not os.path.lexists(path):
            return
    log.warning("%s could not be removed", path)


@contextlib.contextmanager
def _standing(directory: str) -> Iterator[list[str]]:
    """Hold off those who clean up, while a root is made that nobody has open yet; gives what nobody has open any more.

    The directory's own lock is shared by those who make roots: who has it alone knows that no root is half made."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        left = _left_by_the_dead(directory) if _alone(fd) else []
        fcntl.flock(fd, fcntl.LOCK_SH)
        yield left
    finally:
        fcntl.flock(fd, fcntl.LOCK_UN)  # closing is not enough: a child that was forked meanwhile has the descriptor too
        os.close(fd)


def _alone(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _left_by_the_dead(directory: str) -> list[str]:
    """The roots here that nobody has open. Each gets a name that nobody opens. Caller: has the directory's lock alone."""
    left = []
    for name in os.listdir(directory):
        path = os.path.join(directory, name)
        if _GONE.fullmatch(name):
            left.append(path)  # whoever was to remove it did not come so far
        elif _NAME.fullmatch(name) and _is_deserted(path):
            left.append(f"{path}.gone")
            os.rename(path, left[-1])
    return left


def _is_deserted(path: str) -> bool:
    """Whether a root of ours is open in no process: each holds a lock on its FORMAT. Without one, its making was not finished."""
    found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        return False
    lock = LockFile(os.path.join(path, "FORMAT"))
    try:
        return lock.try_lock(0, exclusive=True)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    finally:
        lock.close()
