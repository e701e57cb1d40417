"""The page on coming from another cache: each program runs, and trains with the same data afterwards as before."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from forebay.testing import ScriptedServer
from tests.pages import blocks, run, section

PAGE = "start/migrate.md"
GIVEN = "import atexit\ntrained = []\ntrain = trained.append\natexit.register(lambda: print(trained))\n"


def trained(heading: str, folder: Path, given: str = "") -> list[str]:
    """What each program of a section trains with."""
    folder.mkdir(exist_ok=True)
    programs = blocks(section(PAGE, f"## {heading}"), "python")
    return [run(f"{GIVEN}{given}\n{program.replace('/nvme/', str(folder) + '/')}", folder) for program in programs]


@pytest.mark.parametrize(
    ("heading", "package", "given", "expected"),
    [
        ("diskcache", "diskcache", "data = b'words'", [b"words", None, *[{"n": 10, "squares": [x * x for x in range(10)]}] * 2]),
        ("joblib.Memory", "joblib", "", [[0, 1, 4]] * 2),
    ],
)
def test_the_programs_train_with_the_same_data(tmp_path: Path, heading: str, package: str, given: str, expected: list[object]) -> None:
    pytest.importorskip(package)
    assert trained(heading, tmp_path, given) == [f"{expected}\n"] * 2


def test_cache_info_reads_the_same(tmp_path: Path) -> None:
    assert trained("functools.lru_cache", tmp_path) == ["[499500, 499500, CacheInfo(hits=1, misses=1, maxsize=None, currsize=1)]\n"] * 2


def test_fsspec_chains_read_the_same_and_fetch_once(server: ScriptedServer, tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    pytest.importorskip("aiohttp")
    if "forebay" not in fsspec.available_protocols():
        pytest.skip("the protocol is not installed")
    url = server.put("/data.bin", b"data")
    assert trained("fsspec filecache", tmp_path, f"url = {url!r}") == ["[b'data']\n"] * 3
    (request,) = [request for request in server.requests if request.headers["User-Agent"] == "forebay"]
    assert request.method == "GET"  # the two programs share a cache


def test_snapshots_of_the_hub_read_the_same(tmp_path: Path) -> None:
    pytest.importorskip("huggingface_hub")
    pytest.importorskip("forebay.adapters.huggingface")
    hub = importlib.import_module("tests.servers.hub").hub
    with hub() as running:
        running.commit("me/model", {"config.json": b"{}"})
        programs = blocks(section(PAGE, "## huggingface_hub"), "python")
        settings = {"HF_ENDPOINT": running.url, "HF_HOME": str(tmp_path / "hf")}
        assert [run(f"{GIVEN}repository = 'me/model'\n{program}", tmp_path, **settings) for program in programs] == ["['{}']\n"] * 2


def test_a_cache_that_is_filled_replaces_the_copy_of_a_prolog(server: ScriptedServer, tmp_path: Path) -> None:
    text = section(PAGE, "## s5cmd in a prolog")
    before, after = blocks(text, "bash")
    urls = [server.put(f"/{number}.tar", b"%d" % number) for number in range(3)]
    (tmp_path / "shards.txt").write_text("\n".join(urls))
    (tmp_path / "train.py").write_text(GIVEN + blocks(text, "python")[0])
    (tmp_path / "bin").mkdir()
    for name, command in (("python", ""), ("forebay", " -m forebay.cli")):
        (tmp_path / "bin" / name).write_text(f'#!/bin/bash\nexec {sys.executable}{command} "$@"\n')
        (tmp_path / "bin" / name).chmod(0o755)
    environment = {**os.environ, "FOREBAY_MIN_FREE": "0", "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    for script in (before, after):
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    script = after.replace("/local_scratch", str(tmp_path)) + "wait\n"
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{[b'%d' % number for number in range(3)]}\n", "")
    assert server.gets == 3  # of the filling and of the program together
