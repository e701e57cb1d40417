from __future__ import annotations

import contextlib
import logging
import os
import pickle
import shutil
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import forebay
from forebay._engine.catalog import schema
from forebay._engine.files import root as roots
from forebay._engine.files.root import LOCKS, Root, open_root, parse_blob_name, parse_tmp_name
from forebay._engine.store import Settings, Store
from forebay._kernel import host, locks
from forebay.errors import NewerFormat, RootRefused
from tests.harness import MiB, bytes_of, opened

as_root = pytest.mark.root


def whole(root: Root) -> bool:
    """Whether everything that a root is made of is there, and nothing else."""
    top = {"FORMAT", "CACHEDIR.TAG", "blobs", "trees", "packs", "tmp", "shared", "locks"}
    return (
        set(os.listdir(root.path)) == top
        and len(os.listdir(root.blobs_dir)) == 256
        and set(os.listdir(root.path / "locks")) == {*LOCKS, "words"}
        and root.words.stat().st_size == root.words.stat().st_blocks * 512 == 4096
    )


def test_a_new_root_is_whole_and_is_found_again(tmp_path: Path) -> None:
    made = open_root(tmp_path / "a" / "b")
    assert whole(made)
    assert open_root(tmp_path / "a" / "b") == made
    assert made.is_same()
    assert stat.S_IMODE(made.path.stat().st_mode) == 0o700
    assert made.path.joinpath("FORMAT").read_text() == f"forebay 3 {made.id:016x}\n"
    assert made.path.joinpath("CACHEDIR.TAG").read_bytes().startswith(b"Signature: 8a477f597d28d172789f06886806bc55")


def test_two_roots_have_two_ids(tmp_path: Path) -> None:
    assert open_root(tmp_path / "a").id != open_root(tmp_path / "b").id


def test_64_processes_make_one_root(tmp_path: Path, children: Callable[..., object]) -> None:
    gate, said = os.pipe(), os.pipe()

    def make() -> None:
        os.close(gate[1])
        os.read(gate[0], 1)  # ends for all of them when the parent closes its side
        os.write(said[1], b"%016x" % open_root(tmp_path / "root").id)

    born = [children(make) for _ in range(64)]
    os.close(gate[0])
    os.close(gate[1])
    assert [child.wait() for child in born] == [0] * 64
    os.close(said[1])
    with open(said[0], "rb") as file:
        ids = file.read()
    root = open_root(tmp_path / "root")
    assert ids == b"%016x" % root.id * 64
    assert whole(root)


