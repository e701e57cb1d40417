"""What tests of adapters share."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.adapters.ray_cluster import Nodes


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    """A real Ray cluster of two nodes."""
    from tests.adapters.ray_cluster import running  # loads Ray

    with running() as found:
        yield found


STAND_INS = str(Path(__file__).parents[2] / "tools" / "stand_ins")


def load_streaming() -> ModuleType:
    """Streaming, which loads torchvision: where that does not load, with a stand-in for it, here and in the processes started from here."""
    pytest.importorskip("torch")
    try:
        importlib.import_module("torchvision")
    except (ImportError, RuntimeError):
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        sys.path.insert(0, STAND_INS)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [STAND_INS, os.environ.get("PYTHONPATH")]))
    return pytest.importorskip("streaming")
