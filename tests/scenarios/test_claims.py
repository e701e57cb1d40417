"""The scenarios of claims, by their numbers: jobs that are killed and started again, conflicts, users, foreign bytes, containers."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import forebay
import forebay.claims  # here, so that forked children need not
from forebay import errors
from tests.claiming import REMOTE, alone, claims_in, files, rank, text_of
from tests.processes import Gate, die_with_parent


def left_by_one_killed(registry: Path, children: Callable[..., Any], **how: Any) -> str:
    """The directory of a claim whose process, with an array, was killed."""
    ready = Gate()

    def work() -> None:
        forebay.claim("/local", REMOTE).array("a", 8, "int64")
        ready.open()
        signal.pause()

    child = children(work, **how)
    ready.wait()
    ready.close()
    child.kill()
    (dead,) = claims_in(registry)
    return dead


# -- 1: killed and started again ---------------------------------------------------------------------------------------

RANKS = 3
SOON = 20.0
"""Seconds that a restart may take: a guard against waiting for the dead, on a busy machine."""


class Job:
    """Ranks, each with a forked worker, that meet, then wait at a barrier to which nobody more comes; all in one process group."""

    def __init__(self, local: Path) -> None:
        self.local = local
        self._from, self._to = os.pipe()
        self.began = time.monotonic()
        self.group = os.fork()
        if self.group == 0:
            code = 1
            try:
                os.setpgid(0, 0)
                code = self._launch()
            finally:
                os._exit(code)
        os.close(self._to)
        with contextlib.suppress(OSError):
            os.setpgid(self.group, self.group)
        self.pids: dict[str, int] = {}

    def _launch(self) -> int:
        """As a launcher does: starts the ranks, and ends when all of them have ended."""
        for number in range(RANKS):
            if os.fork() == 0:
                die_with_parent()
                return self._rank(number)
        with contextlib.suppress(ChildProcessError):
            while True:
                os.wait()
        return 0

    def _rank(self, number: int) -> int:
        name = f"rank {number}"
        try:
            claim = forebay.claim(self.local, REMOTE, rank(number, RANKS), "the job")
            counts = claim.array("counts", (2 * RANKS,), "int64")
            worker = os.fork()
            mine = number if worker else RANKS + number
            name = name if worker else f"worker {number}"
            counts[mine] += 1
            never = claim.barrier("somebody is missing")
            claim.barrier("all are here").wait(2 * RANKS)
            started_anew = bool((counts == 1).all())  # whatever the dead counted is gone
            os.write(self._to, f"{name}={os.getpid()}={claim.prefix}={started_anew}\n".encode())
            never.wait(2 * RANKS + 1)
            return 1
        except errors.BarrierBroken:
            claim.close()
            return 0
        except BaseException as error:
            os.write(self._to, f"{name} failed: {error!r}\n".encode())
            return 1

    def wait(self) -> float:
        """Until all of it are at work; gives how long that took. Each must have the first prefix, and memory of zeros."""
        said = b""
        while said.count(b"\n") < 2 * RANKS:
            assert select.select([self._from], [], [], 30)[0], said
            block = os.read(self._from, 4096)
            said += block
            assert block, said
            assert b"failed" not in said, said
        for line in said.decode().splitlines():
            name, pid, prefix, started_anew = line.split("=")
            assert (prefix, started_anew) == ("0", "True"), said
            self.pids[name] = int(pid)
        return time.monotonic() - self.began

    def kill(self, whom: str) -> None:
        if whom == "group":
            os.killpg(self.group, signal.SIGKILL)
        else:
            os.kill(self.pids[whom], signal.SIGKILL)

    def end(self) -> None:
        os.waitpid(self.group, 0)

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.group, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.group, 0)
        os.close(self._from)


@pytest.mark.rotates
@pytest.mark.parametrize("whom", ["group", "rank 0", "rank 1", "worker 2"])
def test_s01_a_killed_job_starts_again_at_once_20_times(registry: Path, tmp_path: Path, whom: str) -> None:
    """Who loses one of theirs learns it at the barrier and ends, as ranks do; then the job is started again with the same words."""
    seen, before = [], Job(tmp_path / "local")
    jobs = [before]
    try:
        before.wait()
        for _ in range(20):
            before.kill(whom)
            killed = time.monotonic()
            if whom not in ("group", "rank 0"):
                before.end()  # a leader that lives is no leader that was killed: a launcher waits for it
            again = Job(tmp_path / "local")
            jobs.append(again)
            again.wait()
            assert time.monotonic() - killed < SOON
            seen.append(files(registry))
            before = again
    finally:
        for job in jobs:
            job.close()
    assert len(set(seen)) == 1, seen  # the last one's files, and none of all those before
    assert files(tmp_path) == (0, 0)


def test_s01_a_claim_of_what_was_killed_takes_no_longer_than_the_first(registry: Path, children: Callable[..., Any]) -> None:
    def timed() -> None:
        began = time.perf_counter()
        claim = forebay.claim("/local/train", REMOTE)
        took = time.perf_counter() - began
        claim.array("a", 1 << 16, "int64")
        os.write(told, struct.pack("d", took))
        signal.pause()

    heard, told = os.pipe()
    took: list[float] = []
    for _ in range(20):  # each is there before the next, which finds what the one before left
        job = children(timed, group=True)
        took += struct.unpack("d", os.read(heard, 8))
        job.kill()
    os.close(told)
    os.close(heard)
    assert min(took[1:]) < 0.25  # a busy machine is not always busy
    with forebay.claim("/local/train", REMOTE) as claim:
        assert claim.prefix == 0


# -- 7: two jobs, one directory ----------------------------------------------------------------------------------------


def test_s07_of_eight_jobs_at_once_one_gets_the_directory(registry: Path, children: Callable[..., Any], barrier: Any, flag: Any) -> None:
    start, done = barrier(8), flag()
    heard, told = os.pipe()

    def job(number: int) -> tuple[bool, str]:
        start.wait()
        try:
            with forebay.claim("/local/train", REMOTE, alone(), f"job {number}"):
                assert done.wait(60)
                return True, f"{os.getpid()}"
        except errors.ClaimConflict as error:
            os.write(told, b".")
            return False, str(error)

    born = [children(lambda number=number: job(number)) for number in range(8)]
    for _ in range(7):
        assert os.read(heard, 1) == b"."
    done.set()
    said = [child.result() for child in born]
    (winner,) = [pid for won, pid in said if won]
    for won, line in said:
        assert won or all(fact in line for fact in ("/local/train", REMOTE, winner)), line
    for fd in (heard, told):
        os.close(fd)


def test_s07_a_conflict_says_all_there_is_to_know(registry: Path, run: Any) -> None:
    script = """
