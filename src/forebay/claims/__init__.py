"""Claims: which local directories and which shared memory belong to which job of this node.

A claim lives as long as any process that has it, and is freed by itself. It needs no cache: `forebay.claim`.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeAlias

from forebay import _config, errors
from forebay.claims import conflicts, records
from forebay.claims.conflicts import ClaimRequest
from forebay.claims.inspect import ClaimState
from forebay.claims.jobs import identify
from forebay.claims.members import ClaimContext
from forebay.claims.records import ClaimedPath, ClaimedStream, Record
from forebay.claims.registry import Held, Registry
from forebay.claims.registry import default as default_registry
from forebay.remote import urls
from forebay.world import World as World

if TYPE_CHECKING:
    import numpy

    from forebay.claims.barriers import Barrier
    from forebay.claims.shared import NamedLock, Scalar

PathLike: TypeAlias = str | os.PathLike[str]
# Of both tables each use is one call, which needs no lock: a child of a fork would inherit it held.
# By rank: who was forked may be another one than the parent, and comes to its first claim with what the parent has.
_counts: dict[tuple[Path, str, int], itertools.count[int]] = {}  # how many claims without a name this process asked for
_open: dict[tuple[str, str, int], Claim] = {}  # those that this process has: kept, since what was made of one may be in use


def claim(
    dirs: PathLike | Sequence[PathLike], remotes: str | Sequence[str | None] | None = None, world: World | None = None,
    job: str | None = None, *, name: str | None = None, shared: bool = False, timeout: float | None = 60.0,
) -> Claim:  # fmt: skip
    """Register what this job uses on this node; all its ranks call this, and have one claim together.

    ``dirs``: the local working directories, which need not be there yet; none for shared memory alone. ``remotes``: where each is
    filled from, or None: only a directory that has one must be the job's alone. ``world``: which rank this is (default:
    `World.detect`). ``job``: what the ranks of this job have in common, where no launcher says it. ``name``: which of the job's claims
    this is (default: the first call of each rank makes or finds the first one, and so on). ``shared``: the directories are only read
    here, and may be those of others of the same remote. ``timeout``: seconds for which a rank waits for the first rank of
    its node, or anybody for a job that is ending.

    Raises `ClaimConflict` (a ValueError) where another claim that lives has such a directory, or one above or below it;
    `ClaimMismatch` (a RuntimeError) where a rank says something else than the first one; `Closed` where somebody removes the claim's
    directory meanwhile; `ConfigError`, `WaitTimeout`, `NoSpace`, `RootRefused`. It is freed when the last process that has it closes it,
    or ends, however."""
    streams = _streams(dirs, remotes, shared)
    world = World.detect() if world is None else world
    if not isinstance(world, World):
        raise errors.ConfigError(f"world={world!r}: must be a World, or None", name="world", value=repr(world))
    patience = _config.parse_timeout(timeout)
    known = identify(job, world)
    registry = Registry()
    key = _ordinal(registry, known.id, world.rank) if name is None else _named(name)
    wanted = ClaimRequest(known.id, known.how, key, streams, world.to_json(), world.rank, name=known.name)
    held = registry.register(wanted, patience) if world.is_local_leader else registry.join(wanted, patience)
    return opened(registry, held, world)


def _ordinal(registry: Registry, job: str, rank: int) -> str:
    return str(next(_counts.setdefault((registry.path, job, rank), itertools.count())))


def _named(name: str) -> str:
    if not isinstance(name, str) or not name:
        raise errors.ConfigError(f"name={name!r}: must be a text that is not empty", name="name", value=repr(name))
    return f"named {name}"


def _streams(
    dirs: PathLike | Sequence[PathLike], remotes: PathLike | Sequence[PathLike | None] | None, shared: bool
) -> tuple[ClaimedStream, ...]:
    listed = _listed(dirs, "dirs")
    wanted = [_place(path) for path in listed]
    given = [None] * len(wanted) if remotes is None else _listed(remotes, "remotes")
    if len(given) != len(wanted):
        raise errors.ConfigError(
            f"{len(wanted)} directories, but {len(given)} remotes: one each, or None", name="remotes", value=len(given)
        )
    again = [f"{listed[first]} and {listed[other]}" for first, other in conflicts.repeated(wanted)]
    if again:
        message = f"each directory may appear once in a claim, but these are repeated: {', '.join(again)}"
        raise errors.ConfigError(message, name="dirs", value=again)
    return tuple(ClaimedStream(place, _redacted(remote), shared) for place, remote in zip(wanted, given, strict=True))


def _listed(given: Any, name: str) -> list[Any]:
    """One, or several."""
    if isinstance(given, str | os.PathLike):
        return [given]
    if isinstance(given, bytes) or not isinstance(given, Iterable):
        raise _nonsense(name, given)
    return list(given)


def _text(given: Any, name: str) -> str:
    text = os.fspath(given) if isinstance(given, str | os.PathLike) else None
    if not isinstance(text, str) or not text or "\0" in text:
        raise _nonsense(name, given)
    return text


def _place(given: Any) -> ClaimedPath:
    path = _text(given, "dirs")
    if urls.is_url(path):
        raise errors.ConfigError(
            f"dirs: {path!r} is a URL: local directories come first, then what they are filled from", name="dirs", value=path
        )
    try:
        return records.canonical(os.path.expanduser(path))
    except (OSError, UnicodeEncodeError) as error:
        why = error.strerror if isinstance(error, OSError) else error.reason
        message = f"dirs: {path[:100]!r} cannot be looked at: {why}"
        raise errors.ConfigError(message, name="dirs", value=path) from error


def _nonsense(name: str, value: Any) -> errors.ConfigError:
    what = "local directories: paths as text, or one alone" if name == "dirs" else "a URL or None for each directory"
    return errors.ConfigError(f"{name}: {value!r} makes no sense: wanted are {what}", name=name, value=repr(value))


def _redacted(remote: Any) -> str | None:
    if remote is None:
        return None
    return urls.canonical(_text(remote, "remotes"))


def opened(registry: Registry, held: Held, world: World) -> Claim:
    """What the registry gave, as a `Claim` of this process."""
    found = Claim(registry, held, world)
    kept = _open.setdefault(found._identity, found)
    if kept is not found:
        held.members.leave()  # another thread unpickled it in the same moment
    return kept


def _arrive(registry: str, identity: tuple[str, str, int], world: World) -> Claim:
    """A claim that came by pickle: that of this process, if it has it, else it joins now."""
    found = _open.get(identity)
    if found is not None:
        return found
    at = Registry(registry)
    held = at.attach(at.path / identity[0], rank=world.rank)
    if _token(held.record) != identity[1]:
        held.members.leave()
        raise errors.Closed(f"claim {identity[0]} was freed, and its number is another one's by now", what="claim")
    return opened(at, held, world)


def _token(record: Record) -> str:
    """Tells a claim from one that had, or will have, its name."""
    return f"{record.pid} {record.start}"


class Claim:
    """What a job uses on this node: its directories, and shared memory, barriers and locks for its processes. Made by `claim`.

    ``prefix``: a small number that no other live claim of the node has. ``path``: of its directory, in memory. ``job``, ``name``;
    ``directories`` (links resolved), ``remotes`` (free of secrets), ``shared``; ``world``: as this process was told, or found;
    ``is_leader``: whether it made the claim.

    Callable from any thread. A forked child has the claim as well, and so has who unpickles it, at once. An open claim stays, whoever
    refers to it, until `close` or the end of the process: arrays made of it may be in use."""

    def __init__(self, registry: Registry, held: Held, world: World) -> None:
        record = held.record
        self._registry, self._record, self._members = registry, record, held.members
        self._house = ClaimContext(held.members, f"claim {record.prefix:06} of {record.owner}", self)
        self._identity = (held.members.directory.name, _token(record), world.rank)
        self.prefix, self.path, self.job, self.world = record.prefix, held.members.directory, record.job, world
        self.name = record.key.removeprefix("named ")
        self.directories = tuple(stream.place.path for stream in record.streams)
        self.remotes = tuple(stream.remote for stream in record.streams)
        self.shared = all(stream.shared for stream in record.streams)
        self.is_leader = world.is_local_leader

    def array(self, name: str, shape: int | Sequence[int], dtype: Any) -> numpy.ndarray[Any, Any]:
        """An array in shared memory, which all processes that have the claim see under this name: of zeros at first.

        Raises `ClaimMismatch` where another shape or dtype was asked for before, `NoSpace` where /dev/shm is full, `MissingExtra`
        without NumPy. It stays good after `close`, and after the claim was freed."""
        from forebay.claims import shared

        return shared.array(self._house, name, shape, dtype)

    def scalar(self, name: str, dtype: Any) -> Scalar:
        """One value in shared memory, with ``get()`` and ``set(value)``: see `array`."""
        from forebay.claims import shared

        return shared.scalar(self._house, name, dtype)

    def buffer(self, name: str, size: int) -> memoryview:
        """``size`` bytes of shared memory, writable: see `array`."""
        from forebay.claims import shared

        return shared.buffer(self._house, name, size)

    def barrier(self, name: str) -> Barrier:
        """Where ``parties`` processes or threads wait for each other: ``wait(parties, timeout=None)``, any number of times."""
        from forebay.claims.barriers import Barrier

        return Barrier(self._house, name)

    def lock(self, name: str, timeout: float | None = None) -> NamedLock:
        """A lock for a ``with``, which one thread of one process has at a time; death frees it. ``timeout``: then `WaitTimeout`."""
        from forebay.claims.shared import NamedLock

        return NamedLock(self._house, name, _config.parse_timeout(timeout))

    # -- life ------------------------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether this process gave the claim back."""
        return self._members.has_left

    def close(self) -> None:
        """Give the claim back, of this process alone: the last one frees it. What was made of it stays good."""
        _open.pop(self._identity, None)
        if not self.closed:
            from forebay.claims import shared

            shared.close(self._house)
            self._members.leave()

    def let_go(self) -> None:
        """The same for finalizers, which may run inside anything: never waits."""
        _open.pop(self._identity, None)
        self._members.leave_soon()

    def __enter__(self) -> Self:
        self._house.check()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        self._house.check()
        return _arrive, (str(self._registry.path), self._identity, self.world)

    def __repr__(self) -> str:
        return f"<forebay.Claim {self.prefix:06} of {', '.join(self.directories)}{' closed' if self.closed else ''}>"


