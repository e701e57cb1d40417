"""The verbs that show what there is: `ls`, `which`, `path`, `du`, `stats`, `claims`."""

from __future__ import annotations

import os
import re
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import islice
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from forebay._config import format_size
from forebay.cli.arguments import (
    check_space,
    complete_names,
    end_if_missing,
    existing,
    find_each,
    matching,
    names_argument,
    opened,
    parse_filters,
    store_of,
    verb,
)
from forebay.cli.output import Output, ago, entry_record, shown, shown_name, write_whole
from forebay.errors import ConfigError, MissingExtra, NotCached

if TYPE_CHECKING:
    from forebay._model import Entry
    from forebay.cache import Cache
    from forebay.claims import ClaimInfo
    from forebay.reports import Stats

MOST_NODES = 20_000
"""Prefixes that are told apart; further ones count for those above them."""
MOST_CELLS = 24
_DEEPEST = 8
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


class Cell(NamedTuple):
    """A part of a space: a prefix of names, its bytes and its entries."""

    name: str
    bytes: int
    entries: int


class PrefixNode:
    """A prefix of names: the bytes and the number of the entries below it, and the prefixes that continue it."""

    def __init__(self, name: str) -> None:
        self.name, self.bytes, self.entries = name, 0, 0
        self.children: dict[str, PrefixNode] = {}

    def count(self, size: int) -> None:
        """Count an entry of this size."""
        self.bytes, self.entries = self.bytes + size, self.entries + 1

    def lines(self, depth: int = 0) -> Iterator[tuple[int, str, PrefixNode]]:
        """What is below, the largest first: depth, label and prefix. A prefix that only one other continues shares a line with it."""
        for child in sorted(self.children.values(), key=lambda one: (-one.bytes, one.name)):
            while len(child.children) == 1 and (only := next(iter(child.children.values()))).entries == child.entries:
                child = only
            yield depth, child.name[len(self.name) :], child
            yield from child.lines(depth + 1)


def tree_of(entries: Iterable[tuple[str, int]]) -> PrefixNode:
    """The prefixes of the names of entries, which come with their bytes."""
    top, nodes = PrefixNode(""), 1
    for name, size in entries:
        node = top
        node.count(size)
        for part in _parts(name):
            child = node.children.get(part)
            if child is None:
                if nodes >= MOST_NODES:
                    break
                child, nodes = node.children.setdefault(part, PrefixNode(node.name + part)), nodes + 1
            node = child
            node.count(size)
    return top


def _parts(name: str) -> list[str]:
    """The directories of a name, with their slashes; the host of a URL is the first one."""
    scheme, found, rest = name.partition("://")
    parts = [part + "/" for part in (rest if found else name).split("/")[:-1][:_DEEPEST]]
    return [f"{scheme}://{parts[0]}", *parts[1:]] if found and parts else parts


def cells_of(entries: Iterable[tuple[str, int]]) -> list[Cell]:
    """The largest prefixes of the names of entries, which come with their bytes, the largest first. Together they are all entries."""
    cells: list[Cell] = []
    nodes = [tree_of(entries)]
    while nodes:  # split the largest one
        node = max(nodes, key=lambda one: one.bytes)
        nodes.remove(node)
        children = list(node.children.values())
        if len(cells) + len(nodes) + len(children) + 1 > MOST_CELLS:
            children = []
        nodes += children
        own = node.entries - sum(child.entries for child in children)
        if own:
            cells.append(Cell(node.name, node.bytes - sum(child.bytes for child in children), own))
    return sorted(cells, key=lambda cell: -cell.bytes)


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
                leased_by = store_of(cache).seeing.leased_by(entry)  # before this process holds the entry itself
                found.append(entry_record(entry) | {"path": _path_of(cache, entry), "leased_by": leased_by})
            except NotCached as evicted:
                missing[entry.name] = evicted
    output.document(found)
    for facts in found:
        output.facts(_readable(facts))
    end_if_missing(missing)


def _path_of(cache: Cache, entry: Entry) -> str | None:
    """Where the file or directory of an entry is; None for what has no file of its own."""
    if entry.space not in ("urls", "directories") and entry.kind != "blob":
        return None
    with cache.hold(entry) as path:
        return path


