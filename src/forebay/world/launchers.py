"""What the launchers know about this process: its rank, the number of ranks and of nodes, and their job.

Nothing is imported to find out: a framework that is not loaded yet knows nothing.
"""

from __future__ import annotations

import os
import re
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from forebay._kernel import host
from forebay._kernel.waits import PollingWait
from forebay.errors import ConfigError

TORCH, ENVIRONMENT = "torch.distributed", "the environment"
_BY_HAND = "LOCAL_WORLD_SIZE"  # ranks per node, if the launcher does not set them
_SPECIAL_STEPS = 0xFFFFFFF0  # SLURM numbers the batch script and the like from here on: they have no ranks
_RANDOM = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")  # the generated name of a run
_GROUPS = re.compile(r"(\d+)(?:\(x(\d+)\))?")


@dataclass(frozen=True, slots=True)
class LauncherInfo:
    """What one launcher knows about this process; None for what it does not know. ``job``: identifies the job, equal in all its ranks;
    ``name``: its name in messages; ``how``: where both were taken from. ``facts``: the values that everything else was read from."""

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
        return _formatted(self.launcher, self.facts)


class Variables:
    """Environment variables of one launcher. ``names``: for each value the variables that may hold it; the first non-empty one counts."""

    def __init__(self, launcher: str, **names: str) -> None:
        self.launcher = launcher
        self.facts: dict[str, object] = {}  # by variable, for messages
        self._values: dict[str, str] = {}
        for what, variables in names.items():
            for name in variables.split():
                if what not in self._values and (value := os.environ.get(name, "").strip()):
                    self._values[what] = self.facts[name] = value

    def text(self, what: str) -> str | None:
        return self._values.get(what)

    def number(self, what: str) -> int | None:
        """Return a value as a number. Raises `ConfigError` if it is none."""
        value = self.text(what)
        if value is not None and not (value.isascii() and value.isdigit()):
            raise contradiction(self, f"{value!r} is not a number")
        return None if value is None else int(value)

    def info(self, rank: int, num_ranks: int, **others: Any) -> LauncherInfo:
        """Return everything that the variables say."""
        numbers = {name: self.number(name) for name in ("rank_of_node", "ranks_per_node", "node", "num_nodes")}
        return LauncherInfo(self.launcher, rank, num_ranks, facts=self.facts, **{**numbers, **others})

    def __str__(self) -> str:
        return _formatted(self.launcher, self.facts)


def _formatted(launcher: str, facts: dict[str, object]) -> str:
    return f"{launcher} says {', '.join(f'{name}={value}' for name, value in facts.items())}"


def contradiction(info: LauncherInfo | Variables | str, why: str) -> ConfigError:
    """Return the error for impossible values, which names all of them."""
    return ConfigError(f"{info}: {why}; correct it, or pass the ranks as world=forebay.World(...)", name="world", value=str(info))


def _has(*names: str) -> bool:
    """Whether any of these variables is set: reading all variables of a launcher takes ten times as long."""
    return any(name in os.environ for name in names)


# -- the launchers -----------------------------------------------------------------------------------------------------


def from_torch() -> LauncherInfo | None:
    """Read torch.distributed if it is initialised."""
    dist = torch_distributed()
    if dist is None:
        return None
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    return LauncherInfo(TORCH, rank, num_ranks, facts={"rank": rank, "world_size": num_ranks})


def from_ray() -> LauncherInfo | None:
    """Read Ray Train within its training function."""
    ray, train = sys.modules.get("ray"), sys.modules.get("ray.train")
    if ray is None or train is None or not ray.is_initialized():
        return None
    running = ray.get_runtime_context()
    if running.get_actor_id() is None:  # its workers are actors; this is the driver
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
    """Read the variables of torchrun, which other launchers set too."""
    if not _has("RANK", "WORLD_SIZE"):
        return None
    variables = Variables(
        ENVIRONMENT, rank="RANK", num_ranks="WORLD_SIZE", rank_of_node="LOCAL_RANK", ranks_per_node="LOCAL_WORLD_SIZE LOCAL_SIZE",
        node="GROUP_RANK", num_nodes="GROUP_WORLD_SIZE",
    )  # fmt: skip
    rank, num_ranks = variables.number("rank"), variables.number("num_ranks")
    if rank is None and num_ranks in (None, 1):
        return None
    if rank is None or num_ranks is None:
        raise contradiction(variables, f"there is no {'RANK' if rank is None else 'WORLD_SIZE'}")
    run, restart = os.environ.get("TORCHELASTIC_RUN_ID"), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    job = f"torchrun {run} {address()} restart {restart}" if run else None
    chosen = run if run != "none" and not _RANDOM.fullmatch(run or "") else ""
    return variables.info(rank, num_ranks, job=job, name=f"torchrun {chosen} at {address()}".replace("  ", " "), how="torchrun's run")


