"""What a new process takes until its first hit, and the command line, beside diskcache and typer.
``python benchmarks/start.py [ROW...] [--quick] [--json]``

Whole processes are timed, from their start to their end: Python's own start is a floor.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import forebay
from _common import FLOOR, OURS, PEER, Line, Timing, main
from forebay.testing import ScriptedServer

SIZE = 100_000
ENTRIES = 1000

READ = "import sys, forebay; assert len(forebay.Cache(sys.argv[1], max_age='forever').read(sys.argv[2])) == {size}"
GET = "import sys, forebay; assert len(forebay.Cache(sys.argv[1]).get('key')) == {size}"
DISKCACHE = "import sys, diskcache; assert len(diskcache.Cache(sys.argv[1])['key']) == {size}"
VERB = "import sys; from forebay.cli.__main__ import main; main()"  # as the console script


def processes(line: Line, commands: Mapping[str, tuple[str, Sequence[str]]], rounds: int) -> None:
    """Time processes in turn: by label the kind, and the arguments of Python. A first round, which compiles modules, is not counted."""
    line.timings = {label: Timing(kind) for label, (kind, _) in commands.items()}
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    null = os.open(os.devnull, os.O_RDWR)
    for number in range(rounds + 1):
        for label, (_, words) in commands.items():
            began = time.perf_counter()
            pid = os.posix_spawn(sys.executable, [sys.executable, *words], environment, file_actions=[(os.POSIX_SPAWN_DUP2, null, 1)])
            _, status, usage = os.wait4(pid, 0)
            wall = time.perf_counter() - began
            assert status == 0, f"{label} ended with {os.waitstatus_to_exitcode(status)}"
            if number:
                line.timings[label].wall.append(wall)
                line.timings[label].cpu.append(usage.ru_utime + usage.ru_stime)
    os.close(null)


def hit(folder: Path, quick: bool) -> list[Line]:
    """Import, open a root that is there, read one object."""
    import diskcache

    root, peer, data = str(folder / "root"), str(folder / "diskcache"), os.urandom(SIZE)
    with ScriptedServer() as server, forebay.Cache(root, budget="100MB") as cache:
        url = server.put("/object", data)
        assert cache.read(url) == data
        cache.put("key", data)
    with diskcache.Cache(peer) as there:
        there["key"] = data
    read, get, other = (code.format(size=SIZE) for code in (READ, GET, DISKCACHE))
    lines = []
    for what, code, values in (("`Cache.read` of a URL", read, (root, url)), ("`Cache.get`", get, (root,))):
        line = Line(f"a new process: import, open, first hit by {what}", "<= 1x diskcache")
        processes(
            line,
            {
                "Forebay": (OURS, ["-c", code, *values]),
                "its import": (FLOOR, ["-c", "import forebay.cache"]),
                "Python alone": (FLOOR, ["-c", "pass"]),
                "diskcache": (PEER, ["-c", other, peer]),
            },
            3 if quick else 25,
        )
        line.met = line.ratio("diskcache") >= 1
        lines.append(line)
    return lines


def verbs(folder: Path, quick: bool) -> list[Line]:
    """The console script beside the import of the package that parses its command line."""
    count = 50 if quick else ENTRIES
    with forebay.Cache(folder, budget="100MB") as cache:
        for number in range(count):
            cache.put(f"key {number:04}", b"a small value")
    lines = []
    for what, words, most in (("--version", ["--version"], 1.5), (f"ls of {count:,} entries", ["-C", str(folder), "ls"], 2)):
        line = Line(f"`forebay {what}`", f"<= {most}x `import typer`")
        processes(
            line,
            {
                "Forebay": (OURS, ["-c", VERB, *words]),
                "Python alone": (FLOOR, ["-c", "pass"]),
                "import typer": (PEER, ["-c", "import typer"]),
            },
            3 if quick else 15,
        )
        line.met = line.ratio("import typer") * most >= 1
        lines.append(line)
    return lines


if __name__ == "__main__":
    main("start", {"hit": hit, "verbs": verbs})
