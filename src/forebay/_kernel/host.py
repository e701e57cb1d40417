"""Calls to Linux, and the only module through which files are changed.

Every call or mapped store of `_kernel` and `_engine` that changes a file goes through a function here, so each is a crash point: a test
installs a hook with `on_step`, and kills the process, or raises, before the k-th change."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import gc
import importlib
import os
import stat
import struct
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from forebay._kernel import greenlets, interrupts
from forebay._logs import logger
from forebay._model import Buffer

log = logger("forebay.kernel")
Path = str | os.PathLike[str]
Hook = Callable[[str, str], None]
T = TypeVar("T")

libc = ctypes.CDLL(None, use_errno=True)
libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
CREATE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
_FICLONE = 0x40049409
_GET_FLAGS, _SET_FLAGS, _NO_COPY = 0x80086601, 0x40086602, 0x00800000  # see ioctl_iflags(2)
_COMPRESSION = 0x04 | 0x0400  # FS_COMPR_FL, FS_NOCOMP_FL
_COPYING = frozenset(["btrfs"])
SHARING = frozenset(["xfs", "overlay"])
"""Kinds of file systems that write in place, except to blocks that a file shares with another one: see `unshare`. An overlay is as its
upper layer."""
_MAP_EXTENTS, _EXTENTS, _IS_SHARED, _UNSHARE = 0xC020660B, 64, 0x2000, 0x40  # FS_IOC_FIEMAP: see <linux/fiemap.h>
_HEADER_OF_MAP, _EXTENT = struct.Struct("=QQIIII"), struct.Struct("=40xI12x")
_IOV_MAX = 1024
_HIGH = 512
SLICE = 64 << 20
"""The most bytes that are written between two points, where others need not wait for the whole."""
_PUNCH_HOLE_KEEP_SIZE = 0x03
_FIRST_PAUSE, _LAST_PAUSE = 0.0002, 0.02  # seconds between two attempts to lock a file
_UNSUPPORTED = frozenset([errno.EOPNOTSUPP, errno.ENOSYS])
_NOT_BETWEEN_THESE = _UNSUPPORTED | {errno.EXDEV, errno.EINVAL, errno.ENOTTY, errno.EPERM, errno.ETXTBSY}
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


# ``directory``: a descriptor of the path's parent directory; only the last component of the path is looked up, in it.


def _last(path: Path, directory: int | None) -> Path:
    return path if directory is None else os.path.basename(path)


def open_fd(path: Path, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
    """`os.open`, with a descriptor that is not one of the standard streams': see `not_standard`."""
    return not_standard(os.open(path, flags | os.O_CLOEXEC, mode, dir_fd=dir_fd))


def not_standard(fd: int) -> int:
    """Return the same open file under a number above 2: in a process that was started with a closed standard stream, the kernel gives a
    new file that stream's number, and what C code then prints overwrites the file. ``fd`` must not be used any more."""
    if fd > 2 or fd < 0:
        return fd
    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
    finally:
        os.close(fd)


def create(path: Path, mode: int, *, masked: bool = False, directory: int | None = None) -> int:
    """A descriptor of a new file, which has ``mode`` whatever the umask, or, ``masked``, what the umask leaves of it.
    Raises FileExistsError."""
    step("create", path)
    fd = open_fd(_last(path, directory), CREATE, mode, dir_fd=directory)
    return fd if masked else with_mode(fd, mode)


def with_mode(fd: int, mode: int) -> int:
    """The descriptor of a new file, which gets ``mode`` where the umask may have left less of it."""
    if mode & 0o077:
        try:
            chmod(fd, mode)
        except BaseException:
            os.close(fd)
            raise
    return fd


def create_unnamed(directory: Path, mode: int) -> int:
    """Return a descriptor of a new, unnamed file. It disappears with the descriptor unless `give_name` names it."""
    step("create_unnamed", directory)
    return open_fd(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, mode)


def give_name(fd: int, path: str | os.PathLike[str]) -> None:
    """The first name of an unnamed file. Raises FileExistsError."""
    step("link", path)
    with _needs_proc():
        os.link(f"/proc/self/fd/{fd}", path, src_dir_fd=fd, follow_symlinks=True)  # with a directory, or Python would not follow


