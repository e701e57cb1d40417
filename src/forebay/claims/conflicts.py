"""Requests for claims, whether two claims may exist side by side, and the messages if they may not."""

from __future__ import annotations

import hashlib
import os
import socket
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from forebay import errors
from forebay._logs import logger
from forebay.claims import processes, records
from forebay.claims.processes import JobId
from forebay.claims.records import ClaimedPath, ClaimedStream, ExternalFiles, Record
from forebay.remote import urls
from forebay.world import World

log = logger("forebay.claims")

_LONGEST = 300  # characters of a command
_MOST = 16  # directories of a claim that a message lists
_ADVICE = "give this job a directory of its own, wait until the other one ends, or, if both only read the same remote, pass shared=True"
_ADVICE_SAME_PROCESS = (
    "give each claim a directory of its own, close the other first, or, if both only read the same remote, pass shared=True"
)
_ADVICE_RANKS = "; if both are ranks of one job, tell each which it is (world=), or initialise torch.distributed first"


class Beside(Protocol):
    """The files that a claim is to have outside its directory. All but `check` is called under the registry's lock, and must be quick."""

    def check(self) -> None:
        """Raises `ClaimConflict` if something other than a claim uses a directory."""
        ...

    def is_free(self, prefix: int) -> bool:
        """Whether a claim may have this number."""
        ...

    def files(self, prefix: int) -> ExternalFiles:
        """Return the files that are removed with the claim."""
        ...

    def create_marker(self, prefix: int, directory: int) -> None:
        """Create the marker, as `MARKER` in the claim's directory and under its name outside. Raises FileExistsError, OSError."""
        ...


class ClaimRequest(NamedTuple):
    """A request for a claim. ``key``: the name or number of the claim in its ``job``. ``world``: which rank this process is, if any.
    ``equal_only``: a directory inside another one is no conflict. ``conflict_timeout``: seconds for which a conflict may pass. ``spared``:
    claims, by the names of their directories, whose working directories this process gave up."""

    job: JobId
    key: str
    streams: tuple[ClaimedStream, ...]
    world: World | None = None
    equal_only: bool = False
    beside: Beside | None = None
    conflict_timeout: float = 0.0
    spared: frozenset[str] = frozenset()

    @property
    def rank(self) -> int | None:
        return None if self.world is None else self.world.rank

    def __str__(self) -> str:
        """The claim as messages name it."""
        return f"claim {self.key} of {records.owner(self.job.name)}"

    @property
    def tag(self) -> str:
        """The suffix of the name of the claim's directory: equal in all ranks, different for other users."""
        return hashlib.blake2b(f"{os.geteuid()}\0{self.job.id}\0{self.key}".encode(errors="surrogatepass"), digest_size=8).hexdigest()

    def record(self, prefix: int) -> Record:
        """Return what the claim publishes about itself, with this number."""
        beside = self.beside.files(prefix) if self.beside is not None and prefix >= 0 else None
        own, world = processes.own(), None if self.world is None else self.world.to_json()
        return Record(
            prefix, self.job.name, self.job.how, self.key, os.geteuid(), socket.gethostname(), os.getpid(), own.space, own.start,
            processes.mount_space(), time.time(), own.command, self.streams, world, beside,
        )  # fmt: skip


# -- comparing ---------------------------------------------------------------------------------------------------------


def find_conflict(ours: Record, theirs: Record, uid: int, *, equal_only: bool = False) -> tuple[ClaimedStream, ClaimedStream] | None:
    """Return a directory of ours that is to be filled from a remote, and the one of theirs that it overlaps; None if there is none.

    ``uid``: the user whose claim theirs is, whatever it says: one on directories that this user may not write to does not count.
    ``equal_only``: nor do directories one inside the other."""
    meets = records.same if equal_only else records.overlap
    filled = [stream for stream in ours.streams if stream.remote is not None]
    for number, theirs_number in _candidates([stream.directory for stream in filled], [stream.directory for stream in theirs.streams]):
        mine, other = filled[number], theirs.streams[theirs_number]
        if not meets(mine.directory, other.directory) or _both_only_read(mine, other):
            continue
        now = _current(theirs, other.directory)
        if not meets(mine.directory, now):
            continue
        # What a record of another mount namespace says of its own directory cannot be checked here.
        is_inside = records.is_above(mine.directory, now) and theirs.mounts == processes.mount_space()
        if uid == os.geteuid() or records.may_write(uid, now if is_inside else mine.directory):
            return mine, other
        log.warning("%s is no conflict: user %s may not write to %s", describe(theirs, []), uid, mine.directory.path)
    return None


def _candidates(ours: Sequence[ClaimedPath], theirs: Sequence[ClaimedPath]) -> Iterator[tuple[int, int]]:
    """Yield the indexes of the pairs that may overlap. Comparing each with each takes 3 us a pair, a second for many directories."""
    numbers = defaultdict(list)
    for number, other in enumerate(theirs):
        for mark in records.marks([other]):
            numbers[mark].append(number)
    for number, mine in enumerate(ours):
        found = (numbers.get(mark, ()) for mark in records.opposite(records.marks([mine])))
        yield from ((number, other) for other in sorted(set().union(*found)))


