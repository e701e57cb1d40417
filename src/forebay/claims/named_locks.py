"""Locks of a claim that have names: bytes of one file, which the kernel lets go when their holder dies."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TypeAlias, TypeVar, cast

from forebay import _config, errors
from forebay._kernel import host, locks, waits
from forebay.claims import claim_files
from forebay.claims.members import ClaimContext
from forebay.claims.table import Member

LOCKS, WORDS = "locks", "words"
Kind: TypeAlias = Literal["lock", "barrier", "memory"]
T = TypeVar("T")


class _Locks:
    """The locks of a claim in this process. A forked child holds none of its parent's.

    The handler of a signal may run in the middle of what is here, and must not wait for what its own thread was about to let go: it
    locks through a description of its own."""

    def __init__(self, directory: Path) -> None:
        self.file = locks.LockFile(directory / LOCKS, claim_files.opener)
        self.words = waits.Words(directory / WORDS, claim_files.opener)
        self.threads: dict[int, int] = {}  # offset -> the thread that holds it
        self._path = directory / LOCKS
        self._busy: set[int] = set()  # the threads that are in the middle of a call to `file`
        self._apart: dict[int, locks.LockFile] = {}  # offset -> where a handler has locked it
        self._retires = self._stands = False  # the latter: between the hooks of a fork
        host.at_fork(self)

    def try_lock(self, offset: int) -> Literal[True] | None:
        me = threading.get_ident()
        if me in self._busy:
            apart = locks.LockFile(self._path, claim_files.opener)
            if not apart.try_lock(offset, exclusive=True):
                return None
            self._apart[offset] = apart
        elif not self._alone(lambda: self.file.try_lock(offset, exclusive=True)):
            return None
        self.threads[offset] = me
        return True

    def unlock(self, offset: int) -> None:
        self.threads.pop(offset, None)
        apart = self._apart.pop(offset, None)
        if apart is not None:
            apart.close()
        elif threading.get_ident() in self._busy:
            self.file.unlock_soon(offset)
        else:
            self._alone(lambda: self.file.unlock(offset))
        self.words.bump(offset % waits.COUNT)

    def held(self, offset: int) -> bool:
        return offset in self._apart or self.file.held(offset)

    def retire(self) -> None:
        """Close the file: now, or when the last that is held is let go."""
        self._retires = True
        if threading.get_ident() not in self._busy:
            self.file.retire()

    def _alone(self, call: Callable[[], T]) -> T:
        me = threading.get_ident()
        self._busy.add(me)
        try:
            return call()
        finally:
            self._busy.discard(me)
            if self._retires:
                self.file.retire()

    def before_fork(self) -> None:
        if threading.get_ident() not in self._busy:
            self._busy.add(threading.get_ident())
            self.file.before_fork(keep=False)
            self._stands = True

    def after_fork_parent(self) -> None:
        if self._stands:
            self._stands = False
            self.file.after_fork_parent()
            self._busy.discard(threading.get_ident())

    def after_fork_child(self) -> None:
        self.file.after_fork_child(keep=False)
        for apart in self._apart.values():
            apart.after_fork_child(keep=False)
        self._apart, self._busy, self.threads, self._stands = {}, set(), {}, False


def _locks_of(house: ClaimContext) -> _Locks:
    found = house.parts.get(_Locks)
    if found is None:
        try:
            found = house.parts.setdefault(_Locks, _Locks(house.directory))
        except FileNotFoundError:
            raise house.lost() from None
    return cast(_Locks, found)


def words_of(house: ClaimContext) -> waits.Words:
    """The futex words of a claim."""
    return _locks_of(house).words


def number(kind: str, name: str) -> int:
    """62 bits that stand for a name."""
    digest = hashlib.blake2b(name.encode(errors="surrogatepass"), digest_size=8, person=kind.encode())
    return int.from_bytes(digest.digest(), "little") >> 2


def close(house: ClaimContext) -> None:
    """Close the file of the locks: now, or when the last that is held is let go."""
    found = house.parts.pop(_Locks, None)
    if found is not None:
        found.retire()


class NamedLock:
    """A lock of all processes of a claim, and of their threads: ``with claim.lock("index"): ...``.

    Entering waits, at most ``timeout`` seconds, then raises `WaitTimeout`, which names the holder. A holder that dies lets go: the
    next one enters within 0.1 s. A forked child does not hold what its parent holds. Not reentrant: a thread that enters a second time
    gets a `ConfigError` at once. Callable from any thread; who unpickles it has the same lock."""

    def __init__(self, house: ClaimContext, name: str, timeout: float | None = None, *, kind: Kind = "lock") -> None:
        if not isinstance(name, str):
            raise errors.ConfigError(f"name={name!r}: must be a str", name="name", value=repr(name))
        house.check()
        self.name, self.timeout = name, _config.parse_timeout(timeout)
        self._house, self._kind = house, kind
        self._known = _locks_of(house)
        self._offset = number(kind, name)

    def __repr__(self) -> str:
        return f"<{self._what()}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return NamedLock, (self._house, self.name, self.timeout)

    def within(self, timeout: float | None) -> Self:
        """The same lock, waited for at most this long."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__, timeout=timeout)
        return other

    def __enter__(self) -> Self:
        self._house.check()
        known, offset, me = self._known, self._offset, threading.get_ident()
        if known.threads.get(offset) == me:
            raise errors.ConfigError(f"{self._what()} is held by this very thread: it cannot be taken twice")
        try:
            if self._take() is None:
                waits.wait_for(self._try, known.words, offset % waits.COUNT, what=self._whose, timeout=self.timeout)
        except BaseException:
            # Ctrl-C after the kernel gave the lock, and before that was noted: nobody would ever let go.
            if known.held(offset) and known.threads.get(offset, me) == me:
                known.unlock(offset)
            raise
        return self

    def _try(self) -> Literal[True] | None:
        self._house.check()
        return self._take()

    def _take(self) -> Literal[True] | None:
        try:
            return self._known.try_lock(self._offset)
        except FileNotFoundError:
            raise self._house.lost() from None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._known.threads.get(self._offset) == threading.get_ident():  # else it is the parent's of this forked child
            self._known.unlock(self._offset)

    def _what(self) -> str:
        return f"the {self._kind} {self.name!r} of {self._house.name}"

    def _whose(self) -> tuple[str, str]:
        live = {member.pid: member for member in self._house.members.live()}
        found = locks.holders(self._house.directory / LOCKS, self._offset, among=live)
        return self._what(), ", ".join(with_state(live[pid]) for pid in found) or "an unknown process"


def with_state(member: Member) -> str:
    """A member in words, and whether it stands still."""
    words = member.describe()
    if not member.is_stopped():
        return words
    return f"{words[:-1]}, stopped)" if words.endswith(")") else f"{words} (stopped)"
