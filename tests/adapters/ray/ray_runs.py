"""A training of two workers that fails once and goes on, in a process of its own with a small Ray: ``ray_runs.py JSON``. Says what it saw.

What it is told: names of runs (``tune``: of a `Tuner` instead), each with its ``storage``, a path of this host or of a counting
filesystem (``shelf``: where that is) or of an S3 server (``s3``: its address and keys); ``root``: of the cache; ``log``: a directory.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import ray
import ray.train
from pyarrow.fs import FSSpecHandler, PyFileSystem
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

import forebay
from forebay.adapters import ray as ours

STEPS, FAILS_AT = 4, 2
SIZE = 3 << 20


def weights(step: int) -> bytes:
    return random.Random(step).randbytes(SIZE)


def save(step: int, rank: int) -> None:
    """Of all workers one has a checkpoint to report: one of ours."""
    if rank:
        ours.report({"step": step})
        return
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "deep").mkdir()
        (Path(folder) / "deep" / "weights.bin").write_bytes(weights(step))
        (Path(folder) / "step.json").write_text(json.dumps(step))
        ours.report({"step": step}, forebay.Checkpoint.from_directory(folder))


def load(checkpoint: ours.RayCheckpoint) -> dict[str, Any]:
    with checkpoint.as_directory() as folder:
        step = json.loads((Path(folder) / "step.json").read_text())
        found = Path(folder) / "deep" / "weights.bin"
        assert found.read_bytes() == weights(step)
        return {"step": step, "folder": folder, "inode": found.stat().st_ino, "isinstance": isinstance(checkpoint, ray.train.Checkpoint)}


def train(config: dict[str, Any]) -> None:
    rank, log = ray.train.get_context().get_world_rank(), Path(config["log"])
    with forebay.Cache(config["root"], budget="256MiB", min_free=0) as cache:
        checkpoint = ours.get_checkpoint(cache)
        first = 0
        if checkpoint is not None:
            seen = load(checkpoint) | {"writable": checkpoint.to_directory()}
            again = ours.get_checkpoint(cache)
            seen["same"] = again is not None and again == checkpoint and again.to_directory() == seen["writable"]
            (log / f"resumed-{rank}").write_text(json.dumps(seen))
            first = seen["step"] + 1
        for step in range(first, STEPS):
            if step == FAILS_AT and checkpoint is None:
                raise RuntimeError("as was agreed")
            save(step, rank)


def tune(config: dict[str, Any]) -> None:
    """A function of a `Tuner`, which fails once."""
    with forebay.Cache(config["root"], budget="256MiB", min_free=0) as cache:
        checkpoint = ours.get_checkpoint(cache)
        first = 0 if checkpoint is None else load(checkpoint)["step"] + 1
        for step in range(first, STEPS):
            if step == FAILS_AT and checkpoint is None:
                raise RuntimeError("as was agreed")
            save(step, 0)


def run_tuner(name: str, told: dict[str, Any]) -> dict[str, Any]:
    import ray.tune

    where = ray.tune.RunConfig(
        name=name, storage_path=told["storage"], storage_filesystem=filesystem_of(told),
        failure_config=ray.tune.FailureConfig(max_failures=1),
    )  # fmt: skip
    tuner = ray.tune.Tuner(ray.tune.with_resources(tune, {"cpu": 0.3}), param_space={"root": told["root"]}, run_config=where)
    (result,) = tuner.fit()
    with forebay.Cache(told["root"]) as cache:
        return {"last": load(ours.to_ray(ours.from_ray(result.checkpoint, cache))), "metrics": result.metrics}


def filesystem_of(told: dict[str, Any]) -> Any:
    if "shelf" in told:
        from tests.servers.counting import Shelf

        return Shelf(told["shelf"]).arrow()
    if "s3" in told:
        import s3fs

        return PyFileSystem(FSSpecHandler(s3fs.S3FileSystem(**told["s3"])))
    return None


def run(name: str, told: dict[str, Any]) -> dict[str, Any]:
    filesystem = filesystem_of(told)
    log = Path(told["log"])
    log.mkdir()
    where = RunConfig(name=name, storage_path=told["storage"], storage_filesystem=filesystem, failure_config=FailureConfig(max_failures=1))
    scaling = ScalingConfig(num_workers=2, resources_per_worker={"CPU": 0.3})
    loop = {"root": told["root"], "log": told["log"]}
    result = DataParallelTrainer(train, train_loop_config=loop, scaling_config=scaling, run_config=where).fit()
    with forebay.Cache(told["root"]) as cache:
        found = ours.from_ray(result.checkpoint, cache)
        found.update_metadata({"by": "forebay"})
        metadata = result.checkpoint.get_metadata()
        last = load(ours.to_ray(found))
        return {
            "last": last, "metrics": result.metrics, "metadata": metadata, "path": result.checkpoint.path,
            "resumed": [json.loads(path.read_text()) for path in sorted(log.glob("resumed-*"))],
        }  # fmt: skip


def main() -> None:
    told = json.loads(sys.argv[1])
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as place:
        small: dict[str, Any] = {"num_cpus": 2, "include_dashboard": False, "object_store_memory": 100 << 20}
        ray.init(address="local", **small, log_to_driver=False, configure_logging=False, _temp_dir=place)
        try:
            found = {name: (run_tuner if name == "tune" else run)(name, each) for name, each in told.items()}
        finally:
            ray.shutdown()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