def _readable(facts: Mapping[str, Any]) -> dict[str, str]:
    now = time.time()
    ages = {name: f"{ago(now, facts[name])} ago" if facts[name] > 0 else "never" for name in ("created", "used", "validated")}
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
        "path": directory, "budget": usage.budget, "used": usage.bytes_used, "reserved": usage.bytes_reserved, "overhead": overhead,
        "max_rate": usage.max_rate, "max_connections": usage.max_connections, "disk_free": free, "strays": strays,
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
    if textfile is not None and not textfile.is_dir():
        raise ConfigError(f"{textfile} is no directory", name="--textfile", value=str(textfile))
    output = Output(as_json or form == "json")
    with opened(root, change=zero) as cache:
        counters = cache.stats()
        text = "" if textfile is None and form != "prometheus" else _metrics(cache.path, counters)
        if textfile is not None:
            write_whole(textfile / file_name(cache.path), text.encode())
        if zero:
            cache.reset_stats()
    if form == "prometheus":
        output.raw(text.rstrip("\n"))
        return
    output.document(counters.as_dict())
    if textfile is None or form is not None:  # else of use in a cron job, which should be silent
        output.facts(counters.as_text())


# -- the format of Prometheus --------------------------------------------------------------------------------------------

COUNTERS = {
    "hits": "Calls served from the cache.",
    "misses": "Calls that fetched from a remote.",
    "fills": "Objects that were stored.",
    "evictions": "Entries that were removed.",
    "fallbacks": "Calls that were served without the cache.",
    "waits": "Waits for another process.",
    "bytes_hit": "Bytes served by hits.",
    "bytes_remote": "Bytes received over the network.",
    "bytes_stored": "Bytes stored.",
    "requests": "Requests to remotes.",
    "retries": "Requests that were repeated.",
    "store_failures": "Values that could not be stored.",
    "damaged": "Damaged entries that were set aside.",
}
GAUGES = {
    "bytes_used": "Bytes on the disk that count against the budget.",
    "bytes_reserved": "Bytes reserved by writes in progress.",
    "entries": "Entries.",
}
_LONGEST = 120  # characters of the part of a file's name that tells the root


def _metrics(path: Path, stats: Stats) -> str:
    """The statistics of the root at ``path`` in the format of Prometheus. Raises `MissingExtra`."""
    try:
        from prometheus_client import generate_latest
        from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily
    except ImportError as error:
        raise MissingExtra.of("the format of Prometheus", "prometheus") from error

    def family(kind: Any, name: str, text: str, values: Mapping[str, float], *labels: str) -> Any:
        metric = kind(f"forebay_{name}", text, labels=("root", *labels))
        for label, value in values.items():
            metric.add_metric((str(path), label)[: 1 + len(labels)], value)
        return metric

    waits = {cause: getattr(stats, f"wait_ns_{cause}") / 1e9 for cause in ("remote", "lock", "space")}
    entries, sizes = ({space: usage[at] for space, usage in sorted(stats.spaces.items())} for at in (0, 1))
    families = [
        *(family(CounterMetricFamily, name, text, {"": getattr(stats, name)}) for name, text in COUNTERS.items()),
        family(CounterMetricFamily, "wait_seconds", "Seconds spent waiting.", waits, "cause"),
        *(family(GaugeMetricFamily, name, text, {"": getattr(stats, name)}) for name, text in GAUGES.items()),
        family(GaugeMetricFamily, "budget_bytes", "Bytes that all processes together may store.", {"": stats.budget}),
        family(GaugeMetricFamily, "space_entries", "Entries of a space.", entries, "space"),
        family(GaugeMetricFamily, "space_bytes", "Bytes of a space.", sizes, "space"),
    ]
    registry: Any = SimpleNamespace(collect=lambda: families)
    text: bytes = generate_latest(registry)
    return text.decode()


def file_name(path: Path) -> str:
    """The name of the file for the collector of node_exporter; each root has its own."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", str(path)).strip("-") or "root"
    if not re.fullmatch(r"[A-Za-z0-9._/]+", str(path)) or len(name) > _LONGEST:  # another root could have the same name
        name = f"{name[-_LONGEST:]}-{zlib.crc32(os.fsencode(path)):08x}"
    return f"forebay-{name}.prom"


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
    listed = claims_without_secrets()
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


def claims_without_secrets() -> list[ClaimInfo]:
    """All claims on this node, without the secrets in their URLs and commands."""
    from forebay.claims import list_claims  # here, so that `forebay --help` need not load them

    return [
        replace(claim, remotes=tuple(url and shown(url) for url in claim.remotes), command=shown(claim.command)) for claim in list_claims()
    ]
