"""Which job a process belongs to: its ranks on this node must find each other, and no other job."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

from forebay.claims import processes
from forebay.errors import ConfigError
from forebay.world import World, launchers


@dataclass(frozen=True, slots=True)
class Job:
    """``id``: the same in all processes of the job on this node, and in no other job's; ``name``: the same for people, who do with less.
    ``how``: what it was taken from."""

    id: str
    name: str
    how: str


def identify(job: str | None, world: World) -> Job:
    """The job of this process, which has its place in ``world``: ``job`` if it is given, else what its launcher calls it, else the
    process that started its ranks. Raises `ConfigError` for a ``job`` that is no name.

    A rank that is alone on its node shares nothing with others, whatever its launcher says: its job is its process. So a step of
    SLURM may run two programs side by side. Several nodes may be on one machine, as in tests: then each has a job of its own."""
    if job is not None and (not isinstance(job, str) or not job):
        raise ConfigError(f"job={job!r}: must be a name, the same in all ranks of the job", name="job", value=repr(job))
    found = Job(job, job, "job=") if job is not None else _launched(world) if world.ranks_per_node > 1 else None
    found = found or _by_process(world)
    if not world.is_multinode:
        return found
    return Job(f"{found.id}, node {world.node}", f"{found.name}, node {world.node}", found.how)


def _launched(world: World) -> Job | None:
    """By the launcher that made these ranks. One that speaks of another number of them started something further out."""
    for ask in launchers.SOURCES:
        try:
            said = ask()
        except ConfigError:
            continue  # what makes no sense names no job; the world was given by hand then
        if said is not None and said.job is not None and said.num_ranks == world.num_ranks:
            return Job(said.job, said.name, said.how)
    address = launchers.address()
    return Job(f"master {address}", address, "MASTER_ADDR and MASTER_PORT") if address else None


def _by_process(world: World) -> Job:
    """By the process that is the only rank here, or that started the ranks."""
    rank = os.getpid()
    if launchers.worker() is not None:  # its rank is the process that made the DataLoader, which a fork server would hide
        parent = sys.modules["multiprocessing.process"].parent_process()
        rank = os.getppid() if parent is None else parent.pid
    if world.ranks_per_node == 1:
        return Job(_process(rank), f"process {rank}", "this process, the only rank here")
    found = processes.status(rank)
    parent = found.parent if found is not None else 0
    return Job(_process(parent), f"process {parent}", "the process that started this one")


def _process(pid: int) -> str:
    """A process, and no other one that had or will have its number."""
    found = processes.status(pid)
    return f"process {pid} {found.start if found is not None else 0} {processes.pid_space()}"
