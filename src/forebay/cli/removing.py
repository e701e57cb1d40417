"""The verbs that decide what the cache keeps: `budget`, `rm`, `prune`, `clear`, `pin`, `unpin`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from forebay._config import format_size, parse_budget, parse_size
from forebay._model import Entry, Report
from forebay.cli.arguments import (
    check_space,
    complete_names,
    end_if_missing,
    find_each,
    names_argument,
    opened,
    parse_filters,
    store_of,
    verb,
)
from forebay.cli.hints import ABSENT, FAILED, NoCache, NotFreed
from forebay.cli.output import Output, ago, confirmed, count, note
from forebay.errors import CacheFault, ConfigError, ForebayError, NotCached, ReadOnly

if TYPE_CHECKING:
    from forebay._model import Strays
    from forebay.cache import Cache
    from forebay.claims import ClaimInfo
    from forebay.reports import Plan


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
            usage = cache.stats()
            used = usage.bytes_used + usage.bytes_reserved
            over = used - after
            if over > 0 and (dry_run or not yes):
                output.line(f"{format_size(used)} are used: about {format_size(over)} would be evicted, least recently used first")
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


@verb("forebay rm https://host/shard-000.tar", "forebay rm --filter 'used>30d' --dry-run", options="filter dry-run yes root json")
@click.argument("names", nargs=-1, metavar="[NAME]...", shell_complete=complete_names)
def rm(names: tuple[str, ...], filters: tuple[str, ...], dry_run: bool, yes: bool, root: Path | None, as_json: bool) -> None:
    """Remove entries by name, or by filter after asking. Entries that are in use or pinned stay, and are listed."""
    if bool(names) == bool(filters):
        raise ConfigError("rm takes names, or --filter: one of the two", name="rm", value="")
    output = Output(as_json)
    with opened(root, change=not dry_run) as cache:
        entries, missing = find_each(cache, names)
        report: Report | None
        if names and not dry_run:
            report = _remove(cache, entries, missing, output)
        else:
            ids = {entry.id for entry in entries} | _ids_of_blocks(cache, entries, missing)
            passes = (lambda entry: entry.id in ids) if names else parse_filters(filters)
            pinned = [entry.name for entry in entries if entry.life == "pinned"] if names else None
            report = _carry_out(cache.plan(where=passes), output, dry_run=dry_run, yes=yes, pinned=pinned)
    end_if_missing(missing, FAILED if report is not None and report.spared else ABSENT)
    if report is not None and report.spared:
        raise click.exceptions.Exit(FAILED)


def _ids_of_blocks(cache: Cache, entries: list[Entry], missing: dict[str, NotCached]) -> set[int]:
    """The ids of the blocks of these objects. An object of which only blocks are cached is removed from ``missing``."""
    from forebay.cache import fetcher_of
    from forebay.cache.entries import blocks_of

    fetcher = fetcher_of(cache)
    blocks = [blocks_of(fetcher, entry) for entry in entries]
    for name in list(missing):
        if some := blocks_of(fetcher, name):
            del missing[name]
            blocks.append(some)
    return {block.id for some in blocks for block in some}


def _remove(cache: Cache, entries: list[Entry], missing: dict[str, NotCached], output: Output) -> Report:
    """Remove ``entries``, and blocks of objects of which there is no entry; ``missing`` becomes the errors for what is not cached."""
    reports = []
    reports += [cache.evict(entry) for entry in entries]
    for name in list(missing):
        with suppress(NotCached):
            reports.append(cache.evict(name))
            del missing[name]
    report = Report(
        removed=tuple(name for r in reports for name in r.removed),
        spared=tuple(name for r in reports for name in r.spared),
        freed=sum(r.freed for r in reports),
    )
    output.document(report)
    _show_report(report, output, pinned=[entry.name for entry in entries if entry.life == "pinned"])
    return report


@verb("forebay prune", "forebay prune --free 20GB --dry-run", options="filter space dry-run yes root json")
@click.option("--free", metavar="SIZE", help="Make room for SIZE more bytes, least recently used first.")
def prune(
    free: str | None, filters: tuple[str, ...], space: str | None, dry_run: bool, yes: bool, root: Path | None, as_json: bool
) -> None:
    """Remove what exceeds the limits, and what killed processes left unfinished; or what --free and --filter select.

    Entries in use stay. Unfinished downloads stay too, to be resumed, until their room is needed. Without --free and --filter,
    the claims of dead jobs are freed as well, even if there is no cache.
    """
    passes = parse_filters(filters) if filters else None
    if space is not None and free is None and passes is None:
        raise ConfigError("--space requires --free or --filter; `forebay clear --space` removes it all", name="--space", value=space)
    output = Output(as_json)
    if free is not None or passes is not None:
        with opened(root, change=not dry_run) as cache:
            check_space(cache, space)
            plan = cache.plan(None if free is None else _parse_free(free, cache.budget), where=passes, space=space)
            report = _carry_out(plan, output, dry_run=dry_run, yes=yes)
        freed = plan.frees if report is None else report.freed
        if freed < plan.lacking:
            what = f"--free {free} requires the removal of {format_size(plan.lacking)}, of which {format_size(freed)}"
            state = "can be removed" if dry_run else "were removed"
            raise NotFreed(f"{what} {state}; the rest is pinned, in use, or reserved for fetches")
        return
    dead = _dead_claims(dry_run=dry_run)
    for claim in dead:
        memory = f", {format_size(claim.bytes)} of shared memory" if claim.bytes else ""
        what = f"claim {claim.prefix:06} of a dead job{memory} {'would be freed' if dry_run else 'freed'}"
        output.line(f"{what}: {', '.join(claim.directories) or 'damaged'}")
    try:
        with opened(root, change=not dry_run) as cache:
            strays = cache.strays()
            output.strays(strays)
            _carry_out(cache.prune(), output, dry_run=dry_run, yes=yes, claims=dead, strays=strays)
    except NoCache as error:
        if root is not None:
            raise
        note(str(error))
        output.document({"claims": dead})


def _parse_free(free: str, budget: int) -> int:
    size = parse_size(free, total=budget, name="--free")
    if size > budget:
        raise ConfigError(
            f"--free {free} is more than the budget of {format_size(budget)}: that much can never be free", name="--free", value=free
        )
    return size


def _dead_claims(*, dry_run: bool) -> list[ClaimInfo]:
    """Return the claims that dead jobs of this user left, freed unless ``dry_run``, without asking: the user's next claim would free
    them too."""
    from forebay.claims import list_claims, prune_claims

    try:
        return [claim for claim in list_claims() if not claim.live and claim.uid == os.geteuid()] if dry_run else prune_claims()
    except (ForebayError, OSError) as error:  # a fault of the node, which is no reason not to prune the cache
        note(f"claims: {error}")
        return []


@verb("forebay clear --space urls --dry-run", options="space dry-run yes root json")
def clear(space: str | None, dry_run: bool, yes: bool, root: Path | None, as_json: bool) -> None:
    """Remove everything, or one space, after asking. Entries that are pinned or in use stay."""
    with opened(root, change=not dry_run) as cache:
        check_space(cache, space)
        _carry_out(cache.clear(space), Output(as_json), dry_run=dry_run, yes=yes)


def _carry_out(
    plan: Plan, output: Output, *, dry_run: bool, yes: bool, claims: Sequence[ClaimInfo] | None = None, strays: Strays | None = None,
    pinned: Sequence[str] | None = None,
) -> Report | None:  # fmt: skip
    """Show a plan of removal, ask, execute it, and return what happened; None with ``dry_run``. Exits if nobody agrees; asks nothing if
    nothing would be removed.

    ``claims``: freed claims, for the one JSON document. ``strays``: are removed too. ``pinned``: names that were given, and stay."""
    extra = {name: value for name, value in (("claims", claims), ("strays", strays), ("pinned", pinned)) if value is not None}
    if dry_run:
        output.document({"victims": plan.victims, "frees": plan.frees, **extra})
        _show_victims(plan, strays, output)
        for name in pinned or ():
            output.line(f"pinned, kept: {name}", style="yellow")
        return None
    if (plan.victims or (strays and strays.files)) and not yes:
        _show_victims(plan, strays, output)
        if not confirmed("Remove them?"):
            raise click.exceptions.Exit(FAILED)
    report = plan.execute()
    output.document({**report._asdict(), **extra})
    _show_report(report, output)
    return report


def _show_victims(plan: Plan, strays: Strays | None, output: Output) -> None:
    now = time.time()
    if plan.victims:
        output.table(("SIZE>", "USED>", "NAME"), ((format_size(v.size), ago(now, v.used), v.name) for v in plan.victims))
    what = _entries_and_strays(len(plan.victims), strays.files if strays else 0)
    output.line(f"{what} would be removed, {format_size(plan.frees + (strays.bytes if strays else 0))}")


def _show_report(report: Report, output: Output, *, pinned: Sequence[str] = ()) -> None:
    """Print what was removed, and the names of entries that stay; ``pinned``: those that stay because they are pinned."""
    output.line(f"{_entries_and_strays(len(report.removed), report.stray_files)} removed, {format_size(report.freed)} freed")
    for name in report.spared:
        output.line(f"{'pinned' if name in pinned else 'in use'}, kept: {name}", style="yellow")


def _entries_and_strays(entries: int, strays: int) -> str:
    what = count(entries, "entry", "entries")
    return f"{what} and {count(strays, 'stray file', 'stray files')}" if strays else what


@verb("forebay pin https://host/shard-000.tar", options="root json")
@names_argument
def pin(names: tuple[str, ...], root: Path | None, as_json: bool) -> None:
    """Exclude entries from eviction until `forebay unpin`. They still count against the budget."""
    with opened(root, change=True) as cache:
        _each_name(cache, names, cache.pin, done="pinned", as_json=as_json)


@verb("forebay unpin https://host/shard-000.tar", options="root json")
@names_argument
def unpin(names: tuple[str, ...], root: Path | None, as_json: bool) -> None:
    """Allow pinned entries to be evicted again."""
    with opened(root, change=True) as cache:
        _each_name(cache, names, cache.unpin, done="unpinned", as_json=as_json)


def _each_name(cache: Cache, names: Sequence[str], act: Callable[[Entry], object], *, done: str, as_json: bool) -> None:
    """Call ``act`` for each name that the cache holds, and print it; exits with `ABSENT` if one is missing."""
    output = Output(as_json)
    entries, missing = find_each(cache, names)
    present = []
    for entry in entries:
        try:
            act(entry)
        except NotCached as error:  # it disappeared meanwhile
            missing[entry.name] = error
        else:
            present.append(entry.name)
            output.line(f"{done}: {entry.name}")
    output.document({done: present, "missing": [absent.key for absent in missing.values()]})
    end_if_missing(missing)