import forebay, os, sys
claim = forebay.claim("/local/train", sys.argv[-1], job="theirs")
print(os.getpid(), flush=True)
sys.stdin.read()
"""
    command = [
        sys.executable,
        "-c",
        script,
        "--api-token",
        "hush",
        "-p",
        "hush",
        "--steps=100",
        "https://user:hush@host/train?X-Amz-Signature=hush",
    ]
    theirs = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert theirs.stdout is not None
    pid = int(theirs.stdout.readline())
    with pytest.raises(errors.ClaimConflict) as raised:
        forebay.claim("/local/train", REMOTE, job="ours")
    said = str(raised.value)
    theirs.communicate("")
    user = raised.value.theirs["user"]
    for fact in ("/local/train", REMOTE, "host/train", "theirs", "ours", str(pid), str(os.getpid()), str(user), "--steps"):
        assert str(fact) in said, fact
    assert "hush" not in said + repr(raised.value.facts)
    assert isinstance(raised.value, ValueError)
    assert abs(raised.value.theirs["started"] - time.time()) < 60
    forebay.claim("/local/train", REMOTE, job="ours").close()  # it ended: nothing to do


@pytest.mark.parametrize(
    ("theirs", "ours", "fine"),
    [
        (("/l/a", REMOTE), ("/l/a", REMOTE), False),
        (("/l/a", REMOTE), ("/l/a/b", REMOTE), False),
        (("/l/a/b", REMOTE), ("/l/a", REMOTE), False),
        (("/l/a", REMOTE), ("/l/ab", REMOTE), True),
        (("/l/a", REMOTE), ("/l/b/../a", REMOTE), False),
        (("/l/a", REMOTE), ("/l/a", None), True),
        (("/l/a", None), ("/l/a", None), True),
    ],
)
def test_s07_what_overlaps(registry: Path, children: Callable[..., Any], theirs: Any, ours: Any, fine: bool) -> None:
    def other() -> bool:
        try:
            forebay.claim(*ours).close()
        except errors.ClaimConflict:
            return False
        return True

    with forebay.claim(*theirs):
        assert children(other).result() == fine


def test_s07_links_lead_to_the_same_directory(registry: Path, tmp_path: Path, children: Callable[..., Any]) -> None:
    (tmp_path / "real" / "a").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with forebay.claim(tmp_path / "real" / "a", REMOTE):
        child = children(lambda: text_of(errors.ClaimConflict, lambda: forebay.claim(tmp_path / "link" / "a" / "new", REMOTE)))
        assert str(tmp_path / "real" / "a") in child.result()


def test_s07_who_only_reads_may_share(registry: Path, children: Callable[..., Any]) -> None:
    with forebay.claim("/local/train", REMOTE):
        assert children(lambda: forebay.claim("/local/train", REMOTE, shared=True).prefix).result() == 1
        for other in (("/local/train", "s3://bucket/other"), ("/local/train/part", REMOTE)):
            children(lambda other=other: text_of(errors.ClaimConflict, lambda: forebay.claim(*other, shared=True))).result()


def test_s07_one_job_may_not_download_twice_into_a_directory(registry: Path) -> None:
    with forebay.claim("/local/train", REMOTE), forebay.claim("/local/eval", REMOTE) as second:
        assert second.prefix == 1
        assert f"{os.getpid()}" in text_of(errors.ClaimConflict, lambda: forebay.claim("/local/train", REMOTE))
    said = text_of(ValueError, lambda: forebay.claim(["/local/a", "/local/b", "/local/x/../a"], [REMOTE, None, None]))
    assert "/local/x/../a" in said
    assert "/local/b" not in said


# -- 10: two users -----------------------------------------------------------------------------------------------------


@pytest.mark.root
def test_s10_two_users_share_a_node(registry: Path, children: Callable[..., Any], flag: Any) -> None:
    theirs, done = flag(), flag()

    def other() -> int:
        claim = forebay.claim("/local/theirs", REMOTE)
        claim.array("secret", 8, "int64")[0] = 7
        theirs.set()
        assert done.wait(60)
        claim.close()
        return claim.prefix

    child = children(other, user=65534)
    assert theirs.wait(60)
    with forebay.claim("/local/ours", REMOTE) as claim:  # and the other way round
        assert claim.prefix == 1
        stranger = children(lambda: text_of(errors.ClaimConflict, lambda: forebay.claim("/local/ours/deep", REMOTE)), user=65533)
        assert f"{os.getpid()}" in stranger.result()
        said = text_of(errors.ClaimConflict, lambda: forebay.claim("/local/theirs", REMOTE))
        assert str(child.pid) in said
        (found,) = [info for info in forebay.claims.list_claims() if info.uid == 65534]
        assert found.live
        assert tuple(map(str, found.directories)) == ("/local/theirs",)

        def look() -> list[str]:
            seen = []
            for path in registry.glob("0*/*"):
                with contextlib.suppress(PermissionError):
                    path.read_bytes()
                    seen.append(path.name)
            return seen

        assert set(children(look, user=65533).result()) <= {"claim"}  # memory is nobody else's
    done.set()
    assert child.result() == 0


@pytest.mark.root
def test_s10_another_users_dead_are_no_conflict(registry: Path, children: Callable[..., Any]) -> None:
    dead = left_by_one_killed(registry, children, user=65534)
    with forebay.claim("/local", REMOTE) as claim:
        assert claim.prefix == 1  # its number is taken as long as its files are there
    assert claims_in(registry) == [dead]  # nobody removes what is another's, except root
    children(lambda: forebay.claim("/local", REMOTE).close(), user=65534).result()
    assert claims_in(registry) == []


# -- 14: nobody else's bytes -------------------------------------------------------------------------------------------


def test_s14_what_is_not_ours_stays(registry: Path, tmp_path: Path, children: Callable[..., Any]) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").write_text("precious")
    dead = left_by_one_killed(registry, children)
    (registry / dead / "link").symlink_to(kept)
    (registry / dead / "link to a file").symlink_to(kept / "file")
    foreign = {"notes.txt": "mine", "000000.txt": "mine", "999999.0123456789abcdef": "mine"}
    for name, text in foreign.items():
        (registry / name).write_text(text)
    (registry / "a directory").mkdir()
    (registry / "a directory" / "file").write_text("mine")
    (registry / "000007.0123456789abcdef").symlink_to(kept)
    with forebay.claim("/local", REMOTE):
        pass
    forebay.claims.prune_claims()
    assert (kept / "file").read_text() == "precious"
    assert {name: (registry / name).read_text() for name in foreign} == foreign
    assert (registry / "a directory" / "file").read_text() == "mine"
    for name in foreign:
        (registry / name).unlink()
    (registry / "000007.0123456789abcdef").unlink()
    shutil.rmtree(registry / "a directory")


@pytest.mark.parametrize("kind", ["link", "file", "dangling"])
def test_s14_a_registry_that_cannot_be_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    place = tmp_path / "claims"
    if kind == "file":
        place.write_text("mine")
    else:
        place.symlink_to(tmp_path / "there")
        if kind == "link":
            (tmp_path / "there").mkdir()
    monkeypatch.setenv("FOREBAY_CLAIMS", str(place))
    said = text_of(errors.ForebayError, lambda: forebay.claim("/local", REMOTE))
    assert str(place) in said
    assert not (tmp_path / "there").exists() or list((tmp_path / "there").iterdir()) == []


DAMAGES: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: path.write_bytes(b""),
    "cut short": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "noise": lambda path: path.write_bytes(os.urandom(5000)),
    "no such file": lambda path: path.unlink(),
    "a directory": lambda path: (path.unlink(), path.mkdir()),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ["claim", "members", "memory.a"])
def test_s14_damage_stops_nobody(registry: Path, children: Callable[..., Any], name: str, damage: str) -> None:
    """Of a dead job's files. What cannot be read is a conflict with nobody; what is there is freed, or stays, or is passed over."""
    dead = left_by_one_killed(registry, children)
    (path,) = [path for path in (registry / dead).iterdir() if path.name.startswith(name)]
    DAMAGES[damage](path)
    for _ in range(2):
        with forebay.claim("/local", REMOTE) as claim:
            claim.array("a", 8, "int64")[:] = 1
            forebay.claims.list_claims()
    for left in claims_in(registry):
        shutil.rmtree(registry / left)


