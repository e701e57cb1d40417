"""The mutants fit the code: `make mutants` runs them."""

from __future__ import annotations

import importlib.util
from pathlib import Path


def test_each_old_text_occurs_once_and_each_invariant_has_a_mutant() -> None:
    path = Path(__file__).parents[2] / "tools/mutants.py"
    spec = importlib.util.spec_from_file_location("mutants", path)
    assert spec is not None
    assert spec.loader is not None
    mutants = importlib.util.module_from_spec(spec)
    import sys

    sys.modules["mutants"] = mutants  # dataclasses look their module up
    try:
        spec.loader.exec_module(mutants)
        assert mutants.misfits() == []
        assert len({mutant.name for mutant in mutants.MUTANTS}) == len(mutants.MUTANTS)
        page = path.parents[1] / "docs" / "reference" / "invariants.md"
        assert page.read_text() == mutants.invariants_page(page), "run `python tools/mutants.py --page`"
    finally:
        del sys.modules["mutants"]
