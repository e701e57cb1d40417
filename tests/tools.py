"""The scripts of tools/ as modules."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

TOOLS = Path(__file__).parents[1] / "tools"


@contextlib.contextmanager
def tool(name: str) -> Iterator[ModuleType]:
    """A script as a module, until the end of the block: its dataclasses look it up by name. What it adds to ``sys.path`` goes, too."""
    spec = importlib.util.spec_from_file_location(name, TOOLS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    before, sys.modules[name] = list(sys.path), importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(sys.modules[name])
        yield sys.modules[name]
    finally:
        sys.path[:] = before
        del sys.modules[name]
