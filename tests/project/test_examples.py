"""The examples run, and print what they promise."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import forebay

pytestmark = pytest.mark.rotates

EXAMPLES = Path(__file__).parents[2] / "examples"
EXAMPLE = EXAMPLES / "train_images.py"
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


def test_the_second_run_of_the_training_decodes_nothing(tmp_path: Path) -> None:
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
    assert run.returncode == 130
    assert "stopped; what was decoded stays in the cache\n" in err
    assert "src/forebay" not in err  # a thread by which Python's multiprocessing hands out files may report the interrupt
    with pytest.raises(ProcessLookupError):  # nobody is left behind
        os.killpg(run.pid, 0)


def test_each_example_has_a_help(tmp_path: Path) -> None:
    out, _ = start(tmp_path, "--help").communicate(timeout=200)
    for option in ("--workers", "--epochs", "--root"):
        assert option in out


# -- a flow of tasks ---------------------------------------------------------------------------------------------------


def flow(root: Path, *arguments: str) -> tuple[dict[str, bool], int]:
    """Of each part whether it was computed, and how many calls were."""
    command = [sys.executable, str(EXAMPLES / "flow.py"), *arguments]
    done = subprocess.run(command, env={**os.environ, "FLOW_ROOT": str(root)}, capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stderr) == (0, "")
    parts = re.findall(r"^(.+?) {2,}(computed by process \d+|from the cache) +[\d.]+ s   ", done.stdout, re.MULTILINE)
    (ran,) = re.findall(r"^(\d+) calls computed", done.stdout, re.MULTILINE)
    assert ("Run it again" in done.stdout) == (int(ran) > 0)
    return {name: source != "from the cache" for name, source in parts}, int(ran)


def test_the_second_run_of_the_flow_computes_nothing(tmp_path: Path) -> None:
    few = ["--kinds", "spectrum", "--costs", "1", "10"]
    parts = ["spectrum, cost 1", "spectrum, cost 10", "report on the best"]
    # 2 scores, the report, the digits, and the features: of two processes that wanted these at once, one computed them.
    assert flow(tmp_path, *few) == (dict.fromkeys(parts, True), 5)
    assert flow(tmp_path, *few) == (dict.fromkeys(parts, False), 0)
    assert flow(tmp_path, *few, "0.01") == ({**dict.fromkeys(parts, False), "spectrum, cost 0.01": True}, 1)


# -- ranks that share --------------------------------------------------------------------------------------------------

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(EXAMPLES / "claims_ddp.py")]


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FOREBAY_CLAIMS", str(tmp_path / "claims"))
    return tmp_path / "claims"


def test_two_ranks_share_what_they_claim(tmp_path: Path, registry: Path) -> None:
    command = [*TORCHRUN, "--directory", str(tmp_path / "local"), "--epochs", "2", "--workers", "1"]
    for first in (True, False):
        done = subprocess.run(command, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr
        assert re.findall(r"^epoch (\d): ([\d,]+) samples, each once;", done.stdout, re.MULTILINE) == [("0", "2,000"), ("1", "2,000")]
        assert len(re.findall(r"^rank [01] of 2: claim 0 of job ", done.stdout, re.MULTILINE)) == 2
        assert done.stdout.count("downloaded") == first
    assert [path.name for path in registry.iterdir()] == ["lock"]


def test_a_directory_that_is_claimed_is_refused(tmp_path: Path, registry: Path) -> None:
    with forebay.claim(tmp_path / "local", "https://example.com/other", job="the other one"):
        done = subprocess.run([*TORCHRUN, "--directory", str(tmp_path / "local")], capture_output=True, text=True, timeout=200)
    assert done.returncode != 0
    assert done.stderr.count("the other one") >= 2  # each rank says it
    assert "epoch 0" not in done.stdout
