"""The scenarios of remote directories, by their numbers, with real processes."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import forebay
from forebay import Checkpoint, errors
from forebay.remote import RemoteOptions
from forebay.testing import ScriptedServer
from tests.harness import KiB, MiB, assert_counted, data_usage, usage
from tests.items import files_below, until
from tests.remote_directories import CKPT, FILES, TOTAL, files_of, http_directory
from tests.servers.counting import Shelf, content

SOON = 20.0
"""Seconds for what must happen at once: a guard against waiting for the dead, on a busy machine."""

Start = Callable[..., Any]


def use(root: Path, there: Shelf, name: str = CKPT, **how: Any) -> str:
    """One process's use of a directory, by a handle of its own; gives where it was."""
    with forebay.Cache(root) as cache, Checkpoint(name, there.arrow(), cache=cache).as_directory(**how) as path:
        assert files_of(path) == there.below(name)
        return path


def made(root: Path, budget: int) -> None:
    forebay.Cache(root, budget=budget, min_free=0).close()


# -- 1, 11: killed runs leave nothing ----------------------------------------------------------------------------------


@pytest.mark.parametrize("cycles", [2, pytest.param(20, marks=pytest.mark.stress)])
def test_s01_killed_in_the_middle_of_downloads(cycles: int, root: Path, tmp_path: Path, shelf: Shelf, children: Start) -> None:
    """Eight processes, killed together, started again at once: each restart works at once with no clean-up, and nothing grows."""
    shelf.fill(CKPT, FILES)
    made(root, 8 * MiB)
    beside = []
    for cycle in range(cycles):
        shelf.put(f"{CKPT}/model-00001.safetensors", content(f"{cycle}", 300_000))
        shelf.stall(f"{CKPT}/model-00001.safetensors")
        shelf.forget()
        killed = [children(lambda: use(root, shelf, refresh=True)) for _ in range(8)]
        shelf.wait("stalled")
        for child in killed:
            child.kill()
        shelf.go(f"{CKPT}/model-00001.safetensors")
        began = time.monotonic()
        assert len({child.result() for child in [children(lambda: use(root, shelf, refresh=True)) for _ in range(2)]}) == 1
        assert time.monotonic() - began < SOON
        beside.append(len([path for path in files_below(tmp_path) if not path.startswith((f"{root}/", f"{shelf.place}/"))]))
        assert usage(root / "tmp") <= MiB
    assert beside == [0] * cycles
    with forebay.Cache(root) as cache:
        assert cache.put("brim", bytes(cache.budget - 65_536))
    assert_counted(root, 8 * MiB)
    assert usage(root / "tmp") == 0


def test_s01_what_the_killed_user_of_a_replaced_directory_linked_can_go(root: Path, shelf: Shelf, children: Start) -> None:
    """One is killed in a directory that another has replaced: the swept tree frees the files that both versions have."""
    shelf.fill(CKPT, FILES)
    made(root, 8 * MiB)
    inside, inside_write = os.pipe()

    def killed() -> None:
        with forebay.Cache(root) as cache, Checkpoint(CKPT, shelf.arrow(), cache=cache).as_directory():
            os.write(inside_write, b".")
            threading.Event().wait(60)

    child = children(killed)
    assert os.read(inside, 1)
    with forebay.Cache(root) as cache:
        shelf.put(f"{CKPT}/model-00001.safetensors", content("new", 300_000))
        use(root, shelf, refresh=True)
        child.kill()
        assert cache.put("brim", bytes(cache.budget - 65_536))
    os.close(inside)
    os.close(inside_write)


