"""The tutorials run as they stand and print what they show; so do the snippets of the pages on loops and on training."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from forebay.testing import ScriptedServer
from tests.harness import require

pytestmark = pytest.mark.rotates


DOCS = next(folder for folder in Path(__file__).parents if (folder / "mkdocs.yml").exists()) / "docs"
TUTORIALS = DOCS / "start"
LOOPS = DOCS / "start" / "loops.md"
TRAIN = DOCS / "use" / "train.md"
SEEING = DOCS / "operate" / "seeing.md"


def blocks(page: str | Path, language: str) -> list[str]:
    """The contents of the page's code blocks in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", (TUTORIALS / page).read_text(), re.DOTALL | re.MULTILINE)


def run(page: str | Path, folder: Path, before: str = "") -> str:
    """Run the Python blocks of a page as one program in ``folder``, with no settings of the caller's; return what it prints.

    ``before``: the beginning of the program, with what the page takes as given."""
    program = folder / "train.py"
    program.write_text("\n".join([before, *blocks(page, "python")]))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FOREBAY_")}
    done = subprocess.run(
        [sys.executable, "-W", "error", program.name],
        cwd=folder,
        env={**environment, "FOREBAY_MIN_FREE": "0", "FOREBAY_HOME": str(folder / "home")},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_the_first_cache_prints_what_the_page_shows(tmp_path: Path) -> None:
    assert run("first-cache.md", tmp_path) == "".join(blocks("first-cache.md", "text"))


def test_the_training_loop_decodes_nothing_in_its_second_run(tmp_path: Path) -> None:
    for package in ("torch", "numpy"):
        require(package)
    for output in blocks("training-loop.md", "text"):
        assert run("training-loop.md", tmp_path) == output


LOOPS_BEGIN = """
import atexit, contextlib, os
trained = []
atexit.register(lambda: print(len(trained)))
train = trained.append
urls, photos, names, shards, members, model = {0!r}

def decode(data):
    return bytes(data)
"""


def test_the_snippets_of_the_page_on_loops_run(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "weights.bin").write_bytes(b"weights")
    names = [f"item-{number:02}.bin" for number in range(24)]
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for name in names:
            member = tarfile.TarInfo(name)
            member.size = len(name) * 100
            tar.addfile(member, io.BytesIO(name.encode() * 100))
    with ScriptedServer() as server:
        urls = [server.put(f"/photos/{name}", name.encode() * 100) for name in names]
        shard = server.put("/shards/shard-000.tar", packed.getvalue())
        given = urls, f"{server.url}/photos", names, shard, [f"shard-000.tar/{name}" for name in names], str(tmp_path / "model") + "/"
        assert run(LOOPS, tmp_path, LOOPS_BEGIN.format(given)) == "273\n"


TRAIN_BEGIN = """
import atexit, warnings
warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)  # Python 3.12 and later, of each fork
trained = []
atexit.register(lambda: print(sum(trained)))
urls = {0!r}

def decode(url, data):
    return data[0] + len(data)

def train(batch):
    trained.append(int(batch.sum()))
"""


def test_the_steps_of_the_page_on_training_give_the_same_samples(tmp_path: Path) -> None:
    require("torch")
    with ScriptedServer() as server:
        urls = [server.put(f"/train/{number:06}.bin", bytes([number]) * 1000) for number in range(40)]
        epochs = 1 + 2 + 2 + 2 + 2
        assert run(TRAIN, tmp_path, TRAIN_BEGIN.format(urls)) == f"{epochs * sum(1000 + number for number in range(40))}\n"
        assert server.gets == 40 * 5  # each step has a cache of its own, and its second epoch asks for nothing


def test_the_snippets_of_the_page_on_seeing_run(tmp_path: Path) -> None:
    assert run(SEEING, tmp_path) == ""  # nothing has happened yet


def test_each_tutorial_is_tested() -> None:
    programs = {page.name for page in TUTORIALS.glob("*.md") if blocks(page, "python")}
    assert programs == {"first-cache.md", "training-loop.md", "loops.md", "migrate.md"}  # the last one by test_migrations.py
