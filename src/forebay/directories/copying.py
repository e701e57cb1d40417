"""Private copies of directories, anywhere on this host: whole or not at all, and ended by the next one where one was killed.

A copy is made under one name that never changes: ``.NAME.forebay-part`` beside a directory that is not there yet, ``.forebay-part``
within one that is. A file of it is done when it has the time that tells its version (`stamp`), which it gets last.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import stat
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from forebay import errors
from forebay._engine.files.trees import remove_whole
from forebay._kernel import host
from forebay._model import ObjectInfo
from forebay.directories.manifests import File
from forebay.directories.sinks import FileSink, Gate, has_stamp, stamp
from forebay.directories.thread_pool import each

PART = ".forebay-part"
JOBS = 16
COPIES = 4  # files at once where nothing but this host is asked
_FULL = frozenset([errno.ENOSPC, errno.EDQUOT])

OnProgress = Callable[[int, int], None]


# -- the two doors -----------------------------------------------------------------------------------------------------


def target_of(path: str | os.PathLike[str]) -> Path:
    """The directory that is meant: ``~`` expanded, absolute, links on the way to it followed. Raises `ConfigError`."""
    text = os.fspath(path)
    if not text:
        raise errors.ConfigError("to_directory needs a path: '' is none", name="path", value=text)
    return Path(os.path.realpath(os.path.expanduser(text)))


@contextlib.contextmanager
def locked(target: Path) -> Iterator[None]:
    """Of all processes of this host one at a time: for those that have no cache, which has better locks. What is locked is the directory
    itself where there is one, and else the one above, which may be /tmp and everybody's."""
    while True:
        above = not target.is_dir()
        if above:
            os.makedirs(target.parent, exist_ok=True)
        try:
            fd = os.open(target.parent if above else target, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            continue  # it went meanwhile
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)  # death lets go; a signal ends the wait
            if _is_lock_of(fd, target, above):  # else whoever had it made the directory, and those who come now lock that
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
    source: str | os.PathLike[str], files: Sequence[File], target: Path, *,
    overwrite: bool = False, budget: int = 0, on_progress: OnProgress | None = None,
) -> None:  # fmt: skip
    """Let ``target`` (see `target_of`) have writable copies of these files of the directory ``source``, which share its blocks where the
    file system can.

    Caller: has a lock that all who copy to ``target`` take, and holds ``source``. Raises `Foreign`, naming the file, where something
    else stands, unless ``overwrite``; directories are never replaced, and links never followed. `NoSpace`, `RemoteChanged`, OSError.
    After an error nothing is left; what is killed is ended by the next call. Nothing is synced to the disk: `os.sync` does that."""
    top = Path(source)
    if target.is_dir() and os.path.samefile(top, target):
        return
    stamps: dict[str, int | None] = {file.name: stamp(file) or os.stat(top / file.name).st_mtime_ns for file in files}
    copy = _Copy(target, files, stamps, overwrite, budget)

    def bring(file: File, sink: FileSink) -> None:
        fd = os.open(top / file.name, os.O_RDONLY | os.O_CLOEXEC)
        try:
            before = os.fstat(fd)
            sink.begin(ObjectInfo(file.name, before.st_size))
            if not sink.clone(fd):
                copy.ask_for_room()
                sink.copy(fd)
            after = os.fstat(fd)
        finally:
            os.close(fd)
        if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
            raise errors.RemoteChanged(f"{top / file.name} was written to while it was copied", url=str(top / file.name))

    copy.make(bring, COPIES, on_progress)


def fetch_tree(
    files: Sequence[File], target: Path, fetch: Callable[[File, FileSink], object], *,
    overwrite: bool = False, jobs: int = JOBS, budget: int = 0, on_progress: OnProgress | None = None,
) -> None:  # fmt: skip
    """`copy_tree` from a remote: ``fetch`` brings one file into its sink, as `Remote.fetch` does. For what the cache has no room for.

    Called from several threads. Raises what it does, too; `RemoteChanged` where it brings another size or version than was listed."""
    copy = _Copy(target, files, {file.name: stamp(file) for file in files}, overwrite, budget)
    copy.ask_for_room()
    copy.make(fetch, jobs, on_progress)


# -- the whole ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Lacking:
    """What a directory lacks: ``todo``, and what stands in the way of it."""

    todo: list[File]
    in_the_way: list[Path]