def test_s11_fifty_uses_of_which_ten_are_killed(
    root: Path, tmp_path: Path, shelf: Shelf, children: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inside the ``with``: nothing is left outside the root, the budget holds, everything can be evicted again."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    budget = 2 * MiB
    made(root, budget)
    for n in range(10):
        shelf.fill(f"run/step_{n}", {"model.pt": content(f"{n}", 200_000), "sub/optim.pt": content(f"o{n}", 50_000)})
    inside, inside_write = os.pipe()

    def killed(n: int) -> None:
        with forebay.Cache(root) as cache, Checkpoint(f"run/step_{n % 10}", shelf.arrow(), cache=cache).as_directory() as path:
            assert files_of(path) == shelf.below(f"run/step_{n % 10}")
            os.write(inside_write, b".")
            threading.Event().wait(60)

    for n in range(50):  # one after the other: each is another process
        if n % 5:
            use(root, shelf, f"run/step_{n % 10}")
        else:
            child = children(lambda n=n: killed(n))
            assert os.read(inside, 1)
            child.kill()
        assert data_usage(root) <= budget
    assert {path for path in files_below(tmp_path) if not path.startswith((f"{root}/", f"{shelf.place}/"))} == set()
    with forebay.Cache(root) as cache:
        assert not [entry for entry in cache.entries() if entry.leased]
        assert cache.put("brim", bytes(budget - 65_536))
        assert cache.entries("directories") == []
    assert_counted(root, budget)
    os.close(inside)
    os.close(inside_write)


# -- 2: nothing is pulled away -----------------------------------------------------------------------------------------


def test_s02_three_times_the_budget_while_two_hold_it(root: Path, shelf: Shelf, children: Start) -> None:
    """A and B hold it, C writes three times the budget: both read it exact; A is killed: B reads on; B leaves: it can go."""
    shelf.fill(CKPT, FILES)
    made(root, 4 * MiB)
    gates = [os.pipe() for _ in range(4)]  # A is inside, B is inside, B may go, B is out

    def hold(inside: int, leave: int) -> bool:
        with forebay.Cache(root) as cache, Checkpoint(CKPT, shelf.arrow(), cache=cache).as_directory() as path:
            os.write(gates[inside][1], b".")
            os.read(gates[leave][0], 1)
            return files_of(path) == FILES

    a, b = children(lambda: hold(0, 3)), children(lambda: hold(1, 2))
    for inside in (0, 1):
        os.read(gates[inside][0], 1)

    def press(times: int) -> None:
        with forebay.Cache(root) as cache:
            for n in range(times * 8):
                cache.put(f"pressure {n}", bytes(512 * KiB))

    children(lambda: press(3)).result()
    a.kill()
    children(lambda: press(3)).result()
    os.write(gates[2][1], b".")
    assert b.result()
    with forebay.Cache(root) as cache:
        assert cache.put("brim", bytes(cache.budget - 65_536))
        assert cache.entries("directories") == []
    for pair in gates:
        for end in pair:
            os.close(end)


# -- 4: the budget holds -----------------------------------------------------------------------------------------------


def test_s04_many_processes_many_directories(root: Path, shelf: Shelf, children: Start) -> None:
    """The sum on the disk never passes the budget, parts in flight and trees included."""
    budget = 2 * MiB
    made(root, budget)
    for n in range(12):
        shelf.fill(f"run/{n}", {f"{k}": content(f"{n} {k}", 20_000 + 9_000 * k) for k in range(6)})

    def rank(seed: int) -> int:
        chance, full = random.Random(seed), 0
        for _ in range(8):
            try:
                use(root, shelf, f"run/{chance.randrange(12)}")
            except errors.NoSpace:
                full += 1  # others hold what there is
        return full

    ranks = [children(lambda seed=seed: rank(seed)) for seed in range(4)]
    most = 0
    while any(os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None for child in ranks):
        for child in ranks:
            child.stop()  # else files come and go while they are counted
        most = max(most, data_usage(root))
        for child in ranks:
            child.signal(signal.SIGCONT)
        time.sleep(0.02)
    assert sum(child.result() for child in ranks) < 16
    assert 0 < most <= budget


# -- 6, 12: one download -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("many", [8, pytest.param(32, marks=pytest.mark.stress)])
def test_s06_many_processes_one_download(many: int, root: Path, shelf: Shelf, children: Start, barrier: Callable[..., Any]) -> None:
    shelf.fill(CKPT, FILES)
    made(root, 8 * MiB)
    start = barrier(many)

    def rank() -> str:
        start.wait(60)
        return use(root, shelf)

    assert len({child.result() for child in [children(rank) for _ in range(many)]}) == 1
    assert shelf.sent == TOTAL  # each byte once
    assert shelf.opens == sorted(f"{CKPT}/{name}" for name, body in FILES.items() if body)


def test_s06_killed_halfway_another_takes_over(root: Path, shelf: Shelf, children: Start) -> None:
    """At once, without what was there already."""
    files = {f"{n}": content(f"{n}", 100_000) for n in range(20)}
    shelf.fill(CKPT, files)
    made(root, 8 * MiB)
    for n in range(10, 20):
        shelf.stall(f"{CKPT}/{n}")
    first = children(lambda: use(root, shelf))
    until(lambda: len({each.name for each in shelf.asked("read")}) >= 10)
    waiters = [children(lambda: use(root, shelf)) for _ in range(3)]
    first.kill()
    for n in range(10, 20):
        shelf.go(f"{CKPT}/{n}")
    began = time.monotonic()
    assert len({child.result() for child in waiters}) == 1
    assert time.monotonic() - began < SOON
    assert shelf.sent <= 1.55 * 2_000_000


@pytest.mark.parametrize("kind", ["http", "fsspec"])
def test_s06_killed_in_the_middle_of_a_file_it_is_resumed(
    kind: str, root: Path, server: ScriptedServer, shelf: Shelf, children: Start
) -> None:
    """At the byte ranges that are missing: of the whole at most 55 % come again."""
    body = content("large", 8 * MiB)
    options = RemoteOptions(part=512 * KiB, streams=2)
    made(root, 64 * MiB)
    half = 4 * MiB
    shelf.put(f"{CKPT}/large", body)
    url = http_directory(server, {"large": body})

    def take(killed: bool) -> bool:
        done = threading.Event()

        def told(step: Any) -> None:
            if killed and step.done >= half + MiB:  # of which each of the two streams has begun a part
                os.kill(os.getpid(), signal.SIGKILL)
            done.set()

        how = {"filesystem": shelf.fsspec()} if kind == "fsspec" else {}
        with forebay.Cache(root, remote_options=options) as cache:
            with cache.directory(CKPT if how else url, on_progress=told, **how) as path:
                return files_of(path) == {"large": body}

    if kind == "http":
        server.objects["/run/step_100/large"].rate = 16 * MiB
    else:
        shelf.slow(0.05)
    child = children(lambda: take(True))
    assert child.wait() == -signal.SIGKILL
    sent = server.sent if kind == "http" else shelf.sent
    if kind == "http":
        server.objects["/run/step_100/large"].rate = None
    shelf.forget()
    assert children(lambda: take(False)).result()
    again = server.sent - sent if kind == "http" else shelf.sent
    assert again <= 0.55 * len(body)


def test_s06_what_was_left_is_not_gone_on_with_where_the_remote_changed(root: Path, server: ScriptedServer, children: Start) -> None:
    """Killed in the middle of a file, which then becomes another one: it is fetched anew, and has no byte of the one before."""
    old, new = content("old", 4 * MiB), content("new", 4 * MiB)
    url = http_directory(server, {"large": old})
    made(root, 64 * MiB)
    server.objects["/run/step_100/large"].stall_after = 2 * MiB

    def take() -> bool:
        with forebay.Cache(root, remote_options=RemoteOptions(part=8 * MiB)) as cache, cache.directory(url, refresh=True) as path:
            return files_of(path) == {"large": new}

    child = children(take)
    assert server.stalled.wait(60)
    child.kill()
    server.go.set()
    http_directory(server, {"large": new})
    assert children(take).result()


def test_s12_four_handles_then_a_restart(root: Path, shelf: Shelf, children: Start) -> None:
    """One download in total; the second run starts from the warm disk, with no payload byte."""
    shelf.fill(CKPT, FILES)
    made(root, 8 * MiB)
    first = {child.result() for child in [children(lambda: use(root, shelf)) for _ in range(4)]}
    assert shelf.sent == TOTAL
    shelf.forget()
    second = {child.result() for child in [children(lambda: use(root, shelf)) for _ in range(4)]}
    assert first == second
    assert shelf.asked() == []


def test_s12_a_restart_after_a_reboot_of_the_remote_asks_and_fetches_nothing(root: Path, shelf: Shelf, children: Start) -> None:
    shelf.fill(CKPT, FILES)
    made(root, 8 * MiB)
    children(lambda: use(root, shelf)).result()
    shelf.forget()
    children(lambda: use(root, shelf, max_age=0)).result()
    assert shelf.asked("list")
    assert shelf.asked("read") == []


# -- 22, 23, 24: offline, stale, not there -----------------------------------------------------------------------------


def test_s22_offline_is_quick(root: Path, shelf: Shelf) -> None:
    """What is there in less than 10 ms, what is not a distinct error; nobody is asked."""
    shelf.fill(CKPT, FILES)
    made(root, 8 * MiB)
    use(root, shelf)
    shelf.fail("list", "ConnectionError", "blackholed")
    shelf.forget()
    with forebay.Cache(root, offline=True) as cache:
        took = []
        for _ in range(5):
            began = time.monotonic()
            with cache.directory(CKPT, filesystem=shelf.arrow()) as path:
                took.append(time.monotonic() - began)
        assert files_of(path) == FILES
        assert min(took) < 0.01
        with pytest.raises(errors.Offline, match="step_101"):
            cache.directory("bucket/run/step_101", filesystem=shelf.arrow())
    assert shelf.asked() == []


def test_s23_one_question_a_period_for_the_node(root: Path, shelf: Shelf, children: Start, barrier: Callable[..., Any]) -> None:
    """However many processes want to know; with ``max_age="forever"`` none."""
    shelf.fill(CKPT, FILES)
    made(root, 8 * MiB)
    use(root, shelf)
    shelf.forget()
    start = barrier(6)

    def rank() -> None:
        start.wait(60)
        use(root, shelf, max_age=60)
        use(root, shelf, max_age="forever")

    for child in [children(rank) for _ in range(6)]:
        child.result()
    assert shelf.asked() == []
    began = time.time()  # what was validated before is too old
    start = barrier(6)

    def stale() -> None:
        with forebay.Cache(root) as cache:
            start.wait(60)
            with cache.directory(CKPT, filesystem=shelf.arrow(), max_age=time.time() - began) as path:
                assert files_of(path) == FILES

    for child in [children(stale) for _ in range(6)]:
        child.result()
    listed = {each.process for each in shelf.asked("list")}
    assert len(listed) == 1  # one of them asked, the others waited for his answer


def test_s23_readers_of_the_old_finish_on_it(root: Path, shelf: Shelf, children: Start) -> None:
    shelf.fill(CKPT, FILES)
    made(root, 8 * MiB)
    inside, leave = os.pipe(), os.pipe()

    def reader() -> dict[str, bytes]:
        with forebay.Cache(root) as cache, Checkpoint(CKPT, shelf.arrow(), cache=cache).as_directory() as path:
            os.write(inside[1], b".")
            os.read(leave[0], 1)
            return files_of(path)

    old = children(reader)
    os.read(inside[0], 1)
    shelf.put(f"{CKPT}/config.json", b"{next}")
    children(lambda: use(root, shelf, refresh=True)).result()
    os.write(leave[1], b".")
    assert old.result() == FILES
    for end in (*inside, *leave):
        os.close(end)


def test_s24_what_appears_later_is_seen_at_once(root: Path, shelf: Shelf, children: Start) -> None:
    made(root, 8 * MiB)
    with pytest.raises(errors.NotFound, match="step_100"):
        children(lambda: use(root, shelf)).result()
    shelf.fill(CKPT, FILES)
    assert children(lambda: use(root, shelf)).result()


# -- 26, 27: retries; many streams -------------------------------------------------------------------------------------


def test_s26_503_twice_then_a_stall_then_well(root: Path, server: ScriptedServer) -> None:
    """It succeeds, and resumes by range: less than 1.5 times the bytes come."""
    url = http_directory(server, FILES)
    large = server.objects["/run/step_100/model-00001.safetensors"]
    large.statuses, large.stall_after, large.stalls = [503, 503], 200_000, 1
    options = RemoteOptions(backoff=0.01, read_timeout=2)
    with forebay.Cache(root, budget=8 * MiB, min_free=0, remote_options=options) as cache, cache.directory(url) as path:
        assert files_of(path) == FILES
    assert server.sent < 1.5 * TOTAL


def test_s27_many_streams_of_one_large_file(root: Path, server: ScriptedServer) -> None:
    """A server that gives 2 MB/s a connection: twice that at the least, on a busy machine, of the eight times that eight give."""
    body = content("large", 16 * MiB)
    url = http_directory(server, {"large": body})
    server.objects["/run/step_100/large"].rate = 2_000_000
    options = RemoteOptions(part=MiB, streams=8)
    with forebay.Cache(root, budget="100MB", min_free=0, remote_options=options) as cache:
        began = time.monotonic()
        with cache.directory(url) as path:
            took = time.monotonic() - began
            assert files_of(path) == {"large": body}
    assert took < len(body) / 2_000_000 / 2


def test_s27_memory_is_bounded(root: Path, server: ScriptedServer) -> None:
    """200 MB in six files: at most 100 MB more than before."""
    url = http_directory(server, {f"{n}": bytes(32 * MiB) for n in range(6)})
    script = """
import resource, sys
import forebay
from forebay.remote import RemoteOptions
with forebay.Cache(sys.argv[1], budget="1GB", min_free=0) as cache:
    cache.read(sys.argv[2] + ".forebay.json")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with cache.directory(sys.argv[2]) as path:
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    done = subprocess.run([sys.executable, "-c", script, root, url], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 100_000  # kB


# -- 37, 39: parts, and per call ---------------------------------------------------------------------------------------


def test_s37_parts_by_several_processes(root: Path, shelf: Shelf, children: Start) -> None:
    """Each sees a directory complete for what it asked; no byte comes twice."""
    shelf.fill(CKPT, FILES)
    made(root, 8 * MiB)
    shelf.slow(0.02)
    wanted = [["model-*"], ["sub/"], ["model-00001*", "*.json"], None]

    def rank(n: int) -> set[str]:
        with forebay.Cache(root) as cache, Checkpoint(CKPT, shelf.arrow(), cache=cache).as_directory(include=wanted[n]) as path:
            assert all(FILES[name] == body for name, body in files_of(path).items())
            return set(files_of(path))

    found = [child.result() for child in [children(lambda n=n: rank(n)) for n in range(4)]]
    models, subs = {n for n in FILES if n.startswith("model-")}, {n for n in FILES if n.startswith("sub/")}
    assert found == [models, subs, {"model-00001.safetensors", "config.json"}, set(FILES)]
    assert shelf.sent == TOTAL


def test_s39_a_directory_on_a_mount_is_kept_where_that_is_wanted(root: Path, tmp_path: Path, children: Start) -> None:
    place = tmp_path / "mount" / "model"
    for name, body in FILES.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(body)
    made(root, 8 * MiB)

    def rank() -> str:
        with forebay.Cache(root) as cache:
            with Checkpoint(place, cache=cache).as_directory() as own, cache.directory(place, force=True, pin=True) as kept:
                assert own == str(place)
                assert files_of(kept) == FILES
                return kept

    assert len({child.result() for child in [children(rank) for _ in range(3)]}) == 1
    with forebay.Cache(root) as cache:
        (tree,) = cache.entries("directories")
        assert (tree.life, tree.leased) == ("pinned", False)
        assert cache.evict(tree.name).removed == ()
