"""Plots and tables of the documentation, made from what benchmarks have measured.

    python tools/plots.py       writes docs/pictures/*.svg, and fills the marked places of the pages

docs/pictures/epochs.json is what `python benchmarks/epochs.py --json` wrote. A place in a page is what stands between
`<!-- epochs: NAME -->` and `<!-- end -->`; without the measurement it says so. A test compares the pages with what this script makes.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PICTURES = DOCS / "pictures"
PAGES = ("performance.md", "how-to/train.md")

sys.path.insert(0, str(ROOT / "benchmarks"))
from _common import FLOOR, OURS, PEER, table  # noqa: E402
from _epochs_peers import LOOKAHEAD, PLAIN, RAM, READ, THREADS, URLS  # noqa: E402

PENDING = "*Not measured yet.*"
STEPS = {PLAIN: "a plain `Dataset`", READ: "`cache.read` in it", URLS: "`UrlDataset`", LOOKAHEAD: "`UrlDataset` and `Lookahead`"}
TITLES = {
    "objects": "Objects, room for all of them",
    "shards": "Tar shards, room for all of them",
    "half": "Objects, room for half of them",
    "steps": "Objects, 50 ms of work a batch",
}


def measurement(folder: Path = PICTURES) -> dict[str, Any] | None:
    """What epochs.py measured; None if that is still to come."""
    path = folder / "epochs.json"
    return json.loads(path.read_text()) if path.exists() else None


class Contestant(NamedTuple):
    """``seconds``: the median of each epoch by its number."""

    kind: str
    seconds: dict[int, float]


def contestants(lines: Iterable[Mapping[str, Any]]) -> dict[str, Contestant]:
    """All that stand in the lines of a row."""
    every: dict[str, Contestant] = {}
    for line in lines:
        for label, timing in line["timings"].items():
            contestant = every.setdefault(label, Contestant(timing["kind"], {}))
            contestant.seconds[line["facts"]["epoch"]] = statistics.median(timing["wall"])
    return every


# -- the places of the pages -------------------------------------------------------------------------------------------


def places(measured: Mapping[str, Any] | None) -> dict[str, str]:
    """The content of each place by its name."""
    if measured is None:
        return dict.fromkeys(("table", "plot", "steps", "half"), PENDING)
    rows = measured["rows"]
    versions: dict[str, str] = {}
    for lines in rows.values():
        versions |= lines[0]["facts"].get("versions", {})
    packages = ", ".join(f"{name} {version}" for name, version in versions.items())
    return {
        "table": f"{table(dict(measured), list(rows))}\n\nVersions: {packages}.",
        "plot": "![Seconds for an epoch, by contestant](pictures/epochs.svg)",
        "steps": steps(rows["steps"]) if "steps" in rows else PENDING,
        "half": half(rows["half"]) if "half" in rows else PENDING,
    }


def steps(lines: Sequence[Mapping[str, Any]]) -> str:
    """The steps of the how-to, each beside the one before."""
    every = contestants(lines)
    text = ["| | | epoch 1 | epoch 3 | epoch 1 is faster than in the step before |", "|---|---|---|---|---|"]
    before = None
    for number, (label, what) in enumerate(STEPS.items(), 1):
        if label not in every:
            continue  # it failed
        first, last = every[label].seconds[1], every[label].seconds[3]
        gain = f"{before / first:.1f}x" if before else ""
        text.append(f"| {number} | {what} | {first:.1f} s | {last:.1f} s | {gain} |")
        before = first
    first, last = every[RAM].seconds[1], every[RAM].seconds[3]
    return "\n".join([*text, f"| | everything in RAM | {first:.1f} s | {last:.1f} s | |"])


def half(lines: Sequence[Mapping[str, Any]]) -> str:
    """Epoch 3 with room for half of the data."""
    every = contestants(lines)
    hits = {line["facts"]["ours"]: line["facts"]["hits"][-1] for line in lines}
    text = ["| | epoch 3 | of the objects from the cache |", "|---|---|---|"]
    labels = {PLAIN: STEPS[PLAIN], THREADS: "without a cache, 16 requests at a time"} | STEPS
    for label, what in labels.items():
        share = f"{hits[label]:.0%}" if label in hits else "-"
        text += [f"| {what} | {every[label].seconds[3]:.1f} s | {share} |"] if label in every else []
    return "\n".join(text)


def filled(page: str, content: Mapping[str, str]) -> str:
    """The page with the content of its places. Raises KeyError for a place that there is not."""

    def fill(match: re.Match[str]) -> str:
        return f"{match[1]}\n{content[match[2]]}\n<!-- end -->"

    return re.sub(r"(<!-- epochs: (\w+) -->).*?<!-- end -->", fill, page, flags=re.DOTALL)


# -- the plot ----------------------------------------------------------------------------------------------------------


def source(measured: Mapping[str, Any]) -> str:
    """Names the measurement; it stands in the plot, so that one of another measurement is noticed."""
    return hashlib.sha256(json.dumps(measured, sort_keys=True).encode()).hexdigest()


def plot(measured: Mapping[str, Any]) -> str:
    """The rows as bars on a logarithmic scale, as SVG: the same bytes whenever it is made by the same matplotlib."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    rows = [row for row in TITLES if row in measured["rows"]]
    settings = {"svg.hashsalt": "epochs", "svg.fonttype": "none", "font.family": "sans-serif", "font.size": 9}
    with matplotlib.rc_context(settings):
        heights = [1.2 + len(contestants(measured["rows"][row])) for row in rows]
        figure, axes = pyplot.subplots(len(rows), 1, figsize=(8, 0.42 * sum(heights)), height_ratios=heights, squeeze=False)
        for axis, row in zip(axes[:, 0], rows, strict=True):
            _bars(axis, TITLES[row], contestants(measured["rows"][row]))
        figure.tight_layout()
        content = io.StringIO()
        figure.savefig(content, format="svg", metadata={"Date": None, "Creator": None, "Source": source(measured)}, facecolor="white")
        pyplot.close(figure)
    return "".join(f"{line.rstrip()}\n" for line in content.getvalue().splitlines())


