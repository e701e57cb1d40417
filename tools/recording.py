"""A recording of two terminals that want the same object, as an animated SVG.

    python tools/recording.py       writes docs/pictures/terminals.svg

Both commands run on terminals of their own, against a slow server on loopback; pyte turns their output into screens.
"""

from __future__ import annotations

import fcntl
import html
import itertools
import os
import pty
import select
import struct
import subprocess
import sys
import tempfile
import termios
import time
from pathlib import Path
from typing import NamedTuple

import pyte

from forebay.testing import ScriptedServer

PICTURE = Path(__file__).parents[1] / "docs" / "pictures" / "terminals.svg"
PORT = 8930
SIZE, RATE = 48_000_000, 6_000_000
COLUMNS, ROWS = 92, 5
SECONDS, FRAMES_A_SECOND = 15.0, 8
SECOND_BEGINS = 3.0
TYPED_A_SECOND = 40
CELL, LINE, GAP = 8.4, 18, 26
COLORS = {"green": "#3fb950", "yellow": "#d29922", "brown": "#d29922", "red": "#f85149", "cyan": "#39c5cf", "magenta": "#bc8cff"}


class Run(NamedTuple):
    """Text on the screen, of one colour."""

    text: str
    color: str


class Shell:
    """A terminal on which a command is typed, and then runs. ``begins``: seconds until the first character."""

    def __init__(self, command: str, begins: float, folder: str) -> None:
        self.screen = pyte.Screen(COLUMNS, ROWS)
        self.screen.set_mode(pyte.modes.LNM)
        self._stream = pyte.ByteStream(self.screen)
        self._command, self._begins, self._folder = command, begins, folder
        self._typed, self._process, self._fd = 0, None, -1
        self._stream.feed(b"$ ")

    def step(self, now: float) -> None:
        """Type what is typed by now, start the command, and take what it has printed."""
        due = min(len(self._command), max(0, int((now - self._begins) * TYPED_A_SECOND)))
        self._stream.feed(self._command[self._typed : due].encode())
        self._typed = due
        if due == len(self._command) and self._process is None:
            self._start()
        while self._fd >= 0 and select.select([self._fd], [], [], 0)[0]:
            try:
                self._stream.feed(os.read(self._fd, 65536))
            except OSError:  # the command has ended
                os.close(self._fd)
                self._fd = -1
                self._stream.feed(b"$ ")

    def _start(self) -> None:
        self._stream.feed(b"\r\n")
        self._fd, inside = pty.openpty()
        fcntl.ioctl(inside, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        environ = {name: value for name, value in os.environ.items() if not name.startswith("FOREBAY_")}
        environ |= {"FOREBAY_HOME": self._folder, "FOREBAY_MIN_FREE": "0", "TERM": "xterm-256color", "COLUMNS": str(COLUMNS)}
        command = [str(Path(sys.executable).parent / "forebay"), *self._command.split()[1:]]
        self._process = subprocess.Popen(command, stdin=inside, stdout=inside, stderr=inside, env=environ)
        os.close(inside)

    def end(self) -> int:
        """The exit code of the command."""
        assert self._process is not None
        return self._process.wait(30)

    def rows(self) -> tuple[tuple[Run, ...], ...]:
        """What is on the screen, as runs of one colour."""
        lines = []
        for number in range(ROWS):
            cells = [self.screen.buffer[number][column] for column in range(COLUMNS)]
            runs = itertools.groupby(cells, key=lambda cell: COLORS.get(cell.fg, f"#{cell.fg}" if len(cell.fg) == 6 else "#e6edf3"))
            lines.append(tuple(Run("".join(cell.data for cell in group), color) for color, group in runs))
        return tuple(lines)


Frames = list[tuple[float, tuple[tuple[Run, ...], ...]]]


def record() -> tuple[Frames, str]:
    """The screens of both terminals, one above the other, each with the second from which it is shown; and what the server has seen."""
    frames: Frames = []
    with tempfile.TemporaryDirectory() as folder, ScriptedServer(PORT) as server:
        server.rate = RATE
        url = server.put("/shard-000.tar", os.urandom(SIZE))
        shells = [Shell(f"forebay pull {url}", begins, folder) for begins in (0.5, SECOND_BEGINS)]
        began = time.monotonic()
        for number in range(int(SECONDS * FRAMES_A_SECOND)):
            time.sleep(max(0.0, began + number / FRAMES_A_SECOND - time.monotonic()))
            for shell in shells:
                shell.step(time.monotonic() - began)
            rows = shells[0].rows() + shells[1].rows()
            if not frames or frames[-1][1] != rows:
                frames.append((number / FRAMES_A_SECOND, rows))
        if any(shell.end() for shell in shells):
            sys.exit("a command failed")
        return frames, f"{server.sent / 1e6:.0f} MB sent for an object of {SIZE / 1e6:.0f} MB"


def svg(frames: Frames, seen: str) -> str:
    """The frames beside each other, of which a window shows one at a time."""
    width, height = round(COLUMNS * CELL + 24), 2 * ROWS * LINE + GAP + 74
    steps = "".join(
        f"{100 * start / SECONDS:.2f}%{{transform:translateX(-{number * width}px)}}" for number, (start, _) in enumerate(frames)
    )
    style = (
        f"@keyframes roll{{{steps}}}.roll{{animation:roll {SECONDS}s step-end infinite}}"
        f"text{{font:14px ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;white-space:pre;fill:#e6edf3}}.c{{fill:#8b949e}}"
    )
    parts = []
    for number, (_, rows) in enumerate(frames):
        for line, runs in enumerate(rows):
            runs = _without_end(runs)
            spans = "".join(f'<tspan fill="{run.color}">{html.escape(run.text)}</tspan>' for run in runs)
            if spans:
                y, length = 44 + line * LINE + (GAP if line >= ROWS else 0), CELL * sum(len(run.text) for run in runs)
                parts.append(f'<text x="{number * width + 12}" y="{y}" textLength="{length:.0f}" xml:space="preserve">{spans}</text>')
    half = 40 + ROWS * LINE
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img">',
        f"<style>{style}</style>",
        f'<rect width="{width}" height="{height}" rx="8" fill="#0d1117"/>',
        '<text x="12" y="22" class="c">terminal 1</text>',
        f'<text x="12" y="{half + 6}" class="c">terminal 2</text>',
        f'<text x="12" y="{height - 14}" class="c">server: {seen}</text>',
        f'<svg x="0" y="0" width="{width}" height="{height}"><g class="roll">', *parts, "</g></svg>", "</svg>", "",
    ])  # fmt: skip


def _without_end(runs: tuple[Run, ...]) -> tuple[Run, ...]:
    """A line without the blanks at its end."""
    while runs and not runs[-1].text.strip():
        runs = runs[:-1]
    return (*runs[:-1], runs[-1]._replace(text=runs[-1].text.rstrip())) if runs else ()


if __name__ == "__main__":
    PICTURE.write_text(svg(*record()))
    print(PICTURE)
