"""Checkpoints that torch.distributed.checkpoint saved, served by nginx and loaded through the cache: in one process, and by two ranks."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from forebay import Cache, errors
from tests.servers.nginx import Nginx, nginx

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
dcp = pytest.importorskip("torch.distributed.checkpoint")

from torch.distributed.checkpoint.api import CheckpointException  # noqa: E402

from forebay.adapters.torch import CheckpointReader  # noqa: E402

ROWS, COLUMNS = 512, 256  # of float32: 512 KB
PAGE = next(folder for folder in Path(__file__).parents if (folder / "mkdocs.yml").exists()) / "docs/use/torch.md"

RANKS = """
import os, sys
import torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from forebay import Cache
from forebay.adapters.torch import CheckpointReader

store, folder, url, root = sys.argv[1:]
other = os.fork()  # neither rank imports all of this a second time
rank = 1 if other else 0
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))
whole = torch.arange(512 * 256, dtype=torch.float32).reshape(512, 256)
dcp.save({"model": {"w": distribute_tensor(whole, mesh, [Shard(0)])}, "step": 7}, checkpoint_id=folder)
state = {"model": {"w": distribute_tensor(torch.zeros(512, 256), mesh, [Shard(0)])}, "step": 0}
with Cache(f"{root}-{rank}", budget="500MB") as cache:  # as of two nodes
    dcp.load(state, storage_reader=CheckpointReader(url, cache=cache, block_size="64KB"))
assert torch.equal(state["model"]["w"].to_local(), whole[rank * 256 : rank * 256 + 256])
assert state["step"] == 7
dist.destroy_process_group()
if other:
    assert os.waitpid(other, 0)[1] == 0
