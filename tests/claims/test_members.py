"""Who has a claim: told by kernel locks, through forks of all kinds, closed descriptors, deaths and exits."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from forebay import errors
from forebay._kernel import fences, locks
from forebay.claims import claim_files, members
from forebay.claims.claim_files import CLAIM, Gone
from forebay.claims.members import Member, Members
from tests.claims import contexts
from tests.items import until
from tests.processes import Child, Gate, Line, ProcessGroup, fork_in_c, talk_to


def states(context: Members) -> list[str]:
    return [member.state for member in context.everyone()]


def joined(place: Path, line: Line) -> None:
    """What a process does that finds the claim by itself: joins, says so, and stays until it is told to go."""
    members.leave_all()  # it is no child of who has the claim
    found = Members.attach(place, rank=1)
    line.say(found.slot)
    line.hear()
    found.leave()


def other(place: Path) -> Child:
    return talk_to(lambda line: joined(place, line))


def test_the_leader_is_the_first(context: Members) -> None:
    (only,) = context.everyone()
    assert (only.slot, only.pid, only.rank, only.state) == (0, os.getpid(), 0, "in")
    assert only.describe() == f"rank 0 (process {os.getpid()})"
    assert context.live() == [only]
    assert context.is_in(0)


def test_who_comes_is_seen_and_who_goes_too(place: Path, context: Members) -> None:
    with other(place) as child:
        assert child.hear() == 1
        assert [member.pid for member in context.live()] == [os.getpid(), child.pid]
        child.say()
        child.wait()
        assert states(context)[-1] == "left"


def test_a_forked_child_is_one_at_once(context: Members) -> None:
    def child(line: Line) -> None:
        line.say([member.pid for member in context.live()])
        line.hear()

    with talk_to(child) as born:
        seen = [member.pid for member in context.live()]
        assert born.hear() == [os.getpid(), born.pid]
        assert born.pid in seen or len(seen) == 1  # its record is written by itself; its lock is there before
        assert locks.locked_at(os.open(context.directory / CLAIM, os.O_RDONLY), 1) == 1
        born.kill()
    assert states(context) == ["in", "vanished"]


def test_a_child_holds_nothing_of_its_parents(place: Path, quick_path: Path) -> None:
    """The parent dies; the child goes on, as itself alone."""

    def parent(line: Line) -> None:
        context = contexts.leader(place)
        if os.fork() == 0:
            line.say(context.slot)
            line.hear()
            os._exit(0)
        line.hear()

    with talk_to(parent) as leader:
        assert leader.hear() == 1
        leader.kill()
        look = members.MemberTable(place)
        fd = os.open(place / CLAIM, os.O_RDONLY)
        assert [member.state for member in look.members(fd)] == ["vanished", "in"]
        os.close(fd)
        leader.say()


def test_a_child_of_c_becomes_one_at_its_first_call(context: Members) -> None:
    with talk_to(lambda line: (line.say([m.pid for m in context.live()]), line.hear()), by=fork_in_c) as born:
        assert born.hear() == [os.getpid(), born.pid]
        assert [member.pid for member in context.live()] == [os.getpid(), born.pid]
        born.say()
        born.wait()
    assert states(context) == ["in", "vanished"]


def test_what_a_child_of_c_leaves_takes_nothing_from_its_parent(place: Path, context: Members) -> None:
    with talk_to(lambda line: line.say(context.leave()), by=fork_in_c) as born:
        born.hear()
        born.wait()
    with other(place) as child:
        child.hear()
        child.say()
        child.wait()
    assert context.is_in(0)


def test_an_entry_is_whole_before_it_says_in_on_every_core(place: Path, context: Members, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, members.Identity]] = []
    table = context._table
    monkeypatch.setattr(fences, "fence", lambda: seen.append((table.state(1), table.identity(1))))
    found = Members.attach(place, rank=1)
    assert seen == [(members.FREE, found.identity)]
    found.leave()


def test_a_killed_process_has_vanished(place: Path, context: Members) -> None:
    with other(place) as child:
        slot = child.hear()
        assert context.is_in(slot)
        assert context.occupant(slot) is not None
        child.kill()
        assert not context.is_in(slot)
        assert context.occupant(slot) is None
        assert states(context)[-1] == "vanished"


def test_a_place_that_was_left_is_used_again_and_one_of_the_dead_is_not(place: Path, context: Members) -> None:
    slots = []
    for end in (Child.kill, lambda child: (child.say(), child.wait()), Child.kill, Child.kill):
        with other(place) as child:
            slots.append(child.hear())
            end(child)
    assert slots == [1, 2, 2, 3]


def test_a_stopped_process_is_in_and_said_to_be_stopped(place: Path, context: Members) -> None:
    with other(place) as child:
        slot = child.hear()
        child.stop()
        (member,) = [member for member in context.live() if member.slot == slot]
        assert "stopped)" in member.describe_with_state()
        assert not member.is_dying()
        assert member.state == "in"
        os.kill(child.pid, signal.SIGCONT)
        child.say()
        child.wait()
        assert member.is_dying()
        assert "stopped" not in member.describe_with_state()


def test_who_becomes_another_program_has_left(place: Path, context: Members) -> None:
    def becomes(line: Line) -> None:
        Members.attach(place)
        line.say()
        line.hear()
        os.execv("/bin/sleep", ["sleep", "1000"])

    with talk_to(becomes) as child:
        child.hear()
        child.say()
        while Path(f"/proc/{child.pid}/comm").read_text() != "sleep\n":
            pass
        # The kernel names the new program a moment before it closes the old one's files.
        until(lambda: [member.state for member in context.everyone() if member.pid == child.pid][-1] == "left")
        child.kill()


def test_descriptors_that_the_job_closes_are_opened_anew(
    place: Path, context: Members, caplog: pytest.LogCaptureFixture
) -> None:  # fmt: skip
    def careless(line: Line) -> None:
        found = Members.attach(place, rank=1)
        identity = found.identity
        os.close(found._fd)
        other = os.open("/dev/null", os.O_RDONLY)
        os.dup2(other, found._fd)  # the number is another file's now
        line.say(("closed", found.slot))
        line.hear()
        found.check()
        line.say((found.identity == identity, os.path.samestat(os.fstat(other), os.stat("/dev/null"))))
        line.hear()

    with talk_to(careless) as child:
        _, slot = child.hear()
        assert not context.is_in(slot)
        child.say()
        assert child.hear() == (True, True)
        assert context.is_in(slot)
        child.kill()


def test_a_lost_descriptor_is_told_once(context: Members, caplog: pytest.LogCaptureFixture) -> None:
    os.close(context._fd)
    with caplog.at_level(logging.WARNING, "forebay.claims"):
        for _ in range(3):
            context.check()
    assert len(caplog.records) == 1
    assert context.slot == 0


def test_after_leaving_every_call_says_so(context: Members) -> None:
    context.leave()
    context.leave()
    assert context.has_left
    for call in (context.check, context.everyone, context.live, lambda: context.is_in(0)):
        with pytest.raises(errors.Closed):
            call()


def test_a_claim_that_was_freed_cannot_be_joined(place: Path, context: Members) -> None:
    context.leave()
    place.rename(place.with_name("freed"))
    with pytest.raises(Gone):
        Members.attach(place)
    contexts.create(place)  # another one has its name
    assert Members.attach(place).slot == 1
    members.leave_all()


def test_who_lost_a_claim_that_was_freed_is_told(place: Path, context: Members) -> None:
    os.close(context._fd)
    place.rename(place.with_name("freed"))
    with pytest.raises(errors.Closed, match="lost"):
        context.check()


def test_a_claim_has_1024_places(place: Path, context: Members) -> None:
    fd = os.open(place / CLAIM, os.O_RDWR)
    try:
        assert locks.take(fd, 1, claim_files.SLOTS - 2)
        last = Members.attach(place)
        assert last.slot == claim_files.SLOTS - 1
        with pytest.raises(errors.NoSpace, match="1,024"):
            Members.attach(place)
        last.leave()
    finally:
        os.close(fd)


# -- exits -------------------------------------------------------------------------------------------------------------

SCRIPT = """
import os, sys
from pathlib import Path
from forebay.claims.members import Members
members = Members.attach(Path(sys.argv[1]))
exec(sys.argv[2])
"""


@pytest.mark.parametrize(
    ("end", "state"),
    [
        ("pass", "left"),
        ("sys.exit(3)", "left"),
        ("raise RuntimeError", "left"),
        ("import threading; threading.Thread(target=lambda: None).start()", "left"),
        ("os._exit(0)", "vanished"),
        ("os.kill(os.getpid(), 9)", "vanished"),
    ],
)
def test_an_exit_is_told_from_a_death(place: Path, context: Members, end: str, state: str) -> None:
    subprocess.run([sys.executable, "-c", SCRIPT, place, end], capture_output=True)
    assert states(context)[-1] == state


def leave_quietly(place: Path | None) -> None:
    if place is not None:
        Members.attach(place)


def fail(place: Path | None) -> None:
    leave_quietly(place)
    raise RuntimeError("as asked")


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
@pytest.mark.parametrize("work", [leave_quietly, fail])
def test_a_worker_of_multiprocessing_leaves(
    place: Path, context: Members, method: str, work: Callable[[Path | None], None], capfd: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    """One that inherits the claim, and one that joins it by itself."""
    own = None if method == "fork" else place
    worker = multiprocessing.get_context(method).Process(target=work, args=(own,))
    worker.start()
    worker.join()
    found = [member for member in context.everyone() if member.pid == worker.pid]
    assert [member.state for member in found] == ["left"]


def test_who_died_before_is_known(place: Path, context: Members) -> None:
    with other(place) as child:
        child.hear()
        child.kill()
    dead = context.everyone()[-1]
    assert dead.state == "vanished"
    assert dead.identity not in context.dead_before
    with talk_to(lambda line: line.say(dead.identity in Members.attach(place).dead_before)) as later:
        assert later.hear()


def test_forks_of_many_threads(context: Members, children: ProcessGroup) -> None:
    import threading

    done = Gate()
    born: list[int] = []

    def fork() -> None:
        pid = os.fork()
        if pid == 0:
            context.check()
            os.read(done._from, 1)
            os._exit(0 if context.is_in(context.slot) else 1)
        born.append(pid)

    threads = [threading.Thread(target=fork) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for _ in range(8):
        done.open()
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in born] == [0] * 8
    assert len({member.slot for member in context.everyone()}) == 9


def test_words_of_another_namespace() -> None:
    assert Member(1, 5, 1, 2, 3, 0.0, 0, "in").describe() == "rank 3 (process 5 of another PID namespace)"
    assert not Member(1, 5, 1, 2, 3, 0.0, 0, "in").is_dying()
