"""A remote directory as a leased tree: single-flight for each requested part of it, complete or not at all.

listing    requested from the remote once a period              stored under the directory's key
files      each an entry of ``urls``, under a key of its own     a crash leaves whole files, and a partial that is resumed
tree       links to the files, under the directory's key         a crash leaves nothing visible
"""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from collections.abc import Mapping, Sequence

from forebay import errors, remote
from forebay._engine.files import blobs
from forebay._engine.leases import Lease, in_place
from forebay._engine.store import Store
from forebay._kernel import interrupts, waits
from forebay._model import DIRECTORIES, URLS, Entry, ObjectInfo, Victim, noted
from forebay.directories import listings
from forebay.directories.listings import Listing
from forebay.directories.location import RemoteDirectory
from forebay.directories.manifests import File, Manifest
from forebay.fetch.job import Job
from forebay.fetch.pipeline import Pipeline
from forebay.fetch.request import FetchOptions, Target, is_same_version

DISK_FULL = "the disk is full: free some of it, or lower min_free"
LOOKS = 3
"""Trees that one call looks up or creates before it fails because all of them were damaged."""
GROWS = '{"grows": true}'
"""The ``meta`` of a tree that is extended."""
CHANGES = 2
"""How often one call lists a directory again because files changed while it fetched them; then it fails."""


def lease(location: RemoteDirectory, options: FetchOptions) -> Lease:
    """A lease on the complete tree of a directory or part; a local directory is its own tree, unless ``options.force``.

    Raises `NotFound`, `NotADirectory`, `BadListing`, `Incomplete`, `RemoteChanged` or another `RemoteError`; `Offline`; `WaitTimeout`;
    `NoSpace` or another `CacheFault` where it cannot be stored."""
    if is_in_place(location, options):
        tree = in_place(location.local or "")
        if tree.entry.kind != "directory":
            raise errors.NotADirectory(f"{location.local}: this is a file, not a directory", url=location.local)
        return tree
    store = location.fetcher.store
    if not store.keeps:
        raise store.refusal(location.key)
    with waits.time_limit(options.timeout):
        return _Tree(location, store, options).lease()


def is_in_place(location: RemoteDirectory, options: FetchOptions) -> bool:
    """Whether a local directory is its own tree."""
    return location.local is not None and not options.force


def chosen(location: RemoteDirectory, options: FetchOptions) -> Manifest:
    """The files as they are now. Raises as `lease` does."""
    return _chosen(location, listings.stored(location, options.since) or listings.ask(location, options))


def manifest_of(location: RemoteDirectory, tree: Lease, options: FetchOptions) -> Manifest:
    """The files and empty directories of a tree that `lease` returned."""
    if is_in_place(location, options):
        return chosen(location, options)
    members = location.fetcher.store.members(tree.entry)
    listing = listings.stored(location, -1)
    now = location.part.choose(location.key, listing.manifest) if listing is not None else None
    if now is not None and now.version == tree.entry.validator and [file.name for file in now.files] == [name for name, _ in members]:
        return now
    every = tuple(File(name, file.size, file.validator) for name, file in members)
    folders = [name.removesuffix("/") for name in blobs.folders_of(tree.entry.meta) or []]
    return Manifest(every, tuple(folders if folders or every else [""]))


def beside(location: RemoteDirectory, part: Lease, key: str, options: FetchOptions) -> Lease:
    """A lease on the directory ``key#version``, where the files of one version of a directory lie side by side, whichever calls asked for
    them. ``part``: the files that this call asked for, from `lease`; they are added, and ``part`` is closed. A path in the directory stays
    as long as any lease on it.

    In a root that can only be read, ``part`` is returned if the files are not there. Raises `CacheFault`, `WaitTimeout`."""
    store, folder = location.fetcher.store, f"{key}#"
    if not store.keeps:
        return part
    with contextlib.ExitStack() as stack:
        stack.callback(part.close)
        key = folder + json.loads(part.entry.meta)["listing"]
        whole = store.take_many(DIRECTORIES, [key]).get(key)
        if whole is not None:
            if store.holds(whole, part):
                return whole
            whole.close()
        if store.root.read_only:
            stack.pop_all()
            return part
        with store.locks.named(f"directory {key}", timeout=options.timeout, on_wait=options.on_wait):
            for _ in range(LOOKS):
                whole = store.take_many(DIRECTORIES, [key]).get(key)
                if whole is None:
                    older = itertools.takewhile(lambda entry: entry.key.startswith(folder), store.seeing.page(DIRECTORIES, folder))
                    store.remove([Victim.of(entry) for entry in older])  # but those in use; the files stay
                    whole = store.publish_tree(DIRECTORIES, key, [], meta=GROWS)
                with contextlib.ExitStack() as unless_complete:
                    unless_complete.callback(whole.close)
                    if store.extend_tree(whole, part):
                        unless_complete.pop_all()
                        return whole
    raise errors.Damaged(f"{key} is damaged, and was damaged again after it was recreated: see `forebay verify`", key=key)


