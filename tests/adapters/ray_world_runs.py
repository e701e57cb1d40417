"""Two trainings of Ray Train, each of two workers, which tell their worlds and jobs; and what the driver and another actor say.

``ray_world_runs.py PLACE``, a process of its own with a small Ray. Prints JSON. One training has a claim, and is started again after
a worker was killed: what it saw lies in PLACE.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch.distributed as dist
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
from torch.utils.data import DataLoader, Dataset

from tests.claims.launched import told

SCALING = ScalingConfig(num_workers=2, resources_per_worker={"CPU": 0.3})


class Asking(Dataset[str]):
    """Each item is what a worker has to tell."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, i: int) -> str:
        return json.dumps(told())


def train(config: dict[str, Any]) -> None:
    from tests.adapters import claims_runs  # not as the main program has it: its spawned workers must find the data set

    if config["claims"]:
        claims_runs.train(Path(config["claims"]))
    found = {**told(), "workers": [json.loads(item) for item in DataLoader(Asking(), num_workers=1, batch_size=None)]}
    found["torch"] = dist.is_initialized()
    (Path(config["place"]) / f"{ray.train.get_context().get_world_rank()}.json").write_text(json.dumps(found))


@ray.remote(num_cpus=0.3)
class Other:
    """Has Ray Train loaded, and is not of a training."""

    def told(self) -> dict[str, Any]:
        import ray.train

        return {**told(), "loaded": ray.train.__name__ in sys.modules}


def run(trainer: type[Any], name: str, claims: str = "") -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as place:
        where = RunConfig(name=name, storage_path=place, failure_config=FailureConfig(max_failures=1 if claims else 0))
        trainer(train, train_loop_config={"place": place, "claims": claims}, scaling_config=SCALING, run_config=where).fit()
        return [json.loads(path.read_text()) for path in sorted(Path(place).glob("*.json"))]


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as place:
        small: dict[str, Any] = {"num_cpus": 2, "include_dashboard": False, "object_store_memory": 100 << 20}
        print(place, flush=True)  # where the logs are, if this does not end
        ray.init(address="local", **small, log_to_driver=False, _temp_dir=place)
        try:
            found = {
                "plain": run(DataParallelTrainer, "plain", sys.argv[1]), "torch": run(TorchTrainer, "torch"), "driver": told(),
                "other": ray.get(Other.remote().told.remote()),
            }  # fmt: skip
        finally:
            ray.shutdown()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
