"""The scenarios of claims, by their numbers: ranks and workers that wait for each other, are stopped, killed, forked and many."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest

import forebay
import forebay.claims  # here, so that forked children need not
from forebay import errors
from tests.claiming import REMOTE, alone, rank, text_of

# -- 8: nobody waits in silence ----------------------------------------------------------------------------------------


@pytest.mark.rotates
def test_s08_ranks_whose_leader_does_not_come(registry: Path, children: Callable[..., Any], warnings: Any) -> None:
    def follow() -> tuple[list[str], str]:
        with warnings() as said:
            return said, text_of(errors.WaitTimeout, lambda: forebay.claim("/local", REMOTE, rank(1, 2), "job 7", timeout=7))

    said, error = children(follow).result()
    assert any("job 7" in line for line in said)
    assert "job 7" in error
    assert "job=" in error  # how the job was found


def stop_here() -> None:
    """This process stands still until somebody lets it go on; its parent sees that."""
    os.kill(os.getpid(), signal.SIGSTOP)


def await_stop(child: Any) -> None:
    os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)


@pytest.mark.rotates
def test_s08_a_stopped_participant_is_named(registry: Path, children: Callable[..., Any], warnings: Any) -> None:
    def take_part(number: int) -> tuple[list[str], int]:
        with warnings() as said:
            barrier = forebay.claim("/local", None, rank(number, 3), "job").barrier("b")
            barrier.wait(3)
            if number == 2:
                stop_here()
            return said, barrier.wait(3)

    born = [children(lambda number=number: take_part(number)) for number in range(3)]
    await_stop(born[2])
    time.sleep(7)  # longer than what is waited in silence
    born[2].signal(signal.SIGCONT)
    found = [child.result() for child in born]
    assert sorted(number for _, number in found) == [0, 1, 2]
    for said, _ in found[:2]:
        assert any(f"{born[2].pid}" in line and "stopped" in line for line in said), said


def test_s08_a_time_out_names_who_is_stopped(registry: Path, children: Callable[..., Any], flag: Any) -> None:
    stopped, told = flag(), flag()

    def take_part(number: int) -> str:
        barrier = forebay.claim("/local", None, rank(number, 2), "job").barrier("b")
        barrier.wait(2)
        if number:
            stop_here()
            barrier.wait(2)
            return ""
        assert stopped.wait(60)
        said = text_of(errors.WaitTimeout, lambda: barrier.wait(2, timeout=1))
        told.set()
        barrier.wait(2)  # as if it had not come before
        return said

    born = [children(lambda number=number: take_part(number)) for number in range(2)]
    await_stop(born[1])
    stopped.set()
    assert told.wait(60)
    born[1].signal(signal.SIGCONT)
    said = born[0].result()
    assert f"process {born[1].pid}" in said
    assert "stopped" in said
    born[1].result()


@pytest.mark.rotates
@pytest.mark.parametrize("end", [signal.SIGCONT, signal.SIGKILL])
def test_s08_a_stopped_holder_of_a_lock(
    registry: Path, children: Callable[..., Any], warnings: Any, flag: Any, end: signal.Signals
) -> None:
    held = flag()

    def hold() -> None:
        with forebay.claim("/local", None, rank(0, 3), "job").lock("download"):
            held.set()
            time.sleep(5)  # until long after it is stopped

    def patient() -> tuple[list[str], float]:
        claim = forebay.claim("/local", None, rank(1, 3), "job")
        assert held.wait(60)
        with warnings() as said, claim.lock("download"):
            return said, time.monotonic()

    def impatient() -> str:
        claim = forebay.claim("/local", None, rank(2, 3), "job")
        assert held.wait(60)
        with pytest.raises(errors.WaitTimeout) as raised, claim.lock("download", timeout=1):
            raise AssertionError("two have the lock")
        return str(raised.value)

    holder, waiting, short = children(hold), children(patient), children(impatient)
    assert held.wait(60)
    holder.stop()
    assert f"{holder.pid}" in short.result()
    time.sleep(6)  # longer than what is waited in silence
    holder.signal(end)
    ended = time.monotonic()
    said, got = waiting.result()
    assert any("download" in line and f"{holder.pid}" in line for line in said), said
    assert got - ended < 20
    holder.wait()


def test_s08_a_killed_participant_is_an_error_within_a_second(registry: Path, children: Callable[..., Any], flag: Any) -> None:
    crossed = [flag() for _ in range(3)]

    def take_part(number: int) -> tuple[float, list[str], int]:
        barrier = forebay.claim("/local", None, rank(number, 3), "job").barrier("b")
        barrier.wait(3)
        crossed[number].set()
        if number == 2:
            signal.pause()
        with pytest.raises(threading.BrokenBarrierError) as raised:
            barrier.wait(3)
        return time.monotonic(), raised.value.missing, barrier.wait(2, timeout=60)  # each has seen it: usable again

    born = [children(lambda number=number: take_part(number)) for number in range(3)]
    for seen in crossed:
        assert seen.wait(60)
    time.sleep(0.3)  # so that most often both wait by now; they may as well come later
    killed = time.monotonic()
    born[2].kill()
    found = [child.result() for child in born[:2]]
    assert max(at for at, _, _ in found) - killed < 20
    for _, missing, _ in found:
        assert len(missing) == 1
        assert f"{born[2].pid}" in missing[0]
        assert "rank 2" in missing[0]
    assert sorted(number for _, _, number in found) == [0, 1]


def test_s08_ctrl_c_ends_every_wait_and_takes_the_arrival_back(registry: Path, children: Callable[..., Any], flag: Any) -> None:
    ready, gone, over = flag(), flag(), flag()

    def interrupted(claim: forebay.Claim, wait: Callable[[], object]) -> None:
        timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            wait()
        assert time.monotonic() - began < 20
        timer.join()

    def first() -> int:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        claim = forebay.claim("/local", None, rank(0, 2), "job")
        barrier = claim.barrier("b")
        interrupted(claim, lambda: barrier.wait(2))
        interrupted(claim, lambda: forebay.claim("/x", REMOTE, rank(1, 2), "nobody's"))
        ready.set()
        assert gone.wait(60)
        interrupted(claim, lambda: claim.lock("l").__enter__())
        over.set()
        return barrier.wait(2, timeout=60)

    def second() -> int:
        claim = forebay.claim("/local", None, rank(1, 2), "job")
        assert ready.wait(60)
        with claim.lock("l"):
            gone.set()
            assert over.wait(60)
        return claim.barrier("b").wait(2, timeout=60)

    born = children(first), children(second)
    assert sorted(child.result() for child in born) == [0, 1]


# -- 17: fork and spawn ------------------------------------------------------------------------------------------------


def _worker(claim: forebay.Claim, number: int, parties: int) -> None:
    """In a process that was forked, or got the claim pickled."""
    claim.array("seen", 8, "int64")[number] += os.getpid()
    with claim.lock("count"):
        count = claim.scalar("count", "int64")
        count.set(count.get() + 1)
    claim.barrier("b").wait(parties, timeout=60)


@pytest.mark.rotates
@pytest.mark.parametrize("how", ["fork", "forkserver", "spawn"])
def test_s17_workers_have_their_parents_claim(registry: Path, children: Callable[..., Any], how: str) -> None:
    def parent() -> list[int]:
        vars(forkserver._forkserver).update(vars(forkserver.ForkServer()))  # one of an earlier test is no child of ours
        context = multiprocessing.get_context(how)
        claim = forebay.claim("/local", REMOTE)
        seen = claim.array("seen", 8, "int64")
        for _ in range(2):  # the second children uses what the first one left
            workers = [context.Process(target=_worker, args=(claim, number, 4)) for number in range(3)]
            seen[:] = 0
            for worker in workers:
                worker.start()
            claim.barrier("b").wait(4, timeout=60)
            for worker in workers:
                worker.join()
                assert worker.exitcode == 0
            assert seen[:3].tolist() == [worker.pid for worker in workers]
        return [int(claim.scalar("count", "int64").get())]

    assert children(parent).result() == [6]


def test_s17_what_is_left_holds_the_claim(registry: Path, children: Callable[..., Any], flag: Any) -> None:
    """The leader is gone; its forked child uses the memory, and nobody takes the directory."""
    leave = flag()
    heard, told = os.pipe()

    def parent() -> None:
        claim = forebay.claim("/local", REMOTE)
        claim.array("a", 8, "int64")[:] = 7
        if os.fork():
            os._exit(0)
        os.write(told, b".")
        assert leave.wait(60)
        assert claim.array("a", 8, "int64").tolist() == [7] * 8
        os.write(told, b"!")
        os._exit(0)

    assert children(parent).wait() == 0
    assert os.read(heard, 1) == b"."
    with pytest.raises((errors.ClaimConflict, errors.WaitTimeout)):
        forebay.claim("/local", REMOTE, timeout=0.5)
    assert forebay.claims.prune_claims() == []
    leave.set()
    assert os.read(heard, 1) == b"!"
    forebay.claim("/local", REMOTE, timeout=20).close()
    for fd in (heard, told):
        os.close(fd)


def test_s17_a_fork_in_the_middle_of_claims(registry: Path, children: Callable[..., Any]) -> None:
    """One thread claims and closes without end, another one forks; each child claims too. Nobody waits for a lock of the other's."""

    def work() -> None:
        stop = threading.Event()

        def churn() -> None:
            turn = 0
            while not stop.is_set():
                turn += 1
                with forebay.claim(f"/local/{turn % 3}", REMOTE, alone(), f"churn {turn}") as claim:
                    claim.array("a", 8, "int64")[:] = 1

        thread = threading.Thread(target=churn)
        thread.start()
        for number in range(30):
            pid = os.fork()
            if pid == 0:
                with forebay.claim(f"/child/{number}", REMOTE, alone(), f"child {number}") as claim:
                    os._exit(0 if claim.array("a", 8, "int64").sum() == 0 else 1)
            assert os.waitpid(pid, 0)[1] == 0
        stop.set()
        thread.join()

    children(work).result()


