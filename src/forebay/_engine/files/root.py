"""Opening a root: who may use it, where it may be, and its creation by many processes at once."""

from __future__ import annotations

import contextlib
import os
import re
import stat
import time
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
    id_in_head,
    id_left,
    is_scrap,
    is_shared_name,
    parse_blob_below,
    parse_blob_name,
    parse_directory_name,
    parse_tmp_name,
)
from forebay._kernel import host, interrupts, locks
from forebay._kernel.below import LinkInTheWay, NoPlainFile
from forebay._logs import logger
from forebay.errors import NewerFormat, RootRefused

__all__ = ["LEASE_FILES", "LOCKS", "VERSION", "Root", "open_root", "parse_blob_name", "parse_tmp_name"]

log = logger("forebay.root")

_WORDS_SIZE = 4096
_EMPTY, _DAMAGED, _STRANGE = -1, -2, -3
_NO_FILE = FileNotFoundError, NoPlainFile, LinkInTheWay
_PATIENCE, _ATTEMPTS = 10.0, 3
# What the format 1 had, and this one does not have, by directory.
_OF_INDEX = r"\d+|table|values|history|waiting|(policy|order)-\d+"
_OLDER = {"slots": _OF_INDEX, "index": _OF_INDEX, "locks": "names"}
_VERSION = rb"forebay ([1-9][0-9]{0,8}) "
_FORMAT = rb"forebay [1-9][0-9]{0,8} ([0-9a-f]{16})\n"
_TAG = b"Signature: 8a477f597d28d172789f06886806bc55\n# This directory is a cache of Forebay: backups need not keep it.\n"
_FANS = frozenset(FANS)
ANOTHER = "choose another directory, with root= or FOREBAY_HOME"
_LOCK_FILES = frozenset({*LOCKS, "words"})
# The directories of a root, and whether a name in one is Forebay's: used where FORMAT is missing.
_DIRECTORIES: dict[str, Callable[[str], object]] = {
    "blobs": _FANS.__contains__,
    "trees": parse_directory_name,
    "packs": parse_directory_name,
    "tmp": parse_tmp_name,
    "shared": is_shared_name,
    "locks": _LOCK_FILES.__contains__,
}
_FILES = r"FORMAT|CACHEDIR\.TAG|counters|settings\.json|hosts|catalog\..*"


def open_root(
    path: str | os.PathLike[str], *, shared: bool = False, read_only: bool = False,
    id_in_catalog: Callable[[Path], int | None] = lambda path: None,
) -> Root:  # fmt: skip
    """Open the root at ``path``, creating it if there is none. Any number of processes may do so at once.

    In a writable directory that belongs to another user or is open to everybody, the root is a directory inside: ``forebay-<uid>``, or
    ``forebay-g<gid>`` with ``shared``. ``read_only`` creates and changes nothing, and accepts roots of other users and on network file
    systems. A root that a group may write to is opened with ``shared`` only: its files may come from any member of the group.
    ``id_in_catalog``: gives the id of a root that is known by its catalog only. Raises `RootRefused`, `NewerFormat`, or OSError."""
    directory = _resolved(path)
    if read_only:
        return _open_read_only(directory, shared, id_in_catalog)
    for left in reversed(range(_ATTEMPTS)):
        try:
            root = _open_to_write(directory, shared, id_in_catalog)
            if root.read_only or root.stay():
                break
        except FileNotFoundError:  # another program removes it meanwhile
            if not left:
                raise
    else:
        _refuse(directory, "an undisturbed directory", "another root each time", "stop the program that changes it")
    return root


