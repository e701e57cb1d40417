"""What a new process imports on its way to a first hit: each module more is time in every worker that starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import forebay
from forebay.testing import ScriptedServer

NOT_NEEDED = {
    # of the standard library
    "asyncio", "concurrent", "dataclasses", "hashlib", "importlib.metadata", "inspect", "logging", "pickle", "random", "secrets", "shutil",
    "socket", "sqlite3", "ssl", "subprocess", "tempfile", "traceback",
    # of others
    "botocore", "click", "cloudpickle", "fsspec", "numpy", "pyarrow", "rich", "urllib3", "yaml",
    # our own
    "forebay._engine.catalog", "forebay._engine.check", "forebay._engine.flight", "forebay._engine.leases",
    "forebay._engine.null_store", "forebay._engine.packs", "forebay._engine.parts", "forebay._engine.publish", "forebay._engine.reading",
    "forebay._engine.space.budget", "forebay._engine.spaces", "forebay._engine.seeing", "forebay._engine.writers",
    "forebay.cache.entries", "forebay.claims", "forebay.codecs", "forebay.directories", "forebay.fetch.files",
    "forebay.prefetch", "forebay.remote.base", "forebay.remote.filesystems", "forebay.remote.http", "forebay.remote.local",
    "forebay.remote.s3", "forebay.reports", "forebay.samples", "forebay.sources", "forebay.tasks", "forebay.world",
}  # fmt: skip

CODE = """
import sys
before = set(sys.modules)
import forebay
{body}
print(*(set(sys.modules) - before))
"""
READ = "assert bytes(forebay.Cache({root!r}, max_age='forever').read({url!r})) == b'object'"
GET = "assert bytes(forebay.Cache({root!r}).get('key')) == b'value'"


@pytest.mark.parametrize("body", [READ, GET], ids=["read", "get"])
def test_a_first_hit_imports_nothing_that_it_does_not_use(tmp_path: Path, body: str) -> None:
    root = str(tmp_path / "root")
    with ScriptedServer() as server, forebay.Cache(root, budget="100MB") as cache:
        url = server.put("/object", b"object")
        cache.read(url)
        cache.put("key", b"value")
    code = CODE.format(body=body.format(root=root, url=url))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    loaded = done.stdout.split()
    assert "forebay.cache" in loaded
    assert NOT_NEEDED.intersection(loaded) == set()


def test_the_version_is_printed_without_a_parser() -> None:
    code = "import sys; sys.argv = ['forebay', '--version']; from forebay.cli.__main__ import main; main(); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    version, loaded = done.stdout.splitlines()
    assert version == f"forebay {forebay.__version__}"
    assert NOT_NEEDED.intersection(loaded.split()).isdisjoint({"rich", "click"})


def test_a_verb_imports_no_other_verb_and_nothing_to_draw_with(tmp_path: Path) -> None:
    root = tmp_path / "root"
    with forebay.Cache(root, budget="100MB") as cache:
        cache.put("key", b"value")
    code = "import sys; from forebay.cli.main import run; assert run(sys.argv[1:]) == 0; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, "-C", str(root), "ls", "-q"], capture_output=True, text=True)
    entry, loaded = done.stdout.splitlines()
    others = {f"forebay.cli.{name}" for name in ("bars", "checkup", "demo", "fetching", "removing", "report")}
    assert entry == "values:key"
    assert {"rich", "forebay.reports", *others}.intersection(loaded.split()) == set()
