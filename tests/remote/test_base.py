"""Options, attempts and the edge where foreign errors become ours."""

from __future__ import annotations

import pickle
import socket
import threading
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from forebay import errors, remote
from forebay.remote import RemoteOptions, base
from forebay.remote.base import AttemptFailed, Call, CallAborted

URL = "https://me:5ec3e7@host/a?token=5ec3e7"


def test_options_from_the_environment() -> None:
    known = {
        "FOREBAY_CONNECT_TIMEOUT": "1.5",
        "FOREBAY_READ_TIMEOUT": "7",
        "FOREBAY_ATTEMPTS": "2",
        "FOREBAY_STREAMS": " 3 ",
        "FOREBAY_CONNECTIONS": "",
    }
    options = RemoteOptions.from_environment(known)
    assert (options.connect_timeout, options.read_timeout, options.attempts, options.streams) == (1.5, 7, 2, 3)
    assert options.connections == RemoteOptions().connections
    assert RemoteOptions.from_environment({}) == RemoteOptions()


@pytest.mark.parametrize(
    ("name", "value"),
    [("ATTEMPTS", "two"), ("ATTEMPTS", "1.5"), ("STREAMS", "0"), ("READ_TIMEOUT", "-1"), ("READ_TIMEOUT", "nan"), ("READ_TIMEOUT", "inf")],
)
def test_a_wrong_variable_is_named(name: str, value: str) -> None:
    with pytest.raises(errors.ConfigError, match=f"FOREBAY_{name} is '{value}'"):
        RemoteOptions.from_environment({f"FOREBAY_{name}": value})


def test_a_wrong_option_is_named() -> None:
    with pytest.raises(errors.ConfigError, match="streams is 0"):
        RemoteOptions(streams=0)


@pytest.mark.parametrize("name", ["", " ", "a b", " a", "a ", "a:", "a\r\nb", "a\0", "\u00e9", "Content-Length", "transfer-encoding"])
def test_a_header_that_would_be_another_one_is_refused(name: str) -> None:
    with pytest.raises(errors.ConfigError, match="cannot be sent"):
        RemoteOptions(headers={name: "1"})


@pytest.mark.parametrize("name", ["connect_timeout", "read_timeout", "total_timeout", "backoff", "attempts", "part"])
def test_an_array_is_no_number(name: str) -> None:
    numpy = pytest.importorskip("numpy")
    for wrong in ([1, 2], [0.5], [], ["a", "b"], [True, False]):
        with pytest.raises(errors.ConfigError, match=f"{name} is array"):
            RemoteOptions(**{name: numpy.array(wrong)})
    right: Any = {name: numpy.int64(3)}
    assert RemoteOptions(**right) == RemoteOptions(**{name: 3})  # type: ignore[arg-type]
    assert type(getattr(RemoteOptions(**right), name)) in (int, float)


COUNTS = ["attempts", "connections", "streams", "part", "buffer"]


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        *((name, wrong) for name in ("headers", "token", "partition") for wrong in (5, b"x", ["x"], object())),
        *((name, wrong) for name in ("connect_timeout", *COUNTS) for wrong in ("5", b"5", [5], object())),
        *((name, 1.5) for name in COUNTS),
        ("headers", {"a": 5}),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_an_option_of_a_wrong_type_is_named(name: str, wrong: Any) -> None:
    with pytest.raises(errors.ConfigError, match=name):
        RemoteOptions(**{name: wrong})


@pytest.mark.parametrize("name", ["connect_timeout", "read_timeout", "total_timeout"])
@pytest.mark.parametrize("value", [float("inf"), 1e12, float("nan")])
def test_what_no_clock_can_wait_for_is_refused(name: str, value: float) -> None:
    with pytest.raises(errors.ConfigError, match=f"{name} is"):
        RemoteOptions(**{name: value})  # type: ignore[arg-type]


def test_options_are_keys_and_pickle() -> None:
    one, other = RemoteOptions(headers={"A": "b"}, token="t"), RemoteOptions(headers={"A": "c"}, token="t")
    assert one == RemoteOptions(headers={"A": "b"}, token="t") == pickle.loads(pickle.dumps(one))
    assert hash(one) == hash(RemoteOptions(headers={"A": "b"}, token="t"))
    assert one != other


