"""Which node, rank and worker of a job this process is."""

from __future__ import annotations

import operator
from typing import Any, Self

from forebay._kernel.interrupts import guarded, unless_of_handler
from forebay.errors import ConfigError
from forebay.world.launchers import ranks
from forebay.world.launchers import worker as dataloader_worker

__all__ = ["World"]


class World:
    """The nodes, ranks and workers of a job, and which of them this process is. All counts are for the whole job.

    A job runs on ``num_nodes`` nodes, each with ``ranks_per_node`` ranks, each with ``workers_per_rank`` DataLoader workers; a rank without
    workers counts as one worker. All workers are numbered, node by node and rank by rank: ``worker`` is this one's number. ``node``,
    ``rank`` and the like follow from that. ``is_leader`` is true for the first of all, ``is_local_leader`` for the first of its node.

    Worlds with the same numbers are equal. They can be pickled. Raises `ConfigError` for impossible numbers."""

    def __init__(self, num_nodes: int, ranks_per_node: int, workers_per_rank: int, worker: int) -> None:
        numbers = {"num_nodes": num_nodes, "ranks_per_node": ranks_per_node, "workers_per_rank": workers_per_rank, "worker": worker}
        num_nodes, ranks_per_node, workers_per_rank, worker = (_number(name, value) for name, value in numbers.items())
        workers_per_node = ranks_per_node * workers_per_rank
        for name, value in (("num_nodes", num_nodes), ("ranks_per_node", ranks_per_node), ("workers_per_rank", workers_per_rank)):
            if value < 1:
                raise ConfigError(f"{name}={value}: there must be at least one", name=name, value=value)
        if not 0 <= worker < num_nodes * workers_per_node:
            message = f"worker={worker}: there are {num_nodes * workers_per_node}, with {_formatted(numbers)}"
            raise ConfigError(message, name="worker", value=worker)
        self.node = worker // workers_per_node
        self.num_nodes = num_nodes
        self.is_multinode = num_nodes > 1
        self.rank = worker // workers_per_rank
        self.num_ranks = num_nodes * ranks_per_node
        self.rank_of_node = self.rank % ranks_per_node
        self.ranks_per_node = ranks_per_node
        self.worker = worker
        self.num_workers = num_nodes * workers_per_node
        self.worker_of_node = worker % workers_per_node
        self.workers_per_node = workers_per_node
        self.worker_of_rank = worker % workers_per_rank
        self.workers_per_rank = workers_per_rank
        self.is_leader = worker == 0
        self.is_local_leader = self.worker_of_node == 0

    @classmethod
    @guarded
    def detect(cls) -> Self:
        """Return the world according to this process's launcher: torch.distributed if initialised, Ray Train, torchrun, MPI, SLURM; a
        single rank if there is none. In a DataLoader worker, return that worker's world.

        Nothing is imported. If `torch.multiprocessing.spawn` started the ranks, initialise torch.distributed first, since nothing else
        knows them; then every rank must call this once, because the ranks ask each other how many a node has. A spawned worker does not
        know what its rank knows: pass it the rank's world, and call that world's `detect_workers()`.

        Raises `ConfigError` if environment variables contradict each other, or nodes have different numbers of ranks; `WaitTimeout` after a
        minute if the ranks must ask each other and one does not."""
        num_nodes, ranks_per_node, rank = ranks()
        return cls(num_nodes, ranks_per_node, 1, rank).detect_workers()

    def detect_workers(self) -> Self:
        """Return the same rank, with the workers that PyTorch reports in this process."""
        worker, workers = dataloader_worker() or (0, 1)
        return type(self)(self.num_nodes, self.ranks_per_node, workers, self.rank * workers + worker)

    def copy(self) -> Self:
        """Return an equal world."""
        return type(self)(*self._key())

    def replicate(self, replication: int) -> Self:
        """Return the world in which ``replication`` consecutive ranks count as one, so that they see the same samples.

        If the remaining ranks do not fill the nodes, all count as ranks of one node. Raises `ConfigError` unless ``replication`` is
        positive and divides the number of ranks."""
        times = _number("replication", replication)
        if times < 1:
            raise ConfigError(f"replication={times}: Replication factor must be positive", name="replication", value=times)
        if self.num_ranks % times:
            message = f"replication={times}: World size must be divisible by it, and is {self.num_ranks} ranks"
            raise ConfigError(message, name="replication", value=times)
        num_ranks = self.num_ranks // times
        num_nodes = 1 if num_ranks % self.ranks_per_node else num_ranks // self.ranks_per_node
        worker = self.rank // times * self.workers_per_rank + self.worker_of_rank
        return type(self)(num_nodes, num_ranks // num_nodes, self.workers_per_rank, worker)

    def to_json(self) -> dict[str, Any]:
        """Return all its numbers by name."""
        return dict(vars(self))

    def _key(self) -> tuple[int, int, int, int]:
        return self.num_nodes, self.ranks_per_node, self.workers_per_rank, self.worker

    def __eq__(self, other: object) -> bool:
        return self._key() == other._key() if isinstance(other, World) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._key())

    def __repr__(self) -> str:
        names = ("num_nodes", "ranks_per_node", "workers_per_rank", "worker")
        return f"World({_formatted(dict(zip(names, self._key(), strict=True)))})"


def _formatted(numbers: dict[str, int]) -> str:
    return ", ".join(f"{name}={value}" for name, value in numbers.items())


def _number(name: str, value: Any) -> int:
    try:
        return operator.index(value)
    except unless_of_handler(TypeError):
        raise ConfigError(f"{name}={value!r}: must be a whole number", name=name, value=repr(value)) from None
