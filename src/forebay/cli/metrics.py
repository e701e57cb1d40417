"""The statistics of a cache in the text format of Prometheus, which the package prometheus-client writes."""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
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


class _Collector:
    """Yields the metrics of one root."""

    def __init__(self, path: Path, stats: Stats, metrics: Any) -> None:
        self._path, self._stats, self._metrics = str(path), stats, metrics

    def collect(self) -> Iterator[Any]:
        stats, metrics = self._stats, self._metrics
        for name, text in COUNTERS.items():
            yield self._one(metrics.CounterMetricFamily, name, text, getattr(stats, name))
        waits = metrics.CounterMetricFamily("forebay_wait_seconds", "Seconds spent waiting.", labels=("root", "cause"))
        for cause in ("remote", "lock", "space"):
            waits.add_metric((self._path, cause), getattr(stats, f"wait_ns_{cause}") / 1e9)
        yield waits
        for name, text in GAUGES.items():
            yield self._one(metrics.GaugeMetricFamily, name, text, getattr(stats, name))
        yield self._one(metrics.GaugeMetricFamily, "budget_bytes", "Bytes that all processes together may store.", stats.budget)
        for name, text, at in (("space_entries", "Entries of a space.", 0), ("space_bytes", "Bytes of a space.", 1)):
            family = metrics.GaugeMetricFamily(f"forebay_{name}", text, labels=("root", "space"))
            for space, usage in sorted(stats.spaces.items()):
                family.add_metric((self._path, space), usage[at])
            yield family

    def _one(self, family: Any, name: str, text: str, value: float) -> Any:
        metric = family(f"forebay_{name}", text, labels=("root",))
        metric.add_metric((self._path,), value)
        return metric


def _registry(path: Path, stats: Stats) -> tuple[Any, Any]:
    """The package prometheus-client, and a registry of it that has the metrics. Raises `MissingExtra`."""
    try:
        import prometheus_client
        from prometheus_client.core import CollectorRegistry
    except ImportError as error:
        raise MissingExtra.of("the format of Prometheus", "prometheus") from error
    from prometheus_client import metrics_core

    registry = CollectorRegistry()
    registry.register(_Collector(path, stats, metrics_core))
    return prometheus_client, registry


def as_text(path: Path, stats: Stats) -> str:
    """The metrics of the root at ``path``. Raises `MissingExtra`."""
    client, registry = _registry(path, stats)
    text: bytes = client.generate_latest(registry)
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
