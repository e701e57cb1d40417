"""The claims of a node: a directory each, in one that all users share. Who lives is decided by kernel locks alone.

A claim is made, and a dead one freed, under the lock of the registry, which is held for a millisecond. Steps, and what is left where
the process dies after each: the directory is made under another name, with its locks held (scrap); it gets its name (a claim that is
dead, as its locks are free). It loses its name (scrap); its files go. Whoever next has the lock removes what is his own scrap, and
frees what is his own and dead.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from forebay import errors
from forebay._kernel import locks
from forebay.claims import building, conflicts, inspect, registry_dir
from forebay.claims.backoff import Patience
from forebay.claims.claim_files import Gone
from forebay.claims.claim_request import ClaimRequest, Held
from forebay.claims.inspect import ClaimState
from forebay.claims.locked_registry import REFUSED, InTheWay, LockedRegistry
from forebay.claims.members import Members
from forebay.claims.table import CLAIM, LEADER

_LONGEST_PAUSE = 0.05
_PATIENCE = 60.0


class Registry:
    """The claims of this node. Callable from any thread, and in a forked child; it holds nothing open."""

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        """Raises `RootRefused` where the directory (default: ``$FOREBAY_CLAIMS``, else one in /dev/shm) cannot serve."""
        self.path = (registry_dir.default() if path is None else Path(path)).absolute()
        registry_dir.prepare(self.path)

    # -- having a claim --------------------------------------------------------------------------------------------

    def register(self, wanted: ClaimRequest, timeout: float | None = _PATIENCE) -> Held:
        """Make a claim, as the leader of the job's ranks on this node. Raises `ClaimConflict`, `NoSpace`, `WaitTimeout`.

        Where what stands against it is about to end, waits for that, at most ``timeout`` seconds; else ``wanted.patience`` seconds."""
        patience = Patience(timeout, _LONGEST_PAUSE)

        def may_pass(found: InTheWay) -> bool:
            return patience.waited < (patience.timeout if found.is_ending() else wanted.patience)

        while True:
            found = self._register(wanted, timeout, may_pass)
            if isinstance(found, Held):
                return found
            patience.sleep(found.told)

    def _register(self, wanted: ClaimRequest, timeout: float | None, may_pass: Callable[[InTheWay], bool]) -> Held | InTheWay:
        """Once. Gives what may be waited for."""
        with self.locked(timeout) as ledger:
            try:
                return ledger.make(wanted, ledger.make_way(wanted), self._left)
            except InTheWay as found:
                if may_pass(found):
                    return found
                ledger.refuse(wanted, found.error)
                raise found.error from None

    def join(self, wanted: ClaimRequest, timeout: float | None = _PATIENCE) -> Held:
        """Find the claim that the leader makes, or has made. Raises `ClaimMismatch` where it is about something else, `WaitTimeout`, and
        the `ClaimConflict` that the leader met."""
        patience = Patience(timeout, _LONGEST_PAUSE)
        while True:
            held = self._find(wanted, led=True)
            if held is not None:
                return _matching(held, wanted)
            refusal = self._refusal(wanted)
            if refusal is not None:
                raise refusal
            patience.sleep(lambda: self._missing(wanted))

    def join_or_register(self, wanted: ClaimRequest, timeout: float | None = _PATIENCE) -> Held:
        """The claim of that job and key, made by whoever comes first: nobody leads it. Its directories meet no others."""
        with self.locked(timeout) as ledger:
            held = self._find(wanted, led=False)
            return held if held is not None else ledger.make(wanted, ledger.make_way(wanted), self._left)

    def attach(self, directory: Path, *, rank: int | None = None, worker: int | None = None) -> Held:
        """Join those who have the claim in ``directory``. Raises `Closed` where it was freed."""
        with contextlib.suppress(Gone):
            members = Members.attach(directory, rank=rank, worker=worker, on_left=self._left)
            found = inspect.look_at(self.path, directory.name)
            if found is not None and found.record is not None:
                return Held(found.record, members)
            members.leave()
        raise errors.Closed(f"the claim {directory} was freed: all who had it are gone", what="claim")

    def _find(self, wanted: ClaimRequest, *, led: bool) -> Held | None:
        """The claim of that job and key, joined. ``led``: only while its leader has it."""
        for name in os.listdir(self.path):
            found = inspect.look_at(self.path, name) if name.endswith(wanted.tag) else None
            if found is None or found.record is None or not found.live or found.uid != os.geteuid() or (led and found.is_ending()):
                continue  # another user's: anybody can tell the tag of a job, and give it to a claim of his own
            try:
                members = Members.attach(found.directory, rank=wanted.rank, worker=wanted.worker, on_left=self._left)
            except Gone:
                continue
            if not led or members.is_in(LEADER):
                return Held(found.record, members)
            members.leave()
        return None

    def _refusal(self, wanted: ClaimRequest) -> Exception | None:
        """Why the leader made no claim, as long as it lives."""
        for name in os.listdir(self.path):
            if not name.startswith(REFUSED + wanted.tag):
                continue
            try:
                fd = os.open(self.path / name / CLAIM, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            except OSError:
                continue  # withdrawn
            try:
                if os.fstat(fd).st_uid == os.geteuid() and locks.locked_at(fd, LEADER) is not None:
                    return errors.from_wire(dict(json.loads(building.read(fd))))
            except (OSError, ValueError, TypeError):
                continue  # damaged
            finally:
                os.close(fd)
        return None

    def _missing(self, wanted: ClaimRequest) -> tuple[str, str]:
        job = wanted.name or wanted.job
        known = [found.record for found in self.look() if found.live and found.record is not None and found.record.job == job]
        there = "; ".join(f"claim {record.key} of process {record.pid}" for record in known)
        return (
            f"the first rank of this node to make claim {wanted.key} of {wanted.owner} (known by {wanted.how})",
            f"nobody yet (claims of this job here: {there or 'none'})",
        )

    # -- seeing and freeing ----------------------------------------------------------------------------------------

    def look(self) -> list[ClaimState]:
        """All claims of the node, live and dead, by their number. What cannot be read is told as far as it can."""
        found = [inspect.look_at(self.path, name) for name in os.listdir(self.path)]
        return sorted((one for one in found if one is not None), key=lambda one: (one.prefix, one.tag))

    def prefixes(self) -> set[int]:
        """The numbers that claims have, dead ones too."""
        return {prefix for _, prefix, _ in inspect.parse(os.listdir(self.path))}

    def prune(self, timeout: float | None = _PATIENCE) -> list[ClaimState]:
        """Free what is dead and this user's now; the next claim of the user would do the same. Gives what was freed."""
        with self.locked(timeout) as ledger:
            return [one for one in self.look() if not one.live and one.uid == os.geteuid() and ledger.free(one.directory)]

    def _left(self, directory: Path) -> None:
        """Free a claim if nobody has it any more, and the lock is to be had without a wait; else the next claim does."""
        with contextlib.suppress(OSError):  # a `WaitTimeout` is one too
            if inspect.glance(str(directory)) is None:
                with self.locked(0) as ledger:
                    ledger.free(directory)

    @contextlib.contextmanager
    def locked(self, timeout: float | None = _PATIENCE) -> Iterator[LockedRegistry]:
        """The lock of all claims of the node held: none is made or freed meanwhile. Raises `WaitTimeout`.

        What loses its name is removed afterwards: large files take long."""
        scrap: list[Path] = []
        try:
            with registry_dir.locked(self.path, timeout):
                ledger = LockedRegistry(self.path, scrap)
                yield ledger
        finally:
            for directory in scrap:
                building.remove(directory)


def _matching(held: Held, wanted: ClaimRequest) -> Held:
    differs = conflicts.mismatch(wanted.streams, held.record.streams)
    if differs is None:
        return held
    held.members.leave()
    theirs = held.record
    raise errors.ClaimMismatch(
        f"claim {wanted.key} of {wanted.owner} (known by {wanted.how}) is another one for its leader, process {theirs.pid}: "
        f"{differs}",
        ours=[s.place.path for s in wanted.streams], theirs=[s.place.path for s in theirs.streams],
    )  # fmt: skip
