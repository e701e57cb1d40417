"""Streaming on claims: real data sets of small shards, jobs that are killed, and jobs with Streaming as it is beside them."""

from __future__ import annotations

import gc
import importlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.adapters.conftest import load_streaming
from tests.adapters.streaming.streaming_runs import SAMPLES, Job, Node, Say, make_shards, own_node
from tests.items import until
from tests.servers.ports import free_port

load_streaming()

from torch.utils.data import DataLoader  # noqa: E402

from forebay.adapters import streaming  # noqa: E402
from forebay.adapters.streaming import names as names  # noqa: E402


@pytest.fixture(scope="module")
def remote(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("remote") / "shards"
    make_shards(directory)
    return directory


@pytest.fixture(autouse=True)
def node(monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    with own_node(monkeypatch) as found:
        yield found


def data_set(remote: Path | None, local: Path) -> Any:
    from streaming import StreamingDataset

    return StreamingDataset(remote=None if remote is None else str(remote), local=str(local), shuffle=True, batch_size=4)


def test_streamings_modules_keep_their_names() -> None:
    """Programs import them, and tests patch them."""
    modules = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "streaming"}
    before = {name: dict(vars(module)) for name, module in modules.items()}
    streaming.install()
    try:
        for name, names_of_it in before.items():
            assert names_of_it.keys() <= set(dir(sys.modules[name])), name
        from streaming.base.shared.barrier import TICK, TIMEOUT, FileLock
        from streaming.base.shared.memory import BuiltinSharedMemory, SharedMemory, resource_tracker

        assert (TICK, TIMEOUT) == (0.007, 60)
        assert (FileLock.__module__.partition(".")[0], BuiltinSharedMemory.__name__) == ("filelock", "SharedMemory")
        assert SharedMemory is streaming.SharedMemory
        theirs = before["streaming.base.shared.memory"]["SharedMemory"]
        assert {name for name in dir(theirs) if not name.startswith("_")} <= set(dir(SharedMemory))
        seen: list[tuple[str, str]] = []
        made = SharedMemory("test_of_names", True, 8)
        with pytest.MonkeyPatch.context() as patch:
            for call in ("register", "unregister"):
                patch.setattr(resource_tracker._resource_tracker, call, lambda name, kind: seen.append((name, kind)))
            made.fix_register("/a", "shared_memory")
            made.fix_unregister("/a", "shared_memory")
            made.fix_register("/b", "semaphore")
            made.fix_unregister("/b", "semaphore")
        assert seen == [("/b", "semaphore")] * 2
        made.cleanup()
    finally:
        streaming.uninstall()
    assert {name: dict(vars(sys.modules[name])) for name in before} == before


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


@pytest.mark.rotates
@pytest.mark.parametrize(("method", "count", "workers"), [("fork", 2, 2), ("spawn", 1, 1)])  # who is spawned loads torch: 5 s each
def test_epochs_with_workers(remote: Path, tmp_path: Path, node: Node, method: str, count: int, workers: int) -> None:
    with Job(lambda say: epochs(say, remote, tmp_path / "local", count=count, workers=workers, method=method)) as job:
        prefix = job.said()
        assert [job.said() for _ in range(count + 1)] == [*[ALL] * count, None]
        assert job.wait() == 0
    assert (node.claims(), node.things(prefix)) == ([], [])


@pytest.mark.rotates
@pytest.mark.parametrize("times", [5, pytest.param(20, marks=pytest.mark.stress)])
def test_a_killed_job_blocks_nothing(remote: Path, tmp_path: Path, node: Node, times: int) -> None:
    """Killed whole and started again at once with the same directory, again and again: it goes on, and nothing grows."""
    left = set()
    for _ in range(times):
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


# -- jobs beside each other --------------------------------------------------------------------------------------------


def plain(say: Say, remote: Path, local: Path) -> None:
    """A job with Streaming as it is."""
    try:
        data = data_set(remote, local)
    except ValueError as error:
        say(str(error))
        return
    say(data._shm_prefix_int)
    say(sorted(sample["number"] for sample in data))
    signal.pause()


def patched(say: Say, remote: Path, local: Path) -> None:
    streaming.install()
    plain(say, remote, local)


def patched_at_rest(say: Say, remote: Path, local: Path) -> None:
    streaming.install()
    data = data_set(remote, local)
    say(data._shm_prefix_int)
    signal.pause()


WORDS = re.compile(r"Reused local directory: \['.*/one/?'\] vs \['.*/one/?'\]. Provide a different one.")


@pytest.mark.parametrize(("first", "second"), [(plain, patched), (patched, plain)])
def test_jobs_with_directories_of_their_own(remote: Path, tmp_path: Path, first: Any, second: Any) -> None:
    """One after the other: Streaming as it is looks for a free number and takes it later, so it fails where another takes it in between."""
    with Job(lambda say: first(say, remote, tmp_path / "one")) as one:
        number = one.said()
        with Job(lambda say: second(say, remote, tmp_path / "two")) as two:
            assert two.said() != number
            assert [one.said(), two.said()] == [ALL, ALL]


def test_jobs_that_start_at_once(remote: Path, tmp_path: Path) -> None:
    with Job(lambda say: patched(say, remote, tmp_path / "one")) as one, Job(lambda say: patched(say, remote, tmp_path / "two")) as two:
        assert one.said() != two.said()
        assert [one.said(), two.said()] == [ALL, ALL]


@pytest.mark.parametrize("first", [plain, patched])
def test_a_directory_that_another_job_has(remote: Path, tmp_path: Path, node: Node, first: Any) -> None:
    """Whichever has Forebay; and only as long as it lives."""
    with Job(lambda say: first(say, remote, tmp_path / "one")) as one:
        one.said()
        assert one.said() == ALL
        with Job(lambda say: patched(say, remote, tmp_path / "one")) as other:
            assert WORDS.search(other.said())
    with Job(lambda say: patched(say, remote, tmp_path / "one")) as again:
        prefix = again.said()
        assert again.said() == ALL
    streaming.clean_stale_shared_memory()
    assert (node.claims(), node.things(prefix)) == ([], [])


def test_streaming_as_it_is_sees_whose_a_directory_is(remote: Path, tmp_path: Path, node: Node) -> None:
    """As far as it looks: no further than the first number that is free, and not where there is a lock file."""
    with Job(lambda say: patched_at_rest(say, remote, tmp_path / "one")) as one:
        prefix = one.said()
        if not all(names.name_of(number, names.LOCALS) in node.things(number) for number in range(prefix)):
            pytest.skip("a number below is free")
        with Job(lambda say: plain(say, remote, tmp_path / "one")) as other:
            assert WORDS.search(other.said())


@pytest.mark.rotates
def test_a_main_process_that_is_killed_alone(remote: Path, tmp_path: Path, node: Node) -> None:
    """Its workers notice after some seconds: until they are gone, who starts again waits."""
    with Job(lambda say: epochs(say, remote, tmp_path / "local", count=1, hang=True)) as job:
        assert [job.said(), job.said(), job.said()][1:] == [ALL, "in the middle"]
        os.kill(job.pid, signal.SIGKILL)
        with Job(lambda say: epochs(say, remote, tmp_path / "local", count=1)) as again:
            prefix = again.said()
            assert again.said() == ALL
            assert again.wait() == 0
    assert (node.claims(), node.things(prefix)) == ([], [])


def lose_a_worker(say: Say, remote: Path, local: Path) -> None:
    from streaming.base.dataset import _ShardState

    streaming.install()
    data = data_set(remote, local)
    batches = iter(DataLoader(data, batch_size=4, num_workers=2))
    next(batches)
    # A worker that dies while it fetches a shard leaves it "being fetched", as with Streaming alone: the next epoch would wait for it.
    until(lambda: set(data._shard_states.numpy().tolist()) == {int(_ShardState.LOCAL)}, "all shards")
    try:
        os.kill(batches._workers[1].pid, signal.SIGKILL)
        time.sleep(60)  # until its handler of SIGCHLD raises. To take what the dead one sent may raise an OSError instead
    except RuntimeError as error:
        say(str(error))
    del batches
    say(sorted(itertools.chain.from_iterable(batch["number"].tolist() for batch in DataLoader(data, batch_size=4, num_workers=2))))


def test_a_worker_that_is_killed(remote: Path, tmp_path: Path) -> None:
    """PyTorch tells the main process, which may begin another epoch with other workers."""
    with Job(lambda say: lose_a_worker(say, remote, tmp_path / "local")) as job:
        assert job.said().startswith("DataLoader worker")
        assert job.said() == ALL


def two_sets(say: Say, remote: Path, place: Path) -> None:
    """To train and to evaluate; when one is deleted its directory is free at once."""
    streaming.install()
    train, evaluate = data_set(remote, place / "train"), data_set(remote, place / "eval")
    say([train._shm_prefix_int != evaluate._shm_prefix_int, [sample["number"] for sample in evaluate] != []])
    prefix = train._shm_prefix_int
    del train
    gc.collect()
    train = data_set(remote, place / "train")
    say(train._shm_prefix_int == prefix)
    say(sorted(sample["number"] for sample in train))


def test_two_data_sets_of_a_job(remote: Path, tmp_path: Path, node: Node) -> None:
    with Job(lambda say: two_sets(say, remote, tmp_path)) as job:
        assert [job.said(), job.said(), job.said(), job.said()] == [[True, True], True, ALL, None]
    assert node.claims() == []


# -- ranks -------------------------------------------------------------------------------------------------------------

RANK = """
import itertools, json, os, sys
from forebay.adapters import streaming
streaming.install()
from streaming import StreamingDataset
from torch.utils.data import DataLoader
remote, local, out = sys.argv[1:]
data = StreamingDataset(remote=remote, local=local, shuffle=True, batch_size=4)
loader = DataLoader(data, batch_size=4, num_workers=2)
seen = [list(itertools.chain.from_iterable(batch["number"].tolist() for batch in loader)) for epoch in range(2)]
with open(out + "/rank" + os.environ["RANK"], "w") as file:
    json.dump([data._shm_prefix_int, *seen], file)
"""


@pytest.mark.stress
def test_torchrun_with_two_ranks(remote: Path, tmp_path: Path, node: Node) -> None:
    (tmp_path / "rank.py").write_text(RANK)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, tmp_path / "rank.py", remote, tmp_path / "local", tmp_path], capture_output=True, text=True, timeout=200, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    ranks = [json.loads((tmp_path / f"rank{rank}").read_text()) for rank in range(2)]
    assert ranks[0][0] == ranks[1][0]
    for epoch in (1, 2):
        assert sorted(set(ranks[0][epoch] + ranks[1][epoch])) == ALL
    assert (node.claims(), node.things(ranks[0][0])) == ([], [])


