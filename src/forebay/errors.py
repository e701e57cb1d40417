"""Every error that Forebay raises.

    ForebayError
    ├── ConfigError (ValueError)                 invalid argument or variable
    │   ├── NotBytes (TypeError)                 data that is not bytes-like
    │   └── NotJson (TypeError)                  metadata that JSON cannot hold
    ├── MissingExtra (ImportError)               an optional package is missing
    ├── Closed (ValueError, RuntimeError)        a call after close()
    ├── RootError (OSError)                      the directory cannot be a cache
    │   ├── RootRefused                          another user's, or unsuitable
    │   └── NewerFormat                          written by a newer Forebay
    ├── CacheFault (OSError)                     failed; calls use the source
    │   ├── WriterBusy                           another process is writing
    │   ├── NoSpace                              (ENOSPC) no room
    │   ├── ReadOnly                             (EROFS) the root is read-only
    │   ├── NoLocks                              the kernel has no OFD locks
    │   └── Damaged                              stored bytes have changed
    ├── WaitTimeout (TimeoutError)               a wait took too long
    │   └── ConnectionsBusy (RemoteTimeout)      max_connections are in use
    ├── Offline (FileNotFoundError)              not cached, in offline mode
    ├── NotCached (KeyError)                     nothing under this key
    │   └── Ambiguous                            a name of several entries
    ├── ChecksumMismatch (ValueError)            not the expected bytes
    ├── ClaimConflict (ValueError)               another claim has the directory
    ├── ClaimMismatch (RuntimeError)             processes of a job disagree
    ├── BarrierBroken (BrokenBarrierError)       a participant died
    ├── FillFailed (RuntimeError)                another process's call failed
    ├── Foreign (FileExistsError)                another file is in the way
    ├── SourceChanged (RuntimeError)             changed during its upload
    └── RemoteError (OSError)                    the source failed
        ├── NotFound (FileNotFoundError)         no such object
        ├── AccessDenied (PermissionError)       credentials not accepted
        ├── Archived                             in a tier that must be restored
        ├── RemoteTimeout (TimeoutError)         nothing arrived for too long
        ├── RemoteUnavailable (ConnectionError)  all retries failed
        ├── RemoteChanged                        changed while being read
        ├── Conflict (FileExistsError)           a conditional write failed
        ├── Unsupported (NotImplementedError)    not possible with this remote
        ├── RemoteProtocolError                  an invalid HTTP or S3 response
        ├── BadArchive                           not an intact tar file
        ├── BadListing                           a name that no file can have
        ├── NotADirectory (NotADirectoryError)   an object, not a directory
        └── Incomplete                           an unfinished upload

Each error is pickled and rebuilt with its message, facts, notes and causes, so that one raised in a worker reaches the main process. A
cause that cannot be pickled arrives as a `RemoteCause` that holds its class name and its text.
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import threading
from collections.abc import Sequence
from typing import Any

EXTRAS = {
    "s3": ("botocore",),
    "fsspec": ("fsspec",),
    "arrow": ("pyarrow",),
    "tasks": ("cloudpickle", "PyYAML"),
    "torch": ("torch",),
    "energon": ("megatron-energon",),
    "ray": ("ray[train]",),
    "streaming": ("mosaicml-streaming",),
    "joblib": ("joblib",),
    "prometheus": ("prometheus-client",),
    "opentelemetry": ("opentelemetry-api",),
}
"""The extras of Forebay, and the packages that each installs."""


_DEEPEST = 32  # causes of causes


class ForebayError(Exception):
    """Base of all errors of Forebay.

    ``facts`` holds the values that the message was formatted from; each is also an attribute. ``callers_own``: whether it comes of what its
    caller asked for, or of the state of the caller's process, not of the source: callers that wait for the same object go on without it."""

    facts: dict[str, Any]
    callers_own: bool = False

    def __init__(self, message: str = "", **facts: Any) -> None:
        Exception.__init__(self, message)
        self.facts = facts
        for name, value in facts.items():
            setattr(self, name, value)

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), str(self), _portable(self.facts), _others_of(self), _history_of(self, set()))


