"""`SharedBarrier` over a barrier of a claim: a waiting process sleeps in the kernel, and gets an error if a missing process dies."""

from __future__ import annotations

import operator
import os
import threading
from collections import Counter
from typing import Any, Self

import numpy as np

from forebay import claims
from forebay._kernel.interrupts import guarded_methods
from forebay.adapters.streaming import shared
from forebay.adapters.streaming.prefix import claim_of, hold
from forebay.adapters.streaming.shared import SharedArray
from forebay.claims.registry import Registry
from forebay.claims.shared import NamedLock


def _stored(index: int, kind: type) -> Any:
    """Return a property of `SharedBarrier` whose value is in the memory ``_arr``."""

    def load(barrier: SharedBarrier) -> Any:
        return kind(barrier._arr[index])

    def store(barrier: SharedBarrier, value: Any) -> None:
        barrier._arr[index] = kind(value)

    return property(load, store)


@guarded_methods("num_enter", "num_exit", "flag")
class SharedBarrier:
    """A barrier for all processes of the node that create one of this name, unpickle it, or inherit it: call it with their number.

    It belongs to the claim whose number begins the name, if this process has that claim, else to one of its own. ``num_enter``,
    ``num_exit`` and ``flag`` have the values of an idle barrier of Streaming, in the memory ``_arr``. ``lock`` is a lock of the same
    processes with the methods of a FileLock; the barrier does not need it, so it can be deleted, and is not pickled. ``filelock_path``
    is unused."""

    lock: Any  # Streaming puts a FileLock here
    num_enter, num_exit, flag = _stored(0, int), _stored(1, int), _stored(2, bool)

    def __init__(self, filelock_path: str, shm_name: str) -> None:
        """Raises what `SharedMemory` raises."""
        self.filelock_path = filelock_path
        self._arr = SharedArray(3, np.int32, shm_name)
        self.num_enter, self.num_exit, self.flag = 0, -1, True
        self._claim = claim_of(shm_name) or _own_claim(shm_name)
        hold(self, self._claim)
        self.lock = Lock(self._claim.lock(shm_name), filelock_path)

    def __call__(self, num_procs: int) -> None:
        """Wait until ``num_procs`` processes have arrived. Raises `BarrierBroken` if one of them died."""
        self._claim.barrier(self._arr.name).wait(operator.index(num_procs))

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        hold(self, self._claim)


@guarded_methods()
class Lock:
    """A lock of a claim with the methods of ``filelock.FileLock``: reentrant, so a thread releases it as often as it acquired it.

    ``lock_file`` is unused. A forked child does not hold what its parent holds."""

    def __init__(self, lock: NamedLock, lock_file: str) -> None:
        self.lock_file, self._lock, self._held = lock_file, lock, lock
        self._depth: Counter[tuple[int, int]] = Counter()  # by process and thread

    def acquire(self, timeout: float | None = None, *_: Any, blocking: bool = True, **__: Any) -> Self:
        """Acquire it for a `with` block or until `release`. ``timeout``: seconds, unlimited if negative. Raises `WaitTimeout`."""
        me = os.getpid(), threading.get_ident()
        if not self._depth[me]:
            limit = None if timeout is None or timeout < 0 else timeout
            self._held = self._lock.within(limit if blocking else 0.0).__enter__()
        self._depth[me] += 1
        return self

    def release(self, force: bool = False) -> None:
        """Release it; does nothing if this thread does not hold it. ``force``: however often it was acquired."""
        me = os.getpid(), threading.get_ident()
        depth = self._depth.pop(me, 0)
        if depth > 1 and not force:
            self._depth[me] = depth - 1
        elif depth:
            self._held.__exit__(None, None, None)

    @property
    def is_locked(self) -> bool:
        """Whether this thread holds it."""
        return self._depth[os.getpid(), threading.get_ident()] > 0

    def __enter__(self) -> Self:
        return self.acquire(timeout=self._lock.timeout)

    def __exit__(self, *_: object) -> None:
        self.release()


_own: dict[str, claims.Claim] = {}  # of this process


def _own_claim(name: str) -> claims.Claim:
    """Return the claim that all processes of this user have for a barrier of this name; the first one creates it."""
    claim = _own.get(name)
    if claim is None or claim.closed:
        registry = Registry()
        _own[name] = claim = shared.opened(registry, registry.join_or_register(shared.request_of("barriers", name)))
    return claim
