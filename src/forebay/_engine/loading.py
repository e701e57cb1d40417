"""`Store.prefetching`: what a prefetcher needs beside reads and writes: what to expect, what goes first, and sessions."""

from __future__ import annotations

from collections.abc import Sequence

from forebay import errors
from forebay._engine.engine import Engine, recover_and_retry
from forebay._engine.files.layout import faults
from forebay._engine.flight import Flight
from forebay._engine.index.adaptive import Trial, charge_of
from forebay._engine.index.records import ID, USED, VALIDATED
from forebay._engine.leases import Lease
from forebay._engine.publish import Label, Pending
from forebay._engine.spaces import Spaces
from forebay._model import Entry

DISMISS_SOON = 0.01
"""Seconds that a call may wait for the writer lock to say which entries go first: it is a hint, and can be given later."""


class Prefetching:
    """What the prefetchers of one root know ahead. Callable from any thread, and in a forked child."""

    def __init__(self, engine: Engine, spaces: Spaces, key_locks: Flight) -> None:
        self.engine, self._spaces, self._locks = engine, spaces, key_locks

    @recover_and_retry
    def expect(self, space: str, key: str, max_age: int) -> int | None:
        """See `Hits.expect`."""
        return self.engine.expect(space, key, max_age)

    @recover_and_retry
    def dismiss(self, space: str, keys: Sequence[str]) -> Sequence[str]:
        """Have the entries of these keys evicted before all others, unless they are used first. Returns the keys for which there is no
        place now, or all of them where the writer lock is not free soon. In a space that is not adaptive it does nothing."""
        engine, id = self.engine, self._spaces.number(space)
        adaptive = engine.adaptive.of(id)
        if adaptive is None or engine.root.read_only:
            return ()
        named: list[str] = []
        trials: list[Trial] = []
        for key in keys:
            hint = engine.index.find(space, key)
            if hint is not None:
                words, base, slot, entry, size, is_file, *_ = hint
                named.append(key)
                trials.append(Trial(slot, entry, words[base + USED], charge_of(size, is_file=is_file)))
        if not trials:
            return ()
        try:
            with engine.parts.catalog.writer(DISMISS_SOON):
                return named[adaptive.dismiss(trials) :]
        except errors.WriterBusy:
            return keys

    @recover_and_retry
    def try_used(self, space: str, keys: Sequence[str]) -> Sequence[str]:
        """Put the entries of these keys on trial as new ones, if they were fetched for other processes and used since then: fetching
        and use are one. Returns the keys that were not used yet, or all of them where the writer lock is not free soon. It does nothing
        in a space that is not adaptive, and where bimodal insertion does not lead."""
        engine, id = self.engine, self._spaces.number(space)
        adaptive = engine.adaptive.of(id)
        if adaptive is None or engine.root.read_only or not adaptive.ghosts.bimodal:
            return ()
        unused: list[str] = []
        trials: list[Trial] = []
        for key in keys:
            hint = engine.index.find(space, key)
            if hint is None:  # it is still being fetched
                unused.append(key)
                continue
            words, base, slot, entry, size, is_file, *_ = hint
            used = words[base + USED]
            if used == words[base + VALIDATED]:  # see `Label`
                unused.append(key)
            else:
                trials.append(Trial(slot, entry, used, charge_of(size, is_file=is_file)))
        if not trials:
            return unused
        try:
            with engine.parts.catalog.writer(DISMISS_SOON):
                for trial in trials:
                    if adaptive.wants_trial(adaptive.ghosts.capacity):
                        adaptive.put_on_trial(trial)
        except errors.WriterBusy:
            return keys
        return unused

    @recover_and_retry
    def never_used(self, several: Sequence[Entry]) -> None:
        """Let these entries be evicted before all that was ever used, unless they are used first: their files have other names too."""
        for entry in several:
            words, base = self.engine.index.record(entry.slot)
            if words[base + ID] == entry.id and not self.engine.root.read_only:
                words[base + USED] = 0

    @recover_and_retry
    def join(self, space: str, key: str) -> Lease:
        """Join a session. It begins with the first process that joins, and ends when the last lease on it is gone, whatever its holder
        died of. Entries that name the session are then removed by the next process that writes."""
        engine = self.engine
        engine.check_usable(writing=True)
        lease = engine.parts.leases.take(self._spaces.number(space), key)
        if lease is not None:
            return lease
        with self._locks.hold(space, key):
            # P1 and P2 find none / P1 holds the key, begins one, lets go / P2 holds the key: we are here.
            return engine.parts.leases.take(self._spaces.number(space), key) or self._begin_session(Label(space, key, life="held"))

    def _begin_session(self, label: Label) -> Lease:
        with faults(label.key), self.engine.parts.catalog.write() as txn:
            ((_, lease),) = self.engine.parts.writers.publisher.enter(txn, [Pending(label, "session", 0, leased=True)])
        assert lease is not None
        return lease
