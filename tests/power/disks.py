"""Disks that lose power: file systems in images, behind loop devices, which the kernel shuts down as it does after an I/O error."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import shutil
import struct
import subprocess
import tempfile
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from forebay._kernel import host
from tests.items import until

KINDS = ("ext4", "xfs")
LOG_FLUSHED, NOTHING_FLUSHED = 1, 2
"""How a disk loses power: all transactions of the file system that were finished are there, without data that was not written back; or
those are lost, too, that the log has not got yet."""
_SHUTDOWN = 0x8004587D  # FS_IOC_SHUTDOWN, in C <linux/fs.h>
_NEW_NAMESPACE, _PRIVATE, _BIND = 0x20000, 0x44000, 0x1000
_WRITE_AND_WAIT = 7  # SYNC_FILE_RANGE_WAIT_BEFORE, _WRITE, _WAIT_AFTER
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER: whose parent is killed is a child of the test
_BOOT_ID = "/proc/sys/kernel/random/boot_id"


def run(*words: str | Path) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, f"{words}: {done.stderr}"


class Disk:
    """A mounted file system of its own. ``place``: the directory that it is mounted on."""

    def __init__(self, top: Path, kind: str, size: int) -> None:
        self.image, self.place, self.kind = top / f"{kind}.img", top / kind, kind
        self.place.mkdir()
        with open(self.image, "wb") as file:
            file.truncate(size)
        run(f"mkfs.{kind}", "-q", self.image)
        self.mount()

    def mount(self) -> None:
        run("mount", "-o", "loop", self.image, self.place)

    def lose_power(self, how: int) -> None:
        """From now on every call fails, and what is not on the disk is lost."""
        fd = os.open(self.place, os.O_RDONLY)
        try:
            fcntl.ioctl(fd, _SHUTDOWN, struct.pack("I", how))
        finally:
            os.close(fd)

    def restart(self, group: int) -> None:
        """Once the last process of a group that was killed is gone, with what it has mounted and open."""
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-group, 0):
                continue
        run("umount", self.place)
        # A process of another test may have the mount in a namespace of its own, and mounting would give the dead file system again.
        until(lambda: not subprocess.check_output(["losetup", "-j", self.image]), "the end of the last mount")
        self.mount()

    def files(self) -> list[Path]:
        """All that there are now."""
        return [Path(folder, name) for folder, _, names in os.walk(self.place) for name in names]

    def write_back(self, files: Iterable[Path]) -> None:
        """Write pages of files back, as the kernel does at any time and in any order; what the file system's log has stays in memory."""
        for path in files:
            with contextlib.suppress(OSError):
                fd = os.open(path, os.O_RDONLY)
                try:
                    libc.sync_file_range(fd, 0, 0, _WRITE_AND_WAIT)
                finally:
                    os.close(fd)


libc = ctypes.CDLL(None, use_errno=True)
libc.sync_file_range.argtypes = [ctypes.c_int, ctypes.c_longlong, ctypes.c_longlong, ctypes.c_uint]


def reboot() -> None:
    """Have another boot id from now on, in this process and its children."""
    name = f"/tmp/forebay-boot-id-{os.getpid()}"
    Path(name).write_text(f"{uuid.uuid4()}\n")
    _mount_here(name.encode(), _BOOT_ID.encode(), None, _BIND)
    os.unlink(name)
    host.boot_id.cache_clear()


def hide_mounts() -> None:
    """From now on this process and its children cannot see /sys."""
    _mount_here(b"tmpfs", b"/sys", b"tmpfs", 0)


def _mount_here(what: bytes, where: bytes, kind: bytes | None, flags: int) -> None:
    """A mount that other processes do not see."""
    for failed in (
        libc.unshare(_NEW_NAMESPACE),
        libc.mount(b"none", b"/", None, _PRIVATE, None),
        libc.mount(what, where, kind, flags, None),
    ):
        assert not failed, os.strerror(ctypes.get_errno())


@contextlib.contextmanager
def disk(kind: str, size: int = 400 << 20) -> Iterator[Disk]:
    """Skips where none can be mounted. Not below `tmp_path`: pytest looks through what it finds there, and a dead disk has only errors."""
    top = Path(tempfile.mkdtemp(prefix="forebay-disk-"))
    try:
        made = Disk(top, kind, size)
    except (AssertionError, FileNotFoundError) as error:
        shutil.rmtree(top)
        pytest.skip(f"a disk of kind {kind} cannot be mounted here: {error}")
    libc.prctl(_SUBREAPER, 1, 0, 0, 0)
    try:
        yield made
    finally:
        libc.prctl(_SUBREAPER, 0, 0, 0, 0)
        subprocess.run(["umount", "-l", made.place], check=True)
        shutil.rmtree(top)
