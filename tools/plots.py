"""Plots and tables of the documentation, made from what benchmarks have measured.

    python tools/plots.py       writes docs/pictures/*.svg, and fills the marked places of the pages

docs/pictures/NAME.json is what `python benchmarks/NAME.py --json` wrote. A place in a page is what stands between
`<!-- NAME: PART -->` and `<!-- end -->`; without the measurement it says so. Links in it are relative to docs/. `table` and `plot` are
parts of every measurement; epochs has more. A test compares the pages with what this script makes.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PICTURES = DOCS / "pictures"
PAGES = (ROOT / "README.md", DOCS / "index.md", DOCS / "performance.md", DOCS / "use" / "train.md")

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
    "far": "Objects 100 ms away, 50 ms of work a batch",
}


BENCHMARKS = ("touch", "tasks", "samples", "engine", "prefetch", "remote", "blocks", "checkpoint", "claims", "start", "with_fsspec")
"""Those whose lines are plotted as ratios."""


def measurement(name: str = "epochs", folder: Path = PICTURES) -> dict[str, Any] | None:
    """What a benchmark measured; None if that is still to come."""
    path = folder / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def svg_of(name: str) -> str:
    """The file name of the plot of a benchmark."""
    return "epochs.svg" if name == "epochs" else f"{name}-times.svg"


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


def contents(measured: Mapping[str, Mapping[str, Any] | None]) -> dict[tuple[str, str], str]:
    """The content of each place by the benchmark and the part, from what each benchmark measured."""
    content = {("epochs", part): text for part, text in places(measured.get("epochs")).items()}
    for name in BENCHMARKS:
        found = measured.get(name)
        content[name, "table"] = table(dict(found), list(found["rows"])) if found is not None else PENDING
        content[name, "plot"] = (
            f"![Times of peers and floors as multiples of ours](pictures/{svg_of(name)})" if found is not None else PENDING
        )
    return content


def places(measured: Mapping[str, Any] | None) -> dict[str, str]:
    """The content of each place by its name."""
    if measured is None:
        return dict.fromkeys(("headline", "table", "plot", "steps", "far", "half"), PENDING)
    rows = measured["rows"]
    versions: dict[str, str] = {}
    for lines in rows.values():
        versions |= lines[0]["facts"].get("versions", {})
    packages = ", ".join(f"{name} {version}" for name, version in versions.items())
    return {
        "headline": headline(rows["objects"]) if "objects" in rows else PENDING,
        "table": f"{table(dict(measured), list(rows))}\n\nVersions: {packages}.",
        "plot": "![Seconds for an epoch, by contestant](pictures/epochs.svg)",
        "steps": steps(rows["steps"]) if "steps" in rows else PENDING,
        "far": steps(rows["far"]) if "far" in rows else PENDING,
        "half": half(rows["half"]) if "half" in rows else PENDING,
    }


def headline(lines: Sequence[Mapping[str, Any]]) -> str:
    """The picture of `three_bars`, and its numbers."""
    plain, first, later = three(lines)
    what = lines[0]["what"].partition(", epoch")[0]
    said = f"a plain Dataset takes {plain} s each time, UrlDataset {first} s the first time and {later} s after that"
    text = f"**{plain} s** for each epoch with a plain `Dataset`; with Forebay's `UrlDataset` **{first} s** for the first epoch and "
    return f"![Seconds for an epoch: {said}](pictures/epoch.svg)\n\n{text}**{later} s** for each later one: {what}, two workers."


def three(lines: Sequence[Mapping[str, Any]]) -> tuple[str, str, str]:
    """Seconds of an epoch: a plain `Dataset`, and the first and the last one of `UrlDataset`."""
    every = contestants(lines)
    return f"{every[PLAIN].seconds[1]:.1f}", f"{every[URLS].seconds[1]:.1f}", f"{every[URLS].seconds[3]:.1f}"


def steps(lines: Sequence[Mapping[str, Any]]) -> str:
    """The steps of the how-to, each beside the one before."""
    every = contestants(lines)
    text = ["| | | epoch 1 | epoch 3 | speed-up of epoch 1 over the step before |", "|---|---|---|---|---|"]
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
    text = ["| | time of epoch 3 | hits in epoch 3 |", "|---|---|---|"]
    labels = {PLAIN: STEPS[PLAIN], THREADS: "without a cache, 16 requests at a time"} | STEPS
    for label, what in labels.items():
        share = f"{hits[label]:.0%}" if label in hits else "-"
        text += [f"| {what} | {every[label].seconds[3]:.1f} s | {share} |"] if label in every else []
    return "\n".join(text)


def filled(page: str, content: Mapping[tuple[str, str], str], docs: str = "") -> str:
    """The page with the content of its places. ``docs``: leads from the page to docs/. Raises KeyError for a place that there is not."""

    def fill(match: re.Match[str]) -> str:
        text = content[match[2], match[3]].replace("](pictures/", f"]({docs}pictures/")
        return f"{match[1]}\n{text}\n<!-- end -->"

    return re.sub(r"(<!-- (\w+): (\w+) -->).*?<!-- end -->", fill, page, flags=re.DOTALL)


def docs_from(page: Path) -> str:
    """What leads from a page to docs/: ``docs/``, nothing, or ``../``."""
    folder = page.parent
    return "docs/" if folder == ROOT else "../" * len(folder.relative_to(DOCS).parts)


# -- the plots ---------------------------------------------------------------------------------------------------------

COLORS = {OURS: "#00796b", FLOOR: "#b7791f", PEER: "#7b8794"}
MARKERS = "osD^vP*X<>hd8p"


def source(measured: Mapping[str, Any]) -> str:
    """Names the measurement; it stands in the plot, so that one of another measurement is noticed."""
    return hashlib.sha256(json.dumps(measured, sort_keys=True).encode()).hexdigest()


def three_bars(measured: Mapping[str, Any]) -> str:
    """The numbers of `headline` as bars, as SVG for a light or dark page."""
    seconds = three(measured["rows"]["objects"])
    labels = ("plain Dataset, each epoch", "UrlDataset, first epoch", "UrlDataset, later epochs")
    bars = []
    for number, (label, value) in enumerate(zip(labels, seconds, strict=True)):
        width, y = 460 * float(value) / float(seconds[0]), 12 + 34 * number
        bars += [
            f'<text x="190" y="{y + 16}" text-anchor="end">{label}</text>',
            f'<rect x="200" y="{y}" width="{width:.1f}" height="22" rx="3" class="{"ours" if number else "peer"}"/>',
            f'<text x="{208 + width:.1f}" y="{y + 16}" class="value">{value} s</text>',
        ]
    style = (
        "text { font: 14px system-ui, sans-serif; fill: #24292f } .value { font-weight: 600 } "
        f".ours {{ fill: {COLORS[OURS]} }} .peer {{ fill: {COLORS[PEER]} }} "
        "@media (prefers-color-scheme: dark) { text { fill: #e6edf3 } .ours { fill: #26a69a } }"
    )
    head = '<svg xmlns="http://www.w3.org/2000/svg" width="740" height="120" viewBox="0 0 740 120" role="img">'
    return "\n".join([head, f"<desc>{source(measured)}</desc>", f"<style>{style}</style>", *bars, "</svg>", ""])


def plot(measured: Mapping[str, Any]) -> str:
    """The rows of epochs as bars on a logarithmic scale, as SVG."""
    rows = [row for row in TITLES if row in measured["rows"]]
    heights = [1.2 + len(contestants(measured["rows"][row])) for row in rows]
    with _figure(measured, (8, 0.42 * sum(heights)), len(rows), height_ratios=heights) as (axes, content):
        for axis, row in zip(axes, rows, strict=True):
            _bars(axis, TITLES[row], contestants(measured["rows"][row]))
    return content()


def ratios(measured: Mapping[str, Any]) -> str:
    """Each line of a benchmark as the times of its peers and floors, as multiples of ours, on a logarithmic scale, as SVG."""
    lines = [line for rows in measured["rows"].values() for line in rows if len(line["timings"]) > 1]
    labels: dict[str, str] = {}
    for line in lines:
        labels |= {label: timing["kind"] for label, timing in line["timings"].items() if timing["kind"] != OURS}
    look = {
        label: {"marker": MARKERS[number % len(MARKERS)], "color": COLORS[kind], "fillstyle": "full" if number < len(MARKERS) else "none"}
        for number, (label, kind) in enumerate(sorted(labels.items(), key=lambda each: (each[1], each[0])))
    }
    with _figure(measured, (8, 1.2 + 0.3 * len(lines) + 0.2 * -(-len(look) // 3)), 1) as (axes, content):
        axis = axes[0]
        axis.axvline(1, color=COLORS[OURS], linewidth=2)
        for place, line in enumerate(reversed(lines)):
            ours = next(statistics.median(timing["wall"]) for timing in line["timings"].values() if timing["kind"] == OURS)
            for label, timing in line["timings"].items():
                if timing["kind"] != OURS and ours:
                    axis.plot(statistics.median(timing["wall"]) / ours, place, linestyle="", markersize=6, alpha=0.85, **look[label])
        _logarithmic(axis, [line["what"].replace("`", "") for line in reversed(lines)])
        axis.grid(axis="y", linewidth=0.3)
        axis.set_title("times as multiples of ours, which is the line: left of it is faster", loc="left")
        handles = [axis.plot([], [], linestyle="", label=label, **how)[0] for label, how in look.items()]
        axis.legend(
            handles=handles, loc="upper left", bbox_to_anchor=(0, -0.45 / max(len(lines) * 0.3, 1)), ncols=3, fontsize=7, frameon=False
        )
    return content()


@contextlib.contextmanager
def _figure(measured: Mapping[str, Any], size: tuple[float, float], count: int, **how: Any) -> Iterator[tuple[Any, Callable[[], str]]]:
    """``count`` plots below each other, and what gives their SVG behind the block: the same bytes whenever the same matplotlib makes it."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    made = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "epochs", "svg.fonttype": "none", "font.family": "sans-serif", "font.size": 9}):
        figure, axes = pyplot.subplots(count, 1, figsize=size, squeeze=False, **how)
        try:
            yield axes[:, 0], lambda: "".join(f"{line.rstrip()}\n" for line in made.getvalue().splitlines())
            figure.tight_layout()
            metadata = {"Date": None, "Creator": None, "Source": source(measured)}
            figure.savefig(made, format="svg", metadata=metadata, facecolor="white", bbox_inches="tight")
        finally:
            pyplot.close(figure)