def _open_to_write(directory: Path, shared: bool, id_in_catalog: Callable[[Path], int | None]) -> Root:
    _refuse_network(directory)
    directory = _inside(directory, shared)
    _make_directory(directory)
    _check_owner(directory, shared)
    if _has_format(directory) and not _may_write(directory):
        log.warning("%s is not writable: its entries are served, nothing is added", directory)
        return _open_read_only(directory, shared, id_in_catalog)
    id = _read_id(directory, id_in_catalog)
    if id is None:
        id = _create(Root(directory, id_left(directory, id_in_catalog) or int.from_bytes(os.urandom(8)) >> 2, shared=shared))
    elif id < 0:
        id = _restore_format(directory, id_in_catalog)
    root = Root(directory, id, shared=_is_a_groups(directory.stat()))
    _check_trust(root, shared)
    if not (root.is_same() and _stores_in_place(root)):
        _bring_up(root)
    if shared and not root.shared:
        _refuse(directory, "a root for a group", "a root for its owner only", f"{ANOTHER}, or remove it first")
    _complete(root)
    _unshare(root)
    return root


def _resolved(path: str | os.PathLike[str]) -> Path:
    """The real path. Refuses a link that another user put into a directory to which everybody may write, as Linux itself does where
    ``fs.protected_symlinks`` is set; a link that is put there from now on is not followed."""
    above, name = os.path.split(os.fspath(path).rstrip("/"))
    if name in ("", ".", ".."):
        return Path(os.path.realpath(path))
    directory = Path(os.path.realpath(above), name)
    try:
        status, parent = directory.lstat(), directory.parent.stat()
    except (FileNotFoundError, NotADirectoryError):
        return directory
    if not stat.S_ISLNK(status.st_mode):
        return directory
    if parent.st_mode & stat.S_IWOTH and status.st_uid not in (0, os.geteuid(), parent.st_uid):
        found = f"a link of user {status.st_uid} in a directory that everybody may write to"
        _refuse(directory, "a directory, or a link of this user", found, f"{ANOTHER}, or remove the link")
    return Path(os.path.realpath(directory))


def _check_trust(root: Root, shared: bool) -> None:
    """Refuse a root that others can write to, unless ``shared`` was given: stored results of functions would be unpickled here."""
    if root.shared and not shared:
        group = root.path.stat().st_gid
        _refuse(
            root.path, "a root that only its owner can write to", f"one that group {group} can write to",
            f"pass shared=True, or set FOREBAY_SHARED=1, if you trust all members of that group; else {ANOTHER}",
        )  # fmt: skip


def _open_read_only(directory: Path, shared: bool, id_in_catalog: Callable[[Path], int | None]) -> Root:
    id = _read_id(directory, id_in_catalog)
    is_lost = id is not None and id < 0
    if id is not None and is_lost:
        id = _id_without_format(directory, id, id_in_catalog)
    if id is None:
        _refuse(directory, "a cache to read from", "no FORMAT file", "check the path: a read-only root is never created")
    root = Root(directory, id, shared=_is_a_groups(directory.stat()), read_only=True)
    _check_trust(root, shared)
    if not is_lost and not root.is_same():
        _refuse(directory, f"a root of format {VERSION}", "an older one", "open it for writing once, as `forebay verify --repair` does")
    return root


def _bring_up(root: Root) -> None:
    """Give a root of an older format this one, once no process has it open. Its settings stay. Its entries stay if the catalog has this
    format, as after format 2; else they go when the catalog is opened, which is then replaced, with a warning."""
    lock = locks.LockFile(root.path / "FORMAT", root.files.open, writable=True)
    until = time.monotonic() + _PATIENCE
    try:
        while not lock.try_lock(0, exclusive=True):  # another process may be doing the same
            if time.monotonic() > until:
                _refuse(root.path, f"a root of format {VERSION}", "an older one that processes have open", "end them")
            interrupts.sleep(0.05)
        if root.is_same() and _stores_in_place(root):
            return
        for folder, older in _OLDER.items():
            for name in root.files.names_in(root.path / folder):
                if re.fullmatch(older, name):
                    root.files.unlink(root.path / folder / name)
            with contextlib.suppress(OSError):  # it has files of others
                root.files.rmdir(root.path / folder)
        if not _stores_in_place(root):
            _move_into_place(root)
        root.replace(root.path / "FORMAT", root.format_line)
    finally:
        lock.close()


def _stores_in_place(root: Root) -> bool:
    with root.files.listing(root.path) as fd:
        return host.stores_in_place(fd)


