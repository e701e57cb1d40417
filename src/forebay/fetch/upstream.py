"""The root that is searched second: other processes fill it, and this one only reads it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from forebay import errors
from forebay._engine.index.memo import Remembered
from forebay._engine.store import Store
from forebay._kernel import waits
from forebay._logs import logger
from forebay._model import Entry
from forebay.fetch.opening import CacheOptions, others_can_write

log = logger("forebay.fetch")
T = TypeVar("T")


class Upstream:
    """The upstream root of a cache. While it cannot be used, for whatever reason, it has nothing: no call fails because of it.

    The first such failure is logged as a warning. The root is then opened again from time to time, whatever root is there by then.
    Callable from any thread and after a fork.

    ``id``: of the root that was opened last; 0: of none."""

    def __init__(self, options: CacheOptions) -> None:
        """Opens the root. Raises nothing."""
        self._options, self.id = options, 0
        self._store: Store | None = None
        self._turn: waits.Turn | None = None  # while the root cannot be used
        self._is_trusted, self._has_warned = False, False
        store = self._open()
        if store is None:
            self._turn = waits.Turn()
        else:
            self._store, self.id, self._is_trusted = store, store.root.id, not others_can_write(store)

    def ask(self, question: Callable[[Store], T | None]) -> T | None:
        """What ``question`` finds in the store of the root; None if the root cannot be used. Raises `ConfigError` if ``question`` does."""
        store = self._usable()
        try:
            return None if store is None else question(store)
        except (errors.CacheFault, errors.WaitTimeout, errors.Closed, OSError) as error:
            if store is self._store:  # else another thread has opened the root again since
                self._turn = waits.Turn()
                self._say(error)
            return None

    def view(self, space: str, key: str) -> Remembered | None:
        """See `Store.view`."""
        return self.ask(lambda store: store.view(space, key))

    def entry(self, space: str, key: str) -> Entry | None:
        """See `Store.entry`."""
        return self.ask(lambda store: store.entry(space, key))

    @property
    def others_can_write(self) -> bool:
        """Whether anyone but this user and the superuser can write to the root, or could when it was first opened. True if it never was."""
        return not self._is_trusted or (self._turn is None and self._store is not None and others_can_write(self._store))

    def close(self) -> None:
        """Release the root."""
        if self._store is not None:
            self._store.close()

    def abandon(self) -> None:
        """See `Store.abandon`."""
        if self._store is not None:
            self._store.abandon()

    def _usable(self) -> Store | None:
        turn = self._turn
        if turn is not None and (opened := turn.attempt(self._open)) is not None:
            if opened is self._store:
                opened.close()  # it was opened once more
            self._store, self.id, self._turn = opened, opened.root.id, None
            log.info("the upstream cache in %s can be used again", self._options.path)
        return self._store if self._turn is None else None

    def _open(self) -> Store | None:
        try:
            store = self._options.open()
        except (errors.ForebayError, OSError) as error:
            self._say(error)
            return None
        if self._is_trusted and others_can_write(store):  # codecs were chosen for a root that only this user can write to
            store.close()
            self._say("others can write to the root that is there now")
            return None
        return store

    def _say(self, why: object) -> None:
        say, self._has_warned = log.info if self._has_warned else log.warning, True
        say("the upstream cache in %s cannot be used, going on without it: %s", self._options.path, str(why))