# -- /dev/shm is full --------------------------------------------------------------------------------------------------


def test_s13_a_full_dev_shm_is_an_error_and_nothing_else(
    tmpfs: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, children: Callable[..., Any]
) -> None:
    place = tmpfs("1M")
    place.chmod(0o1777)
    monkeypatch.setenv("FOREBAY_CLAIMS", str(place / "claims"))

    def work() -> str:
        with forebay.claim("/local", REMOTE) as claim:
            small = claim.array("small", 1000, "int64")
            said = text_of(errors.NoSpace, lambda: claim.array("large", 1 << 20, "int64"))
            small[:] = 1
            with pytest.raises(errors.NoSpace):
                claim.buffer("large too", 8 << 20)
            claim.buffer("medium", 64 << 10)[-1] = 1  # what could not be had was given back
            return said

    said = children(work).result()
    assert "'large'" in said
    assert "8,39" in said  # 8 MiB and a page
    (place / "others").write_bytes(b"x" * (512 << 10))
    with contextlib.suppress(OSError):
        while True:
            with open(place / "others", "ab", buffering=0) as file:
                file.write(b"x" * 4096)
    error = children(lambda: text_of(errors.NoSpace, lambda: forebay.claim("/local", REMOTE))).result()
    assert str(place) in error
    (place / "others").unlink()
    children(lambda: forebay.claim("/local", REMOTE).close()).result()
    assert claims_in(place / "claims") == []