def _store_in_place(root: Root) -> None:
    """See `host.store_in_place`: of the directories whose files are mapped to be written to; SQLite does that, too."""
    for name in (*_DIRECTORIES, ""):  # the root itself last: it says that this is done
        with root.files.listing(root.path / name) as fd:
            try:
                host.store_in_place(fd, name in ("shared", "locks", ""))
            except OSError as error:
                found = f"one that always writes to other blocks ({error.strerror}), so that a full disk would end processes"
                todo = "choose a directory on another file system"
                _refuse(root.path, "a file system that writes in place where it is told to", found, todo)


def _move_into_place(root: Root) -> None:
    """Copy the files that are mapped to be written to, so that they are stored in place from now on: on btrfs that is set when a file is
    made. Caller: no process has the root open."""
    root.files.unlink(root.shared_dir / "cells")  # they are copies, and many
    root.files.unlink(Path(f"{root.catalog}-shm"))  # a killed process left it: SQLite makes another
    for path in _mapped(root):
        with contextlib.suppress(*_NO_FILE), open(root.files.open(path), "rb") as file:
            root.replace(path, file.read())
    with contextlib.suppress(FileNotFoundError):  # a directory is missing: it is made, and this done, by `_lay_out`
        _store_in_place(root)


def _unshare(root: Root) -> None:
    """Unshare the files that processes map to write to them, if they share blocks with a copy: `cp` makes such copies on XFS, and so does
    an overlay on XFS of a file of a lower layer, when the file is opened. Processes may have the root open."""
    if host.fs_kind(root.path) not in host.SHARING:
        return
    head = root.shared_dir / "head"
    with contextlib.suppress(*_NO_FILE, PermissionError), open(root.files.open(head, os.O_RDWR), "rb") as file:
        if not host.shares_blocks(file.fileno()):
            return
        for path in _mapped(root):  # SQLite's index is not among them: to close a descriptor of it would drop SQLite's locks
            if path != head:  # the head is the last: it shows that this is done
                with contextlib.suppress(*_NO_FILE, PermissionError), open(root.files.open(path, os.O_RDWR), "rb") as other:
                    host.unshare(other.fileno())
        host.unshare(file.fileno())


def _mapped(root: Root) -> list[Path]:
    """The files that processes map to write to them, apart from SQLite's."""
    mapped = [root.words, root.counters, root.hosts, *(root.shared_dir / name for name in root.files.names_in(root.shared_dir))]
    mapped += [root.packs_dir / name / "index" for name in root.files.names_in(root.packs_dir)]
    return mapped + [root.tmp_dir / name for name in root.files.names_in(root.tmp_dir) if name.endswith(".map")]


def _refuse(directory: str | Path, expected: str, actual: str, todo: str) -> NoReturn:
    raise RootRefused(f"{directory}: expected {expected}, found {actual}: {todo}", path=str(directory), wanted=expected, found=actual)


def _read_format(directory: Path) -> int | None:
    """The id of the root at ``directory``; None if there is no root, `_EMPTY` if a power cut left FORMAT empty, `_DAMAGED` if it has
    other content than Forebay writes."""
    path = directory / "FORMAT"
    try:
        if not stat.S_ISREG(path.lstat().st_mode):
            _refuse(directory, "a root of Forebay", "a FORMAT that is not a plain file", f"{ANOTHER}, or remove this one")
        text = host.read_small(path, LONGEST_FORMAT)
    except FileNotFoundError:
        return None
    except NotADirectoryError:
        _refuse(directory, "a directory", "something else", ANOTHER)
    if text is None:
        return _DAMAGED  # it is too long
    if not text.strip(b"\0"):
        return _EMPTY
    version = re.match(_VERSION, text)  # what follows it may be another in a newer format
    found = int(version[1]) if version else VERSION
    if found > VERSION:
        message = f"{directory} has format {found}, this Forebay reads format {VERSION} at most: upgrade it, or {ANOTHER}"
        raise NewerFormat(message, path=str(directory), found=found, known=VERSION)
    match = re.fullmatch(_FORMAT, text)
    return int(match[1], 16) if match else _DAMAGED


