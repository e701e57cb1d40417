"""What the PFIO caches share: the interface, reading and filling slots in files, and the private root of a cache with ``dir=``."""

from __future__ import annotations

import abc
import contextlib
import decimal
import fcntl
import numbers
import operator
import os
import pickle
import re
import secrets
import shutil
import stat
import struct
import warnings
import weakref
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Self, cast

from forebay import errors
from forebay._engine.files.layout import FULL
from forebay._engine.packs.pack import Pack
from forebay._kernel import host
from forebay._kernel.interrupts import finalizer, guarded_methods, paced, unless_of_handler
from forebay._kernel.locks import LockFile
from forebay._logs import logger
from forebay.adapters.pfio.file import RECORD, PfioFile, write_array
from forebay.cache import Cache as NodeCache
from forebay.remote import absolute_path, as_text, expand_user
from forebay.samples import Samples

log = logger("forebay.pfio")

UNLIMITED = 1 << 60
_ROOT = re.compile(r"forebay-[0-9a-f]{16}")
_GONE = re.compile(_ROOT.pattern + r"\.gone")
_RUN = secrets.token_hex(8)  # with the pid, identifies a process: a forked child has another pid, a spawned one another token
_COUNT = struct.Struct("Q")
_COUNT_AT = 4096 - _COUNT.size  # the end of the header of an array's index, which the array itself does not use


@guarded_methods("__len__", "get", "multiprocess_safe", "multithread_safe")
class Cache(abc.ABC):
    """The interface of all caches. ``len()`` is the number of slots."""

    @abc.abstractmethod
    def __len__(self) -> int: ...

    @property
    @abc.abstractmethod
    def multiprocess_safe(self) -> bool:
        """Whether several processes may put into it."""

    @property
    @abc.abstractmethod
    def multithread_safe(self) -> bool:
        """Whether several threads may use it."""

    @abc.abstractmethod
    def put(self, i: int, data: Any) -> bool:
        """Store the data of slot i, once. False if it is not stored."""

    @abc.abstractmethod
    def get(self, i: int) -> Any:
        """The data of slot i, or None."""

    def get_and_cache(self, i: int, backend_get: Callable[[int], Any]) -> Any:
        """The data of slot i; else that of ``backend_get(i)``, which is stored."""
        data = self.get(i)
        if data is None:
            data = backend_get(i)
            self.put(i, data)
        return data

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:  # noqa: B027  # most hold nothing
        """Release everything."""


@guarded_methods("__len__", "multiprocess_safe", "multithread_safe")
class Shared(Cache):
    """Slots outside of the process: any number of processes and threads may use them."""

    length: int

    def __len__(self) -> int:
        return self.length

    @property
    def multiprocess_safe(self) -> bool:
        return True

    @property
    def multithread_safe(self) -> bool:
        return True