# -- containers --------------------------------------------------------------------------------------------------------

CONTAINED = """
import forebay, os, sys
from forebay import errors
claim = None
try:
    claim = forebay.claim(sys.argv[1], "s3://bucket/x", job=sys.argv[2], timeout=20)
    claim.array("a", 8, "int64")[:] = 1
    print("prefix", claim.prefix, flush=True)
except errors.ClaimConflict as error:
    print("conflict", str(error).replace(chr(10), " "), flush=True)
sys.stdin.read()
"""


@pytest.mark.root
def test_two_pid_namespaces_share_a_registry(registry: Path) -> None:
    """The same process numbers in both: who lives is known from locks alone."""
    probe = subprocess.run(["unshare", "--pid", "--fork", "--mount-proc", "true"], capture_output=True, text=True)
    if probe.returncode:
        pytest.skip(f"no PID namespaces here: {probe.stderr.strip()}")

    def start(local: str, job: str) -> subprocess.Popen[str]:
        words = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", sys.executable, "-c", CONTAINED, local, job]
        return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def heard(container: subprocess.Popen[str]) -> str:
        assert container.stdout is not None
        return container.stdout.readline()

    first = start("/local/a", "first")
    assert heard(first) == "prefix 0\n"
    second = start("/local/b", "second")
    assert heard(second) == "prefix 1\n"
    third = start("/local/a/inside", "third")
    assert heard(third).startswith("conflict")
    first.kill()
    first.communicate()
    fourth = start("/local/a", "fourth")
    assert heard(fourth) == "prefix 0\n"
    fifth = start("/local/b", "fifth")
    assert heard(fifth).startswith("conflict")  # what lives in another namespace lives
    for container in (second, third, fourth, fifth):
        container.communicate("")
