"""Streaming imports torchvision for its image datasets, litData for videos; one that was built for another torch does not load."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path


def import_or_stand_in() -> None:
    """Import torchvision; where it does not load, put a stand-in for it into the path."""
    try:
        importlib.import_module("torchvision")
    except (ImportError, RuntimeError):
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        sys.path.insert(0, str(Path(__file__).parents[1] / "tools" / "stand_ins"))