def _rebuild(
    cls: type[ForebayError], message: str, facts: dict[str, Any], others: dict[str, Any] | None = None, history: _History | None = None
) -> ForebayError:  # fmt: skip
    # Not `cls.__new__`: of a class of two errors that is the first one's, and may not be the one that makes its instances.
    base: type | None = cls
    while base is not None and issubclass(base, ForebayError):
        base = base.__base__
    error: ForebayError = (base or Exception).__new__(cls)
    ForebayError.__init__(error, message, **facts)
    for name, value in (others or {}).items():
        setattr(error, name, value)
    if history is not None:
        _restore_history(error, history)
    return error


def _others_of(error: ForebayError) -> dict[str, Any]:
    """Attributes that were set on an error besides its facts."""
    return _portable({name: value for name, value in vars(error).items() if name not in error.facts and name not in ("facts", "__notes__")})


class RemoteCause(Exception):
    """Replaces an error of another process that cannot be pickled. Its text holds the name of that error's class and its message."""


_History = tuple[Any, Any, bool, list[str]]  # cause, context, whether that is hidden, notes


def _history_of(error: BaseException, visited: set[int]) -> _History | None:
    """The causes and notes of an error, as far as they can be pickled; None if it has none."""
    visited.add(id(error))
    notes = [str(note) for note in getattr(error, "__notes__", ())]
    is_silenced = error.__cause__ is None and error.__suppress_context__  # `from None`: its text may hold a secret
    cause, context = (_stand_in(reason, visited) for reason in (error.__cause__, None if is_silenced else error.__context__))
    if cause is None and context is None and not notes:
        return None
    return cause, None if error.__context__ is error.__cause__ else context, error.__suppress_context__, notes


def _restore_history(error: BaseException, history: _History) -> None:
    cause, context, hidden, notes = history
    cause, context = (reason.rebuilt() if isinstance(reason, _WithHistory | _Carried) else reason for reason in (cause, context))
    error.__cause__, error.__context__, error.__suppress_context__ = cause, context or cause, hidden
    if notes:
        error.__notes__ = notes  # an error of another package may have brought them itself


class _WithHistory:
    """An error together with its causes, which its own pickle does not contain."""

    def __init__(self, error: BaseException, history: _History) -> None:
        self._error, self._history = error, history

    def rebuilt(self) -> BaseException:
        _restore_history(self._error, self._history)
        return self._error

    def __reduce__(self) -> tuple[Any, ...]:
        return _with_history, (self._error, self._history)


def _with_history(error: BaseException, history: _History) -> BaseException:
    return _WithHistory(error, history).rebuilt()


class _Carried:
    """An error of another package, pickled by itself: where its class cannot be imported (it may be of another program's ``__main__``),
    the rest of the outer pickle must still load. ``data``: empty where the error cannot be pickled."""

    def __init__(self, data: bytes, text: str, history: _History | None) -> None:
        self._data, self._text, self._history = data, text, history

    def rebuilt(self) -> BaseException:
        import pickle

        error: BaseException = RemoteCause(self._text)
        try:
            known = pickle.loads(self._data)
        except Exception:  # noqa: BLE001  another package's class may raise anything
            known = None
        if isinstance(known, BaseException):
            error = known
        if self._history is not None:
            _restore_history(error, self._history)
        return error

    def __reduce__(self) -> tuple[Any, ...]:
        return _carried, (self._data, self._text, self._history)


def _carried(data: bytes, text: str, history: _History | None) -> BaseException:
    return _Carried(data, text, history).rebuilt()


def _stand_in(reason: BaseException | None, visited: set[int]) -> Any:
    """``reason`` itself where it can be pickled and comes back unchanged, else its text. None where it was visited before: causes may form
    a cycle."""
    import pickle

    if reason is None or id(reason) in visited or len(visited) > _DEEPEST:
        return None
    history = _history_of(reason, visited)
    if isinstance(reason, ForebayError):  # a copy without causes: they are added here, where cycles are detected
        copy: BaseException = _rebuild(type(reason), str(reason), _portable(reason.facts), _others_of(reason))
        return copy if history is None else _WithHistory(copy, history)
    text = f"{type(reason).__module__}.{type(reason).__qualname__}: {reason}"
    try:
        data = pickle.dumps(reason)
        copy = pickle.loads(data)
        sound = type(copy) is type(reason) and str(copy) == str(reason)
    except Exception:  # noqa: BLE001  another package's class may raise anything
        sound = False
    return _Carried(data if sound else b"", text, history)


