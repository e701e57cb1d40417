"""Files in the root that nobody counts: seen by `du`, told by `verify` and `doctor`, removed where Forebay gave them their names."""

from __future__ import annotations

import os
import re
import threading
from pathlib import Path
from typing import Any

import pytest

from forebay import Cache
from forebay.testing import ScriptedServer

from .conftest import Run

MiB = 1 << 20


@pytest.fixture
def planted(home: Path) -> dict[str, Path]:
    """A cache, and what somebody put into it: under names of ours, and under others."""
    with Cache(home, budget=64 * MiB, min_free=0) as cache:
        cache.put("k", b"value")
        cache.put("large", bytes(100_000))
    ours = {
        "blob": home / "blobs" / "ab" / "00000000000000ab",
        "named": home / "blobs" / "cd" / "00000000000000cd.tar",
        "write": home / "tmp" / "00000000000000aa-00000000000000bb",
        "tree": home / "trees" / "00000000000000ee" / "file",
        "pack": home / "packs" / "00000000000000ff" / "index",
    }
    others = {"top": home / "thesis.tex", "in blobs": home / "blobs" / "ab" / "notes.txt", "in packs": home / "packs" / "mine"}
    for path in (*ours.values(), *others.values()):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(os.urandom(MiB))
    return {**{f"ours: {name}": path for name, path in ours.items()}, **{f"others: {name}": path for name, path in others.items()}}


def strays_of(ran: Any) -> tuple[int, int]:
    found = ran.json["strays"]
    assert 5 * MiB <= found["bytes"] < 5.2 * MiB or not found["files"]
    assert 3 * MiB <= found["foreign_bytes"] < 3.2 * MiB
    return found["files"], found["foreign"]


@pytest.mark.parametrize("by", [["prune"], ["verify", "--repair"]])
def test_s19_strays_are_counted_told_and_removed(planted: dict[str, Path], home: Path, run: Run, by: list[str]) -> None:
    assert strays_of(run("du", "--json")) == (5, 3)
    shown = run("du").out
    assert "5 files that no entry names" in shown
    assert "3 files that Forebay did not create" in shown
    told = run("verify", "--quick")
    assert told.code == 1
    assert all(str(path.parent if path.name in ("file", "index") else path) in told.out for path in planted.values())
    doctor = run("doctor")
    assert doctor.code == 1
    assert re.search("foreign files: not created by Forebay", doctor.out)
    assert strays_of(run("prune", "--dry-run", "--json")) == (5, 3)
    assert all(path.exists() for path in planted.values())  # who looks removes nothing
    done = run(*by, *(["--yes"] if by == ["prune"] else []))
    assert done.code == (0 if by == ["prune"] else 1)  # what is not ours is left, and told
    if by == ["prune"]:
        assert "0 entries and 5 stray files removed, 5.2" in done.out
    else:
        assert ("5 problems repaired" in done.out, "3 problems left" in done.out) == (True, True)
    doctor = run("doctor")
    assert ("foreign files" in doctor.out, "--repair" in doctor.out) == (True, False)
    for name, path in planted.items():
        assert path.exists() is name.startswith("others"), name
    assert strays_of(run("du", "--json")) == (0, 3)
    for name, path in planted.items():
        if name.startswith("others"):
            path.unlink()
    assert run("verify").code == 0
    with Cache(home) as cache:
        assert cache.get("large") == bytes(100_000)


def test_prune_asks_before_strays_go(planted: dict[str, Path], run: Run) -> None:
    """Without a terminal nobody agrees."""
    ours = [path for name, path in planted.items() if name.startswith("ours")]
    ran = run("prune")
    assert (ran.code, "--yes" in ran.err, "0 entries and 5 stray files would be removed, 5.2" in ran.out) == (1, True, True)
    assert run("prune", "--json").code == 1
    assert all(path.exists() for path in ours)
    ran = run("prune", "--json", "--yes")
    assert (ran.code, ran.json["stray_files"], ran.json["removed"]) == (0, 5, [])
    assert not any(path.exists() for path in ours)


