"""The loggers of Forebay. Text from outside (keys, names in listings, server responses) cannot forge a log line or move the cursor."""

from __future__ import annotations

TYPE_CHECKING = False

if TYPE_CHECKING:
    import logging
    import traceback

    def logger(name: str) -> logging.Logger:
        """Return the logger of this name; its messages are escaped for every handler. Each module of Forebay gets its logger here."""
else:

    def logger(name):
        return _Logger(name)


class _Logger:
    """Stands for the logger of a module until the module first logs: a process that logs nothing does not import `logging`."""

    _logger: logging.Logger

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> object:
        if attribute != "_logger":
            return getattr(self._logger, attribute)
        import logging

        self._logger = logging.getLogger(self._name)
        self._logger.addFilter(_ESCAPING)  # idempotent
        return self._logger


def escaped(text: str) -> str:
    """``text`` on one line: line breaks, control characters, lone surrogates and other unprintable characters are escaped."""
    return text if text.isprintable() else "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class _Escaping:
    """Escapes messages. A printable one keeps its template and arguments, for handlers that use those."""

    def filter(self, record: logging.LogRecord) -> bool:
        try:
            message = record.getMessage()
        except Exception:  # noqa: BLE001 (the handler formats it again, and reports the error)
            return True
        if not message.isprintable():
            record.msg, record.args = escaped(message), None
        if record.exc_info and record.exc_info[1] is not None and not record.exc_text:
            record.exc_text = _formatted(record.exc_info[1])  # formatters use it if it is set
        return True


def _formatted(error: BaseException) -> str:
    """The traceback of an error; no message in it can add lines."""
    import traceback

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
    # Replaced on the object, not in a subclass: Python makes those of causes, of its own class.
    formatted.format_exception_only = lambda *args, **kwargs: (  # type: ignore[method-assign]
        escaped(line.removesuffix("\n")) + "\n" for line in plain(*args, **kwargs)
    )
    if isinstance(formatted.__notes__, list):
        formatted.__notes__ = [escaped(str(note)) for note in formatted.__notes__]


_ESCAPING = _Escaping()