def _portable(facts: dict[str, Any]) -> dict[str, Any]:
    """The facts that survive pickling; the others are replaced by their ``repr``."""
    import pickle

    portable = {}
    for name, value in facts.items():
        try:
            pickle.loads(pickle.dumps(value))
            portable[name] = value
        except Exception:  # noqa: BLE001  its class may raise anything
            portable[name] = repr(value)
    return portable


class ConfigError(ForebayError, ValueError):
    """An invalid argument or environment variable."""


class NotJson(ConfigError, TypeError):
    """Metadata that JSON cannot hold: not a dict, or refused by `json.dumps`."""


class NotBytes(ConfigError, TypeError):
    """Data that is not bytes-like."""


class MissingExtra(ForebayError, ImportError):
    """An optional package is missing. ``extra``: the extra of Forebay that installs it."""

    extra: str

    @classmethod
    def of(cls, what: str, extra: str) -> MissingExtra:
        import shlex

        packages = " ".join(map(shlex.quote, EXTRAS.get(extra, (extra,))))  # a shell may expand brackets
        return cls(f"{what} needs the extra {extra!r} of Forebay, which is not installed: pip install {packages}", extra=extra)


class Closed(ForebayError, ValueError, RuntimeError):
    """A call on a handle after its ``close()``."""

    callers_own = True

    @classmethod
    def of(cls, what: str) -> Closed:
        return cls(f"this {what} is closed: open a new one", what=what)


class RootError(ForebayError, OSError):
    """This directory cannot be used as a cache. ``path``: the directory."""

    path: str


class RootRefused(RootError):
    """The directory belongs to another user, is on a file system that cannot hold a cache, holds foreign files, or cannot be created."""


class NewerFormat(RootError):
    """The root was written by a newer Forebay. ``found``: its format version. ``known``: the newest known one."""

    found: int
    known: int


class CacheFault(ForebayError, OSError):
    """The cache itself failed. Calls that do not need it are served from the source."""

    callers_own = True


class WriterBusy(CacheFault):
    """The catalog cannot be written now: another process is writing, or was stopped while writing. ``waited``: seconds. ``holder``: that
    process, with its pid and command."""

    waited: float
    holder: str


class NoSpace(CacheFault):
    """No room in the cache or on the disk. ``need``: bytes needed. ``free``: bytes free. ``budget``: bytes of the limit that was reached.
    ``limit``: which one: ``budget``, ``disk`` or ``quota``. ``hopeless``: whether it would not fit even into an empty cache."""

    errno = errno.ENOSPC
    need: int
    free: int
    budget: int
    hopeless: bool = False
    limit: str = "budget"

    @classmethod
    def of(
        cls, key: str, need: int, free: int, budget: int, todo: str = "raise the budget, or see `forebay ls --leased`",
        *, hopeless: bool = False, limit: str = "budget", charge: int = 0,
    ) -> NoSpace:  # fmt: skip
        """``charge``: bytes on disk for ``need`` bytes of data, if the limit counts those."""
        what = "quota" if limit == "quota" else "budget"
        takes = f" ({charge:,} on the disk)" if charge > need else ""
        return cls(
            f"no room for {key!r}: it needs {need:,} bytes{takes}, {max(free, 0):,} of the {what} of {budget:,} are available: {todo}",
            key=key, need=need, free=free, budget=budget, hopeless=hopeless, limit=limit,
        )  # fmt: skip


class ReadOnly(CacheFault):
    """The root was opened read-only, or this user may only read it. ``path``: the root."""

    errno = errno.EROFS
    path: str

    @classmethod
    def of(cls, path: object) -> ReadOnly:
        return cls(f"{path} is open read-only: do this as its owner, without read_only=True", path=str(path))


class NoLocks(CacheFault):
    """The kernel, or a sandbox around this process, refuses open-file-description (OFD) locks, without which processes cannot share a cache
    or claims. Calls that can do without read the source."""

    @classmethod
    def of(cls, reason: str) -> NoLocks:
        return cls(f"no open-file-description (OFD) locks here: fcntl(F_OFD_SETLK) failed: {reason}; processes cannot share anything")