def repeated(directories: Sequence[ClaimedPath]) -> list[tuple[int, int]]:
    """Return the index of each directory that equals an earlier one, after the index of the earlier one."""
    first = {number: number for number in range(len(directories))}
    for number, other in _candidates(directories, directories):
        if other < first[number] and records.same(directories[number], directories[other]):
            first[number] = other
    return [(earlier, number) for number, earlier in first.items() if earlier != number]


def _both_only_read(ours: ClaimedStream, theirs: ClaimedStream) -> bool:
    if not ours.shared or ours.remote != theirs.remote or urls.is_masked(ours.remote or ""):  # what is masked may differ
        return False
    return records.same(ours.directory, theirs.directory)


def _current(record: Record, directory: ClaimedPath) -> ClaimedPath:
    """Return where their directory is now: it may have been removed and its inode reused. Their paths mean nothing here if their process
    has another mount namespace."""
    if record.mounts != processes.mount_space():
        return directory
    try:
        return records.canonical(directory.path)
    except OSError:
        return directory


def mismatch(ours: tuple[ClaimedStream, ...], leaders: tuple[ClaimedStream, ...]) -> str | None:
    """Describe how the arguments of a rank differ from its leader's; None if they agree."""
    if len(ours) != len(leaders):
        return f"{len(ours)} directories here, {len(leaders)} there"
    for number, (mine, other) in enumerate(zip(ours, leaders, strict=True)):
        which = f"directory {number}" if len(ours) > 1 else "the directory"
        if mine.directory.path != other.directory.path and not records.same(mine.directory, other.directory):
            return f"{which} is {mine.directory.path} here, {other.directory.path} there"
        if mine.remote != other.remote:
            return f"the remote of {mine.directory.path} is {mine.remote} here, {other.remote} there"
        if mine.shared != other.shared:
            return f"shared={mine.shared} here, shared={other.shared} there"
    return None


# -- messages ----------------------------------------------------------------------------------------------------------


def conflict_error(ours: Record, theirs: Record, pids: list[int], conflict: tuple[ClaimedStream, ClaimedStream]) -> errors.ClaimConflict:
    """Return the error for two claims of one directory. ``pids``: the processes that have the other claim."""
    mine, other = (stream.directory.path for stream in conflict)
    what = f"{mine} is taken" if mine == other else f"{mine} overlaps with {other}, which is taken"
    same_process = ours.pid in pids and (ours.pid, ours.ticks, ours.space) == (theirs.pid, theirs.ticks, theirs.space)
    advice = _ADVICE_SAME_PROCESS if same_process else _ADVICE
    if ours.job != theirs.job and ours.how == theirs.how and "only rank" in ours.how:
        advice += _ADVICE_RANKS
    job = "the same job" if ours.job == theirs.job else "another job"
    holder = f"the same process, by claim {theirs.prefix:06}" if same_process else f"claim {theirs.prefix:06} of {job} on this node"
    return _error(f"{what} by {holder}", ours, theirs, pids, advice)


def two_leaders_error(ours: Record, theirs: Record, pids: list[int]) -> errors.ClaimConflict:
    """Return the error for two ranks that both say that they are the first of their node."""
    state = f"is process {theirs.pid} already"
    advice = "give each process its rank (world=), or each job a name of its own (job=)"
    if theirs.pid not in pids:
        state, advice = f"was process {theirs.pid}, which ended before others of its job", "wait until they end, or end them"
    return _error(
        f"the first rank of this node for claim {ours.key} of {records.owner(ours.job)} (known by {ours.how}) {state}",
        ours, theirs, pids, advice,
    )  # fmt: skip


def _error(what: str, ours: Record, theirs: Record, pids: list[int], advice: str) -> errors.ClaimConflict:
    message = f"{what}\n  requested by {describe(ours, [ours.pid])}\n  held by {describe(theirs, pids)}\n{advice}"
    return errors.ClaimConflict(message, ours=_facts(ours, [ours.pid]), theirs=_facts(theirs, pids))


def _facts(record: Record, pids: list[int]) -> dict[str, Any]:
    """Return a claim as plain values."""
    return {
        "job": record.job,
        "directories": [stream.directory.path for stream in record.streams],
        "remotes": [stream.remote for stream in record.streams],
        "pids": pids,
        "user": records.user_name(record.uid),
        "started": record.start,
        "command": record.command,
    }


def describe(record: Record, pids: list[int]) -> str:
    """Return a claim in one line. ``pids``: the processes that have it."""
    streams = [f"{s.directory.path} from {s.remote}" if s.remote is not None else s.directory.path for s in record.streams[:_MOST]]
    if len(record.streams) > _MOST:
        streams.append(f"{len(record.streams) - _MOST:,} more")
    started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.start))
    ended = f"process {record.pid}, which ended"
    holders = f"process{'es' if len(pids) > 1 else ''} {', '.join(map(str, pids))}" if pids else ended
    command = processes.shortened(record.command, _LONGEST) or "?"
    who = f"{records.owner(record.job)}: {holders} of {records.user_name(record.uid)} on {record.host}"
    return f"{who} since {started}, for {', '.join(streams)}: {command}"
