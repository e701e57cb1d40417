"""What is asked of the registry, whether two claims can stand side by side, and in which words it is told if they cannot."""

from __future__ import annotations

import hashlib
import os
import socket
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from forebay import errors
from forebay.claims import processes, records
from forebay.claims.records import Beside, ClaimedPath, ClaimedStream, Record


class Outside(Protocol):
    """What a claim is to have outside of its directory. Called under the registry's lock."""

    def free(self, prefix: int) -> bool:
        """Whether a claim may have this number. Raises `ClaimConflict` where a directory is taken by what is no claim."""
        ...

    def names(self, prefix: int) -> Sequence[str]:
        """Absolute paths of the files that go with the claim. The first is the landmark, which comes with it too."""
        ...

    def content(self, prefix: int) -> bytes:
        """What the landmark holds."""
        ...


class ClaimRequest(NamedTuple):
    """``key``: the name or number of the claim in its ``job``, which is known by ``how``, and to people as ``name``. ``equal_only``: that a
    directory lies inside of another is no conflict. ``patience``: seconds for which a conflict is hoped to pass. ``spared``: claims, by
    the names of their directories, whose working directories this process gave up."""

    job: str
    how: str
    key: str
    streams: tuple[ClaimedStream, ...]
    world: dict[str, Any] | None = None
    rank: int | None = None
    worker: int | None = None
    equal_only: bool = False
    outside: Outside | None = None
    patience: float = 0.0
    name: str = ""
    spared: frozenset[str] = frozenset()

    @property
    def owner(self) -> str:
        """The job in words for people."""
        return records.owner(self.name or self.job)

    @property
    def tag(self) -> str:
        """Ends the name of the claim's directory: the same in all ranks, and in no other user's."""
        return hashlib.blake2b(f"{os.geteuid()}\0{self.job}\0{self.key}".encode(errors="surrogatepass"), digest_size=8).hexdigest()

    def record(self, prefix: int) -> Record:
        """What the claim tells of itself, with this number."""
        beside = None
        if self.outside is not None and prefix >= 0:
            landmark, *paths = self.outside.names(prefix)
            beside = Beside(tuple(paths), landmark)
        return Record(
            prefix, self.name or self.job, self.how, self.key, os.geteuid(), socket.gethostname(), os.getpid(), processes.pid_space(),
            processes.own_start(), processes.mount_space(), time.time(), processes.own_command(), self.streams, self.world, beside,
        )  # fmt: skip


_LONGEST = 300  # of a command
_MOST = 16  # directories of a claim that are told
_WHAT_TO_DO = "give this job a directory of its own, wait until the other one ends, or, if both only read the same remote, say shared=True"
_WHAT_TO_DO_ALONE = "give each claim a directory of its own, close the other first, or, if both only read the same remote, say shared=True"
_OR_RANKS = "; if both are ranks of one job, tell each which it is (world=), or initialise torch.distributed first"


def conflict(ours: Record, theirs: Record, *, equal_only: bool = False) -> tuple[ClaimedStream, ClaimedStream] | None:
    """A directory of ours that is to be filled from a remote, and the one of theirs that it overlaps with; None where there is none.

    ``equal_only``: directories one inside the other do not count."""
    meets = records.same if equal_only else records.overlap
    for stream, other in _near([stream for stream in ours.streams if stream.remote is not None], theirs.streams):
        if meets(stream.place, other.place) and not _both_only_read(stream, other) and meets(stream.place, _now(theirs, other.place)):
            return stream, other
    return None


def _near(ours: Sequence[ClaimedStream], theirs: Sequence[ClaimedStream]) -> Iterator[tuple[ClaimedStream, ClaimedStream]]:
    """The pairs that may overlap. To compare each with each takes 3 us, which of many directories is a second."""
    seen, above = defaultdict(list), defaultdict(list)
    for number, other in enumerate(theirs):
        for level, names in _seen(other.place):
            seen[level, names].append(number)
            for depth in range(len(names) + 1):
                above[level, names[:depth]].append(number)
    for stream in ours:
        found: set[int] = set()
        for level, names in _seen(stream.place):
            found.update(above.get((level, names), ()))
            found.update(*(seen.get((level, names[:depth]), ()) for depth in range(len(names))))
        yield from ((stream, theirs[number]) for number in sorted(found))


def _seen(place: ClaimedPath) -> Iterator[tuple[records.Level, tuple[str, ...]]]:
    """A place as each directory that is there sees it, of itself and those above."""
    return ((level, place.names[depth:]) for depth, level in enumerate(place.levels))