@pytest.mark.rotates
def test_a_creation_killed_at_any_step_is_completed_by_the_next_open(quick_path: Path, kill_at: Callable[..., bool]) -> None:
    steps: list[str] = []
    host.on_step(lambda name, subject: steps.append(name))
    open_root(quick_path / "uninterrupted")
    host.on_step(None)
    # Directories 00 to ff and the lease files are made alike: every seventh will do.
    for step in [n for n in range(len(steps)) if n < 20 or n % 7 == 0 or n > len(steps) - 40]:
        place = quick_path / str(step)
        assert kill_at(step, lambda place=place: open_root(place))
        root = open_root(place)
        assert whole(root), (step, steps[step])
        assert root.is_same()
    assert {"mkdir", "create", "allocate", "link", "unlink"} <= set(steps)


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_a_root_for_a_group_has_the_groups_modes_whatever_the_umask(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        root = open_root(tmp_path / "root", shared=True)
    finally:
        os.umask(before)
    for directory, names, files in os.walk(root.path):
        assert stat.S_IMODE(os.stat(directory).st_mode) == 0o2770
        assert {stat.S_IMODE(os.stat(os.path.join(directory, file)).st_mode) for file in files} <= {0o660}
        assert names is not None
    with pytest.raises(RootRefused, match="shared=True"):
        open_root(root.path)


def test_a_private_root_does_not_become_a_groups(root: Root) -> None:
    with pytest.raises(RootRefused, match="group"):
        open_root(root.path, shared=True)


@as_root
def test_two_users_of_a_group_share_a_root(public_path: Path, children: Callable[..., object], as_user: Callable[[int, int], None]) -> None:
    place = public_path / "shared"
    place.mkdir()
    os.chown(place, 0, 4242)
    place.chmod(0o2770)
    made = open_root(place, shared=True)

    def other() -> None:
        as_user(4243, 4242)
        with pytest.raises(RootRefused, match="shared=True"):
            open_root(place)
        assert open_root(place, shared=True) == made
        (place / "tmp" / "x").write_text("theirs")
        (place / "blobs" / "00" / "y").write_text("theirs")

    assert children(other).wait() == 0
    assert (place / "tmp" / "x").stat().st_gid == 4242


@as_root
def test_a_root_of_another_user_is_refused(tmp_path: Path) -> None:
    root = open_root(tmp_path / "root")
    os.chown(root.path, 4242, 4242)
    with pytest.raises(RootRefused, match="user 4242"):
        open_root(root.path)
    assert open_root(root.path, read_only=True).id == root.id


@as_root
def test_a_directory_of_another_users_gets_a_root_inside(tmp_path: Path) -> None:
    place = tmp_path / "local_scratch"
    place.mkdir()
    os.chown(place, 4242, 4242)
    root = open_root(place)
    assert root.path == place / f"forebay-{os.geteuid()}"
    assert os.listdir(place) == [root.path.name]
    assert open_root(place) == root


@pytest.mark.parametrize("mode", [0o1777, 0o777, 0o1700])
def test_a_directory_open_to_all_gets_a_root_inside(tmp_path: Path, mode: int) -> None:
    tmp_path.joinpath("scratch").mkdir()
    tmp_path.joinpath("scratch").chmod(mode)
    tmp_path.joinpath("scratch", "theirs").write_text("not ours")
    root = open_root(tmp_path / "scratch")
    assert root.path == tmp_path / "scratch" / f"forebay-{os.geteuid()}"
    assert whole(root)


def test_a_root_that_was_opened_to_all_is_refused(root: Root) -> None:
    root.path.chmod(0o777)
    with pytest.raises(RootRefused, match="chmod o-w"):
        open_root(root.path)


@as_root
def test_a_link_that_another_user_planted_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "scratch").mkdir()
    (tmp_path / "scratch").chmod(0o1777)
    (tmp_path / "scratch" / f"forebay-{os.geteuid()}").symlink_to(tmp_path / "mine")
    with pytest.raises(RootRefused):
        open_root(tmp_path / "scratch")
    assert os.listdir(tmp_path / "mine") == []


@pytest.mark.parametrize("name", ["precious.txt", "tmp/precious.txt", "locks/mine", "blobs/zz", "shared/table", "trees/linux"])
def test_s15_foreign_files_are_refused_and_left_alone(tmp_path: Path, name: str) -> None:
    (tmp_path / "place" / name).parent.mkdir(parents=True)
    (tmp_path / "place" / name).write_text("precious")
    with pytest.raises(RootRefused, match=r"precious|mine|zz|table|linux") as caught:
        open_root(tmp_path / "place")
    assert str(tmp_path / "place") in str(caught.value)
    assert [p for p in (tmp_path / "place").rglob("*") if p.is_file()] == [tmp_path / "place" / name]


def test_at_most_three_foreign_names_are_listed(tmp_path: Path) -> None:
    for name in "abcdef":
        (tmp_path / name).touch()
    with pytest.raises(RootRefused, match=r"6 things .*\(a, b, c\)"):
        open_root(tmp_path)


