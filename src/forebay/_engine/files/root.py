"""The way into a root: who may use it, where it may lie, and its creation by many processes at once."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import xxhash

from forebay._engine.files.layout import (
    FANS,
    LEASE_FILES,
    LOCKS,
    LONGEST_FORMAT,
    VERSION,
    Root,
    id_left,
    is_scrap,
    parse_blob_below,
    parse_blob_name,
    parse_directory_name,
    parse_tmp_name,
)
from forebay._kernel import host
from forebay._logs import logger
from forebay.errors import NewerFormat, RootRefused

__all__ = ["LEASE_FILES", "LOCKS", "VERSION", "Root", "open_root", "parse_blob_name", "parse_tmp_name"]

log = logger("forebay.root")

_WORDS_SIZE = 4096
_EMPTY = -1
_FORMAT = re.compile(rb"forebay ([1-9][0-9]{0,8}) ([0-9a-f]{16})\n")
_TAG = b"Signature: 8a477f597d28d172789f06886806bc55\n# This directory is a cache of Forebay: backups need not keep it.\n"
# The directories of a root, and whether a name in one is ours: asked where no FORMAT says so.
_DIRECTORIES: dict[str, Callable[[str], object]] = {
    "blobs": FANS.__contains__,
    "trees": parse_directory_name,
    "packs": parse_directory_name,
    "tmp": parse_tmp_name,
    "slots": str.isdigit,
    "locks": {*LOCKS, "words"}.__contains__,
}
_FILES = re.compile(r"FORMAT|CACHEDIR\.TAG|counters|settings\.json|hosts|catalog\..*")


def open_root(path: str | os.PathLike[str], *, shared: bool = False, read_only: bool = False) -> Root:
    """The root at ``path``, made if there is none; any number of processes may do so at once.

    A writable directory of another user's, or one that everybody may write to, gets a root of its own inside:
    ``forebay-<uid>``, or ``forebay-g<gid>`` with ``shared``. ``read_only`` makes and changes nothing, and takes roots of
    others and on network file systems too. A root that a group may write to is opened with ``shared`` only: what lies there may be
    anybody's of the group. Raises `RootRefused` (what was wanted, found, and what to do), `NewerFormat`, or OSError.
    """
    place = Path(os.path.realpath(path))
    if read_only:
        return _open_read_only(place, shared)
    _refuse_network(place)
    place = _inside(place, shared)
    _make_directory(place)
    _check_owner(place, shared)
    if _has_format(place) and not _may_write(place):
        log.warning("%s may not be written to: what it has is served, nothing is added", place)
        return _open_read_only(place, shared)
    id = _read_format(place)
    if id is None:
        id = _create(Root(place, id_left(place) or secrets.randbits(62), shared=shared))
    elif id == _EMPTY:
        id = _mend_format(place)
    root = Root(place, id, shared=_is_a_groups(place.stat()))
    _check_trust(root, shared)
    if shared and not root.shared:
        _refuse(place, "a root for a group", "one that was made for its owner alone", "choose another place, or remove it first")
    _complete(root)
    return root


def _check_trust(root: Root, shared: bool) -> None:
    """Refuse what others can write to, unless that was asked for: their outputs of functions would be unpickled here."""
    if root.shared and not shared:
        group = root.path.stat().st_gid
        _refuse(
            root.path, "a root that only its owner can write to", f"one that group {group} can write to",
            "pass shared=True, or set FOREBAY_SHARED=1, if you trust all members of that group; else choose another place",
        )  # fmt: skip


def _open_read_only(place: Path, shared: bool) -> Root:
    id = _read_format(place)
    if id == _EMPTY:
        id = id_left(place)
    if id is None:
        _refuse(place, "a cache to read from", "no FORMAT file", "check the path: a read-only root is never made")
    root = Root(place, id, shared=_is_a_groups(place.stat()), read_only=True)
    _check_trust(root, shared)
    return root


def _refuse(place: Path, wanted: str, found: str, todo: str) -> NoReturn:
    raise RootRefused(f"{place}: {wanted} was wanted, but found was {found}: {todo}", path=str(place), wanted=wanted, found=found)


def _read_format(place: Path) -> int | None:
    """The id of the root at ``place``; None if there is no root, `_EMPTY` where a power cut left its FORMAT so."""
    try:
        text = host.read_small(place / "FORMAT", LONGEST_FORMAT)
    except FileNotFoundError:
        return None
    except NotADirectoryError:
        _refuse(place, "a directory", "something else", "choose another place")
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENXIO):  # a symbolic link, a socket
            raise
        text = None
    if text is None:
        _refuse(place, "a root of Forebay", "a FORMAT that is no plain file", "choose another place, or remove this one")
    if not text.strip(b"\0"):
        return _EMPTY
    found = _FORMAT.fullmatch(text)
    if not found:
        _refuse(place, "a root of Forebay", f"a FORMAT file that says {text[:40]!r}", "choose another place, or remove this one")
    version = int(found[1])
    if version > VERSION:
        message = f"{place}: written in format {version}, this Forebay knows format {VERSION}: upgrade Forebay, or choose another place"
        raise NewerFormat(message, path=str(place), found=version, known=VERSION)
    return int(found[2], 16)


def _refuse_network(place: Path) -> None:
    kind = host.fs_kind(next(p for p in (place, *place.parents) if p.exists()))
    if not host.is_local(kind):
        todo = "choose a place on a local disk, such as $TMPDIR or /dev/shm (as a read-only upstream this one may serve)"
        _refuse(place, "a local file system", f"one of kind {kind}, where locks and mappings may not be shared", todo)


def _inside(place: Path, shared: bool) -> Path:
    """``place``; where that is a directory open to others and no root, the directory in it that is to be the root."""
    try:
        found = place.lstat()
    except FileNotFoundError:
        return place
    if not stat.S_ISDIR(found.st_mode) or _has_format(place):
        return place
    foreign = found.st_uid != os.geteuid() and not (shared and _fits_group(found))
    if foreign and not os.access(place, os.W_OK | os.X_OK, effective_ids=True):
        return place  # is refused, with the reason
    if foreign or found.st_mode & (stat.S_IWOTH | stat.S_ISVTX):
        return place / (f"forebay-g{os.getegid()}" if shared else f"forebay-{os.geteuid()}")
    return place


def _has_format(place: Path) -> bool:
    return os.path.lexists(place / "FORMAT")


def _may_write(place: Path) -> bool:
    """Whether this process may change the root: its directory, and the catalog in it."""
    catalog = place / "catalog.sqlite"
    files = [place, catalog] if catalog.exists() else [place]
    return all(os.access(path, os.W_OK, effective_ids=True) for path in files)


def _is_a_groups(found: os.stat_result) -> bool:
    return bool(found.st_mode & stat.S_IWGRP)


def _fits_group(found: os.stat_result) -> bool:
    """Whether this directory, another user's, can be the root of a group of ours."""
    ours = found.st_gid in (os.getegid(), *os.getgroups())
    return ours and _is_a_groups(found) and not found.st_mode & (stat.S_IWOTH | stat.S_ISVTX)


