"""The statistics of a cache in the text format of Prometheus, which the package prometheus-client writes."""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from forebay.cli.streams import write_whole
from forebay.errors import ConfigError, MissingExtra
from forebay.reports import Stats

COUNTERS = {
    "hits": "Calls served from the cache.",
    "misses": "Calls that fetched from a remote.",
    "fills": "Objects that were stored.",
    "evictions": "Entries that were removed.",
    "fallbacks": "Calls that were served without the cache.",
    "waits": "Waits for another process.",
    "bytes_hit": "Bytes served by hits.",
    "bytes_remote": "Bytes received over the network.",
    "bytes_stored": "Bytes stored.",
    "requests": "Requests to remotes.",
    "retries": "Requests that were repeated.",
    "store_failures": "Values that could not be stored.",
    "damaged": "Damaged entries that were set aside.",
}
GAUGES = {
    "bytes_used": "Bytes on the disk that count against the budget.",
    "bytes_reserved": "Bytes reserved by writes in progress.",
    "entries": "Entries.",
}
_LONGEST = 120  # characters of the part of a file's name that tells the root


def as_text(path: Path, stats: Stats) -> str:
    """The metrics of the root at ``path``. Raises `MissingExtra`."""
    try:
        from prometheus_client import generate_latest
        from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily
    except ImportError as error:
        raise MissingExtra.of("the format of Prometheus", "prometheus") from error

    def family(kind: Any, name: str, text: str, values: Mapping[str, float], *labels: str) -> Any:
        metric = kind(f"forebay_{name}", text, labels=("root", *labels))
        for label, value in values.items():
            metric.add_metric((str(path), label)[: 1 + len(labels)], value)
        return metric

    waits = {cause: getattr(stats, f"wait_ns_{cause}") / 1e9 for cause in ("remote", "lock", "space")}
    entries, sizes = ({space: usage[at] for space, usage in sorted(stats.spaces.items())} for at in (0, 1))
    families = [
        *(family(CounterMetricFamily, name, text, {"": getattr(stats, name)}) for name, text in COUNTERS.items()),
        family(CounterMetricFamily, "wait_seconds", "Seconds spent waiting.", waits, "cause"),
        *(family(GaugeMetricFamily, name, text, {"": getattr(stats, name)}) for name, text in GAUGES.items()),
        family(GaugeMetricFamily, "budget_bytes", "Bytes that all processes together may store.", {"": stats.budget}),
        family(GaugeMetricFamily, "space_entries", "Entries of a space.", entries, "space"),
        family(GaugeMetricFamily, "space_bytes", "Bytes of a space.", sizes, "space"),
    ]
    registry: Any = SimpleNamespace(collect=lambda: families)
    text: bytes = generate_latest(registry)
    return text.decode()


def file_name(path: Path) -> str:
    """The name of the file for the collector of node_exporter; each root has its own."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", str(path)).strip("-") or "root"
    if not re.fullmatch(r"[A-Za-z0-9._/]+", str(path)) or len(name) > _LONGEST:  # another root could have the same name
        name = f"{name[-_LONGEST:]}-{zlib.crc32(os.fsencode(path)):08x}"
    return f"forebay-{name}.prom"


def write_textfile(directory: Path, path: Path, stats: Stats) -> Path:
    """Write the metrics to a file in ``directory``, which is replaced as a whole. Raises `MissingExtra`, `ConfigError`, `OutputFailed`."""
    if not directory.is_dir():
        raise ConfigError(f"{directory} is no directory", name="--textfile", value=str(directory))
    file = directory / file_name(path)
    write_whole(file, as_text(path, stats).encode())
    return file
