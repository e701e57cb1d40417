"""HTTP/1.1 on one socket: a question goes out, an answer comes in. Knows no URL, no pool and no retry.

Not `http.client`: that parses headers as e-mail, which costs more than the rest of a small object's fetch, copies each body through a
second buffer, loses what came before a time-out, and ends short in silence where a connection is cut.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

MAX_HEAD = 128 << 10
MAX_LINE = 4 << 10  # of a chunk's size, or of a trailer
SMALL = 16 << 10
_STATUS = re.compile(r"HTTP/1\.([01]) (\d{3})(?: (.*))?\Z")
_END_OF_HEAD = re.compile(rb"\r?\n\r?\n")
_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+\Z")
_DIGITS = re.compile(r"[0-9]{1,18}\Z")
_HEX = re.compile(rb"[0-9A-Fa-f]{1,15}\Z")


class BadAnswer(Exception):
    """The server does not speak HTTP/1.1. The text holds nothing that it sent."""


class Cut(Exception):
    """The connection ended before the answer did. ``left``: bytes that are missing, None where that is unknown."""

    def __init__(self, left: int | None = None) -> None:
        super().__init__(left)
        self.left = left


class Headers(Mapping[str, str]):
    """Names in any case; values of a name that came several times are joined by commas."""

    def __init__(self, pairs: Iterable[tuple[str, str]] = ()) -> None:
        self._found: dict[str, str] = {}
        for name, value in pairs:
            key = name.lower()
            self._found[key] = f"{self._found[key]}, {value}" if key in self._found else value

    def __getitem__(self, name: str) -> str:
        return self._found[name.lower()]

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)


class Head(NamedTuple):
    """What comes before a body. ``length``: bytes of the body as sent, None where only its end tells."""

    status: int
    reason: str
    headers: Headers
    length: int | None


class Wire:
    """A connection, used by one thread at a time: `ask`, then `block` until it is empty, then perhaps `ask` again.

    Raises what the socket raises, `BadAnswer` and `Cut`; after any of them it must be closed."""

    def __init__(self, sock: socket.socket, size: int) -> None:
        self.sock = sock
        self._space = memoryview(bytearray(max(size, MAX_LINE)))
        self._ahead = self._space[:0]  # what was received and not yet asked for
        self._left: int | None = 0  # bytes of the body, or of the present chunk; None: up to the connection's end
        self._chunked = self._begun = self._closes = False

    @property
    def is_free(self) -> bool:
        """The answer was read to its end, and the server goes on listening."""
        return self._left == 0 and not (self._chunked or self._closes or self._ahead)

    def close(self) -> None:
        self.sock.close()

    def ask(self, method: str, target: str, headers: Mapping[str, str], body: bytes | None = None) -> Head:
        """Send a request and read its answer up to the body. ``headers``: all of them, Host too."""
        lines = [f"{method} {target} HTTP/1.1", *[f"{name}: {value}" for name, value in headers.items()]]
        if body is not None:
            lines.append(f"Content-Length: {len(body)}")
        self._left = None  # not free until the answer has come
        self._send("\r\n".join([*lines, "", ""]).encode("latin-1"), len(lines), body or b"")
        head = self._head(method)
        while head.status < 200:
            head = self._head(method)
        return head

    def _send(self, head: bytes, lines: int, body: bytes) -> None:
        if head.count(b"\n") != lines + 1 or head.count(b"\r") != lines + 1 or b"\0" in head:
            raise ValueError("a line break within a header")
        try:
            # small ones in one segment: of two, the second would wait until the first is acknowledged
            self.sock.sendall(head + body if len(body) < SMALL else head)
            if len(body) >= SMALL:
                self.sock.sendall(body)
        except BrokenPipeError:
            self._closes = True  # a server that refuses need not listen to the end: its answer may be there

    def _head(self, method: str) -> Head:
        version, status, reason, headers = _parsed(self._text())
        if status == 101:
            raise BadAnswer("another protocol")
        bodiless = method == "HEAD" or status < 200 or status in (204, 304)
        words = {word.strip().lower() for word in headers.get("Connection", "").split(",")}
        self._closes = self._closes or "close" in words or (version == "0" and "keep-alive" not in words)
        self._begun, self._chunked = False, "Transfer-Encoding" in headers and not bodiless
        if self._chunked and headers["Transfer-Encoding"].strip().lower() != "chunked":
            raise BadAnswer("an unknown Transfer-Encoding")
        self._left = 0 if bodiless or self._chunked else _length(headers)
        return Head(status, reason, headers, None if self._chunked else self._left)

    def _text(self) -> str:
        """The lines of a head."""
        piece, got = self._ahead, bytes(self._ahead)
        while not (end := _END_OF_HEAD.search(got)):
            if len(got) > MAX_HEAD:
                raise BadAnswer("headers without an end")
            piece = self._receive()
            got += piece
        self._ahead = piece[len(piece) - (len(got) - end.end()) :]
        return got[: end.start()].decode("latin-1")

    def _receive(self) -> memoryview:
        count = self.sock.recv_into(self._space)
        if count == 0:
            raise Cut(None if self._chunked else self._left)
        return self._space[:count]

    def block(self, limit: int) -> memoryview:
        """The next bytes of the body, at most ``limit`` of them, good until the next call; empty at its end."""
        if self._chunked and self._left == 0:
            self._next_chunk()
        if self._left == 0:
            return self._space[:0]
        if not self._ahead:
            try:
                self._ahead = self._receive()
            except Cut:
                if self._left is not None:
                    raise
                self._left, self._closes = 0, True
                return self._space[:0]
        count = min(limit, len(self._ahead) if self._left is None else self._left)
        found, self._ahead = self._ahead[:count], self._ahead[count:]
        if self._left is not None:
            self._left -= len(found)
        return found

    def _next_chunk(self) -> None:
        if self._begun and self._line():
            raise BadAnswer("a chunk that is longer than it says")
        size = self._line().partition(b";")[0].strip()
        if not _HEX.match(size):
            raise BadAnswer("a chunk of no size")
        self._begun, self._left = True, int(size, 16)
        if self._left == 0:
            while self._line():  # trailers
                continue
            self._chunked = False

    def _line(self) -> bytes:
        got = b""
        while (end := (start := bytes(self._ahead[:MAX_LINE])).find(b"\n")) < 0:
            got += start
            if len(got) > MAX_LINE:
                raise BadAnswer("a line without an end")
            self._ahead = self._receive()
        self._ahead = self._ahead[end + 1 :]
        return (got + start[:end]).rstrip(b"\r")


def _parsed(text: str) -> tuple[str, int, str, Headers]:
    first, *lines = text.split("\n")
    said = _STATUS.match(first.rstrip("\r"))
    if said is None:
        raise BadAnswer("no HTTP/1.1 at all")
    pairs = []
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or not _NAME.match(name):  # a line that goes on from the one before has had no meaning since 2014
            raise BadAnswer("a header that is none")
        pairs.append((name, value.strip()))
    return said[1], int(said[2]), (said[3] or "").strip(), Headers(pairs)


def _length(headers: Headers) -> int | None:
    said = {value.strip() for value in headers.get("Content-Length", "").split(",")}
    if said == {""}:
        return None
    text = said.pop()
    if said or not _DIGITS.match(text):
        raise BadAnswer("a Content-Length that is none")
    return int(text)
