"""The layout of a root: paths, names and modes. And where errors of the disk become faults of the cache, which calls survive."""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import xxhash

from forebay import errors
from forebay._kernel import host
from forebay._kernel.below import Below, TopReplaced
from forebay._model import Buffer

VERSION = 3
"""Of all that a root has: it rises with each change of the catalog's format, or of another file's."""
HEAD_MAGIC = b"FBHEAD02"
LONGEST_FORMAT = 4096
PAGE = 4096
"""Bytes of a memory page, of a page of the catalog, and of the steps in which files are laid out."""
ROW = 256
"""What a small value costs beside its bytes."""
LEASE_FILES = 64
LOCKS = ("keys", "writer", "owners", "transfers", *(f"leases-{n:02d}" for n in range(LEASE_FILES)))
FANS = tuple(f"{n:02x}" for n in range(256))

_NUMBER = r"([0-3][0-9a-f]{15})"  # 62 bits: what a row and a lock can have
_BLOB = rf"{_NUMBER}([A-Za-z0-9.]{{0,16}})"
_SUFFIX = r"[A-Za-z0-9.]{0,16}"
_TMP = rf"{_NUMBER}-{_NUMBER}(|\.map|\.old|\.tree|\.pack)"
_SCRAP = r"new-[0-9a-f]{16}"


class BlobName(NamedTuple):
    """The parts of the name of a file under ``blobs/``."""

    id: int
    suffix: str


class TmpName(NamedTuple):
    """The parts of a name under ``tmp/``. ``suffix``: ``""`` (the bytes), ``.map``, ``.old`` (of another user), ``.tree`` or ``.pack``."""

    keyhash: int
    id: int
    suffix: str


def parse_blob_name(name: str) -> BlobName | None:
    """The parts of a blob's file name; None if it is not a name of Forebay's."""
    match = re.fullmatch(_BLOB, name)
    return BlobName(int(match[1], 16), match[2]) if match else None


def parse_blob_below(fan: str, name: str) -> BlobName | None:
    """The parts of the name of a file in ``blobs/<fan>``; None if it is not a name of Forebay's, or its id belongs in another fan."""
    parsed = parse_blob_name(name)
    return parsed if parsed and FANS[parsed.id & 0xFF] == fan else None


def parse_directory_name(name: str) -> BlobName | None:
    """The parts of the name of a tree or a pack, which has no suffix; None if it is not a name of Forebay's."""
    parsed = parse_blob_name(name)
    return parsed if parsed and not parsed.suffix else None


def parse_policy_name(name: str) -> BlobName | None:
    """The id of the space of a policy's file; None if it is not a name of Forebay's."""
    match = re.fullmatch(r"policy-([1-9][0-9]{0,18})", name)
    return BlobName(int(match[1]), "") if match and int(match[1]) < 1 << 63 else None


def parse_tmp_name(name: str) -> TmpName | None:
    """The parts of the name of a write in progress; None if it is not a name of Forebay's."""
    match = re.fullmatch(_TMP, name)
    return TmpName(int(match[1], 16), int(match[2], 16), match[3]) if match else None


def key_hash(space: str, key: str) -> int:
    """The offset of a key's lock, and part of the names of what is written for it. Keys that share one only wait for each other."""
    return xxhash.xxh3_64_intdigest(f"{space}\0{key}".encode("utf-8", "surrogatepass")) & ((1 << 62) - 1)


def is_suffix(value: object) -> bool:
    """Whether the name of a blob may end so."""
    return type(value) is str and re.fullmatch(_SUFFIX, value) is not None


def is_shared_name(name: str) -> bool:
    """Whether a file that the processes have mapped has such a name."""
    return name in ("head", "keys", "cells", "history", "waiting") or re.fullmatch(r"(records|policy|order)-[0-9]+", name) is not None


def is_scrap(name: str) -> bool:
    """Whether `Root.install` makes such names in the root."""
    return re.fullmatch(_SCRAP, name) is not None


def id_left(directory: Path, id_in_catalog: Callable[[Path], int | None]) -> int | None:
    """The id of a root that lost its FORMAT, read from its head, else from its catalog."""
    id = id_in_head(directory)
    return id_in_catalog(directory / "catalog.sqlite") if id is None else id


