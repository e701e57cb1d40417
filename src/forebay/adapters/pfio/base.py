"""What the caches of the adapter for PFIO have in common, and how those that lie in files are read."""

from __future__ import annotations

import abc
import contextlib
import operator
import os
import pickle
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from forebay import errors
from forebay._logs import logger
from forebay.adapters.pfio import places as places
from forebay.adapters.pfio.file import PfioFile
from forebay.cache import Cache as Home
from forebay.samples import Samples

log = logger("forebay.pfio")


class Cache(abc.ABC):
    """What all caches have. ``len()`` is the number of slots."""

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
        """Store the data of slot i, once. False where that is not done."""

    @abc.abstractmethod
    def get(self, i: int) -> Any:
        """The data of slot i, or None."""

    def get_and_cache(self, i: int, backend_get: Callable[[int], Any]) -> Any:
        """The data of slot i; else what ``backend_get(i)`` gives, stored."""
        data = self.get(i)
        if data is None:
            data = backend_get(i)
            self.put(i, data)
        return data

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:  # noqa: B027  # most need none
        """Let go of everything."""


class Shared(Cache):
    """Slots that lie outside of the process: any number of processes and threads may use them."""

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
    """Slots that lie in files."""

    closed: bool
    _source: Samples | PfioFile | None  # what is read
    _tag: str  # how PFIO's profile calls this class

    def __init__(self, length: int, do_pickle: bool, dir: str | os.PathLike[str] | None, verbose: bool, trace: bool) -> None:
        self.length, self.do_pickle, self.verbose, self.trace = checked_length(length), do_pickle, verbose, trace
        self.dir = places.default_dir() if dir is None else dir
        self._place, self._given = os.path.abspath(self.dir), dir is not None
        self._source, self._told = None, False
        self._home: Home | None = None

    def get(self, i: int) -> Any:
        """The data of slot i as bytes, or unpickled; None if there are none, and after `close`. Raises IndexError."""
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
        except OSError as error:  # a cache that cannot be read has nothing
            self._tell_once(error)
            return None
        if data is None:
            return None
        return pickle.loads(data) if self.do_pickle and data else data.tobytes()  # bytes(data) takes twice as long

    def _tell_once(self, error: OSError) -> None:
        if not self._told:
            log.warning("%s", str(error))
        self._told = True

    def _find(self, name: str) -> Samples | PfioFile | None:
        """What was preserved under this name. Raises `ConfigError` where that has another length."""
        found: Samples | PfioFile | None = None if self._given else _named(self._node(), name, self.length)
        path = os.path.join(self._place, name)
        if found is None and os.path.exists(path):
            found = PfioFile(path, self.length)
        if found is None:
            self._say("nothing was preserved as %s in %s", name, self.dir)
        return found

    def _node(self) -> Home:
        """The cache of this node, opened once."""
        home = self._home
        if home is None:
            home = self._home = Home()
            weakref.finalize(self, home.close)
        return home

    def _leave_node(self) -> None:
        home, self._home = self._home, None
        if home is not None:
            home.close()

    def _say(self, message: str, *args: object) -> None:
        if self.verbose:
            log.info(message, *args)


def checked_length(length: int) -> int:
    if not 0 < length < 1 << 64:
        raise errors.ConfigError(f"length={length} makes no sense: it is at least 1, and less than 2**64", name="length", value=length)
    return operator.index(length)


def _named(home: Home, name: str, length: int) -> Samples | None:
    """The array of this name in the node's cache, if it has so many slots."""
    try:
        found = home.samples(name, codec="raw")
    except errors.NotCached:
        return None
    if len(found) < length:
        message = f"the array {name!r} has {len(found):,} slots, but {length:,} were wanted: give the length that it was made with"
        found.close()
        raise errors.ConfigError(message, name="length", value=length, found=len(found))
    return found


def let_go(source: Samples | PfioFile | None) -> None:
    if isinstance(source, Samples):
        source.close()


def recorded(tag: str, *, trace: bool = True) -> contextlib.AbstractContextManager[Any]:
    """One call in the profile of pytorch-pfn-extras, if that is installed, and ``trace`` wanted."""
    if not trace:
        return contextlib.nullcontext()
    try:
        from pytorch_pfn_extras.profiler import record  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        return contextlib.nullcontext()
    found: contextlib.AbstractContextManager[Any] = record(tag, trace=True)
    return found


def send(source: Samples | PfioFile | None) -> bytes:
    """What is read, for another process."""
    return pickle.dumps(source)


def receive(owner: object, sent: bytes) -> Samples | PfioFile | None:
    """What was sent here, until its owner is collected."""
    found: Samples | PfioFile | None = pickle.loads(sent)
    if isinstance(found, Samples):
        weakref.finalize(owner, found._home.close).atexit = False
    return found
