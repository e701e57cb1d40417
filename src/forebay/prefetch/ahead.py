"""Objects of URLs in an order that is known: fetched before their turn, within a window of bytes, and kept if they are used again soon."""

from __future__ import annotations

import contextlib
import heapq
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Self

from forebay import _config, errors
from forebay._engine.index.adaptive import charge_of, hash_of
from forebay._engine.index.orders import NEVER, Orders
from forebay._engine.publish import INLINE
from forebay._kernel import host, interrupts
from forebay._kernel.interrupts import guarded, guarded_methods, items_of_program, of_program
from forebay._logs import logger
from forebay._model import URLS, Buffer
from forebay.fetch import Fetcher
from forebay.fetch.opening import in_memory
from forebay.fetch.request import FOREVER, FetchOptions
from forebay.prefetch.items import Objects
from forebay.prefetch.loader import Loader, abandon
from forebay.prefetch.loads import Load
from forebay.prefetch.retention import NextUses, Retention
from forebay.remote.urls import Url, as_text

log = logger("forebay.prefetch")

MOST = 65_536
"""Objects that are looked ahead for, however small they are."""
WINDOW = 1 << 30
HORIZON = 1 << 18
"""Objects whose turn is known, of an order that is a sequence, if the caller names no other number."""
MOST_KNOWN = 1 << 20
"""The largest horizon: an object takes about 300 bytes of memory."""
_SHARE = 4  # of the budget, the part that the window may have where the caller names none
_FULL = 16  # a cache that has less than one part in so many left is full
_NARROW = 8
_IN_MEMORY = 256 << 20
"""Bytes of objects that are fetched and not to be stored, until their turn."""
_AT_FIRST, _A_TURN = 1024, 8  # so many are drawn for the horizon at once
_AT_ONCE = 128  # so many are looked for at once, while the lock is held
_LAG = 1024
"""Objects that were skipped and count as not read yet: another process reads them."""
_LOOK_EVERY = 16
"""Skipped objects until it is looked which of them were read."""
_MEASURE_AGAIN = 1.0
"""Seconds until the limits of the space are asked for again."""


class LookaheadProgress(NamedTuple):
    """How far a look-ahead is. ``read``: objects read or skipped. ``ahead``: objects prefetched or being prefetched. ``ready``: those of
    them that are there. ``total``: all objects of the order; None if it has no length."""

    read: int
    ahead: int
    ready: int
    total: int | None


class _Drawn(NamedTuple):
    """An object of the order. ``hash`` and ``position``, where next uses are known: see `NextUses`; 0: they are not."""

    url: str
    hash: int = 0
    position: int = 0


class _Next:
    """An object whose turn comes. ``load``: on its way into the cache, or only into memory; None: the cache has it, or it is not to be
    fetched ahead. ``size``: about as many bytes as others have; None: none was read yet."""

    __slots__ = ("drawn", "load", "name", "size", "url")

    def __init__(self, drawn: _Drawn, name: str) -> None:
        self.drawn, self.url, self.name = drawn, drawn.url, name
        self.load: Load | None = None
        self.size: int | None = None

    @property
    def is_passing(self) -> bool:
        """Whether it is not to be stored."""
        return self.load is not None and not self.load.stores