def become_rank(number: int, port: int) -> None:
    """What torchrun tells the second of two ranks, or the first."""
    told = {"RANK": number, "WORLD_SIZE": 2, "LOCAL_RANK": number, "LOCAL_WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in told.items()}, TORCHELASTIC_RUN_ID="none", GROUP_RANK="0")


def two_epochs(say: Say, remote: Path, local: Path, number: int, port: int) -> None:
    become_rank(number, port)
    epochs(say, remote, local)


def test_two_ranks_with_two_workers_each(remote: Path, tmp_path: Path, node: Node) -> None:
    port = free_port()
    ranks = [Job(lambda say, n=n: two_epochs(say, remote, tmp_path / "local", n, port)) for n in range(2)]
    with ranks[0], ranks[1]:
        prefixes, *both = [[rank.said() for rank in ranks] for _ in range(3)]
        assert prefixes[0] == prefixes[1]
        for epoch in both:
            assert sorted(set(epoch[0] + epoch[1])) == ALL
        assert [rank.wait() for rank in ranks] == [0, 0]
    assert (node.claims(), node.things(prefixes[0])) == ([], [])


def rank_and_wait(say: Say, remote: Path, local: Path, number: int, port: int) -> None:
    become_rank(number, port)
    streaming.install()
    data = data_set(remote, local)
    say(len(list(data)))
    if number == 1:
        signal.pause()
    began = time.monotonic()
    try:
        list(data)
    except threading.BrokenBarrierError as error:
        say([time.monotonic() - began, str(error)])


def test_a_rank_that_is_killed(remote: Path, tmp_path: Path, node: Node) -> None:
    """The other is told within a second, where it would have waited for ever."""
    port = free_port()
    with Job(lambda say: rank_and_wait(say, remote, tmp_path / "local", 0, port)) as leader:
        with Job(lambda say: rank_and_wait(say, remote, tmp_path / "local", 1, port)) as other:
            assert [leader.said(), other.said()] == [SAMPLES / 2, SAMPLES / 2]
            other.kill()
            waited, message = leader.said()
            assert waited < 20
            assert f"rank 1 (process {other.pid})" in message


def rank_with_workers(say: Say, remote: Path, local: Path, number: int, port: int, epochs: int) -> None:
    become_rank(number, port)
    streaming.install()
    loader = DataLoader(data_set(remote, local), batch_size=4, num_workers=1)
    for _ in range(epochs):
        list(loader)
    say("between epochs")
    if number == 1:
        signal.pause()
    sys.stdin.readline()
    began = time.monotonic()
    try:
        list(loader)
    except RuntimeError as error:
        say([time.monotonic() - began, str(error)])


@pytest.mark.parametrize("epochs", [0, 1])
def test_a_rank_that_is_killed_while_it_has_no_workers(
    remote: Path, tmp_path: Path, node: Node, monkeypatch: pytest.MonkeyPatch, epochs: int
) -> None:
    """The workers of the others are new, and began when it was dead."""
    port, (read, write) = free_port(), os.pipe()
    monkeypatch.setattr(sys, "stdin", os.fdopen(read))
    with Job(lambda say: rank_with_workers(say, remote, tmp_path / "local", 0, port, epochs)) as leader:
        with Job(lambda say: rank_with_workers(say, remote, tmp_path / "local", 1, port, epochs)) as other:
            assert [leader.said(), other.said()] == ["between epochs"] * 2
            other.kill()
            os.write(write, b"\n")
            waited, message = leader.said()
            assert f"rank 1 (process {other.pid})" in message
            assert waited < 10  # the start of a worker included
    os.close(write)


# -- installing --------------------------------------------------------------------------------------------------------


PLACES = ("base.shared", "base.shared.array", "base.shared.scalar", "base.shared.prefix", "base.dataset", "base.util", "base.batching")


def look(say: Say) -> None:
    """Says which names of Streaming are ours: before, after installing twice, and after that was undone."""

    def ours() -> list[str]:
        modules = [importlib.import_module(f"streaming.{place}") for place in PLACES]
        found = [(place, name, value) for place, module in zip(PLACES, modules, strict=True) for name, value in vars(module).items()]
        return [f"{place}.{name}" for place, name, value in found if str(getattr(value, "__module__", "")).startswith("forebay.")]

    say(ours())
    streaming.install()
    streaming.install()
    say(ours())
    streaming.uninstall()
    say(ours())


def test_installing_reaches_every_module() -> None:
    with Job(look) as job:
        assert job.said() == []
        found = job.said()
        names_of_ours = {name.rpartition(".")[2] for name in found}
        assert names_of_ours >= {"SharedArray", "SharedBarrier", "SharedMemory", "SharedScalar", "World"}
        assert names_of_ours >= {"get_shm_prefix", "clean_stale_shared_memory"}
        assert {
            "base.dataset.SharedMemory",
            "base.dataset.get_shm_prefix",
            "base.batching.World",
            "base.shared.scalar.SharedScalar",
        } <= set(found)
        assert [job.said(), job.said()] == [[], None]


def test_without_streaming_it_says_what_to_install(tmp_path: Path) -> None:
    script = """
import sys
sys.modules["streaming"] = None
from forebay import errors
from forebay.adapters import streaming
try: streaming.install()
except errors.MissingExtra as error: print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "the extra 'streaming'" in done.stdout
