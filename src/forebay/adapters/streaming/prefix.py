"""`get_shm_prefix`: the number of a data set of Streaming on this node, as a claim.

The claim also has the block ``locals`` as Streaming would have created it, so that jobs with an unmodified Streaming see that the number
and the directories are taken. Freeing the claim after its last process removes all files with its number.
"""

from __future__ import annotations

import os
import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from forebay import claims, errors
from forebay._kernel.interrupts import finalizer, guarded
from forebay.adapters.streaming import names as names
from forebay.adapters.streaming import shared as shared
from forebay.claims import conflicts, records
from forebay.claims.claim_files import MARKER
from forebay.claims.conflicts import ClaimRequest
from forebay.claims.processes import identify
from forebay.claims.records import ClaimedStream, ExternalFiles
from forebay.claims.registry import Registry
from forebay.remote import urls
from forebay.world import World

TICK = 0.007
LEADER_WITHIN = 60.0
"""Seconds that a rank waits for the first one of its node."""
_counts: Counter[tuple[str, str, int]] = Counter()  # numbers requested in this process, by registry, job and rank


class Locals(shared.SharedMemory):
    """The block ``locals`` of a claim. This process closes the claim when the last of these objects is gone.

    A length of 0, stored by the process that registered, tells the node that the directories are free. Other processes store into
    private copies, so that a rank or worker that ends first does not speak for all. Unpickling it opens the claim."""

    def __init__(self, claim: claims.Claim, *, is_leader: bool = False) -> None:
        self.claim = claim
        # Through the claim's own link to it: another job's clean-up may have removed the one in /dev/shm.
        self.shm = shared.Block.attach(names.name_of(claim.prefix, names.LOCALS), at=claim.path / MARKER, private=not is_leader)
        self.created_shms, self.opened_shms = ([self.shm], []) if is_leader else ([], [self.shm])
        shared.claimed[claim] = frozenset(names.name_of(claim.prefix, what) for what in names.MEMORY)
        hold(self, claim, self.shm.buf if is_leader else None)

    def cleanup(self) -> None:
        """Close the claim in this process."""
        self.shm.close()
        shared.claimed.pop(self.claim, None)
        self.claim.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return shared.unpickle, (shared.on_unpickle, Locals, self.claim)


# -- holders of a claim ------------------------------------------------------------------------------------------------

_holders: weakref.WeakKeyDictionary[claims.Claim, weakref.WeakSet[Any]] = weakref.WeakKeyDictionary()


def hold(holder: object, claim: claims.Claim, view: memoryview | None = None) -> None:
    """Keep the claim open until the last of its holders is gone. ``view``: of ``locals``, to be marked when this holder is gone."""
    _holders.setdefault(claim, weakref.WeakSet()).add(holder)
    weakref.finalize(holder, _let_go, claim, view, os.getpid()).atexit = False  # at exit the claim leaves by itself


@finalizer
def _let_go(claim: claims.Claim, view: memoryview | None, creator: int) -> None:
    """Close a claim without ever waiting: this runs wherever garbage is collected."""
    if view is not None and creator == os.getpid():
        names.give_up(view)
    if next(iter(_holders.get(claim, ())), None) is None:  # its length still counts the object that is being finalized
        shared.claimed.pop(claim, None)
        claim.let_go()


def claim_of(name: str) -> claims.Claim | None:
    """Return this process's open claim whose number begins the name."""
    return next((claim for claim in list(_holders) if name.startswith(names.name_of(claim.prefix, "")) and not claim.closed), None)


def _is_held(path: str, directories: Iterable[str]) -> bool:
    """Whether a live process of a user who may write to one of these directories has the file open; one that was killed left it."""
    try:
        uid = os.lstat(path).st_uid
        return any(records.may_write(uid, records.canonical(directory)) for directory in directories) and names.is_used(path)
    except OSError:
        return False  # its job has ended meanwhile


class _StreamingFiles:
    """The files of Streaming for a number, as the `Beside` of its claim."""

    def __init__(self, directories: Sequence[str], remotes: Sequence[str | None], registry: Registry) -> None:
        self._directories, self._registry = directories, registry
        self._exclusive = {path for path, remote in zip(directories, remotes, strict=True) if remote is not None}

    def check(self) -> None:
        """Raises `ClaimConflict` if a job that does not use Forebay has one of the directories."""
        if not self._exclusive:
            return
        for prefix, theirs in names.directories_of_others(self._registry.prefixes()):
            path = names.paths_of(prefix)[0]
            if not _is_held(path, self._exclusive.intersection(theirs)):
                continue
            with self._registry.locked():  # P1 has the lock, and creates `locals` / P2 sees that / P1 gives its claim the number
                if prefix in self._registry.prefixes():
                    continue
            ours: dict[str, Any] = {"directories": list(self._directories), "pids": [os.getpid()]}
            raise errors.ClaimConflict(
                f"{path} is held by a job of Streaming that does not use Forebay", ours=ours, theirs={"directories": theirs}
            )

    def is_free(self, prefix: int) -> bool:
        return names.is_free(prefix)

    def files(self, prefix: int) -> ExternalFiles:
        marker, *others = names.paths_of(prefix)
        return ExternalFiles(tuple(others), marker)

    def create_marker(self, prefix: int, directory: int) -> None:
        names.create_linked(names.paths_of(prefix)[0], names.pack(self._directories, prefix), directory)


