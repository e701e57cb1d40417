"""A listing that another process put into a root names only files below its directory, whatever it says."""

from __future__ import annotations

import functools
import json
import os
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import forebay
from forebay import errors
from forebay._kernel.below import Below
from forebay._model import LISTINGS
from forebay.cache import fetcher_of
from forebay.cli.main import run
from forebay.directories.copying import copy_tree
from forebay.directories.listings import UploadMarker
from forebay.directories.manifests import File, Manifest
from forebay.testing import ScriptedServer
from tests import processes
from tests.remote_directories import MARKER, marker_of

(ATTACKER, VICTIM), GROUP = processes.USERS, processes.COMMON_GROUP
FILES = {"config.json": b"{}", "weights.bin": b"w" * 5000}
SECRET, PLANTED = b"the victim's own", b"the attacker's"

as_user = functools.partial(processes.as_user, gid=GROUP)


@pytest.fixture
def home(public: Path) -> Path:
    """The victim's, with a file that only the victim can read."""
    place = public / "home"
    place.mkdir()
    (place / ".bashrc").write_bytes(SECRET)
    for path in (place, place / ".bashrc"):
        os.chown(path, VICTIM, VICTIM)
    (place / ".bashrc").chmod(0o600)
    place.chmod(0o755)
    return place


@pytest.fixture
def url(server: ScriptedServer) -> str:
    for name, body in FILES.items():
        server.put(f"/run/{name}", body)
    return server.put(f"/run/{MARKER}", marker_of(FILES)).removesuffix(MARKER)


def fill(root: Path, url: str, **options: bool) -> None:
    with forebay.Cache(root, **options) as cache, cache.directory(url):
        pass


def poison(root: Path, url: str, extra: File, **options: bool) -> None:
    """Add a file to the stored listing, and have the stored tree say that it is of that listing."""
    with forebay.Cache(root, **options) as cache:
        store = fetcher_of(cache).store
        stored = store.view(LISTINGS, url)
        listing = Manifest(tuple(sorted([*Manifest.parse(stored.view).files, extra], key=lambda file: file.name)))
        store.put(LISTINGS, url, listing.encoded, validator=listing.version, validated=store.now(exact=True))
    meta = json.dumps({"listing": listing.version, "size": listing.size})
    with closing(sqlite3.connect(root / "catalog.sqlite")) as con, con:
        con.execute("UPDATE entries SET validator = ?, meta = ? WHERE kind = 'tree'", (listing.version, meta))


def copy_by(how: str, root: Path, url: str, target: Path, **options: bool) -> dict[str, bytes]:
    """The files that the victim's copy then has."""
    if how == "pull":
        os.environ["FOREBAY_SHARED"] = "1"
        assert run(["pull", url, "--to", str(target), "-C", str(root)]) == 0
    else:
        with forebay.Cache(root, **options) as cache:
            if how == "checkpoint":
                forebay.Checkpoint(url, cache=cache).to_directory(target)
            else:
                cache.copy_directory(url, target)
    return {path.name: path.read_bytes() for path in target.iterdir()}


@pytest.mark.root
@pytest.mark.parametrize("how", ["checkpoint", "copy_directory", "pull"])
def test_a_listing_of_a_groups_root_replaces_no_file_outside_of_the_copy(
    project: Path, home: Path, url: str, children: Callable[..., Any], how: str
) -> None:
    root = project / "root"

    def attack() -> None:
        fill(root, url, shared=True)
        (root / ".bashrc").write_bytes(PLANTED)
        poison(root, url, File("../../.bashrc", len(PLANTED), '"1"', 1.0), shared=True)

    children(as_user(ATTACKER, attack, umask=0o002)).result()
    copied = children(as_user(VICTIM, lambda: copy_by(how, root, url, home / "models" / "run", shared=True))).result()
    assert (home / ".bashrc").read_bytes() == SECRET
    assert copied == FILES


