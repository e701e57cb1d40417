"""What the launchers say of this process: its rank, how many there are, and which job they belong to.

Nothing is imported to find out: a framework that is not loaded yet has nothing to say.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from forebay.errors import ConfigError

TORCH, ENVIRONMENT = "torch.distributed", "the environment"
_BY_HAND = "LOCAL_WORLD_SIZE"  # how many ranks a node has, where the launcher does not say it
_SPECIAL_STEPS = 0xFFFFFFF0  # SLURM numbers the batch script and its like from here on: they are no step with ranks
_RANDOM = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")  # the name of a run that nobody named
_GROUPS = re.compile(r"(\d+)(?:\(x(\d+)\))?")


@dataclass(frozen=True, slots=True)
class LauncherInfo:
    """What one launcher says of this process; None where it does not say. ``job``: whom the ranks belong to, the same in each of
    them; ``name``: the same for people; ``how``: what it was taken from. ``facts``: what all else was read from."""

    launcher: str
    rank: int
    num_ranks: int
    rank_of_node: int | None = None
    ranks_per_node: int | None = None
    node: int | None = None
    num_nodes: int | None = None
    job: str | None = None
    name: str = ""
    how: str = ""
    facts: dict[str, object] = field(default_factory=dict)

    def __str__(self) -> str:
        return _words(self.launcher, self.facts)

    def agrees(self, other: LauncherInfo) -> bool:
        """Whether both speak of the same ranks."""
        return (self.rank, self.num_ranks) == (other.rank, other.num_ranks)


class Variables:
    """Variables of the environment that one launcher sets. ``names``: what each may be called; the first that is not empty counts."""

    def __init__(self, launcher: str, **names: str) -> None:
        self.launcher = launcher
        self.facts: dict[str, object] = {}  # by their names, for people
        self._values: dict[str, str] = {}
        for what, choice in names.items():
            for name in choice.split():
                if what not in self._values and (value := os.environ.get(name, "").strip()):
                    self._values[what] = self.facts[name] = value

    def text(self, what: str) -> str | None:
        return self._values.get(what)

    def number(self, what: str) -> int | None:
        """Raises `ConfigError` if it is none."""
        value = self.text(what)
        if value is not None and not (value.isascii() and value.isdigit()):
            raise wrong(self, f"{value!r} is no number")
        return None if value is None else int(value)

    def said(self, rank: int, num_ranks: int, **others: Any) -> LauncherInfo:
        """All that Said has of them."""
        found = {name: self.number(name) for name in ("rank_of_node", "ranks_per_node", "node", "num_nodes")}
        return LauncherInfo(self.launcher, rank, num_ranks, facts=self.facts, **{**found, **others})

    def __str__(self) -> str:
        return _words(self.launcher, self.facts)


def _words(launcher: str, facts: dict[str, object]) -> str:
    return f"{launcher} says {', '.join(f'{name}={value}' for name, value in facts.items())}"


def wrong(said: LauncherInfo | Variables | str, why: str) -> ConfigError:
    """What is said cannot be. Names all of it."""
    return ConfigError(f"{said}: {why}; set it right, or give the ranks as world=forebay.World(...)", name="world", value=str(said))


def _has(*names: str) -> bool:
    """Whether a launcher may have something to say: reading all of its variables takes ten times as long."""
    return any(name in os.environ for name in names)


# -- one by one --------------------------------------------------------------------------------------------------------


def from_torch() -> LauncherInfo | None:
    """torch.distributed, where it is initialised."""
    dist = torch_distributed()
    if dist is None:
        return None
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    return LauncherInfo(TORCH, rank, num_ranks, facts={"rank": rank, "world_size": num_ranks})


def from_ray() -> LauncherInfo | None:
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
    run = context.get_experiment_name()
    job = f"ray {running.gcs_address} {running.get_job_id()} {run}"
    return LauncherInfo(
        "Ray Train", rank, num_ranks, rank_of_node, ranks_per_node, node, None, job, f"Ray Train {run}", "the run of Ray Train", facts
    )  # fmt: skip


def from_torchrun() -> LauncherInfo | None:
    """The variables of torchrun, which other launchers set too."""
    if not _has("RANK", "WORLD_SIZE"):
        return None
    said = Variables(
        ENVIRONMENT, rank="RANK", num_ranks="WORLD_SIZE", rank_of_node="LOCAL_RANK", ranks_per_node="LOCAL_WORLD_SIZE LOCAL_SIZE",
        node="GROUP_RANK", num_nodes="GROUP_WORLD_SIZE",
    )  # fmt: skip
    rank, num_ranks = said.number("rank"), said.number("num_ranks")
    if rank is None and num_ranks in (None, 1):
        return None
    if rank is None or num_ranks is None:
        raise wrong(said, f"there is no {'RANK' if rank is None else 'WORLD_SIZE'}")
    run, restart = os.environ.get("TORCHELASTIC_RUN_ID"), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    job = f"torchrun {run} {address()} restart {restart}" if run else None
    chosen = run if run != "none" and not _RANDOM.fullmatch(run or "") else ""
    return said.said(rank, num_ranks, job=job, name=f"torchrun {chosen} at {address()}".replace("  ", " "), how="torchrun's run")


def from_mpi() -> LauncherInfo | None:
    """The variables of Open MPI's mpirun, and of MPICH's and Intel's."""
    if not _has("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PMI_RANK"):
        return None
    said = Variables(
        "MPI", rank="OMPI_COMM_WORLD_RANK PMI_RANK", num_ranks="OMPI_COMM_WORLD_SIZE PMI_SIZE",
        rank_of_node="OMPI_COMM_WORLD_LOCAL_RANK MPI_LOCALRANKID",
        ranks_per_node=f"OMPI_COMM_WORLD_LOCAL_SIZE MPI_LOCALNRANKS {_BY_HAND}",
    )  # fmt: skip
    rank, num_ranks = said.number("rank"), said.number("num_ranks")
    if rank is None or num_ranks is None:
        if _has("OMPI_COMM_WORLD_RANK") or (num_ranks or 1) > 1:
            raise wrong(said, f"there is no OMPI_COMM_WORLD_{'RANK' if rank is None else 'SIZE'}")
        return None
    run = os.environ.get("PMIX_NAMESPACE")
    return said.said(rank, num_ranks, job=f"mpi {run}" if run else None, name=f"MPI {run}", how="MPI's job")


