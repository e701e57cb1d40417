"""Standard output and standard error as the verbs see them: a failure to write is told from one of the cache."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

from forebay.cli.hints import OutputFailed


class OutputStream:
    """A stream whose failures have a name. Of standard error nobody can be told: what it does not take is lost."""

    def __init__(self, stream: Any, *, silent: bool) -> None:
        self._stream, self._silent = stream, silent
        self._failed: OutputFailed | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._told(lambda: self._stream.write(text)) or len(text)
        except UnicodeEncodeError as error:
            return self._write_bytes(text, error.encoding)

    def _write_bytes(self, text: str, encoding: str) -> int:
        """A path as the system has it; other letters that the stream does not take as escapes."""
        try:
            data = text.encode(encoding, "surrogateescape")
        except UnicodeEncodeError:
            data = text.encode(encoding, "backslashreplace")
        self.flush()
        self._told(lambda: self._stream.buffer.write(data))
        return len(text)

    def flush(self) -> None:
        self._told(self._stream.flush)

    def _told(self, call: Callable[[], Any]) -> Any:
        if self._failed is not None:  # typer tries what a stream takes, and passes over what that raises
            raise self._failed
        try:
            return call()
        except BrokenPipeError:
            raise
        except OSError as error:
            write_nowhere(self._stream)
            if not self._silent:
                self._failed = OutputFailed(f"the output cannot be written: {error.strerror}")
                raise self._failed from error
        return None


@contextlib.contextmanager
def named() -> Iterator[None]:
    """Both streams are `OutputStream`s inside of the block."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = OutputStream(before[0], silent=False), OutputStream(before[1], silent=True)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def write_nowhere(*streams: Any) -> None:
    """Let what is still to be written go nowhere: the interpreter's last flush must not fail too."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in streams:
        os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
