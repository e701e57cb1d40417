"""Runs a function in one process of the node at a time: for `Cache.get_or_put`, tasks, samples, shards and blocks."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from forebay import errors
from forebay._kernel import interrupts, waits
from forebay._model import Asker, Buffer

if TYPE_CHECKING:
    from forebay._engine.flight import KeyHold, WaitFor
    from forebay.fetch import Fetcher

T = TypeVar("T")


def get_or_make(
    fetcher: Fetcher, space: str, key: str, look: Callable[[], T | None], make: Callable[[], T], keep: Callable[[T], T | None],
    **options: Any,
) -> T:  # fmt: skip
    """See `get_or_make_async`."""

    async def made() -> T:
        return make()

    async def kept(value: T) -> T | None:
        return keep(value)

    value: T = waits.run(get_or_make_async(fetcher, space, key, look, made, kept, wait=waits.wait_here, **options))
    return value


def get_or_make_free(
    fetcher: Fetcher, space: str, keys: Sequence[str], look: Callable[[str], T | None],
    make: Callable[[list[str], Mapping[str, KeyHold]], dict[str, T]], *, label: str,
) -> dict[str, T]:  # fmt: skip
    """The values of the keys that no other call is making: what ``look`` finds, else what one call of ``make`` makes and stores.

    ``make`` gets the missing keys and their locks, which it may release one by one; it gets no locks if the cache fails, and then nothing
    can be stored. Never waits for a lock while it holds others: two calls for the same keys share the work, and cannot wait for each
    other. Raises what ``make`` raises."""
    with contextlib.ExitStack() as stack:
        found: dict[str, T] = {}
        holds: Mapping[str, KeyHold] = {}
        try:
            holds = stack.enter_context(fetcher.store.locks.holding_free(space, keys))
            # P1 looks: absent / P2 makes, stores, unlocks / P1 locks: without this look it makes the value again.
            found = {key: value for key in interrupts.paced(holds) if (value := look(key)) is not None}
            keys = list(holds)
        except (errors.CacheFault, errors.Closed) as error:
            fetcher.fall_back(error, label)
            holds = {}
        missing = [key for key in keys if key not in found]
        return found | (make(missing, holds) if missing else {})


async def get_or_make_async(
    fetcher: Fetcher, space: str, key: str, look: Callable[[], T | None], make: Callable[[], Awaitable[T]],
    keep: Callable[[T], Awaitable[T | None]], *, past: Callable[[T], T] | None = None,
    pack: Callable[[T, float], Buffer | None] | None = None, unpack: Callable[[Buffer], T | None] | None = None, codec: str = "",
    label: str = "", timeout: float | None = None, counts_miss: bool = False, looked: bool = False, asker: Asker | None = None,
    wait: WaitFor = waits.wait_for_async,
) -> T:  # fmt: skip
    """The result of ``look``; else that of ``make``, as ``keep`` stored it. One process of the node runs ``make`` at a time.

    Looks before it takes the key's lock, and again under it: another process may have stored the value in between. ``keep`` returns None
    if the value cannot be stored: callers that waited then get the bytes of ``pack``, through ``unpack``, if they have the same ``codec``;
    see `Flight.note_unstored`. If the cache fails, ``make`` runs once, and the caller gets its result through ``past``. ``looked``: the
    caller has just looked. ``label``: the name of the value in messages. ``asker``: see `Flight.note_failure`; default: a function of the
    program makes the value. Raises what ``make`` raises."""
    values: list[T] = []
    has_failed, locks, asker = False, fetcher.store.locks, asker or fetcher.asker(runs_function=True)

    async def fill(_: KeyHold) -> T:
        nonlocal has_failed
        if counts_miss:
            fetcher.store.count("misses")
        try:
            with waits.time_limit(None, afresh=True):  # the time limit is for the cache, not for the function
                values.append(await make())
        except BaseException:
            has_failed = True
            raise
        kept = await keep(values[0])
        if kept is not None:
            return kept
        if pack is not None:
            locks.note_unstored(space, key, codec, partial(pack, values[0]))
        return values[0] if past is None else past(values[0])

    try:
        with waits.time_limit(timeout):
            value = None if looked else look()
            return value if value is not None else await locks.make_once(space, key, look, fill, wait, timeout=timeout, asker=asker)
    except (errors.CacheFault, errors.WaitTimeout, errors.Closed) as error:
        from forebay._engine.flight import Unstored  # imported late: a hit needs no catalog

        if has_failed:
            raise  # the error of the function itself
        if isinstance(error, Unstored) and error.codec == codec and error.data is not None and unpack is not None:
            data, error.data = error.data, None  # its frames hold it
            if (got := unpack(data)) is not None:
                return got
        if fetcher.store.keeps:  # else that was configured, or a warning was logged when the root could not be opened
            fetcher.fall_back(error, label or f"{space}:{key}")
    value = values[0] if values else await make()
    return value if past is None else past(value)
