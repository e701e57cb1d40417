"""The examples run, and print what they promise."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[1] / "examples" / "train_images.py"
IMAGES = 40

for package in ("torch.utils.data", "numpy", "PIL", "sklearn"):
    pytest.importorskip(package)


def start(root: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(EXAMPLE), "--root", str(root), "--images", str(IMAGES), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)


def epochs(out: str) -> list[tuple[int, bool, int, float]]:
    """Of each epoch: how many were decoded, whether that took bytes, how many came from the cache, and their megabytes."""
    row = r"^\d+ +(\d+) +([\d.]+) MB +(\d+) +([\d.]+) MB +[\d.]+ +[\d.]+ +[\d.]+ +\d+%$"
    return [(int(n), float(read) > 0, int(kept), float(size)) for n, read, kept, size in re.findall(row, out, re.MULTILINE)]


def test_its_second_run_decodes_nothing(tmp_path: Path) -> None:
    kept = (0, False, IMAGES, 0.5)
    first = [(IMAGES, True, 0, 0.0), kept]
    for workers, expected in (("2", first), ("0", [kept, kept])):
        run = start(tmp_path, "--workers", workers)
        out, err = run.communicate(timeout=200)
        assert (run.returncode, err, epochs(out)) == (0, "", expected)
        assert ("Run it again" in out) == (expected is first)


def test_ctrl_c_ends_it(tmp_path: Path) -> None:
    run = start(tmp_path, "--workers", "2", "--epochs", "100000")
    assert run.stdout is not None
    while not epochs(run.stdout.readline()):
        assert run.poll() is None
    os.killpg(run.pid, signal.SIGINT)
    _, err = run.communicate(timeout=60)
    assert (run.returncode, err) == (130, "stopped; what was decoded stays in the cache\n")
    with pytest.raises(ProcessLookupError):  # nobody is left behind
        os.killpg(run.pid, 0)


def test_it_has_a_help(tmp_path: Path) -> None:
    out, _ = start(tmp_path, "--help").communicate(timeout=200)
    for option in ("--workers", "--epochs", "--root"):
        assert option in out
