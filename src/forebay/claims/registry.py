"""The claims of a node: one directory each, in a registry that all users share, in memory that a reboot clears.

Only kernel locks decide which process is alive. A claim is created, and a dead one freed, under the lock of the registry, which is held
for a millisecond. The steps, and what is left if the process dies after each: the directory is built under another name with its locks
held (scrap); it gets its name (a dead claim, as its locks are free). It loses its name (scrap); its files are removed. The next process
with the lock removes its own user's scrap, and frees its own user's dead claims.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import re
import stat
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, NoReturn

from forebay import errors
from forebay._kernel import host, locks
from forebay._kernel.waits import PollingWait
from forebay.claims import claim_files, conflicts, processes, records
from forebay.claims.claim_files import CLAIM, LEADER, LOCKS, MARKER, NEW, OLD, SLOTS, TABLE, WORDS, Gone, scrap_name
from forebay.claims.conflicts import ClaimRequest
from forebay.claims.members import Member, Members, MemberTable, OnLeft, exit_hooks
from forebay.claims.processes import inherited_fds
from forebay.claims.records import Record

VARIABLE = "FOREBAY_CLAIMS"
DEFAULT = "/dev/shm/forebay-claims"
LOCK = "lock"
REFUSED = "refused."
_LONGEST_PAUSE, _LONGEST_LOCK_PAUSE = 0.05, 0.02
_TIMEOUT = 60.0
_OPEN_TO_ALL = 0o1777
_REFUSALS = 32
_NO_NUMBER, _NUMBERS = -1, 1_000_000
_NAME = re.compile(r"(?<![^/])(([0-9]{6,15})\.([0-9a-f]{16}))(?![^/])")
_NOT_SHARED_MEMORY = frozenset((CLAIM, TABLE, LOCKS, WORDS, MARKER))
_PID = re.compile(rb"([1-9][0-9]{0,9})\n")
_TAKEN = frozenset((errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR))
_UNFIT = frozenset((errno.EACCES, errno.EPERM, errno.EISDIR, errno.ELOOP, errno.ENXIO))


# -- the directory of all claims ---------------------------------------------------------------------------------------


def default() -> Path:
    """Return the registry's path as the environment sets it. Raises `ConfigError` for a relative path, which differs by process."""
    value = os.environ.get(VARIABLE) or DEFAULT
    if not os.path.isabs(value) or "\0" in value:
        raise errors.ConfigError(f"{VARIABLE}={value}: must be an absolute path", name=VARIABLE, value=value)
    return Path(value)


def prepare(path: Path) -> None:
    """Create the directory if needed, fit for all users. Raises `RootRefused`, which says what to do."""
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        _make(path)
        status = os.lstat(path)
    if not stat.S_ISDIR(status.st_mode):
        _refuse(path, "it is a symbolic link" if stat.S_ISLNK(status.st_mode) else "it is no directory")
    if status.st_mode & 0o1002 == 0o0002:
        if status.st_uid != os.geteuid():
            _refuse(path, "every user may remove what others have there (chmod +t)")
        host.chmod(path, _OPEN_TO_ALL)
    if status.st_uid not in (0, os.geteuid()) and status.st_mode & _OPEN_TO_ALL != _OPEN_TO_ALL:
        _refuse(path, f"it belongs to user {status.st_uid}, and is not open to all (chmod 1777)")
    if not os.access(path, os.W_OK | os.X_OK, effective_ids=True):
        _refuse(path, "this user may not write there")
    if not host.is_local(kind := host.fs_kind(path)):
        _refuse(path, f"it is on a {kind} file system, whose locks other machines may not share")


def _refuse(path: Path, why: str) -> NoReturn:
    raise errors.RootRefused(f"{path} cannot hold the claims of this node: {why}: set {VARIABLE} to a directory that can", path=str(path))


