"""What the documentation shows of measurements is what its script makes of them."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests import tools

pytestmark = pytest.mark.rotates

REPO = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tool() -> Iterator[ModuleType]:
    with tools.tool("plots") as module:
        yield module


def line(ours: str, epoch: int, *, hits: list[float] | None = None, **seconds: float) -> dict[str, Any]:
    """A line of a measurement: ``seconds`` of each contestant."""
    from _common import OURS, PEER

    timings = {
        label: {"kind": OURS if label == ours else PEER, "wall": [value, 9 * value, value / 9], "cpu": []}
        for label, value in seconds.items()
    }
    facts = {"epoch": epoch, "ours": ours, "versions": {"torch": "2.13.0"}} | ({"hits": hits} if hits else {})
    return {"what": f"{ours}, {epoch}", "must": "<= 1 s", "timings": timings, "met": True, "note": "", "unit": "s", "facts": facts}


def measured(tool: ModuleType) -> dict[str, Any]:
    every = {tool.PLAIN: 22.0, tool.READ: 20.0, tool.URLS: 4.0, tool.LOOKAHEAD: 3.5, tool.RAM: 3.2}
    first, last = line(tool.READ, 1, **every), line(tool.READ, 3, **dict.fromkeys(every, 3.3))
    half = line(tool.URLS, 3, hits=[0.0, 0.4, 0.47], **{tool.URLS: 1.5, tool.THREADS: 3.0})
    return {"machine": "a machine", "rows": {"steps": [first, last], "half": [half]}}


def test_each_step_is_beside_the_one_before(tool: ModuleType) -> None:
    rows = tool.places(measured(tool))["steps"].splitlines()[2:]
    assert [[cell.strip() for cell in row.split("|")[3:-1]] for row in rows] == [
        ["22.0 s", "3.3 s", ""],
        ["20.0 s", "3.3 s", "1.1x"],
        ["4.0 s", "3.3 s", "5.0x"],
        ["3.5 s", "3.3 s", "1.1x"],
        ["3.2 s", "3.3 s", ""],
    ]


def test_hits_with_half_a_budget_are_those_of_the_last_epoch(tool: ModuleType) -> None:
    assert tool.places(measured(tool))["half"].splitlines()[2:] == [
        "| without a cache, 16 requests at a time | 3.0 s | - |",
        "| `UrlDataset` | 1.5 s | 47% |",
    ]


def test_the_table_has_each_line_and_the_versions(tool: ModuleType) -> None:
    table = tool.places(measured(tool))["table"]
    assert table.startswith("a machine\n\n| measured |")
    assert table.count("| <= 1 s |") == 3
    assert table.endswith("Versions: torch 2.13.0.")


def test_only_the_content_of_places_changes(tool: ModuleType) -> None:
    page = "a\n<!-- epochs: half -->\nold\n<!-- end -->\nb\n<!-- epochs: steps --><!-- end -->\n"
    content = {("epochs", "half"): "1\n2", ("epochs", "steps"): "3"}
    filled = tool.filled(page, content)
    assert filled == "a\n<!-- epochs: half -->\n1\n2\n<!-- end -->\nb\n<!-- epochs: steps -->\n3\n<!-- end -->\n"
    assert tool.filled(filled, content) == filled
    with pytest.raises(KeyError):
        tool.filled("<!-- epochs: other --><!-- end -->", content)


@pytest.fixture(scope="module")
def stored(tool: ModuleType) -> dict[str, Any]:
    return {name: tool.measurement(name) for name in ("epochs", *tool.BENCHMARKS)}


def test_the_pages_show_what_was_measured(tool: ModuleType, stored: dict[str, Any]) -> None:
    content = tool.contents(stored)
    pages = {page: page.read_text() for page in tool.PAGES}
    assert all(tool.filled(text, content, tool.docs_from(page)) == text for page, text in pages.items()), "run `make plots`"
    for (name, part), text in content.items():
        assert any(f"<!-- {name}: {part} -->" in page for page in pages.values()) == (text != tool.PENDING), (name, part)


def test_the_plots_are_of_the_measurements(tool: ModuleType, stored: dict[str, Any]) -> None:
    for name, data in stored.items():
        plot = tool.PICTURES / tool.svg_of(name)
        assert data is None or tool.source(data) in plot.read_text(), "run `make plots`"
    assert (tool.PICTURES / "epoch.svg").read_text() == tool.three_bars(stored["epochs"]), "run `make plots`"
    assert {path.stem for path in tool.PICTURES.glob("*.json")} <= set(stored)


@pytest.mark.processes  # matplotlib asks fc-list for fonts when it is first loaded
@pytest.mark.parametrize("how", ["plot", "ratios"])
def test_a_plot_is_made_again_without_a_difference(tool: ModuleType, how: str) -> None:
    pytest.importorskip("matplotlib")
    data, make = measured(tool), getattr(tool, how)
    plot = make(data)
    assert ElementTree.fromstring(plot).tag == "{http://www.w3.org/2000/svg}svg"
    assert tool.source(data) in plot
    assert all(label in plot for label in (tool.PLAIN, tool.THREADS))
    assert make(data) == plot