@guarded_methods("__next__")
class Lookahead(Iterator[memoryview]):
    """An iterator over the bytes of objects in a known order; the next ones are prefetched. Made by `Cache.lookahead`.

    Objects that are in the cache by then, or that another process is fetching, are not fetched again. As far as the order is known, the
    cache keeps what is used soonest: an object needed later than all cached ones is not stored, and the one needed last is evicted first.

    ``window``: approximate bytes of objects to prefetch (default: a quarter of the budget, at most 1 GiB; an eighth of that for skipped
    objects while the cache is full). ``most``: maximum number of objects to prefetch. ``horizon``: objects to draw from the order in
    advance, at most 1,048,576, so that their next uses are known (default: 262,144 for a sequence; none for another iterable, which may
    have to be drawn late).

    Callable from any thread. Usable in both processes after a fork; each continues from the same place. Not picklable: another process
    makes its own, since its order is its own. Nothing remains when the process ends."""

    def __init__(
        self, fetcher: Fetcher, urls: Iterable[Url], *, window: int | None, most: int, horizon: int, workers: int,
        read_many: Callable[..., list[Any]],
    ) -> None:  # fmt: skip
        """``read_many``: that of the cache, for what was not looked ahead for."""
        self._fetcher, self._read_many = fetcher, read_many
        self._total = len(urls) if isinstance(urls, Sequence) else None
        self._is_list = isinstance(urls, (list, tuple, dict))  # else its code is the program's own, and may take its time
        self._urls = iter(urls) if self._is_list else of_program(iter)(urls)
        self._came: deque[Url] = deque()  # what the order gave: a handler may raise before it is taken
        self._max_age = FOREVER if fetcher.offline else fetcher.max_age
        self._turn = threading.RLock()  # held while the order is asked, which may wait for anything: a fork and `close` do not wait for it
        self._lock = threading.RLock()  # guards what follows; taken inside of the other
        self._drawn: deque[_Drawn] = deque()  # beyond the window
        self._ahead: deque[_Next] = deque()
        self._again: deque[_Next] = deque()  # passed by a call in which a handler raised
        self._by_name: dict[str, deque[_Next]] = {}
        self._read = self._width = self._unsized = 0  # bytes that are ahead, and objects of unknown size
        self._sizes = self._sized = 0  # of what was read
        self._in_memory = 0  # bytes that are ahead and not to be stored
        self._is_drawn = False
        self._raised: Exception | None = None  # by the order
        self._reads = False  # whether this process reads what it looks ahead for
        self._skipped: deque[tuple[_Next, int]] = deque()
        self._skipped_bytes = 0
        self._unused: dict[str, None] = {}  # names of what was fetched and skipped, and which no other process is known to have used
        self._gone: dict[str, None] = {}  # names of what the cache need not keep
        self._lent: list[tuple[int, int, str, int]] = []  # a heap of what stays for others: until when, hash, name, size
        self._measure_at = 0.0
        self._workers, self._most = workers, most
        self._objects = Objects(fetcher, fetcher.target)
        self._loader: Loader | None = None
        store = fetcher.current()
        can_store = store.keeps and not store.root.read_only
        if can_store or fetcher.upstream is None:
            self._loader = Loader(self._objects, store, workers, in_turn=True)
            weakref.finalize(self, abandon, weakref.ref(self._loader)).atexit = False
        host.at_fork(self)  # behind that of the loader, whose lock is taken inside of this one
        self._store, self._hit = store, fetcher.hot_lookup()
        self._window = min(WINDOW, (store.spaces.budget() or in_memory()) // _SHARE) if window is None else window
        self._narrows, self._is_full = window is None, False
        self._horizon = min(horizon, self._total or horizon) if can_store else 0
        self._orders = Orders(store.root) if self._horizon and store.keeps else None
        self._retention = Retention(self._wanted) if self._horizon else None
        self._uses = NextUses(self._horizon + MOST if self._horizon else 0)
        with self._turn, self._lock:
            self._fill(_AT_FIRST)

    # -- reading ---------------------------------------------------------------------------------------------------

    def __next__(self) -> memoryview:
        """The bytes of the next object, read-only. Raises what reading it raises; the next call goes on behind it. If a signal handler
        raises, the next call returns this object. Raises, behind the last one, what the order itself raised."""
        came: list[tuple[_Next, memoryview]] = []
        try:
            self._advance(came)
            return came[0][1]
        except BaseException:
            self._again.extend(following for following, _ in came)
            raise

    @guarded
    def _advance(self, came: list[tuple[_Next, memoryview]]) -> None:
        with self._turn, self._lock:
            self._fill()
            if self._again:
                following = self._again.popleft()
            elif self._ahead:
                following = self._ahead[0]
                self._pass(following)
            else:
                self._raise_what_the_order_raised()
                raise StopIteration
        try:
            with self._turn, self._lock:
                self._fill()
            came.append((following, self._bytes_of(following)))
            following.load = None  # dropped here, where signals wait: what a handler raises while a weak reference is told is lost
        except interrupts.unless_of_handler(Exception):
            raise
        except BaseException:
            self._again.append(following)
            raise

    def read(self, url: Url) -> memoryview:
        """The bytes of one object, as `Cache.read`, in its turn or any other. Every read counts as a turn, so reading in another order does
        not stop prefetching. Raises as `Cache.read` does."""
        return self._bytes_of(self._take(url))

    def read_many(self, urls: Iterable[Url], *, return_exceptions: bool = False) -> list[Any]:
        """The bytes of a batch, in order, as `Cache.read_many`: prefetched objects are there, or on their way; the others are fetched in
        parallel. Raises the first error, after all have been read; ``return_exceptions`` returns errors in the places of objects."""
        every = [as_text(url) for url in items_of_program(urls)]
        taken = [self._take(url) for url in every]
        others = [following.url for following in taken if following.load is None]
        many = iter(self._read_many(others, return_exceptions=True))
        results = [self._result(following, next(many) if following.load is None else None) for following in interrupts.paced(taken)]
        if not return_exceptions:
            for result in results:
                if isinstance(result, Exception):
                    raise result
        return results

    def skip(self) -> bool:
        """Skip the next object, which another process reads, as a loader's worker does. Returns whether there was one. Bytes fetched for it
        stay in the cache as just used. After the last object, raises what the order itself raised."""
        with self._turn, self._lock:
            self._fill()
            if not self._ahead:
                self._raise_what_the_order_raised()
                return False
            self._reads, following = False, self._ahead[0]
            load, loader = following.load, self._loader
            if loader is not None:
                self._objects.for_others = True
            lease = load.ref.lease if load is not None else None
            if lease is not None:
                self._sizes += lease.entry.size
                self._sized += 1
            self._pass(following)
            self._skip(following, lease.entry.size if lease is not None else self._typical)
            self._fill()
        self._dismiss()
        self._try_used()
        return True

    def _result(self, following: _Next, result: memoryview | Exception | None) -> memoryview | Exception:
        """``result``: None if the object was looked ahead for."""
        if isinstance(result, memoryview):
            self._note_read(following, len(result))
        try:
            return self._bytes_of(following) if result is None else result
        except Exception as error:  # noqa: BLE001 (the result of this object)
            return error

    def _bytes_of(self, following: _Next) -> memoryview:
        load, loader = following.load, self._loader
        if load is not None and loader is not None:
            data: Buffer = loader.take(load)
        else:
            hit = self._hit_at_once(following)
            data = self._fetcher.read(self._fetcher.target(following.url), FetchOptions.of(self._fetcher)) if hit is None else hit
        self._note_read(following, len(data))
        return data if isinstance(data, memoryview) else memoryview(data)

    def _note_read(self, following: _Next, size: int) -> None:
        """An object of ``size`` bytes was read."""
        with self._lock:
            self._sizes += size
            self._sized += 1
            is_first = self._sized == 1
            if self._loader is not None:
                self._objects.for_others = False
            if following.drawn.position:
                self._reads = True
                self._keep_or_let_go(following, size)
        if is_first:
            with self._turn, self._lock:
                self._fill()  # now that it is known how far the window reaches
        self._dismiss()

    def _hit_at_once(self, following: _Next) -> memoryview | None:
        if self._fetcher.closed:
            return None
        data = self._hit(following.url, self._max_age)
        if data is None and not following.name.startswith("file:"):  # a local file is its own copy
            alias = self._fetcher.alias(following.url, following.name)
            data = self._store.first_touch(URLS, following.name, self._max_age, alias)
        return data

    def _take(self, url: Url) -> _Next:
        """The object, if it is ahead; else one of its own. In both cases what is ahead moves on."""
        interrupts.point()
        text = as_text(url)
        name = self._name(text)
        with self._turn, self._lock:
            self._fill()
            waiting = self._by_name.get(name)
            if waiting:
                following = waiting[0]
                self._pass(following)
            else:
                following = _Next(_Drawn(text), name)
                if self._ahead:
                    self._pass(self._ahead[0])
            self._fill()
        return following

    def _name(self, url: str) -> str:
        try:
            return self._fetcher.target(url).key
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
            self._in_memory -= following.size if following.is_passing else 0
        self._read += 1
        drawn = following.drawn
        if drawn.position and self._orders is not None:
            self._uses.pass_by(drawn.hash, drawn.position)
            self._orders.announce(drawn.hash, self._uses.next(drawn.hash))
            self._orders.advance(self._read)

    def _fill(self, count: int = _A_TURN) -> None:
        """Look ahead as far as the window allows, for so many at once, and draw ``count`` more objects for the horizon. Caller: holds both
        locks; other threads may change what the inner one guards meanwhile."""
        self._measure()
        self._look_after_lent()
        for _ in range(count if self._horizon else 0):
            if self._uses.drawn - self._read >= self._horizon or not self._draw():
                break
            self._scout(self._drawn[-1])
        most = min(len(self._ahead) + _AT_ONCE, self._most)
        while len(self._ahead) < most:
            is_enough = self._width + self._unsized * self._typical >= self._reach if self._sized else self._unsized >= self._workers
            if (is_enough or self._in_memory >= _IN_MEMORY) and self._ahead:
                break
            if not self._drawn and not self._draw():
                break
            self._look_for(self._drawn[0])
            self._drawn.popleft()  # only now: what a handler raises above lets a later call look for it

    def _draw(self) -> bool:
        """Draw the next object of the order. False: there is none. Caller: as that of `_fill`."""
        if self._is_drawn:
            return False
        try:
            if not self._came:
                self._ask()
            if self._is_drawn:  # T1 asks the order / T2 closes the look-ahead
                return False
            url = as_text(self._came.popleft())
        except StopIteration:
            self._is_drawn = True
            return False
        except interrupts.unless_of_handler(Exception) as error:  # the order's own, at its turn: objects before it are still to be read
            self._raised, self._is_drawn = error, True
            return False
        if self._orders is None:
            self._drawn.append(_Drawn(url))
        else:
            hash = hash_of(url)
            position = self._uses.draw(hash)
            self._drawn.append(_Drawn(url, hash, position))
            if self._uses.next(hash) == position:
                self._orders.announce(hash, position)
        return True

    def _ask(self) -> None:
        """Have the order give its next object. Raises what it raises, and StopIteration."""
        if self._is_list:
            interrupts.point_without(self._lock)
            self._came.append(next(self._urls))
            return
        lock = self._lock  # if the order forks, its child has another one
        lock.release()
        try:
            with interrupts.outside():
                self._came.append(next(self._urls))
        finally:
            while not lock.acquire(timeout=interrupts.TURN):  # no call holds it for long, nor a fork
                log.debug("waiting for another thread, which looks ahead")

    def _raise_what_the_order_raised(self) -> None:
        raised, self._raised = self._raised, None
        if raised is not None:
            raise raised

    @property
    def _reach(self) -> int:
        """How many bytes it looks ahead. What is ahead for other processes takes the room of what they could find there: in a full cache
        it is no more than keeps the workers busy."""
        if not (self._narrows and self._is_full and self._loader is not None and self._objects.for_others):
            return self._window
        return min(max(self._window // _NARROW, 2 * self._workers * self._typical), self._window)

    @property
    def _typical(self) -> int:
        return self._sizes // self._sized if self._sized else 0

    def _look_for(self, drawn: _Drawn) -> None:
        name = self._name(drawn.url)
        following = _Next(drawn, name)
        if self._loader is not None and not self._loader.closed and not self._is_local(drawn.url):
            size = self._expected(name)
            stores = self._is_to_be_stored(following, size)
            if size is None:
                following.load = self._loader.submit(drawn.url, name, False, stores=stores)
        if self._sized:
            following.size = self._typical
            self._width += following.size
            self._in_memory += following.size if following.is_passing else 0
        else:
            self._unsized += 1
        self._ahead.append(following)
        self._by_name.setdefault(name, deque()).append(following)

    def _expected(self, name: str) -> int | None:
        """The size of an object that the cache has already; it is touched, so that colder ones are evicted before its turn."""
        store = self._store
        with contextlib.suppress(errors.CacheFault):
            if store.keeps and not store.root.read_only:
                return store.prefetching.expect(URLS, name, self._max_age)
            entry = store.entry(URLS, name)
            return entry.size if entry is not None else None
        return None

    def _is_local(self, url: str) -> bool:
        with contextlib.suppress(errors.ForebayError):
            return self._fetcher.target(url).in_place is not None
        return True

    # -- what the cache keeps --------------------------------------------------------------------------------------

    def _measure(self) -> None:
        """Ask, now and then, how much the objects may take. Caller: holds the lock."""
        if time.monotonic() < self._measure_at:
            return
        self._measure_at = time.monotonic() + _MEASURE_AGAIN
        with contextlib.suppress(errors.CacheFault):
            usage = self._store.seeing.usage()
            self._is_full = usage.used + usage.reserved > usage.budget - usage.budget // _FULL
            if self._retention is None:
                return
            left = usage.budget - sum(row.charge for row in usage.spaces if row.name != URLS)
            self._retention.limit = min(left, self._store.spaces.largest(URLS))

    def _scout(self, drawn: _Drawn) -> None:
        """An object was drawn for the horizon: if the cache has it, it is to stay until then. Caller: holds the lock."""
        retention = self._retention
        if retention is not None and self._uses.next(drawn.hash) == drawn.position and drawn.hash not in retention:
            name = self._name(drawn.url)
            size = self._expected(name)
            if size is not None:
                self._keep(drawn.hash, name, size, drawn.position)

    def _is_to_be_stored(self, following: _Next, size: int | None) -> bool:
        """Whether an object is to be stored if it has to be fetched. ``size``: of an object that the cache has. What is there, or will be,
        stays until its turn. Caller: holds the lock."""
        retention, drawn = self._retention, following.drawn
        if retention is None or self._by_name.get(following.name):  # it is ahead already
            return True
        if size is not None:
            retention.note_kept(drawn.hash)
        else:
            retention.note_lost(drawn.hash)
            used = min(self._uses.after(drawn.position), self._wanted(drawn.hash))
            if self._reads and not retention.is_worth(_charge(self._typical), used):
                return False
        self._keep(drawn.hash, following.name, self._typical if size is None else size, drawn.position)
        return True

    def _keep_or_let_go(self, following: _Next, size: int) -> None:
        """An object was read: it stays until it is used again, if nothing else is worth the room more. Caller: holds the lock."""
        retention, drawn = self._retention, following.drawn
        if retention is None or following.is_passing:
            return
        self._keep_for_all(drawn.hash, following.name, size)
        if following.load is not None and drawn.hash in retention:
            self._expected(following.name)  # it is not on probation any more

    def _wanted(self, hash: int) -> int:
        """The position at which another look-ahead of the node uses an object, about, or `NEVER`."""
        turns = self._orders.turns_until(hash) if self._orders is not None else NEVER
        return self._read + turns if turns < NEVER else NEVER

    def _keep_for_all(self, hash: int, name: str, size: int) -> None:
        """An object stays until it is used next, here or by another look-ahead. Caller: holds the lock."""
        own, wanted = self._uses.next(hash), self._wanted(hash)
        if wanted < own:
            heapq.heappush(self._lent, (wanted, hash, name, size))
        self._keep(hash, name, size, min(own, wanted))

    def _look_after_lent(self) -> None:
        """Others have used what stayed for them by now: it stays for whoever uses it next. Caller: holds the lock."""
        while self._lent and self._lent[0][0] <= self._read:
            position, hash, name, size = heapq.heappop(self._lent)
            if self._retention is not None and self._retention.position(hash) == position:
                self._keep_for_all(hash, name, size)

    def _keep(self, hash: int, name: str, size: int, position: int) -> None:
        if self._retention is not None:
            self._gone.pop(name, None)
            self._gone.update(dict.fromkeys(self._retention.keep(hash, name, _charge(size), position)))

    def _skip(self, following: _Next, size: int) -> None:
        """Another process reads an object about now. Caller: holds the lock."""
        if self._retention is None:
            if following.load is not None:
                self._unused[following.name] = None
            return
        self._skipped.append((following, size))
        self._skipped_bytes += size
        while len(self._skipped) > _LAG or self._skipped_bytes > self._retention.capacity // 8:
            following, size = self._skipped.popleft()
            self._skipped_bytes -= size
            self._keep_or_let_go(following, size)

    def _dismiss(self) -> None:
        """Have those objects evicted first that are used the latest."""
        store = self._store
        if not self._gone or not store.keeps:
            return
        with self._lock:
            gone, self._gone = self._gone, {}
        with contextlib.suppress(errors.CacheFault):
            left = store.prefetching.dismiss(URLS, list(gone))
            with self._lock:
                self._gone = {**dict.fromkeys(left), **self._gone}

    def _try_used(self) -> None:
        """What was skipped and used since then proves itself from now on, as what a process reads of a remote itself."""
        store = self._store
        with self._lock:
            names = list(self._unused)
        if len(names) < _LOOK_EVERY or self._read % _LOOK_EVERY or not store.keeps:
            return
        with contextlib.suppress(errors.CacheFault):
            unused = store.prefetching.try_used(URLS, names)
            with self._lock:
                for name in set(names).difference(unused[-_LAG:]):
                    self._unused.pop(name, None)

    @property
    def progress(self) -> LookaheadProgress:
        """How far it is now."""
        with self._lock:
            ready = sum(following.load is None or following.load.is_settled for following in self._ahead)
            return LookaheadProgress(self._read, len(self._ahead), ready, self._total)

    def before_fork(self) -> None:
        self._lock.acquire()

    def after_fork_parent(self) -> None:
        self._lock.release()

    def after_fork_child(self) -> None:
        self._turn, self._lock = threading.RLock(), threading.RLock()

    # -- the end ---------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Drop prefetched objects and stop fetching them; if nothing is prefetched any more, skipped objects are fetched to their end.
        Bytes that were read stay valid. A second call does nothing."""
        with self._lock:
            gives_up, self._is_drawn = bool(self._ahead), True
            self._ahead.clear()
            self._again.clear()
            self._drawn.clear()
            self._by_name.clear()
            self._width = self._unsized = self._in_memory = 0
            if self._orders is not None:
                self._orders.close()
        if self._loader is not None:
            self._loader.close(gives_up=True) if gives_up else abandon(weakref.ref(self._loader))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __reduce__(self) -> Any:
        raise errors.ConfigError("a look-ahead cannot be pickled: make one in the process that reads", name="lookahead", value=repr(self))

    def __repr__(self) -> str:
        return f"<forebay.Lookahead {self._read:,} of {'unknown' if self._total is None else format(self._total, ',')}>"


def _charge(size: int) -> int:
    return charge_of(size, is_file=size > INLINE)


def look_ahead(
    fetcher: Fetcher, urls: Iterable[Url], window: int | None, most: int | None, horizon: int | None, workers: int,
    read_many: Callable[..., list[Any]],
) -> Lookahead:  # fmt: skip
    """See `Cache.lookahead`. ``window`` in bytes."""
    if isinstance(urls, str | bytes) or not isinstance(urls, Iterable):
        raise errors.ConfigError(f"lookahead takes several URLs, in their order, not {urls!r}", name="urls", value=repr(urls))
    _config.parse_count(workers, name="workers")
    if window is not None and window < 1:
        raise errors.ConfigError(f"window must be at least one byte, not {window!r}", name="window", value=window)
    if most is not None and (type(most) is not int or most < 1):
        raise errors.ConfigError(f"most must be an integer of at least 1, not {most!r}", name="most", value=most)
    if horizon is None:
        horizon = HORIZON if isinstance(urls, Sequence) else 0
    if type(horizon) is not int or not 0 <= horizon <= MOST_KNOWN:
        message = f"horizon must be an integer from 0 to {MOST_KNOWN:,}, not {horizon!r}"
        raise errors.ConfigError(message, name="horizon", value=horizon)
    most = min(most or MOST, MOST)
    return Lookahead(fetcher, urls, window=window, most=most, horizon=horizon, workers=workers, read_many=read_many)
