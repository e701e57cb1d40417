"""Barriers: nobody passes before all have come, nobody waits for the dead, and whoever is told is told once."""

from __future__ import annotations

import functools
import gc
import logging
import os
import pickle
import random
import signal
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forebay import errors
from forebay._kernel import fences, host, waits
from forebay.claims import barriers, shared
from forebay.claims.barriers import Barrier
from forebay.claims.members import Members
from tests.claims import contexts
from tests.claims.contexts import leaving
from tests.clocks import Clocks
from tests.items import until
from tests.processes import Child, Gate, ProcessGroup, death_of, fork, fork_to_die, talk_to

NAME = "start"
LONG = 30.0
SOON = 10.0
"""Within which a death is to be told, on a busy machine."""


def rank(place: Path, number: int, work: Callable[[Barrier], Any], name: str = NAME) -> Any:
    """What a rank does at a barrier of the claim, which it finds by itself."""
    return contexts.rank(place, number, lambda context: work(Barrier(context, name)))


def broken(barrier: Barrier, parties: int | None = None) -> tuple[list[str], float]:
    """Whom a broken barrier misses, and how long that took to be told."""
    began = time.monotonic()
    with pytest.raises(errors.BarrierBroken) as caught:
        barrier.wait(parties, timeout=LONG)
    return caught.value.missing, time.monotonic() - began


def stop_waiting(context: Members, *waiting: Child) -> None:
    """Stop processes that wait, while none of them has the barrier's lock, which it would keep."""
    with barriers.state_of(context, NAME).mutex.within(LONG):
        for child in waiting:
            child.stop()


def comes_to_wait(context: Members, count: int, name: str = NAME) -> None:
    """Until so many wait."""
    board = barriers.state_of(context, name)
    deadline = time.monotonic() + LONG
    while sum(map(bool, board.seats())) < count:
        assert time.monotonic() < deadline, f"{board.seats()} after {LONG} s"
        time.sleep(0.002)


def workers(members: Members, work: Callable[[Barrier], Any], count: int = 2) -> list[Any]:
    """What each of a rank's new workers does at the barrier before it ends in order."""
    made = [fork(lambda: leaving(members, lambda members: work(Barrier(members, NAME)))) for _ in range(count)]
    return [worker.result() for worker in made]


# -- crossing ----------------------------------------------------------------------------------------------------------


def test_a_number_of_numpy(context: Members) -> None:
    assert Barrier(context, NAME).wait(np.int64(1)) == 0


@pytest.mark.parametrize("parties", [1, 2, 3, 7])
def test_each_has_a_number_of_its_own(place: Path, context: Members, children: ProcessGroup, parties: int) -> None:
    others = [children(lambda n=n: rank(place, n, lambda barrier: barrier.wait(parties, LONG))) for n in range(1, parties)]
    assert sorted([Barrier(context, NAME).wait(parties, LONG), *(other.result() for other in others)]) == list(range(parties))


def test_nobody_is_a_round_ahead(place: Path, context: Members, children: ProcessGroup) -> None:
    parties, rounds = 4, 1000
    turns = shared.buffer(context, "turns", parties * 8).cast("Q")

    def run(which: int, barrier: Barrier) -> int:
        ahead = 0
        for turn in range(rounds):
            turns[which] = turn
            barrier.wait(parties, LONG)
            ahead += sum(count != turn for count in turns)  # nobody can have gone on before all looked
            barrier.wait(parties, LONG)
        return ahead

    others = [children(lambda n=n: rank(place, n, lambda barrier: run(n, barrier))) for n in range(1, parties)]
    assert run(0, Barrier(context, NAME)) + sum(other.result() for other in others) == 0


