"""Which job a process belongs to: its ranks agree, and no two jobs do."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from forebay import errors
from forebay.claims.processes import JobId, identify
from forebay.world import World
from tests.claims.launched import LAUNCHERS, clean

PROGRAM = str(Path(__file__).with_name("launched.py"))
ROOT = str(Path(__file__).parents[2])
FIRST_OF_TWO, ALONE = World(1, 2, 1, 0), World(1, 1, 1, 0)
TWO = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
TORCHRUN = {**TWO, "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "0"}
SLURM = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"}
MPI = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "PMIX_NAMESPACE": "17"}


def identified(patch: pytest.MonkeyPatch, said: dict[str, str], world: World = FIRST_OF_TWO, job: str | None = None) -> JobId:
    with patch.context() as inner:
        for name in LAUNCHERS:
            inner.delenv(name, raising=False)
        for name, value in said.items():
            inner.setenv(name, value)
        return identify(job, world)


@pytest.mark.parametrize(
    ("said", "how", "name"),
    [
        (TORCHRUN, "torchrun's run", "torchrun at 127.0.0.1:29500"),
        ({**TORCHRUN, "TORCHELASTIC_RUN_ID": "b4962510-d52e-42c5-aeb0-e0af0bb20eb9"}, "torchrun's run", "torchrun at 127.0.0.1:29500"),
        ({**TORCHRUN, "TORCHELASTIC_RUN_ID": "mine"}, "torchrun's run", "torchrun mine at 127.0.0.1:29500"),
        (MPI, "MPI's job", "MPI 17"),
        (SLURM, "the step of SLURM", "SLURM 7.0"),
        ({**SLURM, "SLURM_STEP_ID": ""}, "the step of SLURM", "SLURM 7"),
        (TWO, "MASTER_ADDR and MASTER_PORT", "127.0.0.1:29500"),
        ({}, "the process that started this one", f"process {os.getppid()}"),
        ({**TORCHRUN, **SLURM}, "torchrun's run", "torchrun at 127.0.0.1:29500"),
        ({**MPI, **SLURM, **TWO}, "MPI's job", "MPI 17"),
        ({**SLURM, **TWO}, "the step of SLURM", "SLURM 7.0"),
    ],
)
def test_the_launcher_names_the_job(monkeypatch: pytest.MonkeyPatch, said: dict[str, str], how: str, name: str) -> None:
    found = identified(monkeypatch, said)
    assert (found.how, found.name) == (how, name)
    assert found == identified(monkeypatch, {**said, **({"RANK": "1"} if "RANK" in said else {})}, World(1, 2, 1, 1))


@pytest.mark.parametrize(
    ("said", "other"),
    [
        (TORCHRUN, {"MASTER_PORT": "29501"}),
        (TORCHRUN, {"TORCHELASTIC_RUN_ID": "another"}),
        (TORCHRUN, {"TORCHELASTIC_RESTART_COUNT": "1"}),
        (SLURM, {"SLURM_STEP_ID": "1"}),
        (SLURM, {"SLURM_JOB_ID": "8"}),
        (MPI, {"PMIX_NAMESPACE": "18"}),
        (TWO, {"MASTER_PORT": "29501"}),
    ],
)
def test_another_run_is_another_job(monkeypatch: pytest.MonkeyPatch, said: dict[str, str], other: dict[str, str]) -> None:
    assert identified(monkeypatch, said).id != identified(monkeypatch, {**said, **other}).id


def test_a_launcher_of_something_else_does_not_name_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    # One task of a step started these two ranks: another may have started two more.
    outer = {**SLURM, "SLURM_STEP_NUM_TASKS": "1"}
    assert identified(monkeypatch, outer).how == "the process that started this one"
    assert identified(monkeypatch, {**outer, "MASTER_ADDR": "a", "MASTER_PORT": "1"}).how == "MASTER_ADDR and MASTER_PORT"


def test_variables_that_make_no_sense_name_no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    # Else who gives the world by hand, as the error advises, would meet it again.
    found = identified(monkeypatch, {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "1"})
    assert found.how == "MASTER_ADDR and MASTER_PORT"
    assert identified(monkeypatch, {"RANK": "many", **SLURM}).how == "the step of SLURM"


def test_a_rank_alone_is_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    # srun -n1 sh -c 'python train.py & python eval.py & wait'
    found = identified(monkeypatch, {**SLURM, "SLURM_STEP_NUM_TASKS": "1"}, ALONE)
    assert found == identified(monkeypatch, {}, ALONE)
    assert str(os.getpid()) in found.id
    assert (found.how, found.name) == ("this process, the only rank here", f"process {os.getpid()}")


def test_a_given_name_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    assert identified(monkeypatch, TORCHRUN, job="mine") == JobId("mine", "mine", "job=")
    assert identified(monkeypatch, {}, ALONE, job="mine") == JobId("mine", "mine", "job=")


def test_nodes_that_share_a_machine_are_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [identified(monkeypatch, {}, World(2, 2, 1, worker), "mine").id for worker in range(4)] == ["mine, node 0"] * 2 + [
        "mine, node 1"
    ] * 2


@pytest.mark.parametrize("job", ["", 7, b"mine"])
def test_a_name_is_a_string(job: Any) -> None:
    with pytest.raises(errors.ConfigError, match="must be a name"):
        identify(job, ALONE)


# -- real processes ----------------------------------------------------------------------------------------------------


def run(command: list[str], **env: str) -> list[dict[str, Any]]:
    """What the ranks that ``command`` starts have to tell."""
    paths = os.pathsep.join([ROOT, os.environ["PYTHONPATH"]])
    done = subprocess.run(command, env={**clean(), "PYTHONPATH": paths, **env}, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


BY_HAND = f"""
import subprocess, sys
ranks = [subprocess.Popen([sys.executable, {PROGRAM!r}, "1", "2", "1", str(rank)]) for rank in range(2)]
sys.exit(sum(rank.wait() for rank in ranks))
"""


def test_ranks_that_one_process_starts_are_one_job() -> None:
    one, two = run([sys.executable, "-c", BY_HAND]), run([sys.executable, "-c", BY_HAND])
    assert len({told["job"] for told in one}) == len({told["job"] for told in two}) == 1
    assert one[0]["job"] != two[0]["job"]
    assert one[0]["how"] == "the process that started this one"


def test_programs_side_by_side_are_jobs_of_their_own() -> None:
    told = run(["sh", "-c", f"{sys.executable} {PROGRAM} & {sys.executable} {PROGRAM} & wait"])
    assert len({each["job"] for each in told}) == 2
    assert {each["world"] for each in told} == {repr(ALONE)}


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="needs mpirun")
def test_open_mpi() -> None:
    mpirun = ["mpirun", "--oversubscribe", "-n", "2", sys.executable, PROGRAM]
    told = run(mpirun, OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
    assert sorted(each["world"] for each in told) == [repr(World(1, 2, 1, rank)) for rank in range(2)]
    assert len({(each["job"], each["how"]) for each in told}) == 1
    assert told[0]["how"] == "MPI's job"
