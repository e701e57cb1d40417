"""The store against a model, with a second process that does half of the work."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from forebay import errors
from forebay._engine.leases import Lease
from forebay._engine.store import Settings, Store
from forebay._model import Victim
from tests.harness import KiB, assert_settled, bytes_of, data_usage, opened
from tests.processes import HANG, fork

TIGHT, AMPLE = 256 * KiB, 64 << 20
KEYS = [f"key {n}" for n in range(6)]
SIZES = [0, 1, 100, 16 * KiB, 16 * KiB + 1, 40 * KiB, 70 * KiB, 300 * KiB]
BLOCK = 4096


@dataclass
class Actor:
    """What one process does. The second one's calls come over a pipe."""

    store: Store
    leases: dict[int, tuple[Lease, bytes]] = field(default_factory=dict)

    def put(self, key: str, data: bytes) -> bool:
        try:
            self.store.put("v", key, data)
        except errors.NoSpace:
            return False
        return True

    def get(self, key: str) -> bytes | None:
        return bytes_of(self.store, key)

    def touch(self, key: str) -> None:
        if (found := self.store.view("v", key)) is not None:
            self.store.touch(found.entry)

    def remove(self, key: str) -> int:
        gone = [Victim(e.name, e.size, e.charge, e.used, e.id) for e in self.store.seeing.entries("v") if e.key == key]
        return len(self.store.remove(gone).removed)

    def pin(self, key: str, life: str) -> bool:
        return self.store.set_life("v", key, life)

    def lease(self, token: int, key: str) -> bytes | None:
        lease = self.store.lease("v", key)
        if lease is None:
            return None
        data = Path(lease).read_bytes()
        self.leases[token] = lease, data
        return data

    def leased_is_whole(self, token: int) -> bool:
        lease, data = self.leases[token]
        return Path(lease).read_bytes() == data

    def release(self, token: int) -> None:
        lease, _ = self.leases.pop(token)
        lease.close()

    def keys(self) -> list[str]:
        return sorted(entry.key for entry in self.store.seeing.entries("v"))

    def clear(self) -> None:
        for token in list(self.leases):
            self.release(token)
        for key in self.keys():
            self.pin(key, "cached")
            self.remove(key)


def serve(place: Path, pipe: Any) -> None:
    with opened(place) as store:
        actor = Actor(store)
        with contextlib.suppress(EOFError):
            while True:
                name, *arguments = pipe.recv()
                pipe.send(getattr(actor, name)(*arguments))


class Far:
    """The second process, called like an `Actor`."""

    def __init__(self, pipe: Any) -> None:
        self._pipe = pipe

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            self._pipe.send((name, *arguments))
            if not self._pipe.poll(HANG):
                raise AssertionError(f"{name}{arguments} hangs")
            return self._pipe.recv()

        return call


