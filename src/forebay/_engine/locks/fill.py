"""Absent -> lock -> look again -> make -> publish: at most one process of the node makes a key at a time.

The key's lock is a byte of ``locks/keys``. A process that waits for it finds the result: an entry, or a failure that was recorded after
the wait began, or neither: then the worker died, and the process that has the lock now takes over."""

from __future__ import annotations

import contextlib
import contextvars
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Self, TypeVar

import xxhash

from forebay import errors
from forebay._engine.catalog import Catalog, failures, reservations
from forebay._engine.files.faults import CatalogBroken, faults
from forebay._engine.files.root import Root
from forebay._engine.files.stages import progress_of
from forebay._engine.index.counters import WAIT_NS_LOCK, WAITS, Counters
from forebay._engine.index.waiting import Entered, KeyWaiter, Waiters
from forebay._engine.locks.owners import Owners
from forebay._kernel import events, locks, waits
from forebay._logs import logger

log = logger("forebay.fill")
T = TypeVar("T")

FIRST_WORD = 3  # futex words from here on are the keys'
KEY_WORDS = waits.COUNT - FIRST_WORD
_held: contextvars.ContextVar[tuple[int, ...] | None] = contextvars.ContextVar("forebay_held", default=())
"""The keys that this call chain holds while it makes their values; None: some, and it is not known which."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """The state of a wait, for its callback: the key, ``since`` how many seconds, the holder, its progress in bytes (total None:
    unknown)."""

    key: str
    since: float
    holder: str
    done: int
    total: int | None


OnWait = Callable[[Waiting], None]


def hash_of(space: int, key: str) -> int:
    """The offset of the key's lock: 62 bits. Two keys that share one only wait for each other."""
    return xxhash.xxh3_64_intdigest(f"{space}\0{key}".encode("utf-8", "surrogatepass")) & ((1 << 62) - 1)


class KeyHold:
    """The lock of one key, held. Any thread may release it; releasing it again does nothing."""

    def __init__(self, fill: Fill, keyhash: int) -> None:
        self._fill, self.keyhash = fill, keyhash
        self._mutex = threading.Lock()
        self._held = True

    def release(self) -> None:
        with self._mutex:
            held, self._held = self._held, False
        if held:
            self._fill.unlock(self.keyhash)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.release()


