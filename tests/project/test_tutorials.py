"""The tutorials run as they stand and print what they show."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TUTORIALS = next(folder for folder in Path(__file__).parents if (folder / "mkdocs.yml").exists()) / "docs" / "tutorial"


def blocks(page: str, language: str) -> list[str]:
    """The contents of the page's code blocks in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", (TUTORIALS / page).read_text(), re.DOTALL | re.MULTILINE)


def run(page: str, folder: Path) -> str:
    """Run the Python blocks of a page as one program in ``folder``, with no settings of the caller's; return what it prints."""
    program = folder / "train.py"
    program.write_text("\n".join(blocks(page, "python")))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FOREBAY_")}
    done = subprocess.run(
        [sys.executable, "-W", "error", program.name],
        cwd=folder,
        env={**environment, "FOREBAY_MIN_FREE": "0"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_the_first_cache_prints_what_the_page_shows(tmp_path: Path) -> None:
    assert run("first-cache.md", tmp_path) == "".join(blocks("first-cache.md", "text"))


def test_the_training_loop_decodes_nothing_in_its_second_run(tmp_path: Path) -> None:
    for package in ("torch.utils.data", "numpy"):
        pytest.importorskip(package)
    for output in blocks("training-loop.md", "text"):
        assert run("training-loop.md", tmp_path) == output


def test_each_tutorial_is_tested() -> None:
    assert sorted(page.name for page in TUTORIALS.glob("*.md")) == ["first-cache.md", "training-loop.md"]