def id_in_head(directory: Path) -> int | None:
    """The id of a root as its head has it; None if there is no head."""
    try:
        fd = host.open_fd(directory / "shared" / "head", os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        words = os.read(fd, 16) if stat.S_ISREG(os.fstat(fd).st_mode) else b""
    finally:
        os.close(fd)
    id = int.from_bytes(words[8:], "little")
    return id if words[:8] == HEAD_MAGIC and id >> 62 == 0 else None


class Root:
    """An open root: its path and its rules. Holds no descriptor: picklable, usable after a fork and from any thread.

    ``id``: the random number that FORMAT, catalog and head share. ``shared``: belongs to a group; all modes include the group."""

    def __init__(self, path: Path, id: int, *, shared: bool = False, read_only: bool = False) -> None:
        self.path, self.id, self.shared, self.read_only = path, id, shared, read_only
        self._facts = path, id, shared, read_only
        self.files = Below(path)
        """The files of the root; no symbolic link in it is followed. See `stay`."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Root) and self._facts == other._facts

    def __hash__(self) -> int:
        return hash(self._facts)

    @host.cached_property
    def epoch(self) -> str:
        """Names this boot of the machine and this mount of the disk, in as many characters as a boot id has. What was written in another
        epoch may be less than what was stored: the power was cut, or the file system shut itself down."""
        boot = host.boot_id()
        return f"{boot[:24]}{int(boot[24:], 16) ^ host.mount_number(self.path):012x}"

    @host.cached_property
    def epoch_tag(self) -> int:
        """The epoch in 32 bits."""
        return xxhash.xxh32_intdigest(self.epoch.encode())

    @host.cached_property
    def is_layered(self) -> bool:
        """Whether a file may lie in a lower layer until it is opened for writing. What was mapped before shows nothing of what is written
        then: only a file that is opened again does."""
        return host.fs_kind(self.path) == "overlay"

    @host.cached_property
    def _blobs(self) -> str:
        return str(self.blobs_dir)

    @property
    def format_line(self) -> bytes:
        """The content of FORMAT."""
        return f"forebay {VERSION} {self.id:016x}\n".encode()

    @property
    def dir_mode(self) -> int:
        return 0o2770 if self.shared else 0o700

    @property
    def file_mode(self) -> int:
        """Of files that are written to."""
        return 0o660 if self.shared else 0o600

    @property
    def blob_mode(self) -> int:
        """Of files that are finished."""
        # Under fs.protected_hardlinks a user can link another user's file only with read *and write* permission: a group's
        # trees and spaces link each other's blobs.
        return 0o660 if self.shared else 0o444

    @property
    def tree_mode(self) -> int:
        """Of the directories of a finished tree."""
        return 0o2770 if self.shared else 0o555

    @property
    def catalog(self) -> Path:
        return self.path / "catalog.sqlite"

    @property
    def damaged_catalog(self) -> Path:
        """The last one that was damaged, set aside."""
        return self.path / "catalog.damaged.sqlite"

    @property
    def ballast(self) -> Path:
        return self.path / "catalog.ballast"

    @property
    def counters(self) -> Path:
        return self.path / "counters"

    @property
    def settings(self) -> Path:
        """The file of the limits that users set, for a catalog that is lost."""
        return self.path / "settings.json"

    @property
    def hosts(self) -> Path:
        """Which hosts gave no answer lately."""
        return self.path / "hosts"

    @host.cached_property
    def shared_dir(self) -> Path:
        """The files that all processes have mapped."""
        return self.path / "shared"

    @property
    def tmp_dir(self) -> Path:
        return self.path / "tmp"

    @host.cached_property
    def blobs_dir(self) -> Path:
        return self.path / "blobs"

    @property
    def trees_dir(self) -> Path:
        return self.path / "trees"

    @property
    def packs_dir(self) -> Path:
        return self.path / "packs"

    @property
    def words(self) -> Path:
        """The futex words."""
        return self.path / "locks" / "words"

    def lock(self, name: str) -> Path:
        """The lock file ``name``, one of `LOCKS`."""
        return self.path / "locks" / name

    def leases(self, id: int) -> Path:
        """The lock file in which byte ``id`` is the lease of that entry."""
        return self.lock(f"leases-{id % LEASE_FILES:02d}")

    def blob(self, id: int, suffix: str = "") -> Path:
        return Path(self.blob_name(id, suffix))

    def blob_name(self, id: int, suffix: str = "") -> str:
        """The path of a blob as text, for calls so frequent that making a `Path` would cost too much."""
        digits = id.to_bytes(8).hex()  # a format takes three times as long
        return f"{self._blobs}/{digits[-2:]}/{digits}{suffix}"

    def tree(self, id: int) -> Path:
        return self.path / f"trees/{id:016x}"

    def pack(self, id: int) -> Path:
        return self.path / f"packs/{id:016x}"

    def tmp(self, keyhash: int, id: int, suffix: str = "") -> Path:
        return self.path / f"tmp/{keyhash:016x}-{id:016x}{suffix}"

    def is_same(self) -> bool:
        """Whether the root that was opened is still at its path: False once it was deleted or replaced."""
        try:
            return host.read_small(self.path / "FORMAT", LONGEST_FORMAT) == self.format_line
        except OSError:
            return False

    def stay(self) -> bool:
        """From now on `files` are those of the directory that has the path now, and of no other. False where that is another root's.

        T1 begins a transaction / another root takes the place / T1 puts a file there / the roots change places again / T1 commits: no row
        of the other root would name the file, and the row in this one would lead to none."""
        if self.is_layered:  # a directory may get another number there when it is copied to the upper layer
            return self.is_same()
        with self.files.listing(self.path) as fd:
            self.files = self.files.kept_to(os.fstat(fd), RootReplaced)
            return host.read_small(self.path / "FORMAT", LONGEST_FORMAT, fd) == self.format_line

    def install(self, path: Path, fill: Callable[[int], object]) -> None:
        """Make the file ``path`` whole or not at all: ``fill`` is given the descriptor of a new file. One that is there stays.

        Any number of processes may install the same file at once. Raises what the disk raises; then nothing is left.
        """
        while not os.path.lexists(path):
            scrap = self.path / f"new-{os.urandom(8).hex()}"
            fd = self.files.create(scrap, self.file_mode)
            try:
                host.chmod(fd, self.file_mode)
                host.store_in_place(fd)
                fill(fd)
                try:
                    self.files.link(scrap, path)
                except FileExistsError:
                    return  # another process was first: its file is as good
                except FileNotFoundError:
                    if not path.parent.is_dir():  # the root was deleted
                        raise
                    continue  # another process swept our temporary file: check whether the file exists now
            finally:
                os.close(fd)
                self.files.unlink(scrap)

    def replace(self, path: Path, content: Buffer) -> None:
        """Replace the content of the file ``path``, on the disk too: completely or not at all. Raises what the disk raises; the file is
        unchanged then."""
        while True:
            scrap = self.path / f"new-{os.urandom(8).hex()}"
            fd = self.files.create(scrap, self.file_mode)
            try:
                host.store_in_place(fd)
                host.pwrite(fd, content, 0)
                host.sync(fd)
                try:
                    self.files.rename(scrap, path)
                except FileNotFoundError:
                    if not path.parent.is_dir():
                        raise
                    continue  # another process swept our scrap
            except BaseException:
                self.files.unlink(scrap)
                raise
            finally:
                os.close(fd)
            return

    def sweep(self) -> None:
        """Remove what killed installers left. One that lives finds its scrap gone, and makes another."""
        for name in filter(is_scrap, os.listdir(self.path)):
            self.files.unlink(self.path / name)


FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
SCARCE = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
"""What the process or the machine has too little of for now: nothing is wrong with the root."""


class CatalogBroken(errors.CacheFault):
    """The catalog is gone, or another root's, or it seems to be damaged, since it answered what no sound one does. `Catalog.rebuild` checks
    that before it replaces it: a fault of a call can look the same. ``damaged``: the catalog is there, and only that check can tell."""

    damaged: bool = False


class RootReplaced(CatalogBroken, TopReplaced):
    """Another directory has the path of the root by now, or none."""


class DiskFull(errors.NoSpace):
    """SQLite ran out of disk space, or the disk quota is used up. ``relieved``: there is room now, since the ballast was released."""

    relieved: bool = False


class faults:
    """Around what only the cache does: any OSError of the disk becomes `NoSpace` or `CacheFault`, with its cause.

    A class, since a generator takes thrice as long, and this is around every block that is written."""

    __slots__ = ("_key", "_need")

    def __init__(self, key: str, need: int = 0) -> None:
        self._key, self._need = key, need

    def __enter__(self) -> None:
        """Nothing is to be done."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if not isinstance(error, OSError) or isinstance(error, errors.ForebayError):
            return
        if error.errno in FULL:
            raise errors.NoSpace(
                f"no room for {self._key!r} on the disk: {error}", key=self._key, need=self._need, free=0, budget=0, limit="disk"
            ) from error
        raise errors.CacheFault(f"the cache failed for {self._key!r}: {error}", key=self._key) from error