def open_write(path: Path, directory: int | None = None) -> int:
    """A descriptor to change a file that is there. Symbolic links are not followed."""
    return open_fd(_last(path, directory), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=directory)


def out_of_the_way(fd: int) -> int:
    """Return the same open file under a high descriptor number, if one is free: a job that closes all descriptors and opens others gets
    low numbers first, so later writes here do not go into its files. ``fd`` must not be used any more."""
    try:
        high = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _HIGH)
    except OSError:
        return fd  # the process may not have so many
    os.close(fd)
    return high


def pwrite(fd: int, data: Buffer, offset: int) -> None:
    """Write all of ``data`` at ``offset``."""
    step("pwrite", fd)
    view = memoryview(data).cast("B")
    while view:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written


def pwritev(fd: int, parts: Sequence[Buffer], length: int, offset: int) -> None:
    """Write all of ``parts``, one behind the other, ``length`` bytes together, at ``offset``."""
    if _hook is not None:
        _hook("pwrite", str(fd))
    written = os.pwritev(fd, parts, offset) if len(parts) <= _IOV_MAX else 0
    if written < length:  # cut short by a signal, or by a full disk, which the next write reports
        rest = memoryview(b"".join(parts))[written:]
        while rest:
            count = os.pwrite(fd, rest, offset + written)
            rest, written = rest[count:], written + count


def flock(fd: int, kind: int) -> None:
    """Wait for a lock of the open file, ``LOCK_SH`` or ``LOCK_EX`` of `fcntl`, in turns with points. Released when the process dies."""
    pause = _FIRST_PAUSE
    for turn in interrupts.turns():
        try:
            fcntl.flock(fd, kind | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            greenlets.sleep(min(pause, turn))
            pause = min(pause * 2, _LAST_PAUSE)


def allocate(fd: int, offset: int, length: int) -> None:
    """Have the blocks of this range, so that a later store or write finds them. Raises OSError ENOSPC; the file may then have grown."""
    if length <= 0:
        return
    step("allocate", fd)
    try:
        os.posix_fallocate(fd, offset, length)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        # Not ftruncate: on a full disk, a store into a hole of a mapping kills the process.
        _write_zeros(fd, max(offset, os.fstat(fd).st_size), offset + length)


def _write_zeros(fd: int, start: int, end: int) -> None:
    zeros = memoryview(bytes(min(1 << 20, max(0, end - start))))
    while start < end:
        start += os.pwrite(fd, zeros[: end - start], start)


def punch(fd: int, offset: int, length: int) -> None:
    """Free the blocks of this range, where the file system can; the size stays, and the range reads as zeros."""
    step("punch", fd)
    while libc.fallocate(fd, _PUNCH_HOLE_KEEP_SIZE, offset, length):
        code = ctypes.get_errno()
        if code in _UNSUPPORTED:
            return
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))


def truncate(fd: int, length: int) -> None:
    """Set the size. Never shorten a file that any process may have mapped: reading the lost part kills that process."""
    step("truncate", fd)
    os.ftruncate(fd, length)


def store_in_place(fd: int, wanted: bool = True) -> None:
    """Where the file system copies blocks that are written to, have it write those of a new, empty file in place: else a store into a
    mapping needs a new block, and kills the process on a full disk. Of a directory: of the files that are made in it. With ``wanted``
    False those are written as is usual there. Raises OSError where the file system cannot."""
    if fs_kind(fd) not in _COPYING:
        return
    flags = _flags_of(fd)
    changed = flags & ~_COMPRESSION | _NO_COPY if wanted else flags & ~_NO_COPY
    if flags != changed:
        step("store_in_place", fd)
        if wanted and flags & _COMPRESSION:  # of a directory whose files are compressed, or never are: btrfs refuses both at once
            fcntl.ioctl(fd, _SET_FLAGS, (flags & ~_COMPRESSION).to_bytes(8, "little"))
        fcntl.ioctl(fd, _SET_FLAGS, changed.to_bytes(8, "little"))
        if _flags_of(fd) & _NO_COPY != changed & _NO_COPY:
            raise OSError(errno.EOPNOTSUPP, "the file system does not switch copy-on-write off")


def _flags_of(fd: int) -> int:
    return int.from_bytes(fcntl.ioctl(fd, _GET_FLAGS, bytes(8))[:4], "little")


