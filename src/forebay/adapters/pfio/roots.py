"""The roots of PFIO caches with ``dir=``: a private root for each cache, removed with it."""

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
    """The directory in which PFIO itself would keep its files."""
    return os.path.join(os.getenv("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "pfio")


def check_local(directory: str) -> None:
    """Raises `ConfigError` (a ValueError) for a directory that cannot hold a cache."""
    kind = host.fs_kind(directory)
    if not host.is_local(kind):
        message = f"dir={directory!r} lies on a file system of kind {kind}, which cannot hold a cache: choose a local disk"
        raise errors.ConfigError(message, name="dir", value=directory)


def open_private(directory: str) -> Cache:
    """A new root in ``directory``, for one cache. Removes the roots of processes that were killed."""
    os.makedirs(directory, exist_ok=True)
    check_local(directory)
    with _creating_root(directory) as abandoned:
        cache = Cache(os.path.join(directory, f"forebay-{secrets.token_hex(8)}"), budget=UNLIMITED, min_free=0)
    for path in abandoned:
        remove_private(path)
    return cache


def reopen_private(path: str) -> Cache:
    """The root that another process created with `open_private`."""
    return Cache(path, budget=UNLIMITED, min_free=0)


def publish(staged: str, target: str, overwrite: bool) -> bool:
    """Give a complete file the name ``target``, atomically; False if the name is taken, unless ``overwrite``. Raises OSError."""
    if overwrite:
        os.replace(staged, target)
        return True
    try:
        os.link(staged, target)
    except FileExistsError:
        return False
    return True


def link(source: str, target: str, overwrite: bool) -> bool:
    """Give a preserved file another name. See `publish`."""
    if os.path.exists(target) and os.path.samefile(source, target):
        return overwrite  # renaming a second link over the first would leave both names
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
    """Remove a root with its contents, also if other processes write to it meanwhile."""
    for _ in range(10):
        shutil.rmtree(path, ignore_errors=True)
        if not os.path.lexists(path):
            return
    log.warning("%s could not be removed", path)


@contextlib.contextmanager
def _creating_root(directory: str) -> Iterator[list[str]]:
    """Keep other processes from cleaning up while a root is created that nothing has open yet; give the roots that nothing has open.

    Processes that create roots share the directory's lock: a process that holds it alone knows that no root is half created."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        abandoned = _abandoned_in(directory) if _try_exclusive(fd) else []
        fcntl.flock(fd, fcntl.LOCK_SH)
        yield abandoned
    finally:
        fcntl.flock(fd, fcntl.LOCK_UN)  # closing is not enough: a child that was forked meanwhile has the descriptor too
        os.close(fd)


def _try_exclusive(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _abandoned_in(directory: str) -> list[str]:
    """The roots here that no process has open, each renamed so that none opens it. Caller: holds the directory's lock alone."""
    abandoned = []
    for name in os.listdir(directory):
        path = os.path.join(directory, name)
        if _GONE.fullmatch(name):
            abandoned.append(path)  # the process that was to remove it ended before
        elif _NAME.fullmatch(name) and _is_abandoned(path):
            with contextlib.suppress(FileNotFoundError):
                os.rename(path, f"{path}.gone")
                abandoned.append(f"{path}.gone")
    return abandoned


def _is_abandoned(path: str) -> bool:
    """Whether a root of this user is open in no process: each holds a lock on its FORMAT file, which a half created root lacks."""
    try:
        status = os.lstat(path)
    except FileNotFoundError:  # P1 lists it / P2 closes its cache, which removes it / P1 looks
        return False
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
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
