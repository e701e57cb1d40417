"""`Store.locks`: absent -> lock -> look again -> make -> publish, so at most one process of the node makes a key at a time.

The key's lock is a byte of ``locks/keys``. A process that waits for it finds the result: an entry, or a failure that was recorded after
the wait began, or neither: then the worker died, and the process that has the lock now takes over."""

from __future__ import annotations

import base64
import contextlib
import contextvars
import math
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeVar

from forebay import errors
from forebay._engine.catalog import failures, reservations
from forebay._engine.engine import Engine, recover_and_retry
from forebay._engine.files.layout import CatalogBroken, faults, key_hash
from forebay._engine.files.stages import progress_of
from forebay._engine.files.waiters import Entered, KeyWaiter
from forebay._engine.index.counters import WAIT_NS_LOCK, WAITS
from forebay._kernel import events, interrupts, locks, waits
from forebay._logs import logger
from forebay._model import Asker, Buffer

log = logger("forebay.fill")
T = TypeVar("T")
WaitFor = Callable[..., Awaitable[Any]]
"""`waits.wait_for_async`, or `waits.wait_here`."""

FIRST_WORD = 3  # futex words from here on are the keys'
KEY_WORDS = waits.COUNT - FIRST_WORD
NAMED = ""
"""The space of named locks; no space is called so."""
MESSAGE = 16 << 10
"""The most bytes of a value that could not be stored that reach other processes."""
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


class Unstored(errors.CacheFault):
    """Another caller has made the value, and could not store it. ``data``: its bytes, if they reach this caller; ``codec``: what made them
    of the value."""

    data: Buffer | None = None
    codec = ""


@dataclass(eq=False, slots=True)
class KeyWait:
    """A thread or coroutine of this process that waits for a key, ``since`` a time of the clock of failures. ``unstored``: codec and bytes
    of what it waited for."""

    space: str
    key: str
    since: int
    unstored: tuple[str, Buffer | None] | None = None


class KeyHold:
    """The lock of one key. Any thread may release it; releasing it again does nothing, and it is released when the object is dropped."""

    def __init__(self, keys: locks.LockFile, words: waits.Words, keyhash: int) -> None:
        self.keyhash, self._keys, self._words = keyhash, keys, words
        self._held: list[None] = []  # one item while it is held: `pop` is one step, so of two threads that release, one does

    def try_take(self) -> bool:
        """Take the lock if it is free."""
        got = self._keys.try_lock(self.keyhash, exclusive=True)
        if got:
            self._held.append(None)
        return got

    def release(self) -> None:
        with contextlib.suppress(IndexError):
            self._held.pop()
            self._keys.unlock(self.keyhash)
            self._words.bump(_word_of(self.keyhash))

    def handed_over(self) -> KeyHold:
        """The same lock, for another holder: this object releases it no more."""
        other = KeyHold(self._keys, self._words, self.keyhash)
        other._held, self._held = self._held, []
        return other

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if self._held and not is_finalizing():
            with interrupts.shielded():
                self._held.clear()
                self._keys.unlock_soon(self.keyhash)
                self._words.bump(_word_of(self.keyhash))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.release()


