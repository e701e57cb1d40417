"""Of many directories those that are the same, or overlap: found without comparing each with each."""

from __future__ import annotations

import itertools
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

import forebay
from forebay import errors
from forebay.claims import conflicts, members, records
from forebay.claims.conflicts import ClaimRequest
from forebay.claims.processes import JobId
from forebay.claims.records import ClaimedPath, ClaimedStream, Record
from forebay.claims.registry import Registry
from tests.claiming import REMOTE, alone, rank
from tests.processes import Gate, ProcessGroup

pytestmark = pytest.mark.usefixtures("registry")  # a refusal is told through the registry, too

MANY = 200


@pytest.fixture
def places(tmp_path: Path) -> Callable[[int], list[ClaimedPath]]:
    """So many random places, by names with links and dots, some there and some not."""
    for there in ("a/b/c", "a/d", "e"):
        (tmp_path / there).mkdir(parents=True)
    for link, target in (("l", "a"), ("m", "a/b"), ("n", "nowhere")):
        (tmp_path / link).symlink_to(target)
    chance = random.Random(8)

    names = [*"abcdelmnx", "nowhere", ".."]

    def path() -> str:
        return "/".join([str(tmp_path), *chance.choices(names, k=chance.randint(0, 4))])

    return lambda count: [records.canonical(path()) for _ in range(count)]


def record(where: list[ClaimedPath]) -> Record:
    return ClaimRequest(JobId("job", "job", "how"), "0", tuple(ClaimedStream(place, REMOTE, False) for place in where)).record(0)


@pytest.mark.parametrize(("equal_only", "meets"), [(False, records.overlap), (True, records.same)])
def test_a_conflict_is_the_first_pair_that_meets(
    places: Callable[[int], list[ClaimedPath]], equal_only: bool, meets: Callable[[ClaimedPath, ClaimedPath], bool]
) -> None:
    found = 0
    for _ in range(200):
        ours, theirs = places(3), places(4)
        first = next((pair for pair in itertools.product(ours, theirs) if meets(*pair)), None)
        said = conflicts.find_conflict(record(ours), record(theirs), os.geteuid(), equal_only=equal_only)
        assert (said and tuple(stream.directory for stream in said)) == first
        found += first is not None
    assert 0 < found < 200


def test_what_is_repeated_is_told_with_the_first_that_is_the_same(places: Callable[[int], list[ClaimedPath]]) -> None:
    for _ in range(200):
        some = places(6)
        again = [next((first for first in range(number) if records.same(some[first], some[number])), None) for number in range(6)]
        assert conflicts.repeated(some) == [(first, number) for number, first in enumerate(again) if first is not None]


def test_many_directories_are_not_compared_each_with_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[ClaimedPath] = []
    common = records._below_common

    def counted(a: ClaimedPath, b: ClaimedPath) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
        compared.append(a)
        return common(a, b)

    monkeypatch.setattr(records, "_below_common", counted)
    first, other = ([tmp_path / f"{job}{number}" for number in range(MANY)] for job in "ab")
    with forebay.claim(first, [REMOTE] * MANY, alone(), job="a"):
        forebay.claim(other, [REMOTE] * MANY, alone(), job="b").close()
        assert compared == []
        with pytest.raises(errors.ClaimConflict, match=r"a7/x overlaps with .*/a7, which"):
            forebay.claim([*other, tmp_path / "a7" / "x"], [REMOTE] * (MANY + 1), alone(), job="b")
    assert len(compared) <= 4


def test_each_repeat_is_named_once(tmp_path: Path) -> None:
    with pytest.raises(errors.ConfigError) as caught:
        forebay.claim([tmp_path / "a", f"{tmp_path}/./a", f"{tmp_path}/a/", tmp_path / "b"], world=alone())
    assert str(caught.value).endswith(f"repeated: {tmp_path}/a and {tmp_path}/./a, {tmp_path}/a and {tmp_path}/a/")


def test_a_text_that_is_no_path_says_so() -> None:
    with pytest.raises(errors.ConfigError, match="cannot be read: surrogates not allowed"):
        forebay.claim("/local/\ud800", world=alone())


def test_a_conflict_of_a_process_with_itself_is_true_for_whoever_reads_it(tmp_path: Path) -> None:
    with forebay.claim(tmp_path, REMOTE, alone()) as held, pytest.raises(errors.ClaimConflict) as caught:
        forebay.claim(tmp_path, REMOTE, alone())
    what, *_, todo = str(caught.value).splitlines()  # other ranks get it, too
    assert what == f"{tmp_path} is taken by the same process, by claim {held.prefix:06}"
    assert todo.startswith("give each claim a directory of its own, close the other first, or")


@pytest.mark.parametrize(
    ("again", "said"),
    [
        (lambda place: forebay.claim(place, REMOTE, alone(), timeout=0), "{place} is taken by claim 000000 of another job on this node"),
        (
            lambda place: forebay.claim(place, REMOTE, rank(0, 2), name="a", job="job", timeout=0),
            "was process {leader}, which ended",
        ),
    ],
)
def test_a_leader_that_left_is_not_who_has_it(
    node: Registry, tmp_path: Path, children: ProcessGroup, again: Callable[[Path], object], said: str
) -> None:
    ready = Gate()
    leader = forebay.claim(tmp_path, REMOTE, rank(0, 2), name="a", job="job")

    def stay() -> None:
        members.leave_all()
        with forebay.claim(tmp_path, REMOTE, rank(1, 2), name="a", job="job"):
            ready.open()
            signal.pause()

    child = children(stay)
    ready.wait()
    leader.close()
    with pytest.raises(errors.ClaimConflict) as caught:
        again(tmp_path)
    assert said.format(place=tmp_path, leader=os.getpid()) in str(caught.value)
    assert f"held by job job: process {child.pid} " in str(caught.value)


def test_of_many_directories_the_first_are_told(tmp_path: Path) -> None:
    many = [tmp_path / f"{number}" for number in range(MANY)]
    with forebay.claim(many, [REMOTE] * MANY, alone(), job="a"), pytest.raises(errors.ClaimConflict) as caught:
        forebay.claim(many[-1], REMOTE, alone(), job="b")
    said = str(caught.value)
    assert said.startswith(f"{many[-1]} is taken")
    assert f"{many[15]} from {REMOTE}, {MANY - 16} more: " in said
    assert caught.value.theirs["directories"] == [str(path) for path in many]