def _bars(axis: Any, title: str, every: Mapping[str, Contestant]) -> None:
    labels = sorted(
        every, key=lambda label: ((OURS, FLOOR, PEER).index(every[label].kind), min(every[label].seconds.items())), reverse=True
    )
    epochs = sorted({epoch for contestant in every.values() for epoch in contestant.seconds} & {1, 3})
    for number, epoch in enumerate(epochs):
        thick = 0.8 / len(epochs)
        for place, label in enumerate(labels):
            value = every[label].seconds[epoch]
            at = place + 0.4 - (number + 0.5) * thick
            axis.barh(at, value, thick, color=COLORS[every[label].kind], alpha=0.5 if number else 1)
            axis.text(value, at, f" {value:.2g} s" if value < 10 else f" {value:.0f} s", va="center", fontsize=7)
    _logarithmic(axis, labels)
    axis.set_title(f"{title}: seconds for epoch {' (dark) and '.join(map(str, epochs))}{' (light)' if len(epochs) > 1 else ''}", loc="left")
    axis.margins(x=0.12)


def _logarithmic(axis: Any, labels: Sequence[str]) -> None:
    axis.set_xscale("log")
    axis.xaxis.set_major_formatter("{x:g}")
    axis.xaxis.set_minor_formatter("")
    axis.set_yticks(range(len(labels)), labels)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def main() -> int:
    measured = {name: measurement(name) for name in ("epochs", *BENCHMARKS)}
    content = contents(measured)
    for page in PAGES:
        page.write_text(filled(page.read_text(), content, docs_from(page)))
    for name, found in measured.items():
        if found is None:
            print(f"no {PICTURES / name}.json: python benchmarks/{name}.py --json > docs/pictures/{name}.json")
        else:
            (PICTURES / svg_of(name)).write_text(plot(found) if name == "epochs" else ratios(found))
    if measured["epochs"] is not None:
        (PICTURES / "epoch.svg").write_text(three_bars(measured["epochs"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
