"""A small flow: features of 1,797 written digits, a grid of models over them, a report. Run it twice.

    python examples/flow.py      # 3 features, 12 models and a report are computed, by two processes
    python examples/flow.py      # the same again: nothing is computed, scikit-learn is not even imported
    python examples/flow.py --costs 0.1 1 10 100 1000   # only what is new is computed

Run it in two terminals at once: they share the work. Ctrl-C ends it and loses no finished result.
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
HERE = Path(os.environ.get("FLOW_ROOT", DEFAULT))  # the processes of the pool run this line too
tasks = forebay.Cache(HERE, budget="200MB").tasks("flow")


# -- the flow ----------------------------------------------------------------------------------------------------------


@tasks.cached(tag="digits")
def digits() -> tuple[Any, Any]:
    """Images and labels. They are read back as views of the mapping, whichever process stored them."""
    from sklearn.datasets import load_digits

    dataset = load_digits()
    return dataset.images / 16, dataset.target


@tasks.cached(tag="features-{kind}")  # a changed function runs again: outputs of older code are not used
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
    right: float  # share of correctly classified digits, in five folds
    spread: float


@tasks.cached  # without a tag the arguments are the tag
def score(kind: str, cost: float) -> Score:
    """Train and test a support vector machine five times."""
    from sklearn.model_selection import cross_val_score
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler
    from sklearn.svm import SVC

    scores = cross_val_score(make_pipeline(StandardScaler(), SVC(C=cost)), features(kind), digits()[1], cv=5)
    return Score(float(scores.mean()), float(scores.std()))


@tasks.cached(tag="confused-{kind}-{cost}")
def confused(kind: str, cost: float) -> list[tuple[int, int, int]]:
    """The most frequent errors: the digit, what it was classified as, how many times."""
    from sklearn.model_selection import cross_val_predict
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler
    from sklearn.svm import SVC

    truth = digits()[1]
    predicted = cross_val_predict(make_pipeline(StandardScaler(), SVC(C=cost)), features(kind), truth, cv=5)
    pairs, counts = np.unique(np.stack([truth, predicted])[:, truth != predicted], axis=1, return_counts=True)
    return [(int(pairs[0, i]), int(pairs[1, i]), int(counts[i])) for i in np.argsort(-counts, kind="stable")[:3]]


# -- the report -------------------------------------------------------------------------------------------------------


class Call(NamedTuple):
    value: Any
    seconds: float
    ran: int  # calls that the process computed for it, nested ones included
    by: int


def timed(function: Any, *arguments: Any) -> Call:
    """Call a function of the flow, and report whether it was computed."""
    began, runs = time.perf_counter(), tasks.stats().runs
    value = function(*arguments)
    return Call(value, time.perf_counter() - began, tasks.stats().runs - runs, os.getpid())


def line(what: str, call: Call, result: str) -> int:
    source = f"computed by process {call.by}" if call.ran else "from the cache"
    print(f"{what:<22}{source:<30}{call.seconds:>8.3f} s   {result}", flush=True)
    return call.ran


def flow(kinds: list[str], costs: list[float], jobs: int) -> int:
    """Print a line for each part; return the number of computed calls."""
    grid, values, ran = list(itertools.product(kinds, costs)), {}, 0
    with ProcessPoolExecutor(jobs) as pool:
        scores = [pool.submit(timed, score, *point) for point in grid]  # if two need the same features, one computes them
        for point, future in zip(grid, scores, strict=True):
            one = future.result()
            values[point] = one.value
            ran += line(f"{point[0]}, cost {point[1]:g}", one, f"{one.value.right:.2%} right, +- {one.value.spread:.2%}")
    best = max(values, key=lambda point: values[point].right)
    report = timed(confused, *best)
    ran += line("report on the best", report, ", ".join(f"{a} classified as {b} {n} times" for a, b, n in report.value))
    print(f"best: {best[0]}, cost {best[1]:g}")
    return ran


def parsed(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", default=["pixels", "spectrum", "gradients"], help="features to try (default: all)")
    parser.add_argument("--costs", nargs="+", type=float, default=[0.1, 1, 10, 100], help="the grid (default: 0.1 1 10 100)")
    parser.add_argument("--jobs", type=int, default=2, help="processes (default: %(default)s)")
    parser.epilog = f"The cache is in {HERE}; FLOW_ROOT sets another directory."
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