@pytest.mark.parametrize(
    "name", ["blobs/{other}/{id:016x}", "blobs/{other}/{id:016x}.tar", "trees/{id:016x}.tree", "packs/{id:016x}.x/index"]
)
@pytest.mark.parametrize("id", [0x1FF, None], ids=["of its own", "an entry's"])
def test_a_name_of_ours_where_it_does_not_belong_is_somebodys(home: Path, run: Run, name: str, id: int | None) -> None:
    with Cache(home, budget=64 * MiB, min_free=0) as cache:
        cache.put("large", os.urandom(100_000))
        entry = cache.entry("large")
        assert entry is not None
    other = "a2" if entry.id & 0xFF == 0xA1 else "a1"
    path = home / name.format(id=id or entry.id, other=other)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(bytes(MiB))
    found = run("du", "--json").json["strays"]
    assert (found["files"], found["foreign"]) == (0, 1)
    ran = run("verify")
    assert (ran.code, str(path.parent if path.name == "index" else path) in ran.out) == (1, True)
    lines = run("prune", "--yes").lines
    assert (len(lines), "1 file that Forebay did not create, 1.05 MB" in lines[0], lines[1]) == (2, True, "0 entries removed, 0 B freed")
    assert path.exists()


@pytest.mark.parametrize("name", ["00000000000001a1.tar.gz", "00000000000001a1tar", "00000000000001a1"])
@pytest.mark.parametrize("size", [0, 5000])
def test_what_du_promises_prune_removes(home: Path, run: Run, name: str, size: int) -> None:
    with Cache(home, budget=64 * MiB, min_free=0):
        path = home / "blobs" / "a1" / name
        path.write_bytes(bytes(size))
    assert run("du", "--json").json["strays"]["files"] == 1
    assert "0 entries and 1 stray file removed" in run("prune", "--yes").out
    assert not path.exists()
    assert run("verify").code == 0


@pytest.mark.parametrize(
    ("name", "count"),
    [("blobs/{fan}/{id}.evil", 1), ("trees/{id}/file", 1), ("packs/{id}/index", 1)],
    ids=["another suffix", "a tree", "a pack"],
)
@pytest.mark.parametrize("by", [["prune", "--yes"], ["verify", "--repair"]])
def test_what_has_an_entrys_id_and_is_not_its_file_is_a_stray(home: Path, run: Run, name: str, count: int, by: list[str]) -> None:
    """It goes, also while the entry is in use, and the entry's own file stays."""
    with Cache(home, budget=64 * MiB, min_free=0) as cache:
        cache.put("large", bytes(100_000))
        entry = cache.entry("large")
        assert entry is not None
        path = home / name.format(fan=f"{entry.id & 0xFF:02x}", id=f"{entry.id:016x}")
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes(MiB))
        held = cache.get("large")
        told = run("du", "--json").json["strays"]
        assert (told["files"], told["bytes"] >= MiB) == (count, True)
        ran = run("verify")
        assert (ran.code, f"{entry.id:016x}" in ran.out) == (1, True)
        run(*by)
        assert not path.exists()
        assert run("du", "--json").json["strays"]["files"] == 0
        assert held == bytes(100_000)
    assert run("verify").code == 0
    with Cache(home) as cache:
        assert cache.get("large") == bytes(100_000)


def test_each_file_of_a_stray_id_is_counted(home: Path, run: Run) -> None:
    with Cache(home, budget=64 * MiB, min_free=0):
        names = {
            "blobs/a1/00000000000001a1.a": MiB, "blobs/a1/00000000000001a1.b": 4 * MiB,
            "tmp/00000000000000aa-00000000000000bb": 5 * MiB, "tmp/00000000000000aa-00000000000000bb.map": 4096,
        }  # fmt: skip
        for name, size in names.items():
            (home / name).write_bytes(bytes(size))
    found = run("du", "--json").json["strays"]
    assert (found["files"], found["bytes"]) == (4, sum((home / name).stat().st_blocks * 512 for name in names))
    assert "0 entries and 4 stray files removed" in run("prune", "--yes").out
    assert not any((home / name).exists() for name in names)


def test_s19_what_is_being_written_is_no_stray(home: Path, server: ScriptedServer) -> None:
    """A download in progress, a pack that is filled, and a directory that is held."""
    with Cache(home, budget=64 * MiB, min_free=0) as cache:
        with cache.samples("pack", 100) as samples:
            samples.put(0, b"sample")
            reader = threading.Thread(target=cache.read, args=(server.put("/key", bytes(10 * MiB), stall_after=MiB),))
            reader.start()
            assert server.stalled.wait(60)
            found = cache.strays()
            assert (found.files, found.foreign) == (0, 0)
            assert cache.prune().execute().removed == ()
            assert cache.check() == []
            server.go.set()
            reader.join()
        assert (cache.strays().files, cache.strays().foreign) == (0, 0)
