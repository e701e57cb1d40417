from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from forebay._engine.files import blobs
from forebay._engine.files.root import Root, open_root, parse_tmp_name

ID = 0xABC


def blob(root: Root, id: int, content: str = "bytes") -> Path:
    path = root.blob(id)
    path.write_text(content)
    path.chmod(root.blob_mode)
    return path


@pytest.fixture
def members(root: Root) -> list[tuple[str, Path]]:
    names = ["config.json", "weights/a.bin", "weights/deep/er/b.bin", "Ünï code.txt"]
    return [(name, blob(root, n + 1, name)) for n, name in enumerate(names)]


def test_a_tree_holds_its_members_as_links(root: Root, members: list[tuple[str, Path]]) -> None:
    path = blobs.build(root, ID, members)
    assert path == root.tree(ID)
    assert {str(p.relative_to(path)): p.read_text() for p in path.rglob("*") if p.is_file()} == {name: name for name, _ in members}
    assert all((path / name).samefile(blob) for name, blob in members)
    assert {stat.S_IMODE(p.stat().st_mode) for p in (path, *path.rglob("*")) if p.is_dir()} == {0o555}
    assert os.listdir(root.trees_dir) == [f"{ID:016x}"]
    assert os.listdir(root.tmp_dir) == []


def test_a_groups_tree_can_be_removed_by_the_group(tmp_path: Path) -> None:
    root = open_root(tmp_path / "root", shared=True)
    path = blobs.build(root, ID, [("a/b", blob(root, 1))])
    assert {stat.S_IMODE(p.stat().st_mode) for p in (path, path / "a")} == {0o2770}
    assert stat.S_IMODE((path / "a" / "b").stat().st_mode) == 0o660


@pytest.mark.root
def test_a_member_of_the_group_links_and_removes_what_another_stored(
    public_path: Path, children: Callable[..., object], as_user: Callable[[int, int], None]
) -> None:
    place = public_path / "root"
    place.mkdir()
    os.chown(place, 0, 4242)
    root = open_root(place, shared=True)
    one = blob(root, 1)
    blobs.build(root, 7, [("a/b", one)])

    def other() -> None:
        as_user(4243, 4242)
        blobs.build(root, ID, [("a/b", one)])  # where hard links are protected, only who may write to a file may link it
        assert blobs.extend(root, 7, [("a/c", str(one)), ("d/e/f", str(one)), ("g", str(one))]) == []
        assert sorted(blobs.list_files(root, 7)) == ["a/b", "a/c", "d/e/f", "g"]
        assert blobs.remove(root, 7)

    assert children(other).wait() == 0
    assert os.listdir(root.trees_dir) == [f"{ID:016x}"]
    assert blobs.remove(root, ID)


def test_a_tree_is_extended_by_links_and_is_read_only_again(root: Root, members: list[tuple[str, Path]]) -> None:
    more = [(name, str(path)) for name, path in sorted(members)]
    path = blobs.build(root, ID, members[:1])
    for _ in range(2):
        assert blobs.extend(root, ID, more) == []
        assert {str(p.relative_to(path)): p.read_text() for p in path.rglob("*") if p.is_file()} == {name: name for name, _ in members}
        assert {stat.S_IMODE(p.stat().st_mode) for p in (path, *path.rglob("*")) if p.is_dir()} == {0o555}


def test_what_lies_in_the_way_of_an_added_file_stays(root: Root, members: list[tuple[str, Path]], tmp_path: Path) -> None:
    path, other = blobs.build(root, ID, []), str(blob(root, 9))
    path.chmod(0o755)
    (path / "file").write_bytes(b"")
    (path / "outside").symlink_to(tmp_path)
    names = ["file", "file/below", "new", "outside", "outside/below"]
    assert blobs.extend(root, ID, [(name, other) for name in names]) == ["file", "file/below", "outside", "outside/below"]
    assert os.listdir(tmp_path) == ["root"]
    assert (path / "new").samefile(other)
    assert blobs.extend(root, ID + 1, [("name", other)]) == ["name"]  # no such tree
    with pytest.raises(ValueError, match="cannot be the name"):
        blobs.extend(root, ID, [("../escape", other)])


