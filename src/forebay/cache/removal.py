"""What `Cache` removes, and the plans of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from forebay._kernel import waits
from forebay._model import Entry, Report, Victim
from forebay.cache.entries import Entries, planned
from forebay.origin import Origin
from forebay.reports import Plan, coldest_until


def remove(origin: Origin, victims: Iterable[Victim]) -> Report:
    """Remove entries, but for those in use, pinned, or part of a directory. Raises `WriterBusy`."""
    with waits.time_limit(origin.timeout):
        return origin.store.remove(victims)


def evict(origin: Origin, entry: Entry) -> Report:
    """See `Cache.evict`."""
    files = [file for _, file in origin.store.members(entry)] if entry.kind == "tree" else []
    report = remove(origin, [Victim.of(entry)])
    if report.spared or not files:
        return report
    with_it = remove(origin, map(Victim.of, files))
    return Report(report.removed + with_it.removed, (), report.freed + with_it.freed)


def plan(origin: Origin, need: int | None, where: Callable[[Entry], bool] | None, space: str | None, *, all: bool) -> Plan:
    """See `Cache.plan`. ``need``: in bytes."""

    def execute(victims: Iterable[Victim]) -> Report:
        return remove(origin, victims)

    cold = Entries(origin.store, space, lambda e: e.life != "pinned" and (where is None or where(e)))
    if need is None and (where is not None or space is not None or all):
        return Plan(planned(cold), execute)
    lacking = origin.store.lacking(need or 0)
    return Plan(tuple(map(Victim.of, coldest_until(cold, lacking))), execute, max(lacking, 0))


def prune(origin: Origin) -> Plan:
    """See `Cache.prune`."""

    def execute(victims: Sequence[Victim]) -> Report:
        report = remove(origin, victims)
        with waits.time_limit(origin.timeout):
            origin.store.make_room()
            strays = origin.store.remove_strays()
            return report._replace(freed=report.freed + strays.bytes, stray_files=strays.files)

    return Plan(plan(origin, None, None, None, all=False).victims, execute)
