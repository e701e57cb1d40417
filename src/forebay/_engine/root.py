"""The root directory of a cache: what lies where, who may use it, and its creation by many processes at once."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, NoReturn

from forebay._kernel import host
from forebay.errors import NewerFormat, RootRefused

VERSION = 1
LEASE_FILES = 64
LOCKS = ("keys", "writer", "owners", "names", *(f"leases-{n:02d}" for n in range(LEASE_FILES)))
WORDS_SIZE = 4096

_FORMAT = re.compile(rb"forebay ([0-9]{1,9}) ([0-9a-f]{16})\n")
_TAG = b"Signature: 8a477f597d28d172789f06886806bc55\n# This directory is a cache of Forebay: backups need not keep it.\n"
_SCRAP = re.compile(r"new-[0-9a-f]{16}")
_BLOB = re.compile(r"([0-9a-f]{16})([A-Za-z0-9.]{0,16})")
_TMP = re.compile(r"([0-9a-f]{16})-([0-9a-f]{16})(|\.map|\.tree)")
_FANS = tuple(f"{n:02x}" for n in range(256))


class BlobName(NamedTuple):
    """What the name of a file under ``blobs/`` says."""

    id: int
    suffix: str


class TmpName(NamedTuple):
    """What the name of something under ``tmp/`` says. ``suffix``: ``""`` (the bytes), ``.map`` or ``.tree``."""

    keyhash: int
    id: int
    suffix: str


def parse_blob_name(name: str) -> BlobName | None:
    """The parts of a blob's file name; None if it is not one of ours."""
    found = _BLOB.fullmatch(name)
    return BlobName(int(found[1], 16), found[2]) if found else None


def parse_tmp_name(name: str) -> TmpName | None:
    """The parts of the name of a write in progress; None if it is not one of ours."""
    found = _TMP.fullmatch(name)
    return TmpName(int(found[1], 16), int(found[2], 16), found[3]) if found else None


@dataclass(frozen=True)
class Root:
    """A root that was opened: its place and its rules. Holds no descriptor: may be pickled, forked and used by any thread.

    ``id``: the random number that FORMAT, catalog and slots share. ``shared``: belongs to a group, all modes include it.
    """

    path: Path
    id: int
    shared: bool = False
    read_only: bool = False

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
        # Under fs.protected_hardlinks a user can only link a file of another's that he may read *and write*: a group's
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
    def ballast(self) -> Path:
        return self.path / "catalog.ballast"

    @property
    def counters(self) -> Path:
        return self.path / "counters"

    @property
    def slots_dir(self) -> Path:
        return self.path / "slots"

    @property
    def tmp_dir(self) -> Path:
        return self.path / "tmp"

    @property
    def blobs_dir(self) -> Path:
        return self.path / "blobs"

    @property
    def trees_dir(self) -> Path:
        return self.path / "trees"

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
        return self.path / "blobs" / f"{id & 0xFF:02x}" / f"{id:016x}{suffix}"

    def tree(self, id: int) -> Path:
        return self.path / "trees" / f"{id:016x}"

    def tmp(self, keyhash: int, id: int, suffix: str = "") -> Path:
        return self.path / "tmp" / f"{keyhash:016x}-{id:016x}{suffix}"

    def is_same(self) -> bool:
        """Whether the root that was opened still lies at its path: False once it was deleted or replaced."""
        try:
            return _read_format(self.path) == self.id
        except OSError:
            return False

    def install(self, path: Path, fill: Callable[[int], None]) -> None:
        """Make the file ``path`` whole or not at all: ``fill`` is given the descriptor of a new file. One that is there stays.

        Any number of processes may install the same file at once. Raises what the disk raises.
        """
        _install(self.path, path, self.file_mode, fill)


def open_root(path: str | os.PathLike[str], *, shared: bool = False, read_only: bool = False) -> Root:
    """The root at ``path``, made if there is none; any number of processes may do so at once.

    A writable directory of another user's, or one that everybody may write to, gets a root of its own inside:
    ``forebay-<uid>``, or ``forebay-g<gid>`` with ``shared``. ``read_only`` makes and changes nothing, and takes roots of
    others and on network file systems too. Raises `RootRefused` (what was wanted, found, and what to do), `NewerFormat`, or `OSError`.
    """
    place = Path(os.path.realpath(path))
    if read_only:
        return _open_read_only(place)
    _refuse_network(place)
    place = _inside(place, shared)
    _make_directories(place, shared)
    _check_owner(place, shared)
    id = _read_format(place)
    if id is None:
        id = _create(place, shared)
    else:
        _complete(place)
    group = bool(place.stat().st_mode & stat.S_IWGRP)
    if shared and not group:
        _refuse(place, "a root for a group", "one that was made for its owner alone", "choose another place, or remove it first")
    return Root(place, id, shared=group)


