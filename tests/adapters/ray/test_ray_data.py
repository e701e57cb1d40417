"""The recipes for Ray Data: tasks read objects through the cache of their node; readers get files of it."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from forebay.testing import ScriptedServer
from tests.adapters.test_loaders import COUNT, recipe
from tests.pages import run

BEGIN = """
import os, ray
node = {{"num_cpus": 1, "include_dashboard": False, "object_store_memory": 100 << 20, "_temp_dir": {place!r}}}
ray.init(address="local", log_to_driver=False, logging_level="ERROR", **node)
os.environ["TQDM_DISABLE"] = "1"
"""


@pytest.mark.rotates
def test_objects_and_files_of_ray_data_are_fetched_once(server: ScriptedServer, tmp_path: Path) -> None:
    pytest.importorskip("ray.data")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pytest.importorskip("pyarrow").table({"x": [1, 2]})
    urls = [server.put(f"/{number}.bin", b"%d" % number) for number in range(COUNT)]
    tables = []
    for number in range(2):
        parquet.write_table(table, tmp_path / "table")
        tables.append(server.put(f"/{number}.parquet", (tmp_path / "table").read_bytes()))
    has_protocol = "forebay" in pytest.importorskip("fsspec").available_protocols()
    which = (0, 1, 2) if has_protocol else (0, 1)
    program = (
        recipe("Ray Data", *which)
        .replace('target_protocol="s3"', 'target_protocol="http"')
        .replace('"cache"', repr(str(tmp_path / "cache")))
    )
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as place:  # the paths of sockets are short
        shown = run(f"{BEGIN.format(place=place)}urls, tables = {urls}, {tables}\n{program}", tmp_path)
    assert shown == f"{sorted([str(b'%d' % number) for number in range(COUNT)] + ['1', '1', '2', '2'] * (len(which) - 1))}\n"
    assert server.gets == COUNT + len(tables)
