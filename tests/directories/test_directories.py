"""`Cache.directory`: a remote directory as a local one, whole, shared, leased, and of one version."""

from __future__ import annotations

import errno
import gc
import os
import pickle
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import forebay
from forebay import errors
from forebay.remote import RemoteOptions
from forebay.reports import Progress
from forebay.testing import ScriptedServer
from tests.harness import data_usage, usage
from tests.items import until
from tests.processes import ProcessGroup, in_child
from tests.remote_directories import (
    CKPT,
    FILES,
    MARKER,
    TOTAL,
    Remote,
    arrow,
    arrow_helper,
    every_kind,
    files_of,
    fsspec_etags,
    fsspec_helper,
    http_directory,
    inodes_of,
    marker_of,
    modes_of,
    s3,
)
from tests.servers.counting import Shelf, content

MiB = 1 << 20
ODD = "a\N{COMBINING ACUTE ACCENT} b\\c%20d&e=f+g:h*i'j\"k"


def names_of(found: str | os.PathLike[str]) -> set[str]:
    return set(files_of(found))


# -- what is handed out ------------------------------------------------------------------------------------------------


@every_kind
def test_a_directory_of_any_kind(cache: forebay.Cache, remote: Remote) -> None:
    with cache.directory(remote.url, **remote.how) as path:
        assert files_of(path) == FILES
        assert modes_of(path) == {("d", 0o555), ("f", 0o444)}
        assert Path(path).is_relative_to(cache.path / "trees")


def test_a_slash_at_the_end_makes_no_difference(cache: forebay.Cache, remote: Remote) -> None:
    with cache.directory(remote.url, **remote.how) as one, cache.directory(f"{remote.url}/", **remote.how) as other:
        assert os.fspath(one) == os.fspath(other)


@every_kind
def test_a_file_that_changed_is_fetched_and_the_others_are_shared(cache: forebay.Cache, remote: Remote) -> None:
    with cache.directory(remote.url, **remote.how) as old:
        before, then = inodes_of(old), cache.stats().bytes_remote
        changed = content("changed", 50_001)
        remote.put("sub/deep/optim.pt", changed)
        remote.put("new", b"a new file")
        remote.remove("config.json")
        with cache.directory(remote.url, refresh=True, **remote.how) as new:
            expected = FILES | {"sub/deep/optim.pt": changed, "new": b"a new file"}
            del expected["config.json"]
            assert files_of(new) == expected
            after = inodes_of(new)
            assert {name for name in after if after[name] == before.get(name)} == set(expected) - {"sub/deep/optim.pt", "new"}
        assert files_of(old) == FILES  # whoever has the version before keeps it
    assert cache.stats().bytes_remote - then < 80_000


def test_the_lease_is_a_path(cache: forebay.Cache, remote: Remote) -> None:
    lease = cache.directory(remote.url, **remote.how)
    assert os.fspath(lease) == str(lease) == lease.path
    assert sorted(os.listdir(lease)) == sorted({name.partition("/")[0] for name in FILES})
    lease.close()
    lease.close()
    with pytest.raises(errors.Closed):
        os.fspath(lease)


def test_nothing_in_it_can_be_changed(cache: forebay.Cache, remote: Remote) -> None:
    """By who is not root."""
    with cache.directory(remote.url, **remote.how) as path:
        if os.geteuid() == 0:
            assert modes_of(path) == {("d", 0o555), ("f", 0o444)}
            return
        with pytest.raises(PermissionError):
            (Path(path) / "config.json").write_bytes(b"mine")
        with pytest.raises(PermissionError):
            (Path(path) / "mine").write_bytes(b"mine")


def test_each_file_is_an_entry_and_the_tree_has_no_bytes_of_its_own(cache: forebay.Cache, remote: Remote) -> None:
    with cache.directory(remote.url, **remote.how) as path:
        blobs = {entry.id: entry for entry in cache.entries("urls")}
        assert len(blobs) == len(FILES)
        assert sum(entry.size for entry in blobs.values()) == TOTAL
        assert len({entry.validator for entry in blobs.values()}) == len(FILES)
        assert all(entry.checksum for entry in blobs.values())
        inodes = {os.stat(file).st_ino for file in (cache.path / "blobs").glob("*/*")}
        assert set(inodes_of(path).values()) == inodes
        (tree,) = cache.entries("directories")
        assert (tree.kind, tree.leased) == ("tree", True)
    stats = cache.stats()
    assert data_usage(cache.path) <= stats.bytes_used <= TOTAL + (len(FILES) + 8) * 4096 + 65_536
    assert not cache.entries("directories")[0].leased


def test_the_files_are_there_for_the_other_calls(cache: forebay.Cache, server: ScriptedServer) -> None:
    """What `read` fetched the directory does not fetch, and the other way round."""
    url = http_directory(server, FILES)
    assert bytes(cache.read(f"{url}model-00001.safetensors")) == FILES["model-00001.safetensors"]
    sent = server.sent
    with cache.directory(url) as path:
        assert files_of(path) == FILES
    assert server.sent - sent < TOTAL - 300_000 + 10_000
    sent = server.sent
    assert bytes(cache.read(f"{url}sub/deep/optim.pt")) == FILES["sub/deep/optim.pt"]
    assert server.sent == sent


def test_a_tree_goes_before_its_files_can(cache: forebay.Cache, remote: Remote) -> None:
    """A file is no victim while a tree links it; when the last goes that does, they go with it."""
    with cache.directory(remote.url, **remote.how) as path:
        (tree,) = cache.entries("directories")
        for entry in cache.entries("urls"):
            assert cache.evict(entry.name).removed == ()
        assert cache.evict(tree.name).removed == ()
        assert files_of(path) == FILES
        with cache.directory(remote.url, include="sub/", **remote.how):
            pass
    part = next(entry for entry in cache.entries("directories") if entry.id != tree.id)
    removed = cache.evict(tree.name).removed  # what the part of it has stays
    assert tree.name in removed
    assert len(removed) == 1 + len([name for name in FILES if not name.startswith("sub/")])
    assert not os.path.exists(path)
    assert cache.evict(part.name).removed
    assert cache.entries("urls") == []
    assert data_usage(cache.path) == 0


def test_a_directory_stays_until_room_is_needed(cache: forebay.Cache, remote: Remote, shelf: Shelf) -> None:
    with cache.directory(remote.url, **remote.how) as path:
        first = os.fspath(path)
    shelf.forget()
    with cache.directory(remote.url, **remote.how) as path:
        assert os.fspath(path) == first
    assert shelf.asked() == []
    assert cache.put("brim", bytes(cache.budget - 65_536))
    assert not os.path.exists(first)
    cache.evict("values:brim")
    with cache.directory(remote.url, **remote.how) as path:
        assert files_of(path) == FILES


