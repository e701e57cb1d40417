"""The loggers of Forebay. What others can choose (keys, names in listings, answers of servers) cannot forge a line or move a cursor."""

from __future__ import annotations

import logging


def logger(name: str) -> logging.Logger:
    """The logger of this name, with its messages escaped, whatever handlers they reach. Each module of ours takes its own from here."""
    found = logging.getLogger(name)
    found.addFilter(_ESCAPING)  # idempotent
    return found


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
        return True


_ESCAPING = _Escaping()