def _bars(axis: Any, title: str, every: Mapping[str, Contestant]) -> None:
    color = {OURS: "#00796b", FLOOR: "#b7791f"}
    labels = sorted(
        every, key=lambda label: ((OURS, FLOOR, PEER).index(every[label].kind), min(every[label].seconds.items())), reverse=True
    )
    epochs = sorted({epoch for contestant in every.values() for epoch in contestant.seconds} & {1, 3})
    for number, epoch in enumerate(epochs):
        thick = 0.8 / len(epochs)
        for place, label in enumerate(labels):
            value = every[label].seconds[epoch]
            at = place + 0.4 - (number + 0.5) * thick
            axis.barh(at, value, thick, color=color.get(every[label].kind, "#7b8794"), alpha=0.5 if number else 1)
            axis.text(value, at, f" {value:.2g} s" if value < 10 else f" {value:.0f} s", va="center", fontsize=7)
    axis.set_xscale("log")
    axis.xaxis.set_major_formatter("{x:g}")
    axis.xaxis.set_minor_formatter("")
    axis.set_yticks(range(len(labels)), labels)
    axis.set_title(f"{title}: seconds for epoch {' (dark) and '.join(map(str, epochs))}{' (light)' if len(epochs) > 1 else ''}", loc="left")
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    axis.margins(x=0.12)


def main() -> int:
    measured = measurement()
    content = places(measured)
    for page in (DOCS / name for name in PAGES):
        page.write_text(filled(page.read_text(), content))
    if measured is None:
        print(f"no {PICTURES / 'epochs.json'}: python benchmarks/epochs.py --json > docs/pictures/epochs.json")
    else:
        (PICTURES / "epochs.svg").write_text(plot(measured))
    return 0


if __name__ == "__main__":
    sys.exit(main())