def test_pressure_of_three_times_the_budget_while_it_is_leased(tmp_path: Path, remote: Remote) -> None:
    with forebay.Cache(tmp_path / "root", budget=4 * MiB, min_free=0) as cache:
        with cache.directory(remote.url, **remote.how) as path:
            before = inodes_of(path)
            for n in range(24):
                cache.put(f"pressure {n}", bytes(512 << 10))
                assert cache.stats().bytes_used <= cache.budget
                assert data_usage(cache.path) <= cache.budget
            assert files_of(path) == FILES
            assert inodes_of(path) == before
        assert cache.check(deep=True) == []
        assert cache.put("brim", bytes(3_900_000))


def test_a_name_is_any_that_a_file_can_have(cache: forebay.Cache, shelf: Shelf) -> None:
    files = {ODD: b"odd", "...": b"three dots", ".hidden": b"h", "n" * 255: b"long", "/".join(["d" * 100] * 12): b"deep", "-rf": b"-"}
    shelf.fill(CKPT, files)
    with cache.directory(CKPT, filesystem=shelf.arrow()) as path:
        assert files_of(path) == files


def test_the_marker_of_an_upload_is_not_shown(cache: forebay.Cache, remote: Remote) -> None:
    remote.put(MARKER, marker_of(FILES))
    with cache.directory(remote.url, **remote.how) as path:
        assert files_of(path) == FILES


def test_metadata_of_ray_is_a_file_like_others(cache: forebay.Cache, remote: Remote) -> None:
    remote.put(".metadata.json", b'{"a": 1}')
    with cache.directory(remote.url, **remote.how) as path:
        assert (Path(path) / ".metadata.json").read_bytes() == b'{"a": 1}'


def test_many_files_are_listed_in_few_requests_and_opened_once(cache: forebay.Cache, shelf: Shelf) -> None:
    files = {f"{n % 7}/{n}": b"%d" % n for n in range(500)}
    shelf.fill(CKPT, files)
    with cache.directory(CKPT, filesystem=shelf.arrow()) as path:
        assert files_of(path) == files
    assert len(shelf.asked("list")) <= 10
    assert shelf.opens == sorted(f"{CKPT}/{name}" for name in files)  # each once


def test_files_of_a_new_listing_are_looked_at_once_each(cache: forebay.Cache, shelf: Shelf) -> None:
    """After they were read: the listing told what they were before."""
    files = {f"{n}": b"%d" % n for n in range(40)}
    shelf.fill(CKPT, files)
    with cache.directory(CKPT, filesystem=shelf.arrow()) as path:
        assert files_of(path) == files
    asked = [each for each in shelf.asked() if each.verb in ("stat", "read")]
    names = [each.name for each in asked if each.verb == "stat"]
    assert sorted(names) == sorted(f"{CKPT}/{name}" for name in files)
    for name in names:
        assert [each.verb for each in asked if each.name == name] == ["read", "stat"]


def test_files_of_an_older_listing_are_looked_at_before_they_are_read(cache: forebay.Cache, shelf: Shelf) -> None:
    shelf.fill(CKPT, {"a": b"a", "b": b"b"})
    cache.directory(CKPT, filesystem=shelf.arrow(), include="a").close()
    shelf.forget()
    cache.directory(CKPT, filesystem=shelf.arrow(), include="b").close()
    assert [each.verb for each in shelf.asked() if each.name.endswith("/b")][:2] == ["stat", "open"]


# -- damage ------------------------------------------------------------------------------------------------------------


def look(root: Path, there: Shelf) -> tuple[str, dict[str, bytes]]:
    with forebay.Cache(root) as cache, cache.directory(CKPT, filesystem=there.arrow()) as path:
        return path, files_of(path)


@pytest.mark.parametrize("harm", ["flipped", "cut", "gone from the tree", "tree gone"])
def test_damage_is_seen_and_mended(cache: forebay.Cache, remote: Remote, shelf: Shelf, harm: str) -> None:
    """By the next process; what is whole is not fetched again."""
    path, _ = in_child(lambda: look(cache.path, shelf))
    file = Path(path) / "sub" / "deep" / "optim.pt"
    if harm == "flipped":
        file.chmod(0o644)
        with open(file, "r+b") as stored:
            stored.write(b"XXXX")
    elif harm == "cut":
        file.chmod(0o644)
        os.truncate(file, 10)
    else:
        for folder in (file.parents[2], file.parents[1], file.parents[0]):
            folder.chmod(0o755)
        file.unlink() if harm == "gone from the tree" else shutil.rmtree(path)
    shelf.forget()
    assert in_child(lambda: look(cache.path, shelf))[1] == FILES
    assert shelf.opens == ([f"{CKPT}/sub/deep/optim.pt"] if harm in ("flipped", "cut") else [])


def test_one_repair_mends_a_tree_with_a_file_that_lost_its_other_name(cache: forebay.Cache, remote: Remote) -> None:
    with cache.directory(remote.url, **remote.how) as path:
        file = Path(path) / "sub" / "deep" / "optim.pt"
        next(name for name in cache.path.glob("blobs/*/*") if name.samefile(file)).unlink()
    cache.repair()
    assert cache.check(deep=True) == []
    with cache.directory(remote.url, **remote.how) as path:
        assert files_of(path) == FILES


# -- local directories -------------------------------------------------------------------------------------------------


def local_places(place: Path) -> list[tuple[Any, Any]]:
    fsspec = pytest.importorskip("fsspec")
    arrow = pytest.importorskip("pyarrow.fs")
    fs = fsspec.filesystem("file")
    return [
        (place, None), (str(place), None), (f"{place}/", None), (place.as_uri(), None), (str(place), fs),
        (str(place), arrow.LocalFileSystem()), (str(place), arrow.PyFileSystem(arrow.FSSpecHandler(fs))),
    ]  # fmt: skip


@pytest.mark.parametrize("which", range(7))
def test_a_local_directory_is_its_own_path(cache: forebay.Cache, tmp_path: Path, which: int) -> None:
    place = tmp_path / "mine"
    (place / "sub").mkdir(parents=True)
    (place / "sub" / "file").write_bytes(b"mine")
    (place / "link").symlink_to("sub")
    before = os.stat(place / "sub" / "file")
    url, filesystem = local_places(place)[which]
    with cache.directory(url, **({} if filesystem is None else {"filesystem": filesystem})) as path:
        assert os.path.abspath(os.fspath(path)) == str(place)
        (place / "new").write_bytes(b"a write of its owner is none of our business")
    assert cache.entries() == []
    after = os.stat(place / "sub" / "file")
    assert (after.st_mode, after.st_mtime_ns, after.st_nlink) == (before.st_mode, before.st_mtime_ns, before.st_nlink)
    assert sorted(os.listdir(place)) == ["link", "new", "sub"]