def from_mpi() -> LauncherInfo | None:
    """Read the variables of Open MPI's mpirun, and of MPICH's and Intel's."""
    if not _has("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PMI_RANK"):
        return None
    variables = Variables(
        "MPI", rank="OMPI_COMM_WORLD_RANK PMI_RANK", num_ranks="OMPI_COMM_WORLD_SIZE PMI_SIZE",
        rank_of_node="OMPI_COMM_WORLD_LOCAL_RANK MPI_LOCALRANKID",
        ranks_per_node=f"OMPI_COMM_WORLD_LOCAL_SIZE MPI_LOCALNRANKS {_BY_HAND}",
    )  # fmt: skip
    rank, num_ranks = variables.number("rank"), variables.number("num_ranks")
    if rank is None or num_ranks is None:
        if _has("OMPI_COMM_WORLD_RANK") or (num_ranks or 1) > 1:
            raise contradiction(variables, f"there is no OMPI_COMM_WORLD_{'RANK' if rank is None else 'SIZE'}")
        return None
    run = os.environ.get("PMIX_NAMESPACE")
    return variables.info(rank, num_ranks, job=f"mpi {run}" if run else None, name=f"MPI {run}", how="MPI's job")


def from_slurm() -> LauncherInfo | None:
    """Read the variables of SLURM within a step, or in a container, which may get them without the step."""
    if not _has("SLURM_PROCID"):
        return None
    variables = Variables(
        "SLURM", job="SLURM_JOB_ID SLURM_JOBID", step="SLURM_STEP_ID SLURM_STEPID", rank="SLURM_PROCID", rank_of_node="SLURM_LOCALID",
        num_ranks="SLURM_STEP_NUM_TASKS SLURM_NTASKS SLURM_NPROCS", tasks="SLURM_STEP_TASKS_PER_NODE SLURM_TASKS_PER_NODE",
        ranks_per_node=f"SLURM_NTASKS_PER_NODE {_BY_HAND}", node="SLURM_NODEID",
        num_nodes="SLURM_STEP_NUM_NODES SLURM_NNODES SLURM_JOB_NUM_NODES",
    )  # fmt: skip
    step, rank, num_ranks = variables.number("step"), variables.number("rank"), variables.number("num_ranks")
    if rank is None or _is_batch_script(step, rank, num_ranks):
        return None
    if num_ranks is None:
        raise contradiction(variables, "there is no SLURM_STEP_NUM_TASKS")
    job, tasks = variables.text("job"), variables.text("tasks")
    run = f"{job}.{step}" if step is not None else job
    per_node = variables.number("ranks_per_node") if tasks is None else _even(variables, tasks)
    return variables.info(
        rank, num_ranks, ranks_per_node=per_node, job=f"slurm {run}" if run else None, name=f"SLURM {run}", how="the step of SLURM"
    )


def _is_batch_script(step: int | None, rank: int, num_ranks: int | None) -> bool:
    """Whether this is the batch script, which has the variables of rank 0 and runs once. Of what SLURM starts it alone has no step."""
    if step is not None:
        return step >= _SPECIAL_STEPS
    return rank == 0 and (num_ranks is None or _has("SLURMD_NODENAME"))


def _even(variables: Variables, groups: str) -> int:
    """Return the ranks per node from SLURM's ``4(x2)``: four on each of two nodes. 0 if the numbers differ."""
    matches = [_GROUPS.fullmatch(group) for group in groups.split(",")]
    if None in matches:
        raise contradiction(variables, f"{groups!r} is not a list of tasks per node")
    counts = {int(group[1]) for group in matches if group}
    return counts.pop() if len(counts) == 1 else 0


SOURCES: tuple[Callable[[], LauncherInfo | None], ...] = (from_torch, from_ray, from_torchrun, from_mpi, from_slurm)
"""What the process itself knows comes before its environment, and an inner launcher before the outer one, whose variables it inherits."""


# -- other facts -------------------------------------------------------------------------------------------------------


def torch_distributed() -> Any:
    """Return torch.distributed if it is initialised, else None."""
    dist = sys.modules.get("torch.distributed")
    return dist if dist is not None and getattr(dist, "is_initialized", bool)() else None


def worker() -> tuple[int, int] | None:
    """Return the number of this DataLoader worker, and how many there are; None in all other processes."""
    data = sys.modules.get("torch.utils.data")
    info = data.get_worker_info() if data is not None else None
    return None if info is None else (info.id, info.num_workers)


def address() -> str:
    """Return the address of the ranks' rendezvous from the environment; empty if there is none."""
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    return f"{host}:{port}" if host and port else ""


TIMEOUT, LOG_AFTER = 60.0, 5.0  # seconds that ranks wait for each other's World.detect(), and until the first log line about it
_LONGEST_PAUSE = 0.2


def ranks() -> tuple[int, int, int]:
    """Return ``(num_nodes, ranks_per_node, rank)`` of this process: ``(1, 1, 0)`` without a launcher.

    Raises `ConfigError` for impossible values. RANK and WORLD_SIZE without anything else mean one rank on each node. If only
    torch.distributed knows the ranks, but not how many a node has, they exchange their nodes through its store: `WaitTimeout` if one does
    not call this within a minute."""
    infos = _relevant()
    if not infos:
        return 1, 1, 0
    first = infos[0]
    per_node, num_nodes = _merged(infos, "ranks_per_node"), _merged(infos, "num_nodes")
    if per_node is None and num_nodes:
        per_node = 0 if first.num_ranks % num_nodes else first.num_ranks // num_nodes
    if per_node is None:
        # RANK and WORLD_SIZE alone mean one rank on each node, as in MosaicML Streaming.
        is_alone = first.num_ranks == 1 or (first.launcher == ENVIRONMENT and not _merged(infos, "rank_of_node"))
        per_node = 1 if is_alone else _exchanged(first)
    _check(infos, per_node)
    return first.num_ranks // per_node, per_node, first.rank


