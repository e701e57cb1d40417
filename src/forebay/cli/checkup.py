"""The checks of `doctor`: each is a function that yields findings, and changes nothing."""

from __future__ import annotations

import grp
import os
import platform
import re
import resource
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import forebay
from forebay import errors
from forebay._config import (
    KNOWN,
    LEAST_BUDGET,
    EnvironmentSettings,
    format_age,
    format_size,
    given_settings,
    parse_budget,
    unused_budget,
)
from forebay._kernel import host, mappings
from forebay.cli.options import opened
from forebay.cli.render import count

if TYPE_CHECKING:
    from forebay._engine.index.ghosts import Standing
    from forebay._engine.seeing import IndexUse

ENOUGH_FILES = 4096
ENOUGH_MAPS = 65_530  # the kernel's default
ENOUGH_INODES = 100_000
ENOUGH_SHARED = 64 << 20
FULL_INDEX = 0.75  # it is replaced by a larger one at 0.625
_SECRET = re.compile("TOKEN|SECRET|PASSWORD|KEY|HEADER")


@dataclass(frozen=True, slots=True)
class Finding:
    """``state``: ``ok``, ``slow`` (works, but could be better) or ``wrong``. ``todo``: what would help."""

    name: str
    state: str
    found: str
    todo: str = ""


def check_up(path: Path) -> Iterator[Finding]:
    """Yield all findings about this machine and the cache at ``path``, which need not exist."""
    for check in (_versions, _extras, _settings, _file_system, _disk, _limits, _kernel_facts, _permissions, _catalog, _content, _claims):
        yield from _safely(check, path)


def _safely(check: Callable[[Path], Iterator[Finding]], path: Path) -> Iterator[Finding]:
    try:
        yield from check(path)
    except (OSError, errors.ForebayError) as error:
        name = check.__name__.strip("_").replace("_", " ")
        if isinstance(error, errors.WriterBusy):
            yield Finding(name, "slow", f"it could not be read: {error}", "run it again when other processes write less")
            return
        todo = "`forebay verify --repair`" if isinstance(error, errors.CacheFault) else "see the message"
        yield Finding(name, "wrong", str(error), todo)


def _existing(path: Path) -> Path:
    """Return the path, or its nearest parent that exists."""
    return next(p for p in (path, *path.absolute().parents) if p.exists())


def _versions(path: Path) -> Iterator[Finding]:
    parts = [f"forebay {forebay.__version__}", *(f"{name} {metadata.version(name)}" for name in ("pycurl", "xxhash", "click", "rich"))]
    parts += [f"Python {platform.python_version()}", f"SQLite {sqlite3.sqlite_version}", f"Linux {platform.release()}"]
    yield Finding("versions", "ok", ", ".join(parts))


def _extras(path: Path) -> Iterator[Finding]:
    missing = [extra for extra, packages in errors.EXTRAS.items() if not all(map(_is_installed, packages))]
    present = [extra for extra in errors.EXTRAS if extra not in missing]
    yield Finding("extras", "ok", f"installed: {', '.join(present) or 'none'}; not installed: {', '.join(missing) or 'none'}")


def _is_installed(package: str) -> bool:
    try:
        return bool(metadata.version(package.partition("[")[0]))
    except metadata.PackageNotFoundError:
        return False


