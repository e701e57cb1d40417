"""A remote directory, such as a checkpoint: its files as a local directory once per node, its metadata, and its upload."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from typing import Any, NoReturn, Self

from forebay import errors, remote
from forebay._engine.null_store import NullStore
from forebay._kernel import host
from forebay._kernel.interrupts import guarded, guarded_methods
from forebay.cache import Cache, fetcher_of
from forebay.directories import copying, trees, uploading
from forebay.directories import metadata as stored
from forebay.directories.location import RemoteDirectory, check_either, locate
from forebay.directories.manifests import Patterns
from forebay.fetch import Fetcher
from forebay.fetch.request import FetchOptions
from forebay.reports import OnProgress, Progress

_STRIPPED = frozenset({"s3", "gs", "gcs", "http", "https"})
"""Schemes of URLs whose path on a filesystem is all that follows them."""

_SETTING = re.compile(r"\?(?:.*&)?(?:region|endpoint_override|scheme|allow_bucket_creation|allow_bucket_deletion|proxy_options)=")

_INSTEAD = {
    **dict.fromkeys(
        ("from_dict", "to_dict", "from_bytes", "to_bytes", "get_internal_representation"),
        "only directories are supported: write the data to a file in one, and use Checkpoint.from_directory(directory); read it back from "
        "`with checkpoint.as_directory() as directory`",
    ),
    "from_uri": "use Checkpoint(uri)",
    "to_uri": "use Checkpoint.upload(directory, uri), or checkpoint.persist(uri)",
    "uri": "use checkpoint.url; checkpoint.path is the path on checkpoint.filesystem",
    "get_preprocessor": "use checkpoint.get_metadata(), and rebuild the preprocessor from what you stored there",
    "set_preprocessor": "use checkpoint.set_metadata({...}) with what the preprocessor can be rebuilt from",
}


def _gone(name: str) -> AttributeError | None:
    """What to use instead of a method that Ray's checkpoints once had."""
    return AttributeError(f"Checkpoint has no {name}: {_INSTEAD[name]}") if name in _INSTEAD else None


class _Kind(type):
    def __getattr__(cls, name: str) -> NoReturn:
        raise _gone(name) or AttributeError(f"type object {cls.__name__!r} has no attribute {name!r}")