def test_a_file_is_no_root(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(RootRefused, match="directory"):
        open_root(tmp_path / "file")
    with pytest.raises(RootRefused, match="directory"):
        open_root(tmp_path / "file", read_only=True)


@pytest.mark.parametrize("kind", ["nfs", "lustre", "cifs", "fuse", "9p", "virtiofs"])
def test_a_network_file_system_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    there = open_root(tmp_path / "there")
    monkeypatch.setattr(host, "fs_kind", lambda path: kind)
    with pytest.raises(RootRefused, match=kind):
        open_root(tmp_path / "new")
    assert not (tmp_path / "new").exists()
    with pytest.raises(RootRefused, match=kind):
        open_root(there.path)
    assert open_root(there.path, read_only=True) == Root(there.path, there.id, read_only=True)


def test_a_newer_format_is_refused_naming_both(root: Root) -> None:
    (root.path / "FORMAT").write_text(f"forebay 7 {root.id:016x}\n")
    with pytest.raises(NewerFormat, match=r"format 7.*format 3") as caught:
        open_root(root.path)
    assert (caught.value.found, caught.value.known) == (7, 3)


@pytest.fixture
def place(quick_path: Path) -> Path:
    return quick_path / "root"


def older(place: Path) -> Root:
    """A root as the format 1 had it, with a value, a file, and limits that were set."""
    with opened(place, 50 * MiB, max_entries=500) as store:
        store.put("v", "small", b"s")
        store.put("v", "large", bytes(100_000))
        root = store.root
    with contextlib.closing(sqlite3.connect(place / "catalog.sqlite")) as con, con:
        con.execute("UPDATE meta SET value = 4 WHERE name = 'format'")
    shutil.rmtree(place / "shared")
    for name in ("slots/000", "index/table", "index/000", "index/policy-3", "index/theirs", "locks/names"):
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).write_bytes(b"older")
    (place / "FORMAT").write_text(f"forebay 1 {root.id:016x}\n")
    return root


def assert_emptied(place: Path) -> None:
    with opened(place) as store:
        assert store.seeing.entries("v") == []
        assert (store.seeing.usage().budget, store.spaces.root_limits()["max_entries"]) == (50 * MiB, 500)
        store.put("v", "new", bytes(50_000))
        assert [problem.subject for problem in store.check(deep=True)] == [str(place / "index")]
        assert len(list((place / "blobs").glob("*/*"))) == 1
    assert sorted(path.name for path in (place / "index").iterdir()) == ["theirs"]
    assert not (place / "slots").exists()


