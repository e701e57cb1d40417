"""Results as tables and text, or one JSON document, on standard output; notes and errors on standard error.

A failed write of either stream has an error of its own, unlike a fault of the cache. rich is imported where something is drawn: a list in a
pipe needs none of it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

import click

from forebay._config import EnvironmentSettings, format_age, format_size
from forebay._kernel import host
from forebay._logs import escaped
from forebay.cli.hints import OutputFailed, hint_for

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from forebay._engine.seeing import Facts
    from forebay._model import Entry, Strays

T = TypeVar("T")
PAGE_ROWS = 1000
"""Rows in memory at once; they determine the widths of a longer table's columns."""
UNLIMITED = 100_000  # columns without a terminal: nothing is cut or folded in a pipe


def console(*, stderr: bool = False) -> Console:
    """Return a console on the current ``sys.stdout`` or ``sys.stderr``. rich decides on colour: ``NO_COLOR``, ``TERM``, a terminal."""
    from rich.console import Console

    class PipeAwareConsole(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError  # rich would end the process here, with 1

    stream = sys.stderr if stderr else sys.stdout
    return PipeAwareConsole(stderr=stderr, width=None if stream.isatty() else UNLIMITED, highlight=False, markup=False, emoji=False)


def styled(*parts: str | tuple[str, str]) -> Text:
    """Return a line of text for a console; a part may be a text with its style."""
    from rich.text import Text

    return Text.assemble(*parts)


def plain(text: object) -> str:
    """Return the text with escapes for everything that could move a terminal's cursor or forge a line."""
    return escaped(str(text))


def shown(text: str) -> str:
    """Return the text without the secrets in its URLs: signatures, passwords, queries."""
    from forebay.remote import redacted  # here, so that `forebay --help` need not load it

    return redacted(text)


def shown_name(name: str) -> str:
    """Return a whole argument, such as a URL with spaces in it, without secrets."""
    from forebay.remote import redacted
    from forebay.remote import shown as without_secrets

    return redacted(without_secrets(name))


def wants_bars() -> bool:
    """Whether to draw bars: on a terminal, unless ``FOREBAY_PROGRESS=0``; ``=1`` always draws them; ``forebay -q`` never does."""
    if _is_quiet():
        return False
    progress = EnvironmentSettings.from_environment().progress
    return sys.stderr.isatty() if progress is None else progress


def print_error(error: BaseException, *, about: str = "") -> None:
    """Print an error in two lines: what happened, and what to do."""
    what = str(error) or type(error).__name__
    print_two_lines(f"{about}: {what}" if about and about not in what else what, hint_for(error).todo)


def print_two_lines(what: str, todo: str) -> None:
    err = console(stderr=True)
    err.print(styled(("error: ", "bold red"), plain(shown(what))), soft_wrap=True)
    err.print(styled((" hint: ", "bold"), plain(todo)), soft_wrap=True)


def _is_quiet() -> bool:
    context = click.get_current_context(silent=True)
    return context is not None and bool(context.find_root().params.get("quiet"))


def argument_of_verbosity() -> tuple[str, str] | None:
    """The option before the verb that sets how much of the log is shown, and its level; None if there is none."""
    context = click.get_current_context(silent=True)
    verbose = 0 if context is None else context.find_root().params.get("verbose", 0)
    if verbose:
        return ("-v", "info") if verbose == 1 else ("-vv", "debug")
    return ("-q", "error") if _is_quiet() else None


def note(text: str) -> None:
    """Print a note on standard error, unless ``forebay -q``."""
    if _is_quiet():
        return
    console(stderr=True).print(styled(plain(shown(text))), soft_wrap=True)


def rich_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """Return a table for a console; columns whose names end with ``>`` are aligned to the right."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0), show_header=any(columns))
    for name in columns:
        right = name.endswith(">")
        table.add_column(name.rstrip(">"), justify="right" if right else "left", no_wrap=right, overflow="fold")
    for row in rows:
        table.add_row(*(cell if isinstance(cell, Text) else Text(plain(cell)) for cell in row))
    return table


class LogLines(logging.Handler):
    """The log as lines on standard error, above any bars."""

    def __init__(self) -> None:
        super().__init__()
        self.target: Console | None = None

    def emit(self, record: logging.LogRecord) -> None:
        lines = [f"{record.levelname.lower()}: {record.getMessage()}"]
        if record.exc_info:
            lines += logging.Formatter().formatException(record.exc_info).splitlines()
        try:
            for line in lines:
                (self.target or console(stderr=True)).print(styled((plain(shown(line)), "yellow")), soft_wrap=True)
        except OSError:  # the reader is gone, which must not fail the code that logs
            self.handleError(record)


LOG_LINES = LogLines()


class Output:
    """The results of one verb. With ``as_json`` only each `document` is printed, else only text and tables."""

    def __init__(self, as_json: bool = False) -> None:
        self.as_json = as_json

    @functools.cached_property
    def _out(self) -> Console:
        return console()

    def _is_terminal(self) -> bool:
        """Whether rich takes standard output for a terminal, which these variables can make it do."""
        return (sys.stdout.isatty() or not {"FORCE_COLOR", "TTY_COMPATIBLE"}.isdisjoint(os.environ)) and self._out.is_terminal

    def document(self, value: object) -> None:
        """Print ``value`` if the output is JSON."""
        if self.as_json:
            sys.stdout.write(json.dumps(_jsonable(value), indent=2) + "\n")

    def line(self, text: object, *, style: str = "") -> None:
        if style and not self.as_json:
            self._out.print(styled((plain(text), style)), soft_wrap=True)
        else:
            self.raw(plain(text))

    def raw(self, text: str) -> None:
        """Print text that needs no escapes."""
        if not self.as_json:
            sys.stdout.write(text + "\n")

    def path(self, path: str) -> None:
        """Print a path: unchanged for a program, with escaped control characters for a terminal."""
        if self.as_json or self._is_terminal():
            self.line(path)
        else:
            sys.stdout.write(path + "\n")

    def table(self, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        """Print a table; columns whose names end with ``>`` are aligned to the right."""
        if self.as_json:
            return
        rest = iter(rows)
        rows = list(islice(rest, PAGE_ROWS))
        if not self._is_terminal() or len(rows) == PAGE_ROWS:
            widths = None
            for page in chain([rows], _pages(rest)):
                lines, widths = _aligned(columns, page, widths)
                self.raw("\n".join(lines))
            return
        self._out.print(rich_table(columns, rows))

    def entries(self, entries: Iterable[Entry], *, names_only: bool = False) -> None:
        """Print any number of entries without keeping them in memory."""
        if self.as_json:
            sys.stdout.write("[")
            comma = ""
            for entry in entries:
                sys.stdout.write(f"{comma}\n  {json.dumps(entry_record(entry))}")
                comma = ","
            sys.stdout.write("\n]\n" if comma else "]\n")
        elif names_only:
            self.names(entry.name for entry in entries)
        else:
            self.facts_of_entries((e.name, e.size, e.used, e.created, e.life, e.leased) for e in entries)

    def facts_of_entries(self, facts: Iterable[Facts]) -> None:
        """Print the table of `entries` from their facts alone."""
        now = time.time()
        rows = (_entry_row(fields, now) for fields in facts)
        first = next(rows, None)
        if first is not None:
            self.table(("SIZE>", "USED>", "CREATED>", "STATE", "NAME"), chain([first], rows))

    def names(self, names: Iterable[str]) -> None:
        """Print names, one a line."""
        for page in _pages(names):
            text = "\n".join(page)
            self.raw(text if text.replace("\n", "").isprintable() and text.count("\n") == len(page) - 1 else "\n".join(map(plain, page)))

    def strays(self, strays: Strays, todo: str = "") -> None:
        """Print the files that belong to no entry, if there are any."""
        if strays.files:
            self.line(f"{count(strays.files, 'file', 'files')} that no entry names, {format_size(strays.bytes)}{todo and ': '}{todo}")
        if strays.foreign:
            others = f"{count(strays.foreign, 'file', 'files')} that Forebay did not create, {format_size(strays.foreign_bytes)}"
            self.line(f"{others}: `forebay verify` lists them; move them away, or remove them yourself")

    def facts(self, facts: Mapping[str, object]) -> None:
        """Print names and values, one a line."""
        self.table(("", ""), facts.items())


def _pages(items: Iterable[T]) -> Iterator[list[T]]:
    rest = iter(items)
    while page := list(islice(rest, PAGE_ROWS)):
        yield page


def _aligned(columns: Sequence[str], rows: Iterable[Sequence[object]], widths: list[int] | None = None) -> tuple[list[str], list[int]]:
    """Return the lines of a table for a pipe, with nothing cut or folded, and the widths for the following lines, which have no header."""
    cells: Iterable[Sequence[object]] = rows
    if widths is None:
        cells = [[plain(cell) for cell in row] for row in rows]
        if any(columns):
            cells.insert(0, [name.rstrip(">") for name in columns])
        widths = [max((len(str(row[n])) for row in cells), default=0) for n in range(len(columns))]
        if len(cells) > PAGE_ROWS:  # more rows follow, whose sizes may be longer
            widths = [max(width, 8) if name.endswith(">") else width for name, width in zip(columns, widths, strict=True)]
    form = "  ".join(f"{{:{'>' if name.endswith('>') else '<'}{width}}}" for name, width in zip(columns, widths, strict=True))
    lines = [form.format(*row).rstrip() for row in cells]
    if "".join(lines).isprintable():
        return lines, widths
    return [form.format(*map(plain, row)).rstrip() for row in cells], widths


def entry_record(entry: Entry) -> dict[str, object]:
    """Return an entry as ``--json`` shows it: sizes in bytes, times in seconds since 1970."""
    fields = ("space", "key", "kind", "size", "charge", "life", "leased", "created", "used", "validated", "validator")
    return {"name": entry.name, **{field: getattr(entry, field) for field in fields}, "checksum": entry.checksum.hex()}


def _entry_row(facts: Facts, now: float) -> tuple[object, ...]:
    name, size, used, created, life, leased = facts
    state = "leased" if leased else ""
    if life != "cached":
        state = f"{life} {state}".rstrip()
    return _size(size), ago(now, used), ago(now, created), state, name


_size, _age = functools.lru_cache(4096)(format_size), functools.lru_cache(4096)(format_age)  # many entries have the same values


def ago(now: float, moment: float) -> str:
    """How long ago something was; a dash if it never was."""
    return _age(int(now - moment)) if moment > 0 else "-"


def count(number: int, one: str, many: str) -> str:
    """A number with its noun."""
    return f"{number:,} {one if number == 1 else many}"


def _jsonable(value: object) -> object:
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return _jsonable(value._asdict())
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
    """Whether the user agrees; False without a terminal."""
    if not sys.stdin.isatty():
        console(stderr=True).print("error: cannot ask for confirmation without a terminal; pass --yes")
        return False
    console(stderr=True).print(styled(f"{question} [y/N] "), end="")
    return sys.stdin.readline().strip().lower() in ("y", "yes")


# -- the streams -------------------------------------------------------------------------------------------------------


COPIED = 1 << 20
"""Bytes that `copy_to_output` holds at a time."""


class OutputStream:
    """A stream that raises `OutputFailed`. A ``silent`` one, standard error, drops what cannot be written."""

    def __init__(self, stream: Any, *, silent: bool) -> None:
        self._stream, self._silent = stream, silent
        self._failed: OutputFailed | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self.call(lambda: self._stream.write(text)) or len(text)
        except UnicodeEncodeError as error:
            encoding = error.encoding
        try:
            data = text.encode(encoding, "surrogateescape")  # a path as the system has it
        except UnicodeEncodeError:
            data = text.encode(encoding, "backslashreplace")
        self.flush()
        self.call(lambda: self._stream.buffer.write(data))
        return len(text)

    def flush(self) -> None:
        self.call(self._stream.flush)

    def call(self, call: Callable[[], Any]) -> Any:
        """Call what writes to the stream. Raises `OutputFailed`, BrokenPipeError."""
        if self._failed is not None:  # click probes streams, and ignores errors
            raise self._failed
        try:
            return call()
        except BrokenPipeError:
            raise
        except OSError as error:
            discard(self._stream)
            if not self._silent:
                self._failed = OutputFailed(f"the output cannot be written: {error.strerror}")
                raise self._failed from error


def copy_to_output(file: BinaryIO) -> None:
    """Write all bytes of a file to standard output, which is an `OutputStream`."""
    out = sys.stdout
    assert isinstance(out, OutputStream)
    out.flush()
    while data := file.read(COPIED):
        out.call(functools.partial(out.buffer.write, data))
    out.flush()


@contextlib.contextmanager
def guarded_streams() -> Iterator[None]:
    """Make both streams `OutputStream`s inside the block."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = OutputStream(before[0], silent=False), OutputStream(before[1], silent=True)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def discard(*streams: Any) -> None:
    """Discard what is still to be written, so that the interpreter's last flush does not fail too."""
    null = host.open_fd(os.devnull, os.O_WRONLY)
    for stream in streams:
        os.dup2(null, stream.fileno())
    os.close(null)


def write_whole(path: Path, data: bytes) -> None:
    """Write a file as a whole, or not at all. Raises `OutputFailed`."""
    from forebay._kernel import host
    from forebay.remote.local import staged  # here, so that `forebay --help` need not load it

    try:
        with staged(path) as (part, fd):
            host.pwrite(fd, data, 0)
            os.replace(part, path)
    except OSError as error:
        raise OutputFailed(f"{path} cannot be written: {error.strerror}") from error
