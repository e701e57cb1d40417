"""What is packed: a source archive in which `make test` works, a wheel whose description can be read anywhere, one version."""

from __future__ import annotations

import email.parser
import email.policy
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.message import EmailMessage
from pathlib import Path

import pytest

import forebay

pytestmark = pytest.mark.rotates("package")

REPO = Path(__file__).parents[2]
PROJECT = tomllib.loads((REPO / "pyproject.toml").read_text())
WHOLE_SUITE_RAN_ON = ["3.11", "3.12", "3.13"]
"""Versions of Python on which all tests passed. Add one after `make test PYTHON=...`, here and in docs/start/install.md."""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the source archive and the wheel, built without the network."""
    folder = tmp_path_factory.mktemp("built")
    words = [sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-t", "wheel", "-d", str(folder)]
    done = subprocess.run(words, cwd=REPO, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def metadata(built: Path) -> EmailMessage:
    """METADATA of the wheel."""
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        text = wheel.read(f"forebay-{forebay.__version__}.dist-info/METADATA").decode()
    return email.parser.Parser(EmailMessage, policy=email.policy.default).parsestr(text)  # type: ignore[arg-type, return-value]


def files_of(name: str) -> set[str]:
    """What the repository has there, a file or all below a folder; nothing that Python or an editor left."""
    place = REPO / name
    paths = [place] if place.is_file() else [path for path in place.rglob("*") if path.is_file()]
    return {str(path.relative_to(REPO)) for path in paths if "__pycache__" not in path.parts and path.suffix not in (".pyc", ".orig")}


def test_the_source_archive_has_all_that_make_test_needs(built: Path) -> None:
    top = f"forebay-{forebay.__version__}"
    with tarfile.open(built / f"{top}.tar.gz") as archive:
        names = {os.path.relpath(member.name, top) for member in archive.getmembers() if member.isfile()}
        modes = {os.path.relpath(member.name, top): member.mode for member in archive.getmembers()}
    folders = ("src", "tests", "tools", "docs", "examples", "benchmarks", ".ci")
    files = ("Makefile", "pyproject.toml", "hatch_build.py", "mkdocs.yml", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md",
             "CITATION.cff", "LICENSE")  # fmt: skip
    assert set().union(*map(files_of, (*folders, *files))) - names == set()
    assert modes[".ci/deps"] & 0o111
    assert {name.partition("/")[0] for name in names} <= {*folders, *files, "PKG-INFO", ".gitignore", ".pre-commit-config.yaml"}


def test_the_wheel_has_the_package_and_nothing_else(built: Path) -> None:
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert names == {name.removeprefix("src/") for name in files_of("src/forebay")}


def test_the_version_stands_in_one_place(metadata: EmailMessage) -> None:
    assert metadata["Version"] == forebay.__version__
    others = [REPO / name for name in ("pyproject.toml", "CITATION.cff", "SECURITY.md", "README.md", "Makefile")]
    assert [path.name for path in others if f'"{forebay.__version__}"' in path.read_text()] == []


def test_the_description_links_to_nothing_beside_it(metadata: EmailMessage) -> None:
    text = metadata.get_content()
    assert "# Forebay\n" in text
    assert [link for link in re.findall(r"\]\(([^)\s]+)", text) if not re.match(r"https?://|#", link)] == []
    assert "Next: A first cache in ten minutes, A training loop." in text
    assert metadata["Description-Content-Type"] == "text/markdown"


def test_each_relative_link_of_the_readme_leads_to_a_file() -> None:
    links = re.findall(r"\]\((?![a-z]+:|#)([^)#\s]+)", (REPO / "README.md").read_text())
    assert links
    assert [link for link in links if not (REPO / link).exists()] == []


def test_what_developers_need_is_no_extra(metadata: EmailMessage) -> None:
    extras = set(metadata.get_all("Provides-Extra", []))
    assert extras == set(PROJECT["project"]["optional-dependencies"])
    assert extras.isdisjoint(PROJECT["dependency-groups"])


def test_the_versions_of_python_that_ran_the_suite_are_told() -> None:
    claimed = [found[1] for line in PROJECT["project"]["classifiers"] if (found := re.search(r"Python :: (3\.\d+)$", line))]
    assert set(WHOLE_SUITE_RAN_ON) <= set(claimed)
    assert f"Python {claimed[0]} to {claimed[-1]}" in (REPO / "README.md").read_text()
    page = (REPO / "docs/start/install.md").read_text()
    assert f"The whole test suite runs on {', '.join(WHOLE_SUITE_RAN_ON[:-1])} and {WHOLE_SUITE_RAN_ON[-1]}." in page
    assert f"{sys.version_info[0]}.{sys.version_info[1]}" in claimed
