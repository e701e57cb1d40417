"""Fences reach each process that shares memory, its children too; where the kernel has none, a process says so."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import pytest

from forebay._kernel import fences, mappings
from tests.processes import in_child

GET_REGISTRATIONS = 1 << 9
REGISTERED = 1 << 2


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine whose cores keep no order."""
    monkeypatch.setattr(fences, "_IS_ORDERED", False)
    fences._register.cache_clear()
    yield
    fences._register.cache_clear()


def registrations() -> int:
    return int(fences._syscall(fences._MEMBARRIER, GET_REGISTRATIONS, 0, 0))


needs_membarrier = pytest.mark.skipif(registrations() < 0, reason="the kernel does not tell who is registered (before Linux 6.3)")


@needs_membarrier
def test_who_maps_words_is_reached_by_fences_and_so_are_its_children() -> None:
    def young() -> None:
        mappings.words(mappings.words_of_process(8).cast("B"))
        assert registrations() & REGISTERED
        in_child(lambda: registrations() & REGISTERED or os._exit(1))
        assert fences._membarrier(fences._GLOBAL_EXPEDITED)

    in_child(young)


@needs_membarrier
def test_a_machine_that_keeps_the_order_makes_no_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fences, "_IS_ORDERED", True)
    calls: list[int] = []
    monkeypatch.setattr(fences, "_syscall", lambda *call: calls.append(call[1]))
    mappings.words(mappings.words_of_process(8).cast("B"))
    fences.fence()
    assert calls == []


def test_where_the_kernel_has_no_fence_a_process_warns_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(fences, "_MEMBARRIER", -1)
    with caplog.at_level(logging.WARNING, "forebay"):
        for _ in range(3):
            mappings.words(mappings.words_of_process(8).cast("B"))
            fences.fence()
    (said,) = [record.getMessage() for record in caplog.records]
    assert "out of order" in said
    assert os.uname().machine in said