def _read_id(directory: Path, id_in_catalog: Callable[[Path], int | None]) -> int | None:
    """As `_read_format`; `_STRANGE` if the head and the catalog agree on another id than FORMAT has, as after one of its digits changed."""
    id = _read_format(directory)
    if id is None or id < 0 or (in_head := id_in_head(directory)) in (None, id):
        return id
    if not Root(directory, id).is_same():  # of an older format, where FORMAT says more than the id
        return id
    is_strange = id_in_catalog(directory / "catalog.sqlite") == in_head and _is_of_owner(directory)
    return _STRANGE if is_strange and _read_format(directory) == id else id  # else the root was replaced meanwhile


def _refuse_network(directory: Path) -> None:
    kind = host.fs_kind(next(p for p in (directory, *directory.parents) if p.exists()))
    if not host.is_local(kind):
        todo = "choose a directory on a local disk, such as $TMPDIR or /dev/shm (this one may serve as a read-only upstream)"
        _refuse(directory, "a local file system", f"one of kind {kind}, where locks and mappings may not be shared", todo)


def _inside(directory: Path, shared: bool) -> Path:
    """``directory``; or, if that is open to others and not a root, the directory in it that becomes the root."""
    try:
        status = directory.lstat()
    except FileNotFoundError:
        return directory
    if not stat.S_ISDIR(status.st_mode) or _has_format(directory):
        return directory
    foreign = status.st_uid != os.geteuid() and not (shared and _fits_group(status))
    if foreign and not os.access(directory, os.W_OK | os.X_OK, effective_ids=True):
        return directory  # is refused, with the reason
    if foreign or status.st_mode & (stat.S_IWOTH | stat.S_ISVTX):
        return directory / (f"forebay-g{os.getegid()}" if shared else f"forebay-{os.geteuid()}")
    return directory


def _has_format(directory: Path) -> bool:
    return os.path.lexists(directory / "FORMAT")


def _may_write(directory: Path) -> bool:
    """Whether this process may change the root: its directory, and the catalog in it."""
    catalog = directory / "catalog.sqlite"
    files = [directory, catalog] if catalog.exists() else [directory]
    return all(os.access(path, os.W_OK, effective_ids=True) for path in files)


def _is_a_groups(status: os.stat_result) -> bool:
    return bool(status.st_mode & stat.S_IWGRP)


def _fits_group(status: os.stat_result) -> bool:
    """Whether this directory, which belongs to another user, can be the root of a group of this user."""
    ours = status.st_gid in (os.getegid(), *os.getgroups())
    return ours and _is_a_groups(status) and not status.st_mode & (stat.S_IWOTH | stat.S_ISVTX)


def _make_directory(directory: Path) -> None:
    for parent in reversed(directory.parents):
        if not parent.exists():
            host.mkdir(parent, 0o755)
    if not os.path.lexists(directory):
        host.mkdir(directory, 0o700)


def _check_owner(directory: Path, shared: bool) -> None:
    status = directory.lstat()
    if not stat.S_ISDIR(status.st_mode):
        _refuse(directory, "a directory", "something else", ANOTHER)
    if status.st_mode & stat.S_IWOTH and _has_format(directory):
        _refuse(directory, "a root that only its owner or group may write to", "one that everybody may write to", f"chmod o-w {directory}")
    if status.st_uid == os.geteuid() or (_fits_group(status) and (shared or _has_format(directory))):
        return
    owner = f"one of user {status.st_uid} with mode {stat.S_IMODE(status.st_mode):04o}"
    _refuse(directory, f"a directory of user {os.geteuid()}", owner, f"{ANOTHER}, or have its owner create it with shared=True")


def _create(new: Root) -> int:
    """Create the files of a root, FORMAT last: the process that links FORMAT first determines the root's id."""
    _refuse_foreign(new.path)
    _lay_out(new)
    new.install(new.path / "FORMAT", lambda fd: host.pwrite(fd, new.format_line, 0))
    id = _read_format(new.path)
    if id is None or id < 0:
        _refuse(new.path, "an undisturbed directory", "a FORMAT file that changed at once", "stop the program that changes it")
    return id


