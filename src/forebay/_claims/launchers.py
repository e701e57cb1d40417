"""What the launchers say of this process: its rank, how many there are, and which job they belong to.

Nothing is imported to find out: a framework that is not loaded yet has nothing to say.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from forebay._kernel import host
from forebay.errors import ConfigError

_SPECIAL_STEPS = 0xFFFFFFF0  # SLURM numbers the batch script and its like from here on: they are no step with ranks
_GROUPS = re.compile(r"(\d+)(?:\(x(\d+)\))?")


@dataclass(frozen=True, slots=True)
class Said:
    """What one launcher says of this process; None where it does not say. ``job``: whom the ranks belong to, the same in each of
    them; ``how``: what that is, for people. ``facts``: what it was read from."""

    launcher: str
    rank: int
    num_ranks: int
    rank_of_node: int | None = None
    ranks_per_node: int | None = None
    node: int | None = None
    num_nodes: int | None = None
    job: str | None = None
    how: str = ""
    facts: dict[str, object] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.launcher} says {', '.join(f'{name}={value}' for name, value in self.facts.items())}"

    def agrees(self, other: Said) -> bool:
        """Whether both speak of the same ranks."""
        return (self.rank, self.num_ranks) == (other.rank, other.num_ranks)


class Variables:
    """Variables of the environment that one launcher sets, and those of them that were found."""

    def __init__(self, launcher: str) -> None:
        self.launcher = launcher
        self.found: dict[str, object] = {}

    def text(self, *names: str) -> str | None:
        """The first of them that is there. An empty one is not."""
        for name in names:
            if value := os.environ.get(name, "").strip():
                self.found[name] = value
                return value
        return None

    def number(self, *names: str) -> int | None:
        """The same, as a number. Raises `ConfigError` if it is none."""
        value = self.text(*names)
        if value is not None and not (value.isascii() and value.isdigit()):
            raise wrong(self, f"{value!r} is no number")
        return None if value is None else int(value)

    def __str__(self) -> str:
        return f"{self.launcher} says {', '.join(f'{name}={value}' for name, value in self.found.items())}"


def wrong(said: Said | Variables | str, why: str) -> ConfigError:
    """What is said cannot be. Names all of it."""
    return ConfigError(f"{said}: {why}; set it right, or give the ranks as world=forebay.World(...)", name="world", value=str(said))


# -- one by one --------------------------------------------------------------------------------------------------------


def from_torch() -> Said | None:
    """torch.distributed, where it is initialised."""
    dist = torch_distributed()
    if dist is None:
        return None
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    return Said("torch.distributed", rank, num_ranks, facts={"rank": rank, "world_size": num_ranks})


def from_ray() -> Said | None:
    """Ray Train, within its training function."""
    ray, train = sys.modules.get("ray"), sys.modules.get("ray.train")
    if ray is None or train is None or not ray.is_initialized():
        return None
    running = ray.get_runtime_context()
    if running.get_actor_id() is None:  # its workers are actors: this is the driver
        return None
    try:
        context = train.get_context()
        rank, num_ranks = context.get_world_rank(), context.get_world_size()
        rank_of_node, ranks_per_node, node = context.get_local_rank(), context.get_local_world_size(), context.get_node_rank()
    except RuntimeError:
        return None  # another actor
    facts = {"world_rank": rank, "world_size": num_ranks, "local_rank": rank_of_node, "local_world_size": ranks_per_node, "node_rank": node}
    job = f"ray {running.gcs_address} {running.get_job_id()} {context.get_experiment_name()}"
    return Said("Ray Train", rank, num_ranks, rank_of_node, ranks_per_node, node, None, job, "the run of Ray Train", facts)


def from_torchrun() -> Said | None:
    """The variables of torchrun, which other launchers set too."""
    said = Variables("the environment")
    rank, num_ranks = said.number("RANK"), said.number("WORLD_SIZE")
    if rank is None and num_ranks in (None, 1):
        return None
    rank_of_node, ranks_per_node = said.number("LOCAL_RANK"), said.number("LOCAL_WORLD_SIZE", "LOCAL_SIZE")
    node, num_nodes = said.number("GROUP_RANK"), said.number("GROUP_WORLD_SIZE")
    if rank is None or num_ranks is None:
        raise wrong(said, f"there is no {'RANK' if rank is None else 'WORLD_SIZE'}")
    run, restart = os.environ.get("TORCHELASTIC_RUN_ID"), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    job = f"torchrun {run} {address()} restart {restart}" if run else None
    return Said("the environment", rank, num_ranks, rank_of_node, ranks_per_node, node, num_nodes, job, "torchrun's run", said.found)


def from_mpi() -> Said | None:
    """The variables of Open MPI's mpirun, and of MPICH's and Intel's."""
    said = Variables("MPI")
    rank, num_ranks = said.number("OMPI_COMM_WORLD_RANK", "PMI_RANK"), said.number("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
    if rank is None or num_ranks is None:
        return None
    rank_of_node = said.number("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")
    ranks_per_node = said.number("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
    run = Variables("MPI").text("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")
    job = f"mpi {run}" if run else None
    return Said("MPI", rank, num_ranks, rank_of_node, ranks_per_node, None, None, job, "MPI's job", said.found)


def from_slurm() -> Said | None:
    """The variables of SLURM, within a step: a batch script has them too, and runs once."""
    said = Variables("SLURM")
    step, rank = said.number("SLURM_STEP_ID", "SLURM_STEPID"), said.number("SLURM_PROCID")
    if step is None or step >= _SPECIAL_STEPS or rank is None:
        return None
    num_ranks = said.number("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    if num_ranks is None:
        raise wrong(said, "there is no SLURM_STEP_NUM_TASKS")
    rank_of_node, node, num_nodes = said.number("SLURM_LOCALID"), said.number("SLURM_NODEID"), said.number("SLURM_STEP_NUM_NODES")
    ranks_per_node = _even(said, said.text("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"))
    job = f"slurm {said.number('SLURM_JOB_ID', 'SLURM_JOBID')}.{step}"
    return Said("SLURM", rank, num_ranks, rank_of_node, ranks_per_node, node, num_nodes, job, "the step of SLURM", said.found)


def _even(said: Variables, groups: str | None) -> int | None:
    """How many ranks each node has, of SLURM's ``4(x2)``: four on each of two."""
    if groups is None:
        return None
    counts = {int(found[1]) if (found := _GROUPS.fullmatch(group)) else -1 for group in groups.split(",")}
    if counts == {-1}:
        raise wrong(said, f"{groups!r} is no list of tasks per node")
    if len(counts) > 1:
        raise wrong(said, "the nodes have different numbers of ranks, and a World has the same on each")
    return counts.pop()


SOURCES: tuple[Callable[[], Said | None], ...] = (from_torch, from_ray, from_torchrun, from_mpi, from_slurm)
"""What the process itself knows comes before what it was told, and the inner launcher before the outer one, whose variables it inherits."""


def told() -> Iterator[Said]:
    """What each launcher says, the nearest first. Raises `ConfigError` for variables that make no sense."""
    return (said for ask in SOURCES if (said := ask()) is not None)


# -- together ----------------------------------------------------------------------------------------------------------


def ranks() -> tuple[int, int, int]:
    """``(num_nodes, ranks_per_node, rank)`` of this process: ``(1, 1, 0)`` where no launcher says otherwise.

    Raises `ConfigError` where what is said cannot be. Where torch.distributed alone knows the ranks, and not how many a node has,
    the first call is a collective: all ranks gather the names of their nodes."""
    said = list(told())
    if not said:
        return 1, 1, 0
    first = said[0]
    if first.launcher == "torch.distributed":
        _check_against(first, said)
    per_node = _merged(said, "ranks_per_node")
    if per_node is None:
        per_node = 1 if first.num_ranks == 1 else _gathered(first)
    _check(said, per_node)
    return first.num_ranks // per_node, per_node, first.rank


def _check_against(first: Said, said: Iterable[Said]) -> None:
    """torch.distributed must have taken the ranks that the environment gave it."""
    for other in said:
        if other.launcher == "the environment" and not other.agrees(first):
            raise wrong(f"{first}, {other}", "they contradict each other")


def _merged(said: list[Said], name: str) -> int | None:
    """A fact, from the first that has it among those that speak of the same ranks as the first."""
    values = (getattr(each, name) for each in said if each.agrees(said[0]))
    return next((value for value in values if value is not None), None)


def _check(said: list[Said], per_node: int) -> None:
    first = said[0]
    what = ", ".join(str(each) for each in said if each.agrees(first))
    if not 0 <= first.rank < first.num_ranks:
        raise wrong(what, f"there is no rank {first.rank} among {first.num_ranks}")
    if per_node < 1 or first.num_ranks % per_node:
        raise wrong(what, f"{first.num_ranks} ranks cannot be {per_node} on each node")
    node, rank_of_node = divmod(first.rank, per_node)
    if _merged(said, "num_nodes") not in (None, first.num_ranks // per_node):
        raise wrong(what, f"{first.num_ranks} ranks, {per_node} on each node, are on {first.num_ranks // per_node} nodes")
    if _merged(said, "rank_of_node") not in (None, rank_of_node) or _merged(said, "node") not in (None, node):
        raise wrong(what, f"rank {first.rank} should be number {rank_of_node} on node {node}: the ranks of a node must follow each other")


# -- torch -------------------------------------------------------------------------------------------------------------


def torch_distributed() -> Any:
    """torch.distributed where it is initialised, else None."""
    dist = sys.modules.get("torch.distributed")
    return dist if dist is not None and getattr(dist, "is_initialized", bool)() else None


def worker() -> tuple[int, int] | None:
    """Which DataLoader worker this is, and of how many; None in all other processes."""
    data = sys.modules.get("torch.utils.data")
    info = data.get_worker_info() if data is not None else None
    return None if info is None else (info.id, info.num_workers)


class _Gathered:
    """How many ranks each node has, by a gather among the ranks of the default process group: once for each such group."""

    _group: Any = None  # the one that _found belongs to
    _found: int | None = None
    _inherited: Any = None  # made by a parent, whose connections it uses

    def __call__(self, first: Said) -> int:
        dist = torch_distributed()
        if dist is None:
            raise wrong(first, "nothing says how many ranks this node has: set LOCAL_WORLD_SIZE")
        group = dist.group.WORLD
        if self._found is None or self._group is not group:
            if group is self._inherited or worker() is not None:
                raise wrong(first, "how many a node has, only its ranks can ask each other: World.detect() there, before they fork")
            self._group, self._found = group, _count(first, _gather(dist))
        return self._found

    def before_fork(self) -> None: ...

    def after_fork_parent(self) -> None: ...

    def after_fork_child(self) -> None:
        dist = torch_distributed()
        self._inherited = dist.group.WORLD if dist is not None else None


_gathered = _Gathered()
host.at_fork(_gathered)


def _gather(dist: Any) -> list[str]:
    """The node of each rank. Over gloo: other backends would want a device of each."""
    names: list[str] = [""] * dist.get_world_size()
    apart = None if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")
    dist.all_gather_object(names, here(), group=apart)
    if apart is not None:
        dist.destroy_process_group(apart)
    return names


def here() -> str:
    """This node: the processes that share its /dev/shm."""
    return f"{os.uname().nodename} {host.boot_id()} {os.stat('/dev/shm').st_dev}"


def _count(first: Said, names: list[str]) -> int:
    """How many ranks each node has. Raises `ConfigError` unless it is the same for all, and a node's ranks follow each other."""
    per_node = names.count(names[0])
    blocks = [set(names[start : start + per_node]) for start in range(0, len(names), per_node)]
    if any(len(block) > 1 for block in blocks) or any(names.count(name) != per_node for name in names):
        where = ", ".join(f"{rank} on {name.split()[0]}" for rank, name in enumerate(names))
        raise wrong(first, f"the nodes have different numbers of ranks, or take turns: {where}")
    return per_node


# -- for jobs ----------------------------------------------------------------------------------------------------------


def address() -> str:
    """Where the ranks meet, as the environment has it; empty if it has none."""
    found, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    return f"{found}:{port}" if found and port else ""
