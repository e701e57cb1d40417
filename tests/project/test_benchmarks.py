"""The benchmarks run, and print a table with their rows; how fast anything is, is not asked here."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.adapters.streaming.streaming_runs import alone
from tests.harness import require

pytestmark = pytest.mark.rotates

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_the_table_of_samples_has_the_rows_that_were_asked_for(tmp_path: Path) -> None:
    for peer in ("diskcache", "lmdb", "numpy", "pfio"):
        require(peer)
    words = [sys.executable, str(BENCHMARKS / "samples.py"), "--quick", "--folder", str(tmp_path), "space", "codecs"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    rows = [line.split("|") for line in done.stdout.splitlines() if line.startswith("|")][2:]
    assert [row[1].strip() for row in rows] == [
        "bytes on disk for a sample of 10 KB, index included",
        "`get` of an array of 150 KB, codec numpy",
        "`get` of an array of 150 KB, codec pickle",
    ]
    assert all("pfio" in row[5] and "diskcache" in row[5] for row in rows)
    assert list(tmp_path.iterdir()) == []


def test_the_table_of_loading_ahead_has_energon_in_it(tmp_path: Path) -> None:
    require("megatron")
    words = [sys.executable, str(BENCHMARKS / "prefetch.py"), "--quick", "--folder", str(tmp_path), "once", "publishing"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    rows = [line.split("|") for line in done.stdout.splitlines() if line.startswith("|")][2:]
    whats = ["4 processes", "4 processes", "40 items, each referenced 3 times", "200 items"]
    assert all(row[1].strip().startswith(what) for row, what in zip(rows, whats, strict=True))
    assert ["Energon" in row[5] for row in rows] == [True, True, True, False]
    assert list(tmp_path.iterdir()) == []


def test_the_table_of_directories_has_its_peers_in_it(tmp_path: Path) -> None:
    require("ray")
    words = [sys.executable, str(BENCHMARKS / "checkpoint.py"), "--quick", "--folder", str(tmp_path), "reads"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    rows = [line.split("|") for line in done.stdout.splitlines() if line.startswith("|")][2:]
    assert [row[1].strip().partition(": ")[2] for row in rows] == ["opens", "bytes read"]
    assert all(peer in row[5] for row in rows for peer in ("Ray", "pyarrow copy_files"))
    assert [row[6].strip() for row in rows] == ["met", "met"]  # what is counted is the same everywhere
    assert list(tmp_path.iterdir()) == []


def test_the_table_of_policies_has_a_row_for_each_trace(tmp_path: Path) -> None:
    words = [sys.executable, str(BENCHMARKS / "policies.py"), "--quick", "--folder", str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    rows = [[cell.strip() for cell in line.split("|")] for line in done.stdout.splitlines() if line.startswith("|")]
    assert rows[0][2:5] == ["auto", "lru", "reference lru"]
    assert len(rows) == 2 + 11
    assert all(float(row[3].rstrip("%")) == pytest.approx(float(row[4].rstrip("%")), abs=3) for row in rows[2:])  # values cost a row beside
    assert list(tmp_path.iterdir()) == []


def test_the_table_of_tasks_has_its_peers_in_it(tmp_path: Path) -> None:
    for peer in ("diskcache", "joblib", "numpy"):
        require(peer)
    words = [sys.executable, str(BENCHMARKS / "tasks.py"), "--quick", "--folder", str(tmp_path), "read", "write", "call", "open"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    rows = [line.split("|") for line in done.stdout.splitlines() if line.startswith("|")][2:]
    what = [f"{verb} of {size}" for verb in ("read", "write") for size in ("1 KB", "100 KB", "5 MB")] + ["a call", "open", "open"]
    what.insert(3, "the same")
    assert all(row[1].strip().startswith(name) for row, name in zip(rows, what, strict=True))
    assert all("diskcache" in row[5] for row in rows)
    assert all("joblib" in row[5] for row in rows[:8])
    assert list(tmp_path.iterdir()) == []


def test_the_table_of_claims_has_streaming_in_it(tmp_path: Path) -> None:
    if importlib.util.find_spec("streaming") is None:  # it takes seconds to import
        pytest.skip("needs mosaicml-streaming")
    words = [sys.executable, str(BENCHMARKS / "claims.py"), "--quick", "--folder", str(tmp_path), "claim", "killed", "death"]
    with alone():
        done = subprocess.run(words, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    rows = [line.split("|") for line in done.stdout.splitlines() if line.startswith("|")][2:]
    whats = ["claim with 0", "claim with 4", "claim of the directory", "a participant"]
    assert all(row[1].strip().startswith(what) for row, what in zip(rows, whats, strict=True))
    assert ["Streaming" in row[5] for row in rows] == [True] * 3 + [False]
    assert re.search("Streaming refused it [1-4] of 4 times", rows[2][3])  # what users meet is met here, too
    assert "2 of 2 wait still" in rows[3][3]
    assert list(tmp_path.iterdir()) == []


def test_the_table_of_blocks_has_fsspec_in_it_and_counts_what_is_sent(tmp_path: Path) -> None:
    for peer in ("aiohttp", "fsspec", "pyarrow"):
        require(peer)
    words = [sys.executable, str(BENCHMARKS / "blocks.py"), "--quick", "--folder", str(tmp_path), "512k"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    rows = [line.split("|") for line in done.stdout.splitlines() if line.startswith("|")][2:]
    assert len(rows) == 3
    assert all("fsspec blockcache" in row[5] for row in rows)
    assert rows[0][6].strip() == "met"  # what is counted is the same everywhere
    assert list(tmp_path.iterdir()) == []


def test_the_table_of_fsspec_has_its_caches_in_it_and_counts_requests(tmp_path: Path) -> None:
    for peer in ("aiohttp", "fsspec.implementations.chained", "pyarrow"):
        pytest.importorskip(peer)
    words = [sys.executable, str(BENCHMARKS / "with_fsspec.py"), "--quick", "--folder", str(tmp_path), "cold"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    rows = [line.split("|") for line in done.stdout.splitlines() if line.startswith("|")][2:]
    assert len(rows) == 1
    assert all(peer in row[5] for row in rows for peer in ("filecache", "simplecache", "blockcache"))
    assert rows[0][6].strip() == "met"  # what is counted is the same everywhere
    assert list(tmp_path.iterdir()) == []


def test_the_table_of_epochs_counts_requests(tmp_path: Path) -> None:
    require("torch")
    words = [sys.executable, str(BENCHMARKS / "epochs.py"), "--quick", "--json", "--folder", str(tmp_path), "steps"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    lines = json.loads(done.stdout)["rows"]["steps"]
    counted = {(line["facts"]["ours"], line["facts"]["epoch"]): line["facts"]["requests"][line["facts"]["ours"]] for line in lines}
    assert counted == {(ours, epoch): 64 if epoch == 1 else 0 for ours, epoch in counted}
    assert len(counted) == 3 * 3
    assert {line["met"] for line in lines} == {None}  # contestants ran side by side
    assert lines[0]["facts"]["sent"]["no cache"] == 64 * 100_000
    measured = tmp_path / "measured.json"
    measured.write_text(done.stdout)
    table = subprocess.run([*words[:2], "--table", str(measured)], capture_output=True, text=True, timeout=60)
    assert table.stdout.count("50 ms of work a batch") == 9, table.stderr
    measured.unlink()
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def epochs_run(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """How the benchmark of epochs runs programs."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("_epochs_run")


