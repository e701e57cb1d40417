"""The recipes of the page on other data loaders run with the real packages, and fetch each object once."""

from __future__ import annotations

import importlib
import io
import json
import tarfile
from pathlib import Path

import pytest

from forebay.cli.main import VERBS
from forebay.testing import ScriptedServer
from tests.pages import blocks, run, section

PAGE = "use/loaders.md"
COUNT = 12


def recipe(heading: str, *which: int) -> str:
    """Those of a section's snippets, as one program over what the page takes as given; it prints what it trained with."""
    snippets = blocks(section(PAGE, f"## {heading}"), "python")
    given = "import atexit\ntrained = []\ntrain = trained.append\natexit.register(lambda: print(sorted(map(str, trained))))\n"
    opening = blocks(section(PAGE, "# With other data loaders"), "python")[0]
    program = "\n".join([given, opening, *(snippets[n] for n in which)])
    return program.replace('"/nvme/forebay"', '"cache"')


def needs(*packages: str) -> None:
    for package in packages:
        pytest.importorskip(package)


def shard(server: ScriptedServer, number: int) -> str:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for name, data in ((f"{number}.json", json.dumps(number).encode()), (f"{number}.bin", bytes([number]))):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return server.put(f"/shard-{number}.tar", packed.getvalue())


@pytest.mark.rotates
@pytest.mark.parametrize("which", [(0, 0), (0, 1)])
def test_webdataset_reads_shards_through_the_cache(server: ScriptedServer, tmp_path: Path, which: tuple[int, ...]) -> None:
    needs("webdataset")
    if 1 in which and "cat" not in VERBS:
        pytest.skip("this version has no `forebay cat`")
    for number in range(3):
        shard(server, number)
    program = recipe("webdataset", *which)  # its two snippets, or the first one twice, are two epochs of one cache
    program = f"import webdataset as wds\nshards = {server.url + '/shard-{0..2}.tar'!r}\n{program}"
    samples = [str((n, bytes([n]))) for n in range(3) for _ in range(2)]
    assert run(program, tmp_path, FOREBAY_HOME=str(tmp_path / "cache")) == f"{samples}\n"
    assert server.gets == 3


@pytest.mark.rotates
def test_litdata_reads_a_directory_in_place(tmp_path: Path) -> None:
    needs("litdata", "torch")
    writer = importlib.import_module("litdata.streaming.writer")
    written = tmp_path / "optimized"
    written.mkdir()
    chunks = writer.BinaryWriter(str(written), chunk_size=4)
    for number in range(COUNT):
        chunks[number] = {"x": number}
    chunks.done(), chunks.merge(1)
    # A local directory is its own copy, unless it is forced into the cache: so it stands for a remote one.
    given = f"import functools\ncache.directory = functools.partial(cache.directory, force=True)\noptimized = {str(written)!r} + '/'\n"
    program = recipe("litData", 0).replace("import litdata\n", f"import litdata\n{given}")
    program = program.replace('train(batch["x"])', 'train(batch["x"].tolist()), os.path.samefile(path, optimized)').replace(
        "atexit", "atexit, os", 1
    )
    shown = run(
        f"{program}\ntrained[:] = sorted(sum(trained, []))\nassert cache.check(deep=True) == []\n", tmp_path, HOME=str(tmp_path / "user")
    )
    assert shown == f"{sorted(map(str, range(COUNT)))}\n"
    assert not (tmp_path / "user").exists()  # no copy of litData's own


def test_tf_data_reads_objects_and_files(server: ScriptedServer, tmp_path: Path) -> None:
    needs("tensorflow")
    urls = [server.put(f"/{number}.bin", bytes([97 + number])) for number in range(COUNT)]
    program = recipe("tf.data", 0)
    assert run(f"urls = {urls}\n{program}", tmp_path) == f"{[str(bytes([97 + number])) for number in range(COUNT)]}\n"
    assert server.gets == COUNT
    program = recipe("tf.data", 1)
    write = """
import pycurl, tensorflow as tf
for n in range(2):
    with tf.io.TFRecordWriter(f"{n}.tfrecord") as file:
        file.write(b"r%d" % n)
"""
    assert run(f"{write}records = ['0.tfrecord', '1.tfrecord']\n{program}", tmp_path) == f"{[str(b'r0'), str(b'r1')]}\n"