def test_a_local_directory_can_be_kept(cache: forebay.Cache, tmp_path: Path) -> None:
    """Such as one on a network mount."""
    place = tmp_path / "mounted"
    (place / "sub").mkdir(parents=True)
    (place / "sub" / "file").write_bytes(b"mine")
    with cache.directory(place, force=True) as path:
        assert Path(path).is_relative_to(cache.path)
        assert files_of(path) == {"sub/file": b"mine"}
        (place / "sub" / "file").write_bytes(b"changed")
        assert files_of(path) == {"sub/file": b"mine"}
        with cache.directory(place, force=True, refresh=True) as new:
            assert files_of(new) == {"sub/file": b"changed"}
    assert os.stat(place / "sub" / "file").st_nlink == 1


def test_a_local_directory_that_is_not_there(cache: forebay.Cache, tmp_path: Path) -> None:
    with pytest.raises(errors.NotFound, match="nowhere"):
        cache.directory(tmp_path / "nowhere")
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(errors.NotADirectory, match="file"):
        cache.directory(tmp_path / "file")


# -- a part of it ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("include", "exclude", "wanted"),
    [
        (["model-*.safetensors"], None, {"model-00001.safetensors", "model-00002.safetensors"}),
        (["model-*"], ["*-00002.*"], {"model-00001.safetensors"}),
        (["sub/"], None, {name for name in FILES if name.startswith("sub/")}),
        (None, ["sub/"], {name for name in FILES if not name.startswith("sub/")}),
        ("*.pt", None, {"sub/deep/optim.pt"}),  # a star crosses a slash
        (["deep/*"], None, None),  # a pattern is of the whole name
        (["config.json", "empty"], [], {"config.json", "empty"}),
        (None, ["*"], None),
        (["Config.json"], None, None),  # case counts
        (["model-0000[12].*"], ["?odel-00001*"], {"model-00002.safetensors"}),
    ],
)
def test_a_part_of_a_directory_by_include_and_exclude(
    cache: forebay.Cache, remote: Remote, include: Any, exclude: Any, wanted: set[str] | None
) -> None:
    if wanted is None:
        with pytest.raises(errors.NotFound):
            cache.directory(remote.url, include=include, exclude=exclude, **remote.how)
        return
    with cache.directory(remote.url, include=include, exclude=exclude, **remote.how) as path:
        assert files_of(path) == {name: FILES[name] for name in wanted}


def test_a_part_now_and_only_the_rest_later(cache: forebay.Cache, remote: Remote, shelf: Shelf) -> None:
    """Scenario 37."""
    with cache.directory(remote.url, include=["model-*"], **remote.how) as part:
        assert shelf.opens == [f"{CKPT}/model-00001.safetensors", f"{CKPT}/model-00002.safetensors"]
        shelf.forget()
        with cache.directory(remote.url, **remote.how) as whole:
            assert files_of(whole) == FILES
            assert shelf.opens == sorted(f"{CKPT}/{name}" for name in FILES if not name.startswith("model-") and FILES[name])
            assert names_of(part) == {"model-00001.safetensors", "model-00002.safetensors"}
            shelf.forget()
            with cache.directory(remote.url, include="sub/", exclude="*.bin", **remote.how) as other:
                assert names_of(other) == {"sub/deep/optim.pt", "sub/with space #1?.txt"}
    assert shelf.asked("open") == []


def test_the_order_of_patterns_makes_no_other_part(cache: forebay.Cache, remote: Remote) -> None:
    with cache.directory(remote.url, include=["model-*", "sub/"], **remote.how) as one:
        with cache.directory(remote.url, include=["sub/", "model-*", "sub/"], **remote.how) as other:
            assert os.fspath(one) == os.fspath(other)


@pytest.mark.parametrize("patterns", [[1], [""], ["../x"], [b"a"], []])
def test_patterns_that_make_no_sense(cache: forebay.Cache, remote: Remote, patterns: Any, shelf: Shelf) -> None:
    with pytest.raises((errors.ConfigError, errors.NotFound)):
        cache.directory(remote.url, include=patterns, **remote.how)
    assert shelf.asked("open") == []


# -- versions and freshness --------------------------------------------------------------------------------------------


def test_four_handles_and_a_restart_find_the_same_copy(tmp_path: Path, remote: Remote, shelf: Shelf) -> None:
    """Scenario 12."""
    seen = set()
    for _ in range(2):
        for _ in range(2):
            with forebay.Cache(tmp_path / "root", budget=64 * MiB, min_free=0) as cache:
                with cache.directory(remote.url, filesystem=shelf.arrow()) as path:
                    seen.add(os.fspath(path))
                    assert files_of(path) == FILES
    assert len(seen) == 1
    assert shelf.opens == sorted(f"{CKPT}/{name}" for name, body in FILES.items() if body)
    assert shelf.sent == TOTAL


def test_within_max_age_nobody_is_asked(cache: forebay.Cache, remote: Remote, shelf: Shelf) -> None:
    cache.directory(remote.url, **remote.how).close()
    shelf.forget()
    for _ in range(3):
        cache.directory(remote.url, **remote.how).close()
        cache.directory(remote.url, max_age="forever", **remote.how).close()
    assert shelf.asked() == []


def test_after_max_age_the_listing_is_asked_for_and_nothing_else(cache: forebay.Cache, remote: Remote, shelf: Shelf) -> None:
    with cache.directory(remote.url, **remote.how) as first:
        shelf.forget()
        with cache.directory(remote.url, max_age=0, **remote.how) as second:
            assert os.fspath(first) == os.fspath(second)
    assert shelf.asked("list")
    assert shelf.asked("open") == []


def test_a_change_is_seen_after_max_age(cache: forebay.Cache, remote: Remote) -> None:
    cache.directory(remote.url, **remote.how).close()
    remote.put("config.json", b"[]")
    with cache.directory(remote.url, **remote.how) as path:
        assert files_of(path) == FILES
    with cache.directory(remote.url, max_age=0, **remote.how) as path:
        assert files_of(path) == FILES | {"config.json": b"[]"}


def test_a_part_that_did_not_change_stays(cache: forebay.Cache, remote: Remote) -> None:
    with cache.directory(remote.url, include="model-*", **remote.how) as first:
        remote.put("config.json", b"{1}")
        with cache.directory(remote.url, include="model-*", refresh=True, **remote.how) as second:
            assert inodes_of(first) == inodes_of(second)


def test_invalidate_lets_the_next_call_ask(cache: forebay.Cache, server: ScriptedServer) -> None:
    url = http_directory(server, FILES)
    cache.directory(url).close()
    http_directory(server, FILES | {"config.json": b"{1}"})
    cache.invalidate(url)
    with cache.directory(url) as path:
        assert files_of(path) == FILES | {"config.json": b"{1}"}


