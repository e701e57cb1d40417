"""What to do about an error, and the exit code it ends in: one table by type."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from forebay import errors

OK = 0
FAILED = 1
USAGE = 2
ABSENT = 3
INTERRUPTED = 130
PIPE = 141  # as a shell shows what SIGPIPE ended

COMPLETE = "_FOREBAY_COMPLETE"
"""The variable by which a shell asks for completions."""


_verb: list[str] = []  # the verb that runs


class OutputFailed(errors.ForebayError, OSError):
    """What a verb has to say cannot be written to where its output goes."""


class NotFreed(errors.ForebayError, RuntimeError):
    """Less could be removed than was asked for."""


class NoCache(errors.ForebayError, FileNotFoundError):
    """There is no cache at this place yet, and the verb does not make one. ``path``."""

    @classmethod
    def of(cls, path: str) -> NoCache:
        return cls(f"there is no cache at {path}", path=path)


class NoSuchSpace(errors.NotCached):
    """The cache has no space of this name."""

    @classmethod
    def of(cls, key: str, there: Sequence[str] = ()) -> NoSuchSpace:
        return cls(f"there is no space {key!r}, but: {', '.join(there) or 'none at all'}", key=key)


@dataclass(frozen=True, slots=True)
class Hint:
    """The second line of an error, and the exit code."""

    todo: str
    code: int = FAILED


# A class stands before its bases: the first that fits is taken.
_HINTS: tuple[tuple[type[BaseException], Hint], ...] = (
    (errors.ConfigError, Hint("correct what is named there: `forebay VERB --help` lists what it takes", USAGE)),
    (errors.MissingExtra, Hint("install what is named there into forebay's environment, then run the command again")),
    (OutputFailed, Hint("nothing is wrong with the cache: look at where the output goes")),
    (NotFreed, Hint("`forebay ls --leased` shows what is in use; `forebay unpin` lets entries go; or raise the budget")),
    (NoCache, Hint("`forebay pull URL` makes one; --root or FOREBAY_HOME names another place", ABSENT)),
    (errors.NewerFormat, Hint("upgrade forebay, or give this version a place of its own by --root")),
    (
        errors.RootError,
        Hint("choose a local directory by --root or FOREBAY_HOME (claims: FOREBAY_CLAIMS); `forebay doctor` looks closer"),
    ),
    (
        errors.NoSpace,
        Hint("raise FOREBAY_BUDGET, or `forebay prune --free SIZE`; `forebay ls --leased` shows what is held"),
    ),
    (errors.ReadOnly, Hint("run it as the owner of the cache, or --root names one of your own")),
    (errors.Damaged, Hint("`forebay verify --repair` sets damaged entries aside")),
    (errors.WriterBusy, Hint("nothing is wrong with the cache: run it again when others write less")),
    (errors.CacheFault, Hint("`forebay doctor` looks for the cause, `forebay verify --repair` mends the cache")),
    (errors.WaitTimeout, Hint("wait for the holder, or end it: what it has fetched is kept")),
    (errors.ClaimConflict, Hint("`forebay claims` shows who has it: end that job, or give this one a directory of its own")),
    (errors.ClaimMismatch, Hint("start all ranks with the same directories, and shapes of shared memory")),
    (errors.BarrierBroken, Hint("its participant died: the log of that process says why")),
    (errors.Offline, Hint("`forebay warm` fills a cache before the network is gone", ABSENT)),
    (NoSuchSpace, Hint("`forebay du` lists the spaces", ABSENT)),
    (errors.Ambiguous, Hint("give one of these names: `forebay ls` shows what is kept", ABSENT)),
    (errors.NotCached, Hint("`forebay pull URL` fetches it", ABSENT)),
    (errors.ChecksumMismatch, Hint("check the expected sum; `forebay pull --refresh URL` asks the source again")),
    (errors.NotFound, Hint("check the name; that of a directory ends with a slash")),
    (errors.NotADirectory, Hint("without the slash at its end the URL means the object")),
    (errors.Incomplete, Hint("wait until its upload has ended; if that was cut off, the same `forebay push` ends it")),
    (errors.BadListing, Hint("rename or remove that object at the source")),
    (errors.Foreign, Hint("move the file away, name another directory, or say --overwrite")),
    (errors.AccessDenied, Hint("check the credentials in this shell (environment, ~/.netrc, ~/.aws) and the rights on the object")),
    (errors.RemoteTimeout, Hint("run it again: what came is kept and resumed where the source allows")),
    (errors.RemoteUnavailable, Hint("run it again: what came is kept and resumed where the source allows")),
    (errors.RemoteChanged, Hint("run it again when the source is at rest")),
    (errors.Conflict, Hint("somebody else writes there: run it again when he is done")),
    (errors.Unsupported, Hint("write to s3://, to a path, or to another filesystem that can")),
    (errors.SourceChanged, Hint("run it again when the files are at rest: what was sent is not sent again")),
    (errors.RemoteError, Hint("check the URL and the source")),
    (PermissionError, Hint("check the owner and the mode of the file")),
    (OSError, Hint("`forebay doctor` looks for the cause")),
)


def hint_for(error: BaseException) -> Hint:
    """What to do about ``error``: what it says itself (``todo``), else what its class does."""
    found = next((hint for kind, hint in _HINTS if isinstance(error, kind)), None)
    if type(error) is errors.NotCached and not _is_url(getattr(error, "key", "")):
        found = Hint("check the name: `forebay ls -q` lists all", ABSENT)
    found = found or Hint("this is a fault of Forebay: FOREBAY_VERBOSITY=debug shows where; please report it")
    todo = getattr(error, "todo", "") or found.todo.replace("forebay VERB", command())
    return replace(found, todo=str(todo))


def _is_url(name: str) -> bool:
    return "://" in name or name.startswith("/")


def say_verb(name: str | None) -> None:
    """Which verb the hints are for; None: no verb yet."""
    _verb[:] = [] if name is None else [name]


def command() -> str:
    """The command that runs, as it is typed: with its verb, once that is known."""
    return " ".join(["forebay", *_verb])


def is_expected(error: BaseException) -> bool:
    """Whether the error says something of the world, not of a fault in our code."""
    return isinstance(error, (errors.ForebayError, OSError))


def shared_code(failures: Sequence[BaseException]) -> int:
    """One exit code for several errors: theirs if they agree, else `FAILED`; `OK` for none."""
    codes = {hint_for(error).code for error in failures}
    return (codes.pop() if len(codes) == 1 else FAILED) if codes else OK
