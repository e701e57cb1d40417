"""The limits that all processes share: who has a permit, who waits for one, and how many bytes a second there are."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from forebay._engine.index import head
from forebay._engine.index import settings as limits_module
from forebay._engine.index.settings import ConnectionPermit, ConnectionRequest, NodeLimits
from forebay._engine.store import Settings, Store
from tests.harness import opened
from tests.processes import Child, Gate, Line, talk_to

SECOND = 1_000_000_000
HOST = "http://host:80"
PIECE = 16 << 10


class Clock:
    """A monotonic clock that a test moves."""

    def __init__(self) -> None:
        self.now = 10**15

    def __call__(self) -> int:
        return self.now


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with opened(tmp_path / "root", 1 << 26, max_rate=1_000_000, max_connections=2) as store:
        yield store


def limits_of(store: Store, clock: Callable[[], int] = time.monotonic_ns) -> NodeLimits:
    """Those of another process: its locks exclude those of others in this one too."""
    return NodeLimits(store.root, store.engine.index.head, store.engine.settings.limits, clock)


def taken(request: ConnectionRequest, seconds: float = 10) -> ConnectionPermit:
    """Its permit, as soon as there is one."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        permit = request.try_take()
        if permit is not None:
            return permit
        time.sleep(0.001)
    raise AssertionError("no permit came")


# -- bytes a second ------------------------------------------------------------------------------------------------------


def receive(processes: list[NodeLimits], clock: Clock, seconds: float, piece: int = PIECE) -> list[int]:
    """Bytes that each process gets if all want as many as they may have, in pieces."""
    got, end = [0] * len(processes), clock.now + round(seconds * SECOND)
    while True:
        delays = []
        for number, limits in enumerate(processes):
            while (delay := limits.delay()) == 0:
                limits.count(piece)
                got[number] += piece
            delays.append(delay)
        clock.now += round(min(delays) * SECOND) + 1
        if clock.now >= end:
            return got


