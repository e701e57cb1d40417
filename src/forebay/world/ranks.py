"""The number of nodes and of ranks per node, and the rank of this process, from what the launchers know."""

from __future__ import annotations

import os
import weakref
from typing import Any

from forebay._kernel import host
from forebay._kernel.waits import PollingWait
from forebay.world.launchers import ENVIRONMENT, SOURCES, TORCH, LauncherInfo, contradiction, torch_distributed

TIMEOUT, LOG_AFTER = 60.0, 5.0  # seconds that ranks wait for each other's World.detect(), and until the first log line about it
_LONGEST_PAUSE = 0.2


def ranks() -> tuple[int, int, int]:
    """Return ``(num_nodes, ranks_per_node, rank)`` of this process: ``(1, 1, 0)`` without a launcher.

    Raises `ConfigError` for impossible values. If only torch.distributed knows the ranks, but not how many a node has, they exchange
    their nodes through its store: `WaitTimeout` if one does not call this within a minute."""
    infos = _relevant()
    if not infos:
        return 1, 1, 0
    first = infos[0]
    per_node, num_nodes = _merged(infos, "ranks_per_node"), _merged(infos, "num_nodes")
    if per_node is None and num_nodes:
        per_node = 0 if first.num_ranks % num_nodes else first.num_ranks // num_nodes
    if per_node is None:
        per_node = 1 if first.num_ranks == 1 else _exchanged(first)
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
