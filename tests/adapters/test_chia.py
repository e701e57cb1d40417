"""CHIA's names: what its users' scripts call gives what it gave, on a real Ray."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import logging
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")

import ray

import forebay
from forebay.adapters import chia
from tests.adapters.ray_cluster import AWAY, Nodes


@pytest.fixture
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("chia")


@pytest.fixture
def store(nodes: Nodes, place: Path) -> Iterator[Any]:
    """An actor without a name, of 1 KB."""
    actor = chia.Cache.options(resources={"head": 1}).remote(str(place / "cache"), 1024, {"f": True})
    yield actor
    ray.kill(actor)


def written(place: Path, text: str) -> str:
    path = place / "flow.yaml"
    path.write_text(text)
    return str(path)


# -- the actor ---------------------------------------------------------------------------------------------------------


@pytest.mark.rotates
def test_values_by_tag(store: Any) -> None:
    assert ray.get(store.write.remote("k", {"v": 42}))
    assert ray.get(store.read.remote("k")) == (True, {"v": 42})
    assert ray.get(store.read.remote("other")) == (False, None)
    assert ray.get([store.has.remote("k"), store.has.remote("other")]) == [True, False]
    assert ray.get([store.evict.remote("k"), store.evict.remote("k")]) == [True, False]
    assert ray.get(store.write.remote("a", "b"))
    assert ray.get(store.flush.remote()) is None
    assert ray.get([store.keys.remote(), store.size_bytes.remote()]) == [[], 0]
    assert ray.get(store.get_config.remote()) == {"f": True}


def test_a_kilobyte_holds_two_values_of_400_characters(store: Any) -> None:
    for tag in ("k0", "k1"):
        assert ray.get(store.write.remote(tag, "x" * 400))
    ray.get(store.read.remote("k0"))  # so that k1 is the one to go
    assert ray.get(store.write.remote("k2", "x" * 400))
    assert ray.get(store.keys.remote()) == ["k0", "k2"]
    assert ray.get(store.size_bytes.remote()) <= 1024


def test_what_is_larger_than_the_budget_is_not_kept(store: Any) -> None:
    assert ray.get(store.write.remote("small", 1))
    assert ray.get(store.write.remote("big", "x" * 2000)) is False
    assert ray.get(store.keys.remote()) == ["small"]


def test_writing_again_replaces_value_and_size(store: Any) -> None:
    ray.get(store.write.remote("k", "small"))
    before = ray.get(store.size_bytes.remote())
    for _ in range(2):
        assert ray.get(store.write.remote("k", "much longer " * 5))
        size = ray.get(store.size_bytes.remote())
        assert before < size < before + 100
    assert ray.get(store.keys.remote()) == ["k"]
    assert ray.get(store.write.remote("k", "x" * 2000)) is False
    assert ray.get(store.read.remote("k")) == (True, "much longer " * 5)


@pytest.mark.rotates
def test_the_next_actor_goes_on(store: Any, place: Path) -> None:
    for tag in "abc":
        ray.get(store.write.remote(tag, [tag]))
    ray.get(store.read.remote("a"))
    again = chia.Cache.options(resources={"head": 1}).remote(str(place / "cache"), 1024, {})
    assert ray.get(again.keys.remote()) == ["b", "c", "a"]
    assert ray.get(again.read.remote("c")) == (True, ["c"])
    ray.kill(again)
    with forebay.Cache(place / "cache") as cache:
        assert cache.tasks("chia").read("b") == (True, ["b"])


# -- the running one ---------------------------------------------------------------------------------------------------

CACHE = """
cache:
  shorthand: true
  listed:
    cache: true
  tagged:
    cache: true
    tags: ["iter.*", warmup]
  idle:
    cache: false
