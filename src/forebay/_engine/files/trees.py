"""Directories that are handed out: their files are hard links to blobs, so that they cost no bytes of their own."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from forebay._engine.files.layout import Root
from forebay._kernel.below import Below, LinkInTheWay, why_not_below


def build(root: Root, id: int, members: Iterable[tuple[str, str | Path]], *, keyhash: int = 0) -> Path:
    """Make the tree ``id`` of ``(relative name, blob)``; it has its name only when it is whole.

    Raises ValueError for a name that could leave the tree or that two members claim, FileNotFoundError for a blob that is gone,
    and what the disk raises; then nothing is left. Caller: holds leases on the members and, as ``keyhash``, the tree's key.
    """
    staged, path = root.tmp(keyhash, id, ".tree"), root.tree(id)
    try:
        _make_directory(root, str(staged))
        _link_all(root, str(staged), members)
        for directory in _directories(root, str(staged)):
            root.files.chmod(directory, root.tree_mode)
        # Moving a directory requires write permission on it: its own mode is set after the move, its row after both.
        root.files.chmod(staged, root.dir_mode)
        root.files.rename(staged, path)
    except BaseException:
        root.files.remove_whole(staged)
        raise
    root.files.chmod(path, root.tree_mode)
    return path


def remove(root: Root, id: int, *, keyhash: int = 0) -> bool:
    """Remove the tree ``id`` with all that is in it, and what a killed `build` of it left; False if nothing was there.

    Caller: holds the lock of ``id`` exclusively. Symbolic links are removed, never followed. May be repeated after a crash.
    """
    return root.files.remove_whole(root.tree(id)) | root.files.remove_whole(root.tmp(keyhash, id, ".tree"))


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
            for entry in inside:
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


def _link_all(root: Root, top: str, members: Iterable[tuple[str, str | Path]]) -> None:
    """Plain strings, and a directory is opened once for its files: there may be many thousands."""
    directories = {""}
    for folder, files in itertools.groupby(members, key=_folder_of):
        parts, name = folder.split("/"), folder
        try:
            for depth in range(1, len(parts) + 1):
                above = "/".join(parts[:depth])
                if above not in directories:
                    _make_directory(root, f"{top}/{above}")
                    directories.add(above)
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