class Flight:
    """Single-flight for one root, across threads and processes; the death of a holder releases its locks. Callable from any thread, and in
    a forked child."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._errors: dict[tuple[str, str], tuple[int, Exception]] = {}  # this process's own failures, of whatever class
        self._waiters: list[KeyWait] = []  # changed by one step at a time, so it needs no lock

    # -- one at a time ---------------------------------------------------------------------------------------------

    async def make_once(
        self, space: str, key: str, look: Callable[[], T | None], make: Callable[[KeyHold], Awaitable[T]],
        wait: WaitFor = waits.wait_for_async, *, timeout: float | None = None, on_wait: OnWait | None = None, asker: Asker | None = None,
    ) -> T:  # fmt: skip
        """Return what ``look`` finds, else what ``make`` makes under the key's lock, which it may release before it returns. It runs once:
        a catalog that breaks meanwhile is recovered for the next call.

        ``wait``: how to wait for the lock: the event loop goes on, or, with `waits.wait_here`, the thread that has `waits.run` drive this
        coroutine sleeps. ``asker``: see `note_failure`. Raises what ``make`` raised, here or in the process that was waited for, where
        that concerns this caller; `WaitTimeout` after ``timeout`` seconds of waiting; `Busy` where waiting would never end; `Unstored`: see
        `note_unstored`."""
        with self.engine.reopening():
            hold, waiter = await self._hold(space, key, wait, timeout, on_wait)
            with hold:
                value = self._look_again(space, key, look, waiter, asker)
                if value is not None:
                    return value
                with self._making(space, key, hold.keyhash, asker):
                    return await make(hold)

    def _look_again(self, space: str, key: str, look: Callable[[], T | None], waiter: KeyWait | None, asker: Asker | None) -> T | None:
        """P1 looks: absent / P2 looks: absent / P1 locks, makes, unlocks / P2 locks: this is P2. Raises what P1 failed with while P2
        waited."""
        value = look()
        if value is None and waiter is not None:
            error = _unstored(key, *waiter.unstored) if waiter.unstored is not None else self.failure(space, key, waiter.since, asker)
            if error is not None:
                raise error
        return value

    @contextlib.contextmanager
    def _making(self, space: str, key: str, keyhash: int, asker: Asker | None) -> Iterator[None]:
        """Around making a key's value under its lock: a failure reaches the processes that wait."""
        try:
            with _holding(keyhash):
                yield
        except Exception as error:
            self.note_failure(space, key, error, asker)
            raise

    # -- locks -----------------------------------------------------------------------------------------------------

    @recover_and_retry
    def hold(self, space: str, key: str, *, timeout: float | None = None, on_wait: OnWait | None = None) -> KeyHold:
        """Take the lock of a key, waiting up to ``timeout`` seconds. Any thread may release it."""
        return waits.run(self._hold(space, key, waits.wait_here, timeout, on_wait))[0]

    async def hold_async(self, space: str, key: str, *, timeout: float | None = None) -> KeyHold:
        """`hold` for a coroutine: the event loop goes on."""
        return (await self._hold(space, key, waits.wait_for_async, timeout))[0]

    @recover_and_retry
    def try_hold(self, space: str, key: str) -> KeyHold | None:
        """Take the lock of a key if it is free."""
        with faults(key):
            return self._try(space, key)

    @contextlib.contextmanager
    def holding_free(self, space: str, keys: Sequence[str]) -> Iterator[dict[str, KeyHold]]:
        """The locks of those of these keys that are free, around a block that makes their values together, and may release them earlier.

        The block may wait for other keys, as what makes one value may."""
        with contextlib.ExitStack() as stack:
            with self.working():  # a handler that runs at a point may ask for one of these keys
                taken = ((key, self.try_hold(space, key)) for key in interrupts.paced(keys))
                holds = {key: stack.enter_context(hold) for key, hold in taken if hold is not None}
            stack.enter_context(_holding(*(hold.keyhash for hold in holds.values())))
            yield holds

    def named(self, name: str, *, timeout: float | None = None, on_wait: OnWait | None = None) -> KeyHold:
        """Take the lock of this name, which belongs to no key.

        It may be waited for inside a function that makes a key's value too, so its holder must run nothing that waits for such a key."""
        with self.working(False):
            return self.hold(NAMED, name, timeout=timeout, on_wait=on_wait)

    @contextlib.contextmanager
    def working(self, is_working: bool = True) -> Iterator[None]:
        """Around work with held keys that this object does not know of: no key is waited for inside, since two such waits could wait for
        each other. ``is_working=False``: around work that may wait whatever is held."""
        token = _held.set(None if is_working else ())
        try:
            yield
        finally:
            _held.reset(token)

    def wait_turn(self, space: str, key: str, seconds: float) -> None:
        """Sleep until the lock of a key may have been released, at most ``seconds``."""
        self.engine.parts.words.sleep(_word_of(key_hash(space, key)), seconds)

    @recover_and_retry
    def with_remains(self, space: str, keys: Iterable[str]) -> set[str]:
        """Those of these keys for which another process is writing, or left a partial when it died."""
        reserved = reservations.keyhashes(self.engine.parts.catalog)
        return {key for key in keys if key_hash(space, key) in reserved} if reserved else set()

    async def _hold(
        self, space: str, key: str, wait: WaitFor, timeout: float | None, on_wait: OnWait | None = None
    ) -> tuple[KeyHold, KeyWait | None]:
        """Take the key's lock. Returns, too, the wait for it; None if there was none."""
        with faults(key):
            if (hold := self._try(space, key)) is not None:
                return hold, None
            keyhash = key_hash(space, key)
            with self._waiting(space, key, keyhash) as waiter:
                on_turn = self._teller(key, keyhash, on_wait)
                return await wait(*self._wait(key, keyhash), timeout=timeout, on_turn=on_turn), waiter

    def _try(self, space: str, key: str) -> KeyHold | None:
        """The lock of a key if it is free."""
        self.engine.check_usable(writing=True)
        parts, keyhash = self.engine.parts, key_hash(space, key)
        hold = KeyHold(parts.writers.keys, parts.words, keyhash)
        try:
            if not hold.try_take():
                return None
            if parts.writers.keys.has_name():
                return hold
            hold.release()
        except FileNotFoundError as error:  # at the first lock
            log.debug("%s", error)
        raise CatalogBroken(f"the root {self.engine.root.path} was deleted or replaced")

    def _wait(self, key: str, keyhash: int) -> tuple[Callable[[], KeyHold | None], waits.Words, int, Callable[[], tuple[str, str]]]:
        """What `waits.wait_for` needs to wait for a key's lock."""
        parts = self.engine.parts
        keys, words, owners = parts.writers.keys, parts.words, parts.owners

        def attempt() -> KeyHold | None:
            hold = KeyHold(keys, words, keyhash)
            return hold if hold.try_take() else None

        return attempt, words, _word_of(keyhash), lambda: (key, owners.holder_of(keyhash))

    def _teller(self, key: str, keyhash: int, on_wait: OnWait | None) -> Callable[[float], None] | None:
        if on_wait is None:
            return None
        began, parts = time.monotonic(), self.engine.parts

        def tell(waited: float) -> None:
            reserved = reservations.by_key(parts.catalog, keyhash)
            found = (progress_of(self.engine.root, keyhash, one.id) for one in reserved)
            progress = next((one for one in found if one is not None), (0, None))
            on_wait(Waiting(key, time.monotonic() - began, parts.owners.holder_of(keyhash), *progress))

        return tell

    @contextlib.contextmanager
    def _waiting(self, space: str, key: str, keyhash: int) -> Iterator[KeyWait]:
        """Around a wait for a key's lock, which is counted. Raises `Busy`."""
        held, parts, counters = _held.get(), self.engine.parts, self.engine.counters
        if held is None or keyhash in held:
            raise Busy(f"{key!r} is being made by {parts.owners.holder_of(keyhash)}, and this caller holds another key", key=key)
        waiter = KeyWait(space, key, time.monotonic_ns())
        self._waiters.append(waiter)
        counters.add(WAITS)
        try:
            entered = self._enter(key, keyhash, held)
            try:
                yield waiter
            finally:
                parts.writers.waiters.leave(entered)
        finally:
            self._waiters.remove(waiter)
            counters.add(WAIT_NS_LOCK, time.monotonic_ns() - waiter.since)
            events.emit("wait", self.engine.root.path, key, since=waiter.since)

    def _enter(self, key: str, keyhash: int, held: tuple[int, ...]) -> Entered | None:
        """Show a wait for a key by a holder of other keys. Raises `Busy` where it would never end.

        A function that makes a value may need another value that another process is making: the calls of a flow ask for each other. Such
        waits end, unless they form a circle: A makes k1 and waits for k2, B makes k2 and waits for k1. They are entered one after the
        other, so the one that would close a circle sees all of it, and does not wait."""
        waiters = self.engine.parts.writers.waiters
        if not held:
            return waiters.enter(key, keyhash)
        with self.engine.parts.catalog.writer():
            if leads_to(held, keyhash, waiters.every()):
                raise Busy(f"{key!r} is being made by one that waits, in the end, for this caller", key=key)
            entered = waiters.enter(key, keyhash, held)
        if entered is None:
            raise Busy(f"{key!r} is being made by another, and others would not see that this caller waits for it", key=key)
        return entered

    # -- failures --------------------------------------------------------------------------------------------------

    def note_failure(self, space: str, key: str, error: Exception, asker: Asker | None = None) -> None:
        """Record a failure for the callers that wait for this key, if it concerns any of them.

        What a remote answered, or that it did not, concerns the callers that ask alike. Any other error is the caller's own; but if a
        function raised it, it concerns every caller. ``asker``: this caller; None: it runs a function that asks no remote."""
        if not _is_own(error, asker):
            self._note(space, key, error, asker.manner() if asker is not None and _is_of_remote(error) else None)

    def _note(self, space: str, key: str, error: Exception, manner: str | None) -> None:
        with contextlib.suppress(errors.CacheFault, OSError), self.engine.parts.catalog.write() as txn:
            at = time.monotonic_ns()
            failures.record(txn, space, key, errors.to_wire(error) | ({} if manner is None else {"asker": manner}), at)
            if len(self._errors) >= 256:
                self._errors.clear()
            copy = _without_frames(error)
            if copy is not None:
                self._errors[space, key] = at, copy

    def note_unstored(self, space: str, key: str, codec: str, pack: Callable[[float], Buffer | None]) -> None:
        """Tell the callers that wait for this key, which this thread holds, that its value was made and cannot be stored. ``pack`` returns
        its bytes by this codec, unless there are more than so many; it is called only if a caller waits. Other threads of this process get
        them, and other processes if there are few. Without them each makes the value itself, at the same time as the others."""
        here = [waiter for waiter in [*self._waiters] if (waiter.space, waiter.key) == (space, key)]
        data = pack(math.inf if here else MESSAGE) if here or self._is_awaited_elsewhere(key_hash(space, key)) else None
        for waiter in here:
            waiter.unstored = codec, data
        text = base64.b85encode(bytes(data)).decode() if data is not None and memoryview(data).nbytes <= MESSAGE else None
        self._note(space, key, _unstored(key, codec, None, text=text), None)

    def _is_awaited_elsewhere(self, keyhash: int) -> bool:
        with contextlib.suppress(errors.CacheFault, OSError):  # the root was deleted meanwhile, say
            return any(one.keyhash == keyhash for one in self.engine.parts.writers.waiters.every())
        return False

    @recover_and_retry
    def failure(self, space: str, key: str, since: int, asker: Asker | None = None) -> Exception | None:
        """What the work on a key failed with after ``since`` (nanoseconds of the monotonic clock), in any process, where that concerns this
        ``asker``; a later call tries again."""
        failure = failures.of(self.engine.parts.catalog, space, key)
        if failure is None or failure[0] < since:
            return None
        manner = failure[1].get("asker")
        if manner is not None and (asker is None or manner != asker.manner()):
            return None
        at, error = self._errors.get((space, key), (0, None))
        copy = _without_frames(error) if error is not None and at == failure[0] else None
        return _from_wire(failure[1]) if copy is None else copy