def keep(location: RemoteDirectory, files: Sequence[tuple[File, str]]) -> None:
    """Store local files (each with its path) that were just uploaded, as though fetched.

    ``files``: all of the directory, with the validators of the remote. Raises `CacheFault` where there is no room."""
    store = location.fetcher.store
    for file, path in files:
        target = location.target(file.name)
        there = store.entry(URLS, target.key)
        if there is not None and there.validator == file.validator and there.checksum.hex() == file.digest:
            store.set_validated([(there, now := store.now(exact=True))], now)
            continue
        with store.writing(URLS, target.key, suffix=target.suffix, resume=False) as writing:
            remote.resolve(path).fetch(path, writing)
            entry = writing.publish(validator=file.validator)
        if file.digest is not None and entry.checksum.hex() != file.digest:
            store.remove([Victim.of(entry)])
            raise errors.CacheFault(f"{path} was written to since it was uploaded: it is not stored", key=entry.key)
    listings.keep(location, Manifest.of(file for file, _ in files))


def _chosen(location: RemoteDirectory, listing: Listing) -> Manifest:
    manifest = location.part.choose(location.key, listing.manifest)
    if not manifest.files and not manifest.folders:
        raise errors.NotFound(
            f"{location.key}: none of its {len(listing.manifest.files):,} files matches {location.part}", url=location.key
        )
    return manifest


