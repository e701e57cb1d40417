"""Barriers, locks and memory of a claim among the workers of a DataLoader, forked and spawned."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import forebay
from forebay import errors

pytest.importorskip("numpy")
pytest.importorskip("torch")
data = pytest.importorskip("torch.utils.data")

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more workers than processors
LONG = 40.0
WORKERS = 3


@pytest.fixture
def claim(quick_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[forebay.Claim]:
    monkeypatch.setenv("FOREBAY_CLAIMS", str(quick_path / "claims"))
    with forebay.claim(tmp_path / "data") as found:
        yield found


class Steps(data.IterableDataset):  # type: ignore[misc] # PyTorch is not typed here
    """Whose workers take each step together. Gives (step, how many workers had begun it when it was left)."""

    def __init__(self, claim: forebay.Claim, steps: int) -> None:
        self.claim, self.steps = claim, steps

    def __iter__(self) -> Iterator[tuple[int, int]]:
        began, barrier = self.claim.array("began", self.steps, "i8"), self.claim.barrier("step")
        for step in range(self.steps):
            with self.claim.lock("began", timeout=LONG):
                began[step] += 1
            barrier.wait(WORKERS, timeout=LONG)
            yield step, int(began[step])


def test_workers_take_each_step_together(claim: forebay.Claim) -> None:
    loader = data.DataLoader(Steps(claim, 5), batch_size=None, num_workers=WORKERS, multiprocessing_context="fork")
    for epoch in range(1, 3):
        assert sorted(map(tuple, loader)) == [(step, WORKERS * epoch) for step in range(5) for _ in range(WORKERS)]
    assert claim.array("began", 5, "i8").tolist() == [2 * WORKERS] * 5


class Killed(Steps):
    """The last worker is killed while the others wait, who note that they were told."""

    def __iter__(self) -> Iterator[int]:
        which, told = data.get_worker_info().id, self.claim.array("told", WORKERS, "f8")
        if which == WORKERS - 1:
            time.sleep(0.3)  # the others wait by now, or come later: told they are
            os.kill(os.getpid(), signal.SIGKILL)
        began = time.monotonic()
        try:
            self.claim.barrier("step").wait(WORKERS, timeout=LONG)
        except errors.BarrierBroken:
            told[which] = time.monotonic() - began
        yield which


def test_a_worker_is_killed(claim: forebay.Claim) -> None:
    told = claim.array("told", WORKERS, "f8")
    loader = data.DataLoader(Killed(claim, 1), batch_size=None, num_workers=WORKERS, multiprocessing_context="fork")
    with pytest.raises(RuntimeError, match="exited unexpectedly"):
        list(loader)
    deadline = time.monotonic() + LONG
    while (told > 0).tolist() != [True] * (WORKERS - 1) + [False]:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert told.max() < 1.3
    again = data.DataLoader(Steps(claim, 3), batch_size=None, num_workers=WORKERS, multiprocessing_context="fork")
    assert len(list(again)) == 3 * WORKERS


class Stuck(Steps):
    """All but one worker wait for one that never comes."""

    def __iter__(self) -> Iterator[int]:
        yield 0
        if data.get_worker_info().id:
            self.claim.barrier("step").wait(WORKERS)
        yield 1


def test_an_epoch_is_given_up_while_workers_wait(claim: forebay.Claim, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch ends them by a signal; the next epoch's workers know nothing of them."""
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.5)
    loader = iter(data.DataLoader(Stuck(claim, 1), batch_size=None, num_workers=WORKERS, multiprocessing_context="fork"))
    assert [next(loader) for _ in range(WORKERS)] == [0] * WORKERS
    del loader
    again = data.DataLoader(Steps(claim, 3), batch_size=None, num_workers=WORKERS, multiprocessing_context="fork")
    assert len(list(again)) == 3 * WORKERS


class Carried(Steps):
    """Has what it needs of the claim with it: pickled where workers are spawned."""

    def __init__(self, claim: forebay.Claim) -> None:
        self.barrier, self.lock, self.count = claim.barrier("carried"), claim.lock("carried", LONG), claim.scalar("carried", "i8")

    def __iter__(self) -> Iterator[int]:
        with self.lock:
            self.count.set(self.count.get() + 1)
        self.barrier.wait(2, timeout=LONG)
        yield self.count.get()


@pytest.mark.rotates
@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_a_dataset_carries_them(claim: forebay.Claim, start: str) -> None:
    loader = data.DataLoader(Carried(claim), batch_size=None, num_workers=2, multiprocessing_context=start)
    assert list(loader) == [2, 2]
    assert claim.scalar("carried", "i8").get() == 2
