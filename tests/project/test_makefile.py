"""The environments that `make` picks, and what a creation that failed leaves."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]


def make(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["make", "-C", str(REPO), *words], capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("python", "place"),
    [
        ("python3", ".venv"),
        ("python3.13", ".venv-python3.13"),
        ("/usr/bin/python3", ".venv-usr-bin-python3"),
        ("/opt/a/bin/python3", ".venv-opt-a-bin-python3"),
    ],
)
def test_each_interpreter_has_an_environment_of_its_own(python: str, place: str) -> None:
    assert f"{place}/bin/forebay demo" in make("-n", "demo", f"PYTHON={python}").stdout.splitlines()


def test_half_an_environment_is_made_again(tmp_path: Path) -> None:
    """Debian's Python without python3-venv leaves the interpreter, but no pip."""
    python, venv = tmp_path / "python", tmp_path / "venv"
    words = (str(venv / "bin/python"), f"PYTHON={python}", f"VENV={venv}")
    python.write_text(f'#!/bin/sh\n[ "$1" = -c ] || {{ mkdir -p {venv}/bin && touch {venv}/bin/python && test -e {tmp_path}/pip; }}\n')
    python.chmod(0o755)
    assert make(*words).returncode != 0
    assert make(*words).returncode != 0
    (tmp_path / "pip").touch()
    assert make(*words).returncode == 0
    assert (venv / "bin/python").exists()
