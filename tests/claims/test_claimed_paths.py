"""Directories: one is one, whatever it is called."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.claims import records
from forebay.claims.records import ClaimedPath, canonical, marks, opposite, overlap, same


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "data" / "train").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "data")
    return tmp_path


@pytest.mark.parametrize(
    ("a", "b", "found"),
    [
        ("data", "data", "same"),
        ("data/train", "link/train", "same"),
        ("data/new", "link/new", "same"),
        ("data/train/../train/.", "data/train", "same"),
        ("new/a", "new//a/", "same"),
        ("data", "link/train", "overlap"),
        ("data/train/new/deep", "link", "overlap"),
        ("new", "new/a/b", "overlap"),
        ("data/train", "data/trainer", "apart"),
        ("data/new", "data/newer", "apart"),
        ("data/train", "data/eval", "apart"),
        ("new/a", "newer/a", "apart"),
    ],
)
def test_which_directories_are_the_same_or_overlap(tree: Path, a: str, b: str, found: str) -> None:
    one, other = canonical(f"{tree}/{a}"), canonical(f"{tree}/{b}")
    assert (same(one, other), same(other, one)) == ((found == "same"),) * 2
    assert (overlap(one, other), overlap(other, one)) == ((found != "apart"),) * 2


def test_the_root_has_all_in_it(tree: Path) -> None:
    assert overlap(canonical("/"), canonical(tree))
    assert not same(canonical("/"), canonical(tree))
    assert same(canonical("/"), canonical("//"))


def test_a_relative_path_is_seen_from_here(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tree)
    assert same(canonical("data"), canonical(tree / "data"))
    assert canonical("data").path == str(tree / "data")


def test_a_directory_that_was_made_since_is_the_same(tree: Path) -> None:
    before = canonical(tree / "new" / "deep")
    (tree / "new" / "deep").mkdir(parents=True)
    after = canonical(tree / "link" / ".." / "new" / "deep")
    assert same(before, after)
    assert overlap(before, canonical(tree / "new"))


def test_what_was_removed_and_made_again_is_the_same(tree: Path) -> None:
    before = canonical(tree / "data" / "train")
    (tree / "data" / "train").rmdir()
    (tree / "another").mkdir()  # which may get its number
    (tree / "data" / "train").mkdir()
    assert same(before, canonical(tree / "data" / "train"))


def test_a_link_that_leads_nowhere_is_what_it_leads_to(tree: Path) -> None:
    (tree / "nowhere").symlink_to(tree / "data" / "later")
    assert same(canonical(tree / "nowhere"), canonical(tree / "data" / "later"))


@pytest.mark.parametrize("name", ["loop", "x" * 300])
def test_what_cannot_be_a_directory_is_an_error(tree: Path, name: str) -> None:
    (tree / "loop").symlink_to(tree / "loop")
    with pytest.raises(OSError):
        canonical(tree / name)


def test_a_place_that_may_not_be_looked_at_is_told_by_its_name(tree: Path) -> None:
    (tree / "locked").mkdir()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.chmod(tree, 0o755)
            os.chmod(tree / "locked", 0)
            for above in (tree.parent, tree.parent.parent):
                os.chmod(above, 0o755)
            if os.geteuid() == 0:
                os.setuid(65534)
            code = 0 if same(canonical(tree / "locked" / "a"), canonical(tree / "locked" / "a" / "b" / "..")) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.mark.root
def test_a_bind_mount_is_what_it_shows(tree: Path) -> None:
    (tree / "mounted").mkdir()
    if subprocess.run(["mount", "--bind", tree / "data", tree / "mounted"], capture_output=True).returncode:
        pytest.skip("no mounts here")
    try:
        assert same(canonical(tree / "mounted" / "train"), canonical(tree / "data" / "train"))
        assert same(canonical(tree / "mounted" / "new"), canonical(tree / "data" / "new"))
        assert overlap(canonical(tree / "mounted"), canonical(tree / "link" / "new"))
    finally:
        subprocess.run(["umount", tree / "mounted"], check=True)


def test_where_case_makes_no_difference_names_to_come_are_one(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "_ignores_case", lambda directory: directory.startswith(str(tree)))
    assert same(canonical(tree / "data" / "New" / "A"), canonical(tree / "data" / "new" / "a"))
    assert overlap(canonical(tree / "data" / "NEW"), canonical(tree / "link" / "new" / "b"))
    (tree / "data" / "Later").mkdir()
    assert canonical(tree / "data" / "train").path.endswith("data/train")


def test_where_case_makes_a_difference_they_are_two(tree: Path) -> None:
    assert not overlap(canonical(tree / "data" / "New"), canonical(tree / "data" / "new"))
    assert not records._ignores_case(str(tree))
    assert not records._ignores_case(str(tree / "missing"))


NAMES = st.lists(st.sampled_from(["a", "b", "ab"]), max_size=5)


@st.composite
def places(draw: st.DrawFn) -> ClaimedPath:
    """Any: those with the same parents have the same levels above, and some are known less deep than others."""
    names = tuple(draw(NAMES))
    depth = draw(st.integers(0, len(names)))
    levels = tuple((1, hash(names[:n])) for n in range(depth + 1))
    return ClaimedPath("/" + "/".join(names), names, levels)


@given(places(), places())
def test_marks_miss_nothing(a: ClaimedPath, b: ClaimedPath) -> None:
    assert not opposite(marks([a])).isdisjoint(marks([b])) or not overlap(a, b)


@given(places(), places())
def test_overlap_is_what_the_names_say(a: ClaimedPath, b: ClaimedPath) -> None:
    shorter = min(len(a.names), len(b.names))
    assert overlap(a, b) == (a.names[:shorter] == b.names[:shorter])
    assert same(a, b) == (a.names == b.names)
