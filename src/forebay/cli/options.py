"""What the verbs share: common options, the cache that they open, and doing one thing to each name."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forebay._config import EnvironmentSettings, default_root, without_limits
from forebay.cli.hints import ABSENT, NoCache, NoSuchSpace
from forebay.cli.render import Output, say_error, shown_name
from forebay.errors import CacheFault, ConfigError, NotCached

if TYPE_CHECKING:
    from forebay._model import Entry
    from forebay.cache import Cache


def option(*flags: str, metavar: str | None = None, help: str, parser: Callable[[str], Any] | None = None) -> Any:
    """An option whose default says nothing worth showing."""
    return typer.Option(*flags, metavar=metavar, help=help, show_default=False, parser=parser)


def _place_or_unset(text: str) -> Path | None:
    return Path(text) if text else None


def argument(metavar: str, *, help: str = "") -> Any:
    """A positional argument, shown as ``metavar``."""
    return typer.Argument(metavar=metavar, help=help, show_default=False)


RootOption = Annotated[
    Path | None,
    option(
        "--root", "-C", metavar="DIR", help="The cache's directory (default: $FOREBAY_HOME, else ~/.cache/forebay).",
        parser=_place_or_unset,
    ),
]  # fmt: skip
JsonOption = Annotated[bool, option("--json", help="One JSON document on standard output.")]
YesOption = Annotated[bool, option("--yes", "-y", help="Do not ask.")]
DryRunOption = Annotated[bool, option("--dry-run", "-n", help="Show what would go; remove nothing.")]
SpaceOption = Annotated[str | None, option("--space", metavar="SPACE", help="Only this named part of the cache.")]
FilterOption = Annotated[
    list[str], option("--filter", "-f", metavar="TERM", help="Such as 'size>1GB', 'used>30d', 'space=urls'; all must hold.")
]
JobsOption = Annotated[int, typer.Option("--jobs", "-j", min=1, metavar="N", help="How many at a time.")]
Names = Annotated[list[str], argument("NAME", help="A URL, or SPACE:KEY, as `forebay ls` shows it.")]


def place(root: Path | None) -> Path:
    """Where the cache lies: ``root``, else ``$FOREBAY_HOME``, else the default place."""
    return root or EnvironmentSettings.with_faults(limits=False)[0].home or default_root(is_network=_is_network)


def _is_network(path: Path) -> bool:
    from forebay._kernel import host

    return not host.is_local(host.fs_kind(path))


def existing(root: Path | None) -> Path:
    """The place of a cache that is there. Raises `NoCache`: looking must not make one where a path was mistyped."""
    given = place(root)
    for path in (given, given / f"forebay-{os.getuid()}", given / f"forebay-g{os.getgid()}"):
        if (path / "FORMAT").exists():
            return path
    raise NoCache.of(str(given))


@contextmanager
def opened(root: Path | None, *, change: bool = False) -> Iterator[Cache]:
    """The cache at ``root``, closed at the end: to be looked at only, or with ``change`` to remove, pin or mend what it keeps.

    Looking changes nothing in it, and takes no notice of the limits that the environment names. Only verbs that fetch (`filled`) let the
    environment set them, and make a cache where there is none. Raises `CacheFault` where it cannot be looked into, `ConfigError`."""
    from forebay.cache import Cache, fault_of  # here, so that `forebay --help` need not load the engine

    if change:
        EnvironmentSettings.from_environment()  # nothing is changed where it makes no sense, limits included
    path = existing(root)
    read_only = not (change and os.access(path, os.W_OK))  # an administrator's: what may not be changed says so itself
    # What a group shares may be looked at and removed without a word: no verb runs what others wrote.
    with without_limits(Cache, path, shared=bool(path.stat().st_mode & stat.S_IWGRP), read_only=read_only) as cache:
        fault = fault_of(cache)
        if fault is not None:  # a job reads past it; here "nothing is there" would be a lie
            raise CacheFault(f"the cache in {path} cannot be looked into: {fault}")
        yield cache


@contextmanager
def filled(root: Path | None) -> Iterator[Cache]:
    """The cache at ``root``, closed at the end, as a job opens it: made if there is none, with the limits of the environment."""
    from forebay.cache import Cache

    with Cache(place(root)) as cache:
        yield cache


def check_space(cache: Cache, name: str | None) -> None:
    """Raises `NoSuchSpace`: a mistyped name is not a space with nothing in it."""
    there = sorted(cache.stats().spaces)
    if name is not None and name not in there:
        raise NoSuchSpace.of(name, there)


def matching(entries: Iterable[Entry], names: list[str]) -> Iterator[Entry]:
    """The entries that ``names`` name: each a whole name, or its beginning, of a value its key alone. All where there are no names."""
    from forebay import remote

    heads = list(names)
    for name in names:
        with suppress(ConfigError, UnicodeError):
            heads.append(remote.canonical(name))  # as it is kept: a query by its hash, a path as a URL
    values = {f"values:{name}" for name in names}
    start = tuple(heads)
    return (entry for entry in entries if not names or entry.name.startswith(start) or entry.name in values)


def find_each(cache: Cache, names: list[str]) -> tuple[list[Entry], list[NotCached]]:
    """The entries of these names, each once, and what is wrong with the names that have none, or several."""
    found: dict[int, Entry] = {}
    missing: list[NotCached] = []
    for name in dict.fromkeys(names):
        try:
            entry = cache.entry(name)
            if entry is None:
                raise NotCached.of(shown_name(name))
            found[entry.id] = entry
        except NotCached as error:
            missing.append(error)
    return list(found.values()), missing


def each_name(cache: Cache, names: list[str], act: Callable[[Entry], object], *, done: str, as_json: bool) -> None:
    """Do ``act`` to each name that the cache holds, and say so; exits with `ABSENT` if one was missing."""
    output = Output(as_json)
    entries, missing = find_each(cache, names)
    present = []
    for entry in entries:
        try:
            act(entry)
        except NotCached as error:  # gone meanwhile
            missing.append(error)
        else:
            present.append(entry.name)
            output.line(f"{done}: {entry.name}")
    output.document({done: present, "missing": [gone.key for gone in missing]})
    for gone in missing:
        say_error(gone)
    if missing:
        raise typer.Exit(ABSENT)