def repeated(places: Sequence[ClaimedPath]) -> list[tuple[int, int]]:
    """The numbers of those places that are the same as one before, after that one's."""
    first: dict[tuple[records.Level, tuple[str, ...]], int] = {}
    found = []
    for number, place in enumerate(places):
        before = min((first[seen] for seen in _seen(place) if seen in first), default=None)
        if before is not None:
            found.append((before, number))
        first |= {seen: number for seen in _seen(place) if seen not in first}
    return found


def _both_only_read(ours: ClaimedStream, theirs: ClaimedStream) -> bool:
    return ours.shared and ours.remote == theirs.remote and records.same(ours.place, theirs.place)


def _now(record: Record, place: ClaimedPath) -> ClaimedPath:
    """Where their directory is now: it may have been removed, and its number given to another. Their names for it may not be ours, if
    they see other file systems."""
    if record.mounts != processes.mount_space():
        return place
    try:
        return records.canonical(place.path)
    except OSError:
        return place


def mismatch(ours: tuple[ClaimedStream, ...], leaders: tuple[ClaimedStream, ...]) -> str | None:
    """What a rank says otherwise than its leader, in words; None where they agree."""
    if len(ours) != len(leaders):
        return f"{len(ours)} directories here, {len(leaders)} there"
    for number, (mine, other) in enumerate(zip(ours, leaders, strict=True)):
        which = f"directory {number}" if len(ours) > 1 else "the directory"
        if mine.place.path != other.place.path and not records.same(mine.place, other.place):
            return f"{which} is {mine.place.path} here, {other.place.path} there"
        if mine.remote != other.remote:
            return f"the remote of {mine.place.path} is {mine.remote} here, {other.remote} there"
        if mine.shared != other.shared:
            return f"shared={mine.shared} here, shared={other.shared} there"
    return None


def facts(record: Record, pids: list[int]) -> dict[str, Any]:
    """A claim in plain values."""
    return {
        "job": record.job,
        "directories": [stream.place.path for stream in record.streams],
        "remotes": [stream.remote for stream in record.streams],
        "pids": pids,
        "user": record.user,
        "started": record.start,
        "command": record.command,
    }


def in_conflict(ours: Record, theirs: Record, pids: list[int], found: tuple[ClaimedStream, ClaimedStream]) -> errors.ClaimConflict:
    """The error of two claims that want the same."""
    mine, other = (stream.place.path for stream in found)
    what = f"{mine} is taken" if mine == other else f"{mine} overlaps with {other}, which is taken"
    alone = ours.pid in pids and (ours.pid, ours.ticks, ours.space) == (theirs.pid, theirs.ticks, theirs.space)
    todo = _WHAT_TO_DO_ALONE if alone else _WHAT_TO_DO
    if ours.job != theirs.job and ours.how == theirs.how and "only rank" in ours.how:
        todo += _OR_RANKS
    job = "the same job" if ours.job == theirs.job else "another job"
    whom = f"the same process, by claim {theirs.prefix:06}" if alone else f"claim {theirs.prefix:06} of {job} on this node"
    return errors.ClaimConflict(_told(f"{what} by {whom}", ours, theirs, pids, todo), **_facts(ours, theirs, pids))


def claimed_twice(ours: Record, theirs: Record, pids: list[int]) -> errors.ClaimConflict:
    """The error of two ranks that both say they lead."""
    who = f"is process {theirs.pid} already"
    todo = "give each process its rank (world=), or each job a name of its own (job=)"
    if theirs.pid not in pids:
        who, todo = f"was process {theirs.pid}, which has gone before others of its job", "wait until they end, or end them"
    what = f"the first rank of this node for claim {ours.key} of {ours.owner} (known by {ours.how}) {who}"
    return errors.ClaimConflict(_told(what, ours, theirs, pids, todo), **_facts(ours, theirs, pids))


def _told(what: str, ours: Record, theirs: Record, pids: list[int], todo: str) -> str:
    return f"{what}\n  wanted by {describe(ours, [ours.pid])}\n  held by {describe(theirs, pids)}\n{todo}"


def _facts(ours: Record, theirs: Record, pids: list[int]) -> dict[str, Any]:
    return {"ours": facts(ours, [ours.pid]), "theirs": facts(theirs, pids)}


def describe(record: Record, pids: list[int]) -> str:
    """A claim in one line."""
    streams = [f"{s.place.path} from {s.remote}" if s.remote is not None else s.place.path for s in record.streams[:_MOST]]
    if len(record.streams) > _MOST:
        streams.append(f"{len(record.streams) - _MOST:,} more")
    started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.start))
    who = f"{'process' if len(pids) == 1 else 'processes'} {', '.join(map(str, pids))}" if pids else f"process {record.pid}, which ended"
    command = processes.shortened(record.command, _LONGEST) or "?"
    return f"{record.owner}: {who} of {record.user} on {record.host} since {started}, for {', '.join(streams)}: {command}"