def stores_in_place(directory: int) -> bool:
    """Whether blocks of the files that are made in this directory are written in place: see `store_in_place`."""
    return fs_kind(directory) not in _COPYING or bool(_flags_of(directory) & _NO_COPY)


def shares_blocks(fd: int) -> bool:
    """Whether a file shares blocks with another one, looking at its first `_EXTENTS` extents. False where the file system cannot tell."""
    found = bytearray(_HEADER_OF_MAP.size + _EXTENTS * _EXTENT.size)
    _HEADER_OF_MAP.pack_into(found, 0, 0, 1 << 62, 0, 0, _EXTENTS, 0)  # from byte 0 on, so many extents at most
    try:
        fcntl.ioctl(fd, _MAP_EXTENTS, found)
    except OSError:
        return False
    return any(flags & _IS_SHARED for (flags,) in _EXTENT.iter_unpack(found[_HEADER_OF_MAP.size :]))


def unshare(fd: int) -> None:
    """Give a file blocks of its own in place of those that it shares with other files, where the file system can: a store into a mapping
    of a shared block needs a new one, and kills the process on a full disk. Processes may have the file mapped. Raises OSError ENOSPC;
    then it may still share some."""
    size = os.fstat(fd).st_size
    for start in range(0, size, SLICE):
        step("unshare", fd)
        while libc.fallocate(fd, _UNSHARE, start, min(SLICE, size - start)):
            code = ctypes.get_errno()
            if code in _UNSUPPORTED:
                return
            if code != errno.EINTR:
                raise OSError(code, os.strerror(code))
        interrupts.point()


def sync(fd: int) -> None:
    """Have on the disk what was written to a file, so that it is there after a power cut too."""
    step("sync", fd)
    os.fsync(fd)


def rename(old: Path, new: Path, old_directory: int | None = None, new_directory: int | None = None) -> None:
    """Move a name; a file that has the new one is replaced in the same instant."""
    step("rename", old)
    os.rename(_last(old, old_directory), _last(new, new_directory), src_dir_fd=old_directory, dst_dir_fd=new_directory)


def link(old: str | Path, new: str | Path, old_directory: int | None = None, new_directory: int | None = None) -> None:
    """A second name. Raises FileExistsError; a symbolic link is linked, not followed."""
    step("link", new)
    os.link(_last(old, old_directory), _last(new, new_directory), src_dir_fd=old_directory, dst_dir_fd=new_directory, follow_symlinks=False)


def unlink(path: str | Path, directory: int | None = None) -> bool:
    """Remove a name; False if it was missing. With ``directory`` only the last name of ``path`` counts, not what leads to it."""
    step("unlink", path)
    try:
        os.unlink(_last(path, directory), dir_fd=directory)
    except FileNotFoundError:
        return False
    return True


def mkdir(path: str | Path, mode: int, directory: int | None = None) -> bool:
    """Make a directory, with what the umask leaves of ``mode``; False if the name is taken."""
    step("mkdir", path)
    try:
        os.mkdir(_last(path, directory), mode, dir_fd=directory)
    except FileExistsError:
        return False
    return True


def rmdir(path: Path, directory: int | None = None) -> None:
    """Remove an empty directory."""
    step("rmdir", path)
    os.rmdir(_last(path, directory), dir_fd=directory)


def chmod(path: Path | int, mode: int, directory: int | None = None) -> None:
    """Set the mode of what a descriptor (of ``O_PATH`` too) or a path names. Raises OSError for a symbolic link: none is followed."""
    step("chmod", path)
    if isinstance(path, int):
        with _needs_proc():
            os.chmod(f"/proc/self/fd/{path}", mode)  # os.fchmod takes none of O_PATH
        return
    # os.chmod follows links, and on Linux cannot do else.
    fd = open_fd(_last(path, directory), os.O_PATH | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=directory)
    try:
        with _needs_proc():
            os.chmod(f"/proc/self/fd/{fd}", mode)
    finally:
        os.close(fd)


def clone(source: int, target: int) -> bool:
    """Share all blocks of ``source`` with ``target`` where the file system can; False where it cannot."""
    step("clone", target)
    try:
        fcntl.ioctl(target, _FICLONE, source)
    except OSError as error:
        if error.errno in _NOT_BETWEEN_THESE:
            return False
        raise
    return True