class Damaged(CacheFault):
    """Stored bytes differ from what was stored. ``key``: the key of the entry, which is set aside and fetched again."""

    key: str


class WaitTimeout(ForebayError, TimeoutError):
    """A wait ended without success. ``what``: what was awaited; ``waited``: seconds; ``holder``: the process that held it or did not
    arrive."""

    callers_own = True
    what: str
    waited: float
    holder: str

    @classmethod
    def of(cls, what: str, waited: float, holder: str, by: str = "held by") -> WaitTimeout:
        return cls(f"waited {waited:.1f} s for {what}, {by} {holder}", what=what, waited=waited, holder=holder)


class Offline(ForebayError, FileNotFoundError):
    """The URL is not in the cache, and offline mode forbids asking the remote. ``url``: the URL."""

    callers_own = True
    url: str

    @classmethod
    def of(cls, url: str) -> Offline:
        return cls(f"{url} is not in the cache, and offline mode forbids fetching it: unset FOREBAY_OFFLINE, or fetch it first", url=url)


class NotCached(ForebayError, KeyError):
    """The cache holds nothing under this key. ``key``: the key."""

    key: str

    @classmethod
    def of(cls, key: str) -> NotCached:
        return cls(f"{key!r} is not in the cache: see `forebay ls`", key=key)


class Ambiguous(NotCached):
    """The name matches several entries. Nothing was done. ``key``: the name; ``names``: the full name of each entry."""

    names: list[str]

    @classmethod
    def of(cls, key: str, names: Sequence[str] = ()) -> Ambiguous:
        return cls(f"{key!r} may mean {' or '.join(map(repr, names))}: use one of these names", key=key, names=list(names))


class ChecksumMismatch(ForebayError, ValueError):
    """The source's bytes are not those that the caller expected, or that the source itself promised. ``wanted``: the expected checksum;
    ``found``: the actual one."""

    wanted: str
    found: str

    @classmethod
    def of(cls, url: str, wanted: str, found: str, *, callers_own: bool = False) -> ChecksumMismatch:
        """``callers_own``: the caller passed the expected checksum."""
        error = cls(f"{url}: received {found}, expected {wanted}: nothing was stored", url=url, wanted=wanted, found=found)
        error.callers_own = callers_own
        return error


class ClaimConflict(ForebayError, ValueError):
    """A requested directory overlaps one of another live claim. Nothing was claimed. ``ours``: this claim as plain values: job,
    directories, remotes, pids, user, started (seconds since 1970), command. ``theirs``: the other claim, likewise."""

    ours: dict[str, Any]
    theirs: dict[str, Any]


class ClaimMismatch(ForebayError, RuntimeError):
    """Two processes of a job disagree about what they share: the directories, or the shape or type of shared memory."""


class BarrierBroken(ForebayError, threading.BrokenBarrierError):
    """A participant died while others waited at this barrier. Once every survivor has received this error, the barrier can be used again.
    ``barrier``: its name. ``missing``: a description of each process that did not arrive."""

    barrier: str
    missing: list[str]


class FillFailed(ForebayError, RuntimeError):
    """The function that another process ran for this key raised an error that cannot be rebuilt here. ``kind``: the error's class."""

    kind: str


class Foreign(ForebayError, FileExistsError):
    """A file that is not Forebay's, or was modified, is where Forebay would write one. Nothing was written. ``path``: the file."""

    path: str
    errno = errno.EEXIST


class SourceChanged(ForebayError, RuntimeError):
    """A local file changed or was removed during its upload. Upload it again once nothing changes it. ``path``: the file."""

    path: str

    @classmethod
    def of(cls, path: object) -> SourceChanged:
        return cls(f"{path} changed while being uploaded: upload it again once nothing changes it", path=str(path))


class RemoteError(ForebayError, OSError):
    """The source failed. ``url``: the URL. ``status``: the HTTP status of the response, if there was one."""

    url: str
    status: int | None = None


class NotFound(RemoteError, FileNotFoundError):
    """There is no such object. This is never cached: the next call asks again."""

    errno = errno.ENOENT


class AccessDenied(RemoteError, PermissionError):
    """The remote denies access to this object with these credentials."""

    callers_own = True
    errno = errno.EACCES