"""


@ray.remote(num_cpus=0)
def from_elsewhere(handle: chia.Handle, tag: str) -> Any:
    active = chia.get_active_cache("chia-tests")
    assert active == handle
    return ray.get([handle.read.chia_remote(tag), active.read.options(name="read").remote(tag)])


@pytest.mark.rotates
def test_start_and_stop(nodes: Nodes, place: Path) -> None:
    handle = chia.start_cache(size=4, units="mib", cache_dir_path=str(place / "cache"), namespace="chia-tests")
    try:
        assert chia.start_cache(1, str(place / "other"), namespace="chia-tests") == handle
        assert not (place / "other").exists()
        assert ray.get(handle.write.remote("k", 1))
        assert ray.get(from_elsewhere.options(**AWAY).remote(handle, "k")) == [(True, 1)] * 2
        pid = ray.get(handle.actor.__ray_call__.remote(lambda self: os.getpid()))
        os.kill(pid, signal.SIGKILL)
        end = time.monotonic() + 60
        while True:
            try:
                assert ray.get(handle.read.remote("k")) == (True, 1)
                break
            except ray.exceptions.RayActorError:
                assert time.monotonic() < end
                time.sleep(0.1)
    finally:
        for _ in range(2):
            chia.stop_cache("chia-tests")
    with pytest.raises(AttributeError):
        handle.__nothing__  # noqa: B018


@pytest.mark.rotates
def test_what_is_cached_is_said_by_the_file(nodes: Nodes, place: Path) -> None:
    assert chia.is_cached("shorthand") is False
    handle = chia.start_cache(1, str(place / "cache"), "GB", yaml_path=written(place, CACHE))
    try:
        assert ray.get(handle.get_config.remote()) == {"shorthand": True, "listed": True, "tagged": ["iter.*", "warmup"]}
        assert [chia.is_cached(name) for name in ("shorthand", "listed", "tagged", "idle", "other")] == [True, True, False, False, False]
        assert [chia.is_cached("tagged", tag) for tag in ("iter0", "warmup", "warmup2")] == [True, True, False]
        assert [chia.is_cached(name) for name in ("Class.listed", "Class.other", "Class.idle")] == [True, False, False]
    finally:
        chia.stop_cache()


def test_mistakes_are_told(nodes: Nodes, place: Path) -> None:
    with pytest.raises(ValueError, match=r"'PB'.*KB, KiB"):
        chia.start_cache(1, str(place / "cache"), "PB")
    with pytest.raises(ValueError, match="line 3"):
        chia.start_cache(1, str(place / "cache"), yaml_path=written(place, "cache:\n  f:\n    cached: true\n"))
    with pytest.raises(ValueError, match="line 2"):
        chia.Bypass(written(place, "bypass:\n  f: maybe\n"))
    assert not (place / "cache").exists()
    assert chia.get_active_cache() is None


def test_pickles_of_chia_are_refused_and_taken_over_on_request(nodes: Nodes, place: Path) -> None:
    name = f"a_{hashlib.sha256(b'a').hexdigest()[:16]}.pkl"
    (place / name).write_bytes(pickle.dumps(("a", [1, 2])))
    with pytest.raises(forebay.errors.RootRefused, match="import_chia"):
        chia.start_cache(1, str(place), "MB")
    assert os.listdir(place) == [name]
    with forebay.Cache(place / "new") as cache:
        assert cache.tasks("chia").import_chia(place) == 1
    store = chia.Cache.options(resources={"head": 1}).remote(str(place / "new"), 1 << 20, {})
    assert ray.get(store.read.remote("a")) == (True, [1, 2])


# -- in place of CHIA's own --------------------------------------------------------------------------------------------

HERE = Path(__file__).parent


@pytest.mark.rotates
@pytest.mark.parametrize("source", [str(HERE / "like_chia"), ""], ids=["like older ones", "chialoops"])
def test_a_flow_of_chia_s_functions(nodes: Nodes, place: Path, source: str) -> None:
    if not source and importlib.util.find_spec("chia") is None:
        pytest.skip("chialoops is not installed")
    paths = [*filter(None, [source]), str(HERE.parents[1] / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    words = [sys.executable, str(HERE / "chia_flow.py"), nodes.cluster.address, str(place)]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(words, capture_output=True, text=True, timeout=200, env=env)
    assert done.returncode == 0, done.stderr[-4000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "ours": True, "first": 49, "nested": 64, "kept": ["iter7", "iter8"], "method": [10, ["iter7", "iter8", "built"], 10],
        "again": [49, 64, 81], "nested again": 64, "text": "from a file", "by a worker": 49, "runs": ["7", "8", "5", "9"],
    }  # fmt: skip
    with forebay.Cache(place / "cache") as cache:
        assert [cache.tasks("chia").read(f"iter{x}") for x in (7, 8, 9)] == [(True, 49), (True, 64), (True, 81)]


OWN = """
import runpy, sys
from forebay.adapters import chia
chia.install()
runpy.run_module(sys.argv.pop(), run_name="__main__", alter_sys=True)
"""


@pytest.mark.rotates
@pytest.mark.parametrize(("script", "checks"), [("test_cache_tags", 69), ("test_bypass_tags", 30)])
def test_chia_s_own_scripts(nodes: Nodes, tmp_path: Path, script: str, checks: int) -> None:
    if importlib.util.find_spec("chia") is None:
        pytest.skip("chialoops is not installed")
    env = os.environ | {"RAY_ADDRESS": nodes.cluster.address, "TMPDIR": str(tmp_path)}
    words = [sys.executable, "-c", OWN, f"chia.base.test.{script}"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=200, env=env)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert (done.stdout.count("PASS:"), done.stdout.count("FAIL:")) == (checks, 0)


def test_install_and_uninstall(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(HERE / "like_chia"))
    for name in [name for name in sys.modules if name.partition(".")[0] == "chia"]:
        monkeypatch.delitem(sys.modules, name)
    from chia.base import bypass, cache  # type: ignore[import-not-found]

    before = dict(vars(cache)), dict(vars(bypass))
    for _ in range(2):
        chia.install()
    for module in (cache, bypass):
        replaced = {name for name, value in vars(module).items() if value is not before[module is bypass].get(name)}
        assert replaced == set(chia._OURS[module.__name__])
        assert all(vars(module)[name] is ours for name, ours in chia._OURS[module.__name__].items())
    chia.uninstall()
    assert (dict(vars(cache)), dict(vars(bypass))) == before
    for name in [name for name in sys.modules if name.partition(".")[0] == "chia"]:
        del sys.modules[name]


def test_another_package_of_that_name_is_no_chia(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "chia").mkdir()
    (tmp_path / "chia" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(forebay.errors.MissingExtra, match=r"chia\.base.*pip install chialoops"):
        chia.install()
    sys.modules.pop("chia", None)


@ray.remote(num_cpus=0)
class OfChia:
    """CHIA's actor has no root."""

    def size_bytes(self) -> int:
        return 0