# -- 18: opened by many ------------------------------------------------------------------------------------------------


@pytest.mark.rotates
def test_s18_sixty_four_processes_of_eight_jobs_at_once(registry: Path, children: Callable[..., Any], barrier: Any) -> None:
    """The registry is not there yet. Every job gets a prefix of its own, every rank its job's claim, in whatever order they come."""
    jobs, ranks, rounds = 8, 8, 3
    start = barrier(jobs * ranks)

    def process(job: int, number: int) -> list[tuple[int, int]]:
        found = []
        for turn in range(rounds):
            start.wait()
            claim = forebay.claim(f"/local/{job}", REMOTE, rank(number, ranks), f"job {job}, {turn}")
            with claim.lock("count"):
                claim.array("counts", ranks, "int64")[number] += 1
            claim.barrier("all").wait(ranks, timeout=60)
            found.append((claim.prefix, int(claim.array("counts", ranks, "int64").sum())))
            start.wait()
            claim.close()
            start.wait()
        return found

    born = {(job, number): children(lambda job=job, number=number: process(job, number)) for number in range(ranks) for job in range(jobs)}
    found = {who: child.result() for who, child in born.items()}
    for turn in range(rounds):
        prefixes = {job: {found[job, number][turn] for number in range(ranks)} for job in range(jobs)}
        assert all(len(seen) == 1 for seen in prefixes.values()), prefixes
        assert sorted(seen.pop() for seen in prefixes.values()) == [(prefix, ranks) for prefix in range(jobs)]


