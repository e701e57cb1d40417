"""Jobs that come, meet, are killed and come again, all on one node; nobody ever shares a directory, and nothing is left."""

from __future__ import annotations

import fcntl
import os
import random
import time
from collections import Counter
from pathlib import Path

import pytest

import forebay
import forebay.claims  # here, so that forked children need not
from forebay import errors
from tests import parts
from tests.claiming import REMOTE, claims_in, rank, registry  # noqa: F401 (a fixture)
from tests.processes import Child, fork

JOBS, RANKS, DIRECTORIES, TURNS = 6, 2, 4, 20


class Rank:
    """A rank of a job that claims one of a few directories, works in it with its fellows, and goes. ``did`` counts what went well."""

    def __init__(self, place: Path, seed: int, number: int) -> None:
        self.place, self.number, self.did = place, number, Counter[str]()
        self.chance = random.Random(seed)  # the same in all ranks of the job: they do the same

    def run(self, job: str) -> Counter[str]:
        for turn in range(TURNS):
            directory = self.place / str(self.chance.randrange(DIRECTORIES))
            try:
                claim = forebay.claim(directory, REMOTE, rank(self.number, RANKS), f"{job}, {turn}", timeout=30)
            except errors.ClaimConflict:
                self.did["refused"] += 1
                continue
            try:
                self.work(claim, directory)
                self.did["worked"] += 1
            except errors.BarrierBroken:
                self.did["broken"] += 1
            finally:
                claim.close()
        with forebay.claim("/end", None, rank(self.number, RANKS), job, timeout=30) as claim:
            claim.barrier("end").wait(RANKS, timeout=30)  # what a leader was refused is told to its rank as long as it is there
        return self.did

    def work(self, claim: forebay.Claim, directory: Path) -> None:
        """As long as the claim is held a plain lock on the directory's own file must be free for the leader: no other job is in it."""
        file = os.open(f"{directory}.own", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if claim.is_leader:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            counts, barrier = claim.array("counts", RANKS, "int64"), claim.barrier("turn")
            for turn in range(self.chance.randrange(1, 30)):
                counts[self.number] += 1
                barrier.wait(RANKS, timeout=30)
                assert (counts == turn + 1).all(), (counts, turn)  # neither a round ahead nor one behind, and zero at first
                barrier.wait(RANKS, timeout=30)
            with claim.lock("l", timeout=30):
                total = claim.scalar("total", "int64")
                total.set(total.get() + 1)
            barrier.wait(RANKS, timeout=30)
            assert total.get() == RANKS
        finally:
            os.close(file)


def start(place: Path, job: int) -> list[Child]:
    return [fork(lambda number=number: Rank(place, job, number).run(f"job {job}")) for number in range(RANKS)]


def under_load(place: Path, seconds: float, *, kills: bool) -> None:
    numbers, chance, did = iter(range(1_000_000)), random.Random(7), Counter[str]()
    until, jobs = time.monotonic() + seconds, list[list[Child]]()
    try:
        while time.monotonic() < until or jobs:
            while len(jobs) < JOBS and time.monotonic() < until:
                jobs.append(start(place, next(numbers)))
            job = jobs.pop(chance.randrange(len(jobs)))
            if kills and chance.random() < 0.8:
                time.sleep(chance.uniform(0, 0.2))
                for child in chance.sample(job, RANKS):
                    child.kill()
                did["killed"] += 1
            else:
                for child in job:
                    did += child.result()
    finally:
        for job in jobs:
            for child in job:
                child.kill()
    print(dict(did))
    assert did["worked"] > RANKS * JOBS
    assert did["refused"] > 0
    assert did["broken"] == 0  # who sees one killed is killed next, before he could tell


@pytest.mark.rotates
@pytest.mark.parametrize("kills", [False, True], ids=["nobody dies", "killed"])
def test_no_directory_has_two_jobs_for_seconds(registry: Path, tmp_path: Path, kills: bool) -> None:  # noqa: F811
    under_load(tmp_path, 3, kills=kills)
    forebay.claim("/after", REMOTE, job="after").close()
    assert claims_in(registry) == []


@pytest.mark.stress
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kills", [False, True], ids=["nobody dies", "killed"])
def test_no_directory_has_two_jobs_for_a_minute(registry: Path, tmp_path: Path, kills: bool) -> None:  # noqa: F811
    under_load(tmp_path, parts.share(60), kills=kills)
    forebay.claim("/after", REMOTE, job="after").close()
    assert claims_in(registry) == []
