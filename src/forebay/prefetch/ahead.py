"""Objects of URLs in an order that is known: fetched before their turn, within a window of bytes."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Self

from forebay import errors
from forebay._kernel import host
from forebay._model import Buffer
from forebay.origin import Origin
from forebay.origin.opening import in_memory
from forebay.origin.request import FetchOptions
from forebay.origin.spaces import FOREVER, URLS
from forebay.prefetch.loader import abandon
from forebay.prefetch.loads import Load
from forebay.prefetch.objects import ObjectLoader
from forebay.remote.urls import Url, as_text

MOST = 65_536
"""Objects that are looked ahead for, however small they are."""
WINDOW = 1 << 30
_SHARE = 4  # of the budget, the part that the window may have where the caller names none


class LookaheadProgress(NamedTuple):
    """Where a look-ahead stands. ``read``: objects that were read or passed by; ``ahead``: those that are looked ahead for, of which
    ``ready`` are there; ``total``: of all objects of the order, None where it has no length."""

    read: int
    ahead: int
    ready: int
    total: int | None


class _Next:
    """An object whose turn comes. ``load``: on its way into the cache; None: the cache has it, or it is not to be fetched ahead. ``size``:
    about as many bytes as others have; None: none was read yet."""

    __slots__ = ("load", "name", "size", "url")

    def __init__(self, url: str, name: str) -> None:
        self.url, self.name = url, name
        self.load: Load | None = None
        self.size: int | None = None


class Lookahead(Iterator[memoryview]):
    """An iterator over the bytes of objects in a known order; the next ones are fetched meanwhile. Made by `Cache.lookahead`.

    What the cache has by then, or another process is fetching, is not fetched again. Callable from any thread. Usable in both processes
    after a fork, where each goes on from the same place; not picklable: another process makes one of its own, as its order is its own.
    Nothing remains when the process ends."""

    def __init__(
        self, origin: Origin, urls: Iterable[Url], *, window: int | None, most: int, workers: int, read_many: Callable[..., list[Any]]
    ) -> None:  # fmt: skip
        """``read_many``: that of the cache, for what was not looked ahead for."""
        self._origin, self._urls, self._read_many = origin, iter(urls), read_many
        self._total = len(urls) if isinstance(urls, Sequence) else None
        self._max_age = FOREVER if origin.offline else origin.max_age
        self._lock = threading.RLock()  # guards what follows
        self._ahead: deque[_Next] = deque()
        self._by_name: dict[str, deque[_Next]] = {}
        self._read = self._width = self._unsized = 0  # bytes that are ahead, and objects of unknown size
        self._sizes = self._sized = 0  # of what was read
        self._is_drawn = False
        self._raised: Exception | None = None  # by the order
        self._workers, self._most = workers, most
        self._loader: ObjectLoader | None = None
        store = origin.current()
        can_store = store.keeps and not store.root.read_only
        if can_store or origin.upstream is None:
            self._loader = ObjectLoader(origin, store, origin.target, workers, waits=True, in_turn=True)
            weakref.finalize(self, abandon, weakref.ref(self._loader)).atexit = False
        host.at_fork(self)  # behind that of the loader, whose lock is taken inside of this one
        self._store, self._hit = store, store.hot_lookup(URLS)
        self._window = min(WINDOW, (store.usage().budget or in_memory()) // _SHARE) if window is None else window
        self._fill()

    # -- reading ---------------------------------------------------------------------------------------------------

    def __next__(self) -> memoryview:
        """The bytes of the next object, read-only. Raises what reading it raises; the next call goes on behind it. Raises, behind the last
        one, what the order itself raised."""
        with self._lock:
            self._fill()
            if not self._ahead:
                self._raise_what_the_order_raised()
                raise StopIteration
            following = self._ahead[0]
            self._pass(following)
            self._fill()
        return self._bytes_of(following)

    def read(self, url: Url) -> memoryview:
        """The bytes of one object, as `Cache.read`: at its turn, or at any other. Whatever is read counts as a turn, so that an order that
        is not kept does not stop what is ahead. Raises as `Cache.read`."""
        return self._bytes_of(self._take(url))

    def read_many(self, urls: Iterable[Url], *, return_exceptions: bool = False) -> list[Any]:
        """The bytes of a batch, in order, as `Cache.read_many`: what was looked ahead for is there, or on its way; the others are fetched
        side by side. Raises the first error, after all have been read; ``return_exceptions`` returns errors in the places of objects."""
        every = [as_text(url) for url in urls]
        taken = [self._take(url) for url in every]
        others = [following.url for following in taken if following.load is None]
        many = iter(self._read_many(others, return_exceptions=True))
        results = [next(many) if following.load is None else self._result(following) for following in taken]
        if not return_exceptions:
            for result in results:
                if isinstance(result, Exception):
                    raise result
        return results

    def skip(self) -> bool:
        """Pass by the next object, which another process reads, as a loader's worker does. Returns whether there was one. What was fetched
        for it stays in the cache as what was just used. Raises, behind the last one, what the order itself raised."""
        with self._lock:
            self._fill()
            if not self._ahead:
                self._raise_what_the_order_raised()
                return False
            following = self._ahead[0]
            load = following.load
            lease = load.ref.lease if load is not None else None
            if lease is not None:
                self._sizes += lease.entry.size
                self._sized += 1
            self._pass(following)
            self._fill()
        return True

    def _result(self, following: _Next) -> memoryview | Exception:
        try:
            return self._bytes_of(following)
        except Exception as error:  # noqa: BLE001 (the result of this object)
            return error

    def _bytes_of(self, following: _Next) -> memoryview:
        load, loader = following.load, self._loader
        if load is not None and loader is not None:
            data: Buffer = loader.take(load)
        else:
            hit = self._hit_at_once(following)
            data = self._origin.read(self._origin.target(following.url), FetchOptions.of(self._origin)) if hit is None else hit
        with self._lock:
            self._sizes += len(data)
            self._sized += 1
            if self._sized == 1:
                self._fill()  # now that it is known how far the window reaches
        return data if isinstance(data, memoryview) else memoryview(data)

    def _hit_at_once(self, following: _Next) -> memoryview | None:
        if self._origin.closed:
            return None
        data = self._hit(following.url, self._max_age)
        return self._store.first_touch(URLS, following.name, self._max_age, following.url) if data is None else data

    def _take(self, url: Url) -> _Next:
        """The object, if it is ahead; else one of its own. In both cases what is ahead moves on."""
        text = as_text(url)
        name = self._name(text)
        with self._lock:
            self._fill()
            waiting = self._by_name.get(name)
            if waiting:
                following = waiting[0]
                self._pass(following)
            else:
                following = _Next(text, name)
                if self._ahead:
                    self._pass(self._ahead[0])
            self._fill()
        return following

    def _name(self, url: str) -> str:
        try:
            return self._origin.target(url).key
        except errors.ForebayError:
            return url  # reading it raises the error

    # -- what is ahead ---------------------------------------------------------------------------------------------

    def _pass(self, following: _Next) -> None:
        """Its turn has come, or has passed. Caller: holds the lock."""
        if self._ahead[0] is following:
            self._ahead.popleft()
        else:
            self._ahead.remove(following)
        waiting = self._by_name[following.name]
        waiting.remove(following)
        if not waiting:
            del self._by_name[following.name]
        if following.size is None:
            self._unsized -= 1
        else:
            self._width -= following.size
        self._read += 1

    def _fill(self) -> None:
        """Look ahead as far as the window allows. Caller: holds the lock."""
        while not self._is_drawn and len(self._ahead) < self._most:
            is_enough = self._width + self._unsized * self._typical >= self._window if self._sized else self._unsized >= self._workers
            if is_enough and self._ahead:
                break
            try:
                url = as_text(next(self._urls))
            except StopIteration:
                self._is_drawn = True
            except Exception as error:  # noqa: BLE001  # the order's own, which comes at its turn: objects before it are still to be read
                self._raised, self._is_drawn = error, True
            else:
                self._look_for(url)

    def _raise_what_the_order_raised(self) -> None:
        raised, self._raised = self._raised, None
        if raised is not None:
            raise raised

    @property
    def _typical(self) -> int:
        return self._sizes // self._sized if self._sized else 0

    def _look_for(self, url: str) -> None:
        name = self._name(url)
        following = _Next(url, name)
        if self._loader is not None and not self._loader.closed and not self._is_local(url) and not self._is_expected(name):
            following.load = self._loader.submit(url, name, False)
        if self._sized:
            following.size = self._typical
            self._width += following.size
        else:
            self._unsized += 1
        self._ahead.append(following)
        self._by_name.setdefault(name, deque()).append(following)

    def _is_expected(self, name: str) -> bool:
        """Whether the cache has it already; it is touched, so that colder ones are evicted before its turn."""
        store = self._store
        with contextlib.suppress(errors.CacheFault):
            if store.keeps and not store.root.read_only:
                return store.reservations.expect(URLS, name, self._max_age)
            return store.entry(URLS, name) is not None
        return False

    def _is_local(self, url: str) -> bool:
        with contextlib.suppress(errors.ForebayError):
            return self._origin.target(url).in_place is not None
        return True

    @property
    def progress(self) -> LookaheadProgress:
        """Where it stands now."""
        with self._lock:
            ready = sum(following.load is None or following.load.is_settled for following in self._ahead)
            return LookaheadProgress(self._read, len(self._ahead), ready, self._total)

    def before_fork(self) -> None:
        self._lock.acquire()

    def after_fork_parent(self) -> None:
        self._lock.release()

    def after_fork_child(self) -> None:
        self._lock = threading.RLock()

    # -- the end ---------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Give up what is ahead, and what is being fetched for it; where nothing is ahead any more, what was skipped is fetched to its end.
        What was read stays valid. A second call does nothing."""
        with self._lock:
            gives_up, self._is_drawn = bool(self._ahead), True
            self._ahead.clear()
            self._by_name.clear()
            self._width = self._unsized = 0
        if self._loader is not None:
            self._loader.close(gives_up=True) if gives_up else self._loader.abandon()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __reduce__(self) -> Any:
        raise errors.ConfigError("a look-ahead cannot be pickled: make one in the process that reads", name="lookahead", value=repr(self))

    def __repr__(self) -> str:
        return f"<forebay.Lookahead {self._read:,} of {'unknown' if self._total is None else format(self._total, ',')}>"


def look_ahead(
    origin: Origin, urls: Iterable[Url], window: int | None, most: int | None, workers: int, read_many: Callable[..., list[Any]]
) -> Lookahead:  # fmt: skip
    """See `Cache.lookahead`. ``window`` in bytes."""
    if isinstance(urls, str | bytes) or not isinstance(urls, Iterable):
        raise errors.ConfigError(f"lookahead takes several URLs, in their order, not {urls!r}", name="urls", value=repr(urls))
    if type(workers) is not int or workers < 1:
        raise errors.ConfigError(f"workers must be an integer of at least 1, not {workers!r}", name="workers", value=workers)
    if window is not None and window < 1:
        raise errors.ConfigError(f"window must be at least one byte, not {window!r}", name="window", value=window)
    if most is not None and (type(most) is not int or most < 1):
        raise errors.ConfigError(f"most must be an integer of at least 1, not {most!r}", name="most", value=most)
    return Lookahead(origin, urls, window=window, most=min(most or MOST, MOST), workers=workers, read_many=read_many)
