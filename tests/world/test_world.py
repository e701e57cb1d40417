"""Which rank this is: the numbers of a world, and what is read off the variables of each launcher."""

from __future__ import annotations

import itertools
import pickle
import subprocess
import sys

import pytest

from forebay import errors
from forebay.world import World
from tests.claims.launched import LAUNCHERS

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2"}
MPI = {f"OMPI_COMM_WORLD_{name}": value for name, value in {"RANK": "5", "SIZE": "8", "LOCAL_RANK": "1", "LOCAL_SIZE": "4"}.items()}
HYDRA = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
SLURM = {
    "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1", "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_TASKS_PER_NODE": "4(x2)", "SLURM_NTASKS": "8",
}  # fmt: skip
HANDED_ON = {name: SLURM[name] for name in ("SLURM_JOB_ID", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NODEID")}
SIXTH_OF_EIGHT = World(2, 4, 1, 5)
ALONE = World(1, 1, 1, 0)


@pytest.fixture
def variables(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An environment in which no launcher says anything."""
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def detected(patch: pytest.MonkeyPatch, said: dict[str, str]) -> World:
    for name, value in said.items():
        patch.setenv(name, value)
    return World.detect()


# -- the numbers -------------------------------------------------------------------------------------------------------


def test_all_numbers_follow_from_four() -> None:
    world = World(2, 3, 4, 17)  # rank 4 is the second of node 1; its workers are 16 to 19
    assert world.to_json() == {
        "node": 1, "num_nodes": 2, "is_multinode": True, "rank": 4, "num_ranks": 6, "rank_of_node": 1, "ranks_per_node": 3,
        "worker": 17, "num_workers": 24, "worker_of_node": 5, "workers_per_node": 12, "worker_of_rank": 1, "workers_per_rank": 4,
        "is_leader": False, "is_local_leader": False,
    }  # fmt: skip
    assert vars(world) == world.to_json()


def test_each_node_has_one_leader_and_the_job_one() -> None:
    worlds = [World(3, 2, 2, worker) for worker in range(12)]
    assert [world.worker for world in worlds if world.is_local_leader] == [0, 4, 8]
    assert [world.worker for world in worlds if world.is_leader] == [0]


def test_worlds_that_say_the_same_are_equal() -> None:
    world = World(2, 3, 4, 17)
    assert world == world.copy() == pickle.loads(pickle.dumps(world)) == eval(repr(world))
    assert world.copy() is not world
    assert len({world, world.copy(), World(2, 3, 4, 16)}) == 2
    assert world != (2, 3, 4, 17)


def test_a_class_of_ones_own_stays_it() -> None:
    class Ours(World):
        pass

    assert {type(world) for world in (Ours.detect(), Ours(1, 2, 1, 0).copy(), Ours(1, 2, 1, 0).replicate(2))} == {Ours}


@pytest.mark.parametrize(
    "given",
    [(0, 1, 1, 0), (1, 0, 1, 0), (1, 1, 0, 0), (1, 1, 1, 1), (2, 3, 4, 24), (1, 1, 1, -1), (1, "2", 1, 0), (1.0, 1, 1, 0)],
)
def test_nonsense_is_refused(given: tuple[int, int, int, int]) -> None:
    with pytest.raises(errors.ConfigError):
        World(*given)


@pytest.mark.parametrize(
    ("world", "times", "expected"),
    [
        (World(2, 4, 2, 11), 1, World(2, 4, 2, 11)),
        (World(2, 4, 2, 11), 2, World(1, 4, 2, 5)),
        (World(2, 4, 2, 11), 4, World(1, 2, 2, 3)),
        (World(2, 4, 2, 11), 8, World(1, 1, 2, 1)),
        (World(4, 2, 1, 7), 2, World(2, 2, 1, 3)),
    ],
)
def test_ranks_that_see_the_same_count_as_one(world: World, times: int, expected: World) -> None:
    assert world.replicate(times) == expected


@pytest.mark.parametrize(
    ("times", "why"),
    [
        (0, "must be positive"),
        (-1, "must be positive"),
        (3, "divisible by it, and is 8"),
        (16, "divisible by it, and is 8"),
    ],
)
def test_replication_must_divide_the_ranks(times: int, why: str) -> None:
    with pytest.raises(errors.ConfigError, match=f"replication={times}: .*{why}"):
        World(2, 4, 1, 0).replicate(times)


def test_outside_of_a_loader_a_rank_is_its_own_worker() -> None:
    assert World(2, 4, 3, 17).detect_workers() == World(2, 4, 1, 5)


# -- what launchers say ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("said", [TORCHRUN, MPI, HYDRA, SLURM], ids=["torchrun", "Open MPI", "MPICH", "SLURM"])
def test_each_launcher_is_understood(variables: pytest.MonkeyPatch, said: dict[str, str]) -> None:
    assert detected(variables, said) == SIXTH_OF_EIGHT


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"RANK": "", "WORLD_SIZE": ""},
        {"WORLD_SIZE": "1"},
        {"RANK": "0", "WORLD_SIZE": "1"},
        {**HANDED_ON, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURMD_NODENAME": "n1"},
        {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0"},
        {**SLURM, "SLURM_STEP_ID": "4294967291"},
        {"PMI_RANK": "3"},
        {"LOCAL_RANK": "3"},
    ],
    ids=["nothing", "empty", "size 1", "rank 0 of 1", "a batch script", "an empty batch", "a batch step", "no size", "a device"],
)
def test_else_it_is_alone(variables: pytest.MonkeyPatch, said: dict[str, str]) -> None:
    assert detected(variables, said) == ALONE


def test_the_inner_launcher_counts(variables: pytest.MonkeyPatch) -> None:
    # srun starts one torchrun, or one daemon of mpirun, on each of two nodes.
    outer = {**SLURM, "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
    assert detected(variables, {**outer, **TORCHRUN}) == SIXTH_OF_EIGHT
    for name in TORCHRUN:
        variables.delenv(name)
    assert detected(variables, {**outer, **MPI}) == SIXTH_OF_EIGHT


@pytest.mark.parametrize("more", [{}, {"LOCAL_RANK": "0"}, {"MASTER_ADDR": "a", "MASTER_PORT": "1"}], ids=["alone", "device", "address"])
def test_a_rank_and_a_number_of_ranks_mean_one_on_each_node(variables: pytest.MonkeyPatch, more: dict[str, str]) -> None:
    assert detected(variables, {"RANK": "1", "WORLD_SIZE": "4", **more}) == World(4, 1, 1, 1)


@pytest.mark.parametrize(
    "how_many",
    [{"SLURM_NTASKS_PER_NODE": "4"}, {"SLURM_NNODES": "2"}, {"SLURM_JOB_NUM_NODES": "2"}, {"LOCAL_WORLD_SIZE": "4"}],
    ids=lambda said: next(iter(said)),
)
def test_what_a_container_is_told_of_slurm_is_enough(variables: pytest.MonkeyPatch, how_many: dict[str, str]) -> None:
    assert detected(variables, {**HANDED_ON, **how_many}) == SIXTH_OF_EIGHT
    first = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
    assert detected(variables, first) == World(2, 4, 1, 0)


@pytest.mark.parametrize("said", [MPI, HYDRA], ids=["Open MPI", "MPICH"])
def test_what_mpi_does_not_say_can_be_set_by_hand(variables: pytest.MonkeyPatch, said: dict[str, str]) -> None:
    without = {name: value for name, value in said.items() if name not in ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")}
    with pytest.raises(errors.ConfigError, match="set LOCAL_WORLD_SIZE"):
        detected(variables, without)
    assert detected(variables, {"LOCAL_WORLD_SIZE": "4"}) == SIXTH_OF_EIGHT


def test_an_outer_launcher_is_not_even_read(variables: pytest.MonkeyPatch) -> None:
    assert detected(variables, {**SLURM, "SLURM_STEP_TASKS_PER_NODE": "many", **TORCHRUN}) == SIXTH_OF_EIGHT


def test_launchers_that_speak_of_the_same_ranks_complete_each_other(variables: pytest.MonkeyPatch) -> None:
    # srun sh -c 'RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS python train.py'
    assert detected(variables, {"RANK": "5", "WORLD_SIZE": "8", **SLURM}) == SIXTH_OF_EIGHT


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"RANK": "3"}, "there is no WORLD_SIZE"),
        ({"WORLD_SIZE": "4", "LOCAL_RANK": "1"}, "there is no RANK"),
        ({"OMPI_COMM_WORLD_RANK": "3"}, "there is no OMPI_COMM_WORLD_SIZE"),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, "there is no OMPI_COMM_WORLD_RANK"),
        ({"SLURM_PROCID": "3", "SLURM_JOB_ID": "7"}, "there is no SLURM_STEP_NUM_TASKS"),
        ({**HANDED_ON, "SLURM_NNODES": "3"}, "8 ranks cannot be divided evenly"),
        ({"RANK": "three", "WORLD_SIZE": "4"}, "'three' is not a number"),
        ({"RANK": "-1", "WORLD_SIZE": "4"}, "'-1' is not a number"),
        ({"RANK": "4", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}, "there is no rank 4 among 4"),
        ({"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}, "set LOCAL_WORLD_SIZE"),
        ({"RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "3"}, "4 ranks cannot be divided evenly"),
        ({"RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "0"}, "4 ranks cannot be divided evenly"),
        ({**TORCHRUN, "LOCAL_RANK": "2"}, "rank 5 should be number 1 on node 1"),
        ({**TORCHRUN, "LOCAL_RANK": "4"}, "rank 5 should be number 1 on node 1"),
        ({**TORCHRUN, "GROUP_RANK": "0"}, "rank 5 should be number 1 on node 1"),
        ({**TORCHRUN, "GROUP_WORLD_SIZE": "3"}, "make 2 nodes"),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "5,3"}, "8 ranks cannot be divided evenly"),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "many"}, "'many' is not a list of tasks per node"),
        ({**SLURM, "SLURM_LOCALID": "2", "SLURM_NODEID": "1"}, "the ranks of a node must be consecutive"),
        ({**MPI, "OMPI_COMM_WORLD_LOCAL_RANK": "2"}, "the ranks of a node must be consecutive"),
    ],
)
def test_what_cannot_be_is_shown(variables: pytest.MonkeyPatch, said: dict[str, str], why: str) -> None:
    with pytest.raises(errors.ConfigError) as caught:
        detected(variables, said)
    assert why in str(caught.value)
    assert "world=forebay.World(...)" in str(caught.value)
    assert [name for name, value in said.items() if f"{name}={value}" not in str(caught.value) and name != "SLURM_NTASKS"] == []


@pytest.mark.parametrize(("num_nodes", "ranks_per_node"), [*itertools.product((1, 2, 3), (1, 2, 4))])
def test_every_rank_of_slurm_finds_its_place(variables: pytest.MonkeyPatch, num_nodes: int, ranks_per_node: int) -> None:
    for rank in range(num_nodes * ranks_per_node):
        node, rank_of_node = divmod(rank, ranks_per_node)
        said = {
            "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "3", "SLURM_PROCID": rank, "SLURM_STEP_NUM_TASKS": num_nodes * ranks_per_node,
            "SLURM_LOCALID": rank_of_node, "SLURM_NODEID": node, "SLURM_STEP_NUM_NODES": num_nodes,
            "SLURM_STEP_TASKS_PER_NODE": f"{ranks_per_node}(x{num_nodes})" if num_nodes > 1 else ranks_per_node,
        }  # fmt: skip
        world = detected(variables, {name: str(value) for name, value in said.items()})
        assert world == World(num_nodes, ranks_per_node, 1, rank)
        assert world.is_local_leader == (rank_of_node == 0)


def test_no_framework_is_loaded() -> None:
    foreign = "{'torch', 'ray', 'numpy', 'xxhash', 'pycurl'}"
    code = f"import sys; from forebay import World; World.detect(); print(*sys.modules.keys() & {foreign})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
