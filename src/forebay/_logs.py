"""The loggers of Forebay. What others can choose (keys, names in listings, answers of servers) cannot forge a line or move a cursor."""

from __future__ import annotations

import logging
import traceback


def logger(name: str) -> logging.Logger:
    """The logger of this name, with its messages escaped, whatever handlers they reach. Each module of ours takes its own from here."""
    result = logging.getLogger(name)
    result.addFilter(_ESCAPING)  # idempotent
    return result


def escaped(text: str) -> str:
    """``text`` on one line: line breaks, control characters, lone surrogates and what else cannot be printed stand as escapes."""
    return text if text.isprintable() else "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class _Escaping(logging.Filter):
    """A message that is printable as it is keeps its template and arguments, for handlers that look at those."""

    def filter(self, record: logging.LogRecord) -> bool:
        try:
            message = record.getMessage()
        except Exception:  # noqa: BLE001 (the handler formats it once more, and reports what is wrong)
            return True
        if not message.isprintable():
            record.msg, record.args = escaped(message), None
        if record.exc_info and record.exc_info[1] is not None and not record.exc_text:
            record.exc_text = _told(record.exc_info[1])  # what formatters take where it is there
        return True


def _told(error: BaseException) -> str:
    """The traceback of an error, with no line in it that the text of an error made."""
    formatted = traceback.TracebackException.from_exception(error)
    left, seen = [formatted], set[int]()
    while left:
        one = left.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        _escape_text(one)
        left += [other for other in (one.__cause__, one.__context__, *(one.exceptions or ())) if other is not None]
    return "\n".join(map(escaped, "".join(formatted.format()).removesuffix("\n").split("\n")))


def _escape_text(formatted: traceback.TracebackException) -> None:
    plain = formatted.format_exception_only
    # On the object: those of causes are made by Python, of its own class.
    formatted.format_exception_only = lambda *args, **kwargs: (  # type: ignore[method-assign]
        escaped(line.removesuffix("\n")) + "\n" for line in plain(*args, **kwargs)
    )
    if isinstance(formatted.__notes__, list):
        formatted.__notes__ = [escaped(str(note)) for note in formatted.__notes__]


_ESCAPING = _Escaping()
