"""Ranks that PyTorch starts, each of which tells its world and its job: ``world_runs.py HOW PLACE``. It writes a file each to PLACE."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils.data import DataLoader, Dataset

import forebay
from forebay import errors
from forebay.world import launchers
from tests.claims.launched import told

RANKS = 2


class Asking(Dataset[str]):
    """Each item is the world as a worker finds it, and as it finds it from its rank's."""

    def __init__(self, items: int) -> None:
        self.items, self.world = items, forebay.World.detect()

    def __len__(self) -> int:
        return self.items

    def __getitem__(self, i: int) -> str:
        time.sleep(0.05)  # so that no worker takes all
        try:
            found = told()
        except errors.ConfigError as error:
            found = {"error": str(error)}
        return json.dumps({**found, "from_rank": repr(self.world.detect_workers())})


def asked(how: str) -> list[dict[str, Any]]:
    """What two workers of a DataLoader say."""
    loader = DataLoader(Asking(2), num_workers=2, batch_size=None, multiprocessing_context=how)
    return [json.loads(item) for item in loader]


def write(place: str, name: object, found: Any) -> None:
    (Path(place) / f"{name}.json").write_text(json.dumps(found))


def start(rank: int) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{os.environ['PORT']}", rank=rank, world_size=RANKS)


def torchrun(place: str) -> None:
    """Before and after torch.distributed is initialised."""
    before = told()
    dist.init_process_group("gloo")
    write(place, before["world"], {"before": before, "after": told(), "fork": asked("fork"), "spawn": asked("spawn")})
    dist.destroy_process_group()


def spawned(rank: int, place: str) -> None:
    """Nothing but torch.distributed knows. Ranks ask each other before a collective or after it has begun, as each likes."""
    start(rank)
    begun = dist.barrier(async_op=True) if rank == 1 else None
    first = told()
    begun = begun or dist.barrier(async_op=True)
    begun.wait()
    workers = asked("fork")
    os.environ["RANK"], os.environ["WORLD_SIZE"] = str(1 - rank), str(RANKS)
    write(place, rank, {"first": first, "again": told_or_error(), "workers": workers})
    dist.destroy_process_group()


def alone(rank: int, place: str) -> None:
    """Rank 0 asks, and the others do not. One of its children asks too."""
    logging.basicConfig(level="WARNING", filename=Path(place) / "log")
    start(rank)
    launchers.TIMEOUT, launchers.LOG_AFTER = 0.5, 0.2
    if rank == 0:
        child = multiprocessing.get_context("fork").Process(target=lambda: write(place, "child", told_or_error()))
        child.start()
        child.join()
        write(place, rank, told_or_error())
    dist.barrier()
    dist.destroy_process_group()


def told_or_error() -> dict[str, Any]:
    try:
        return told()
    except (errors.ConfigError, errors.WaitTimeout) as error:
        return {"kind": type(error).__name__, "error": str(error)}


if __name__ == "__main__":
    how, where = sys.argv[1:]
    if how == "torchrun":
        torchrun(where)
    else:
        mp.spawn({"spawned": spawned, "alone": alone}[how], (where,), nprocs=RANKS)