@guarded_methods()
class Checkpoint(metaclass=_Kind):
    """A directory on a remote or on this host: a checkpoint, a model, a folder of a dataset.

    ``path``: a URL or a local path; with a ``filesystem``, a path on it. ``filesystem``: a filesystem object of pyarrow or fsspec.
    ``cache``: the cache through which it is read; by default this process's default cache, opened when needed. With neither, any number of
    handles, processes and jobs of a node share one copy.

    Handles to the same directory are equal. A pickled handle opens its cache, or the default one, again when unpickled. Callable from any
    thread and on both sides of a fork. Raises `ConfigError` (a ValueError) for a URL together with a filesystem."""

    def __init__(self, path: str | os.PathLike[str], filesystem: Any = None, cache: Cache | None = None) -> None:
        self.url = remote.as_text(path)
        self._given, self._cache = filesystem, cache
        check_either(self.url, filesystem)
        if filesystem is None and not remote.is_url(self.url):
            self.url = remote.absolute_path(remote.expand_user(self.url))

    @classmethod
    def from_directory(cls, path: str | os.PathLike[str], cache: Cache | None = None) -> Self:
        """A handle to a directory on this host."""
        return cls(remote.absolute_path(remote.expand_user(remote.as_text(path))), None, cache)

    # -- what it is ------------------------------------------------------------------------------------------------

    @property
    def path(self) -> str:
        """The path on `filesystem`: the URL without its scheme, or an absolute local path."""
        if self._given is not None:
            return self.url
        local = remote.local_path(self.url)
        if local is not None:
            return local
        kind, _, rest = self.url.partition("://")
        needs_pyarrow = kind.lower() not in _STRIPPED or self._has_settings  # else pyarrow is not called: it may use the network
        return (self._arrow[1] if needs_pyarrow and self._arrow is not None else rest).rstrip("/")

    @property
    def filesystem(self) -> Any:
        """The filesystem that was given, else pyarrow's for the URL. None if pyarrow is not installed or has none for this URL."""
        if self._given is not None:
            return self._given
        return self._arrow[0] if self._arrow is not None else None

    @host.cached_property
    def _arrow(self) -> tuple[Any, str] | None:
        from forebay.remote.filesystems.clients import arrow_from_uri

        return arrow_from_uri(remote.local_path(self.url) or self.url)

    @host.cached_property
    def _source(self) -> tuple[str, Any]:
        """The URL or path, and its filesystem object; pyarrow's own, for URLs that it alone knows."""
        if self._given is None and (self._has_settings or not self._is_known) and self._arrow is not None:
            return self._arrow[1], self._arrow[0]
        return self.url, self._given

    @property
    def _has_settings(self) -> bool:
        """Whether the URL has settings of the connection, as pyarrow accepts them: ``s3://bucket/run?endpoint_override=...``."""
        return self.url.lower().startswith("s3://") and bool(_SETTING.search(self.url))

    @property
    def _is_known(self) -> bool:
        try:
            return remote.resolve(self.url) is not None
        except errors.ConfigError:
            return False

    @property
    def cache(self) -> Cache:
        """The cache through which it is read."""
        return self._cache if self._cache is not None else default_cache()

    def __repr__(self) -> str:
        if self._given is not None:
            kind = getattr(self._given, "type_name", None) or type(self._given).__name__
            return f"Checkpoint({self.url!r}, filesystem={kind})"
        return f"Checkpoint({self.url if remote.local_path(self.url) else remote.canonical(self.url)!r})"

    def _compared(self) -> str:
        return (self.url if self._given is not None else remote.canonical(self.url, remote.UrlNaming())).rstrip("/")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Checkpoint):
            return NotImplemented
        return self._compared() == other._compared() and _are_equal(self._given, other._given)

    def __hash__(self) -> int:
        return hash(self._compared())

    def __getstate__(self) -> Any:
        return state_without(self, "_arrow", "_source")

    def __fspath__(self) -> NoReturn:
        raise TypeError("a Checkpoint is no path: use `with checkpoint.as_directory() as path`, or `checkpoint.to_directory()`")

    def __getattr__(self, name: str) -> NoReturn:
        raise _gone(name) or AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    # -- its files -------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    @guarded
    def as_directory(self, *, include: Patterns = None, exclude: Patterns = None, **arguments: Any) -> Iterator[str]:
        """Its files as a local directory, read-only and complete, for a ``with``: all threads and processes of the node share one copy.

        After the block it stays in the cache for the next caller until the cache needs the room. A local directory is yielded as is. For
        arguments and errors, see `Cache.directory`."""
        url, filesystem = self._source
        if self._is_local and not arguments.get("force"):
            lease = trees.lease(self._location(include, exclude), FetchOptions())
        else:
            lease = self.cache.directory(url, include=include, exclude=exclude, filesystem=filesystem, **arguments)
        with lease as path:
            yield path

    def to_directory(
        self, path: str | os.PathLike[str] | None = None, *, overwrite: bool = False, include: Patterns = None, exclude: Patterns = None,
        **arguments: Any,
    ) -> str:  # fmt: skip
        """Make a private, writable copy of its files, and return its path. To read only, use `as_directory`, which makes no copy.

        Without a ``path`` the copy is a new directory in the temporary directory (``TMPDIR``) that only this user can read. The caller must
        remove it, for example with `shutil.rmtree`. Files are cloned if the file system supports reflinks; otherwise they take the space a
        second time, which no budget counts.

        If several processes request the same ``path``, one makes the copy. Other files in it stay. If a file would replace one that is not
        a copy of ours, raises `Foreign` (a FileExistsError), unless ``overwrite``. If the cache has no room, the files are fetched straight
        to their destination. Raises as `Cache.directory` does; `NoSpace` if the disk of the copy is full."""
        url, filesystem = self._source
        if self._is_local and not arguments.get("force"):
            return copying.copy(self._location(include, exclude), FetchOptions(), path, overwrite=overwrite)
        return self.cache.copy_directory(
            url, path, overwrite=overwrite, include=include, exclude=exclude, filesystem=filesystem, **arguments
        )

    @property
    def _is_local(self) -> bool:
        url, filesystem = self._source
        return (remote.local_path(url) if filesystem is None else remote.local_path_on(filesystem, url)) is not None

    @property
    def _fetcher(self) -> Fetcher:
        """The fetcher of the cache; for a local directory without a cache, one that needs none."""
        if self._cache is None and self._is_local:
            return Fetcher(NullStore(), remote.RemoteOptions())
        return fetcher_of(self.cache)

    def _location(self, include: Patterns = None, exclude: Patterns = None) -> RemoteDirectory:
        return locate(self._fetcher, *self._source, include, exclude)

    # -- its metadata ----------------------------------------------------------------------------------------------

    def get_metadata(self) -> dict[str, Any]:
        """Return the metadata that the remote has for it now; ``{}`` if there is none. Raises `RemoteError`."""
        return stored.read(self._location())

    def set_metadata(self, metadata: dict[str, Any]) -> None:
        """Store this as its metadata, replacing what is there. Raises `RemoteError`, or `NotJson` (a ValueError and a TypeError)."""
        stored.write(self._location(), metadata)

    def update_metadata(self, metadata: dict[str, Any]) -> None:
        """Set these keys of its metadata. Concurrent updates on this node are never lost; nor are those of other nodes if the store
        supports conditional writes (S3). Raises as `set_metadata` does."""
        stored.update(self._location(), metadata)

    # -- uploads ---------------------------------------------------------------------------------------------------

    @classmethod
    def upload(
        cls, directory: str | os.PathLike[str], url: str | os.PathLike[str], *, filesystem: Any = None, delete: bool = False,
        keep: bool = False, cache: Cache | None = None, on_progress: OnProgress | None = None,
    ) -> Self:  # fmt: skip
        """Upload a local directory to ``url``; returns a handle to it. Only missing files are sent, several at a time, large ones in parts.
        Until the upload is complete, readers get `Incomplete` rather than some of the files.

        ``delete``: remove remote files that are not in ``directory``, except the metadata. ``keep``: the files stay in the cache as though
        fetched, so this node need not fetch them. ``on_progress``: called in the states ``reading`` and ``sending``.

        The same call resumes an interrupted upload. Raises `SourceChanged` if a file changes during the upload, `Conflict` if another
        upload to the same URL started, `Unsupported` if the remote accepts no writes, `ConfigError`, `RemoteError`."""
        checkpoint = cls(url, filesystem, cache)

        def tell(state: str, done: int, total: int) -> None:
            if on_progress is not None:
                on_progress(Progress(remote.shown(url), done, total, state))

        fetcher = fetcher_of(checkpoint.cache) if keep else checkpoint._fetcher
        done = uploading.push(locate(fetcher, *checkpoint._source), directory, delete=delete, keep=keep, tell=tell)
        size = sum(file.size or 0 for file, _ in done.files)
        tell("done", size, size)
        return checkpoint

    def persist(
        self, url: str | os.PathLike[str], *, filesystem: Any = None, delete: bool = False, keep: bool = False,
        on_progress: OnProgress | None = None,
    ) -> Self:  # fmt: skip
        """Upload this directory to another URL, such as a local checkpoint to shared storage; returns its handle. See `upload`."""
        with self.as_directory() as directory:
            return self.upload(
                directory, url, filesystem=filesystem, delete=delete, keep=keep, cache=self._cache, on_progress=on_progress
            )  # fmt: skip


def state_without(checkpoint: object, *names: str) -> Any:
    """What is pickled of it, with the slots of a user's class, but without these attributes."""
    state = object.__getstate__(checkpoint)
    fields, slots = state if isinstance(state, tuple) else (state, None)
    kept = {name: value for name, value in fields.items() if name not in names}
    return kept if slots is None else (kept, slots)


def _are_equal(one: Any, other: Any) -> bool:
    if one is None or other is None:
        return one is other
    try:
        return bool(one == other)
    except Exception:  # noqa: BLE001 (whatever the filesystem's own comparison raises)
        return False


_default: Cache | None = None


def default_cache() -> Cache:
    """The default cache of this process, opened at the first call. It takes no lock, which a fork could leave held: if two threads
    open it, both caches have the same root, and one engine."""
    global _default
    cache = _default
    if cache is None or cache.closed:
        cache = _default = Cache()
    return cache