def _restore_format(directory: Path, id_in_catalog: Callable[[Path], int | None]) -> int:
    """Rewrite a FORMAT that is empty, damaged, or of another root. Any number of processes may do so at once: each writes the same."""
    status = os.lstat(directory / "FORMAT")
    found = _read_id(directory, id_in_catalog)
    if found is None:
        _refuse(directory, "an undisturbed directory", "a FORMAT file that keeps changing", "stop the program that changes it")
    if found >= 0:  # another process was first
        return found
    if found != _STRANGE:  # else it is a root for sure
        _refuse_foreign(directory)
    id = _id_without_format(directory, found, id_in_catalog)
    if id is None:
        id = xxhash.xxh3_64_intdigest(f"{status.st_dev} {status.st_ino} {status.st_mtime_ns}".encode()) >> 2
    what = {_EMPTY: "empty, as after a power cut", _STRANGE: "damaged, as it names another root"}.get(found, "damaged")
    log.warning("%s: its FORMAT is %s: it is rewritten", directory, what)
    root = Root(directory, id, shared=_is_a_groups(directory.stat()))
    root.replace(directory / "FORMAT", root.format_line)
    return id


def _id_without_format(directory: Path, found: int, id_in_catalog: Callable[[Path], int | None]) -> int | None:
    """The id of a root whose FORMAT does not tell it, from its other files. A damaged one may be another program's: so the catalog has
    to name the root, belong to the directory's owner, and agree with the head. Raises `RootRefused` where it does not."""
    if found == _EMPTY:
        return id_left(directory, id_in_catalog)
    in_catalog = id_in_catalog(directory / "catalog.sqlite")
    if in_catalog is None or not _is_of_owner(directory) or id_left(directory, id_in_catalog) != in_catalog:
        text = _start_of_format(directory)
        _refuse(directory, "a root of Forebay", f"a FORMAT file containing {text!r}", f"{ANOTHER}, or remove this one")
    return in_catalog


def _is_of_owner(directory: Path) -> bool:
    """Whether the catalog belongs to the user, or to the group, that the directory belongs to."""
    above, catalog = directory.stat(), os.lstat(directory / "catalog.sqlite")
    return catalog.st_uid == above.st_uid or (_is_a_groups(above) and catalog.st_gid == above.st_gid)


