"""A flow as CHIA's users write it, with one line more: ``python chia_flow.py ADDRESS PLACE`` tells what it saw as JSON."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import ray
from chia.base.bypass import Bypass, get_active_bypass
from chia.base.cache import UNITS, get_active_cache, start_cache, stop_cache
from chia.base.ChiaFunction import ChiaFunction, get

from forebay.adapters import chia

chia.install()  # what is bound above is replaced, too

RULES = """
cache:
  square:
    cache: true
    tags: ["iter.*"]
  build: true
bypass:
  build: true
  square:
    bypass: true
    tags: ["iter.*"]
  text:
    bypass: true
    data: {data}
"""


@ChiaFunction()
def square(x: int, log: str) -> int:
    with open(log, "a") as file:
        file.write(f"{x}\n")
    return x * x


class Builder:
    @ChiaFunction()
    def build(self, x: int, log: str) -> int:
        with open(log, "a") as file:
            file.write(f"{x}\n")
        return 2 * x


@ChiaFunction()
def text() -> str:
    return "not bypassed"


@ChiaFunction()
def nested(x: int, log: str) -> Any:
    """Calls from a worker where nothing calls install()."""
    return get(square.chia_remote(x, log, _chia_tag=f"iter{x}"))


@ChiaFunction()
def with_a_bypass(rules: str, x: int, log: str) -> Any:
    """A worker that makes its own bypass."""
    bypass = Bypass(rules)
    bypass.set_provider("square", served)
    return get(square.chia_remote(x, log, _chia_tag=f"iter{x}"))


def served(tag: str, data_path: Any, *args: Any, **kwargs: Any) -> Any:
    hit, value = ray.get(get_active_cache().read.remote(tag))
    if not hit:
        raise KeyError(tag)
    return value


def is_kept(tag: str, data_path: Any, *args: Any, **kwargs: Any) -> bool:
    return bool(ray.get(get_active_cache().has.remote(tag)))


def main(address: str, place: Path) -> dict[str, Any]:
    rules, log, source = place / "flow.yaml", str(place / "log"), os.environ["PYTHONPATH"]
    (place / "data.txt").write_text("from a file")
    rules.write_text(RULES.format(data=place / "data.txt"))
    ray.init(address, log_to_driver=False, namespace="flow", runtime_env={"env_vars": {"PYTHONPATH": source}})
    seen: dict[str, Any] = {"ours": start_cache is chia.start_cache and Bypass is chia.Bypass and UNITS is chia.UNITS}
    start_cache(size=4, units="MB", cache_dir_path=str(place / "cache"), yaml_path=str(rules))
    try:
        seen["first"] = get(square.chia_remote(7, log, _chia_tag="iter7"))
        seen["nested"] = get(nested.chia_remote(8, log))
        seen["kept"] = ray.get(get_active_cache().keys.remote())
        builder = Builder()
        built = get(builder.build.chia_remote(builder, 5, log, _chia_tag="built"))
        bypass = Bypass(str(rules))
        assert get_active_bypass() is bypass
        kept = ray.get(get_active_cache().keys.remote())
        bypass.set_provider("build", served)
        bypass.set_provider("square", served)
        bypass.set_cond("square", is_kept)
        seen["again"] = [get(square.chia_remote(x, log, _chia_tag=f"iter{x}")) for x in (7, 8, 9)]
        seen["nested again"] = get(nested.chia_remote(8, log))
        seen["method"] = [built, kept, get(builder.build.chia_remote(builder, 5, log, _chia_tag="built"))]
        seen["text"] = get(text.chia_remote())
        Bypass()
        seen["by a worker"] = get(with_a_bypass.chia_remote(str(rules), 7, log))
        seen["runs"] = Path(log).read_text().split()
    finally:
        stop_cache()
    return seen


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], Path(sys.argv[2]))))
