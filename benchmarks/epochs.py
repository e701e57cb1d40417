"""A data set read in a new random order each epoch, by PyTorch's DataLoader.

    python benchmarks/epochs.py [ROW...] [--quick] [--json]
    python benchmarks/epochs.py --table FILE        the table of what --json has written

The objects lie behind a server in a process of its own that takes 20 ms to answer; it counts what it sends. Every contestant is a fresh
process with two workers (16 where there are 16 cores), and has caches and files of its own. Peers are set as their documentation advises;
one that is not installed, fails or takes too long is left out, and the first line of its row says so. A round runs all in turn; the slow
ones run for one round, fsspec's filecache with a tenth of the objects (its times are those of the tenth, times 10), and those without any
cache for one epoch, since all of theirs are the same. With --quick several run side by side, to see that all of them work; nothing is
judged then.
"""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

from _common import Line, main
from _epochs_peers import (
    BATCH,
    CONNECTIONS,
    EPOCHS,
    FILES,
    FORMAT_OF,
    FORMATS,
    LOOKAHEAD,
    OBJECTS,
    PLAIN,
    RAM,
    READ,
    SHARDS,
    SHARDS_OURS,
    THREADS,
    URLS,
)
from _epochs_run import LATENCY, Epoch, Race, make

SHARD = 100
"""Samples of a shard."""
PACKAGES = ("torch", "urllib3", "fsspec", "diskcache", "megatron-energon", "webdataset", "litdata", "mosaicml-streaming")


def _race(folder: Path, quick: bool, labels: list[str], seconds: float, **how: Any) -> Race:
    """``seconds`` of the quarter of an hour that all rows may take."""
    table = how.pop("table", OBJECTS)
    count = 64 if quick else 2_000
    rounds, at_once = (1, 3) if quick else (3, 1)
    race = Race({label: table[label] for label in labels}, folder, count, rounds=rounds, at_once=at_once, seconds=seconds, **how)
    race.run()
    return race


def _line(race: Race, what: str, ours: str, epoch: int, must: str = "-") -> Line:
    line = Line(f"{what}, epoch {epoch + 1}, {ours}", must, race.beside(ours, epoch))
    mine = race.last(ours, epoch)
    line.note = f"{race.count / line.ours.median:,.0f}/s, {mine.requests:,} requests"
    counted: dict[str, Epoch] = {label: race.last(label, epoch) for label in line.timings}
    line.facts = {
        "epoch": epoch + 1,
        "ours": ours,
        "count": race.count,
        "requests": {label: each.requests for label, each in counted.items()},
        "sent": {label: each.sent for label, each in counted.items()},
    }
    return line


def _ran(race: Race) -> list[str]:
    """Those of ours that did not fail."""
    return [label for label in (LOOKAHEAD, URLS, READ) if label in race.runs]


def _finished(race: Race, lines: list[Line]) -> list[Line]:
    """The first line says what is left out, and which versions there were. Where contestants ran side by side nothing is judged."""
    slow = [label for label in race.runs if race.table[label].share < 1]
    notes = [f"{label}: {race.table[label].share:.0%} of the objects" for label in slow]
    notes += [f"left out: {label} ({why})" for label, why in race.left_out.items()]
    lines[0].note = "; ".join([lines[0].note, *notes])
    lines[0].facts["versions"] = {name: version for name in PACKAGES if (version := _version(name))}
    if race.at_once > 1:
        for line in lines:
            line.met = None
    lines[0].facts["rounds"] = {label: len(runs) for label, runs in race.runs.items()}
    return lines


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def objects(folder: Path, quick: bool) -> list[Line]:
    """2,000 objects of 100 KB, and room for all of them."""
    race = _race(folder, quick, [label for label in OBJECTS if label != RAM], 270)
    what, lines = f"{race.count:,} x 100 KB, {LATENCY * 1e3:.0f} ms away", []
    for ours in _ran(race):
        for epoch in range(EPOCHS):
            line = _line(race, what, ours, epoch, ">= 0.8x local files; >= the best peer")
            line.met = line.ratio(FILES) >= 0.8 and line.best_peer() >= 1
            if not epoch:
                line.must, line.met = "-", None
                if ours != READ:
                    line.must = f">= 0.9x of {CONNECTIONS} connections / latency; >= the best peer"
                    line.met = race.count / line.ours.median >= 0.9 * CONNECTIONS / LATENCY and line.best_peer() >= 1
            lines.append(line)
    return _finished(race, lines)


