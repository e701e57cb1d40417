"""A file of words that processes share: what they see of each other, and what is not believed."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import pytest

from forebay import errors
from forebay._engine.files.layout import Root
from forebay._engine.files.root import open_root
from forebay._engine.files.shared_table import FREE, HEADER, SharedTable
from forebay._kernel.below import Below
from tests.processes import in_child

WORDS = 1000


def table_of(root: Root, magic: bytes = b"FBTEST01", words: int = WORDS) -> SharedTable:
    return SharedTable(root, root.shared_dir / "waiting", magic, words)


def test_processes_see_what_others_store(root: Root) -> None:
    words = table_of(root).create(lambda words: memoryview.__setitem__(words, HEADER, 7))
    words[FREE] = 5

    def other() -> tuple[int, int]:
        words = table_of(root).create()
        words[HEADER + WORDS - 1] = 9
        return words[FREE], words[HEADER]

    assert in_child(other) == (5, 7)
    assert words[HEADER + WORDS - 1] == 9


def test_it_may_lie_in_the_root_itself(root: Root) -> None:
    before = set(os.listdir(root.path))
    SharedTable(root, root.hosts, b"FBTEST01", WORDS).create()
    assert set(os.listdir(root.path)) - before == {"hosts"}


def test_it_is_allocated_whole(root: Root) -> None:
    table = table_of(root)
    assert table.words() is None
    table.create()
    status = table.path.stat()
    assert status.st_blocks * 512 >= status.st_size == -(-8 * (HEADER + WORDS) // 4096) * 4096


@pytest.mark.parametrize(
    "harm", ["zeros", "noise", "short", "long", "empty", "another root's", "another form", "pipe", "link", "directory"]
)
def test_what_is_not_ours_is_not_mapped_and_makes_way(harm: str, root: Root, tmp_path: Path) -> None:
    table = table_of(root)
    table.create()[HEADER] = 5
    sound = table.path.read_bytes()
    contents = {
        "zeros": bytes(len(sound)), "noise": random.Random(1).randbytes(len(sound)), "short": sound[:-4096], "long": sound + bytes(4096),
        "empty": b"",
    }  # fmt: skip
    table.path.unlink()
    if harm in contents:
        table.path.write_bytes(contents[harm])
    elif harm == "another root's":
        other = open_root(tmp_path / "other")
        table_of(other).create()
        shutil.copy(table_of(other).path, table.path)
    elif harm == "another form":
        table_of(root, b"FBTEST02").create()
    elif harm == "pipe":
        os.mkfifo(table.path)
    elif harm == "link":
        (tmp_path / "theirs").write_bytes(sound)
        table.path.symlink_to(tmp_path / "theirs")
    else:
        table.path.mkdir()
    assert table.words() is None
    words = table.create()
    assert words[HEADER] == 0
    words[HEADER] = 6
    assert table_of(root).create()[HEADER] == 6


def test_a_directory_with_files_of_others_stays(root: Root) -> None:
    table = table_of(root)
    table.path.mkdir(parents=True)
    (table.path / "theirs").write_text("x")
    with pytest.raises(errors.CacheFault, match="in the way"):
        table.create()
    assert (table.path / "theirs").read_text() == "x"


def test_a_file_that_was_cut_is_read_no_more(root: Root) -> None:
    """To touch what is no longer there would kill the process."""
    table = table_of(root)
    table.create()
    os.truncate(table.path, 4096)
    assert table.words() is None
    assert table.create()[HEADER + WORDS - 1] == 0


def test_in_a_read_only_root_it_is_read_and_not_created(root: Root) -> None:
    reader = Root(root.path, root.id, read_only=True)
    before = os.listdir(root.path)
    with pytest.raises(errors.CacheFault):
        table_of(reader).create()
    assert os.listdir(root.path) == before
    table_of(root).create()[HEADER] = 5
    words = table_of(reader).create()
    assert (words[HEADER], words.readonly) == (5, True)


def test_killed_at_any_step_it_is_whole_or_not_there(root: Root, kill_at: object) -> None:
    def fill(words: memoryview) -> None:
        words[HEADER] = 7

    step = 0
    while kill_at(step, lambda: table_of(root).create(fill)):  # type: ignore[operator]
        found = table_of(root).words()
        assert found is None or found[HEADER] == 7
        step += 1
        assert table_of(root).create(fill)[HEADER] == 7
        table_of(root).path.unlink()
    assert step > 3


def test_of_two_that_find_none_one_takes_what_the_other_has_created(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    """P1 finds none / P2 finds none, creates one and has it mapped / P1 goes on: with the same file."""
    mkdir, created = Below.mkdir, list[bool]()

    def making(self: Below, path: Path, mode: int) -> bool:
        if not created:
            created.append(True)
            table_of(root).create()[HEADER] = 7
        return mkdir(self, path, mode)

    monkeypatch.setattr(Below, "mkdir", making)
    assert table_of(root).create()[HEADER] == 7
    assert created
