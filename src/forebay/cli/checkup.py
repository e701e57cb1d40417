"""The verbs that look for faults: `config`, `verify`, and `doctor`, whose checks are functions that yield findings and change nothing."""

from __future__ import annotations

import grp
import os
import platform
import re
import resource
import sqlite3
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import click

import forebay
from forebay import _config_file, errors
from forebay._config import (
    KNOWN,
    LEAST_BUDGET,
    REMOTE,
    EnvironmentSettings,
    format_age,
    format_size,
    given_by_file,
    given_by_variables,
    given_settings,
    parse_budget,
    unused_budget,
)
from forebay._kernel import host, locks, mappings
from forebay.cli.arguments import existing, opened, root_path, store_of, verb
from forebay.cli.hints import FAILED, NoCache
from forebay.cli.output import Output, argument_of_verbosity, count, note, print_error, styled

if TYPE_CHECKING:
    from forebay._engine.index.adaptive import Standing
    from forebay._engine.seeing import IndexUse

ENOUGH_FILES = 4096
ENOUGH_MAPS = 65_530  # the kernel's default
ENOUGH_INODES = 100_000
ENOUGH_SHARED = 64 << 20
FULL_INDEX = 0.75  # it is replaced by a larger one at 0.625
_SECRET = re.compile("TOKEN|SECRET|PASSWORD|KEY|HEADER")


# -- config ------------------------------------------------------------------------------------------------------------

OF_ROOT = ("budget", "min_free", "max_entries", "max_rate", "max_connections")
OTHERS = ("max_age", "offline", "shared", "progress", "verbosity", *map(str.lower, REMOTE), "s3_anonymous", "claims")
DEFAULTS = {
    "budget": "75 % of the free space, once the cache is created", "min_free": "5 % of the disk", "max_age": "300s", "offline": "0",
    "shared": "0", "progress": "on a terminal", "verbosity": "warning", "connect_timeout": "10", "read_timeout": "30", "attempts": "5",
    "connections": "16", "streams": "8", "s3_anonymous": "only if no credentials are found", "claims": "/dev/shm/forebay-claims",
    "client_cert": "none", "client_key": "none",
}  # fmt: skip
"""The defaults; the other settings have no limit by default."""


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
    settings = list(_all_settings(root))
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
    except errors.ConfigError:
        return _config_file.location(os.environ), "invalid"
    return file.path, f"ignored: {file.ignored}" if file.ignored else "read" if file.is_there else "does not exist"


def _all_settings(root: Path | None) -> Iterator[Setting]:
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
    """The cache's directory, and its stored limits as text; no limits if there is no cache, or it cannot be read."""
    try:
        with opened(root) as cache:
            limits = {name: value for name, value in store_of(cache).spaces.root_limits().items() if value is not None}
            return str(cache.path), {name: _shown(name, value) for name, value in limits.items()}
    except NoCache as error:
        return str(error.path), {}
    except errors.ForebayError as error:
        note(f"what the cache keeps cannot be read: {error}")
        return str(root_path(root)), {}


def _shown(name: str, value: int) -> str:
    if name in ("budget", "min_free"):
        return format_size(value)
    if not value and name != "max_entries":
        return "no limit"
    return f"{format_size(value)}/s" if name == "max_rate" else f"{value:,}"


# -- verify and doctor -------------------------------------------------------------------------------------------------


@verb("forebay verify", "forebay verify --repair", options="root json")
@click.option("--repair", is_flag=True, help="Repair what is wrong; damaged entries are removed, and fetched again when needed.")
@click.option("--quick", is_flag=True, help="Do not read the stored bytes: check names, sizes and sums only.")
def verify(repair: bool, quick: bool, root: Path | None, as_json: bool) -> None:
    """Check the whole cache: every stored byte against its checksum, the catalog against the files, the sums against the budget."""
    output = Output(as_json)
    with opened(root, change=repair) as cache:
        mended = cache.repair(deep=not quick) if repair else []
        remaining, entries = cache.check(deep=not quick), cache.stats().entries
    output.document({"mended": mended, "problems": remaining})
    for problems, what in ((mended, "repaired"), (remaining, "left" if repair else "found")):
        for problem in problems:
            output.line(f"{problem}" + (f" ({problem.key})" if problem.key else ""))
        if problems:
            output.line(f"{count(len(problems), 'problem', 'problems')} {what}")
    if not remaining:
        output.line(f"no problems found ({count(entries, 'entry', 'entries')})")
    if remaining or any(problem.kind == "catalog" for problem in mended):  # repaired, but the entries it listed are lost
        raise click.exceptions.Exit(FAILED)


