"""Every error that Forebay raises.

    ForebayError
    ├── ConfigError (ValueError)             an argument or a variable of the environment makes no sense
    │   └── NotJson (TypeError)              metadata that JSON cannot hold
    ├── MissingExtra (ImportError)           an optional package is needed for this URL or front
    ├── Closed (ValueError, RuntimeError)    a call after close()
    ├── RootError (OSError)                  this directory cannot be a cache
    │   ├── RootRefused                      another user's, on a network file system, or with foreign files
    │   └── NewerFormat                      written by a newer Forebay
    ├── CacheFault (OSError)                 the cache itself failed; calls are served past it
    │   ├── WriterBusy                       another process writes to the catalog, or was stopped while it did
    │   ├── NoSpace                          (ENOSPC) no room, with need, free and budget
    │   ├── ReadOnly                         (EROFS) this root may only be read
    │   └── Damaged                          stored bytes differ from what was stored
    ├── WaitTimeout (TimeoutError)           what was waited for, how long, who holds it
    ├── Offline (FileNotFoundError)          not in the cache, and asking the remote is forbidden
    ├── NotCached (KeyError)                 a key that the cache does not hold
    │   └── Ambiguous                        a name that means several entries
    ├── ChecksumMismatch (ValueError)        the source's bytes are not those the caller expected
    ├── ClaimConflict (ValueError)           a directory belongs to another job, or to another claim of this one
    ├── ClaimMismatch (RuntimeError)         a rank says something else than its leader, or than who made the shared memory
    ├── BarrierBroken (BrokenBarrierError)   a participant died: the barrier cannot be crossed this time
    ├── FillFailed (RuntimeError)            another process's function raised an error that cannot be rebuilt here
    ├── Foreign (FileExistsError)            a file that is not ours stands where one of ours is to go
    ├── SourceChanged (RuntimeError)         a local file was changed while it was sent
    └── RemoteError (OSError)                the source failed
        ├── NotFound (FileNotFoundError)
        ├── AccessDenied (PermissionError)
        ├── RemoteTimeout (TimeoutError)
        ├── RemoteUnavailable (ConnectionError)   retries are used up
        ├── RemoteChanged                    the object became another one while it was read
        ├── Conflict (FileExistsError)       a conditional write found another object there
        ├── Unsupported (NotImplementedError)     this kind of place cannot do that
        ├── RemoteProtocolError              an answer that HTTP or S3 does not allow
        ├── BadArchive                       a tar that is cut short, damaged, or none
        ├── BadListing                       a name that no file below the directory can have
        ├── NotADirectory (NotADirectoryError)    an object where a directory is wanted
        └── Incomplete                       an upload to this directory has begun and not ended

Each is pickled and rebuilt with its message, its facts, its notes and what led to it, so that one raised in a worker reaches the main
process. A cause that cannot be pickled arrives as a `RemoteCause` that names its class and has its text.
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import pickle
import shlex
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
}
"""The extras of Forebay, and the packages that each brings."""


_DEEPEST = 32  # errors that led to one another


class ForebayError(Exception):
    """Base of all errors of Forebay.

    ``facts`` holds what the message was made of; each fact is an attribute too.
    """

    facts: dict[str, Any]

    def __init__(self, message: str = "", **facts: Any) -> None:
        Exception.__init__(self, message)
        self.facts = facts
        for name, value in facts.items():
            setattr(self, name, value)

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), str(self), _portable(self.facts), _others_of(self), _story_of(self, set()))


def _rebuild(
    cls: type[ForebayError], message: str, facts: dict[str, Any], others: dict[str, Any] | None = None, story: _Story | None = None
) -> ForebayError:  # fmt: skip
    # Not `cls.__new__`: of a class of two errors that is the first one's, and may not be the one that makes its instances.
    base: type | None = cls
    while base is not None and issubclass(base, ForebayError):
        base = base.__base__
    error: ForebayError = (base or Exception).__new__(cls)
    ForebayError.__init__(error, message, **facts)
    for name, value in (others or {}).items():
        setattr(error, name, value)
    if story is not None:
        _tell_again(error, story)
    return error


def _others_of(error: ForebayError) -> dict[str, Any]:
    """What was noted in an error beside its facts."""
    return _portable({name: value for name, value in vars(error).items() if name not in error.facts and name not in ("facts", "__notes__")})


class RemoteCause(Exception):
    """Stands for an error of another process that cannot be pickled. Its text names the class of that one, and what it said."""


_Story = tuple[Any, Any, bool, list[str]]  # cause, context, whether that is hidden, notes


def _story_of(error: BaseException, visited: set[int]) -> _Story | None:
    """What led to an error, as far as it can be pickled; None: nothing did."""
    visited.add(id(error))
    notes = [str(note) for note in getattr(error, "__notes__", ())]
    is_silenced = error.__cause__ is None and error.__suppress_context__  # `from None`: its text may hold a secret
    cause, context = (_stand_in(reason, visited) for reason in (error.__cause__, None if is_silenced else error.__context__))
    if cause is None and context is None and not notes:
        return None
    return cause, None if error.__context__ is error.__cause__ else context, error.__suppress_context__, notes


def _tell_again(error: BaseException, story: _Story) -> None:
    cause, context, hidden, notes = story
    cause, context = (reason.told() if isinstance(reason, _Retold | _Carried) else reason for reason in (cause, context))
    error.__cause__, error.__context__, error.__suppress_context__ = cause, context or cause, hidden
    if notes:
        error.__notes__ = notes  # an error of another package may have brought them itself


class _Retold:
    """Carries an error together with what led to it, which is not in its own pickle."""

    def __init__(self, error: BaseException, story: _Story) -> None:
        self._error, self._story = error, story

    def told(self) -> BaseException:
        _tell_again(self._error, self._story)
        return self._error

    def __reduce__(self) -> tuple[Any, ...]:
        return _told_of, (self._error, self._story)


def _told_of(error: BaseException, story: _Story) -> BaseException:
    return _Retold(error, story).told()


class _Carried:
    """Carries an error of another package in its own pickle: where its class is not known, as of another program's ``__main__``, what is
    unpickled around it must come all the same. ``data``: empty where it cannot be pickled."""

    def __init__(self, data: bytes, text: str, story: _Story | None) -> None:
        self._data, self._text, self._story = data, text, story

    def told(self) -> BaseException:
        error: BaseException = RemoteCause(self._text)
        try:
            known = pickle.loads(self._data)
        except Exception:  # noqa: BLE001  whatever its class, not ours, makes of it
            known = None
        if isinstance(known, BaseException):
            error = known
        if self._story is not None:
            _tell_again(error, self._story)
        return error

    def __reduce__(self) -> tuple[Any, ...]:
        return _carried, (self._data, self._text, self._story)


def _carried(data: bytes, text: str, story: _Story | None) -> BaseException:
    return _Carried(data, text, story).told()


def _stand_in(reason: BaseException | None, visited: set[int]) -> Any:
    """``reason`` itself where it can be pickled and comes back as it was, else its text. None where it was told before: errors may form
    a ring."""
    if reason is None or id(reason) in visited or len(visited) > _DEEPEST:
        return None
    story = _story_of(reason, visited)
    if isinstance(reason, ForebayError):  # one that knows nothing of what led to it: its story is told here, where rings are seen
        copy: BaseException = _rebuild(type(reason), str(reason), _portable(reason.facts), _others_of(reason))
        return copy if story is None else _Retold(copy, story)
    text = f"{type(reason).__module__}.{type(reason).__qualname__}: {reason}"
    try:
        data = pickle.dumps(reason)
        copy = pickle.loads(data)
        sound = type(copy) is type(reason) and str(copy) == str(reason)
    except Exception:  # noqa: BLE001  whatever its class, not ours, makes of it
        sound = False
    return _Carried(data if sound else b"", text, story)


def _portable(facts: dict[str, Any]) -> dict[str, Any]:
    """Facts as they can be pickled, and come back: of others the text."""
    portable = {}
    for name, value in facts.items():
        try:
            pickle.loads(pickle.dumps(value))
            portable[name] = value
        except Exception:  # noqa: BLE001  whatever its class makes of it
            portable[name] = repr(value)
    return portable


class ConfigError(ForebayError, ValueError):
    """An argument or a variable of the environment that makes no sense."""


class NotJson(ConfigError, TypeError):
    """Metadata that JSON cannot hold: what `json.dumps` refuses, or no dict."""


class MissingExtra(ForebayError, ImportError):
    """An optional package is missing. ``extra``: the extra of Forebay that brings it."""

    extra: str

    @classmethod
    def of(cls, what: str, extra: str) -> MissingExtra:
        packages = " ".join(map(shlex.quote, EXTRAS.get(extra, (extra,))))  # a shell may take brackets for a pattern
        return cls(f"{what} needs the extra {extra!r} of Forebay, which is not installed: pip install {packages}", extra=extra)


class Closed(ForebayError, ValueError, RuntimeError):
    """A call on a handle after its ``close()``."""

    @classmethod
    def of(cls, what: str) -> Closed:
        return cls(f"this {what} is closed: open a new one", what=what)


class RootError(ForebayError, OSError):
    """This directory cannot be used as a cache. ``path``: the directory."""

    path: str


class RootRefused(RootError):
    """The directory is another user's, lies on a file system that cannot hold a cache, has foreign files, or cannot be made."""


