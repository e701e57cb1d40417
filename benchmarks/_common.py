"""How rows are measured and printed.

A row runs in a process of its own. Within it every round runs Forebay, the floors and the peers in turn, so that all of them
meet the same noise; medians are kept. The floors are what the machine itself costs, measured in the same run: only ratios can be
carried from one machine to another.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

OURS, FLOOR, PEER = "ours", "floor", "peer"


@dataclass
class Timing:
    """Samples of one contestant, in seconds for one operation. ``cpu``: user and system time, which other programs disturb less."""

    kind: str
    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.wall)

    @property
    def median_cpu(self) -> float:
        return statistics.median(self.cpu) if self.cpu else float("nan")


@dataclass
class Part:
    """A contestant: ``run`` does ``count`` operations; ``before`` prepares a round, and is not timed."""

    kind: str
    run: Callable[[], object]
    count: int = 1
    before: Callable[[], object] | None = None


@dataclass
class Line:
    """One line of the table: what was measured, what it must be, and what came out. ``facts``: what plots need besides; not printed."""

    what: str
    must: str
    timings: dict[str, Timing] = field(default_factory=dict)
    met: bool | None = None
    note: str = ""
    unit: str = "s"
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def ours(self) -> Timing:
        return next(timing for timing in self.timings.values() if timing.kind == OURS)

    def ratio(self, label: str) -> float:
        """How often our time goes into this one's: above 1 we are faster."""
        return self.timings[label].median / self.ours.median

    def best_peer(self) -> float:
        """`ratio` of the fastest peer; infinite if there is none."""
        return min((self.ratio(label) for label, timing in self.timings.items() if timing.kind == PEER), default=float("inf"))

    def floors(self) -> str:
        return "; ".join(
            f"{label} {self._value(timing.median)} ({self.ours.median / timing.median:.3g}x)"
            for label, timing in self.timings.items()
            if timing.kind == FLOOR
        )

    def peers(self) -> str:
        return "; ".join(
            f"{label} {self._value(timing.median)}" + (f" ({self.ratio(label):.3g}x{self._cpu_ratio(timing)})" if self.ours.median else "")
            for label, timing in self.timings.items()
            if timing.kind == PEER
        )

    def _value(self, value: float) -> str:
        return seconds(value) if self.unit == "s" else f"{value:,.0f} {self.unit}"

    def _cpu_ratio(self, timing: Timing) -> str:
        ours = self.ours.median_cpu
        return f", CPU {timing.median_cpu / ours:.3g}x" if timing.cpu and ours > 0 else ""

    def markdown(self) -> str:
        mine = self._value(self.ours.median)
        if self.ours.cpu:
            mine += f" (CPU {seconds(self.ours.median_cpu)})"
        verdict = {True: "met", False: "**missed**", None: "-"}[self.met]
        cells = [self.what, self.must, f"{mine}{', ' + self.note if self.note else ''}", self.floors() or "-", self.peers() or "-", verdict]
        return f"| {' | '.join(cells)} |"


HEAD = "| measured | goal | Forebay | floor (x: our time / its time) | peers (x: their time / ours) | |\n|---|---|---|---|---|---|"


