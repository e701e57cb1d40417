"""Statistics in the format of Prometheus, as its own parser reads them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from forebay import Cache
from forebay.cli.listing import COUNTERS, GAUGES, file_name

from .conftest import Run


@pytest.fixture
def filled(cache: Cache) -> Cache:
    pytest.importorskip("prometheus_client")
    cache.put("key", b"value")
    for name in ("key", "key", "other"):
        cache.get(name)
    cache.space("features").put("a", bytes(20_000))
    return cache


def parsed(text: str) -> dict[tuple[str, str], float]:
    """The values, by the name of the metric and the labels besides the root."""
    from prometheus_client.parser import text_string_to_metric_families

    values = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = "".join(value for name, value in sample.labels.items() if name != "root")
            values[sample.name, labels] = sample.value
    return values


def test_the_values_are_those_of_the_statistics(run: Run, filled: Cache) -> None:
    ran = run("stats", "--format", "prometheus")
    values, stats = parsed(ran.out), filled.stats()
    assert ran.code == 0
    for name in COUNTERS:
        assert values[f"forebay_{name}_total", ""] == getattr(stats, name), name
    for name in GAUGES:
        assert values[f"forebay_{name}", ""] == getattr(stats, name), name
    assert values["forebay_hits_total", ""] == 2
    assert values["forebay_budget_bytes", ""] == 50_000_000
    assert values["forebay_space_entries", "features"] == 1
    assert values["forebay_space_bytes", "features"] == 20_000
    assert {cause for name, cause in values if name == "forebay_wait_seconds_total"} == {"remote", "lock", "space"}
    assert f'root="{filled.path}"' in ran.out


def test_a_file_for_node_exporter_is_replaced_as_a_whole(run: Run, filled: Cache, tmp_path: Path) -> None:
    folder = tmp_path / "textfile"
    folder.mkdir()
    file = folder / file_name(filled.path)
    assert (ran := run("stats", "--textfile", folder)).code == 0
    assert (ran.out, ran.err, os.listdir(folder)) == ("", "", [file.name])
    assert parsed(file.read_text())["forebay_hits_total", ""] == 2
    filled.get("key")
    with open(file) as before:
        assert run("stats", "--textfile", folder).code == 0
        assert os.fstat(before.fileno()).st_nlink == 0  # another file has its name
    assert parsed(file.read_text())["forebay_hits_total", ""] == 3
    assert os.listdir(folder) == [file.name]
    ran = run("stats", "--textfile", folder, "--json")
    assert ran.json["hits"] == 3


def test_each_root_has_a_file_of_its_own() -> None:
    paths = [Path("/scratch/forebay"), Path("/scratch-forebay"), Path("/scratch/for ebay"), Path("/" + "x" * 300), Path("/" + "x" * 301)]
    names = [file_name(path) for path in paths]
    assert names[0] == "forebay-scratch-forebay.prom"
    assert len(set(names)) == len(names)
    assert max(map(len, names)) < 200


def test_a_directory_that_is_missing_or_a_contradiction_is_an_error_in_two_lines(run: Run, filled: Cache, tmp_path: Path) -> None:
    ran = run("stats", "--textfile", tmp_path / "none")
    assert (ran.code, "is no directory" in ran.err) == (2, True)
    ran = run("stats", "--json", "--format", "prometheus")
    assert (ran.code, "exclude each other" in ran.err) == (2, True)


def test_where_the_package_is_missing_the_error_says_what_to_install(run: Run, cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    ran = run("stats", "--format", "prometheus")
    assert (ran.code, ran.out) == (1, "")
    assert "pip install prometheus-client" in ran.err
