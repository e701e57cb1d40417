"""Whole files: finished, immutable, named after their entry's id; a name is used once, ever.

And directories that are handed out: their files are hard links to blobs, so that they cost no bytes of their own."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import stat
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import xxhash

from forebay._engine.files.layout import FANS, Root, parse_blob_below
from forebay._kernel import host, interrupts, mappings
from forebay._kernel.below import Below, LinkInTheWay, NoPlainFile, why_not_below
from forebay._model import Buffer, Entry, noted
from forebay.errors import Damaged

CHUNK = 1 << 20
"""A checksum is the xxh3-128 of the xxh3-128s of a file's chunks of 1 MiB, so that chunks may arrive in any order."""

SECOND = 1_000_000_000


def publish(root: Root, staged: Path, id: int, suffix: str = "") -> Path:
    """Give the finished file ``staged`` its final name. Caller: has inserted its row, and commits it after this."""
    path = root.blob(id, suffix)
    root.files.rename(staged, path)
    return path


def write(root: Root, id: int, data: Buffer, checksum: bytes, suffix: str = "") -> None:
    """Write a whole file under its final name. Caller: holds the writer lock and has recorded its intent."""
    fd = root.files.create(root.blob_name(id, suffix), root.blob_mode)
    try:
        host.pwrite(fd, data, 0)
        seal(fd, checksum)
    finally:
        os.close(fd)


