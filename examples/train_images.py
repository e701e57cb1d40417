"""Trains a small network on real images, and prints what each epoch read from where.

    python examples/train_images.py      # each image is decoded once, by the first worker that needs it
    python examples/train_images.py      # the same again: nothing is decoded any more

Run it in two terminals at once: each finds what the other one has decoded. Ctrl-C ends it and loses nothing.

The images are cut from the two photographs that come with scikit-learn, a temple and a flower, and stored as PNG files; the
network learns to tell which of the two a piece is from. Needs: pip install 'forebay[examples]'
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset

import forebay
from forebay.adapters.torch import CachedDataset

CUT, SIDE = 160, 64  # pixels: of a piece as a PNG file, and as the network sees it
DECODED_BYTES = 3 * SIDE * SIDE


class Pieces(Dataset[Any]):
    """The PNG files: decoded, resized, labelled. Counts what it reads, in all worker processes together."""

    def __init__(self, folder: Path) -> None:
        self.files = sorted(folder.glob("*.png"))
        self.decoded = multiprocessing.Value("q", 0)
        self.bytes = multiprocessing.Value("q", 0)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        file = self.files[i]
        with Image.open(file) as image:
            small = image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.LANCZOS)
        with self.decoded.get_lock(), self.bytes.get_lock():
            self.decoded.value += 1
            self.bytes.value += file.stat().st_size
        return torch.from_numpy(np.array(small)).permute(2, 0, 1).contiguous(), int(file.stem[-1])


def mirrored(item: tuple[torch.Tensor, int]) -> tuple[torch.Tensor, int]:
    """Random augmentation: applied after the cache, and never stored."""
    image, label = item
    return (image.flip(2) if random.random() < 0.5 else image).float() / 255, label


def network() -> nn.Module:
    layers: list[nn.Module] = []
    for before, after in ((3, 16), (16, 32), (32, 64)):
        layers += [nn.Conv2d(before, after, 3, stride=2, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 2))


def train(pieces: Pieces, dataset: CachedDataset, epochs: int, workers: int) -> None:
    """Train, and print one line per epoch."""
    torch.set_num_threads(1)  # leaves processors to the workers
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    loader = DataLoader(dataset, batch_size=32, shuffle=True, num_workers=workers, persistent_workers=workers > 0)
    print(f"{'epoch':<7}{'decoded from PNG':>24}{'from the cache':>24}{'seconds':>10}{'waited':>8}{'loss':>8}{'right':>8}")
    for epoch in range(1, epochs + 1):
        decoded, read = -pieces.decoded.value, -pieces.bytes.value
        began = asked = time.perf_counter()
        waited = losses = right = 0.0
        for images, labels in loader:
            waited += time.perf_counter() - asked
            scores = model(images)
            loss = nn.functional.cross_entropy(scores, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses += loss.item() * len(labels)
            right += int((scores.argmax(1) == labels).sum())
            asked = time.perf_counter()
        decoded, read = decoded + pieces.decoded.value, read + pieces.bytes.value
        kept = len(dataset) - decoded
        source = f"{decoded:>12,}{read / 1e6:>9.1f} MB{kept:>12,}{kept * DECODED_BYTES / 1e6:>9.1f} MB"
        speed = f"{time.perf_counter() - began:>10.1f}{waited:>8.1f}"
        print(f"{epoch:<7}{source}{speed}{losses / len(dataset):>8.3f}{right / len(dataset):>8.0%}", flush=True)


def cut_photographs(folder: Path, count: int) -> None:
    """Store ``count`` pieces as PNG files, all or none: the folder gets its name when it is complete."""
    from sklearn.datasets import load_sample_images

    folder.parent.mkdir(parents=True, exist_ok=True)
    position = random.Random(0)
    with tempfile.TemporaryDirectory(dir=folder.parent) as unfinished:
        whole = Path(unfinished) / "whole"
        whole.mkdir()
        photographs = load_sample_images().images
        for n in range(count):
            label = n % len(photographs)
            height, width, _ = photographs[label].shape
            top, left = position.randrange(height - CUT), position.randrange(width - CUT)
            piece = photographs[label][top : top + CUT, left : left + CUT]
            Image.fromarray(piece).save(whole / f"{n:06d}-{label}.png", compress_level=1)
        if not folder.exists():  # another process may have been faster
            whole.rename(folder)


def parsed(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = Path(tempfile.gettempdir()) / f"forebay-example-{os.getuid()}"
    parser.add_argument("--workers", type=int, default=2, help="worker processes of the loader (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--images", type=int, default=1200, help="number of pieces to cut (default: %(default)s)")
    parser.add_argument("--root", type=Path, default=default, help="directory of images and cache (default: %(default)s)")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    options = parsed(arguments)
    folder = options.root / f"images-{options.images}"
    try:
        if not folder.exists():
            print(f"cutting {options.images:,} images into {folder}", flush=True)
            cut_photographs(folder, options.images)
        pieces = Pieces(folder)
        with forebay.Cache(options.root / "cache", budget="1GiB") as cache:
            fingerprint = f"{options.images} pieces of {CUT} as {SIDE} pixels"
            samples = cache.samples("pieces", len(pieces), codec="pickle", fingerprint=fingerprint)
            train(pieces, CachedDataset(pieces, samples, mirrored), options.epochs, options.workers)
        if pieces.decoded.value:
            print("Run it again: now everything comes from the cache.")
    except KeyboardInterrupt:
        print("stopped; what was decoded stays in the cache", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
