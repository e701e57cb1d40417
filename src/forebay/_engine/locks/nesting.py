"""Waiting for a key while holding others: allowed, unless such waits form a cycle.

A function that makes a value may need another value that another process is making: the calls of a flow ask for each other. Such waits
end, unless they form a cycle: A makes k1 and waits for k2, B makes k2 and waits for k1. So a process records in the catalog, before it
waits, what it holds and what it waits for. Records are written one after the other, so the one that closes a cycle sees all of it, and
does not wait.

The record of a dead process is ignored: the lock of its owner tells."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Collection, Iterable, Iterator

from forebay import errors
from forebay._engine.catalog import Catalog, Txn, processes
from forebay._engine.locks.owners import Owners


class Busy(errors.CacheFault):
    """Another works on this key, and this caller may not wait for it: that one waits for what this caller holds, or may do so."""


class Nesting:
    """The nested waits of one root. Callable from any thread."""

    def __init__(self, catalog: Catalog, owners: Owners) -> None:
        self._catalog, self._owners = catalog, owners
        self._numbers = itertools.count()

    @contextlib.contextmanager
    def waiting(self, key: str, held: Collection[int], target: int) -> Iterator[None]:
        """Around a wait for the key ``target`` by a holder of the keys ``held``. Raises `Busy` where the wait would never end."""
        if not held:
            yield
            return
        note = processes.KeyWait(self._owners.me(), next(self._numbers), frozenset(held), target)
        with self._catalog.write() as txn:
            if leads_to(held, target, self._living(txn)):
                raise Busy(f"{key!r} is being made by one that waits, in the end, for this caller", key=key)
            processes.enter_wait(txn, note)
        try:
            yield
        finally:
            # A record that stays, for want of room, only makes other processes compute alone what they could have waited for.
            with contextlib.suppress(errors.CacheFault, OSError), self._catalog.write() as txn:
                processes.leave_wait(txn, note)

    def _living(self, txn: Txn) -> list[processes.KeyWait]:
        living = []
        for wait in processes.waits(txn):
            if self._owners.is_dead(wait.owner):
                processes.leave_wait(txn, wait)
            else:
                living.append(wait)
        return living


def leads_to(held: Iterable[int], target: int, waits: Iterable[processes.KeyWait]) -> bool:
    """Whether the holder of ``target`` waits, directly or through other waits, for one of the keys ``held``."""
    goals, seen, next_ones = set(held), set[int](), {target}
    edges = list(waits)
    while next_ones:
        if next_ones & goals:
            return True
        seen |= next_ones
        next_ones = {wait.wanted for wait in edges if wait.held & next_ones} - seen
    return False