def copy_range(source: int, target: int, start: int, length: int, at: int | None = None) -> int:
    """Copy bytes to another file inside the kernel, to the offset ``at`` (default: the same). Returns how many; 0 if the kernel cannot copy
    between these two."""
    step("copy_range", target)
    try:
        return os.copy_file_range(source, target, length, start, start if at is None else at)
    except OSError as error:
        if error.errno in _NOT_BETWEEN_THESE:
            return 0
        raise


def set_mtime(fd: int, ns: int) -> None:
    """Set when a file was last changed, in nanoseconds since 1970."""
    step("set_mtime", fd)
    os.utime(fd, ns=(time.time_ns(), ns))


def set_word(words: memoryview, index: int, value: int) -> None:
    """Store one aligned 8-byte word of a mapping; readers never see half of it."""
    step("set_word", index)
    words[index] = value


def set_byte(view: memoryview, index: int, value: int) -> None:
    """Store one byte of a mapping."""
    step("set_byte", index)
    view[index] = value


def set_bytes(view: memoryview, start: int, data: bytes) -> None:
    """Store bytes of a mapping; readers may see a part of them."""
    step("set_bytes", start)
    view[start : start + len(data)] = data


def never_free(thing: object) -> None:
    """Let an object live as long as the process, and not be finalized at its end either."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


# -- facts -------------------------------------------------------------------------------------------------------------


@functools.cache
def boot_id() -> str:
    """Changes with every boot of the machine."""
    with _needs_proc(), open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


class _needs_proc:
    """Around the use of a path below /proc. Without /proc it would fail as if a file of a cache had been deleted.

    A class, since a generator takes thrice as long."""

    def __enter__(self) -> None:
        """Nothing is to be done."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if isinstance(error, FileNotFoundError) and not os.path.exists("/proc/sys/kernel/random/boot_id"):
            raise OSError(errno.ENOSYS, "/proc is not mounted, or incomplete: Forebay needs it to create files") from error


def mount_number(path: Path) -> int:
    """A number that the file system of a disk gets anew at each mount; the same for its bind mounts, and in all containers. 0 where it
    cannot be seen: on an overlay, on file systems without one device, without /sys."""
    device = os.stat(path).st_dev
    try:
        name = os.path.basename(os.readlink(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}"))
        return os.stat(f"/sys/fs/{fs_kind(path)}/{name}").st_ino
    except OSError:
        return 0


def read_small(path: Path, largest: int, directory: int | None = None) -> bytes | None:
    """Return the whole content of a file; None if it is not a plain file, or has more than ``largest`` bytes. Raises OSError. Never
    blocks, and follows no symbolic link."""
    fd = open_fd(_last(path, directory), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=directory)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_size > largest:
            return None
        return os.pread(fd, largest, 0)
    finally:
        os.close(fd)


UNCOUNTED = 1 << 62


class Disk(NamedTuple):
    """A file system, in bytes. ``block``: its allocation unit; ``free``: bytes available to this user.

    ``inodes_free``: `UNCOUNTED` where the file system has as many as it has room for."""

    block: int
    total: int
    free: int
    inodes_free: int


def disk(path: Path) -> Disk:
    """The capacity of the file system that holds ``path``."""
    status = os.statvfs(path)
    inodes = status.f_favail if status.f_files else UNCOUNTED
    return Disk(status.f_frsize, status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize, inodes)


def free_bytes(path: Path) -> int:
    """The bytes available to this user on the file system that holds ``path``: `Disk.free`."""
    return disk(path).free


_KINDS = {
    0xEF53: "ext4", 0x58465342: "xfs", 0x01021994: "tmpfs", 0x9123683E: "btrfs", 0x794C7630: "overlay", 0xF2F52010: "f2fs",
    0x2FC12FC1: "zfs", 0xCA451A4E: "bcachefs", 0x858458F6: "ramfs", 0x6969: "nfs", 0xFF534D42: "cifs", 0xFE534D42: "smb2", 0x517B: "smb",
    0x0BD00BD0: "lustre", 0x47504653: "gpfs", 0x00C36400: "ceph", 0x65735546: "fuse", 0x01021997: "9p", 0x5346414F: "afs",
    0x01161970: "gfs2", 0x7461636F: "ocfs2", 0x19830326: "beegfs", 0xAAD7AAEA: "panfs", 0x20030528: "orangefs", 0x73757245: "coda",
    0x786F4256: "vboxsf", 0xBACBACBC: "vmhgfs", 0x6A656A63: "fakeowner", 0x7C7C6673: "prl_fs",
}  # fmt: skip
NETWORK_KINDS = frozenset(
    [
        "nfs", "cifs", "smb2", "smb", "lustre", "gpfs", "ceph", "fuse", "9p", "afs", "gfs2", "ocfs2", "beegfs", "panfs", "orangefs",
        "coda", "vboxsf", "vmhgfs", "fakeowner", "prl_fs", "virtiofs",
    ]
)  # fmt: skip
"""File systems whose locks or mappings other machines, or the host, may not share."""


def fs_kind(path: Path | int) -> str:
    """The kind of the file system that holds what a path or a descriptor names, such as ``ext4`` or ``nfs``; its magic number in hex if
    unknown.

    virtiofs reports itself as ``fuse``."""
    buffer = (ctypes.c_long * 32)()
    if libc.fstatfs(path, buffer) if isinstance(path, int) else libc.statfs(os.fsencode(path), buffer):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), path)
    magic = buffer[0] & 0xFFFFFFFF
    return _KINDS.get(magic, f"{magic:#x}")


