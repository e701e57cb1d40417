"""Two ranks with DataLoader workers that share a directory, a counter, an array, a lock and a barrier of this node.

    python -m torch.distributed.run --standalone --nproc-per-node 2 examples/claims_ddp.py

Run it in a second terminal at the same time: it is refused, because the first job downloads into that directory. Kill all processes
of the first job with -9 and run it again: it starts at once, and afterwards `forebay claims` shows nothing.
Needs: pip install 'forebay[torch]' numpy
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import forebay

DEFAULT = Path(tempfile.gettempdir()) / f"forebay-claims-{os.getuid()}"
REMOTE = "https://example.com/digits"  # this example sends it no request
SAMPLES, PIXELS = 2_000, 64


def download(claim: forebay.Claim, folder: Path) -> Path:
    """One process of the node downloads; the others wait, and find the file."""
    file = folder / "samples.npy"
    with claim.lock("download"):
        if not file.exists():
            began = time.perf_counter()
            folder.mkdir(parents=True, exist_ok=True)
            np.save(folder / "half.npy", np.random.default_rng(0).standard_normal((SAMPLES, PIXELS), np.float32))
            (folder / "half.npy").rename(file)
            print(f"rank {claim.world.rank} downloaded {file} in {time.perf_counter() - began:.2f} s", flush=True)
    return file


class Samples(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """The dataset carries the claim to workers, forked or pickled: they write to the same memory as the ranks."""

    def __init__(self, claim: forebay.Claim, file: Path, epochs: int) -> None:
        self.claim, self.data = claim, np.load(file, mmap_mode="r")
        self.epoch = claim.scalar("epoch", "int64")
        self.epochs = epochs

    def seen(self) -> np.ndarray[Any, Any]:
        """The shared counters, requested where they are used: a pickled array would be a copy."""
        return self.claim.array("seen", (self.epochs, SAMPLES), "uint8")

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        epoch = self.epoch.get()  # persistent workers learn here which epoch it is
        self.seen()[epoch, index] += 1
        sample = torch.from_numpy(self.data[index].copy())
        return sample, (sample.sum() > 0).long()


def train(claim: forebay.Claim, samples: Samples, epochs: int, workers: int) -> None:
    world, barrier = claim.world, claim.barrier("epoch")
    sampler: DistributedSampler[tuple[torch.Tensor, torch.Tensor]] = DistributedSampler(samples)
    loader = DataLoader(samples, batch_size=50, sampler=sampler, num_workers=workers, persistent_workers=workers > 0)
    model = DistributedDataParallel(nn.Linear(PIXELS, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        if world.is_local_leader:
            samples.epoch.set(epoch)
        barrier.wait(world.ranks_per_node)  # until then a rank might count for the previous epoch
        for inputs, labels in loader:
            loss = nn.functional.cross_entropy(model(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        barrier.wait(world.ranks_per_node)  # after this, all ranks have counted
        if world.is_local_leader:
            counts = samples.seen()[epoch]
            once = "each once" if (counts == 1).all() else "NOT each once"
            print(f"epoch {epoch}: {int(counts.sum()):,} samples, {once}; loss {loss.item():.3f}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=DEFAULT, help="directory of the samples (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--workers", type=int, default=2, help="DataLoader workers of each rank (default: %(default)s)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    try:
        claim = forebay.claim(options.directory, REMOTE)  # the same line in all ranks: torchrun's variables distinguish them
    except forebay.errors.ClaimConflict as error:
        print(error, file=sys.stderr)
        return 1
    print(f"rank {claim.world.rank} of {claim.world.num_ranks}: claim {claim.prefix} of job {claim.job}", flush=True)
    distributed.init_process_group("gloo")
    try:
        train(claim, Samples(claim, download(claim, options.directory), options.epochs), options.epochs, options.workers)
    finally:
        distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
