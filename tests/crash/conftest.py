"""A process dies before the k-th change of a file, for every k; then a fresh one, and one that lived through it, find the root sound."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest

from forebay._engine.store import Store
from tests.harness import assert_counted, assert_settled, opened
from tests.processes import death_of, fork_to_die, in_child

Act = Callable[[Store], object]
MOST = 2000


@dataclass
class Scene:
    """One root in which the same thing is done again and again, and dies one step later each time."""

    place: Path
    budget: int
    forgets: bool = False
    """Whether what was set is lost on the way, so that each opener must say the budget."""

    def play(
        self, before: Act, during: Act, after: Act, *, least: int = 3, small_first: bool = True, steps: Iterable[int] | None = None
    ) -> list[str]:  # fmt: skip
        """``before`` sets the stage, ``during`` dies at each of its steps in turn, ``after`` looks at what is left, in a process of
        its own. Then the root is checked, written to once (``small_first``), and filled to the brim. Gives the steps; there are at
        least ``least``. ``steps``: only at these, in order."""
        deaths: list[str] = []
        in_child(lambda: self._set(before))
        for step in itertools.count() if steps is None else steps:
            assert step < MOST
            death = death_of(fork_to_die(step, self._acting(during)))
            if death is None:
                break
            deaths.append(death)
            try:
                in_child(lambda: self._look(after))
                in_child(lambda: self._use(before, small_first))
            except Exception as error:
                raise AssertionError(f"killed before step {step}, {death}: {error}") from error
        in_child(lambda: self._look(after))
        assert len(deaths) >= least, deaths
        return deaths

    def open(self) -> contextlib.AbstractContextManager[Store]:
        return opened(self.place, self.budget if self.forgets else None)

    def _acting(self, during: Act) -> Callable[[], None]:
        def act() -> None:
            with self.open() as store:
                during(store)

        return act

    def _set(self, before: Act) -> None:
        with opened(self.place, self.budget) as store:
            store.spaces.ensure("v")
            before(store)

    def _look(self, after: Act) -> None:
        """The next open works at once, nothing is wrong, what is there can be read."""
        with self.open() as store:
            assert store.check(deep=True) == []
            after(store)

    def _use(self, before: Act, small_first: bool) -> None:
        """After the next write nothing is left that is not counted; a partial is counted, and goes when the space is needed."""
        assert_counted(self.place, self.budget)
        if small_first:
            with self.open() as store:
                store.put("v", "next", b"written once")
                assert store.check() == []
            counted = assert_counted(self.place, self.budget)
            assert counted.leaving == 0, counted
        with self.open() as store:
            store.put("v", "brim", bytes(self.budget - 4096 if self.budget > 1 << 20 else self.budget))
            assert store.check(deep=True) == []
        brim = assert_settled(self.place, self.budget)
        assert brim.counted > self.budget * 0.9
        with self.open() as store:
            store.remove([victim_of(entry) for entry in store.entries("v")])
            before(store)


def victim_of(entry):  # type: ignore[no-untyped-def]
    from forebay._model import Victim

    return Victim(entry.name, entry.size, entry.charge, entry.used, entry.id)


@pytest.fixture
def scene(quick_path: Path) -> Callable[[int], Scene]:
    return lambda budget: Scene(quick_path / "root", budget)
