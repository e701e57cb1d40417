"""Directories that are handed out: their files are hard links to blobs, so that they cost no bytes of their own."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from forebay._engine.layout import Root, parse_blob_name
from forebay._kernel import host


def build(root: Root, id: int, members: Iterable[tuple[str, str | Path]], *, keyhash: int = 0) -> Path:
    """Make the tree ``id`` of ``(relative name, blob)``; it has its name only when it is whole.

    Raises ValueError for a name that could leave the tree or that two members claim, FileNotFoundError for a blob that is gone,
    and what the disk raises; then nothing is left. Caller: holds leases on the members and, as ``keyhash``, the tree's key.
    """
    staged, path = root.tmp(keyhash, id, ".tree"), root.tree(id)
    try:
        host.mkdir(staged, 0o700)
        _link_all(str(staged), members)
        for directory in _directories(staged):
            host.chmod(directory, root.tree_mode)
        # A directory can only be moved by who may write to it: its own mode comes after the move, its row after both.
        host.chmod(staged, 0o700)
        host.rename(staged, path)
    except BaseException:
        remove_whole(staged)
        raise
    host.chmod(path, root.tree_mode)
    return path


def remove(root: Root, id: int, *, keyhash: int = 0) -> bool:
    """Remove the tree ``id`` with all that is in it, and what a killed `build` of it left; False if nothing was there.

    Caller: holds the lock of ``id`` exclusively. Symbolic links are removed, never followed. May be repeated after a crash.
    """
    return remove_whole(root.tree(id)) | remove_whole(root.tmp(keyhash, id, ".tree"))


def list_trees(root: Root) -> Iterator[int]:
    """The ids of all trees; what has no name of ours is none of our business."""
    for name in os.listdir(root.trees_dir):
        found = parse_blob_name(name)
        if found and not found.suffix:
            yield found.id


def list_files(root: Root, id: int) -> Iterator[str]:
    """The names of all that lies in a tree and is no directory. Raises FileNotFoundError where there is no such tree."""
    top = root.tree(id)
    for directory in _directories(top):
        with os.scandir(directory) as found:
            yield from (os.path.relpath(entry.path, top) for entry in found if not entry.is_dir(follow_symlinks=False))


def charge(root: Root, id: int) -> int:
    """How many bytes of disk the tree's directories take. Raises FileNotFoundError where there is no such tree."""
    return sum(directory.lstat().st_blocks * 512 for directory in _directories(root.tree(id)))


def footprint(names: Iterable[str], block: int) -> int:
    """About how many bytes of disk the directories of a tree with these members will take: enough, where names are not too long."""
    sizes: dict[str, int] = {"": 0}
    for name in names:
        *above, last = name.split("/")
        for depth, part in enumerate((*above, last)):
            parent = "/".join(above[:depth])
            if depth < len(above) and "/".join(above[: depth + 1]) in sizes:
                continue
            sizes[parent] += 2 * len(os.fsencode(part)) + 24
            if depth < len(above):
                sizes["/".join(above[: depth + 1])] = 0
    return sum(max(-(-size // block), 1) * block for size in sizes.values())


def _link_all(top: str, members: Iterable[tuple[str, str | Path]]) -> None:
    """Plain strings: there may be many thousands."""
    made = {""}
    for name, blob in members:
        parts = name.split("/")
        if "\0" in name or not {"", ".", ".."}.isdisjoint(parts):
            raise ValueError(f"{name!r} cannot be the name of a file in a tree")
        try:
            for depth in range(1, len(parts)):
                above = "/".join(parts[:depth])
                if above not in made:
                    host.mkdir(f"{top}/{above}", 0o700)
                    made.add(above)
            host.link(blob, f"{top}/{name}")
        except (FileExistsError, NotADirectoryError) as error:
            raise ValueError(f"{name!r} is two things in one tree") from error


def _directories(top: Path) -> Iterator[Path]:
    """``top`` and all directories below, the deepest first."""
    with os.scandir(top) as found:
        below = [Path(entry.path) for entry in found if entry.is_dir(follow_symlinks=False)]
    for directory in below:
        yield from _directories(directory)
    yield top


def remove_whole(top: Path) -> bool:
    """Remove a file, or a directory with all that is in it; False if it was missing. Symbolic links are removed, never followed."""
    try:
        found = top.lstat()
    except FileNotFoundError:
        return False
    if not stat.S_ISDIR(found.st_mode):
        return host.unlink(top)
    _remove_directory(top, found)
    return True


def _remove_directory(directory: Path, found: os.stat_result) -> None:
    if found.st_mode & stat.S_IRWXU != stat.S_IRWXU and found.st_uid == os.geteuid():
        host.chmod(directory, 0o700)
    with os.scandir(directory) as entries:
        inside = list(entries)
    for entry in inside:
        if entry.is_dir(follow_symlinks=False):
            _remove_directory(Path(entry.path), entry.stat(follow_symlinks=False))
        else:
            host.unlink(Path(entry.path))
    host.rmdir(directory)