def test_one_remote_for_each_scheme_and_options() -> None:
    first = remote.resolve("http://h/a")
    assert first is remote.resolve("HTTPS://other/b", RemoteOptions())
    assert first is not remote.resolve("http://h/a", RemoteOptions(attempts=1))
    assert type(remote.resolve("/a")) is type(remote.resolve("file:///a"))


class Failing:
    """Fails ``times`` times."""

    def __init__(self, times: int, trouble: AttemptFailed | None = None) -> None:
        self.left, self.trouble, self.calls = times, trouble or AttemptFailed("no luck"), 0

    def __call__(self) -> str:
        self.calls += 1
        if self.left:
            self.left -= 1
            raise self.trouble
        return "done"


def test_retrying() -> None:
    call, work = Call(URL, RemoteOptions(backoff=0.001)), Failing(4)
    assert call.retry(work) == "done"
    assert (work.calls, call.transfer.retries) == (5, 4)
    with pytest.raises(errors.RemoteUnavailable, match=r"^https://\.\.\.@host/a\?\.\.\.: no luck, after 5 attempts and 0 bytes$"):
        call.retry(Failing(5))


def test_only_trouble_is_tried_again() -> None:
    call, work = Call(URL, RemoteOptions()), Failing(1, AttemptFailed("for good", retryable=False))
    with pytest.raises(errors.RemoteUnavailable, match="after 1 attempt"):
        call.retry(work)

    def broken() -> None:
        calls.append(1)
        raise OSError("the sink's")

    calls: list[int] = []
    with pytest.raises(OSError, match="the sink's"):
        call.retry(broken)
    assert (work.calls, len(calls)) == (1, 1)


def test_no_attempt_begins_after_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(base, "time", SimpleNamespace(monotonic=lambda: now[0]))
    call, work = Call(URL, RemoteOptions(total_timeout=0.2, backoff=10)), Failing(9)
    monkeypatch.setattr(call._aborted, "wait", lambda seconds: pytest.fail(f"waits {seconds} s"))
    with pytest.raises(errors.RemoteUnavailable, match="after 1 attempt"):
        call.retry(work)
    now[0] += 0.25
    with pytest.raises(errors.RemoteTimeout, match=r"not done in 0\.2 s"):
        call.retry(Failing(0))


def test_aborting_wakes_who_waits_between_attempts() -> None:
    call, ended = Call(URL, RemoteOptions(backoff=60)), threading.Event()
    begun = threading.Event()

    def work() -> None:
        begun.set()
        raise AttemptFailed("no luck")

    def run() -> None:
        with pytest.raises(CallAborted):
            call.retry(work)
        ended.set()

    thread = threading.Thread(target=run)
    thread.start()
    begun.wait()
    call.abort()
    assert ended.wait(60)
    thread.join()


def test_aborting_wakes_who_reads_a_socket() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, Call(URL, RemoteOptions()) as call:
        call.on_abort(partial(ours.shutdown, socket.SHUT_RDWR))
        reading = threading.Thread(target=ours.recv, args=(1,))
        reading.start()
        call.abort()
        reading.join(60)
        assert not reading.is_alive()
        with pytest.raises(CallAborted):
            call.on_abort(partial(theirs.shutdown, socket.SHUT_RDWR))
        with pytest.raises(CallAborted):
            call.check()


def test_aborting_ends_the_responses_of_a_call() -> None:
    class Response:
        ends = 0

        def abort(self) -> None:
            self.ends += 1

    ours, removed, late = Response(), Response(), Response()
    with Call(URL, RemoteOptions()) as call:
        call.on_abort(ours.abort)
        call.on_abort(removed.abort)
        call.not_on_abort(removed.abort)
        call.abort()
        with pytest.raises(CallAborted):
            call.on_abort(late.abort)
    assert (ours.ends, removed.ends, late.ends) == (1, 0, 0)


def test_a_call_that_begins_again_keeps_its_counts_and_deadline() -> None:
    call = Call(URL, RemoteOptions(total_timeout=100))
    call.count(requests=2)
    successor = call.restarted()
    successor.check()
    successor.count(requests=1)
    assert call.transfer.requests == 3
    with pytest.raises(CallAborted):
        call.check()
