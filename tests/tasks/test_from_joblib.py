"""The page on joblib.Memory: its two programs run, one after the other, in one directory."""

from __future__ import annotations

import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import forebay

joblib = pytest.importorskip("joblib")
np = pytest.importorskip("numpy")
PAGE = Path(__file__).parents[2] / "docs/use/tasks.md"


def test_both_programs_run_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    section = PAGE.read_text().partition("## From joblib.Memory")[2].partition("\n## ")[0]
    before, after = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    runs: list[int] = []
    opened: list[forebay.Cache] = []

    def solve(n: int) -> Any:
        runs.append(n)
        return np.arange(n)

    def cache(path: str) -> forebay.Cache:
        opened.append(forebay.Cache(path))
        return opened[-1]

    for program in (before, after, after):
        names: dict[str, Any] = {"joblib": joblib, "forebay": SimpleNamespace(Cache=cache), "solve": solve}
        exec(program, names)
        for _ in range(2):
            assert names["solve"](3).tolist() == [0, 1, 2]
        while opened:
            opened.pop().close()
    assert runs == [3, 3]  # joblib's, and ours
    assert sorted(os.listdir()) == ["cache", "forebay-cache"]
    with pytest.raises(forebay.errors.RootRefused, match="joblib"):
        forebay.Cache("cache")
