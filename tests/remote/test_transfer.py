"""Several ranges at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay._model import Span
from forebay.remote import RemoteOptions
from forebay.remote.base import Call, CallAborted, cut_spans, run_parts


@pytest.fixture
def call() -> Call:
    return Call("http://h/a", RemoteOptions())


@given(st.lists(st.tuples(st.integers(0, 100), st.integers(0, 50))), st.integers(1, 60))
def test_parts_cover_the_spans(spans: list[tuple[int, int]], size: int) -> None:
    found = list(cut_spans((Span(*span) for span in spans), size))
    assert [byte for span in found for byte in range(span.start, span.end)] == [b for start, n in spans for b in range(start, start + n)]
    assert all(0 < span.length <= size for span in found)


def test_all_work_is_done_once(call: Call) -> None:
    done: list[int] = []
    run_parts((lambda n=n: done.append(n) for n in range(1000)), 4, call)  # type: ignore[misc]
    assert sorted(done) == list(range(1000))


def test_work_is_done_at_once(call: Call) -> None:
    meeting = threading.Barrier(4)
    arrived: list[int] = []
    run_parts(iter([lambda: arrived.append(meeting.wait(60))] * 4), 3, call)
    assert sorted(arrived) == [0, 1, 2, 3]


def test_no_work(call: Call) -> None:
    before = threading.active_count()
    run_parts(iter([]), 4, call)
    assert not call._aborted.is_set()
    assert threading.active_count() == before


@pytest.mark.parametrize("helpers", [0, 3])
def test_the_first_error_ends_the_rest(call: Call, helpers: int) -> None:
    done: list[int] = []

    def work() -> Iterator[Callable[[], None]]:
        yield from (lambda n=n: done.append(n) for n in range(5))  # type: ignore[misc]
        yield fail
        while not call._aborted.is_set():
            yield lambda: None
        pytest.fail("work was taken after an error")

    def fail() -> None:
        raise error

    error = ValueError("mine")
    with pytest.raises(ValueError) as caught:
        run_parts(work(), helpers, call)
    assert caught.value is error
    with pytest.raises(CallAborted):
        call.check()


def test_an_error_of_a_helper_wakes_the_caller(call: Call) -> None:
    here, failed = threading.get_ident(), threading.Event()

    def work() -> None:
        if threading.get_ident() == here:
            assert failed.wait(60)
            assert call._aborted.wait(60)
            call.check()
        failed.set()
        raise ValueError

    with pytest.raises(ValueError):
        run_parts(iter([work] * 4), 3, call)


def test_an_interrupt_of_the_caller_ends_the_helpers(call: Call) -> None:
    here, busy = threading.get_ident(), threading.Semaphore(0)

    def work() -> None:
        if threading.get_ident() == here:
            for _ in range(3):
                assert busy.acquire(timeout=60)
            raise KeyboardInterrupt
        busy.release()
        assert call._aborted.wait(60)
        call.check()

    with pytest.raises(KeyboardInterrupt):
        run_parts(iter([work] * 4), 3, call)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("forebay") and thread.is_alive()]
