"""Waiting: nobody sleeps through a bump, nobody waits for a dead process, nobody waits in silence."""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from forebay import errors
from forebay._kernel import locks, waits
from forebay._kernel.locks import LockFile
from forebay._kernel.waits import Words, wait_for, wait_for_async
from tests.processes import Line, in_child, talk_to

WORD = 5
FOR_EVER = 3600.0


def nobody() -> tuple[str, str]:
    return "a test's thing", "somebody"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    place = tmp_path / "words"
    place.write_bytes(bytes(4096))
    return place


@pytest.fixture
def words(path: Path) -> Words:
    return Words(path)


@pytest.fixture
def only_bumps_wake(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sleep that nobody ends lasts longer than the test may."""
    monkeypatch.setattr(waits, "TURN", FOR_EVER)


# -- the words ---------------------------------------------------------------------------------------------------------


def test_a_bump_changes_one_word_for_everybody(path: Path, words: Words) -> None:
    other = Words(path)
    before = [other.value(i) for i in range(waits.COUNT)]
    words.bump(WORD)
    assert [i for i in range(waits.COUNT) if other.value(i) != before[i]] == [WORD]


def test_a_parent_and_its_child_never_bump_to_the_same_value(words: Words) -> None:
    def bumped() -> int:
        words.bump(WORD)
        return words.value(WORD)

    def work() -> list[int]:
        return [bumped() for _ in range(50)]

    theirs = [*in_child(work), *in_child(work), *work()]
    assert len(set(theirs)) == 150


class Racing:
    """The words of a process that is overtaken between each load and the store that follows it."""

    def __init__(self, real: memoryview, other: Words) -> None:
        self._real, self._other = real, other
        self.waiter_saw = -1

    def __getitem__(self, index: int) -> int:
        loaded = self._real[index]
        self._other.bump(index)
        self.waiter_saw = self._real[index]
        return loaded

    def __setitem__(self, index: int, value: int) -> None:
        self._real[index] = value


def test_two_bumps_at_once_are_two_changes(path: Path, words: Words) -> None:
    """P1 loads / P2 bumps / a waiter loads / P1 stores: if both stored the same value, the waiter would sleep on."""
    late = Words(path)
    racing = Racing(late._words, words)
    late._words = racing  # type: ignore[assignment]
    late.bump(WORD)
    assert words.value(WORD) != racing.waiter_saw


def test_words_that_were_cut_short_are_refused(path: Path) -> None:
    os.truncate(path, 100)
    with pytest.raises(errors.CacheFault, match="cut short"):
        Words(path)


def test_who_can_only_read_bumps_nothing(path: Path, words: Words) -> None:
    path.chmod(0o400)
    reader = Words(path, writable=False)
    before = words.value(WORD)
    reader.bump(WORD)
    assert words.value(WORD) == before


def test_no_word_is_outside(words: Words) -> None:
    with pytest.raises(IndexError):
        words.bump(waits.COUNT)


def test_a_sleep_ends_at_once_where_the_word_has_changed(words: Words) -> None:
    seen = words.value(WORD)
    words.bump(WORD)
    assert words.value(WORD) != seen
    sleeper = threading.Thread(target=lambda: words.sleep(WORD, FOR_EVER, seen), daemon=True)
    sleeper.start()
    sleeper.join(60)
    assert not sleeper.is_alive()


# -- nobody sleeps through a bump --------------------------------------------------------------------------------------


def test_what_is_there_is_given_at_once(words: Words) -> None:
    assert wait_for(lambda: 0, words, WORD, what=nobody, timeout=0) == 0


@pytest.mark.usefixtures("only_bumps_wake")
def test_a_bump_between_the_attempt_and_the_sleep_is_not_lost(words: Words) -> None:
    tries: list[int] = []

    def attempt() -> int | None:
        tries.append(1)
        if len(tries) > 1:
            return 7
        words.bump(WORD)
        return None

    assert wait_for(attempt, words, WORD, what=nobody) == 7


@pytest.mark.usefixtures("only_bumps_wake")
@pytest.mark.parametrize("writable", [True, False])
def test_one_bump_wakes_all_processes(path: Path, words: Words, tmp_path: Path, writable: bool) -> None:
    """Whether it comes before, between or after their attempts: each sees the word or the thing."""
    thing = tmp_path / "thing"

    def work(line: Line) -> None:
        own = Words(path, writable=writable)
        line.say("up")
        wait_for(lambda: thing.exists() or None, own, WORD, what=nobody)
        line.say("got it")

    children = [talk_to(work) for _ in range(5)]
    try:
        for child in children:
            child.hear()
        thing.touch()
        words.bump(WORD)
        assert [child.hear() for child in children] == ["got it"] * 5
    finally:
        for child in children:
            child.kill()
            child.close()


@pytest.mark.usefixtures("only_bumps_wake")
def test_a_lock_goes_from_hand_to_hand(path: Path, words: Words, tmp_path: Path) -> None:
    place, count = tmp_path / "lock", tmp_path / "count"
    place.touch()
    count.write_text("0")

    def work(line: Line) -> None:
        file = LockFile(place)
        for _ in range(30):
            wait_for(lambda: file.try_lock(1, exclusive=True) or None, words, WORD, what=nobody)
            count.write_text(str(int(count.read_text()) + 1))
            file.unlock(1)
            words.bump(WORD)
        line.say("done")

    children = [talk_to(work) for _ in range(4)]
    try:
        for child in children:
            child.hear()
    finally:
        for child in children:
            child.kill()
            child.close()
    assert count.read_text() == "120"


@pytest.mark.usefixtures("only_bumps_wake")
def test_a_waiting_thread_keeps_no_other_from_running(words: Words) -> None:
    got = threading.Event()
    thread = threading.Thread(target=lambda: wait_for(lambda: got.is_set() or None, words, WORD, what=nobody))
    thread.start()
    got.set()
    words.bump(WORD)
    thread.join(60)
    assert not thread.is_alive()


def test_s08_a_killed_holder_is_waited_for_no_longer(path: Path, words: Words, tmp_path: Path) -> None:
    place = tmp_path / "lock"
    place.touch()

    def hold(line: Line) -> None:
        file = LockFile(place)
        line.say(file.try_lock(1, exclusive=True))
        line.hear()

    with talk_to(hold) as holder:
        assert holder.hear() is True
        file = LockFile(place)
        turns: list[float] = []

        def on_turn(waited: float) -> None:
            turns.append(waited)
            if len(turns) == 2:
                holder.kill()

        assert wait_for(lambda: file.try_lock(1, exclusive=True) or None, words, WORD, what=nobody, on_turn=on_turn)
        assert len(turns) >= 2
        assert turns == sorted(turns)


@pytest.mark.usefixtures("only_bumps_wake")
def test_ctrl_c_ends_a_wait(path: Path) -> None:
    def work(line: Line) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        words = Words(path)
        try:
            wait_for(lambda: None, words, WORD, what=nobody, on_turn=lambda waited: line.say("waiting"))
        except KeyboardInterrupt:
            line.say("interrupted")

    with talk_to(work) as child:
        assert child.hear() == "waiting"
        os.kill(child.pid, signal.SIGINT)
        assert child.hear() == "interrupted"


def test_where_there_is_no_such_call_waiting_does_not_spin(words: Words, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits, "_FUTEX", -1)
    slept: list[float] = []
    monkeypatch.setattr(waits.time, "sleep", slept.append)  # type: ignore[attr-defined]
    tries: list[int] = []

    def attempt() -> int | None:
        tries.append(1)
        return 7 if len(tries) > 3 else None

    assert wait_for(attempt, words, WORD, what=nobody) == 7
    assert slept == [waits._LOOK] * 3


# -- time-outs ---------------------------------------------------------------------------------------------------------


def test_a_time_out_says_what_was_waited_for_and_who_holds_it(words: Words) -> None:
    began = time.monotonic()
    with pytest.raises(errors.WaitTimeout, match=r"waited 0\.\d s for a test's thing, held by somebody") as caught:
        wait_for(lambda: None, words, WORD, what=nobody, timeout=0.15)
    assert isinstance(caught.value, TimeoutError)
    assert (caught.value.what, caught.value.holder) == ("a test's thing", "somebody")
    assert 0.15 <= caught.value.waited <= time.monotonic() - began


def test_no_time_at_all_is_one_attempt(words: Words) -> None:
    tries: list[int] = []
    with pytest.raises(errors.WaitTimeout):
        wait_for(lambda: tries.append(1), words, WORD, what=nobody, timeout=0)
    assert tries == [1]


def test_what_the_turn_raises_ends_the_wait(words: Words) -> None:
    def stop(waited: float) -> None:
        raise KeyError("no more")

    with pytest.raises(KeyError):
        wait_for(lambda: None, words, WORD, what=nobody, on_turn=stop)


# -- nobody waits in silence -------------------------------------------------------------------------------------------


def says(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "forebay.wait" and record.levelno == logging.WARNING]


def test_s08_a_long_wait_says_once_what_for_and_who_holds_it(words: Words, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(errors.WaitTimeout):
        wait_for(lambda: None, words, WORD, what=nobody, timeout=0.35, say_after=0.0)
    assert says(caplog) == ["waiting 0 s for a test's thing, held by somebody"]


def test_s08_a_very_long_wait_says_it_again(words: Words, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits, "SAY_EVERY", 0.0)
    assert wait_for(lambda: 7 if len(says(caplog)) >= 2 else None, words, WORD, what=nobody, timeout=60, say_after=0.1) == 7


def test_a_short_wait_says_nothing_and_asks_nobody(words: Words, caplog: pytest.LogCaptureFixture) -> None:
    tries: list[int] = []

    def attempt() -> int | None:
        tries.append(1)
        return 7 if len(tries) > 2 else None

    assert wait_for(attempt, words, WORD, what=lambda: pytest.fail("asked")) == 7
    assert says(caplog) == []


def test_the_engines_waits_speak_within_10_s() -> None:
    for call in (wait_for, wait_for_async):
        assert inspect.signature(call).parameters["say_after"].default <= 10


# -- coroutines --------------------------------------------------------------------------------------------------------


def test_a_coroutine_waits_while_its_loop_goes_on(words: Words) -> None:
    got: list[int] = []
    turns: list[float] = []

    async def give() -> None:
        while not turns:
            await asyncio.sleep(0)
        got.append(7)
        words.bump(WORD)

    async def both() -> int:
        waiting = wait_for_async(lambda: got[0] if got else None, words, WORD, what=nobody, on_turn=turns.append)
        return (await asyncio.gather(waiting, give()))[0]

    before = threading.active_count()
    assert asyncio.run(both()) == 7
    assert threading.active_count() == before


def test_a_hundred_coroutines_wait_at_once(path: Path, words: Words) -> None:
    got: list[int] = []

    async def work() -> list[int]:
        waiting = [wait_for_async(lambda: got[0] if got else None, words, WORD, what=nobody) for _ in range(100)]
        everybody = asyncio.gather(*waiting)
        await asyncio.sleep(0)
        got.append(7)
        words.bump(WORD)
        return await everybody

    assert asyncio.run(work()) == [7] * 100


def test_a_coroutine_is_told_that_its_time_is_up(words: Words) -> None:
    with pytest.raises(errors.WaitTimeout, match="held by somebody"):
        asyncio.run(wait_for_async(lambda: None, words, WORD, what=nobody, timeout=0.05))


def test_a_coroutine_finds_what_a_killed_holder_left(words: Words) -> None:
    tries: list[int] = []

    def attempt() -> int | None:  # nobody bumps
        tries.append(1)
        return 7 if len(tries) > 2 else None

    assert asyncio.run(wait_for_async(attempt, words, WORD, what=nobody)) == 7


def test_who_holds_it_comes_from_the_kernel(path: Path, words: Words, tmp_path: Path) -> None:
    place = tmp_path / "lock"
    place.touch()
    holder, file = LockFile(place), LockFile(place)
    holder.try_lock(1, exclusive=True)
    with pytest.raises(errors.WaitTimeout, match=f"held by process {os.getpid()} on "):
        wait_for(
            lambda: file.try_lock(1, exclusive=True) or None,
            words,
            WORD,
            what=lambda: ("the lock", locks.describe_holders(place, 1)),
            timeout=0.05,
        )


# -- a limit that several requests share ---------------------------------------------------------------------------------


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(waits, "time", self)

    def monotonic(self) -> float:
        return self.now


def test_the_time_of_a_shared_limit_passes_while_some_wait_and_none_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    limit = waits.SharedLimit(10)
    clock.now += 5
    limit.begin()
    limit.begin()
    clock.now += 3
    assert limit.waited() == 3
    limit.end(has_one=True)
    clock.now += 100
    assert (limit.waited(), limit.is_over()) == (3, False)
    limit.release()
    clock.now += 6
    assert (limit.waited(), limit.is_over()) == (9, False)
    clock.now += 1
    assert limit.is_over()
    limit.end(has_one=False)
    clock.now += 100
    assert limit.waited() == 10


def test_a_shared_limit_is_lowered_and_never_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    limit = waits.SharedLimit(float("inf"))
    limit.begin()
    clock.now += 3
    assert not limit.is_over()
    limit.lower(2)
    limit.lower(50)
    clock.now += 1
    assert not limit.is_over()
    clock.now += 1
    assert limit.is_over()
    assert limit.waited() == 5
