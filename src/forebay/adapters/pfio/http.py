"""PFIO's cache on a server that accepts PUT and GET: `HTTPCache`, and the `HTTPConnector` that it uses."""

from __future__ import annotations

import http.client
import os
import pickle
import time
from collections import deque
from typing import Any
from urllib.parse import urlsplit

from forebay import errors
from forebay._kernel.interrupts import guarded_methods
from forebay.adapters.pfio.base import Shared, checked_length, log, recorded

TOKEN_AGE = 1.0
"""Seconds after which the file of the bearer token is read again."""
TOKEN_PATH = "PFIO_HTTP_BEARER_TOKEN_PATH"


@guarded_methods()
class HTTPConnector:
    """Stores bytes on a server and reads them, under ``url`` and a suffix.

    ``url``: ``http://`` is optional. ``bearer_token_path``: a file with a token, read again each second (default: the path in the
    variable ``PFIO_HTTP_BEARER_TOKEN_PATH``). ``timeout``: seconds that the server may be silent. Connections are kept open.
    Callable from any thread, usable in both processes after a fork, picklable. Raises `ConfigError` (a ValueError) for another URL."""

    def __init__(self, url: str, bearer_token_path: str | os.PathLike[str] | None = None, timeout: float = 3, trace: bool = False) -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme != "http" or not parts.hostname or parts.query or parts.fragment or "@" in parts.netloc or ";" in parts.path:
            shown = parts.netloc.rpartition("@")[2] or url
            message = f"HTTPConnector: the url of {shown!r} should be http://HOST/PATH, without user, query and fragment"
            raise errors.ConfigError(message, name="url", value=shown)
        self.host, self.path = parts.netloc, parts.path if parts.path.endswith("/") else f"{parts.path}/"
        self.bearer_token_path = bearer_token_path if bearer_token_path is not None else os.environ.get(TOKEN_PATH)
        self.timeout, self.trace = timeout, trace
        self._idle: deque[http.client.HTTPConnection] = deque()  # taken and returned in one atomic step each: no lock
        self._pid = os.getpid()
        self._token, self._token_read = "", float("-inf")
        self._headers()

    def put(self, suffix: str, data: Any) -> bool:
        """Whether the server stored it (201). Errors are logged."""
        with recorded("pfio.cache.http.conn:put", trace=self.trace):
            status, _ = self._request("PUT", suffix, data)
        if status not in (201, None):
            log.warning("put: unexpected status code %d from %s", status, self.host)
        return status == 201

    def get(self, suffix: str) -> bytes | None:
        """The stored bytes; None if there are none. Errors are logged, and give None too."""
        with recorded("pfio.cache.http.conn:get", trace=self.trace):
            status, data = self._request("GET", suffix)
        if status not in (200, 404, None):
            log.warning("get: unexpected status code %d from %s", status, self.host)
        return data if status == 200 else None

    def close(self) -> None:
        """Close idle connections. A later call opens a new one."""
        while self._idle:
            self._idle.pop().close()

    def _request(self, method: str, suffix: str, data: Any = None) -> tuple[int | None, bytes]:
        if self._pid != os.getpid():  # the connections belong to the parent process
            self._idle, self._pid = deque(), os.getpid()
        while True:
            try:
                connection, used = self._idle.pop(), True
            except IndexError:
                connection, used = http.client.HTTPConnection(self.host, timeout=self.timeout), False
            try:
                connection.request(method, self.path + suffix, body=data, headers=self._headers())
                response = connection.getresponse()
                result = response.status, response.read()
            except (http.client.HTTPException, OSError) as error:
                connection.close()
                if used and isinstance(error, ConnectionError):
                    continue  # the server closed it while it was idle; both methods may be repeated
                log.warning("%s: %s from %s: %s", method.lower(), type(error).__name__, self.host, error)
                return None, b""
            self._idle.append(connection)
            return result

    def _headers(self) -> dict[str, str]:
        if self.bearer_token_path is None:
            return {}
        if time.monotonic() - self._token_read > TOKEN_AGE:
            with open(self.bearer_token_path) as file:
                self._token, self._token_read = file.read().strip(), time.monotonic()
        return {"Authorization": f"Bearer {self._token}"}

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_idle": deque()}


@guarded_methods()
class HTTPCache(Shared):
    """Slots on a server, each under ``url`` and its number: shared by the processes of all machines that use the same URL.

    ``url``, ``bearer_token_path``, ``trace``: see `HTTPConnector`. ``do_pickle``: store any object instead of bytes; responses are
    unpickled, so trust the server. A server that fails is a miss, with a warning. Nothing is kept on this node, unlike with `Samples`.
    Callable from any thread, usable in both processes after a fork, picklable."""

    def __init__(
        self, length: int, url: str, bearer_token_path: str | os.PathLike[str] | None = None, do_pickle: bool = False, trace: bool = False
    ) -> None:  # fmt: skip
        self.length, self.do_pickle, self.trace = checked_length(length), do_pickle, trace
        self.connector = HTTPConnector(url, bearer_token_path, trace=trace)

    def put(self, i: int, data: Any) -> bool:
        """Store the data of slot i, which replaces what the server has. Raises IndexError."""
        with recorded("pfio.cache.http:put", trace=self.trace):
            return self.connector.put(self._name(i), pickle.dumps(data) if self.do_pickle else data)

    def get(self, i: int) -> Any:
        """The data of slot i as bytes, or unpickled; None if there is none. Raises IndexError."""
        with recorded("pfio.cache.http:get", trace=self.trace):
            data = self.connector.get(self._name(i))
        return pickle.loads(data) if self.do_pickle and data is not None else data

    def close(self) -> None:
        """Close idle connections."""
        self.connector.close()

    def _name(self, i: int) -> str:
        if not 0 <= i < self.length:
            raise IndexError(f"index {i} out of range ([0, {self.length - 1}])")
        return str(i)
