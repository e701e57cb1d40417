"""What binds a root: budget, free space, number of entries. Set by whoever says so last, for everybody."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass

from forebay._config import format_size
from forebay._engine.catalog import Catalog, spaces
from forebay._engine.files import settings_file
from forebay._engine.files.layout import Root
from forebay._engine.files.settings_file import Kept
from forebay._engine.index.counters import Counters
from forebay._engine.space.budget import Budget
from forebay._kernel import host, locks
from forebay._logs import logger
from forebay.errors import WriterBusy

log = logger("forebay.settings")


@dataclass(frozen=True, slots=True)
class Settings:
    """What binds a root, where the opener says so; None leaves what it was set to. Sizes in bytes."""

    budget: int | None = None
    min_free: int | None = None
    max_entries: int | None = None

    def over(self, earlier: Settings) -> Settings:
        """These, and of an earlier call what these do not say."""
        return Settings(**{name: value if value is not None else getattr(earlier, name) for name, value in asdict(self).items()})


def apply(
    settings: Settings, root: Root, catalog: Catalog, budget: Budget, counters: Counters, before: Settings | None = None
) -> tuple[Settings, bool]:  # fmt: skip
    """Set what is given, and give what binds now. A new root gets three quarters of what is free, and leaves a twentieth of the disk; one
    whose catalog was lost gets what people had set: as the file beside it says, else as it was in force ``before`` for this process.

    A lower limit is applied at once to what is there. False beside it: the catalog was too busy for that, `Budget.make_room` is due. Raises
    `WriterBusy` where something is to be changed and cannot be."""
    given = {name: value for name, value in asdict(settings).items() if value is not None}
    if spaces.setting(catalog, "budget") is not None and all(spaces.setting(catalog, name) == value for name, value in given.items()):
        found = spaces.totals(catalog)
        return Settings(found.budget, found.min_free, found.max_entries), True
    with catalog.write() as txn:
        found = spaces.totals(txn)
        first = spaces.setting(txn, "budget") is None
        kept = (settings_file.read(root) or Kept(**asdict(before or Settings()))) if first else Kept()
        wanted = {name: value if value is not None else getattr(kept, name) for name, value in asdict(settings).items()}
        if first:
            disk = host.disk(root.path)
            wanted["budget"] = disk.free * 3 // 4 if wanted["budget"] is None else wanted["budget"]
            wanted["min_free"] = disk.total // 20 if wanted["min_free"] is None else wanted["min_free"]
            spaces.restore(txn, kept.spaces)
        changed = {name: value for name, value in wanted.items() if value is not None and value != getattr(found, name)}
        for name, value in wanted.items():
            if value is not None and value != spaces.setting(txn, name):  # one that was said is kept, also where it is the default
                spaces.set_setting(txn, name, value)
        txn.then = lambda: keep(root, catalog)
    applied = True
    if first and catalog.lost:
        _say_lost(root, catalog, kept, wanted)
    if changed and not first:
        limits = ", ".join(f"{name} {_number(getattr(found, name))} -> {value:,}" for name, value in changed.items())
        said = [f"{root.path}: changed for everybody: {limits}"]
        try:
            said += _shrink(catalog, budget)
        except WriterBusy as error:
            applied = False
            said.append(f"it is not met yet, a later call that writes evicts for it: {error}")
        said += _others(counters)
        tell = log.warning if len(said) > 1 else log.info
        tell("%s", "; ".join(said))
    in_force = {"budget": found.budget, "min_free": found.min_free, "max_entries": found.max_entries} | changed
    return Settings(**in_force), applied


def keep(root: Root, catalog: Catalog) -> None:
    """Note beside the catalog what people set, unless that stands there. Caller: holds the writer lock."""
    there = spaces.kept(catalog)
    if not settings_file.says(root, there):
        settings_file.write(root, there)


def _say_lost(root: Root, catalog: Catalog, kept: Kept, now: dict[str, int | None]) -> None:
    why, catalog.lost = catalog.lost, ""
    limits = {name: format_size(value) for name in ("budget", "min_free") if (value := getattr(kept, name)) is not None}
    limits |= {"max_entries": f"{kept.max_entries:,}"} if kept.max_entries is not None else {}
    limits |= {f"the limits of the space {space.name}": "" for space in kept.spaces}
    left = ", ".join(f"{name} {value}".strip() for name, value in limits.items())
    if "budget" not in limits:
        new = format_size(now["budget"] or 0)
        left = f"{left or 'nothing that was set'}; the budget is {new} from now on: where that is wrong, set it by Cache(budget=...)"
    log.warning(
        "%s: %s: an empty one takes its place; what was kept is fetched again when wanted, and nothing is pinned; what stays: %s",
        root.path, why, left,
    )  # fmt: skip


def _shrink(catalog: Catalog, budget: Budget) -> Iterator[str]:
    """Apply a lower limit to what is there; gives what that cost, in words."""
    before, there = spaces.usage(catalog)[0], sum(space.entries for space in spaces.every(catalog))
    fits = budget.make_room()
    after, left = spaces.usage(catalog)[0], sum(space.entries for space in spaces.every(catalog))
    if there > left:
        yield f"{there - left:,} entries were evicted for it, {format_size(max(before - after, 0))}"
    if not fits:
        yield f"it is not met yet: {format_size(after)} are kept, in use or pinned, or the disk lacks room"


def _others(counters: Counters) -> Iterator[str]:
    others = counters.living()
    if others:
        others_have = "another process has it open:" if len(others) == 1 else f"{len(others)} other processes have it open, such as"
        yield f"{others_have} {locks.describe_process(others[0])}"


def _number(value: int | None) -> str:
    return "none" if value is None else f"{value:,}"