def _make_directory(place: Path) -> None:
    for parent in reversed(place.parents):
        if not parent.exists():
            host.mkdir(parent, 0o755)
    if not os.path.lexists(place):
        host.mkdir(place, 0o700)


def _check_owner(place: Path, shared: bool) -> None:
    found = place.lstat()
    if not stat.S_ISDIR(found.st_mode):
        _refuse(place, "a directory", "something else", "choose another place")
    if found.st_mode & stat.S_IWOTH and _has_format(place):
        _refuse(place, "a root that only its owner or group may write to", "one open to everybody", f"chmod o-w {place}")
    if found.st_uid == os.geteuid() or (_fits_group(found) and (shared or _has_format(place))):
        return
    owner = f"one of user {found.st_uid} with mode {stat.S_IMODE(found.st_mode):04o}"
    _refuse(place, f"a directory of user {os.geteuid()}", owner, "choose another place, or have its owner make it with shared=True")


def _create(new: Root) -> int:
    """Lay a root out, FORMAT last: whoever links FORMAT first gives the root its id."""
    _refuse_foreign(new.path)
    _lay_out(new)
    new.install(new.path / "FORMAT", lambda fd: host.pwrite(fd, new.format_line, 0))
    id = _read_format(new.path)
    if id is None:
        _refuse(new.path, "a place that stays", "a FORMAT file that vanished at once", "let nothing remove it meanwhile")
    return id


