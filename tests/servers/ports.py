"""Ports for servers that cannot say which one they got, and for addresses at which nobody listens."""

from __future__ import annotations

import contextlib
import random
import socket

BELOW = 32_768
"""From here on the system takes the ports of sockets that name none, by the thousand: one that was free is taken before a server starts."""


def free_port() -> int:
    chance = random.SystemRandom()  # a forked process would go on with the same numbers
    while True:
        port = chance.randrange(20_000, BELOW)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
