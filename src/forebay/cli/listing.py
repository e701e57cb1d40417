"""The verbs that show what there is: `ls`, `which`, `path`, `du`, `stats`, `claims`."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import replace
from itertools import islice
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from forebay._config import format_age, format_size
from forebay.cli.options import complete_names, existing, names_argument, opened, store_of, verb
from forebay.cli.render import Output, ago, entry_record, shown, shown_name
from forebay.cli.selecting import check_space, end_if_missing, find_each, matching, parse_filters, tree_of
from forebay.errors import ConfigError, NotCached

if TYPE_CHECKING:
    from forebay._model import Entry
    from forebay.cache import Cache

MOST_PIDS = 4  # of a claim


@verb("forebay ls --sort size --limit 10", "forebay ls --filter 'used>30d'", "forebay ls --tree", options="filter space root json")
@click.argument("names", nargs=-1, metavar="[NAME]...", shell_complete=complete_names)
@click.option(
    "--sort", "-s", type=click.Choice(["name", "size", "used", "created"]), default="name", show_default=True,
    help="By name, or the largest, last used or newest first.",
)  # fmt: skip
@click.option("--reverse", "-r", is_flag=True, help="Reverse the order.")
@click.option("--leased", is_flag=True, help="Show only entries that a process is using.")
@click.option("--tree", is_flag=True, help="Show sums by prefix instead of entries, the largest first.")
@click.option("--limit", "-n", type=click.IntRange(min=1), metavar="N", help="Show at most N lines.")
@click.option("--quiet", "-q", is_flag=True, help="Show only names, one per line.")
def ls(
    names: tuple[str, ...], sort: str, reverse: bool, leased: bool, filters: tuple[str, ...], space: str | None, tree: bool,
    limit: int | None, quiet: bool, root: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """List what the cache holds: all, or entries whose names begin with NAME."""
    if tree and (quiet or sort != "name" or reverse):
        raise click.UsageError("--tree has an order of its own, and no names of entries: leave out --sort, --reverse and --quiet")
    passes = parse_filters(filters)
    with opened(root) as cache:
        check_space(cache, space)
        listing = cache.entries(space)
        output = Output(as_json)
        if sort == "name" and not (as_json or names or filters or leased or tree):
            if quiet:
                output.names(islice(listing.names(backwards=reverse), limit))
            else:
                output.facts_of_entries(islice(listing.facts(backwards=reverse), limit))
            return
        if sort == "name":
            ordered = listing.by_name(backwards=reverse)
        else:
            ordered = listing.sorted_by(attrgetter(sort), backwards=not reverse)
        entries = (e for e in matching(cache, ordered, names) if (not filters or passes(e)) and (e.leased or not leased))
        if tree:
            lines = list(islice(tree_of((entry.name, entry.size) for entry in entries).lines(), limit))
            output.document([{"prefix": one.name, "bytes": one.bytes, "entries": one.entries, "depth": depth} for depth, _, one in lines])
            rows = [(format_size(one.bytes), f"{one.entries:,}", "  " * depth + label) for depth, label, one in lines]
            if rows:
                output.table(("SIZE>", "ENTRIES>", "PREFIX"), rows)
        else:
            output.entries(islice(entries, limit), names_only=quiet)


@verb("forebay which https://host/shard-000.tar", options="root json")
@names_argument
def which(names: tuple[str, ...], root: Path | None, as_json: bool) -> None:
    """Show all that the cache knows of objects: file, size, age, validator, whether it is pinned, and which processes use it."""
    output = Output(as_json)
    with opened(root) as cache:
        entries, missing = find_each(cache, names)
        found = []
        for entry in entries:
            try:
                found.append(_facts_of(cache, entry))
            except NotCached as evicted:
                missing[entry.name] = evicted
    output.document(found)
    for facts in found:
        output.facts(_readable(facts))
    end_if_missing(missing)


def _facts_of(cache: Cache, entry: Entry) -> dict[str, Any]:
    """What `which` says of an entry."""

    leased_by = store_of(cache).seeing.leased_by(entry)  # before this process holds the entry itself
    return entry_record(entry) | {"path": _path_of(cache, entry), "leased_by": leased_by}


def _path_of(cache: Cache, entry: Entry) -> str | None:
    """Where the file or directory of an entry is; None for what has no file of its own."""
    if entry.space not in ("urls", "directories") and entry.kind != "blob":
        return None
    with cache.hold(entry) as path:
        return path


def _readable(facts: Mapping[str, Any]) -> dict[str, str]:
    now = time.time()
    ages = {name: f"{format_age(int(now - facts[name]))} ago" if facts[name] > 0 else "never" for name in ("created", "used", "validated")}
    return {
        "name": facts["name"],
        "path": facts["path"] or "none: a program reads it through what stored it",
        "size": f"{format_size(facts['size'])} ({format_size(facts['charge'])} of the budget)",
        "stored": ages["created"],
        "last used": ages["used"],
        "checked with the remote": ages["validated"],
        "validator": facts["validator"] or "none",
        "pinned": "yes" if facts["life"] == "pinned" else "no",
        "in use by": ", ".join(facts["leased_by"]) or ("another user's process" if facts["leased"] else "no process"),
    }


@verb("forebay du", options="root json")
def du(root: Path | None, as_json: bool) -> None:
    """Show the bytes in each space, and how much of the budget and the disk is free."""
    with opened(root) as cache:
        usage, directory, overhead, strays = cache.stats(), cache.path, cache.overhead(), cache.strays()
    disk = os.statvfs(directory)
    free = disk.f_bavail * disk.f_frsize
    output = Output(as_json)
    output.document({
        "path": directory,
        "budget": usage.budget,
        "used": usage.bytes_used,
        "reserved": usage.bytes_reserved,
        "overhead": overhead,
        "max_rate": usage.max_rate,
        "max_connections": usage.max_connections,
        "disk_free": free,
        "strays": strays,
        "spaces": {name: {"entries": count, "bytes": size} for name, (count, size) in usage.spaces.items()},
    })  # fmt: skip
    spaces = [(name, count, format_size(size)) for name, (count, size) in sorted(usage.spaces.items())]
    output.table(("SPACE", "ENTRIES>", "BYTES>"), spaces)
    reserved = f", {format_size(usage.bytes_reserved)} reserved for fetches" if usage.bytes_reserved else ""
    used = f"{format_size(usage.bytes_used)} used{reserved} of a budget of {format_size(usage.budget)}"
    output.line(f"{used}; {format_size(free)} free on the disk")
    limits = [f"{format_size(usage.max_rate)} a second"] if usage.max_rate else []
    limits += [f"{usage.max_connections:,} connections to a host"] if usage.max_connections else []
    if limits:
        output.line(f"transfers are limited to {' and '.join(limits)}, for all processes together")
    parts = ", ".join(f"{name} {format_size(size)}" for name, size in overhead.items())
    output.line(f"{format_size(sum(overhead.values()))} outside the budget: {parts}")
    output.strays(strays, "`forebay prune` removes them")


@verb("forebay stats", "forebay stats --format prometheus", options="root json")
@click.option("--zero", "-z", is_flag=True, help="Set the counters to zero after showing them.")
@click.option("--format", "form", type=click.Choice(["text", "json", "prometheus"]), help="How to print them.  [default: text]")
@click.option(
    "--textfile", metavar="DIR", type=click.Path(path_type=Path),
    help="Write them in the format of Prometheus to a file in DIR, for node_exporter's textfile collector.",
)  # fmt: skip
def stats(zero: bool, form: str | None, textfile: Path | None, root: Path | None, as_json: bool) -> None:
    """Show what all processes on the node did with this cache: hits, misses, bytes, waits, evictions."""
    if as_json and form not in (None, "json"):
        raise click.UsageError(f"--json and --format {form} exclude each other")
    from forebay.cli import metrics  # here, as it is seldom needed

    output, file, text = Output(as_json or form == "json"), None, None
    with opened(root, change=zero) as cache:
        counters = cache.stats()
        if textfile is not None:
            file = metrics.write_textfile(textfile, cache.path, counters)
        if form == "prometheus":
            text = metrics.as_text(cache.path, counters)
        if zero:
            cache.reset_stats()
    if text is not None:
        output.raw(text.rstrip("\n"))
        return
    output.document(counters.as_dict())
    if file is not None and form is None:  # of use in a cron job, which should be silent
        return
    output.facts(counters.as_text())


@verb('tar -tf "$(forebay path https://host/shard-000.tar)"', options="root json")
@click.argument("name", required=False, metavar="[NAME]", shell_complete=complete_names)
def path(name: str | None, root: Path | None, as_json: bool) -> None:
    """Show the path of an entry's file, or without NAME the cache's directory. Fetches nothing. The file may be evicted when no process
    uses it; `forebay pin` prevents that."""
    output = Output(as_json)
    if name is None:
        file = str(existing(root))
    else:
        with opened(root) as cache:
            entry = cache.entry(name)
            if entry is None:
                raise NotCached.of(shown_name(name))
            name = entry.name
            found = _path_of(cache, entry)
            if found is None:
                what = "an array of samples" if entry.kind == "pack" else "a small value that a program stored"
                todo = "read it in a program, through what stored it: Cache.get, a space, samples or tasks"
                raise ConfigError(
                    f"{name} is {what}: only objects of URLs, and large values, have files", name="NAME", value=name, todo=todo
                )
            file = found
    output.document({"name": name, "path": file})
    output.path(file)


@verb("forebay claims", options="json")
def claims(as_json: bool) -> None:
    """List the claims on this node, those of dead jobs too: which job has which directories, and how much shared memory."""
    from forebay.claims import list_claims  # here, so that `forebay --help` need not load them

    listed = [
        replace(claim, remotes=tuple(url and shown(url) for url in claim.remotes), command=shown(claim.command)) for claim in list_claims()
    ]
    output = Output(as_json)
    output.document(listed)
    now = time.time()
    rows = []
    for claim in listed:
        pids = [str(pid) for pid in claim.pids]
        processes = " ".join(pids if len(pids) <= MOST_PIDS else [*pids[: MOST_PIDS - 1], f"+{len(pids) - MOST_PIDS + 1}"]) or "-"
        memory = "-" if claim.bytes is None else format_size(claim.bytes)
        state, directories = "live" if claim.live else "dead", " ".join(claim.directories) or "damaged"
        rows.append((f"{claim.prefix:06}", state, ago(now, claim.started), claim.user, processes, memory, claim.job or "-", directories))
    if rows:
        output.table(("PREFIX", "STATE", "AGE>", "USER", "PROCESSES", "MEMORY>", "JOB", "DIRECTORIES"), rows)