def _open_read_only(place: Path) -> Root:
    id = _read_format(place)
    if id is None:
        _refuse(place, "a cache to read from", "no FORMAT file", "check the path: a read-only root is never made")
    return Root(place, id, shared=bool(place.stat().st_mode & stat.S_IWGRP), read_only=True)


def _refuse(place: Path, wanted: str, found: str, todo: str) -> NoReturn:
    raise RootRefused(f"{place}: {wanted} was wanted, but found was {found}: {todo}", path=str(place), wanted=wanted, found=found)


def _read_format(place: Path) -> int | None:
    """The id of the root at ``place``; None if there is no root."""
    try:
        text = (place / "FORMAT").read_bytes()
    except FileNotFoundError:
        return None
    except NotADirectoryError:
        _refuse(place, "a directory", "something else", "choose another place")
    found = _FORMAT.fullmatch(text)
    if not found or int(found[1]) < 1:
        _refuse(place, "a root of Forebay", f"a FORMAT file that says {text[:40]!r}", "choose another place, or remove this one")
    version = int(found[1])
    if version > VERSION:
        message = f"{place}: written in format {version}, this Forebay knows format {VERSION}: upgrade Forebay, or choose another place"
        raise NewerFormat(message, path=str(place), found=version, known=VERSION)
    return int(found[2], 16)


def _refuse_network(place: Path) -> None:
    there = next(p for p in (place, *place.parents) if p.exists())
    kind = host.fs_kind(there)
    if not host.is_local(kind):
        todo = "choose a place on a local disk, such as $TMPDIR or /dev/shm (as a read-only upstream this one may serve)"
        _refuse(place, "a local file system", f"one of kind {kind}, where locks and mappings may not be shared", todo)


def _inside(place: Path, shared: bool) -> Path:
    """``place``, or the directory in it that is to be the root, where it is open to others."""
    try:
        found = place.lstat()
    except FileNotFoundError:
        return place
    if not stat.S_ISDIR(found.st_mode) or os.path.lexists(place / "FORMAT"):
        return place
    others = found.st_uid != os.geteuid() and not (shared and _fits_group(found))
    if others and not os.access(place, os.W_OK | os.X_OK, effective_ids=True):
        return place  # refused later, with the reason
    if others or found.st_mode & (stat.S_IWOTH | stat.S_ISVTX):
        return place / (f"forebay-g{os.getegid()}" if shared else f"forebay-{os.geteuid()}")
    return place


def _fits_group(found: os.stat_result) -> bool:
    """Whether this directory, another user's, can be the root of a group of ours."""
    ours = found.st_gid in (os.getegid(), *os.getgroups())
    return ours and bool(found.st_mode & stat.S_IWGRP) and not found.st_mode & (stat.S_IWOTH | stat.S_ISVTX)


def _make_directories(place: Path, shared: bool) -> None:
    for parent in reversed(place.parents):
        if not parent.exists():
            host.mkdir(parent, 0o755)
    if not os.path.lexists(place):
        host.mkdir(place, 0o700)


def _check_owner(place: Path, shared: bool) -> None:
    found = place.lstat()
    if not stat.S_ISDIR(found.st_mode):
        _refuse(place, "a directory", "something else", "choose another place")
    if found.st_mode & stat.S_IWOTH and os.path.lexists(place / "FORMAT"):
        _refuse(place, "a root that only its owner or group may write to", "one open to everybody", f"chmod o-w {place}")
    if found.st_uid == os.geteuid() or (_fits_group(found) and (shared or os.path.lexists(place / "FORMAT"))):
        return
    owner = f"one of user {found.st_uid} with mode {stat.S_IMODE(found.st_mode):04o}"
    _refuse(place, f"a directory of user {os.geteuid()}", owner, "choose another place, or have its owner make it with shared=True")


def _holds(names: re.Pattern[str] | tuple[str, ...]) -> Callable[[str], bool]:
    if isinstance(names, tuple):
        return frozenset(names).__contains__
    return lambda name: names.fullmatch(name) is not None