@pytest.mark.parametrize("count", [1, 2, 5, 40])
def test_processes_share_the_rate_evenly(store: Store, count: int) -> None:
    clock = Clock()
    got = receive([limits_of(store, clock) for _ in range(count)], clock, 5, 2000)
    assert sum(got) == pytest.approx(5_000_000, rel=0.05)
    assert min(got) > 0.8 * sorted(got)[count // 2]  # the first one may catch up what nobody used before


def test_more_processes_than_a_second_has_shares_stay_within_the_rate(store: Store) -> None:
    clock = Clock()
    got = receive([limits_of(store, clock) for _ in range(500)], clock, 4, 1000)
    assert sum(got) < 4_800_000


def test_what_came_before_it_could_be_stopped_is_paid_for_beside_others(store: Store) -> None:
    clock = Clock()
    limits, other = limits_of(store, clock), limits_of(store, clock)
    began = clock.now
    assert limits.delay() == 0
    limits.count(8_000_000)
    got = 0
    while (delay := limits.delay()) > 0:
        while other.delay() == 0:
            other.count(1000)
            got += 1000
        clock.now += round(min(delay, other.delay()) * SECOND) + 1
    assert got == pytest.approx(8_000_000, rel=0.05)
    assert (clock.now - began) / SECOND == pytest.approx(16, rel=0.05)


def test_a_pause_is_not_caught_up_for_more_than_a_tenth_of_a_second(store: Store) -> None:
    clock = Clock()
    limits = limits_of(store, clock)
    receive([limits], clock, 1)
    clock.now += 3600 * SECOND
    assert receive([limits], clock, 1)[0] < 1_000_000 * 1.15 + PIECE


def test_unused_bytes_of_a_reservation_are_lost(store: Store) -> None:
    clock = Clock()
    processes = [limits_of(store, clock) for _ in range(50)]
    for limits in processes:
        limits.delay()  # reserves, and uses nothing
    clock.now += 2 * SECOND
    assert sum(receive(processes, clock, 1)) < 1_000_000 * 1.15 + len(processes) * PIECE


def test_another_rate_applies_at_once(store: Store) -> None:
    clock = Clock()
    limits = limits_of(store, clock)
    receive([limits], clock, 1)
    limits.count(100_000_000)
    assert limits.delay() > 0
    store.configure(Settings(max_rate=0))
    assert limits.delay() == 0
    store.configure(Settings(max_rate=50_000_000))
    assert receive([limits], clock, 4)[0] == pytest.approx(200_000_000, rel=0.05)
    store.configure(Settings(max_rate=100_000))
    assert receive([limits], clock, 10)[0] == pytest.approx(1_000_000, rel=0.1)


@pytest.mark.parametrize("word", [1, 10**15 - 1, 10**15 + 4 * SECOND, 1 << 62, (1 << 64) - 1])
def test_a_damaged_word_of_the_rate_stops_nobody(store: Store, word: int) -> None:
    clock = Clock()
    limits = limits_of(store, clock)
    words, at = store.engine.index.head.limit_words()
    words[at] = word
    assert limits.delay() <= 3
    assert receive([limits], clock, 10)[0] > 5_000_000


# -- what is in force ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", range(7))
def test_a_damaged_word_of_the_settings_changes_no_limit(tmp_path: Path, word: int) -> None:
    with opened(tmp_path, 1 << 26, max_rate=1_000_000, max_connections=2) as store:
        limits = limits_of(store)
        assert limits.in_force() == (1_000_000, 2)
        store.engine.index.head.words()[head.SETTINGS + word] ^= 1 << 40
        assert limits.in_force() == (1_000_000, 2)
    with opened(tmp_path) as store:  # opening a root mends them
        assert store.limits.in_force() == (1_000_000, 2)
        assert store.engine.settings.is_shared()


def test_a_table_of_slots_that_is_recreated_has_them_again(store: Store) -> None:
    os.unlink(store.root.shared_dir / "head")
    store.put("v", "k", b"x")  # notices it
    assert (store.root.shared_dir / "head").exists()
    assert store.limits.in_force() == (1_000_000, 2)


# -- connections ---------------------------------------------------------------------------------------------------------


def test_there_are_no_more_permits_than_the_limit(store: Store) -> None:
    processes = [limits_of(store) for _ in range(3)]
    requests = [limits.request(HOST) for limits in processes]
    permits = [request.try_take() for request in requests]
    assert [permit is not None for permit in permits] == [True, True, False]
    assert limits_of(store).request("http://other:80").try_take() is not None
    assert permits[0] is not None
    permits[0].release()
    permits[0].release()  # does nothing
    assert requests[2].try_take() is not None
    assert processes[0].request(HOST).try_take() is None


def test_two_requests_of_one_process_get_two_permits(store: Store) -> None:
    limits = limits_of(store)
    requests = [limits.request(HOST) for _ in range(3)]
    assert [request.try_take() is not None for request in requests] == [True, True, False]


def test_a_request_that_begins_lets_those_that_wait_look_first(store: Store) -> None:
    clock = Clock()
    holders = [taken(limits_of(store).request(HOST)) for _ in range(2)]
    waiting = limits_of(store, clock).request(HOST)
    assert waiting.try_take() is None
    assert all(holder.is_wanted() for holder in holders)
    assert not holders[0].is_wanted(3600)
    for holder in holders:
        holder.release()
    late = limits_of(store, clock).request(HOST)
    assert late.try_take() is None
    assert waiting.try_take() is not None
    assert late.try_take() is None
    clock.now += SECOND // 20
    assert late.try_take() is not None


def test_a_released_permit_is_seen_at_once(store: Store) -> None:
    clock = Clock()
    holders = [taken(limits_of(store, clock).request(HOST)) for _ in range(2)]
    waiting = limits_of(store, clock).request(HOST)
    assert waiting.try_take() is None
    clock.now += 1
    holders[0].release()
    assert waiting.try_take() is not None


def test_others_are_told_that_a_process_waits_while_one_of_its_threads_does(store: Store) -> None:
    holder, _ = (taken(limits_of(store).request(HOST)) for _ in range(2))
    limits = limits_of(store)
    first, second = limits.request(HOST), limits.request(HOST)
    assert (first.try_take(), second.try_take()) == (None, None)
    first.cancel()
    first.cancel()
    assert holder.is_wanted()
    second.cancel()
    assert not holder.is_wanted()


def test_a_request_that_is_cancelled_is_waited_for_no_longer(store: Store) -> None:
    holders = [taken(limits_of(store).request(HOST)) for _ in range(2)]
    first, second = (limits_of(store).request(HOST) for _ in range(2))
    assert (first.try_take(), second.try_take()) == (None, None)
    holders[0].release()
    first.cancel()
    assert second.try_take() is not None
    assert not holders[1].is_wanted()


@pytest.mark.parametrize("step", ["locked", "returned"])
def test_a_permit_that_an_interrupt_kept_from_the_caller_is_given_back(store: Store, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store.configure(Settings(max_connections=1))
    limits = limits_of(store)
    request, try_lock = limits.request(HOST), limits.locks.try_lock

    def interrupted(*arguments: object, **named: object) -> bool:
        assert step == "returned" or try_lock(*arguments, **named)  # type: ignore[arg-type]
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        if step == "locked":
            patch.setattr(limits.locks, "try_lock", interrupted)
        else:
            patch.setattr(limits_module, "ConnectionPermit", interrupted)
        request.try_take()
    request.cancel()
    permit = limits_of(store).request(HOST).try_take()
    assert permit is not None
    request.cancel()
    assert limits.request(HOST).try_take() is None, "it is another's now"


def test_a_request_gives_back_nothing_that_it_has_not_taken(store: Store) -> None:
    limits = limits_of(store)
    permits = [taken(limits.request(HOST)) for _ in range(2)]
    request = limits.request(HOST)
    assert request.try_take() is None
    request.cancel()
    assert limits_of(store).request(HOST).try_take() is None
    for permit in permits:
        permit.release()


def test_a_lower_limit_wants_permits_back(store: Store) -> None:
    limits = limits_of(store)
    permits = [taken(limits.request(HOST)) for _ in range(2)]
    store.configure(Settings(max_connections=1))
    assert [permit.is_wanted() for permit in permits] == [False, True]
    permits[0].release()
    assert limits.request(HOST).try_take() is not None
    store.configure(Settings(max_connections=0))
    assert [limits.request(HOST).try_take() is not None for _ in range(10)] == [True] * 10
    assert not permits[1].is_wanted()


def hold(store: Store) -> Child:
    """A process that has a permit."""

    def work(line: Line) -> None:
        permit = taken(store.limits.request(HOST))
        line.say("has it")
        line.hear()
        permit.release()

    child = talk_to(work)
    assert child.hear() == "has it"
    return child


def test_the_permit_of_a_killed_process_is_free(store: Store) -> None:
    with hold(store) as one, hold(store):
        request = store.limits.request(HOST)
        assert request.try_take() is None
        one.signal(signal.SIGKILL)
        one.wait()
        taken(request).release()


def test_a_killed_process_waits_no_longer(store: Store) -> None:
    def wait(line: Line) -> None:
        line.say(store.limits.request(HOST).try_take())
        line.hear()

    holder, _ = (taken(limits_of(store).request(HOST)) for _ in range(2))
    with talk_to(wait) as child:
        assert child.hear() is None
        assert holder.is_wanted()
        child.signal(signal.SIGKILL)
        child.wait()
        assert not holder.is_wanted()


def test_each_of_several_processes_gets_its_turn(store: Store) -> None:
    """Each of them releases its permit only because another one wants it, and wants one again at once."""
    store.configure(Settings(max_connections=1))

    def work(line: Line) -> None:
        while True:
            permit = taken(store.limits.request(HOST), 60)
            line.say()
            while not permit.is_wanted():
                time.sleep(0.001)
            permit.release()

    with ExitStack() as stack:
        children = [stack.enter_context(talk_to(work)) for _ in range(4)]
        for child in children * 5:
            child.hear()


def test_a_fork_neither_takes_nor_frees_permits(store: Store) -> None:
    permits = [taken(store.limits.request(HOST)) for _ in range(2)]

    def work(line: Line) -> bool:
        permits[0].release()
        request = store.limits.request(HOST)
        line.say(request.try_take())
        line.hear()
        taken(request)
        return True

    with talk_to(work) as child:
        assert child.hear() is None
        assert limits_of(store).request(HOST).try_take() is None
        permits[0].release()
        child.say()
        assert child.result() is True


def test_the_permit_of_a_killed_process_is_free_though_its_child_lives(store: Store) -> None:
    gate, ended = Gate(), Gate()

    def work(line: Line) -> None:
        taken(store.limits.request(HOST))
        taken(store.limits.request(HOST))
        if os.fork() == 0:
            line.close()
            gate.wait()
            ended.open()
            os._exit(0)
        line.say("forked")
        line.hear()

    with talk_to(work) as child:
        child.hear()
        request = limits_of(store).request(HOST)
        assert request.try_take() is None
        child.signal(signal.SIGKILL)
        child.wait()
        taken(request).release()
    gate.open()
    ended.wait()
    gate.close()
    ended.close()


def test_a_root_that_is_only_read_has_the_same_permits(store: Store) -> None:
    reading = Store.open(store.root.path, Settings(), read_only=True)
    try:
        before = (store.root.shared_dir / "head").read_bytes()
        ours = [limits_of(reading) for _ in range(3)]
        assert ours[0].in_force() == (1_000_000, 2)
        first = taken(ours[0].request(HOST))
        second = taken(limits_of(store).request(HOST))
        requests = [ours[1].request(HOST), limits_of(store).request(HOST), ours[2].request(HOST)]
        assert [request.try_take() for request in requests] == [None] * 3
        assert first.is_wanted()
        first.release()
        assert taken(requests[0]) is not None
        assert [request.try_take() for request in requests[1:]] == [None] * 2
        second.release()
        assert taken(requests[1]) is not None
        clock = Clock()
        assert receive([limits_of(reading, clock)], clock, 10)[0] == pytest.approx(10_000_000, rel=0.05)
        assert (store.root.shared_dir / "head").read_bytes()[:64] == before[:64]
    finally:
        reading.close()


def test_a_process_that_only_reads_takes_each_permit_once(store: Store) -> None:
    reading = Store.open(store.root.path, Settings(), read_only=True)
    try:
        limits = limits_of(reading)
        first, second = (taken(limits.request(HOST)) for _ in range(2))
        third = limits.request(HOST)
        assert third.try_take() is None
        second.release()
        taken(third).release()
        first.release()
    finally:
        reading.close()


def test_two_that_only_read_never_share_a_permit(store: Store) -> None:
    """Both lock, and then both look: at least one of them gives way."""
    store.configure(Settings(max_connections=1))
    reading = Store.open(store.root.path, Settings(), read_only=True)
    try:
        one, other = limits_of(reading), limits_of(reading)
        request = one.request(HOST)
        assert other.locks.try_lock(request._first, exclusive=False)  # it has not looked again yet
        assert request.try_take() is None
        other.locks.unlock(request._first)
        taken(request).release()
    finally:
        reading.close()


def test_where_the_locks_fail_there_is_no_limit(store: Store) -> None:
    os.unlink(store.root.lock("transfers"))
    assert [limits_of(store).request(HOST).try_take() is not None for _ in range(4)] == [True] * 4


def test_those_that_have_permits_are_named(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    assert store.limits.holders(HOST) == "an unknown process"
    with hold(store) as one, hold(store) as other:
        for child in (one, other):
            assert f"process {child.pid} on " in store.limits.holders(HOST)
        assert store.limits.holders("http://other:80") == "an unknown process"
        monkeypatch.setattr(limits_module, "NAMED", 1)
        assert store.limits.holders(HOST).endswith(" and 1 more")


def test_a_wait_is_logged(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    holders = [taken(limits_of(store).request(HOST)) for _ in range(2)]
    request = limits_of(store, clock).request(HOST)
    for seconds in (0, 4, 2, 3, 60):
        clock.now += seconds * SECOND
        assert request.try_take() is None
    lines = [record.message for record in caplog.records if "waiting" in record.message]
    assert lines == [f"waiting {n} s for a connection to {HOST}: the node's max_connections=2 are in use" for n in (6, 69)]
    assert all(holder.is_wanted() for holder in holders)
