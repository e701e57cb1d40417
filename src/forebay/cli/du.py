"""`forebay du`."""

from __future__ import annotations

import os

from forebay.cli.options import JsonOption, RootOption, opened
from forebay.cli.render import Output


def du(root: RootOption = None, as_json: JsonOption = False) -> None:
    """Show how many bytes each space holds, and how much of the budget and the disk is left."""
    with opened(root) as cache:
        stats, path, overhead, strays = cache.stats(), cache.path, cache.overhead(), cache.strays()
    disk = os.statvfs(path)
    free = disk.f_bavail * disk.f_frsize
    output = Output(as_json)
    output.document({
        "path": path,
        "budget": stats.budget,
        "used": stats.bytes_used,
        "reserved": stats.bytes_reserved,
        "overhead": overhead,
        "disk_free": free,
        "strays": strays,
        "spaces": {name: {"entries": count, "bytes": size} for name, (count, size) in stats.spaces.items()},
    })  # fmt: skip
    output.usage(stats, free, overhead)
    output.strays(strays, "`forebay prune` removes them")