def seconds(value: float) -> str:
    """A duration with three digits: ``1.23 us``."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value / 1e-9:.3g} ns"


def interleave(rounds: int, parts: Mapping[str, Part]) -> dict[str, Timing]:
    """All parts in turn, ``rounds`` times, after one round that warms up and is thrown away."""
    timings = {label: Timing(part.kind) for label, part in parts.items()}
    for number in range(rounds + 1):
        for label, part in parts.items():
            if part.before is not None:
                part.before()
            gc.collect()
            cpu, wall = time.process_time(), time.perf_counter()
            part.run()
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            if number:
                timings[label].wall.append(wall / part.count)
                timings[label].cpu.append(cpu / part.count)
    return timings


def python(code: str, *values: str) -> dict[str, Any]:
    """What a fresh interpreter prints as JSON in its last line."""
    done = subprocess.run([sys.executable, "-c", code, *values], check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def time_starts(line: Line, codes: Mapping[str, tuple[str, str, Sequence[str]]], rounds: int) -> list[float]:
    """Time what fresh interpreters do, in turn: by label (kind, code, its arguments). Gives the medians of the parts that ours told of,
    in milliseconds. A first round is not counted."""
    steps = []
    line.timings = {label: Timing(kind) for label, (kind, _, _) in codes.items()}
    for number in range(rounds + 1):
        for label, (_, code, values) in codes.items():
            wall, cpu, *parts = python(code, *values)
            if number:
                line.timings[label].wall.append(wall)
                line.timings[label].cpu.append(cpu)
                steps += [parts] if parts else []
    return [statistics.median(step) * 1e3 for step in zip(*steps, strict=True)]


Row = Callable[[Path, bool], list[Line]]


def main(
    name: str, rows: Mapping[str, Row], *, folder: Path | None = None, variables: Mapping[str, tuple[str, str]] | None = None
) -> None:  # fmt: skip
    """The command line of a benchmark: rows by name, all by default.

    ``variables``: further options, each with the variable of the environment in which its value comes to the rows, and its help."""
    parser = argparse.ArgumentParser(description=f"{name}: rows are {', '.join(rows)}")
    parser.add_argument("rows", nargs="*", metavar="ROW", help="default: all")
    parser.add_argument("--quick", action="store_true", help="small sizes, few rounds: does it run at all?")
    parser.add_argument("--json", action="store_true", help="all samples, instead of Markdown")
    parser.add_argument("--table", type=Path, metavar="FILE", help="measure nothing: print the table of what --json has written")
    parser.add_argument("--folder", type=Path, default=folder, help="where caches and files are put: %(default)s")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    for option, (_, text) in (variables or {}).items():
        parser.add_argument(f"--{option}", metavar="PATH", help=text)
    asked = parser.parse_args()
    for option, (variable, _) in (variables or {}).items():
        if value := getattr(asked, option):
            os.environ[variable] = str(Path(value).absolute())
    if unknown := set(asked.rows) - set(rows):
        parser.error(f"no row {', '.join(sorted(unknown))}: rows are {', '.join(rows)}")
    if asked.table:
        print(table(json.loads(asked.table.read_text()), asked.rows or list(rows)))
        return
    if asked.child:
        lines = rows[asked.child](asked.folder, asked.quick)
        print(json.dumps([dataclasses.asdict(line) for line in lines]))
        return
    failed = report(name, asked.rows or list(rows), asked)
    sys.exit(1 if failed else 0)


def report(name: str, wanted: list[str], asked: argparse.Namespace) -> list[str]:
    """Run the rows one after the other; gives the names of those that could not be run."""
    began, failed, found = time.monotonic(), [], {}
    if not asked.json:
        print(f"{machine()}\n\n{HEAD}", flush=True)
    for row in wanted:
        lines = run_row(name, row, asked)
        if lines is None:
            failed.append(row)
            continue
        found[row] = [dataclasses.asdict(line) for line in lines]
        if not asked.json:
            print("\n".join(line.markdown() for line in lines), flush=True)
    if asked.json:
        print(json.dumps({"machine": machine(), "rows": found}, indent=1))
    else:
        print(f"\n{time.monotonic() - began:.0f} s, load {os.getloadavg()[0]:.1f} at the end")
    return failed


def table(measured: dict[str, Any], rows: Sequence[str]) -> str:
    """These rows of what ``--json`` has written, as Markdown."""
    lines = [_line(dict(each)).markdown() for row in rows for each in measured["rows"].get(row, ())]
    return "\n".join([f"{measured['machine']}\n", HEAD, *lines])


def run_row(name: str, row: str, asked: argparse.Namespace) -> list[Line] | None:
    """One row in a process and a directory of its own; None if it failed, which is told."""
    folder = Path(tempfile.mkdtemp(prefix=f"forebay-bench-{row}-", dir=asked.folder))
    words = [sys.executable, str(Path(__file__).with_name(f"{name}.py")), "--child", row, "--folder", str(folder)]
    try:
        done = subprocess.run(words + ["--quick"] * asked.quick, stdout=subprocess.PIPE, text=True, env=_environment())
        if done.returncode:
            print(f"row {row} failed with {done.returncode}", file=sys.stderr)
            return None
        return [_line(found) for found in json.loads(done.stdout.splitlines()[-1])]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _line(found: dict[str, Any]) -> Line:
    timings = {label: Timing(**timing) for label, timing in found.pop("timings").items()}
    return Line(**found, timings=timings)


def _environment() -> dict[str, str]:
    """This checkout's Forebay, with no setting of the user's."""
    source = str(Path(__file__).parents[1] / "src")
    return {name: value for name, value in os.environ.items() if not name.startswith("FOREBAY_")} | {"PYTHONPATH": source}


def machine() -> str:
    """Where this runs, in a line."""
    with open("/proc/cpuinfo") as file:
        model = next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), os.uname().machine)
    version = ".".join(map(str, sys.version_info[:3]))
    load = f"load {os.getloadavg()[0]:.1f}"
    return f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} x {model}, Linux {os.uname().release}, Python {version}, {load}"
