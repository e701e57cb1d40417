"""The plugin of pytest, in a run of its own: the example of its page, and what a test must not see."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import pages

pytestmark = pytest.mark.processes


def outcome(folder: Path, text: str) -> str:
    """What a run of pytest says of a file of tests, with a variable of the caller's that would break each."""
    (folder / "test_it.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "forebay.adapters.pytest", "-p", "no:cacheprovider", "--rootdir", str(folder)]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environ |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "FOREBAY_OFFLINE": "1", "FOREBAY_HOME": str(folder / "callers")}
    done = subprocess.run([*command, "test_it.py"], cwd=folder, env=environ, capture_output=True, text=True)
    return done.stdout


def test_the_example_of_the_page_passes(tmp_path: Path) -> None:
    (text,) = pages.blocks((pages.DOCS / "reference/testing.md").read_text(), "python")
    assert "1 passed" in outcome(tmp_path, text)
    assert not (tmp_path / "callers").exists()


def test_each_test_has_a_cache_of_its_own(tmp_path: Path) -> None:
    one = "def test_{}(forebay_cache):\n    assert forebay_cache.get('k') is None\n    assert forebay_cache.put('k', b'v')\n\n"
    assert "2 passed" in outcome(tmp_path, one.format("a") + one.format("b"))


def test_the_plugin_is_one_that_pytest_finds() -> None:
    import tomllib

    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["pytest11"] == {"forebay": "forebay.adapters.pytest"}