def charge_of(size: int) -> int:
    return size + 256 if size <= 16 * KiB else -(-size // BLOCK) * BLOCK


def machine(actors: list[Any], place: Path, budget: int) -> type[RuleBasedStateMachine]:
    keys, sizes, who = st.sampled_from(KEYS), st.sampled_from(SIZES), st.integers(0, len(actors) - 1)

    class Machine(RuleBasedStateMachine):
        """``model``: what each key was last put to. ``sure``: keys that nothing can have evicted since."""

        def __init__(self) -> None:
            super().__init__()
            self.model: dict[str, bytes] = {}
            self.sure: set[str] = set()
            self.pinned: set[str] = set()
            self.leases: dict[int, tuple[int, str, bytes]] = {}
            self.number = 0

        def held(self) -> int:
            """Charge of what cannot be evicted now."""
            leased = {(key, data): len(data) for _, key, data in self.leases.values()}
            kept = {(key, self.model[key]): len(self.model[key]) for key in self.pinned}
            return sum(charge_of(size) for size in {**leased, **kept}.values())

        def is_held(self, key: str) -> bool:
            return key in self.pinned or any(name == key and data == self.model.get(key) for _, name, data in self.leases.values())

        @rule(by=who, key=keys, size=sizes)
        def put(self, by: int, key: str, size: int) -> None:
            self.number += 1
            data = (f"{key} {self.number} ".encode() * (size // 8 + 1))[:size]
            everything = sum(charge_of(len(value)) for value in self.model.values()) + self.held() + charge_of(size)
            kept = actors[by].put(key, data)
            if kept:
                self.model[key] = data
            else:
                old = charge_of(len(self.model[key])) if key in self.model else 0
                assert self.held() + old + charge_of(size) > budget, f"no room for {size} bytes, though only {self.held()} are held"
            if everything > budget:
                self.sure &= {name for name in KEYS if self.is_held(name)}
            if kept:
                self.sure.add(key)

        @rule(by=who, key=keys)
        def get(self, by: int, key: str) -> None:
            found = actors[by].get(key)
            wanted = self.model.get(key)
            assert found == wanted or (found is None and key not in self.sure), f"{key}: {found!r:.40} where {wanted!r:.40} was put"

        @rule(by=who, key=keys)
        def touch(self, by: int, key: str) -> None:
            actors[by].touch(key)

        @rule(by=who, key=keys)
        def remove(self, by: int, key: str) -> None:
            gone = actors[by].remove(key)
            if key in self.model and self.is_held(key):
                assert gone == 0
            elif key in self.sure:
                assert gone == 1
            if key in self.model and not self.is_held(key):
                del self.model[key]
                self.sure.discard(key)

        @rule(by=who, key=keys)
        def pin(self, by: int, key: str) -> None:
            if actors[by].pin(key, "pinned"):
                assert key in self.model
                self.pinned.add(key)
                self.sure.add(key)
            else:
                assert key not in self.sure

        @precondition(lambda self: self.pinned)
        @rule(by=who, data=st.data())
        def unpin(self, by: int, data: st.DataObject) -> None:
            key = data.draw(st.sampled_from(sorted(self.pinned)))
            assert actors[by].pin(key, "cached")
            self.pinned.discard(key)

        @rule(by=who, key=keys)
        def lease(self, by: int, key: str) -> None:
            self.number += 1
            found = actors[by].lease(self.number, key)
            if found is None:  # a small value has no file
                assert key not in self.sure or len(self.model[key]) <= 16 * KiB
                return
            assert found == self.model[key]
            self.leases[self.number] = by, key, found
            self.sure.add(key)

        @precondition(lambda self: self.leases)
        @rule(data=st.data())
        def release(self, data: st.DataObject) -> None:
            token = data.draw(st.sampled_from(sorted(self.leases)))
            by, _, _ = self.leases.pop(token)
            actors[by].release(token)

        @invariant()
        def leases_pin(self) -> None:
            assert all(actors[by].leased_is_whole(token) for token, (by, _, _) in self.leases.items())

        @invariant()
        def the_budget_holds(self) -> None:
            found = actors[0].store.seeing.usage()
            assert found.used + found.reserved <= budget
            if budget == TIGHT:
                assert data_usage(place) <= budget

        @invariant()
        def both_list_the_same(self) -> None:
            listed = actors[0].keys()
            assert listed == actors[1].keys()
            assert self.sure <= set(listed) <= set(self.model)

        def teardown(self) -> None:
            for actor in actors:
                actor.clear()
            actors[0].put("swept", b"")
            assert actors[1].remove("swept") == 1
            assert actors[0].store.check(deep=True) == []
            assert actors[0].keys() == []

    return Machine


@pytest.mark.rotates
@pytest.mark.parametrize("budget", [TIGHT, AMPLE], ids=["tight", "ample"])
def test_the_store_is_a_dict_that_may_forget(quick_path: Path, budget: int) -> None:
    place, (near, far) = quick_path / "root", multiprocessing.Pipe()
    with opened(place, budget) as store:
        store.spaces.ensure("v")
    child = fork(lambda: (near.close(), serve(place, far)))
    far.close()
    try:
        with opened(place) as store:
            store.configure(Settings(budget=budget))
            actors: list[Any] = [Actor(store), Far(near)]
            run_state_machine_as_test(
                machine(actors, place, budget),
                settings=hypothesis.settings(max_examples=25, stateful_step_count=40, deadline=None),
            )
    finally:
        near.close()
    child.result()
    assert_settled(place, budget)