# -- of all jobs -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ClaimInfo:
    """A claim of the node. ``pids``: who has it now, and ``leader``, who made it, as far as we may know. ``started``: seconds since 1970;
    ``age``: seconds. ``bytes``: of its shared memory; None where that is not shown to us. ``live``: somebody has it. What a damaged
    one does not tell is empty, 0, or None."""

    prefix: int
    job: str
    name: str
    user: str
    uid: int
    pids: tuple[int, ...]
    leader: int | None
    started: float
    age: float
    directories: tuple[str, ...]
    remotes: tuple[str | None, ...]
    shared: bool
    bytes: int | None
    live: bool
    command: str


def list_claims() -> list[ClaimInfo]:
    """The claims of this node, of all users and jobs, live and dead, by their number. Raises `RootError`."""
    with _looking():
        registry = _known()
        return [] if registry is None else [_info(seen) for seen in registry.look()]


def prune_claims() -> list[ClaimInfo]:
    """Free now what dead jobs of this user left; the user's next claim would do the same. Gives what was freed; a claim that any living
    process has is never touched. Raises `RootError`, `WaitTimeout`."""
    with _looking():
        registry = _known()
        if registry is None:
            return []
        dead = [_info(seen) for seen in registry.look() if not seen.live]
        freed = {(seen.prefix, seen.uid) for seen in registry.prune()}
        return [info for info in dead if (info.prefix, info.uid) in freed]