def _make(path: Path) -> None:
    """Build it under another name first: no process may see it with the mode that the umask leaves."""
    new = path.with_name(scrap_name(NEW))
    try:
        for directory in [*reversed(path.parents), new]:
            if not os.path.isdir(directory):
                host.mkdir(directory, 0o700 if directory is new else 0o755)
    except OSError as error:
        _refuse(path, f"it cannot be created ({error.strerror})")
    try:
        _make_lock(new / LOCK)
        host.chmod(new, _OPEN_TO_ALL)
        host.rename(new, path)
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
            return host.out_of_the_way(host.open_write(path))  # no O_CREAT: a sticky directory refuses it for another user's file
        except FileNotFoundError:
            _make_lock(path)
            return host.out_of_the_way(host.open_write(path))
    except OSError as error:
        if error.errno in _UNFIT:  # not a file that Forebay made
            _refuse(path.parent, f"{LOCK!r} in it cannot be opened ({error.strerror})")
        raise


def _describe_holder(path: Path, fd: int) -> str:
    """Describe the holder of the lock by /proc, else by what the last holder wrote."""
    if pids := locks.holders(path, 0) or locks.posix_holders(path, 0):
        return ", ".join(map(locks.describe_process, pids))
    written = _PID.match(os.pread(fd, 16, 0))
    try:
        user = os.stat(f"/proc/{int(written[1])}").st_uid if written else None
    except OSError:
        user = None
    if written is None or user is None:
        return "an unknown process, probably another user's: the superuser sees it in /proc/*/fdinfo"
    return f"{locks.describe_process(int(written[1]))} of user {user}, according to {LOCK!r}, which every user can write to"


# -- the state of a claim ----------------------------------------------------------------------------------------------


class ClaimState(NamedTuple):
    """A claim as any process of the node sees it. ``tag``: identifies job and key. ``live``: some process has the claim; ``led``: the
    process that registered it does. ``record``: None if it is damaged; it and ``led`` are unknown where only marks were read."""

    registry: Path
    name: str
    prefix: int
    tag: str
    uid: int
    live: bool
    led: bool
    record: Record | None

    @property
    def directory(self) -> Path:
        return self.registry / self.name

    def members(self) -> list[Member]:
        """Return the processes that have, or had, the claim; none if it is another user's."""
        fd = claim_files.open_read(f"{self.directory}/{CLAIM}")
        if fd is None:
            return []
        try:
            return MemberTable(self.directory).members(fd)
        except OSError:
            return []
        finally:
            os.close(fd)

    def pids(self) -> list[int]:
        """Return the processes that have the claim now, as far as this user may know."""
        if self.uid == os.geteuid():
            pids = (member.pid for member in self.members() if member.state == "in")
            return list(dict.fromkeys(pids))  # a forked process may have it twice, as its parent's child and as a rank
        return [self.record.pid] if self.led and self.record is not None else []

    def is_ending(self) -> bool:
        """Whether the claim is about to be freed: its leader has gone or was killed, or all its processes were."""
        if not self.led or self._is_leader_dying():
            return True
        members = [member for member in self.members() if member.state == "in"]
        return all(member.is_dying() for member in members) if members else self._has_lost_leader()

    def _is_leader_dying(self) -> bool:
        record = self.record
        if record is None or record.space != processes.own().space:
            return False
        if processes.status(record.pid) is not None:
            return processes.is_dying(record.pid, record.ticks)
        return self._has_lost_leader()  # /proc hides it from this user, or it just ended

    def _has_lost_leader(self) -> bool:
        """Look again: a child forked by the leader and killed with it may have held its lock for another moment."""
        now = read_state(self.registry, self.name, self.prefix, self.tag)
        return now is None or not now.led

    def memory(self) -> int | None:
        """Return the bytes of shared memory of the claim, including its files outside its directory; None if they are hidden from this
        user."""
        paths = self.record.beside.paths if self.record is not None and self.record.beside is not None else ()
        try:
            own = (f"{self.directory}/{name}" for name in os.listdir(self.directory) if name not in _NOT_SHARED_MEMORY)
            return sum(map(_allocated, [*own, *(path for path in paths if path.startswith("/dev/shm/"))]))
        except PermissionError:
            return None
        except OSError:
            return 0  # it was freed in between