def shards(folder: Path, quick: bool) -> list[Line]:
    """The same samples in shards of 10 MB, and room for all of them."""
    made = folder / "made"
    made.mkdir()
    absent = {name for label, name in FORMAT_OF.items() if SHARDS[label].missing()}
    formats = {name: code for name, code in FORMATS.items() if name not in absent}
    failed = make(made, formats, 64 if quick else 2_000, 16 if quick else SHARD, 60)
    labels = [label for label in SHARDS if FORMAT_OF.get(label) not in failed]
    race = _race(folder, quick, labels, 100, table=SHARDS, made=made)
    race.left_out.update({label: failed[name] for label, name in FORMAT_OF.items() if name in failed})
    size = sum(path.stat().st_size for path in (made / "tar").iterdir())
    what, lines = f"{race.count:,} x 100 KB in tar shards of {size / len(list((made / 'tar').iterdir())) / 1e6:.0f} MB", []
    for epoch in range(EPOCHS):
        line = _line(race, what, SHARDS_OURS, epoch, ">= 0.8x local files; >= the best peer")
        line.met = line.ratio(FILES) >= 0.8 and line.best_peer() >= 1
        if not epoch:
            sent = race.last(SHARDS_OURS, epoch).sent / size
            line.must, line.met = ">= the best peer; bytes <= 1.02x", sent <= 1.02 and line.best_peer() >= 1
            line.note += f", {sent:.3f}x the bytes"
        lines.append(line)
    return _finished(race, lines)


def half(folder: Path, quick: bool) -> list[Line]:
    """Objects, and room for half of them: the last epoch."""
    race = _race(folder, quick, [LOOKAHEAD, URLS, READ, PLAIN, THREADS, "diskcache"], 200, share=0.5)
    lines = []
    for ours in _ran(race):
        must = "hits >= 45 %; <= 0.6x the time of no cache with as many requests at once"
        line = _line(race, f"{race.count:,} x 100 KB, budget for half of it", ours, EPOCHS - 1, must)
        hits = [1 - race.last(ours, epoch).requests / race.count for epoch in range(EPOCHS)]
        beside = PLAIN if ours == READ else THREADS
        line.met = hits[-1] >= 0.45 and beside in line.timings and line.ratio(beside) >= 1 / 0.6
        line.note += f", {hits[-1]:.0%} hits ({hits[1]:.0%} in epoch 2)"
        line.facts["hits"] = hits
        lines.append(line)
    return _finished(race, lines)


def steps(folder: Path, quick: bool) -> list[Line]:
    """A loop that works for 50 ms with each batch of 32: the steps of the how-to, beside the same items in memory."""
    return _steps(_race(folder, quick, [LOOKAHEAD, URLS, READ, PLAIN, RAM], 200, step=0.05))


def far(folder: Path, quick: bool) -> list[Line]:
    """The same loop over a server that takes 100 ms to answer."""
    return _steps(_race(folder, quick, [LOOKAHEAD, URLS, RAM], 120, step=0.05, latency=0.1))


def _steps(race: Race) -> list[Line]:
    what, lines = f"{race.count:,} x 100 KB, {race.latency * 1e3:.0f} ms away, 50 ms of work a batch of {BATCH}", []
    for ours in _ran(race):
        for epoch in range(EPOCHS):
            line = _line(race, what, ours, epoch)
            if ours == LOOKAHEAD and race.latency == LATENCY:
                line.must, line.met = ">= 0.97x in RAM", line.ratio(RAM) >= 0.97
            lines.append(line)
    return _finished(race, lines)


ROWS = {"objects": objects, "shards": shards, "half": half, "steps": steps, "far": far}

if __name__ == "__main__":
    main("epochs", ROWS)