@pytest.mark.rotates
def test_a_cache_of_chia_s_own_is_not_taken_for_ours(nodes: Nodes, place: Path) -> None:
    theirs = OfChia.options(name=chia.NAME, namespace="theirs").remote()
    ray.get(theirs.size_bytes.remote())
    with pytest.raises(forebay.errors.ConfigError, match="CHIA's own cache runs"):
        chia.start_cache(1, str(place / "cache"), "MB", namespace="theirs")
    assert not (place / "cache").exists()
    chia.stop_cache("theirs")


def test_units_are_chia_s() -> None:
    assert chia.UNITS["KB"] == chia.UNITS["KIB"] == 1024
    assert chia.UNITS["TIB"] == 1024**4
    assert set(chia.UNITS) == {"B", "KB", "MB", "GB", "TB", "KIB", "MIB", "GIB", "TIB"}


# -- bypass ------------------------------------------------------------------------------------------------------------

BYPASS = """
bypass:
  add: true
  tagged:
    bypass: true
    tags: "iter0_.*"
  text:
    bypass: true
    data: {path}
  idle: false
"""


@pytest.fixture
def bypass(place: Path) -> chia.Bypass:
    (place / "text.txt").write_text("from the head\n")
    return chia.Bypass(written(place, BYPASS.format(path=place / "text.txt")))


def answer(tag: str | None, data_path: str | None, *args: Any, **kwargs: Any) -> int:
    return 42


def test_the_gates_of_a_bypass(bypass: chia.Bypass, caplog: pytest.LogCaptureFixture) -> None:
    assert chia.get_active_bypass() is bypass
    assert bypass.active
    assert [bypass.is_bypassed("add", None, 1, 2) for _ in range(2)] == [False] * 2
    assert caplog.text.count("add is to be bypassed, but has neither a provider nor data") == 1
    for name in ("add", "tagged", "idle", "other"):
        bypass.set_provider(name, answer)
    assert bypass.is_bypassed("add", None, 1, 2)
    assert bypass.is_bypassed("add", "anything")
    assert bypass.is_bypassed("text")
    assert [bypass.is_bypassed("tagged", tag) for tag in ("iter0_a", "iter1_a", None)] == [True, False, False]
    assert not any(bypass.is_bypassed(name) for name in ("idle", "other"))


def test_a_method_goes_by_its_qualified_name_or_by_the_bare_one(place: Path) -> None:
    bypass = chia.Bypass(written(place, "bypass:\n  build: true\n  Test.build: false\n  Other.run: true\n"))
    for name in ("build", "Builder.build", "run"):
        bypass.set_provider(name, functools.partial(str, name))
    names = ("build", "Builder.build", "pkg.Maker.build", "Test.build", "Other.run", "run")
    assert [bypass.is_bypassed(name) for name in names] == [True, True, True, False, True, False]
    assert [bypass.get_provider_info(name)[0]() for name in names[:3]] == ["build", "Builder.build", "build"]


