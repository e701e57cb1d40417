"""`get_shm_prefix`: the number under which a job of Streaming has its things on this node, as a claim.

The claim has the piece ``locals`` beside it, as Streaming would have made it. So jobs with Streaming as it is see that the number is
taken, and which directories are. Whoever frees the claim after its last process removes all that has its number.
"""

from __future__ import annotations

import os
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any

from forebay import claims, errors
from forebay.adapters.streaming import names as names
from forebay.adapters.streaming import shared as shared
from forebay.claims import conflicts, records
from forebay.claims.claim_files import LANDMARK
from forebay.claims.conflicts import ClaimRequest
from forebay.claims.jobs import identify
from forebay.claims.records import ClaimedStream
from forebay.claims.registry import Registry
from forebay.remote import urls
from forebay.world import World

TICK = 0.007
_counts: Counter[tuple[str, str, int]] = Counter()  # how many numbers this process asked for, by registry, job and rank


class Locals(shared.SharedMemory):
    """The piece ``locals`` of a claim. The claim is given back, by this process alone, when the last of these is gone.

    A length of 0, stored by the process that registered, tells the node that the directories are free; what others store they alone
    see, so that a rank or a worker that ends first does not speak for all. Picklable: whoever gets it has the claim."""

    def __init__(self, claim: claims.Claim, *, made: bool) -> None:
        self.claim = claim
        # By the name that the claim has for it: another job's clean-up may have removed the one in /dev/shm.
        self.shm = shared.Block.attach(names.name_of(claim.prefix, names.LOCALS), at=claim.path / LANDMARK, private=not made)
        self.created_shms, self.opened_shms = ([self.shm], []) if made else ([], [self.shm])
        shared.claimed[claim] = names.name_of(claim.prefix, "")
        hold(self, claim, self.shm.buf if made else None)

    def cleanup(self) -> None:
        """Give the claim back here."""
        self.shm.close()
        shared.claimed.pop(self.claim, None)
        self.claim.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrive, (self.claim, shared.on_arrival)


# -- who needs a claim -------------------------------------------------------------------------------------------------

_holders: weakref.WeakKeyDictionary[claims.Claim, weakref.WeakSet[Any]] = weakref.WeakKeyDictionary()


def hold(holder: object, claim: claims.Claim, view: memoryview | None = None) -> None:
    """Keep the claim until the last of its holders is gone. ``view``: of ``locals``, to tell the node when this one is."""
    _holders.setdefault(claim, weakref.WeakSet()).add(holder)
    weakref.finalize(holder, _let_go, claim, view, os.getpid()).atexit = False  # the end of the process is the claim's own affair


def _let_go(claim: claims.Claim, view: memoryview | None, maker: int) -> None:
    """Never waits: this runs wherever the garbage is collected."""
    if view is not None and maker == os.getpid():
        names.give_up(view)
    if next(iter(_holders.get(claim, ())), None) is None:  # its length still counts the one that goes
        shared.claimed.pop(claim, None)
        claim.let_go()


def claim_of(name: str) -> claims.Claim | None:
    """The claim of this process that has the number with which a name begins."""
    return next((claim for claim in list(_holders) if name.startswith(names.name_of(claim.prefix, "")) and not claim.closed), None)


def _arrive(claim: claims.Claim, on_arrival: Any) -> Locals:
    if on_arrival is not None:
        on_arrival()
    return Locals(claim, made=False)


class _Outside:
    """What Streaming has on the node for a number."""

    def __init__(self, directories: Sequence[str], remotes: Sequence[str | None], registry: Registry) -> None:
        self._directories, self._registry = directories, registry
        self._wanted = {path for path, remote in zip(directories, remotes, strict=True) if remote is not None}
        self._is_checked = False

    def is_free(self, prefix: int) -> bool:
        """Raises `ClaimConflict` where a job that does not use Forebay has one of the directories."""
        if not self._is_checked:
            self._check()
            self._is_checked = True
        return names.is_free(prefix)

    def paths(self, prefix: int) -> list[str]:
        return names.paths_of(prefix)

    def content(self, prefix: int) -> bytes:
        return names.pack(self._directories, prefix)

    def _check(self) -> None:
        if not self._wanted:
            return
        for path, theirs in names.directories_of_others(self._registry.prefixes()):
            if self._wanted.intersection(theirs) and names.is_used(path):  # else what a killed job left
                ours: dict[str, Any] = {"directories": list(self._directories), "pids": [os.getpid()]}
                raise errors.ClaimConflict(
                    f"{path} is held by a job of Streaming that does not use Forebay", ours=ours, theirs={"directories": theirs}
                )


