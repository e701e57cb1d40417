"""How results look: tables and words on standard output, or one JSON document; remarks and errors on standard error."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from forebay._config import Settings, format_age, format_size
from forebay.cli.hints import hint_for

if TYPE_CHECKING:
    from forebay._model import Entry, Problem, Report, Victim
    from forebay.claims import ClaimInfo
    from forebay.reports import Stats

UNLIMITED = 100_000  # columns where no terminal sets a width: nothing is cut or folded in a pipe


MOST_PIDS = 4  # of a claim, in a table


class _Console(Console):
    def on_broken_pipe(self) -> None:
        raise BrokenPipeError  # rich would end the process here, with 1


def console(*, stderr: bool = False) -> Console:
    """A console on today's ``sys.stdout`` or ``sys.stderr``. Colour as rich decides: ``NO_COLOR``, ``TERM``, a terminal."""
    stream = sys.stderr if stderr else sys.stdout
    return _Console(stderr=stderr, width=None if stream.isatty() else UNLIMITED, highlight=False, markup=False, emoji=False)


def plain(text: object) -> str:
    """The text with what could move a terminal's cursor or forge a line written out as escapes."""
    words = str(text)
    if words.isprintable():
        return words
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in words)


def wants_bars() -> bool:
    """Whether bars are drawn: on a terminal, unless ``FOREBAY_PROGRESS=0``; ``=1`` draws them anyway."""
    said = Settings.from_environment().progress
    return sys.stderr.isatty() if said is None else said


def say_error(error: BaseException, *, about: str = "") -> None:
    """One line what, one line what to do."""
    what = str(error) or type(error).__name__
    say_two_lines(f"{about}: {what}" if about and about not in what else what, hint_for(error).todo)


def say_two_lines(what: str, todo: str) -> None:
    err = console(stderr=True)
    err.print(Text.assemble(("error: ", "bold red"), plain(what)), soft_wrap=True)
    err.print(Text.assemble((" hint: ", "bold"), plain(todo)), soft_wrap=True)


def note(text: str) -> None:
    """A remark for a person, on standard error."""
    console(stderr=True).print(Text(plain(text)), soft_wrap=True)


class LogLines(logging.Handler):
    """The log as lines on standard error, above the bars where there are any."""

    def __init__(self) -> None:
        super().__init__()
        self.target: Console | None = None

    def emit(self, record: logging.LogRecord) -> None:
        lines = [f"{record.levelname.lower()}: {record.getMessage()}"]
        if record.exc_info:
            lines += logging.Formatter().formatException(record.exc_info).splitlines()
        try:
            for line in lines:
                (self.target or console(stderr=True)).print(Text(plain(line), style="yellow"), soft_wrap=True)
        except OSError:  # nobody reads any more: whoever logs this must not fail for it
            self.handleError(record)


LOG_LINES = LogLines()


