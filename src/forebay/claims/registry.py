"""The claims of a node: a directory each, in one that all users share, in memory that a boot clears. Who lives is decided by kernel locks.

A claim is made, and a dead one freed, under the lock of the registry, which is held for a millisecond. Steps, and what is left where
the process dies after each: the directory is made under another name, with its locks held (scrap); it gets its name (a claim that is
dead, as its locks are free). It loses its name (scrap); its files go. Whoever next has the lock removes what is his own scrap, and
frees what is his own and dead.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import stat
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from forebay import errors
from forebay._kernel import host, locks
from forebay._kernel.waits import Wait
from forebay.claims import claim_files, conflicts, inspect, records
from forebay.claims.claim_files import CLAIM, LEADER, NEW, OLD, SLOTS, Gone, scrap_name
from forebay.claims.conflicts import ClaimRequest
from forebay.claims.inspect import ClaimState
from forebay.claims.members import Members, OnLeft, at_the_end
from forebay.claims.processes import passing
from forebay.claims.records import Record

_SHORTEST = 0.0002


class Patience(Wait):
    """One wait, of at most ``timeout`` seconds (None: as long as it takes)."""

    def __init__(self, timeout: float | None, longest: float) -> None:
        super().__init__(timeout)
        self._longest, self._pause = longest, _SHORTEST

    def sleep(self, what: Callable[[], tuple[str, str]]) -> None:
        """Sleep a little. ``what``: what is waited for, and who has it. Raises `WaitTimeout` when the time is up."""
        time.sleep(min(self._pause, self.turn(what)))
        self._pause = min(2 * self._pause, self._longest)


VARIABLE = "FOREBAY_CLAIMS"
DEFAULT = "/dev/shm/forebay-claims"
LOCK = "lock"
_OPEN_TO_ALL = 0o1777
_LONGEST_LOCK_PAUSE = 0.02
_PID = re.compile(rb"([1-9][0-9]{0,9})\n")
_TAKEN = frozenset((errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR))
_UNFIT = frozenset((errno.EACCES, errno.EPERM, errno.EISDIR, errno.ELOOP, errno.ENXIO))


def default() -> Path:
    """Where the environment says. Raises `ConfigError` for what is no absolute path: processes elsewhere would see another one."""
    said = os.environ.get(VARIABLE) or DEFAULT
    if not os.path.isabs(said) or "\0" in said:
        raise errors.ConfigError(f"{VARIABLE}={said}: must be an absolute path", name=VARIABLE, value=said)
    return Path(said)


def prepare(place: Path) -> None:
    """Have the directory, fit for all users. Raises `RootRefused` with what to do."""
    try:
        status = os.lstat(place)
    except FileNotFoundError:
        _make(place)
        status = os.lstat(place)
    if not stat.S_ISDIR(status.st_mode):
        _refuse(place, "it is a symbolic link" if stat.S_ISLNK(status.st_mode) else "it is no directory")
    if status.st_mode & 0o1002 == 0o0002:
        if status.st_uid != os.geteuid():
            _refuse(place, "anybody may remove what others have there (chmod +t)")
        host.chmod(place, _OPEN_TO_ALL)
    if status.st_uid not in (0, os.geteuid()) and status.st_mode & _OPEN_TO_ALL != _OPEN_TO_ALL:
        _refuse(place, f"it is user {status.st_uid}'s alone, and not open to all (chmod 1777)")
    if not os.access(place, os.W_OK | os.X_OK, effective_ids=True):
        _refuse(place, "this user may not write there")
    if not host.is_local(kind := host.fs_kind(place)):
        _refuse(place, f"it lies on a {kind} file system, whose locks other machines may not share")


def _refuse(place: Path, why: str) -> NoReturn:
    raise errors.RootRefused(f"{place} cannot hold the claims of this node: {why}: set {VARIABLE} to a directory that can", path=str(place))


def _make(place: Path) -> None:
    """Under another name first: nobody else may find it with the mode that the umask leaves."""
    new = place.with_name(scrap_name(NEW))
    try:
        for above in [*reversed(place.parents), new]:
            if not os.path.isdir(above):
                host.mkdir(above, 0o700 if above is new else 0o755)
    except OSError as error:
        _refuse(place, f"it cannot be made ({error.strerror})")
    try:
        _make_lock(new / LOCK)
        host.chmod(new, _OPEN_TO_ALL)
        host.rename(new, place)
    except OSError as error:
        host.unlink(new / LOCK)
        host.rmdir(new)
        if error.errno not in _TAKEN:  # else another process was first
            raise


def _make_lock(path: Path) -> None:
    with contextlib.suppress(FileExistsError):
        os.close(host.create(path, 0o666))


def _open_lock(path: Path) -> int:
    try:
        try:
            return host.out_of_the_way(host.open_write(path))  # without O_CREAT: in a sticky directory that is refused for another's file
        except FileNotFoundError:
            _make_lock(path)
            return host.out_of_the_way(host.open_write(path))
    except OSError as error:
        if error.errno in _UNFIT:  # somebody put there what is no file of ours
            _refuse(path.parent, f"{LOCK!r} in it cannot be opened ({error.strerror})")
        raise


def _holder(path: Path, fd: int) -> str:
    """Who has the lock, in words: by /proc, else by what the last holder wrote."""
    if found := locks.holders(path, 0) or locks.posix_holders(path, 0):
        return ", ".join(map(locks.describe_process, found))
    said = _PID.match(os.pread(fd, 16, 0))
    try:
        user = os.stat(f"/proc/{int(said[1])}").st_uid if said else None
    except OSError:
        user = None
    if said is None or user is None:
        return "an unknown process, probably another user's: the superuser sees it in /proc/*/fdinfo"
    return f"{locks.describe_process(int(said[1]))} of user {user}, as {LOCK!r} says, which every user can write to"


@contextlib.contextmanager
def _locked(place: Path, timeout: float | None) -> Iterator[None]:
    """Hold the lock of all claims of the node. Raises `RootRefused`, `WaitTimeout`."""
    patience = Patience(timeout, _LONGEST_LOCK_PAUSE)
    fd = passing.take_in(lambda: _open_lock(place / LOCK))
    try:
        while not locks.take(fd, 0):
            patience.sleep(lambda: ("the list of this node's claims", _holder(place / LOCK, fd) if timeout else "another"))
        with contextlib.suppress(OSError):  # on a full file system: it needs a block, and is only for people
            host.pwrite(fd, f"{os.getpid()}\n".encode().ljust(16), 0)  # the kernel tells other users of no holder
        yield
    finally:
        passing.close(fd, unlocking=1)


REFUSED = "refused."
_REFUSALS = 32
_NONE, _NUMBERS = -1, 1_000_000
_refusals: deque[tuple[int, Path, int]] = deque()


class InTheWay(Exception):
    """Another claim stands against the one that is wanted. ``error``: that in words for the caller; ``seen``: the claim, if it is one."""

    def __init__(self, wanted: ClaimRequest, error: errors.ClaimConflict, seen: ClaimState | None = None) -> None:
        super().__init__(str(error))
        self._wanted, self.error, self.seen = wanted, error, seen

    def __reduce__(self) -> tuple[Any, ...]:
        return InTheWay, (self._wanted, self.error, self.seen)

    def is_ending(self) -> bool:
        """Whether it is about to go."""
        return self.seen is not None and self.seen.is_ending()

    def told(self) -> tuple[str, str]:
        """What is waited for, and who has it."""
        record = self.seen.record if self.seen is not None else None
        who = conflicts.describe(record, self.seen.pids()) if self.seen is not None and record is not None else "another job"
        return f"claim {self._wanted.key} of {self._wanted.owner}", who


def _is_ours(path: Path) -> bool:
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return False
    return status.st_uid == os.geteuid() and stat.S_ISDIR(status.st_mode)


def _is_free(wanted: ClaimRequest, prefix: int) -> bool:
    try:
        return wanted.outside is None or wanted.outside.free(prefix)
    except errors.ClaimConflict as error:
        raise InTheWay(wanted, error) from None


class Held(NamedTuple):
    """A claim that this process has."""

    record: Record
    members: Members


class LockedRegistry:
    """What is in the registry. Good only as long as the lock is held; afterwards what is in `scrap` is to be removed."""

    def __init__(self, path: Path, scrap: list[Path]) -> None:
        self._path, self.names, self.scrap = path, os.listdir(path), scrap
        for name in self.names:
            if name.startswith((NEW, OLD)) and _is_ours(path / name):
                self._scrap(path / name)
            elif name.startswith(REFUSED) and _is_ours(path / name):
                self.free(path / name)  # where who refused is gone

    def make_way(self, wanted: ClaimRequest) -> set[int]:
        """The numbers that are taken; our own dead claims are freed on the way. Raises `InTheWay` where one that lives has the same name,
        or a directory that is wanted."""
        asked = records.marks(stream.place for stream in wanted.streams if stream.remote is not None).asked
        taken, own = set(), wanted.tag
        registry = os.open(self._path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for name, prefix, tag in inspect.parse(self.names):
                found = inspect.glance(name, registry)
                if found is None:
                    if self.free(self._path / name) or not os.path.isdir(self._path / name):
                        continue  # its number can be had; that of another user's dead claim cannot
                elif tag == own or records.may_meet(found, asked):
                    self._check(wanted, name)
                taken.add(prefix)
        finally:
            os.close(registry)
        return taken

    def _check(self, wanted: ClaimRequest, name: str) -> None:
        other = inspect.look_at(self._path, name)
        if other is None or other.record is None:
            return
        ours = wanted.record(_NONE)
        if other.tag == wanted.tag and other.uid == os.geteuid():
            raise InTheWay(wanted, conflicts.claimed_twice(ours, other.record, other.pids()), other)
        found = conflicts.conflict(ours, other.record, equal_only=wanted.equal_only)
        if found is None or name in wanted.spared:
            return
        if other.record.beside is None or not claim_files.is_released(other.directory):
            raise InTheWay(wanted, conflicts.in_conflict(ours, other.record, other.pids(), found), other)

    def make(self, wanted: ClaimRequest, taken: set[int], on_left: OnLeft) -> Held:
        """Make the claim, under the lowest number that nobody has. Raises `InTheWay`, `NoSpace`, `Closed` where somebody takes its
        directory away meanwhile, OSError."""
        for prefix in range(_NUMBERS):
            if prefix in taken or not _is_free(wanted, prefix):
                continue
            try:
                return self._make(wanted, prefix, on_left)
            except OSError as error:
                if error.errno not in _TAKEN:
                    raise
        raise errors.NoSpace(f"{self._path}: all {_NUMBERS:,} numbers are taken", key=str(self._path))

    def _make(self, wanted: ClaimRequest, prefix: int, on_left: OnLeft) -> Held:
        new, directory = self._path / scrap_name(NEW), self._path / f"{prefix:06}.{wanted.tag}"
        record = wanted.record(prefix)
        fd = claim_files.build(new, record, wanted.outside.content(prefix) if wanted.outside is not None else None)
        try:
            try:
                host.rename(new, directory)
            except FileNotFoundError:
                raise claim_files.Gone(f"{new} is missing: somebody removed it while it was made") from None
            return Held(record, passing.hand_over(fd, lambda fd: Members(directory, fd, LEADER, wanted.rank, wanted.worker, on_left)))
        except OSError:
            self._scrap(new)
            raise
        finally:
            passing.close(fd, unlocking=SLOTS)

    def free(self, directory: Path) -> bool:
        """Take a claim of ours off its name, if nobody has it. False where somebody does, and for what is not ours."""
        if not _is_ours(directory):
            return False
        try:
            fd = passing.take_in(lambda: claim_files.open_write(directory, CLAIM))
        except OSError:
            return False  # without this file it is none that we made
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode) or not locks.take(fd, 0, SLOTS):
                return False
            old = self._path / scrap_name(OLD)
            try:
                host.rename(directory, old)
            except FileNotFoundError:
                return False  # the owner of the registry was first
            self._scrap(old)
            return True
        finally:
            passing.close(fd, unlocking=SLOTS)

    def _scrap(self, directory: Path) -> None:
        claim_files.remove_beside(directory)
        self.scrap.append(directory)

    # -- refusals --------------------------------------------------------------------------------------------------

    def refuse(self, wanted: ClaimRequest, error: errors.ClaimConflict) -> None:
        """Let the other ranks of the job know why there is no claim: they need not wait for it. As long as this process lives."""
        new = self._path / scrap_name(NEW)
        fd = claim_files.build_refusal(new, json.dumps(errors.to_wire(error)).encode())
        name = self._path / f"{REFUSED}{wanted.tag}{new.name.removeprefix(NEW[:-1])}"
        host.rename(new, name)
        _refusals.append((os.getpid(), name, fd))
        if len(_refusals) > _REFUSALS:
            _withdraw(*_refusals.popleft())


def _withdraw(pid: int, name: Path, fd: int) -> None:
    if pid == os.getpid():  # else it is a parent's
        passing.close(fd, unlocking=SLOTS)
        claim_files.remove(name)


def _withdraw_all() -> None:
    while _refusals:
        _withdraw(*_refusals.popleft())


at_the_end.append(_withdraw_all)


_LONGEST_PAUSE = 0.05
_PATIENCE = 60.0


class Registry:
    """The claims of this node. Callable from any thread, and in a forked child; it holds nothing open."""

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        """Raises `RootRefused` where the directory (default: ``$FOREBAY_CLAIMS``, else one in /dev/shm) cannot serve."""
        self.path = (default() if path is None else Path(path)).absolute()
        prepare(self.path)

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
                    return errors.from_wire(dict(json.loads(claim_files.read(fd))))
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
            with _locked(self.path, timeout):
                ledger = LockedRegistry(self.path, scrap)
                yield ledger
        finally:
            for directory in scrap:
                claim_files.remove(directory)


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
