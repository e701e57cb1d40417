"""What the caches of the adapter for PFIO share: the interface, reading and filling slots in files, the limit of their size."""

from __future__ import annotations

import abc
import contextlib
import decimal
import fcntl
import numbers
import operator
import os
import pickle
import secrets
import struct
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Self, cast

from forebay import errors
from forebay._engine.files.faults import FULL
from forebay._engine.packs.pack import Pack
from forebay._logs import logger
from forebay.adapters.pfio import roots
from forebay.adapters.pfio.file import RECORD, PfioFile, write_array
from forebay.cache import Cache as NodeCache
from forebay.samples import Samples

log = logger("forebay.pfio")


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


class Stored(Shared):
    """Slots in files."""

    closed: bool
    _source: Samples | PfioFile | None  # what is read
    _tag: str  # the name of this class in PFIO's profile

    def __init__(self, length: int, do_pickle: bool, dir: str | os.PathLike[str] | None, verbose: bool, trace: bool) -> None:
        self.length, self.do_pickle, self.verbose, self.trace = checked_length(length), do_pickle, verbose, trace
        self.dir = roots.default_dir() if dir is None else dir
        self._directory, self._is_given = os.path.abspath(self.dir), dir is not None
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
        except OSError as error:  # a cache that cannot be read is empty
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
        preserved: Samples | PfioFile | None = None if self._is_given else _named(self._node_cache(), name, self.length)
        path = os.path.join(self._directory, name)
        if preserved is None and os.path.exists(path):
            preserved = PfioFile(path, self.length)
        if preserved is None:
            self._log("nothing was preserved as %s in %s", name, self.dir)
        return preserved

    def _node_cache(self) -> NodeCache:
        """The cache of this node, opened once."""
        cache = self._cache
        if cache is None:
            cache = self._cache = NodeCache()
            weakref.finalize(self, cache.close)
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
    except ImportError:
        return contextlib.nullcontext()
    recording: contextlib.AbstractContextManager[Any] = record(tag, trace=True)
    return recording


def pickled(source: Samples | PfioFile | None) -> bytes:
    """A source to be read in another process."""
    return pickle.dumps(source)


def unpickled(owner: object, data: bytes) -> Samples | PfioFile | None:
    """A source that another process pickled; its cache stays open until ``owner`` is collected."""
    source: Samples | PfioFile | None = pickle.loads(data)
    if isinstance(source, Samples):
        weakref.finalize(owner, source._origin.close).atexit = False
    return source


# -- filling -----------------------------------------------------------------------------------------------------------

_RUN = secrets.token_hex(8)  # with the pid, identifies a process: a forked child has another pid, a spawned one another token


class Filling(Stored):
    """Slots that are filled, until they are frozen: put, preserve, preload, and use in several processes."""

    _live: Samples | None  # the array that `put` fills
    _limit_first: bool  # whether a put into a filled slot counts against the limit too
    _for_workers: bool  # whether only the process that created it can preload, and close it for all

    def __init__(
        self, length: int, do_pickle: bool, dir: str | os.PathLike[str] | None, cache_size_limit: Any, verbose: bool, trace: bool
    ) -> None:  # fmt: skip
        super().__init__(length, do_pickle, dir, verbose, trace)
        self.cache_size_limit = _checked_limit(cache_size_limit)
        self._creator = (os.getpid(), _RUN)
        own = roots.open_private(self._directory) if self._is_given else None
        cache = own or self._node_cache()
        live = self._live = cache.samples(length=self.length, codec="raw")
        self._source, self.closed, self._was_frozen = live, False, False
        self._root = str(own.path) if own is not None else None
        self._end: weakref.finalize[Any, Any] | None = weakref.finalize(self, _end, self._creator, live, own)
        self._tally = Tally.of(live) if cache_size_limit else None
        if self._tally is not None:
            with self._tally.exclusive():
                self._tally.add(RECORD.size * self.length)
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
            return live.put(i, value) if self._tally is None else self._put_within(self._tally, live, operator.index(i), value)
        except errors.Closed:  # by another thread, meanwhile
            return False
        except OSError as error:  # other faults were reported already: somebody removed this cache
            self._warn_once(error)
            return False

    def _put_within(self, tally: Tally, live: Samples, i: int, value: bytes | memoryview) -> bool:
        """The first put that does not fit freezes the cache."""
        size = memoryview(value).nbytes
        with tally.exclusive():
            if live.frozen or not 0 <= i < self.length or (i in live and not self._limit_first):
                return live.put(i, value)
            if tally.read() + size > self.cache_size_limit:
                live.freeze()
                return False
            tally.add(size)
            stored = live.put(i, value)
            if not stored:
                tally.add(-size)
            return stored

    def preserve(self, name: str, overwrite: bool = False) -> bool:
        """Keep the contents under a name beyond `close`, for `preload` of any of these classes, and freeze the cache.

        With ``dir``, writes the file ``dir/name``, which PFIO reads too; else gives the array a name in the node's cache. False if the name
        is taken (unless ``overwrite``), or there is no space. Raises RuntimeError in any process but the one that created this cache."""
        self._check_creator("preserve")
        if self.closed:
            return False
        to_file = self._is_given or isinstance(self._source, PfioFile)
        kept = self._save(name, overwrite) if to_file else self._name(name, overwrite)
        if not kept:
            self._log("%s is not preserved in %s", name, self.dir)
        return kept

    def _save(self, name: str, overwrite: bool) -> bool:
        target = os.path.join(self._directory, name)
        if not overwrite and os.path.lexists(target):
            return False
        if isinstance(self._source, PfioFile):
            return roots.link(self._source.path, target, overwrite)
        live = cast(Samples, self._source)
        live.freeze()
        staged = os.path.join(str(self._root), f"preserve-{secrets.token_hex(8)}")
        try:
            with open(staged, "xb", opener=_private) as file:
                write_array(file, live)
            return roots.publish(staged, target, overwrite)
        except OSError as error:
            if error.errno not in FULL:
                raise
            warnings.warn(f"{target} is not stored: {error.strerror}", RuntimeWarning, stacklevel=3)
            return False
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(staged)

    def _name(self, name: str, overwrite: bool) -> bool:
        """Give the array a name in the node's cache; if it has one already, give it to a copy."""
        source = self._source
        if not isinstance(source, Samples) or source.name == name:
            return overwrite
        if source.name is None:
            return source.preserve(name, overwrite)
        with self._node_cache().samples(length=self.length) as copy:
            complete = all(copy.put(i, cast(memoryview, source.get(i))) for i in source)
            return complete and copy.preserve(name, overwrite)

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
        if self._end is not None:
            self._end()
        close_source(live)
        if self._tally is not None:
            self._tally.close()

    def _is_creator(self) -> bool:
        return self._creator == (os.getpid(), _RUN)

    def _check_creator(self, what: str) -> None:
        if not self._is_creator():
            raise RuntimeError(f"{what} can be called only in process {self._creator[0]}, which created this cache; this is {os.getpid()}")

    def __getstate__(self) -> dict[str, Any]:
        state = {name: value for name, value in vars(self).items() if name not in ("_end", "_cache", "_live", "_source")}
        data = None if self.closed else pickled(self._source)  # pickled separately: it must not be opened if the root is gone
        return state | {"_pickled_source": data, "_is_live": self._source is self._live}

    def __setstate__(self, state: dict[str, Any]) -> None:
        data, is_live = state.pop("_pickled_source"), state.pop("_is_live")
        vars(self).update(state)
        self._source = self._live = self._cache = self._end = None
        root = self._root if is_live else None
        if data is None or (root is not None and not os.path.exists(os.path.join(root, "FORMAT"))):
            self.closed = True  # by the process that created it, meanwhile
            return
        self._source = unpickled(self, data)
        self._live = cast(Samples, self._source) if is_live else None
        if root is not None:
            # Opened once with its own budget, which this process's environment would replace otherwise.
            roots.reopen_private(root).close()