"""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nginx]:
    """nginx, with a checkpoint below ``/step`` that two ranks saved, and then loaded."""
    folder = tmp_path_factory.mktemp("checkpoints")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FOREBAY_")} | {"FOREBAY_MIN_FREE": "0"}
    with nginx(folder / "nginx") as server:
        arguments = [str(folder / "store"), str(server.files / "step"), f"{server.url}/step", str(folder / "root")]
        ranks = subprocess.run([sys.executable, "-c", RANKS, *arguments], env=environment, capture_output=True, text=True, timeout=100)
        assert ranks.returncode == 0, ranks.stderr
        (folder / "nginx" / "by-ranks.log").write_text("\n".join(server.lines()))
        yield server


def whole() -> Any:
    return torch.arange(ROWS * COLUMNS, dtype=torch.float32).reshape(ROWS, COLUMNS)


def sent(lines: list[str]) -> dict[str, int]:
    """Bytes of bodies that were sent, by name."""
    sizes: dict[str, int] = {}
    for line in lines:
        name = line.split('"')[1].split()[1].rpartition("/")[2]
        sizes[name] = sizes.get(name, 0) + int(line.split('"')[2].split()[1])
    return sizes


class Sent:
    """What nginx has sent since this was made."""

    def __init__(self, served: Nginx) -> None:
        self._served, self._before = served, len(served.lines())

    def bodies(self) -> dict[str, int]:
        return sent(self._served.lines()[self._before :])


@pytest.mark.rotates
@pytest.mark.parametrize("fetch", ["blocks", "file"])
def test_one_process_loads_what_two_ranks_saved_and_again_without_a_request(served: Nginx, cache: Cache, fetch: Any) -> None:
    since = Sent(served)
    for run in ("first", "second"):
        state = {"model": {"w": torch.zeros(ROWS, COLUMNS)}, "step": 0}
        dcp.load(state, storage_reader=CheckpointReader(f"{served.url}/step", cache=cache, fetch=fetch), no_dist=True)
        assert torch.equal(state["model"]["w"], whole())
        assert state["step"] == 7
        stored = sum(path.stat().st_size for path in (served.files / "step").iterdir())
        assert sum(since.bodies().values()) == (stored if run == "first" else 0)
        since = Sent(served)


@pytest.mark.rotates
def test_a_plan_that_needs_one_small_tensor_fetches_its_blocks_alone(served: Nginx, cache: Cache, tmp_path: Path) -> None:
    state = {"big": whole(), "small": torch.arange(10)}
    dcp.save(state, checkpoint_id=str(served.files / "mixed"), no_dist=True)
    since = Sent(served)
    wanted = {"small": torch.zeros(10, dtype=torch.int64)}
    dcp.load(wanted, storage_reader=CheckpointReader(f"{served.url}/mixed", cache=cache, block_size="64KB"), no_dist=True)
    assert torch.equal(wanted["small"], torch.arange(10))
    assert sum(size for name, size in since.bodies().items() if name.endswith(".distcp")) <= 2 * 65536


def test_each_of_two_ranks_fetches_its_own_shard_alone(served: Nginx) -> None:
    files = {path.name: path.stat().st_size for path in (served.files / "step").glob("*.distcp")}
    bodies = sent(served.log.with_name("by-ranks.log").read_text().splitlines())
    bodies.pop(".metadata")
    assert set(bodies) == set(files) == {"__0_0.distcp", "__1_0.distcp"}
    in_common = 2 * 65536  # what both ranks need of the file of one of them
    assert sum(bodies.values()) <= sum(files.values()) + in_common


def test_a_state_of_another_shape_is_refused(served: Nginx, cache: Cache) -> None:
    with pytest.raises(CheckpointException, match="ize mismatch"):
        dcp.load({"model": {"w": torch.zeros(3, 3)}}, storage_reader=CheckpointReader(f"{served.url}/step", cache=cache), no_dist=True)


def test_a_missing_checkpoint_is_not_found(served: Nginx, cache: Cache) -> None:
    with pytest.raises(errors.NotFound, match="404"):
        CheckpointReader(f"{served.url}/none", cache=cache).read_metadata()


def test_another_way_to_fetch_is_refused(cache: Cache) -> None:
    with pytest.raises(errors.ConfigError, match="fetch"):
        CheckpointReader("http://host/step", cache=cache, fetch="all")  # type: ignore[arg-type]


def test_a_file_that_ends_too_early_is_reported(served: Nginx, cache: Cache) -> None:
    dcp.save({"w": whole()}, checkpoint_id=str(served.files / "cut"), no_dist=True)
    (path,) = (served.files / "cut").glob("*.distcp")
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(CheckpointException, match="too early"):
        dcp.load({"w": torch.zeros(ROWS, COLUMNS)}, storage_reader=CheckpointReader(f"{served.url}/cut", cache=cache), no_dist=True)


def test_extensions_of_a_checkpoint_are_refused(served: Nginx, cache: Cache) -> None:
    dcp.save({"w": whole()}, checkpoint_id=str(served.files / "packed"), no_dist=True)
    notes = served.files / "packed" / ".metadata"
    metadata = pickle.loads(notes.read_bytes())
    for place in metadata.storage_data.values():
        place.transform_descriptors = ["stream.zstd/1"]
    notes.write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointException, match="saved with extensions"):
        dcp.load({"w": torch.zeros(ROWS, COLUMNS)}, storage_reader=CheckpointReader(f"{served.url}/packed", cache=cache), no_dist=True)


def test_the_recipes_for_single_files_run(served: Nginx, cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    torch.save({"w": whole()}, served.files / "model.pt")
    safetensors.save_file({"w": whole()}, served.files / "model.safetensors")
    blocks = [block.removeprefix("python\n") for block in PAGE.read_text().split("```") if block.startswith("python")]
    for name in ("model.pt", "model.safetensors"):
        (snippet,) = [block for block in blocks if f"/{name}" in block]
        variables: dict[str, Any] = {"cache": cache}
        exec(snippet.replace("s3://bucket", served.url), variables)
        assert torch.equal(variables["state"]["w"], whole())