def test_other_sections_of_the_file(nodes: Nodes, place: Path) -> None:
    path = written(place, "machines: {1: {cores: 8}}\ncache:\n  f: true\nbypass:\n  g: true\n")
    chia.start_cache(1, str(place / "cache"), "MB", yaml_path=path)
    try:
        assert chia.is_cached("f")
        assert chia.Bypass(path).active
    finally:
        chia.stop_cache()


def test_a_file_that_is_not_there(place: Path) -> None:
    for call in (chia.Bypass, chia._load_cache_config):
        with pytest.raises(FileNotFoundError) as caught:
            call(place / "flow.yaml")
        assert isinstance(caught.value, forebay.errors.ConfigError)
        assert caught.value.filename == str(place / "flow.yaml")


def test_chias_own_lines_are_logged(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    rules = "bypass:\n  f: {bypass: true, data: x.md, tags: a}\n  g: true\n  h: false\ncache:\n  f: {cache: true, tags: a}\n  g: true\n"
    bypass = chia.Bypass(written(place, rules))
    bypass.set_provider("g", answer)
    chia._load_cache_config(place / "flow.yaml")
    assert [bypass.get_provider_info(name)[0].__name__ for name in ("f", "C.g")] == ["_default_file_provider", "answer"]
    assert [(record.name, record.getMessage()) for record in caplog.records if "file server" not in record.msg] == [
        ("chia.bypass", "Bypass: f data=x.md tags=['a']"),
        ("chia.bypass", "Bypass: g data=None tags=None"),
        ("chia.cache", "Cache: f tags=['a']"),
        ("chia.cache", "Cache: g tags=None"),
        ("chia.bypass", "BYPASS f (data=x.md, provider=False)"),
        ("chia.bypass", "BYPASS C.g (data=None, provider=True)"),
    ]


def test_the_condition_is_asked_last(bypass: chia.Bypass) -> None:
    asked: list[Any] = []
    bypass.set_provider("tagged", answer)
    bypass.set_cond("tagged", lambda tag, data_path, x: asked.append((tag, data_path, x)) or x % 2 == 0)
    assert [bypass.is_bypassed("tagged", "iter0_a", x) for x in (2, 3)] == [True, False]
    assert bypass.is_bypassed("tagged", "other", 2) is False
    assert asked == [("iter0_a", None, 2), ("iter0_a", None, 3)]


def test_what_programs_set_by_hand(bypass: chia.Bypass) -> None:
    mine = chia.Bypass()
    mine._bypass, mine._tag_patterns = dict(bypass._bypass), {"add": ["nested.*"]}
    mine.set_provider("add", answer)
    assert [mine.is_bypassed("add", tag) for tag in ("nested_add", "add")] == [True, False]


def test_without_a_file_nothing_is_bypassed() -> None:
    bypass = chia.Bypass()
    bypass.set_provider("add", answer)
    assert not bypass.active
    assert not bypass.is_bypassed("add")


@ray.remote(num_cpus=0)
def provided(state: dict[str, Any], name: str) -> Any:
    bypass = chia.Bypass()
    bypass.load_state(state)
    provider, data_path = bypass.get_provider_info(name)
    server = bypass.file_server()
    again = ray.get([server.exists.remote(data_path), server.get_bytes.remote(data_path)]) if data_path else None
    return bypass.is_bypassed(name, "iter0_a"), provider("iter0_a", data_path), again


@pytest.mark.rotates
def test_the_state_goes_to_workers_and_files_come_from_the_head(nodes: Nodes, place: Path) -> None:
    (place / "text.txt").write_text("from the head\n")
    bypass = chia.Bypass(written(place, BYPASS.format(path=place / "text.txt")))
    with pytest.raises(KeyError, match="add"):
        bypass.get_provider_info("add")
    bypass.set_provider("add", answer)
    bypass.set_provider("tagged", answer)
    bypass.set_cond("tagged", lambda *args: False)
    told = [provided.options(**AWAY).remote(bypass.get_state(), name) for name in ("add", "tagged", "text")]
    assert ray.get(told) == [(True, 42, None), (False, 42, None), (True, "from the head\n", [True, b"from the head\n"])]
