"""The verbs about settings: `budget`, `config`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from forebay import _config_file
from forebay._config import REMOTE, format_size, given_by_file, given_by_variables, parse_budget
from forebay.cli.hints import FAILED, NoCache
from forebay.cli.options import opened, root_path, store_of, verb
from forebay.cli.render import Output, argument_of_verbosity, confirmed, note, print_error
from forebay.errors import CacheFault, ConfigError, ForebayError, ReadOnly

if TYPE_CHECKING:
    from forebay.cache import Cache

OF_ROOT = ("budget", "min_free", "max_entries", "max_rate", "max_connections")
OTHERS = ("max_age", "offline", "shared", "progress", "verbosity", *map(str.lower, REMOTE), "s3_anonymous", "claims")
DEFAULTS = {
    "budget": "75 % of the free space, once the cache is created", "min_free": "5 % of the disk", "max_age": "300s", "offline": "0",
    "shared": "0", "progress": "on a terminal", "verbosity": "warning", "connect_timeout": "10", "read_timeout": "30", "attempts": "5",
    "connections": "16", "streams": "8", "s3_anonymous": "only if no credentials are found", "claims": "/dev/shm/forebay-claims",
}  # fmt: skip
"""What holds where nothing is set; no limit for the others."""


# -- budget ------------------------------------------------------------------------------------------------------------


@verb("forebay budget", "forebay budget 500GB", options="dry-run yes root json")
@click.argument("size", required=False, metavar="[SIZE]")
def budget(size: str | None, dry_run: bool, yes: bool, root: Path | None, as_json: bool) -> None:
    """Show the budget of the cache, or change it for all processes. Lowering it evicts the least recently used entries at once, after
    asking. No other verb changes it; FOREBAY_BUDGET applies only when a cache is created."""
    from forebay._engine.store import Settings  # here, so that `forebay --help` need not load it
    from forebay._kernel import host
    from forebay.cli.checkup import unused_setting

    output = Output(as_json)
    with opened(root, change=size is not None and not dry_run) as cache:
        before, path, disk = cache.budget, cache.path, host.disk(cache.path)
        if size is not None:
            after = parse_budget(size, total=disk.total, name="SIZE")
            over = _used(cache) - after
            if over > 0 and (dry_run or not yes):
                output.line(f"{format_size(_used(cache))} are used: about {format_size(over)} would be evicted, least recently used first")
            if over > 0 and not (dry_run or yes or confirmed("Lower the budget?")):
                raise click.exceptions.Exit(FAILED)
            if not dry_run:
                store = store_of(cache)
                if store.root.read_only:
                    raise ReadOnly.of(path)
                if not store.configure(Settings(budget=after)):
                    raise CacheFault(f"{store.root.settings} cannot be written now: the budget is not changed")
        usage = cache.stats()
    output.document({"path": path, "budget": usage.budget, "before": before, "used": usage.bytes_used, "reserved": usage.bytes_reserved})
    if size is not None and not dry_run:
        output.line(f"the budget of {path} is {format_size(usage.budget)} now, for all processes; it was {format_size(before)}")
        return
    output.line(f"{format_size(usage.budget)} for all processes; {format_size(usage.bytes_used + usage.bytes_reserved)} used")
    if size is None:
        with suppress(ConfigError):  # `config` and `doctor` report it
            message = unused_setting(path, usage.budget, disk.total)
            if message:
                note(message)


def _used(cache: Cache) -> int:
    usage = cache.stats()
    return usage.bytes_used + usage.bytes_reserved


# -- config ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting and its source: ``argument``, ``variable``, ``file``, ``cache`` or ``default``. ``where``: which one of these.
    ``unused``: other values, and what sets them."""

    name: str
    value: str
    source: str
    where: str = ""
    unused: tuple[str, ...] = ()


@verb("forebay config", options="root json")
def config(root: Path | None, as_json: bool) -> None:
    """Show all settings, their values, and what set each: an argument, a variable, your forebay.toml or the cache. Creates nothing."""
    from forebay.cli.checkup import setting_faults  # here: other verbs need not load it

    settings = list(_settings(root))
    faults = setting_faults()
    file, state = _state_of_file()
    output = Output(as_json)
    output.document({"file": file, "state": state, "settings": settings, "faults": [str(fault) for fault in faults]})
    output.table(("SETTING", "VALUE", "SET BY", "NOT USED"), ((s.name, s.value, _set_by(s), "; ".join(s.unused)) for s in settings))
    output.line(f"your settings: {file or 'no home directory for them'} ({state})")
    for fault in faults:
        print_error(fault)
    if faults:
        raise click.exceptions.Exit(FAILED)


def _set_by(setting: Setting) -> str:
    return f"{setting.source} {setting.where}".rstrip()


def _state_of_file() -> tuple[Path | None, str]:
    try:
        file = _config_file.read(os.environ)
    except ConfigError:
        return _config_file.location(os.environ), "invalid"
    return file.path, f"ignored: {file.ignored}" if file.ignored else "read" if file.is_there else "does not exist"


def _settings(root: Path | None) -> Iterator[Setting]:
    given = [("variable", given_by_variables(os.environ)), ("file", given_by_file(os.environ)[0])]
    path, limits = _limits_of_root(root)
    arguments = {"home": Setting("home", str(root), "argument", "--root")} if root else {}
    verbosity = argument_of_verbosity()
    if verbosity:
        arguments["verbosity"] = Setting("verbosity", verbosity[1], "argument", verbosity[0])
    for name in ("home", *OF_ROOT, *OTHERS):
        sources = [Setting(name, own[name].text, source, own[name].name.partition(": ")[0]) for source, own in given if name in own]
        kept = [Setting(name, limits[name], "cache", path)] if name in limits else []
        sources = kept + sources if name == "budget" else sources + kept  # a budget that is given is for a cache that is created
        default = path if name == "home" else DEFAULTS.get(name, "no limit")
        first, *rest = [*([arguments[name]] if name in arguments else []), *sources, Setting(name, default, "default")]
        unused = tuple(f"{other.value} ({_set_by(other)})" for other in rest if other.source in ("variable", "file"))
        yield replace(first, value=path if name == "home" else first.value, unused=unused)


def _limits_of_root(root: Path | None) -> tuple[str, dict[str, str]]:
    """The cache's directory, and the limits that it keeps, as they are shown; none if there is no cache, or it cannot be read."""

    try:
        with opened(root) as cache:
            limits = {name: value for name, value in store_of(cache).spaces.root_limits().items() if value is not None}
            return str(cache.path), {name: _shown(name, value) for name, value in limits.items()}
    except NoCache as error:
        return str(error.path), {}
    except ForebayError as error:
        note(f"what the cache keeps cannot be read: {error}")
        return str(root_path(root)), {}


def _shown(name: str, value: int) -> str:
    if name in ("budget", "min_free"):
        return format_size(value)
    if not value and name != "max_entries":
        return "no limit"
    return f"{format_size(value)}/s" if name == "max_rate" else f"{value:,}"