@pytest.mark.root
@pytest.mark.parametrize("gain", ["replace", "read"])
def test_another_users_root_that_is_only_read_writes_and_reads_no_file_outside_of_itself(
    scratch: Path, home: Path, url: str, children: Callable[..., Any], gain: str
) -> None:
    """``read``: a link in that root leads to the victim's file, whose copy anybody could read."""
    root = scratch / "root"
    name = "../../.bashrc" if gain == "replace" else "../stolen"

    def attack() -> None:
        fill(root, url)
        (root / ".bashrc").write_bytes(PLANTED)
        (root / "trees" / "stolen").symlink_to(home / ".bashrc")
        poison(root, url, File(name, len(SECRET), '"1"', 1.0))
        for path in [root, *root.rglob("*")]:
            if not path.is_symlink():
                path.chmod(0o755 if path.is_dir() else 0o644)

    children(as_user(ATTACKER, attack)).result()
    how = {"read_only": True, "offline": True}
    copied = children(as_user(VICTIM, lambda: copy_by("checkpoint", root, url, home / "models" / "run", **how))).result()
    assert (home / ".bashrc").read_bytes() == SECRET
    assert copied == FILES
    assert not (home / "models" / "stolen").exists()


def test_without_room_a_stored_listing_names_no_file_outside_of_the_copy(tmp_path: Path, url: str) -> None:
    root, target = tmp_path / "root", tmp_path / "models" / "run"
    fill(root, url)
    poison(root, url, File("../stolen", 3, '"1"', 1.0))
    with forebay.Cache(root, budget=4096) as cache:
        cache.copy_directory(url, target)
    assert {path.name: path.read_bytes() for path in target.iterdir()} == FILES
    assert not (tmp_path / "models" / "stolen").exists()


ROWS = {
    "a name above": ["../x", 1, None, None, None],
    "an absolute name": ["/x", 1, None, None, None],
    "a name twice": ["config.json", 1, None, None, None],
    "a number for a name": [1, 1, None, None, None],
    "a text for a size": ["x", "1", None, None, None],
    "a size below zero": ["x", -1, None, None, None],
    "a size that no file has": ["x", 1 << 70, None, None, None],
    "a number for a version": ["x", 1, 2, None, None],
    "a time that is none": ["x", 1, None, float("nan"), None],
    "too many fields": ["x", 1, None, None, None, None],
}


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_a_row_that_forebay_never_wrote_has_the_listing_requested_again(tmp_path: Path, url: str, server: ScriptedServer, row: Any) -> None:
    root = tmp_path / "root"
    fill(root, url)
    with forebay.Cache(root) as cache:
        store = fetcher_of(cache).store
        rows = [*json.loads(bytes(store.view(LISTINGS, url).view)), row]
        store.put(LISTINGS, url, json.dumps(rows).encode(), validator="another", validated=store.now(exact=True))
    before = server.gets
    assert copy_by("copy_directory", root, url, tmp_path / "copy") == FILES
    assert server.gets == before + 1  # the listing alone


@pytest.mark.parametrize("name", ["../x", "/x", "a//b", ".", "a\nb", "config.json/x"])
def test_a_marker_names_files_below_its_directory_only(name: str) -> None:
    with pytest.raises(errors.BadListing, match="no file below a directory can be called"):
        UploadMarker.parse("s3://bucket/run/.forebay.json", marker_of({**FILES, name: b""}))


def test_a_link_in_a_tree_is_not_followed_by_a_copy(tmp_path: Path) -> None:
    """Put there after the tree was checked: by then only the copy itself can see it."""
    top, secret = tmp_path / "trees", tmp_path / "secret"
    (top / "1").mkdir(parents=True)
    secret.write_bytes(SECRET)
    (top / "1" / "a").symlink_to(secret)
    with pytest.raises(OSError, match="symbolic links"):
        copy_tree(top / "1", Manifest((File("a", len(SECRET), '"1"', 1.0),)), tmp_path / "copy", within=Below(top))
    assert not (tmp_path / "copy").exists()