@guarded_methods("get")
class Stored(Shared):
    """Slots in files."""

    closed: bool
    _source: Samples | PfioFile | None  # what is read
    _tag: str  # the name of this class in PFIO's profile

    def __init__(self, length: int, do_pickle: bool, dir: str | os.PathLike[str] | None, verbose: bool, trace: bool) -> None:
        self.length, self.do_pickle, self.verbose, self.trace = checked_length(length), do_pickle, verbose, trace
        self.dir = default_dir() if dir is None else dir
        self._directory, self._is_given = absolute_path(as_text(self.dir)), dir is not None
        self._source, self._has_warned = None, False
        self._cache: NodeCache | None = None

    def get(self, i: int) -> Any:
        """The data of slot i as bytes, or unpickled; None if it is empty, and after `close`. Raises IndexError."""
        if not self.trace:
            return self._get(i)
        with recorded(f"pfio.cache.{self._tag}:get"):
            return self._get(i)

    def _get(self, i: int) -> Any:
        """See `get`."""
        source = self._source
        if source is None or self.closed:
            return None
        try:
            data = source.get(i)
        except errors.Closed:  # by another thread, meanwhile
            return None
        except unless_of_handler(OSError) as error:  # a cache that cannot be read is empty
            self._warn_once(error)
            return None
        if data is None:
            return None
        return pickle.loads(data) if self.do_pickle and data else data.tobytes()  # bytes(data) takes twice as long

    def _warn_once(self, error: OSError) -> None:
        if not self._has_warned:
            log.warning("%s", str(error))
        self._has_warned = True

    def _find(self, name: str) -> Samples | PfioFile | None:
        """What was preserved under this name. Raises `ConfigError` if it has fewer slots."""
        name = as_text(name)
        preserved: Samples | PfioFile | None = None if self._is_given else _named(self._node_cache(), name, self.length)
        path = os.path.join(self._directory, name)
        if preserved is None and os.path.exists(path):
            preserved = PfioFile(path, self.length)
        if preserved is None:
            self._log("nothing was preserved as %s in %s", name, self.dir)
        return preserved

    def _adopt(self, source: Samples | PfioFile | None) -> None:
        """Read a source that another process pickled; its cache stays open until this object is collected."""
        self._source = source
        if isinstance(source, Samples):
            weakref.finalize(self, finalizer(source._fetcher.close)).atexit = False

    def _node_cache(self) -> NodeCache:
        """The cache of this node, opened once."""
        cache = self._cache
        if cache is None:
            cache = self._cache = NodeCache()
            weakref.finalize(self, finalizer(cache.close))
        return cache

    def _close_node_cache(self) -> None:
        cache, self._cache = self._cache, None
        if cache is not None:
            cache.close()

    def _log(self, message: str, *args: object) -> None:
        if self.verbose:
            log.info(message, *args)


def checked_length(length: int) -> int:
    if not 0 < length < 1 << 64:
        raise errors.ConfigError(f"length={length} is invalid: it must be at least 1, and less than 2**64", name="length", value=length)
    return operator.index(length)


def _named(cache: NodeCache, name: str, length: int) -> Samples | None:
    """The array of this name in the node's cache. Raises `ConfigError` if it has fewer slots."""
    try:
        array = cache.samples(name, codec="raw")
    except errors.NotCached:
        return None
    if len(array) < length:
        message = f"the array {name!r} has {len(array):,} slots, but {length:,} were requested: give the length that it was created with"
        array.close()
        raise errors.ConfigError(message, name="length", value=length, found=len(array))
    return array


def close_source(source: Samples | PfioFile | None) -> None:
    if isinstance(source, Samples):
        source.close()


def recorded(tag: str, *, trace: bool = True) -> contextlib.AbstractContextManager[Any]:
    """Records one call in the profile of pytorch-pfn-extras, if ``trace`` is set and the package is installed."""
    if not trace:
        return contextlib.nullcontext()
    try:
        from pytorch_pfn_extras.profiler import record  # type: ignore[import-not-found,unused-ignore]
    except unless_of_handler(ImportError):
        return contextlib.nullcontext()
    recording: contextlib.AbstractContextManager[Any] = record(tag, trace=True)
    return recording


# -- filling -----------------------------------------------------------------------------------------------------------


