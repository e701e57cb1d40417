"""What the verbs share: common options, the cache that they open, and doing one thing to each name."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forebay._config import Settings, default_root
from forebay.cli.hints import ABSENT, NoCache, NoSuchSpace
from forebay.cli.render import Output, say_error
from forebay.errors import NotCached

if TYPE_CHECKING:
    from forebay._model import Entry
    from forebay.cache import Cache


def option(*flags: str, metavar: str | None = None, help: str) -> Any:
    """An option whose default says nothing worth showing."""
    return typer.Option(*flags, metavar=metavar, help=help, show_default=False)


def argument(metavar: str, *, help: str = "") -> Any:
    """A positional argument, shown as ``metavar``."""
    return typer.Argument(metavar=metavar, help=help, show_default=False)


RootOption = Annotated[
    Path | None, option("--root", "-C", metavar="DIR", help="The cache's directory (default: $FOREBAY_HOME, else ~/.cache/forebay).")
]
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
    return root or Settings.from_environment().home or default_root(is_network=_is_network)


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
def opened(root: Path | None, *, make: bool = False, **arguments: Any) -> Iterator[Cache]:
    """The cache at ``root``, closed at the end. Made if there is none only with ``make``."""
    from forebay.cache import Cache  # here, so that `forebay --help` need not load the engine

    if make:
        path = place(root)
    else:
        path = existing(root)
        arguments.setdefault("read_only", not os.access(path, os.W_OK))  # an administrator's: look at it all the same
    with Cache(path, **arguments) as cache:
        yield cache


def check_space(cache: Cache, name: str | None) -> None:
    """Raises `NoSuchSpace`: a mistyped name is not a space with nothing in it."""
    there = sorted(cache.stats().spaces)
    if name is not None and name not in there:
        raise NoSuchSpace.of(name, there)


def matching(entries: list[Entry], names: list[str]) -> list[Entry]:
    """The entries that ``names`` name: each a whole name, or its beginning. All where there are no names."""
    return [entry for entry in entries if not names or entry.name.startswith(tuple(names))]


def each_name(names: list[str], act: Callable[[str], object], *, done: str, as_json: bool) -> None:
    """Do ``act`` to each name that the cache holds, and say so; exits with `ABSENT` if one was missing."""
    output, present, missing = Output(as_json), [], []
    for name in names:
        try:
            act(name)
        except NotCached as error:
            missing.append(name)
            say_error(error)
        else:
            present.append(name)
            output.line(f"{done}: {name}")
    output.document({done: present, "missing": missing})
    if missing:
        raise typer.Exit(ABSENT)