@every_kind
def test_what_is_not_there_is_told_and_not_remembered(cache: forebay.Cache, remote: Remote) -> None:
    """Scenario 24."""
    for name in FILES:
        remote.remove(name)
    for _ in range(2):
        with pytest.raises(errors.NotFound, match="step_100") as caught:
            cache.directory(remote.url, **remote.how)
        assert isinstance(caught.value, FileNotFoundError)
    assert cache.entries() == []
    remote.put("late", b"it came")
    with cache.directory(remote.url, **remote.how) as path:
        assert files_of(path) == {"late": b"it came"}


def test_a_remote_directory_that_went_away_is_not_found(cache: forebay.Cache, remote: Remote) -> None:
    cache.directory(remote.url, **remote.how).close()
    for name in FILES:
        remote.remove(name)
    with pytest.raises(errors.NotFound, match="step_100"):
        cache.directory(remote.url, refresh=True, **remote.how)
    remote.put("late", b"it came")
    with cache.directory(remote.url, **remote.how) as path:
        assert files_of(path) == {"late": b"it came"}


def test_offline_serves_what_is_there_and_asks_nobody(cache: forebay.Cache, remote: Remote, shelf: Shelf) -> None:
    """Scenario 22."""
    with pytest.raises(errors.Offline, match="step_100") as caught:
        cache.directory(remote.url, offline=True, **remote.how)
    assert isinstance(caught.value, FileNotFoundError)
    assert shelf.asked() == []
    cache.directory(remote.url, **remote.how).close()
    shelf.forget()
    began = time.monotonic()
    with cache.directory(remote.url, offline=True, max_age=0, **remote.how) as path:
        assert files_of(path) == FILES
    assert time.monotonic() - began < 20
    with cache.directory(remote.url, offline=True, include="*.json", **remote.how) as path:  # a part of what is there
        assert names_of(path) == {"config.json"}
    assert shelf.asked() == []


def test_a_remote_that_cannot_be_reached_does_not_take_away_what_is_there(
    tmp_path: Path,
    remote: Remote,
    shelf: Shelf,
    caplog: pytest.LogCaptureFixture,
) -> None:
    options = RemoteOptions(attempts=1, backoff=0.01)
    with forebay.Cache(tmp_path / "root", budget=64 * MiB, min_free=0, remote_options=options) as cache:
        cache.directory(remote.url, **remote.how).close()
        shelf.fail("list", "ConnectionError", "blackholed")
        with cache.directory(remote.url, refresh=True, **remote.how) as path:
            assert files_of(path) == FILES
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        with pytest.raises(errors.RemoteUnavailable, match="step_101"):
            cache.directory(f"{CKPT[:-3]}101", **remote.how)


# -- uploads that are not finished -------------------------------------------------------------------------------------


@every_kind
def test_an_upload_that_goes_on_is_not_handed_out(cache: forebay.Cache, remote: Remote) -> None:
    remote.put(MARKER, marker_of(FILES, complete=False))
    with pytest.raises(errors.Incomplete, match="step_100"):
        cache.directory(remote.url, **remote.how)
    assert cache.entries("directories") == []
    remote.put(MARKER, marker_of(FILES))
    with cache.directory(remote.url, **remote.how) as path:
        assert files_of(path) == FILES


def test_a_file_of_the_manifest_that_is_missing(cache: forebay.Cache, remote: Remote) -> None:
    remote.put(MARKER, marker_of(FILES))
    remote.remove("config.json")
    with pytest.raises(errors.Incomplete, match="step_100"):
        cache.directory(remote.url, **remote.how)


def test_while_a_new_one_is_uploaded_the_old_one_is_served(cache: forebay.Cache, remote: Remote, caplog: pytest.LogCaptureFixture) -> None:
    remote.put(MARKER, marker_of(FILES))
    cache.directory(remote.url, **remote.how).close()
    remote.put(MARKER, marker_of(FILES, complete=False))
    remote.put("config.json", b"half of the next")
    with cache.directory(remote.url, refresh=True, **remote.how) as path:
        assert files_of(path) == FILES
    assert "WARNING" in [record.levelname for record in caplog.records]


def test_bytes_that_are_not_those_of_the_manifest(cache: forebay.Cache, server: ScriptedServer) -> None:
    """The right size and ETag, other bytes: what was uploaded is not what is there."""
    url = http_directory(server, FILES)
    server.objects["/run/step_100/model-00001.safetensors"].body = content("other", 300_000)
    with pytest.raises((errors.RemoteError, errors.ChecksumMismatch), match="model-00001"):
        cache.directory(url)
    assert cache.entries("directories") == []
    http_directory(server, FILES)
    with cache.directory(url) as path:
        assert files_of(path) == FILES


@pytest.mark.parametrize(
    "marker",
    [
        b"", b"[]", b'{"forebay": 99}', b'{"files": 1}',
        b'{"forebay": 1, "complete": true, "files": {"../x": {"size": 1}}}',
        b'{"forebay": 1, "complete": true, "files": {"a": {"size": -1}}}', b'{"forebay": 1, "complete": true, "files": {"a": 5}}',
    ],
)  # fmt: skip
def test_a_manifest_that_makes_no_sense(cache: forebay.Cache, server: ScriptedServer, marker: bytes, tmp_path: Path) -> None:
    server.put(f"/d/{MARKER}", marker)
    with pytest.raises(errors.RemoteError, match="/d/"):
        cache.directory(f"{server.url}/d/")
    assert cache.entries("directories") == []


# -- names that cannot be ----------------------------------------------------------------------------------------------


HOSTILE = {
    "up": "../../etc/x", "up only": "..", "dot": "./x", "up inside": "a/../../x", "absolute": "/etc/passwd", "newline": "a\nb",
    "nul": "a\0b", "control": "a\x1bb", "empty part": "a//b", "too long": "n" * 256, "path too long": "/".join(["d" * 200] * 30),
    "slash at the end": "a/",
}  # fmt: skip


@pytest.mark.parametrize(
    ("face", "what"),
    [*(("arrow", what) for what in HOSTILE if what != "nul"), ("fsspec", "nul"), ("fsspec", "up")],  # pyarrow cannot say a nul
)
def test_a_hostile_name(cache: forebay.Cache, tmp_path: Path, shelf: Shelf, face: str, what: str) -> None:
    shelf.fill(CKPT, FILES)
    shelf.lists(f"{CKPT}/{HOSTILE[what]}")
    before = outside(tmp_path)
    with pytest.raises(errors.BadListing) as caught:
        cache.directory(CKPT, filesystem=getattr(shelf, face)())
    assert isinstance(caught.value, errors.RemoteError)
    assert CKPT in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "\x1b" not in str(caught.value)
    assert outside(tmp_path) == before
    assert shelf.asked("open") == []
    assert cache.entries("directories") == []


