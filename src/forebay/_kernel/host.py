"""What we ask of Linux, and the one place from which files are changed.

Every call or mapped store of `_kernel` and `_engine` that changes a file goes through a function here, so that each is a crash
point: a test installs a hook with `on_step` and kills the process, or raises, before the k-th change.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import functools
import logging
import os
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from forebay._model import Buffer

log = logging.getLogger("forebay.kernel")
Path = str | os.PathLike[str]
Hook = Callable[[str, str], None]

libc = ctypes.CDLL(None, use_errno=True)
_FICLONE = 0x40049409
_PUNCH_HOLE_KEEP_SIZE = 0x03
_hook: Hook | None = None


def on_step(hook: Hook | None) -> None:
    """Call ``hook(call, subject)`` before each change of a file. It may kill the process, or raise what the disk could raise."""
    global _hook
    _hook = hook


def step(call: str, subject: object) -> None:
    """A crash point."""
    if _hook is not None:
        _hook(call, str(subject))


# -- changes -----------------------------------------------------------------------------------------------------------


def create(path: Path, mode: int) -> int:
    """A descriptor of a new file. Raises FileExistsError."""
    step("create", path)
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, mode)


def open_write(path: Path) -> int:
    """A descriptor to change a file that is there. Symbolic links are not followed."""
    return os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)


def pwrite(fd: int, data: Buffer, offset: int) -> None:
    """Write all of ``data`` at ``offset``."""
    step("pwrite", fd)
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written


def allocate(fd: int, offset: int, length: int) -> None:
    """Have the blocks of this range, so that a later store or write finds them. Raises OSError ENOSPC."""
    step("allocate", fd)
    if length <= 0:
        return
    try:
        os.posix_fallocate(fd, offset, length)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise
        os.ftruncate(fd, max(os.fstat(fd).st_size, offset + length))


def punch(fd: int, offset: int, length: int) -> None:
    """Give the blocks of this range back; the size stays, the range reads as zeros."""
    step("punch", fd)
    fallocate = libc.fallocate
    fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    if fallocate(fd, _PUNCH_HOLE_KEEP_SIZE, offset, length):
        code = ctypes.get_errno()
        if code != errno.EOPNOTSUPP:
            raise OSError(code, os.strerror(code))


def truncate(fd: int, length: int) -> None:
    step("truncate", fd)
    os.ftruncate(fd, length)


def rename(old: Path, new: Path) -> None:
    step("rename", old)
    os.rename(old, new)


def link(old: Path, new: Path) -> None:
    """A second name. Raises FileExistsError; a symbolic link is linked, not followed."""
    step("link", new)
    os.link(old, new, follow_symlinks=False)


def unlink(path: Path) -> bool:
    """Remove a name; False if it was missing."""
    step("unlink", path)
    try:
        os.unlink(path)
    except FileNotFoundError:
        return False
    return True


def mkdir(path: Path, mode: int) -> bool:
    """Make a directory; False if it was there."""
    step("mkdir", path)
    try:
        os.mkdir(path, mode)
    except FileExistsError:
        return False
    return True


def rmdir(path: Path) -> None:
    step("rmdir", path)
    os.rmdir(path)


def chmod(path: Path | int, mode: int) -> None:
    step("chmod", path)
    os.chmod(path, mode)


def clone(source: int, target: int) -> bool:
    """Share all blocks of ``source`` with ``target`` where the file system can; False where it cannot."""
    step("clone", target)
    try:
        fcntl.ioctl(target, _FICLONE, source)
    except OSError as error:
        if error.errno in (errno.EOPNOTSUPP, errno.EXDEV, errno.EINVAL, errno.ENOTTY, errno.ENOSYS):
            return False
        raise
    return True


def copy_range(source: int, target: int, source_offset: int, target_offset: int, count: int) -> int:
    """Copy up to ``count`` bytes inside the kernel; gives how many."""
    step("copy_range", target)
    return os.copy_file_range(source, target, count, source_offset, target_offset)


def set_word(words: memoryview, index: int, value: int) -> None:
    """Store one aligned 8-byte word of a mapping: it cannot be seen torn."""
    step("set_word", index)
    words[index] = value


def set_byte(view: memoryview, index: int, value: int) -> None:
    """Store one byte of a mapping."""
    step("set_byte", index)
    view[index] = value


# -- facts -------------------------------------------------------------------------------------------------------------

now_ns = time.time_ns


@functools.cache
def boot_id() -> str:
    """Changes with every boot of the machine."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