def _allocated(path: str) -> int:
    try:
        return os.lstat(path).st_blocks * 512
    except FileNotFoundError:
        return 0


def parse(names: Iterable[str]) -> list[tuple[str, int, str]]:
    """Return the names of claims' directories among those of the registry, with the number and tag of each."""
    return [(name, int(prefix), tag) for name, prefix, tag in _NAME.findall("/".join(names))]  # in one call: 0.3 us a name instead of 1


def read_state(registry: Path, name: str, prefix: int, tag: str, sought: frozenset[int] | None = None) -> ClaimState | None:
    """Return the state of the claim of this name, as `parse` returns it; None if there is none, or it was freed in between.

    ``sought``: marks; the record is read only if the claim is live and one of its directories may have one of them. Raises OSError if this
    process cannot open any file."""
    fd = claim_files.open_read(f"{registry}/{name}/{CLAIM}")
    try:
        if fd is not None:
            uid, live = os.fstat(fd).st_uid, locks.locked_at(fd, 0, SLOTS) is not None
            if sought is not None and not (live and records.may_overlap(claim_files.read_marks(fd), sought)):
                return ClaimState(registry, name, prefix, tag, uid, live, False, None)
            led = live and locks.locked_at(fd, LEADER) is not None
            return ClaimState(registry, name, prefix, tag, uid, live, led, records.load(claim_files.read(fd)))
    except OSError:
        pass  # not a regular file
    finally:
        if fd is not None:
            os.close(fd)
    try:  # no process can have a claim whose file cannot be read, but its name is taken
        status = os.lstat(registry / name)
    except FileNotFoundError:
        return None
    return ClaimState(registry, name, prefix, tag, status.st_uid, False, False, None) if stat.S_ISDIR(status.st_mode) else None


# -- under the lock of all claims --------------------------------------------------------------------------------------


def _is_ours(path: Path) -> bool:
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return False
    return status.st_uid == os.geteuid() and stat.S_ISDIR(status.st_mode)


