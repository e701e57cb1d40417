"""Claims: which local directories and which shared memory belong to which job of this node.

A claim lives as long as any process has it, and is then freed without any action. It needs no cache: call `forebay.claim`.
"""

from __future__ import annotations

import errno
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
from forebay._kernel import greenlets
from forebay._kernel.interrupts import guarded, guarded_methods, undone_by
from forebay._model import exact_str
from forebay.claims import conflicts, records, shared
from forebay.claims.barriers import Barrier
from forebay.claims.conflicts import ClaimRequest
from forebay.claims.members import Members
from forebay.claims.processes import identify
from forebay.claims.records import ClaimedPath, ClaimedStream, Record
from forebay.claims.registry import ClaimState, Registry
from forebay.claims.registry import default as default_registry
from forebay.claims.shared import NamedLock, Scalar
from forebay.remote import urls
from forebay.world import World as World

if TYPE_CHECKING:
    import numpy

PathLike: TypeAlias = str | os.PathLike[str]
_REFUSED = frozenset((errno.ENOSYS, errno.EPERM, errno.EOPNOTSUPP))
"""What the kernel, a sandbox or a file system answers to calls that it does not offer."""
# Each use of these tables is a single call, which needs no lock: a forked child could inherit a held one.
# Their keys include the rank, since a forked process may be another rank than its parent, and inherits the parent's tables.
_counts: dict[tuple[Path, str, int], itertools.count[int]] = {}  # numbers of the claims without a name
_open: dict[tuple[str, str, int], Claim] = {}  # this process's claims; kept, since arrays made from one may be in use


@undone_by(lambda made: made.close())
def claim(
    dirs: PathLike | Sequence[PathLike], remotes: str | Sequence[str | None] | None = None, world: World | None = None,
    job: str | None = None, *, name: str | None = None, shared: bool = False, timeout: float | None = 60.0,
) -> Claim:  # fmt: skip
    """Register what this job uses on this node. All ranks of the job call this, and share one claim.

    ``dirs``: the local working directories, which need not exist yet; none for shared memory alone. ``remotes``: the URL that each is
    filled from, or None; only directories with a remote must be exclusive to this job. ``world``: which rank this is (default:
    `World.detect`). ``job``: a name shared by the ranks of this job, needed if no launcher provides one. ``name``: which of the job's
    claims this is (default: each rank's first call means the first claim, and so on). ``shared``: this job only reads the directories, and
    shares them with jobs that read the same remote. ``timeout``: seconds to wait for the node's first rank, or for a job that is ending.

    Raises `ClaimConflict` (a ValueError) if another live claim has such a directory, or one above or below it; `ClaimMismatch` (a
    RuntimeError) if a rank's arguments differ from those of the first rank; `Closed` if the claim's directory is removed during the call;
    `ConfigError`, `WaitTimeout`, `NoSpace`, `RootRefused`, `NoLocks`. The claim is freed when its last process closes it or ends."""
    greenlets.look()
    streams = _streams(dirs, remotes, shared)
    world = World.detect() if world is None else world
    if not isinstance(world, World):
        raise errors.ConfigError(f"world={world!r}: must be a World, or None", name="world", value=repr(world))
    seconds = _config.parse_timeout(timeout)
    identified = identify(job, world)
    registry = Registry()
    if name is None:
        key = str(next(_counts.setdefault((registry.path, identified.id, world.rank), itertools.count())))
    elif text := exact_str(name):
        key = f"named {text}"
    else:
        raise errors.ConfigError(f"name={name!r}: must be a non-empty text", name="name", value=repr(name))
    request = ClaimRequest(identified, key, streams, world)
    try:
        members = registry.register(request, seconds) if world.is_local_leader else registry.join(request, seconds)
    except OSError as error:
        if isinstance(error, errors.ForebayError) or error.errno not in _REFUSED:
            raise
        message = f"{registry.path} cannot hold the claims of this node: the system refuses what they need: {error}"
        raise errors.RootRefused(message, path=str(registry.path)) from error
    return opened(registry, members, world)


