"""Libraries that read through fsspec, behind the cache: each fetches an object once, and finds it there when it comes again."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

fsspec = pytest.importorskip("fsspec")
pytest.importorskip("fsspec.implementations.chained")
pytest.importorskip("aiohttp")
pd = pytest.importorskip("pandas")
pytest.importorskip("pyarrow")

import forebay  # noqa: E402
from tests.pages import run  # noqa: E402
from tests.servers.nginx import Nginx, nginx  # noqa: E402

ROWS = 50_000
DOCS = Path(__file__).parents[2] / "docs" / "use" / "fsspec.md"
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::PendingDeprecationWarning")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nginx]:
    with nginx(tmp_path_factory.mktemp("nginx")) as found:
        frame = pd.DataFrame({"price": range(ROWS), **{f"other{number}": range(ROWS) for number in range(9)}})
        frame.to_parquet(found.files / "table.parquet", compression=None)
        frame.to_parquet(found.files / "large.parquet", compression=None)
        frame.head(1000).to_csv(found.files / "table.csv", index=False)
        yield found


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[forebay.Cache]:
    """Not a test's own: libraries pickle filesystems, and keep what they unpickle."""
    with forebay.Cache(tmp_path_factory.mktemp("cache") / "root", budget="1GB", min_free=0) as cache:
        yield cache


@pytest.fixture
def options(cache: forebay.Cache) -> dict[str, Any]:
    return {"forebay": {"cache": cache}}


@pytest.fixture
def url(server: Nginx, request: pytest.FixtureRequest) -> Iterator[str]:
    """That of a table which is fetched once, however often it is read."""
    name = f"{request.node.name}.parquet"
    os.link(server.files / "table.parquet", server.files / name)
    yield f"forebay::{server.url}/{name}"
    assert server.gets(name) == {name: 1}


def test_pandas(server: Nginx, url: str, options: dict[str, Any]) -> None:
    for _ in range(2):
        assert pd.read_parquet(url, storage_options=options)["price"].sum() == sum(range(ROWS))
        assert len(pd.read_csv(f"forebay::{server.url}/table.csv", storage_options=options)) == 1000


def test_a_file_that_is_never_closed_warns_of_nothing(url: str, options: dict[str, Any], cache: forebay.Cache) -> None:
    """pyarrow closes none that it has asked for its schema."""
    gc.collect()  # what other tests left is not of this one
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        pd.read_parquet(url, storage_options=options)
        gc.collect()
    assert [str(warning.message) for warning in seen if warning.category is ResourceWarning] == []
    assert not any(entry.leased for entry in cache.entries())


def test_a_column_by_pandas_is_fetched_in_blocks(server: Nginx, options: dict[str, Any]) -> None:
    options["forebay"] |= {"fetch": "blocks", "block_size": 64_000}
    frame = pd.read_parquet(f"forebay::{server.url}/large.parquet", columns=["price"], storage_options=options)
    assert frame["price"].sum() == sum(range(ROWS))
    lines = [line for line in server.lines() if "GET /large.parquet" in line]
    sent = sum(int(line.rsplit('"', 1)[1].split()[1]) for line in lines)
    assert sent < (server.files / "large.parquet").stat().st_size / 3


def test_datasets_of_pyarrow(url: str, options: dict[str, Any]) -> None:
    ds = pytest.importorskip("pyarrow.dataset")
    arrow = pytest.importorskip("pyarrow.fs")
    fs, path = fsspec.url_to_fs(url, **options)
    for each in (fs, arrow.PyFileSystem(arrow.FSSpecHandler(fs))):
        assert ds.dataset(path, filesystem=each).to_table(columns=["price"]).num_rows == ROWS


def test_dask(url: str, options: dict[str, Any]) -> None:
    dd = pytest.importorskip("dask.dataframe")
    for _ in range(2):
        assert dd.read_parquet(url, storage_options=options)["price"].sum().compute(scheduler="sync") == sum(range(ROWS))


