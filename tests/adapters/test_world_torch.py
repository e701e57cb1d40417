"""Worlds and jobs of ranks that PyTorch really starts, and of their DataLoaders' workers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from forebay.world import World
from tests.claims.launched import clean
from tests.servers.ports import free_port

pytest.importorskip("torch")

PROGRAM = str(Path(__file__).with_name("world_runs.py"))
LAUNCHED = str(Path(__file__).parents[1] / "claims" / "launched.py")
ROOT = str(Path(__file__).parents[2])
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]


def start(*command: str) -> subprocess.Popen[str]:
    env = {**clean(), "PYTHONPATH": os.pathsep.join([ROOT, os.environ["PYTHONPATH"]]), "PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def output(run: subprocess.Popen[str]) -> str:
    out, err = run.communicate(timeout=200)
    assert run.returncode == 0, err
    return out


def told_by(place: Path, *command: str) -> dict[str, Any]:
    """What each rank has written, by the name of its file."""
    output(start(*command, str(place)))
    return {path.stem: json.loads(path.read_text()) for path in sorted(place.glob("*.json"))}


@pytest.mark.rotates
def test_torchrun(tmp_path: Path) -> None:
    told = told_by(tmp_path, *TORCHRUN, "--standalone", PROGRAM, "torchrun")
    assert list(told) == [repr(World(1, 2, 1, rank)) for rank in range(2)]
    for rank, each in enumerate(told.values()):
        workers = [repr(World(1, 2, 2, 2 * rank + worker)) for worker in range(2)]
        assert each["after"] == each["before"]
        assert [item["world"] for item in each["fork"]] == [item["world"] for item in each["spawn"]] == workers
        assert [item["from_rank"] for item in each["fork"] + each["spawn"]] == workers * 2
    everyone = [item for each in told.values() for item in (each["before"], *each["fork"], *each["spawn"])]
    assert {(item["job"], item["how"]) for item in everyone} == {(everyone[0]["job"], "torchrun's run")}


@pytest.mark.rotates
def test_two_nodes_of_torchrun_on_one_machine() -> None:
    both = [*TORCHRUN, "--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    runs = [start(*both, "--node-rank", str(node), LAUNCHED) for node in range(2)]
    told = [[json.loads(line) for line in output(run).splitlines()] for run in runs]
    worlds = [sorted(each["world"] for each in node) for node in told]
    assert worlds == [[repr(World(2, 2, 1, rank)) for rank in ranks] for ranks in ((0, 1), (2, 3))]
    one, two = ({each["job"] for each in node} for node in told)
    assert (len(one), len(two), len(one | two)) == (1, 1, 2)


@pytest.mark.rotates
def test_spawned_ranks_ask_each_other(tmp_path: Path) -> None:
    told = told_by(tmp_path, sys.executable, PROGRAM, "spawned")
    for rank in range(2):
        first, again = told[str(rank)]["first"], told[str(rank)]["again"]
        assert first["world"] == repr(World(1, 2, 1, rank))
        assert first["how"] == "the process that started this one"
        assert [item["world"] for item in told[str(rank)]["workers"]] == [repr(World(1, 2, 2, 2 * rank + worker)) for worker in range(2)]
        assert {item["job"] for item in told[str(rank)]["workers"]} == {first["job"]}
        assert again["kind"] == "ConfigError"
        assert f"torch.distributed says rank={rank}, world_size=2, the environment says RANK={1 - rank}, WORLD_SIZE=2" in again["error"]
    assert told["0"]["first"]["job"] == told["1"]["first"]["job"]


@pytest.mark.rotates
def test_s08_who_is_not_asked_is_named(tmp_path: Path) -> None:
    told = told_by(tmp_path, sys.executable, PROGRAM, "alone")
    assert told["0"]["kind"] == "WaitTimeout"
    assert "World.detect() of rank 1" in told["0"]["error"]
    assert "World.detect() of rank 1" in (tmp_path / "log").read_text()
    assert told["child"]["kind"] == "ConfigError"
    assert "before they fork" in told["child"]["error"]