class Fill:
    """Single-flight for one root, across threads and processes."""

    def __init__(self, root: Root, catalog: Catalog, owners: Owners, words: waits.Words, counters: Counters) -> None:
        self._root, self._catalog, self._owners, self._words, self._counters = root, catalog, owners, words, counters
        self._keys = locks.LockFile(root.lock("keys"), root.files.open)
        self._waiters = Waiters(root)
        self._errors: dict[tuple[int, str], tuple[int, Exception]] = {}  # this process's own failures, of whatever class

    def single(
        self,
        space: int,
        key: str,
        look: Callable[[], T | None],
        make: Callable[[], T],
        *,
        timeout: float | None = None,
        on_wait: OnWait | None = None,
        on_hold: Callable[[KeyHold], None] | None = None,
    ) -> T:
        """Return what ``look`` finds, else what ``make`` makes under the key's lock. ``on_hold`` is called with the lock, which may be
        released before ``make`` returns.

        Raises what ``make`` raised, here or in the process that was waited for; `WaitTimeout` after ``timeout`` seconds of waiting;
        `Busy` where waiting would never end."""
        keyhash = hash_of(space, key)
        waiting_since = self._lock(key, keyhash, timeout, on_wait)
        with KeyHold(self, keyhash) as hold:
            value = self._look_again(space, key, look, waiting_since)
            if value is not None:
                return value
            if on_hold is not None:
                on_hold(hold)
            with self._making(space, key, keyhash):
                return make()

    async def single_async(
        self, space: int, key: str, look: Callable[[], T | None], make: Callable[[], Awaitable[T]], *, timeout: float | None = None
    ) -> T:
        """`single` for a coroutine: the event loop goes on while another process makes the value, and while ``make`` is awaited."""
        keyhash = hash_of(space, key)
        waiting_since = await self._lock_async(key, keyhash, timeout)
        try:
            value = self._look_again(space, key, look, waiting_since)
            if value is not None:
                return value
            with self._making(space, key, keyhash):
                return await make()
        finally:
            self.unlock(keyhash)

    def _look_again(self, space: int, key: str, look: Callable[[], T | None], since: int | None) -> T | None:
        """P1 looks: absent / P2 looks: absent / P1 locks, makes, unlocks / P2 locks: this is P2. Raises what P1 failed with after
        ``since``."""
        value = look()
        error = self.failure(space, key, since) if value is None and since is not None else None
        if error is not None:
            raise error
        return value

    @contextlib.contextmanager
    def _making(self, space: int, key: str, keyhash: int) -> Iterator[None]:
        """Around making a key's value under its lock: a failure reaches the processes that wait."""
        held = _held.get()
        token = _held.set(None if held is None else (*held, keyhash))
        try:
            yield
        except (errors.CacheFault, errors.WaitTimeout):
            raise  # the cache's, or this caller's own limit, not the source's: each caller continues on its own
        except Exception as error:
            self.note_failure(space, key, error)
            raise
        finally:
            with contextlib.suppress(ValueError):  # a coroutine whose event loop is gone ends in another context
                _held.reset(token)

    @contextlib.contextmanager
    def working(self, is_working: bool = True) -> Iterator[None]:
        """Around work with held keys that this object does not know of: no key is waited for inside, since two such waits could wait for
        each other. ``is_working=False``: around work that may wait whatever is held."""
        token = _held.set(None if is_working else ())
        try:
            yield
        finally:
            _held.reset(token)

    def hold(self, space: int, key: str, *, timeout: float | None = None, on_wait: OnWait | None = None) -> KeyHold:
        """Take the key's lock. Any thread may release it."""
        keyhash = hash_of(space, key)
        self._lock(key, keyhash, timeout, on_wait)
        return KeyHold(self, keyhash)

    async def hold_async(self, space: int, key: str, *, timeout: float | None = None) -> KeyHold:
        """`hold` for a coroutine: the event loop goes on."""
        keyhash = hash_of(space, key)
        await self._lock_async(key, keyhash, timeout)
        return KeyHold(self, keyhash)

    @contextlib.contextmanager
    def holding(self, space: int, key: str, *, timeout: float | None = None) -> Iterator[None]:
        """The key's lock around a block."""
        hold = self.hold(space, key, timeout=timeout)
        try:
            yield
        finally:
            hold.release()

    def try_hold(self, space: int, key: str) -> KeyHold | None:
        """The key's lock if it is free."""
        return self.try_hold_hash(hash_of(space, key))

    def try_hold_hash(self, keyhash: int) -> KeyHold | None:
        """The lock at this offset if it is free."""
        return KeyHold(self, keyhash) if self._keys.try_lock(keyhash, exclusive=True) else None

    @contextlib.contextmanager
    def holding_free(self, space: int, keys: Iterable[str]) -> Iterator[list[str]]:
        """The locks of those of these keys that are free, around a block that makes their values together; yields these keys.

        The block may wait for other keys, as what makes one value may."""
        holds: dict[str, KeyHold] = {}
        try:
            for key in keys:
                if (hold := self.try_hold(space, key)) is not None:
                    holds[key] = hold
            held = _held.get()
            token = _held.set(None if held is None else (*held, *(hold.keyhash for hold in holds.values())))
            try:
                yield list(holds)
            finally:
                _held.reset(token)
        finally:
            for hold in holds.values():
                hold.release()

    def sleep(self, space: int, key: str, seconds: float) -> None:
        """Sleep until the key's lock may have been released, at most ``seconds``."""
        self._words.sleep(_word_of(hash_of(space, key)), seconds)

    def unlock(self, keyhash: int) -> None:
        self._keys.unlock(keyhash)
        self._words.bump(_word_of(keyhash))

    def progress(self, keyhash: int) -> tuple[int, int | None]:
        """How far the work on a key is: bytes done, and in all."""
        for reservation in reservations.by_key(self._catalog, keyhash):
            progress = progress_of(self._root, keyhash, reservation.id)
            if progress is not None:
                return progress
        return 0, None

    def _lock(self, key: str, keyhash: int, timeout: float | None, on_wait: OnWait | None) -> int | None:
        """Take the key's lock. Returns when the wait began, on the clock of failures; None if there was none."""
        with faults(key):
            if self._is_free(keyhash):
                return None
            return self._wait_for(key, keyhash, timeout, on_wait)

    def _wait_for(self, key: str, keyhash: int, timeout: float | None, on_wait: OnWait | None) -> int:
        began = time.monotonic()

        def tell(waited: float) -> None:
            if on_wait is not None:
                on_wait(Waiting(key, time.monotonic() - began, self._owners.holder_of(keyhash), *self.progress(keyhash)))

        with self._waiting(key, keyhash) as since:
            waits.wait_for(
                lambda: self._keys.try_lock(keyhash, exclusive=True) or None,
                self._words,
                _word_of(keyhash),
                what=lambda: (key, self._owners.holder_of(keyhash)),
                timeout=timeout,
                on_turn=tell if on_wait is not None else None,
            )
        return since

    async def _lock_async(self, key: str, keyhash: int, timeout: float | None) -> int | None:
        """`_lock` for a coroutine."""
        with faults(key):
            if self._is_free(keyhash):
                return None
            with self._waiting(key, keyhash) as since:
                await waits.wait_for_async(
                    lambda: self._keys.try_lock(keyhash, exclusive=True) or None,
                    self._words,
                    _word_of(keyhash),
                    what=lambda: (key, self._owners.holder_of(keyhash)),
                    timeout=timeout,
                )
            return since

    def _is_free(self, keyhash: int) -> bool:
        """Whether the key's lock was free; then it is taken."""
        try:
            if not self._keys.try_lock(keyhash, exclusive=True):
                return False
            if self._keys.has_name():
                return True
            self._keys.unlock(keyhash)
        except FileNotFoundError as error:  # at the first lock
            log.debug("%s", error)
        raise CatalogBroken(f"the root {self._root.path} was deleted or replaced")

    @contextlib.contextmanager
    def _waiting(self, key: str, keyhash: int) -> Iterator[int]:
        """Around a wait for a key's lock, which is counted; yields when it began. Raises `Busy`."""
        held = _held.get()
        if held is None or keyhash in held:
            raise Busy(f"{key!r} is being made by {self._owners.holder_of(keyhash)}, and this caller holds another key", key=key)
        since = time.monotonic_ns()
        self._counters.add(WAITS)
        try:
            entered = self._enter(key, keyhash, held)
            try:
                yield since
            finally:
                self._waiters.leave(entered)
        finally:
            self._counters.add(WAIT_NS_LOCK, time.monotonic_ns() - since)
            events.emit("wait", self._root.path, key, since=since)

    def _enter(self, key: str, keyhash: int, held: tuple[int, ...]) -> Entered | None:
        """Show a wait for a key by a holder of other keys. Raises `Busy` where it would never end.

        A function that makes a value may need another value that another process is making: the calls of a flow ask for each other. Such
        waits end, unless they form a circle: A makes k1 and waits for k2, B makes k2 and waits for k1. They are entered one after the
        other, so the one that would close a circle sees all of it, and does not wait."""
        if not held:
            return self._waiters.enter(key, keyhash)
        with self._catalog.writer():
            if leads_to(held, keyhash, self._waiters.every()):
                raise Busy(f"{key!r} is being made by one that waits, in the end, for this caller", key=key)
            entered = self._waiters.enter(key, keyhash, held)
        if entered is None:
            raise Busy(f"{key!r} is being made by another, and others would not see that this caller waits for it", key=key)
        return entered

    def note_failure(self, space: int, key: str, error: Exception) -> None:
        """Record a failure for the processes that wait for this key."""
        with contextlib.suppress(errors.CacheFault, OSError), self._catalog.write() as txn:
            at = time.monotonic_ns()
            failures.record(txn, space, key, errors.to_wire(error), at)
            if len(self._errors) >= 256:
                self._errors.clear()
            copy = _without_frames(error)
            if copy is not None:
                self._errors[space, key] = at, copy

    def failure(self, space: int, key: str, since: int) -> Exception | None:
        """What the work on a key failed with after ``since``, in any process; a later call tries again."""
        failure = failures.of(self._catalog, space, key)
        if failure is None or failure[0] < since:
            return None
        at, error = self._errors.get((space, key), (0, None))
        copy = _without_frames(error) if error is not None and at == failure[0] else None
        return errors.from_wire(failure[1]) if copy is None else copy

    def close(self) -> None:
        self._keys.close()
        self._waiters.locks.close()

    def before_fork(self) -> None:
        self._keys.before_fork(keep=False)
        self._waiters.locks.before_fork(keep=False)

    def after_fork_parent(self) -> None:
        self._waiters.locks.after_fork_parent()
        self._keys.after_fork_parent()

    def after_fork_child(self) -> None:
        self._keys.after_fork_child(keep=False)
        self._waiters.locks.after_fork_child(keep=False)
        self._errors = {}