class Archived(RemoteError):
    """The object is in an archive tier (S3 Glacier or Deep Archive, Azure's archive tier): it cannot be read until it is restored there,
    which takes minutes to hours. ``tier``: as the remote names it, else empty. ``names``: of a directory, the names of those of its files
    that are known to be archived."""

    tier: str = ""
    names: Sequence[str] = ()


class RemoteTimeout(RemoteError, TimeoutError):
    """The remote sent nothing for too long. ``done``: bytes received before; ``attempts``: 0 if the remote was not even asked."""

    done: int = 0
    attempts: int = 1


class ConnectionsBusy(WaitTimeout, RemoteTimeout):
    """Other transfers use all connections to a host that the root's ``max_connections`` allows; the remote was not asked. ``holder``: the
    processes that use them."""

    @classmethod
    def of_host(cls, url: str, host: str, limit: int, waited: float, holder: str, done: int) -> ConnectionsBusy:
        what = f"one of the {limit:,} connections to {host} that max_connections allows"
        message = f"{url}: waited {waited:.1f} s for {what}, held by {holder}: raise timeout= or max_connections, or wait for their end"
        return cls(message, url=url, what=what, waited=waited, holder=holder, done=done, attempts=0)


class RemoteUnavailable(RemoteError, ConnectionError):
    """Every attempt failed. ``attempts``: number of attempts; ``done``: bytes received."""

    attempts: int = 1
    done: int = 0


class RemoteChanged(RemoteError):
    """The object changed while it was being read."""


class Conflict(RemoteError, FileExistsError):
    """A conditional write found an object that it must not replace. Nothing was written."""

    errno = errno.EEXIST

    @classmethod
    def of(cls, url: str, status: int | None = None) -> Conflict:
        return cls(f"{url}: it, or another version of it, already exists: nothing was written", url=url, status=status)


class Unsupported(RemoteError, NotImplementedError):
    """This kind of remote does not support the operation: HTTP servers accept no writes, few filesystems conditional ones. Nothing was
    written."""


class RemoteProtocolError(RemoteError):
    """A response that does not match its request: a wrong range, or a body that is too short or too long."""


class BadArchive(RemoteError):
    """A tar file that is truncated, damaged, compressed, or not a tar file. ``offset``: the byte at which that was detected."""

    offset: int


class BadListing(RemoteError):
    """A remote directory lists a name that cannot be a local file name below the directory. Nothing was written. ``name``: the name."""

    name: str


class NotADirectory(RemoteError, NotADirectoryError):
    """This name is an object, not a directory."""

    errno = errno.ENOTDIR


class Incomplete(RemoteError):
    """An upload to this directory started and has not ended: the directory is incomplete. ``missing``: how many files are missing."""

    missing: int


def to_wire(error: BaseException) -> dict[str, Any]:
    """Return the error as plain JSON values, for other processes. Reading it back runs no code."""
    # Of a class that is not of this module the nearest one that is.
    own = (base.__name__ for base in type(error).__mro__ if globals().get(base.__name__) is base)
    wire: dict[str, Any] = {"kind": next(own, type(error).__name__), "message": str(error)}
    if isinstance(error, ForebayError):
        return wire | {"facts": {name: value for name, value in error.facts.items() if _is_plain(value)}}
    whole = type(error).__module__ == "builtins" and _is_plain(list(error.args))
    return wire | {"args": list(error.args) if whole else None}


def _is_plain(value: object) -> bool:
    """Whether JSON gives the value back as it is."""
    if isinstance(value, list):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    return isinstance(value, (str, int, float, bool, type(None)))


def from_wire(wire: dict[str, Any]) -> Exception:
    """Return the error that `to_wire` described: of the same class for Forebay's own and built-in ones, else `FillFailed`."""
    kind, message, args = str(wire.get("kind")), str(wire.get("message")), wire.get("args")
    own, known = globals().get(kind), getattr(builtins, kind, None)
    if isinstance(own, type) and issubclass(own, ForebayError):
        return _rebuild(own, message, dict(wire.get("facts") or {}))
    if isinstance(known, type) and issubclass(known, Exception) and isinstance(args, list):
        with contextlib.suppress(TypeError, ValueError):  # another process may have written anything
            return known(*args)
    return FillFailed(f"{kind}: {message}", kind=kind)