class LockedRegistry:
    """The registry while its lock is held: here claims get and lose their names. The directories in `scrap` are to be removed after."""

    def __init__(self, path: Path, scrap: list[Path]) -> None:
        self._path, self.names, self.scrap = path, os.listdir(path), scrap
        for name in self.names:
            if name.startswith((NEW, OLD)) and _is_ours(path / name):
                self._scrap(path / name)
            elif name.startswith(REFUSED):
                self.free(path / name)  # if the process that refused has ended

    def free_dead(self, request: ClaimRequest) -> tuple[set[int], tuple[errors.ClaimConflict, ClaimState] | None]:
        """Free this user's dead claims. Returns the numbers that are taken, and, if a live claim has the requested name or a requested
        directory, the error and that claim."""
        sought = records.opposite(records.marks(stream.directory for stream in request.streams if stream.remote is not None))
        taken, own_tag = set[int](), request.tag
        for name, prefix, tag in parse(self.names):
            state = read_state(self._path, name, prefix, tag, None if tag == own_tag else sought)
            if state is None or (not state.live and self.free(state.directory)):
                continue  # its number is free; that of another user's dead claim is not
            if state.live and (conflict := self._conflict(request, state)) is not None:
                return taken, (conflict, state)
            taken.add(prefix)
        return taken, None

    def _conflict(self, request: ClaimRequest, other: ClaimState) -> errors.ClaimConflict | None:
        if other.record is None:
            return None
        ours = request.record(_NO_NUMBER)
        if other.tag == request.tag and other.uid == os.geteuid():
            return conflicts.two_leaders_error(ours, other.record, other.pids())
        streams = conflicts.find_conflict(ours, other.record, other.uid, equal_only=request.equal_only)
        if streams is None or other.name in request.spared:
            return None
        if other.record.beside is not None and claim_files.is_released(other.directory):
            return None
        return conflicts.conflict_error(ours, other.record, other.pids(), streams)

    def create(self, request: ClaimRequest, taken: set[int], on_left: OnLeft) -> Members:
        """Create the claim under the lowest free number. Raises `NoSpace`, `Closed` if its directory is removed meanwhile, OSError."""
        for prefix in range(_NUMBERS):
            if prefix in taken or not (request.beside is None or request.beside.is_free(prefix)):
                continue
            try:
                return self._create(request, prefix, on_left)
            except OSError as error:
                if error.errno not in _TAKEN:
                    raise
        raise errors.NoSpace(f"{self._path}: all {_NUMBERS:,} numbers are taken", key=str(self._path))

    def _create(self, request: ClaimRequest, prefix: int, on_left: OnLeft) -> Members:
        new, directory = self._path / scrap_name(NEW), self._path / f"{prefix:06}.{request.tag}"
        record, beside = request.record(prefix), request.beside
        create_marker = None if beside is None else functools.partial(beside.create_marker, prefix)
        fd = claim_files.build(new, record.dump(), create_marker=create_marker)
        try:
            host.rename(new, directory)
            return inherited_fds.hand_over(fd, lambda fd: Members(directory, fd, LEADER, record, request.rank, on_left))
        except OSError as error:
            self._scrap(new)
            if isinstance(error, FileNotFoundError):
                raise Gone(f"{new} is missing: it was removed while the claim was created") from None
            raise
        finally:
            inherited_fds.close(fd, unlocking=SLOTS)

    def free(self, directory: Path) -> bool:
        """Take the name from a claim of this user that no process has. Returns False if a process has it, or it is not this user's."""
        try:
            fd = inherited_fds.register(lambda: claim_files.open_write(directory / CLAIM))
        except OSError:
            return False  # another user's; or no claim, without this file
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
            inherited_fds.close(fd, unlocking=SLOTS)

    def _scrap(self, directory: Path) -> None:
        claim_files.remove_external(directory)
        self.scrap.append(directory)

    def refuse(self, request: ClaimRequest, error: errors.ClaimConflict) -> None:
        """Tell the other ranks of the job, as long as this process lives, why there is no claim, so that they do not wait for it."""
        new = self._path / scrap_name(NEW)
        fd = claim_files.build(new, json.dumps(errors.to_wire(error)).encode(), files={})
        name = self._path / f"{REFUSED}{request.tag}{new.name.removeprefix(NEW[:-1])}"
        host.rename(new, name)
        _refusals.append((os.getpid(), name, fd))
        if len(_refusals) > _REFUSALS:
            _withdraw(*_refusals.popleft())


_refusals: deque[tuple[int, Path, int]] = deque()


def _withdraw(pid: int, name: Path, fd: int) -> None:
    if pid == os.getpid():  # else it is a parent's
        inherited_fds.close(fd, unlocking=SLOTS)
        claim_files.remove(name)


def _withdraw_all() -> None:
    while _refusals:
        _withdraw(*_refusals.popleft())


exit_hooks.append(_withdraw_all)


# -- the registry ------------------------------------------------------------------------------------------------------