def _settings(path: Path) -> Iterator[Finding]:
    names = sorted(name for name in os.environ if name.startswith("FOREBAY_"))
    known = [name for name in names if name.removeprefix("FOREBAY_") in KNOWN]
    shown = [f"{name}={'(set)' if _SECRET.search(name) else os.environ[name]}" if name in known else name for name in names]
    yield Finding("environment", "ok", " ".join(shown) or "no FOREBAY_ variable is set")
    for fault in setting_faults():
        yield Finding(str(fault.facts["name"]), "wrong", str(fault), "correct or unset it: until then no job can open a cache")
    proxies = sorted(name for name in os.environ if name.lower() in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"))
    if proxies:
        yield Finding("proxies", "ok", "in use: " + ", ".join(proxies))  # only the names: a proxy's URL may hold a password


def setting_faults() -> list[errors.ConfigError]:
    """What is invalid in the variables, and in the user's file."""
    from forebay.remote.base import numbers

    return EnvironmentSettings.with_faults()[1] + numbers(given_settings()[0])[1]


def _file_system(path: Path) -> Iterator[Finding]:
    kind = host.fs_kind(_existing(path))
    if not host.is_local(kind):
        todo = "its locks and mappings are unreliable: set FOREBAY_HOME to a local directory"
        yield Finding("file system", "wrong", f"{path} is on {kind}", todo)
    elif kind in ("tmpfs", "ramfs"):
        yield Finding("file system", "ok", f"{path} is on {kind}: entries take memory, and are lost at a restart")
    else:
        yield Finding("file system", "ok", f"{path} is on {kind}")
    if _is_rotating(_existing(path)):
        yield Finding("disk", "slow", "a rotating disk", "a directory on an SSD, or in memory, serves many processes faster")


def _is_rotating(path: Path) -> bool:
    device = path.stat().st_dev
    node = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")
    if node.resolve().name.startswith("vd"):
        return False  # a virtual machine's disk: many hypervisors call all of them rotating
    for flag in (node / "queue/rotational", node.resolve().parent / "queue/rotational"):
        if flag.is_file():
            return flag.read_text().strip() == "1"
    return False


def _disk(path: Path) -> Iterator[Finding]:
    disk = host.disk(_existing(path))
    share = disk.free / disk.total if disk.total else 0.0
    todo = "" if share > 0.05 else "the cache keeps 5 % of the disk free: make room, or use another disk"
    yield Finding("free space", "slow" if todo else "ok", f"{format_size(disk.free)} of {format_size(disk.total)} ({share:.0%})", todo)
    few = disk.inodes_free < ENOUGH_INODES
    todo = "each object takes one, and objects are evicted to free some: store larger ones, or use another disk" if few else ""
    free = "no limit" if disk.inodes_free == host.UNCOUNTED else f"{disk.inodes_free:,}"
    yield Finding("free inodes", "slow" if few else "ok", free, todo)


def _limits(path: Path) -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = soft != resource.RLIM_INFINITY and soft < ENOUGH_FILES
    todo = f"`ulimit -n {ENOUGH_FILES}` before the job" if few else ""
    yield Finding("open files", "slow" if few else "ok", f"{soft} (at most {hard})", todo)
    maps = mappings.max_maps()
    few = maps < ENOUGH_MAPS
    todo = f"`sysctl vm.max_map_count={ENOUGH_MAPS}`: each process maps entries, up to a quarter of this limit" if few else ""
    yield Finding("memory maps", "slow" if few else "ok", f"vm.max_map_count = {maps}", todo)
    largest, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if largest != resource.RLIM_INFINITY:
        yield Finding("file size", "slow", f"no file may exceed {format_size(largest)}", "`ulimit -f unlimited` before the job")


def _kernel_facts(path: Path) -> Iterator[Finding]:
    readable = os.access("/proc/self/fdinfo", os.R_OK)
    todo = "" if readable else "mount /proc: without it messages cannot name the process that others wait for"
    yield Finding("/proc", "ok" if readable else "slow", "readable" if readable else "not readable", todo)
    yield Finding("boot id", "ok", host.boot_id())


def _permissions(path: Path) -> Iterator[Finding]:
    if not (path / "FORMAT").exists():
        parent = _existing(path)
        writable = os.access(parent, os.W_OK | os.X_OK)
        todo = "" if writable else f"{parent} is not writable: choose another directory with --root or FOREBAY_HOME"
        group = f": it will be one of group {_group(os.getegid())}" if writable and EnvironmentSettings.with_faults()[0].shared else ""
        yield Finding("root", "ok" if writable else "wrong", f"no cache at {path} yet{group}", todo)
        return
    status = path.stat()
    if status.st_mode & 0o002:
        yield Finding("root", "wrong", f"every user may write to it (mode {status.st_mode & 0o7777:o})", f"`chmod o-w {path}`")
    owner = "yours" if status.st_uid == os.geteuid() else f"of user {status.st_uid}"
    writable = os.access(path, os.W_OK)
    yield Finding("root", "ok", f"{path}, {owner}, mode {status.st_mode & 0o7777:o}{'' if writable else ', read-only for you'}")
    if status.st_mode & 0o020:
        yield Finding("root", "ok", f"members of group {_group(status.st_gid)} may read, write and remove everything in it")


def _group(gid: int) -> str:
    try:
        return f"{grp.getgrgid(gid).gr_name} ({gid})"
    except KeyError:
        return str(gid)


def _catalog(path: Path) -> Iterator[Finding]:
    catalog = path / "catalog.sqlite"
    if not catalog.exists():
        return
    wal, shm = Path(f"{catalog}-wal"), Path(f"{catalog}-shm")
    if wal.exists() and not shm.exists() and not os.access(path, os.W_OK):
        yield Finding(
            "catalog", "wrong", "it has a -wal without a -shm, which you may not create: nothing can be looked up",
            f"its owner runs `forebay ls --root {path}` once",
        )  # fmt: skip
        return
    size = sum(p.stat().st_size for p in (catalog, wal) if p.exists())
    yield Finding("catalog", "ok", format_size(size))


def _content(path: Path) -> Iterator[Finding]:
    if not (path / "FORMAT").exists():
        return
    from forebay.cache import origin_of

    with opened(path) as cache:
        store = origin_of(cache).store
        assert store.keeps  # else the cache could not be opened
        stats, problems, index = cache.stats(), cache.check(), store.seeing.index_use()
        standings = store.seeing.usage().standings
    disk = host.disk(path)
    yield from _budget(path, stats.budget, disk.total)
    entries = count(stats.entries, "entry", "entries")
    facts = f"{format_size(stats.bytes_used)} of {format_size(stats.budget)}, {entries}, hit rate {stats.hit_rate:.0%}"
    short = stats.budget - stats.bytes_used > disk.free
    todo = "the disk is full before the budget is: lower the budget, or make room" if short else ""
    yield Finding("content", "slow" if short else "ok", facts, todo)
    yield from _index(index, path / "index")
    yield from _policies(standings)
    if stats.fallbacks:
        calls = count(stats.fallbacks, "call", "calls")
        yield Finding("fallbacks", "slow", f"{calls} bypassed the cache", "the logs of those jobs say why")
    if stats.store_failures:
        values = count(stats.store_failures, "value", "values")
        yield Finding("lost stores", "slow", f"{values} could not be stored", "the logs of those jobs say why")
    for name, some, todo in (
        ("soundness", [p for p in problems if p.kind != "foreign"], "`forebay verify --repair`"),
        ("foreign files", [p for p in problems if p.kind == "foreign"], "not created by Forebay, not in the budget: move them out"),
    ):
        if some:
            yield Finding(name, "wrong", "; ".join(map(str, some[:3])), todo)


def _index(use: IndexUse, folder: Path) -> Iterator[Finding]:
    """The index of keys, which spares a first read of an entry the catalog."""
    from forebay._engine.seeing import SAMPLED

    name = "index of keys"
    if not use.is_there:
        todo = "the next process that may write to the root creates it" if use.sampled else ""
        yield Finding(name, "slow" if todo else "ok", "there is none yet: each first read asks the catalog", todo)
        return
    if not use.buckets:
        found = f"{folder / 'table'} is damaged, or another root's: each first read asks the catalog"
        yield Finding(name, "slow", found, "the next processes that store entries replace it")
        return
    full = use.used / use.buckets
    found = f"{format_size(use.size)}, {full:.0%} full, last grown {format_age(time.time() - use.changed)} ago"
    found += f"; leads to {use.led:,} of {use.sampled:,} entries{' of a sample' if use.sampled >= SAMPLED else ''}"
    todo = ""
    if full > FULL_INDEX:
        todo = "it could not be replaced by a larger one: make room on the disk"
    elif use.led < use.sampled / 2:
        todo = "nothing to do: it learns an entry when a process stores it, or reads it for the first time since the machine booted"
    yield Finding(name, "slow" if todo else "ok", found, todo)


def _policies(standings: Mapping[str, Standing | None]) -> Iterator[Finding]:
    """What is evicted first of the spaces that choose that themselves."""
    for name, standing in sorted(standings.items()):
        found = "lru: no process has used it yet"
        if standing is not None:
            (lru, bimodal), uses, share = standing.hits, standing.uses, standing.share
            sample = f"the last {uses:,} uses of 1 in {share:,} keys" if share > 1 else f"the last {uses:,} uses"
            found = f"{standing.leader}: of {sample}, lru would have hit {lru:,}, bimodal insertion {bimodal:,}"
        yield Finding(f"eviction of {name}", "ok", found)


def _budget(path: Path, budget: int, disk: int) -> Iterator[Finding]:
    how = "`forebay budget SIZE` changes it for all processes"
    if budget < LEAST_BUDGET:
        yield Finding("budget", "slow", f"{format_size(budget)} holds almost nothing", how)
    elif budget > disk:
        yield Finding("budget", "slow", f"{format_size(budget)} is more than the whole disk, {format_size(disk)}", how)
    try:
        unused = unused_setting(path, budget, disk)
    except errors.ConfigError as error:  # a share that is invalid for this disk
        yield Finding("budget", "wrong", str(error), "until then no job can open the cache")
        return
    if unused:
        yield Finding("budget", "ok", unused)


def unused_setting(path: Path, budget: int, disk: int) -> str:
    """A message about the budget of variables or the user's file if it differs from that of the cache; else empty. Raises `ConfigError`
    if it is invalid for a ``disk`` of this size."""
    given = given_settings()[0].get("budget")
    if given is None or EnvironmentSettings.with_faults()[0].budget is None:
        return ""
    return unused_budget(given, path, budget) if parse_budget(given.text, total=disk, name=given.name) != budget else ""


def _claims(_: Path) -> Iterator[Finding]:
    from forebay.claims import list_claims
    from forebay.claims.registry import LOCK, default

    registry = default()
    if not os.path.lexists(registry):
        yield Finding("claims", "ok", f"none yet; the first one creates {registry}")
        return
    claims, free = list_claims(), host.disk(registry).free
    dead = [claim for claim in claims if not claim.live]
    memory = format_size(sum(claim.bytes or 0 for claim in claims))
    what = f"{len(claims) - len(dead)} live, {len(dead)} dead; {memory} of shared memory, {format_size(free)} free in {registry}"
    if free < ENOUGH_SHARED:
        todo = "jobs have their shared memory there: enlarge it (a container's with --shm-size), or set FOREBAY_CLAIMS"
        yield Finding("claims", "slow", what, todo)
        return
    owners = {os.lstat(path).st_uid for path in (registry, registry / LOCK) if os.path.lexists(path)}
    if not owners <= {0, os.geteuid()}:
        todo = "that user can remove the claims of others: have root create the registry at boot, see docs/use/claims.md"
        yield Finding("claims", "slow", f"{what}, which belongs to another user", todo)
        return
    mine = any(claim.uid == os.geteuid() for claim in dead)
    yield Finding("claims", "ok", what, "`forebay prune` frees your dead ones now, as your next claim will" if mine else "")
