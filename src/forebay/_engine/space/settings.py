"""The limits of a root: budget, free space, number of entries, transfers. They apply to every process; the last process that sets them
wins."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from forebay._config import format_size
from forebay._engine.catalog import Catalog, spaces
from forebay._engine.files import settings_file
from forebay._engine.files.layout import Root
from forebay._engine.files.settings_file import Kept
from forebay._engine.index.counters import Counters
from forebay._engine.index.head import SharedHead
from forebay._kernel import host, locks
from forebay._logs import logger
from forebay.errors import WriterBusy

log = logger("forebay.settings")

OF_TRANSFERS = frozenset({"max_rate", "max_connections"})
"""Limits that take no room."""


class Settings(NamedTuple):
    """The limits that the opener of a root sets, sizes in bytes; None leaves a limit as it was set before. ``max_rate``: bytes a second
    from remotes; ``max_connections``: to a host; 0 lifts these two. ``first_budget``: the budget of a root that has none yet."""

    budget: int | None = None
    min_free: int | None = None
    max_entries: int | None = None
    max_rate: int | None = None
    max_connections: int | None = None
    first_budget: int | None = None

    def over(self, earlier: Settings) -> Settings:
        """These settings, with those of an earlier call where these are None."""
        return Settings(*(ours if ours is not None else before for ours, before in zip(self, earlier, strict=True)))


def apply(
    settings: Settings, root: Root, catalog: Catalog, head: SharedHead, make_room: Callable[[], bool], counters: Counters,
    before: Settings | None = None,
) -> tuple[Settings, bool]:  # fmt: skip
    """Set the given limits; returns those in force now, and whether lower ones were met.

    A new root gets three quarters of the free space as its budget, and leaves a twentieth of the disk free. A root whose catalog was lost
    gets the limits in the file beside it, else those that were in force ``before`` for this process. A lower limit is applied at once;
    False: the catalog was too busy, and ``make_room`` is due. Raises `WriterBusy` if a limit must be changed and cannot be."""
    given = {name: value for name in settings_file.NAMES if (value := getattr(settings, name)) is not None}
    there = spaces.limits(catalog)
    if there["budget"] is not None and all(there[name] == value for name, value in given.items()):
        return Settings(**there), True
    with catalog.write() as txn:
        there = spaces.limits(txn)
        first = there["budget"] is None
        kept = (settings_file.read(root) or _kept(before or Settings())) if first else Kept()
        limits: dict[str, int | None] = {name: given.get(name, getattr(kept, name)) for name in settings_file.NAMES}
        if first:
            disk = host.disk(root.path)
            first_budget = disk.free * 3 // 4 if settings.first_budget is None else settings.first_budget
            limits["budget"] = first_budget if limits["budget"] is None else limits["budget"]
            limits["min_free"] = disk.total // 20 if limits["min_free"] is None else limits["min_free"]
            spaces.restore(txn, kept.spaces)
        changed = {name: value for name, value in limits.items() if value is not None and value != there[name]}
        for name, value in changed.items():
            spaces.set_setting(txn, name, value)
        txn.after_commit.append(lambda: keep(root, catalog, head))
    applied = True
    if first and catalog.lost:
        _log_lost(root, catalog, kept, limits)
    texts = {name: (_shown(name, there[name]), _shown(name, value)) for name, value in changed.items()}
    changes = ", ".join(f"{name} {old} -> {new}" for name, (old, new) in texts.items() if old != new)
    if changes and not first:
        messages = [f"{root.path}: changed for all processes: {changes}"]
        try:
            messages += _shrink(catalog, make_room) if not changed.keys() <= OF_TRANSFERS else ()
        except WriterBusy as error:
            applied = False
            messages.append(f"the new limit is not met yet; a later call that writes evicts for it: {error}")
        messages += _others(counters)
        (log.warning if len(messages) > 1 else log.info)("%s", "; ".join(messages))
    return Settings(**there | changed), applied


def _kept(settings: Settings) -> Kept:
    return Kept(**{name: getattr(settings, name) for name in settings_file.NAMES})


def is_kept(root: Root, catalog: Catalog, head: SharedHead) -> bool:
    """Whether what `keep` copies is where it belongs."""
    there = spaces.kept(catalog)
    return settings_file.says(root, there) and head.limits() == (there.max_rate or 0, there.max_connections or 0)


def keep(root: Root, catalog: Catalog, head: SharedHead) -> None:
    """Write the limits that were set into the file beside the catalog, and those of transfers into the head, where they are not
    there. Caller: holds the writer lock."""
    there = spaces.kept(catalog)
    if not settings_file.says(root, there):
        settings_file.write(root, there)
    head.set_limits(there.max_rate or 0, there.max_connections or 0)


def _log_lost(root: Root, catalog: Catalog, kept: Kept, now: dict[str, int | None]) -> None:
    why, catalog.lost = catalog.lost, ""
    limits = {name: format_size(value) for name in ("budget", "min_free") if (value := getattr(kept, name)) is not None}
    limits |= {name: _shown(name, value) for name in ("max_entries", *OF_TRANSFERS) if (value := getattr(kept, name)) is not None}
    limits |= {f"the limits of the space {space.name}": "" for space in kept.spaces}
    left = ", ".join(f"{name} {value}".strip() for name, value in limits.items())
    if "budget" not in limits:
        new = format_size(now["budget"] or 0)
        left = f"{left or 'nothing that was set'}; the budget is {new} from now on: where that is wrong, set it by Cache(budget=...)"
    log.warning(
        "%s: %s: an empty one replaces it; what was kept is fetched again when needed, and nothing is pinned; what stays: %s",
        root.path, why, left,
    )  # fmt: skip


def _shrink(catalog: Catalog, make_room: Callable[[], bool]) -> Iterator[str]:
    """Evict for a lower limit; yields messages that say what that cost."""
    before, there = spaces.usage(catalog)[0], sum(space.entries for space in spaces.every(catalog))
    fits = make_room()
    after, left = spaces.usage(catalog)[0], sum(space.entries for space in spaces.every(catalog))
    if there > left:
        yield f"{there - left:,} entries were evicted to meet it, {format_size(max(before - after, 0))}"
    if not fits:
        yield f"the new limit is not met yet: {format_size(after)} are in use or pinned, or the disk lacks room"


def _others(counters: Counters) -> Iterator[str]:
    others = counters.living()
    if others:
        others_have = "another process has it open:" if len(others) == 1 else f"{len(others)} other processes have it open, such as"
        yield f"{others_have} {locks.describe_process(others[0])}"


def _shown(name: str, value: int | None) -> str:
    return "none" if value is None or (not value and name in OF_TRANSFERS) else f"{value:,}"
