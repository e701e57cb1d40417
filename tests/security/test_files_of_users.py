"""Files that Forebay writes for its user, in directories to which others may write."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import forebay
from forebay import errors
from forebay.cli import listing
from forebay.cli.main import run
from forebay.directories import copying
from tests.directories.test_copying import BODIES, listed, write
from tests.processes import USERS

OWN = b"the victim's own"


@pytest.mark.parametrize("verb", ["report", "stats"])
def test_a_link_under_a_name_that_can_be_guessed_is_not_followed(tmp_path: Path, children: Callable[..., Any], verb: str) -> None:
    root, own, place = tmp_path / "root", tmp_path / "own", tmp_path / "place"
    own.write_bytes(OWN)
    place.mkdir()
    with forebay.Cache(root) as cache:
        cache.put("key", b"value")
    name = "page.html" if verb == "report" else listing.file_name(root)
    option = ["--html", str(place / name)] if verb == "report" else ["--textfile", str(place)]

    def write() -> int:
        pid, thread = os.getpid(), threading.get_ident()
        for guess in (f".{name}.{pid}.part", f"{name}.{pid}.{thread}", f".{name}.forebay-part"):
            (place / guess).symlink_to(own)
        return run([verb, "-C", str(root), *option])

    assert children(write).result() == 0
    assert own.read_bytes() == OWN
    assert (place / name).stat().st_size > 1000
    assert not (place / name).is_symlink()


@pytest.mark.root
def test_a_copy_is_not_made_in_a_directory_that_another_user_put_in_its_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name of an unfinished copy can be guessed. The copy finds another user's directory there / removes it / the other user is
    faster than the copy, and creates it again."""
    source, target = write(tmp_path / "source", BODIES), tmp_path / "copy"
    theirs = tmp_path / ".copy.forebay-part"
    remove = copying.Below.remove_whole
    theirs.mkdir()
    os.chown(theirs, USERS[0], USERS[0])

    def remove_and_lose(files: copying.Below, path: Path) -> bool:
        removed = remove(files, path)
        if path == theirs:
            theirs.mkdir()
            os.chown(theirs, USERS[0], USERS[0])
        return removed

    monkeypatch.setattr(copying.Below, "remove_whole", remove_and_lose)
    with pytest.raises(errors.Foreign, match="belongs to another user"):
        copying.copy_tree(source, listed(), target)
    assert not target.exists()
    assert list(theirs.iterdir()) == []
