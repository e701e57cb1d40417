"""A small flow: features of 1,797 written digits, a grid of models over them, a report. Run it twice.

    python examples/flow.py      # 3 features, 12 models and a report are computed, by two processes
    python examples/flow.py      # the same again: nothing is computed, scikit-learn is not even imported
    python examples/flow.py --costs 0.1 1 10 100 1000   # what is new is computed, the rest is there

Run it in two terminals at once: they share the work. Ctrl-C ends it, and loses nothing that was ready.
Needs: pip install 'forebay[examples,tasks]'
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import forebay

DEFAULT = Path(tempfile.gettempdir()) / f"forebay-flow-{os.getuid()}"
HERE = Path(os.environ.get("FLOW_ROOT", DEFAULT))  # the processes of the pool come by here too
tasks = forebay.Cache(HERE, budget="200MB").tasks("flow")


# -- the flow ----------------------------------------------------------------------------------------------------------


@tasks.cached(tag="digits")
def digits() -> tuple[Any, Any]:
    """Images and labels. They are read back as views of the mapping, whichever process stored them."""
    from sklearn.datasets import load_digits

    found = load_digits()
    return found.images / 16, found.target


@tasks.cached(tag="features-{kind}")  # when the function changes it runs again: what older code stored is not used
def features(kind: str) -> Any:
    """One row for each image."""
    images, _ = digits()
    if kind == "pixels":
        return images.reshape(len(images), -1)
    if kind == "spectrum":
        return np.abs(np.fft.rfft2(images)).reshape(len(images), -1)
    down, across = np.gradient(images, axis=(1, 2))
    strength, turn = np.hypot(down, across), np.digitize(np.arctan2(down, across), np.linspace(-np.pi, np.pi, 9)[1:-1])
    cells = [strength[:, i : i + 4, j : j + 4] * (turn[:, i : i + 4, j : j + 4] == k) for i in (0, 4) for j in (0, 4) for k in range(8)]
    return np.stack([cell.sum(axis=(1, 2)) for cell in cells], axis=1)


class Score(NamedTuple):
    right: float  # share of the digits that were told right, in five folds
    spread: float


@tasks.cached  # without a tag the arguments are the tag
def score(kind: str, cost: float) -> Score:
    """Train and test a support vector machine five times."""
    from sklearn.model_selection import cross_val_score
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler
    from sklearn.svm import SVC

    found = cross_val_score(make_pipeline(StandardScaler(), SVC(C=cost)), features(kind), digits()[1], cv=5)
    return Score(float(found.mean()), float(found.std()))


@tasks.cached(tag="confused-{kind}-{cost}")
def confused(kind: str, cost: float) -> list[tuple[int, int, int]]:
    """What was taken for what most often: the digit, what it was taken for, how many times."""
    from sklearn.model_selection import cross_val_predict
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler
    from sklearn.svm import SVC

    truth = digits()[1]
    said = cross_val_predict(make_pipeline(StandardScaler(), SVC(C=cost)), features(kind), truth, cv=5)
    pairs, counts = np.unique(np.stack([truth, said])[:, truth != said], axis=1, return_counts=True)
    return [(int(pairs[0, i]), int(pairs[1, i]), int(counts[i])) for i in np.argsort(-counts, kind="stable")[:3]]


# -- how it went -------------------------------------------------------------------------------------------------------


class Told(NamedTuple):
    value: Any
    seconds: float
    ran: int  # calls that were computed for it in the process that was asked, those inside of it too
    by: int


def told(function: Any, *arguments: Any) -> Told:
    """Call a function of the flow, and tell whether it was computed."""
    began, runs = time.perf_counter(), tasks.stats().runs
    value = function(*arguments)
    return Told(value, time.perf_counter() - began, tasks.stats().runs - runs, os.getpid())


def line(what: str, found: Told, result: str) -> int:
    source = f"computed by process {found.by}" if found.ran else "from the cache"
    print(f"{what:<22}{source:<30}{found.seconds:>8.3f} s   {result}", flush=True)
    return found.ran


def flow(kinds: list[str], costs: list[float], jobs: int) -> int:
    """Print a line for each part; gives how many calls were computed."""
    grid, found, ran = list(itertools.product(kinds, costs)), {}, 0
    with ProcessPoolExecutor(jobs) as pool:
        scores = [pool.submit(told, score, *point) for point in grid]  # two that want the same features: one computes them
        for point, future in zip(grid, scores, strict=True):
            one = future.result()
            found[point] = one.value
            ran += line(f"{point[0]}, cost {point[1]:g}", one, f"{one.value.right:.2%} right, +- {one.value.spread:.2%}")
    best = max(found, key=lambda point: found[point].right)
    report = told(confused, *best)
    ran += line("report on the best", report, ", ".join(f"{a} taken for {b} {n} times" for a, b, n in report.value))
    print(f"best: {best[0]}, cost {best[1]:g}")
    return ran


def parsed(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", default=["pixels", "spectrum", "gradients"], help="features to try (default: all)")
    parser.add_argument("--costs", nargs="+", type=float, default=[0.1, 1, 10, 100], help="the grid (default: 0.1 1 10 100)")
    parser.add_argument("--jobs", type=int, default=2, help="processes (default: %(default)s)")
    parser.epilog = f"The cache lies in {HERE}; FLOW_ROOT sets another place."
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    options = parsed(arguments)
    began = time.perf_counter()
    try:
        ran = flow(options.kinds, options.costs, options.jobs)
    except KeyboardInterrupt:
        print("stopped; what was ready stays in the cache", file=sys.stderr)
        return 130
    stats = tasks.stats()
    print(f"{ran} calls computed, {time.perf_counter() - began:.2f} s; {stats.entries} values, {stats.bytes / 1e3:,.0f} KB in {HERE}")
    if ran:
        print("Run it again: now everything comes from the cache.")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