@pytest.mark.parametrize("name", ["config.json/x", "sub"])
def test_a_file_and_a_directory_of_one_name(cache: forebay.Cache, tmp_path: Path, shelf: Shelf, name: str) -> None:
    shelf.fill(CKPT, FILES)
    shelf.lists(f"{CKPT}/{name}")
    before = outside(tmp_path)
    with pytest.raises(errors.BadListing, match=name.partition("/")[0]):
        cache.directory(CKPT, filesystem=shelf.arrow())
    assert outside(tmp_path) == before


def test_a_hostile_name_in_a_manifest(cache: forebay.Cache, tmp_path: Path, server: ScriptedServer) -> None:
    for name in HOSTILE.values():
        server.put(f"/d/{MARKER}", marker_of({"fine": b"f", name: b"h"}))
        before = outside(tmp_path)
        with pytest.raises(errors.RemoteError):
            cache.directory(f"{server.url}/d/")
        assert outside(tmp_path) == before


def test_hostile_names_on_s3(cache: forebay.Cache, aws: Any) -> None:
    client = aws.client()
    client.create_bucket(Bucket="hostile")
    for number, name in enumerate(["../../etc/x", "/etc/x", "a\nb", "a//b"]):
        client.put_object(Bucket="hostile", Key=f"{number}/fine", Body=b"fine")
        client.put_object(Bucket="hostile", Key=f"{number}/{name}", Body=b"hostile")
        with pytest.raises(errors.BadListing):
            cache.directory(f"s3://hostile/{number}/")
    client.put_object(Bucket="hostile", Key="folder/", Body=b"")  # as some tools mark an empty directory: that is fine
    client.put_object(Bucket="hostile", Key="folder/sub/", Body=b"")
    client.put_object(Bucket="hostile", Key="folder/sub/file", Body=b"f")
    with cache.directory("s3://hostile/folder/") as path:
        assert files_of(path) == {"sub/file": b"f"}


def outside(place: Path) -> set[str]:
    """All that is there, but for the root and the journal."""
    found = {str(path) for path in place.rglob("*")}
    return {path for path in found if not path.startswith((f"{place}/root/", f"{place}/shelf/"))}


def test_a_file_is_no_directory(cache: forebay.Cache, remote: Remote, server: ScriptedServer) -> None:
    with pytest.raises(errors.NotADirectory, match=r"config\.json") as caught:
        cache.directory(f"{remote.url}/config.json", **remote.how)
    assert isinstance(caught.value, NotADirectoryError)
    assert caught.value.errno == errno.ENOTDIR


# -- remotes that misbehave --------------------------------------------------------------------------------------------


def hasty(root: Path, **options: Any) -> forebay.Cache:
    asked = RemoteOptions(**({"part": 64 << 10, "backoff": 0.01, "attempts": 2, "read_timeout": 10.0} | options))
    return forebay.Cache(root, budget=64 * MiB, min_free=0, remote_options=asked)


def test_a_server_that_truncates(tmp_path: Path, server: ScriptedServer) -> None:
    url = http_directory(server, FILES)
    cut = server.objects["/run/step_100/model-00001.safetensors"]
    cut.cut_after = 1000
    with hasty(tmp_path / "root") as cache:
        with pytest.raises(errors.RemoteError, match="model-00001"):
            cache.directory(url)
        assert cache.entries("directories") == []
        cut.cuts = 0
        with cache.directory(url) as path:
            assert files_of(path) == FILES
        assert cache.check(deep=True) == []


def test_a_filesystem_that_truncates(tmp_path: Path, remote: Remote, shelf: Shelf) -> None:
    shelf.cut(f"{CKPT}/model-00001.safetensors", after=1000)
    with hasty(tmp_path / "root") as cache:
        with pytest.raises(errors.RemoteError, match="model-00001"):
            cache.directory(remote.url, **remote.how)
        assert cache.entries("directories") == []
        shelf.withdraw("cut", f"{CKPT}/model-00001.safetensors")
        with cache.directory(remote.url, **remote.how) as path:
            assert files_of(path) == FILES


def test_a_server_that_truncates_once_is_asked_again(tmp_path: Path, server: ScriptedServer) -> None:
    """Scenario 26."""
    url = http_directory(server, FILES)
    for name in ("model-00001.safetensors", "model-00002.safetensors"):
        server.objects[f"/run/step_100/{name}"].cut_after = 50_000
        server.objects[f"/run/step_100/{name}"].cuts = 1
    server.objects["/run/step_100/config.json"].statuses = [503]
    with hasty(tmp_path / "root", attempts=4) as cache, cache.directory(url) as path:
        assert files_of(path) == FILES
    assert server.sent < 1.5 * TOTAL


def test_a_server_that_stalls_for_ever(tmp_path: Path, server: ScriptedServer) -> None:
    url = http_directory(server, FILES)
    server.objects["/run/step_100/model-00001.safetensors"].stall_after = 1000
    with hasty(tmp_path / "root", read_timeout=1, attempts=2) as cache:
        began = time.monotonic()
        with pytest.raises((errors.RemoteTimeout, errors.RemoteUnavailable), match="model-00001"):
            cache.directory(url)
        assert time.monotonic() - began < 20
        assert cache.entries("directories") == []
        server.objects["/run/step_100/model-00001.safetensors"].stall_after = None
        with cache.directory(url) as path:
            assert files_of(path) == FILES


def test_an_etag_that_changes_between_two_ranges(tmp_path: Path, server: ScriptedServer) -> None:
    """The other version is fetched, whole: no file of the tree has bytes of both."""
    url = http_directory(server, FILES)
    name, new = "model-00001.safetensors", content("next", 300_000)
    asked = []

    def on_request(request: Any) -> None:
        if request.path.endswith(name) and request.method == "GET":
            asked.append(request)
            if len(asked) == 2:
                http_directory(server, FILES | {name: new})

    server.on_request = on_request
    with hasty(tmp_path / "root", streams=1) as cache, cache.directory(url) as path:
        assert files_of(path) == FILES | {name: new}
    assert len(asked) > 2


def test_an_object_that_changes_between_two_reads(tmp_path: Path, remote: Remote, shelf: Shelf) -> None:
    name, new = "model-00001.safetensors", content("next", 300_000)
    shelf.swap(f"{CKPT}/{name}", new, after=70_000)
    with hasty(tmp_path / "root", streams=1) as cache, cache.directory(remote.url, **remote.how) as path:
        assert files_of(path) == FILES | {name: new}


def test_an_object_that_changes_size_between_two_reads(tmp_path: Path, remote: Remote, shelf: Shelf) -> None:
    for size in (100_000, 400_000):
        name, new = "model-00001.safetensors", content("next", size)
        shelf.put(f"{CKPT}/{name}", FILES[name])
        shelf.swap(f"{CKPT}/{name}", new, after=70_000)
        with hasty(tmp_path / "root", streams=1) as cache, cache.directory(remote.url, refresh=True, **remote.how) as path:
            assert files_of(path) == FILES | {name: new}


