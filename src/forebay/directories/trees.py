"""A remote directory as a leased tree: single-flight for each requested part of it, complete or not at all.

listing    requested from the remote once a period              stored under the directory's key
files      each an entry of ``urls``, under a key of its own     a crash leaves whole files, and a partial that is resumed
tree       links to the files, under the directory's key         a crash leaves nothing visible
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from forebay import errors, remote
from forebay._engine.files.trees import remove_whole
from forebay._engine.locks.lease import Lease, in_place
from forebay._engine.store import Store
from forebay._kernel import waits
from forebay._model import Entry, ObjectInfo, Victim, noted
from forebay.directories import copying
from forebay.directories.listings import Listing, Listings
from forebay.directories.location import RemoteDirectory, locate
from forebay.directories.manifests import File, Manifest, Part, Patterns
from forebay.origin import Origin
from forebay.origin.job import Job
from forebay.origin.pipeline import Pipeline
from forebay.origin.request import FetchOptions, Target, is_same_version
from forebay.origin.spaces import DIRECTORIES, POSTPONED, URLS

_DISK_FULL = "the disk is full: free some of it, or lower min_free"
LOOKS = 3
"""Trees that one call looks up or creates before it fails because all of them were damaged."""
CHANGES = 2
"""How often one call lists a directory again because files changed while it fetched them; then it fails."""


class Directories:
    """Directories of remotes in one store. Callable from any thread and after a fork."""

    def __init__(self, origin: Origin) -> None:
        self._origin = origin
        self._listings = Listings(origin)

    @staticmethod
    def key_of(location: RemoteDirectory, part: Part) -> str:
        """The key of a part of a directory."""
        suffix = str(part)
        return f"{location.key}#{suffix}" if suffix else location.key

    def lease(self, location: RemoteDirectory, part: Part, options: FetchOptions) -> Lease:
        """A lease on a tree that is complete for ``part``; a local directory is yielded as it is, unless ``options.force``.

        Raises `NotFound`, `NotADirectory`, `BadListing`, `Incomplete`, `RemoteChanged` or another `RemoteError`; `Offline`; `WaitTimeout`;
        `NoSpace` or another `CacheFault` where it cannot be stored."""
        if location.local is not None and _is_in_place(location, options):
            return _as_it_is(location.local)
        store = self._origin.store
        if not store.keeps:
            raise errors.NoSpace(f"{location.key} cannot be stored: {store.why}", key=location.key, need=0, free=0, budget=0)
        with waits.time_limit(options.timeout):
            return _Tree(self._origin, self._listings, store, location, part, options).lease()

    def chosen(self, location: RemoteDirectory, part: Part, options: FetchOptions) -> Manifest:
        """The files of a part as they are now. Raises as `lease` does."""
        kept = self._listings.kept(location, options.since)
        return _chosen(location, part, (kept or self._listings.ask(location, options)).manifest)

    def files_of(self, location: RemoteDirectory, part: Part, tree: Lease, options: FetchOptions) -> Sequence[File]:
        """The files of a tree that `lease` returned."""
        if _is_in_place(location, options):
            return self.chosen(location, part, options).files
        members = self._origin.store.members(tree.entry)
        kept = self._listings.kept(location, -1)
        now = part.choose(kept.manifest) if kept is not None else None
        if now is not None and now.version == tree.entry.validator and [file.name for file in now.files] == [name for name, _ in members]:
            return now.files
        return Manifest.of(location.key, (File(name, file.size, file.validator) for name, file in members)).files

    def invalidate(self, location: RemoteDirectory) -> None:
        """Make the next call ask the remote."""
        self._listings.postpone(location, 0)

    def keep(self, location: RemoteDirectory, files: Sequence[tuple[File, str]]) -> None:
        """Store local files (each with its path) that were just uploaded, as though fetched.

        ``files``: all of the directory, with the validators of the remote. Raises `CacheFault` where there is no room."""
        store = self._origin.store
        for file, path in files:
            key = location.target(file.name).key
            there = store.entry(URLS, key)
            if there is not None and there.validator == file.validator and there.checksum.hex() == file.digest:
                store.set_validated([(there, now := store.now(exact=True))], now)
                continue
            entry = adopt(self._origin, URLS, key, path, validator=file.validator)
            if file.digest is not None and entry.checksum.hex() != file.digest:
                store.remove([Victim.of(entry)])
                raise errors.CacheFault(f"{path} was written to since it was uploaded: it is not stored", key=entry.key)
        self._listings.keep(location, Manifest.of(location.key, (file for file, _ in files)))


def lease(
    origin: Origin, url: str | os.PathLike[str], filesystem: Any, include: Patterns, exclude: Patterns, options: FetchOptions
) -> Lease:  # fmt: skip
    """`Directories.lease`, for the arguments of a caller."""
    return Directories(origin).lease(locate(origin, url, filesystem), Part.of(include, exclude), options)


def adopt(origin: Origin, space: str, key: str, path: str, *, validator: str | None = None) -> Entry:
    """Copy and hash a local file into a new entry. Raises `CacheFault`, `NotFound`."""
    with origin.store.writing(space, key, suffix=remote.suffix(path), resume=False) as writing:
        remote.resolve(path).fetch(path, writing)
        return writing.publish(validator=validator)


def _is_in_place(location: RemoteDirectory, options: FetchOptions) -> bool:
    """Whether a local directory serves as it is."""
    return location.local is not None and not options.force


def _as_it_is(path: str) -> Lease:
    lease = in_place(path)
    if lease.entry.kind != "directory":
        raise errors.NotADirectory(f"{path}: this is a file, not a directory", url=path)
    return lease


def _chosen(location: RemoteDirectory, part: Part, whole: Manifest) -> Manifest:
    chosen = part.choose(whole)
    if not chosen.files:
        raise errors.NotFound(f"{location.key}: none of its {len(whole.files):,} files matches {part}", url=location.key)
    return chosen


class _Tree:
    """One call for one part of one directory."""

    def __init__(
        self, origin: Origin, listings: Listings, store: Store, location: RemoteDirectory, part: Part, options: FetchOptions
    ) -> None:
        self._origin, self._listings, self._store = origin, listings, store
        self._location, self._part, self._options = location, part, options
        self._key = Directories.key_of(location, part)
        self._began = store.now(exact=True)
        self._came_unseen = False  # files of unknown version were fetched: they may be of different times
        self._unlike: set[str] = set()  # files whose validators in listings never match those of the file itself

    def lease(self) -> Lease:
        tree = self._sound()
        if self._options.pin and tree.entry.life != "pinned":
            self._store.set_life(DIRECTORIES, self._key, "pinned")
        return tree

    def _sound(self) -> Lease:
        for _ in range(LOOKS):
            tree = self._kept() or (self._lease_read_only() if self._store.root.read_only else self._exclusive())
            if self._store.is_sound(tree):
                return tree
            tree.close()  # it was set aside: recreate it from undamaged files
            if self._store.root.read_only:
                break
        raise errors.Damaged(f"{self._key} is damaged, and was damaged again after it was recreated: see `forebay verify`", key=self._key)

    # -- what is there ---------------------------------------------------------------------------------------------

    def _there(self) -> Lease | None:
        """The stored tree. Its files are checked later, not while other processes wait."""
        tree = self._store.take_many(DIRECTORIES, [self._key]).get(self._key)
        if tree is not None and noted(tree.entry.meta, listing=str, size=int) is None:
            tree.close()
            self._store.set_aside(tree.entry, f"{tree.entry.name}: its notes on listing and size are invalid")
            return None
        return tree

    def _kept(self) -> Lease | None:
        """The stored tree, if the remote was asked recently enough and had the same files."""
        tree = self._there()
        if tree is None:
            return None
        version = self._listings.version(self._location, self._options.since)
        if self._options.offline or (version is not None and version == json.loads(tree.entry.meta)["listing"]):
            return self._hit(tree)
        listing = self._listings.kept(self._location, self._options.since) if version is not None else None
        if listing is not None and self._is_of(tree, listing):
            return self._hit(tree)
        tree.close()
        return None

    def _hit(self, tree: Lease) -> Lease:
        self._store.count_hit(json.loads(tree.entry.meta)["size"])
        return tree

    def _is_of(self, tree: Lease, listing: Listing) -> bool:
        """Whether the tree matches its part of the listing. Notes the listing's version, so that the next call need not read it."""
        now = self._part.choose(listing.manifest)
        if now.version != tree.entry.validator:
            return False
        if not self._store.root.read_only and tree.entry.meta != _meta(listing, now):
            self._store.set_meta(tree.entry, _meta(listing, now))
        return True

    def _lease_read_only(self) -> Lease:
        """In a read-only root: the stored tree, if the remote still has the same files."""
        tree = self._there()
        if tree is None:
            raise errors.ReadOnly.of(self._store.root.path)
        try:
            if self._is_of(tree, self._listings.ask(self._location, self._options)):
                return self._hit(tree)
        except (errors.RemoteUnavailable, errors.RemoteTimeout, errors.Incomplete) as error:
            return self._stale(tree, error)
        tree.close()
        raise errors.ReadOnly.of(self._store.root.path)

    def _stale(self, tree: Lease, error: Exception) -> Lease:
        message = "the current version of %s cannot be fetched (%s): its copy from the cache is served"
        self._origin.warn(f"stale {self._key}", message, self._key, error)
        return self._hit(tree)

    # -- one process at a time -------------------------------------------------------------------------------------

    def _exclusive(self) -> Lease:
        began = time.monotonic_ns()
        with self._store.locks.named(f"directory {self._key}", timeout=self._options.timeout, on_wait=self._options.on_wait):
            # P1 and P2 see no tree / P1 locks, creates the tree, unlocks / P2 locks: we are here.
            tree = self._kept()
            if tree is not None:
                return tree
            failure = self._store.locks.failure(DIRECTORIES, self._key, began)
            if failure is not None:
                raise failure
            try:
                return self._build()
            except errors.CacheFault:
                raise  # a fault of the cache, not of the source: the next call may find room
            except Exception as error:
                self._store.locks.note_failure(DIRECTORIES, self._key, error)
                raise

    def _build(self) -> Lease:
        listing = self._listings.kept(self._location, self._options.since) or self._ask_remote()
        if isinstance(listing, Lease):
            return listing
        changed = 0
        for _ in range(CHANGES):
            try:
                return self._of(listing)
            except (errors.RemoteChanged, errors.ChecksumMismatch, errors.NotFound) as error:
                before, listing = listing, self._listings.ask(self._location, self._options)
                changed += before.version != listing.version
                if isinstance(error, errors.NotFound) and before.version == listing.version:
                    raise
                self._note_unlike(error, before, listing)
        try:
            return self._of(listing)
        except (errors.RemoteChanged, errors.ChecksumMismatch) as error:
            if not changed:
                raise
            message = f"{self._key}: it changed repeatedly while it was fetched; the last error: {error}"
            raise errors.RemoteChanged(message, url=self._key) from error

    def _ask_remote(self) -> Listing | Lease:
        """The remote's listing; the stored tree, where the remote is unreachable or incomplete."""
        try:
            return self._listings.ask(self._location, self._options)
        except (errors.RemoteUnavailable, errors.RemoteTimeout, errors.Incomplete) as error:
            tree = self._there()
            if tree is None:
                raise
            if self._options.since > 1:  # calls in the next seconds need no time-out of their own
                self._listings.postpone(self._location, self._options.since + min(self._store.now() - self._options.since, POSTPONED))
            return self._stale(tree, error)

    def _note_unlike(self, error: Exception, before: Listing, now: Listing) -> None:
        """A file differs from the listing, though the listing did not change: note the files whose validators cannot be compared."""
        if isinstance(error, errors.RemoteChanged):
            validators = {file.name: file.validator for file in before.manifest.files}
            same = {file.name for file in now.manifest.files if file.validator is not None and validators.get(file.name) == file.validator}
            if any(remote.canonical(self._location.object(name)) == getattr(error, "url", None) for name in same):
                self._unlike |= same

    def _of(self, listing: Listing) -> Lease:
        """The tree of this listing, created if there is none."""
        tree = self._there()
        if tree is not None and self._is_of(tree, listing):
            return self._hit(tree)
        if tree is not None:
            tree.close()
        manifest = _chosen(self._location, self._part, listing.manifest)
        self._check_fits(manifest)
        with self._files(manifest, listing.at) as leases:
            if self._came_unseen and self._listings.ask(self._location, self._options).version != listing.version:
                raise errors.RemoteChanged(f"{self._key}: it changed while being fetched", url=self._key)
            members = [(file.name, leases[file.name]) for file in manifest.files]
            life = "pinned" if self._options.pin else "cached"
            meta = _meta(listing, manifest)
            return self._store.publish_tree(DIRECTORIES, self._key, members, life=life, meta=meta, validator=manifest.version)

    # -- files -----------------------------------------------------------------------------------------------------

    def _check_fits(self, manifest: Manifest) -> None:
        budget = self._store.seeing.usage().budget
        if manifest.size > budget:
            raise errors.NoSpace.of(
                self._key, manifest.size, 0, budget, "it can never be stored: raise the budget, or request a part of it", hopeless=True
            )

    def _no_space(self, manifest: Manifest, error: errors.NoSpace) -> errors.NoSpace:
        """The error of one file, as an error of the whole directory."""
        todo = _DISK_FULL if error.limit == "disk" else "raise the budget, or request a part of it"
        return errors.NoSpace.of(self._key, manifest.size, error.free, error.budget, todo, hopeless=error.hopeless, limit=error.limit)

    @contextlib.contextmanager
    def _files(self, manifest: Manifest, at: int) -> Iterator[dict[str, Lease]]:
        """Leases on all files; missing ones are fetched, several at a time."""
        leases: dict[str, Lease] = {}
        progress = _Progress(self._options.on_progress, manifest.size)
        targets = {file.name: self._location.target(file.name) for file in manifest.files}
        missing = self._missing(manifest, targets, at, leases, progress)
        self._came_unseen = any(file.digest is None and (file.validator is None or file.name in self._unlike) for file in missing)

        requests = (
            Job(self._origin, targets[file.name], self._options_of(file, at, progress.of(file)), number, leased=True)
            for number, file in enumerate(missing)
        )
        fetches = contextlib.closing(Pipeline(self._origin, on_turn=progress.tell).run(requests))
        try:
            self._store.ensure_room(URLS, [(targets[file.name].key, file.size or 0) for file in missing])
            with fetches as fetched:
                for request in fetched:
                    file = missing[request.number]
                    leases[file.name] = self._listed_version(file, request)
            yield leases
        except errors.NoSpace as error:
            came = [leases.pop(file.name) for file in missing if file.name in leases]
            for lease in came:
                lease.close()
            self._store.drop([lease.entry for lease in came])  # files of a directory that cannot be complete here
            raise self._no_space(manifest, error) from error
        finally:
            for lease in leases.values():
                lease.close()

    def _missing(
        self, manifest: Manifest, targets: Mapping[str, Target], at: int, leases: dict[str, Lease], progress: _Progress
    ) -> list[File]:
        """The files that must be fetched; leases on the others are added to ``leases``."""
        keys = {targets[file.name].key: file for file in manifest.files}
        older: list[tuple[Entry, int]] = []
        for key, lease in self._store.take_many(URLS, list(keys)).items():
            file = keys[key]
            if lease.entry.kind != "blob" or not self._is_right(lease, file, at) or not self._store.is_sound(lease):
                lease.close()
                continue
            if self._store.validated(lease.entry) < at:
                older.append((lease.entry, at))
            self._store.count_hit(lease.entry.size)
            progress.of(file)(lease.entry.size, None)
            leases[file.name] = lease
        if older:
            self._store.set_validated(older, at)
        missing = [file for file in manifest.files if file.name not in leases]
        return sorted(missing, key=lambda file: -(file.size or 0))

    def _is_right(self, lease: Lease, file: File, at: int) -> bool:
        """Whether the stored file matches the listing."""
        entry = lease.entry
        if file.size not in (None, entry.size):
            return False
        if file.digest is not None:
            return entry.checksum.hex() == file.digest
        if file.validator is not None and file.name not in self._unlike:
            return is_same_version(entry.validator, file.validator)
        return self._store.validated(entry) >= at

    def _options_of(self, file: File, at: int, on_progress: Callable[[int, int | None], None]) -> FetchOptions:
        """Those of a fetch of the listed version of a file. An older listing than this call tells nothing about the file's state now."""
        expected = file.validator if file.name not in self._unlike else None
        is_new = expected is not None and at >= self._began
        listed = ObjectInfo(file.name, file.size, file.validator, modified=file.modified) if is_new else None
        return FetchOptions(
            since=at if expected is None else -1, offline=self._options.offline, etag=expected, timeout=self._options.timeout, force=True,
            on_progress=on_progress, wait=self._options.wait, listed=listed, ahead=True,
        )  # fmt: skip

    def _listed_version(self, file: File, request: Job) -> Lease:
        """The file that was fetched. Raises `RemoteChanged` or `ChecksumMismatch` if the remote has another version now, or its error."""
        target, lease, error = request.target, request.lease, request.error
        if isinstance(error, errors.ChecksumMismatch):
            raise errors.RemoteChanged(f"{target.key}: the remote sent {error.found}, but listed {error.wanted}", url=target.key) from error
        if lease is None:
            raise error or errors.Closed.of("cache")
        if file.size not in (None, lease.entry.size):
            lease.close()
            raise errors.RemoteChanged(
                f"{target.key}: the remote sent {lease.entry.size:,} bytes, but listed {file.size:,}", url=target.key
            )
        if file.digest is not None and lease.entry.checksum.hex() != file.digest:
            lease.close()
            self._store.set_aside(lease.entry, f"{target.key}: its bytes are not those of which its upload noted the checksum")
            raise errors.ChecksumMismatch.of(target.key, f"xxh3 {file.digest}", f"xxh3 {lease.entry.checksum.hex()}")
        return lease


