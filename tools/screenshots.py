"""Pictures for the documentation, as a headless Chromium shows it: `forebay report` of an invented cache, and pages of the site.

`make screenshots` writes docs/pictures/report-WIDTH-SCHEME.png and site-PAGE.png."""

from __future__ import annotations

import math
import os
import random
import shutil
import subprocess
import sys
import tempfile
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from itertools import product
from pathlib import Path
from threading import Thread

from forebay._engine.seeing import Failure, Fetch, Now
from forebay.claims import ClaimInfo
from forebay.cli.listing import Cell
from forebay.cli.report import Content, page
from forebay.reports import HistoryPoint, Stats

REPO = Path(__file__).parents[1]
PICTURES = REPO / "docs" / "pictures"
PAGES = ("index.html", "use/train.html", "reference/cache.html", "performance.html")
GB = 10**9
MIDNIGHT = 1_790_000_000.0 // 86_400 * 86_400


def points(count: int, seconds: float, end: float) -> list[HistoryPoint]:
    """Two epochs of a training job that fill the cache, and later ones that read from it."""
    rng, result, first = random.Random(1), [], end - count * seconds
    for number in range(count):
        warm = 1 - math.exp(-number / count * 5)
        calls = int(900 * seconds * (0.8 + 0.2 * rng.random())) if number % (count // 5) > 3 else 0
        hits = int(calls * warm)
        result.append(HistoryPoint(
            first + number * seconds, first + (number + 1) * seconds, hits=hits, misses=calls - hits, fills=calls - hits,
            evictions=int((calls - hits) * 0.4 * warm), bytes_hit=hits * 110_000, bytes_remote=(calls - hits) * 110_000,
            wait_ns_remote=(calls - hits) * 20_000_000, wait_ns_lock=(calls - hits) * 4_000_000,
            bytes_used=int(447 * GB * min(1.0, 1.6 * warm)), budget=500 * GB,
        ))  # fmt: skip
    return result


def content() -> Content:
    """What the pictures show."""
    prefixes = {
        "urls": [
            Cell("s3://corpus/imagenet/train/", 148 * GB, 1_281_167), Cell("s3://corpus/laion/shards-00/", 96 * GB, 960),
            Cell("s3://corpus/laion/shards-01/", 61 * GB, 610), Cell("https://weights.example/llama/70b/", 39 * GB, 30),
            Cell("s3://corpus/imagenet/val/", 7 * GB, 50_000), Cell("https://weights.example/vit/", 4 * GB, 12),
            Cell("s3://corpus/laion/metadata/", GB // 2, 41), Cell("https://weights.example/tokenizer/", GB // 25, 1),
        ],
        "features": [Cell("clip-b32/", 44 * GB, 9), Cell("clip-l14/", 21 * GB, 4)],
        "experiments": [Cell("ablation/", 17 * GB, 1_412), Cell("sweep/", 9 * GB, 388), Cell("notes/", GB // 5, 1)],
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
    failures = (Failure("urls", "https://weights.example/vit/h14.bin", time - 5000, "the server returned 404 Not Found"),)
    claims = [ClaimInfo(0, "SLURM 4711.0", "", "anna", 1000, (24562, 24563), 24562, time - 9000, 9000, ("/scratch/train",), (None,), False,
                        67_100_000, True, "train.py")]  # fmt: skip
    return Content(
        "/scratch/forebay", "node7", "0.1.0", time, stats, {"log": 9 * 10**6, "slots": 52 * 10**6, "directories": 2 * 10**6}, prefixes,
        points(1440, 60, time), points(24 * 14, 3600, time), Now(fetches, (), 40, failures), claims,
    )  # fmt: skip


def serve_site(folder: Path) -> str:
    """The URL of the site, built into a folder: from a file it would have no search."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    subprocess.run(command, check=True, cwd=REPO, timeout=600, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"})
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}"


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


def take(chromium: str, folder: Path, name: str, url: str, width: int, height: int, *options: str) -> None:
    """Write a picture of a page."""
    picture = PICTURES / f"{name}.png"
    command = [
        chromium, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={folder}/profile",
        f"--window-size={width},{height}", f"--screenshot={picture}", *options, url,
    ]  # fmt: skip
    env = {"TZ": "UTC", "HOME": str(folder), "PATH": "/usr/bin:/bin"}
    subprocess.run(command, check=True, capture_output=True, timeout=120, env=env)
    print(picture)


def main() -> None:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        sys.exit("chromium is not installed: make deps")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        report = folder / "report.html"
        report.write_text(page(content()))
        for width, (scheme, number) in product((1280, 390), (("dark", 0), ("light", 1))):
            option = f"--blink-settings=preferredColorScheme={number}"
            take(chromium, folder, f"report-{width}-{scheme}", report.as_uri(), width, 1240, option)
        site = serve_site(folder / "site")
        for path in PAGES:
            take(chromium, folder, f"site-{Path(path).stem}", f"{site}/{path}", 1280, 790)


if __name__ == "__main__":
    main()
