"""`Store.locks`: the locks of keys, and single-flight on them, for all threads and processes of a node."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from forebay._engine.catalog import reservations
from forebay._engine.engine import Engine, recover_and_retry
from forebay._engine.files.faults import faults
from forebay._engine.locks.fill import KeyHold, OnWait, hash_of
from forebay._engine.spaces import Spaces

T = TypeVar("T")

NAMED = 0
"""The space of named locks; no space has this id."""


class KeyLocks:
    """The locks of the keys of one root; the death of a holder releases them. Callable from any thread, and in a forked child."""

    def __init__(self, engine: Engine, spaces: Spaces) -> None:
        self.engine, self._spaces = engine, spaces

    def single(
        self, space: str, key: str, look: Callable[[], T | None], make: Callable[[], T], *,
        timeout: float | None = None, on_wait: OnWait | None = None, on_hold: Callable[[KeyHold], None] | None = None,
    ) -> T:  # fmt: skip
        """See `Fill.single`. ``make`` runs once: a catalog that breaks meanwhile is recovered for the next call."""
        with faults(key):
            self.engine.check_usable(writing=True)
            number = self._spaces.ensure(space).id
        with self.engine.reopening():
            return self.engine.parts.writers.fill.single(number, key, look, make, timeout=timeout, on_wait=on_wait, on_hold=on_hold)

    async def single_async(
        self, space: str, key: str, look: Callable[[], T | None], make: Callable[[], Awaitable[T]], *, timeout: float | None = None
    ) -> T:
        """See `Fill.single_async`."""
        number = self._number(space, key)
        with self.engine.reopening():
            return await self.engine.parts.writers.fill.single_async(number, key, look, make, timeout=timeout)

    def _number(self, space: str, key: str) -> int:
        with faults(key):
            self.engine.check_usable(writing=True)
            return self._spaces.ensure(space).id

    @recover_and_retry
    def hold(self, space: str, key: str, *, timeout: float | None = None) -> KeyHold:
        """Take the lock of a key, waiting up to ``timeout`` seconds. Any thread may release it."""
        return self.engine.parts.writers.fill.hold(self._spaces.ensure(space).id, key, timeout=timeout)

    def try_hold(self, space: str, key: str) -> KeyHold | None:
        """Take the lock of a key if it is free."""
        with faults(key):
            self.engine.check_usable(writing=True)
            return self.engine.parts.writers.fill.try_hold(self._spaces.ensure(space).id, key)

    @contextlib.contextmanager
    def holding_free(self, space: str, keys: Sequence[str]) -> Iterator[list[str]]:
        """See `Fill.holding_free`."""
        with contextlib.ExitStack() as stack:
            with faults(keys[0]):  # not of what is made
                held = stack.enter_context(self.engine.parts.writers.fill.holding_free(self._number(space, keys[0]), keys))
            yield held

    async def hold_async(self, space: str, key: str, *, timeout: float | None = None) -> KeyHold:
        """`hold` for a coroutine: the event loop goes on."""
        return await self.engine.parts.writers.fill.hold_async(self._number(space, key), key, timeout=timeout)

    @recover_and_retry
    def named(self, name: str, *, timeout: float | None = None, on_wait: OnWait | None = None) -> KeyHold:
        """Take the lock of this name, which belongs to no key.

        It may be waited for inside a function that makes a key's value too, so its holder must run nothing that waits for such a key."""
        self.engine.check_usable(writing=True)
        with self.engine.parts.writers.fill.working(False):
            return self.engine.parts.writers.fill.hold(NAMED, name, timeout=timeout, on_wait=on_wait)

    @recover_and_retry
    def with_remains(self, space: str, keys: Iterable[str]) -> set[str]:
        """Those of these keys for which another process is writing, or left a partial when it died."""
        reserved = reservations.keyhashes(self.engine.parts.catalog)
        number = self._spaces.lookup(space).id
        return {key for key in keys if hash_of(number, key) in reserved} if reserved else set()

    def working(self) -> contextlib.AbstractContextManager[None]:
        """Around what makes a value while its key is held: inside, no other key is waited for."""
        return self.engine.parts.writers.fill.working()

    def wait_turn(self, space: str, key: str, seconds: float) -> None:
        """Sleep until the lock of a key may have been released, at most ``seconds``."""
        self.engine.parts.writers.fill.sleep(self._spaces.ensure(space).id, key, seconds)

    @recover_and_retry
    def failure(self, space: str, key: str, since: int) -> Exception | None:
        """What the work on a key failed with after ``since`` (nanoseconds of the monotonic clock), in any process."""
        return self.engine.parts.writers.fill.failure(self._spaces.ensure(space).id, key, since)

    def note_failure(self, space: str, key: str, error: Exception) -> None:
        """Record a failure for those that wait for this key."""
        self.engine.parts.writers.fill.note_failure(self._spaces.ensure(space).id, key, error)