def _end(creator: tuple[int, str], live: Samples, own: NodeCache | None) -> None:
    """Runs in the process that created a cache when it is closed, collected, or open at exit. ``own``: its root in ``dir``."""
    if creator != (os.getpid(), _RUN):
        return
    if own is not None and not live.closed:
        live.freeze()  # otherwise a worker that is putting would recreate what is removed here
    live.close()
    if own is not None:
        own.close()
        roots.remove_private(str(own.path))


def _checked_limit(limit: Any) -> Any:
    """Raises `ConfigError` (a ValueError) for an invalid limit."""
    if limit is not None and not (isinstance(limit, (numbers.Real, decimal.Decimal)) and limit >= 0):  # type: ignore[operator]
        message = f"cache_size_limit={limit!r} makes no sense: bytes, or None or 0 for no limit"
        raise errors.ConfigError(message, name="cache_size_limit", value=repr(limit))
    return limit


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


# -- the limit ---------------------------------------------------------------------------------------------------------

_NUMBER = struct.Struct("Q")
_OFFSET = 4096 - _NUMBER.size  # the end of the index's header, which the array itself does not use


class Tally:
    """The bytes that all processes have put into an array, counted in its index: exact, for a cache with a limit. Callable from any
    thread, usable in both processes after a fork, and picklable.

    A process that is killed between counting and storing leaves the number too high by one value; it is never too low."""

    _mutex: threading.Lock  # guards _fd, and the file's lock, which the threads of a process share
    _fd: int

    def __init__(self, path: str) -> None:
        self._path = path
        self._reset()

    @classmethod
    def of(cls, samples: Samples) -> Tally | None:
        """The tally of an array, 0 at first; None for an array that stores nothing."""
        pack = samples._pack
        return cls(str(pack._root.pack(pack.id) / "index")) if isinstance(pack, Pack) else None

    def _reset(self) -> None:
        self._mutex, self._fd, self._pid = threading.Lock(), -1, os.getpid()

    def __reduce__(self) -> tuple[Any, ...]:
        return Tally, (self._path,)

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """No other thread or process counts meanwhile. Raises OSError if the array is gone."""
        if self._pid != os.getpid():
            self.close()  # the parent has the same open file, whose lock would not exclude this process
            self._reset()
        with self._mutex:
            if self._fd < 0:
                self._fd = os.open(self._path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            fcntl.flock(self._fd, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(self._fd, fcntl.LOCK_UN)

    def read(self) -> int:
        """The number. Within `exclusive`."""
        number: int = _NUMBER.unpack(os.pread(self._fd, _NUMBER.size, _OFFSET))[0]
        return number

    def add(self, size: int) -> None:
        """Count ``size`` more. Within `exclusive`."""
        os.pwrite(self._fd, _NUMBER.pack(self.read() + size), _OFFSET)

    def close(self) -> None:
        """Close the file. The next use opens it again."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_finalizing():
            self.close()
