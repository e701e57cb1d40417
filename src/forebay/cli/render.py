"""How results look: tables and words on standard output, or one JSON document; remarks and errors on standard error."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import math
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, TypeVar

from rich.console import Console
from rich.table import Table
from rich.text import Text

from forebay._config import EnvironmentSettings, format_age, format_size
from forebay._logs import escaped
from forebay.cli.hints import hint_for

if TYPE_CHECKING:
    from forebay._engine.stats import Facts
    from forebay._model import Entry, Problem, Report, Strays, Victim
    from forebay.claims import ClaimInfo
    from forebay.reports import Stats

T = TypeVar("T")
A_PAGE = 1000
"""Rows that are in memory at once; a longer table has its columns as wide as those need."""
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
    return escaped(str(text))


def shown(text: str) -> str:
    """The text without the secrets that URLs in it hold: signatures, passwords, queries."""
    from forebay.remote import redacted  # here, so that `forebay --help` need not load it

    return redacted(text)


def shown_name(name: str) -> str:
    """A whole argument, such as a URL with blanks in it, without secrets."""
    from forebay.remote import redacted
    from forebay.remote import shown as without

    return redacted(without(name))


def wants_bars() -> bool:
    """Whether bars are drawn: on a terminal, unless ``FOREBAY_PROGRESS=0``; ``=1`` draws them anyway."""
    said = EnvironmentSettings.from_environment().progress
    return sys.stderr.isatty() if said is None else said


def say_error(error: BaseException, *, about: str = "") -> None:
    """One line what, one line what to do."""
    what = str(error) or type(error).__name__
    say_two_lines(f"{about}: {what}" if about and about not in what else what, hint_for(error).todo)


def say_two_lines(what: str, todo: str) -> None:
    err = console(stderr=True)
    err.print(Text.assemble(("error: ", "bold red"), plain(shown(what))), soft_wrap=True)
    err.print(Text.assemble((" hint: ", "bold"), plain(todo)), soft_wrap=True)


def note(text: str) -> None:
    """A remark for a person, on standard error."""
    console(stderr=True).print(Text(plain(shown(text))), soft_wrap=True)


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
                (self.target or console(stderr=True)).print(Text(plain(shown(line)), style="yellow"), soft_wrap=True)
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

    def path(self, path: str) -> None:
        """A path: for a program as it is, whatever bytes it has; for a terminal with its control characters escaped."""
        if self._out.is_terminal or self.as_json:
            self.line(path)
        else:
            sys.stdout.write(path + "\n")

    def table(self, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        """A table; a column whose name ends with ``>`` is set to the right."""
        if self.as_json:
            return
        rest = iter(rows)
        rows = list(islice(rest, A_PAGE))
        if not self._out.is_terminal or len(rows) == A_PAGE:
            widths = None
            for page in chain([rows], _pages(rest)):
                lines, widths = _aligned(columns, page, widths)
                self.raw("\n".join(lines))
            return
        table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0), show_header=any(columns))
        for name in columns:
            right = name.endswith(">")
            table.add_column(name.rstrip(">"), justify="right" if right else "left", no_wrap=right, overflow="fold")
        for row in rows:
            table.add_row(*(cell if isinstance(cell, Text) else Text(plain(cell)) for cell in row))
        self._out.print(table)

    def entries(self, entries: Iterable[Entry], *, names_only: bool = False) -> None:
        """Of any number: none is kept once it is written."""
        if self.as_json:
            self._stream("[", (json.dumps(entry_record(entry)) for entry in entries), "]")
        elif names_only:
            self.names(entry.name for entry in entries)
        else:
            self.facts_of_entries((e.name, e.size, e.used, e.created, e.life, e.leased) for e in entries)

    def facts_of_entries(self, facts: Iterable[Facts]) -> None:
        """The table of `entries`."""
        now = time.time()
        rows = (_entry_row(one, now) for one in facts)
        first = next(rows, None)
        if first is not None:
            self.table(("SIZE>", "USED>", "CREATED>", "STATE", "NAME"), chain([first], rows))

    def names(self, names: Iterable[str]) -> None:
        """One a line."""
        for page in _pages(names):
            text = "\n".join(page)
            self.raw(text if text.replace("\n", "").isprintable() and text.count("\n") == len(page) - 1 else "\n".join(map(plain, page)))

    def _stream(self, before: str, items: Iterable[str], after: str) -> None:
        """A JSON list, an item a line."""
        sys.stdout.write(before)
        comma = ""
        for item in items:
            sys.stdout.write(f"{comma}\n  {item}")
            comma = ","
        sys.stdout.write(f"\n{after}\n" if comma else f"{after}\n")

    def usage(self, stats: Stats, disk_free: int, overhead: Mapping[str, int]) -> None:
        spaces = [(name, count, format_size(size)) for name, (count, size) in sorted(stats.spaces.items())]
        self.table(("SPACE", "ENTRIES>", "BYTES>"), spaces)
        reserved = f", {format_size(stats.bytes_reserved)} promised to fetches" if stats.bytes_reserved else ""
        used = f"{format_size(stats.bytes_used)} used{reserved} of a budget of {format_size(stats.budget)}"
        self.line(f"{used}; {format_size(disk_free)} free on the disk")
        parts = ", ".join(f"{name} {format_size(size)}" for name, size in overhead.items())
        self.line(f"{format_size(sum(overhead.values()))} beside the budget: {parts}")

    def strays(self, strays: Strays, todo: str = "") -> None:
        """What is counted by nobody, where there is any."""
        if strays.files:
            self.line(
                f"beside it {_count(strays.files, 'file', 'files')} that no entry names, {format_size(strays.bytes)}{todo and ': '}{todo}"
            )
        if strays.foreign:
            others = f"beside it {_count(strays.foreign, 'file', 'files')} that Forebay did not make, {format_size(strays.foreign_bytes)}"
            self.line(f"{others}: `forebay verify` names them; move them away, or remove them yourself")

    def facts(self, facts: Mapping[str, object]) -> None:
        """Names and values, one a line."""
        self.table(("", ""), facts.items())

    def victims(self, victims: Sequence[Victim], frees: int, strays: Strays | None = None) -> None:
        now = time.time()
        if victims:
            self.table(("SIZE>", "USED>", "NAME"), ((format_size(v.size), _ago(now, v.used), v.name) for v in victims))
        what = _entries_and_strays(len(victims), strays.files if strays else 0)
        self.line(f"{what} would go, {format_size(frees + (strays.bytes if strays else 0))}")

    def pinned(self, names: Iterable[str]) -> None:
        """What was meant, and stays for that."""
        for name in names:
            self.line(f"pinned, left alone: {name}", style="yellow")

    def report(self, report: Report, *, pinned: Collection[str] = ()) -> None:
        """What really happened, the spared ones by name; ``pinned``: those that were spared for that."""
        self.line(f"{_entries_and_strays(len(report.removed), report.stray_files)} removed, {format_size(report.freed)} freed")
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


def _pages(items: Iterable[T]) -> Iterator[list[T]]:
    rest = iter(items)
    while page := list(islice(rest, A_PAGE)):
        yield page


def _aligned(columns: Sequence[str], rows: Iterable[Sequence[object]], widths: list[int] | None = None) -> tuple[list[str], list[int]]:
    """The lines of a table for a pipe, nothing cut, nothing folded; and the widths for those that follow, which have no header."""
    cells: Iterable[Sequence[object]] = rows
    if widths is None:
        cells = [[plain(cell) for cell in row] for row in rows]
        if any(columns):
            cells.insert(0, [name.rstrip(">") for name in columns])
        widths = [max((len(str(row[n])) for row in cells), default=0) for n in range(len(columns))]
        if len(cells) > A_PAGE:  # more follow, whose sizes may be longer
            widths = [max(width, 8) if name.endswith(">") else width for name, width in zip(columns, widths, strict=True)]
    form = "  ".join(f"{{:{'>' if name.endswith('>') else '<'}{width}}}" for name, width in zip(columns, widths, strict=True))
    lines = [form.format(*row).rstrip() for row in cells]
    if "".join(lines).isprintable():
        return lines, widths
    return [form.format(*map(plain, row)).rstrip() for row in cells], widths


def entry_record(entry: Entry) -> dict[str, object]:
    """An entry as ``--json`` shows it: sizes in bytes, times in seconds since 1970."""
    fields = ("space", "key", "kind", "size", "charge", "life", "leased", "created", "used", "validated", "validator")
    return {"name": entry.name, **{field: getattr(entry, field) for field in fields}, "checksum": entry.checksum.hex()}


def _entry_row(facts: Facts, now: float) -> tuple[object, ...]:
    name, size, used, created, life, leased = facts
    state = "leased" if leased else ""
    if life != "cached":
        state = f"{life} {state}".rstrip()
    return _size(size), _ago(now, used), _ago(now, created), state, name


def _claim_row(claim: ClaimInfo, now: float) -> tuple[object, ...]:
    pids = [str(pid) for pid in claim.pids]
    shown = " ".join(pids if len(pids) <= MOST_PIDS else [*pids[: MOST_PIDS - 1], f"+{len(pids) - MOST_PIDS + 1}"])
    memory = "-" if claim.bytes is None else format_size(claim.bytes)
    age, state = _ago(now, claim.started), "live" if claim.live else "dead"
    return f"{claim.prefix:06}", state, age, claim.user, shown or "-", memory, claim.job or "-", " ".join(claim.directories) or "damaged"


_size, _age = functools.lru_cache(4096)(format_size), functools.lru_cache(4096)(format_age)  # many entries have the same


def _ago(now: float, moment: float) -> str:
    return _age(int(now - moment)) if moment > 0 else "-"


def _count(number: int, one: str, many: str) -> str:
    return f"{number:,} {one if number == 1 else many}"


def _entries_and_strays(entries: int, strays: int) -> str:
    what = _count(entries, "entry", "entries")
    return f"{what} and {_count(strays, 'stray file', 'stray files')}" if strays else what


def _jsonable(value: object) -> object:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _jsonable({f.name: getattr(value, f.name) for f in dataclasses.fields(value)})
    if isinstance(value, Mapping):
        return {str(k): _jsonable(v) for k, v in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return [_jsonable(v) for v in value]
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, BaseException):
        return shown(str(value))
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)


def confirmed(question: str) -> bool:
    """Whether a person agrees. Without a terminal nobody does."""
    if not sys.stdin.isatty():
        note("nobody is there to ask: give --yes")
        return False
    console(stderr=True).print(Text(f"{question} [y/N] "), end="")
    return sys.stdin.readline().strip().lower() in ("y", "yes")