def test_s18_the_same_job_may_hold_several(registry: Path, children: Callable[..., Any]) -> None:
    """The k-th of a rank pairs with the k-th of its leader, and by name whatever the order."""

    def process(number: int) -> list[int]:
        train = forebay.claim("/local/train", REMOTE, rank(number, 2), "job")
        names = ["a", "b"] if number else ["b", "a"]
        named = {name: forebay.claim(f"/local/{name}", REMOTE, rank(number, 2), "job", name=name) for name in names}
        last = forebay.claim("/local/eval", None, rank(number, 2), "job")
        train.barrier("end").wait(2, timeout=60)
        return [train.prefix, named["a"].prefix, named["b"].prefix, last.prefix]

    first, second = [child.result() for child in [children(lambda number=number: process(number)) for number in range(2)]]
    assert first == second
    assert len(set(first)) == 4


def test_s18_ranks_that_differ_are_told_so(registry: Path, children: Callable[..., Any], barrier: Any) -> None:
    both = barrier(2)

    def process(number: int) -> str:
        if number == 0:
            with forebay.claim(["/local/a", "/local/b"], [REMOTE, None], rank(0, 2), "job"):
                both.wait()
            return ""
        said = text_of(errors.ClaimMismatch, lambda: forebay.claim(["/local/a", "/local/c"], [REMOTE, None], rank(1, 2), "job"))
        both.wait()
        return said

    said = [child.result() for child in [children(lambda number=number: process(number)) for number in range(2)]][1]
    assert "/local/b" in said
    assert "/local/c" in said


# -- 29: errors travel -------------------------------------------------------------------------------------------------


def test_s29_errors_come_whole_out_of_other_processes(registry: Path, children: Callable[..., Any]) -> None:
    def conflict() -> None:
        forebay.claim("/local", REMOTE, alone(), "b")

    with forebay.claim("/local", REMOTE, alone(), "a") as claim:
        claim.array("x", 8, "int64")
        with pytest.raises(errors.ClaimConflict) as raised:
            children(conflict).result()
        assert raised.value.theirs["job"] == "a"
        assert raised.value.ours["job"] == "b"

        def mismatch() -> None:
            claim.array("x", 9, "int64")

        with pytest.raises(errors.ClaimMismatch, match="8"):
            children(mismatch).result()
    broken = errors.BarrierBroken("gone", barrier="b", missing=["rank 1"], waited=0.5)
    again = pickle.loads(pickle.dumps(broken))
    assert (type(again), again.missing, again.barrier, str(again)) == (errors.BarrierBroken, ["rank 1"], "b", "gone")


def test_s29_followers_get_their_leaders_conflict_at_once(registry: Path, children: Callable[..., Any], flag: Any) -> None:
    told = flag()

    def process(number: int) -> tuple[str, float]:
        began = time.monotonic()
        said = text_of(errors.ClaimConflict, lambda: forebay.claim("/local", REMOTE, rank(number, 4), "job"))
        took = time.monotonic() - began
        if number == 0:
            assert told.wait(60)  # a leader that has ended has nothing more to say
        return said, took

    with forebay.claim("/local", REMOTE, alone(), "before"):
        born = [children(lambda number=number: process(number)) for number in range(4)]
        found = [child.result() for child in born[1:]]
        told.set()
        found.append(born[0].result())
    assert all("/local" in said and "before" in said for said, _ in found)
    assert max(took for _, took in found) < 5
