"""Tasks of a real Ray cluster of two nodes: what runs, where, and what is found again."""

from __future__ import annotations

import inspect
import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")
pytest.importorskip("numpy")

import numpy as np
import ray

import forebay
from forebay._kernel import interrupts
from forebay.adapters import ray as ours
from forebay.adapters.ray.tasks import size_in
from forebay.tasks.naming import code_of
from forebay.tasks.values import Values
from tests.adapters.ray_cluster import AWAY, HEAD, Log, Nodes, node
from tests.interrupts.signals import NUMBER, handler_that_raises
from tests.items import until

SRC = str(Path(__file__).parents[3] / "src")


@pytest.fixture
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Outside of tmp_path: this process keeps a cache open as long as it lives."""
    return tmp_path_factory.mktemp("ray")


@pytest.fixture
def log(place: Path) -> Log:
    return Log(place / "log")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ray") / "cache"


@pytest.fixture
def tasks(nodes: Nodes, root: Path) -> Iterator[ours.RayTasks]:
    """The same for all tests, since an actor takes seconds to start; empty, and as it was started first."""
    found = ours.active()
    if found is None or found.config is not None or not found.write("is well", True):
        ours.stop()
        found = ours.start(60, root, "MB")
    found.flush()
    yield found
    session = found._session
    session.bypass.providers.clear()
    session.bypass.conditions.clear()


def square(x: int, log: Log, y: int = 0) -> int:
    log.add(node())
    return x * x + y


def task(tasks: ours.RayTasks, fn: Any = square, **how: Any) -> Any:
    return tasks.remote(fn, **{"ignore": ("log",), **HEAD, **how})


def restart(root: Path, **how: Any) -> ours.RayTasks:
    """With a configuration, which the first one had not."""
    ours.stop()
    return ours.start(60, root, "MB", **how)


# -- start and stop ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("units", "size"), [("B", 3), ("KB", 3 << 10), ("mb", 3 << 20), ("Gb", 3 << 30), ("TB", 3 << 40), ("kib", 3 << 10), ("TiB", 3 << 40)]
)
def test_units_are_powers_of_1024_in_any_case(units: str, size: int) -> None:
    assert size_in(3, units) == size
    assert size_in(0.5, "KB") == 512


def test_an_unknown_unit_is_told_with_those_that_are_known() -> None:
    with pytest.raises(ValueError, match=r"'parsecs'.*B, KB, KiB, MB, MiB, GB, GiB, TB, TiB"):
        size_in(1, "parsecs")
    with pytest.raises(ValueError, match="mode"):
        ours.start(1, "nowhere", mode="sideways")
    with pytest.raises(ValueError, match="mode"):
        ours.remote(square, mode="sideways")


def test_each_half_is_imported_alone() -> None:
    code = "import sys; from forebay.adapters import ray as r; r.start; print(*(m for m in ('ray.train', 'pyarrow') if m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
    with pytest.raises(AttributeError, match="nonsense"):
        ours.nonsense  # noqa: B018
    assert all(getattr(ours, name) for name in ours.__all__)


@pytest.mark.rotates
def test_start_gives_the_one_that_runs(tasks: ours.RayTasks, root: Path, caplog: pytest.LogCaptureFixture) -> None:
    tasks.write("a", 1)
    again = ours.start(60, root, "MiB")
    assert again.read("a") == (True, 1)
    assert caplog.text == ""
    other = ours.start(1, root, "MB", config={"cache": {"square": True}})
    assert other.budget == 60 << 20
    assert "size 62914560, not 1048576, config" in caplog.text
    assert str(root) in repr(other)


@pytest.mark.rotates
def test_what_is_kept_stays_when_it_is_stopped(tasks: ours.RayTasks, root: Path) -> None:
    tasks.write("a", [1, 2])
    ours.stop()
    ours.stop()
    assert ours.active() is None
    assert tasks.read("a") == (False, None)
    assert tasks.write("b", 1) is False
    assert restart(root).read("a") == (True, [1, 2])
    with forebay.Cache(root) as cache:
        assert cache.tasks("ray").read("a") == (True, [1, 2])


def test_what_is_wrong_with_the_directory_is_told_by_start(nodes: Nodes, place: Path) -> None:
    (place / "mine").write_text("not a cache")
    with pytest.raises(forebay.errors.RootRefused, match="mine"):
        ours.start(1, place, "MB", namespace="wrong")
    assert ours.active("wrong") is None


DRIVER = """
import json, sys, ray
from forebay.adapters import ray as ours
ray.init(address=sys.argv[1], log_to_driver=False, configure_logging=False)
print("ready", flush=True)
sys.stdin.readline()
tasks = ours.start(int(sys.argv[3]), sys.argv[2], "MB", namespace="race")
print(json.dumps([tasks.budget, ray.get_actor("forebay-tasks", "race")._actor_id.hex(), tasks.write(sys.argv[3], 1)]), flush=True)
sys.stdin.readline()
"""


@pytest.mark.rotates
def test_two_drivers_start_it_at_once(nodes: Nodes, place: Path) -> None:
    command = [sys.executable, "-c", DRIVER, nodes.cluster.address, str(place / "cache")]
    drivers = [subprocess.Popen([*command, str(n)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for n in (20, 30)]
    pipes = [(driver.stdin, driver.stdout) for driver in drivers]
    try:
        assert [out.readline() for _, out in pipes if out] == ["ready\n"] * 2
        for into, _ in pipes:
            assert into
            into.write("\n")
            into.flush()
        found = [json.loads(out.readline()) for _, out in pipes if out]
        assert found[0][:2] == found[1][:2]
        assert found[0][0] in (20 << 20, 30 << 20)
        tasks = ours.active("race")
        assert tasks is not None
        assert sorted(tasks.keys()) == ["20", "30"]
    finally:
        for driver in drivers:
            driver.communicate("\n", timeout=60)
        ours.stop("race")


# -- values ------------------------------------------------------------------------------------------------------------


@ray.remote(num_cpus=0)
def values_from(tag: str) -> Any:
    tasks = ours.active()
    assert tasks is not None
    found = tasks.read(tag), tasks.has(tag), tasks.write(f"{tag} by {node()}", np.arange(3)), tasks.keys()
    return (*found, tasks.size_bytes() == tasks.stats().bytes, tasks.budget, tasks.evict(f"{tag} by {node()}"), tasks.read("nothing"))


@pytest.mark.parametrize("options", [HEAD, AWAY], ids=["head", "away"])
def test_any_process_of_the_cluster_reads_and_writes(tasks: ours.RayTasks, options: dict[str, Any]) -> None:
    assert tasks.write("a", {"v": 1})
    read, has, wrote, keys, agrees, budget, evicted, nothing = ray.get(values_from.options(**options).remote("a"))
    assert (read, has, wrote, agrees, budget) == ((True, {"v": 1}), True, True, True, 60 << 20)
    assert keys == ["a", f"a by {'head' if options is HEAD else 'away'}"]
    assert evicted
    assert nothing == (False, None)
    assert tasks.keys() == ["a"]
    assert tasks.flush() == 1


@ray.remote(num_cpus=0)
class Reader:
    def read(self, tag: str) -> Any:
        tasks = ours.active()
        assert tasks is not None
        begin = time.perf_counter()
        hit, value = tasks.read(tag)
        return hit, value[-1] if hit else None, time.perf_counter() - begin

    def copies(self, tag: str) -> list[int]:
        with forebay.Cache() as cache:
            return [entry.size for entry in cache.entries() if entry.space.startswith("ray@") and entry.key == tag]


def test_a_worker_of_the_node_reads_without_the_actor(tasks: ours.RayTasks) -> None:
    tasks.write("a", np.arange(1_000_000))
    reader = Reader.options(**HEAD).remote()
    assert ray.get(reader.read.remote("a"))[:2] == (True, 999_999)
    head = ray.get_actor("forebay-tasks", "forebay")
    pid = ray.get(head.__ray_call__.remote(lambda self: os.getpid()))
    os.kill(pid, signal.SIGSTOP)
    try:
        tasks.write("b", np.arange(2_000_000))
        assert ray.get(reader.read.remote("b"), timeout=60)[:2] == (True, 1_999_999)
    finally:
        os.kill(pid, signal.SIGCONT)


def test_another_node_keeps_a_copy_while_it_is_current(tasks: ours.RayTasks) -> None:
    tasks.write("copied", np.arange(1_000_000))
    reader = Reader.options(**AWAY).remote()
    assert ray.get(reader.read.remote("copied"))[:2] == (True, 999_999)
    (size,) = ray.get(reader.copies.remote("copied"))
    assert size > 8_000_000
    head = ray.get_actor("forebay-tasks", "forebay")
    ray.get(head.__ray_call__.remote(lambda self: setattr(self._values, "send", None)))  # what was transferred is not transferred again
    assert ray.get(reader.read.remote("copied"))[:2] == (True, 999_999)
    ray.get(head.__ray_call__.remote(lambda self: delattr(self._values, "send")))
    tasks.write("copied", np.arange(10))
    assert ray.get(reader.read.remote("copied"))[:2] == (True, 9)
    tasks.evict("copied")
    assert ray.get(reader.read.remote("copied"))[:2] == (False, None)


@pytest.mark.rotates
def test_a_damaged_copy_is_fetched_again(tasks: ours.RayTasks, nodes: Nodes) -> None:
    tasks.write("a", np.arange(1_000_000))
    assert ray.get(Reader.options(**AWAY).remote().read.remote("a"))[:2] == (True, 999_999)
    for blob in nodes.homes["away"].glob("blobs/*/*"):
        blob.chmod(0o600)
        with blob.open("r+b") as file:
            file.write(bytes(64))
    assert ray.get(Reader.options(**AWAY).remote().read.remote("a"))[:2] == (True, 999_999)


# -- calls -------------------------------------------------------------------------------------------------------------


def test_a_hit_needs_no_run(tasks: ours.RayTasks, log: Log) -> None:
    squares = task(tasks)
    assert ray.get([squares.remote(3, log), squares.remote(4, log=log)]) == [9, 16]
    assert ray.get([squares.remote(3, log), squares.remote(x=4, log=log), squares.remote(3, log, y=0)]) == [9, 16, 9]
    assert len(log) == 2
    assert tasks.read(squares.tag_of(3, log)) == (True, 9)
    assert squares.evict(3, log)
    assert ray.get(squares.remote(3, log)) == 9
    assert len(log) == 3
    assert squares(5, log) == 25  # the function itself
    assert "square" in repr(squares)


def test_nodes_share_what_they_made(tasks: ours.RayTasks, log: Log) -> None:
    away = task(tasks, **AWAY)
    assert ray.get(away.remote(3, log)) == 9
    assert ray.get(task(tasks).remote(3, log)) == 9
    assert log.lines() == ["away"]
    assert ray.get(away.remote(ray.put(3), log)) == 9  # named on the worker, there
    assert log.lines() == ["away"]


def test_tags(tasks: ours.RayTasks, log: Log, caplog: pytest.LogCaptureFixture) -> None:
    squares = task(tasks, tag="x-{x}", version=2)
    assert ray.get(squares.remote(3, log)) == 9
    assert squares.tag_of(3, log).endswith("square@2:x-3")
    assert ray.get(squares.remote(3, log, tag="iter-1")) == 9
    assert tasks.read(squares.tag_of(3, log, tag="iter-1")) == (True, 9)
    assert len(log) == 2
    assert ray.get(squares.remote(5, log, tag="iter-1")) == 25  # under the same tag, of other arguments
    assert len(log) == 3
    assert "different arguments" in caplog.text
    assert ray.get(squares.options(tag="iter-1").remote(5, log)) == 25
    assert len(log) == 3
    with pytest.raises(ValueError, match="not a str"):
        squares.remote(3, log, tag=7)


def tagged(tag: str, log: Log) -> str:
    log.add()
    return tag


def test_a_function_may_have_a_parameter_called_tag(tasks: ours.RayTasks, log: Log) -> None:
    found = task(tasks, tagged).options(tag="mine")
    assert ray.get([found.remote(tag="a", log=log)]) == ["a"]
    assert re.search(r"tagged#[0-9a-f]{16}:mine$", found.tag_of("a", log))
    assert ray.get(found.remote("a", log)) == "a"
    assert len(log) == 1


FLOW = "def work(x, log):\n    log.add()\n    return x * {n}\n"


def test_a_function_is_known_by_its_code(tasks: ours.RayTasks, log: Log, tmp_path: Path) -> None:
    """Of two scripts of one name, and of one that was edited; also where a worker names the call, since it has references alone."""
    made = []
    for n in (2, 3, 2):
        path = tmp_path / f"{len(made)}" / "flow.py"
        path.parent.mkdir()
        path.write_text(FLOW.format(n=n) + f"# {len(made)}\n")
        flow: dict[str, Any] = {"__name__": "flow", "__file__": str(path)}
        exec(compile(path.read_text(), path, "exec"), flow)
        made.append(task(tasks, flow["work"], tag="iter-1"))
    assert [ray.get(one.remote(5, log)) for one in made] == [10, 15, 10]
    assert len(log) == 2
    assert [ray.get(one.remote(ray.put(5), log)) for one in made] == [10, 15, 10]
    assert len(log) == 2
    assert made[0].tag_of(5, log) == made[2].tag_of(5, log) != made[1].tag_of(5, log)


def total(parts: list[Any], log: Log) -> int:
    log.add()
    return sum(ray.get(parts))


@pytest.mark.rotates
def test_references_count_by_what_is_behind_them(tasks: ours.RayTasks, log: Log) -> None:
    squares = task(tasks)
    assert ray.get(squares.remote(ray.put(3), log)) == 9
    assert ray.get(squares.remote(squares.remote(3, log), log)) == 81
    assert ray.get(squares.remote(ray.put(9), log)) == 81
    assert ray.get(squares.remote(3, log)) == 9
    assert len(log) == 2
    assert tasks.read(squares.tag_of(ray.put(9), log)) == (True, 81)
    parts = task(tasks, total)
    assert ray.get([parts.remote([ray.put(1), ray.put(n)], log) for n in (2, 3, 2)]) == [3, 4, 3]
    assert len(log) == 4


def leads_elsewhere(what: str, log: Log) -> Any:
    log.add()
    return [ray.put(1) if what == "reference" else Counter.remote()]


@pytest.mark.rotates
@pytest.mark.parametrize("what", ["reference", "actor"])
def test_what_leads_to_the_program_itself_is_not_kept(tasks: ours.RayTasks, log: Log, what: str) -> None:
    calls = task(tasks, leads_elsewhere)
    for _ in range(2):
        ((found,),) = ray.get([calls.remote(what, log)])
        assert ray.get(found if what == "reference" else found.add.remote(1)) in (1, (1, 1))
    assert len(log) == 2
    assert tasks.write("a", {"deep": [ray.put(1)]}) is False


def slow(x: int, log: Log) -> int:
    log.add()
    time.sleep(0.5)
    return x


def test_of_a_node_one_process_runs_a_call(tasks: ours.RayTasks, log: Log) -> None:
    calls = task(tasks, slow)
    assert ray.get([calls.remote(1, log) for _ in range(4)]) == [1] * 4
    assert len(log) == 1


def fails(log: Log) -> None:
    log.add()
    raise LookupError("as was agreed")


def test_what_is_raised_is_not_kept(tasks: ours.RayTasks, log: Log) -> None:
    for _ in range(2):
        with pytest.raises(LookupError, match="as was agreed"):
            ray.get(task(tasks, fails).remote(log))
    assert len(log) == 2
    assert tasks.keys() == []


class Limited:
    """A time limit ends as the worker stores it."""

    came = False

    def __reduce__(self) -> tuple[Any, ...]:
        if not Limited.came:  # Ray pickles it, too
            Limited.came = True
            signal.raise_signal(signal.SIGUSR1)
        return str, ()


def limited(log: Log) -> Limited:
    def handler(*_: object) -> None:
        raise TimeoutError("of the handler")

    log.add()
    signal.signal(signal.SIGUSR1, handler)
    return Limited()


def test_signals_wait_while_a_worker_stores(tasks: ours.RayTasks, log: Log) -> None:
    with pytest.raises(TimeoutError, match="of the handler"):
        ray.get(task(tasks, limited).remote(log))
    assert len(log) == 1


def test_signals_wait_while_the_caller_looks(tasks: ours.RayTasks, log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, look = list[bool](), Values.look

    def watched(self: Values, *args: Any, **kwargs: Any) -> Any:
        seen.append(isinstance(signal.getsignal(NUMBER), interrupts._Note))
        return look(self, *args, **kwargs)

    monkeypatch.setattr(Values, "look", watched)
    with handler_that_raises():
        assert ray.get(task(tasks).remote(3, log)) == 9
    assert seen == [True]


def pair(x: int, log: Log) -> tuple[int, int]:
    log.add()
    return x, x + 1


def stream(n: int, log: Log) -> Iterator[int]:
    log.add()
    for i in range(n):  # noqa: UP028  # Ray sends to it
        yield i


def nothing(log: Log) -> None:
    log.add()


def test_several_returns(tasks: ours.RayTasks, log: Log, caplog: pytest.LogCaptureFixture) -> None:
    pairs = task(tasks, pair, num_returns=2)
    for _ in range(2):
        assert ray.get(pairs.remote(1, log)) == [1, 2]
    assert len(log) == 1
    assert ray.get(task(tasks, pair).remote(1, log)) == (1, 2)  # the same call
    assert len(log) == 1
    for part in pairs.options(num_returns=3).remote(5, log):
        with pytest.raises(ValueError, match="returns"):
            ray.get(part)
    assert len(tasks.keys()) == 1
    assert not [record for record in caplog.records if record.name.startswith("forebay")]


def test_what_comes_in_parts_or_not_at_all_runs_uncached(tasks: ours.RayTasks, log: Log, caplog: pytest.LogCaptureFixture) -> None:
    streams = task(tasks, stream, num_returns="streaming")
    for _ in range(2):
        assert [ray.get(part) for part in streams.remote(3, log)] == [0, 1, 2]
    assert caplog.text.count("runs uncached") == 1
    assert task(tasks, nothing, num_returns=0).remote(log) is None
    assert tasks.keys() == []


@ray.remote(num_cpus=0, resources={"head": 1})
def ray_square(x: int, log: Log) -> int:
    return square(x, log)


def test_what_ray_or_cached_decorated_is_taken(tasks: ours.RayTasks, log: Log) -> None:
    assert ray.get([tasks.remote(ray_square, ignore="log").remote(3, log)]) == [9]
    cached = tasks.cached(square, tag="x-{x}", ignore=("log",))
    assert ray.get(task(tasks, cached).remote(4, log)) == 16
    assert cached(4, log) == 16
    assert cached.tag_of(4, log) == task(tasks, cached).tag_of(4, log)
    assert log.lines() == ["head"] * 2
    again = tasks.remote(task(tasks, cached), version=2)
    assert again.tag_of(4, log).endswith("square@2:x-4")

    async def coroutine() -> None: ...

    for wrong in (coroutine, tasks.cached(coroutine)):
        with pytest.raises(ValueError, match="is a coroutine"):
            tasks.remote(wrong)
    for wrong in (3, Reader, Log):
        with pytest.raises(ValueError, match="neither a function"):
            tasks.remote(wrong)


module_task = ours.remote(square, ignore=("log",), **HEAD)


@ray.remote(num_cpus=0)
def calls_tasks(tasks: ours.RayTasks, given: Any, log: Log) -> Any:
    inner = ray.get([given.remote(3, log), module_task.remote(4, log)])
    return [*inner, tasks.cached(square, ignore="log")(3, log)]


@pytest.mark.parametrize("options", [HEAD, AWAY], ids=["head", "away"])
def test_tasks_go_wherever_they_are_sent(tasks: ours.RayTasks, log: Log, options: dict[str, Any]) -> None:
    for _ in range(2):
        assert ray.get(calls_tasks.options(**options).remote(tasks, task(tasks), log)) == [9, 16, 9]
    assert log.lines() == ["head"] * 2


# -- nested calls, configuration, bypass -------------------------------------------------------------------------------


def outer(x: int, log: Log) -> list[Any]:
    inner = ours.remote(square, ignore=("log",), **HEAD)
    found = ours.remote(tagged, ignore=("log",), **HEAD)
    return ray.get([inner.remote(x, log, tag="in-1"), inner.remote(x, log, tag="out"), found.options(tag="t").remote("real", log)])


def test_nested_calls_see_configuration_and_providers(tasks: ours.RayTasks, root: Path, log: Log) -> None:
    bypass = {"square": {"bypass": True, "tags": ["in-.*"]}, "tagged": True}
    tasks = restart(root, config={"cache": {"square": True}, "bypass": bypass})
    here = "provided"
    tasks.set_provider("square", lambda tag, data_path, x, log, y=0: (tag, data_path, x))
    tasks.set_provider("tagged", lambda tag, data_path, *args: (here, str(tag)))
    for _ in range(2):
        found = ray.get(task(tasks, outer, **AWAY).remote(3, log))
        assert found == [("in-1", None, 3), 9, ("provided", "t")]
    assert log.lines() == ["head"]  # outer and tagged are not listed
    assert sorted(key.rpartition(":")[2] for key in (*tasks.keys(),)) == ["in-1", "out"]


def in_namespace(x: int, log: Log) -> Any:
    tasks = ours.active()
    assert tasks is not None
    return tasks.namespace, ray.get(module_task.remote(x, log))


def test_nested_calls_are_of_the_same_namespace(nodes: Nodes, place: Path, log: Log) -> None:
    tasks = ours.start(1, place / "other", "MB", namespace="other", config={"cache": {"square": True}})
    try:
        assert ray.get(task(tasks, in_namespace, **AWAY).remote(3, log)) == ("other", 9)
        assert tasks.keys() == [module_task.tag_of(3, log)]
    finally:
        ours.stop("other")


@pytest.mark.rotates
def test_a_file_is_read_where_the_cache_was_started(
    tasks: ours.RayTasks, root: Path, place: Path, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    Path("answer.txt").write_text("forty-twö\n", encoding="utf-8")
    tasks = restart(root, config={"cache": {"square": True}, "bypass": {"square": {"bypass": True, "data": "answer.txt"}}})
    monkeypatch.chdir("/")
    squares = task(tasks, **AWAY)
    assert ray.get(squares.remote(3, log)) == "forty-twö\n"
    assert tasks.read(squares.tag_of(3, log)) == (True, "forty-twö\n")
    tasks.set_provider("square", lambda tag, data_path, *args, **kwargs: data_path)
    assert ray.get(squares.remote(3, log)) == "answer.txt"
    assert len(log) == 0


def test_conditions_are_asked_last_and_by_the_caller(tasks: ours.RayTasks, root: Path, log: Log) -> None:
    tasks = restart(root, config={"cache": {}, "bypass": {"square": {"bypass": True, "tags": "even.*"}}})
    asked: list[Any] = []
    tasks.set_provider("square", lambda tag, data_path, x, log: f"{tag} on {node()}")
    tasks.set_condition("square", lambda tag, data_path, x, log: asked.append((str(tag), x)) or x % 2 == 0)
    squares = task(tasks, **AWAY)
    assert ray.get(squares.remote(2, log, tag="even-2")) == "even-2 on away"
    assert ray.get(squares.remote(3, log, tag="even-3")) == 9
    assert ray.get(squares.remote(2, log, tag="odd")) == 4
    assert ray.get(squares.remote(2, log)) == 4
    assert asked == [("even-2", 2), ("even-3", 3)]
    assert log.lines() == ["away"] * 3
    assert tasks.keys() == []


@pytest.mark.rotates
def test_a_rule_over_references_is_followed_by_the_worker(tasks: ours.RayTasks, root: Path, log: Log) -> None:
    restart(root, config={"cache": {"square": {"cache": True, "tags": "x-3", "pin": True}}})
    squares = task(tasks, tag="x-{x}")
    for _ in range(2):
        assert ray.get([squares.remote(ray.put(x), log) for x in (3, 4)]) == [9, 16]
    assert len(log) == 3
    assert [key.rpartition(":")[2] for key in (*tasks.keys(),)] == ["x-3"]
    assert tasks.flush() == 0
    assert tasks.evict(squares.tag_of(3, log))


@pytest.mark.rotates
def test_replay_mode_keeps_and_reads_only_by_bypass(tasks: ours.RayTasks, root: Path, log: Log) -> None:
    tasks = restart(root, config={"cache": {"square": True}, "bypass": {"square": True}}, mode="replay")
    tasks.set_provider("square", tasks.from_cache)
    tasks.set_condition("square", tasks.if_cached)
    squares = task(tasks, **AWAY)
    assert ray.get([squares.remote(3, log) for _ in range(2)]) == [9, 9]
    assert (len(log), tasks.keys()) == (2, [])
    assert ray.get(squares.remote(3, log, tag="a")) == 9
    assert ray.get(squares.remote(999, log, tag="a")) == 9  # whatever the arguments
    assert len(log) == 3
    tasks.set_condition("square", lambda *args: True)
    with pytest.raises(KeyError, match="missing"):
        ray.get(squares.remote(3, log, tag="missing"))
    tasks.set_condition("square", lambda *args: False)
    assert ray.get(squares.remote(4, log, tag="a")) == 16
    assert len(log) == 4


# -- actors ------------------------------------------------------------------------------------------------------------


@ray.remote(num_cpus=0)
class Counter:
    def __init__(self) -> None:
        self.n = 0

    def add(self, x: int, fn: int = 0) -> tuple[int, int]:
        self.n += 1
        return self.n, x + fn

    @ray.method(num_returns=2)
    def two(self) -> tuple[int, int]:
        self.n += 1
        return self.n, -self.n


@ray.remote(num_cpus=0)
class Coroutines:
    def __init__(self) -> None:
        self.n = 0

    async def add(self, x: int, fn: int = 0) -> tuple[int, int]:
        self.n += 1
        return self.n, x + fn


@pytest.mark.rotates
@pytest.mark.parametrize("actor", [Counter, Coroutines])
@pytest.mark.parametrize("options", [HEAD, AWAY], ids=["head", "away"])
def test_a_method_of_an_actor(tasks: ours.RayTasks, actor: Any, options: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    handle = actor.options(**options).remote()
    add = tasks.remote(handle.add)
    bare = actor.__ray_metadata__.modified_class.add  # it is here, so that its code counts
    assert (add._naming.identity, add._naming.code.digest) == (f"{__name__}.{bare.__qualname__}", code_of(bare)[0].digest)
    assert ray.get([add.remote(1, tag="a", fn=2) for _ in range(1)]) == [(1, 3)]
    assert ray.get(add.remote(1, tag="a", fn=2)) == (1, 3)
    assert tasks.read(add.tag_of(1, fn=2, tag="a")) == (True, (1, 3))
    assert ray.get(add.remote(ray.put(1), tag="b")) == (2, 1)
    assert ray.get(add.remote(1, tag="b")) == (2, 1)
    # What it holds is not known; coroutines run in any order.
    assert sorted(ray.get([add.remote(1), add.remote(1)])) == [(3, 1), (4, 1)]
    assert caplog.text.count("runs uncached without a tag") <= 1


@pytest.mark.rotates
def test_several_returns_of_a_method_and_its_replay(tasks: ours.RayTasks, root: Path) -> None:
    tasks = restart(root, config={"cache": {"two": True}, "bypass": {"add": True}})
    handle = Counter.remote()
    two = tasks.remote(handle.two)
    assert [ray.get(two.remote(tag="a")) for _ in range(2)] == [[1, -1]] * 2
    tasks.set_provider("add", lambda tag, data_path, x, fn=0: ("provided", x, fn))
    assert ray.get(tasks.remote(handle.add).remote(1, fn=5)) == ("provided", 1, 5)
    assert ray.get(tasks.remote(Coroutines.remote().add).remote(1, fn=5)) == ("provided", 1, 5)


@pytest.mark.rotates
def test_cached_methods_of_an_actor_class(tasks: ours.RayTasks, log: Log) -> None:
    @ray.remote(num_cpus=0)
    class Worker:
        def __init__(self, seed: int) -> None:
            self.seed = seed

        @tasks.cached(ignore=("log",))
        def work(self, x: int, log: Log) -> int:
            log.add()
            return self.seed + x

    for options in (HEAD, AWAY):
        handle = Worker.options(**options).remote(100)
        assert ray.get([handle.work.remote(1, log), handle.work.remote(1, log)]) == [101] * 2
    assert len(log) == 1
    assert ray.get(Worker.options(**AWAY).remote(200).work.remote(1, log)) == 201


# -- loss --------------------------------------------------------------------------------------------------------------


def waits(x: int, log: Log, gate: str) -> int:
    log.add(x)
    while not os.path.exists(gate):
        time.sleep(0.02)
    return x * x


def head_pid(namespace: str = "forebay") -> int:
    found: int = ray.get(ray.get_actor("forebay-tasks", namespace).__ray_call__.remote(lambda self: os.getpid()))
    return found


@pytest.mark.rotates
def test_the_actor_is_killed_while_tasks_run(tasks: ours.RayTasks, log: Log, place: Path) -> None:
    gate = place / "gate"
    calls = [task(tasks, waits, ignore=("log", "gate"), **options) for options in (HEAD, AWAY)]
    found = [calls[x % 2].remote(x, log, str(gate)) for x in range(8)]
    until(lambda: len(log) == 8)
    before = head_pid()
    os.kill(before, signal.SIGKILL)
    gate.touch()
    assert ray.get(found) == [x * x for x in range(8)]

    def is_back() -> bool:
        try:
            return head_pid() != before
        except ray.exceptions.RayActorError:
            return False

    until(is_back)
    reader = Reader.options(**AWAY).remote()
    tasks.write("a", [1])
    until(lambda: ray.get(reader.read.remote("a"))[:2] == (True, 1))  # it is picked up again

    def is_cached() -> bool:
        ran = len(log)
        assert ray.get(calls[1].remote(9, log, str(gate))) == 81
        return len(log) == ran

    until(is_cached)  # by each worker, as soon as it has an answer


@ray.remote(num_cpus=0)
class Elsewhere:
    """A driver of another node."""

    def start(self, path: str) -> bool:
        return ours.start(10, path, "MB", namespace="lost").write("a", 1)


@pytest.mark.rotates
def test_the_node_that_has_a_value_is_lost(nodes: Nodes, place: Path, log: Log, caplog: pytest.LogCaptureFixture) -> None:
    third = nodes.add("third", place / "home-third")
    try:
        other = Elsewhere.options(resources={"third": 1}).remote()
        assert ray.get(other.start.remote(str(place / "third")))
        tasks = ours.active("lost")
        assert tasks is not None
        assert tasks.read("a") == (True, 1)
        squares = task(tasks)
        assert ray.get(squares.remote(3, log)) == 9
        pid = head_pid("lost")
    finally:
        nodes.cluster.remove_node(third, allow_graceful=False)
    until(lambda: not os.path.exists(f"/proc/{pid}"))
    begin = time.monotonic()
    for _ in range(3):
        assert ray.get(squares.remote(4, log)) == 16
    assert time.monotonic() - begin < 30
    assert [r.message for r in caplog.records if r.levelno >= logging.WARNING and r.name == "forebay.ray"] == [
        next(r.message for r in caplog.records if "calls run uncached until it is back" in r.message)
    ]
    tasks = ours.start(10, place / "cache", "MB", namespace="lost")
    ran = len(log)
    assert ray.get([squares.remote(4, log)]) == [16]
    assert ray.get([squares.remote(4, log)]) == [16]
    assert len(log) == ran + 1
    ours.stop("lost")


@pytest.mark.rotates
def test_without_a_cache_tasks_run(nodes: Nodes, log: Log, caplog: pytest.LogCaptureFixture) -> None:
    squares = ours.remote(square, ignore=("log",), namespace="never", **HEAD)
    assert [ray.get(squares.remote(3, log)) for _ in range(2)] == [9, 9]
    assert len(log) == 2
    assert caplog.text.count("calls run uncached") == 1
    assert not squares.evict(3, log)
    assert inspect.signature(squares) == inspect.signature(square)