# What a directory of the layout may hold where no FORMAT says that it is ours.
_DIRECTORIES: dict[str, Callable[[str], bool]] = {
    "blobs": _holds(_FANS),
    "trees": _holds(re.compile("[0-9a-f]{16}")),
    "packs": _holds(re.compile("[0-9a-f]{16}")),
    "tmp": _holds(_TMP),
    "slots": _holds(re.compile("[0-9]{3,}")),
    "locks": _holds((*LOCKS, "words")),
}
_FILES = re.compile(r"FORMAT|CACHEDIR\.TAG|counters|catalog\..*|new-[0-9a-f]{16}")


def _foreign(place: Path) -> Iterator[str]:
    """What lies here that no crashed creation left."""
    for name in sorted(os.listdir(place)):
        if name in _DIRECTORIES and stat.S_ISDIR((place / name).lstat().st_mode):
            yield from (f"{name}/{inner}" for inner in os.listdir(place / name) if not _DIRECTORIES[name](inner))
        elif not _FILES.fullmatch(name):
            yield name


def _create(place: Path, shared: bool) -> int:
    """Lay the root out, FORMAT last; whoever links FORMAT first gives the root its id."""
    foreign = list(_foreign(place))
    if foreign and _read_format(place) is None:
        found = f"{len(foreign)} things that are not Forebay's ({', '.join(foreign[:3])})"
        _refuse(place, "an empty or new directory", found, f"give a directory of its own, such as {place}/forebay")
    new = Root(place, secrets.randbits(62), shared=shared)
    _lay_out(new)
    new.install(place / "FORMAT", lambda fd: host.pwrite(fd, f"forebay {VERSION} {new.id:016x}\n".encode(), 0))
    id = _read_format(place)
    if id is None:
        _refuse(place, "a place that stays", "a FORMAT file that vanished at once", "let nothing remove it meanwhile")
    _sweep(place)
    return id


def _lay_out(root: Root) -> None:
    """Make what is missing. Each step may be repeated, and made by others meanwhile."""
    _settle(root.path, root.dir_mode)
    for name in (*_DIRECTORIES, *(f"blobs/{fan}" for fan in _FANS)):
        host.mkdir(root.path / name, root.dir_mode)
        _settle(root.path / name, root.dir_mode)
    for name in LOCKS:
        _touch(root.lock(name), root.file_mode)
    root.install(root.words, lambda fd: host.allocate(fd, 0, WORDS_SIZE))
    root.install(root.path / "CACHEDIR.TAG", lambda fd: host.pwrite(fd, _TAG, 0))


def _settle(path: Path, mode: int) -> None:
    """Give ``path`` its mode whatever the umask was, also where its maker was killed before he could."""
    found = path.lstat()
    if stat.S_ISLNK(found.st_mode):
        _refuse(path, "a file or directory of the root's own", "a symbolic link", "remove it")
    if stat.S_IMODE(found.st_mode) != mode and found.st_uid == os.geteuid():
        host.chmod(path, mode)


def _touch(path: Path, mode: int) -> None:
    if not os.path.lexists(path):
        with contextlib.suppress(FileExistsError):  # another process makes this root too
            os.close(host.create(path, mode))
    _settle(path, mode)


def _complete(place: Path) -> None:
    """Make again what somebody removed from a root, and remove what killed installers left."""
    names = set(os.listdir(place))
    for name in names & _DIRECTORIES.keys():
        if not stat.S_ISDIR((place / name).lstat().st_mode):
            _refuse(place / name, "a directory of the root's own", "something else", "remove it; symbolic links are not followed")
    if not names >= _DIRECTORIES.keys():
        id = _read_format(place)
        if id is not None:
            _lay_out(Root(place, id, shared=bool(place.stat().st_mode & stat.S_IWGRP)))
    _sweep(place)


def _install(place: Path, path: Path, mode: int, fill: Callable[[int], None]) -> None:
    while not os.path.lexists(path):
        scrap = place / f"new-{secrets.randbits(64):016x}"
        fd = host.create(scrap, mode)
        try:
            host.chmod(fd, mode)
            fill(fd)
        except BaseException:
            host.unlink(scrap)
            raise
        finally:
            os.close(fd)
        try:
            host.link(scrap, path)
        except FileExistsError:  # another process was first: its file is as good
            return
        except FileNotFoundError:  # another process swept our scrap: look whether the file is there now
            continue
        finally:
            host.unlink(scrap)


def _sweep(place: Path) -> None:
    """Remove what killed installers left. One that lives sees its scrap gone, and looks again."""
    for name in os.listdir(place):
        if _SCRAP.fullmatch(name):
            host.unlink(place / name)