def test_threads_are_parties(context: Members) -> None:
    numbers: list[int] = []
    threads = [threading.Thread(target=lambda: numbers.append(Barrier(context, NAME).wait(5, LONG))) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(numbers) == list(range(5))


def test_more_come_than_parties(place: Path, context: Members, children: ProcessGroup) -> None:
    others = [children(lambda n=n: rank(place, n, lambda barrier: barrier.wait(2, LONG))) for n in range(1, 6)]
    numbers = [Barrier(context, NAME).wait(2, LONG), *(other.result() for other in others)]
    assert sorted(numbers) == [0, 0, 0, 1, 1, 1]


def test_a_forked_child_is_a_party(context: Members, children: ProcessGroup) -> None:
    barrier = Barrier(context, NAME)
    barrier.wait(1)
    child = children(lambda: leaving(context, lambda _: [barrier.wait(2, LONG) for _ in range(50)]))
    ours = [barrier.wait(2, LONG) for _ in range(50)]
    assert [sum(pair) for pair in zip(ours, child.result(), strict=True)] == [1] * 50


def test_two_names_are_two_barriers(place: Path, context: Members, children: ProcessGroup) -> None:
    other = children(lambda: rank(place, 1, lambda barrier: barrier.wait(2, LONG), "a"))
    comes_to_wait(context, 1, "a")
    with pytest.raises(errors.WaitTimeout):
        Barrier(context, "b").wait(2, 0.05)
    assert Barrier(context, "a").wait() == 1
    assert other.result() == 0


# -- the number of parties ---------------------------------------------------------------------------------------------


def test_the_first_says_how_many(context: Members) -> None:
    with pytest.raises(errors.ConfigError, match="pass the number of parties"):
        Barrier(context, NAME).wait()


@pytest.mark.parametrize("parties", [0, -1, 1.5, True, "2", barriers.SEATS + 1])
def test_parties_that_make_no_sense(context: Members, parties: Any) -> None:
    with pytest.raises(errors.ConfigError, match="parties"):
        Barrier(context, NAME).wait(parties)


@pytest.mark.parametrize("timeout", [-1, "3", True, float("nan")])
def test_timeouts_that_make_no_sense(context: Members, timeout: Any) -> None:
    with pytest.raises(errors.ConfigError, match="timeout"):
        Barrier(context, NAME).wait(1, timeout)
    with pytest.raises(errors.ConfigError, match="timeout"):
        shared.NamedLock(context, NAME, timeout)


def test_another_number_while_somebody_waits(place: Path, context: Members, children: ProcessGroup) -> None:
    other = children(lambda: rank(place, 1, lambda barrier: barrier.wait(2, LONG)))
    comes_to_wait(context, 1)
    with pytest.raises(errors.ConfigError, match=r"1 of 2 parties wait, so it cannot be for 3"):
        Barrier(context, NAME).wait(3, LONG)
    assert Barrier(context, NAME).wait(2, LONG) == 1
    assert other.result() == 0


def test_another_number_while_nobody_waits(place: Path, context: Members, children: ProcessGroup) -> None:
    barrier = Barrier(context, NAME)
    for parties in (3, 1, 2):
        work = functools.partial(Barrier.wait, parties=parties, timeout=LONG)
        others = [children(lambda n=n, work=work: rank(place, n, work)) for n in range(1, parties)]
        assert sorted([work(barrier), *(other.result() for other in others)]) == list(range(parties))


# -- deaths ------------------------------------------------------------------------------------------------------------


def test_a_rank_that_waits_at_a_barrier_is_killed(place: Path, context: Members, children: ProcessGroup) -> None:
    killed = children(lambda: rank(place, 1, lambda barrier: barrier.wait(3, LONG)))
    other = children(lambda: rank(place, 2, lambda barrier: broken(barrier, 3)))
    comes_to_wait(context, 2)
    killed.kill()
    assert broken(Barrier(context, NAME), 3) == ([f"rank 1 (process {killed.pid})"], pytest.approx(0, abs=SOON))
    assert other.result() == ([f"rank 1 (process {killed.pid})"], pytest.approx(0, abs=SOON))


def test_a_rank_that_crossed_a_barrier_is_killed_on_its_way(place: Path, context: Members, children: ProcessGroup) -> None:
    gate = Gate()
    killed = children(lambda: rank(place, 1, lambda barrier: (barrier.wait(2, LONG), gate.wait())))
    idle = children(lambda: rank(place, 2, lambda barrier: gate.wait()))  # who lives, and never comes, does not hide it
    barrier = Barrier(context, NAME)
    barrier.wait(2, LONG)
    timer = threading.Timer(0.2, killed.kill)
    timer.start()
    missing, waited = broken(barrier, 2)
    timer.join()
    assert (missing, waited) == ([f"rank 1 (process {killed.pid})"], pytest.approx(0.2, abs=SOON))
    idle.kill()


def test_a_rank_is_killed_before_it_came_to_the_barrier(place: Path, context: Members, children: ProcessGroup) -> None:
    gate = Gate()
    killed = children(lambda: rank(place, 1, lambda barrier: (gate.open(), Gate().wait())))
    gate.wait()
    killed.kill()
    assert broken(Barrier(context, NAME), 2) == ([f"rank 1 (process {killed.pid})"], pytest.approx(0, abs=SOON))


def test_who_waits_is_told_within_a_second(place: Path, context: Members, children: ProcessGroup) -> None:
    """The quickest of five: a busy machine is not busy all the time."""
    took = []
    for number in range(1, 6):
        name, killed_at = f"barrier {number}", list[float]()
        killed = children(lambda number=number, name=name: rank(place, number, lambda barrier: barrier.wait(3, LONG), name))
        comes_to_wait(context, 1, name)
        timer = threading.Timer(0.3, lambda killed=killed, at=killed_at: (at.append(time.monotonic()), killed.kill()))
        timer.start()
        broken(Barrier(context, name), 3)
        took.append(time.monotonic() - killed_at[0])
        timer.join()
    assert min(took) < 1


@pytest.mark.parametrize("epochs", [0, 1, 2])
@pytest.mark.parametrize("how", ["at once", "one after the other"])
def test_a_rank_is_killed_while_it_has_no_workers(place: Path, context: Members, children: ProcessGroup, epochs: int, how: str) -> None:
    """Those of the other ranks are told, also if they began after it died, and after others were told."""
    ready, go = Gate(), {1: Gate(), 2: Gate()}

    def work(members: Members) -> Any:
        for _ in range(epochs):
            workers(members, lambda barrier: barrier.wait(6, LONG))
        ready.open()
        if members.rank == 3:
            Gate().wait()
        go[members.rank].wait()
        if how == "at once":
            return workers(members, lambda barrier: broken(barrier, 6))
        return [told for _ in range(2) for told in workers(members, lambda barrier: broken(barrier, 6), 1)]

    killed, *others = [children(lambda n=n: contexts.rank(place, n, work)) for n in (3, 1, 2)]
    for _ in range(3):
        ready.wait()
    killed.kill()
    for number, other in enumerate(others, 1):
        go[number].open()
        if how == "one after the other":
            assert len(other.result()) == 2
    told = [one for other in others for one in other.result()]
    assert told == [([f"rank 3 (process {killed.pid})"], pytest.approx(0, abs=2.0))] * 4


def test_a_rank_has_lost_a_worker_and_ends(place: Path, context: Members, children: ProcessGroup) -> None:
    """As a DataLoader does: it raises, and the rank ends with an exception."""
    go = Gate()

    def lose(members: Members) -> int:
        workers(members, lambda barrier: barrier.wait(4, LONG))
        lost = talk_to(lambda line: (line.say(), Gate().wait()))
        lost.hear()
        lost.kill()
        return lost.pid

    def survive(members: Members) -> Any:
        workers(members, lambda barrier: barrier.wait(4, LONG))
        go.wait()
        return workers(members, lambda barrier: broken(barrier, 4))

    ended, other = children(lambda: contexts.rank(place, 1, lose)), children(lambda: contexts.rank(place, 2, survive))
    died = [f"rank 1 (process {ended.result()})"]
    go.open()
    assert other.result() == [(died, pytest.approx(0, abs=SOON))] * 2


def test_survivors_go_on_without_a_rank(place: Path, context: Members, children: ProcessGroup) -> None:
    """Those that are told once go on with fewer, and their workers of later epochs are told no more."""
    ready, go = Gate(), Gate()

    def work(members: Members) -> Any:
        workers(members, lambda barrier: barrier.wait(4, LONG))
        ready.open()
        if members.rank == 1:
            Gate().wait()
        go.wait()
        first = workers(members, lambda barrier: (broken(barrier, 4)[0], barrier.wait(2, LONG)))
        return first, [sorted(workers(members, lambda barrier: barrier.wait(2, LONG))) for _ in range(2)]

    killed, other = [children(lambda n=n: contexts.rank(place, n, work)) for n in (1, 2)]
    ready.wait()
    ready.wait()
    killed.kill()
    go.open()
    first, later = other.result()
    assert sorted(first) == [([f"rank 1 (process {killed.pid})"], number) for number in (0, 1)]
    assert later == [[0, 1], [0, 1]]


def test_who_is_not_needed_may_die(place: Path, context: Members, children: ProcessGroup) -> None:
    gate, go = Gate(), Gate()
    killed = children(lambda: rank(place, 9, lambda barrier: (gate.open(), Gate().wait())))
    other = children(lambda: rank(place, 1, lambda barrier: (go.wait(), barrier.wait(2, LONG))[1]))
    gate.wait()
    killed.kill()
    timer = threading.Timer(0.5, go.open)  # the death is looked at five times before
    timer.start()
    assert Barrier(context, NAME).wait(2, LONG) == 0
    assert other.result() == 1
    timer.join()


@pytest.mark.parametrize("late", [False, True])
def test_a_worker_is_killed_before_it_ever_came(context: Members, children: ProcessGroup, late: bool) -> None:
    """Its main process has the claim too, and could come: but workers wait for workers."""
    go, there = Gate(), Gate()
    killed = children(lambda: (there.open(), Gate().wait()))
    there.wait()
    others = [children(lambda: (go.wait(), leaving(context, lambda context: broken(Barrier(context, NAME), 3)))[1]) for _ in range(2)]
    if not late:
        go.open()
        go.open()
        comes_to_wait(context, 2)
    killed.kill()
    if late:
        go.open()
        go.open()
    names = [f"rank 0 (process {killed.pid})"]
    assert [other.result() for other in others] == [(names, pytest.approx(0, abs=SOON + (not late)))] * 2
    assert Barrier(context, NAME).wait(1) == 0


def test_the_late_are_told_and_then_it_is_usable(place: Path, context: Members, children: ProcessGroup) -> None:
    go = Gate()

    def late(barrier: Barrier) -> Any:
        barrier.wait(4, LONG)
        go.wait()
        return broken(barrier), barrier.wait(2, LONG)

    def prompt(barrier: Barrier) -> Any:
        barrier.wait(4, LONG)
        barrier.wait(4, LONG)

    third = children(lambda: rank(place, 2, late))
    barrier, killed = Barrier(context, NAME), children(lambda: rank(place, 1, prompt))
    fourth = children(lambda: rank(place, 3, lambda barrier: (barrier.wait(4, LONG), broken(barrier))[1]))
    barrier.wait(4, LONG)
    comes_to_wait(context, 2)
    killed.kill()
    names = [f"rank 1 (process {killed.pid})"]
    assert broken(barrier)[0] == fourth.result()[0] == names
    with pytest.raises(errors.WaitTimeout, match=rf"missing: rank 2 \(process {third.pid}\)$"):
        barrier.wait(2, 0.3)
    go.open()
    assert barrier.wait(2, LONG) in (0, 1)
    told, _ = third.result()
    assert told == (names, pytest.approx(0, abs=SOON))


def test_a_late_one_that_dies_is_missed_in_the_next_round(place: Path, context: Members, children: ProcessGroup) -> None:
    late = children(lambda: rank(place, 2, lambda barrier: (barrier.wait(3, LONG), Gate().wait())))
    killed = children(lambda: rank(place, 1, lambda barrier: (barrier.wait(3, LONG), barrier.wait(3, LONG))))
    barrier = Barrier(context, NAME)
    barrier.wait(3, LONG)
    comes_to_wait(context, 1)
    killed.kill()
    assert broken(barrier)[0] == [f"rank 1 (process {killed.pid})"]
    late.kill()
    assert broken(barrier, 2)[0] == [f"rank 2 (process {late.pid})"]
    assert barrier.wait(1) == 0


def test_nobody_waits_for_one_that_takes_no_part(place: Path, context: Members, children: ProcessGroup) -> None:
    """Two die before the first crossing, the second one before it came; a rank that has the claim never comes."""
    here = Gate()

    def survive(barrier: Barrier) -> set[str]:
        dead: set[str] = set()
        while True:
            try:
                barrier.wait(4 - len(dead), LONG)
            except errors.BarrierBroken as error:
                dead.update(error.missing)
            else:
                return dead

    second, _ = [children(lambda n=n: rank(place, n, lambda barrier: (here.open(), Gate().wait(2 * LONG)))) for n in (2, 5)]
    here.wait()
    here.wait()
    first = children(lambda: rank(place, 1, lambda barrier: barrier.wait(4, LONG)))
    survivors = [children(lambda n=n: rank(place, n, survive)) for n in (3, 4)]
    comes_to_wait(context, 3)
    first.kill()
    board = barriers.state_of(context, NAME)
    until(lambda: sum(bool(seat & barriers.INFORMED) for seat in board.seats()) == 3, "all are told")
    second.kill()
    names = {f"rank {n} (process {child.pid})" for n, child in enumerate((first, second), 1)}
    assert [survivor.result() for survivor in survivors] == [names, names]


def test_all_are_told_of_the_same_deaths_in_one_round(place: Path, context: Members, children: ProcessGroup) -> None:
    """One dies / some are told / another dies / the others are told: of the first, and all of the second in the next round."""
    first = children(lambda: rank(place, 1, lambda barrier: barrier.wait(4, LONG)))
    second = children(lambda: rank(place, 2, lambda barrier: barrier.wait(4, LONG)))
    other = children(lambda: rank(place, 3, lambda barrier: [broken(barrier, parties)[0] for parties in (4, 3)]))
    comes_to_wait(context, 3)
    stop_waiting(context, second, other)
    first.kill()
    barrier = Barrier(context, NAME)
    told = [broken(barrier, 4)[0]]
    second.kill()
    other.signal(signal.SIGCONT)
    told.append(broken(barrier, 3)[0])
    assert told == other.result() == [[f"rank 1 (process {first.pid})"], [f"rank 2 (process {second.pid})"]]
    assert barrier.wait(1) == 0


def test_a_clock_that_is_set_back_leaves_no_late_one_untold(place: Path, context: Members, children: ProcessGroup) -> None:
    """All join / the clock is set back / the round breaks: that was after they joined, whatever the time was."""
    go = Gate()
    with Clocks(together=True) as clocks:
        late = children(lambda: rank(place, 2, lambda barrier: (barrier.wait(3, LONG), go.wait(), broken(barrier)[0])[2]))
        killed = children(lambda: rank(place, 1, lambda barrier: (barrier.wait(3, LONG), barrier.wait(3, LONG))))
        barrier = Barrier(context, NAME)
        barrier.wait(3, LONG)
        comes_to_wait(context, 1)
        clocks.step(-3600 * 1_000_000_000)
        killed.kill()
        names = [f"rank 1 (process {killed.pid})"]
        assert broken(barrier)[0] == names
        with pytest.raises(errors.WaitTimeout, match=rf"missing: rank 2 \(process {late.pid}\)$"):
            barrier.wait(2, 0.3)
        go.open()
        assert late.result() == names


@pytest.mark.parametrize("end", ["killed", "left"])
def test_nobody_waits_for_a_late_one_that_is_gone(place: Path, context: Members, children: ProcessGroup, end: str) -> None:
    go = Gate()
    late = children(lambda: rank(place, 2, lambda barrier: (barrier.wait(3, LONG), go.wait(), barrier._members.leave())))
    killed = children(lambda: rank(place, 1, lambda barrier: (barrier.wait(3, LONG), barrier.wait(3, LONG))))
    barrier = Barrier(context, NAME)
    barrier.wait(3, LONG)
    comes_to_wait(context, 1)
    killed.kill()
    broken(barrier)
    if end == "killed":
        late.kill()
    else:
        go.open()
        late.result()
    assert barrier.wait(1) == 0


def test_a_death_is_told_once(place: Path, context: Members, children: ProcessGroup) -> None:
    killed = children(lambda: rank(place, 1, lambda barrier: barrier.wait(2, LONG)))
    comes_to_wait(context, 1)
    killed.kill()
    barrier = Barrier(context, NAME)
    broken(barrier, 2)
    with pytest.raises(errors.WaitTimeout, match="1 who have not joined the claim"):
        barrier.wait(2, 0.4)
    again = children(lambda: rank(place, 1, lambda barrier: barrier.wait(2, LONG)))
    assert barrier.wait(2, LONG) + again.result() == 1


def test_a_death_is_no_news_at_another_barrier(place: Path, context: Members, children: ProcessGroup) -> None:
    killed = children(lambda: rank(place, 1, lambda barrier: barrier.wait(2, LONG)))
    comes_to_wait(context, 1)
    killed.kill()
    broken(Barrier(context, NAME), 2)
    another = Barrier(context, "another")
    with pytest.raises(errors.WaitTimeout, match="1 who have not joined the claim"):
        another.wait(2, 0.4)
    late = children(lambda: rank(place, 1, lambda barrier: barrier.wait(2, LONG), "another"))
    assert another.wait(2, LONG) + late.result() == 1


def test_a_death_is_reported_at_a_barrier_where_the_dead_took_part(place: Path, context: Members, children: ProcessGroup) -> None:
    crossed = Barrier(context, "another")

    def take_part(barrier: Barrier) -> None:
        Barrier(barrier._members, "another").wait(2, LONG)
        barrier.wait(2, LONG)

    killed = children(lambda: rank(place, 1, take_part))
    crossed.wait(2, LONG)
    comes_to_wait(context, 1)
    killed.kill()
    assert broken(Barrier(context, NAME), 2)[0] == broken(crossed)[0] == [f"rank 1 (process {killed.pid})"]


def test_ranks_that_join_later_are_told_of_no_earlier_death(place: Path, context: Members, children: ProcessGroup) -> None:
    """Workers of one epoch are killed in the barrier; those of the next one use it as if nobody had been there."""
    old = [children(lambda: rank(place, 0, lambda barrier: barrier.wait(3, LONG))) for _ in range(2)]
    comes_to_wait(context, 2)
    for child in old:
        child.kill()
    new = [children(lambda: rank(place, 0, lambda barrier: [barrier.wait(3, LONG) for _ in range(3)])) for _ in range(3)]
    assert sorted(child.result()[0] for child in new) == [0, 1, 2]


@pytest.mark.rotates
def test_survivors_that_go_on_at_once(place: Path, context: Members, children: ProcessGroup) -> None:
    """The first to be told comes again before the others woke: nobody is told twice of one death."""

    def survive(barrier: Barrier) -> Any:
        return broken(barrier, 5)[0], [barrier.wait(3, LONG) for _ in range(20)][-1]

    for turn in range(10):
        name = f"{NAME}{turn}"
        killed = children(lambda name=name: rank(place, 1, lambda barrier: barrier.wait(5, LONG), name))
        others = [children(lambda n=n, name=name: rank(place, n, survive, name)) for n in (2, 3, 4)]
        comes_to_wait(context, 4, name)
        killed.kill()
        ends = [other.result() for other in others]
        assert [missing for missing, _ in ends] == [[f"rank 1 (process {killed.pid})"]] * 3
        assert sorted(number for _, number in ends) == [0, 1, 2]


def test_who_waits_and_is_stopped_is_told_later(place: Path, context: Members, children: ProcessGroup) -> None:
    stopped = children(lambda: rank(place, 1, lambda barrier: broken(barrier, 3)))
    killed = children(lambda: rank(place, 2, lambda barrier: barrier.wait(3, LONG)))
    comes_to_wait(context, 2)
    stop_waiting(context, stopped)
    killed.kill()
    barrier = Barrier(context, NAME)
    broken(barrier, 3)
    with pytest.raises(errors.WaitTimeout, match=rf"missing: rank 1 \(process {stopped.pid}, stopped\)$"):
        barrier.wait(2, 0.3)
    stopped.signal(signal.SIGCONT)
    assert stopped.result()[0] == [f"rank 2 (process {killed.pid})"]
    assert barrier.wait(1) == 0


def test_an_exit_breaks_nothing(place: Path, context: Members, children: ProcessGroup) -> None:
    left = children(lambda: rank(place, 1, lambda barrier: (barrier.wait(2, LONG), barrier._members.leave())))
    barrier = Barrier(context, NAME)
    barrier.wait(2, LONG)
    left.result()
    with pytest.raises(errors.WaitTimeout):
        barrier.wait(2, 0.3)
    assert barrier.wait(1) == 0


def test_who_leaves_the_claim_while_a_thread_waits(place: Path, context: Members, children: ProcessGroup) -> None:
    def leave(barrier: Barrier) -> Any:
        caught: list[BaseException] = []

        def wait() -> None:
            with pytest.raises(errors.Closed) as error:
                barrier.wait(3, LONG)
            caught.append(error.value)

        thread = threading.Thread(target=wait)
        thread.start()
        comes_to_wait(barrier._members, 1)
        barrier._members.leave()
        thread.join()
        return str(caught[0])

    assert "closed" in children(lambda: rank(place, 1, leave)).result()
    assert Barrier(context, NAME).wait(1) == 0


def test_the_error_crosses_processes(place: Path, context: Members, children: ProcessGroup) -> None:
    killed = children(lambda: rank(place, 1, lambda barrier: barrier.wait(2, LONG)))
    comes_to_wait(context, 1)
    killed.kill()
    with pytest.raises(threading.BrokenBarrierError) as caught:
        Barrier(context, NAME).wait(2, LONG)
    again = pickle.loads(pickle.dumps(caught.value))
    assert (again.barrier, again.missing, str(again)) == (NAME, [f"rank 1 (process {killed.pid})"], str(caught.value))
    assert again.waited < SOON


# -- every step --------------------------------------------------------------------------------------------------------


def test_killed_at_every_step_of_a_crossing(quick_path: Path, children: ProcessGroup) -> None:
    """Whoever dies, at whatever step: the other crosses or is told, within a second; then the barrier works."""
    died = 0
    for step in range(100):
        context = contexts.leader(contexts.create(quick_path / str(step)))
        barrier = Barrier(context, NAME)
        barrier.wait(1)
        begin = Gate()

        def dies(context: Members = context, barrier: Barrier = barrier, begin: Gate = begin) -> None:
            begin.wait()
            leaving(context, lambda _: [barrier.wait(2, LONG) for _ in range(3)])

        child = fork_to_die(step, dies)
        begin.open()
        crossed, told = 0, None
        began = time.monotonic()
        try:
            while crossed < 3:
                barrier.wait(2, LONG)
                crossed += 1
        except errors.BarrierBroken as error:
            told = error.missing
        where = death_of(child)
        assert time.monotonic() - began < SOON, (step, where)
        assert barrier.wait(1, LONG) == 0
        assert told == (None if crossed == 3 else [house_member(context, child)]), (step, where)
        context.leave()
        begin.close()
        if where is None:
            break
        died += 1
    assert died > 5


def house_member(context: Members, child: Child) -> str:
    return next(member.describe() for member in context.everyone() if member.pid == child.pid)


def test_killed_at_every_step_of_telling(quick_path: Path) -> None:
    """A waiter dies, and the one who breaks the round for the others dies of that, at each step: the last one is told of both."""
    died = 0
    for step in range(100):
        context = contexts.leader(contexts.create(quick_path / str(step)))
        barrier = Barrier(context, NAME)
        first = fork(lambda barrier=barrier: barrier.wait(3, LONG))
        go = Gate()

        def dies(context: Members = context, barrier: Barrier = barrier, go: Gate = go) -> None:
            go.wait()
            with pytest.raises(errors.BarrierBroken):
                barrier.wait(3, LONG)
            context.leave()

        child = fork_to_die(step, dies)
        comes_to_wait(context, 1)
        first.kill()
        go.open()
        where = death_of(child)
        missing, waited = broken(barrier, 3)
        assert waited < SOON
        assert missing != []
        assert set(missing) <= {house_member(context, first), house_member(context, child)}
        assert barrier.wait(1) == 0
        context.leave()
        go.close()
        if where is None:
            break
        died += 1
    assert died > 3


def stops_at(step: int, stands: Gate, work: Callable[[], Any]) -> Any:
    """Do ``work``, and stand still before its ``step``-th change of a file."""
    left = [step]

    def hook(name: str, subject: str) -> None:
        if left[0] == 0:
            stands.open()
            os.kill(os.getpid(), signal.SIGSTOP)
        left[0] -= 1

    host.on_step(hook)
    try:
        return work()
    finally:
        host.on_step(None)


def test_the_last_one_stops_at_every_step(context: Members) -> None:
    """Who comes meanwhile can say who stands still; when he goes on, all is as if he had been slow."""
    barrier, stopped = Barrier(context, NAME), 0
    barrier.wait(1)
    while True:
        stands, numbers = Gate(), []
        early = threading.Thread(target=lambda numbers=numbers: numbers.append(barrier.wait(2, LONG)))
        early.start()
        comes_to_wait(context, 1)
        slow = fork(lambda step=stopped, stands=stands: leaving(context, lambda _: stops_at(step, stands, lambda: barrier.wait(2, LONG))))
        found = os.waitid(os.P_PID, slow.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        if found.si_code == os.CLD_STOPPED:
            stands.wait()
            with pytest.raises(errors.WaitTimeout, match=rf"held by rank 0 \(process {slow.pid}, stopped\)$"):
                barrier.wait(2, 0.15)
            slow.signal(signal.SIGCONT)
        early.join()
        assert slow.result() + numbers[0] == 1
        stands.close()
        if found.si_code != os.CLD_STOPPED:
            break
        stopped += 1
    assert stopped > 3


def test_a_rank_gives_up_while_the_last_one_is_stopped(context: Members, children: ProcessGroup) -> None:
    """He may have counted us; but we do not wait for him longer than we were told to."""
    barrier, stands = Barrier(context, NAME), Gate()
    barrier.wait(1)
    slow = children(lambda: (comes_to_wait(context, 1), leaving(context, lambda _: stops_at(2, stands, lambda: barrier.wait(2, LONG))))[1])
    began = time.monotonic()
    with pytest.raises(errors.WaitTimeout):
        barrier.wait(2, 2.0)
    assert time.monotonic() - began < SOON
    stands.wait()
    slow.signal(signal.SIGCONT)
    assert slow.result() == 1
    assert barrier.wait(1) == 0


# -- giving up ---------------------------------------------------------------------------------------------------------


def test_a_timeout_names_who_has_not_come_and_disturbs_nobody(place: Path, context: Members, children: ProcessGroup) -> None:
    gate, go = Gate(), Gate()
    other = children(lambda: rank(place, 2, lambda barrier: barrier.wait(3, LONG)))
    late = children(lambda: rank(place, 1, lambda barrier: (gate.open(), go.wait(), barrier.wait(3, LONG))[2]))
    gate.wait()
    comes_to_wait(context, 1)
    barrier = Barrier(context, NAME)
    with pytest.raises(errors.WaitTimeout, match=rf"2 of 3 are, missing: rank 1 \(process {late.pid}\)$"):
        barrier.wait(3, 0.1)
    go.open()
    assert sorted([barrier.wait(3, LONG), other.result(), late.result()]) == [0, 1, 2]


def test_a_timeout_names_who_left(place: Path, context: Members, children: ProcessGroup) -> None:
    gone = children(lambda: rank(place, 1, lambda barrier: barrier.wait(2, LONG)))
    barrier = Barrier(context, NAME)
    barrier.wait(2, LONG)
    gone.result()
    with pytest.raises(errors.WaitTimeout, match=rf"1 of 2 are, missing: rank 1 \(process {gone.pid}\), which left$"):
        barrier.wait(2, 0.1)


def test_ctrl_c_takes_the_arrival_back(place: Path, context: Members, children: ProcessGroup) -> None:
    def pressed(barrier: Barrier) -> int:
        def seats() -> int:
            return sum(map(bool, barriers.state_of(barrier._members, NAME).seats()))

        def press() -> None:
            until(lambda: seats() == 1)
            os.kill(os.getpid(), signal.SIGINT)

        threading.Thread(target=press).start()
        with pytest.raises(KeyboardInterrupt):
            barrier.wait(2, LONG)
        return seats()

    assert children(lambda: rank(place, 1, pressed)).result() == 0
    assert Barrier(context, NAME).wait(1) == 0


@pytest.mark.rotates
def test_a_barrier_logs_for_whom_it_waits(place: Path, context: Members, children: ProcessGroup, caplog: pytest.LogCaptureFixture) -> None:
    gate = Gate()
    stopped = children(lambda: rank(place, 1, lambda barrier: (gate.open(), Gate().wait())))
    gate.wait()
    stopped.stop()
    with caplog.at_level(logging.WARNING), pytest.raises(errors.WaitTimeout):
        Barrier(context, NAME).wait(2, 5.3)
    [said] = [record.getMessage() for record in caplog.records if record.name == "forebay.wait"]
    assert "1 of 2 are" in said
    assert f"rank 1 (process {stopped.pid}, stopped)" in said


def test_waiting_costs_next_to_nothing(place: Path, context: Members, children: ProcessGroup) -> None:
    others = [children(lambda n=n: rank(place, n, lambda barrier: barrier.wait(8, LONG))) for n in range(1, 7)]
    comes_to_wait(context, 6)
    barrier = Barrier(context, NAME)
    with pytest.raises(errors.WaitTimeout):
        barrier.wait(8, 0.3)  # after the forks each page that is stored to costs something once
    began, cpu = time.monotonic(), time.process_time()
    with pytest.raises(errors.WaitTimeout):
        barrier.wait(8, 2.0)
    assert (time.process_time() - cpu) / (time.monotonic() - began) < 0.02
    for other in others:
        other.kill()


def test_nobody_sleeps_through_the_last_arrival(context: Members, children: ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits, "TURN", 3600.0)
    barrier = Barrier(context, NAME)
    barrier.wait(1)
    child = children(lambda: leaving(context, lambda _: [barrier.wait(2) for _ in range(200)]))
    for _ in range(200):
        barrier.wait(2)
    assert len(child.result()) == 200


def test_a_rank_that_joins_reports_no_death_again(place: Path, context: Members, children: ProcessGroup) -> None:
    """He is told of no death that the others were told of here, though he had the claim when it happened."""
    here, go = Gate(), Gate()
    other = children(lambda: rank(place, 2, lambda barrier: (here.open(), go.wait(), barrier.wait(2, LONG))[2]))
    here.wait()
    killed = children(lambda: rank(place, 1, lambda barrier: barrier.wait(2, LONG)))
    comes_to_wait(context, 1)
    killed.kill()
    barrier = Barrier(context, NAME)
    broken(barrier, 2)
    timer = threading.Timer(0.5, lambda: barrier.wait(2, LONG))
    go.open()
    timer.start()
    assert other.result() == 0
    timer.join()


def test_a_claim_that_is_dropped_is_not_kept(place: Path, context: Members) -> None:
    def drop(context: Members) -> list[bool]:
        other = contexts.join(place)
        Barrier(other, NAME).wait(1)
        known = weakref.ref(other), weakref.ref(barriers.state_of(other, NAME))
        shared.close(other)
        other.leave()
        del other
        gc.collect()
        return [ref() is None for ref in known]

    assert fork(lambda: contexts.rank(place, 1, drop)).result() == [True, True]


@pytest.mark.parametrize("seed", range(3))
def test_ranks_are_killed_one_after_the_other(place: Path, context: Members, children: ProcessGroup, seed: int) -> None:
    """At any moment: those who are left know each death at once, and go on with fewer."""
    count, chance = 5, random.Random(seed)

    def run(barrier: Barrier) -> set[str]:
        dead: set[str] = set()
        while len(dead) < count - 2:
            began = time.monotonic()
            try:
                barrier.wait(count - len(dead), LONG)
            except errors.BarrierBroken as error:
                dead.update(error.missing)
            assert time.monotonic() - began < SOON
        for _ in range(50):
            barrier.wait(2, LONG)
        return dead

    ranks = [children(lambda n=n: rank(place, n, run)) for n in range(1, count + 1)]
    while len(context.live()) < 1 + count:  # who comes after a death is not told of it
        time.sleep(0.002)
    for child in ranks[: count - 2]:
        time.sleep(chance.uniform(0.0, 0.3))
        child.kill()
    names = {f"rank {n} (process {child.pid})" for n, child in enumerate(ranks[: count - 2], 1)}
    for child in ranks[count - 2 :]:
        child.wait()
    assert [child.result() for child in ranks[count - 2 :]] == [names, names]


def test_what_was_stored_before_a_barrier_is_seen_after_it_on_every_core(context: Members, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits loads the round, and then what others stored: the fence is the last that happens before the round changes."""
    barrier, steps = Barrier(context, NAME), list[str]()
    state = barriers.state_of(context, NAME)
    monkeypatch.setattr(fences, "fence", lambda: steps.append("fence"))
    host.on_step(lambda call, subject: steps.append(f"{call} {subject}"))
    before = state.round
    barrier.wait(1)
    host.on_step(None)
    assert state.round == before + 1
    at = steps.index("fence")
    assert steps[at + 1] == f"set_word {barriers._STATE}"