def _relevant() -> list[LauncherInfo]:
    """Return what the innermost launcher knows, and the outer ones with the same ranks, up to one that knows the ranks per node."""
    infos: list[LauncherInfo] = []
    for info in filter(None, (read() for read in SOURCES)):
        if infos and (info.rank, info.num_ranks) != (infos[0].rank, infos[0].num_ranks):
            if infos[0].launcher == TORCH and info.launcher == ENVIRONMENT:  # torch.distributed should have taken its ranks from it
                raise contradiction(f"{infos[0]}, {info}", "they contradict each other")
            continue
        infos.append(info)
        if info.ranks_per_node is not None:
            break
    return infos


def _merged(infos: list[LauncherInfo], name: str) -> int | None:
    """Return a number from the innermost launcher that knows it."""
    return next((value for info in infos if (value := getattr(info, name)) is not None), None)


def _check(infos: list[LauncherInfo], per_node: int) -> None:
    first, what = infos[0], ", ".join(map(str, infos))
    if not 0 <= first.rank < first.num_ranks:
        raise contradiction(what, f"there is no rank {first.rank} among {first.num_ranks}")
    if per_node < 1 or first.num_ranks % per_node:
        raise contradiction(
            what, f"every node of a World has the same number of ranks, and {first.num_ranks} ranks cannot be divided evenly here"
        )
    num_nodes, (node, rank_of_node) = first.num_ranks // per_node, divmod(first.rank, per_node)
    if _merged(infos, "num_nodes") not in (None, num_nodes):
        raise contradiction(what, f"{first.num_ranks} ranks, {per_node} on each node, make {num_nodes} nodes")
    if _merged(infos, "rank_of_node") not in (None, rank_of_node) or _merged(infos, "node") not in (None, node):
        raise contradiction(
            what, f"rank {first.rank} should be number {rank_of_node} on node {node}: the ranks of a node must be consecutive"
        )


# -- if only torch.distributed knows the ranks -------------------------------------------------------------------------


class _RankExchange:
    """The ranks per node, exchanged between the ranks of torch.distributed once for each default process group.

    It uses the store and no collective, so that ranks may call it at any moment, whatever else they send each other."""

    def __init__(self) -> None:
        self._known: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._inherited: weakref.WeakSet[Any] = weakref.WeakSet()  # groups of a parent, whose connections they use

    def __call__(self, first: LauncherInfo) -> int:
        dist = torch_distributed()
        if dist is None:
            raise contradiction(first, "the number of ranks on this node is unknown: set LOCAL_WORLD_SIZE")
        group = dist.group.WORLD
        if group not in self._known:
            if group in self._inherited:
                raise contradiction(first, "only its ranks can find out how many a node has: call World.detect() there before they fork")
            self._known[group] = _count(first, _exchange(dist.distributed_c10d._get_default_store(), first))
        return self._known[group]

    def after_fork_child(self) -> None:
        dist = torch_distributed()
        if dist is not None:
            self._inherited.add(dist.group.WORLD)


_exchanged = _RankExchange()
host.at_fork(_exchanged)


def _exchange(store: Any, first: LauncherInfo) -> list[str]:
    """Return the node of each rank. Raises `WaitTimeout`."""
    keys = [f"forebay/node/{rank}" for rank in range(first.num_ranks)]
    store.set(keys[first.rank], own_node())

    def what() -> tuple[str, str]:
        missing = f"rank {', '.join(str(rank) for rank, key in enumerate(keys) if not store.check([key])) or 'none'}"
        return f"World.detect() of {missing}, which all ranks must call since no launcher knows how many a node has", missing

    wait = PollingWait(TIMEOUT, _LONGEST_PAUSE, LOG_AFTER, "missing:")
    while not store.check(keys):  # its own wait prints a warning for each timeout
        wait.sleep(what)
    return [store.get(key).decode() for key in keys]


def own_node() -> str:
    """Identify this node: the processes that share its /dev/shm."""
    return f"{os.uname().nodename} {host.boot_id()} {os.stat('/dev/shm').st_dev}"


def _count(first: LauncherInfo, names: list[str]) -> int:
    """Return the ranks per node. Raises `ConfigError` unless all nodes have the same number, and their ranks are consecutive."""
    per_node = names.count(names[0])
    if any(names[rank] != names[rank - rank % per_node] or names.count(name) != per_node for rank, name in enumerate(names)):
        where = ", ".join(f"{rank} on {name.split()[0]}" for rank, name in enumerate(names))
        raise contradiction(first, f"a World has the same number of consecutive ranks on each node, but here the ranks are {where}")
    return per_node