class _Copy:
    """One call: look, stage what is missing, move it into place."""

    def __init__(self, target: Path, files: Iterable[File], stamps: dict[str, int | None], overwrite: bool, budget: int) -> None:
        self._target, self._stamps, self._overwrite, self._budget = target, stamps, overwrite, budget
        self._new = not os.path.lexists(target)
        self._part = target.with_name(_beside(target.name)) if self._new else target / PART
        self._look = self._looked(target, files, check=True)
        self._gate, self._sinks = Gate(), list[FileSink]()
        self._asking = threading.Lock()  # guards _asked
        self._asked = False

    def make(self, bring: Callable[[File, FileSink], object], jobs: int, on_progress: OnProgress | None) -> None:
        """Have everything in place."""
        if not self._look.todo and not self._new:
            self._sweep()
            return
        try:
            with self._full_disk():
                self._stage(bring, jobs, on_progress)
            self._move()
        except BaseException:
            remove_whole(self._part)
            raise

    def _sweep(self) -> None:
        """What a copy that was killed left after its last step but one."""
        remove_whole(self._part)
        remove_whole(self._target.with_name(_beside(self._target.name)))

    # -- looking ---------------------------------------------------------------------------------------------------

    def _looked(self, top: Path, files: Iterable[File], *, check: bool) -> _Lacking:
        """What is not there yet. ``check``: what else stands there is the user's."""
        closed, todo, in_the_way = set[str](), list[File](), list[Path]()
        if check and not self._new and not top.is_dir():
            raise _foreign(top, "no directory")
        for name in sorted({above for file in files for above in _above(file.name)}):
            if not closed.isdisjoint(_above(name)):
                closed.add(name)
            elif (found := _lstat(top / name)) is None or not stat.S_ISDIR(found.st_mode):
                closed.add(name)
                if found is not None:
                    self._check_mine(top / name, check, "no directory")
                    in_the_way.append(top / name)
        for file in files:
            found = _lstat(top / file.name) if closed.isdisjoint(_above(file.name)) else None
            if found is not None and self._is_done(file, found):
                continue
            todo.append(file)
            if found is not None:
                self._check_mine(top / file.name, check, "a directory" if stat.S_ISDIR(found.st_mode) else "another file")
                in_the_way.append(top / file.name)
        return _Lacking(todo, in_the_way)

    def _is_done(self, file: File, found: os.stat_result) -> bool:
        return stat.S_ISREG(found.st_mode) and file.size in (found.st_size, None) and has_stamp(found.st_mtime_ns, self._stamps[file.name])

    def _check_mine(self, path: Path, check: bool, what: str) -> None:
        if check and (not self._overwrite or what == "a directory"):
            raise _foreign(path, what)

    # -- room ------------------------------------------------------------------------------------------------------

    def ask_for_room(self) -> None:
        """Raises `NoSpace`, once, where the disk has less than what is to come."""
        with self._asking:
            if self._asked:
                return
            self._asked = True
            if self._need() - sum(sink.done for sink in self._sinks) > self._free():
                raise self._no_space()

    def _need(self) -> int:
        return sum(file.size or 0 for file in self._look.todo)

    def _free(self) -> int:
        return host.free_bytes(next(place for place in (self._target, *self._target.parents) if place.exists()))

    def _no_space(self) -> errors.NoSpace:
        need, free = self._need(), self._free()
        message = f"no room for {self._target}: {need:,} bytes are wanted, {free:,} are free on its disk"
        return errors.NoSpace(message, key=str(self._target), need=need, free=free, budget=self._budget, limit="disk")

    @contextlib.contextmanager
    def _full_disk(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno not in _FULL or isinstance(error, errors.ForebayError):
                raise
            remove_whole(self._part)  # so that what is told to be free is what there is
            raise self._no_space() from error

    # -- making ----------------------------------------------------------------------------------------------------

    def _stage(self, bring: Callable[[File, FileSink], object], jobs: int, on_progress: OnProgress | None) -> None:
        os.makedirs(self._target.parent, exist_ok=True)
        self._find_part()
        look = self._looked(self._part, self._look.todo, check=False)
        for path in look.in_the_way:
            remove_whole(path)
        _prune(self._part, {file.name for file in self._look.todo})
        for name in sorted({above for file in look.todo for above in _above(file.name)}):
            host.mkdir(self._part / name, 0o777)
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

        each(((file, file.size or 0) for file in look.todo), work, jobs, on_turn=tell, stop=self._gate.shut)
        tell()

    def _find_part(self) -> None:
        """Have the directory in which the copy is made, with what an earlier one left in it."""
        beside = self._target.with_name(_beside(self._target.name))
        if not self._new and _lstat(beside) is not None:  # what was killed came before the directory itself
            remove_whole(self._part)
            with contextlib.suppress(OSError):  # another disk, or no right to: it is made anew
                host.rename(beside, self._part)
        found = _lstat(self._part)
        if found is not None and (not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid()):
            remove_whole(self._part)  # the name can be guessed: in /tmp anybody may put something there
        host.mkdir(self._part, 0o777)

    def _move(self) -> None:
        if self._new:
            try:
                host.rename(self._part, self._target)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                    raise
                raise _foreign(self._target, "something that was not there before") from error
            return
        for path in self._look.in_the_way:
            self._clear(path)
        for name in sorted({above for file in self._look.todo for above in _above(file.name)}):
            host.mkdir(self._target / name, 0o777)
        for file in self._look.todo:
            path = self._target / file.name
            if not self._overwrite and _lstat(path) is not None:
                raise _foreign(path, "a file that was not there before")
            host.rename(self._part / file.name, path)
        self._sweep()

    @staticmethod
    def _clear(path: Path) -> None:
        """Make way for a directory; a file is replaced by the move itself."""
        found = _lstat(path)
        if found is not None and not stat.S_ISDIR(found.st_mode):
            host.unlink(path)


def _beside(name: str) -> str:
    """The name of the part of a directory of this name, which file systems may keep."""
    if len(os.fsencode(name)) > 200:
        name = hashlib.blake2b(os.fsencode(name), digest_size=16).hexdigest()
    return f".{name}{PART}"


def _above(name: str) -> list[str]:
    """The directories that a name stands in, the topmost first."""
    parts = name.split("/")
    return ["/".join(parts[:depth]) for depth in range(1, len(parts))]


def _lstat(path: Path) -> os.stat_result | None:
    try:
        return path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return None


def _foreign(path: Path, what: str) -> errors.Foreign:
    return errors.Foreign(f"{path} is {what}, and stays as it is: name another directory, or have it overwritten", path=str(path))


def _prune(top: Path, names: set[str], prefix: str = "") -> None:
    """Remove what is none of these files, nor a directory of one."""
    directories = {above for name in names for above in _above(name)}
    with os.scandir(top) as found:
        inside = list(found)
    for entry in inside:
        name = prefix + entry.name
        if name in directories and entry.is_dir(follow_symlinks=False):
            _prune(Path(entry.path), names, f"{name}/")
        elif name not in names:
            remove_whole(Path(entry.path))
