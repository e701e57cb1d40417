"""Scenario 13: a directory is wanted, and the disk is full."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

import forebay
from forebay import Checkpoint, errors
from tests.harness import MiB, fill_the_disk
from tests.remote_directories import CKPT, files_of
from tests.servers.counting import Shelf, content


@pytest.mark.root
def test_s13_a_full_disk(tmpfs: Callable[[str], Path], tmp_path: Path, shelf: Shelf) -> None:
    """A path is wanted and there is no room: `NoSpace`, with what is wanted, free and allowed; a copy elsewhere works all the same."""
    files = {"a": content("a", 3 * MiB), "sub/b": content("b", 3 * MiB)}
    shelf.fill(CKPT, files)
    disk = tmpfs("16M")
    with forebay.Cache(disk / "root", budget="1GB", min_free=0) as cache:
        fill_the_disk(disk)
        found = Checkpoint(CKPT, shelf.arrow(), cache=cache)
        with pytest.raises(errors.NoSpace) as caught:
            with found.as_directory():
                pass
        assert isinstance(caught.value, OSError)
        assert caught.value.errno == errno.ENOSPC
        assert caught.value.need >= 6 * MiB
        assert 0 <= caught.value.free < 6 * MiB
        assert caught.value.budget == 1_000_000_000
        assert cache.stats().bytes_reserved == 0
        assert found.to_directory(tmp_path / "copy") == str(tmp_path / "copy")
        assert files_of(tmp_path / "copy") == files
        with pytest.raises(OSError, match=r"(?i)space|room") as caught_copy:
            found.to_directory(disk / "copy")
        assert caught_copy.value.errno == errno.ENOSPC
        assert sorted(os.listdir(disk)) == ["others", "root"]  # nothing is left
        (disk / "others").unlink()
        with found.as_directory() as path:
            assert files_of(path) == files
        assert cache.check(deep=True) == []
