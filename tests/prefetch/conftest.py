"""Roots of these tests lie in memory, where there is one: a root has hundreds of directories, and each test makes one of its own."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def tmp_path(tmp_path: Path) -> Iterator[Path]:
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="forebay-test-", dir="/dev/shm") as name:
        yield Path(name)