def _mend_format(place: Path) -> int:
    """Let an empty FORMAT say what it said. Any number of processes may do so at once: each writes the same."""
    _refuse_foreign(place)
    fd = os.open(place / "FORMAT", os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        found, text = os.fstat(fd), os.pread(fd, LONGEST_FORMAT, 0)
    finally:
        os.close(fd)
    if text.strip(b"\0"):  # another process was first
        written = _read_format(place)
        if written is None or written == _EMPTY:
            _refuse(place, "a place that stays", "a FORMAT file that changes all the time", "let nothing touch it meanwhile")
        return written
    id = id_left(place)
    if id is None:
        id = xxhash.xxh3_64_intdigest(f"{found.st_dev} {found.st_ino} {found.st_mtime_ns}") >> 2
    log.warning("%s: its FORMAT was empty, as a power cut may leave it: it is written anew", place)
    root = Root(place, id, shared=_is_a_groups(place.stat()))
    root.replace(place / "FORMAT", root.format_line)
    return id


def _refuse_foreign(place: Path) -> None:
    others = list(foreign(place))
    if others:
        found = f"{len(others)} things that are not Forebay's ({', '.join(others[:3])})"
        _refuse(place, "an empty or new directory", found, f"give a directory of its own, such as {place}/forebay")


def foreign(place: Path) -> Iterator[str]:
    """What lies at ``place`` that no root has: paths below it."""
    for name in sorted(os.listdir(place)):
        if name in _DIRECTORIES and stat.S_ISDIR((place / name).lstat().st_mode):
            yield from (f"{name}/{inner}" for inner in os.listdir(place / name) if not _DIRECTORIES[name](inner))
            if name == "blobs":
                yield from _foreign_in_fans(place / name)
        elif not (_FILES.fullmatch(name) or is_scrap(name)):
            yield name


def _foreign_in_fans(blobs: Path) -> Iterator[str]:
    for fan in sorted({*FANS} & set(os.listdir(blobs))):
        found = blobs / fan
        if not stat.S_ISDIR(found.lstat().st_mode):
            yield f"blobs/{fan}"
        else:
            yield from (f"blobs/{fan}/{name}" for name in os.listdir(found) if parse_blob_below(fan, name) is None)


def _lay_out(root: Root) -> None:
    """Make what is missing. Each step may be repeated, and be made by others meanwhile."""
    _settle(root, root.path, root.dir_mode)
    for name in (*_DIRECTORIES, *(f"blobs/{fan}" for fan in FANS)):
        root.files.mkdir(root.path / name, root.dir_mode)
        _settle(root, root.path / name, root.dir_mode)
    for name in LOCKS:
        if not os.path.lexists(root.lock(name)):
            with contextlib.suppress(FileExistsError):  # another process makes this root too
                os.close(root.files.create(root.lock(name), root.file_mode))
        _settle(root, root.lock(name), root.file_mode)
    root.install(root.words, lambda fd: host.allocate(fd, 0, _WORDS_SIZE))
    root.install(root.path / "CACHEDIR.TAG", lambda fd: host.pwrite(fd, _TAG, 0))


def _settle(root: Root, path: Path, mode: int, *, is_ours: bool = True) -> None:
    """Give ``path`` its mode whatever the umask was, also where its maker was killed before he could. ``is_ours``: a link in its place is
    refused; else left alone."""
    top = path == root.path
    found = path.lstat() if top else root.files.lstat(path)
    if stat.S_ISLNK(found.st_mode):
        if not is_ours:
            return
        _refuse(path, "a file or directory of the root's own", "a symbolic link", "remove it; symbolic links are not followed")
    if stat.S_IMODE(found.st_mode) != mode and found.st_uid == os.geteuid():
        host.chmod(path, mode) if top else root.files.chmod(path, mode)


def _complete(root: Root) -> None:
    """Make again what somebody removed from a root, and remove what killed installers left."""
    for name in _DIRECTORIES:
        found = root.path / name
        if os.path.lexists(found) and not stat.S_ISDIR(found.lstat().st_mode):
            _refuse(found, "a directory of the root's own", "something else", "remove it; symbolic links are not followed")
    _remove_links(root)
    _refuse_strange_locks(root)
    wanted = {"": _DIRECTORIES.keys(), "blobs": {*FANS}, "locks": {*LOCKS, "words"}}
    if any(not names <= _names_in(root, place) for place, names in wanted.items()):
        _lay_out(root)
    if not root.path.stat().st_mode & 0o007:  # else its owner opened it up to readers, these files among the rest
        for name in ("catalog.sqlite", "catalog.sqlite-wal", "catalog.sqlite-shm", "counters", "settings.json"):
            with contextlib.suppress(FileNotFoundError):
                _settle(root, root.path / name, root.file_mode, is_ours=False)
    root.sweep()


def _remove_links(root: Root) -> None:
    """Links in the place of directories of blobs, which nobody of ours follows: nothing could be kept there."""
    try:
        with root.files.listing(root.blobs_dir) as fd, os.scandir(fd) as found:
            links = [entry.name for entry in found if entry.name in FANS and not entry.is_dir(follow_symlinks=False)]
    except FileNotFoundError:
        return
    for name in links:
        log.warning("%s: no directory, but a link or a file, which nobody follows: it is made anew", root.blobs_dir / name)
        with contextlib.suppress(IsADirectoryError):  # another process made it anew since it was listed
            root.files.unlink(root.blobs_dir / name)


def _refuse_strange_locks(root: Root) -> None:
    try:
        with root.files.listing(root.path / "locks") as fd, os.scandir(fd) as found:
            strange = [entry.name for entry in found if entry.name in {*LOCKS, "words"} and not entry.is_file(follow_symlinks=False)]
    except FileNotFoundError:
        return
    for name in strange:
        _refuse(root.lock(name), "a file of the root's own", "something else", "remove it: it is made anew")


def _names_in(root: Root, directory: str) -> set[str]:
    try:
        return set(root.files.names_in(root.path / directory))
    except FileNotFoundError:
        return set()