class NewerFormat(RootError):
    """The root was written by a newer Forebay. ``found``, ``known``: the two format versions."""

    found: int
    known: int


class CacheFault(ForebayError, OSError):
    """The cache itself failed. Calls that can do without it are served from the source."""


class WriterBusy(CacheFault):
    """The catalog cannot be written to now: another process is writing, or was stopped while it did. ``waited``: seconds; ``holder``: the
    process, with its pid and command."""

    waited: float
    holder: str


class NoSpace(CacheFault):
    """No room in the cache, nor on the disk. ``need``, ``free``, ``budget``: bytes. ``hopeless``: it would not fit into an empty cache.
    ``limit``: what is used up: ``budget``, ``disk`` or ``quota``, which ``budget`` then is."""

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
        """``charge``: what ``need`` bytes take on the disk, where that is what the limit counts."""
        what = "quota" if limit == "quota" else "budget"
        takes = f", which take {charge:,} on the disk" if charge > need else ""
        return cls(
            f"no room for {key!r}: {need:,} bytes wanted{takes}, {max(free, 0):,} of the {what} of {budget:,} can be had: {todo}",
            key=key, need=need, free=free, budget=budget, hopeless=hopeless, limit=limit,
        )  # fmt: skip


class ReadOnly(CacheFault):
    """This root was opened to be read, or may only be read. ``path``: the root."""

    errno = errno.EROFS
    path: str

    @classmethod
    def of(cls, path: object) -> ReadOnly:
        return cls(f"{path} is read-only here: its owner can do that, without read_only=True", path=str(path))


