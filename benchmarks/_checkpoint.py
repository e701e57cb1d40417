"""Processes that bring a directory to this host, each in its own way: `Member`s, told what to do over a pipe.

``python benchmarks/_checkpoint.py WAY SPEC`` is one of them. It imports what it needs, opens nothing, says that it is ready, and begins
when it is told to: the clock knows no imports. obstore hangs after a fork, and so does pyarrow's S3: each is a new interpreter.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

MB = 1_000_000


@dataclass(frozen=True)
class Spec:
    """Where the directory is: ``path`` is ``bucket/name`` on the S3 server ``endpoint``, or on the counting filesystem in ``shelf``.
    ``root``: of the cache; ``target``: where those write who have none."""

    path: str
    root: str
    target: str
    endpoint: str = ""
    key: str = ""
    secret: str = ""
    shelf: str = ""
    helper: bool = False

    @property
    def url(self) -> str:
        return f"s3://{self.path}"

    def arrow(self) -> Any:
        """The directory's filesystem, of pyarrow."""
        if self.shelf:
            from tests.servers.counting import Shelf

            return Shelf(self.shelf).arrow(helper=self.helper)
        from pyarrow.fs import S3FileSystem

        scheme, _, address = self.endpoint.partition("://")
        return S3FileSystem(access_key=self.key, secret_key=self.secret, endpoint_override=address, scheme=scheme, region="us-east-1")


Way = Callable[[Spec], "contextlib.AbstractContextManager[str]"]

# -- ways --------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def forebay(spec: Spec) -> Iterator[str]:
    """With the opening of the cache."""
    import forebay

    with forebay.Cache(spec.root, budget="8GB") as cache, _ours(spec, cache).as_directory() as path:
        yield path


def _ours(spec: Spec, cache: Any) -> Any:
    import forebay

    if spec.shelf:
        return forebay.Checkpoint(spec.path, filesystem=spec.arrow(), cache=cache)
    return forebay.Checkpoint(spec.url, cache=cache)


@contextlib.contextmanager
def ray(spec: Spec) -> Iterator[str]:
    import ray.train

    with ray.train.Checkpoint(spec.path, filesystem=spec.arrow()).as_directory() as path:
        yield path


@contextlib.contextmanager
def ray_to_directory(spec: Spec) -> Iterator[str]:
    import ray.train

    yield ray.train.Checkpoint(spec.path, filesystem=spec.arrow()).to_directory(spec.target)


@contextlib.contextmanager
def arrow(spec: Spec) -> Iterator[str]:
    import pyarrow.fs

    os.makedirs(spec.target)
    here = pyarrow.fs.LocalFileSystem()
    pyarrow.fs.copy_files(spec.path, spec.target, source_filesystem=spec.arrow(), destination_filesystem=here, use_threads=not spec.shelf)
    yield spec.target


@contextlib.contextmanager
def s3fs(spec: Spec) -> Iterator[str]:
    import s3fs

    there = s3fs.S3FileSystem(key=spec.key, secret=spec.secret, endpoint_url=spec.endpoint, skip_instance_cache=True)
    there.get(f"{spec.path}/", f"{spec.target}/", recursive=True)
    yield spec.target


@contextlib.contextmanager
def obstore(spec: Spec) -> Iterator[str]:
    """16 objects at a time, as many threads: each as one stream into a file."""
    bucket, _, folder = spec.path.partition("/")
    store = _obstore(spec, bucket)

    def fetch(name: str) -> None:
        path = os.path.join(spec.target, name.removeprefix(f"{folder}/"))
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb", buffering=0) as file:
            file.writelines(store.get(name).stream(min_chunk_size=1 << 20))

    names = [each["path"] for batch in store.list(f"{folder}/") for each in batch]
    with ThreadPoolExecutor(16) as crew:
        list(crew.map(fetch, names))
    yield spec.target


@contextlib.contextmanager
def obstore_ranges(spec: Spec) -> Iterator[str]:
    """One object after the other, in 8 ranges of 8 MiB at a time."""
    bucket, _, folder = spec.path.partition("/")
    store, part = _obstore(spec, bucket), 8 << 20
    for found in [each for batch in store.list(f"{folder}/") for each in batch]:
        name = found["path"]
        path = os.path.join(spec.target, name.removeprefix(f"{folder}/"))
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb", buffering=0) as file, ThreadPoolExecutor(8) as crew:

            def fetch(start: int, name: str = name, fd: int = file.fileno(), size: int = found["size"]) -> None:
                os.pwrite(fd, store.get_range(name, start=start, end=min(start + part, size)), start)

            list(crew.map(fetch, range(0, found["size"], part)))
    yield spec.target


