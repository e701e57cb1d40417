"""A training whose second rank is killed in its first attempt, and which its launcher starts again: ``claims_runs.py PLACE``.

Each rank has a claim of one directory with a remote; what it saw lies in PLACE, by rank.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader, Dataset

import forebay


class Marking(Dataset[int]):
    """Its workers, which are spawned, mark in shared memory what they gave."""

    def __init__(self, claim: forebay.Claim) -> None:
        self.claim = claim

    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> int:
        self.claim.array("seen", (self.claim.world.num_ranks, len(self)), "uint8")[self.claim.world.rank, i] += 1
        return i


def train(place: Path) -> None:
    """As every rank does it."""
    claim = forebay.claim(place / "data", "s3://bucket/train")
    rank, again = claim.world.rank, (place / "killed").exists()
    barrier = claim.barrier("together")
    barrier.wait(2, timeout=60)
    if rank == 1 and not again:
        (place / "killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    barrier.wait(2, timeout=60)  # broken, the first time
    items = list(DataLoader(Marking(claim), num_workers=2, batch_size=None, multiprocessing_context="spawn"))
    barrier.wait(2, timeout=60)
    seen = claim.array("seen", (2, 4), "uint8").tolist()
    found = {"world": repr(claim.world), "prefix": claim.prefix, "job": claim.job, "items": items, "seen": seen}
    (place / f"rank-{rank}.json").write_text(json.dumps(found))


def check(place: Path) -> None:
    """Both ranks of the second attempt had the claim of the first, and all of their workers took part."""
    ranks: list[dict[str, Any]] = [json.loads((place / f"rank-{rank}.json").read_text()) for rank in range(2)]
    assert [rank["world"] for rank in ranks] == [repr(forebay.World(1, 2, 1, rank)) for rank in range(2)]
    assert ranks[0]["job"] == ranks[1]["job"]
    assert [rank["prefix"] for rank in ranks] == [0, 0]
    assert [rank["seen"] for rank in ranks] == [[[1, 1, 1, 1], [1, 1, 1, 1]]] * 2


if __name__ == "__main__":
    train(Path(sys.argv[1]))