@guarded
def get_shm_prefix(
    streams_local: Sequence[str], streams_remote: Sequence[str | None], world: Any, retry: int = 100
) -> tuple[int, shared.SharedMemory]:
    """Return the number of this data set on this node, and the block with its directories. Keep the block as long as the data set is used.

    ``streams_local``: the local directory of each stream; ``streams_remote``: where it is filled from, or None: only a directory with a
    remote must be used by this job alone. ``world``: of Streaming or of Forebay. ``retry``: how many times 7 ms a conflict may take to
    pass. Every rank of the node calls this; the k-th calls of all ranks belong together.

    Raises `ClaimConflict` (a ValueError) if another live job has a directory, `ClaimMismatch` (a RuntimeError) if a rank passes other
    directories than the first one of its node, or that one does not come within `LEADER_WITHIN`; ConfigError, WaitTimeout, NoSpace."""
    streams_local = [urls.as_text(path) for path in streams_local]
    streams = _streams(streams_local, streams_remote)
    if retry < 0:
        raise errors.ConfigError(f"retry={retry}: must be 0 or more", name="retry", value=retry)
    here = World(world.num_nodes, world.ranks_per_node, world.workers_per_rank, world.worker)
    registry, job = Registry(), identify(None, here)
    count = (str(registry.path), job.id, here.rank)  # a forked process may be another rank than its parent
    _counts[count] += 1
    spared = frozenset(claim.path.name for claim, pid in _given_up.items() if pid == os.getpid() and claim.path.parent == registry.path)
    request = ClaimRequest(
        job, f"of Streaming, {_counts[count] - 1}", streams, here, equal_only=True,
        beside=_StreamingFiles(streams_local, streams_remote, registry), conflict_timeout=retry * TICK, spared=spared,
    )  # fmt: skip
    try:
        members = registry.register(request) if here.is_local_leader else registry.join(request, LEADER_WITHIN)
    except errors.ClaimConflict as error:
        raise _as_streaming_error(error, streams_local) from error
    except errors.WaitTimeout as error:
        if here.is_local_leader:
            raise
        raise errors.ClaimMismatch(f"{error}: does the first rank of this node also create this data set?", **error.facts) from error
    claim = claims.opened(registry, members, here)
    return claim.prefix, Locals(claim, is_leader=here.is_local_leader)


def _streams(directories: Sequence[str], remotes: Sequence[str | None]) -> tuple[ClaimedStream, ...]:
    if len(directories) != len(remotes):
        message = f"{len(directories)} local directories, but {len(remotes)} remotes: one each, or None"
        raise errors.ConfigError(message, name="streams_remote", value=len(remotes))
    paths = [records.canonical(path) for path in directories]
    repeated = list(dict.fromkeys(directories[number] for _, number in conflicts.repeated(paths)))
    if repeated:
        raise errors.ConfigError(f"Reused local directory: {repeated}. Provide a different one.", name="streams_local", value=repeated)
    return tuple(
        ClaimedStream(path, urls.canonical(remote) if remote is not None else None) for path, remote in zip(paths, remotes, strict=True)
    )


def _as_streaming_error(error: errors.ClaimConflict, directories: Sequence[str]) -> errors.ClaimConflict:
    """Begin the message with Streaming's own text, which programs look for."""
    theirs = error.theirs["directories"] if "theirs" in error.facts else "those of another claim"
    lines = [line for line in str(error).splitlines() if "shared=True" not in line]  # Streaming has no such argument
    message = f"Reused local directory: {list(directories)} vs {theirs}. Provide a different one.\n" + "\n".join(lines)
    return errors.ClaimConflict(message, **error.facts)


_given_up: weakref.WeakKeyDictionary[claims.Claim, int] = weakref.WeakKeyDictionary()  # the process that gave each up


@guarded
def clean_stale_shared_memory() -> None:
    """Free what ended jobs of this user left. It is never required before `get_shm_prefix`, and touches nothing that a live process has.

    This process may then reuse the directories of data sets that it created before: a deleted one may live on in its threads. For all
    other jobs they remain taken.

    Callable in every rank at any time. Raises RootRefused, WaitTimeout."""
    _given_up.update(dict.fromkeys(list(_holders), os.getpid()))
    registry = Registry()
    registry.prune()
    with registry.locked():  # else files that were just created, and are not in use yet, would be taken for leftovers
        names.remove_unused(registry.prefixes())
