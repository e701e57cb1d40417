"""Listings of directories, requested from the remote once a period for the whole node and stored as values; and the marker with which an
upload records the files of a directory, and whether all of them are there."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Self

from forebay import errors
from forebay._kernel import host, interrupts
from forebay._logs import logger
from forebay._model import LISTINGS, Buffer, BufferSink, ObjectInfo, Span, Transfer
from forebay.directories.location import RemoteDirectory
from forebay.directories.manifests import MARK, File, Manifest, check_names
from forebay.fetch.request import FetchOptions, is_same_version

log = logger("forebay.directories")


@dataclass(frozen=True, slots=True)
class Listing:
    """All files of a directory. ``at``: when the remote was asked, in nanoseconds since 1970."""

    manifest: Manifest
    version: str
    at: int


def stored(location: RemoteDirectory, since: int) -> Listing | None:
    """The stored listing, if the remote was asked at ``since`` or later."""
    store = location.fetcher.store
    try:
        hit = store.view(LISTINGS, location.key)
    except errors.CacheFault:
        return None  # a listing can be requested again
    if hit is None or store.validated(hit.entry) < since:
        return None
    try:
        manifest = Manifest.parse(hit.view)
        location.part.choose(location.key, manifest)
    except (ValueError, TypeError, RecursionError, errors.BadListing) as error:  # a later version may store more
        log.warning("the stored listing of %s is not used: %s", location.key, str(error))
        return None
    return Listing(manifest, hit.entry.validator or "", store.validated(hit.entry))


def version(location: RemoteDirectory, since: int) -> str | None:
    """The version of the listing of `stored`, without reading it."""
    store = location.fetcher.store
    entry = store.entry(LISTINGS, location.key)
    return entry.validator if entry is not None and store.validated(entry) >= since else None


def ask(location: RemoteDirectory, options: FetchOptions) -> Listing:
    """Ask the remote, and store its answer. Raises `NotFound` where nothing lies there, `NotADirectory`, `Incomplete`, `Offline`,
    `RemoteError`."""
    if options.offline and location.local is None:
        raise errors.Offline.of(location.key)
    at = location.fetcher.store.now(exact=True)
    with location.fetcher.reaching(options):
        manifest = Manifest.of(_listed(location))
    if not manifest.files and not manifest.folders:
        postpone(location, 0)  # the stored listing is out of date
        if location.is_object():
            raise errors.NotADirectory(f"{location.key}: this is an object, not a directory: see `Cache.local`", url=location.key)
        raise errors.NotFound(f"{location.key}: there is no object below this URL", url=location.key)
    listing = Listing(manifest, manifest.version, at)
    _store(location, listing)
    return listing


def keep(location: RemoteDirectory, files: Manifest) -> None:
    """Store the listing of a directory that this process has just written."""
    _store(location, Listing(files, files.version, location.fetcher.store.now(exact=True)))


def _store(location: RemoteDirectory, listing: Listing) -> None:
    store = location.fetcher.store
    if not store.keeps or store.root.read_only:
        return
    try:
        entry = store.entry(LISTINGS, location.key)
        if entry is None or entry.validator != listing.version:
            store.put(LISTINGS, location.key, listing.manifest.encoded, validator=listing.version, validated=listing.at)
        else:
            store.set_validated([(entry, listing.at)], listing.at)
    except errors.CacheFault as error:
        location.fetcher.warn("listing", "the listing of %s is not stored, and is requested each time: %s", location.key, error)


def postpone(location: RemoteDirectory, until: int) -> None:
    """Serve the stored listing without asking the remote until then; 0: have the remote asked."""
    store = location.fetcher.store
    with contextlib.suppress(errors.CacheFault):  # there is no listing to serve
        if not until:
            store.invalidate_keys([(LISTINGS, location.key)])
        elif (entry := store.entry(LISTINGS, location.key)) is not None:
            store.set_validated([(entry, until)], store.now(exact=True))


# -- asking --------------------------------------------------------------------------------------------------------------


def _listed(location: RemoteDirectory) -> Iterator[File]:
    if location.key.startswith(("http://", "https://")):
        yield from _listed_by_mark(location)
        return
    location.fetcher.count(Transfer(requests=1))
    infos = dict(location.list())
    noted = _noted(location, set(infos)) if MARK in infos else {}
    for name, info in interrupts.paced(infos.items()):
        if name != MARK:
            mine = noted.get(name)
            is_noted = mine is not None and bool(mine.etag) and is_same_version(info.validator, mine.etag or "")
            digest = mine.digest if mine is not None and is_noted else None  # else another writer may have replaced it
            yield File(name, info.size, info.validator, info.modified, digest)


def _listed_by_mark(location: RemoteDirectory) -> Iterator[File]:
    """HTTP has no listings: the marker of an upload serves as one."""
    try:
        noted = _noted(location, None)
    except errors.NotFound as error:
        message = f"{location.key}: over HTTP directories cannot be listed, and there is no {MARK} that lists the files"
        todo = "upload it with `forebay push`, or name its files one by one"
        raise errors.NotFound(f"{message}: {todo}", url=location.key, status=error.status, todo=todo) from error
    yield from (File(name, file.size, None, None, file.digest) for name, file in noted.items())


def _noted(location: RemoteDirectory, present: set[str] | None) -> Mapping[str, MarkedFile]:
    """The files in the marker of an upload. ``present``: the names that are there, if known. Raises `Incomplete`."""
    where = location.target(MARK).key
    sink = MarkSink(where, location.fetcher.most)
    location.fetcher.count(location.remote.fetch(location.object(MARK), sink))
    mark = UploadMarker.parse(where, sink.data)
    _check_complete(location, mark.complete, mark.files, present)
    return mark.files


def _check_complete(location: RemoteDirectory, complete: bool, files: Mapping[str, object], present: set[str] | None) -> None:
    missing = sorted(set(files) - present) if present is not None else []
    if complete and not missing:
        return
    why = "they were removed, or are being removed now" if complete else "its upload has begun but not finished"
    many = f"{len(missing):,} of its {len(files):,} files are not there (such as {missing[0]!r}): {why}" if missing else why
    message = f"{location.key} is incomplete: {many}; repeat the upload, or remove {MARK} if all files are there"
    raise errors.Incomplete(message, url=location.key, missing=len(missing))


# -- the marker of an upload ---------------------------------------------------------------------------------------------

FORMAT = 1
LARGEST = 256 << 20
"""Maximum bytes of a marker: more than a million files take. The server of a directory is not trusted with its length."""
_ETAG = 80
"""Bytes by which the row of a file may grow until its directory is complete."""


class MarkedFile(NamedTuple):
    """One file. ``digest``: its checksum in hex. ``etag``: once the directory is complete, the remote's validator of the file. Before that:
    the validator of the object that the file replaces; None if it replaces none, "" if the remote has no validator for the object."""

    size: int
    digest: str
    etag: str | None


@dataclass(frozen=True)
class UploadMarker:
    """The content of `.forebay.json` in a directory."""

    complete: bool
    files: Mapping[str, MarkedFile]

    @host.cached_property
    def encoded(self) -> bytes:
        files = {name: {"size": file.size, "xxh3": file.digest, "etag": file.etag} for name, file in sorted(self.files.items())}
        return json.dumps({"forebay": FORMAT, "complete": self.complete, "files": files}).encode()

    def check_size(self, where: str) -> None:
        """Raises `ConfigError` if readers would refuse its size."""
        if len(self.encoded) + _ETAG * len(self.files) > LARGEST:
            many = f"{where} would have more than {LARGEST:,} bytes"
            message = f"{many}: pack the {len(self.files):,} files into tar files, or upload them as several directories"
            raise errors.ConfigError(message, name="directory", value=where)

    @classmethod
    def parse(cls, where: str, data: Buffer) -> Self:
        """The marker from its `encoded` form. Raises `RemoteProtocolError` for anything else, `BadListing` for names of no files."""
        try:
            content = json.loads(bytes(data))
            format, complete = int(content["forebay"]), bool(content["complete"])
            rows = interrupts.paced(content["files"].items())
            files = {name: MarkedFile(int(file["size"]), str(file["xxh3"]), file["etag"]) for name, file in rows}
            if not all(0 <= file.size < 1 << 63 for file in files.values()):
                raise ValueError("a size that no file has")
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            message = f"{where} is damaged ({str(error)[:200]!r}): remove this object, then upload the directory again"
            raise errors.RemoteProtocolError(message, url=where) from error
        if format != FORMAT:
            message = f"{where} was written by a newer Forebay (format {format}): use that one, or remove this object"
            raise errors.RemoteProtocolError(message, url=where)
        check_names(where, sorted(files))
        return cls(complete, files)


class MarkSink(BufferSink):
    """Receives a marker in memory. Raises `RemoteProtocolError` for more than `LARGEST` bytes."""

    def __init__(self, where: str, most: Callable[[], int] | None = None) -> None:
        super().__init__(lambda: LARGEST if most is None else min(LARGEST, most()))
        self._where = where

    def begin(self, info: ObjectInfo) -> tuple[Span, ...]:
        """See `Sink.begin`."""
        self._check(info.size or 0)
        return super().begin(info)

    def write(self, offset: int, data: Buffer) -> None:
        """See `Sink.write`."""
        self._check(offset + memoryview(data).nbytes)
        super().write(offset, data)

    def _check(self, size: int) -> None:
        if size > LARGEST:
            message = f"{self._where}: an answer of more than {LARGEST:,} bytes where a small one is due"
            raise errors.RemoteProtocolError(message, url=self._where)
