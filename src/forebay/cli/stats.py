"""`forebay stats`."""

from __future__ import annotations

from typing import Annotated

from forebay._config import format_size
from forebay.cli.options import JsonOption, RootOption, opened, option
from forebay.cli.render import Output

TIMES = ("wait_ns_remote", "wait_ns_lock", "wait_ns_space")
SIZES = ("bytes_hit", "bytes_remote", "bytes_stored", "bytes_used", "bytes_reserved", "budget")


def stats(
    zero: Annotated[bool, option("--zero", "-z", help="Set the counters to zero after showing them.")] = False,
    root: RootOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show what all processes of the node did with this cache: hits, misses, bytes, waits, evictions."""
    with opened(root, change=zero) as cache:
        found = cache.stats()
        if zero:
            cache.reset_stats()
    output = Output(as_json)
    output.document(found.as_dict())
    facts = {name: _shown(name, value) for name, value in found.as_dict().items() if isinstance(value, (int, float))}
    facts["hit_rate"] = f"{found.hit_rate:.1%}"
    output.facts({name.replace("_ns_", " for ").replace("_", " "): value for name, value in facts.items()})


def _shown(name: str, value: float) -> str:
    if name in TIMES:
        return f"{value / 1e9:,.1f} s"
    return format_size(value) if name in SIZES else f"{value:,}"
