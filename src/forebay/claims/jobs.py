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
    """``id``: equal in all processes of the job on this node, and different in every other job; ``name``: a shorter form for messages.
    ``how``: where both were taken from."""

    id: str
    name: str
    how: str


def identify(job: str | None, world: World) -> Job:
    """Return the job of this process, whose rank is given by ``world``: ``job`` if it is given, else the launcher's job, else the process
    that started its ranks. Raises `ConfigError` if ``job`` is no name.

    The job of a rank that is alone on its node is its process, whatever its launcher says, since it shares nothing with others. So a
    step of SLURM may run two programs side by side. Several nodes on one machine, as in tests, have a job each."""
    if job is not None and (not isinstance(job, str) or not job):
        raise ConfigError(f"job={job!r}: must be a name, the same in all ranks of the job", name="job", value=repr(job))
    if job is not None:
        identified = Job(job, job, "job=")
    else:
        identified = (_launched(world) if world.ranks_per_node > 1 else None) or _by_process(world)
    if not world.is_multinode:
        return identified
    return Job(f"{identified.id}, node {world.node}", f"{identified.name}, node {world.node}", identified.how)


def _launched(world: World) -> Job | None:
    """Return the job of the launcher that started these ranks. A launcher with another number of ranks started an outer program."""
    for read_launcher in launchers.SOURCES:
        try:
            info = read_launcher()
        except ConfigError:
            continue  # contradictory variables name no job; the world was given explicitly then
        if info is not None and info.job is not None and info.num_ranks == world.num_ranks:
            return Job(info.job, info.name, info.how)
    address = launchers.address()
    return Job(f"master {address}", address, "MASTER_ADDR and MASTER_PORT") if address else None


def _by_process(world: World) -> Job:
    """Return a job named by the process that is the only rank here, or by the one that started the ranks."""
    rank = os.getpid()
    if launchers.worker() is not None:  # its rank is the process that made the DataLoader, which a fork server would hide
        parent = sys.modules["multiprocessing.process"].parent_process()
        rank = os.getppid() if parent is None else parent.pid
    if world.ranks_per_node == 1:
        return Job(_process_id(rank), f"process {rank}", "this process, the only rank here")
    process = processes.status(rank)
    starter = process.parent if process is not None else 0
    return Job(_process_id(starter), f"process {starter}", "the process that started this one")


def _process_id(pid: int) -> str:
    """Identify a process among all that ever have its number."""
    process = processes.status(pid)
    return f"process {pid} {process.start if process is not None else 0} {processes.pid_space()}"