def _start_of_format(directory: Path) -> bytes:
    fd = host.open_fd(directory / "FORMAT", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        return os.pread(fd, 40, 0)
    finally:
        os.close(fd)


def _refuse_foreign(directory: Path) -> None:
    others = list(foreign(directory))
    if others:
        actual = f"{len(others)} things that are not Forebay's ({', '.join(others[:3])})"
        _refuse(directory, "an empty or new directory", actual, f"use a directory for the cache alone, such as {directory}/forebay")


def foreign(directory: Path) -> Iterator[str]:
    """Names in ``directory`` that do not belong to a root, as paths below it."""
    for name in sorted(os.listdir(directory)):
        if name in _DIRECTORIES and stat.S_ISDIR((directory / name).lstat().st_mode):
            yield from (f"{name}/{inner}" for inner in os.listdir(directory / name) if not _DIRECTORIES[name](inner))
            if name == "blobs":
                yield from _foreign_in_fans(directory / name)
        elif not (re.fullmatch(_FILES, name) or is_scrap(name)):
            yield name


def _foreign_in_fans(blobs: Path) -> Iterator[str]:
    for fan in sorted(_FANS & set(os.listdir(blobs))):
        directory = blobs / fan
        if not stat.S_ISDIR(directory.lstat().st_mode):
            yield f"blobs/{fan}"
        else:
            yield from (f"blobs/{fan}/{name}" for name in os.listdir(directory) if parse_blob_below(fan, name) is None)


def _lay_out(root: Root) -> None:
    """Create what is missing. Each step may be repeated, and done by other processes at the same time."""
    _settle(root, root.path, root.dir_mode)
    for directory, names in ((root.path, tuple(_DIRECTORIES)), (root.blobs_dir, FANS)):
        with root.files.directory(directory) as fd:  # once for all: there are hundreds of names
            for path in [f"{directory}/{name}" for name in names]:  # a `Path` of each would take longer than its directory
                host.mkdir(path, root.dir_mode, fd)
                _settle(root, path, root.dir_mode, fd)
        if directory == root.path:
            _store_in_place(root)
    locks = root.words.parent
    with root.files.directory(locks) as fd:
        there = root.files.names_in(root.path / "locks")
        for name in LOCKS:
            path = f"{locks}/{name}"
            if name not in there:
                with contextlib.suppress(FileExistsError):  # another process makes this root too
                    os.close(host.create(path, root.file_mode, directory=fd))
            _settle(root, path, root.file_mode, fd)
    root.install(root.words, lambda fd: host.allocate(fd, 0, _WORDS_SIZE))
    root.install(root.path / "CACHEDIR.TAG", lambda fd: host.pwrite(fd, _TAG, 0))


def _settle(root: Root, path: str | Path, mode: int, directory: int | None = None, *, is_ours: bool = True) -> None:
    """Set the mode of ``path`` whatever the umask was, also where its creator was killed before doing so. If ``path`` is a link, refuse it
    where ``is_ours``, else leave it alone. ``directory``: a descriptor of its parent directory, if that is open."""
    top = directory is None and path == root.path
    if directory is not None:
        status = os.stat(os.path.basename(path), dir_fd=directory, follow_symlinks=False)
    else:
        status = os.lstat(path) if top else root.files.lstat(path)
    if stat.S_ISLNK(status.st_mode):
        if not is_ours:
            return
        _refuse(path, "a file or directory of the root's own", "a symbolic link", "remove it; symbolic links are not followed")
    if stat.S_IMODE(status.st_mode) != mode and status.st_uid == os.geteuid():
        host.chmod(path, mode) if top else root.files.chmod(path, mode)


def _complete(root: Root) -> None:
    """Recreate what was removed from a root, and remove what killed installers left."""
    for name in _DIRECTORIES:
        path = root.path / name
        if os.path.lexists(path) and not stat.S_ISDIR(path.lstat().st_mode):
            _refuse(path, "a directory of the root's own", "something else", "remove it; symbolic links are not followed")
    _remove_links(root)
    _refuse_foreign_locks(root)
    expected = {"": _DIRECTORIES.keys(), "blobs": _FANS, "locks": _LOCK_FILES}
    if any(not names <= set(root.files.names_in(root.path / directory)) for directory, names in expected.items()):
        _lay_out(root)
    if not root.path.stat().st_mode & 0o007:  # else its owner opened it up to readers, these files among the rest
        for name in ("catalog.sqlite", "catalog.sqlite-wal", "catalog.sqlite-shm", "counters", "settings.json"):
            with contextlib.suppress(FileNotFoundError):
                _settle(root, root.path / name, root.file_mode, is_ours=False)
    root.sweep()


def _remove_links(root: Root) -> None:
    """Remove links that replaced directories of blobs: Forebay does not follow them, so nothing could be stored there."""
    try:
        with root.files.listing(root.blobs_dir) as fd, os.scandir(fd) as scan:
            links = [entry.name for entry in scan if entry.name in _FANS and not entry.is_dir(follow_symlinks=False)]
    except FileNotFoundError:
        return
    for name in links:
        log.warning("%s is a link or a file instead of a directory: it is recreated", root.blobs_dir / name)
        with contextlib.suppress(IsADirectoryError):  # another process has recreated it since it was listed
            root.files.unlink(root.blobs_dir / name)


def _refuse_foreign_locks(root: Root) -> None:
    try:
        with root.files.listing(root.path / "locks") as fd, os.scandir(fd) as scan:
            strange = [entry.name for entry in scan if entry.name in _LOCK_FILES and not entry.is_file(follow_symlinks=False)]
    except FileNotFoundError:
        return
    for name in strange:
        _refuse(root.lock(name), "a file of the root's own", "something else", "remove it: it is recreated")
