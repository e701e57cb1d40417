"""What the verbs share: common options, and the cache that they open."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from forebay._config import EnvironmentSettings, default_root, without_limits
from forebay.cli.hints import NoCache
from forebay.errors import CacheFault

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from forebay._engine.store import Store
    from forebay.cache import Cache


def complete_names(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
    """Complete the name of an entry, in a shell."""
    from forebay.cli import completing  # here: only a shell that completes needs it

    return completing.names(partial(_completed_root, context), incomplete)


def complete_spaces(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
    """Complete the name of a space, in a shell."""
    from forebay.cli import completing

    return completing.spaces(partial(_completed_root, context), incomplete)


def _completed_root(context: click.Context) -> Path:
    """The directory of the cache that a line, which is being completed, is about. Raises `NoCache`."""
    root = context.params.get("root") or context.find_root().params.get("root")
    return existing(Path(root) if root else None)


def complete_directories(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
    """Let a shell complete the path of a directory."""
    from click.shell_completion import CompletionItem

    return [CompletionItem(incomplete, type="dir")]


def _path_or_none(context: click.Context, option: click.Parameter, text: str | Path | None) -> Path | None:
    return Path(text) if text else None


OPTIONS = {
    "root": click.Option(
        ["--root", "-C"], metavar="DIR", callback=_path_or_none, shell_complete=complete_directories,
        help="The cache's directory (default: $FOREBAY_HOME, else ~/.cache/forebay).",
    ),
    "json": click.Option(["--json", "as_json"], is_flag=True, help="Print one JSON document on standard output."),
    "refresh": click.Option(["--refresh"], is_flag=True, help="Ask the source now, even if the copy is fresh."),
    "yes": click.Option(["--yes", "-y"], is_flag=True, help="Do not ask for confirmation."),
    "dry-run": click.Option(["--dry-run", "-n"], is_flag=True, help="Only show what would be done."),
    "space": click.Option(["--space"], metavar="SPACE", shell_complete=complete_spaces, help="Only this space."),
    "filter": click.Option(
        ["--filter", "-f", "filters"], multiple=True, metavar="TERM", help="Such as 'size>1GB', 'used>30d', 'space=urls'; all must match."
    ),
}  # fmt: skip
"""Options that several verbs have."""
names_argument = click.argument("names", nargs=-1, required=True, metavar="NAME...", shell_complete=complete_names)


def verb(*examples: str, options: str = "") -> Callable[[Callable[..., None]], click.Command]:
    """Make a verb of a function; the first sentence of its docstring stands in the list of verbs, ``examples`` at the end of its help.
    ``options``: names of `OPTIONS`, after its own."""

    def make(function: Callable[..., None]) -> click.Command:
        first = " ".join((function.__doc__ or "").split()).split(". ")[0].rstrip(".") + "."
        epilog = "\n".join(["\b", f"{'Example' if len(examples) == 1 else 'Examples'}:", *(f"  {example}" for example in examples)])
        command = click.command(function.__name__, short_help=first, epilog=epilog)(function)  # else the first line of the help is cut
        command.params += [OPTIONS[name] for name in options.split()]
        return command

    return make


def jobs_option(default: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    return click.option(
        "--jobs", "-j", type=click.IntRange(min=1), default=default, show_default=True, metavar="N", help="Transfers at a time."
    )


def root_path(root: Path | None) -> Path:
    """Return the cache's directory: ``root``, else ``$FOREBAY_HOME``, else the default."""
    return root or EnvironmentSettings.with_faults(limits=False)[0].home or default_root(is_network=_is_network)


def _is_network(path: Path) -> bool:
    from forebay._kernel import host

    return not host.is_local(host.fs_kind(path))


def existing(root: Path | None) -> Path:
    """Return the directory of an existing cache. Raises `NoCache`: a mistyped path must not create one."""
    base = root_path(root)
    for path in (base, base / f"forebay-{os.geteuid()}", base / f"forebay-g{os.getegid()}"):
        if (path / "FORMAT").exists():
            return path
    raise NoCache.of(str(base))


@contextmanager
def opened(root: Path | None, *, change: bool = False) -> Iterator[Cache]:
    """Open the existing cache at ``root``, and close it at the end: read-only, or with ``change`` to remove, pin or repair entries.

    Reading changes nothing in it, and ignores limits in the environment: only verbs that fetch (`filled`) apply those, and create a
    cache if there is none. Raises `CacheFault` if it cannot be read, `ConfigError`."""
    from forebay.cache import Cache, fault_of  # here, so that `forebay --help` need not load the engine

    if change:
        EnvironmentSettings.from_environment()  # invalid settings, limits included, prevent any change
    path = existing(root)
    read_only = not (change and os.access(path, os.W_OK))  # another user's: operations that are not allowed raise
    # No opt-in is needed for a group's cache: no verb executes what others wrote.
    with without_limits(Cache, path, shared=bool(path.stat().st_mode & stat.S_IWGRP), read_only=read_only) as cache:
        fault = fault_of(cache)
        if fault is not None:  # a job bypasses it; here an empty result would be wrong
            raise CacheFault(f"the cache in {path} cannot be read: {fault}")
        yield cache


@contextmanager
def looked_into(root: Path | None, *, change: bool = False) -> Iterator[Cache]:
    """As `opened`; where there is no cache yet, one that keeps nothing."""
    from forebay.cache import Cache

    try:
        existing(root)
    except NoCache:
        with Cache(enabled=False) as cache:
            yield cache
        return
    with opened(root, change=change) as cache:
        yield cache


@contextmanager
def filled(root: Path | None) -> Iterator[Cache]:
    """Open the cache at ``root`` as a job does, and close it at the end: created if there is none, with the limits of the environment."""
    from forebay.cache import Cache

    with Cache(root_path(root)) as cache:
        yield cache


def store_of(cache: Cache) -> Store:
    """The store of a cache that is `opened`."""
    from forebay.cache import origin_of

    store = origin_of(cache).store
    assert store.keeps  # else the cache could not be opened
    return store