@verb("forebay doctor", options="root json")
def doctor(root: Path | None, as_json: bool) -> None:
    """Find what is wrong or slow on this machine and in this cache, and say what to do. Changes nothing."""
    try:
        path = existing(root)
    except NoCache:
        path = root_path(root)
    findings = list(check_up(path))
    output = Output(as_json)
    output.document(findings)
    style = {"ok": "green", "slow": "yellow", "wrong": "bold red"}
    output.table(("", "CHECK", "FOUND"), [(styled((f.state, style[f.state])), f.name, f.found) for f in findings])
    for finding in findings:
        if finding.todo:
            output.line(f"{finding.name}: {finding.todo}")
    if any(finding.state == "wrong" for finding in findings):
        raise click.exceptions.Exit(FAILED)


@dataclass(frozen=True, slots=True)
class Finding:
    """``state``: ``ok``, ``slow`` (works, but could be better) or ``wrong``. ``todo``: what would help."""

    name: str
    state: str
    found: str
    todo: str = ""


def _finding(name: str, found: str, todo: str = "", state: str = "slow") -> Finding:
    """A finding that is ok if there is nothing to do."""
    return Finding(name, state if todo else "ok", found, todo)


def check_up(path: Path) -> Iterator[Finding]:
    """Yield all findings about this machine and the cache at ``path``, which need not exist."""
    for check in (_versions, _extras, _settings, _file_system, _disk, _limits, _kernel_facts, _permissions, _catalog, _content, _claims):
        try:
            yield from check(path)
        except (OSError, errors.ForebayError) as error:
            name = check.__name__.strip("_").replace("_", " ")
            if isinstance(error, errors.NoLocks):
                continue  # `_kernel_facts` says so, and what to do
            if isinstance(error, errors.WriterBusy):
                yield _finding(name, f"it could not be read: {error}", "run it again when other processes write less")
            else:
                todo = "`forebay verify --repair`" if isinstance(error, errors.CacheFault) else "see the message"
                yield _finding(name, str(error), todo, "wrong")


def _existing(path: Path) -> Path:
    """Return the path, or its nearest parent that exists."""
    return next(p for p in (path, *path.absolute().parents) if p.exists())


def _versions(path: Path) -> Iterator[Finding]:
    parts = [f"forebay {forebay.__version__}", *(f"{name} {metadata.version(name)}" for name in ("pycurl", "xxhash", "click", "rich"))]
    parts += [f"Python {platform.python_version()}", f"SQLite {sqlite3.sqlite_version}", f"Linux {platform.release()}"]
    yield _finding("versions", ", ".join(parts))


def _extras(path: Path) -> Iterator[Finding]:
    missing = [extra for extra, packages in errors.EXTRAS.items() if not all(map(_is_installed, packages))]
    present = [extra for extra in errors.EXTRAS if extra not in missing]
    yield _finding("extras", f"installed: {', '.join(present) or 'none'}; not installed: {', '.join(missing) or 'none'}")


def _is_installed(package: str) -> bool:
    try:
        return bool(metadata.version(package.partition("[")[0]))
    except metadata.PackageNotFoundError:
        return False


