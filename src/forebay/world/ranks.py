"""Of what the launchers say: on how many nodes the ranks are, how many each has, and which this is."""

from __future__ import annotations

import os
import time
import weakref
from typing import Any

from forebay._kernel import host
from forebay._logs import logger
from forebay.errors import WaitTimeout
from forebay.world.launchers import ENVIRONMENT, TORCH, LauncherInfo, told, torch_distributed, wrong

log = logger("forebay.world")

PATIENCE, SAY_AFTER = 60.0, 5.0  # seconds that ranks wait for each other's World.detect(), and between two lines that say so
LONGEST_PAUSE = 0.2


def ranks() -> tuple[int, int, int]:
    """``(num_nodes, ranks_per_node, rank)`` of this process: ``(1, 1, 0)`` where no launcher says otherwise.

    Raises `ConfigError` where what is said cannot be. Where torch.distributed alone knows the ranks, and not how many a node has,
    they tell each other through its store: `WaitTimeout` if one does not ask within a minute."""
    said = _relevant()
    if not said:
        return 1, 1, 0
    first = said[0]
    per_node, num_nodes = _merged(said, "ranks_per_node"), _merged(said, "num_nodes")
    if per_node is None and num_nodes:
        per_node = 0 if first.num_ranks % num_nodes else first.num_ranks // num_nodes
    if per_node is None:
        per_node = 1 if first.num_ranks == 1 else _together(first)
    _check(said, per_node)
    return first.num_ranks // per_node, per_node, first.rank


def _relevant() -> list[LauncherInfo]:
    """What the nearest launcher says, and those further out that speak of the same ranks, until one knows how many a node has."""
    found: list[LauncherInfo] = []
    for each in told():
        if found and not each.agrees(found[0]):
            if found[0].launcher == TORCH and each.launcher == ENVIRONMENT:  # which torch.distributed should have taken its ranks from
                raise wrong(f"{found[0]}, {each}", "they contradict each other")
            continue
        found.append(each)
        if each.ranks_per_node is not None:
            break
    return found


def _merged(said: list[LauncherInfo], name: str) -> int | None:
    """A fact, of the nearest that knows it."""
    return next((value for each in said if (value := getattr(each, name)) is not None), None)


def _check(said: list[LauncherInfo], per_node: int) -> None:
    first, what = said[0], ", ".join(map(str, said))
    if not 0 <= first.rank < first.num_ranks:
        raise wrong(what, f"there is no rank {first.rank} among {first.num_ranks}")
    if per_node < 1 or first.num_ranks % per_node:
        raise wrong(what, f"a World has the same number of ranks on each node, and {first.num_ranks} ranks here are uneven")
    num_nodes, (node, rank_of_node) = first.num_ranks // per_node, divmod(first.rank, per_node)
    if _merged(said, "num_nodes") not in (None, num_nodes):
        raise wrong(what, f"{first.num_ranks} ranks, {per_node} on each node, are on {num_nodes} nodes")
    if _merged(said, "rank_of_node") not in (None, rank_of_node) or _merged(said, "node") not in (None, node):
        raise wrong(what, f"rank {first.rank} should be number {rank_of_node} on node {node}: the ranks of a node must follow each other")


# -- where only torch.distributed knows ---------------------------------------------------------------------------------


class _Together:
    """How many ranks each node has, as the ranks of torch.distributed tell each other: once for each default process group.

    Through its store and not by a collective: ranks may ask at any moment, whatever else they send each other."""

    def __init__(self) -> None:
        self._known: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._inherited: weakref.WeakSet[Any] = weakref.WeakSet()  # groups of a parent, whose connections they use

    def __call__(self, first: LauncherInfo) -> int:
        dist = torch_distributed()
        if dist is None:
            raise wrong(first, "nothing says how many ranks this node has: set LOCAL_WORLD_SIZE")
        group = dist.group.WORLD
        if group not in self._known:
            if group in self._inherited:
                raise wrong(first, "how many a node has, only its ranks can ask each other: World.detect() there, before they fork")
            self._known[group] = _count(first, _exchange(dist.distributed_c10d._get_default_store(), first))
        return self._known[group]

    def before_fork(self) -> None: ...

    def after_fork_parent(self) -> None: ...

    def after_fork_child(self) -> None:
        dist = torch_distributed()
        if dist is not None:
            self._inherited.add(dist.group.WORLD)


_together = _Together()
host.at_fork(_together)


def _exchange(store: Any, first: LauncherInfo) -> list[str]:
    """The node of each rank, by rank. Raises `WaitTimeout`."""
    keys = [f"forebay/node/{rank}" for rank in range(first.num_ranks)]
    store.set(keys[first.rank], here())
    began, pause, say_at = time.monotonic(), 0.001, SAY_AFTER
    while not store.check(keys):  # its own wait prints a warning for each time that was over
        time.sleep(pause)
        pause, waited = min(2 * pause, LONGEST_PAUSE), time.monotonic() - began
        if waited >= min(say_at, PATIENCE):
            missing = ", ".join(str(rank) for rank, key in enumerate(keys) if not store.check([key]))
            what = f"World.detect() of rank {missing or 'none'}: all must call it, for no launcher says how many a node has"
            if waited >= PATIENCE:
                raise WaitTimeout(f"waited {waited:.0f} s for {what}", what=what, waited=waited, holder=f"rank {missing}")
            log.warning("rank %d has waited %.0f s for %s", first.rank, waited, what)
            say_at += SAY_AFTER
    return [store.get(key).decode() for key in keys]


def here() -> str:
    """This node: the processes that share its /dev/shm."""
    return f"{os.uname().nodename} {host.boot_id()} {os.stat('/dev/shm').st_dev}"


def _count(first: LauncherInfo, names: list[str]) -> int:
    """How many ranks each node has. Raises `ConfigError` unless it is the same for all, and a node's ranks follow each other."""
    per_node = names.count(names[0])
    if any(names[rank] != names[rank - rank % per_node] or names.count(name) != per_node for rank, name in enumerate(names)):
        where = ", ".join(f"{rank} on {name.split()[0]}" for rank, name in enumerate(names))
        raise wrong(first, f"a World has the same number of ranks on each node, one node after the other, and here are {where}")
    return per_node
