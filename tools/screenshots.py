"""Pictures of `forebay report` for the documentation: an invented cache with an invented day, as a headless Chromium shows it.

`make screenshots` writes docs/pictures/report-light.png and report-dark.png."""

from __future__ import annotations

import math
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from forebay._engine.activity import Failure, Fetch, Now
from forebay.claims import ClaimInfo
from forebay.cli.report.content import Content
from forebay.cli.report.page import page
from forebay.cli.report.treemap import Cell
from forebay.reports import HistoryPoint, Stats

PICTURES = Path(__file__).parents[1] / "docs" / "pictures"
GB = 10**9
MIDNIGHT = 1_790_000_000.0 // 86_400 * 86_400


def points(count: int, seconds: float) -> list[HistoryPoint]:
    """Two epochs of a training job that fill the cache, and later ones that read from it."""
    rng, result = random.Random(1), []
    for number in range(count):
        warm = 1 - math.exp(-number / count * 5)
        calls = int(900 * seconds * (0.8 + 0.2 * rng.random())) if number % (count // 5) > 3 else 0
        hits = int(calls * warm)
        result.append(HistoryPoint(
            MIDNIGHT + number * seconds, MIDNIGHT + (number + 1) * seconds, hits=hits, misses=calls - hits, fills=calls - hits,
            evictions=int((calls - hits) * 0.4 * warm), bytes_hit=hits * 110_000, bytes_remote=(calls - hits) * 110_000,
            wait_ns_remote=(calls - hits) * 20_000_000, wait_ns_lock=(calls - hits) * 4_000_000,
        ))  # fmt: skip
    return result


def content() -> Content:
    """What the pictures show."""
    prefixes = {
        "urls": [
            Cell("s3://corpus/imagenet/train/", 148 * GB, 1_281_167), Cell("s3://corpus/laion/shards-00/", 96 * GB, 960),
            Cell("s3://corpus/laion/shards-01/", 61 * GB, 610), Cell("https://weights.example/llama/70b/", 39 * GB, 30),
            Cell("s3://corpus/imagenet/val/", 7 * GB, 50_000), Cell("https://weights.example/vit/", 4 * GB, 12),
        ],
        "features": [Cell("clip-b32/", 44 * GB, 9), Cell("clip-l14/", 21 * GB, 4)],
        "experiments": [Cell("ablation/", 17 * GB, 1_412), Cell("sweep/", 9 * GB, 388)],
    }  # fmt: skip
    spaces = {name: (sum(c.entries for c in cells), sum(c.bytes for c in cells)) for name, cells in prefixes.items()}
    stats = Stats(
        hits=61_400_000, misses=3_900_000, fills=3_900_000, evictions=412_000, bytes_hit=6_754_000 * 10**6, bytes_remote=429_000 * 10**6,
        bytes_used=sum(size for _, size in spaces.values()), bytes_reserved=6 * GB, budget=500 * GB,
        entries=sum(count for count, _ in spaces.values()), spaces=spaces,
    )  # fmt: skip
    time = MIDNIGHT + 86_400
    fetches = (
        Fetch("urls", "s3://corpus/laion/shards-01/00611.tar", "process 24562 on node7 (train.py)", 61 * 10**6, 104 * 10**6, time - 2),
        Fetch("urls", "s3://corpus/laion/shards-01/00612.tar", "process 24563 on node7 (train.py)", 12 * 10**6, 101 * 10**6, time - 1),
    )
    failures = (Failure("urls", "https://weights.example/vit/h14.bin", time - 5000, "the remote answers 404 Not Found"),)
    claims = [ClaimInfo(0, "SLURM 4711.0", "", "anna", 1000, (24562, 24563), 24562, time - 9000, 9000, ("/scratch/train",), (None,), False,
                        67_100_000, True, "train.py")]  # fmt: skip
    return Content(
        "/scratch/forebay", "node7", "0.1.0", time, stats, {"log": 9 * 10**6, "slots": 52 * 10**6, "directories": 2 * 10**6}, prefixes,
        points(1440, 60), points(24 * 14, 3600), Now(fetches, (), 40, failures), claims,
    )  # fmt: skip


def main() -> None:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        sys.exit("chromium is not installed: make deps")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "report.html"
        file.write_text(page(content()))
        for name, width, options in (("light", 1000, []), ("dark", 390, ["--blink-settings=preferredColorScheme=0"])):
            command = [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={folder}/profile"]
            picture = PICTURES / f"report-{name}.png"
            subprocess.run(
                [*command, *options, f"--window-size={width},1240", f"--screenshot={picture}", file.as_uri()],
                check=True, capture_output=True, timeout=120, env={"TZ": "UTC", "HOME": folder, "PATH": "/usr/bin:/bin"},
            )  # fmt: skip
            print(picture)


if __name__ == "__main__":
    main()