def _settings(path: Path) -> Iterator[Finding]:
    names = sorted(name for name in os.environ if name.startswith("FOREBAY_"))
    known = [name for name in names if name.removeprefix("FOREBAY_") in KNOWN]
    shown = [f"{name}={'(set)' if _SECRET.search(name) else os.environ[name]}" if name in known else name for name in names]
    yield _finding("environment", " ".join(shown) or "no FOREBAY_ variable is set")
    for fault in setting_faults():
        yield _finding(str(fault.facts["name"]), str(fault), "correct or unset it: until then no job can open a cache", "wrong")
    proxies = sorted(name for name in os.environ if name.lower() in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"))
    if proxies:
        yield _finding("proxies", "in use: " + ", ".join(proxies))  # only the names: a proxy's URL may hold a password


def setting_faults() -> list[errors.ConfigError]:
    """The errors in the environment variables and in the user's file."""
    from forebay.remote.base import RemoteOptions, numbers

    given = given_settings()[0]
    faults = EnvironmentSettings.with_faults()[1] + numbers(given)[1]
    certificate = given.get("client_cert") or given.get("client_key")
    if certificate is not None and not faults:
        try:
            RemoteOptions.from_environment().keyed_certificate()
        except errors.ConfigError as error:
            faults.append(errors.ConfigError(f"{certificate.name}: {error}", name=certificate.name, value=certificate.text))
    return faults


def _file_system(path: Path) -> Iterator[Finding]:
    kind = host.fs_kind(_existing(path))
    todo = "" if host.is_local(kind) else "its locks and mappings are unreliable: set FOREBAY_HOME to a local directory"
    lost = ": entries take memory, and are lost at a restart" if kind in ("tmpfs", "ramfs") else ""
    yield _finding("file system", f"{path} is on {kind}{lost}", todo, "wrong")
    if _is_rotating(_existing(path)):
        yield _finding("disk", "a rotating disk", "a directory on an SSD, or in memory, serves many processes faster")


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
    yield _finding("free space", f"{format_size(disk.free)} of {format_size(disk.total)} ({share:.0%})", todo)
    few = disk.inodes_free < ENOUGH_INODES
    todo = "each object takes one, and objects are evicted to free some: store larger ones, or use another disk" if few else ""
    free = "no limit" if disk.inodes_free == host.UNCOUNTED else f"{disk.inodes_free:,}"
    yield _finding("free inodes", free, todo)


def _limits(path: Path) -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = soft != resource.RLIM_INFINITY and soft < ENOUGH_FILES
    todo = f"`ulimit -n {ENOUGH_FILES}` before the job" if few else ""
    yield _finding("open files", f"{soft} (at most {hard})", todo)
    maps = mappings.max_maps()
    few = maps < ENOUGH_MAPS
    todo = f"`sysctl vm.max_map_count={ENOUGH_MAPS}`: each process maps entries, up to a quarter of this limit" if few else ""
    yield _finding("memory maps", f"vm.max_map_count = {maps}", todo)
    largest, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if largest != resource.RLIM_INFINITY:
        yield _finding("file size", f"no file may exceed {format_size(largest)}", "`ulimit -f unlimited` before the job")


def _kernel_facts(path: Path) -> Iterator[Finding]:
    readable = os.access("/proc/self/fdinfo", os.R_OK)
    todo = "" if readable else "mount /proc: without it messages cannot name the process that others wait for"
    yield _finding("/proc", "readable" if readable else "not readable", todo)
    yield _finding("boot id", host.boot_id())
    found, todo = "open-file-description locks work", ""
    if not locks.are_available():
        found = "no open-file-description (OFD) locks: nothing can be stored or claimed, and calls that can do without read the source"
        todo = "run on Linux itself, a newer gVisor, or a sandbox that passes fcntl(F_OFD_SETLK) on; PRoot and old gVisor do not"
    yield _finding("locks", found, todo, "wrong")


def _permissions(path: Path) -> Iterator[Finding]:
    if not (path / "FORMAT").exists():
        parent = _existing(path)
        writable = os.access(parent, os.W_OK | os.X_OK)
        todo = "" if writable else f"{parent} is not writable: choose another directory with --root or FOREBAY_HOME"
        group = f": it will be one of group {_group(os.getegid())}" if writable and EnvironmentSettings.with_faults()[0].shared else ""
        yield _finding("root", f"no cache at {path} yet{group}", todo, "wrong")
        return
    status = path.stat()
    if status.st_mode & 0o002:
        yield _finding("root", f"every user may write to it (mode {status.st_mode & 0o7777:o})", f"`chmod o-w {path}`", "wrong")
    owner = "yours" if status.st_uid == os.geteuid() else f"of user {status.st_uid}"
    writable = os.access(path, os.W_OK)
    yield _finding("root", f"{path}, {owner}, mode {status.st_mode & 0o7777:o}{'' if writable else ', read-only for you'}")
    if status.st_mode & 0o020:
        yield _finding("root", f"members of group {_group(status.st_gid)} may read, write and remove everything in it")


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
        found = "it has a -wal without a -shm, which you may not create: nothing can be looked up"
        yield _finding("catalog", found, f"its owner runs `forebay ls --root {path}` once", "wrong")
        return
    size = sum(p.stat().st_size for p in (catalog, wal) if p.exists())
    yield _finding("catalog", format_size(size))


def _content(path: Path) -> Iterator[Finding]:
    if not (path / "FORMAT").exists():
        return

    with opened(path) as cache:
        store = store_of(cache)
        stats, problems, index = cache.stats(), cache.check(), store.seeing.index_use()
        standings = store.seeing.usage().standings
    disk = host.disk(path)
    yield from _budget(path, stats.budget, disk.total)
    entries = count(stats.entries, "entry", "entries")
    facts = f"{format_size(stats.bytes_used)} of {format_size(stats.budget)}, {entries}, hit rate {stats.hit_rate:.0%}"
    short = stats.budget - stats.bytes_used > disk.free
    todo = "the disk is full before the budget is: lower the budget, or make room" if short else ""
    yield _finding("content", facts, todo)
    yield from _index(index, path / "shared" / "keys")
    yield from _policies(standings)
    if stats.fallbacks:
        calls = count(stats.fallbacks, "call", "calls")
        yield _finding("fallbacks", f"{calls} bypassed the cache", "the logs of those jobs say why")
    if stats.store_failures:
        values = count(stats.store_failures, "value", "values")
        yield _finding("lost stores", f"{values} could not be stored", "the logs of those jobs say why")
    for name, some, todo in (
        ("soundness", [p for p in problems if p.kind != "foreign"], "`forebay verify --repair`"),
        ("foreign files", [p for p in problems if p.kind == "foreign"], "not created by Forebay, not in the budget: move them out"),
    ):
        if some:
            yield _finding(name, "; ".join(map(str, some[:3])), todo, "wrong")


def _index(use: IndexUse, path: Path) -> Iterator[Finding]:
    """The index of keys, by which a process reads an entry for the first time without the catalog."""
    from forebay._engine.seeing import SAMPLED

    name = "index of keys"
    if not use.is_there:
        todo = "the next process that may write to the root creates it" if use.sampled else ""
        yield _finding(name, "there is none yet: each first read asks the catalog", todo)
        return
    if not use.buckets:
        found = f"{path} is damaged, or another root's: each first read asks the catalog"
        yield _finding(name, found, "the next processes that store entries replace it")
        return
    full = use.used / use.buckets
    found = f"{format_size(use.size)}, {full:.0%} full, last grown {format_age(time.time() - use.changed)} ago"
    found += f"; leads to {use.led:,} of {use.sampled:,} entries{' of a sample' if use.sampled >= SAMPLED else ''}"
    todo = ""
    if full > FULL_INDEX:
        todo = "it could not be replaced by a larger one: make room on the disk"
    elif use.led < use.sampled / 2:
        todo = "nothing to do: it learns an entry when a process stores it, or reads it for the first time since the machine booted"
    yield _finding(name, found, todo)


def _policies(standings: Mapping[str, Standing | None]) -> Iterator[Finding]:
    """The eviction order of the spaces that choose it automatically."""
    for name, standing in sorted(standings.items()):
        found = "lru: no process has used it yet"
        if standing is not None:
            (lru, bimodal), uses, share = standing.hits, standing.uses, standing.share
            sample = f"the last {uses:,} uses of 1 in {share:,} keys" if share > 1 else f"the last {uses:,} uses"
            found = f"{standing.leader}: of {sample}, lru would have hit {lru:,}, bimodal insertion {bimodal:,}"
        yield _finding(f"eviction of {name}", found)


def _budget(path: Path, budget: int, disk: int) -> Iterator[Finding]:
    how = "`forebay budget SIZE` changes it for all processes"
    if budget < LEAST_BUDGET:
        yield _finding("budget", f"{format_size(budget)} holds almost nothing", how)
    elif budget > disk:
        yield _finding("budget", f"{format_size(budget)} is more than the whole disk, {format_size(disk)}", how)
    try:
        unused = unused_setting(path, budget, disk)
    except errors.ConfigError as error:  # a share that is invalid for this disk
        yield _finding("budget", str(error), "until then no job can open the cache", "wrong")
        return
    if unused:
        yield _finding("budget", unused)


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
        yield _finding("claims", f"none yet; the first one creates {registry}")
        return
    claims, free = list_claims(), host.disk(registry).free
    dead = [claim for claim in claims if not claim.live]
    memory = format_size(sum(claim.bytes or 0 for claim in claims))
    what = f"{len(claims) - len(dead)} live, {len(dead)} dead; {memory} of shared memory, {format_size(free)} free in {registry}"
    owners = {os.lstat(path).st_uid for path in (registry, registry / LOCK) if os.path.lexists(path)}
    if free < ENOUGH_SHARED:
        todo = "jobs have their shared memory there: enlarge it (a container's with --shm-size), or set FOREBAY_CLAIMS"
        yield _finding("claims", what, todo)
    elif not owners <= {0, os.geteuid()}:
        todo = "that user can remove the claims of others: have root create the registry at boot, see docs/use/claims.md"
        yield _finding("claims", f"{what}, which belongs to another user", todo)
    else:
        mine = any(claim.uid == os.geteuid() for claim in dead)
        yield Finding("claims", "ok", what, "`forebay prune` frees your dead ones now, as your next claim will" if mine else "")