def is_local(kind: str) -> bool:
    """Whether locks and mappings there are shared by all processes of this machine and by no other."""
    return kind not in NETWORK_KINDS


# -- forks -------------------------------------------------------------------------------------------------------------


class Inherited(Protocol):
    """A listener for forks. Its methods are called in the forking thread; what they raise is logged."""

    def after_fork_child(self) -> None: ...


class Forking(Inherited, Protocol):
    """A listener that has something to do before the fork and in the parent, too."""

    def before_fork(self) -> None: ...
    def after_fork_parent(self) -> None: ...


_LONGEST_IMPORT = 5.0  # seconds that a fork waits for what other threads import
_left = set[str]()  # names of modules that took longer
_listeners: list[weakref.ref[Inherited]] = []  # in order of registration
_hooked_pid = os.getpid()


class _Fork(threading.local):
    """The fork that this thread is about: its listeners, alive until it is over. None: there is none that we know of."""

    listeners: list[Inherited] | None = None
    shield: interrupts.shielded | None = None


_fork = _Fork()


def at_fork(listener: Inherited) -> None:
    """Call ``listener``, as long as it is alive, at each fork: listeners are called in reverse order of registration before the fork,
    and in order of registration after it. One that is registered while another thread forks is called in the child only."""
    _listeners.append(weakref.ref(listener, _listeners.remove))


class _Uncopied:
    """See `uncopied`."""

    def __init__(self) -> None:
        self._changed = threading.Condition()  # guards the others
        self._depths: dict[int, int] = {}  # of the threads that are in such a block
        self._forking = set[int]()  # threads

    def __enter__(self) -> None:
        me = threading.get_ident()
        with self._changed:
            while me not in self._depths and self._forking - {me}:
                self._changed.wait()
            self._depths[me] = self._depths.get(me, 0) + 1

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        me = threading.get_ident()
        with self._changed:
            self._depths[me] -= 1
            if not self._depths[me]:
                del self._depths[me]
                self._changed.notify_all()

    def before_fork(self) -> None:
        me = threading.get_ident()
        with self._changed:
            self._forking.add(me)
            while self._depths.keys() - {me}:
                self._changed.wait()

    def after_fork_parent(self) -> None:
        with self._changed:
            self._forking.discard(threading.get_ident())
            self._changed.notify_all()

    def after_fork_child(self) -> None:
        me = threading.get_ident()
        self._changed, self._forking = threading.Condition(), set()
        self._depths = {thread: depth for thread, depth in self._depths.items() if thread == me}


uncopied = _Uncopied()
"""``with uncopied:``: a fork by another thread waits for the end of this block, and whoever begins one during a fork, for the fork. Such
blocks do not wait for one another, and may be nested. One may begin under any other lock; no lock that a fork takes may be taken in one.
Two threads that both fork inside such blocks wait for each other for ever."""
greenlets.when_patched(uncopied.after_fork_child)
at_fork(uncopied)  # the first: it waits last, when the fork has all other locks


