"""The store backend of joblib's Memory: the same calls, prints and results as joblib's own, in a root of ours."""

from __future__ import annotations

import pickle
import re
import warnings
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import forebay
from tests.processes import Gate, fork

joblib = pytest.importorskip("joblib")
np = pytest.importorskip("numpy")

from forebay.adapters.joblib import StoreBackend, register  # noqa: E402

NewMemory = Callable[..., Any]


@pytest.fixture
def new_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NewMemory]:
    """Makes memories in one root, each with a handle of its own."""
    monkeypatch.setattr(joblib.memory, "_STORE_BACKENDS", {"local": joblib.memory.FileSystemStoreBackend})
    monkeypatch.setattr(joblib.memory, "_FUNCTION_HASHES", weakref.WeakKeyDictionary())  # as in a process that starts
    register()
    handles = []

    def create(**arguments: Any) -> Any:
        memory = joblib.Memory(str(tmp_path / "root"), backend="forebay", **{"verbose": 0} | arguments)
        handles.append(memory.store_backend.cache)
        return memory

    yield create
    for handle in handles:
        handle.close()


runs: list[object] = []


@pytest.fixture(autouse=True)
def no_runs() -> None:
    runs.clear()


def arange(n: int, log: object = None) -> Any:
    runs.append(n)
    return {"a": np.arange(n), "n": n}


def test_a_result_lies_in_the_root_and_its_budget(new_memory: NewMemory, tmp_path: Path) -> None:
    memory = new_memory(backend_options={"budget": "300MB", "quota": "100MB"})
    cached = memory.cache(arange, ignore=["log"])
    assert [cached(n, log)["a"].sum() for n, log in ((5, 1), (5, 2), (70_000, 3))] == [10, 10, sum(range(70_000))]
    assert runs == [5, 70_000]
    with forebay.Cache(tmp_path / "root") as cache:
        assert (cache.budget, cache.tasks("joblib").budget) == (300_000_000, 100_000_000)
        sizes = [entry.size for entry in cache.entries("joblib") if entry.key.endswith("/output")]
        assert len(sizes) == 2
        assert 560_000 < sum(sizes) < 600_000
    again = new_memory().cache(arange, ignore=["log"])
    assert again.check_call_in_cache(5)  # another memory, as of another process
    assert not again.check_call_in_cache(6)
    assert runs == [5, 70_000]


@pytest.mark.parametrize("n", [10, 300_000])
@pytest.mark.parametrize(("mode", "is_writable"), [(None, True), ("r", False), ("c", True)])
def test_arrays_are_what_the_mmap_mode_says(new_memory: NewMemory, n: int, mode: str | None, is_writable: bool) -> None:
    cached = new_memory(mmap_mode=mode).cache(arange)
    cached(n)
    array = cached(n)["a"]
    assert array.flags.writeable is is_writable
    if is_writable:
        array[:] = 7
    assert cached(n)["a"].tolist() == list(range(n))
    assert runs == [n]


def test_views_stay_valid_after_they_are_cleared(new_memory: NewMemory) -> None:
    memory = new_memory(mmap_mode="r")
    array = memory.cache(arange)(300_000)["a"]
    memory.clear(warn=False)
    assert int(array.sum()) == sum(range(300_000))


@pytest.mark.parametrize("arguments", [{"mmap_mode": "r+"}, {"mmap_mode": "w+"}, {"compress": 3}])
def test_what_would_write_to_cached_bytes_or_compress_them_is_refused(new_memory: NewMemory, arguments: Any) -> None:
    with pytest.raises(ValueError, match=next(iter(arguments))):
        new_memory(**arguments)


def test_an_open_cache_may_be_given(new_memory: NewMemory, cache: forebay.Cache) -> None:
    memory = new_memory(backend_options={"cache": cache, "space": "solver"})
    memory.cache(arange)(3)
    assert any(entry.key.endswith("/output") for entry in cache.entries("solver"))
    with pytest.raises(forebay.errors.ConfigError, match="open cache, and budget"):
        new_memory(backend_options={"cache": cache, "budget": "100MB"})
    with pytest.raises(forebay.errors.ConfigError, match="'urls' is taken by the cache itself"):
        new_memory(backend_options={"cache": cache, "space": "urls"})


def test_a_path_is_the_root_itself(tmp_path: Path) -> None:
    register()
    memory = joblib.Memory(tmp_path / "root", backend="forebay", verbose=0)
    with memory.store_backend.cache as cache:
        assert cache.path == tmp_path / "root"


