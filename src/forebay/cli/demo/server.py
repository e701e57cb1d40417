"""The demo's remote: an HTTP server on loopback, in a process of its own, with a latency and a limited rate.

``python -m forebay.cli.demo.server FOLDER LATENCY RATE`` prints its URL, and its counters for each line of standard input. It ends with
its standard input.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from forebay.testing import ScriptedServer


def _print(value: object) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def main() -> None:
    folder, latency, rate = sys.argv[1:]
    with ScriptedServer() as server:
        server.rate = float(rate)
        for path in Path(folder).iterdir():
            server.put(f"/{path.name}", path.read_bytes(), latency=float(latency))
        _print(server.url)
        for _ in sys.stdin:
            _print([server.gets + server.heads, server.sent])


if __name__ == "__main__":
    main()