class Damaged(CacheFault):
    """Stored bytes are not what was stored. ``key``: whose; the entry is set aside and fetched again."""

    key: str


class WaitTimeout(ForebayError, TimeoutError):
    """``what`` was waited for, ``waited`` seconds long, while ``holder`` had it, or did not come."""

    what: str
    waited: float
    holder: str

    @classmethod
    def of(cls, what: str, waited: float, holder: str, by: str = "held by") -> WaitTimeout:
        return cls(f"waited {waited:.1f} s for {what}, {by} {holder}", what=what, waited=waited, holder=holder)


class Offline(ForebayError, FileNotFoundError):
    """The URL is not in the cache and asking the remote is forbidden. ``url``."""

    url: str

    @classmethod
    def of(cls, url: str) -> Offline:
        return cls(f"{url} is not in the cache, and offline mode forbids to fetch it: unset FOREBAY_OFFLINE, or fetch it first", url=url)


class NotCached(ForebayError, KeyError):
    """The cache holds nothing under this key. ``key``."""

    key: str

    @classmethod
    def of(cls, key: str) -> NotCached:
        return cls(f"{key!r} is not in the cache: see `forebay ls`", key=key)


class Ambiguous(NotCached):
    """The name means several entries. Nothing was done. ``key``: the name; ``names``: what each is called in full."""

    names: list[str]

    @classmethod
    def of(cls, key: str, names: Sequence[str] = ()) -> Ambiguous:
        return cls(f"{key!r} may mean {' or '.join(map(repr, names))}: say which one", key=key, names=list(names))


class ChecksumMismatch(ForebayError, ValueError):
    """The source's bytes are not those that the caller expected. ``wanted``, ``found``."""

    wanted: str
    found: str

    @classmethod
    def of(cls, url: str, wanted: str, found: str) -> ChecksumMismatch:
        return cls(f"{url}: {found} came where {wanted} was expected: nothing was kept", url=url, wanted=wanted, found=found)


