"""What a process of a launcher has to tell: its world and its job, as one line of JSON. Run as a program, with an interpreter's paths.

``launched.py [NUM_NODES RANKS_PER_NODE WORKERS_PER_RANK WORKER]``: the world is detected if it is not given.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from forebay.claims.processes import identify
from forebay.world import World

LAUNCHERS = [
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
    *("PMIX_NAMESPACE", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    *(name for name in os.environ if name.startswith(("SLURM", "OMPI_"))),
]
"""The variables that launchers set."""


def told(world: World | None = None) -> dict[str, Any]:
    """Of this process."""
    world = world or World.detect()
    job = identify(None, world)
    return {"world": repr(world), "job": job.id, "how": job.how}


def clean() -> dict[str, str]:
    """The environment without the variables of launchers."""
    return {name: value for name, value in os.environ.items() if name not in LAUNCHERS}


if __name__ == "__main__":
    given = [int(word) for word in sys.argv[1:]]
    # One call, so that what several processes write to one pipe stays apart.
    os.write(1, json.dumps(told(World(*given) if given else None)).encode() + b"\n")
