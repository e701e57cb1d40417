"""Standard output and standard error of the verbs: a failed write has an error of its own, unlike a fault of the cache."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from forebay.cli.hints import OutputFailed

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
            return self._write_bytes(text, error.encoding)

    def _write_bytes(self, text: str, encoding: str) -> int:
        """Write a path as the system has it, and other characters that the stream cannot encode as escapes."""
        try:
            data = text.encode(encoding, "surrogateescape")
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
        return None


def copy_to_output(file: BinaryIO) -> None:
    """Write all bytes of a file to standard output, which is an `OutputStream`."""
    out = sys.stdout
    assert isinstance(out, OutputStream)
    out.flush()
    while data := file.read(COPIED):
        out.call(functools.partial(out.buffer.write, data))
    out.flush()


@contextlib.contextmanager
def replaced() -> Iterator[None]:
    """Make both streams `OutputStream`s inside the block."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = OutputStream(before[0], silent=False), OutputStream(before[1], silent=True)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def discard(*streams: Any) -> None:
    """Discard what is still to be written, so that the interpreter's last flush does not fail too."""
    null = os.open(os.devnull, os.O_WRONLY)
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