def from_slurm() -> LauncherInfo | None:
    """The variables of SLURM, within a step; or handed on to a container, which may leave out the step."""
    if not _has("SLURM_PROCID"):
        return None
    said = Variables(
        "SLURM", job="SLURM_JOB_ID SLURM_JOBID", step="SLURM_STEP_ID SLURM_STEPID", rank="SLURM_PROCID", rank_of_node="SLURM_LOCALID",
        num_ranks="SLURM_STEP_NUM_TASKS SLURM_NTASKS SLURM_NPROCS", tasks="SLURM_STEP_TASKS_PER_NODE SLURM_TASKS_PER_NODE",
        ranks_per_node=f"SLURM_NTASKS_PER_NODE {_BY_HAND}", node="SLURM_NODEID",
        num_nodes="SLURM_STEP_NUM_NODES SLURM_NNODES SLURM_JOB_NUM_NODES",
    )  # fmt: skip
    step, rank, num_ranks = said.number("step"), said.number("rank"), said.number("num_ranks")
    if rank is None or _is_batch_script(step, rank, num_ranks):
        return None
    if num_ranks is None:
        raise wrong(said, "there is no SLURM_STEP_NUM_TASKS")
    job, tasks = said.text("job"), said.text("tasks")
    run = f"{job}.{step}" if step is not None else job
    per_node = said.number("ranks_per_node") if tasks is None else _even(said, tasks)
    return said.said(
        rank, num_ranks, ranks_per_node=per_node, job=f"slurm {run}" if run else None, name=f"SLURM {run}", how="the step of SLURM"
    )


def _is_batch_script(step: int | None, rank: int, num_ranks: int | None) -> bool:
    """It has the variables of rank 0, and runs once. Of what SLURM itself starts it alone has no number of a step."""
    if step is not None:
        return step >= _SPECIAL_STEPS
    return rank == 0 and (num_ranks is None or _has("SLURMD_NODENAME"))


def _even(said: Variables, groups: str) -> int:
    """How many ranks each node has, of SLURM's ``4(x2)``: four on each of two. 0 if not all have the same number."""
    found = [_GROUPS.fullmatch(group) for group in groups.split(",")]
    if None in found:
        raise wrong(said, f"{groups!r} is no list of tasks per node")
    counts = {int(group[1]) for group in found if group}
    return counts.pop() if len(counts) == 1 else 0


SOURCES: tuple[Callable[[], LauncherInfo | None], ...] = (from_torch, from_ray, from_torchrun, from_mpi, from_slurm)
"""What the process itself knows comes before what it was told, and the inner launcher before the outer one, whose variables it inherits."""


def told() -> Iterator[LauncherInfo]:
    """What each launcher says, the nearest first. Raises `ConfigError` for variables that make no sense."""
    return (said for ask in SOURCES if (said := ask()) is not None)


# -- what others ask -----------------------------------------------------------------------------------------------------


def torch_distributed() -> Any:
    """torch.distributed where it is initialised, else None."""
    dist = sys.modules.get("torch.distributed")
    return dist if dist is not None and getattr(dist, "is_initialized", bool)() else None


def worker() -> tuple[int, int] | None:
    """Which DataLoader worker this is, and of how many; None in all other processes."""
    data = sys.modules.get("torch.utils.data")
    info = data.get_worker_info() if data is not None else None
    return None if info is None else (info.id, info.num_workers)


def address() -> str:
    """Where the ranks meet, as the environment has it; empty if it has none."""
    found, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    return f"{found}:{port}" if found and port else ""