def test_a_directory_that_changes_between_listing_and_fetch(tmp_path: Path, remote: Remote, shelf: Shelf) -> None:
    """The last file is replaced while the first one is fetched: what is handed out is of one moment."""
    shelf.stall(f"{CKPT}/config.json")
    with hasty(tmp_path / "root") as cache:
        found: list[dict[str, bytes]] = []

        def fetch() -> None:
            with cache.directory(remote.url, **remote.how) as path:
                found.append(files_of(path))

        thread = threading.Thread(target=fetch)
        thread.start()
        shelf.wait("stalled")
        new = {"sub/deep/optim.pt": content("next", 60_000), "config.json": b"{next}"}
        shelf.fill(CKPT, new)
        shelf.go(f"{CKPT}/config.json")
        thread.join(60)
        assert found == [FILES | new]


def test_a_file_that_vanishes_between_listing_and_fetch(tmp_path: Path, remote: Remote, shelf: Shelf) -> None:
    """Listed anew: the directory without it, or an error that names it; never half of it."""
    shelf.stall(f"{CKPT}/config.json")
    with hasty(tmp_path / "root") as cache:
        found: list[Any] = []

        def fetch() -> None:
            try:
                with cache.directory(remote.url, **remote.how) as path:
                    found.append(files_of(path))
            except errors.RemoteError as error:
                found.append(error)

        thread = threading.Thread(target=fetch)
        thread.start()
        shelf.wait("stalled")
        shelf.remove(f"{CKPT}/config.json")
        shelf.swap(f"{CKPT}/config.json", b"")
        shelf.withdraw("swap", f"{CKPT}/config.json")
        shelf.go(f"{CKPT}/config.json")
        thread.join(60)
        left = {name: body for name, body in FILES.items() if name != "config.json"}
        assert found[0] == left or "config.json" in str(found[0])
        with cache.directory(remote.url, **remote.how) as path:
            assert files_of(path) == left


def test_a_remote_directory_that_changes_again_and_again_is_an_error(tmp_path: Path, server: ScriptedServer) -> None:
    """A directory that is never at rest, not even after it was listed, is an error, and no endless loop."""
    url = http_directory(server, FILES)
    count = [0]

    def on_request(request: Any) -> None:
        if request.path.endswith("model-00001.safetensors") and request.method == "GET":
            count[0] += 1
            http_directory(server, FILES | {"model-00001.safetensors": content(f"{count[0]}", 300_000)})
        elif request.path.endswith(MARKER):
            server.put(f"/run/step_100/{MARKER}", marker_of(FILES | {"model-00001.safetensors": content(f"m{count[0]}", 300_000)}))

    server.on_request = on_request
    with hasty(tmp_path / "root", streams=1) as cache:
        with pytest.raises(errors.RemoteChanged, match=r"step_100|model-00001"):
            cache.directory(url)
        assert cache.entries("directories") == []
        assert count[0] < 60


def test_what_the_remote_raises_reaches_the_caller(tmp_path: Path, remote: Remote, shelf: Shelf) -> None:
    shelf.fail(f"{CKPT}/config.json", "PermissionError", "not yours")
    with hasty(tmp_path / "root") as cache:
        with pytest.raises(errors.AccessDenied, match=r"config\.json"):
            cache.directory(remote.url, **remote.how)
        shelf.withdraw("fail", f"{CKPT}/config.json")
        with cache.directory(remote.url, **remote.how) as path:
            assert files_of(path) == FILES


def test_errors_pickle(tmp_path: Path, remote: Remote, shelf: Shelf) -> None:
    """Scenario 29."""
    shelf.lists(f"{CKPT}/../x")
    with hasty(tmp_path / "root") as cache, pytest.raises(errors.BadListing) as caught:
        cache.directory(remote.url, **remote.how)
    again = pickle.loads(pickle.dumps(caught.value))
    assert (type(again), str(again), again.name) == (errors.BadListing, str(caught.value), "../x")


# -- room --------------------------------------------------------------------------------------------------------------


def test_a_directory_that_is_larger_than_the_budget(tmp_path: Path, remote: Remote, shelf: Shelf) -> None:
    with forebay.Cache(tmp_path / "root", budget=256 << 10, min_free=0) as cache:
        assert cache.put("kept", b"x" * 10_000)
        with pytest.raises(errors.NoSpace) as caught:
            cache.directory(remote.url, **remote.how)
        assert isinstance(caught.value, OSError)
        assert caught.value.errno == errno.ENOSPC
        assert caught.value.need >= TOTAL
        assert caught.value.budget == 256 << 10
        assert 0 <= caught.value.free <= 256 << 10
        assert shelf.asked("open") == []  # nothing is fetched for nothing
        assert cache.get("kept") is not None  # and nothing evicted
        assert cache.stats().bytes_reserved == 0
        with cache.directory(remote.url, include="sub/", **remote.how) as path:  # a part of it fits
            assert len(files_of(path)) == 3


def test_room_that_is_held_by_others(tmp_path: Path, remote: Remote, shelf: Shelf) -> None:
    shelf.put("other/large", content("large", 600_000))
    with forebay.Cache(tmp_path / "root", budget=MiB, min_free=0) as cache:
        with cache.directory("other", **remote.how) as held:
            with pytest.raises(errors.NoSpace) as caught:
                cache.directory(remote.url, **remote.how)
            assert caught.value.need >= TOTAL
            assert files_of(held) == {"large": content("large", 600_000)}
        with cache.directory(remote.url, **remote.how) as path:
            assert files_of(path) == FILES


def test_the_whole_root_is_counted(tmp_path: Path, remote: Remote) -> None:
    with forebay.Cache(tmp_path / "root", budget=8 * MiB, min_free=0) as cache:
        for n in range(30):
            remote.put("model-00001.safetensors", content(f"{n}", 300_000))
            with cache.directory(remote.url, refresh=True, **remote.how) as path:
                assert len(files_of(path)) == len(FILES)
            assert data_usage(cache.path) <= cache.stats().bytes_used <= cache.budget
        assert cache.check(deep=True) == []
    assert usage(tmp_path / "root" / "tmp") == 0


# -- many at once ------------------------------------------------------------------------------------------------------


def test_threads_share_one_fetch_and_one_copy(cache: forebay.Cache, remote: Remote, shelf: Shelf) -> None:
    shelf.stall(f"{CKPT}/config.json")
    seen: list[str] = []

    def use() -> None:
        with cache.directory(remote.url, **remote.how) as path:
            assert files_of(path) == FILES
            seen.append(os.fspath(path))

    threads = [threading.Thread(target=use) for _ in range(8)]
    for thread in threads:
        thread.start()
    shelf.wait("stalled")
    shelf.go(f"{CKPT}/config.json")
    for thread in threads:
        thread.join(60)
    assert len(seen) == 8
    assert len(set(seen)) == 1
    assert shelf.sent == TOTAL


