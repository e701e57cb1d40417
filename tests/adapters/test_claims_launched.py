"""Claims of a training that is really launched: a rank is killed, and torchrun starts all of them again."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.claiming import registry
from tests.claims.launched import clean

__all__ = ["registry"]

pytest.importorskip("torch")
pytest.importorskip("numpy")

PROGRAM = str(Path(__file__).with_name("claims_runs.py"))
ROOT = str(Path(__file__).parents[2])
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1", "--monitor-interval", "0.1"]


@pytest.mark.rotates
def test_s01_a_training_that_is_started_again_has_its_directory(registry: Path, tmp_path: Path) -> None:
    env = {**clean(), "PYTHONPATH": os.pathsep.join([ROOT, os.environ["PYTHONPATH"]]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *TORCHRUN, PROGRAM, str(tmp_path)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    from tests.adapters import claims_runs  # loads torch

    claims_runs.check(tmp_path)
