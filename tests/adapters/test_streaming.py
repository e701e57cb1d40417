"""Streaming on claims: real data sets of small shards, jobs that are killed, and jobs with Streaming as it is beside them."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.adapters.conftest import load_streaming
from tests.adapters.streaming_runs import SAMPLES, Job, Node, Say, make_shards, own_node

load_streaming()

from torch.utils.data import DataLoader  # noqa: E402

from forebay.adapters import streaming  # noqa: E402


@pytest.fixture(scope="module")
def remote(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("remote") / "shards"
    make_shards(directory)
    return directory


@pytest.fixture(autouse=True)
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    with own_node(tmp_path, monkeypatch) as found:
        yield found


def data_set(remote: Path | None, local: Path) -> Any:
    from streaming import StreamingDataset

    return StreamingDataset(remote=None if remote is None else str(remote), local=str(local), shuffle=True, batch_size=4)


def epochs(say: Say, remote: Path, local: Path, *, count: int = 2, workers: int = 2, method: str = "fork", hang: bool = False) -> None:
    """A job: says its number, and which samples it saw in each epoch; then it stops in the middle of one, or ends."""
    streaming.install()
    data = data_set(remote, local)
    say(data._shm_prefix_int)
    loader = DataLoader(data, batch_size=4, num_workers=workers, multiprocessing_context=method if workers else None)
    for _ in range(count):
        say(sorted(itertools.chain.from_iterable(batch["number"].tolist() for batch in loader)))
    if hang:
        batches = iter(loader)
        next(batches)
        say("in the middle")
        signal.pause()


ALL = list(range(SAMPLES))


@pytest.mark.parametrize(("method", "count"), [("fork", 2), ("spawn", 1)])
def test_epochs_with_two_workers(remote: Path, tmp_path: Path, node: Node, method: str, count: int) -> None:
    with Job(lambda say: epochs(say, remote, tmp_path / "local", count=count, method=method)) as job:
        prefix = job.said()
        assert [job.said() for _ in range(count + 1)] == [*[ALL] * count, None]
        assert job.wait() == 0
    assert (node.claims(), node.things(prefix)) == ([], [])


def test_a_killed_job_blocks_nothing(remote: Path, tmp_path: Path, node: Node) -> None:
    """Killed whole and started again at once with the same directory, again and again: it goes on, and nothing grows."""
    left = set()
    for _ in range(20):
        with Job(lambda say: epochs(say, remote, tmp_path / "local", count=1, hang=True)) as job:
            prefix = job.said()
            assert job.said() == ALL
            assert job.said() == "in the middle"
            job.kill()
        left.add((prefix, len(node.claims()), *node.things(prefix)))
    assert len(left) == 1
    with Job(lambda say: epochs(say, remote, tmp_path / "local", count=0, workers=0)) as job:
        assert job.said() == prefix
        assert job.wait() == 0
    assert (node.claims(), node.things(prefix)) == ([], [])
