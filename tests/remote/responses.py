"""Whole responses, for tests of the HTTP client below its retries."""

from __future__ import annotations

import threading
from typing import NamedTuple

from forebay.remote.http.transfers import Headers, HttpTransfer, TransferRequest


class Response(NamedTuple):
    status: int
    reason: str
    headers: Headers
    body: bytes


def whole(incoming: HttpTransfer) -> Response:
    """The response, once it has ended. Raises what ended it early."""
    incoming.wait_for_head()
    pieces = []
    while piece := incoming.read(1 << 20):
        pieces.append(piece)
    return Response(incoming.status, incoming.reason, incoming.headers, b"".join(pieces))


class Ended(HttpTransfer):
    """A transfer that keeps nothing, and tells when it has ended."""

    def __init__(self, request: TransferRequest) -> None:
        super().__init__(request)
        self.error: Exception | None = None
        self.ended = threading.Event()

    def head(self, status: int, reason: str, headers: Headers) -> None:
        assert status == 200

    def data(self, piece: bytes) -> bool:
        return True

    def end(self, error: Exception | None) -> None:
        self.error = error
        self.ended.set()