def process_start(pid: int) -> float | None:
    """When a process started, in seconds since 1970; None if there is none."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            ticks = int(file.read().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None
    since_boot = ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + since_boot


@dataclass(frozen=True, slots=True)
class Disk:
    """A file system, in bytes. ``block``: the unit in which it gives room; ``free``: what we may have of it."""

    block: int
    total: int
    free: int
    inodes_free: int


def disk(path: Path) -> Disk:
    found = os.statvfs(path)
    return Disk(found.f_frsize, found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize, found.f_favail)


_KINDS = {
    0xEF53: "ext4", 0x58465342: "xfs", 0x01021994: "tmpfs", 0x9123683E: "btrfs", 0x794C7630: "overlay", 0xF2F52010: "f2fs",
    0x2FC12FC1: "zfs",
    0xCA451A4E: "bcachefs", 0x858458F6: "ramfs", 0x6969: "nfs", 0xFF534D42: "cifs", 0xFE534D42: "smb2", 0x517B: "smb", 0x0BD00BD0: "lustre",
    0x47504653: "gpfs", 0x00C36400: "ceph", 0x65735546: "fuse", 0x01021997: "9p", 0x5346414F: "afs",
    0x01161970: "gfs2", 0x7461636F: "ocfs2",
    0x19830326: "beegfs", 0xAAD7AAEA: "panfs", 0x6A656A63: "virtiofs",
}  # fmt: skip
NETWORK_KINDS = frozenset(
    ["nfs", "cifs", "smb2", "smb", "lustre", "gpfs", "ceph", "fuse", "9p", "afs", "gfs2", "ocfs2", "beegfs", "panfs", "virtiofs"]
)
"""File systems whose locks or mappings other machines, or the host, may not share."""


def fs_kind(path: Path) -> str:
    """The kind of file system that ``path`` lies on, such as ``ext4`` or ``nfs``; its magic number in hex if it is not known."""
    buffer = (ctypes.c_long * 32)()
    if libc.statfs(os.fsencode(path), buffer):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), os.fspath(path))
    magic = buffer[0] & 0xFFFFFFFF
    return _KINDS.get(magic, f"{magic:#x}")


def is_local(kind: str) -> bool:
    """Whether locks and mappings there are shared by all processes of this machine and by no other."""
    return kind not in NETWORK_KINDS


# -- forks -------------------------------------------------------------------------------------------------------------


class Forking(Protocol):
    """What is told of forks. Called in the forking thread; what raises is logged."""

    def before_fork(self) -> None: ...
    def after_fork_parent(self) -> None: ...
    def after_fork_child(self) -> None: ...


_listeners: dict[int, weakref.ref[Forking]] = {}
_number = 0
_hooked_pid = os.getpid()


def at_fork(listener: Forking) -> None:
    """Tell ``listener``, as long as it lives, of each fork: the last to register is the first told before, and the last after."""
    global _number
    _number += 1
    number = _number
    _listeners[number] = weakref.ref(listener, lambda _: _listeners.pop(number, None))


def forked_unseen() -> bool:
    """Whether this process was forked by C code, which runs no hook of Python's: then nothing of ours may be used."""
    return _hooked_pid != os.getpid()


def _tell(call: str, order: list[int]) -> None:
    for number in order:
        reference = _listeners.get(number)
        listener = reference() if reference is not None else None
        if listener is None:
            continue
        try:
            getattr(listener, call)()
        except Exception:
            log.exception("%s of %r failed", call, listener)


_told: list[int] = []  # of the fork that is under way: another thread may register meanwhile, and is told of the next one


def _before() -> None:
    _told[:] = sorted(_listeners, reverse=True)
    _tell("before_fork", _told)


def _after_parent() -> None:
    _tell("after_fork_parent", _told[::-1])


def _after_child() -> None:
    global _hooked_pid
    _hooked_pid = os.getpid()
    _tell("after_fork_child", _told[::-1])


os.register_at_fork(before=_before, after_in_parent=_after_parent, after_in_child=_after_child)
