"""Somebody deletes the root while it is open: directories are served as objects are."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import forebay
from forebay import Checkpoint
from tests.harness import MiB
from tests.processes import in_child
from tests.remote_directories import CKPT, FILES, Remote, files_of


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("how", ["directory", "copy"])
def test_somebody_deletes_the_root(tmp_path: Path, remote: Remote, used: bool, how: str) -> None:
    def use() -> dict[str, bytes]:
        cache = forebay.Cache(tmp_path / "root", budget=64 * MiB, min_free=0)
        if used:
            cache.directory(CKPT, **remote.how).close()
        shutil.rmtree(tmp_path / "root", ignore_errors=True)
        found = Checkpoint(CKPT, cache=cache, **remote.how)
        if how == "copy":
            return files_of(found.to_directory(tmp_path / "copy"))
        with found.as_directory() as path:
            return files_of(path)

    assert in_child(use) == FILES
