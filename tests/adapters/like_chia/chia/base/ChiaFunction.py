"""Functions that are sent to workers, and actors by two names of one call: it asks cache and bypass as CHIA's does."""

from __future__ import annotations

import functools
from typing import Any

import ray


class Waiting:
    """What is done with a result when it is fetched."""

    def __init__(self, ref: Any, then: Any) -> None:
        self.ref, self.then = ref, then


class ChiaActorHandle:
    def __init__(self, actor: Any) -> None:
        self._actor = actor

    @property
    def actor(self) -> Any:
        return self._actor

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._actor, name)

    def __reduce__(self) -> Any:
        return chia_actor, (self._actor,)


def chia_actor(handle: Any) -> Any:
    return handle if isinstance(handle, ChiaActorHandle) else ChiaActorHandle(handle)


def get(ref: Any) -> Any:
    return ref.then(ray.get(ref.ref)) if isinstance(ref, Waiting) else ray.get(ref)


def ChiaFunction(**options: Any) -> Any:
    def decorate(function: Any) -> Any:
        @functools.wraps(function)
        def here(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

        def chia_remote(*args: Any, **kwargs: Any) -> Any:
            from chia.base.bypass import get_active_bypass
            from chia.base.cache import get_active_cache, is_cached

            tag, name, bypass = kwargs.pop("_chia_tag", None), function.__name__, get_active_bypass()
            state = bypass.get_state() if bypass is not None and bypass.active else None
            if bypass is not None and bypass.is_bypassed(name, tag, *args, **kwargs):
                provider, data_path = bypass.get_provider_info(name)
                ref = ray.remote(_provide).options(**options).remote(provider, tag, data_path, state, *args, **kwargs)
            else:
                ref = ray.remote(_run).options(**options).remote(function, state, *args, **kwargs)
            if tag is None or not is_cached(name, tag):
                return ref

            def write(value: Any) -> Any:
                ray.get(get_active_cache().write.remote(tag, value))
                return value

            return Waiting(ref, write)

        here.chia_remote = chia_remote  # type: ignore[attr-defined]
        return here

    return decorate


def _restore(state: Any) -> None:
    from chia.base.bypass import Bypass, get_active_bypass

    if state is not None and (get_active_bypass() is None or not get_active_bypass().active):
        Bypass().load_state(state)


def _provide(provider: Any, tag: Any, data_path: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
    _restore(state)
    print(provider.__name__)
    return provider(tag, data_path, *args, **kwargs)


def _run(function: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
    _restore(state)
    return function(*args, **kwargs)
