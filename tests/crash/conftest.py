"""A process dies before the k-th change of a file, for every k; then a fresh one, and one that lived through it, find the root sound."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from forebay._engine.store import Store
from tests import parts
from tests.harness import assert_counted, assert_settled, opened
from tests.processes import death_of, fork_to_die, in_child, steps_of

Act = Callable[[Store], object]
MOST = 2000


@dataclass
class Scene:
    """A root that is prepared anew for each death: the same work dies one step later each time.

    What else the work changes lies beside the root, in `folder`. A copy of a prepared root is no quicker to make, and its trees and packs
    are others': they know their files by inode and by blocks."""

    folder: Path
    budget: int
    forgets: bool = False
    """Whether what was set is lost on the way, so that each opener must say the budget."""
    repairs: bool = False
    """Whether the next process repairs before it checks."""

    @property
    def place(self) -> Path:
        return self.folder / "root"

    def play(self, before: Act, during: Act, after: Act, *, least: int = 3, small_first: bool = True) -> list[str]:
        """``before`` sets the stage, ``during`` dies at each of its steps, ``after`` looks at what is left, in another process. That one
        checks the root and writes to it (``small_first``: a small value); at the first and the last death of each kind it fills it to the
        brim. Gives the steps of a run that does not die; there are at least ``least``."""
        return self.act(before, self._with_store(during), after, least=least, small_first=small_first)

    def act(self, before: Act, during: Callable[[], object], after: Act, *, least: int = 3, small_first: bool = True) -> list[str]:
        """The same for work that opens the root by itself."""
        in_child(lambda: self._set(before))
        steps = steps_of(during)
        assert least <= len(steps) < MOST, steps
        in_child(lambda: self._look(before, after, small_first, brim=True))
        kinds = [step.split()[0] for step in steps]
        chosen = [number for number in range(len(steps)) if parts.takes(number)]
        ends = {number for order in (chosen, chosen[::-1]) for number in {kinds[one]: one for one in order}.values()}
        for number in chosen:
            death = death_of(fork_to_die(number, during))
            try:
                in_child(lambda brim=number in ends: self._look(before, after, small_first, brim=brim))  # type: ignore[misc]
            except Exception as error:
                raise AssertionError(f"killed before step {number}, {death}: {error}") from error
        return steps

    def open(self, budget: int | None = None) -> contextlib.AbstractContextManager[Store]:
        return opened(self.place, budget or (self.budget if self.forgets else None))

    def _with_store(self, during: Act) -> Callable[[], None]:
        def act() -> None:
            with self.open() as store:
                during(store)

        return act

    def _set(self, before: Act) -> None:
        if self.folder.exists():
            shutil.rmtree(self.folder)
        self.folder.mkdir()
        with self.open(self.budget) as store:
            store.spaces.ensure("v")
            for size in (1, 100_000):  # what is created by the first write is not created at each death
                store.put("v", "first", bytes(size))
            store.remove([victim_of(entry) for entry in store.seeing.entries("v")])
            before(store)

    def _look(self, before: Act, after: Act, small_first: bool, *, brim: bool) -> None:
        """The next open works at once, nothing is wrong, what is there can be read. After the next write nothing is left that is not
        counted; a partial is counted, and goes when the space is needed. Then the stage is set for the next death."""
        with self.open() as store:
            if self.repairs:
                store.repair()
            assert store.check(deep=True) == []
            after(store)
        assert_counted(self.place, self.budget)
        if small_first:
            with self.open() as store:
                store.put("v", "next", b"written once")
                assert store.check() == []
            counted = assert_counted(self.place, self.budget)
            assert counted.leaving == 0, counted
        if brim:
            with self.open() as store:
                store.put("v", "brim", bytes(self.budget - 4096 if self.budget > 1 << 20 else self.budget))
                assert store.check(deep=True) == []
            assert assert_settled(self.place, self.budget).counted > self.budget * 0.9
        self._set(before)


def victim_of(entry):  # type: ignore[no-untyped-def]
    from forebay._model import Victim

    return Victim(entry.name, entry.size, entry.charge, entry.used, entry.id)


@pytest.fixture
def scene(quick_path: Path) -> Callable[[int], Scene]:
    return lambda budget: Scene(quick_path / "scene", budget)
