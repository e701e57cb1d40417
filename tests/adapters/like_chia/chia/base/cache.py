"""A cache that keeps nothing, under the names of CHIA's."""

from __future__ import annotations

from typing import Any

import ray

from chia.base.ChiaFunction import chia_actor

UNITS = {"B": 1}
_CACHE_ACTOR_NAME = "ChiaCacheStore"


@ray.remote(num_cpus=0)
class Cache:
    def __init__(self, cache_dir_path: str, budget_bytes: int, config: dict[str, Any]) -> None: ...

    def has(self, tag: str) -> bool:
        return False

    def size_bytes(self) -> int:
        return 0

    def get_config(self) -> dict[str, Any]:
        return {}


def start_cache(size: float, cache_dir_path: str, units: str = "B", yaml_path: str | None = None, namespace: str | None = None) -> Any:
    options = {"name": _CACHE_ACTOR_NAME, "get_if_exists": True}
    return chia_actor(Cache.options(**options).remote(cache_dir_path, size, {}))


def stop_cache(namespace: str | None = None) -> None:
    found = get_active_cache(namespace)
    if found is not None:
        ray.kill(found.actor)


def get_active_cache(namespace: str | None = None) -> Any:
    try:
        return chia_actor(ray.get_actor(_CACHE_ACTOR_NAME))
    except ValueError:
        return None


def is_cached(func_name: str, tag: str | None = None) -> bool:
    found = get_active_cache()
    return found is not None and bool(ray.get(found.get_config.remote()).get(func_name))


def _load_cache_config(yaml_path: str) -> dict[str, Any]:
    return {}
