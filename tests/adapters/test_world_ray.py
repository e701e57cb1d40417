"""Worlds, jobs and claims of workers that Ray Train really starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from forebay.world import World
from tests.claims.launched import clean
from tests.harness import QUICK_RAY

pytest.importorskip("ray.train")
pytest.importorskip("torch")
pytest.importorskip("numpy")

PROGRAM = str(Path(__file__).with_name("ray_world_runs.py"))
ROOT = str(Path(__file__).parents[2])
ALONE = repr(World(1, 1, 1, 0))


def logs_of(ray: str) -> Iterator[str]:
    """The last lines of the logs of Ray's processes and workers."""
    for path in sorted(Path(ray, "session_latest", "logs").rglob("*")):
        if path.is_file() and path.stat().st_size and not path.name.startswith(("monitor", "dashboard", "runtime_env")):
            yield f"-- {path.name}\n{path.read_text(errors='replace')[-2000:]}"


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What everybody had to tell, and where one training left what it saw of its claim."""
    place = tmp_path_factory.mktemp("ray")
    # The nodes may lie within a step of SLURM: that is not what started the workers.
    outer = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1"}
    paths = os.pathsep.join([ROOT, os.environ["PYTHONPATH"]])
    env = {**clean(), **QUICK_RAY, **outer, "PYTHONPATH": paths, "FOREBAY_CLAIMS": str(place / "claims")}
    try:
        done = subprocess.run([sys.executable, PROGRAM, str(place)], env=env, capture_output=True, text=True, timeout=280)
    except subprocess.TimeoutExpired as error:
        pytest.fail("\n".join(["Ray Train did not end", *logs_of((error.stdout or b"").decode().partition("\n")[0])]))
    assert done.returncode == 0, done.stderr
    return {**json.loads(done.stdout.splitlines()[-1]), "place": place}


@pytest.mark.rotates
@pytest.mark.parametrize("kind", ["plain", "torch"])
def test_workers_of_a_training_are_its_ranks(said: Any, kind: str) -> None:
    told = said[kind]
    assert [each["world"] for each in told] == [repr(World(1, 2, 1, rank)) for rank in range(2)]
    assert [each["workers"][0]["world"] for each in told] == [repr(World(1, 2, 1, rank)) for rank in range(2)]
    assert [each["torch"] for each in told] == [kind == "torch"] * 2
    everyone = [item for each in told for item in (each, *each["workers"])]
    assert {(item["job"], item["how"]) for item in everyone} == {(told[0]["job"], "the run of Ray Train")}


@pytest.mark.rotates
def test_two_trainings_are_two_jobs(said: Any) -> None:
    assert said["plain"][0]["job"] != said["torch"][0]["job"]


@pytest.mark.parametrize("who", ["driver", "other"])
def test_who_is_not_of_a_training_is_alone(said: Any, who: str) -> None:
    assert said[who]["world"] == ALONE
    assert said[who]["how"] == "this process, the only rank here"
    assert said[who].get("loaded", True)


def test_s01_a_training_that_is_started_again_has_its_directory(said: Any) -> None:
    from tests.adapters import claims_runs

    claims_runs.check(said["place"])
