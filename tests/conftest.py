"""What holds for every test: profiles, skips with a reason, and nothing of the test's own left open behind it."""

from __future__ import annotations

import gc
import importlib.util
import itertools
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

import forebay
from forebay.testing import ScriptedServer
from tests import parts
from tests.processes import COMMON_GROUP, USERS, ProcessGroup
from tests.starts import refuse, starts

pytest_plugins = ["tests.known_flaky", "tests.remote_directories"]

SRC = str(Path(__file__).parents[1] / "src")
os.environ["PYTHONPATH"] = os.pathsep.join([SRC, *filter(None, [os.environ.get("PYTHONPATH")])])  # for interpreters that tests start

# The caller may have a forebay.toml. Nobody can create this directory, not even root: Chromium and matplotlib try.
os.environ["XDG_CONFIG_HOME"] = "/proc/nonexistent"

# Sockets lie there, of multiprocessing and of Ray, and the path of one may have 107 bytes.
if len(tempfile.gettempdir()) > 40 and os.access("/tmp", os.W_OK):
    os.environ["TMPDIR"] = tempfile.tempdir = "/tmp"

# A shell that starts us in the background ignores Ctrl-C for us and for all that we start: tests that press it would wait for ever.
signal.signal(signal.SIGINT, signal.default_int_handler)

hypothesis.settings.register_profile("dev", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "dev")

passed = pytest.StashKey[bool]()

HERE = Path(__file__).parent
OF_FRAMEWORKS = (HERE / "adapters", HERE / "project" / "test_examples.py")
"""What imports torch, Ray and the like. A process that has them forks ten times as slowly, and most tests fork: so these run apart, with
single tests that are marked ``frameworks`` or use the fixture `torch`."""
FRAMEWORKS = {"ray", "torch"}


MEMORY = Path("/dev/shm")
ROOM = 4 << 30


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="only tests that start no process and no server")
    parser.addoption("--frameworks", choices=("with", "without", "only"), default="with", help="tests of adapters and examples")
    parser.addoption("--part", default="", help="of what rotates: today, the number of a day, or all; without it all but stress tests")
    parser.addoption("--on-disk", action="store_true", help="temporary files lie on a disk; else in memory, where there is room for them")


def pytest_configure(config: pytest.Config) -> None:
    parts.choose(config.getoption("part"))
    if config.getoption("quick"):
        refuse()
    if not config.getoption("on_disk") and MEMORY.is_dir() and os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free >= ROOM:
        os.environ["TMPDIR"] = tempfile.tempdir = str(MEMORY)
    disk = shutil.disk_usage(tempfile.gettempdir())
    if disk.free - disk.total // 20 < ROOM // 4:  # caches leave 5% of a disk free: hundreds of tests would find nothing cached
        raise pytest.UsageError(f"{tempfile.gettempdir()} has {disk.free >> 30} of {disk.total >> 30} GiB free: make room, or set TMPDIR")


def pytest_report_header(config: pytest.Config) -> list[str]:
    place = tempfile.gettempdir()
    return [f"temporary files: {place} ({shutil.disk_usage(place).free >> 30} GiB free)", parts.choose(config.getoption("part"))]


def frameworks_wanted(config: pytest.Config) -> str:
    return "without" if config.getoption("quick") else config.getoption("frameworks")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    wanted = frameworks_wanted(config)
    if wanted == "with" or collection_path.is_dir():
        return None
    is_of_one = any(collection_path.is_relative_to(place) for place in OF_FRAMEWORKS)
    if wanted == "without":
        return is_of_one or None
    return not (is_of_one or re.search(r"torch: Any|mark\.frameworks", collection_path.read_text())) or None


def is_of_frameworks(item: pytest.Item) -> bool:
    in_folder = any(item.path.is_relative_to(place) for place in OF_FRAMEWORKS)
    return in_folder or item.get_closest_marker("frameworks") is not None or "torch" in getattr(item, "fixturenames", ())


