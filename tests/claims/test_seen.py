"""What is seen of a claim whose processes are on their way out."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

import forebay
from forebay._claims import seen
from forebay._claims.seen import Seen
from forebay._claims.table import Member
from tests.claiming import REMOTE, alone


def lead(told: int) -> None:
    claim = forebay.claim("/local", REMOTE, alone(), "job")
    os.dup(claim._members._fd)  # as in the moment between the fork and what is done after it
    child = os.fork()
    if child == 0:
        claim.close()
    else:
        os.write(told, b"%d" % child)
    signal.pause()


def test_a_child_that_dies_while_it_is_looked_at(registry: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leader and child are killed together. The child was just forked: it has its leader's lock still, at the first look; at the second
    look, at who the members are, it is gone as well. That is no claim that somebody has."""
    heard, told = os.pipe()
    leader = os.fork()
    if leader == 0:
        try:
            lead(told)
        finally:
            os._exit(1)
    child = int(os.read(heard, 20))
    for fd in (heard, told):
        os.close(fd)
    os.kill(leader, signal.SIGKILL)
    os.waitpid(leader, 0)
    (name,) = [name for name in os.listdir(registry) if seen.parse([name])]
    found = seen.look_at(registry, name)
    assert found is not None
    assert found.led
    members = Seen.members

    def later(self: Seen) -> list[Member]:
        os.kill(child, signal.SIGKILL)
        while (again := seen.look_at(registry, name)) is not None and again.live:
            os.sched_yield()
        return members(self)

    monkeypatch.setattr(Seen, "members", later)
    assert found.is_ending()


def test_names_of_claims_are_told_from_others() -> None:
    sound, tag = f"000001.{'a' * 16}", "b" * 16
    others = ["", "lock", f"1.{tag}", f".new.{tag}", f"000002.{tag}\n", f"x000003.{tag}", f"000004.{tag}x", f"\n000005.{tag}"]
    assert seen.parse([*others, sound, *others, f"1000000.{tag}"]) == [(sound, 1, "a" * 16), (f"1000000.{tag}", 1_000_000, tag)]
