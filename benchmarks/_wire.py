"""A wire to a server, on loopback, that counts the bytes which come over it, and can be made slow."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from types import TracebackType
from typing import Self

BLOCK = 64 << 10


class Wire:
    """``url``: where clients connect, in place of ``server``. ``carried``: bytes that came from the server, heads of answers included.
    ``rate``: bytes a second of all connections together; 0: no limit."""

    def __init__(self, server: str) -> None:
        scheme, _, address = server.partition("://")
        host, _, port = address.partition(":")
        self._server = host, int(port)
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"{scheme}://127.0.0.1:{self._listening.getsockname()[1]}"
        self._lock = threading.Lock()  # guards what follows
        self.carried, self.rate = 0, 0.0
        self._next = 0.0  # when the next bytes may be sent
        self._open: set[socket.socket] = set()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                client, _ = self._listening.accept()
                server = socket.create_connection(self._server)
                for each in (client, server):
                    each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    self._open.add(each)
                threading.Thread(target=self._carry, args=(client, server, False), daemon=True).start()
                threading.Thread(target=self._carry, args=(server, client, True), daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket, counted: bool) -> None:
        with contextlib.suppress(OSError):  # either end is gone
            while block := source.recv(BLOCK):
                if counted:
                    time.sleep(self._pause(len(block)))
                target.sendall(block)
                if counted:
                    with self._lock:
                        self.carried += len(block)
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        self._open.discard(source)
        source.close()

    def _pause(self, count: int) -> float:
        """Seconds to wait before so many bytes go on."""
        with self._lock:
            if not self.rate:
                return 0
            now = time.monotonic()
            at = max(self._next, now)
            self._next = at + count / self.rate
            return at - now

    def drain(self) -> None:
        """Until what dead clients asked for comes no more."""
        seen = -1
        while seen != self.carried:
            seen = self.carried
            time.sleep(0.3)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._listening.close()
        for each in tuple(self._open):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
