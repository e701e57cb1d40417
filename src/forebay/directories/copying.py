"""Private copies of directories, anywhere on this host: complete or not at all. The next copy finishes one that was killed.

A copy is written under one fixed name: ``.NAME.forebay-part`` beside a directory that does not exist yet, ``.forebay-part`` within one
that does. A file of it is complete once it has the time that identifies its version (`stamp`), which is set last.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import hashlib
import os
import stat
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from forebay import errors, remote
from forebay._engine.files.blobs import remove_whole
from forebay._kernel import host, interrupts
from forebay._kernel.below import Below, LinkInTheWay
from forebay._kernel.threads import run_all
from forebay._model import Buffer, ObjectInfo, Partial, Span
from forebay.directories import trees
from forebay.directories.location import RemoteDirectory
from forebay.directories.manifests import File, Manifest, folders_above
from forebay.fetch.request import FetchOptions, is_same_version

if TYPE_CHECKING:
    from forebay._engine.null_store import NullStore
    from forebay._engine.store import Store

PART = ".forebay-part"
JOBS = 16
COPIES = 4  # concurrent files where no remote is involved
_FULL = frozenset([errno.ENOSPC, errno.EDQUOT])

OnProgress = Callable[[int, int | None], None]


# -- entry points ------------------------------------------------------------------------------------------------------


def copy(location: RemoteDirectory, options: FetchOptions, path: str | os.PathLike[str] | None, *, overwrite: bool) -> str:
    """Write a writable copy of a directory, or a part of it, to ``path``; return its absolute path. One process does it at a time.

    Without a ``path``: to a new directory below the temporary one, which the caller removes, and no other process knows.

    Raises `Foreign`, `NoSpace` where the disk of the copy has no room, and the errors of `trees.lease` except faults of the cache."""
    if path is not None:
        target = target_of(path)
        with _exclusive(location.fetcher.store, target, options):
            _bring(location, options, target, overwrite=overwrite)
        return str(target)
    target = Path(tempfile.mkdtemp(prefix="forebay-checkpoint-"))
    try:
        _bring(location, options, target, overwrite=False)
    except BaseException:
        remove_whole(target)
        raise
    return str(target)


def _exclusive(store: Store | NullStore, target: Path, options: FetchOptions) -> contextlib.AbstractContextManager[object]:
    if store.keeps and not store.root.read_only:
        return store.locks.named(f"copy to {target}", timeout=options.timeout, on_wait=options.on_wait)
    return locked(target)


def _bring(location: RemoteDirectory, options: FetchOptions, target: Path, *, overwrite: bool) -> None:
    """Copy the files of the cached tree; where the cache cannot store it, fetch them past the cache."""
    fetcher = location.fetcher
    try:
        tree = trees.lease(location, options)
    except (errors.CacheFault, errors.WaitTimeout) as error:
        if options.offline:
            raise
        fetcher.fall_back(error, location.key)
    else:
        with tree:
            manifest = trees.manifest_of(location, tree, options)
            within = fetcher.store.root.files if fetcher.store.keeps and not trees.is_in_place(location, options) else None
            copy_tree(tree.path, manifest, target, within=within, overwrite=overwrite)
        return

    def fetch(file: File, sink: FileSink) -> None:
        ask = functools.partial(location.remote.fetch, location.object(file.name), sink)
        try:
            fetcher.receive(location.target(file.name).key, ask, options)
        except errors.Archived as error:
            raise location.archived(error, file.name, manifest.files) from error

    manifest, budget = trees.chosen(location, options), fetcher.store.spaces.budget()
    fetch_tree(manifest, target, fetch, overwrite=overwrite, budget=budget, on_progress=options.on_progress)


def target_of(path: str | os.PathLike[str]) -> Path:
    """The target directory: ``~`` expanded, absolute, symbolic links resolved. Raises `ConfigError`."""
    text = remote.as_text(path)
    if not text or "\0" in text:
        raise errors.ConfigError(f"to_directory needs a path, not {text!r}", name="path", value=text)
    text = remote.expand_user(text)
    remote.absolute_path(text)  # raises if there is no working directory
    return Path(os.path.realpath(text))


@contextlib.contextmanager
def locked(target: Path) -> Iterator[None]:
    """A lock between all processes of this host, for those without a cache, which has better locks. Locks the directory itself if it
    exists, else its parent, which may be /tmp and belong to every user."""
    while True:
        above = not target.is_dir()
        if above:
            os.makedirs(target.parent, exist_ok=True)
        try:
            fd = host.open_fd(target.parent if above else target, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            continue  # it was removed meanwhile
        try:
            host.flock(fd, fcntl.LOCK_EX)
            if _is_lock_of(fd, target, above):  # else the last holder created the directory, and later callers lock that
                yield
                return
        finally:
            fcntl.flock(fd, fcntl.LOCK_UN)  # a child of a fork has the same lock
            os.close(fd)


def _is_lock_of(fd: int, target: Path, above: bool) -> bool:
    if above:
        return not target.is_dir()
    try:
        return os.path.samestat(os.fstat(fd), os.stat(target))
    except OSError:
        return False


def copy_tree(
    source: str | os.PathLike[str], manifest: Manifest, target: Path, *, within: Below | None = None,
    overwrite: bool = False, budget: int = 0, on_progress: OnProgress | None = None,
) -> None:  # fmt: skip
    """Copy these files and empty directories of the directory ``source`` to ``target`` (see `target_of`), writable; the files share its
    blocks where the file system supports it. ``within``: the files that ``source`` is one of, where others may write to it: no link there
    is followed. Without it ``source`` is the user's own, whose links to files are.

    The caller has a lock that every process that copies to ``target`` takes, and a lease on ``source``. Raises `Foreign`, naming the file,
    where another file is in the way, unless ``overwrite``; directories are never replaced, and links never followed. Also `NoSpace`,
    `RemoteChanged`, OSError. An error leaves nothing; the next call finishes a killed copy. Syncs nothing to the disk: `os.sync` does."""
    top = Path(source)
    if target.is_dir() and os.path.samefile(top, target):
        return

    @contextlib.contextmanager
    def opened(file: File) -> Iterator[int]:
        path = top / file.name
        fd = within.open(path) if within is not None else host.open_fd(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            yield fd
        finally:
            os.close(fd)

    def stamp_of(file: File) -> int:
        with opened(file) as fd:
            return os.fstat(fd).st_mtime_ns

    stamps = {file.name: stamp(file) or stamp_of(file) for file in interrupts.paced(manifest.files)}
    copy = _Copy(target, manifest, stamps, overwrite, budget)

    def bring(file: File, sink: FileSink) -> None:
        with opened(file) as fd:
            before = os.fstat(fd)
            sink.begin(ObjectInfo(file.name, before.st_size))
            if not sink.clone(fd):
                copy.ask_for_room()
                sink.copy(fd)
            after = os.fstat(fd)
        if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
            raise errors.RemoteChanged(f"{top / file.name} was written to while being copied", url=str(top / file.name))

    copy.make(bring, COPIES, on_progress)


def fetch_tree(
    manifest: Manifest, target: Path, fetch: Callable[[File, FileSink], object], *,
    overwrite: bool = False, jobs: int = JOBS, budget: int = 0, on_progress: OnProgress | None = None,
) -> None:  # fmt: skip
    """`copy_tree` from a remote, for directories that do not fit into the cache: ``fetch`` writes one file to its sink, as `Remote.fetch`.

    Several threads call ``fetch``. Raises its errors, too; `RemoteChanged` where the size or version is not the listed one."""
    copy = _Copy(target, manifest, {file.name: stamp(file) for file in interrupts.paced(manifest.files)}, overwrite, budget)
    copy.ask_for_room()
    copy.make(fetch, jobs, on_progress)


# -- the whole copy ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Lacking:
    """The files that a directory lacks, ``todo``, and the paths that are in their way."""

    todo: list[File]
    in_the_way: list[Path]


class _Copy:
    """One call: inspects the target, stages missing files, moves them into place."""

    def __init__(self, target: Path, manifest: Manifest, stamps: Mapping[str, int | None], overwrite: bool, budget: int) -> None:
        self._target, self._stamps, self._overwrite, self._budget = target, stamps, overwrite, budget
        self._folders = [f"{name}/" for name in manifest.folders if name]
        self._new = not os.path.lexists(target)
        self._part = target.with_name(_beside(target.name)) if self._new else target / PART
        self._files = Below(target.parent)
        self._look = self._find_lacking(target, manifest.files, check=True)
        self._gate, self._sinks = Gate(self._files), list[FileSink]()
        self._asking = threading.Lock()  # guards _asked
        self._asked = False

    def make(self, bring: Callable[[File, FileSink], object], jobs: int, on_progress: OnProgress | None) -> None:
        """Put all files in place."""
        if not self._look.todo and not self._new:
            self._move()
            return
        try:
            with self._full_disk():
                self._stage(bring, jobs, on_progress)
            self._move()
        except BaseException:
            self._files.remove_whole(self._part)
            raise

    def _sweep(self) -> None:
        """Remove what a copy left that was killed before its last step."""
        self._files.remove_whole(self._part)
        self._files.remove_whole(self._target.with_name(_beside(self._target.name)))

    # -- looking ---------------------------------------------------------------------------------------------------

    def _find_lacking(self, top: Path, files: Iterable[File], *, check: bool) -> _Lacking:
        """The missing files. ``check``: other files in the way belong to the user; raises `Foreign`, unless ``overwrite``."""
        closed, todo, in_the_way = set[str](), list[File](), list[Path]()
        if check and not self._new and not top.is_dir():
            raise _foreign(top, "no directory")
        names = [*(file.name for file in interrupts.paced(files)), *self._folders]
        for name in interrupts.paced(sorted({above for each in interrupts.paced(names) for above in folders_above(each)})):
            if not closed.isdisjoint(folders_above(name)):
                closed.add(name)
            elif (status := self._lstat(top / name)) is None or not stat.S_ISDIR(status.st_mode):
                closed.add(name)
                if status is not None:
                    self._check_mine(top / name, check, "no directory")
                    in_the_way.append(top / name)
        for file in interrupts.paced(files):
            status = self._lstat(top / file.name) if closed.isdisjoint(folders_above(file.name)) else None
            if status is not None and self._is_done(file, status):
                continue
            todo.append(file)
            if status is not None:
                self._check_mine(top / file.name, check, "a directory" if stat.S_ISDIR(status.st_mode) else "another file")
                in_the_way.append(top / file.name)
        return _Lacking(todo, in_the_way)

    def _is_done(self, file: File, status: os.stat_result) -> bool:
        is_whole = stat.S_ISREG(status.st_mode) and file.size in (status.st_size, None)
        return is_whole and has_stamp(status.st_mtime_ns, self._stamps[file.name])

    def _check_mine(self, path: Path, check: bool, what: str) -> None:
        if check and (not self._overwrite or what == "a directory"):
            raise _foreign(path, what)

    # -- room ------------------------------------------------------------------------------------------------------

    def ask_for_room(self) -> None:
        """Raises `NoSpace`, once, if the disk has less room than the remaining files need."""
        with self._asking:
            if self._asked:
                return
            self._asked = True
            if self._need() - sum(sink.done for sink in self._sinks) > self._free():
                raise self._no_space()

    def _need(self) -> int:
        return sum(file.size or 0 for file in self._look.todo)

    def _free(self) -> int:
        return host.free_bytes(next(location for location in (self._target, *self._target.parents) if location.exists()))

    def _no_space(self) -> errors.NoSpace:
        need, free = self._need(), self._free()
        message = f"no room for {self._target}: {need:,} bytes are needed, {free:,} are free on its disk"
        return errors.NoSpace(message, key=str(self._target), need=need, free=free, budget=self._budget, limit="disk")

    @contextlib.contextmanager
    def _full_disk(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno not in _FULL or isinstance(error, errors.ForebayError):
                raise
            self._files.remove_whole(self._part)  # so that the error reports the actual free space
            raise self._no_space() from error

    # -- copying ---------------------------------------------------------------------------------------------------

    def _stage(self, bring: Callable[[File, FileSink], object], jobs: int, on_progress: OnProgress | None) -> None:
        os.makedirs(self._target.parent, exist_ok=True)
        self._find_part()
        look = self._find_lacking(self._part, self._look.todo, check=False)
        for path in interrupts.paced(look.in_the_way):
            self._files.remove_whole(path)
        self._prune(self._part, {file.name for file in self._look.todo})
        self._make_folders(self._part, look.todo)
        total = self._need()
        had = total - sum(file.size or 0 for file in look.todo)

        def work(file: File) -> None:
            sink = FileSink(self._part / file.name, file, self._gate)
            self._sinks.append(sink)
            with contextlib.closing(sink):
                bring(file, sink)
                sink.finish(self._stamps[file.name])

        def tell() -> None:
            if on_progress is not None:
                on_progress(had + sum(sink.done for sink in self._sinks), total)

        largest_first = sorted(look.todo, key=lambda file: -(file.size or 0))
        run_all([functools.partial(work, file) for file in largest_first], jobs, name="file", on_turn=tell, stop=self._gate.shut)
        tell()

    def _find_part(self) -> None:
        """Create the directory for the copy, or take over that of an earlier one, with its files."""
        beside = self._target.with_name(_beside(self._target.name))
        if not self._new and self._lstat(beside) is not None:  # the killed copy began before the directory existed
            self._files.remove_whole(self._part)
            with contextlib.suppress(OSError):  # another disk, or no permission: it is recreated
                self._files.rename(beside, self._part)
        if not self._is_own(self._part):  # the name can be guessed: in /tmp any user can create it
            self._files.remove_whole(self._part)
            self._files.mkdir(self._part, 0o777)
            if not self._is_own(self._part):
                raise errors.Foreign(f"{self._part} belongs to another user: name another directory", path=str(self._part))

    def _move(self) -> None:
        if self._new:
            try:
                self._files.rename(self._part, self._target)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                    raise
                raise _foreign(self._target, "something that was not there before") from error
            return
        for path in self._look.in_the_way:
            self._clear(path)
        self._make_folders(self._target, self._look.todo)
        for file in self._look.todo:
            path = self._target / file.name
            if not self._overwrite and self._lstat(path) is not None:
                raise _foreign(path, "a file that was not there before")
            self._files.rename(self._part / file.name, path)
        self._sweep()

    def _make_folders(self, top: Path, files: Iterable[File]) -> None:
        """Create the directories of these files below ``top``, and the empty ones."""
        names = [*(file.name for file in files), *self._folders]
        for name in interrupts.paced(sorted({above for each in names for above in folders_above(each)})):
            self._files.mkdir(top / name, 0o777)

    def _clear(self, path: Path) -> None:
        """Remove a file where a directory must be; the move itself replaces files."""
        status = self._lstat(path)
        if status is not None and not stat.S_ISDIR(status.st_mode):
            self._files.unlink(path)

    def _lstat(self, path: Path) -> os.stat_result | None:
        try:
            return self._files.lstat(path)
        except (FileNotFoundError, LinkInTheWay):
            return None

    def _is_own(self, path: Path) -> bool:
        status = self._lstat(path)
        return status is not None and stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()

    def _prune(self, top: Path, names: set[str], prefix: str = "") -> None:
        """Remove everything but these files and their directories."""
        directories = {above for name in interrupts.paced(names) for above in folders_above(name)}
        with self._files.listing(top) as fd, os.scandir(fd) as scan:
            entries = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in scan]
        for last, is_directory in interrupts.paced(entries):
            name = prefix + last
            if is_directory and name in directories:
                self._prune(top / last, names, f"{name}/")
            elif name not in names:
                self._files.remove_whole(top / last)


def _beside(name: str) -> str:
    """The name of the part beside a directory of this name, short enough for file systems."""
    if len(os.fsencode(name)) > 200:
        name = hashlib.blake2b(os.fsencode(name), digest_size=16).hexdigest()
    return f".{name}{PART}"


def _foreign(path: Path, what: str) -> errors.Foreign:
    return errors.Foreign(f"{path} is {what}, and is not replaced: name another directory, or allow overwriting", path=str(path))


# -- one file ------------------------------------------------------------------------------------------------------------

BLOCK = 16 << 20
_SECOND = 1_000_000_000


class CopyStopped(Exception):
    """The copy of this file is being cancelled."""


def stamp(file: File) -> int | None:
    """The modification time of a copy, in nanoseconds: the second is the remote's, the fraction is a hash of the version. None: no version.

    S3 reports whole seconds, in which two versions of the same size can be written."""
    if file.validator is None and file.modified is None:
        return None
    second = min(max(int(file.modified or 0), 0), 1 << 32)
    digest = hashlib.blake2b(f"{file.validator}\0{file.modified}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return second * _SECOND + int.from_bytes(digest, "little") % _SECOND


def has_stamp(mtime: int, expected: int | None) -> bool:
    """Whether a file's time is the one that was set: some file systems store only whole microseconds or seconds."""
    if expected is None:
        return False
    unit = next(unit for unit in (_SECOND, 1_000_000, 1000, 100, 1) if mtime % unit == 0)
    return mtime == expected - expected % unit


