"""A remote directory: the meaning of its URL, the URLs and names of the files below it, its path if it is local."""

from __future__ import annotations

import contextlib
import glob
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from forebay import errors, remote
from forebay._kernel.interrupts import paced
from forebay._model import ObjectInfo, Remote
from forebay.directories.manifests import File, Part, Patterns
from forebay.fetch import Fetcher
from forebay.fetch.prefix import Prefix
from forebay.fetch.request import Target

if TYPE_CHECKING:
    from forebay.remote import FilesystemRemote, Realm


SHOWN = 5
"""Names that the text of an error has."""


@dataclass(frozen=True, slots=True)
class RemoteDirectory:
    """A directory, or a part of it, and where its files are. Callable from any thread and after a fork.

    ``url``: as given, without a slash at its end; a path, if there is a filesystem object. ``key``: without secrets, the same for all
    spellings, with a slash at its end. ``local``: the absolute path of a directory of this host, else None."""

    url: str
    key: str
    remote: Remote
    local: str | None
    prefix: Prefix
    fetcher: Fetcher
    part: Part
    realm: Realm
    filesystem: FilesystemRemote | None = None

    @property
    def tree_key(self) -> str:
        """The key of the tree of this part."""
        suffix = str(self.part)
        return f"{self.key}#{suffix}" if suffix else self.key

    def object(self, name: str) -> str:
        """The URL, or path, of the file of this name."""
        return self.prefix.join(name)

    def target(self, name: str) -> Target:
        """The file of this name, as a target to fetch."""
        url = self.object(name)
        if self.filesystem is not None:
            return self.fetcher.target_on(self.filesystem, url)
        target = self.fetcher.target_by(url, self.fetcher.naming._replace(realm=self.realm), lambda: self.remote)
        return target if self.local is None else target._replace(in_place=os.path.join(self.local, name))

    def list(self) -> Iterator[tuple[str, ObjectInfo]]:
        """All objects below: relative names as the remote lists them, unchecked; that of an empty directory ends with a slash. Raises
        `RemoteError`."""
        head = self.prefix.folder.removesuffix("/") + "/" if self.local is None else ""
        for info in paced(self.remote.list(self.prefix.folder)):
            if not info.url.startswith(head):
                raise errors.BadListing(f"{self.key}: it lists {info.url!r}, which does not lie below it", url=self.key, name=info.url)
            name = self.prefix.name_of(info.url + "-")[:-1]  # as it is, a local path would lose the slash at its end
            yield name, info

    def archived(self, error: errors.Archived, name: str, files: Iterable[File]) -> errors.Archived:
        """The error of a directory of which the file ``name`` cannot be read, since it is archived, as may be others of ``files``."""
        found = {name}
        if (archived := getattr(self.remote, "archived", None)) is not None:
            with contextlib.suppress(errors.RemoteError):
                found.update(map(self.prefix.name_of, paced(archived(self.prefix.folder))))
        cold = sorted(found.intersection(file.name for file in paced(files)))
        patterns = [glob.escape(name) for name in cold[:SHOWN]]
        more = f", and {len(cold) - SHOWN:,} more: the error's `names` has them all" if cold[SHOWN:] else ""
        todo = f"restore them first, or leave them out with exclude={patterns}{more}"
        message = f"{self.key}: archived files cannot be read: {todo} ({error})"
        return errors.Archived(message, url=self.key, status=error.status, tier=error.tier, names=cold)

    def is_object(self) -> bool:
        """Whether there is an object with the directory's own name. Raises `RemoteError`, except `NotFound`."""
        try:
            self.remote.stat(self.url)
        except (errors.NotFound, IsADirectoryError):
            return False
        except errors.RemoteError:
            return self.local is not None and os.path.isfile(self.local)
        return True


def check_either(text: str, filesystem: Any) -> None:
    """Raises `ConfigError` for an empty path, and for a URL together with a filesystem object."""
    if not text:
        raise errors.ConfigError("an empty path names no directory", name="path", value="")
    if filesystem is not None and remote.is_url(text):
        shown = remote.canonical(text)
        message = f"{shown} is a URL, and a filesystem was given too: give the path on it, without a scheme"
        raise errors.ConfigError(message, name="path", value=shown)


def locate(
    fetcher: Fetcher, url: str | os.PathLike[str], filesystem: Any = None, include: Patterns = None, exclude: Patterns = None, *,
    options: remote.RemoteOptions | None = None,
) -> RemoteDirectory:  # fmt: skip
    """The directory of a URL or path, or of a path of a filesystem object of fsspec or pyarrow, or the part of it that patterns select.
    ``options``: of requests for a URL, in place of those of the cache.

    Raises `ConfigError`, or `MissingExtra` for a scheme whose package is not installed."""
    text, part = remote.as_text(url), Part.of(include, exclude)
    check_either(text, filesystem)
    realm = fetcher.realm if options is None else remote.Realm(options)
    if filesystem is None:
        prefix = Prefix(text)
        try:
            key = remote.canonical(prefix.folder, fetcher.naming._replace(realm=realm))
            served_by = remote.resolve(text, options or fetcher.options, realm)
            return RemoteDirectory(prefix.url, key, served_by, prefix.local, prefix, fetcher, part, realm)
        except errors.ConfigError:
            from forebay.remote.filesystems.clients import arrow_from_uri

            arrow = arrow_from_uri(text)  # pyarrow knows schemes that neither fsspec nor we know
            if arrow is None:
                raise
        filesystem, text = arrow
    local = remote.local_path_on(filesystem, text)
    if local is not None:
        return locate(fetcher, local, None, include, exclude)
    prefix = Prefix(text, plain=True)
    place = remote.on_filesystem(filesystem, fetcher.options)
    key = place.key(prefix.folder, fetcher.naming)
    return RemoteDirectory(prefix.url, key, place, None, prefix, fetcher, part, realm, place)