@guarded_methods()
class Filling(Stored):
    """Slots that are filled, until they are frozen: put, preserve, preload, and use in several processes."""

    _live: Samples | None  # the array that `put` fills
    _limit_first: bool  # whether a put into a filled slot counts against the limit too
    _for_workers: bool  # whether only the process that created it can preserve, preload, and close it for all

    def __init__(
        self, length: int, do_pickle: bool, dir: str | os.PathLike[str] | None, cache_size_limit: Any, verbose: bool, trace: bool
    ) -> None:  # fmt: skip
        super().__init__(length, do_pickle, dir, verbose, trace)
        self.cache_size_limit = _checked_limit(cache_size_limit)
        self._creator = (os.getpid(), _RUN)
        own = open_private(self._directory) if self._is_given else None
        cache = own or self._node_cache()
        live = self._live = cache.samples(length=self.length, codec="raw")
        self._source, self.closed, self._was_frozen = live, False, False
        self._root = str(own.path) if own is not None else None
        self._end: weakref.finalize[Any, Any] | None = weakref.finalize(self, finalizer(_end), self._creator, live, own)
        pack = live._pack
        self._index = str(pack._root.pack(pack.id) / "index") if cache_size_limit and isinstance(pack, Pack) else None
        self._log("created a cache of %d slots in %s", self.length, cache.path)

    @property
    def frozen(self) -> bool:
        """Whether nothing more is stored: after `preserve` or `preload`, or after any process reached the limit."""
        live = self._live
        return self._was_frozen if live is None else live.frozen

    def put(self, i: int, data: Any) -> bool:
        """Store the data of slot i. False if the slot is filled, the cache is frozen or closed, or the disk is full (with one
        RuntimeWarning). Raises IndexError, TypeError for data that is not bytes-like (unless ``do_pickle``), and what pickling raises."""
        if not self.trace:
            return self._put(i, data)
        with recorded(f"pfio.cache.{self._tag}:put"):
            return self._put(i, data)

    def _put(self, i: int, data: Any) -> bool:
        live = self._live
        if live is None or self.closed or self.frozen:
            return False
        value = pickle.dumps(data) if self.do_pickle else memoryview(data)
        try:
            return live.put(i, value) if self._index is None else self._put_within(self._index, live, operator.index(i), value)
        except errors.Closed:  # by another thread, meanwhile
            return False
        except OSError as error:  # other faults were reported already: somebody removed this cache
            self._warn_once(error)
            return False

    def _put_within(self, index: str, live: Samples, i: int, value: bytes | memoryview) -> bool:
        """The first put that does not fit freezes the cache. The bytes of all processes' puts are counted in the array's ``index``.

        A process that is killed between counting and storing leaves the number too high by one value; it is never too low."""
        size = memoryview(value).nbytes
        with _locked(index) as fd:
            if live.frozen or not 0 <= i < self.length or (i in live and not self._limit_first):
                return live.put(i, value)
            (used,) = _COUNT.unpack(os.pread(fd, _COUNT.size, _COUNT_AT))
            if RECORD.size * self.length + used + size > self.cache_size_limit:
                live.freeze()
                return False
            os.pwrite(fd, _COUNT.pack(used + size), _COUNT_AT)
            stored = live.put(i, value)
            if not stored:
                os.pwrite(fd, _COUNT.pack(used), _COUNT_AT)
            return stored

    def preserve(self, name: str, overwrite: bool = False) -> bool:
        """Keep the contents under a name beyond `close`, for `preload` of any of these classes, and freeze the cache.

        With ``dir``, writes the file ``dir/name``, which PFIO reads too; else gives the array a name in the node's cache. False if the name
        is taken (unless ``overwrite``), or there is no space. Of a `MultiprocessFileCache`, raises RuntimeError in any process but the one
        that created it."""
        if self._for_workers:
            self._check_creator("preserve")
        if self.closed:
            return False
        name, to_file = as_text(name), self._is_given or isinstance(self._source, PfioFile)
        kept = self._save(name, overwrite) if to_file else self._name(name, overwrite)
        if not kept:
            self._log("%s is not preserved in %s", name, self.dir)
        return kept

    def _save(self, name: str, overwrite: bool) -> bool:
        source, target = self._source, os.path.join(self._directory, name)
        if os.path.lexists(target):
            if not overwrite:
                return False
            if isinstance(source, PfioFile) and os.path.exists(target) and os.path.samefile(source.path, target):
                return True  # renaming a second link over the first would leave both names
        unique = secrets.token_hex(8)
        staged = f"{target}.forebay-{unique}" if isinstance(source, PfioFile) else os.path.join(str(self._root), f"preserve-{unique}")
        try:
            if isinstance(source, PfioFile):
                os.link(source.path, staged)
            else:
                live = cast(Samples, source)
                live.freeze()
                with open(staged, "xb", opener=_private) as file:
                    write_array(file, live)
            if overwrite:
                os.replace(staged, target)
            else:
                os.link(staged, target)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in FULL:
                raise
            warnings.warn(f"{target} is not stored: {error.strerror}", RuntimeWarning, stacklevel=3)
            return False
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(staged)
        return True

    def _name(self, name: str, overwrite: bool) -> bool:
        """Give the array a name in the node's cache; if it has one already, or another process created it, give it to a copy."""
        source = self._source
        if not isinstance(source, Samples) or source.name == name:
            return overwrite
        if source.name is None and self._is_creator():
            return source.preserve(name, overwrite)
        with self._node_cache().samples(length=self.length) as copy:
            complete = all(copy.put(i, cast(memoryview, source.get(i))) for i in paced(source))
            kept = complete and copy.preserve(name, overwrite)
        if kept:
            source.freeze()
        return kept

    def preload(self, name: str) -> bool:
        """From now on, read what was preserved under this name, instead of what was put here. False if there is nothing of this name,
        or the cache is frozen. Raises `ConfigError` (a ValueError) if it has fewer slots."""
        if self.frozen:
            self._log("%s is not preloaded: this cache is frozen", name)
            return False
        if self._for_workers:
            self._check_creator("preload")
        preserved = None if self.closed else self._find(name)
        if preserved is None:
            return False
        self._source = preserved
        self._drop_own(frozen=True)
        return True

    def close(self) -> None:
        """Release everything. With ``dir``, the process that created this cache removes its files there; preserved files stay.

        In workers (`MultiprocessFileCache` in another process) this does nothing: the cache stays usable."""
        if self.closed or (self._for_workers and not self._is_creator()):
            return
        self.closed, source, self._source = True, self._source, None
        self._drop_own(frozen=self.frozen)
        close_source(source)
        self._close_node_cache()

    def _drop_own(self, *, frozen: bool) -> None:
        """Remove what was put here: a closed array that is still referred to would keep its space on the disk."""
        live, self._live, self._was_frozen = self._live, None, frozen
        if self._end is not None and (not_ended := self._end.detach()) is not None:
            _end(*not_ended[2])
        close_source(live)

    def _is_creator(self) -> bool:
        return self._creator == (os.getpid(), _RUN)

    def _check_creator(self, what: str) -> None:
        if not self._is_creator():
            raise RuntimeError(f"{what} can be called only in process {self._creator[0]}, which created this cache; this is {os.getpid()}")

    def __getstate__(self) -> dict[str, Any]:
        state = {name: value for name, value in vars(self).items() if name not in ("_end", "_cache", "_live", "_source")}
        data = None if self.closed else pickle.dumps(self._source)  # pickled separately: it must not be opened if the root is gone
        return state | {"_pickled_source": data, "_is_live": self._source is self._live}

    def __setstate__(self, state: dict[str, Any]) -> None:
        data, is_live = state.pop("_pickled_source"), state.pop("_is_live")
        vars(self).update(state)
        self._source = self._live = self._cache = self._end = None
        root = self._root if is_live else None
        if data is None or (root is not None and not os.path.exists(os.path.join(root, "FORMAT"))):
            self.closed = True  # by the process that created it, meanwhile
            return
        self._adopt(pickle.loads(data))
        self._live = cast(Samples, self._source) if is_live else None
        if root is not None:
            # Opened once with its own budget, which this process's environment would replace otherwise.
            NodeCache(root, budget=UNLIMITED, min_free=0).close()