class ClaimConflict(ForebayError, ValueError):
    """A directory that was claimed overlaps with one of another live claim. ``ours``, ``theirs``: the two claims in plain values:
    job, directories, remotes, pids, user, started (seconds since 1970), command. Nothing was claimed."""

    ours: dict[str, Any]
    theirs: dict[str, Any]


class ClaimMismatch(ForebayError, RuntimeError):
    """Two processes of a job say different things of what they share: directories, or the shape or type of shared memory."""


class BarrierBroken(ForebayError, threading.BrokenBarrierError):
    """A participant died while others waited at this ``barrier``. ``missing``: who did not come, in words. Once every survivor has
    seen it, the barrier can be used again."""

    barrier: str
    missing: list[str]


class FillFailed(ForebayError, RuntimeError):
    """The function that another process ran for this key raised an error that cannot be rebuilt here. ``kind``: its class."""

    kind: str


class Foreign(ForebayError, FileExistsError):
    """A file that is not ours, or was changed, stands where one of ours is to go. Nothing was written. ``path``: the file."""

    path: str
    errno = errno.EEXIST


class SourceChanged(ForebayError, RuntimeError):
    """A local file was changed, or removed, while it was sent. ``path``. Send it again when it is at rest."""

    path: str

    @classmethod
    def of(cls, path: object) -> SourceChanged:
        return cls(f"{path} was changed while it was sent: send it again when it is at rest", path=str(path))


class RemoteError(ForebayError, OSError):
    """The source failed. ``url``; ``status``: the answer's HTTP status, if there was one."""

    url: str
    status: int | None = None


class NotFound(RemoteError, FileNotFoundError):
    """There is no such object. Never remembered: the next call asks again."""

    errno = errno.ENOENT


class AccessDenied(RemoteError, PermissionError):
    """The remote refuses to show this object with these credentials."""

    errno = errno.EACCES


class RemoteTimeout(RemoteError, TimeoutError):
    """Nothing came for too long. ``done``: bytes that had come; ``attempts``: 0 where the remote was not even asked."""

    done: int = 0
    attempts: int = 1


class RemoteUnavailable(RemoteError, ConnectionError):
    """Every attempt failed. ``attempts``; ``done``: bytes that had come."""

    attempts: int = 1
    done: int = 0


class RemoteChanged(RemoteError):
    """The object became another one while it was read."""


class Conflict(RemoteError, FileExistsError):
    """A conditional write found an object there that it must not replace. Nothing was written."""

    errno = errno.EEXIST


class Unsupported(RemoteError, NotImplementedError):
    """This kind of place cannot do that: no HTTP server takes our writes, few filesystems know conditional ones. Nothing was written."""


class RemoteProtocolError(RemoteError):
    """An answer that does not fit the question: a wrong range, a body that is too short or too long."""


class BadArchive(RemoteError):
    """A tar that is cut short, damaged, compressed, or none. ``offset``: of the byte where that was seen."""

    offset: int


class BadListing(RemoteError):
    """A remote directory lists a name that no file below a directory here can have. ``name``. Nothing was written."""

    name: str


class NotADirectory(RemoteError, NotADirectoryError):
    """There is an object under this name, and no directory."""

    errno = errno.ENOTDIR


class Incomplete(RemoteError):
    """An upload to this directory has begun and not ended: what is there is not the whole. ``missing``: how many files are not there."""

    missing: int


def to_wire(error: BaseException) -> dict[str, Any]:
    """Returns the error as plain JSON values, for other processes. Nothing that is read back from it runs code."""
    wire: dict[str, Any] = {"kind": type(error).__name__, "message": str(error)}
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
    """Returns the error that `to_wire` described: of the same class for Forebay's own and the built-in ones, else `FillFailed`."""
    kind, message, args = str(wire.get("kind")), str(wire.get("message")), wire.get("args")
    own, known = globals().get(kind), getattr(builtins, kind, None)
    if isinstance(own, type) and issubclass(own, ForebayError):
        return _rebuild(own, message, dict(wire.get("facts") or {}))
    if isinstance(known, type) and issubclass(known, Exception) and isinstance(args, list):
        with contextlib.suppress(TypeError, ValueError):  # another process may have written anything
            return known(*args)
    return FillFailed(f"{kind}: {message}", kind=kind)