class _Tree:
    """One call for one part of one directory."""

    def __init__(self, location: RemoteDirectory, store: Store, options: FetchOptions) -> None:
        self._location, self._store, self._options = location, store, options
        self._fetcher, self._key = location.fetcher, location.tree_key
        self._began = store.now(exact=True)
        self._came_unseen = False  # files of unknown version were fetched: they may be of different times
        self._unlike: set[str] = set()  # files whose validators in listings never match those of the file itself

    def lease(self) -> Lease:
        """See `lease`."""
        for _ in range(1 if self._store.root.read_only else LOOKS):
            tree = self._stored() or self._one_at_a_time()
            if self._store.is_sound(tree):
                if self._options.pin and tree.entry.life != "pinned":
                    self._store.set_life(DIRECTORIES, self._key, "pinned")
                return tree
            tree.close()  # it was set aside: recreate it from undamaged files
        raise errors.Damaged(f"{self._key} is damaged, and was damaged again after it was recreated: see `forebay verify`", key=self._key)

    # -- what is there ---------------------------------------------------------------------------------------------

    def _stored(self) -> Lease | None:
        """The stored tree, if the remote was asked recently enough and had the same files."""
        tree = self._find()
        if tree is None:
            return None
        version = listings.version(self._location, self._options.since)
        if self._options.offline or (version is not None and version == json.loads(tree.entry.meta)["listing"]):
            return self._hit(tree)
        listing = listings.stored(self._location, self._options.since) if version is not None else None
        if listing is not None and self._is_of(tree, listing):
            return self._hit(tree)
        tree.close()
        return None

    def _find(self) -> Lease | None:
        """The stored tree. Its files are checked later, not while other processes wait."""
        tree = self._store.take_many(DIRECTORIES, [self._key]).get(self._key)
        if tree is not None and (noted(tree.entry.meta, listing=str, size=int) is None or blobs.folders_of(tree.entry.meta) is None):
            tree.close()
            self._store.set_aside(tree.entry, f"{tree.entry.name}: its notes on the listing are invalid")
            return None
        return tree

    def _hit(self, tree: Lease) -> Lease:
        self._store.count_hit(json.loads(tree.entry.meta)["size"])
        return tree

    def _is_of(self, tree: Lease, listing: Listing) -> bool:
        """Whether the tree matches its part of the listing. Notes the listing's version, so that the next call need not read it."""
        now = self._location.part.choose(self._location.key, listing.manifest)
        if now.version != tree.entry.validator:
            return False
        if tree.entry.meta != (meta := _meta(listing, now)):
            if not self._store.root.read_only:
                self._store.set_meta(tree.entry, meta)
            tree.entry = tree.entry._replace(meta=meta)
        return True

    # -- one process at a time -------------------------------------------------------------------------------------

    def _one_at_a_time(self) -> Lease:
        if self._store.root.read_only:
            if (tree := self._find()) is None:
                raise errors.ReadOnly.of(self._store.root.path)
            tree.close()
            return self._build()
        began = time.monotonic_ns()
        with self._store.locks.named(f"directory {self._key}", timeout=self._options.timeout, on_wait=self._options.on_wait):
            # P1 and P2 see no tree / P1 locks, creates the tree, unlocks / P2 locks: we are here.
            if (tree := self._stored()) is not None:
                return tree
            if (failure := self._store.locks.failure(DIRECTORIES, self._key, began, self._fetcher.asker())) is not None:
                raise failure
            try:
                return self._build()
            except Exception as error:
                self._store.locks.note_failure(DIRECTORIES, self._key, error, self._fetcher.asker())
                raise

    def _build(self) -> Lease:
        """The tree of the current listing; of an older one, where the remote is unreachable or incomplete."""
        try:
            listing = listings.stored(self._location, self._options.since) or listings.ask(self._location, self._options)
        except (errors.RemoteUnavailable, errors.RemoteTimeout, errors.Incomplete) as error:
            if (tree := self._find()) is None:
                raise
            if self._options.since > 1:  # calls in the next seconds need no time-out of their own
                listings.postpone(self._location, self._fetcher.postponed(self._options))
            message = "the current version of %s cannot be fetched (%s): its copy from the cache is served"
            self._fetcher.warn(f"stale {self._key}", message, self._key, error)
            return self._hit(tree)
        changed = 0
        for _ in range(CHANGES):
            try:
                return self._of(listing)
            except (errors.RemoteChanged, errors.ChecksumMismatch, errors.NotFound) as error:
                before, listing = listing, listings.ask(self._location, self._options)
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

    def _note_unlike(self, error: Exception, before: Listing, now: Listing) -> None:
        """A file differs from the listing, though the listing did not change: note the files whose validators cannot be compared."""
        if isinstance(error, errors.RemoteChanged):
            validators = {file.name: file.validator for file in before.manifest.files}
            same = {file.name for file in now.manifest.files if file.validator is not None and validators.get(file.name) == file.validator}
            if any(remote.canonical(self._location.object(name)) == getattr(error, "url", None) for name in same):
                self._unlike |= same

    def _of(self, listing: Listing) -> Lease:
        """The tree of this listing, created if there is none."""
        tree = self._find()
        if tree is not None and self._is_of(tree, listing):
            return self._hit(tree)
        if tree is not None:
            tree.close()
        if self._store.root.read_only:
            raise errors.ReadOnly.of(self._store.root.path)
        manifest = _chosen(self._location, listing)
        budget = self._store.spaces.budget()
        if manifest.size > budget:
            todo = "it can never be stored: raise the budget, or request a part of it"
            raise errors.NoSpace.of(self._key, manifest.size, 0, budget, todo, hopeless=True)
        with contextlib.ExitStack() as stack:
            leases = self._files(manifest, listing.at, stack)
            if self._came_unseen and listings.ask(self._location, self._options).version != listing.version:
                raise errors.RemoteChanged(f"{self._key}: it changed while being fetched", url=self._key)
            members = [(file.name, leases[file.name]) for file in manifest.files]
            life = "pinned" if self._options.pin else "cached"
            meta = _meta(listing, manifest)
            return self._store.publish_tree(DIRECTORIES, self._key, members, life=life, meta=meta, validator=manifest.version)

    # -- files -----------------------------------------------------------------------------------------------------

    def _files(self, manifest: Manifest, at: int, stack: contextlib.ExitStack) -> dict[str, Lease]:
        """Leases on all files, which the stack closes; missing ones are fetched, several at a time."""
        targets = {file.name: self._location.target(file.name) for file in interrupts.paced(manifest.files)}
        leases = self._stored_files(manifest, targets, at, stack)
        missing = sorted((file for file in manifest.files if file.name not in leases), key=lambda file: -(file.size or 0))
        self._came_unseen = any(file.digest is None and (file.validator is None or file.name in self._unlike) for file in missing)
        done, reported = {name: lease.entry.size for name, lease in leases.items()}, -1

        def tell() -> None:
            nonlocal reported
            if self._options.on_progress is not None and reported != (total := sum(list(done.values()))):
                reported = total
                self._options.on_progress(total, manifest.size)

        jobs = [
            Job(self._fetcher, targets[file.name], self._options_of(file, at, done), number, leased=True)
            for number, file in enumerate(interrupts.paced(missing))
        ]
        came: list[Lease] = []
        try:
            self._store.ensure_room(URLS, [(targets[file.name].key, file.size or 0) for file in missing])
            with contextlib.closing(Pipeline(self._fetcher, on_turn=tell).run(jobs)) as fetched:
                for job in fetched:
                    file = missing[job.number]
                    if isinstance(job.error, errors.Archived):
                        raise self._location.archived(job.error, file.name, missing) from job.error
                    leases[file.name] = stack.enter_context(contextlib.closing(self._listed_version(file, job)))
                    came.append(leases[file.name])
            return leases
        except errors.NoSpace as error:
            stack.close()
            self._store.drop([lease.entry for lease in came])  # files of a directory that cannot be complete here
            todo = DISK_FULL if error.limit == "disk" else "raise the budget, or request a part of it"
            raise errors.NoSpace.of(
                self._key, manifest.size, error.free, error.budget, todo, hopeless=error.hopeless, limit=error.limit
            ) from error  # fmt: skip

    def _stored_files(
        self, manifest: Manifest, targets: Mapping[str, Target], at: int, stack: contextlib.ExitStack
    ) -> dict[str, Lease]:  # fmt: skip
        """Leases on the files that are there, and match the listing."""
        leases, older = dict[str, Lease](), list[tuple[Entry, int]]()
        keys = {targets[file.name].key: file for file in manifest.files}
        for key, lease in interrupts.paced(self._store.take_many(URLS, list(keys)).items()):
            stack.enter_context(contextlib.closing(lease))
            if lease.entry.kind == "blob" and self._is_right(lease.entry, keys[key], at) and self._store.is_sound(lease):
                if self._store.validated(lease.entry) < at and not lease.entry.varies:
                    older.append((lease.entry, at))
                self._store.count_hit(lease.entry.size)
                leases[keys[key].name] = lease
            else:
                lease.close()
        if older:
            self._store.set_validated(older, at)
        return leases

    def _is_right(self, entry: Entry, file: File, at: int) -> bool:
        """Whether the stored file matches the listing."""
        if file.size not in (None, entry.size):
            return False
        if file.digest is not None:
            return entry.checksum.hex() == file.digest
        if file.validator is not None and file.name not in self._unlike:
            return is_same_version(entry.validator, file.validator)
        return self._store.validated(entry) >= at

    def _options_of(self, file: File, at: int, done: dict[str, int]) -> FetchOptions:
        """Those of a fetch of the listed version of a file. An older listing than this call tells nothing about the file's state now."""
        expected = file.validator if file.name not in self._unlike else None
        is_new = expected is not None and at >= self._began
        listed = ObjectInfo(file.name, file.size, file.validator, modified=file.modified) if is_new else None
        return FetchOptions(
            since=at if expected is None else -1, offline=self._options.offline, etag=expected, timeout=self._options.timeout, force=True,
            on_progress=lambda count, _: done.update({file.name: count}), wait=self._options.wait, listed=listed, ahead=True,
        )  # fmt: skip

    def _listed_version(self, file: File, job: Job) -> Lease:
        """The file that was fetched. Raises `RemoteChanged` or `ChecksumMismatch` if the remote has another version now, or its error."""
        key, lease, error = job.target.key, job.lease, job.error
        if isinstance(error, errors.ChecksumMismatch):
            raise errors.RemoteChanged(f"{key}: the remote sent {error.found}, but listed {error.wanted}", url=key) from error
        if lease is None:
            raise error or errors.Closed.of("cache")
        if file.size not in (None, lease.entry.size):
            lease.close()
            raise errors.RemoteChanged(f"{key}: the remote sent {lease.entry.size:,} bytes, but listed {file.size:,}", url=key)
        if file.digest is not None and lease.entry.checksum.hex() != file.digest:
            lease.close()
            self._store.set_aside(lease.entry, f"{key}: its bytes are not those of which its upload noted the checksum")
            raise errors.ChecksumMismatch.of(key, f"xxh3 {file.digest}", f"xxh3 {lease.entry.checksum.hex()}")
        return lease


def _meta(listing: Listing, part: Manifest) -> str:
    notes = {"listing": listing.version, "size": part.size}
    folders = [f"{name}/" for name in part.folders if name]
    return json.dumps({**notes, "folders": folders} if folders else notes)
