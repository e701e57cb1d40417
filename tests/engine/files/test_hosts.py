"""Hosts that cannot be asked, as the processes of a node tell each other."""

from __future__ import annotations

import math
from typing import Any

import pytest

from forebay._engine.files import silent_hosts
from forebay._engine.files.layout import Root
from forebay._engine.files.shared_table import HEADER
from forebay._engine.files.silent_hosts import SilentHosts
from tests.processes import in_child

HOST, OTHER = "http://store:9000", "http://store:9001"


class Clock:
    """The monotonic clock of the table, in seconds."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic_ns(self) -> int:
        return round(self.now * 1e9)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(silent_hosts, "time", clock)
    return clock


def why(hosts: SilentHosts, host: str = HOST, **how: Any) -> int | None:
    found = hosts.trouble_with(host, 10.0, **how)
    return None if found is None else found[1]


def test_all_processes_know_why_a_host_is_left_alone(root: Root, clock: Clock) -> None:
    hosts = SilentHosts(root)
    assert why(hosts) is None
    hosts.failed(HOST, clock.now, math.inf, 2)
    clock.now += 1
    assert hosts.trouble_with(HOST, 10.0) == (pytest.approx(1.0), 2)
    assert in_child(lambda: SilentHosts(root).trouble_with(HOST, 10.0)) == (pytest.approx(1.0), 2)
    assert why(hosts, OTHER) is None
    in_child(lambda: SilentHosts(root).heard(HOST))
    assert why(hosts) is None


def test_one_asks_again_less_and_less_often(root: Root, clock: Clock) -> None:
    one, other = SilentHosts(root), SilentHosts(root)
    one.failed(HOST, clock.now, math.inf, 2)
    for period in (5, 10, 20, 40, 60, 60):
        clock.now += period - 0.1
        assert why(one, is_optional=True) == why(other, is_optional=True) == 2
        clock.now += 0.2
        assert why(other, is_optional=True) is None
        assert why(one, is_optional=True) == 2  # the other finds out
        other.failed(HOST, clock.now, math.inf, 2)
    clock.now += 4.9
    assert why(one) == 2
    clock.now += 0.2
    assert why(one) is None  # who has nothing to serve asks as often as at first
    assert why(other) == 2
    one.heard(HOST)
    assert why(one) is why(other) is None
    clock.now += 10
    one.failed(HOST, clock.now, math.inf, 2)
    clock.now += 5.1
    assert why(other, is_optional=True) is None  # it begins anew


def test_what_was_long_ago_is_forgotten(root: Root, clock: Clock) -> None:
    hosts = SilentHosts(root)
    hosts.failed(HOST, clock.now, math.inf, 2)
    for _ in range(4):
        clock.now += 61
        assert why(hosts, is_optional=True) is None
    clock.now += 121
    assert why(hosts, is_optional=True) is None
    hosts.failed(HOST, clock.now, math.inf, 1)
    clock.now += 5.1
    assert why(hosts, is_optional=True) is None


def test_an_answer_after_a_failure_is_told_at_once(root: Root, clock: Clock) -> None:
    """Answers are noted once a second; but a failure may have been noted since the last note."""
    one, other = SilentHosts(root), SilentHosts(root)
    one.heard(HOST)
    clock.now += 0.3
    one.failed(HOST, clock.now, math.inf, 2)
    assert why(other) == 2
    clock.now += 0.3
    one.heard(HOST)
    assert why(other) is None


def test_what_others_wrote_is_no_harm(root: Root, clock: Clock) -> None:
    hosts = SilentHosts(root)
    hosts.failed(HOST, clock.now, math.inf, 2)
    words = hosts._table.words() if hosts._table is not None else None
    assert words is not None
    for noise in (0, 1, (1 << 64) - 1, clock.monotonic_ns(), 1 << 40):
        words[HEADER + 1 :] = memoryview(bytearray(noise.to_bytes(8, "little") * (len(words) - HEADER - 1))).cast("Q")
        for _ in range(3):
            hosts.trouble_with(HOST, 10.0)
            hosts.failed(HOST, clock.now, 1.0, 1)
            hosts.heard(HOST)
            clock.now += 70