def _end(creator: tuple[int, str], live: Samples, own: NodeCache | None) -> None:
    """Runs in the process that created a cache when it is closed, collected, or open at exit. ``own``: its root in ``dir``."""
    if creator != (os.getpid(), _RUN):
        return
    if own is not None and not live.closed:
        live.freeze()  # otherwise a worker that is putting would recreate what is removed here
    live.close()
    if own is not None:
        own.close()
        remove_private(str(own.path))


def _checked_limit(limit: Any) -> Any:
    """Raises `ConfigError` (a ValueError) for an invalid limit."""
    if limit is not None and not (isinstance(limit, (numbers.Real, decimal.Decimal)) and limit >= 0):  # type: ignore[operator]
        message = f"cache_size_limit={limit!r} makes no sense: bytes, or None or 0 for no limit"
        raise errors.ConfigError(message, name="cache_size_limit", value=repr(limit))
    return limit


def _private(path: str, flags: int) -> int:
    return host.open_fd(path, flags | os.O_CLOEXEC, 0o600)


@contextlib.contextmanager
def _locked(path: str) -> Iterator[int]:
    """A descriptor of the file, while no other thread or process has one. Raises OSError if the file is gone."""
    fd = host.open_fd(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        host.flock(fd, fcntl.LOCK_EX)
        yield fd
    finally:
        fcntl.flock(fd, fcntl.LOCK_UN)  # closing is not enough: a child that was forked meanwhile has the descriptor too
        os.close(fd)


# -- private roots -----------------------------------------------------------------------------------------------------


def default_dir() -> str:
    """The directory in which PFIO itself would keep its files."""
    return os.path.join(os.getenv("XDG_CACHE_HOME") or expand_user("~/.cache", "cache_dir"), "pfio")


def check_local(directory: str) -> None:
    """Raises `ConfigError` (a ValueError) for a directory that cannot hold a cache."""
    kind = host.fs_kind(directory)
    if not host.is_local(kind):
        message = f"dir={directory!r} lies on a file system of kind {kind}, which cannot hold a cache: choose a local disk"
        raise errors.ConfigError(message, name="dir", value=directory)


def open_private(directory: str) -> NodeCache:
    """A new root in ``directory``, for one cache. Removes the roots of processes that were killed."""
    os.makedirs(directory, exist_ok=True)
    check_local(directory)
    with _creating_root(directory) as abandoned:
        cache = NodeCache(os.path.join(directory, f"forebay-{secrets.token_hex(8)}"), budget=UNLIMITED, min_free=0)
    for path in abandoned:
        remove_private(path)
    return cache


def remove_private(path: str) -> None:
    """Remove a root with its contents, also if other processes write to it meanwhile."""
    for _ in range(10):
        shutil.rmtree(path, ignore_errors=True)
        if not os.path.lexists(path):
            return
    log.warning("%s could not be removed", path)


@contextlib.contextmanager
def _creating_root(directory: str) -> Iterator[list[str]]:
    """Keep other processes from cleaning up while a root is created that nothing has open yet; give the roots that nothing has open.

    Processes that create roots share the directory's lock: a process that holds it alone knows that no root is half created."""
    fd = host.open_fd(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        abandoned = _abandoned_in(directory) if _try_exclusive(fd) else []
        host.flock(fd, fcntl.LOCK_SH)
        yield abandoned
    finally:
        fcntl.flock(fd, fcntl.LOCK_UN)  # closing is not enough: a child that was forked meanwhile has the descriptor too
        os.close(fd)


def _try_exclusive(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _abandoned_in(directory: str) -> list[str]:
    """The roots here that no process has open, each renamed so that none opens it. Caller: holds the directory's lock alone."""
    abandoned = []
    for name in os.listdir(directory):
        path = os.path.join(directory, name)
        if _GONE.fullmatch(name):
            abandoned.append(path)  # the process that was to remove it ended before
        elif _ROOT.fullmatch(name) and _is_abandoned(path):
            with contextlib.suppress(FileNotFoundError):
                os.rename(path, f"{path}.gone")
                abandoned.append(f"{path}.gone")
    return abandoned


def _is_abandoned(path: str) -> bool:
    """Whether a root of this user is open in no process: each holds a lock on its FORMAT file, which a half created root lacks."""
    try:
        status = os.lstat(path)
    except FileNotFoundError:  # P1 lists it / P2 closes its cache, which removes it / P1 looks
        return False
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        return False
    lock = LockFile(os.path.join(path, "FORMAT"))
    try:
        return lock.try_lock(0, exclusive=True)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    finally:
        lock.close()
