"""What the verbs share: common options, and the cache that they open."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from forebay._config import EnvironmentSettings, default_root, without_limits
from forebay.cli.hints import NoCache, NoSuchSpace
from forebay.cli.render import shown_name
from forebay.errors import CacheFault, ConfigError, NotCached

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from forebay._model import Entry
    from forebay.cache import Cache


def verb(*examples: str) -> Callable[[Callable[..., None]], click.Command]:
    """Make a verb of a function; the first sentence of its docstring stands in the list of verbs, ``examples`` at the end of its help."""

    def make(function: Callable[..., None]) -> click.Command:
        first = " ".join((function.__doc__ or "").split()).split(". ")[0].rstrip(".") + "."
        epilog = "\n".join(["\b", f"{'Example' if len(examples) == 1 else 'Examples'}:", *(f"  {example}" for example in examples)])
        return click.command(function.__name__, short_help=first, epilog=epilog)(function)  # else the first line of the help is cut

    return make


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


root_option = click.option(
    "--root", "-C", metavar="DIR", callback=_path_or_none, shell_complete=complete_directories,
    help="The cache's directory (default: $FOREBAY_HOME, else ~/.cache/forebay).",
)  # fmt: skip
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document on standard output.")
refresh_option = click.option("--refresh", is_flag=True, help="Ask the source now, even if the copy is fresh.")
yes_option = click.option("--yes", "-y", is_flag=True, help="Do not ask for confirmation.")
dry_run_option = click.option("--dry-run", "-n", is_flag=True, help="Only show what would be done.")
space_option = click.option("--space", metavar="SPACE", shell_complete=complete_spaces, help="Only this space.")
filter_option = click.option(
    "--filter", "-f", "filters", multiple=True, metavar="TERM", help="Such as 'size>1GB', 'used>30d', 'space=urls'; all must match."
)
names_argument = click.argument("names", nargs=-1, required=True, metavar="NAME...", shell_complete=complete_names)


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
def looked_into(root: Path | None) -> Iterator[Cache]:
    """As `opened`; where there is no cache yet, one that keeps nothing."""
    from forebay.cache import Cache

    try:
        existing(root)
    except NoCache:
        with Cache(enabled=False) as cache:
            yield cache
        return
    with opened(root) as cache:
        yield cache


@contextmanager
def filled(root: Path | None) -> Iterator[Cache]:
    """Open the cache at ``root`` as a job does, and close it at the end: created if there is none, with the limits of the environment."""
    from forebay.cache import Cache

    with Cache(root_path(root)) as cache:
        yield cache


def check_space(cache: Cache, name: str | None) -> None:
    """Raise `NoSuchSpace` for an unknown name: a mistyped name must not look like an empty space."""
    if name is not None and name not in (spaces := sorted(cache.stats().spaces)):
        raise NoSuchSpace.of(name, spaces)


def matching(cache: Cache, entries: Iterable[Entry], names: Sequence[str]) -> Iterator[Entry]:
    """Yield the entries whose names begin with one of ``names``, or whose key is one; all if ``names`` is empty."""
    from forebay import remote
    from forebay.cache import origin_of

    heads = list(names)
    for name in names:
        with suppress(ConfigError, UnicodeError):
            heads.append(remote.canonical(name, origin_of(cache).naming))  # as it is stored: a query as its hash, a path as a URL
    values = {f"values:{name}" for name in names}
    prefixes = tuple(heads)

    def is_named(name: str) -> bool:
        return name.startswith(prefixes) or name in values or remote.without_user(name).startswith(prefixes)

    return (entry for entry in entries if not names or is_named(entry.name))


def find_each(cache: Cache, names: Sequence[str]) -> tuple[list[Entry], dict[str, NotCached]]:
    """Return the entries of these names, each once, and an error for each name with no entry, or several."""
    entries: dict[int, Entry] = {}
    missing: dict[str, NotCached] = {}
    for name in dict.fromkeys(names):
        try:
            entry = cache.entry(name)
            if entry is None:
                raise NotCached.of(shown_name(name))
            entries[entry.id] = entry
        except NotCached as error:
            missing[name] = error
    return list(entries.values()), missing