def test_a_root_of_format_1_is_emptied_with_one_warning_and_its_limits_stay(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    older(place)
    with pytest.raises(RootRefused, match="an older one: open it for writing once"):
        open_root(place, read_only=True)
    assert_emptied(place)
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert f"the catalog has format 4, {schema.FORMAT} was expected" in warning
    assert "what stays: budget 52.4 MB, min_free 0 B, max_entries 500" in warning


def test_a_process_that_is_killed_while_it_empties_an_older_root_costs_nothing(place: Path, kill_at: Callable[..., bool]) -> None:
    step = 0
    older(place)
    while kill_at(step, lambda: open_root(place)):
        assert_emptied(place)
        shutil.rmtree(place)
        older(place)
        step += 1
    assert step > 5


def test_an_older_root_that_a_process_has_open_is_left_alone(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = older(place)
    holder = locks.LockFile(place / "FORMAT", root.files.open, writable=False)
    assert holder.try_lock(0, exclusive=False)
    monkeypatch.setattr(roots, "_PATIENCE", 0.0)
    with pytest.raises(RootRefused, match="processes have open: end them"):
        open_root(place)
    assert (place / "slots" / "000").read_bytes() == b"older"
    holder.close()
    assert_emptied(place)


SCRIBBLED = ["forebay", "forebay 0 0123456789abcdef\n", "forebay 1 123\n", "\n", "[W] warning\n" * 3, "\0" * 5000]


@pytest.mark.parametrize("text", SCRIBBLED)
def test_a_scribbled_format_is_refused_where_nothing_else_names_the_root(root: Root, text: str) -> None:
    (root.path / "FORMAT").write_text(text)
    with pytest.raises(RootRefused, match="FORMAT"):
        open_root(root.path)
    with pytest.raises(RootRefused, match="FORMAT"):
        forebay.Cache(root.path)
    assert (root.path / "FORMAT").read_text() == text


@pytest.mark.parametrize("text", [*SCRIBBLED, "", "forebay 3 0123456789ab"])
def test_a_damaged_format_is_repaired_from_the_catalog(place: Path, text: str, caplog: pytest.LogCaptureFixture) -> None:
    with opened(place) as store:
        store.put("v", "large", bytes(100_000))
    before = (place / "FORMAT").read_bytes()
    (place / "FORMAT").write_text(text)
    with contextlib.closing(Store.open(place, Settings(), read_only=True)) as reader:
        assert bytes_of(reader, "large") == bytes(100_000)
    assert (place / "FORMAT").read_text() == text
    with opened(place) as store:
        assert bytes_of(store, "large") == bytes(100_000)
        assert store.check(deep=True) == []
    assert (place / "FORMAT").read_bytes() == before
    (warning,) = {record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING}
    assert "it is rewritten" in warning


def flip_id(place: Path) -> bytes:
    """Change the last digit of the id in FORMAT, which can be read as before. Returns what FORMAT was."""
    before = (place / "FORMAT").read_bytes()
    (place / "FORMAT").write_bytes(before[:-2] + (b"0" if before[-2:-1] != b"0" else b"1") + b"\n")
    return before


def messages(caplog: pytest.LogCaptureFixture) -> set[str]:
    return {record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING}


@pytest.mark.parametrize("foreign", [False, True])
def test_another_id_in_format_is_repaired_where_head_and_catalog_agree(
    place: Path, caplog: pytest.LogCaptureFixture, foreign: bool
) -> None:
    with opened(place) as store:
        store.put("v", "large", bytes(100_000))
    before = flip_id(place)
    flipped = (place / "FORMAT").read_bytes()
    if foreign:
        _make_foreign(place)
    with contextlib.closing(Store.open(place, Settings(), read_only=True)) as reader:
        assert bytes_of(reader, "large") == bytes(100_000)
    assert (place / "FORMAT").read_bytes() == flipped
    with opened(place) as store:
        assert bytes_of(store, "large") == bytes(100_000)
        flip_id(place)
        with opened(place) as other:
            assert bytes_of(other, "large") == bytes(100_000)
        assert store.put("v", "more", b"m")
        assert [problem.kind for problem in store.check(deep=True)] == ["foreign"] * foreign
    assert (place / "FORMAT").read_bytes() == before
    (warning,) = messages(caplog)
    assert "its FORMAT is damaged, as it names another root: it is rewritten" in warning


def test_a_copied_root_is_not_repaired(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    with opened(place) as store:
        store.put("v", "large", bytes(100_000))
    shutil.copytree(place, place.with_name("copy"))
    with opened(place.with_name("copy")) as store:
        assert bytes_of(store, "large") == bytes(100_000)
    assert not messages(caplog)


def test_the_catalog_is_not_asked_while_the_head_agrees_with_format(place: Path) -> None:
    with opened(place) as store:
        root, asked = store.root, list[Path]()

    def id_in_catalog(path: Path) -> int | None:
        asked.append(path)
        return 5

    assert open_root(place, id_in_catalog=id_in_catalog) == root
    assert not asked
    flip_id(place)
    assert open_root(place, id_in_catalog=id_in_catalog).id != root.id  # as the catalog names a third one
    assert asked


def test_a_process_that_has_the_root_open_goes_on_when_its_format_is_damaged(place: Path) -> None:
    with forebay.Cache(place, budget=50 * MiB) as cache:
        cache.put("before", bytes(100_000))
        (place / "FORMAT").write_text("warning")
        assert cache.put("after", bytes(100_000))
        with forebay.Cache(place) as other:
            assert [len(other.get(key) or b"") for key in ("before", "after")] == [100_000] * 2
        assert cache.put("later", bytes(100_000))
        assert [len(cache.get(key) or b"") for key in ("before", "after", "later")] == [100_000] * 3


def _make_foreign(place: Path) -> None:
    (place / "notes.txt").write_text("somebody's")


def _remove_root_id(place: Path) -> None:
    shutil.rmtree(place / "shared")
    with contextlib.closing(sqlite3.connect(place / "catalog.sqlite")) as con, con:
        con.execute("DELETE FROM meta WHERE name = 'root'")


def _change_root_id(place: Path) -> None:
    with contextlib.closing(sqlite3.connect(place / "catalog.sqlite")) as con, con:
        con.execute("UPDATE meta SET value = 5 WHERE name = 'root'")


def _damage_catalog(place: Path) -> None:
    (place / "catalog.sqlite").write_bytes(b"garbage" * 5000)


def _age(place: Path) -> None:
    with contextlib.closing(sqlite3.connect(place / "catalog.sqlite")) as con, con:
        con.execute("UPDATE meta SET value = 8 WHERE name = 'format'")


def _give_away(place: Path) -> None:
    os.chown(place / "catalog.sqlite", 12345, 12345)


@pytest.mark.parametrize(
    "change",
    [_make_foreign, _remove_root_id, _change_root_id, _damage_catalog, _age, pytest.param(_give_away, marks=as_root)],
)
def test_a_damaged_format_stays_where_the_root_cannot_be_told(place: Path, change: Callable[[Path], None]) -> None:
    with opened(place) as store:
        store.put("v", "large", bytes(100_000))
    change(place)
    (place / "FORMAT").write_text("warning")
    files = {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}
    with pytest.raises(RootRefused, match=r"FORMAT|not Forebay"):
        open_root(place, id_in_catalog=lambda catalog: schema.root_id(catalog))
    with pytest.raises(RootRefused):
        forebay.Cache(place)
    assert {path: path.read_bytes() for path in place.rglob("*") if path.is_file()} == files


@pytest.mark.parametrize("change", [_remove_root_id, _change_root_id, _damage_catalog, pytest.param(_give_away, marks=as_root)])
def test_another_id_in_format_stays_where_the_catalog_does_not_agree_with_the_head(place: Path, change: Callable[[Path], None]) -> None:
    with opened(place) as store:
        store.put("v", "large", bytes(100_000))
    flip_id(place)
    change(place)
    flipped = (place / "FORMAT").read_bytes()
    for _ in range(2):
        assert open_root(place, id_in_catalog=lambda catalog: schema.root_id(catalog)).format_line == flipped
    assert (place / "FORMAT").read_bytes() == flipped


ANOTHER_VERSION = """
import sys
from forebay._engine.catalog import schema
from forebay._engine.files import layout, root
import forebay
layout.VERSION = root.VERSION = int(sys.argv[2])
schema.FORMAT = int(sys.argv[3])
schema.TABLES += "CREATE TABLE another(id);"
with forebay.Cache(sys.argv[1], budget="100MB") as cache:
    assert cache.put("theirs", bytes(100_000)) and len(cache.get("theirs")) == 100_000
    print(cache.get("ours") is not None)
"""


def another_version(place: Path, version: int, format: int) -> str:
    """What a Forebay of this version of the root, whose catalog has this format, says of the value `ours`."""
    command = [sys.executable, "-c", ANOTHER_VERSION, str(place), str(version), str(format)]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.strip()


def catalog_of(place: Path) -> int:
    return (place / "catalog.sqlite").stat().st_ino


def test_a_newer_catalog_is_refused_by_name_and_stays(place: Path) -> None:
    another_version(place, roots.VERSION, schema.FORMAT + 1)
    made = catalog_of(place)
    with pytest.raises((NewerFormat, forebay.errors.CacheFault), match=f"format {schema.FORMAT + 1}.* {schema.FORMAT} at most"):
        with opened(place) as store:
            store.put("v", "ours", bytes(100_000))
    with contextlib.suppress(NewerFormat), forebay.Cache(place) as cache:  # which may notice it at the first call only
        assert not cache.put("ours", bytes(100_000))
        assert cache.get_or_put("ours", lambda: b"made") == b"made"
    assert catalog_of(place) == made
    (place / "FORMAT").write_text("warning")
    with pytest.raises(NewerFormat, match=f"format {schema.FORMAT + 1}"):
        forebay.Cache(place)
    assert catalog_of(place) == made
    assert another_version(place, roots.VERSION, schema.FORMAT + 1) == "False"


def test_a_newer_version_takes_the_root_once_and_the_older_then_refuses(place: Path) -> None:
    with forebay.Cache(place, budget="100MB") as cache:
        cache.put("ours", bytes(100_000))
    another_version(place, roots.VERSION + 1, schema.FORMAT + 1)
    made = catalog_of(place)
    for _ in range(3):
        with pytest.raises(NewerFormat, match=f"format {roots.VERSION + 1}"):
            forebay.Cache(place)
        another_version(place, roots.VERSION + 1, schema.FORMAT + 1)
    assert catalog_of(place) == made


def test_a_newer_version_with_the_same_catalog_keeps_the_entries(place: Path) -> None:
    with forebay.Cache(place, budget="100MB") as cache:
        cache.put("ours", bytes(100_000))
    made = catalog_of(place)
    (place / "FORMAT").write_text((place / "FORMAT").read_text().replace(f" {roots.VERSION} ", f" {roots.VERSION - 1} "))
    with forebay.Cache(place) as cache:
        assert len(cache.get("ours") or b"") == 100_000
        assert cache.check(deep=True) == []
    assert catalog_of(place) == made
    assert (place / "FORMAT").read_text().startswith(f"forebay {roots.VERSION} ")


def test_a_root_without_format_gets_a_new_id(root: Root) -> None:
    root.blob(5, ".tar").write_text("bytes")
    (root.path / "FORMAT").unlink()
    assert not root.is_same()
    assert open_root(root.path).id != root.id
    assert root.blob(5, ".tar").exists()


@pytest.mark.parametrize("times", [1, 2, 3])
def test_another_root_at_the_path_while_it_is_opened(tmp_path: Path, times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """T1 reads the FORMAT / another root takes the place / T1 looks at the directory: it opens what is there now, if that stays."""
    place, spares = tmp_path / "root", [tmp_path / f"spare {i}" for i in range(times)]
    ids = [open_root(path).id for path in (place, *spares)]
    stay = Root.stay

    def another_first(self: Root) -> bool:
        if spares:
            place.rename(tmp_path / f"moved {len(spares)}")
            spares.pop(0).rename(place)
        return stay(self)

    monkeypatch.setattr(Root, "stay", another_first)
    if times < 3:
        assert open_root(place).id == ids[-1]
    else:
        with pytest.raises(RootRefused, match="another root each time: stop the program that changes it"):
            open_root(place)
        assert open_root(place).id == ids[-1]
    assert not spares


@pytest.mark.parametrize("what", ["the root", "FORMAT"])
@pytest.mark.parametrize("times", [1, 3])
def test_a_root_that_is_removed_while_it_is_opened(tmp_path: Path, what: str, times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    place, stay, left = tmp_path / "root", Root.stay, [what] * times

    def remove_first(self: Root) -> bool:
        if left:
            left.pop()
            shutil.rmtree(place) if what == "the root" else (place / "FORMAT").unlink()
        return stay(self)

    monkeypatch.setattr(Root, "stay", remove_first)
    if times < 3:
        root = open_root(place)
        assert whole(root)
    else:
        with pytest.raises(FileNotFoundError):
            open_root(place)
        assert whole(open_root(place))
    assert not left


def test_a_removed_directory_is_made_again(root: Root) -> None:
    root.tmp_dir.rmdir()
    assert open_root(root.path) == root
    assert whole(root)


@pytest.mark.parametrize("name", ["blobs", "tmp", "locks"])
def test_a_directory_that_became_a_link_is_refused(root: Root, tmp_path: Path, name: str) -> None:
    (root.path / name).rename(tmp_path / "elsewhere")
    (root.path / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RootRefused, match="symbolic links"):
        open_root(root.path)


def test_nothing_is_made_for_a_read_only_root(tmp_path: Path) -> None:
    with pytest.raises(RootRefused, match="never created"):
        open_root(tmp_path / "root", read_only=True)
    assert os.listdir(tmp_path) == []


def test_what_a_killed_installer_left_is_swept(root: Root) -> None:
    (root.path / "new-0123456789abcdef").write_text("half")
    open_root(root.path)
    assert whole(root)


def test_an_installer_whose_scrap_is_swept_does_it_again(root: Root) -> None:
    fills = []

    def fill(fd: int) -> None:
        fills.append(fd)
        host.pwrite(fd, b"whole", 0)
        if len(fills) == 1:
            open_root(root.path)  # another process comes by

    root.install(root.path / "shared" / "head", fill)
    assert (len(fills), (root.path / "shared" / "head").read_bytes()) == (2, b"whole")


def test_an_installer_that_fails_leaves_nothing(root: Root) -> None:
    def fill(fd: int) -> None:
        raise OSError(28, "full")

    with pytest.raises(OSError, match="full"):
        root.install(root.path / "shared" / "head", fill)
    assert whole(root)
    assert os.listdir(root.shared_dir) == []


def test_a_root_goes_by_pickle(root: Root) -> None:
    assert pickle.loads(pickle.dumps(root)) == root


def test_names_are_parsed_as_they_are_made(root: Root) -> None:
    id, keyhash = 0x123456789ABCDEF, 2**62 - 1
    assert parse_blob_name(root.blob(id, ".tar.gz").name) == (id, ".tar.gz")
    assert root.blob(id).parent.name == "ef"
    assert parse_tmp_name(root.tmp(keyhash, id).name) == (keyhash, id, "")
    assert parse_tmp_name(root.tmp(keyhash, id, ".map").name) == (keyhash, id, ".map")
    assert root.leases(id) == root.lock(f"leases-{id % 64:02d}")
    assert root.leases(id).exists()


@pytest.mark.parametrize(
    "name",
    [
        "", "x", "0123456789abcdef-", "0123456789ABCDEF", "0123456789abcdef/..", "0123456789abcdef\n", "4000000000000000",
        "4000000000000000-0123456789abcdef", "0123456789abcdef-ffffffffffffffff",
    ],
)  # fmt: skip
def test_foreign_names_do_not_parse(name: str) -> None:
    assert parse_blob_name(name) is None
    assert parse_tmp_name(name) is None
    assert roots.VERSION == 3


def test_a_process_whose_own_directory_is_gone_opens_a_root_by_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert open_root(tmp_path / "root").path == tmp_path / "root"


WITHOUT_PROC = """
import logging, sys, forebay
logging.basicConfig(level=logging.WARNING, format="%(message)s")
with forebay.Cache(sys.argv[1], budget=10**8) as cache:
    print(cache.put("a", b"1"), bytes(cache.read(f"file://{sys.argv[2]}", force=True)))
"""


CLAIM = """
import sys, forebay
try:
    forebay.claim([sys.argv[1]])
except OSError as error:
    print(isinstance(error, forebay.errors.ForebayError), error.strerror)
"""


def without_proc(program: str, *arguments: Path) -> subprocess.CompletedProcess[str]:
    """Run a program where /proc is not mounted, as in a chroot."""
    unmounted = ["unshare", "-m", "sh", "-c", 'umount -l /proc && exec "$@"', "sh"]
    if subprocess.run([*unmounted, "true"], capture_output=True).returncode:
        pytest.skip("may not unmount /proc in a namespace of its own")
    return subprocess.run([*unmounted, sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=60)


@as_root
@pytest.mark.parametrize("is_new", [True, False])
def test_without_proc_calls_go_past_the_cache(tmp_path: Path, is_new: bool) -> None:
    """A path below /proc that is missing was taken for a file that another process had removed, again and again."""
    (tmp_path / "source").write_bytes(b"bytes")
    if not is_new:
        with forebay.Cache(tmp_path / "root", budget=MiB) as cache:
            cache.put("a", b"0")
    done = without_proc(WITHOUT_PROC, tmp_path / "root", tmp_path / "source")
    assert done.stdout.strip() == "False b'bytes'"
    assert "/proc is not mounted" in done.stderr


@as_root
def test_without_proc_claims_raise_an_error_of_their_own(tmp_path: Path) -> None:
    done = without_proc(CLAIM, tmp_path / "data")
    assert "True" in done.stdout, done.stderr