def test_threads_enter_and_leave_in_any_order(cache: forebay.Cache, remote: Remote) -> None:
    """Who leaves takes nothing from who is inside."""
    inside, leave = threading.Semaphore(0), [threading.Event() for _ in range(6)]
    wrong: list[object] = []

    def use(n: int) -> None:
        try:
            with cache.directory(remote.url, **remote.how) as path:
                inside.release()
                assert leave[n].wait(60)
                assert files_of(path) == FILES
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=use, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
        assert inside.acquire(timeout=60)
    for n in (3, 0, 5, 1, 4, 2):
        assert cache.entries("directories")[0].leased
        assert cache.evict(cache.entries("directories")[0].name).removed == ()
        leave[n].set()
        threads[n].join(60)
    assert wrong == []
    assert not cache.entries("directories")[0].leased


def test_different_parts_at_once(cache: forebay.Cache, remote: Remote, shelf: Shelf) -> None:
    """Scenario 37: each gets what it asked for, and no byte comes twice."""
    shelf.slow(0.01)
    parts: list[Any] = [{"include": "model-*"}, {"exclude": "model-*"}, {}, {"include": ["sub/", "model-00001*"]}] * 2
    found: dict[int, set[str]] = {}

    def use(n: int) -> None:
        with cache.directory(remote.url, **parts[n], **remote.how) as path:
            found[n] = names_of(path)

    threads = [threading.Thread(target=use, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    models = {name for name in FILES if name.startswith("model-")}
    subs = {name for name in FILES if name.startswith("sub/")}
    assert found == {
        n: [models, set(FILES) - models, set(FILES), subs | {"model-00001.safetensors"}][n % 4] for n in range(8)
    }  # fmt: skip
    assert shelf.sent == TOTAL


def test_a_lease_that_is_dropped_is_released(cache: forebay.Cache, remote: Remote) -> None:
    lease = cache.directory(remote.url, **remote.how)
    assert cache.entries("directories")[0].leased
    del lease
    gc.collect()
    assert not cache.entries("directories")[0].leased


def test_a_lease_pins_in_a_forked_child_too(cache: forebay.Cache, remote: Remote) -> None:
    children = ProcessGroup()
    try:
        lease = cache.directory(remote.url, **remote.how)
        ours, theirs = os.pipe()
        child = children(lambda: os.read(ours, 1))
        lease.close()
        assert cache.entries("directories")[0].leased
        assert cache.evict(cache.entries("directories")[0].name).removed == ()
        child.kill()
        until(lambda: not cache.entries("directories")[0].leased)
        os.close(ours)
        os.close(theirs)
    finally:
        children.kill()


# -- how fast, and how it is told --------------------------------------------------------------------------------------


def test_files_come_in_parallel(cache: forebay.Cache, shelf: Shelf) -> None:
    """Four stand still at once."""
    shelf.fill(CKPT, {f"f{n}": content(f"{n}", 10_000) for n in range(8)})
    for n in range(8):
        shelf.stall(f"{CKPT}/f{n}")
    thread = threading.Thread(target=lambda: cache.directory(CKPT, filesystem=shelf.arrow()).close())
    thread.start()
    try:
        shelf.wait("stalled", times=4)
    finally:
        for n in range(8):
            shelf.go(f"{CKPT}/f{n}")
        thread.join(60)
    assert cache.entries("directories")


def test_connections_are_shared(cache: forebay.Cache, server: ScriptedServer) -> None:
    """Forty files: one pool of connections, no more of them than streams at a time."""
    url = http_directory(server, {f"f{n}": content(f"{n}", 200_000) for n in range(40)})
    most = [0]

    def on_request(request: Any) -> None:
        most[0] = max(most[0], sum("process_request" in thread.name for thread in threading.enumerate()))

    server.on_request = on_request
    with cache.directory(url) as path:
        assert len(files_of(path)) == 40
    assert 2 <= most[0] <= 17


def test_a_large_file_comes_in_parallel_ranges(tmp_path: Path, shelf: Shelf) -> None:
    shelf.put(f"{CKPT}/large", content("large", MiB))
    shelf.stall(f"{CKPT}/large")
    with hasty(tmp_path / "root", streams=4) as cache:
        thread = threading.Thread(target=lambda: cache.directory(CKPT, filesystem=shelf.arrow()).close())
        thread.start()
        try:
            shelf.wait("stalled", times=3)
        finally:
            shelf.go(f"{CKPT}/large")
            thread.join(60)
        with cache.directory(CKPT, filesystem=shelf.arrow()) as path:
            assert files_of(path) == {"large": content("large", MiB)}


def test_progress_is_of_the_whole_directory(cache: forebay.Cache, remote: Remote) -> None:
    steps: list[Progress] = []
    cache.directory(remote.url, on_progress=steps.append, **remote.how).close()
    assert {step.url for step in steps} == {steps[0].url}
    assert "step_100" in steps[0].url
    fetching = [step for step in steps if step.state == "fetching"]
    assert fetching
    assert all(step.total == TOTAL for step in fetching)
    assert [step.done for step in steps] == sorted(step.done for step in steps)
    assert (steps[-1].state, steps[-1].done, steps[-1].total) == ("done", TOTAL, TOTAL)
    steps.clear()
    cache.directory(remote.url, on_progress=steps.append, **remote.how).close()
    assert [step.state for step in steps if step.state != "done"] == []  # nobody fetches, nobody waits


def test_who_waits_says_so(cache: forebay.Cache, remote: Remote, shelf: Shelf, tmp_path: Path) -> None:
    shelf.stall(f"{CKPT}/model-00001.safetensors")
    children = ProcessGroup()
    told: list[Progress] = []
    try:
        child = children(lambda: use_once(tmp_path / "root", shelf))
        shelf.wait("stalled")
        thread = threading.Thread(target=lambda: cache.directory(remote.url, on_progress=told.append, **remote.how).close())
        thread.start()
        try:
            until(lambda: any(step.state == "waiting" for step in told))
        finally:
            shelf.go(f"{CKPT}/model-00001.safetensors")
            thread.join(60)
        assert child.result() == FILES
    finally:
        children.kill()
    waiting = [step for step in told if step.state == "waiting"]
    assert str(child.pid) in waiting[0].holder
    assert not [step for step in told if step.state == "fetching"]
    assert told[-1].state == "done"


def test_a_wait_can_be_bounded(cache: forebay.Cache, remote: Remote, shelf: Shelf, tmp_path: Path) -> None:
    shelf.stall(f"{CKPT}/model-00001.safetensors")
    children = ProcessGroup()
    try:
        child = children(lambda: use_once(tmp_path / "root", shelf))
        shelf.wait("stalled")
        with pytest.raises(errors.WaitTimeout, match=str(child.pid)):
            cache.directory(remote.url, timeout=0.2, **remote.how)
        shelf.go(f"{CKPT}/model-00001.safetensors")
        assert child.result() == FILES
    finally:
        children.kill()


def use_once(root: Path, there: Shelf) -> dict[str, bytes]:
    with forebay.Cache(root) as cache, cache.directory(CKPT, filesystem=there.arrow()) as path:
        return files_of(path)


# -- per call ----------------------------------------------------------------------------------------------------------


def test_pinned_it_is_not_evicted(cache: forebay.Cache, remote: Remote) -> None:
    """Scenario 39."""
    with cache.directory(remote.url, pin=True, **remote.how) as path:
        (tree,) = cache.entries("directories")
        assert tree.life == "pinned"
    for n in range(10):
        cache.put(f"pressure {n}", bytes(8 * MiB))
    assert files_of(path) == FILES
    remote.put("config.json", b"{next}")
    cache.directory(remote.url, refresh=True, **remote.how).close()
    assert [entry.life for entry in cache.entries("directories") if entry.key == tree.key] == ["pinned"]
    cache.unpin(cache.entries("directories")[0].name)


def test_a_directory_is_listed_among_the_entries(cache: forebay.Cache, server: ScriptedServer) -> None:
    """Scenario 39: it can be seen what is there."""
    url = http_directory(server, FILES)
    cache.directory(url).close()
    (entry,) = cache.entries("directories")
    assert entry.name == f"directories:{url}"
    same = cache.entry(entry.name)
    assert same is not None
    assert same._replace(used=entry.used, validated=entry.validated) == entry  # times are those of the wall clock as it counts now


def test_without_a_cache_there_is_no_directory(remote: Remote, tmp_path: Path) -> None:
    with forebay.Cache(tmp_path / "root", enabled=False) as cache:
        with pytest.raises(errors.NoSpace):
            cache.directory(remote.url, **remote.how)
        with cache.directory(tmp_path) as path:
            assert os.fspath(path) == str(tmp_path)


def test_in_a_root_that_may_only_be_read(tmp_path: Path, remote: Remote) -> None:
    """Scenario 31: what is there is served, without a write."""
    with forebay.Cache(tmp_path / "root", budget=64 * MiB, min_free=0) as cache:
        cache.directory(remote.url, **remote.how).close()
    with forebay.Cache(tmp_path / "root", read_only=True) as cache:
        with cache.directory(remote.url, max_age="forever", **remote.how) as path:
            assert files_of(path) == FILES
        with pytest.raises(errors.CacheFault):
            cache.directory("bucket/run", **remote.how)


def test_a_directory_after_the_cache_was_closed(cache: forebay.Cache, remote: Remote, tmp_path: Path) -> None:
    other = forebay.Cache(tmp_path / "root")
    lease = other.directory(remote.url, **remote.how)
    other.close()
    assert files_of(lease) == FILES
    lease.close()
    with pytest.raises(errors.Closed):
        other.directory(remote.url, **remote.how)


def test_no_url_is_a_clear_error(cache: forebay.Cache) -> None:
    with pytest.raises(errors.ConfigError):
        cache.directory("")


# -- empty directories -------------------------------------------------------------------------------------------------


def folders_below(top: str | Path) -> set[str]:
    return {f"{path.relative_to(top)}/" for path in Path(top).rglob("*") if path.is_dir()}


def with_folders(remote: Remote, shelf: Shelf, *names: str) -> None:
    """Make directories there; on S3 by empty objects, as its tools do."""
    for name in names:
        if remote.filesystem is not None:
            shelf.path(f"{CKPT}/{name}").mkdir(parents=True)
        else:
            remote.put(name, b"")


@pytest.mark.parametrize("remote", [arrow, arrow_helper, fsspec_etags, fsspec_helper, s3], ids=lambda make: make.__name__, indirect=True)
def test_empty_directories_stay(remote: Remote, shelf: Shelf, cache: forebay.Cache, tmp_path: Path) -> None:
    with_folders(remote, shelf, "none/", "deep/none/below/")
    wanted = {"none/", "deep/", "deep/none/", "deep/none/below/", "sub/", "sub/deep/"}
    with cache.directory(remote.url, **remote.how) as path:
        assert folders_below(path) == wanted
        assert files_of(path) == FILES
        with cache.directory(remote.url, **remote.how, refresh=True) as again:
            assert again == path
    assert folders_below(cache.copy_directory(remote.url, tmp_path / "copy", **remote.how)) == wanted
    assert files_of(tmp_path / "copy") == FILES
    (tmp_path / "copy" / "none").rmdir()
    assert folders_below(cache.copy_directory(remote.url, tmp_path / "copy", **remote.how)) == wanted
    with cache.directory(remote.url, include="deep/", **remote.how) as part:
        assert folders_below(part) == {"deep/", "deep/none/", "deep/none/below/"}
    with cache.directory(remote.url, exclude=["*none/*"], **remote.how) as part:
        assert folders_below(part) == {"sub/", "sub/deep/"}
    assert cache.check(deep=True) == []
    with_folders(remote, shelf, "new/")
    with cache.directory(remote.url, **remote.how, refresh=True) as path:
        assert folders_below(path) == wanted | {"new/"}


@pytest.mark.parametrize("remote", [arrow, fsspec_etags, s3], ids=lambda make: make.__name__, indirect=True)
def test_an_empty_directory_is_one(remote: Remote, shelf: Shelf, cache: forebay.Cache, tmp_path: Path) -> None:
    for name in FILES:
        remote.remove(name)
    with pytest.raises(errors.NotFound):
        cache.directory(remote.url, **remote.how)
    with_folders(remote, shelf, "")
    with cache.directory(remote.url, **remote.how) as path:
        assert os.listdir(path) == []
    assert os.listdir(cache.copy_directory(remote.url, tmp_path / "copy", **remote.how)) == []
    with forebay.Cache(tmp_path / "off", budget=0) as off:
        assert os.listdir(off.copy_directory(remote.url, tmp_path / "other", **remote.how)) == []


@pytest.mark.parametrize("force", [False, True])
def test_empty_local_directories_stay(cache: forebay.Cache, tmp_path: Path, force: bool) -> None:
    (tmp_path / "local" / "a" / "b").mkdir(parents=True)
    (tmp_path / "empty").mkdir()
    for name, wanted in (("local", {"a/", "a/b/"}), ("empty", set())):
        with cache.directory(tmp_path / name, force=force) as path:
            assert folders_below(path) == wanted
        assert folders_below(cache.copy_directory(tmp_path / name, tmp_path / f"copy of {name}", force=force)) == wanted