def pytest_collection_finish(session: pytest.Session) -> None:
    # What is imported at its first use is imported once, not in each forked child.
    for path in Path(SRC, "forebay").rglob("*.py"):  # to walk packages would be to import those of torch and Ray
        name = ".".join(path.relative_to(SRC).with_suffix("").parts)
        if not name.startswith(("forebay.adapters", "forebay.cli.__main__")):
            importlib.import_module(name.removesuffix(".__init__"))
    if importlib.util.find_spec("cloudpickle"):
        importlib.import_module("cloudpickle")
    if frameworks_wanted(session.config) == "without" and sys.modules.keys() & FRAMEWORKS:
        raise pytest.UsageError("a module that is imported before the tests imports torch or Ray: all that fork would be slow")
    # What was imported stays: neither a collection nor a child's counts touch it any more.
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def temporary(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Directories of tests lie where this process began: not where the first test that wants one says that temporary files are, and which
    goes with it."""
    tmp_path_factory.getbasetemp()


LONG_FIRST = ("faults", "power", "stress", "crash", "adapters", "project/test_examples.py", "engine", "scenarios")
"""Of the files that two processes share, those with the longest tests come first: else one is left alone with them at the end."""

START_RAY = ("adapters/ray", "adapters/test_chia.py", "adapters/test_world_ray.py")
"""These come last: what a process forks in which Ray was once started does not always survive."""


def turn_of(item: pytest.Item) -> int:
    path = item.path.relative_to(HERE)
    if any(path.is_relative_to(part) for part in START_RAY):
        return len(LONG_FIRST) + 1
    return next((turn for turn, part in enumerate(LONG_FIRST) if path.is_relative_to(part)), len(LONG_FIRST))


def is_of_part(item: pytest.Item) -> bool:
    """Whether a test is of the part that ``--part`` chose."""
    if item.get_closest_marker("stress") is not None:
        return bool(item.config.getoption("part")) and parts.takes(item.nodeid, parts.STRESS)
    rotates = item.get_closest_marker("rotates")
    return rotates is None or parts.takes(next(iter(rotates.args), item.nodeid))


def is_wanted(item: pytest.Item) -> bool:
    """Whether the options leave a test in."""
    frameworks = frameworks_wanted(item.config)
    return (
        (frameworks == "with" or is_of_frameworks(item) == (frameworks == "only"))
        and is_of_part(item)
        and not (item.config.getoption("quick") and starts(item))
    )


def pytest_collection_modifyitems(items: list[pytest.Item], config: pytest.Config) -> None:
    items.sort(key=turn_of)
    wanted = [item for item in items if is_wanted(item)]
    config.hook.pytest_deselected(items=list(set(items) - set(wanted)))
    items[:] = wanted
    if config.getoption("frameworks") == "only":
        # Some of the single tests fork, too, which a process where Ray was once started does not survive.
        items.sort(key=lambda item: item.path.is_relative_to(HERE / "adapters"))
    if os.geteuid() != 0:
        for item in items:
            if item.get_closest_marker("root"):
                item.add_marker(pytest.mark.skip(reason="needs root"))


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """What the tests of a file shared can go when it ends."""
    if nextitem is None or nextitem.path != item.path:
        gc.unfreeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = yield
    if report.when == "call":
        item.stash[passed] = report.passed
    return report


def descriptors(below: Path) -> set[str]:
    """The files under a directory that this process has open."""
    links = set()
    for number in os.listdir("/proc/self/fd"):
        try:
            links.add(os.readlink(f"/proc/self/fd/{number}"))
        except FileNotFoundError:  # the listing's own
            continue
    return {link for link in links if link.startswith(f"{below}/")}


def mapped(below: Path) -> set[str]:
    """The files under a directory that this process has mapped."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    paths = {line.split(maxsplit=5)[5] for line in lines if line.count(" ") > 4 and "/" in line}
    return {path for path in paths if path.startswith(f"{below}/")}


def threads_of_forebay(before: set[threading.Thread]) -> set[str]:
    """New threads that a library may not leave behind: those that would hold up the interpreter's exit, and its own."""
    new = set(threading.enumerate()) - before
    return {t.name for t in new if not t.daemon or t.name.startswith("forebay")}


@pytest.fixture(autouse=True)
def no_hook_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller's own settings do not reach a test."""
    for name in [name for name in os.environ if name.startswith("FOREBAY_")]:
        monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def torch() -> Any:
    return pytest.importorskip("torch")


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer() as found:
        yield found


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[forebay.Cache]:
    """One that is sound at the end."""
    with forebay.Cache(tmp_path / "root", budget=64 << 20, min_free=0) as cache:
        yield cache
        assert cache.check(deep=True) == []


@pytest.fixture
def children() -> Iterator[ProcessGroup]:
    """Starts processes; what still runs at the end of the test is killed."""
    group = ProcessGroup()
    yield group
    group.kill()


@pytest.fixture
def quick_path(tmp_path: Path) -> Iterator[Path]:
    """A directory in memory where there is one: what a killed process wrote is there either way, and thousands of openings are quicker."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="forebay-test-", dir=memory) as name:
        yield Path(name)


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """After a test that passed, none of the files under its `tmp_path` is open or mapped, and no thread goes on.

    A test that keeps something on purpose is marked ``@pytest.mark.keeps("why")``."""
    before = set(threading.enumerate())
    frameworks = sys.modules.keys() & FRAMEWORKS
    yield
    if frameworks_wanted(request.config) == "without":
        assert sys.modules.keys() & FRAMEWORKS == frameworks, "the test belongs to those that are marked with `frameworks`"
    if not request.node.stash.get(passed, False) or request.node.get_closest_marker("keeps"):
        return
    place = request.node.funcargs.get("tmp_path")
    request.node.funcargs.clear()  # else the fixtures' values live longer than the fixtures
    deadline = time.monotonic() + 30  # a thread that waits for a remote ends with its request
    for look in itertools.count():
        left = {"threads": threads_of_forebay(before)}
        if place is not None:
            left |= {"descriptors": descriptors(place), "mappings": mapped(place)}
        if not any(left.values()) or time.monotonic() > deadline:
            break
        if look:
            gc.unfreeze()
            time.sleep(0.01)
        gc.collect()
    if look:
        gc.freeze()  # what lives now lives on: else each test would have its collection look at the objects of all before it
    assert {what: names for what, names in left.items() if names} == {}


@pytest.fixture
def public(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory that other users can get into, unlike `tmp_path`."""
    place = Path(tempfile.gettempdir(), f"forebay-public-{os.getpid()}-{time.monotonic_ns()}")
    place.mkdir()
    place.chmod(0o755)
    yield place
    shutil.rmtree(place)


@pytest.fixture
def scratch(public: Path) -> Path:
    """A directory such as /local_scratch: everybody may write to it."""
    place = public / "scratch"
    place.mkdir()
    place.chmod(0o1777)
    return place


@pytest.fixture
def project(public: Path) -> Path:
    """A group's directory."""
    place = public / "project"
    place.mkdir()
    os.chown(place, USERS[0], COMMON_GROUP)
    place.chmod(0o2770)
    return place
