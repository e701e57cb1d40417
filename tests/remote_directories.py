"""Remote directories for tests, of all kinds, and a look at what was handed out."""

from __future__ import annotations

import json
import os
import stat
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from forebay._engine.files.blobs import checksum_of
from forebay.testing import ScriptedServer
from tests.servers.counting import Shelf, content, shelf  # noqa: F401 (a fixture)
from tests.servers.rgw import RgwServer, rgw_server  # noqa: F401 (a fixture)

CKPT = "bucket/run/step_100"
MARKER = ".forebay.json"
FILES = {
    "config.json": b"{}",
    "empty": b"",
    "model-00001.safetensors": content("model-00001", 300_000),
    "model-00002.safetensors": content("model-00002", 200_000),
    "sub/deep/optim.pt": content("optim", 50_000),
    "sub/with space #1?.txt": b"a name that URLs must quote",
    "sub/ünïcode.bin": content("unicode", 1000),
}
TOTAL = sum(map(len, FILES.values()))


def write_files(top: Path, files: Mapping[str, bytes] = FILES) -> Path:
    """A local directory with these files."""
    for name, body in files.items():
        (top / name).parent.mkdir(parents=True, exist_ok=True)
        (top / name).write_bytes(body)
    return top


def files_of(path: str | os.PathLike[str]) -> dict[str, bytes]:
    """What lies below a directory; a symbolic link, a special file, or what the system does not list is an error."""

    def refuse(error: OSError) -> None:
        raise error

    found = {}
    for folder, folders, names in os.walk(path, onerror=refuse):
        for name in [*folders, *names]:
            whole = os.path.join(folder, name)
            mode = os.lstat(whole).st_mode
            assert stat.S_ISREG(mode) or stat.S_ISDIR(mode), whole
        for name in names:
            whole = os.path.join(folder, name)
            found[os.path.relpath(whole, path)] = Path(whole).read_bytes()
    return found


def modes_of(path: str | os.PathLike[str]) -> set[tuple[str, int]]:
    """The kinds and modes of all that is in a directory, and its own."""
    found = {("d", stat.S_IMODE(os.stat(path).st_mode))}
    for folder, folders, names in os.walk(path):
        found |= {("d", stat.S_IMODE(os.lstat(os.path.join(folder, name)).st_mode)) for name in folders}
        found |= {("f", stat.S_IMODE(os.lstat(os.path.join(folder, name)).st_mode)) for name in names}
    return found


def inodes_of(path: str | os.PathLike[str]) -> dict[str, int]:
    return {name: os.stat(os.path.join(path, name)).st_ino for name in files_of(path)}


def marker_of(files: Mapping[str, bytes], *, complete: bool = True, etags: Mapping[str, str] | None = None) -> bytes:
    """The manifest that an upload of these files leaves."""
    known = etags or {}
    described = {name: {"size": len(body), "xxh3": checksum_of(body).hex(), "etag": known.get(name)} for name, body in files.items()}
    return json.dumps({"forebay": 1, "complete": complete, "files": described}).encode()


def quoted(name: str) -> str:
    from urllib.parse import quote

    return quote(name, safe="/~")


def http_directory(server: ScriptedServer, files: Mapping[str, bytes], folder: str = "/run/step_100") -> str:
    """Files and their manifest on an HTTP server; the URL of the directory."""
    for name, body in files.items():
        server.put(f"{folder}/{quoted(name)}", body)
    etags = {name: server.objects[f"{folder}/{quoted(name)}"].etag or "" for name in files}
    server.put(f"{folder}/{MARKER}", marker_of(files, etags=etags))
    return f"{server.url}{folder}/"


@dataclass
class Remote:
    """A directory of some kind: ``url`` (or path) and ``filesystem`` are what `Cache.directory` takes. ``put`` and ``remove`` change it."""

    url: str
    filesystem: Any
    put: Callable[[str, bytes], object]
    remove: Callable[[str], object]

    @property
    def how(self) -> dict[str, Any]:
        return {} if self.filesystem is None else {"filesystem": self.filesystem}


def _on_shelf(request: pytest.FixtureRequest, make: Callable[[Shelf], Any]) -> Remote:
    there: Shelf = request.getfixturevalue("shelf")
    return Remote(CKPT, make(there), lambda name, body: there.put(f"{CKPT}/{name}", body), lambda name: there.remove(f"{CKPT}/{name}"))


def arrow(request: pytest.FixtureRequest) -> Remote:
    pytest.importorskip("pyarrow")
    return _on_shelf(request, lambda there: there.arrow())


def arrow_helper(request: pytest.FixtureRequest) -> Remote:
    pytest.importorskip("pyarrow")
    return _on_shelf(request, lambda there: there.arrow(helper=True))


def fsspec_etags(request: pytest.FixtureRequest) -> Remote:
    return _on_shelf(request, lambda there: there.fsspec())


def fsspec_helper(request: pytest.FixtureRequest) -> Remote:
    return _on_shelf(request, lambda there: there.fsspec(helper=True, etags=False))


def memory(request: pytest.FixtureRequest) -> Remote:
    import fsspec

    fs, base = fsspec.filesystem("memory"), f"/{uuid.uuid4().hex}/step_100"
    return Remote(
        f"memory:/{base}", None, lambda name, body: fs.pipe_file(f"{base}/{name}", body), lambda name: fs.rm_file(f"{base}/{name}")
    )


def http(request: pytest.FixtureRequest) -> Remote:
    server: ScriptedServer = request.getfixturevalue("server")
    files: dict[str, bytes] = {}

    def put(name: str, body: bytes) -> None:
        if name == MARKER:
            server.put(f"/run/step_100/{MARKER}", body)
            return
        files[name] = body
        http_directory(server, files)

    def remove(name: str) -> None:
        del files[name], server.objects[f"/run/step_100/{quoted(name)}"]
        http_directory(server, files)

    return Remote(f"{server.url}/run/step_100", None, put, remove)


def s3(request: pytest.FixtureRequest) -> Remote:
    pytest.importorskip("botocore")
    server: RgwServer = request.getfixturevalue("aws")
    client, folder = server.client(), f"{uuid.uuid4().hex}/step_100"
    client.create_bucket(Bucket="directories")
    return Remote(
        f"s3://directories/{folder}", None,
        lambda name, body: client.put_object(Bucket="directories", Key=f"{folder}/{name}", Body=body),
        lambda name: client.delete_object(Bucket="directories", Key=f"{folder}/{name}"),
    )  # fmt: skip


KINDS = [arrow, arrow_helper, fsspec_etags, fsspec_helper, memory, http, s3]
every_kind = pytest.mark.parametrize("remote", KINDS, ids=lambda make: make.__name__, indirect=True)
some_kinds = pytest.mark.parametrize("remote", [arrow, memory, http, s3], ids=lambda make: make.__name__, indirect=True)


@pytest.fixture
def remote(request: pytest.FixtureRequest) -> Remote:
    """A remote directory that holds FILES: on a counting pyarrow filesystem, unless the test says ``@every_kind``."""
    found: Remote = getattr(request, "param", arrow)(request)
    for name, body in FILES.items():
        found.put(name, body)
    return found


@pytest.fixture
def aws(rgw_server: RgwServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> RgwServer:  # noqa: F811
    """The S3 server, with credentials for it, and nothing else of the user's, in the environment."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "no-config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "no-credentials"))
    monkeypatch.setenv("AWS_ENDPOINT_URL", rgw_server.url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", rgw_server.key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", rgw_server.secret)
    return rgw_server