def test_a_removed_tree_leaves_its_blobs(root: Root, members: list[tuple[str, Path]]) -> None:
    blobs.build(root, ID, members)
    assert blobs.remove(root, ID)
    assert not root.tree(ID).exists()
    assert all(blob.read_text() == name for name, blob in members)
    assert not blobs.remove(root, ID)


@pytest.mark.parametrize("name", ["", "/etc/passwd", "../x", "a/../../x", "a//b", "a/", "./a", ".", "..", "a\0b"])
def test_a_name_that_leaves_the_tree_is_refused(root: Root, name: str) -> None:
    with pytest.raises(ValueError, match="cannot be the name"):
        blobs.build(root, ID, [("good", blob(root, 1)), (name, blob(root, 2))])
    assert (os.listdir(root.trees_dir), os.listdir(root.tmp_dir)) == ([], [])


@pytest.mark.parametrize("names", [("a", "a"), ("a", "a/b"), ("a/b", "a"), ("a/b", "a/b/c")])
def test_a_name_that_is_two_things_is_refused(root: Root, names: tuple[str, str]) -> None:
    with pytest.raises(ValueError, match="two things"):
        blobs.build(root, ID, [(name, blob(root, n + 1)) for n, name in enumerate(names)])
    assert (os.listdir(root.trees_dir), os.listdir(root.tmp_dir)) == ([], [])


def test_a_member_that_was_evicted_leaves_nothing(root: Root) -> None:
    with pytest.raises(FileNotFoundError):
        blobs.build(root, ID, [("a/b", blob(root, 1)), ("c", root.blob(2))])
    assert (os.listdir(root.trees_dir), os.listdir(root.tmp_dir)) == ([], [])


def test_links_in_a_tree_are_removed_and_not_followed(root: Root, tmp_path: Path, members: list[tuple[str, Path]]) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("precious")
    path = blobs.build(root, ID, members)
    path.chmod(0o755)
    (path / "link").symlink_to(outside)
    (path / "file").symlink_to(outside / "precious")
    assert blobs.remove(root, ID)
    assert (outside / "precious").read_text() == "precious"
    assert stat.S_IMODE(outside.stat().st_mode) == 0o755


def test_a_tree_replaced_by_a_link_is_not_followed(root: Root, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir(0o700)
    (outside / "precious").write_text("precious")
    root.tree(ID).symlink_to(outside)
    assert blobs.remove(root, ID)
    assert (outside / "precious").read_text() == "precious"


@pytest.mark.parametrize("work", ["build", "remove"])
def test_a_kill_at_any_step_leaves_what_remove_ends(
    root: Root, members: list[tuple[str, Path]], kill_at: Callable[..., bool], work: str
) -> None:
    step, killed = 0, True
    while killed:
        if work == "build":
            killed = kill_at(step, lambda: blobs.build(root, ID, members))
        else:
            blobs.build(root, ID, members)
            killed = kill_at(step, lambda: blobs.remove(root, ID))
        assert all(parse_tmp_name(name) for name in os.listdir(root.tmp_dir)), "what is left can be told from other things"
        if root.tree(ID).exists() and work == "build":
            assert all((root.tree(ID) / name).exists() for name, _ in members), "a tree that has its name is whole"
        blobs.remove(root, ID)
        assert (os.listdir(root.trees_dir), os.listdir(root.tmp_dir)) == ([], [])
        step += 1
    assert step > len(members)


def test_the_footprint_of_a_tree_is_enough(root: Root) -> None:
    names = [f"{n % 7}/{n % 3}/file-{n:0100d}" for n in range(500)]
    one = blob(root, 1)
    path = blobs.build(root, ID, [(name, one) for name in names])
    assert blobs.footprint(names, 4096) >= sum(p.stat().st_blocks * 512 for p in (path, *path.rglob("*")) if p.is_dir())