READER = """
import json, sys, urllib.request
url = json.loads(sys.argv[1])["url"]
urllib.request.urlopen(f"{url}/bucket/d/000000").read()  # before the first epoch
for epoch in range(2):
    print("epoch", flush=True)
    sys.stdin.readline()
    request = urllib.request.Request(f"{url}/bucket/d/000001", headers={"Range": "bytes=0-9"}, method=["GET", "HEAD"][epoch])
    urllib.request.urlopen(request).read()
print("done [0.5, 0.25]", flush=True)
"""


@pytest.mark.processes
def test_the_server_of_epochs_counts_what_each_epoch_requests(epochs_run: ModuleType, tmp_path: Path) -> None:
    with epochs_run.Server(2, item=1_000, latency=0) as server:
        epochs = epochs_run.run(READER, {"url": server.url}, server, tmp_path / "log", 60)
        assert server.counts() == (3, 1_010)
    assert epochs == [epochs_run.Epoch(0.5, 2, 1_010), epochs_run.Epoch(0.25, 1, 0)]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("program", "limit", "reason"),
    [
        ("raise ValueError('no such luck')", 60, "failed: ValueError: no such luck"),
        ("import sys, time\nprint('epoch', flush=True)\nsys.stdin.readline()\ntime.sleep(1000)", 1, "took more than 1 s"),
        ("import os\nos.fork() or os.execvp('sleep', ['sleep', '1000'])", 1, "took more than 1 s"),
        ("", 60, "failed: it told nothing"),
    ],
)
def test_a_contestant_that_fails_or_hangs_is_ended(
    epochs_run: ModuleType, tmp_path: Path, program: str, limit: int, reason: str
) -> None:  # fmt: skip
    with epochs_run.Server() as server, pytest.raises(epochs_run.Failed) as failed:
        epochs_run.run(program, {}, server, tmp_path / "log", limit)
    assert str(failed.value) == reason