def forked_unseen() -> bool:
    """Whether this process, or one it descends from, was forked by C code, which runs no hooks: Forebay's state must not be used then."""
    return _hooked_pid != os.getpid()


def notify(call: str, listeners: Iterable[Inherited]) -> None:
    """Call the hook ``call`` of each listener that has it."""
    for listener in listeners:
        try:
            hook = getattr(listener, call, None)
            if hook is not None:
                hook()
        except BaseException:  # a Ctrl-C too: what is left would go on with its parent's state, and Python ignores what a hook raises
            log.exception("%s of %r failed", call, listener)


@interrupts.ignored
def _before() -> None:
    if _fork.shield is not None:
        return
    shield = interrupts.shielded()
    shield.__enter__()
    _fork.shield = shield
    collects = gc.isenabled()
    try:
        gc.disable()  # a collection in the middle of the copy may shorten the list, and CPython 3.11 then copies what is freed
        listeners = tuple(_listeners)
    finally:
        if collects:
            gc.enable()
    # A process that C forked has its parent's connections and locks: it must not close them in `before_fork`.
    _fork.listeners = None if forked_unseen() else [alive for known in listeners if (alive := known()) is not None]
    with _without_the_lock_of_logging():
        notify("before_fork", reversed(_fork.listeners or ()))
        _end_imports()


@contextlib.contextmanager
def _without_the_lock_of_logging() -> Iterator[None]:
    """Where `logging` was imported after this module, its hook has run by now, and holds a lock of its own.

    T1 has a lock that a fork takes / T2 forks: it takes that of `logging`, and waits for T1 / T1 logs, and waits for T2."""
    lock = getattr(sys.modules.get("logging"), "_lock", None)
    if lock is None or not lock._is_owned():
        yield
        return
    held = lock._release_save()
    try:
        yield
    finally:
        lock._acquire_restore(held)


def _end_imports() -> None:
    """Wait for the threads that import a module: the child, which does not have them, would wait for them for ever when it imports that
    module. A module that takes longer is waited for once."""
    own, until = threading.get_ident(), time.monotonic() + _LONGEST_IMPORT
    while True:
        # CPython has no public name for the locks of modules. One exists while a thread imports its module, or waits for it.
        locks = [(name, known()) for name, known in list(importlib._bootstrap._module_locks.items())]  # type: ignore[attr-defined]
        under_way = {name for name, lock in locks if getattr(lock, "owner", None) not in (None, own)} - _left
        if not under_way:
            return
        if time.monotonic() > until:
            _left.update(under_way)
            log.info("a fork did not wait any longer for the import of %s: a child that imports it may hang", ", ".join(under_way))
            return
        greenlets.sleep(0.001)


@interrupts.ignored
def _after_parent() -> None:
    prepared, _fork.listeners = _fork.listeners, None
    notify("after_fork_parent", prepared or ())
    _end_shield()


@interrupts.ignored
def _after_child() -> None:
    global _hooked_pid
    prepared, _fork.listeners = _fork.listeners, None
    interrupts.after_fork_child()
    if prepared is not None:
        _hooked_pid = os.getpid()
        # T1 is about to fork / T2 registers another one, and takes its lock / T1 forks: the child, which has no T2, makes its locks anew.
        known = set(map(id, prepared))
        late = [alive for reference in list(_listeners) if (alive := reference()) is not None and id(alive) not in known]
        notify("after_fork_child", (*prepared, *late))
    _end_shield()


def _end_shield() -> None:
    shield, _fork.shield = _fork.shield, None
    if shield is not None:
        shield.__exit__(None, None, None)


class cached_property(Generic[T]):
    """As that of functools, without the lock that Python 3.11 holds for all instances while it computes: a child that was forked
    meanwhile would wait for it for ever. Two threads may compute the value; both get the same one."""

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self._compute, self.__doc__ = compute, compute.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type | None = None) -> T:
        if instance is None:
            return self  # type: ignore[return-value]
        value: T = instance.__dict__.setdefault(self._name, self._compute(instance))
        return value


os.register_at_fork(before=_before, after_in_parent=_after_parent, after_in_child=_after_child)
os.register_at_fork(before=_before)  # a handler that raises before the first one has its shield ends it, and Python ignores that
