"""The pictures of the design page are what their script makes of the texts in this repository."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests import tools

REPO = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tool() -> Iterator[ModuleType]:
    with tools.tool("pictures") as module:
        yield module


@pytest.mark.parametrize("name", ["rooms.svg", "engine.svg", "read.svg"])
def test_a_picture_is_what_the_script_makes_now(tool: ModuleType, name: str) -> None:
    assert (REPO / "docs" / "pictures" / name).read_text() == tool.pictures()[name], "run `python tools/pictures.py`"


def test_the_pictures_are_well_formed_and_no_other_lies_there(tool: ModuleType) -> None:
    plots = {"epochs.svg", "epoch.svg", "terminals.svg"}  # of tools/plots.py and tools/recording.py
    assert {path.name for path in (REPO / "docs" / "pictures").glob("*.svg")} - plots == set(tool.pictures())
    for content in tool.pictures().values():
        assert ElementTree.fromstring(content).tag == "{http://www.w3.org/2000/svg}svg"


def test_each_room_stands_above_all_rooms_that_it_may_import(tool: ModuleType) -> None:
    for below in (tool.top_rooms(), tool.engine_rooms()):
        floors = tool.heights(below)
        assert all(floors[room] > floors[low] for room in below for low in below[room])


def test_each_room_below_src_is_described(tool: ModuleType) -> None:
    folder = REPO / "src" / "forebay"
    files = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    packages = {path.parent.name for path in folder.glob("*/__init__.py")}
    assert set(tool.descriptions()) == set(tool.top_rooms()) == files | packages
