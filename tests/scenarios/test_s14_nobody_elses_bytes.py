"""Scenario 14: nothing is deleted that Forebay did not create, and what is pinned stays."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import forebay
from forebay.testing import ScriptedServer

MiB = 1 << 20


def contents(place: Path) -> dict[str, bytes]:
    return {str(path.relative_to(place)): path.read_bytes() for path in place.rglob("*") if path.is_file()}


FOREIGN = ("data.bin", "blobs/00/readme.txt", "shared/weights.npy", "tmp/results.csv", "deep/er/file", "blobs", ".hidden")


@pytest.mark.parametrize("foreign", FOREIGN)
def test_s14_a_directory_with_foreign_files_is_refused(root: Path, foreign: str, command: Callable[..., Any]) -> None:
    (root / foreign).parent.mkdir(parents=True)
    (root / foreign).write_bytes(b"precious")
    with pytest.raises(forebay.errors.RootRefused) as caught:
        forebay.Cache(root)
    assert str(root) in str(caught.value)
    for verb in (
        []
        if foreign != "data.bin"
        else (["pull", "file:///etc/hostname"], ["clear", "--yes"], ["prune", "--yes"], ["rm", "--filter", "size>0", "--yes"])
    ):
        assert command(*verb, "--root", root).returncode != 0
    assert contents(root) == {foreign: b"precious"}


def test_s14_foreign_files_that_came_later_stay(
    root: Path, server: ScriptedServer, command: Callable[..., Any], children: Callable[..., Any]
) -> None:
    with forebay.Cache(root, budget=8 << 20) as cache:
        cache.read(server.put("/x.bin", os.urandom(100_000)))
    foreign = [f"{place}mine.txt" for place in ("", "blobs/", "blobs/00/", "trees/", "tmp/", "shared/", "locks/", "packs/")]
    for name in foreign:
        (root / name).write_bytes(b"precious")

    def work() -> None:
        with forebay.Cache(root) as cache:
            for i in range(20):
                cache.put(str(i), os.urandom(MiB))
            cache.prune().execute()
            cache.clear().execute()
            cache.repair()

    children(work).result()
    assert command("clear", "--yes", "--root", root).returncode == 0
    assert command("prune", "--yes", "--root", root).returncode == 0
    command("verify", "--repair", "--root", root)
    for name in foreign:
        assert (root / name).read_bytes() == b"precious", name
        (root / name).unlink()


def test_s14_symbolic_links_are_not_followed(root: Path, tmp_path: Path, server: ScriptedServer, children: Callable[..., Any]) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious.bin").write_bytes(b"precious")
    url = server.put("/x.bin", os.urandom(100_000))
    with forebay.Cache(root) as cache:
        cache.read(url)
        with cache.local(url) as path:
            blob = Path(path)
    # In the place of a blob, and beside it, under names that could be the cache's own.
    blob.unlink()
    blob.symlink_to(outside / "precious.bin")
    (root / "blobs" / "11" / "0000000000000011").symlink_to(outside / "precious.bin")
    (root / "trees" / "0000000000000012").symlink_to(outside)
    (root / "tmp" / "0000000000000013-0000000000000014").symlink_to(outside)

    def work() -> None:
        with forebay.Cache(root, budget=4 << 20) as cache:
            assert len(cache.read(url)) == 100_000
            for i in range(8):
                cache.put(str(i), os.urandom(MiB))
            cache.repair()
            cache.clear().execute()

    children(work).result()
    assert contents(outside) == {"precious.bin": b"precious"}


def test_s14_a_root_behind_a_link_and_a_directory_replaced_by_one(root: Path, tmp_path: Path) -> None:
    with forebay.Cache(root) as cache:
        cache.put("key", bytes(100_000))
    outside = tmp_path / "outside"
    (outside / "00").mkdir(parents=True)
    (outside / "00" / "0000000000000000").write_bytes(b"precious")
    (root / "blobs").rename(tmp_path / "moved")
    (root / "blobs").symlink_to(outside)
    with pytest.raises(forebay.errors.RootRefused, match="symbolic link"):
        forebay.Cache(root).get("key")
    (root / "blobs").unlink()
    (tmp_path / "moved").rename(root / "blobs")
    assert contents(outside) == {"00/0000000000000000": b"precious"}
    link = tmp_path / "link"
    link.symlink_to(root)
    with forebay.Cache(link) as cache:  # the place itself may be given by a link
        assert cache.get("key") == bytes(100_000)


def test_s14_a_local_source_is_never_deleted(root: Path, tmp_path: Path) -> None:
    source = tmp_path / "only-copy.bin"
    source.write_bytes(b"precious" * 1000)
    with forebay.Cache(root) as cache:
        for how in ({}, {"force": True}):
            with cache.local(source, **how) as path:
                assert Path(path).read_bytes() == source.read_bytes()
        cache.clear().execute()
        cache.prune().execute()
    assert source.read_bytes() == b"precious" * 1000


def test_s14_what_has_no_source_and_is_kept_on_purpose_stays(root: Path, children: Callable[..., Any], command: Callable[..., Any]) -> None:
    with forebay.Cache(root, budget=8 << 20) as cache:
        cache.put("only copy", b"precious" * 100_000)
        cache.pin("values:only copy")

    def flood() -> None:
        with forebay.Cache(root) as cache:
            for i in range(30):
                cache.put(str(i), os.urandom(MiB))
            cache.clear().execute()
            cache.prune().execute()

    children(flood).result()
    command("clear", "--yes", "--root", root)
    with forebay.Cache(root) as cache:
        assert cache.get("only copy") == b"precious" * 100_000