def get_shm_prefix(
    streams_local: Sequence[str], streams_remote: Sequence[str | None], world: Any, retry: int = 100
) -> tuple[int, shared.SharedMemory]:
    """The number of this data set on this node, and the piece that tells its directories, which is to be kept as long as it is used.

    ``streams_local``: the local directory of each stream; ``streams_remote``: where it is filled from, or None: only one that has a
    remote must be this job's alone. ``world``: of Streaming or of Forebay. ``retry``: how many times 7 ms to wait for a conflict to
    pass. Every rank of the node calls this; their k-th calls belong together.

    Raises `ClaimConflict` (a ValueError) where a directory is another's that lives, `ClaimMismatch` (a RuntimeError) where a rank
    names other directories than the first one of its node; ConfigError, WaitTimeout, NoSpace."""
    streams = _streams(streams_local, streams_remote)
    if retry < 0:
        raise errors.ConfigError(f"retry={retry}: must be 0 or more", name="retry", value=retry)
    here = World(world.num_nodes, world.ranks_per_node, world.workers_per_rank, world.worker)
    registry, job = Registry(), identify(None, here)
    count = (str(registry.path), job.id, here.rank)  # who was forked may be another rank than the parent
    _counts[count] += 1
    wanted = ClaimRequest(
        job.id, job.how, f"of Streaming, {_counts[count] - 1}", streams, here.to_json(), here.rank,
        equal_only=True, external=_Outside(streams_local, streams_remote, registry), conflict_timeout=retry * TICK,
        name=job.name, spared=_spared(registry),
    )  # fmt: skip
    try:
        held = registry.register(wanted) if here.is_local_leader else registry.join(wanted)
    except errors.ClaimConflict as error:
        raise _in_their_words(error, streams_local) from error
    claim = claims.opened(registry, held, here)
    return claim.prefix, Locals(claim, made=here.is_local_leader)


def _spared(registry: Registry) -> frozenset[str]:
    return frozenset(claim.path.name for claim, pid in _given_up.items() if pid == os.getpid() and claim.path.parent == registry.path)


def _streams(directories: Sequence[str], remotes: Sequence[str | None]) -> tuple[ClaimedStream, ...]:
    if len(directories) != len(remotes):
        message = f"{len(directories)} local directories, but {len(remotes)} remotes: one each, or None"
        raise errors.ConfigError(message, name="streams_remote", value=len(remotes))
    places = [records.canonical(path) for path in directories]
    again = list(dict.fromkeys(directories[number] for _, number in conflicts.repeated(places)))
    if again:
        raise errors.ConfigError(f"Reused local directory: {again}. Provide a different one.", name="streams_local", value=again)
    return tuple(
        ClaimedStream(place, urls.canonical(remote) if remote is not None else None) for place, remote in zip(places, remotes, strict=True)
    )


def _in_their_words(error: errors.ClaimConflict, directories: Sequence[str]) -> errors.ClaimConflict:
    """Jobs look for these words of Streaming."""
    theirs = error.theirs["directories"] if "theirs" in error.facts else "those of another claim"
    told = [line for line in str(error).splitlines() if "shared=True" not in line]  # nobody can say that to Streaming
    message = f"Reused local directory: {list(directories)} vs {theirs}. Provide a different one.\n" + "\n".join(told)
    return errors.ClaimConflict(message, **error.facts)


_given_up: weakref.WeakKeyDictionary[claims.Claim, int] = weakref.WeakKeyDictionary()  # and by which process


def clean_stale_shared_memory() -> None:
    """Free what jobs of this user left that are gone. What a living process has stays; nothing of it is needed before `get_shm_prefix`.

    This process itself may then use the directories again of the data sets that it made before: one that was deleted may live on in
    its threads. For all other jobs they are still taken.

    Callable in every rank, at any time. Raises RootRefused, WaitTimeout."""
    _given_up.update(dict.fromkeys(list(_holders), os.getpid()))
    registry = Registry()
    registry.prune()
    with registry.locked():  # or what is just made, and not in use yet, would be taken for left
        names.remove_unused(registry.prefixes())