def _word_of(keyhash: int) -> int:
    return FIRST_WORD + keyhash % KEY_WORDS


def _without_frames(error: Exception) -> Exception | None:
    """A copy of an error without its traceback, its cause and its context, whose frames hold the objects of callers. None: its class
    allows no copy that says the same."""
    kind = type(error)
    for skips_init in (True, False):  # its __init__ may take other arguments, or set what it says
        with contextlib.suppress(Exception):
            reduced = error.__reduce__()
            if isinstance(reduced, str):  # the name of something global
                return None
            rebuild, args = reduced[:2]
            copy = kind.__new__(kind, *args) if skips_init else rebuild(*args)
            vars(copy).update(vars(error))
            if type(copy) is kind and str(copy) == str(error):
                return copy
    return None


# -- waiting for a key while holding others: allowed, unless such waits form a cycle -------------------------------------


class Busy(errors.CacheFault):
    """Another works on this key, and this caller may not wait for it: that one waits for what this caller holds, or may do so."""


def leads_to(held: Iterable[int], target: int, waits: Iterable[KeyWaiter]) -> bool:
    """Whether the holder of ``target`` waits, directly or through other waits, for one of the keys ``held``."""
    goals, seen, next_ones = set(held), set[int](), {target}
    edges = list(waits)
    while next_ones:
        if next_ones & goals:
            return True
        seen |= next_ones
        next_ones = {wait.keyhash for wait in edges if wait.held & next_ones} - seen
    return False
