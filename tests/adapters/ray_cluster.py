"""A Ray cluster of two nodes on this machine: ``head``, where the driver is, and ``away``, which has a default cache of its own."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

HEAD = {"resources": {"head": 1}, "num_cpus": 0}
AWAY = {"resources": {"away": 1}, "num_cpus": 0}
NODE: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 150 << 20, "include_dashboard": False}
# Workers take seconds to start: none before it is wanted, and those that are there stay.
WORKERS = {"prestart_worker_first_driver": False, "num_workers_soft_limit": 8}


class Nodes:
    """``cluster``; ``homes``: of the default caches of its nodes, by name."""

    def __init__(self, place: Path) -> None:
        self.homes = {name: place / f"home-{name}" for name in ("head", "away")}
        with pytest.MonkeyPatch.context() as patch:  # else the cluster would hand its own state to what is started later
            patch.setenv("FOREBAY_HOME", str(self.homes["head"]))
            self.cluster = Cluster(initialize_head=True, head_node_args={**NODE, "resources": {"head": 100}, "_system_config": WORKERS})
        self.add("away", self.homes["away"])

    def add(self, name: str, home: Path) -> Any:
        """A further node."""
        return self.cluster.add_node(**NODE, resources={name: 100}, env_vars={"FOREBAY_HOME": str(home)})


@contextlib.contextmanager
def running() -> Iterator[Nodes]:
    """Connected to as a driver."""
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as place:
        before = dict(os.environ)
        nodes = Nodes(Path(place))
        ray.init(address=nodes.cluster.address, log_to_driver=False, configure_logging=False)
        try:
            yield nodes
        finally:
            ray.shutdown()
            nodes.cluster.shutdown()
            for name in set(os.environ) - set(before):
                del os.environ[name]


class Log:
    """Counts what ran, in whatever process."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def add(self, what: object = "") -> None:
        """One line."""
        with open(self.path, "a") as file:
            file.write(f"{what}\n")

    def lines(self) -> list[str]:
        """All so far."""
        return Path(self.path).read_text().splitlines() if os.path.exists(self.path) else []

    def __len__(self) -> int:
        return len(self.lines())


def node() -> str:
    """The name of this process's node."""
    mine = ray.get_runtime_context().get_node_id()
    (resources,) = [n["Resources"] for n in ray.nodes() if n["NodeID"] == mine]
    return next(name for name in ("head", "away", "third") if name in resources)