def _obstore(spec: Spec, bucket: str) -> Any:
    from obstore.store import S3Store

    return S3Store(
        bucket, endpoint=spec.endpoint, access_key_id=spec.key, secret_access_key=spec.secret, region="us-east-1",
        virtual_hosted_style_request=False, client_options={"allow_http": True},
    )  # fmt: skip


WAYS: dict[str, Way] = {each.__name__: each for each in (forebay, ray, ray_to_directory, arrow, s3fs, obstore, obstore_ranges)}
WRITING = (
    "forebay._engine.writers forebay._engine.check forebay._engine.flight forebay._engine.seeing forebay._engine.index.settings"
    " forebay._engine.packs.segments"
)
"""What a process loads when it writes to a root for the first time."""
IMPORTS = {
    "forebay": f"forebay forebay.cache forebay.checkpoint forebay.remote.http sqlite3 {WRITING}",
    "ray": "ray.train pyarrow.fs",
    "ray_to_directory": "ray.train pyarrow.fs",
    "arrow": "pyarrow.fs",
    "s3fs": "s3fs aiobotocore.session",
    "obstore": "obstore.store",
    "obstore_ranges": "obstore.store",
}
OURS_TOO = {True: "forebay.remote.filesystems pyarrow.fs", False: "forebay.remote.s3 botocore.session"}

# -- one process -------------------------------------------------------------------------------------------------------


def _imports(way: str, spec: Spec) -> list[str]:
    """What is loaded before the clock runs."""
    names = f"{IMPORTS[way]} {OURS_TOO[bool(spec.shelf)]}" if way == "forebay" else IMPORTS[way]
    return names.split()


def _resident(kind: str, process: str = "self") -> float:
    """MB; ``VmHWM``: the most that there ever were."""
    with open(f"/proc/{process}/status") as file:
        return next((int(line.split()[1]) for line in file if line.startswith(kind)), 0) / 1000


def _helpers() -> list[str]:
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return file.read().split()


def _say(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


def member(way: str, spec: Spec) -> None:
    """Ready; "go": have the directory, and say when; "leave": let go of it."""
    for module in _imports(way, spec):
        importlib.import_module(module)
    if spec.shelf:
        spec.arrow()
    before = _resident("VmRSS")
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    _say(ready=True)
    sys.stdin.readline()
    began, cpu = time.monotonic(), time.process_time()
    with WAYS[way](spec) as path:
        ended, cpu = time.monotonic(), time.process_time() - cpu
        grown = _resident("VmHWM") - before + sum(_resident("VmHWM", helper) for helper in _helpers())
        _say(began=began, ended=ended, cpu=cpu, grown=grown, files=_sizes(path))
        sys.stdin.readline()


def _sizes(path: str) -> tuple[int, int]:
    """How many files, and bytes."""
    found = [os.path.getsize(os.path.join(folder, name)) for folder, _, names in os.walk(path) for name in names]
    return len(found), sum(found)


class Member:
    """A process that holds a directory from `go` to `leave`."""

    def __init__(self, way: str, spec: Spec) -> None:
        words = [sys.executable, str(HERE / "_checkpoint.py"), way, json.dumps(dataclasses.asdict(spec))]
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=_environment(spec))

    def _hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self._process.args} ended with {self._process.wait()}")
        said: dict[str, Any] = json.loads(line)
        return said

    def ready(self) -> None:
        self._hear()

    def go(self) -> None:
        self._tell("go")

    def held(self) -> dict[str, Any]:
        return self._hear()

    def _tell(self, word: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{word}\n")
        self._process.stdin.flush()

    def leave(self) -> None:
        self._tell("leave")
        if self._process.wait(120):
            raise SystemExit(f"{self._process.args} ended with {self._process.returncode}")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


def _environment(spec: Spec) -> dict[str, str]:
    """The S3 server's credentials, and nothing of the user's own."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("AWS_") and "proxy" not in name.lower()}
    said = {"AWS_ENDPOINT_URL": spec.endpoint, "AWS_ACCESS_KEY_ID": spec.key, "AWS_SECRET_ACCESS_KEY": spec.secret}
    off = {"AWS_EC2_METADATA_DISABLED": "true", "AWS_CONFIG_FILE": "/nonexistent", "AWS_SHARED_CREDENTIALS_FILE": "/nonexistent"}
    place = os.path.dirname(spec.root)  # Ray downloads to the temporary directory: to the same disk as the others
    return kept | off | {name: value for name, value in said.items() if value} | {"TMPDIR": place}


@contextlib.contextmanager
def ready(members: list[Member]) -> Iterator[None]:
    """All of them imported; gone in the end."""
    try:
        for each in members:
            each.ready()
        yield
    finally:
        for each in members:
            each.kill()


if __name__ == "__main__":
    member(sys.argv[1], Spec(**json.loads(sys.argv[2])))