class Output:
    """The results of one verb. With ``as_json`` each `document` is what is printed; without, the words and tables are."""

    def __init__(self, as_json: bool = False) -> None:
        self.as_json = as_json
        self._out = console()

    def document(self, value: object) -> None:
        """Print ``value`` as JSON if that was asked for."""
        if self.as_json:
            sys.stdout.write(json.dumps(_jsonable(value), indent=2) + "\n")

    def line(self, text: object, *, style: str = "") -> None:
        if style and not self.as_json:
            self._out.print(Text(plain(text), style=style), soft_wrap=True)
        else:
            self.raw(plain(text))

    def raw(self, text: str) -> None:
        """Text of our own, as it is."""
        if not self.as_json:
            sys.stdout.write(text + "\n")

    def table(self, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        """A table; a column whose name ends with ``>`` is set to the right."""
        if self.as_json:
            return
        if not self._out.is_terminal:
            self.raw("\n".join(_aligned(columns, rows)))
            return
        table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0), show_header=any(columns))
        for name in columns:
            right = name.endswith(">")
            table.add_column(name.rstrip(">"), justify="right" if right else "left", no_wrap=right, overflow="fold")
        for row in rows:
            table.add_row(*(cell if isinstance(cell, Text) else Text(plain(cell)) for cell in row))
        self._out.print(table)

    def entries(self, entries: Sequence[Entry], *, names_only: bool = False) -> None:
        self.document([entry_record(entry) for entry in entries])
        if names_only:
            for entry in entries:
                self.line(entry.name)
            return
        now = time.time()
        if entries:
            self.table(("SIZE>", "USED>", "CREATED>", "STATE", "NAME"), (_entry_row(entry, now) for entry in entries))

    def usage(self, stats: Stats, disk_free: int) -> None:
        spaces = [(name, count, format_size(size)) for name, (count, size) in sorted(stats.spaces.items())]
        self.table(("SPACE", "ENTRIES>", "BYTES>"), spaces)
        reserved = f", {format_size(stats.bytes_reserved)} promised to fetches" if stats.bytes_reserved else ""
        used = f"{format_size(stats.bytes_used)} used{reserved} of a budget of {format_size(stats.budget)}"
        self.line(f"{used}; {format_size(disk_free)} free on the disk")

    def facts(self, facts: Mapping[str, object]) -> None:
        """Names and values, one a line."""
        self.table(("", ""), facts.items())

    def victims(self, victims: Sequence[Victim], frees: int) -> None:
        now = time.time()
        if victims:
            self.table(("SIZE>", "USED>", "NAME"), ((format_size(v.size), _ago(now, v.used), v.name) for v in victims))
        self.line(f"{_count(len(victims), 'entry', 'entries')} would go, {format_size(frees)}")

    def report(self, report: Report, *, pinned: Collection[str] = ()) -> None:
        """What really happened, the spared ones by name; ``pinned``: those that were spared for that."""
        self.line(f"{_count(len(report.removed), 'entry', 'entries')} removed, {format_size(report.freed)} freed")
        for name in report.spared:
            self.line(f"{'pinned' if name in pinned else 'in use'}, left alone: {name}", style="yellow")

    def claims(self, claims: Sequence[ClaimInfo]) -> None:
        now = time.time()
        if claims:
            columns = ("PREFIX", "STATE", "AGE>", "USER", "PROCESSES", "MEMORY>", "JOB", "DIRECTORIES")
            self.table(columns, (_claim_row(claim, now) for claim in claims))

    def dead_claims(self, claims: Sequence[ClaimInfo], what: str) -> None:
        for claim in claims:
            memory = f", {format_size(claim.bytes)} of shared memory" if claim.bytes else ""
            self.line(f"claim {claim.prefix:06} of a dead job{memory} {what}: {', '.join(claim.directories) or 'damaged'}")

    def problems(self, problems: Sequence[Problem], *, verb: str) -> None:
        for problem in problems:
            self.line(f"{problem}" + (f" ({problem.key})" if problem.key else ""))
        self.line(f"{_count(len(problems), 'problem', 'problems')} {verb}" if problems else "sound")

    def findings(self, findings: Sequence[Any]) -> None:
        """What `doctor` found: each with ``state``, ``name``, ``found`` and ``todo``."""
        style = {"ok": "green", "slow": "yellow", "wrong": "bold red"}
        rows = [(Text(f.state, style=style[f.state]), f.name, f.found) for f in findings]
        self.table(("", "CHECK", "FOUND"), rows)
        for f in findings:
            if f.todo:
                self.line(f"{f.name}: {f.todo}")


def _aligned(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Iterator[str]:
    """A table for a pipe: nothing cut, nothing folded, quick for many rows."""
    cells = [[plain(cell) for cell in row] for row in rows]
    if any(columns):
        cells.insert(0, [name.rstrip(">") for name in columns])
    widths = [max((len(row[n]) for row in cells), default=0) for n in range(len(columns))]
    for row in cells:
        sides = zip(columns, row, widths, strict=True)
        yield "  ".join(cell.rjust(width) if name.endswith(">") else cell.ljust(width) for name, cell, width in sides).rstrip()


def entry_record(entry: Entry) -> dict[str, object]:
    """An entry as ``--json`` shows it: sizes in bytes, times in seconds since 1970."""
    fields = ("space", "key", "kind", "size", "charge", "life", "leased", "created", "used", "validated", "validator")
    return {"name": entry.name, **{field: getattr(entry, field) for field in fields}, "checksum": entry.checksum.hex()}


def _entry_row(entry: Entry, now: float) -> tuple[object, ...]:
    state = [word for word, true in ((entry.life, entry.life != "cached"), ("leased", entry.leased)) if true]
    return format_size(entry.size), _ago(now, entry.used), _ago(now, entry.created), " ".join(state), entry.name


def _claim_row(claim: ClaimInfo, now: float) -> tuple[object, ...]:
    pids = [str(pid) for pid in claim.pids]
    shown = " ".join(pids if len(pids) <= MOST_PIDS else [*pids[: MOST_PIDS - 1], f"+{len(pids) - MOST_PIDS + 1}"])
    memory = "-" if claim.bytes is None else format_size(claim.bytes)
    age, state = _ago(now, claim.started), "live" if claim.live else "dead"
    return f"{claim.prefix:06}", state, age, claim.user, shown or "-", memory, claim.job or "-", " ".join(claim.directories) or "damaged"


def _ago(now: float, moment: float) -> str:
    return format_age(now - moment) if moment > 0 else "-"


def _count(number: int, one: str, many: str) -> str:
    return f"{number:,} {one if number == 1 else many}"


def _jsonable(value: object) -> object:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _jsonable({f.name: getattr(value, f.name) for f in dataclasses.fields(value)})
    if isinstance(value, Mapping):
        return {str(k): _jsonable(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_jsonable(v) for v in value]
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)


def confirmed(question: str, *, yes: bool) -> bool:
    """Whether a person agrees. Without a terminal only ``yes`` does."""
    if yes:
        return True
    if not sys.stdin.isatty():
        note("nobody is there to ask: give --yes")
        return False
    console(stderr=True).print(Text(f"{question} [y/N] "), end="")
    return sys.stdin.readline().strip().lower() in ("y", "yes")
