"""What a failure leaves behind: those that wait get it, and it keeps nothing of its callers alive."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.harness import opened, single
from tests.items import until


class Own(Exception):
    """One whose arguments are not those of its `__init__`."""

    def __init__(self, name: str, *, code: int) -> None:
        super().__init__(f"{name} is bad")
        self.code = code


class Held:
    """An object of a caller."""


ERRORS: dict[str, Callable[[], Exception]] = {
    "built-in": lambda: KeyError("k"),
    "of the system": lambda: OSError(2, "none", "file"),
    "of a codec": lambda: UnicodeDecodeError("utf-8", b"\xff", 0, 1, "no text"),
    "of a class of its own": lambda: Own("a", code=5),
}
of_each_kind = pytest.mark.parametrize("error", ERRORS.values(), ids=ERRORS)


def look(error: Exception | None) -> tuple[object, ...]:
    """What a caller sees of an error."""
    return type(error), str(error), vars(error)


@of_each_kind
def test_a_failure_keeps_no_object_of_the_function_that_raised_it(tmp_path: Path, error: Callable[[], Exception]) -> None:
    refs: list[weakref.ref[Held]] = []

    def make() -> bytes:
        held = Held()
        refs.append(weakref.ref(held))
        raise error()

    with opened(tmp_path / "root") as store:
        with contextlib.suppress(Exception):
            single(store, "v", "k", lambda: None, make)
        noted = store.locks.failure("v", "k", 0)
        gc.collect()
        assert refs[0]() is None
        assert look(noted) == look(error())


@of_each_kind
def test_a_thread_that_waited_gets_an_error_of_the_same_class(tmp_path: Path, error: Callable[[], Exception]) -> None:
    seen: list[tuple[object, ...]] = []
    with opened(tmp_path / "root") as store:

        def waits() -> None:
            try:
                single(store, "v", "k", lambda: None, bytes)
            except Exception as raised:
                seen.append(look(raised))

        thread = threading.Thread(target=waits)

        def make() -> bytes:
            thread.start()
            until(lambda: store.seeing.counts()["waits"] == 1, "the other thread")
            raise error()

        with contextlib.suppress(type(error())):
            single(store, "v", "k", lambda: None, make)
        thread.join()
    assert seen == [look(error())]