def test_it_prints_what_joblib_prints(new_memory: NewMemory, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def lines(memory: Any) -> list[str]:
        cached = memory.cache(arange)
        cached(3), cached(3), cached.call_and_shelve(3).get()
        memory.clear()
        shown = capsys.readouterr()
        text = (shown.out + shown.err).replace(str(tmp_path / "local"), str(tmp_path / "root"))
        return [" ".join(line.split()) for line in re.sub(r"^_+|\d+\.\d+s, *\d+\.\d+min", "", text, flags=re.MULTILINE).splitlines()]

    for verbose in (0, 1, 2, 5, 11):
        assert lines(new_memory(verbose=verbose)) == lines(joblib.Memory(str(tmp_path / "local"), verbose=verbose))


def test_clear_of_a_function_leaves_the_others(new_memory: NewMemory) -> None:
    memory = new_memory()
    first, second = memory.cache(arange), memory.cache(len)
    assert [first(3)["n"], first(4)["n"], second("ab")] == [3, 4, 2]
    first.clear(warn=False)
    assert (first.check_call_in_cache(3), first.check_call_in_cache(4), second.check_call_in_cache("ab")) == (False, False, True)
    memory.clear(warn=False)
    assert list(memory.store_backend.cache.entries()) == []
    assert not second.check_call_in_cache("ab")


def test_a_changed_function_runs_again_and_loses_its_results(new_memory: NewMemory) -> None:
    def version(body: str) -> Any:
        names: dict[str, Any] = {"__name__": "solver", "runs": runs}
        exec(f"def solve(x):\n    runs.append(x)\n    return {body}\n", names)
        return names["solve"]

    memory = new_memory()
    before = memory.cache(version("x + 1"))
    before._func_code_info, before._func_code_id = ("return x + 1", "solver.py", 1), id(before.func.__code__)
    assert [before(1), before(1), before(2)] == [2, 2, 3]
    after = memory.cache(version("x + 2"))
    after._func_code_info, after._func_code_id = ("return x + 2", "solver.py", 1), id(after.func.__code__)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert [after(1), after(1)] == [3, 3]
    assert runs == [1, 2, 1]
    assert len(memory.store_backend.get_items()) == 1


def test_reduce_size_removes_what_was_used_least_recently(new_memory: NewMemory) -> None:
    memory = new_memory()
    cached = memory.cache(arange)
    for n in (100_000, 100_001, 100_002, 100_000):
        cached(n)
    memory.reduce_size(items_limit=2)
    assert [cached.check_call_in_cache(n) for n in (100_000, 100_001, 100_002)] == [True, False, True]
    memory.reduce_size(bytes_limit="1M")
    assert [cached.check_call_in_cache(n) for n in (100_000, 100_002)] == [True, False]
    memory.reduce_size(age_limit=timedelta(days=1))
    assert cached.check_call_in_cache(100_000)
    memory.reduce_size(age_limit=timedelta(0))
    assert not cached.check_call_in_cache(100_000)
    assert memory.store_backend.get_items() == []


def test_the_source_of_a_function_outlives_its_results(new_memory: NewMemory) -> None:
    """Else each new process would take the function for a changed one, and run its first call again."""
    memory = new_memory()
    cached = memory.cache(arange)
    cached(3)
    memory.store_backend.cache.clear("joblib").execute()
    assert memory.store_backend.contains_path([cached.func_id])
    assert not cached.check_call_in_cache(3)


@pytest.mark.parametrize("mode", [None, "r"])
def test_a_result_without_room_is_returned_all_the_same(new_memory: NewMemory, mode: str | None) -> None:
    cached = new_memory(mmap_mode=mode, backend_options={"quota": "100kB"}).cache(arange)
    assert [int(cached(n)["a"].sum()) for n in (100_000, 100_000)] == [sum(range(100_000))] * 2
    assert runs == [100_000] * 2


def test_a_result_that_the_codec_does_not_take_is_a_warning(new_memory: NewMemory) -> None:
    cached = new_memory(backend_options={"codec": "pytree"}).cache(object)
    with pytest.warns(joblib.memory.CacheWarning, match="codec='pytree'"):
        assert type(cached()) is object


def test_a_validation_callback_decides(new_memory: NewMemory) -> None:
    is_valid = [True]
    metadata: list[Any] = []

    def callback(seen: Any) -> bool:
        metadata.append(seen)
        return is_valid[0]

    cached = new_memory().cache(arange, cache_validation_callback=callback)
    cached(3), cached(3)
    is_valid[0] = False
    cached(3)
    assert runs == [3, 3]
    assert metadata[0]["input_args"] == {"n": "3", "log": "None"}


def test_shelved_results_say_when_they_are_gone(new_memory: NewMemory) -> None:
    cached = new_memory().cache(arange)
    shelved = cached.call_and_shelve(3)
    copy = pickle.loads(pickle.dumps(shelved))
    assert shelved.get()["n"] == copy.get()["n"] == 3
    shelved.clear()
    with pytest.raises(KeyError, match="cleared or evicted"):
        shelved.get()
    copy.store_backend.cache.close()


def test_processes_that_compute_the_same_calls_get_whole_results(new_memory: NewMemory) -> None:
    cached, gate = new_memory(mmap_mode="r").cache(arange), Gate()

    def work() -> list[int]:
        gate.wait()
        return [int(cached(n)["a"].sum()) for n in (200_000, 7, 200_001) for _ in range(2)]

    children = [fork(work) for _ in range(4)]
    for _ in children:
        gate.open()
    expected = [sum(range(n)) for n in (200_000, 7, 200_001) for _ in range(2)]
    assert [child.result() for child in children] == [expected] * 4
    assert [cached.check_call_in_cache(n) for n in (200_000, 7, 200_001)] == [True] * 3
    assert cached.store_backend.cache.check(deep=True) == []


def test_a_memory_pickles_as_the_same_store(new_memory: NewMemory) -> None:
    memory = new_memory()
    memory.cache(arange)(3)
    copy = pickle.loads(pickle.dumps(memory))
    assert isinstance(copy.store_backend, StoreBackend)
    assert copy.cache(arange).check_call_in_cache(3)
    copy.store_backend.cache.close()


PAGE = Path(__file__).parents[2] / "docs/use/joblib.md"


def test_the_snippets_of_the_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    program = "".join(re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)).replace("/nvme/", "")
    names: dict[str, Any] = {"__name__": "solver", "np": np}
    exec(program, names)
    names["features"].store_backend.cache.close()
    with names["cache"] as cache:
        assert sorted(entry.key.rpartition("/")[2] for entry in cache.entries("joblib")) == ["code", "metadata", "output"]
        assert cache.tasks("joblib").budget == 20_000_000_000