def test_duckdb(url: str, options: dict[str, Any]) -> None:
    duckdb = pytest.importorskip("duckdb")
    connection = duckdb.connect()
    connection.register_filesystem(fsspec.url_to_fs(url, **options)[0])
    for _ in range(2):
        assert connection.execute(f"SELECT sum(price) FROM read_parquet('{url}')").fetchone() == (sum(range(ROWS)),)
    connection.close()


def test_polars_reads_an_open_file(url: str, options: dict[str, Any]) -> None:
    polars = pytest.importorskip("polars")
    for _ in range(2):
        with fsspec.open(url, **options) as file:
            assert polars.read_parquet(file, columns=["price"])["price"].sum() == sum(range(ROWS))


def write_zarr(folder: Path) -> None:
    xarray, numpy = pytest.importorskip("xarray"), pytest.importorskip("numpy")
    pytest.importorskip("zarr")
    xarray.Dataset({"v": (("t", "x"), numpy.arange(200.0).reshape(10, 20))}).to_zarr(folder, zarr_format=2, consolidated=True)


@pytest.mark.keeps("the event loop of zarr, and its threads")
def test_xarray_and_zarr(server: Nginx, options: dict[str, Any]) -> None:
    write_zarr(server.files / "array.zarr")
    xarray, zarr = pytest.importorskip("xarray"), pytest.importorskip("zarr")
    chained = f"forebay::{server.url}/array.zarr"
    store = zarr.storage.FsspecStore.from_url(chained, storage_options=options, read_only=True)
    for given, more in ((chained, {"storage_options": options}), (store, {})):
        assert float(xarray.open_zarr(given, zarr_format=2, **more)["v"].sum()) == sum(range(200))
    assert server.gets("0.0") == {"0.0": 1}


def test_datasets_of_hugging_face(options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    datasets = pytest.importorskip("datasets")
    chained = f"forebay::file://{tmp_path}/saved"
    datasets.Dataset.from_dict({"a": [1, 2, 3]}).save_to_disk(chained, storage_options=options)
    assert datasets.load_from_disk(chained, storage_options=options)["a"][:] == [1, 2, 3]


def test_load_dataset_reads_through_the_default_cache(server: Nginx, tmp_path: Path) -> None:
    """Twice, and the second time without the copy that `datasets` keeps of its own."""
    pytest.importorskip("datasets")
    os.link(server.files / "table.csv", server.files / "rows.csv")
    program = f"""
import datasets, forebay
rows = datasets.load_dataset("csv", data_files="forebay::{server.url}/rows.csv", split="train")
print(len(rows), rows[7]["price"], *(entry.key for entry in forebay.Cache().entries()))
"""
    for home in ("first", "second"):
        told = run(program, tmp_path, HF_HOME=str(tmp_path / home), FOREBAY_BUDGET="1GB", HF_HUB_DISABLE_PROGRESS_BARS="1")
        assert told.split() == ["1000", "7", f"{server.url}/rows.csv"]
    assert server.gets("rows") == {"rows.csv": 1}


@pytest.mark.rotates
def test_the_snippets_of_the_page_run(server: Nginx, tmp_path: Path) -> None:
    for package in ("dask.dataframe", "duckdb", "polars", "s3fs"):
        pytest.importorskip(package)
    if not (server.files / "weather.zarr").exists():
        write_zarr(server.files / "weather.zarr")
    blocks = re.findall(r"^```python\n(.*?)^```$", DOCS.read_text(), re.DOTALL | re.MULTILINE)
    program = "\n".join([*blocks, f"assert (len(frame), count, table.num_rows) == ({ROWS}, ({ROWS},), {ROWS}) and len(rows) == {ROWS}"])
    program = program.replace("https://host", server.url).replace("/nvme/forebay", str(tmp_path / "root"))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FOREBAY_")}
    command = [sys.executable, "-c", program.replace('"500GB"', '"1GB", "min_free": 0')]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stderr) == (0, "")