class Registry:
    """The claims of this node. Callable from any thread, and in a forked child; it keeps nothing open."""

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        """Raises `RootRefused` if the directory (default: ``$FOREBAY_CLAIMS``, else one in /dev/shm) is unfit."""
        self.path = (default() if path is None else Path(path)).absolute()
        prepare(self.path)

    def register(self, request: ClaimRequest, timeout: float | None = _TIMEOUT) -> Members:
        """Create a claim as the first of the job's ranks on this node. Raises `ClaimConflict`, `NoSpace`, `WaitTimeout`.

        Waits at most ``timeout`` seconds for a conflicting claim that is about to end, else ``request.conflict_timeout`` seconds."""
        wait = PollingWait(timeout, _LONGEST_PAUSE)
        while True:
            other = None  # a job that does not use Forebay
            try:
                if request.beside is not None:
                    request.beside.check()
                with self.locked(timeout) as locked:
                    taken, obstacle = locked.free_dead(request)
                    if obstacle is None:
                        return locked.create(request, taken, self._free_if_unused)
                conflict, other = obstacle
            except errors.ClaimConflict as error:
                conflict = error
            is_ending = other is not None and other.is_ending()
            if wait.waited >= (wait.timeout if is_ending else request.conflict_timeout):
                with self.locked(timeout) as locked:
                    locked.refuse(request, conflict)
                raise conflict
            wait.sleep(functools.partial(_describe_wait, request, other))

    def join(self, request: ClaimRequest, timeout: float | None = _TIMEOUT) -> Members:
        """Join the claim that the first rank creates, or has created. Raises `ClaimMismatch` if its arguments differ, `WaitTimeout`, and
        the `ClaimConflict` that the first rank got."""
        wait = PollingWait(timeout, _LONGEST_PAUSE)
        while True:
            members = self._find(request, led=True)
            if members is not None:
                return _matching(members, request)
            refusal = self._refusal(request)
            if refusal is not None:
                raise refusal
            wait.sleep(lambda: self._describe_missing(request))

    def join_or_register(self, request: ClaimRequest, timeout: float | None = _TIMEOUT) -> Members:
        """Join the claim of that job and key, or create it: it has no leader. Its directories conflict with no others."""
        with self.locked(timeout) as locked:
            members = self._find(request, led=False)
            return members if members is not None else locked.create(request, locked.free_dead(request)[0], self._free_if_unused)

    def create(self, request: ClaimRequest, timeout: float | None = _TIMEOUT) -> Members:
        """Create a claim that conflicts with no other. Raises what its `Beside` raises, `NoSpace`, `WaitTimeout`."""
        with self.locked(timeout) as locked:
            locked.free_dead(request)
            return locked.create(request, self.prefixes(), self._free_if_unused)

    def join_if_live(self, request: ClaimRequest, timeout: float | None = _TIMEOUT) -> Members | None:
        """Join the claim of that job and key if a process has it; free what ended processes left of it."""
        members = self._find(request, led=False)
        if members is None and any(tag == request.tag for _, _, tag in parse(self._names())):
            with self.locked(timeout) as locked:
                members = self._find(request, led=False)
                if members is None:
                    locked.free_dead(request)
        return members

    def attach(self, directory: Path, *, rank: int | None = None) -> Members:
        """Join the processes that have the claim in ``directory``. Raises `Closed` if it was freed."""
        try:
            return Members.attach(directory, rank=rank, on_left=self._free_if_unused)
        except Gone:
            raise errors.Closed(f"the claim {directory} was freed: all processes that had it are gone", what="claim") from None

    def _find(self, request: ClaimRequest, *, led: bool) -> Members | None:
        """Join the claim of that job and key, if there is one. ``led``: only while its leader has it."""
        for name, prefix, tag in parse(self._names()):
            state = read_state(self.path, name, prefix, tag) if tag == request.tag else None
            if state is None or state.record is None or not state.live or state.uid != os.geteuid() or (led and state.is_ending()):
                continue  # another user's: everybody can compute the tag of a job, and give it to a claim of his own
            try:
                members = Members.attach(state.directory, rank=request.rank, on_left=self._free_if_unused)
            except Gone:
                continue
            if not led or members.is_in(LEADER):
                return members
            members.leave()
        return None

    def _names(self) -> list[str]:
        """What is in the directory; nothing if it was deleted: whoever creates a claim makes it anew."""
        try:
            return os.listdir(self.path)
        except FileNotFoundError:
            return []

    def _refusal(self, request: ClaimRequest) -> Exception | None:
        """Return why the first rank created no claim, as long as it lives."""
        for name in self._names():
            if not name.startswith(REFUSED + request.tag):
                continue
            fd = claim_files.open_read(f"{self.path}/{name}/{CLAIM}")
            if fd is None:
                continue  # withdrawn
            try:
                if os.fstat(fd).st_uid == os.geteuid() and locks.locked_at(fd, LEADER) is not None:
                    return errors.from_wire(dict(json.loads(claim_files.read(fd))))
            except (OSError, ValueError, TypeError):
                continue  # damaged
            finally:
                os.close(fd)
        return None

    def _describe_missing(self, request: ClaimRequest) -> tuple[str, str]:
        known = [state.record for state in self.states() if state.live]
        live = [record for record in known if record is not None and record.job == request.job.name]
        existing = "; ".join(f"claim {record.key} of process {record.pid}" for record in live)
        return (
            f"the first rank of this node to create {request} (known by {request.job.how})",
            f"nobody yet (claims of this job here: {existing or 'none'})",
        )

    # -- inspecting and freeing ------------------------------------------------------------------------------------

    def states(self) -> list[ClaimState]:
        """Return all claims of the node, live and dead, by their number; of unreadable ones what is known."""
        states = [read_state(self.path, *found) for found in parse(self._names())]
        return sorted((state for state in states if state is not None), key=lambda state: (state.prefix, state.tag))

    def prefixes(self) -> set[int]:
        """Return the numbers of all claims, dead ones too."""
        return {prefix for _, prefix, _ in parse(self._names())}

    def prune(self, timeout: float | None = _TIMEOUT) -> list[ClaimState]:
        """Free this user's dead claims now, as the user's next claim would, and return them."""
        with self.locked(timeout) as locked:
            return [state for state in self.states() if not state.live and state.uid == os.geteuid() and locked.free(state.directory)]

    def _free_if_unused(self, directory: Path) -> None:
        """Free a claim if no process has it and the lock is free; else the next claim does so."""
        with contextlib.suppress(OSError):  # `WaitTimeout` is one too
            for found in parse([directory.name]):
                state = read_state(self.path, *found)
                if state is not None and not state.live:
                    with self.locked(0) as locked:
                        locked.free(directory)

    @contextlib.contextmanager
    def locked(self, timeout: float | None = _TIMEOUT) -> Iterator[LockedRegistry]:
        """Hold the lock of all claims of the node: none is created or freed meanwhile. Raises `RootRefused`, `WaitTimeout`.

        Directories that lose their names are removed afterwards, since large files take long."""
        path, scrap = self.path / LOCK, list[Path]()
        wait = PollingWait(timeout, _LONGEST_LOCK_PAUSE)
        fd = inherited_fds.register(lambda: _open_lock(path))
        try:
            while not locks.take(fd, 0):
                wait.sleep(lambda: ("the list of this node's claims", _describe_holder(path, fd) if timeout else "another"))
            with contextlib.suppress(OSError):  # a full file system: it needs a block, and only serves messages
                host.pwrite(fd, f"{os.getpid()}\n".encode().ljust(16), 0)  # the kernel hides the holder from other users
            yield LockedRegistry(self.path, scrap)
        finally:
            inherited_fds.close(fd, unlocking=1)
            for directory in scrap:
                claim_files.remove(directory)


def _describe_wait(request: ClaimRequest, other: ClaimState | None) -> tuple[str, str]:
    holder = "another job" if other is None or other.record is None else conflicts.describe(other.record, other.pids())
    return str(request), holder


def _matching(members: Members, request: ClaimRequest) -> Members:
    theirs = members.record
    difference = conflicts.mismatch(request.streams, theirs.streams)
    if difference is None:
        return members
    members.leave()
    raise errors.ClaimMismatch(
        f"{request} (known by {request.job.how}) differs from that of its leader, process {theirs.pid}: {difference}",
        ours=[s.directory.path for s in request.streams], theirs=[s.directory.path for s in theirs.streams],
    )  # fmt: skip
