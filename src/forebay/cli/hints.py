"""What to do about an error, and its exit code: one table by type."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import NamedTuple

import click

from forebay import _config_file, errors

OK = 0
FAILED = 1
USAGE = 2
ABSENT = 3
INTERRUPTED = 130
PIPE = 141  # as a shell shows a process that SIGPIPE ended

COMPLETE = "_FOREBAY_COMPLETE"
"""The environment variable with which a shell requests completions."""


class OutputFailed(errors.ForebayError, OSError):
    """The output of a verb cannot be written."""


class NotFreed(errors.ForebayError, RuntimeError):
    """Less could be removed than requested."""


class NoCache(errors.ForebayError, FileNotFoundError):
    """There is no cache at ``path`` yet, and the verb does not create one."""

    path: str

    @classmethod
    def of(cls, path: str) -> NoCache:
        return cls(f"there is no cache at {path}", path=path)


class NoSuchSpace(errors.NotCached):
    """The cache has no space of this name."""

    @classmethod
    def of(cls, key: str, spaces: Sequence[str] = ()) -> NoSuchSpace:
        return cls(f"there is no space {key!r}; the spaces are: {', '.join(spaces) or 'none'}", key=key)


class Hint(NamedTuple):
    """The second line of an error, and the exit code."""

    todo: str
    code: int = FAILED


_IN_USE = "`forebay ls --leased` shows entries in use"
_RESUMES = Hint("run it again: what arrived is kept, and resumed if the source allows it")

# A class precedes its bases: the first match is used.
_HINTS: tuple[tuple[type[BaseException], Hint], ...] = (
    (errors.ConfigError, Hint("correct it: `forebay VERB --help` lists its arguments and options", USAGE)),
    (errors.MissingExtra, Hint("install it into forebay's environment, then run the command again")),
    (OutputFailed, Hint("the cache is fine: check where the output goes")),
    (NotFreed, Hint(f"{_IN_USE}; `forebay unpin` lets entries be evicted; `forebay budget SIZE` raises the budget")),
    (NoCache, Hint("`forebay pull URL` creates one; --root or FOREBAY_HOME selects another directory", ABSENT)),
    (errors.NewerFormat, Hint("upgrade forebay, or give this version a directory of its own with --root")),
    (errors.RootError, Hint("choose a local directory with --root or FOREBAY_HOME (claims: FOREBAY_CLAIMS); `forebay doctor` says more")),
    (errors.NoSpace, Hint(f"raise the budget with `forebay budget SIZE`, or run `forebay prune --free SIZE`; {_IN_USE}")),
    (errors.ReadOnly, Hint("run it as the owner of the cache, or select your own with --root")),
    (errors.Damaged, Hint("`forebay verify --repair` sets damaged entries aside")),
    (errors.NoLocks, Hint("run it on Linux itself, or in a sandbox that passes fcntl(F_OFD_SETLK) on: see `forebay doctor`")),
    (errors.WriterBusy, Hint("the cache is fine: run it again when other processes write less")),
    (errors.CacheFault, Hint("`forebay doctor` looks for the cause, `forebay verify --repair` repairs the cache")),
    (errors.ConnectionsBusy, Hint("raise FOREBAY_MAX_CONNECTIONS, or run it again when other processes transfer less")),
    (errors.WaitTimeout, Hint("wait for the holder, or end it: what it fetched is kept")),
    (errors.ClaimConflict, Hint("`forebay claims` shows who has it: end that job, or give this one a directory of its own")),
    (errors.ClaimMismatch, Hint("start all ranks with the same directories, and shapes of shared memory")),
    (errors.BarrierBroken, Hint("a participant died: the log of that process says why")),
    (errors.Offline, Hint("`forebay warm` fills a cache while there is a network", ABSENT)),
    (NoSuchSpace, Hint("`forebay du` lists the spaces", ABSENT)),
    (errors.Ambiguous, Hint("use one of these names: `forebay ls` lists the entries", ABSENT)),
    (errors.ChecksumMismatch, Hint("check the expected sum; `forebay pull --refresh URL` asks the source again")),
    (errors.NotFound, Hint("check the name; the URL of a directory ends with a slash")),
    (errors.NotADirectory, Hint("remove the slash at the end of the URL to get the object")),
    (errors.Incomplete, Hint("wait for the end of its upload; if it was interrupted, the same `forebay push` completes it")),
    (errors.BadListing, Hint("rename or remove that object at the source")),
    (errors.Foreign, Hint("move the file away, use another directory, or pass --overwrite")),
    (errors.AccessDenied, Hint("check the credentials in this shell (environment, ~/.netrc, ~/.aws) and the rights on the object")),
    (errors.Archived, Hint("restore it in its store and repeat the command then, or leave it out with --exclude")),
    (errors.RemoteTimeout, _RESUMES),
    (errors.RemoteUnavailable, _RESUMES),
    (errors.RemoteChanged, Hint("run it again when the source no longer changes")),
    (errors.Conflict, Hint("another process writes there: run it again when it is done")),
    (errors.Unsupported, Hint("write to s3://, to a path, or to another filesystem that can")),
    (errors.SourceChanged, Hint("run it again when the files no longer change: what was sent is not sent again")),
    (errors.RemoteError, Hint("check the URL and the source")),
    (PermissionError, Hint("check the owner and the mode of the file")),
    (OSError, Hint("`forebay doctor` looks for the cause")),
)


def hint_for(error: BaseException) -> Hint:
    """Return what to do about ``error``: its own ``todo``, else that of its class."""
    hint = next((hint for kind, hint in _HINTS if isinstance(error, kind)), None)
    if type(error) is errors.NotCached:
        key = str(getattr(error, "key", ""))
        is_url = "://" in key or key.startswith("/")
        todo = f"`forebay pull {shlex.quote(key)}` fetches it" if is_url else "check the name: `forebay ls -q` lists all"
        hint = Hint(todo, ABSENT)
    name = str(getattr(error, "name", "")) if isinstance(error, errors.ConfigError) else ""
    if _config_file.NAME in name:
        hint = Hint("correct the file: `forebay config` shows all settings", USAGE)
    elif name.startswith("FOREBAY_"):
        hint = Hint(f"correct the variable, or run `unset {name}`; `forebay config` shows all settings", USAGE)
    hint = hint or Hint("this is a bug in Forebay: FOREBAY_VERBOSITY=debug shows where; please report it")
    todo = getattr(error, "todo", "") or hint.todo.replace("forebay VERB", command())
    return hint._replace(todo=str(todo))


def command() -> str:
    """Return the running command as it is typed, with its verb once that is known."""
    context = click.get_current_context(silent=True)
    verb = context.find_root().invoked_subcommand if context is not None else None
    return f"forebay {verb}" if verb else "forebay"


def is_expected(error: BaseException) -> bool:
    """Whether the error has an external cause, and is no bug in Forebay."""
    return isinstance(error, (errors.ForebayError, OSError))


def shared_code(failures: Sequence[BaseException]) -> int:
    """Return one exit code for several errors: their common one, else `FAILED`; `OK` for none."""
    codes = {hint_for(error).code for error in failures}
    return (codes.pop() if len(codes) == 1 else FAILED) if codes else OK