@contextmanager
def _looking() -> Iterator[None]:
    """What the system refuses, such as one more open file, as a `RootError`."""
    try:
        yield
    except OSError as error:
        if isinstance(error, errors.ForebayError):
            raise
        path = str(default_registry())
        raise errors.RootError(f"the claims in {path} cannot be looked at: {error.strerror}", path=path) from error


def _known() -> Registry | None:
    """The registry of the node; None where nobody has claimed yet: looking makes nothing."""
    return Registry() if os.path.lexists(default_registry()) else None


def _info(seen: ClaimState) -> ClaimInfo:
    from forebay.claims.records import user_name

    record = seen.record
    told: dict[str, Any] = {
        "prefix": seen.prefix, "uid": seen.uid, "user": user_name(seen.uid), "pids": tuple(seen.pids()), "bytes": seen.memory(),
        "live": seen.live,
    }  # fmt: skip
    if record is None:
        nothing: dict[str, Any] = {"job": "", "name": "", "leader": None, "started": 0.0, "age": 0.0, "directories": (), "remotes": ()}
        return ClaimInfo(**told, **nothing, shared=False, command="")
    return ClaimInfo(
        **told, job=record.job, name=record.key.removeprefix("named "), leader=record.pid, started=record.start,
        age=max(time.time() - record.start, 0.0), directories=tuple(stream.place.path for stream in record.streams),
        remotes=tuple(stream.remote for stream in record.streams), shared=all(stream.shared for stream in record.streams),
        command=record.command,
    )  # fmt: skip