def _streams(
    dirs: PathLike | Sequence[PathLike], remotes: PathLike | Sequence[PathLike | None] | None, shared: bool
) -> tuple[ClaimedStream, ...]:
    paths = _listed(dirs, "dirs")
    directories = [_directory(path) for path in paths]
    sources = [None] * len(directories) if remotes is None else _listed(remotes, "remotes")
    if len(sources) != len(directories):
        raise errors.ConfigError(
            f"{len(directories)} directories, but {len(sources)} remotes: one each, or None", name="remotes", value=len(sources)
        )
    repeated = [f"{paths[first]} and {paths[other]}" for first, other in conflicts.repeated(directories)]
    if repeated:
        message = f"each directory may appear once in a claim, but these are repeated: {', '.join(repeated)}"
        raise errors.ConfigError(message, name="dirs", value=repeated)
    return tuple(
        ClaimedStream(directory, None if remote is None else urls.canonical(_text(remote, "remotes")), shared)
        for directory, remote in zip(directories, sources, strict=True)
    )


def _listed(value: Any, name: str) -> list[Any]:
    """Return one value, or several, as a list."""
    if isinstance(value, str | os.PathLike):
        return [value]
    if isinstance(value, bytes) or not isinstance(value, Iterable):
        raise _wrong_type(name, value)
    return list(value)


def _text(value: Any, name: str) -> str:
    text = exact_str(os.fspath(value)) if isinstance(value, str | os.PathLike) else None
    if not text or "\0" in text:
        raise _wrong_type(name, value)
    return text


def _directory(value: Any) -> ClaimedPath:
    path = _text(value, "dirs")
    if urls.is_url(path):
        raise errors.ConfigError(
            f"dirs: {path!r} is a URL: pass the local directories first, then the remotes they are filled from", name="dirs", value=path
        )
    try:
        return records.canonical(_config.expand_user(path, "dirs"))
    except (OSError, UnicodeEncodeError) as error:
        why = error.strerror if isinstance(error, OSError) else error.reason
        message = f"dirs: {path[:100]!r} cannot be read: {why}"
        raise errors.ConfigError(message, name="dirs", value=path) from error


def _wrong_type(name: str, value: Any) -> errors.ConfigError:
    what = "a local directory or several, as text or paths" if name == "dirs" else "a URL or None for each directory"
    return errors.ConfigError(f"{name}: {value!r} is invalid: must be {what}", name=name, value=repr(value))


def opened(registry: Registry, members: Members, world: World) -> Claim:
    """Return this process's `Claim` for what the registry returned."""
    new = Claim(registry, members, world)
    existing = _open.setdefault(new._identity, new)
    if existing is not new:
        members.leave()  # another thread unpickled it at the same moment
    return existing


def _unpickle(registry: str, identity: tuple[str, str, int], world: World) -> Claim:
    """Return this process's claim if it has it; else join it now."""
    existing = _open.get(identity)
    return existing if existing is not None else _join(registry, identity, world)


@undone_by(lambda joined: joined.close())
def _join(registry: str, identity: tuple[str, str, int], world: World) -> Claim:
    """Join the claim of another process."""
    at = Registry(registry)
    members = at.attach(at.path / identity[0], rank=world.rank)
    if _token(members.record) != identity[1]:
        members.leave()
        raise errors.Closed(f"claim {identity[0]} was freed, and another claim has its number now", what="claim")
    return opened(at, members, world)


def _token(record: Record) -> str:
    """Tell a claim from earlier and later ones of its name."""
    return f"{record.pid} {record.start}"