def _is_own(error: Exception, asker: Asker | None) -> bool:
    """Whether an error comes of what its caller asked for, or of the state of its process: others may succeed. See `note_failure`."""
    if isinstance(error, MemoryError) or (isinstance(error, errors.ForebayError) and error.callers_own):
        return True
    runs_function = asker is None or asker.runs_function
    return not runs_function and (not _is_of_remote(error) or getattr(error, "attempts", None) == 0)


def _is_of_remote(error: Exception) -> bool:
    return isinstance(error, (errors.RemoteError, errors.ChecksumMismatch))


def _from_wire(wire: dict[str, Any]) -> Exception:
    """The error that a process noted."""
    error = errors.from_wire(wire)
    if type(error) is not errors.CacheFault or "unstored" not in error.facts:
        return error
    data: bytes | None = None
    with contextlib.suppress(ValueError, TypeError, AttributeError):  # None, or whatever another program wrote
        data = base64.b85decode(error.facts["unstored"].encode("ascii"))
    return _unstored(str(error.facts.get("key")), str(error.facts.get("codec")), data)


def _unstored(key: str, codec: str, data: Buffer | None, *, text: str | None = None) -> Unstored:
    error = Unstored(f"another caller made {key!r}, but could not store it", key=key, codec=codec, unstored=text)
    error.codec, error.data = codec, data
    return error


def _word_of(keyhash: int) -> int:
    return FIRST_WORD + keyhash % KEY_WORDS


@contextlib.contextmanager
def _holding(*keyhashes: int) -> Iterator[None]:
    held = _held.get()
    token = _held.set(None if held is None else (*held, *keyhashes))
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # a coroutine whose event loop is gone ends in another context
            _held.reset(token)


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
