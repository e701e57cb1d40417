"""What binds a root: budget, free space, number of entries. Set by whoever says so last, for everybody."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from forebay._engine.budget import Budget
from forebay._engine.catalog import Catalog, spaces
from forebay._engine.layout import Root
from forebay._engine.owners import Owners
from forebay._kernel import host

log = logging.getLogger("forebay.settings")


@dataclass(frozen=True, slots=True)
class Settings:
    """What binds a root, where the opener says so; None leaves what it was set to. Sizes in bytes."""

    budget: int | None = None
    min_free: int | None = None
    max_entries: int | None = None


def apply(settings: Settings, root: Root, catalog: Catalog, budget: Budget, owners: Owners) -> Settings:
    """Set what is given, and give what binds now. A new root gets three quarters of what is free, and leaves a twentieth of the disk.

    A lower limit is applied at once to what is there."""
    if settings == Settings() and spaces.setting(catalog, "budget") is not None:
        found = spaces.totals(catalog)
        return Settings(found.budget, found.min_free, found.max_entries)
    with catalog.write() as txn:
        found = spaces.totals(txn)
        first = spaces.setting(txn, "budget") is None
        disk = host.disk(root.path)
        wanted = {
            "budget": settings.budget if settings.budget is not None else disk.free * 3 // 4 if first else None,
            "min_free": settings.min_free if settings.min_free is not None else disk.total // 20 if first else None,
            "max_entries": settings.max_entries,
        }
        changed = {name: value for name, value in wanted.items() if value is not None and value != getattr(found, name)}
        for name, value in changed.items():
            spaces.set_setting(txn, name, value)
    if changed and not first:
        _say(changed, found, root, owners)
        budget.make_room()
    in_force = {"budget": found.budget, "min_free": found.min_free, "max_entries": found.max_entries} | changed
    return Settings(**in_force)


def _say(changed: dict[str, int], found: spaces.Totals, root: Root, owners: Owners) -> None:
    others = [owner for owner in owners.living() if owner.id != owners.me()]
    if others:
        words = ", ".join(f"{name} {getattr(found, name)} -> {value}" for name, value in changed.items())
        log.warning("%s: changed for everybody: %s; %d other processes have it open, such as %s", root.path, words, len(others), others[0])