def seal(fd: int, checksum: bytes) -> None:
    """Set the modification time of a finished file so that `is_sealed` detects later writes."""
    host.set_mtime(fd, time.time_ns() // SECOND * SECOND + seal_of(checksum))


def is_sealed(status: os.stat_result, checksum: bytes) -> bool:
    """Whether a file still has the time that `seal` gave it. Any write, by whatever name of the file, sets another one.

    Only the fraction of the second counts: it follows from the bytes, so that entries which share a file agree, and it needs no record.
    A file system that does not keep nanoseconds keeps no seal: whole seconds are also what ``tar`` and ``cp -p`` leave, after any write."""
    return status.st_mtime_ns % SECOND == seal_of(checksum)


def seal_of(checksum: bytes) -> int:
    """The fraction of a second, in nanoseconds, that `seal` sets."""
    return int.from_bytes(checksum[:8], "little") % SECOND


def mark_of(checksum: bytes) -> int:
    """56 bits of a checksum, by which a copy of a small value is recognized."""
    return int.from_bytes(checksum[:7], "little")


def remove_whatever_suffix(root: Root, id: int) -> None:
    """Remove the file of ``id`` whose suffix is unknown. Caller: holds the writer lock, and no row names the file."""
    fan = root.blobs_dir / FANS[id & 0xFF]
    for name in root.files.names_in(fan):
        if (blob := parse_blob_below(fan.name, name)) and blob.id == id:
            _remove(root, fan / name)


def unpublish(root: Root, staged: Path, id: int, suffix: str = "") -> None:
    """Take the name away again: the row could not be committed."""
    root.files.rename(root.blob(id, suffix), staged)


def link_blob(root: Root, source: str, id: int) -> None:
    """Give the blob ``source`` a second name, for the entry ``id``. Caller: holds the writer lock and has recorded its intent. Raises
    FileNotFoundError if the source is gone."""
    root.files.link(source, root.blob_name(id))


def open_blob(root: Root, id: int, suffix: str = "") -> int:
    """Return a descriptor to read from. Raises FileNotFoundError if there is no such blob, `Damaged` if it is not a plain file."""
    path = root.blob_name(id, suffix)
    try:
        return root.files.open(path)
    except NoPlainFile as error:
        raise Damaged(f"{path} is not a file", key=path) from error
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise Damaged(f"{path} leads to a symbolic link: none is followed", key=path) from error
        raise


def map_blob(root: Root, entry: Entry, *, copies: bool = False) -> tuple[memoryview, os.stat_result]:
    """The entry's bytes, read-only, and the state of their file; good until the last view of them is gone, also after an eviction. Holds
    no descriptor. ``copies``: they are copied, not mapped.

    Raises FileNotFoundError where the file is gone, `Damaged` where it has another size.
    """
    fd = open_blob(root, entry.id, entry.suffix)
    try:
        status = os.fstat(fd)
        data = os.read(fd, entry.size) if copies else None
        size = status.st_size if data is None or len(data) == entry.size else len(data)  # it may have been cut since
        if size != entry.size:
            raise Damaged(f"{entry.name}: it has {size} bytes, {entry.size} were stored", key=entry.key)
        if data is not None:
            return memoryview(data), status
        view, is_mapped = mappings.read_or_map(fd, entry.size)
        if entry.size and is_mapped:
            mappings.note_file(view, root.blob_name(entry.id, entry.suffix), status)
        return view, status
    except EOFError as error:
        raise Damaged(f"{entry.name}: it was cut", key=entry.key) from error
    finally:
        os.close(fd)


def remove_blob(root: Root, id: int, suffix: str = "") -> bool:
    """Remove the file; False if it was gone. Caller: holds the lock of ``id`` exclusively."""
    return _remove(root, root.blob_name(id, suffix))


def _remove(root: Root, path: str | Path) -> bool:
    try:
        return root.files.unlink(path)
    except IsADirectoryError:  # none that we made, and in the way
        return root.files.remove_whole(path)


def verify_blob(root: Root, path: Path, size: int, checksum: bytes) -> bool:
    """Whether the file holds what was stored. Raises OSError where it cannot be read, FileNotFoundError where it is gone."""
    fd = root.files.open(path)
    try:
        return os.fstat(fd).st_size == size and checksum_of(fd) == checksum
    finally:
        os.close(fd)


def checksum_of(source: Buffer | int) -> bytes:
    """The checksum (16 bytes) of a buffer, or of the whole file behind a descriptor."""
    if type(source) is bytes and 0 < len(source) <= CHUNK:  # the same in fewer steps: small values are compared at each first read
        return xxhash.xxh3_128_digest(xxhash.xxh3_128_digest(source))
    whole = xxhash.xxh3_128()
    if isinstance(source, int):
        for start in range(0, os.fstat(source).st_size, CHUNK):
            interrupts.point()
            whole.update(digest_of_chunk(source, start))
    else:
        data = memoryview(source).cast("B")
        for start in range(0, len(data), CHUNK):
            interrupts.point()
            whole.update(xxhash.xxh3_128_digest(data[start : start + CHUNK]))
    return whole.digest()


def digest_of_chunk(fd: int, start: int) -> bytes:
    """The xxh3-128 of the chunk of a file that starts at ``start``."""
    digest, end = xxhash.xxh3_128(), start + CHUNK
    while start < end and (data := os.pread(fd, end - start, start)):
        digest.update(data)
        start += len(data)
    return digest.digest()


def build(root: Root, id: int, members: Iterable[tuple[str, str | Path]], folders: Iterable[str] = (), *, keyhash: int = 0) -> Path:
    """Make the tree ``id`` of ``(relative name, blob)`` and of empty directories, whose names end with a slash; it has its name only when
    it is whole.

    Raises ValueError for a name that could leave the tree or that two members claim, FileNotFoundError for a blob that is gone,
    and what the disk raises; then nothing is left. Caller: holds leases on the members and, as ``keyhash``, the tree's key.
    """
    staged, path = root.tmp(keyhash, id, ".tree"), root.tree(id)
    try:
        _make_directory(root, str(staged))
        _link_all(root, str(staged), members, folders)
        for directory in interrupts.paced(_directories(root, str(staged))):
            root.files.chmod(directory, root.tree_mode)
        # Moving a directory requires write permission on it: its own mode is set after the move, its row after both.
        root.files.chmod(staged, root.dir_mode)
        root.files.rename(staged, path)
    except BaseException:
        root.files.remove_whole(staged)
        raise
    root.files.chmod(path, root.tree_mode)
    return path


def folders_of(meta: str) -> list[str] | None:
    """The names of the empty directories in a tree of this ``meta``, each with a slash at its end; None where another program wrote what
    cannot be such names."""
    folders = (noted(meta) or {}).get("folders", [])
    is_sound = type(folders) is list and all(type(name) is str and name.endswith("/") for name in folders)
    return folders if is_sound and not any(why_not_below(name[:-1]) for name in folders) else None


def extend(root: Root, id: int, members: Iterable[tuple[str, str]]) -> list[str]:
    """Link more files, sorted by name, into the tree ``id``; returns the names under which another file lies there, or none can lie.

    Each file appears at once; a killed call leaves some of them. Caller: holds leases on the tree and the members, whose names its rows
    have, and no other process extends the tree."""
    top, wrong = str(root.tree(id)), list[str]()
    for folder, files in itertools.groupby(interrupts.paced(members), key=_folder_of):
        missing = list[tuple[str, str]]()
        for name, blob in files:
            try:
                if not os.path.samestat(root.files.lstat(f"{top}/{name}"), root.files.lstat(blob)):
                    wrong.append(name)
            except FileNotFoundError:
                missing.append((name, blob))
            except (NotADirectoryError, LinkInTheWay):
                wrong.append(name)
        try:
            if missing:
                with _unlocked(root, top, folder) as fd:
                    for name, blob in missing:
                        root.files.link(blob, f"{top}/{name}", fd)
        except (FileNotFoundError, FileExistsError, NotADirectoryError, LinkInTheWay):
            wrong += [name for name, _ in missing]
    return wrong


@contextlib.contextmanager
def _unlocked(root: Root, top: str, folder: str) -> Iterator[int]:
    """A descriptor of a directory of a tree, which is made if it is missing, and can be written to inside the block."""
    parts = folder.split("/") if folder else []
    paths = [top, *("/".join((top, *parts[:depth])) for depth in range(1, len(parts) + 1))]
    try:
        for path in paths:
            if path != top and not root.files.is_directory(path):
                _make_directory(root, path)
            if not root.shared:
                root.files.chmod(path, root.tree_mode | stat.S_IWUSR)
        with root.files.directory(paths[-1]) as fd:
            yield fd
    finally:
        for path in reversed(paths):
            if not root.shared and root.files.is_directory(path):
                root.files.chmod(path, root.tree_mode)


def holds(root: Root, tree: str, part: str) -> bool:
    """Whether all files of the tree at the path ``part`` lie in the one at ``tree``, too."""
    files = sorted((name, state) for name, state in interrupts.paced(look(root, part).items()) if not name.endswith("/"))
    try:
        for folder, some in itertools.groupby(files, key=lambda file: file[0].rpartition("/")[0]):
            with root.files.directory(f"{tree}/{folder}".removesuffix("/")) as fd:
                for name, state in some:
                    status = os.stat(name.rpartition("/")[2], dir_fd=fd, follow_symlinks=False)
                    if (status.st_ino, status.st_size, status.st_mtime_ns) != state:
                        return False
    except (FileNotFoundError, NotADirectoryError, LinkInTheWay):
        return False
    return True


def remove(root: Root, id: int, *, keyhash: int = 0) -> bool:
    """Remove the tree ``id`` with all that is in it, and what a killed `build` of it left; False if nothing was there.

    Caller: holds the lock of ``id`` exclusively. Symbolic links are removed, never followed. May be repeated after a crash.
    """
    return root.files.remove_whole(root.tree(id)) | root.files.remove_whole(root.tmp(keyhash, id, ".tree"))


def grows(meta: str) -> bool:
    """Whether files are added to a tree of this ``meta``. A process that was killed between may have left rows of files without links,
    which nobody was given."""
    return (noted(meta) or {}).get("grows") is True


def list_files(root: Root, id: int) -> Iterator[str]:
    """The names of everything in a tree that is not a directory. Raises FileNotFoundError if there is no such tree."""
    top = str(root.tree(id))
    for directory in _directories(root, top):
        with root.files.listing(directory) as fd, os.scandir(fd) as scan:
            names = [entry.name for entry in scan if not entry.is_dir(follow_symlinks=False)]
        yield from (f"{directory}/{name}"[len(top) + 1 :] for name in names)


def look(root: Root, path: str) -> dict[str, tuple[int, int, int]]:
    """The content of a tree: (inode, size, modification time) by relative name; that of a directory ends with a slash.

    Raises FileNotFoundError or `LinkInTheWay` if there is no such tree; no link is followed."""
    files: dict[str, tuple[int, int, int]] = {}
    folders = [""]
    while folders:
        above = folders.pop()
        with root.files.listing(f"{path}/{above}".removesuffix("/")) as fd, os.scandir(fd) as inside:
            for entry in interrupts.paced(inside):
                name = above + entry.name
                if entry.is_dir(follow_symlinks=False):
                    folders.append(name + "/")
                    files[name + "/"] = (0, 0, 0)
                else:
                    status = entry.stat(follow_symlinks=False)
                    files[name] = (status.st_ino, status.st_size, status.st_mtime_ns)
    return files


def footprint(names: Iterable[str], block: int) -> int:
    """About how many bytes of disk the directories of a tree with these members will take: enough, where names are not too long."""
    sizes: dict[str, int] = {"": 0}
    for name in interrupts.paced(names):
        *above, last = name.split("/")
        for depth, part in enumerate((*above, last)):
            parent = "/".join(above[:depth])
            if depth < len(above) and "/".join(above[: depth + 1]) in sizes:
                continue
            sizes[parent] += 2 * len(os.fsencode(part)) + 24
            if depth < len(above):
                sizes["/".join(above[: depth + 1])] = 0
    return sum(max(-(-size // block), 1) * block for size in sizes.values())


def growth(root: Root, id: int, names: Iterable[str], block: int) -> int:
    """As `footprint`, of names that are added to a tree."""
    top, known, size = str(root.tree(id)), set[str](), 0
    for name in interrupts.paced(names):
        size += 2 * len(os.fsencode(name.rpartition("/")[2])) + 24
        while (name := name.rpartition("/")[0]) and name not in known:
            known.add(name)
            size += 0 if root.files.is_directory(f"{top}/{name}") else block
    return size


def _link_all(root: Root, top: str, members: Iterable[tuple[str, str | Path]], folders: Iterable[str]) -> None:
    """Plain strings, and a directory is opened once for its files: there may be many thousands."""
    directories = {""}

    def make(folder: str) -> None:
        parts = folder.split("/")
        for depth in range(1, len(parts) + 1):
            above = "/".join(parts[:depth])
            if above not in directories:
                _make_directory(root, f"{top}/{above}")
                directories.add(above)

    for folder in interrupts.paced(folders):
        make(folder[:-1])
    for folder, files in itertools.groupby(interrupts.paced(members), key=_folder_of):
        name = folder
        try:
            make(folder)
            with root.files.directory(f"{top}/{folder}".removesuffix("/")) as fd:
                for name, blob in files:
                    root.files.link(blob, f"{top}/{name}", fd)
        except (FileExistsError, NotADirectoryError, LinkInTheWay) as error:
            raise ValueError(f"{name!r} is two things in one tree") from error


def _folder_of(member: tuple[str, str | Path]) -> str:
    """The directory in which a member's name lies. Raises ValueError for a name that could lie outside of the tree."""
    name, _ = member
    if why := why_not_below(name):
        raise ValueError(f"{name!r} cannot be the name of a file in a tree: {why}")
    return name.rpartition("/")[0]


def _make_directory(root: Root, path: str) -> None:
    root.files.mkdir(path, root.dir_mode)
    if root.shared:
        root.files.chmod(path, root.dir_mode)  # whatever the umask: other members of the group remove it if we are killed


def _directories(root: Root, top: str) -> Iterator[str]:
    """``top`` and all directories below, the deepest first."""
    with root.files.listing(top) as fd, os.scandir(fd) as scan:
        below = [entry.name for entry in scan if entry.is_dir(follow_symlinks=False)]
    for name in below:
        yield from _directories(root, f"{top}/{name}")
    yield top


def remove_whole(top: Path) -> bool:
    """Remove a file, or a directory with all that is in it; False if it was missing. Symbolic links are removed, never followed."""
    return Below(top.parent).remove_whole(top)