class Gate:
    """Once shut, no file can be created, so that all can be removed; writers raise `CopyStopped`."""

    def __init__(self, files: Below) -> None:
        self._files = files
        self._lock = threading.Lock()  # guards shut: files are created under it
        self._shut = False

    def shut(self) -> None:
        with self._lock:
            self._shut = True

    def check(self) -> None:
        if self._shut:
            raise CopyStopped

    def create(self, path: Path) -> int:
        with self._lock:
            self.check()
            return self._files.create(path, 0o666, masked=True)


class FileSink:
    """A `CloningSink` that writes one file of an unfinished copy. Several threads may call `write`."""

    def __init__(self, path: Path, file: File, gate: Gate) -> None:
        self.partial: Partial | None = None
        self._path, self._file, self._gate = path, file, gate
        self._fd: int | None = None
        self._lock = threading.Lock()  # guards done
        self.done = 0

    def begin(self, info: ObjectInfo) -> tuple[Span, ...]:
        """See `Sink.begin`. Raises `RemoteChanged` for any version but the listed one."""
        file = self._file
        other = file.validator is not None and info.validator is not None and not is_same_version(info.validator, file.validator)
        if other or (info.size is not None and file.size not in (info.size, None)):
            raise errors.RemoteChanged(f"{file.name} has changed since the directory was listed", url=remote.shown(info.url))
        if self._fd is None:
            self._fd = self._gate.create(self._path)
        else:
            host.truncate(self._fd, 0)
        with self._lock:
            self.done = 0
        return () if info.size == 0 else (Span(0, -1 if info.size is None else info.size),)

    def write(self, offset: int, data: Buffer) -> None:
        """See `Sink.write`."""
        self._gate.check()
        host.pwrite(self._descriptor, data, offset)
        self._add(memoryview(data).nbytes)

    def clone(self, fd: int) -> bool:
        """See `CloningSink.clone`."""
        self._gate.check()
        if not host.clone(fd, self._descriptor):
            return False
        self._add(os.fstat(fd).st_size)
        return True

    def copy(self, fd: int) -> None:
        """Copy all bytes of another open file of this host, in the kernel where possible."""
        at, size = 0, os.fstat(fd).st_size
        while at < size:
            self._gate.check()
            count = host.copy_range(fd, self._descriptor, at, min(BLOCK, size - at))
            if count == 0:
                break
            self._add(count)
            at += count
            interrupts.point()
        while block := os.pread(fd, 1 << 20, at):
            self.write(at, block)
            at += len(block)
            interrupts.point()

    def finish(self, ns: int | None) -> None:
        """Check and stamp the file after the last byte. Raises `RemoteChanged` where the size is not the listed one."""
        size, expected = os.fstat(self._descriptor).st_size, self._file.size
        if expected not in (size, None) or self.done < size:
            message = f"{min(self.done, size):,} bytes of {self._file.name} were received instead of {expected or size:,}"
            raise errors.RemoteChanged(message, url=self._file.name)
        if ns is not None:
            host.set_mtime(self._descriptor, ns)

    def close(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

    @property
    def _descriptor(self) -> int:
        if self._fd is None:
            raise CopyStopped
        return self._fd

    def _add(self, count: int) -> None:
        with self._lock:
            self.done += count
