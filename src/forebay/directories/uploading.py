"""Uploads a local directory to a remote one, so that no reader ever mistakes a part of it for the whole.

mark, incomplete    from here on readers refuse                  a crash leaves what the next attempt goes on from
files               those that are not there, several at a time   whole or not at all, each
removals            remote files that are not local, if requested
listing             what is there is what was sent
mark, complete      readers see the new directory
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from forebay import errors, remote
from forebay._kernel import host, interrupts
from forebay._kernel.threads import run_all
from forebay._logs import logger
from forebay._model import BufferSink, ObjectInfo
from forebay.directories import trees
from forebay.directories.listings import MarkedFile, MarkSink, UploadMarker
from forebay.directories.location import RemoteDirectory
from forebay.directories.manifests import MARK, File, LocalFile, check_names, files_below, folders_above, is_folder
from forebay.directories.metadata import METADATA, forget
from forebay.fetch.request import is_same_version
from forebay.remote.local import prune, sweep

JOBS = 16
"""Files that are sent concurrently."""
LARGE_JOBS = 2
"""Of files that are sent in parts, that many."""
IN_ONE = 8 << 20
"""Bytes of a file that `s3://` sends in one request; a larger one is sent in parts, of which eight are in memory at a time."""

WATCH = 2.0
"""Seconds between the checks whether another upload has begun."""

log = logger("forebay.uploading")

_MD5 = re.compile(r'"?([0-9a-f]{32})"?\Z')

Tell = Callable[[str, int, int], None]
"""Receives ``reading`` or ``sending``, the bytes done, and the total bytes."""


@dataclass(frozen=True, slots=True)
class Uploaded:
    """The result of an upload. ``files``: all files of the remote directory now, each with its local path; ``sent``, ``removed``: names;
    ``bytes``: the total that was sent. After a dry run ``files`` is empty, and nothing was done."""

    files: tuple[tuple[File, str], ...]
    sent: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    bytes: int = 0


def upload(
    location: RemoteDirectory,
    local: str | os.PathLike[str],
    *,
    delete: bool = False,
    dry_run: bool = False,
    jobs: int = JOBS,
    tell: Tell | None = None,
) -> Uploaded:
    """Upload the files of a local directory to a remote one; ``delete``: remove all other files there, except its metadata. ``dry_run``:
    only report what would be done.

    Sends only missing files. The markers of earlier uploads, finished or not, and ETags that are MD5 sums tell which files are there.
    Until all are there, a reader gets `Incomplete`, or the copy of the earlier directory in its cache.

    Avoid two concurrent uploads to one directory. The one that began last wins: the other sees its marker within seconds, or at the latest
    when it writes its own where the store has conditional writes (S3, local ones), and raises `Conflict`.

    Raises `ConfigError` for a local directory that cannot be uploaded, `SourceChanged` if a file of it changes meanwhile; `Conflict`;
    `Unsupported` for HTTP; `BadListing` where old and new names exclude each other; `RemoteError`. After any of these, or an
    interrupt, the same call continues where it stopped."""
    return _Upload(location, remote.absolute_path(remote.as_text(local)), max(1, jobs), tell).run(delete, dry_run)


def push(
    location: RemoteDirectory, local: str | os.PathLike[str], *, delete: bool = False, keep: bool = False,
    dry_run: bool = False, jobs: int = JOBS, tell: Tell | None = None,
) -> Uploaded:  # fmt: skip
    """`upload`, and invalidate the listing in the cache; ``keep``: the files stay in the cache, as though fetched.

    Logs a warning if they cannot be stored. Raises `Offline` where the cache must not ask the remote."""
    if location.fetcher.offline and location.local is None:
        raise errors.Offline.of(location.key)
    try:
        done = upload(location, local, delete=delete, dry_run=dry_run, jobs=jobs, tell=tell)
    finally:
        forget(location)
    if keep and not dry_run and location.local is None:
        try:
            trees.keep(location, done.files)
        except errors.CacheFault as error:
            location.fetcher.warn("keep", "%s is uploaded, but not stored in the cache: %s", location.key, error)
    return done


class _Stopped(Exception):
    """Another file failed, or the call was interrupted."""


class _Upload:
    """One call."""

    def __init__(self, location: RemoteDirectory, local: str, jobs: int, tell: Tell | None) -> None:
        self._location, self._local, self._jobs, self._tell = location, local, jobs, tell
        self._stopped = False
        self._marked: str | None = None  # validator of the marker there: "" if it has none, None if there is no marker
        self._done: dict[str, int] = {}  # bytes of each file; one thread writes one key
        self._written: dict[str, ObjectInfo] = {}
        self._watch_at = time.monotonic() + WATCH

    def run(self, delete: bool, dry_run: bool) -> Uploaded:
        self._check_places()
        files = {file.name: file for file in files_below(self._local)}
        there = {name: info for name, info in self._location.list() if not is_folder(name, info.size)}
        before = self._mark_there(there.pop(MARK, None))
        others = set(there) - set(files) - {METADATA}
        gone = tuple(sorted(name for name in others if not self._is_behind_link(name))) if delete else ()
        check_names(self._location.key, sorted(set(files) | set(there) - set(gone)))
        digests, missing = self._compared(files, before, there)
        todo = [file for name, file in files.items() if name in missing]
        plan = Uploaded((), tuple(file.name for file in todo), gone, sum(file.size for file in todo))
        if dry_run:
            return plan
        if not todo and not gone and _is_told(before, files, digests, there):
            return replace(plan, files=self._described(files, digests, there))
        states = {file.name: _state(there.get(file.name)) for file in todo}
        UploadMarker(False, _noted(files, digests, states)).check_size(self._mark_key)
        if self._location.local is not None:
            sweep(self._location.local)
        self._write_mark(UploadMarker(False, _noted(files, digests, states)))
        in_the_way = _in_the_way(gone, files)
        self._remove(in_the_way)
        self._send(todo, sum(file.size for file in files.values()), {name: file.size for name, file in files.items()})
        self._remove(name for name in gone if name not in in_the_way)
        now = self._look_again(files)
        self._write_mark(UploadMarker(True, _noted(files, digests, {name: info.validator for name, info in now.items()})))
        return replace(plan, files=self._described(files, digests, now))

    def _check_places(self) -> None:
        if self._location.key.startswith(("http://", "https://")):
            message = f"{self._location.key}: nothing can be written over HTTP: give the s3:// URL, or the path, behind it"
            raise errors.Unsupported(message, url=self._location.key)
        if self._location.local is None:
            return
        ours, theirs = os.path.realpath(self._local), os.path.realpath(self._location.local)
        if os.path.commonpath([ours, theirs]) in (ours, theirs):
            message = f"{self._local} cannot be uploaded to {self._location.local}: one lies in the other"
            raise errors.ConfigError(message, name="url", value=self._location.local)

    # -- what is there ---------------------------------------------------------------------------------------------

    def _mark_there(self, info: ObjectInfo | None) -> UploadMarker | None:
        if info is None:
            return None
        self._marked = info.validator or ""
        return UploadMarker.parse(self._mark_key, self._read(MARK))

    @property
    def _mark_key(self) -> str:
        return self._location.target(MARK).key

    def _read(self, name: str) -> bytes:
        sink = MarkSink(self._mark_key) if name == MARK else BufferSink()
        self._location.remote.fetch(self._location.object(name), sink)
        return bytes(sink.data)

    def _compared(
        self, files: Mapping[str, LocalFile], before: UploadMarker | None, there: Mapping[str, ObjectInfo]
    ) -> tuple[dict[str, str], set[str]]:
        """The digests of all files, which the marker must contain before the first file is sent, and the names of missing files."""
        digests: dict[str, str] = {}
        missing: set[str] = set()
        total = sum(file.size for file in files.values())

        def read(file: LocalFile) -> None:
            if self._stopped:
                raise _Stopped
            digests[file.name] = digest = file.digest()
            if not self._is_there(file, digest, before, there.get(file.name)):
                missing.add(file.name)

        def turn() -> None:
            self._say("reading", sum(files[name].size for name in list(digests)), total)

        self._run_all([partial(read, file) for file in files.values()], self._jobs, turn)
        return digests, missing

    def _is_there(self, file: LocalFile, digest: str, before: UploadMarker | None, info: ObjectInfo | None) -> bool:
        """Whether the object has these bytes."""
        if info is None or info.size != file.size:
            return False
        if file.name == METADATA:  # it is in no marker
            return self._read(METADATA) == Path(file.path).read_bytes()
        noted = before.files.get(file.name) if before is not None else None
        if before is not None and noted is not None and (noted.size, noted.digest) == (file.size, digest):
            if before.complete:
                same = noted.etag is not None and info.validator is not None and is_same_version(info.validator, noted.etag)
            else:
                # written after that marker: by the upload of the marker
                same = noted.etag is None or noted.etag not in ("", _state(info))
            if same:
                return True
        md5 = _MD5.match(info.validator or "")
        return md5 is not None and md5[1] == _md5_of(file)

    # -- writing ---------------------------------------------------------------------------------------------------

    def _write_mark(self, mark: UploadMarker) -> None:
        """Write the marker over the one that is there, if that is the one we know."""
        url, write = self._location.object(MARK), self._location.remote.write
        try:
            if self._marked == "":
                info = write(url, mark.encoded)
            else:
                info = write(url, mark.encoded, if_none_match="*" if self._marked is None else None, if_match=self._marked)
        except errors.Unsupported:
            info = write(url, mark.encoded)
        except errors.Conflict as error:
            info = self._ours(mark, error)
        self._marked = info.validator or ""

    def _ours(self, mark: UploadMarker, error: errors.Conflict) -> ObjectInfo:
        """The marker that caused the conflict, if it is the one that we wrote: the answer to that write was lost."""
        try:
            info = self._location.remote.stat(self._location.object(MARK))
            same = self._read(MARK) == mark.encoded
        except errors.NotFound:  # another process removed it
            info, same = None, False
        if info is None or not same:
            raise self._overtaken() from error
        return info

    def _overtaken(self) -> errors.Conflict:
        message = f"{self._location.key}: another upload to it began after this one, which stops here"
        return errors.Conflict(message, url=self._location.key)

    def _watch_mark(self) -> None:
        """Check periodically, while files are sent. Raises `Conflict` once another upload has written its marker."""
        if time.monotonic() < self._watch_at or not self._marked:
            return
        self._watch_at = time.monotonic() + WATCH
        try:
            if self._location.remote.stat(self._location.object(MARK), known=self._marked) is not None:
                raise self._overtaken()
        except (errors.RemoteUnavailable, errors.RemoteTimeout) as error:
            log.debug("%s: whether another upload has begun is not known: %s", self._location.key, error)

    def _send(self, todo: list[LocalFile], total: int, sizes: Mapping[str, int]) -> None:
        waiting = {file.name for file in todo}
        self._done = {name: size for name, size in sizes.items() if name not in waiting}

        def turn() -> None:
            self._watch_mark()
            self._say("sending", sum(list(self._done.values())), total)

        has_parts = self._location.key.startswith("s3://") and self._location.filesystem is None
        for in_parts, jobs in (False, self._jobs), (True, min(self._jobs, LARGE_JOBS)):
            some = [file for file in todo if in_parts == (has_parts and file.size > IN_ONE)]
            self._run_all([partial(self._send_one, file) for file in some], jobs, turn)
        turn()

    def _run_all(self, calls: Sequence[Callable[[], object]], jobs: int, turn: Callable[[], None] | None = None) -> None:
        def stop() -> None:
            self._stopped = True

        run_all(calls, jobs, name="file", on_turn=turn, stop=stop)

    def _send_one(self, file: LocalFile) -> None:
        def on_sent(done: int) -> None:
            if self._stopped:
                raise _Stopped
            self._done[file.name] = done

        on_sent(0)
        file.check()
        url = self._location.object(file.name)
        self._written[file.name] = self._location.remote.write(url, file.path, on_sent=on_sent, resume=True)
        self._done[file.name] = file.size
        try:
            file.check()
        except errors.SourceChanged:
            self._location.remote.delete(url)  # else the next attempt might mistake it for the earlier file
            raise

    def _is_behind_link(self, name: str) -> bool:
        """Whether a file on this host is in a linked directory, and so not in this one alone."""
        top = self._location.local
        return top is not None and any(Path(top, above).is_symlink() for above in Path(name).parents[:-1])

    def _remove(self, those: Iterable[str]) -> None:
        names = list(those)
        self._run_all([partial(self._location.remote.delete, self._location.object(name)) for name in names], self._jobs)
        if self._location.local is not None:
            prune(self._location.local, names)

    def _look_again(self, files: Mapping[str, LocalFile]) -> dict[str, ObjectInfo]:
        """The objects that the remote lists for the files now. Raises `Conflict` if one is not the object that was sent."""
        now = {name: info for name, info in self._location.list() if name in files}
        for name, file in interrupts.paced(files.items()):
            info, written = now.get(name), self._written.get(name)
            if info is None or info.size not in (None, file.size) or not self._is_same(written, info):
                message = f"{self._location.key}: {name!r} was removed or written to by somebody else while it was uploaded"
                raise errors.Conflict(message, url=self._location.key)
        return now

    def _is_same(self, written: ObjectInfo | None, listed: ObjectInfo) -> bool:
        """Whether the listed object is the written one, where that can be compared: validators in listings of filesystems may differ."""
        if written is None or self._location.filesystem is not None or not self._location.key.startswith(("s3://", "file://")):
            return True
        return is_same_version(listed.validator, written.validator or "")

    def _described(
        self, files: Mapping[str, LocalFile], digests: Mapping[str, str], now: Mapping[str, ObjectInfo]
    ) -> tuple[tuple[File, str], ...]:
        return tuple(
            (File(name, file.size, now[name].validator, now[name].modified, digests[name]), file.path)
            for name, file in interrupts.paced(files.items())
        )

    def _say(self, state: str, done: int, total: int) -> None:
        if self._tell is not None:
            self._tell(state, done, total)


def _noted(files: Mapping[str, LocalFile], digests: Mapping[str, str], etags: Mapping[str, str | None]) -> dict[str, MarkedFile]:
    every = interrupts.paced(files.items())
    return {name: MarkedFile(file.size, digests[name], etags.get(name)) for name, file in every if name != METADATA}


def _is_told(
    before: UploadMarker | None, files: Mapping[str, LocalFile], digests: Mapping[str, str], there: Mapping[str, ObjectInfo]
) -> bool:
    """Whether the marker that is there already equals the new one."""
    now = _noted(files, digests, {name: there[name].validator for name in files})
    return before is not None and before.complete and before.files == now


def _in_the_way(gone: Iterable[str], files: Mapping[str, object]) -> set[str]:
    """Of the files to remove: those at the path of a new directory, and those below the path of a new file."""
    folders = {folder for name in interrupts.paced(files) for folder in folders_above(name)}
    return {name for name in interrupts.paced(gone) if name in folders or any(folder in files for folder in folders_above(name))}


def _state(info: ObjectInfo | None) -> str | None:
    """Distinguishes an object from its successor: None if there is no object, "" if the remote reports nothing to compare."""
    if info is None:
        return None
    return info.validator or (f"{info.modified}-{info.size}" if info.modified is not None else "")


def _md5_of(file: LocalFile) -> str:
    with open(file.path, "rb", opener=host.open_fd) as opened:
        return interrupts.digest(opened, hashlib.md5(usedforsecurity=False))