class _Progress:
    """Bytes of the whole directory, reported periodically by one thread."""

    def __init__(self, tell: Callable[[int, int | None], None] | None, total: int) -> None:
        self._tell, self._total, self._reported = tell, total, -1
        self._lock = threading.Lock()  # guards _done
        self._done: dict[str, int] = {}

    def of(self, file: File) -> Callable[[int, int | None], None]:
        def note(done: int, total: int | None) -> None:
            with self._lock:
                self._done[file.name] = done

        return note

    def tell(self) -> None:
        with self._lock:
            done = sum(self._done.values())
        if self._tell is not None and done != self._reported:
            self._reported = done
            self._tell(done, self._total)


def _meta(listing: Listing, part: Manifest) -> str:
    return json.dumps({"listing": listing.version, "size": part.size})


# -- private copies ------------------------------------------------------------------------------------------------------


def copy(
    origin: Origin, url: str | os.PathLike[str], filesystem: Any, include: Patterns, exclude: Patterns, options: FetchOptions,
    path: str | os.PathLike[str] | None, *, overwrite: bool,
) -> str:  # fmt: skip
    """`to_directory`, for the arguments of a caller; without a ``path``, `to_temporary`."""
    location, part = locate(origin, url, filesystem), Part.of(include, exclude)
    if path is None:
        return to_temporary(origin, location, part, options)
    return to_directory(origin, location, part, options, path, overwrite=overwrite)


