"""The number of a data set on its node: who gets which, what stands against it, and when it is given back."""

from __future__ import annotations

import gc
import os
import pickle
import re
import secrets
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from multiprocessing.shared_memory import SharedMemory as Plain
from pathlib import Path
from typing import Any

import pytest

np = pytest.importorskip("numpy")

from forebay import claims, errors  # noqa: E402
from forebay.adapters.streaming import SharedMemory, World, clean_stale_shared_memory, get_shm_prefix  # noqa: E402
from forebay.adapters.streaming import names as names  # noqa: E402
from tests.adapters.streaming.streaming_runs import Job, Node, Say, own_node  # noqa: E402
from tests.processes import death_of, fork_to_die  # noqa: E402

ALONE = World(1, 1, 1, 0)
DATA = f"/data-{secrets.token_hex(4)}"  # of this run: others may test on this machine
A, B = f"{DATA}/a", f"{DATA}/b"


@pytest.fixture(autouse=True)
def node(monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    with own_node(monkeypatch) as found:
        yield found


def taken(prefix: int) -> bool:
    return not names.is_free(prefix)


def test_what_it_gives(node: Node) -> None:
    prefix, memory = get_shm_prefix([A, B], ["s3://bucket/a", None], ALONE)
    assert isinstance(memory, SharedMemory)
    text = f"{A}\0{B}\0{prefix}".encode()
    assert bytes(memory.buf) == np.int32(4 + len(text)).tobytes() + text
    assert Path(f"/dev/shm/{prefix:06}_locals").read_bytes() == bytes(memory.buf)
    assert (len(memory.created_shms), len(memory.opened_shms), memory.shm.name) == (1, 0, f"{prefix:06}_locals")
    (claim,) = claims.list_claims()
    assert (claim.prefix, claim.directories, claim.remotes) == (prefix, (A, B), ("s3://bucket/a", None))
    memory.cleanup()
    assert (node.claims(), taken(prefix)) == ([], False)


def test_a_prefix_is_given_back_with_its_memory(node: Node) -> None:
    prefix, memory = get_shm_prefix([A], ["s3://bucket/a"], ALONE)
    for name in (*names.MEMORY[1:], "another"):
        Path(names.SHM, names.name_of(prefix, name)).touch()
    for name in names.LOCK_FILES:
        Path(tempfile.gettempdir(), names.name_of(prefix, name)).touch()
    del memory
    assert (node.claims(), taken(prefix)) == ([], False)
    other = Path(names.SHM, names.name_of(prefix, "another"))
    assert other.exists()  # none of Streaming's names
    other.unlink()
    again, memory = get_shm_prefix([A], ["s3://bucket/a"], ALONE)
    assert again == prefix
    memory.cleanup()


def test_a_registry_that_is_not_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the piece in /dev/shm is a file of its own. It goes with the claim, also where the job is killed."""
    monkeypatch.setenv("FOREBAY_CLAIMS", str(tmp_path / "claims"))
    with Job(lambda say: ask(say, ALONE)) as job:
        prefix = job.said()[0]
        assert names.unpack(Path(names.paths_of(prefix)[0]).read_bytes()) == [A]
        with Job(ask_alone) as other:
            assert other.said() == "taken"
    again, memory = get_shm_prefix([A], ["s3://bucket/a"], ALONE, retry=0)
    assert again == prefix
    memory.buf[:4] = bytes(4)
    another, second = get_shm_prefix([A], ["s3://bucket/a"], ALONE, retry=0)
    memory.cleanup()
    second.cleanup()
    assert (taken(prefix), taken(another)) == (False, False)


@pytest.mark.rotates
def test_garbage_is_given_back(node: Node) -> None:
    _, memory = get_shm_prefix([A], ["s3://bucket/a"], ALONE)
    ring: list[Any] = [memory]
    ring.append(ring)
    del memory, ring
    gc.collect()
    assert node.claims() == []


def test_a_directory_is_of_one_job() -> None:
    _, memory = get_shm_prefix([A, B], ["s3://bucket/a", None], ALONE)
    words = re.escape(f"Reused local directory: {[B, A]} vs {[A, B]}. Provide a different one.")
    with pytest.raises(ValueError, match=words) as caught:
        get_shm_prefix([B, A], [None, "s3://bucket/other"], ALONE, retry=0)
    assert isinstance(caught.value, errors.ClaimConflict)
    assert caught.value.theirs["pids"] == [os.getpid()]
    assert str(os.getpid()) in str(caught.value)
    memory.cleanup()


@pytest.mark.parametrize(
    ("directory", "remote"),
    [(A, None), (f"{A}/inside", "s3://bucket/a"), (DATA, "s3://bucket/a"), (B, "s3://bucket/a")],
    ids=["no remote", "inside", "above", "beside"],  # the same in every process that collects them
)
def test_what_stands_beside_another(directory: str, remote: str | None) -> None:
    first, memory = get_shm_prefix([A], ["s3://bucket/a"], ALONE)
    second, other = get_shm_prefix([directory], [remote], ALONE, retry=0)
    assert first != second
    memory.cleanup()
    other.cleanup()


def test_a_directory_twice_in_one_call(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "a")
    for again in ("a", "link"):
        with pytest.raises(ValueError, match=r"(?s)Reused local directory: \['.*/(a|link)'\]. Provide a different one."):
            get_shm_prefix([f"{tmp_path}/a", *[f"{tmp_path}/{again}"] * 2], [None] * 3, ALONE)


def test_each_directory_has_its_remote() -> None:
    with pytest.raises(ValueError, match="2 local directories, but 1 remotes"):
        get_shm_prefix([A, B], ["s3://bucket/a"], ALONE)


def test_retries() -> None:
    with pytest.raises(ValueError, match="retry=-1: must be 0 or more"):
        get_shm_prefix([A], ["s3://bucket/a"], ALONE, -1)
    _, memory = get_shm_prefix([A], ["s3://bucket/a"], ALONE)
    began = time.monotonic()
    with pytest.raises(errors.ClaimConflict):
        get_shm_prefix([A], ["s3://bucket/a"], ALONE, retry=20)
    assert 0.14 <= time.monotonic() - began < 20
    threading.Timer(0.3, memory.cleanup).start()
    _, memory = get_shm_prefix([A], ["s3://bucket/a"], ALONE, retry=1000)
    memory.cleanup()


def test_a_length_of_0_gives_the_directories_up() -> None:
    """As Streaming's data set does when it is deleted, though somebody may still refer to the memory."""
    first, memory = get_shm_prefix([A], ["s3://bucket/a"], ALONE)
    memory.buf[:4] = np.int32(0).tobytes()
    second, other = get_shm_prefix([A], ["s3://bucket/a"], ALONE, retry=0)
    assert first != second
    memory.cleanup()
    other.cleanup()


@pytest.mark.parametrize("kind", [*names.MEMORY, *names.LOCK_FILES])
def test_a_number_of_which_anything_is_there_is_not_taken(kind: str) -> None:
    free, memory = get_shm_prefix([A], [None], ALONE)
    memory.cleanup()
    path = Path(tempfile.gettempdir() if kind in names.LOCK_FILES else names.SHM, names.name_of(free, kind))
    path.touch()
    prefix, memory = get_shm_prefix([A], [None], ALONE)
    assert prefix > free
    memory.cleanup()
    assert path.exists()  # whose it is, we do not know
    path.unlink()


# -- several processes -------------------------------------------------------------------------------------------------


def ask(say: Say, world: World, directory: str = A) -> None:
    """A rank of a job; ends when it is told to."""
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", "29999"
    try:
        prefix, memory = get_shm_prefix([directory], ["s3://bucket/a"], world)
    except (RuntimeError, ValueError) as error:
        say([type(error).__name__, str(error)])
        threading.Event().wait()  # a leader that is gone refuses nothing any more
    say([prefix, bytes(memory.buf).decode(), len(memory.created_shms), len(memory.opened_shms)])
    memory.buf[:4] = bytes(4) if world.rank else bytes(memory.buf[:4])
    say("done")
    threading.Event().wait()


@pytest.mark.parametrize("first", [0, 1])
def test_ranks_have_one_together(node: Node, first: int) -> None:
    """Whoever comes first. What a rank that is no leader stores into the memory, it alone sees."""
    worlds = [World(1, 2, 1, rank) for rank in (first, 1 - first)]
    with Job(lambda say: ask(say, worlds[0])) as one, Job(lambda say: ask(say, worlds[1])) as other:
        said = {first: one.said(), 1 - first: other.said()}
        assert said[0][:2] == said[1][:2]
        assert (said[0][2:], said[1][2:]) == ([1, 0], [0, 1])
        assert {one.said(), other.said()} == {"done"}
        with pytest.raises(errors.ClaimConflict):
            get_shm_prefix([A], ["s3://bucket/a"], ALONE, retry=0)
        assert len(node.claims()) == 1
    clean_stale_shared_memory()
    assert (node.claims(), taken(said[0][0])) == ([], False)


def test_a_rank_that_its_leader_forked_begins_with_its_first(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29999")
    prefix, memory = get_shm_prefix([A], ["s3://bucket/a"], World(1, 2, 1, 0))
    with Job(lambda say: ask(say, World(1, 2, 1, 1))) as child:
        assert child.said()[0] == prefix
    memory.cleanup()
    clean_stale_shared_memory()
    assert (node.claims(), taken(prefix)) == ([], False)


def test_a_rank_with_other_directories_is_told(node: Node) -> None:
    with Job(lambda say: ask(say, World(1, 2, 1, 0))) as leader, Job(lambda say: ask(say, World(1, 2, 1, 1), B)) as other:
        assert leader.said()[2:] == [1, 0]
        kind, message = other.said()
        assert kind == "ClaimMismatch"
        assert A in message
        assert B in message


def test_a_rank_without_a_leader_is_told(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay.adapters.streaming.prefix.LEADER_WITHIN", 0.5)
    with Job(lambda say: ask(say, World(1, 2, 1, 1))) as alone:
        kind, message = alone.said()
    assert (kind, "nobody yet" in message, "127.0.0.1" in message) == ("ClaimMismatch", True, True)
    assert node.claims() == []


def test_all_ranks_are_told_of_a_conflict() -> None:
    _, memory = get_shm_prefix([A], ["s3://bucket/a"], ALONE)
    with Job(lambda say: ask(say, World(1, 2, 1, 1))) as other, Job(lambda say: ask(say, World(1, 2, 1, 0))) as leader:
        for kind, message in (leader.said(), other.said()):
            assert kind == "ClaimConflict"
            assert message.startswith(f"Reused local directory: {[A]} vs ")
            assert "Provide a different one." in message
    memory.cleanup()


def test_streamings_own_world_is_taken(node: Node) -> None:
    class Theirs:
        num_nodes, ranks_per_node, workers_per_rank, worker = 1, 1, 1, 0

    prefix, memory = get_shm_prefix([A], ["s3://bucket/a"], Theirs())
    assert taken(prefix)
    with pytest.raises(errors.ClaimConflict):
        get_shm_prefix([A], ["s3://bucket/a"], Theirs(), retry=0)
    memory.cleanup()
    assert node.claims() == []


def test_a_copy_that_came_by_pickle(node: Node) -> None:
    prefix, memory = get_shm_prefix([A], ["s3://bucket/a"], ALONE)
    copy = pickle.loads(pickle.dumps(memory))
    copy.buf[:4] = bytes(4)  # a worker's own affair
    del copy
    with pytest.raises(errors.ClaimConflict):
        get_shm_prefix([A], ["s3://bucket/a"], ALONE, retry=0)
    assert taken(prefix)
    memory.cleanup()
    assert node.claims() == []


def test_a_clean_up_of_streaming_as_it_is(node: Node) -> None:
    """Removes the piece of a job that lives. Those who get it later have it all the same."""
    prefix, memory = get_shm_prefix([A], ["s3://bucket/a"], ALONE)
    Path(names.paths_of(prefix)[0]).unlink()
    assert bytes(pickle.loads(pickle.dumps(memory)).buf) == bytes(memory.buf)
    with pytest.raises(errors.ClaimConflict):
        get_shm_prefix([A], ["s3://bucket/a"], ALONE, retry=0)
    memory.cleanup()
    assert node.claims() == []


def test_a_child_keeps_it(node: Node) -> None:
    """The number is free when the last process is gone that has it."""
    prefix, memory = get_shm_prefix([A], ["s3://bucket/a"], ALONE)
    with Job(lambda say: (say("here"), threading.Event().wait())) as child:
        child.said()
        memory.cleanup()
        assert taken(prefix)
        assert len(node.claims()) == 1
    clean_stale_shared_memory()
    assert (node.claims(), taken(prefix)) == ([], False)


def test_the_end_of_a_child_does_not_speak_for_its_parent() -> None:
    _, memory = get_shm_prefix([A], ["s3://bucket/a"], ALONE)

    def drop(say: Say) -> None:
        nonlocal memory
        del memory
        gc.collect()

    with Job(drop) as child:
        assert child.said() is None
        child.wait()
    with pytest.raises(errors.ClaimConflict):
        get_shm_prefix([A], ["s3://bucket/a"], ALONE, retry=0)
    memory.cleanup()


END = """
import gc, os, sys
from forebay.adapters.streaming import SharedArray, World, get_shm_prefix
prefix, memory = get_shm_prefix(["/data/a"], [None], World(1, 1, 1, 0))
keep, drop = sys.argv[1] == "keep", sys.argv[1] == "drop"
if drop:
    del memory
array = SharedArray(3, int, f"{prefix:06}_next_epoch")
if keep and (child := os.fork()) == 0:
    sys.stdin.read()
    os._exit(0)
print(prefix, flush=True)
"""


@pytest.mark.parametrize(("how", "left"), [("keep", True), ("drop", False), ("end", False)])
def test_pieces_of_a_claim_go_with_it(how: str, left: bool) -> None:
    """Not with the process that made them: another that has the claim may open them later."""
    job = subprocess.Popen([sys.executable, "-c", END, how], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert job.stdout is not None
    path = names.paths_of(int(job.stdout.readline()))[2]
    assert job.wait() == 0
    assert os.path.exists(path) is left
    job.communicate("")  # the child ends too, as if killed
    until = time.monotonic() + 5
    while os.path.exists(path) and time.monotonic() < until:
        clean_stale_shared_memory()
    assert not os.path.exists(path)


def ask_alone(say: Say) -> None:
    try:
        get_shm_prefix([A], ["s3://bucket/a"], ALONE, retry=0)
    except errors.ClaimConflict:
        say("taken")


def test_cleaning_gives_up_what_this_process_had_to_itself_only(node: Node) -> None:
    """A data set that was deleted in the middle of an epoch lives on in its threads."""
    first, old = get_shm_prefix([A], ["s3://bucket/a"], ALONE)
    clean_stale_shared_memory()
    assert taken(first)
    with Job(ask_alone) as other:
        assert other.said() == "taken"
    second, new = get_shm_prefix([A], ["s3://bucket/a"], ALONE, retry=0)
    assert first != second
    with pytest.raises(errors.ClaimConflict):
        get_shm_prefix([A], ["s3://bucket/a"], ALONE, retry=0)
    old.cleanup()
    new.cleanup()


def ask_and_give_back() -> None:
    get_shm_prefix([A], ["s3://bucket/a"], ALONE, retry=0)[1].cleanup()


@pytest.mark.rotates
def test_killed_at_every_step_it_leaves_nothing(node: Node) -> None:
    ask_and_give_back()
    step = 0
    while (death := death_of(fork_to_die(step, ask_and_give_back))) is not None:
        prefix, memory = get_shm_prefix([A], ["s3://bucket/a"], ALONE, retry=0)
        memory.cleanup()
        assert (os.listdir(node.registry), taken(prefix)) == (["lock"], False), death
        step += 1
    assert step > 20


# -- what others left --------------------------------------------------------------------------------------------------

PLAIN = """
import sys
from multiprocessing.shared_memory import SharedMemory
data = bytes.fromhex(sys.argv[2])
memory = SharedMemory(sys.argv[1], True, len(data))
memory.buf[:] = data
print("ready", flush=True)
sys.stdin.read()
"""


def plain_job(prefix: int, directory: str) -> subprocess.Popen[str]:
    """Has what Streaming as it is has for a number."""
    data = names.pack([directory], prefix).hex()
    job = subprocess.Popen(
        [sys.executable, "-c", PLAIN, names.name_of(prefix, "locals"), data], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    assert job.stdout is not None
    assert job.stdout.readline() == "ready\n"
    return job


def test_the_directory_of_a_plain_job(node: Node) -> None:
    """Its own while the job lives; what it leaves when it is killed blocks nobody, and is cleaned when that is asked for."""
    with node.number() as prefix:
        job = plain_job(prefix, A)
        Path(names.paths_of(prefix)[-1]).touch()
        with pytest.raises(errors.ClaimConflict, match=r"(?s)Reused local directory: \['.*/a'\] vs \['.*/a'\].*does not use Forebay"):
            get_shm_prefix([A], ["s3://bucket/a"], ALONE, retry=3)
        _, memory = get_shm_prefix([A], [None], ALONE)
        clean_stale_shared_memory()
        assert taken(prefix)
        assert names.unpack(bytes(memory.buf)) == [A]
        memory.cleanup()
        job.kill()
        job.communicate()
        Plain(names.name_of(prefix, "barrier"), True, 12).close()
        _, memory = get_shm_prefix([A], ["s3://bucket/a"], ALONE, retry=0)
        clean_stale_shared_memory()
        assert not taken(prefix)
        assert len(node.claims()) == 1
        memory.cleanup()


def test_importing_it_loads_neither_torch_nor_streaming() -> None:
    script = "import sys, forebay.adapters.streaming; print([name for name in ('torch', 'streaming', 'filelock') if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout == "[]\n"