@guarded_methods("closed")
class Claim:
    """What a job uses on this node: its directories, and shared memory, barriers and locks for its processes. Made by `claim`.

    ``prefix``: a small number that no other live claim of the node has. ``path``: its directory, in memory. ``job``, ``name``, ``shared``:
    as for `claim`. ``directories``: its directories, links resolved. ``remotes``: their remotes, without secrets. ``world``: as given or
    detected in this process. ``is_leader``: whether this process created the claim.

    Callable from any thread. A forked child has the claim at once, as does a process that unpickles it. An open claim stays until `close`
    or the end of the process, even if nothing refers to it: arrays made from it may be in use."""

    def __init__(self, registry: Registry, members: Members, world: World) -> None:
        record = members.record
        self._registry, self._members, members.claim = registry, members, self
        self._identity = (members.directory.name, _token(record), world.rank)
        self.prefix, self.path, self.job, self.world = record.prefix, members.directory, record.job, world
        self.name = record.key.removeprefix("named ")
        self.directories = tuple(stream.directory.path for stream in record.streams)
        self.remotes = tuple(stream.remote for stream in record.streams)
        self.shared = all(stream.shared for stream in record.streams)
        self.is_leader = world.is_local_leader

    def array(self, name: str, shape: int | Sequence[int], dtype: Any) -> numpy.ndarray[Any, Any]:
        """Return the array in shared memory that has this name in all processes of the claim; initially zeros.

        Raises `ClaimMismatch` if another shape or dtype was requested before, `NoSpace` if /dev/shm is full, `MissingExtra` without NumPy.
        The array stays valid after `close`, and after the claim is freed."""
        return shared.array(self._members, name, shape, dtype)

    def scalar(self, name: str, dtype: Any) -> Scalar:
        """Return one value in shared memory, with ``get()`` and ``set(value)``: see `array`."""
        return shared.scalar(self._members, name, dtype)

    def buffer(self, name: str, size: int) -> memoryview:
        """Return ``size`` writable bytes of shared memory: see `array`."""
        return shared.buffer(self._members, name, size)

    def barrier(self, name: str) -> Barrier:
        """Return a barrier at which ``parties`` processes or threads wait for each other with ``wait(parties, timeout=None)``. Reusable."""
        return Barrier(self._members, name)

    def lock(self, name: str, timeout: float | None = None) -> NamedLock:
        """Return a lock for a ``with`` block, held by one thread of one process at a time, and released if its holder dies. Entering raises
        `WaitTimeout` after ``timeout`` seconds."""
        return NamedLock(self._members, name, _config.parse_timeout(timeout))

    @property
    def closed(self) -> bool:
        """Whether this process closed the claim."""
        return self._members.has_left

    def close(self) -> None:
        """Close the claim in this process only; the last process frees it. Arrays and buffers made from it stay valid."""
        _open.pop(self._identity, None)
        if not self.closed:
            shared.close(self._members)
            self._members.leave()

    def let_go(self) -> None:
        """Close the claim without ever waiting, for finalizers, which can run at any point."""
        _open.pop(self._identity, None)
        self._members.leave_soon()

    def __enter__(self) -> Self:
        self._members.check()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        self._members.check()
        return _unpickle, (str(self._registry.path), self._identity, self.world)

    def __repr__(self) -> str:
        return f"<forebay.Claim {self.prefix:06} of {', '.join(self.directories)}{' closed' if self.closed else ''}>"


# -- all claims of the node --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ClaimInfo:
    """A claim of the node. In a damaged claim, unknown fields are empty, 0, or None. ``pids``: the processes that have it now, as far as
    this user may know. ``leader``: the one that created it, likewise. ``started``: seconds since 1970. ``age``: seconds. ``bytes``: size of
    its shared memory; None if hidden from this user. ``live``: whether any process has it."""

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


@guarded
def list_claims() -> list[ClaimInfo]:
    """Return the claims of this node, of all users and jobs, live and dead, ordered by number. Raises `RootError`."""
    with _existing_registry() as registry:
        return [] if registry is None else [_info(state) for state in registry.states()]


@guarded
def prune_claims() -> list[ClaimInfo]:
    """Free what dead jobs of this user left, as the user's next claim would, and return the freed claims. Claims that a live process has
    are never touched. Raises `RootError`, `WaitTimeout`."""
    with _existing_registry() as registry:
        if registry is None:
            return []
        dead = [_info(state) for state in registry.states() if not state.live]
        freed = {(state.prefix, state.uid) for state in registry.prune()}
        return [info for info in dead if (info.prefix, info.uid) in freed]


@contextmanager
def _existing_registry() -> Iterator[Registry | None]:
    """Return the registry of the node; None if there is none yet, since listing creates nothing. Turns an OSError, such as too many open
    files, into a `RootError`."""
    try:
        yield Registry() if os.path.lexists(default_registry()) else None
    except OSError as error:
        if isinstance(error, errors.ForebayError):
            raise
        path = str(default_registry())
        raise errors.RootError(f"the claims in {path} cannot be read: {error.strerror}", path=path) from error


def _info(state: ClaimState) -> ClaimInfo:
    record = state.record
    fields: dict[str, Any] = {
        "prefix": state.prefix, "uid": state.uid, "user": records.user_name(state.uid), "pids": tuple(state.pids()),
        "bytes": state.memory(), "live": state.live,
    }  # fmt: skip
    if record is None:
        unknown: dict[str, Any] = {"job": "", "name": "", "leader": None, "started": 0.0, "age": 0.0, "directories": (), "remotes": ()}
        return ClaimInfo(**fields, **unknown, shared=False, command="")
    return ClaimInfo(
        **fields, job=record.job, name=record.key.removeprefix("named "), leader=record.pid, started=record.start,
        age=max(time.time() - record.start, 0.0), directories=tuple(stream.directory.path for stream in record.streams),
        remotes=tuple(stream.remote for stream in record.streams), shared=all(stream.shared for stream in record.streams),
        command=record.command,
    )  # fmt: skip