def to_directory(
    origin: Origin, location: RemoteDirectory, part: Part, options: FetchOptions, path: str | os.PathLike[str], *, overwrite: bool
) -> str:
    """Write a writable copy of a part of a directory to ``path``; return its absolute path. One process of the node does it at a time.

    Raises `Foreign`, `NoSpace` where the disk of ``path`` has no room, and the errors of `Directories.lease` except faults of the cache."""
    target = copying.target_of(path)
    with _exclusive(origin, target, options):
        _bring(origin, location, part, options, target, overwrite=overwrite)
    return str(target)


def to_temporary(origin: Origin, location: RemoteDirectory, part: Part, options: FetchOptions) -> str:
    """The same in a new directory below the temporary one: no other process knows it, so it needs no lock. The caller removes it."""
    target = Path(tempfile.mkdtemp(prefix="forebay-checkpoint-"))
    try:
        _bring(origin, location, part, options, target, overwrite=False)
    except BaseException:
        remove_whole(target)
        raise
    return str(target)


def _bring(origin: Origin, location: RemoteDirectory, part: Part, options: FetchOptions, target: Path, *, overwrite: bool) -> None:
    directories = Directories(origin)
    tree = _tree(origin, directories, location, part, options)
    if tree is None:
        _fetch(origin, location, directories.chosen(location, part, options).files, target, options, overwrite=overwrite)
        return
    with tree:
        files = directories.files_of(location, part, tree, options)
        within = origin.store.root.files if origin.store.keeps and not _is_in_place(location, options) else None
        copying.copy_tree(tree.path, files, target, within=within, overwrite=overwrite)


def _exclusive(origin: Origin, target: Path, options: FetchOptions) -> contextlib.AbstractContextManager[object]:
    store = origin.store
    if store.keeps and not store.root.read_only:
        return store.locks.named(f"copy to {target}", timeout=options.timeout, on_wait=options.on_wait)
    return copying.locked(target)


def _tree(origin: Origin, directories: Directories, location: RemoteDirectory, part: Part, options: FetchOptions) -> Lease | None:
    try:
        return directories.lease(location, part, options)
    except (errors.CacheFault, errors.WaitTimeout) as error:
        if options.offline:
            raise
        origin.fall_back(error, location.key)
        return None


def _fetch(
    origin: Origin, location: RemoteDirectory, files: Sequence[File], target: Path, options: FetchOptions, *, overwrite: bool
) -> None:
    def fetch(file: File, sink: copying.FileSink) -> None:
        name = location.object(file.name)
        origin.receive(location.target(file.name).key, functools.partial(location.remote.fetch, name, sink), options)

    def report(done: int, total: int) -> None:
        if options.on_progress is not None:
            options.on_progress(done, total)

    copying.fetch_tree(files, target, fetch, overwrite=overwrite, budget=origin.store.seeing.usage().budget, on_progress=report)
